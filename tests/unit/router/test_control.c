/* Flows through the control thread, with this thread in the place of an HTTP thread and scripted
 * workers behind real sockets: what arrives of each sample, in which order, and what goes back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/little_endian.h"
#include "proto/row.h"
#include "proto/row_stream.h"
#include "router/control_internal.h"
#include "router/reply_store.h"
#include "tests/support/test_bytes.h"
#include "tests/support/tiny_model.h"
#include "tests/unit/router/scripted_workers.h"

enum { WAIT_MS = 20000, PROMPT_MAX = 2000, SAMPLES_MAX = 4, CAP = 64, PENDING_MAX = 4096 };

typedef struct fixture {
    tokenizer *tokenizer;
    api_settings settings;
    bt_loop *loop;
    bt_loop_source *stop_source;
    int stop_fd;
    control *control;
    pthread_t thread;
    scripted_workers *workers;
} fixture;

/* What a flow has brought so far. */
typedef struct seen {
    control_flow flow;
    control_sample samples[SAMPLES_MAX];
    int32_t words[PROMPT_MAX];
    uint32_t rows[SAMPLES_MAX];
    uint64_t bytes[SAMPLES_MAX]; /* not yet granted */
    uint32_t next_position, logprob_batches;
    bool has_sample_ended[SAMPLES_MAX];
    uint32_t ended_samples, restarts;
    bool has_ended, is_freed;
} seen;

static fixture f;

/* ---- life ------------------------------------------------------------------------------------ */

static void on_stop(void *context) {
    (void)context;
    bt_loop_stop(f.loop);
}

static void *run_control(void *context) {
    (void)context;
    assert_int_equal(bt_loop_run(f.loop, control_step, f.control), BT_OK);
    return NULL;
}

static void load_tokenizer(void) {
    const tiny_model m = {.family = MODEL_FAMILY_QWEN3, .seed = 1};
    bt_error error;
    test_folder folder = test_folder_make();
    assert_int_equal(tiny_model_write_hf(&m, folder.path), BT_OK);
    if (tokenizer_load(folder.path, &f.tokenizer, &error) != BT_OK) fail_msg("%s", error.text);
    test_folder_remove(&folder);
}

static int set_up_with(uint64_t in_flight_bytes, uint32_t cap, uint32_t vocab_size) {
    bt_error error;
    memset(&f, 0, sizeof(f));
    load_tokenizer();
    f.settings = (api_settings){.tokenizer = f.tokenizer, .mask_max_tokens = cap};
    f.stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_int_equal(bt_loop_create(&f.loop), BT_OK);
    assert_int_equal(bt_loop_watch(f.loop, f.stop_fd, on_stop, NULL, &f.stop_source), BT_OK);
    control_options options = {.dispatch = {.incarnation = 5, .host = "router", .seed = 1},
                               .address = {.host = "127.0.0.1"},
                               .settings = &f.settings,
                               .threads = 1,
                               .flows_per_thread_max = 8,
                               .in_flight_bytes_max = in_flight_bytes};
    options.dispatch.record.sampling_mask_max_tokens = cap;
    options.dispatch.record.kv_checksum = RECORD_CHECKSUM_FULL + 1;
    options.dispatch.record.row_format = ROW_FORMAT_VERSION;
    if (control_create(&options, f.loop, &f.control, &error) != BT_OK) fail_msg("%s", error.text);
    f.workers = scripted_workers_start(control_port(f.control), vocab_size);
    assert_int_equal(pthread_create(&f.thread, NULL, run_control, NULL), 0);
    for (int turns = 0; !control_is_ready(f.control); turns++) { /* nothing announces it here */
        assert_true(turns < WAIT_MS / 10);
        (void)poll(NULL, 0, 10);
    }
    return 0;
}

static int set_up(void **state) {
    (void)state;
    return set_up_with(64 << 20, CAP, 0);
}

static int set_up_with_little_room(void **state) {
    (void)state;
    return set_up_with(3000, CAP, 0);
}

static int set_up_for_wide_rows(void **state) {
    (void)state;
    return set_up_with(64 << 20, SCRIPT_WIDEST, 2 * SCRIPT_WIDEST);
}

static int tear_down(void **state) {
    (void)state;
    assert_int_equal(eventfd_write(f.stop_fd, 1), 0);
    pthread_join(f.thread, NULL);
    scripted_workers_stop(f.workers);
    control_destroy(f.control);
    bt_loop_source_free(f.stop_source);
    bt_loop_destroy(f.loop);
    close(f.stop_fd);
    tokenizer_destroy(f.tokenizer);
    return 0;
}

/* ---- the HTTP thread ------------------------------------------------------------------------- */

static void on_free(control_flow *flow) {
    ((seen *)flow)->is_freed = true;
}

static seen *begin(const char *rid, uint32_t prompt_tokens, uint32_t max_new_tokens,
                   uint32_t samples) {
    seen *s = calloc(1, sizeof(*s));
    assert_non_null(s);
    for (uint32_t i = 0; i < prompt_tokens; i++) {
        s->words[i] = (int32_t)(i % SCRIPT_VOCAB);
    }
    s->flow = (control_flow){.rid = rid, .samples = s->samples, .on_free = on_free};
    s->flow.request = (dispatch_request){.words = s->words, .prompt_tokens = prompt_tokens};
    s->flow.request.generation = proto_generation_default();
    s->flow.request.generation.max_new_tokens = max_new_tokens;
    s->flow.request.generation.samples = samples;
    return s;
}

static void take_rows(seen *s, const control_batch *batch) {
    size_t at = 0;
    assert_false(s->has_sample_ended[batch->sample]);
    assert_int_equal((uintptr_t)batch->payload % 8, 0);
    while (at < batch->bytes) {
        token_row row;
        size_t used = 0;
        assert_int_equal(
            row_record_decode(batch->payload + at, batch->bytes - at, CAP, &row, &used), BT_OK);
        assert_true(used > 0);
        assert_int_equal(row.token, 97 + (s->rows[batch->sample] + batch->sample) % 26);
        s->rows[batch->sample]++;
        at += used;
    }
    s->bytes[batch->sample] += batch->bytes;
}

static void take_logprobs(seen *s, const control_batch *batch) {
    assert_int_equal(batch->bytes, batch->count * sizeof(float));
    if (s->logprob_batches++ == 0) s->next_position = batch->first_position;
    assert_int_equal(batch->first_position, s->next_position);
    for (uint32_t i = 0; i < batch->count; i++) {
        float logprob;
        memcpy(&logprob, batch->payload + i * sizeof(float), sizeof(float));
        assert_true(logprob == -(float)(batch->first_position + i));
    }
    s->next_position += batch->count;
}

/* The next batch of any flow; the flow. */
static seen *take_one(void) {
    control_batch *batch;
    while ((batch = control_next(f.control, 0)) == NULL) {
        assert_true(bt_ring_wait(control_ring(f.control, 0), WAIT_MS));
    }
    seen *s = (seen *)batch->flow;
    assert_false(s->has_ended);
    switch (batch->kind) {
    case CONTROL_ROWS: take_rows(s, batch); break;
    case CONTROL_PROMPT_LOGPROBS: take_logprobs(s, batch); break;
    case CONTROL_RESTART:
        for (uint32_t i = 0; i < SAMPLES_MAX; i++) {
            if (!s->has_sample_ended[i]) s->rows[i] = 0;
        }
        s->restarts++;
        break;
    case CONTROL_SAMPLE_END:
        assert_false(s->has_sample_ended[batch->sample]);
        assert_ptr_equal(batch->end, &s->samples[batch->sample].end);
        s->has_sample_ended[batch->sample] = true;
        s->ended_samples++;
        break;
    case CONTROL_END:
        assert_int_equal(s->ended_samples, s->flow.request.generation.samples);
        s->has_ended = true;
        break;
    }
    control_batch_free(f.control, batch);
    return s;
}

static void take_all(const seen *s) {
    while (!s->has_ended) {
        (void)take_one();
    }
}

static void release(seen *s) {
    control_release(f.control, &s->flow);
}

/* After the control thread is gone, so that nobody looks at them any more. */
static void finish(seen **all, int count) {
    (void)tear_down(NULL);
    for (int i = 0; i < count; i++) {
        assert_true(all[i]->is_freed);
        free(all[i]);
    }
    (void)set_up(NULL);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void samples_arrive_with_their_ends(void **state) {
    (void)state;
    seen *s = begin("a", 40, 100, 3);
    control_submit(f.control, &s->flow);
    take_all(s);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(s->rows[i], 100);
        assert_int_equal(s->samples[i].end.status, BT_OK);
        assert_int_equal(s->samples[i].end.rows_total, 100);
    }
    assert_int_equal(s->flow.end.status, BT_OK);
    assert_int_equal(s->flow.end.rows_total, 300);
    release(s);
    finish(&s, 1);
}

static void one_sample_may_fail(void **state) {
    (void)state;
    seen *s = begin("a", 40, 100, 3);
    s->flow.request.generation.seed = SCRIPT_OVERFLOWS_ONE;
    control_submit(f.control, &s->flow);
    take_all(s);
    assert_int_equal(s->samples[1].end.http_status, 400);
    assert_int_equal(s->rows[1], 0);
    assert_int_equal(s->rows[0] + s->rows[2], 200);
    assert_int_equal(s->flow.end.status, BT_OK);
    release(s);
    finish(&s, 1);
}

/* Behind the rows that are void, before those that come again. */
static void a_restart_is_told_in_order(void **state) {
    (void)state;
    seen *s = begin("a", 40, 100, 3);
    s->flow.request.generation.seed = SCRIPT_STUMBLES;
    s->flow.request.may_restart = true;
    control_submit(f.control, &s->flow);
    take_all(s);
    assert_int_equal(s->restarts, 1);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(s->rows[i], 100);
        assert_int_equal(s->samples[i].end.rows_total, 100);
    }
    assert_int_equal(s->flow.end.status, BT_OK);
    assert_int_equal(s->flow.end.attempts, 2);
    assert_int_equal(budget_used(&f.control->in_flight), 0);
    release(s);
    finish(&s, 1);
}

/* More rows than a window holds: each sample goes on when it is granted, and only then. */
static void credit_goes_to_its_sample(void **state) {
    (void)state;
    enum { TOKENS = 60000 };
    seen *s = begin("a", 40, TOKENS, 2);
    s->flow.request.is_credited = true;
    control_submit(f.control, &s->flow);
    while (!s->has_sample_ended[0]) {
        (void)take_one();
        if (s->bytes[0] == 0) continue;
        control_grant(f.control, &s->flow, 0, s->bytes[0]);
        s->bytes[0] = 0;
    }
    assert_int_equal(s->rows[0], TOKENS);
    assert_false(s->has_sample_ended[1]);
    assert_true(s->rows[1] < TOKENS);
    const uint64_t credits = scripted_workers_counts(f.workers).credits;
    assert_true(credits > 0);
    while (!s->has_ended) {
        control_grant(f.control, &s->flow, 1, s->bytes[1]);
        s->bytes[1] = 0;
        (void)take_one();
    }
    assert_int_equal(s->rows[1], TOKENS);
    assert_true(scripted_workers_counts(f.workers).credits > credits);
    release(s);
    finish(&s, 1);
}

static void one_sample_may_be_cancelled(void **state) {
    (void)state;
    enum { TOKENS = 60000 };
    seen *s = begin("a", 40, TOKENS, 2);
    s->flow.request.is_credited = true;
    control_submit(f.control, &s->flow);
    while (s->rows[0] == 0 || s->rows[1] == 0) {
        (void)take_one();
    }
    control_cancel_sample(f.control, &s->flow, 0);
    control_cancel_sample(f.control, &s->flow, 0); /* once is enough */
    while (!s->has_ended) {
        control_grant(f.control, &s->flow, 1, s->bytes[1]);
        s->bytes[1] = 0;
        (void)take_one();
    }
    assert_int_equal(s->samples[0].end.status, BT_ERR_REQUEST_CANCELLED);
    assert_true(s->rows[0] < TOKENS);
    assert_int_equal(s->samples[1].end.status, BT_OK);
    assert_int_equal(s->rows[1], TOKENS);
    assert_int_equal(s->flow.end.status, BT_OK);
    /* The cancel may still be on its way; it came once when it came. */
    for (int turns = 0; scripted_workers_counts(f.workers).cancelled_samples == 0; turns++) {
        assert_true(turns < WAIT_MS / 10);
        (void)poll(NULL, 0, 10);
    }
    assert_int_equal(scripted_workers_counts(f.workers).cancelled_samples, 1);
    release(s);
    finish(&s, 1);
}

static void ask_abort(const char *rid, bool is_prefix, bool is_all) {
    api_abort abort = {.is_prefix = is_prefix, .is_all = is_all};
    snprintf(abort.rid, sizeof(abort.rid), "%s", rid);
    assert_true(control_abort(f.control, 0, &abort));
}

/* A request that holds rows until it is aborted; it came when `mark` was the abort_mark. */
static seen *hold(const char *rid, uint32_t samples, uint64_t mark) {
    seen *s = begin(rid, 40, 100, samples);
    s->flow.request.generation.seed = SCRIPT_HOLDS;
    s->flow.abort_mark = mark;
    control_submit(f.control, &s->flow);
    return s;
}

static void take_rows_of(const seen *s, uint32_t samples) {
    for (uint32_t i = 0; i < samples; i++) {
        while (s->rows[i] < 2) {
            (void)take_one();
        }
    }
}

static void expect_abort(const seen *s, uint32_t samples, const char *text) {
    for (uint32_t i = 0; i < samples; i++) {
        assert_int_equal(s->samples[i].end.status, BT_OK);
        assert_int_equal(s->samples[i].end.finish, PROTO_FINISH_ABORT);
        assert_string_equal(s->samples[i].end.text, text);
        assert_int_equal(s->samples[i].end.rows_total, s->rows[i]);
    }
}

static void aborts_bring_what_decode_holds(void **state) {
    (void)state;
    seen *all[3];
    all[0] = hold("x_1", 1, 0);
    all[1] = hold("x", 3, 0);
    all[2] = hold("y", 1, 0);
    for (int i = 0; i < 3; i++) {
        take_rows_of(all[i], i == 1 ? 3 : 1);
    }
    ask_abort("x_1", false, false); /* both a request's and a sample's name */
    take_all(all[0]);
    expect_abort(all[0], 1, "Aborted");
    assert_int_equal(all[0]->rows[0], 2 + SCRIPT_HELD);
    while (!all[1]->has_sample_ended[1]) {
        (void)take_one();
    }
    assert_false(all[1]->has_sample_ended[0] || all[1]->has_sample_ended[2]);
    ask_abort("", true, false);
    ask_abort("x_", false, false);
    ask_abort("z", true, false);
    ask_abort("x", false, false);
    take_all(all[1]);
    expect_abort(all[1], 3, "Aborted");
    assert_false(all[2]->has_ended);
    ask_abort("", false, true);
    take_all(all[2]);
    expect_abort(all[2], 1, "Aborted");
    assert_int_equal(scripted_workers_counts(f.workers).aborted_samples, 5);
    for (int i = 0; i < 3; i++) {
        release(all[i]);
    }
    finish(all, 3);
}

/* By the name of a list, and by prefixes, more than one request. */
static void lists_are_aborted_by_their_name(void **state) {
    (void)state;
    seen *all[4];
    static const char *const RIDS[] = {"L_0", "L_1", "L", "La"};
    for (int i = 0; i < 4; i++) {
        all[i] = begin(RIDS[i], 40, 100, 1);
        all[i]->flow.request.generation.seed = SCRIPT_HOLDS;
        all[i]->flow.list_rid_bytes = i < 2 ? 1 : 0;
        control_submit(f.control, &all[i]->flow);
    }
    ask_abort("L", false, false);
    for (int i = 0; i < 3; i++) {
        take_all(all[i]);
        assert_int_equal(all[i]->flow.end.finish, PROTO_FINISH_ABORT);
    }
    assert_false(all[3]->has_ended);
    ask_abort("L", true, false);
    take_all(all[3]);
    assert_int_equal(all[3]->flow.end.finish, PROTO_FINISH_ABORT);
    for (int i = 0; i < 4; i++) {
        release(all[i]);
    }
    finish(all, 4);
}

/* What came before an abort is hit, also when it is submitted later; what came behind it is not,
 * also when it is submitted earlier. */
static void aborts_hit_what_came_before_them(void **state) {
    (void)state;
    seen *all[4];
    const uint64_t before = control_abort_mark(f.control);
    all[0] = hold("a", 1, before + 1); /* behind the next abort */
    ask_abort("a", false, false);
    assert_int_equal(control_abort_mark(f.control), before + 1);
    all[1] = hold("b", 1, before + 1);
    all[2] = hold("other", 1, before);
    all[3] = begin("c", 40, 100, 2); /* was being read meanwhile */
    all[3]->flow.abort_mark = before + 1;
    ask_abort("c_1", false, false);
    ask_abort("c_0", false, false);
    control_submit(f.control, &all[3]->flow);
    take_all(all[3]);
    expect_abort(all[3], 2, "Abort in waiting queue");
    take_rows_of(all[0], 1);
    take_rows_of(all[1], 1);
    take_rows_of(all[2], 1);
    assert_false(all[0]->has_ended || all[1]->has_ended || all[2]->has_ended);
    ask_abort("", false, true);
    for (int i = 0; i < 3; i++) {
        take_all(all[i]);
        expect_abort(all[i], 1, "Aborted");
    }
    for (int i = 0; i < 4; i++) {
        release(all[i]);
    }
    finish(all, 4);
}

/* Those that wait are bounded, and nothing is left of any of them. */
static void many_aborts(void **state) {
    (void)state;
    const api_abort abort = {.rid = "nobody"};
    uint32_t refused = 0;
    for (int i = 0; i < 5000; i++) {
        refused += !control_abort(f.control, 0, &abort);
    }
    assert_true(refused < 5000);
    seen *s = begin("nobody", 40, 5, 1);
    s->flow.abort_mark = control_abort_mark(f.control);
    control_submit(f.control, &s->flow);
    take_all(s);
    assert_int_equal(s->rows[0], 5);
    release(s);
    finish(&s, 1);
}

static void prompt_logprobs_come_alone_and_with_rows(void **state) {
    (void)state;
    seen *all[2];
    for (uint32_t i = 0; i < 2; i++) {
        seen *s = all[i] = begin(i == 0 ? "a" : "b", 1300, i * 10, 1);
        s->flow.request.generation.wants_logprob = 1;
        s->flow.request.generation.wants_prompt_logprobs = 1;
        s->flow.request.generation.prompt_logprobs_from = 100;
        control_submit(f.control, &s->flow);
    }
    for (uint32_t i = 0; i < 2; i++) {
        take_all(all[i]);
        assert_int_equal(all[i]->flow.end.status, BT_OK);
        assert_int_equal(all[i]->rows[0], i * 10);
        assert_int_equal(all[i]->next_position, 1300);
        assert_int_equal(all[i]->logprob_batches, 3); /* 1199 of them, 500 in a frame */
        release(all[i]);
    }
    finish(all, 2);
}

static void what_is_refused_ends_every_sample(void **state) {
    (void)state;
    seen *all[3] = {begin("same", 40, 4, 2), begin("same", 40, 4, 2), begin("bad", 40, 4, 2)};
    all[0]->flow.request.generation.seed = SCRIPT_HANGS;
    all[2]->words[3] = -1;
    for (int i = 0; i < 3; i++)
        control_submit(f.control, &all[i]->flow);
    take_all(all[1]);
    assert_int_equal(all[1]->flow.end.status, BT_ERR_REQUEST_DUPLICATE);
    assert_int_equal(all[1]->samples[1].end.status, BT_ERR_REQUEST_DUPLICATE);
    assert_int_equal(all[1]->samples[1].end.http_status, 400);
    take_all(all[2]);
    assert_int_equal(all[2]->samples[0].end.status, BT_ERR_REQUEST_INVALID);
    assert_string_equal(all[2]->flow.end.text, "token id -1 is outside the vocabulary");
    control_cancel(f.control, &all[0]->flow);
    take_all(all[0]);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(all[0]->samples[i].end.status, BT_ERR_REQUEST_CANCELLED);
    for (int i = 0; i < 3; i++)
        release(all[i]);
    finish(all, 3);
}

/* Bytes on their way to HTTP threads are bounded, those of a prompt's log-probabilities too. */
static void without_room_every_sample_ends_for_that_reason(void **state) {
    (void)state;
    seen *all[2] = {begin("rows", 40, 1000, 3), begin("scores", 1300, 0, 1)};
    all[1]->flow.request.generation.wants_logprob = 1;
    all[1]->flow.request.generation.wants_prompt_logprobs = 1;
    all[1]->flow.request.generation.top_logprobs = 1; /* one frame is more than there is room for */
    for (int i = 0; i < 2; i++) {
        control_submit(f.control, &all[i]->flow);
        take_all(all[i]);
        assert_int_equal(all[i]->flow.end.status, BT_ERR_REQUEST_FULL);
        assert_int_equal(all[i]->flow.end.http_status, 503);
        uint32_t full = 0;
        for (uint32_t k = 0; k < all[i]->flow.request.generation.samples; k++) {
            full += all[i]->samples[k].end.status == BT_ERR_REQUEST_FULL;
            assert_true(all[i]->samples[k].end.status == BT_OK ||
                        strcmp(all[i]->samples[k].end.text, all[i]->flow.end.text) == 0);
        }
        assert_true(full > 0);
        release(all[i]);
    }
    /* It was given back: what fits goes through. */
    seen *small = begin("small", 40, 10, 2);
    control_submit(f.control, &small->flow);
    take_all(small);
    assert_int_equal(small->flow.end.status, BT_OK);
    release(small);
    seen *every[] = {all[0], all[1], small};
    finish(every, 3);
}

/* Rows of a reader who takes nothing, kept as an HTTP thread keeps them. */
static void store_next(reply_store *stores, seen *const *all, uint32_t count) {
    control_batch *batch;
    while ((batch = control_next(f.control, 0)) == NULL)
        assert_true(bt_ring_wait(control_ring(f.control, 0), WAIT_MS));
    assert_int_equal(batch->kind, CONTROL_ROWS);
    for (uint32_t i = 0; i < count; i++) {
        if (&all[i]->flow != batch->flow) continue;
        for (size_t at = 0; at < batch->bytes;) {
            const size_t bytes = bt_load_le32(batch->payload + at);
            assert_int_equal(
                reply_store_append(&stores[i], batch->payload + at, bytes, batch->block), BT_OK);
            at += bytes;
        }
        all[i]->bytes[0] += batch->bytes;
    }
    control_batch_free(f.control, batch);
}

/* Memory of a request is bounded: wide rows stop coming when the window is used up, and what is
 * held then is the window and little more, in replies and in the pool; and all of it comes back. */
static void stalled_readers_of_wide_rows_hold_their_windows(void **state) {
    (void)state;
    enum { FLOWS = 4 };
    const size_t row = row_record_bytes(
        (row_widths){.mask_mode = ROW_MASK_SUPPORT, .support_count = SCRIPT_WIDEST});
    reply_limits limits = {.spill_path = "/tmp"};
    reply_spill spill;
    reply_store stores[FLOWS];
    seen *all[FLOWS];
    budget_init(&limits.memory, 1 << 30);
    budget_init(&limits.spill, 0);
    reply_spill_init(&spill, &limits);
    for (uint32_t i = 0; i < FLOWS; i++) {
        static const char *const rids[FLOWS] = {"a", "b", "c", "d"};
        seen *s = all[i] = begin(rids[i], 40, 1000, 1);
        reply_store_init(&stores[i], &spill);
        s->flow.request.is_credited = true;
        s->flow.request.generation.seed = SCRIPT_WIDE;
        s->flow.request.generation.top_k = SCRIPT_WIDEST;
        s->flow.request.generation.mask_mode = ROW_MASK_SUPPORT;
        control_submit(f.control, &s->flow);
    }
    const size_t window = (1 << 20) + PROTO_FRAME_PAYLOAD_MAX / 4; /* the default, and a step */
    for (uint32_t i = 0; i < FLOWS; i++) {
        while (all[i]->bytes[0] + row <= window)
            store_next(stores, all, FLOWS);
    }
    assert_null(control_next(f.control, 0));
    assert_true(scripted_workers_counts(f.workers).row_bytes <= FLOWS * window);
    /* Blocks are an eighth larger than what is in them; links may have a frame's besides. */
    const size_t bound = FLOWS * (window + window / 8);
    assert_true(budget_used(&limits.memory) >= FLOWS * (window - row));
    assert_true(budget_used(&limits.memory) <= bound);
    assert_true(bt_block_pool_used_bytes(f.control->blocks) <=
                bound + 8 * (PROTO_FRAME_PAYLOAD_MAX / 4));
    assert_int_equal(budget_used(&f.control->in_flight), 0);
    for (uint32_t i = 0; i < FLOWS; i++) {
        control_cancel(f.control, &all[i]->flow);
        take_all(all[i]);
        release(all[i]);
        reply_store_fini(&stores[i]);
    }
    assert_int_equal(budget_used(&limits.memory), 0);
    assert_true(bt_block_pool_used_bytes(f.control->blocks) <= 8 * (PROTO_FRAME_PAYLOAD_MAX / 4));
    finish(all, FLOWS);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(samples_arrive_with_their_ends),
        TEST(one_sample_may_fail),
        TEST(a_restart_is_told_in_order),
        TEST(credit_goes_to_its_sample),
        TEST(one_sample_may_be_cancelled),
        TEST(aborts_bring_what_decode_holds),
        TEST(lists_are_aborted_by_their_name),
        TEST(aborts_hit_what_came_before_them),
        TEST(many_aborts),
        TEST(prompt_logprobs_come_alone_and_with_rows),
        TEST(what_is_refused_ends_every_sample),
        cmocka_unit_test_setup_teardown(without_room_every_sample_ends_for_that_reason,
                                        set_up_with_little_room, tear_down),
        cmocka_unit_test_setup_teardown(stalled_readers_of_wide_rows_hold_their_windows,
                                        set_up_for_wide_rows, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
