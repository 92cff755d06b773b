/* rope_scaling (older files) or rope_parameters (newer ones, with rope_theta inside). A key that is
 * not known is refused, because it may change what is computed. */
#include <string.h>

#include "kernels/model/model_file_hf_internal.h"
#include "kernels/model/model_rope.h"

static const struct {
    const char *name;
    model_rope_kind kind;
} kinds[] = {
    {"default", MODEL_ROPE_KIND_PLAIN},
    {"linear", MODEL_ROPE_KIND_LINEAR},
    {"llama3", MODEL_ROPE_KIND_LLAMA3},
    {"yarn", MODEL_ROPE_KIND_YARN},
};

/* "finetuned" is a note of older yarn files. */
static bool is_key_known(const char *name) {
    static const char *const known[] = {
        "type",
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
        "partial_rotary_factor",
        "finetuned",
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(known); i++)
        if (strcmp(name, known[i]) == 0) return true;
    return false;
}

static bt_status check_keys(const model_settings *rope, json_t *object, const char *where) {
    const char *name = NULL;
    json_t *value = NULL;
    json_object_foreach(object, name, value) {
        if (json_is_object(value)) { /* as in models with two kinds of attention */
            return bt_fail(rope->error, BT_ERR_CALLER_UNSUPPORTED,
                           "%s: rope parameters per layer type ('%.64s' in %s) are not supported",
                           rope->path, name, where);
        }
        if (is_key_known(name) || json_is_null(value)) continue;
        return bt_fail(rope->error, BT_ERR_CALLER_UNSUPPORTED, "%s: unknown key '%.64s' in %s",
                       rope->path, name, where);
    }
    return BT_OK;
}

static bt_status read_kind(const model_settings *rope, const char *where, model_rope_kind *out) {
    const char *old_type = NULL;
    const char *new_type = NULL;
    bt_status status = model_settings_string(rope, "type", &old_type);
    if (status == BT_OK) status = model_settings_string(rope, "rope_type", &new_type);
    if (status != BT_OK) return status;
    if (old_type != NULL && new_type != NULL && strcmp(old_type, new_type) != 0) {
        return bt_fail(rope->error, BT_ERR_CALLER_FILE,
                       "%s: %s has rope_type '%.64s' and type '%.64s'", rope->path, where, new_type,
                       old_type);
    }
    const char *type = new_type != NULL ? new_type : old_type;
    const json_t *factor = json_object_get(rope->object, "factor");
    if (type == NULL && factor != NULL && !json_is_null(factor)) {
        return bt_fail(rope->error, BT_ERR_CALLER_FILE, "%s: %s has a factor and no rope_type",
                       rope->path, where);
    }
    if (type == NULL) type = "default";
    for (size_t i = 0; i < BT_ARRAY_COUNT(kinds); i++) {
        if (strcmp(type, kinds[i].name) != 0) continue;
        *out = kinds[i].kind;
        return BT_OK;
    }
    return bt_fail(rope->error, BT_ERR_CALLER_UNSUPPORTED,
                   "%s: unknown rope_type '%.64s' (in %s); 'default', 'linear', 'llama3' and "
                   "'yarn' are supported",
                   rope->path, type, where);
}

static bt_status read_llama3(const model_settings *rope, model_rope_scaling *out) {
    bt_status status = model_settings_number(rope, "factor", true, &out->factor);
    if (status == BT_OK)
        status = model_settings_number(rope, "low_freq_factor", true, &out->low_frequency_factor);
    if (status == BT_OK)
        status = model_settings_number(rope, "high_freq_factor", true, &out->high_frequency_factor);
    if (status == BT_OK)
        status = model_settings_u32(rope, "original_max_position_embeddings", true,
                                    &out->original_context_tokens);
    return status;
}

/* As transformers: given; else from the two weights, where both are there; else from the factor. */
static bt_status read_yarn_attention(const model_settings *rope, model_rope_scaling *out) {
    double weight = 0;
    double weight_all = 0;
    bt_status status = model_settings_number(rope, "mscale", false, &weight);
    if (status == BT_OK) status = model_settings_number(rope, "mscale_all_dim", false, &weight_all);
    if (status != BT_OK) return status;
    out->attention_factor = model_rope_yarn_attention(out->factor, 1);
    if (weight != 0 && weight_all != 0)
        out->attention_factor = model_rope_yarn_attention(out->factor, weight) /
                                model_rope_yarn_attention(out->factor, weight_all);
    return model_settings_number(rope, "attention_factor", false, &out->attention_factor);
}

static bt_status read_yarn(const model_settings *rope, uint32_t context_tokens,
                           model_rope_scaling *out) {
    const bool has_original = model_settings_find(rope, "original_max_position_embeddings") != NULL;
    out->original_context_tokens = context_tokens;
    bt_status status = model_settings_u32(rope, "original_max_position_embeddings", false,
                                          &out->original_context_tokens);
    if (status != BT_OK) return status;
    if (has_original && out->original_context_tokens != 0)
        out->factor = (double)context_tokens / out->original_context_tokens;
    status = model_settings_number(rope, "factor", !has_original, &out->factor);
    out->beta_fast = 32;
    out->beta_slow = 1;
    out->has_whole_ramp = true;
    if (status == BT_OK) status = model_settings_number(rope, "beta_fast", false, &out->beta_fast);
    if (status == BT_OK) status = model_settings_number(rope, "beta_slow", false, &out->beta_slow);
    if (status == BT_OK) status = model_settings_bool(rope, "truncate", &out->has_whole_ramp);
    if (status == BT_OK) status = read_yarn_attention(rope, out);
    return status;
}

static bt_status check_partial(const model_settings *s) {
    double partial = 1;
    const bt_status status = model_settings_number(s, "partial_rotary_factor", false, &partial);
    if (status != BT_OK || partial == 1) return status;
    return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED,
                   "%s: partial_rotary_factor %g is not supported", s->path, partial);
}

static bt_status read_object(const model_settings *s, const char *where, json_t *object,
                             model_geometry *g) {
    if (!json_is_object(object)) return model_settings_fail(s, where, "an object");
    const model_settings rope = {.object = object, .path = s->path, .error = s->error};
    model_rope_scaling scaling = {0};
    bt_status status = read_kind(&rope, where, &scaling.kind);
    if (status == BT_OK) status = check_keys(&rope, object, where);
    if (status == BT_OK) status = check_partial(&rope);
    if (status == BT_OK) status = model_settings_number(&rope, "rope_theta", false, &g->rope_theta);
    if (status != BT_OK) return status;
    switch (scaling.kind) {
    case MODEL_ROPE_KIND_PLAIN:
    case MODEL_ROPE_KIND_DIVISORS: break;
    case MODEL_ROPE_KIND_LINEAR:
        status = model_settings_number(&rope, "factor", true, &scaling.factor);
        break;
    case MODEL_ROPE_KIND_LLAMA3: status = read_llama3(&rope, &scaling); break;
    case MODEL_ROPE_KIND_YARN: status = read_yarn(&rope, g->context_tokens, &scaling); break;
    }
    g->rope_scaling = scaling;
    return status;
}

bt_status model_file_read_rope(const model_settings *s, model_geometry *g) {
    g->rope_theta = 10000;
    bt_status status = model_settings_number(s, "rope_theta", false, &g->rope_theta);
    if (status == BT_OK) status = check_partial(s);
    if (status != BT_OK) return status;
    json_t *older = json_object_get(s->object, "rope_scaling");
    json_t *newer = json_object_get(s->object, "rope_parameters");
    const bool has_older = older != NULL && !json_is_null(older);
    const bool has_newer = newer != NULL && !json_is_null(newer);
    if (has_older && has_newer && !json_equal(older, newer)) {
        return bt_fail(s->error, BT_ERR_CALLER_FILE,
                       "%s: rope_scaling and rope_parameters say different things", s->path);
    }
    if (has_newer) return read_object(s, "rope_parameters", newer, g);
    if (has_older) return read_object(s, "rope_scaling", older, g);
    return BT_OK;
}
