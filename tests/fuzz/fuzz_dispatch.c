/* A history for the dispatch, read from bytes: frames on links (raw ones that pass the codec, and
 * made-up ones that reach deeper), clients, time. Every request must end exactly once, nothing may
 * be sent on a closed link, and every message sent must pass the checks. */
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "proto/codec.h"
#include "proto/row_stream.h"
#include "router/dispatch.h"
#include "tests/fuzz/row_rules.h"

enum { LINKS = 8, REQUESTS = 16, ROUTER = 7, VOCAB = 100, CAP = 8 };

typedef struct history {
    const uint8_t *at, *end;
    dispatch *d;
    uint64_t now_us;
    uint64_t links[LINKS]; /* the id of each link now; a closed one gets a new id */
    uint64_t next_link;
    bool is_live[REQUESTS]; /* submitted and not ended; request i has id i + 1 */
    uint32_t samples[REQUESTS];
    uint8_t ended[REQUESTS];          /* a bit per sample */
    uint32_t next_position[REQUESTS]; /* of log-probabilities */
} history;

static uint8_t take(history *h) {
    return h->at < h->end ? *h->at++ : 0;
}

/* What request `which` asks for: masks with bit 1 of its index, bounded with bit 2 besides,
 * log-probabilities with bit 3. */
static proto_generation generation_of(uint32_t which) {
    return (proto_generation){.temperature = 1.0f,
                              .top_p = 1.0f,
                              .top_k = 1,
                              .repetition_penalty = 1.0f,
                              .mask_mode = which & 2 ? 1 + (which & 1) : 0,
                              .mask_bounded = (which & 6) == 6,
                              .wants_logprob = which >> 3,
                              .wants_prompt_logprobs = which >> 3};
}

static row_expectation expectation_of(uint64_t request) {
    const proto_generation g = generation_of((uint32_t)request - 1);
    return (row_expectation){.cap = CAP,
                             .mask_mode = g.mask_mode,
                             .mask_bounded = g.mask_bounded,
                             .has_logprob = g.wants_logprob,
                             .vocab_size = VOCAB};
}

/* ---- ops ------------------------------------------------------------------------------------- */

static int index_of(const history *h, dispatch_link link) {
    for (int i = 0; i < LINKS; i++) {
        if (h->links[i] == link) return i;
    }
    return -1;
}

static void on_send(void *context, dispatch_link link, proto_message *message) {
    const history *h = context;
    BT_ASSERT(index_of(h, link) >= 0);
    BT_ASSERT(proto_message_check(message, NULL) == BT_OK);
    proto_message_drop_payload(message);
}

static void on_close(void *context, dispatch_link link) {
    history *h = context;
    const int i = index_of(h, link);
    BT_ASSERT(i >= 0);
    h->links[i] = h->next_link++;
}

static void on_rows(void *context, uint64_t request, const dispatch_rows *rows) {
    const uint8_t *records = rows->records;
    size_t bytes = rows->bytes;
    const history *h = context;
    BT_ASSERT(h->is_live[request - 1]);
    BT_ASSERT(rows->sample < h->samples[request - 1]);
    BT_ASSERT((h->ended[request - 1] >> rows->sample & 1) == 0);
    for (uint32_t i = 0; i < rows->count; i++) {
        token_row row;
        size_t used = 0;
        const row_expectation expect = expectation_of(request);
        BT_ASSERT(row_record_decode(records, bytes, CAP, &row, &used) == BT_OK);
        BT_ASSERT(used > 0);
        BT_ASSERT(row_rules_hold(&expect, &row));
        records += used;
        bytes -= used;
    }
    BT_ASSERT(bytes == 0);
}

static void on_restart(void *context, uint64_t request) {
    const history *h = context;
    BT_ASSERT(h->is_live[request - 1]);
    BT_ASSERT(((request - 1) & 2) != 0);
}

static void on_prompt_logprobs(void *context, uint64_t request,
                               const dispatch_prompt_logprobs *logprobs) {
    history *h = context;
    BT_ASSERT(h->is_live[request - 1]);
    BT_ASSERT(logprobs->count > 0 && logprobs->bytes == logprobs->count * sizeof(float));
    const uint32_t first = logprobs->first_position;
    BT_ASSERT(first == 1 || first == h->next_position[request - 1]);
    h->next_position[request - 1] = first + logprobs->count;
}

static void on_sample_end(void *context, uint64_t request, uint32_t sample,
                          const dispatch_end *end) {
    history *h = context;
    BT_ASSERT(h->is_live[request - 1]);
    BT_ASSERT(sample < h->samples[request - 1]);
    BT_ASSERT((h->ended[request - 1] >> sample & 1) == 0);
    BT_ASSERT(end->status == BT_OK || end->text[0] != '\0');
    BT_ASSERT(end->cap_needed == 0 || end->status == BT_ERR_REQUEST_OVERFLOW);
    BT_ASSERT(end->cap_needed == 0 || (end->cap_needed > CAP && end->cap_needed <= VOCAB));
    h->ended[request - 1] |= (uint8_t)(1u << sample);
}

static void on_end(void *context, uint64_t request, const dispatch_end *end) {
    history *h = context;
    BT_ASSERT(h->is_live[request - 1]);
    BT_ASSERT(h->ended[request - 1] + 1u == 1u << h->samples[request - 1]);
    BT_ASSERT(end->status == BT_OK || end->text[0] != '\0');
    h->is_live[request - 1] = false;
}

static void on_ready_changed(void *context, bool is_ready) {
    (void)context;
    (void)is_ready;
}

/* ---- made-up messages ------------------------------------------------------------------------ */

static void say(history *h, int i, const proto_message *message) {
    if (proto_message_check(message, NULL) != BT_OK) return;
    dispatch_on_message(h->d, h->links[i], message, h->now_us);
}

static void say_hello(history *h, int i) {
    static proto_message m;
    const uint8_t flags = take(h);
    memset(&m, 0, sizeof m);
    m.kind = PROTO_HELLO;
    m.hello.version_major = PROTO_VERSION_MAJOR + (flags >> 7);
    m.hello.version_minor = flags & 16 ? PROTO_MINOR_OF_ABORT - 1 : PROTO_VERSION_MINOR;
    m.hello.lane = flags & 1 ? PROTO_LANE_STREAMS : PROTO_LANE_CONTROL;
    m.hello.role = flags & 2 ? PROTO_ROLE_DECODE : PROTO_ROLE_PREFILL;
    m.hello.incarnation = 1 + ((flags >> 1) & 7);
    (void)snprintf(m.hello.host, sizeof m.hello.host, "h");
    m.hello.record.page_tokens = flags & 64 ? 32 : 16;
    m.hello.record.kv_dtype[0] = m.hello.record.kv_layout[0] = m.hello.record.numerics[0] = 'x';
    m.hello.record.model_fingerprint[0] = 'x';
    m.hello.vocab_size = VOCAB;
    m.hello.context_tokens = 4096;
    m.hello.tp_count = m.hello.pp_count = m.hello.dp_count = 1;
    say(h, i, &m);
}

static void say_ready(history *h, int i) {
    static proto_message m;
    memset(&m, 0, sizeof m);
    m.kind = PROTO_READY;
    m.ready.address_bytes = 1;
    m.ready.pages_total = take(h);
    m.ready.page_tokens = 16;
    m.ready.rows_total = 4;
    m.ready.sequences_max = take(h);
    m.ready.step_tokens = take(h);
    say(h, i, &m);
}

static const bt_status statuses[] = {
    BT_OK,
    BT_OK,
    BT_ERR_REQUEST_FULL,
    BT_ERR_REQUEST_TOO_LARGE,
    BT_ERR_REQUEST_OVERFLOW,
    BT_ERR_REQUEST_CAPTURE,
    BT_ERR_REQUEST_CORRUPT,
    BT_ERR_PEER_GONE,
};

/* Records as a decode worker makes them, from the bytes at payload [count], in their place, and
 * what is less than a header as it is; the bytes they take. */
static size_t put_records(uint8_t *payload, size_t count, uint32_t has_logprob,
                          uint32_t mask_mode) {
    static uint8_t records[16 * 1024];
    const size_t rest = count % ROW_RECORD_HEADER_BYTES;
    size_t used = 0;
    for (size_t k = 0; k < count / ROW_RECORD_HEADER_BYTES; k++) {
        const uint8_t *from = payload + ROW_RECORD_HEADER_BYTES * k;
        int32_t ids[CAP + 1];
        float logprobs[CAP + 1];
        for (int32_t n = 0; n <= CAP; n++) {
            ids[n] = from[0] % VOCAB + n;
            logprobs[n] = -(float)n;
        }
        const uint32_t support = mask_mode == 0 ? 0 : 1 + from[1] % (CAP + 1);
        const token_row row = {.token = ids[0],
                               .mask_mode = mask_mode,
                               .has_logprob = has_logprob,
                               .support_count = support,
                               .support_size = support + (from[2] >= 0x80 ? from[3] : 0u),
                               .weights_version = from[4],
                               .support_ids = ids,
                               .support_logprobs = mask_mode == ROW_MASK_SUPPORT ? logprobs : NULL};
        row_record_encode(&row, records + used);
        used += row_record_bytes(token_row_widths(&row));
    }
    memcpy(records + used, payload + count - rest, rest);
    memcpy(payload, records, used + rest);
    return used + rest;
}

static void say_of_attempt(history *h, int i, proto_kind kind) {
    static proto_message m;
    static _Alignas(16) uint8_t payload[2048];
    const proto_attempt attempt = {.router_incarnation = ROUTER, .counter = take(h)};
    const bt_status status = statuses[take(h) % 8];
    memset(&m, 0, sizeof m);
    m.kind = kind;
    if (kind == PROTO_RESERVATION) {
        m.reservation.attempt = attempt;
        m.reservation.status = status;
        m.reservation.slot_count = status == BT_OK ? 1 + take(h) % 4 : 0;
        for (uint32_t k = 0; k < m.reservation.slot_count; k++)
            m.reservation.slots[k] = (proto_slot){.index = k, .generation = 1};
    } else if (kind == PROTO_PREFILL_DONE) {
        m.prefill_done.attempt = attempt;
        m.prefill_done.status = status;
        m.prefill_done.cap_needed = (uint32_t)attempt.counter;
    } else if (kind == PROTO_PROMPT_LOGPROBS) {
        m.prompt_logprobs.attempt = attempt;
        m.prompt_logprobs.first_position = take(h);
        m.prompt_logprobs.count = take(h) % 128;
        m.payload = payload;
        m.payload_bytes = m.prompt_logprobs.count * sizeof(float);
    } else {
        const uint8_t wanted = take(h), finish = take(h) % 5;
        size_t count = wanted;
        const uint8_t where = take(h);
        const uint32_t has_logprob = where >> 7;
        m.chunk.sample = where % 4;
        for (size_t k = 0; k < count; k++)
            payload[k] = take(h);
        if ((where & 4) == 0) count = put_records(payload, count, has_logprob, where >> 4 & 3);
        m.chunk.attempt = attempt;
        m.chunk.offset = take(h) * UINT64_C(4);
        m.chunk.cap_needed = where;
        m.chunk.finish = (proto_finish)finish;
        m.chunk.status = finish == PROTO_FINISH_ERROR ? status : BT_OK;
        m.chunk.rows_total = take(h);
        m.payload = count > 0 ? payload : NULL;
        m.payload_bytes = count;
    }
    say(h, i, &m);
}

static void say_small(history *h, int i, proto_kind kind) {
    static proto_message m;
    memset(&m, 0, sizeof m);
    m.kind = kind;
    if (kind == PROTO_PAIR_READY) {
        m.pair.worker_id = take(h);
        m.pair.incarnation = 1 + take(h) % 8;
        m.pair.status = statuses[take(h) % 8];
    } else if (kind == PROTO_PONG) {
        m.ping.sequence = take(h);
        m.ping.queued_tokens = take(h);
        m.ping.pages_free = take(h);
    }
    say(h, i, &m);
}

static void say_raw(history *h, int i) {
    static proto_message m;
    static _Alignas(16) uint8_t payload[256];
    const size_t wanted = take(h), payload_bytes = take(h);
    const size_t left = (size_t)(h->end - h->at);
    const size_t bytes = wanted < left ? wanted : left;
    const uint8_t *header = h->at;
    h->at += bytes;
    if (proto_decode(header, bytes, payload, payload_bytes, &m, NULL) != BT_OK) return;
    dispatch_on_message(h->d, h->links[i], &m, h->now_us);
}

/* ---- clients --------------------------------------------------------------------------------- */

static void submit(history *h) {
    static const int32_t prompt[256];
    bt_error error;
    const uint8_t which = take(h) % REQUESTS;
    dispatch_request request = {
        .id = which + 1u,
        .words = prompt,
        .prompt_tokens = take(h),
        .generation = generation_of(which),
        .is_credited = which & 1,
        .may_restart = (which & 2) != 0,
        .timeout_ms = take(h) * 100u,
    };
    request.generation.max_new_tokens = take(h);
    request.generation.samples = 1 + take(h) % 3;
    if (h->is_live[which]) return;
    h->samples[which] = request.generation.samples;
    h->ended[which] = 0;
    h->is_live[which] = true; /* it may end inside the call */
    if (dispatch_submit(h->d, &request, h->now_us, &error) != BT_OK) h->is_live[which] = false;
}

static void step(history *h) {
    const uint8_t op = take(h);
    const int i = op >> 5;
    switch (op & 15) {
    case 0: say_hello(h, i); return;
    case 1: say_ready(h, i); return;
    case 2: say_small(h, i, PROTO_PAIR_READY); return;
    case 3: say_small(h, i, PROTO_PONG); return;
    case 4: say_small(h, i, PROTO_CAPACITY); return;
    case 5: say_of_attempt(h, i, PROTO_RESERVATION); return;
    case 6: say_of_attempt(h, i, PROTO_PREFILL_DONE); return;
    case 7: say_of_attempt(h, i, PROTO_CHUNK); return;
    case 8: say_raw(h, i); return;
    case 9: submit(h); return;
    case 10: dispatch_cancel(h->d, take(h), h->now_us); return;
    case 11: dispatch_grant(h->d, take(h), take(h) % 4, take(h) * 1000u, h->now_us); return;
    case 12:
        h->now_us += take(h) * 10000u;
        dispatch_tick(h->d, h->now_us);
        return;
    case 13:
        dispatch_on_closed(h->d, h->links[i], h->now_us);
        h->links[i] = h->next_link++;
        return;
    case 14:
        if (op >> 4 & 1) {
            const uint8_t which = take(h), sample = take(h) % 5;
            dispatch_abort(h->d, which, sample < 4 ? sample : PROTO_ALL_SAMPLES, h->now_us);
            return;
        }
        dispatch_cancel_sample(h->d, take(h), take(h) % 4, h->now_us);
        return;
    case 15:
        if (op >> 4 & 1) {
            say_of_attempt(h, i, PROTO_PROMPT_LOGPROBS);
            return;
        }
        dispatch_on_opened(h->d, h->links[i], h->now_us);
        return;
    default: dispatch_on_opened(h->d, h->links[i], h->now_us); return;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static history h;
    dispatch_options options = {.incarnation = ROUTER,
                                .host = "r",
                                .record = {.sampling_mask_max_tokens = CAP, .kv_checksum = 1},
                                .requests_max = REQUESTS,
                                .request_timeout_ms = 30000,
                                .seed = 1};
    const dispatch_ops ops = {.send = on_send,
                              .close = on_close,
                              .on_rows = on_rows,
                              .on_prompt_logprobs = on_prompt_logprobs,
                              .on_restart = on_restart,
                              .on_sample_end = on_sample_end,
                              .on_end = on_end,
                              .on_ready_changed = on_ready_changed,
                              .context = &h};
    bt_log_set_level((bt_log_level)-1);
    h = (history){.at = data, .end = data + bytes, .now_us = 1, .next_link = 1};
    for (int i = 0; i < LINKS; i++)
        h.links[i] = h.next_link++;
    BT_ASSERT(dispatch_create(&options, &ops, &h.d) == BT_OK);
    while (h.at < h.end)
        step(&h);
    for (int i = 0; i < 40; i++) {
        h.now_us += 1000000;
        dispatch_tick(h.d, h.now_us);
    }
    for (int i = 0; i < REQUESTS; i++)
        BT_ASSERT(!h.is_live[i]);
    dispatch_destroy(h.d);
    return 0;
}
