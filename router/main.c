/* baton-router: HTTP towards clients, control towards workers; the only process that sees text. */
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/version.h"
#include "proto/record.h"
#include "proto/tokenizer_digest.h"
#include "router/api_sampling.h"
#include "router/control.h"
#include "router/front.h"
#include "router/intake.h"
#include "router/random_id.h"

enum {
    HEAD_BYTES_MAX = 32 * 1024,
    HEAD_TIMEOUT_MS = 15 * 1000,
    BODY_TIMEOUT_MS = 30 * 1000,
    IDLE_TIMEOUT_MS = 75 * 1000, /* longer than the clients' pools keep a connection */
    WRITE_TIMEOUT_MS = 300 * 1000,
    IN_FLIGHT_BYTES = 256 << 20,
};

typedef struct values {
    const char *http, *control, *model, *served_model_name, *log_level, *port_file, *spill_path;
    uint32_t mask_max_tokens, sampling_filter, kv_checksum, http_threads, tokenizer_threads,
        requests_max, batch_max;
    uint32_t heartbeat_ms, dead_after_ms;
    uint32_t connections_max, request_timeout_s, context_length, stream_interval;
    uint64_t reply_memory, reply_spill_bytes, body_bytes_max, body_memory;
    bool is_incremental;
} values;

#define AT(field) .offset = offsetof(values, field)
static const bt_option OPTIONS[] = {
    {"http", BT_OPTION_STRING, "127.0.0.1:30000", .value_name = "HOST:PORT",
     .help = "where clients connect; port 0 takes any free one", AT(http)},
    {"control", BT_OPTION_STRING, "127.0.0.1:30001", .value_name = "HOST:PORT",
     .help = "where workers connect; whoever can reach it can join the cluster", AT(control)},
    {"model", BT_OPTION_STRING, NULL, .value_name = "PATH", .flags = BT_OPTION_REQUIRED,
     .help = "the model's folder or GGUF file, for its tokenizer", AT(model)},
    {"served-model-name", BT_OPTION_STRING, NULL, .value_name = "NAME",
     .help = "the model's name in /v1/models; the path when not given", AT(served_model_name)},
    {"sampling-mask-max-tokens", BT_OPTION_U32, "4096", .min = 1, .max = 1 << 20,
     .help = "most ids in one sampling mask; workers take it from here", AT(mask_max_tokens)},
    {"sampling-filter", BT_OPTION_ENUM, "joint", .choices = api_filter_names,
     .help = "rule of top_k and top_p at ties, where a request names none: joint keeps or drops "
             "them together, rank cuts them by position",
     AT(sampling_filter)},
    {"kv-checksum", BT_OPTION_ENUM, "full", .choices = record_checksum_names,
     .help = "how much of each KV chunk its checksum covers; workers take it from here",
     AT(kv_checksum)},
    {"context-length", BT_OPTION_U32, "0", .max = 1 << 30, .value_name = "TOKENS",
     .help = "longest prompt and reply together; 0 = what the model says", AT(context_length)},
    {"http-threads", BT_OPTION_U32, "1", .min = 1, .max = 64,
     .help = "threads that serve connections and format replies", AT(http_threads)},
    {"tokenizer-threads", BT_OPTION_U32, "2", .min = 1, .max = 64,
     .help = "threads that read and tokenize requests", AT(tokenizer_threads)},
    {"requests-max", BT_OPTION_U32, "4096", .min = 1, .max = 100000,
     .help = "requests to generate at once, waiting ones included; beyond them 503",
     AT(requests_max)},
    {"batch-max", BT_OPTION_U32, "512", .min = 1, .max = 16384, .value_name = "PROMPTS",
     .help =
         "longest list of prompts in one request, and never more than --requests-max; with n, at "
         "most 8 times as many samples",
     AT(batch_max)},
    {"heartbeat-ms", BT_OPTION_U32, "500", .min = 20, .max = 60000, .value_name = "MS",
     .help = "time between two heartbeats of a worker", AT(heartbeat_ms)},
    {"dead-after-ms", BT_OPTION_U32, "5000", .min = 100, .max = 600000, .value_name = "MS",
     .help = "a worker that answers no heartbeat for so long is taken for dead", AT(dead_after_ms)},
    {"connections-max", BT_OPTION_U32, "16384", .min = 1, .max = 1000000,
     .help = "client connections at once", AT(connections_max)},
    {"request-timeout", BT_OPTION_U32, "1800", .min = 1, .max = 604800, .value_name = "SECONDS",
     .help = "longest time of one request", AT(request_timeout_s)},
    {"body-bytes-max", BT_OPTION_BYTES, "512M", .min = 1, .max = 1ull << 40,
     .help = "largest request body; beyond it 413", AT(body_bytes_max)},
    {"body-memory", BT_OPTION_BYTES, "1G", .min = 1, .max = 1ull << 44,
     .help = "memory for all request bodies and for what was read of those that run; beyond it 503",
     AT(body_memory)},
    {"reply-memory", BT_OPTION_BYTES, "1G", .min = 1, .max = 1ull << 44,
     .help = "memory for the rows of replies; beyond it they go to a temporary file",
     AT(reply_memory)},
    {"reply-spill-bytes", BT_OPTION_BYTES, "16G", .max = 1ull << 44,
     .help = "bytes of those temporary files; beyond it a reply ends with 503",
     AT(reply_spill_bytes)},
    {"reply-spill-path", BT_OPTION_STRING, "/tmp", .value_name = "FOLDER",
     .help = "folder of those temporary files", AT(spill_path)},
    {"incremental-streaming-output", BT_OPTION_BOOL, "false",
     .help = "events of /generate carry only what is new", AT(is_incremental)},
    {"stream-interval", BT_OPTION_U32, "1", .min = 1, .max = 1 << 20, .value_name = "TOKENS",
     .help = "tokens between two events of a stream", AT(stream_interval)},
    {"log-level", BT_OPTION_STRING, "info", .value_name = "LEVEL",
     .help = "error, warn, info, debug or trace", AT(log_level)},
    {"port-file", BT_OPTION_STRING, NULL, .value_name = "PATH",
     .help = "write the addresses of --http and --control there once both listen", AT(port_file)},
};

static const bt_option_table TABLE = {
    .program = "baton-router",
    .version = bt_version,
    .summary = "Takes requests over HTTP and has them served by prefill and decode workers.",
    .options = OPTIONS,
    .count = BT_ARRAY_COUNT(OPTIONS),
};

/* Everything that lives as long as the process. */
typedef struct program {
    values v;
    tokenizer *tokenizer;
    api_settings settings;
    reply_limits limits;
    budget bodies;
    bt_loop *loop;
    control *control;
    intake *intake;
    front *front;
    proto_address http_address, control_address;
} program;

static bt_status read_address(const char *option, const char *text, proto_address *out,
                              bt_error *error) {
    bt_error inner;
    bt_status status = proto_address_parse(text, out, &inner);
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "--%s: %s", option, inner.text);
}

static bt_status prepare(program *p, bt_error *error) {
    const values *v = &p->v;
    bt_log_level level;
    api_settings *settings = &p->settings;
    if (bt_log_parse_level(v->log_level, &level) != BT_OK)
        return bt_fail(error, BT_ERR_CALLER_CONFIG,
                       "--log-level: '%s' is not error, warn, info, debug or trace", v->log_level);
    bt_log_set_level(level);
    bt_status status = read_address("http", v->http, &p->http_address, error);
    if (status == BT_OK) status = read_address("control", v->control, &p->control_address, error);
    if (status == BT_OK) status = tokenizer_load(v->model, &p->tokenizer, error);
    if (status != BT_OK) return status;
    settings->tokenizer = p->tokenizer;
    settings->mask_max_tokens = v->mask_max_tokens;
    settings->context_max = v->context_length;
    settings->sampling_filter = v->sampling_filter;
    settings->stream_interval = v->stream_interval;
    settings->is_incremental = v->is_incremental;
    settings->batch_max = v->batch_max < v->requests_max ? v->batch_max : v->requests_max;
    const char *name = v->served_model_name != NULL ? v->served_model_name : v->model;
    if (strlen(name) >= sizeof(settings->model_name) ||
        strlen(v->model) >= sizeof(settings->model_path))
        return bt_fail(error, BT_ERR_CALLER_CONFIG,
                       "the model's name is too long; give a --served-model-name");
    memcpy(settings->model_name, name, strlen(name) + 1);
    memcpy(settings->model_path, v->model, strlen(v->model) + 1);
    budget_init(&p->limits.memory, v->reply_memory);
    budget_init(&p->limits.spill, v->reply_spill_bytes);
    p->limits.spill_path = v->spill_path;
    budget_init(&p->bodies, v->body_memory);
    return BT_OK;
}

static bt_status fill_dispatch(const program *p, dispatch_options *out, bt_error *error) {
    const values *v = &p->v;
    cluster_record *record = &out->record;
    memset(out, 0, sizeof(*out));
    do {
        out->incarnation = random_u64();
    } while (out->incarnation == 0);
    if (gethostname(out->host, sizeof(out->host) - 1) != 0) snprintf(out->host, 8, "router");
    record->sampling_mask_max_tokens = v->mask_max_tokens;
    record->kv_checksum = v->kv_checksum + 1;
    record->row_format = ROW_FORMAT_VERSION;
    record->protocol_minor = PROTO_VERSION_MINOR;
    out->heartbeat_ms = v->heartbeat_ms;
    out->dead_after_ms = v->dead_after_ms;
    out->requests_max = v->requests_max;
    out->request_timeout_ms = v->request_timeout_s * 1000;
    out->vocab_min = tokenizer_vocab_count(p->tokenizer);
    out->seed = random_u64();
    return proto_tokenizer_digest(v->model, record->tokenizer_fingerprint, error);
}

/* "--http 127.0.0.1:30000: cannot listen on ...": the sentence names the option as it was given. */
static bt_status fail_listen(const char *option, const char *address, const bt_error *inner,
                             bt_error *error) {
    return bt_fail(error, inner->status, "--%s %s: %s", option, address, inner->text);
}

static void print_address(char *out, size_t capacity, const proto_address *address, uint16_t port) {
    bool is_v6 = strchr(address->host, ':') != NULL;
    snprintf(out, capacity, is_v6 ? "[%s]:%u" : "%s:%u", address->host, port);
}

static bt_status start(program *p, bt_error *error) {
    const values *v = &p->v;
    bt_error inner;
    control_options for_control = {.address = p->control_address,
                                   .settings = &p->settings,
                                   .threads = v->http_threads,
                                   .flows_per_thread_max = v->requests_max + 64,
                                   .in_flight_bytes_max = IN_FLIGHT_BYTES,
                                   .idle_bytes_max = v->reply_memory / 8};
    bt_status status = fill_dispatch(p, &for_control.dispatch, error);
    if (status != BT_OK) return status;
    status = bt_loop_create(&p->loop);
    if (status != BT_OK) return bt_fail(error, status, "no event loop");
    status = control_create(&for_control, p->loop, &p->control, &inner);
    if (status != BT_OK) return fail_listen("control", v->control, &inner, error);
    print_address(p->settings.control_address, sizeof(p->settings.control_address),
                  &p->control_address, control_port(p->control));
    const intake_options for_intake = {.settings = &p->settings,
                                       .control = p->control,
                                       .threads = v->tokenizer_threads,
                                       .http_threads = v->http_threads,
                                       .depth = v->requests_max};
    status = intake_create(&for_intake, &p->intake);
    if (status != BT_OK) return bt_fail(error, status, "the tokenizer threads cannot start");
    const front_options for_front = {
        .settings = &p->settings,
        .control = p->control,
        .intake = p->intake,
        .intake_threads = v->tokenizer_threads,
        .threads = v->http_threads,
        .flows_per_thread_max = for_control.flows_per_thread_max,
        .address = p->http_address,
        .http = {.connections_max = v->connections_max,
                 .head_bytes_max = HEAD_BYTES_MAX,
                 .body_bytes_max = v->body_bytes_max,
                 .body_budget = &p->bodies,
                 .head_timeout_ms = HEAD_TIMEOUT_MS,
                 .body_timeout_ms = BODY_TIMEOUT_MS,
                 .idle_timeout_ms = IDLE_TIMEOUT_MS,
                 .write_timeout_ms = WRITE_TIMEOUT_MS},
        .limits = &p->limits,
    };
    status = front_create(&for_front, &p->front, &inner);
    if (status != BT_OK) return fail_listen("http", v->http, &inner, error);
    return BT_OK;
}

/* Whole or not at all, so that who waits for the file never reads half of it. */
static bt_status write_port_file(const program *p, const char *http, const char *control_at,
                                 bt_error *error) {
    const char *path = p->v.port_file;
    if (path == NULL) return BT_OK;
    bt_text temporary;
    bt_text_init(&temporary, 4096);
    bt_text_add_format(&temporary, "%s.tmp", path);
    FILE *file = !temporary.has_failed ? fopen(temporary.bytes, "we") : NULL;
    bool is_written = file != NULL && fprintf(file, "%s %s\n", http, control_at) > 0;
    if (file != NULL && fclose(file) != 0) is_written = false;
    if (is_written) is_written = rename(temporary.bytes, path) == 0;
    bt_text_fini(&temporary);
    if (is_written) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_FILE, "--port-file: cannot write %s: %s", path,
                   strerror(errno));
}

static bt_status run(program *p, bt_error *error) {
    char http[PROTO_HOST_MAX + 16];
    const char *control_at = p->settings.control_address;
    print_address(http, sizeof(http), &p->http_address, front_port(p->front));
    bt_status status = bt_loop_handle_stop_signals(p->loop, NULL, NULL);
    if (status == BT_OK) status = intake_start(p->intake);
    if (status == BT_OK) status = front_start(p->front);
    if (status != BT_OK) return bt_fail(error, status, "the threads cannot start");
    status = write_port_file(p, http, control_at, error);
    if (status != BT_OK) return status;
    bt_log_info("router", "serving http://%s, workers join at %s", http, control_at);
    status = bt_loop_run(p->loop, control_step, p->control);
    if (status != BT_OK) return bt_fail(error, status, "the event loop failed");
    bt_log_info("router", "stopping");
    return BT_OK;
}

/* HTTP threads first: nobody gives commands any more, then whoever carries them out. */
static void stop(program *p) {
    if (p->front != NULL) front_stop(p->front);
    if (p->intake != NULL) intake_stop(p->intake);
    control_destroy(p->control);
    intake_destroy(p->intake);
    front_destroy(p->front);
    bt_loop_destroy(p->loop);
    tokenizer_destroy(p->tokenizer);
}

/* One descriptor for each connection; the soft limit is often 1024. */
static void raise_descriptor_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}

int main(int argc, char **argv) {
    program *p = bt_calloc(1, sizeof(*p));
    bt_options *options;
    bt_error error = {0};
    int exit_status = 1;
    if (p == NULL) return exit_status;
    if (!bt_options_start(&TABLE, argc, argv, &p->v, &options, &exit_status)) {
        bt_free(p);
        return exit_status;
    }
    raise_descriptor_limit();
    bt_status status = prepare(p, &error);
    if (status == BT_OK) status = start(p, &error);
    if (status == BT_OK) status = run(p, &error);
    if (status != BT_OK) fprintf(stderr, "baton-router: %s\n", error.text);
    stop(p);
    bt_options_destroy(options);
    bt_free(p);
    return status == BT_OK ? 0 : bt_status_scope(status) == BT_SCOPE_CALLER ? 2 : 1;
}
