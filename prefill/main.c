/* baton-prefill: the prefill core in a worker's shell, with a model to compute on. */
#include <inttypes.h>

#include "kernels/worker_model.h"
#include "pd_buffers/worker_shell.h"
#include "prefill/prefill_core.h"

typedef struct prefill_worker {
    worker_settings settings; /* first: the shell's options have their offsets in it */
    uint32_t sequences_max, chunk_tokens, prompts_max;
    bool prefix_cache;
    worker_model model;
    prefill_core *core;
} prefill_worker;

static const bt_option option_rows[] = {
    {.name = "sequences-max",
     .type = BT_OPTION_U32,
     .default_text = "64",
     .min = 1,
     .max = PREFILL_ATTEMPTS_MAX,
     .help = "Prompts in hand at most.",
     .offset = offsetof(prefill_worker, sequences_max)},
    {.name = "chunk-tokens",
     .type = BT_OPTION_U32,
     .default_text = "512",
     .min = 1,
     .max = 1u << 20,
     .help =
         "Prompt tokens of one compute step, shared by the prompts in it; a cancel takes effect "
         "between steps.",
     .offset = offsetof(prefill_worker, chunk_tokens)},
    {.name = "prompts-max",
     .type = BT_OPTION_U32,
     .default_text = "8",
     .min = 1,
     .max = PREFILL_PROMPTS_MAX,
     .help = "Prompts that share one compute step at most; 1 computes one after the other.",
     .offset = offsetof(prefill_worker, prompts_max)},
    {.name = "prefix-cache",
     .type = BT_OPTION_BOOL,
     .default_text = "on",
     .help =
         "Keep the KV pages of prompts for later ones that begin alike, as long as no prompt in "
         "work needs the memory.",
     .offset = offsetof(prefill_worker, prefix_cache)},
};

static bt_status load(void *worker, worker_facts *facts_out, bt_error *error) {
    prefill_worker *w = worker;
    const bt_compute_settings *settings = &w->settings.compute;
    const bt_status status = worker_model_load(&w->model, "prefill", settings, error);
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

/* A step is a chunk of each of some prompts. */
static bt_status start_compute(void *worker, kv_pool *pages, int *fd_out, bt_error *error) {
    prefill_worker *w = worker;
    const worker_model_limits limits = {.threads = w->settings.compute.threads,
                                        .tokens_max = w->chunk_tokens,
                                        .rows_max = w->prompts_max};
    return worker_model_start(&w->model, &limits, kv_pool_memory(pages),
                              kv_pool_get_options(pages)->page_count, fd_out, error);
}

static bt_status create_core(void *worker, const worker_parts *parts, bt_error *error) {
    prefill_worker *w = worker;
    const prefill_core_options options = {
        .hello = *parts->hello,
        .clock = parts->clock,
        .mover = parts->mover,
        .pages = parts->pages,
        .compute = w->model.compute,
        .page_tokens = w->settings.compute.page_tokens,
        .vocab_size = parts->hello->vocab_size,
        .context_tokens = parts->hello->context_tokens,
        .chunk_tokens = w->chunk_tokens,
        .prompts_max = w->prompts_max,
        .has_prefix_cache = w->prefix_cache,
        .attempts_max = w->sequences_max,
        .ops = {.send = worker_shell_send,
                .can_stream = worker_shell_can_stream,
                .open_streams = worker_shell_open_streams,
                .hang_up = worker_shell_hang_up,
                .on_refused = worker_shell_on_refused,
                .on_broken = worker_shell_on_broken,
                .context = parts->shell},
    };
    const bt_status status = prefill_core_create(&options, &w->core);
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "out of memory for %" PRIu32 " prompts", w->sequences_max);
}

static void on_open(void *worker, proto_lane lane) {
    prefill_core_on_open(((prefill_worker *)worker)->core, lane);
}

static void on_message(void *worker, proto_lane lane, const proto_message *message) {
    prefill_core_on_message(((prefill_worker *)worker)->core, lane, message);
}

static void on_closed(void *worker) {
    prefill_core_on_closed(((prefill_worker *)worker)->core);
}

static void on_computed(void *worker) {
    worker_model_poll(&((prefill_worker *)worker)->model);
}

static void turn(void *worker) {
    prefill_core_turn(((prefill_worker *)worker)->core);
}

static void tick(void *worker) {
    prefill_core_tick(((prefill_worker *)worker)->core);
}

static void stop_compute(void *worker) {
    worker_model_stop(&((prefill_worker *)worker)->model);
}

static void destroy(void *worker) {
    prefill_worker *w = worker;
    prefill_core_destroy(w->core);
    worker_model_fini(&w->model);
}

static const worker_role prefill_role = {
    .options = {.program = "baton-prefill",
                .summary = "Computes the KV pages of prompts and hands them to decode workers.",
                .rows = option_rows,
                .count = BT_ARRAY_COUNT(option_rows)},
    .role = PROTO_ROLE_PREFILL,
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
    static prefill_worker worker;
    return worker_shell_main(&prefill_role, &worker, argc, argv);
}
