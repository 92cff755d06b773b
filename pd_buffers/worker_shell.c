/* A worker process around its core: start in an order that can be undone, the loop with the mover's
 * progress, stop. */
#include "pd_buffers/worker_shell.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/system.h"
#include "pd_buffers/xfer_ucx.h"
#include "proto/tokenizer_digest.h"
#include "proto/worker_link.h"

enum {
    TICK_US = 50 * 1000,
    EXIT_BROKEN = 1,
    EXIT_NOT_STARTED = 2,
    EXIT_REFUSED = 3,
};

struct worker_shell {
    const worker_role *role;
    void *worker;
    const worker_settings *settings; /* the beginning of *worker */
    worker_options options;
    proto_address router;
    worker_facts facts;
    proto_hello hello;
    kv_pool *pages;
    xfer *mover;
    int compute_fd;
    bool has_core;
    bt_loop *loop;
    worker_link *link;
    bt_loop_source *mover_source, *compute_source, *tick_source;
    int exit_status;
};

/* ---- what the core calls --------------------------------------------------------------------- */

void worker_shell_send(void *shell, proto_lane lane, proto_message *message) {
    worker_link_send(((worker_shell *)shell)->link, lane, message);
}

bool worker_shell_can_stream(void *shell) {
    return worker_link_can_stream(((worker_shell *)shell)->link);
}

void worker_shell_open_streams(void *shell) {
    worker_link_open_streams(((worker_shell *)shell)->link);
}

void worker_shell_hang_up(void *shell, const char *why) {
    (void)why; /* the core logged it */
    worker_link_hang_up(((worker_shell *)shell)->link);
}

static void say(const worker_shell *s, const char *text) {
    (void)fprintf(stderr, "%s: %s\n", s->role->options.program, text);
}

static void end_with(worker_shell *s, int status, const char *text) {
    say(s, text);
    s->exit_status = status;
    bt_loop_stop(s->loop);
}

void worker_shell_on_refused(void *shell, const char *text) {
    end_with(shell, EXIT_REFUSED, text);
}

void worker_shell_on_broken(void *shell, bt_status status, const char *text) {
    (void)status; /* the core logged it */
    end_with(shell, EXIT_BROKEN, text);
}

/* ---- what calls the core --------------------------------------------------------------------- */

static void on_open(void *context, proto_lane lane) {
    worker_shell *s = context;
    s->role->on_open(s->worker, lane);
}

static void on_message(void *context, proto_lane lane, const proto_message *message) {
    worker_shell *s = context;
    s->role->on_message(s->worker, lane, message);
}

static void on_closed(void *context) {
    worker_shell *s = context;
    s->role->on_closed(s->worker);
}

static void on_drained(void *context) {
    worker_shell *s = context;
    s->role->turn(s->worker);
}

static void on_computed(void *context) {
    worker_shell *s = context;
    s->role->on_computed(s->worker);
}

static void on_tick(void *context) {
    worker_shell *s = context;
    s->role->tick(s->worker);
}

/* The mover's descriptor only wakes the loop; step makes the progress. */
static void on_mover(void *context) {
    (void)context;
}

/* Before every block: a budget of progress, then the core's turn, then the mover is armed; any call
 * into it since its last progress may have left work that does not show on its descriptor. */
static bool step(void *context) {
    worker_shell *s = context;
    const bool has_more = s->mover->ops->progress(s->mover);
    s->role->turn(s->worker);
    return has_more || !s->mover->ops->arm(s->mover);
}

/* ---- starting -------------------------------------------------------------------------------- */

static bt_status create_pages(worker_shell *s, bt_error *error) {
    kv_pool_options options = {.page_bytes = s->facts.page_bytes, .layers = s->facts.layers};
    bt_status status =
        worker_options_page_count(s->settings, options.page_bytes, &options.page_count, error);
    if (status != BT_OK) return status;
    status = kv_pool_create(&options, &s->pages);
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "%" PRIu32 " KV pages of %zu bytes cannot be allocated: %s",
                   options.page_count, options.page_bytes, bt_status_string(status));
}

static bt_status create_mover(worker_shell *s, bt_error *error) {
    const xfer_ucx_options options = {
        .tls = s->settings->ucx_tls,
        .net_devices = s->settings->ucx_net_devices,
        .allow_all_devices = s->settings->ucx_allow_all_devices,
        .port_range = s->settings->ucx_port_range,
    };
    bt_error why = {0};
    bt_status status = xfer_ucx_create(&options, &s->mover, &why);
    if (status != BT_OK) {
        return bt_fail(error, status, "--ucx-tls %s on --ucx-net-devices %s: %.300s", options.tls,
                       options.net_devices, why.text);
    }
    status = s->mover->ops->register_memory(s->mover, kv_pool_memory(s->pages),
                                            kv_pool_memory_bytes(s->pages));
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "the KV pages cannot be registered with UCX: %s",
                   bt_status_string(status));
}

static void hex_of(const uint8_t *bytes, size_t count, char *out) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < count; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * count] = '\0';
}

/* Fills in what this worker says of itself. */
static bt_status describe(worker_shell *s, bt_error *error) {
    const worker_facts *facts = &s->facts;
    proto_hello *hello = &s->hello;
    cluster_record *record = &hello->record;
    *hello = (proto_hello){
        .role = s->role->role,
        .pid = (uint32_t)getpid(),
        .vocab_size = facts->vocab_size,
        .context_tokens = facts->context_tokens,
        .eos_count = facts->eos_count,
        .tp_count = 1,
        .pp_count = 1,
        .dp_count = 1,
    };
    const bt_status status = bt_system_random_u64(&hello->incarnation);
    if (status != BT_OK) return bt_fail(error, status, "the kernel gives no random bytes");
    char host[PROTO_HOST_MAX];
    bt_system_host_name(host, sizeof host);
    proto_text_copy(hello->host, sizeof hello->host,
                    s->settings->host != NULL ? s->settings->host : host);
    proto_text_copy(hello->model_name, sizeof hello->model_name, facts->name);
    BT_ASSERT(facts->eos_count <= BT_ARRAY_COUNT(hello->eos_ids));
    memcpy(hello->eos_ids, facts->eos_ids, facts->eos_count * sizeof facts->eos_ids[0]);
    (void)snprintf(record->kv_layout, sizeof record->kv_layout,
                   "layers=%" PRIu32 " kv_heads=%" PRIu32 " head_dim=%" PRIu32, facts->layers,
                   facts->kv_heads, facts->head_dim);
    (void)snprintf(record->numerics, sizeof record->numerics, "%s", facts->numerics);
    BT_ASSERT(2 * facts->fingerprint_bytes < sizeof record->model_fingerprint);
    hex_of(facts->fingerprint, facts->fingerprint_bytes, record->model_fingerprint);
    worker_options_fill_record(&s->options, s->settings, hello);
    if (s->settings->compute.model == NULL) return BT_OK; /* nor a tokenizer: it is not stated */
    return proto_tokenizer_digest(s->settings->compute.model, record->tokenizer_fingerprint, error);
}

static bt_status create_core(worker_shell *s, bt_error *error) {
    bt_status status = describe(s, error);
    if (status != BT_OK) return status;
    const worker_parts parts = {.shell = s,
                                .hello = &s->hello,
                                .clock = bt_clock_system(),
                                .mover = s->mover,
                                .pages = s->pages};
    status = s->role->create_core(s->worker, &parts, error);
    s->has_core = status == BT_OK;
    return status;
}

static bt_status create_loop(worker_shell *s, bt_error *error) {
    const worker_link_events events = {.on_open = on_open,
                                       .on_message = on_message,
                                       .on_closed = on_closed,
                                       .on_drained = on_drained,
                                       .context = s};
    bt_status status = bt_loop_create(&s->loop);
    if (status == BT_OK) status = bt_loop_handle_stop_signals(s->loop, NULL, NULL);
    if (status == BT_OK) {
        status = bt_loop_watch(s->loop, s->mover->ops->get_event_fd(s->mover), on_mover, s,
                               &s->mover_source);
    }
    if (status == BT_OK) {
        status = bt_loop_watch(s->loop, s->compute_fd, on_computed, s, &s->compute_source);
    }
    if (status == BT_OK) status = bt_loop_every(s->loop, TICK_US, on_tick, s, &s->tick_source);
    if (status == BT_OK) {
        status = worker_link_create(bt_loop_get_base(s->loop), &s->router, &events, &s->link);
    }
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "the event loop cannot be set up: %s", bt_status_string(status));
}

/* Nothing touches the network before the model is there. */
static bt_status start(worker_shell *s, bt_error *error) {
    bt_status status = worker_options_check(&s->options, s->settings, &s->router, error);
    if (status == BT_OK) status = s->role->load(s->worker, &s->facts, error);
    if (status == BT_OK) status = create_pages(s, error);
    if (status == BT_OK) {
        status = s->role->start_compute(s->worker, s->pages, &s->compute_fd, error);
    }
    if (status == BT_OK) status = create_mover(s, error);
    if (status == BT_OK) status = create_core(s, error);
    if (status == BT_OK) status = create_loop(s, error);
    return status;
}

/* The session ends first, so that nothing is said any more; then what works on the pages; then what
 * owns them. */
static void stop(worker_shell *s) {
    if (s->has_core && s->link != NULL) s->role->on_closed(s->worker);
    bt_loop_source_free(s->tick_source);
    bt_loop_source_free(s->compute_source);
    bt_loop_source_free(s->mover_source);
    s->role->stop_compute(s->worker);
    if (s->mover != NULL) s->mover->ops->destroy(s->mover);
    s->role->destroy(s->worker);
    worker_link_destroy(s->link);
    bt_loop_destroy(s->loop);
    kv_pool_destroy(s->pages);
    worker_options_fini(&s->options);
}

int worker_shell_main(const worker_role *role, void *worker, int argc, char **argv) {
    static worker_shell s;
    int status = 0;
    s = (worker_shell){.role = role, .worker = worker, .settings = worker};
    if (!worker_options_start(&s.options, &role->options, argc, argv, worker, &status)) {
        return status;
    }
    bt_log_set_level((bt_log_level)s.settings->log_level);
    bt_error error = {0};
    if (start(&s, &error) != BT_OK) {
        say(&s, error.text);
        s.exit_status = EXIT_NOT_STARTED;
    } else if (bt_loop_run(s.loop, step, &s) != BT_OK) {
        say(&s, "the event loop failed");
        s.exit_status = EXIT_BROKEN;
    }
    stop(&s);
    return s.exit_status;
}
