/* Every kind survives the way through the codec; every field that is out of range, too long or
 * missing is refused; damaged bytes are refused or give a message that passes the checks. */
#include "proto/codec.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "baton.pb-c.h"
#include "samples.h"

static int32_t prompt[4] = {1, 2, 3, 4};
static uint8_t header[PROTO_FRAME_HEADER_MAX];

static void assert_same(const proto_message *a, const proto_message *b) {
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->payload_bytes, b->payload_bytes);
    assert_ptr_equal(a->payload, b->payload);
    assert_memory_equal(a, b, offsetof(proto_message, payload));
}

static void every_kind_survives(void **state) {
    (void)state;
    for (int kind = 1; kind <= SAMPLE_KINDS; kind++) {
        proto_message sent, got;
        bt_error error = {0};
        size_t bytes = 0;
        sample_message((proto_kind)kind, prompt, sizeof prompt, &sent);
        assert_int_equal(proto_encode(&sent, header, sizeof header, &bytes, &error), BT_OK);
        assert_int_equal(
            proto_decode(header, bytes, sent.payload, sent.payload_bytes, &got, &error), BT_OK);
        assert_same(&sent, &got);
        assert_string_not_equal(proto_kind_name((proto_kind)kind), "unknown");
    }
    assert_string_equal(proto_kind_name((proto_kind)(SAMPLE_KINDS + 1)), "unknown");
}

static void a_short_buffer_is_refused(void **state) {
    (void)state;
    for (int kind = 1; kind <= SAMPLE_KINDS; kind++) {
        proto_message sent;
        size_t bytes = 0, ignored = 0;
        sample_message((proto_kind)kind, prompt, sizeof prompt, &sent);
        assert_int_equal(proto_encode(&sent, header, sizeof header, &bytes, NULL), BT_OK);
        assert_int_equal(proto_encode(&sent, header, bytes - 1, &ignored, NULL),
                         BT_ERR_CALLER_LIMIT);
    }
}

/* A bump allocator: mutants swap pointers, so nothing is freed one by one. */
static struct {
    size_t used;
    _Alignas(16) uint8_t memory[256 * 1024];
} arena;

static void *arena_allocate(void *context, size_t bytes) {
    (void)context;
    void *block = arena.memory + arena.used;
    arena.used += (bytes + 15u) & ~(size_t)15u;
    assert_true(arena.used <= sizeof arena.memory);
    return block;
}

static void arena_free(void *context, void *block) {
    (void)context;
    (void)block;
}

static char long_text[PROTO_TEXT_MAX + 1];
static int32_t long_ids[PROTO_STOP_IDS_MAX + 1];
static uint8_t long_bytes[PROTO_ADDRESS_MAX + 1];
static char control_text[] = "line\nfeed", broken_text[] = "\xc3(", overlong_text[] = "\xc0\xaf",
            surrogate_text[] = "\xed\xa0\x80", cut_text[] = "ab\xe2\x82", none[] = "";

#define CASE(number, statement)                                                                    \
    case number: statement; return true

static bool break_text(int n, char **text) {
    switch (n) {
        CASE(0, *text = long_text);
        CASE(1, *text = control_text);
        CASE(2, *text = broken_text);
        CASE(3, *text = overlong_text);
        CASE(4, *text = surrogate_text);
        CASE(5, *text = cut_text);
    }
    return false;
}

static bool break_attempt(int n, Baton__Attempt **a) {
    switch (n) {
        CASE(0, *a = NULL);
        CASE(1, (*a)->router_incarnation = 0);
        CASE(2, (*a)->counter = 0);
    }
    return false;
}

enum { GENERATION_CASES = 30 };

static bool break_generation(int n, Baton__Generation **owner) {
    Baton__Generation *g = *owner;
    switch (n) {
        CASE(0, *owner = NULL);
        CASE(1, g->max_new_tokens = PROTO_TOKENS_MAX + 1);
        CASE(2, g->temperature = 0.0f);
        CASE(3, g->temperature = -1.0f);
        CASE(4, g->temperature = NAN);
        CASE(5, g->temperature = INFINITY);
        CASE(6, g->top_p = 0.0f);
        CASE(7, g->top_p = 1.5f);
        CASE(8, g->top_p = NAN);
        CASE(9, g->mask_mode = 3);
        CASE(10, g->wants_logprob = 2);
        CASE(11, g->vocab_limit = PROTO_VOCAB_MAX + 1);
        CASE(12, (g->stop_ids = long_ids, g->n_stop_ids = PROTO_STOP_IDS_MAX + 1));
        CASE(13, g->stop_ids[5] = -1);
        CASE(14, g->stop_ids[63] = PROTO_VOCAB_MAX);
        CASE(15, g->mask_bounded = 2);
        CASE(16, g->mask_mode = 0); /* nothing is left to be bounded */
        CASE(17, g->min_new_tokens = g->max_new_tokens + 1);
        CASE(18, g->samples = 0);
        CASE(19, g->samples = PROTO_SAMPLES_MAX + 1);
        CASE(20, g->min_p = 1.5f);
        CASE(21, g->filter = 2);
        CASE(22, g->frequency_penalty = -2.5f);
        CASE(23, g->presence_penalty = NAN);
        CASE(24, g->repetition_penalty = 0.0f);
        CASE(25, g->top_logprobs = PROTO_TOP_LOGPROBS_MAX + 1);
        CASE(26, g->logprob_id_count = PROTO_LOGPROB_IDS_MAX + 1);
        CASE(27, g->bias_count = PROTO_BIASES_MAX + 1);
        CASE(28, g->wants_prompt_logprobs = 2);
        CASE(29, g->wants_logprob = 0); /* which others need */
    }
    return false;
}

static bool break_record(int n, Baton__Record *r) {
    if (n < 6) return break_text(n, &r->kv_dtype);
    switch (n) {
        CASE(6, r->sampling_mask_max_tokens = PROTO_VOCAB_MAX + 1);
        CASE(7, r->kv_checksum = 4);
        CASE(8, r->page_tokens = 4097);
        CASE(9, r->kv_layout = long_text);
        CASE(10, r->numerics = control_text);
        CASE(11, r->model_fingerprint = long_text);
        CASE(12, r->tokenizer_fingerprint = broken_text);
    }
    return false;
}

static bool break_hello(int n, Baton__Hello *h) {
    if (n < 13) return break_record(n, h->record);
    if (n < 19) return break_text(n - 13, &h->host);
    if (n < 25) return break_text(n - 19, &h->model_name);
    switch (n - 25) {
        CASE(0, h->lane = (Baton__Lane)0);
        CASE(1, h->lane = (Baton__Lane)3);
        CASE(2, h->role = (Baton__Role)-1);
        CASE(3, h->incarnation = 0);
        CASE(4, h->host = none);
        CASE(5, h->pins = 1u << RECORD_FIELD_COUNT);
        CASE(6, h->vocab_size = 0);
        CASE(7, h->vocab_size = PROTO_VOCAB_MAX + 1);
        CASE(8, h->context_tokens = 0);
        CASE(9, (h->eos_ids = long_ids, h->n_eos_ids = PROTO_EOS_IDS_MAX + 1));
        CASE(10, h->eos_ids[2] = -1);
        CASE(11, h->eos_ids[2] = (int32_t)h->vocab_size);
        CASE(12, h->tp_count = 0);
        CASE(13, h->tp_rank = h->tp_count);
        CASE(14, h->pp_count = 0);
        CASE(15, h->pp_rank = h->pp_count);
        CASE(16, h->dp_count = 0);
        CASE(17, h->dp_rank = UINT32_MAX);
    }
    return false;
}

static bool break_welcome(int n, Baton__Welcome *w) {
    if (n < 6) return break_text(n, &w->router_host);
    switch (n - 6) {
        CASE(0, w->router_incarnation = 0);
        CASE(1, w->router_host = none);
        CASE(2, w->worker_id = 0);
        CASE(3, w->heartbeat_ms = 0);
        CASE(4, w->dead_after_ms = w->heartbeat_ms);
        CASE(5, w->record = NULL);
        CASE(6, w->record->sampling_mask_max_tokens = 0);
        CASE(7, w->record->kv_checksum = 0);
        CASE(8, w->record->kv_dtype = control_text);
    }
    return false;
}

static bool break_ready(int n, Baton__Ready *r) {
    switch (n) {
        CASE(0, r->address.len = 0);
        CASE(1, (r->address.data = long_bytes, r->address.len = sizeof long_bytes));
        CASE(2, r->pages_total = 0);
        CASE(3, r->page_tokens = 0);
        CASE(4, r->page_tokens = 4097);
        CASE(5, r->rows_total = 0);
        CASE(6, r->step_tokens = PROTO_TOKENS_MAX + 1);
    }
    return false;
}

static bool break_peer(int n, Baton__Peer *p) {
    if (n < 6) return break_text(n, &p->host);
    switch (n - 6) {
        CASE(0, p->worker_id = 0);
        CASE(1, p->incarnation = 0);
        CASE(2, p->role = (Baton__Role)7);
        CASE(3, p->host = none);
        CASE(4, p->address.len = 0);
        CASE(5, (p->address.data = long_bytes, p->address.len = sizeof long_bytes));
    }
    return false;
}

static bool break_pair(int n, Baton__Pair *p) {
    switch (n) {
        CASE(0, p->worker_id = 0);
        CASE(1, p->incarnation = 0);
        CASE(2, p->status = 1);
        CASE(3, p->status = -50);
        CASE(4, p->status = INT32_MIN);
    }
    return false;
}

static bool break_reserve(int n, Baton__Reserve *r) {
    if (n < 3) return break_attempt(n, &r->attempt);
    if (n < 3 + GENERATION_CASES) return break_generation(n - 3, &r->generation);
    switch (n - 3 - GENERATION_CASES) {
        CASE(0, r->prefill_worker_id = 0);
        CASE(1, r->prefill_incarnation = 0);
        CASE(2, r->prompt_tokens = 0);
        CASE(3, r->prompt_tokens = PROTO_TOKENS_MAX + 1);
        CASE(4, r->deadline_ms = 0);
        CASE(5, r->credit_bytes = 0);
        CASE(6, r->generation->max_new_tokens = 0);
    }
    return false;
}

static bool break_reservation(int n, Baton__Reservation *r) {
    if (n < 3) return break_attempt(n, &r->attempt);
    if (n < 9) return break_text(n - 3, &r->text);
    switch (n - 9) {
        CASE(0, r->status = -500);
        CASE(1, r->slot_generations[1] = 0);
        CASE(2, r->n_slot_generations--);
        CASE(3, r->n_slots = r->n_slot_generations = 0);
        CASE(4, r->status = BT_ERR_REQUEST_FULL);
    }
    return false;
}

static bool break_run(int n, Baton__Run *r) {
    if (n < 3) return break_attempt(n, &r->attempt);
    if (n < 3 + GENERATION_CASES) return break_generation(n - 3, &r->generation);
    switch (n - 3 - GENERATION_CASES) {
        CASE(0, r->decode_worker_id = 0);
        CASE(1, r->decode_incarnation = 0);
        CASE(2, r->slot_generations[2] = 0);
        CASE(3, r->prompt_tokens = 0);
        CASE(4, r->prompt_tokens = PROTO_TOKENS_MAX + 1);
        CASE(5, r->first_word = r->prompt_tokens + 22);
        CASE(6, r->first_word = r->prompt_tokens + 21);
        CASE(7, r->deadline_ms = 0);
        CASE(8, r->generation->max_new_tokens = 0);
        CASE(9, r->n_slots = r->n_slot_generations = 2);
        CASE(10, r->generation->prompt_logprobs_from = r->prompt_tokens);
    }
    return false;
}

static bool break_prefill_done(int n, Baton__PrefillDone *p) {
    if (n < 3) return break_attempt(n, &p->attempt);
    if (n < 9) return break_text(n - 3, &p->text);
    if (n == 9) p->status = 7;
    if (n == 10) p->status = BT_ERR_REQUEST_CAPTURE; /* with a cap_needed */
    return n == 9 || n == 10;
}

static bool break_chunk(int n, Baton__Chunk *c) {
    if (n < 3) return break_attempt(n, &c->attempt);
    if (n < 9) return break_text(n - 3, &c->text);
    switch (n - 9) {
        CASE(0, c->finish = (Baton__Finish)5);
        CASE(1, c->finish = (Baton__Finish)-1);
        CASE(2, c->status = 5);
        CASE(3, c->status = BT_OK);
        CASE(4, c->finish = BATON__FINISH__FINISH_LENGTH);
        CASE(5, (c->finish = BATON__FINISH__FINISH_STOP, c->status = BT_OK));
        CASE(6, c->offset = UINT64_MAX - 3);
        CASE(7, c->sample = PROTO_SAMPLES_MAX);
        CASE(8, c->status = BT_ERR_REQUEST_CAPTURE); /* with a cap_needed */
        CASE(9, c->finish = BATON__FINISH__FINISH_ABORT);
    }
    return false;
}

static bool break_prompt_logprobs(int n, Baton__PromptLogprobs *p) {
    if (n < 3) return break_attempt(n, &p->attempt);
    switch (n - 3) {
        CASE(0, p->first_position = 0);
        CASE(1, p->first_position = PROTO_TOKENS_MAX);
        CASE(2, p->count = 0);
        CASE(3, p->count = 5);
    }
    return false;
}

static bool break_message(proto_kind kind, int n, Baton__Frame *f) {
    switch (kind) {
    case PROTO_HELLO: return break_hello(n, f->hello);
    case PROTO_WELCOME: return break_welcome(n, f->welcome);
    case PROTO_REFUSE:
        if (n == 6) f->refuse->text = none;
        return n == 6 || break_text(n, &f->refuse->text);
    case PROTO_READY: return break_ready(n, f->ready);
    case PROTO_PEER: return break_peer(n, f->peer);
    case PROTO_PEER_GONE: return break_pair(n, f->peer_gone);
    case PROTO_PAIR_READY: return break_pair(n, f->pair_ready);
    case PROTO_PING: f->ping->sequence = 0; return n == 0;
    case PROTO_PONG: f->pong->sequence = 0; return n == 0;
    case PROTO_RESERVE: return break_reserve(n, f->reserve);
    case PROTO_RESERVATION: return break_reservation(n, f->reservation);
    case PROTO_RUN: return break_run(n, f->run);
    case PROTO_PREFILL_DONE: return break_prefill_done(n, f->prefill_done);
    case PROTO_CANCEL:
        if (n == 3) f->cancel->sample = PROTO_SAMPLES_MAX;
        return n == 3 || break_attempt(n, &f->cancel->attempt);
    case PROTO_ABORT:
        if (n == 3) f->abort->sample = PROTO_SAMPLES_MAX;
        return n == 3 || break_attempt(n, &f->abort->attempt);
    case PROTO_CHUNK: return break_chunk(n, f->chunk);
    case PROTO_CREDIT:
        if (n == 3) f->credit->bytes = 0;
        if (n == 4) f->credit->sample = PROTO_SAMPLES_MAX;
        return n == 3 || n == 4 || break_attempt(n, &f->credit->attempt);
    case PROTO_CAPACITY: return false; /* Any numbers will do. */
    case PROTO_PROMPT:
        if (n == 3) f->prompt->first_word = 2 * PROTO_TOKENS_MAX + 1;
        return n == 3 || break_attempt(n, &f->prompt->attempt);
    case PROTO_PROMPT_LOGPROBS: return break_prompt_logprobs(n, f->prompt_logprobs);
    }
    return false;
}

/* Encodes a valid message, unpacks it, breaks field n of it and packs it again. */
static bool make_broken(proto_kind kind, int n, const proto_message *valid, size_t *bytes_out) {
    ProtobufCAllocator allocator = {.alloc = arena_allocate, .free = arena_free};
    size_t bytes = 0;
    arena.used = 0;
    assert_int_equal(proto_encode(valid, header, sizeof header, &bytes, NULL), BT_OK);
    Baton__Frame *frame = baton__frame__unpack(&allocator, bytes, header);
    assert_non_null(frame);
    if (!break_message(kind, n, frame)) return false;
    assert_true(baton__frame__get_packed_size(frame) <= sizeof header);
    *bytes_out = baton__frame__pack(frame, header);
    return true;
}

static void every_broken_field_is_refused(void **state) {
    (void)state;
    memset(long_text, 'x', sizeof long_text - 1);
    int tried = 0;
    for (int kind = 1; kind <= SAMPLE_KINDS; kind++) {
        proto_message valid, got;
        size_t bytes = 0;
        sample_message((proto_kind)kind, prompt, sizeof prompt, &valid);
        for (int n = 0; make_broken((proto_kind)kind, n, &valid, &bytes); n++, tried++) {
            bt_error error = {0};
            const bt_status status =
                proto_decode(header, bytes, valid.payload, valid.payload_bytes, &got, &error);
            if (status == BT_OK) print_error("%s case %d\n", proto_kind_name(valid.kind), n);
            assert_int_equal(status, BT_ERR_PEER_PROTOCOL);
            assert_non_null(strstr(error.text, proto_kind_name(valid.kind)));
        }
    }
    assert_true(tried > 150);
}

static void payloads_only_where_they_belong(void **state) {
    (void)state;
    for (int kind = 1; kind <= SAMPLE_KINDS; kind++) {
        const bool may_carry = kind == PROTO_RUN || kind == PROTO_CHUNK || kind == PROTO_PROMPT ||
                               kind == PROTO_PROMPT_LOGPROBS;
        proto_message valid, got;
        bt_error error;
        size_t bytes = 0;
        sample_message((proto_kind)kind, prompt, sizeof prompt, &valid);
        assert_int_equal(proto_encode(&valid, header, sizeof header, &bytes, NULL), BT_OK);
        assert_int_equal(proto_decode(header, bytes, prompt, sizeof prompt, &got, &error),
                         may_carry ? BT_OK : BT_ERR_PEER_PROTOCOL);
        assert_int_equal(
            proto_decode(header, bytes, prompt, PROTO_FRAME_PAYLOAD_MAX + 4, &got, &error),
            BT_ERR_PEER_PROTOCOL);
    }
    /* Prompt ids are whole, and a chunk that says nothing is none. */
    proto_message message;
    sample_message(PROTO_RUN, prompt, 0, &message);
    assert_int_equal(proto_message_check(&message, NULL), BT_ERR_PEER_PROTOCOL);
    message.payload_bytes = 6;
    assert_int_equal(proto_message_check(&message, NULL), BT_ERR_PEER_PROTOCOL);
    sample_message(PROTO_CHUNK, NULL, 0, &message);
    assert_int_equal(proto_message_check(&message, NULL), BT_OK);
    message.chunk.finish = PROTO_FINISH_NONE;
    message.chunk.status = BT_OK;
    assert_int_equal(proto_message_check(&message, NULL), BT_ERR_PEER_PROTOCOL);
}

static void other_versions_can_be_refused_politely(void **state) {
    (void)state;
    proto_message hello, got;
    bt_error error;
    size_t bytes = 0;
    memset(&hello, 0, sizeof hello);
    hello.kind = PROTO_HELLO;
    hello.hello.version_major = PROTO_VERSION_MAJOR + 1;
    hello.hello.lane = PROTO_LANE_CONTROL;
    hello.hello.role = PROTO_ROLE_PREFILL;
    hello.hello.incarnation = 1;
    assert_int_equal(proto_encode(&hello, header, sizeof header, &bytes, NULL), BT_OK);
    assert_int_equal(proto_decode(header, bytes, NULL, 0, &got, &error), BT_OK);
    assert_int_equal(got.hello.version_major, PROTO_VERSION_MAJOR + 1);
    hello.hello.version_major = PROTO_VERSION_MAJOR;
    assert_int_equal(proto_encode(&hello, header, sizeof header, &bytes, &error),
                     BT_ERR_CALLER_ARGUMENT);
    hello.hello.lane = PROTO_LANE_STREAMS;
    assert_int_equal(proto_encode(&hello, header, sizeof header, &bytes, NULL), BT_OK);
}

static void cut_and_changed_bytes_are_survived(void **state) {
    (void)state;
    static uint8_t damaged[PROTO_FRAME_HEADER_MAX];
    int refused = 0;
    for (int kind = 1; kind <= SAMPLE_KINDS; kind++) {
        proto_message valid, got;
        bt_error error;
        size_t bytes = 0;
        sample_message((proto_kind)kind, prompt, sizeof prompt, &valid);
        assert_int_equal(proto_encode(&valid, header, sizeof header, &bytes, NULL), BT_OK);
        for (size_t cut = 0; cut < bytes; cut++) {
            const bt_status status =
                proto_decode(header, cut, valid.payload, valid.payload_bytes, &got, &error);
            assert_true(status == BT_ERR_PEER_PROTOCOL);
        }
        for (size_t at = 0; at < bytes; at++) {
            memcpy(damaged, header, bytes);
            damaged[at] ^= (uint8_t)(1u << (at % 8));
            const bt_status status =
                proto_decode(damaged, bytes, valid.payload, valid.payload_bytes, &got, &error);
            if (status == BT_OK) assert_int_equal(proto_message_check(&got, NULL), BT_OK);
            if (status != BT_OK) refused++;
        }
    }
    assert_true(refused > 0);
}

/* A header may hold thousands of fields that nobody knows; the arena bounds what they cost. */
static void floods_of_fields_are_refused(void **state) {
    (void)state;
    proto_message got;
    bt_error error;
    memset(header, 0, sizeof header);
    for (size_t i = 0; i + 3 <= sizeof header; i += 3) {
        header[i] = 0x90; /* field 18, varint, value 0 */
        header[i + 1] = 0x01;
    }
    assert_int_equal(proto_decode(header, sizeof header, NULL, 0, &got, &error),
                     BT_ERR_PEER_PROTOCOL);
    memset(header, 0xff, sizeof header);
    assert_int_equal(proto_decode(header, sizeof header, NULL, 0, &got, &error),
                     BT_ERR_PEER_PROTOCOL);
    assert_int_equal(proto_decode(header, 0, NULL, 0, &got, &error), BT_ERR_PEER_PROTOCOL);
    assert_int_equal(proto_decode(header, sizeof header + 1, NULL, 0, &got, &error),
                     BT_ERR_PEER_PROTOCOL);
}

static void texts_are_made_fit(void **state) {
    (void)state;
    char out[8];
    proto_text_copy(out, sizeof out, "plain");
    assert_string_equal(out, "plain");
    proto_text_copy(out, sizeof out, "a\nb\x7f.\xff!");
    assert_string_equal(out, "a?b?.?!");
    proto_text_copy(out, sizeof out, "abcde\xe2\x82\xac"); /* the euro sign does not fit whole */
    assert_string_equal(out, "abcde");
    proto_text_copy(out, sizeof out, "abcd\xe2\x82\xac");
    assert_string_equal(out, "abcd\xe2\x82\xac");
    proto_text_copy(out, 1, "abc");
    assert_string_equal(out, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_survives),
        cmocka_unit_test(a_short_buffer_is_refused),
        cmocka_unit_test(every_broken_field_is_refused),
        cmocka_unit_test(payloads_only_where_they_belong),
        cmocka_unit_test(other_versions_can_be_refused_politely),
        cmocka_unit_test(cut_and_changed_bytes_are_survived),
        cmocka_unit_test(floods_of_fields_are_refused),
        cmocka_unit_test(texts_are_made_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
