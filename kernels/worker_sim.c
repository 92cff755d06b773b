/* Numbers of the command line made into a card and a page layout. */
#include "kernels/worker_sim.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/compute_sim.h"

static bt_status fail_support(const char *text, uint32_t most, bt_error *error) {
    return bt_fail(error, BT_ERR_CALLER_CONFIG,
                   "--sim-support is realistic, or 1 to %" PRIu32 " ids (and at most --sim-vocab), "
                   "not '%.40s'",
                   most, text);
}

bt_status worker_sim_read_support(const bt_sim_settings *settings, uint32_t *width_out,
                                  bt_error *error) {
    const char *text = settings->support;
    const uint32_t vocab = settings->vocab_size;
    const uint32_t most = vocab < SIM_ROWS_WIDTH_MAX ? vocab : SIM_ROWS_WIDTH_MAX;
    *width_out = 0;
    if (strcmp(text, "realistic") == 0) return BT_OK;
    char *end = NULL;
    const unsigned long width = strtoul(text, &end, 10);
    const bool is_number = text[0] >= '0' && text[0] <= '9' && *end == '\0';
    if (!is_number || width < 1 || width > most) return fail_support(text, most, error);
    *width_out = (uint32_t)width;
    return BT_OK;
}

/* Of everything that says which rows come: other ones would be another model. */
static void make_fingerprint(const bt_sim_settings *settings, uint32_t width,
                             uint8_t out[MODEL_FINGERPRINT_BYTES]) {
    const uint64_t version = 1; /* of the rows */
    const uint64_t words[] = {version,        settings->vocab_size, settings->context_tokens, width,
                              settings->seed, settings->layers,     settings->kv_bytes};
    for (size_t at = 0; at < MODEL_FINGERPRINT_BYTES; at += sizeof(uint64_t)) {
        uint64_t hash = at;
        for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
            hash = sim_mix(hash, words[i]);
        memcpy(out + at, &hash, sizeof hash);
    }
}

bt_status worker_sim_describe(const bt_sim_settings *settings, uint32_t page_tokens, kv_dtype dtype,
                              model_card *card_out, kv_page_layout *kv_out, bt_error *error) {
    uint32_t width = 0;
    const bt_status status = worker_sim_read_support(settings, &width, error);
    if (status != BT_OK) return status;
    const uint32_t unit = settings->layers * 2 * (uint32_t)kv_element_bytes(dtype);
    if (settings->kv_bytes % unit != 0 || settings->kv_bytes < COMPUTE_SIM_TOKEN_BYTES_MIN) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG,
                       "--sim-kv-bytes %" PRIu32 " is not a multiple of %" PRIu32
                       " (a key and a value in each of %" PRIu32 " layers) of at least %d",
                       settings->kv_bytes, unit, settings->layers, COMPUTE_SIM_TOKEN_BYTES_MIN);
    }
    *card_out = (model_card){.geometry = {.family = MODEL_FAMILY_LLAMA,
                                          .vocab_size = settings->vocab_size,
                                          .context_tokens = settings->context_tokens,
                                          .layers = settings->layers,
                                          .heads = 1,
                                          .kv_heads = 1,
                                          .head_dim = settings->kv_bytes / unit},
                             .name = "sim"};
    make_fingerprint(settings, width, card_out->fingerprint);
    *kv_out = (kv_page_layout){.layers = settings->layers,
                               .kv_heads = 1,
                               .head_dim = settings->kv_bytes / unit,
                               .page_tokens = page_tokens,
                               .dtype = dtype};
    return BT_OK;
}
