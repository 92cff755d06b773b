/* baton-decode: options, the model, pools, the mover, sockets and the loop around the decode core.
 * Exit status: 0 after SIGTERM or SIGINT, 1 when the worker broke, 2 when it could not start, 3
 * when the router refused it. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/options.h"
#include "base/system.h"
#include "decode/decode_core.h"
#include "kernels/compute_host.h"
#include "kernels/model.h"
#include "pd_buffers/kv_pool.h"
#include "pd_buffers/xfer_ucx.h"
#include "proto/address.h"
#include "proto/tokenizer_digest.h"
#include "proto/worker_link.h"

enum {
    TICK_US = 50 * 1000,
    EXIT_BROKEN = 1,
    EXIT_NOT_STARTED = 2,
    EXIT_REFUSED = 3,
};

/* Without --kv-pages and --kv-bytes: an eighth of the memory that is free, at most 1 GiB. */
static const uint64_t kv_bytes_auto_max = UINT64_C(1) << 30;
enum { KV_MEMORY_SHARE = 8 };

/* ---- options --------------------------------------------------------------------------------- */

typedef struct settings {
    const char *router, *model, *host, *ucx_tls, *ucx_net_devices, *ucx_port_range;
    bool ucx_allow_all_devices;
    uint32_t threads, kv_pages, page_tokens, kv_dtype, sequences_max;
    uint32_t sampling_mask_max_tokens, kv_checksum, log_level;
    uint64_t kv_bytes, park_seconds;
} settings;

static const char *const kv_dtypes[] = {"bf16", "f32", NULL};            /* kv_dtype's numbers */
static const char *const checksums[] = {"off", "sampled", "full", NULL}; /* record_checksum's */
static const char *const log_levels[] = {"error", "warn", "info", "debug", "trace", NULL};

static const bt_option option_rows[] = {
    {.name = "model",
     .type = BT_OPTION_STRING,
     .value_name = "PATH",
     .help = "GGUF file or Hugging Face folder.",
     .offset = offsetof(settings, model),
     .flags = BT_OPTION_REQUIRED},
    {.name = "router",
     .type = BT_OPTION_STRING,
     .value_name = "HOST:PORT",
     .default_text = "127.0.0.1:30001",
     .help = "The router's control port.",
     .offset = offsetof(settings, router)},
    {.name = "host",
     .type = BT_OPTION_STRING,
     .value_name = "NAME",
     .help = "This machine's name in logs and errors; by default its host name.",
     .offset = offsetof(settings, host)},
    {.name = "threads",
     .type = BT_OPTION_U32,
     .default_text = "0",
     .max = 1024,
     .help = "Compute threads; 0 is one per CPU.",
     .offset = offsetof(settings, threads)},
    {.name = "kv-pages",
     .type = BT_OPTION_U32,
     .default_text = "0",
     .max = 1u << 24,
     .help = "KV pages; 0 goes by --kv-bytes.",
     .offset = offsetof(settings, kv_pages)},
    {.name = "kv-bytes",
     .type = BT_OPTION_BYTES,
     .default_text = "0",
     .help = "Memory of the KV pages; 0 is an eighth of the free memory, at most 1 GiB.",
     .offset = offsetof(settings, kv_bytes)},
    {.name = "page-tokens",
     .type = BT_OPTION_U32,
     .default_text = "32",
     .min = 16,
     .max = 64,
     .help = "Tokens of a KV page (16, 32 or 64), the same in the whole cluster.",
     .offset = offsetof(settings, page_tokens)},
    {.name = "kv-dtype",
     .type = BT_OPTION_ENUM,
     .default_text = "bf16",
     .choices = kv_dtypes,
     .help = "Type of keys and values, the same in the whole cluster.",
     .offset = offsetof(settings, kv_dtype)},
    {.name = "sequences-max",
     .type = BT_OPTION_U32,
     .default_text = "64",
     .min = 1,
     .max = DECODE_SEQUENCES_MAX,
     .help = "Requests in hand at most.",
     .offset = offsetof(settings, sequences_max)},
    {.name = "stream-timeout",
     .type = BT_OPTION_U64,
     .default_text = "60",
     .min = 1,
     .max = 86400,
     .value_name = "SECONDS",
     .help = "A reader that takes nothing for so long loses its request.",
     .offset = offsetof(settings, park_seconds)},
    {.name = "sampling-mask-max-tokens",
     .type = BT_OPTION_U32,
     .min = 1,
     .max = 1u << 20,
     .help = "Insist on this cap: the worker is refused when the router's differs. By default the "
             "router's is taken.",
     .offset = offsetof(settings, sampling_mask_max_tokens)},
    {.name = "kv-checksum",
     .type = BT_OPTION_ENUM,
     .choices = checksums,
     .help = "Insist on this checksum of KV pages; by default the router's is taken.",
     .offset = offsetof(settings, kv_checksum)},
    {.name = "ucx-tls",
     .type = BT_OPTION_STRING,
     .default_text = "tcp",
     .value_name = "LIST",
     .help = "UCX transports: tcp, or shm on one machine.",
     .offset = offsetof(settings, ucx_tls)},
    {.name = "ucx-net-devices",
     .type = BT_OPTION_STRING,
     .default_text = "lo",
     .value_name = "LIST",
     .help = "Network devices that UCX may use. A reachable UCX port is full control of the "
             "process: only trusted networks.",
     .offset = offsetof(settings, ucx_net_devices)},
    {.name = "ucx-allow-all-devices",
     .type = BT_OPTION_BOOL,
     .default_text = "false",
     .help = "Let --ucx-net-devices be all.",
     .offset = offsetof(settings, ucx_allow_all_devices)},
    {.name = "ucx-port-range",
     .type = BT_OPTION_STRING,
     .value_name = "A-B",
     .help = "TCP ports that UCX may listen on; by default any.",
     .offset = offsetof(settings, ucx_port_range)},
    {.name = "log-level",
     .type = BT_OPTION_ENUM,
     .default_text = "info",
     .choices = log_levels,
     .help = "What is logged.",
     .offset = offsetof(settings, log_level)},
};

static const bt_option_table option_table = {
    .program = "baton-decode",
    .version = "0.1.0",
    .summary = "Decodes sequences whose KV pages a prefill worker computed.",
    .options = option_rows,
    .count = BT_ARRAY_COUNT(option_rows),
};

/* ---- the program ----------------------------------------------------------------------------- */

typedef struct program {
    settings settings;
    bt_options *options;
    proto_address router;
    model *model;
    kv_page_layout kv;
    kv_pool *pages;
    xfer *mover;
    compute *compute;
    bt_loop *loop;
    decode_core *core;
    worker_link *link;
    bt_loop_source *mover_source, *compute_source, *tick_source;
    int exit_status;
} program;

/* ---- what the core calls --------------------------------------------------------------------- */

static void send_message(void *context, proto_lane lane, proto_message *message) {
    worker_link_send(((program *)context)->link, lane, message);
}

static bool can_stream(void *context) {
    return worker_link_can_stream(((program *)context)->link);
}

static void open_streams(void *context) {
    worker_link_open_streams(((program *)context)->link);
}

static void hang_up(void *context, const char *why) {
    (void)why; /* the core logged it */
    worker_link_hang_up(((program *)context)->link);
}

static void end_with(program *p, int status, const char *text) {
    (void)fprintf(stderr, "baton-decode: %s\n", text);
    p->exit_status = status;
    bt_loop_stop(p->loop);
}

static void on_refused(void *context, const char *text) {
    end_with(context, EXIT_REFUSED, text);
}

static void on_broken(void *context, bt_status status, const char *text) {
    (void)status; /* the core logged it */
    end_with(context, EXIT_BROKEN, text);
}

/* ---- what calls the core --------------------------------------------------------------------- */

static void on_open(void *context, proto_lane lane) {
    decode_core_on_open(((program *)context)->core, lane);
}

static void on_message(void *context, proto_lane lane, const proto_message *message) {
    decode_core_on_message(((program *)context)->core, lane, message);
}

static void on_closed(void *context) {
    decode_core_on_closed(((program *)context)->core);
}

static void on_drained(void *context) {
    decode_core_turn(((program *)context)->core);
}

static void on_compute(void *context) {
    compute_host_poll(((program *)context)->compute);
}

static void on_tick(void *context) {
    decode_core_tick(((program *)context)->core);
}

/* The mover's descriptor only wakes the loop; step makes the progress. */
static void on_mover(void *context) {
    (void)context;
}

/* Before every block: a budget of progress, then the core's turn, then the mover is armed; any call
 * into it since its last progress may have left work that does not show on its descriptor. */
static bool step(void *context) {
    program *p = context;
    const bool has_more = p->mover->ops->progress(p->mover);
    decode_core_turn(p->core);
    return has_more || !p->mover->ops->arm(p->mover);
}

/* ---- starting -------------------------------------------------------------------------------- */

static void hex_of(const uint8_t *bytes, size_t count, char *out) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < count; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * count] = '\0';
}

/* What no model is needed for, before minutes go by with loading one. */
static bt_status check_settings(program *p, bt_error *error) {
    const settings *s = &p->settings;
    bt_error why = {0};
    if (s->page_tokens != 16 && s->page_tokens != 32 && s->page_tokens != 64) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "--page-tokens is 16, 32 or 64, not %" PRIu32,
                       s->page_tokens);
    }
    const bt_status status = proto_address_parse(s->router, &p->router, &why);
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "--router: %.300s", why.text);
}

static bt_status load_model(program *p, bt_error *error) {
    const settings *s = &p->settings;
    bt_log_info("decode", "loading %s", s->model);
    const bt_status status = model_load(s->model, NULL, NULL, &p->model, error);
    if (status != BT_OK) return status;
    p->kv = model_kv_layout(p->model, s->page_tokens, (kv_dtype)s->kv_dtype);
    return BT_OK;
}

static bt_status create_pages(program *p, bt_error *error) {
    const size_t page_bytes = kv_page_bytes(&p->kv);
    uint64_t count = p->settings.kv_pages;
    if (count == 0) {
        uint64_t bytes = p->settings.kv_bytes;
        if (bytes == 0) {
            bytes = bt_system_memory_available_bytes() / KV_MEMORY_SHARE;
            if (bytes > kv_bytes_auto_max) bytes = kv_bytes_auto_max;
        }
        count = bytes / page_bytes;
    }
    if (count == 0 || count > UINT32_MAX) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG,
                       "%" PRIu64 " KV pages of %zu bytes cannot be used; see --kv-bytes", count,
                       page_bytes);
    }
    const kv_pool_options options = {
        .page_count = (uint32_t)count, .page_bytes = page_bytes, .layers = p->kv.layers};
    const bt_status status = kv_pool_create(&options, &p->pages);
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "%" PRIu64 " KV pages of %zu bytes cannot be allocated: %s",
                   count, page_bytes, bt_status_string(status));
}

static bt_status create_mover(program *p, bt_error *error) {
    const xfer_ucx_options options = {
        .tls = p->settings.ucx_tls,
        .net_devices = p->settings.ucx_net_devices,
        .allow_all_devices = p->settings.ucx_allow_all_devices,
        .port_range = p->settings.ucx_port_range,
    };
    bt_error why = {0};
    bt_status status = xfer_ucx_create(&options, &p->mover, &why);
    if (status != BT_OK) {
        return bt_fail(error, status, "--ucx-tls %s on --ucx-net-devices %s: %.300s", options.tls,
                       options.net_devices, why.text);
    }
    status = p->mover->ops->register_memory(p->mover, kv_pool_memory(p->pages),
                                            kv_pool_memory_bytes(p->pages));
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "the KV pages cannot be registered with UCX: %s",
                   bt_status_string(status));
}

static bt_status create_compute(program *p, bt_error *error) {
    const settings *s = &p->settings;
    const model_runner_options options = {
        .threads = s->threads != 0 ? s->threads : bt_system_cpu_count(),
        .tokens_max = s->sequences_max,
        .rows_max = s->sequences_max,
        .kv = p->kv,
        .kv_memory = kv_pool_memory(p->pages),
        .kv_page_count = kv_pool_get_options(p->pages)->page_count,
    };
    bt_log_info("decode", "%s, %" PRIu32 " threads", model_isa_name(), options.threads);
    return compute_host_create(p->model, &options, &p->compute, error);
}

static bt_status describe(const program *p, proto_hello *hello, bt_error *error) {
    const settings *s = &p->settings;
    const model_card *card = model_get_card(p->model);
    const model_geometry *g = &card->geometry;
    cluster_record *record = &hello->record;
    *hello = (proto_hello){
        .role = PROTO_ROLE_DECODE,
        .pid = (uint32_t)getpid(),
        .vocab_size = g->vocab_size,
        .context_tokens = g->context_tokens,
        .eos_count = card->eos_count,
        .tp_count = 1,
        .pp_count = 1,
        .dp_count = 1,
    };
    const bt_status status = bt_system_random_u64(&hello->incarnation);
    if (status != BT_OK) return bt_fail(error, status, "the kernel gives no random bytes");
    char host[PROTO_HOST_MAX];
    bt_system_host_name(host, sizeof host);
    proto_text_copy(hello->host, sizeof hello->host, s->host != NULL ? s->host : host);
    proto_text_copy(hello->model_name, sizeof hello->model_name, card->name);
    memcpy(hello->eos_ids, card->eos_ids, card->eos_count * sizeof card->eos_ids[0]);
    record->page_tokens = s->page_tokens;
    (void)snprintf(record->kv_dtype, sizeof record->kv_dtype, "%s", kv_dtypes[s->kv_dtype]);
    (void)snprintf(record->kv_layout, sizeof record->kv_layout,
                   "layers=%" PRIu32 " kv_heads=%" PRIu32 " head_dim=%" PRIu32, g->layers,
                   g->kv_heads, g->head_dim);
    (void)snprintf(record->numerics, sizeof record->numerics, "%s", model_numerics());
    hex_of(card->fingerprint, sizeof card->fingerprint, record->model_fingerprint);
    if (bt_options_is_given(p->options, "sampling-mask-max-tokens")) {
        record->sampling_mask_max_tokens = s->sampling_mask_max_tokens;
        hello->pins |= 1u << RECORD_SAMPLING_MASK_MAX_TOKENS;
    }
    if (bt_options_is_given(p->options, "kv-checksum")) {
        record->kv_checksum = s->kv_checksum + 1;
        hello->pins |= 1u << RECORD_KV_CHECKSUM;
    }
    return proto_tokenizer_digest(s->model, record->tokenizer_fingerprint, error);
}

static bt_status create_core(program *p, bt_error *error) {
    const model_geometry *g = &model_get_card(p->model)->geometry;
    decode_core_options options = {
        .clock = bt_clock_system(),
        .mover = p->mover,
        .pages = p->pages,
        .compute = p->compute,
        .page_tokens = p->settings.page_tokens,
        .vocab_size = g->vocab_size,
        .context_tokens = g->context_tokens,
        .sequences_max = p->settings.sequences_max,
        .park_us = p->settings.park_seconds * 1000 * 1000,
        .ops = {.send = send_message,
                .can_stream = can_stream,
                .open_streams = open_streams,
                .hang_up = hang_up,
                .on_refused = on_refused,
                .on_broken = on_broken,
                .context = p},
    };
    bt_status status = describe(p, &options.hello, error);
    if (status != BT_OK) return status;
    status = decode_core_create(&options, &p->core);
    if (status != BT_OK)
        return bt_fail(error, status, "out of memory for %" PRIu32 " sequences",
                       p->settings.sequences_max);
    return BT_OK;
}

static bt_status create_loop(program *p, bt_error *error) {
    const worker_link_events events = {.on_open = on_open,
                                       .on_message = on_message,
                                       .on_closed = on_closed,
                                       .on_drained = on_drained,
                                       .context = p};
    bt_status status = bt_loop_create(&p->loop);
    if (status == BT_OK) status = bt_loop_handle_stop_signals(p->loop, NULL, NULL);
    if (status == BT_OK) {
        status = bt_loop_watch(p->loop, p->mover->ops->get_event_fd(p->mover), on_mover, p,
                               &p->mover_source);
    }
    if (status == BT_OK) {
        status = bt_loop_watch(p->loop, compute_host_get_fd(p->compute), on_compute, p,
                               &p->compute_source);
    }
    if (status == BT_OK) status = bt_loop_every(p->loop, TICK_US, on_tick, p, &p->tick_source);
    if (status == BT_OK) {
        status = worker_link_create(bt_loop_get_base(p->loop), &p->router, &events, &p->link);
    }
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "the event loop cannot be set up: %s", bt_status_string(status));
}

/* Nothing touches the network before the model is there. */
static bt_status start(program *p, bt_error *error) {
    bt_status status = check_settings(p, error);
    if (status == BT_OK) status = load_model(p, error);
    if (status == BT_OK) status = create_pages(p, error);
    if (status == BT_OK) status = create_compute(p, error);
    if (status == BT_OK) status = create_mover(p, error);
    if (status == BT_OK) status = create_core(p, error);
    if (status == BT_OK) status = create_loop(p, error);
    return status;
}

/* The session ends first, so that nothing is said any more; then what works on the pages; then what
 * owns them. */
static void stop(program *p) {
    if (p->core != NULL && p->link != NULL) decode_core_on_closed(p->core);
    bt_loop_source_free(p->tick_source);
    bt_loop_source_free(p->compute_source);
    bt_loop_source_free(p->mover_source);
    if (p->compute != NULL) p->compute->ops->destroy(p->compute);
    if (p->mover != NULL) p->mover->ops->destroy(p->mover);
    decode_core_destroy(p->core);
    worker_link_destroy(p->link);
    bt_loop_destroy(p->loop);
    kv_pool_destroy(p->pages);
    model_destroy(p->model);
    bt_options_destroy(p->options);
}

int main(int argc, char **argv) {
    static program p;
    int status = 0;
    if (!bt_options_start(&option_table, argc, argv, &p.settings, &p.options, &status)) {
        return status;
    }
    bt_log_set_level((bt_log_level)p.settings.log_level);
    bt_error error = {0};
    if (start(&p, &error) != BT_OK) {
        (void)fprintf(stderr, "baton-decode: %s\n", error.text);
        p.exit_status = EXIT_NOT_STARTED;
    } else if (bt_loop_run(p.loop, step, &p) != BT_OK) {
        (void)fprintf(stderr, "baton-decode: the event loop failed\n");
        p.exit_status = EXIT_BROKEN;
    }
    stop(&p);
    return p.exit_status;
}
