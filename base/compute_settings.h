/* What a worker process is told to compute with, as it stands on its command line: paths and plain
 * numbers. Here because two folders that know nothing of each other share it: pd_buffers has the
 * option rows that fill it (worker_options), kernels uses it (worker_model) and knows what its
 * numbers mean. Strings are borrowed. */
#ifndef BT_BASE_COMPUTE_SETTINGS_H
#define BT_BASE_COMPUTE_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>

/* The choices of --device, in their order. */
typedef enum bt_compute_device {
    BT_COMPUTE_HOST,
    BT_COMPUTE_SIM,  /* keeps time instead */
    BT_COMPUTE_CUDA, /* refused: not built yet */
} bt_compute_device;

/* Of the sim device. */
typedef struct bt_sim_settings {
    uint64_t step_us, token_us;
    uint32_t vocab_size, context_tokens;
    const char *support; /* "realistic", or a number of ids: of every support */
    uint64_t seed;
    uint32_t layers, kv_bytes; /* of a token's keys and values, in all layers together */
    uint32_t report_ms;
    bool checks_pages;
} bt_sim_settings;

typedef struct bt_compute_settings {
    uint32_t device;      /* bt_compute_device */
    uint32_t page_tokens; /* 16, 32 or 64 */
    uint32_t kv_dtype;    /* kv_dtype's numbers: bf16, f32 */
    /* The host's. */
    const char *model;         /* a file or a folder; NULL: none was given */
    uint32_t weights;          /* model_weights's numbers: auto, bf16, int8, native */
    uint32_t threads;          /* 0 = one per CPU */
    const char *weights_cache; /* a folder, "auto" for the user's, "off" */
    uint64_t weights_cache_bytes;
    /* The sim device's. */
    bt_sim_settings sim;
} bt_compute_settings;

#endif
