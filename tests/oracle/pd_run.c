/* baton-pd-run: a router without HTTP, text or tokenizer: the dispatch, its listener, and cases
 * from stdin (cases.h). Waits until a pair of workers is ready, submits every case (all at once, or
 * one after the other with --serial), prints the results in the order of the cases, ends. For
 * comparing a cluster with baton-oracle, and for driving workers by hand.
 *
 *   baton-pd-run --control 127.0.0.1:0 [--port-file PATH] [--prefill N] [--decode M] [--serial]
 *                [--sampling-mask-max-tokens N] [--kv-checksum full] [--timeout SECONDS] */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/system.h"
#include "proto/link.h"
#include "proto/listener.h"
#include "proto/record.h"
#include "proto/row.h"
#include "proto/row_stream.h"
#include "proto/tokenizer_digest.h"
#include "router/dispatch.h"
#include "tests/oracle/cases.h"

enum { LINKS_MAX = 256, TICK_US = 20 * 1000, GRANT_BYTES = 4096 };

typedef struct settings {
    const char *control, *port_file, *model;
    uint32_t prefill, decode, cap, kv_checksum, timeout_seconds;
    bool is_serial, is_credited;
} settings;

static const bt_option option_rows[] = {
    {.name = "control",
     .type = BT_OPTION_STRING,
     .default_text = "127.0.0.1:30001",
     .value_name = "HOST:PORT",
     .help = "Where workers dial.",
     .offset = offsetof(settings, control)},
    {.name = "port-file",
     .type = BT_OPTION_STRING,
     .help = "The port is written here once it is open.",
     .offset = offsetof(settings, port_file)},
    {.name = "model",
     .type = BT_OPTION_STRING,
     .help = "Whose tokenizer the workers must have.",
     .offset = offsetof(settings, model),
     .flags = BT_OPTION_REQUIRED},
    {.name = "prefill",
     .type = BT_OPTION_U32,
     .default_text = "1",
     .help = "Prefill workers to wait for.",
     .offset = offsetof(settings, prefill)},
    {.name = "decode",
     .type = BT_OPTION_U32,
     .default_text = "1",
     .help = "Decode workers to wait for.",
     .offset = offsetof(settings, decode)},
    {.name = "serial",
     .type = BT_OPTION_BOOL,
     .default_text = "false",
     .help = "One case after the other.",
     .offset = offsetof(settings, is_serial)},
    {.name = "credited",
     .type = BT_OPTION_BOOL,
     .default_text = "false",
     .help = "Grant credit as a streaming reader does.",
     .offset = offsetof(settings, is_credited)},
    {.name = "sampling-mask-max-tokens",
     .type = BT_OPTION_U32,
     .default_text = "4096",
     .min = 1,
     .max = 1u << 20,
     .help = "Cap of a mask row.",
     .offset = offsetof(settings, cap)},
    {.name = "kv-checksum",
     .type = BT_OPTION_ENUM,
     .default_text = "full",
     .choices = record_checksum_names,
     .help = "Checksum of KV pages.",
     .offset = offsetof(settings, kv_checksum)},
    {.name = "timeout",
     .type = BT_OPTION_U32,
     .default_text = "120",
     .help = "Seconds after which all is given up.",
     .offset = offsetof(settings, timeout_seconds)},
};

static const bt_option_table option_table = {
    .program = "baton-pd-run",
    .version = "0",
    .summary = "Runs stdin's cases through a cluster of workers.",
    .options = option_rows,
    .count = BT_ARRAY_COUNT(option_rows),
};

/* Printed in the order of cases, prompts and samples. */
typedef struct page_of_text {
    char *text;
    size_t bytes;
    FILE *out;
} page_of_text;

typedef struct sample_result {
    uint32_t rows;
    bool has_ended;
    page_of_text page;
} sample_result;

typedef struct result {
    bool has_ended;
    page_of_text prompt;
    sample_result *samples; /* [the case's samples] */
    int32_t *words;         /* of the request */
} result;

typedef struct router {
    settings settings;
    bt_loop *loop;
    dispatch *dispatch;
    proto_listener *listener;
    bt_loop_source *tick, *deadline;
    oracle_case *cases;
    uint32_t count, submitted, ended;
    uint64_t cached_tokens, retractions; /* of all samples; told on stderr */
    result *results;
    proto_link *links[LINKS_MAX]; /* dispatch_link - 1 */
    bool is_failed;
} router;

static uint64_t now_us(void) {
    const bt_clock clock = bt_clock_system();
    return bt_clock_now_us(&clock);
}

/* ---- links ----------------------------------------------------------------------------------- */

static dispatch_link number_of(const router *r, const proto_link *link) {
    for (uint32_t i = 0; i < LINKS_MAX; i++) {
        if (r->links[i] == link) return i + 1;
    }
    return 0;
}

static void on_message(void *context, proto_link *link, const proto_message *message) {
    router *r = context;
    dispatch_on_message(r->dispatch, number_of(r, link), message, now_us());
}

static void on_closed(void *context, proto_link *link, bt_status status, const char *text) {
    router *r = context;
    const dispatch_link number = number_of(r, link);
    (void)status;
    (void)text;
    r->links[number - 1] = NULL;
    proto_link_destroy(link);
    dispatch_on_closed(r->dispatch, number, now_us());
}

static void on_accept(void *context, int fd, const char *peer) {
    router *r = context;
    (void)peer;
    const proto_link_events events = {
        .on_message = on_message, .on_closed = on_closed, .context = r};
    for (uint32_t i = 0; i < LINKS_MAX; i++) {
        if (r->links[i] != NULL) continue;
        if (proto_link_create(bt_loop_get_base(r->loop), fd, NULL, &events, &r->links[i]) !=
            BT_OK) {
            r->links[i] = NULL;
            return;
        }
        dispatch_on_opened(r->dispatch, i + 1, now_us());
        return;
    }
}

/* ---- what the dispatch calls ----------------------------------------------------------------- */

static void send_message(void *context, dispatch_link link, proto_message *message) {
    router *r = context;
    if (r->links[link - 1] != NULL) {
        proto_link_send(r->links[link - 1], message);
    } else {
        proto_message_drop_payload(message);
    }
}

static void close_link(void *context, dispatch_link link) {
    router *r = context;
    proto_link *l = r->links[link - 1];
    if (l != NULL) proto_link_finish(l);
}

static bt_status open_page(page_of_text *page) {
    page->out = open_memstream(&page->text, &page->bytes);
    return page->out != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
}

static void close_page(page_of_text *page, bool is_printed) {
    if (page->out == NULL) return;
    (void)fclose(page->out);
    if (is_printed && page->text != NULL) (void)fputs(page->text, stdout);
    free(page->text); /* open_memstream's own */
    *page = (page_of_text){.out = NULL};
}

static void on_rows(void *context, uint64_t request, const dispatch_rows *rows) {
    router *r = context;
    const oracle_case *c = &r->cases[request - 1];
    sample_result *to = &r->results[request - 1].samples[rows->sample];
    size_t at = 0;
    for (uint32_t i = 0; i < rows->count; i++) {
        token_row row;
        size_t used = 0;
        if (row_record_decode(rows->records + at, rows->bytes - at, r->settings.cap, &row, &used) !=
                BT_OK ||
            used == 0) {
            r->is_failed = true;
            return;
        }
        at += used;
        const oracle_row printed = {.token = row.token,
                                    .token_logprob = row.token_logprob,
                                    .selected_logprob = row.selected_logprob,
                                    .support_count = row.support_count,
                                    .support_size = row.support_size,
                                    .support_ids = row.support_ids,
                                    .support_logprobs = row.support_logprobs,
                                    .top_count = row.top_count,
                                    .top = (const oracle_top *)row.top,
                                    .id_logprobs = row.id_logprobs};
        cases_print_row(to->page.out, c, rows->sample, to->rows++, &printed);
    }
    if (at != rows->bytes) r->is_failed = true;
}

/* After a retry they come again from the first one. */
static void on_prompt_logprobs(void *context, uint64_t request,
                               const dispatch_prompt_logprobs *logprobs) {
    router *r = context;
    const oracle_case *c = &r->cases[request - 1];
    page_of_text *page = &r->results[request - 1].prompt;
    const size_t entry = logprobs->bytes / logprobs->count;
    if (logprobs->first_position == c->prompt_logprobs_from + 1) {
        close_page(page, false);
        if (open_page(page) != BT_OK) r->is_failed = true;
    }
    for (uint32_t i = 0; page->out != NULL && i < logprobs->count; i++) {
        const uint8_t *at = logprobs->entries + i * entry;
        const uint8_t *top = at + sizeof(float);
        oracle_row row = {.token = c->ids[logprobs->first_position + i],
                          .top_count = c->top_logprobs,
                          .top = (const void *)top,
                          .id_logprobs = (const void *)(top + c->top_logprobs * sizeof(row_top))};
        memcpy(&row.token_logprob, at, sizeof row.token_logprob);
        cases_print_prompt(page->out, c, logprobs->first_position + i, &row);
    }
}

static void on_sample_end(void *context, uint64_t request, uint32_t sample,
                          const dispatch_end *end) {
    router *r = context;
    sample_result *to = &r->results[request - 1].samples[sample];
    const char *finish = end->finish == PROTO_FINISH_STOP ? "stop" : "length";
    if (end->status == BT_ERR_REQUEST_OVERFLOW)
        finish = "overflow";
    else if (end->status != BT_OK)
        finish = end->text;
    cases_print_finish(to->page.out, &r->cases[request - 1], sample, finish, to->rows);
    r->cached_tokens += end->cached_tokens;
    r->retractions += end->retractions;
    to->has_ended = true;
}

static void on_end(void *context, uint64_t request, const dispatch_end *end) {
    router *r = context;
    (void)end; /* every sample has said its own */
    r->results[request - 1].has_ended = true;
    r->ended++;
    if (r->ended == r->count) bt_loop_stop(r->loop);
}

static void on_ready_changed(void *context, bool is_ready) {
    (void)context;
    (void)is_ready;
}

/* ---- submitting ------------------------------------------------------------------------------ */

static proto_generation generation_of(const oracle_case *c) {
    proto_generation g = {
        .max_new_tokens = c->max_new_tokens,
        .temperature = c->temperature,
        .top_p = c->top_p,
        .top_k = c->top_k,
        .min_p = c->min_p,
        .filter = c->filter,
        .frequency_penalty = c->frequency_penalty,
        .presence_penalty = c->presence_penalty,
        .repetition_penalty = c->repetition_penalty,
        .mask_mode = c->mask_mode,
        .mask_bounded = c->mask_bounded,
        .vocab_limit = c->vocab_limit,
        .seed = c->seed,
        .samples = c->samples,
        .stop_id_count = c->ignores_stop != 0 ? 0 : c->stop_count,
        .min_new_tokens = c->min_new_tokens,
        .banned_id_count = c->min_new_tokens > 0 ? c->stop_count : 0,
        .bias_count = c->bias_count,
        .wants_logprob = c->wants_logprob,
        .top_logprobs = c->top_logprobs,
        .logprob_id_count = c->logprob_id_count,
        .wants_prompt_logprobs = c->wants_prompt_logprobs,
        .prompt_logprobs_from = c->prompt_logprobs_from,
    };
    memcpy(g.stop_ids, c->stop_ids, c->stop_count * sizeof c->stop_ids[0]);
    return g;
}

/* The words of an attempt (proto/message.h). Returns owned. */
static int32_t *words_of(const oracle_case *c, const proto_generation *g) {
    int32_t *words = bt_malloc(sizeof *words * proto_words(g, c->id_count));
    if (words == NULL) return NULL;
    int32_t *at = words;
    memcpy(at, c->ids, c->id_count * sizeof *at);
    at += c->id_count;
    memcpy(at, c->bias_ids, c->bias_count * sizeof *at);
    at += c->bias_count;
    memcpy(at, c->biases, c->bias_count * sizeof *at);
    at += c->bias_count;
    memcpy(at, c->logprob_ids, c->logprob_id_count * sizeof *at);
    return words;
}

static void submit(router *r, uint32_t index) {
    const oracle_case *c = &r->cases[index];
    dispatch_request request = {.id = index + 1,
                                .prompt_tokens = c->id_count,
                                .is_credited = r->settings.is_credited,
                                .generation = generation_of(c)};
    int32_t *words = words_of(c, &request.generation);
    request.words = words;
    bt_error error = {.text = "out of memory"};
    const bt_status status = words == NULL
                                 ? BT_ERR_WORKER_MEMORY
                                 : dispatch_submit(r->dispatch, &request, now_us(), &error);
    r->results[index].words = words;
    if (status == BT_OK) return;
    (void)fprintf(stderr, "baton-pd-run: case %s: %s\n", c->name, error.text);
    r->is_failed = true;
    bt_loop_stop(r->loop);
}

static bool has_workers(const router *r) {
    static dispatch_worker_view views[LINKS_MAX];
    const uint32_t count = dispatch_look_workers(r->dispatch, views, LINKS_MAX);
    uint32_t prefill = 0;
    uint32_t decode = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!views[i].is_ready) continue;
        prefill += views[i].role == PROTO_ROLE_PREFILL;
        decode += views[i].role == PROTO_ROLE_DECODE;
    }
    dispatch_view view;
    dispatch_look(r->dispatch, &view);
    return view.is_ready && prefill >= r->settings.prefill && decode >= r->settings.decode;
}

static void on_tick(void *context) {
    router *r = context;
    dispatch_tick(r->dispatch, now_us());
    if (r->submitted == 0 && !has_workers(r)) return;
    while (r->submitted < r->count && (!r->settings.is_serial || r->submitted == r->ended)) {
        submit(r, r->submitted++);
    }
    for (uint32_t i = 0; r->settings.is_credited && i < r->submitted; i++) {
        for (uint32_t k = 0; !r->results[i].has_ended && k < r->cases[i].samples; k++)
            dispatch_grant(r->dispatch, i + 1, k, GRANT_BYTES, now_us());
    }
}

static void on_deadline(void *context) {
    router *r = context;
    (void)fprintf(stderr, "baton-pd-run: not done in time (%" PRIu32 " of %" PRIu32 " cases)\n",
                  r->ended, r->count);
    r->is_failed = true;
    bt_loop_stop(r->loop);
}

/* ---- program --------------------------------------------------------------------------------- */

static bt_status create_dispatch(router *r, bt_error *error) {
    const dispatch_ops ops = {.send = send_message,
                              .close = close_link,
                              .on_rows = on_rows,
                              .on_prompt_logprobs = on_prompt_logprobs,
                              .on_sample_end = on_sample_end,
                              .on_end = on_end,
                              .on_ready_changed = on_ready_changed,
                              .context = r};
    dispatch_options options = {
        .host = "pd-run",
        .record = {.sampling_mask_max_tokens = r->settings.cap,
                   .kv_checksum = r->settings.kv_checksum + 1,
                   .row_format = ROW_FORMAT_VERSION},
        .request_timeout_ms = r->settings.timeout_seconds * 1000,
    };
    bt_status status = bt_system_random_u64(&options.incarnation);
    if (status != BT_OK) return bt_fail(error, status, "no random bytes");
    status = proto_tokenizer_digest(r->settings.model, options.record.tokenizer_fingerprint, error);
    if (status != BT_OK) return status;
    status = dispatch_create(&options, &ops, &r->dispatch);
    if (status != BT_OK) return bt_fail(error, status, "the dispatch cannot be made");
    return BT_OK;
}

static bt_status listen_on(router *r, bt_error *error) {
    proto_address address;
    bt_status status = proto_address_parse(r->settings.control, &address, error);
    if (status != BT_OK) return status;
    const proto_listener_events events = {.on_accept = on_accept, .context = r};
    status = proto_listener_open(bt_loop_get_base(r->loop), &address, &events, &r->listener, error);
    if (status != BT_OK || r->settings.port_file == NULL) return status;
    FILE *file = fopen(r->settings.port_file, "we");
    if (file == NULL) return bt_fail(error, BT_ERR_CALLER_FILE, "cannot write the port file");
    (void)fprintf(file, "%u\n", proto_listener_port(r->listener));
    (void)fclose(file);
    return BT_OK;
}

static bt_status open_result(const oracle_case *c, result *out) {
    out->samples = bt_calloc(c->samples, sizeof *out->samples);
    bt_status status = out->samples != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
    for (uint32_t i = 0; status == BT_OK && i < c->samples; i++)
        status = open_page(&out->samples[i].page);
    return status;
}

static void close_result(const oracle_case *c, result *of, bool is_printed) {
    close_page(&of->prompt, is_printed);
    for (uint32_t i = 0; of->samples != NULL && i < c->samples; i++)
        close_page(&of->samples[i].page, is_printed);
    bt_free(of->samples);
    bt_free(of->words);
}

static bt_status set_up(router *r, bt_error *error) {
    bt_status status = cases_read(stdin, &r->cases, &r->count, error);
    if (status != BT_OK) return status;
    r->results = bt_calloc(r->count + 1, sizeof *r->results);
    if (r->results == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    for (uint32_t i = 0; i < r->count; i++) {
        status = open_result(&r->cases[i], &r->results[i]);
        if (status != BT_OK) return bt_fail(error, status, "out of memory");
    }
    status = create_dispatch(r, error);
    if (status == BT_OK) status = bt_loop_create(&r->loop);
    if (status == BT_OK) status = bt_loop_handle_stop_signals(r->loop, NULL, NULL);
    if (status == BT_OK) status = bt_loop_every(r->loop, TICK_US, on_tick, r, &r->tick);
    if (status == BT_OK) status = bt_loop_timer(r->loop, on_deadline, r, &r->deadline);
    if (status != BT_OK) return status;
    bt_loop_timer_start(r->deadline, (uint64_t)r->settings.timeout_seconds * 1000 * 1000);
    return listen_on(r, error);
}

static void tear_down(router *r) {
    for (uint32_t i = 0; i < LINKS_MAX; i++)
        proto_link_destroy(r->links[i]);
    proto_listener_close(r->listener);
    bt_loop_source_free(r->tick);
    bt_loop_source_free(r->deadline);
    dispatch_destroy(r->dispatch);
    bt_loop_destroy(r->loop);
    for (uint32_t i = 0; r->results != NULL && i < r->count; i++)
        close_result(&r->cases[i], &r->results[i], !r->is_failed);
    bt_free(r->results);
    cases_free(r->cases, r->count);
}

int main(int argc, char **argv) {
    static router r;
    bt_options *options = NULL;
    int exit_status = 0;
    bt_log_set_level(BT_LOG_WARN);
    if (!bt_options_start(&option_table, argc, argv, &r.settings, &options, &exit_status)) {
        return exit_status;
    }
    bt_error error = {0};
    bt_status status = set_up(&r, &error);
    if (status == BT_OK && r.count > 0) {
        status = bt_loop_run(r.loop, NULL, NULL);
    } else if (status != BT_OK) {
        (void)fprintf(stderr, "baton-pd-run: %s\n", error.text);
    }
    if (r.ended != r.count) r.is_failed = true;
    (void)fprintf(stderr, "baton-pd-run: %" PRIu64 " cached tokens, %" PRIu64 " retractions\n",
                  r.cached_tokens, r.retractions);
    const bool is_failed = r.is_failed || status != BT_OK;
    tear_down(&r);
    bt_options_destroy(options);
    return is_failed ? 1 : 0;
}
