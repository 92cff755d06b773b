/* How GGUF says that the rotation frequencies are scaled: keys for linear and yarn, a tensor of
 * divisors for Llama 3's. Defaults are those of llama.cpp. */
#include <string.h>

#include "kernels/model/model_file_gguf_internal.h"
#include "kernels/model/model_rope.h"

static bt_status read_optional(const gguf_keys *k, const char *key, double *out) {
    return gguf_keys_has(k, key) ? gguf_keys_f64(k, key, out) : BT_OK;
}

static bt_status read_yarn(const gguf_keys *k, model_geometry *g) {
    model_rope_scaling *s = &g->rope_scaling;
    double attention = 1;
    bt_status status = BT_OK;
    s->original_context_tokens = g->context_tokens;
    s->beta_fast = 32;
    s->beta_slow = 1;
    s->has_whole_ramp = true;
    if (gguf_keys_has(k, "rope.scaling.original_context_length"))
        status =
            gguf_keys_u32(k, "rope.scaling.original_context_length", &s->original_context_tokens);
    if (status == BT_OK) status = read_optional(k, "rope.scaling.yarn_beta_fast", &s->beta_fast);
    if (status == BT_OK) status = read_optional(k, "rope.scaling.yarn_beta_slow", &s->beta_slow);
    if (status == BT_OK) status = read_optional(k, "rope.scaling.attn_factor", &attention);
    s->attention_factor = attention * model_rope_yarn_attention(s->factor, 1);
    return status;
}

static bt_status read_keys(const gguf_keys *k, model_geometry *g) {
    model_rope_scaling *s = &g->rope_scaling;
    bt_gguf_string type = {.text = "linear", .bytes = 6};
    bt_status status = BT_OK;
    s->factor = 1;
    if (gguf_keys_has(k, "rope.scaling.type"))
        status = gguf_keys_string(k, "rope.scaling.type", &type);
    if (status == BT_OK) status = read_optional(k, "rope.scale_linear", &s->factor);
    if (status == BT_OK) status = read_optional(k, "rope.scaling.factor", &s->factor);
    if (status != BT_OK) return status;
    if (s->factor == 0) s->factor = 1; /* means the same in these files */
    const bool is_yarn = type.bytes == 4 && memcmp(type.text, "yarn", 4) == 0;
    const bool is_none = type.bytes == 4 && memcmp(type.text, "none", 4) == 0;
    const bool is_linear = type.bytes == 6 && memcmp(type.text, "linear", 6) == 0;
    if (!is_yarn && !is_none && !is_linear) {
        return bt_fail(k->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: unknown rope scaling '%.*s'; 'none', 'linear' and 'yarn' are supported",
                       k->path, type.bytes > 64 ? 64 : (int)type.bytes, type.text);
    }
    if (is_yarn) {
        s->kind = MODEL_ROPE_KIND_YARN;
        return read_yarn(k, g);
    }
    if (is_none || s->factor == 1)
        *s = (model_rope_scaling){0};
    else
        s->kind = MODEL_ROPE_KIND_LINEAR;
    return BT_OK;
}

bt_status model_file_read_gguf_rope(const gguf_keys *k, model_geometry *g) {
    const bt_status status = read_keys(k, g);
    const bt_gguf_tensor *divisors = bt_gguf_find_tensor(k->gguf, MODEL_GGUF_ROPE_TENSOR);
    if (status != BT_OK || divisors == NULL) return status;
    if (g->rope_scaling.kind != MODEL_ROPE_KIND_PLAIN) {
        return bt_fail(k->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: " MODEL_GGUF_ROPE_TENSOR
                       " together with rope.scaling.* is not supported",
                       k->path);
    }
    if (divisors->type != BT_GGUF_TENSOR_F32 || divisors->elements != g->head_dim / 2) {
        return bt_fail(k->error, BT_ERR_CALLER_FILE,
                       "%s: tensor " MODEL_GGUF_ROPE_TENSOR
                       " has %llu values of type %s, this model needs %u of type F32",
                       k->path, (unsigned long long)divisors->elements,
                       bt_gguf_tensor_type_name(divisors->type), g->head_dim / 2);
    }
    if (divisors->elements > MODEL_ROPE_DIVISORS_MAX) {
        return bt_fail(k->error, BT_ERR_CALLER_UNSUPPORTED,
                       "%s: tensor " MODEL_GGUF_ROPE_TENSOR " has more than %d values", k->path,
                       MODEL_ROPE_DIVISORS_MAX);
    }
    g->rope_scaling.kind = MODEL_ROPE_KIND_DIVISORS;
    dequant_row_f32(DEQUANT_ENCODING_F32, divisors->data, (size_t)divisors->elements,
                    g->rope_scaling.divisors);
    return BT_OK;
}
