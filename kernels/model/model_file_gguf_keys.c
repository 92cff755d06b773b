/* The keys of an architecture: reading them, and refusing those that would change what is computed.
 */
#include <stdio.h>
#include <string.h>

#include "kernels/model/model_file_gguf_internal.h"

enum { KEY_BYTES_MAX = 128 };

/* "llama.block_count" and the like, valid until the next call with the same buffer. */
static const char *full_key(const gguf_keys *k, const char *key, char buffer[KEY_BYTES_MAX]) {
    (void)snprintf(buffer, KEY_BYTES_MAX, "%s.%s", k->architecture, key);
    return buffer;
}

bool gguf_keys_has(const gguf_keys *k, const char *key) {
    char buffer[KEY_BYTES_MAX];
    return bt_gguf_has_key(k->gguf, full_key(k, key, buffer));
}

bt_status gguf_keys_u32(const gguf_keys *k, const char *key, uint32_t *out) {
    char buffer[KEY_BYTES_MAX];
    return bt_gguf_get_u32(k->gguf, full_key(k, key, buffer), out, k->error);
}

bt_status gguf_keys_f64(const gguf_keys *k, const char *key, double *out) {
    char buffer[KEY_BYTES_MAX];
    return bt_gguf_get_f64(k->gguf, full_key(k, key, buffer), out, k->error);
}

bt_status gguf_keys_string(const gguf_keys *k, const char *key, bt_gguf_string *out) {
    char buffer[KEY_BYTES_MAX];
    return bt_gguf_get_string(k->gguf, full_key(k, key, buffer), out, k->error);
}

bt_status gguf_keys_require(const gguf_keys *k, const char *key, double neutral) {
    char buffer[KEY_BYTES_MAX];
    double value = neutral;
    uint32_t whole = 0;
    if (!gguf_keys_has(k, key)) return BT_OK;
    if (bt_gguf_get_f64(k->gguf, full_key(k, key, buffer), &value, NULL) != BT_OK) {
        const bt_status status = gguf_keys_u32(k, key, &whole);
        if (status != BT_OK) return status;
        value = whole;
    }
    if (value == neutral) return BT_OK;
    return bt_fail(k->error, BT_ERR_CALLER_UNSUPPORTED,
                   "%s: %s.%s is %.9g, which is not supported (only %.9g is)", k->path,
                   k->architecture, key, value, neutral);
}

/* Parts of a key behind the architecture's name whose keys all matter, and those that are read. */
static bool is_section(const char *rest) {
    return strncmp(rest, "attention.", 10) == 0 || strncmp(rest, "rope.", 5) == 0;
}

static bool is_read(const char *rest) {
    static const char *const known[] = {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.layer_norm_epsilon", /* of another norm, never used here */
        "attention.sliding_window",
        "attention.causal",
        "attention.scale",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned", /* a note */
        "rope.scaling.yarn_log_multiplier",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(known); i++)
        if (strcmp(rest, known[i]) == 0) return true;
    return false;
}

static bt_status check_sections(const gguf_keys *k) {
    const size_t prefix_bytes = strlen(k->architecture);
    for (size_t i = 0; i < bt_gguf_key_count(k->gguf); i++) {
        const bt_gguf_string key = bt_gguf_key_at(k->gguf, i);
        char rest[KEY_BYTES_MAX];
        if (key.bytes <= prefix_bytes + 1 || key.text[prefix_bytes] != '.' ||
            memcmp(key.text, k->architecture, prefix_bytes) != 0)
            continue;
        (void)snprintf(rest, sizeof rest, "%.*s", (int)(key.bytes - prefix_bytes - 1),
                       key.text + prefix_bytes + 1);
        if (!is_section(rest) || is_read(rest)) continue;
        return bt_fail(k->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: key %s.%s is not known, so this model is not supported", k->path,
                       k->architecture, rest);
    }
    return BT_OK;
}

static bt_status check_causal(const gguf_keys *k) {
    char buffer[KEY_BYTES_MAX];
    bool is_causal = true;
    if (!gguf_keys_has(k, "attention.causal")) return BT_OK;
    const bt_status status =
        bt_gguf_get_bool(k->gguf, full_key(k, "attention.causal", buffer), &is_causal, k->error);
    if (status != BT_OK || is_causal) return status;
    return bt_fail(k->error, BT_ERR_CALLER_UNSUPPORTED,
                   "%s: attention that is not causal is not supported", k->path);
}

bt_status gguf_keys_check(const gguf_keys *k, const model_geometry *g) {
    const struct {
        const char *key;
        double neutral;
    } neutrals[] = {
        {"attention.value_length", g->head_dim},
        {"rope.dimension_count", g->head_dim},
        {"vocab_size", g->vocab_size},
        {"expert_count", 0},
        {"attention.scale", 0},
        {"attn_logit_softcapping", 0},
        {"final_logit_softcapping", 0},
        {"logit_scale", 0},
        {"embedding_scale", 0},
        {"residual_scale", 0},
        {"rope.scaling.yarn_log_multiplier", 0},
        {"rope.scaling.yarn_ext_factor", 1},
        {"rope.scaling.yarn_attn_factor", 1},
    };
    bt_status status = check_sections(k);
    for (size_t i = 0; i < BT_ARRAY_COUNT(neutrals) && status == BT_OK; i++)
        status = gguf_keys_require(k, neutrals[i].key, neutrals[i].neutral);
    return status == BT_OK ? check_causal(k) : status;
}
