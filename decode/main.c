/* baton-decode: the decode core in a worker's shell, with a model to compute on. */
#include <inttypes.h>

#include "decode/decode_core.h"
#include "kernels/worker_model.h"
#include "pd_buffers/worker_shell.h"

typedef struct decode_worker {
    worker_settings settings; /* first: the shell's options have their offsets in it */
    uint32_t sequences_max, chunk_tokens;
    uint64_t park_seconds;
    worker_model model;
    decode_core *core;
} decode_worker;

static const bt_option option_rows[] = {
    {.name = "sequences-max",
     .type = BT_OPTION_U32,
     .default_text = "64",
     .min = 1,
     .max = DECODE_SEQUENCES_MAX,
     .help = "Samples in hand at most; a request has n of them.",
     .offset = offsetof(decode_worker, sequences_max)},
    {.name = "chunk-tokens",
     .type = BT_OPTION_U32,
     .default_text = "256",
     .min = 1,
     .max = 1u << 20,
     .help = "Tokens of retracted samples that one compute step computes again.",
     .offset = offsetof(decode_worker, chunk_tokens)},
    {.name = "stream-timeout",
     .type = BT_OPTION_U64,
     .default_text = "60",
     .min = 1,
     .max = 86400,
     .value_name = "SECONDS",
     .help = "A reader that takes nothing for so long loses its request.",
     .offset = offsetof(decode_worker, park_seconds)},
};

static bt_status load(void *worker, worker_facts *facts_out, bt_error *error) {
    decode_worker *w = worker;
    const bt_compute_settings *settings = &w->settings.compute;
    const bt_status status = worker_model_load(&w->model, "decode", settings, error);
    if (status != BT_OK) return status;
    const model_card *card = &w->model.card;
    *facts_out = (worker_facts){
        .name = card->name,
        .numerics = w->model.numerics,
        .fingerprint = card->fingerprint,
        .fingerprint_bytes = sizeof card->fingerprint,
        .eos_ids = card->eos_ids,
        .eos_count = card->eos_count,
        .vocab_size = card->geometry.vocab_size,
        .context_tokens = card->geometry.context_tokens,
        .layers = card->geometry.layers,
        .kv_heads = card->geometry.kv_heads,
        .head_dim = card->geometry.head_dim,
        .page_bytes = kv_page_bytes(&w->model.kv),
    };
    return BT_OK;
}

/* Every sequence gets one token in a step, or some of those that are computed again. */
static bt_status start_compute(void *worker, kv_pool *pages, int *fd_out, bt_error *error) {
    decode_worker *w = worker;
    const worker_model_limits limits = {.threads = w->settings.compute.threads,
                                        .tokens_max = w->sequences_max + w->chunk_tokens,
                                        .rows_max = w->sequences_max};
    return worker_model_start(&w->model, &limits, kv_pool_memory(pages),
                              kv_pool_get_options(pages)->page_count, fd_out, error);
}

static bt_status create_core(void *worker, const worker_parts *parts, bt_error *error) {
    decode_worker *w = worker;
    const decode_core_options options = {
        .hello = *parts->hello,
        .clock = parts->clock,
        .mover = parts->mover,
        .pages = parts->pages,
        .compute = w->model.compute,
        .page_tokens = w->settings.compute.page_tokens,
        .vocab_size = parts->hello->vocab_size,
        .context_tokens = parts->hello->context_tokens,
        .sequences_max = w->sequences_max,
        .chunk_tokens = w->chunk_tokens,
        .park_us = w->park_seconds * 1000 * 1000,
        .ops = {.send = worker_shell_send,
                .can_stream = worker_shell_can_stream,
                .open_streams = worker_shell_open_streams,
                .hang_up = worker_shell_hang_up,
                .on_refused = worker_shell_on_refused,
                .on_broken = worker_shell_on_broken,
                .context = parts->shell},
    };
    const bt_status status = decode_core_create(&options, &w->core);
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "out of memory for %" PRIu32 " sequences", w->sequences_max);
}

static void on_open(void *worker, proto_lane lane) {
    decode_core_on_open(((decode_worker *)worker)->core, lane);
}

static void on_message(void *worker, proto_lane lane, const proto_message *message) {
    decode_core_on_message(((decode_worker *)worker)->core, lane, message);
}

static void on_closed(void *worker) {
    decode_core_on_closed(((decode_worker *)worker)->core);
}

static void on_computed(void *worker) {
    worker_model_poll(&((decode_worker *)worker)->model);
}

static void turn(void *worker) {
    decode_core_turn(((decode_worker *)worker)->core);
}

static void tick(void *worker) {
    decode_core_tick(((decode_worker *)worker)->core);
}

static void stop_compute(void *worker) {
    worker_model_stop(&((decode_worker *)worker)->model);
}

static void destroy(void *worker) {
    decode_worker *w = worker;
    decode_core_destroy(w->core);
    worker_model_fini(&w->model);
}

static const worker_role decode_role = {
    .options = {.program = "baton-decode",
                .summary = "Decodes sequences whose KV pages a prefill worker computed.",
                .rows = option_rows,
                .count = BT_ARRAY_COUNT(option_rows)},
    .role = PROTO_ROLE_DECODE,
    .load = load,
    .start_compute = start_compute,
    .create_core = create_core,
    .on_open = on_open,
    .on_message = on_message,
    .on_closed = on_closed,
    .on_computed = on_computed,
    .turn = turn,
    .tick = tick,
    .stop_compute = stop_compute,
    .destroy = destroy,
};

int main(int argc, char **argv) {
    static decode_worker worker;
    return worker_shell_main(&decode_role, &worker, argc, argv);
}
