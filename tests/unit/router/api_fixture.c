#include "tests/unit/router/api_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "tests/support/test_bytes.h"
#include "tests/support/tiny_model.h"

/* ---- tables ---------------------------------------------------------------------------------- */

static void on_begin(void *context, int status, const char *content_type, int64_t content_bytes,
                     const char *fields) {
    api_fixture *f = context;
    f->begin_count++;
    f->status = status;
    f->content_bytes = content_bytes;
    snprintf(f->content_type, sizeof(f->content_type), "%s", content_type);
    snprintf(f->fields, sizeof(f->fields), "%s", fields != NULL ? fields : "");
}

static void on_add(void *context, const char *bytes, size_t count) {
    api_fixture *f = context;
    assert_int_equal(f->begin_count, 1);
    assert_int_equal(f->end_count + f->cut_count, 0);
    bt_text_add(&f->body, bytes, count);
    if (f->room != SIZE_MAX) f->room = f->room > count ? f->room - count : 0;
}

static void on_give(void *context, bt_text *text) {
    if (text->used > 0) on_add(context, text->bytes, text->used);
    bt_text_clear(text);
}

static void on_end(void *context) {
    api_fixture *f = context;
    f->end_count++;
    if (f->content_bytes >= 0) assert_int_equal(f->body.used, f->content_bytes);
}

static void on_cut(void *context) {
    ((api_fixture *)context)->cut_count++;
}

static size_t on_get_room(void *context) {
    return ((api_fixture *)context)->room;
}

static void on_wake(void *context) {
    api_fixture *f = context;
    assert_int_equal(f->begin_count, 0);
    f->wake_count++;
}

static void on_cancel(void *context, uint32_t item) {
    api_fixture *f = context;
    assert_true(item < f->call.batch.count);
    assert_false(f->call.items[item].has_ended);
    f->cancel_count++;
}

static uint32_t number_of(const api_fixture *f, uint32_t item, uint32_t sample) {
    assert_true(item < f->call.batch.count);
    assert_true(sample < f->call.items[item].sample_count);
    return f->call.items[item].first_sample + sample;
}

static void on_cancel_sample(void *context, uint32_t item, uint32_t sample) {
    api_fixture *f = context;
    const uint32_t number = number_of(f, item, sample);
    assert_int_equal(f->cancelled_samples[number], 0);
    assert_false(f->call.samples[number].has_ended);
    f->cancelled_samples[number]++;
}

static void on_grant(void *context, uint32_t item, uint32_t sample, uint64_t bytes) {
    api_fixture *f = context;
    f->granted_bytes += bytes;
    f->granted[number_of(f, item, sample)] += bytes;
}

static uint64_t now_us(void *context) {
    return ((api_fixture *)context)->now_us;
}

static double wall_seconds(void *context) {
    (void)context;
    return 1790000000.25;
}

/* ---- life ------------------------------------------------------------------------------------ */

int api_fixture_set_up(void **state) {
    const tiny_model m = {.family = MODEL_FAMILY_QWEN3, .seed = 1};
    api_fixture *f = calloc(1, sizeof(*f));
    char folder[] = "/tmp/baton-api.XXXXXX";
    char command[64];
    bt_error error;
    assert_non_null(f);
    assert_non_null(mkdtemp(folder));
    assert_int_equal(tiny_model_write_hf(&m, folder), BT_OK);
    if (tokenizer_load(folder, &f->tokenizer, &error) != BT_OK) fail_msg("%s", error.text);
    snprintf(command, sizeof(command), "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    f->settings = (api_settings){.tokenizer = f->tokenizer,
                                 .mask_max_tokens = 64,
                                 .stream_interval = 1,
                                 .batch_max = 6,
                                 .model_name = "tiny",
                                 .model_path = "/models/tiny"};
    f->model = (api_model){.is_known = true,
                           .vocab_size = API_FIXTURE_VOCAB,
                           .context_tokens = API_FIXTURE_CONTEXT,
                           .room_tokens = API_FIXTURE_CONTEXT,
                           .eos_count = 1,
                           .eos_ids = {API_FIXTURE_EOS}};
    budget_init(&f->limits.memory, 1 << 20);
    budget_init(&f->limits.spill, 1 << 20);
    f->limits.spill_path = "/tmp";
    f->room = SIZE_MAX;
    bt_text_init(&f->scratch, 1 << 24);
    bt_text_init(&f->body, 1 << 24);
    *state = f;
    return 0;
}

static void forget(api_fixture *f) {
    if (f->is_running) api_call_fini(&f->call);
    f->is_running = false;
    bt_text_clear(&f->body);
    f->status = 0;
    f->begin_count = 0;
    f->end_count = 0;
    f->cut_count = 0;
    f->cancel_count = 0;
    f->granted_bytes = 0;
    memset(f->granted, 0, sizeof(f->granted));
    memset(f->cancelled_samples, 0, sizeof(f->cancelled_samples));
    f->retractions = 0;
    f->room = SIZE_MAX;
    f->wake_count = 0;
}

int api_fixture_tear_down(void **state) {
    api_fixture *f = *state;
    forget(f);
    assert_int_equal(budget_used(&f->limits.memory), 0);
    assert_int_equal(budget_used(&f->limits.spill), 0);
    bt_text_fini(&f->scratch);
    bt_text_fini(&f->body);
    tokenizer_destroy(f->tokenizer);
    free(f);
    return 0;
}

bool api_fixture_ask(api_fixture *f, api_kind kind, const char *body) {
    const api_output output = {.begin = on_begin,
                               .add = on_add,
                               .give = on_give,
                               .end = on_end,
                               .cut = on_cut,
                               .room = on_get_room,
                               .wake = on_wake,
                               .context = f};
    const api_call_options options = {
        .settings = &f->settings,
        .limits = &f->limits,
        .time = {.clock = {now_us, f}, .wall_seconds = wall_seconds},
        .output = output,
        .backend = {.cancel = on_cancel,
                    .cancel_sample = on_cancel_sample,
                    .grant = on_grant,
                    .context = f},
        .scratch = &f->scratch,
        .started_us = f->now_us,
    };
    api_batch batch;
    api_failure failure;
    forget(f);
    /* In a block of its own size, so that a read past the end is seen by the sanitizers. */
    size_t bytes = strlen(body);
    char *copy = malloc(bytes > 0 ? bytes : 1);
    assert_non_null(copy);
    memcpy(copy, body, bytes);
    const api_body given = {
        .kind = kind, .wants_safetensors = f->wants_safetensors, .text = copy, .bytes = bytes};
    bool is_good = api_batch_read(&given, &f->settings, &f->model, &batch, &failure);
    free(copy);
    if (!is_good) {
        api_answer_failure(&output, &failure);
        return false;
    }
    if (api_call_init(&f->call, &options, &batch) != BT_OK) {
        failure = (api_failure){.http_status = 503, .text = "out of memory"};
        api_batch_fini(&batch);
        api_answer_failure(&output, &failure);
        return false;
    }
    f->is_running = true;
    f->now_us += 41000;
    return true;
}

static void expect_refusal(api_fixture *f, api_kind kind, const api_refusal *r) {
    if (api_fixture_ask(f, kind, r->body)) fail_msg("accepted: %s", r->body);
    assert_int_equal(f->status, 400);
    assert_string_equal(f->content_type, "application/json");
    if (strstr(api_fixture_body(f), r->text) == NULL)
        fail_msg("%s\n-> %s\nnot %s", r->body, api_fixture_body(f), r->text);
    if (kind == API_GENERATE) return;
    /* Nested for SDKs, flat for those who read SGLang's. */
    assert_memory_equal(api_fixture_body(f), "{\"error\":{\"message\":", 20);
    assert_non_null(strstr(api_fixture_body(f), "\"type\":\"BadRequestError\",\"param\":null,"
                                                "\"code\":400},\"object\":\"error\",\"message\""));
}

void api_fixture_expect_refusals(api_fixture *f, api_kind kind, const api_refusal *refusals,
                                 size_t count) {
    for (size_t i = 0; i < count; i++) {
        expect_refusal(f, kind, &refusals[i]);
    }
}

const proto_generation *api_fixture_asked(const api_fixture *f) {
    return &f->call.request->generation;
}

const api_request *api_fixture_item(const api_fixture *f, uint32_t item) {
    assert_true(item < f->call.batch.count);
    return f->call.items[item].request;
}

/* ---- rows ------------------------------------------------------------------------------------ */

void api_fixture_feed(api_fixture *f, uint32_t sample, const token_row *row) {
    uint64_t record[1024];
    size_t bytes = row_record_bytes(token_row_widths(row));
    assert_true(bytes <= sizeof(record));
    row_record_encode(row, (uint8_t *)record);
    const uint32_t item = f->call.samples[sample].item;
    const dispatch_rows rows = {.sample = sample - f->call.items[item].first_sample,
                                .records = (const uint8_t *)record,
                                .bytes = bytes,
                                .count = 1,
                                .cached_tokens = f->cached_tokens};
    api_call_on_rows(&f->call, item, &rows);
}

static const api_request *asked_of(const api_fixture *f, uint32_t sample) {
    return f->call.items[f->call.samples[sample].item].request;
}

void api_fixture_sample_row(api_fixture *f, uint32_t sample, int32_t token, float logprob) {
    const token_row row = {.token = token,
                           .has_logprob = asked_of(f, sample)->wants_logprob,
                           .token_logprob = logprob};
    api_fixture_feed(f, sample, &row);
}

void api_fixture_row(api_fixture *f, int32_t token, float logprob) {
    api_fixture_sample_row(f, 0, token, logprob);
}

void api_fixture_mask_row(api_fixture *f, int32_t token, float logprob, float selected,
                          const int32_t *ids, const float *logprobs, uint32_t count) {
    const token_row row = {.token = token,
                           .mask_mode = logprobs != NULL ? ROW_MASK_SUPPORT : ROW_MASK_SELECTED,
                           .has_logprob = asked_of(f, 0)->wants_logprob,
                           .token_logprob = logprob,
                           .selected_logprob = selected,
                           .support_count = count,
                           .support_ids = ids,
                           .support_logprobs = logprobs};
    api_fixture_feed(f, 0, &row);
}

void api_fixture_sample_text(api_fixture *f, uint32_t sample, const char *text) {
    for (; *text != 0; text++) {
        api_fixture_sample_row(f, sample, (unsigned char)*text, -1.0f);
    }
}

void api_fixture_text(api_fixture *f, const char *text) {
    api_fixture_sample_text(f, 0, text);
}

void api_fixture_prompt(api_fixture *f, uint32_t first, const float *entries, uint32_t count) {
    api_fixture_item_prompt(f, 0, first, entries, count);
}

void api_fixture_item_prompt(api_fixture *f, uint32_t item, uint32_t first, const float *entries,
                             uint32_t count) {
    const proto_generation *asked = &f->call.items[item].request->generation;
    const size_t bytes = proto_prompt_logprob_bytes(asked) * count;
    /* In a block of its own size, at no good alignment. */
    uint8_t *copy = malloc(bytes + 1);
    assert_non_null(copy);
    memcpy(copy + 1, entries, bytes);
    const dispatch_prompt_logprobs given = {
        .first_position = first, .count = count, .entries = copy + 1, .bytes = bytes};
    api_call_on_prompt_logprobs(&f->call, item, &given);
    free(copy);
}

void api_fixture_restart(api_fixture *f, uint32_t item) {
    api_call_on_restart(&f->call, item);
}

/* ---- ends ------------------------------------------------------------------------------------ */

static dispatch_end end_of(const api_fixture *f, const dispatch_end *end, uint32_t sample) {
    dispatch_end told = *end;
    told.cached_tokens = f->cached_tokens;
    told.retractions = f->retractions;
    if (told.status == BT_OK) told.rows_total = f->call.samples[sample].generation.count;
    return told;
}

static void end_sample(api_fixture *f, uint32_t sample, const dispatch_end *end) {
    const dispatch_end told = end_of(f, end, sample);
    const uint32_t item = f->call.samples[sample].item;
    api_call_on_sample_end(&f->call, item, sample - f->call.items[item].first_sample, &told);
}

static dispatch_end failure_of(bt_status status, int http_status, const char *text) {
    dispatch_end e = {.status = status, .http_status = http_status, .finish = PROTO_FINISH_ERROR};
    snprintf(e.text, sizeof(e.text), "%s", text);
    return e;
}

static const dispatch_end LENGTH = {.http_status = 200, .finish = PROTO_FINISH_LENGTH};

void api_fixture_sample_length(api_fixture *f, uint32_t sample) {
    end_sample(f, sample, &LENGTH);
}

void api_fixture_sample_stop(api_fixture *f, uint32_t sample, int32_t matched) {
    const dispatch_end e = {.http_status = 200, .finish = PROTO_FINISH_STOP, .matched_id = matched};
    end_sample(f, sample, &e);
}

void api_fixture_sample_fail(api_fixture *f, uint32_t sample, bt_status status, int http_status,
                             const char *text) {
    const dispatch_end e = failure_of(status, http_status, text);
    end_sample(f, sample, &e);
}

static dispatch_end abort_of(const char *text) {
    dispatch_end e = {.http_status = 200, .finish = PROTO_FINISH_ABORT};
    snprintf(e.text, sizeof(e.text), "%s", text);
    return e;
}

void api_fixture_sample_abort(api_fixture *f, uint32_t sample, const char *text) {
    const dispatch_end e = abort_of(text);
    end_sample(f, sample, &e);
}

/* As the dispatch does: every sample that has not ended, then the request. */
static void end_item(api_fixture *f, uint32_t item, const dispatch_end *end) {
    const uint32_t first = f->call.items[item].first_sample;
    for (uint32_t i = 0; i < f->call.items[item].sample_count; i++) {
        if (!f->call.samples[first + i].has_ended) end_sample(f, first + i, end);
    }
    const dispatch_end told = end_of(f, end, first);
    api_call_on_end(&f->call, item, &told);
}

static void end(api_fixture *f, const dispatch_end *end) {
    for (uint32_t i = 0; i < f->call.batch.count; i++) {
        if (!f->call.items[i].has_ended) end_item(f, i, end);
    }
}

void api_fixture_item_length(api_fixture *f, uint32_t item) {
    end_item(f, item, &LENGTH);
}

void api_fixture_length(api_fixture *f) {
    end(f, &LENGTH);
}

void api_fixture_end_aborted(api_fixture *f, const char *text) {
    const dispatch_end e = abort_of(text);
    end(f, &e);
}

void api_fixture_stop(api_fixture *f, int32_t matched) {
    const dispatch_end e = {.http_status = 200, .finish = PROTO_FINISH_STOP, .matched_id = matched};
    end(f, &e);
}

void api_fixture_fail(api_fixture *f, bt_status status, int http_status, const char *text) {
    const dispatch_end e = failure_of(status, http_status, text);
    end(f, &e);
}

void api_fixture_abort(api_fixture *f) {
    api_fixture_fail(f, BT_ERR_REQUEST_CANCELLED, 503, "x");
}

#ifdef BT_FAULT
void api_fixture_run_out_of_memory(api_fixture *f, api_kind kind, const char *body,
                                   void (*feed)(api_fixture *f)) {
    bool was_reached = true;
    assert_non_null(bt_text_reserve(&f->body, 1 << 20)); /* the fixture's own */
    for (uint64_t nth = 1; was_reached; nth++) {
        assert_true(nth < 1000);
        bt_fault_set(BT_FAULT_ALLOC, nth);
        const bool is_waiting = api_fixture_ask(f, kind, body);
        if (is_waiting) feed(f);
        if (is_waiting) api_fixture_length(f);
        was_reached = bt_fault_visits(BT_FAULT_ALLOC) >= nth;
        bt_fault_set(BT_FAULT_ALLOC, 0);
        assert_int_equal(f->end_count + f->cut_count, 1);
        if (f->cut_count == 0 && f->status != 200 && f->status != 503 && f->status != 500)
            fail_msg("%d %s", f->status, api_fixture_body(f));
        if (!was_reached) assert_int_equal(f->status, 200);
    }
}
#endif

const char *api_fixture_body(const api_fixture *f) {
    return f->body.bytes != NULL ? f->body.bytes : "";
}

const char *api_fixture_last_event(const api_fixture *f, unsigned back) {
    static char event[1 << 16];
    static const char DONE[] = "data: [DONE]\n\n";
    const char *text = api_fixture_body(f);
    size_t end_at = f->body.used;
    assert_true(end_at >= sizeof(DONE) - 1);
    if (f->end_count == 1) {
        end_at -= sizeof(DONE) - 1;
        assert_string_equal(text + end_at, DONE);
    }
    for (;; back--) {
        size_t start = end_at - 2;
        assert_memory_equal(text + start, "\n\n", 2);
        while (start > 0 && memcmp(text + start - 2, "\n\n", 2) != 0) {
            start--;
            if (start < 2) start = 0;
        }
        if (back == 0) {
            assert_memory_equal(text + start, "data: ", 6);
            assert_true(end_at - start < sizeof(event));
            memcpy(event, text + start + 6, end_at - start - 8);
            event[end_at - start - 8] = 0;
            return event;
        }
        end_at = start;
        assert_true(end_at > 0);
    }
}
