/* The fake network of the dispatch tests. */
#include "dispatch_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"

/* ---- ops ------------------------------------------------------------------------------------- */

static void on_send(void *context, dispatch_link link, proto_message *message) {
    fake_network *n = context;
    bt_error error;
    if (proto_message_check(message, &error) != BT_OK) fail_msg("%s", error.text);
    assert_true(n->sent_count < FAKE_SENT_MAX);
    assert_false(fake_is_closed(n, link));
    n->sent[n->sent_count].link = link;
    n->sent[n->sent_count].message = *message;
    n->sent_count++;
    message->payload = NULL;
    message->block = NULL;
}

static void on_close(void *context, dispatch_link link) {
    fake_network *n = context;
    assert_false(fake_is_closed(n, link));
    assert_true(n->closed_count < FAKE_SENT_MAX);
    n->closed[n->closed_count++] = link;
}

static uint32_t *standing_rows(fake_network *n, uint64_t request, uint32_t sample) {
    return &n->standing_rows[request % FAKE_ENDS_MAX][sample];
}

static void on_rows(void *context, uint64_t request, const dispatch_rows *rows) {
    fake_network *n = context;
    assert_null(fake_end_of(n, request, false));
    assert_int_equal((uintptr_t)rows->records % 4, 0);
    assert_null(fake_sample_end_of(n, request, rows->sample, false));
    n->sample_rows[rows->sample] += rows->count;
    if (rows->sample < FAKE_COUNTED_SAMPLES)
        *standing_rows(n, request, rows->sample) += rows->count;
    n->rows_request = request;
    n->rows_calls++;
    n->rows_count += rows->count;
    n->rows_cached_tokens = rows->cached_tokens;
    assert_true(n->rows_bytes + rows->bytes <= sizeof n->rows);
    memcpy(n->rows + n->rows_bytes, rows->records, rows->bytes);
    n->rows_bytes += rows->bytes;
}

static void on_restart(void *context, uint64_t request) {
    fake_network *n = context;
    uint32_t taken_back = 0;
    assert_null(fake_end_of(n, request, false));
    for (uint32_t i = 0; i < FAKE_COUNTED_SAMPLES; i++) {
        if (fake_sample_end_of(n, request, i, false) != NULL) continue;
        taken_back += *standing_rows(n, request, i);
        *standing_rows(n, request, i) = 0;
    }
    assert_true(taken_back > 0);
    n->restarts++;
}

static void on_prompt_logprobs(void *context, uint64_t request,
                               const dispatch_prompt_logprobs *logprobs) {
    fake_network *n = context;
    assert_null(fake_end_of(n, request, false));
    n->positions_calls++;
    n->positions_restarts += logprobs->first_position != n->next_position;
    n->next_position = logprobs->first_position + logprobs->count;
    assert_int_equal(logprobs->bytes, logprobs->count * sizeof(float));
    assert_true(n->next_position <= FAKE_VOCAB);
    memcpy(n->logprobs + logprobs->first_position, logprobs->entries, logprobs->bytes);
}

static void on_sample_end(void *context, uint64_t request, uint32_t sample,
                          const dispatch_end *end) {
    fake_network *n = context;
    assert_null(fake_end_of(n, request, false));
    assert_null(fake_sample_end_of(n, request, sample, false)); /* exactly once */
    assert_true(n->sample_end_count < FAKE_ENDS_MAX);
    if (sample < FAKE_COUNTED_SAMPLES) {
        assert_int_equal(end->rows_total, *standing_rows(n, request, sample));
        *standing_rows(n, request, sample) = 0;
    }
    n->sample_ends[n->sample_end_count++] =
        (fake_sample_end){.request = request, .sample = sample, .end = *end};
}

static void on_end(void *context, uint64_t request, const dispatch_end *end) {
    fake_network *n = context;
    assert_non_null(fake_sample_end_of(n, request, 0, false)); /* samples before the request */
    assert_null(fake_end_of(n, request, false));               /* exactly once */
    assert_true(n->end_count < FAKE_ENDS_MAX);
    n->ends[n->end_count].request = request;
    n->ends[n->end_count].end = *end;
    n->end_count++;
}

static void on_ready_changed(void *context, bool is_ready) {
    fake_network *n = context;
    assert_true(n->is_ready != is_ready);
    n->is_ready = is_ready;
    n->ready_changes++;
}

/* ---- life ------------------------------------------------------------------------------------ */

void fake_options(dispatch_options *out) {
    memset(out, 0, sizeof *out);
    out->incarnation = 0xabcdef0123u;
    (void)snprintf(out->host, sizeof out->host, "hostB");
    out->record.sampling_mask_max_tokens = FAKE_CAP;
    out->record.kv_checksum = RECORD_CHECKSUM_FULL + 1;
    memset(out->record.tokenizer_fingerprint, 't', 64);
    out->record.row_format = 1;
    out->heartbeat_ms = 100;
    out->dead_after_ms = 1000;
    out->requests_max = 1000;
    out->request_timeout_ms = 60000;
    out->reserve_timeout_ms = 2000;
    out->handoff_timeout_ms = 10000;
    out->no_worker_grace_ms = 5000;
    out->attempts_max = 3;
    out->seed = 1;
}

fake_network *fake_network_create(const dispatch_options *options) {
    fake_network *n = calloc(1, sizeof *n);
    dispatch_options standard;
    const dispatch_ops ops = {.send = on_send,
                              .close = on_close,
                              .on_rows = on_rows,
                              .on_prompt_logprobs = on_prompt_logprobs,
                              .on_restart = on_restart,
                              .on_sample_end = on_sample_end,
                              .on_end = on_end,
                              .on_ready_changed = on_ready_changed,
                              .context = n};
    assert_non_null(n);
    fake_options(&standard);
    n->now_us = 1000000;
    n->next_link = 1;
    assert_int_equal(dispatch_create(options == NULL ? &standard : options, &ops, &n->d), BT_OK);
    return n;
}

void fake_network_destroy(fake_network *n) {
    dispatch_destroy(n->d);
    fake_forget(n);
    free(n);
}

/* ---- workers --------------------------------------------------------------------------------- */

void fake_hello(const fake_worker *w, proto_message *out) {
    memset(out, 0, sizeof *out);
    out->kind = PROTO_HELLO;
    proto_hello *h = &out->hello;
    h->version_major = PROTO_VERSION_MAJOR;
    h->version_minor = PROTO_VERSION_MINOR;
    h->lane = PROTO_LANE_CONTROL;
    h->role = w->role;
    h->incarnation = w->incarnation;
    (void)snprintf(h->host, sizeof h->host, "hostA");
    h->pid = (uint32_t)w->incarnation;
    h->record.page_tokens = FAKE_PAGE_TOKENS;
    (void)snprintf(h->record.kv_dtype, sizeof h->record.kv_dtype, "bf16");
    (void)snprintf(h->record.kv_layout, sizeof h->record.kv_layout,
                   "layers=2 kv_heads=1 head_dim=8");
    (void)snprintf(h->record.numerics, sizeof h->record.numerics, "host/exact/1");
    memset(h->record.model_fingerprint, 'm', 64);
    memset(h->record.tokenizer_fingerprint, 't', 64);
    h->record.row_format = 1;
    (void)snprintf(h->model_name, sizeof h->model_name, "tiny");
    h->vocab_size = FAKE_VOCAB;
    h->context_tokens = 4096;
    h->eos_count = 1;
    h->eos_ids[0] = 2;
    h->tp_count = h->pp_count = h->dp_count = 1;
}

void fake_dial(fake_network *n, fake_worker *w, const proto_message *hello) {
    w->control = n->next_link++;
    dispatch_on_opened(n->d, w->control, n->now_us);
    fake_say(n, w->control, hello);
}

void fake_enter(fake_network *n, fake_worker *w, proto_role role, uint64_t incarnation) {
    proto_message hello, streams;
    *w = (fake_worker){.role = role, .incarnation = incarnation};
    fake_hello(w, &hello);
    fake_dial(n, w, &hello);
    w->welcome = fake_expect(n, w->control, PROTO_WELCOME).welcome;
    w->id = w->welcome.worker_id;
    memset(&streams, 0, sizeof streams);
    streams.kind = PROTO_HELLO;
    streams.hello = hello.hello;
    streams.hello.lane = PROTO_LANE_STREAMS;
    w->streams = n->next_link++;
    fake_say(n, w->streams, &streams);
}

void fake_ready(fake_network *n, fake_worker *w, uint32_t pages) {
    proto_message ready;
    memset(&ready, 0, sizeof ready);
    ready.kind = PROTO_READY;
    ready.ready.address_bytes = 4;
    memcpy(ready.ready.address, "addr", 4);
    ready.ready.pages_total = pages;
    ready.ready.page_tokens = FAKE_PAGE_TOKENS;
    ready.ready.rows_total = FAKE_ROWS;
    ready.ready.sequences_max = w->role == PROTO_ROLE_DECODE ? 32 : 0;
    ready.ready.step_tokens = w->role == PROTO_ROLE_PREFILL ? FAKE_STEP_TOKENS : 0;
    fake_say(n, w->control, &ready);
    proto_message peer;
    for (dispatch_link link = 1; link < n->next_link; link++) {
        while (fake_take(n, link, PROTO_PEER, &peer))
            assert_memory_equal(peer.peer.address, "addr", 4);
    }
}

void fake_join(fake_network *n, fake_worker *w, proto_role role, uint64_t incarnation) {
    fake_enter(n, w, role, incarnation);
    fake_ready(n, w, FAKE_PAGES);
}

void fake_pair(fake_network *n, const fake_worker *from, const fake_worker *about,
               bt_status status) {
    proto_message message;
    memset(&message, 0, sizeof message);
    message.kind = PROTO_PAIR_READY;
    message.pair.worker_id = about->id;
    message.pair.incarnation = about->incarnation;
    message.pair.status = status;
    fake_say(n, from->control, &message);
}

void fake_cluster(fake_network *n, fake_worker *prefill, fake_worker *decode) {
    fake_join(n, prefill, PROTO_ROLE_PREFILL, 11);
    fake_join(n, decode, PROTO_ROLE_DECODE, 22);
    fake_pair(n, decode, prefill, BT_OK);
    assert_true(n->is_ready);
}

/* ---- the wire -------------------------------------------------------------------------------- */

void fake_say(fake_network *n, dispatch_link link, const proto_message *message) {
    bt_error error;
    if (proto_message_check(message, &error) != BT_OK) fail_msg("%s", error.text);
    dispatch_on_message(n->d, link, message, n->now_us);
}

void fake_drop(fake_network *n, dispatch_link link) {
    assert_false(fake_is_closed(n, link));
    n->closed[n->closed_count++] = link;
    dispatch_on_closed(n->d, link, n->now_us);
}

void fake_tick(fake_network *n, uint64_t ms) {
    n->now_us += ms * 1000;
    dispatch_tick(n->d, n->now_us);
}

static void answer_pings(fake_network *n, const fake_worker *w) {
    proto_message ping, pong;
    while (fake_take(n, w->control, PROTO_PING, &ping)) {
        memset(&pong, 0, sizeof pong);
        pong.kind = PROTO_PONG;
        pong.ping.sequence = ping.ping.sequence;
        pong.ping.pages_free = FAKE_PAGES - w->pages_used;
        pong.ping.rows_free = FAKE_ROWS - w->rows_used;
        pong.ping.queued_tokens = w->queued_tokens;
        fake_say(n, w->control, &pong);
    }
}

void fake_live(fake_network *n, uint64_t ms, fake_worker *const *workers, uint32_t count) {
    for (uint64_t passed = 0; passed < ms; passed += 50) {
        fake_tick(n, 50);
        for (uint32_t i = 0; i < count; i++)
            answer_pings(n, workers[i]);
    }
}

bool fake_take(fake_network *n, dispatch_link link, proto_kind kind, proto_message *out) {
    for (uint32_t i = 0; i < n->sent_count; i++) {
        if (n->sent[i].link != link || n->sent[i].message.kind != kind) continue;
        *out = n->sent[i].message;
        n->sent_count--;
        memmove(&n->sent[i], &n->sent[i + 1], (n->sent_count - i) * sizeof n->sent[0]);
        return true;
    }
    return false;
}

proto_message fake_expect(fake_network *n, dispatch_link link, proto_kind kind) {
    proto_message out;
    if (!fake_take(n, link, kind, &out)) {
        fail_msg("no %s was sent on link %llu", proto_kind_name(kind), (unsigned long long)link);
    }
    proto_message_drop_payload(&out);
    return out;
}

uint32_t fake_count(const fake_network *n, dispatch_link link, proto_kind kind) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < n->sent_count; i++)
        count += n->sent[i].link == link && n->sent[i].message.kind == kind;
    return count;
}

void fake_forget(fake_network *n) {
    for (uint32_t i = 0; i < n->sent_count; i++)
        proto_message_drop_payload(&n->sent[i].message);
    n->sent_count = 0;
}

bool fake_is_closed(const fake_network *n, dispatch_link link) {
    for (uint32_t i = 0; i < n->closed_count; i++) {
        if (n->closed[i] == link) return true;
    }
    return false;
}

/* ---- requests -------------------------------------------------------------------------------- */

void fake_request(uint64_t id, uint32_t prompt_tokens, uint32_t max_new_tokens,
                  dispatch_request *out) {
    static int32_t prompt[1 << 18];
    assert_true(prompt_tokens <= sizeof prompt / sizeof prompt[0]);
    for (uint32_t i = 0; i < prompt_tokens; i++)
        prompt[i] = (int32_t)(i % FAKE_VOCAB);
    memset(out, 0, sizeof *out);
    out->id = id;
    out->words = prompt;
    out->prompt_tokens = prompt_tokens;
    out->generation = proto_generation_default();
    out->generation.max_new_tokens = max_new_tokens;
    out->generation.top_k = 1;
    out->generation.stop_id_count = 1;
    out->generation.stop_ids[0] = 2;
}

void fake_submit(fake_network *n, uint64_t id, uint32_t prompt_tokens, uint32_t max_new_tokens) {
    dispatch_request request;
    bt_error error;
    fake_request(id, prompt_tokens, max_new_tokens, &request);
    if (dispatch_submit(n->d, &request, n->now_us, &error) != BT_OK) fail_msg("%s", error.text);
}

const dispatch_end *fake_end_of(const fake_network *n, uint64_t id, bool must_exist) {
    for (uint32_t i = 0; i < n->end_count; i++) {
        if (n->ends[i].request == id) return &n->ends[i].end;
    }
    if (must_exist) fail_msg("request %llu has not ended", (unsigned long long)id);
    return NULL;
}

const dispatch_end *fake_sample_end_of(const fake_network *n, uint64_t id, uint32_t sample,
                                       bool must_exist) {
    for (uint32_t i = 0; i < n->sample_end_count; i++) {
        const fake_sample_end *e = &n->sample_ends[i];
        if (e->request == id && e->sample == sample) return &e->end;
    }
    if (must_exist) fail_msg("sample %u has not ended", sample);
    return NULL;
}

void fake_reserve_samples(fake_network *n, const fake_worker *decode, proto_attempt attempt,
                          uint32_t samples) {
    proto_message message;
    memset(&message, 0, sizeof message);
    message.kind = PROTO_RESERVATION;
    message.reservation.attempt = attempt;
    message.reservation.slot_count = samples;
    for (uint32_t i = 0; i < samples; i++)
        message.reservation.slots[i] = (proto_slot){.index = 3 + i, .generation = 7};
    fake_say(n, decode->control, &message);
}

void fake_logprobs(fake_network *n, const fake_worker *prefill, proto_attempt attempt,
                   uint32_t first, uint32_t count) {
    float entries[FAKE_VOCAB];
    proto_message message;
    memset(&message, 0, sizeof message);
    assert_true(count <= FAKE_VOCAB);
    for (uint32_t i = 0; i < count; i++)
        entries[i] = -(float)(first + i);
    message.kind = PROTO_PROMPT_LOGPROBS;
    message.prompt_logprobs.attempt = attempt;
    message.prompt_logprobs.first_position = first;
    message.prompt_logprobs.count = count;
    message.payload = entries;
    message.payload_bytes = count * sizeof(float);
    fake_say(n, prefill->streams, &message);
}

void fake_reserve_reply(fake_network *n, const fake_worker *decode, proto_attempt attempt,
                        bt_status status) {
    proto_message message;
    memset(&message, 0, sizeof message);
    message.kind = PROTO_RESERVATION;
    message.reservation.attempt = attempt;
    message.reservation.status = status;
    if (status == BT_OK) {
        message.reservation.slot_count = 1;
        message.reservation.slots[0] = (proto_slot){.index = 3, .generation = 7};
    }
    fake_say(n, decode->control, &message);
}

void fake_done(fake_network *n, const fake_worker *prefill, proto_attempt attempt,
               bt_status status) {
    proto_message message;
    memset(&message, 0, sizeof message);
    message.kind = PROTO_PREFILL_DONE;
    message.prefill_done.attempt = attempt;
    message.prefill_done.status = status;
    fake_say(n, prefill->control, &message);
}

void fake_chunk(fake_network *n, const fake_worker *decode, proto_attempt attempt, uint64_t offset,
                const void *bytes, size_t count, proto_finish finish, uint32_t rows_total) {
    static _Alignas(16) uint8_t payload[PROTO_FRAME_PAYLOAD_MAX];
    proto_message message;
    memset(&message, 0, sizeof message);
    message.kind = PROTO_CHUNK;
    message.chunk.attempt = attempt;
    message.chunk.sample = n->sample;
    message.chunk.offset = offset;
    message.chunk.finish = finish;
    message.chunk.cached_tokens = n->cached_tokens;
    message.chunk.matched_id = 2;
    message.chunk.rows_total = rows_total;
    assert_true(count <= sizeof payload);
    if (count > 0) memcpy(payload, bytes, count);
    message.payload = count > 0 ? payload : NULL;
    message.payload_bytes = count;
    fake_say(n, decode->streams, &message);
}

void fake_chunk_error(fake_network *n, const fake_worker *decode, proto_attempt attempt,
                      bt_status status, uint32_t rows_total, const char *text) {
    proto_message message;
    memset(&message, 0, sizeof message);
    message.kind = PROTO_CHUNK;
    message.chunk.attempt = attempt;
    message.chunk.sample = n->sample;
    message.chunk.offset =
        rows_total * row_record_bytes((row_widths){.mask_mode = 0, .support_count = 0});
    message.chunk.finish = PROTO_FINISH_ERROR;
    message.chunk.status = status;
    message.chunk.rows_total = rows_total;
    (void)snprintf(message.chunk.text, sizeof message.chunk.text, "%s", text);
    fake_say(n, decode->streams, &message);
}

proto_attempt fake_run(fake_network *n, const fake_worker *prefill, const fake_worker *decode) {
    const proto_message reserve = fake_expect(n, decode->control, PROTO_RESERVE);
    assert_int_equal(reserve.reserve.prefill_worker_id, prefill->id);
    assert_int_equal(reserve.reserve.prefill_incarnation, prefill->incarnation);
    fake_reserve_reply(n, decode, reserve.reserve.attempt, BT_OK);
    const proto_message run = fake_expect(n, prefill->streams, PROTO_RUN);
    assert_true(proto_attempt_equal(run.run.attempt, reserve.reserve.attempt));
    assert_int_equal(run.run.decode_worker_id, decode->id);
    assert_int_equal(run.run.decode_incarnation, decode->incarnation);
    assert_int_equal(run.run.slot_count, 1);
    assert_int_equal(run.run.slots[0].index, 3);
    assert_int_equal(run.run.slots[0].generation, 7);
    return run.run.attempt;
}

size_t fake_rows(uint8_t *out, uint32_t first, uint32_t count) {
    size_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        const token_row row = {.token = (int32_t)(first + i)};
        row_record_encode(&row, out + used);
        used += row_record_bytes((row_widths){.mask_mode = 0, .support_count = 0});
    }
    return used;
}

dispatch_view fake_look(const fake_network *n) {
    dispatch_view view;
    dispatch_look(n->d, &view);
    return view;
}

void fake_expect_rest(const fake_network *n) {
    const dispatch_view view = fake_look(n);
    dispatch_worker_view workers[8];
    assert_int_equal(view.requests_queued + view.requests_running, 0);
    const uint32_t count = dispatch_look_workers(n->d, workers, BT_ARRAY_COUNT(workers));
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(workers[i].attempts, 0);
        assert_int_equal(workers[i].queued_tokens, 0);
        assert_int_equal(workers[i].pages_free, workers[i].pages_total);
    }
}
