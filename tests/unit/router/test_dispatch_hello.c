/* Who may join the cluster and who is refused, with which words; pairs, heartbeats and departures.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "dispatch_fixture.h"

static fake_network *n;
static fake_worker prefill, decode;

static int set_up(void **state) {
    (void)state;
    n = fake_network_create(NULL);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    fake_network_destroy(n);
    return 0;
}

static dispatch_view look(void) {
    dispatch_view view;
    dispatch_look(n->d, &view);
    return view;
}

/* Dials as `role` with a changed hello; the sentence, or "" when it was welcome. */
static const char *try_hello(proto_role role, uint64_t incarnation,
                             void (*change)(proto_hello *hello)) {
    static char text[PROTO_TEXT_MAX];
    fake_worker w = {.role = role, .incarnation = incarnation};
    proto_message hello, refuse;
    fake_hello(&w, &hello);
    if (change != NULL) change(&hello.hello);
    fake_dial(n, &w, &hello);
    text[0] = '\0';
    if (fake_take(n, w.control, PROTO_REFUSE, &refuse)) {
        assert_true(fake_is_closed(n, w.control));
        assert_int_equal(fake_count(n, w.control, PROTO_WELCOME), 0);
        memcpy(text, refuse.refuse.text, sizeof text);
    } else {
        fake_expect(n, w.control, PROTO_WELCOME);
    }
    return text;
}

static void other_major(proto_hello *h) {
    h->version_major = 2;
    h->version_minor = 5;
}
static void two_tp(proto_hello *h) {
    h->tp_count = 2;
}
static void four_pp(proto_hello *h) {
    h->pp_count = 4;
}
static void two_dp(proto_hello *h) {
    h->dp_count = 2;
}
static void pinned_cap(proto_hello *h) {
    h->record.sampling_mask_max_tokens = 128;
    h->pins = 1u << RECORD_SAMPLING_MASK_MAX_TOKENS;
}
static void pinned_right_cap(proto_hello *h) {
    h->record.sampling_mask_max_tokens = FAKE_CAP;
    h->pins = 1u << RECORD_SAMPLING_MASK_MAX_TOKENS;
}
static void unpinned_cap(proto_hello *h) {
    h->record.sampling_mask_max_tokens = 128;
}
static void pinned_checksum(proto_hello *h) {
    h->record.kv_checksum = RECORD_CHECKSUM_OFF + 1;
    h->pins = 1u << RECORD_KV_CHECKSUM;
}
static void other_tokenizer(proto_hello *h) {
    h->record.tokenizer_fingerprint[0] = 'x';
}
static void no_tokenizer(proto_hello *h) {
    h->record.tokenizer_fingerprint[0] = '\0';
}
static void other_page(proto_hello *h) {
    h->record.page_tokens = 64;
}
static void other_dtype(proto_hello *h) {
    (void)snprintf(h->record.kv_dtype, sizeof h->record.kv_dtype, "f32");
}
static void other_layout(proto_hello *h) {
    (void)snprintf(h->record.kv_layout, sizeof h->record.kv_layout,
                   "layers=3 kv_heads=1 head_dim=8");
}
static void other_numerics(proto_hello *h) {
    (void)snprintf(h->record.numerics, sizeof h->record.numerics, "cuda/fast/1");
}
static void other_model(proto_hello *h) {
    h->record.model_fingerprint[0] = 'x';
}
static void no_model(proto_hello *h) {
    h->record.model_fingerprint[0] = '\0';
}
static void no_page(proto_hello *h) {
    h->record.page_tokens = 0;
}
static void other_vocab(proto_hello *h) {
    h->vocab_size = 999;
}
static void new_row_format(proto_hello *h) {
    h->record.row_format = 2;
}

static void refusals_name_field_values_and_hosts(void **state) {
    (void)state;
    static const struct {
        void (*change)(proto_hello *hello);
        const char *text;
    } cases[] = {
        {other_major, "protocol version differs: 2.5 on decode worker at hostA (pid 22), 1.2 on "
                      "router hostB"},
        {two_tp, "tp_count 2 of decode worker at hostA (pid 22) is not supported yet: only 1 is"},
        {four_pp, "pp_count 4 of decode worker at hostA (pid 22) is not supported yet: only 1 is"},
        {two_dp, "dp_count 2 of decode worker at hostA (pid 22) is not supported yet: only 1 is"},
        {pinned_cap, "sampling_mask_max_tokens differs: 128 on decode worker at hostA (pid 22), 64 "
                     "on router hostB"},
        {pinned_checksum,
         "kv_checksum differs: off on decode worker at hostA (pid 22), full on router hostB"},
        {other_tokenizer, "tokenizer_fingerprint differs: xttttttttttttttt on decode worker at "
                          "hostA (pid 22), tttttttttttttttt on router hostB"},
        {no_model, "model_fingerprint is not stated by decode worker at hostA (pid 22)"},
        {new_row_format, "row_format differs: 2 on decode worker at hostA (pid 22), 1 on router "
                         "hostB"},
        {no_page, "page_tokens is not stated by decode worker at hostA (pid 22)"},
        /* founded by the first worker */
        {other_page, "page_tokens differs: 64 on decode worker at hostA (pid 22), 16 on prefill "
                     "worker at hostA (pid 11)"},
        {other_dtype, "kv_dtype differs: \"f32\" on decode worker at hostA (pid 22), \"bf16\" on "
                      "prefill worker at hostA (pid 11)"},
        {other_layout, "kv_layout differs: \"layers=3 kv_heads=1 head_dim=8\" on decode worker at "
                       "hostA (pid 22), "
                       "\"layers=2 kv_heads=1 head_dim=8\" on prefill worker at hostA (pid 11)"},
        {other_numerics, "numerics differs: \"cuda/fast/1\" on decode worker at hostA (pid 22), "
                         "\"host/exact/1\" on prefill worker at hostA (pid 11)"},
        {other_model, "model_fingerprint differs: xmmmmmmmmmmmmmmm on decode worker at hostA (pid "
                      "22), mmmmmmmmmmmmmmmm on prefill worker at hostA (pid 11)"},
        {other_vocab, "vocab_size differs: 999 on decode worker at hostA (pid 22), 1000 on prefill "
                      "worker at hostA (pid 11)"},
    };
    const size_t count = sizeof cases / sizeof cases[0];
    fake_enter(n, &prefill, PROTO_ROLE_PREFILL, 11);
    for (size_t i = 0; i < count; i++) {
        assert_string_equal(try_hello(PROTO_ROLE_DECODE, 22, cases[i].change), cases[i].text);
        assert_int_equal(look().refused_total, i + 1);
    }
    assert_int_equal(look().worker_count, 1);
    assert_int_equal(look().protocol_errors_total, 0);
    /* A refused worker that is set right is welcome. */
    assert_string_equal(try_hello(PROTO_ROLE_DECODE, 22, NULL), "");
}

/* Each id of the tokenizer must be one of the model's, the last one included. */
static void a_tokenizer_may_fill_the_vocabulary_and_no_more(void **state) {
    (void)state;
    dispatch_options options;
    fake_options(&options);
    for (uint32_t more = 0; more < 2; more++) {
        options.vocab_min = FAKE_VOCAB + more;
        fake_network_destroy(n);
        n = fake_network_create(&options);
        const char *text = try_hello(PROTO_ROLE_DECODE, 22, NULL);
        assert_string_equal(
            text, more == 0 ? ""
                            : "the tokenizer does not fit the model: it has 1001 ids, the "
                              "model of decode worker at hostA (pid 22) only 1000");
    }
}

static void the_cap_is_adopted_unless_pinned(void **state) {
    (void)state;
    fake_enter(n, &prefill, PROTO_ROLE_PREFILL, 11);
    assert_int_equal(prefill.welcome.record.sampling_mask_max_tokens, FAKE_CAP);
    assert_int_equal(prefill.welcome.record.kv_checksum, RECORD_CHECKSUM_FULL + 1);
    assert_int_equal(prefill.welcome.record.page_tokens, FAKE_PAGE_TOKENS);
    assert_int_equal(prefill.welcome.heartbeat_ms, 100);
    assert_int_equal(prefill.welcome.dead_after_ms, 1000);
    assert_string_equal(prefill.welcome.router_host, "hostB");
    assert_string_equal(try_hello(PROTO_ROLE_DECODE, 22, unpinned_cap), "");
    assert_string_equal(try_hello(PROTO_ROLE_DECODE, 33, pinned_right_cap), "");
    assert_string_equal(try_hello(PROTO_ROLE_DECODE, 44, no_tokenizer), "");
    assert_int_equal(look().worker_count, 4);
    assert_string_equal(look().record.kv_dtype, "bf16");
    assert_string_equal(look().model_name, "tiny");
    assert_int_equal(look().vocab_size, FAKE_VOCAB);
    assert_int_equal(look().eos_ids[0], 2);
}

static void the_foundation_goes_with_the_last_worker(void **state) {
    (void)state;
    fake_worker second;
    fake_enter(n, &prefill, PROTO_ROLE_PREFILL, 11);
    fake_enter(n, &second, PROTO_ROLE_PREFILL, 12);
    fake_drop(n, prefill.control);
    /* The founder is gone; what it founded stands, and the next oldest speaks for it. */
    assert_string_equal(try_hello(PROTO_ROLE_DECODE, 22, other_page),
                        "page_tokens differs: 64 on decode worker at hostA (pid 22), 16 on prefill "
                        "worker at hostA (pid 12)");
    fake_drop(n, second.streams);
    assert_int_equal(look().worker_count, 0);
    assert_int_equal(look().record.page_tokens, 0);
    assert_int_equal(look().record.sampling_mask_max_tokens, FAKE_CAP);
    assert_string_equal(try_hello(PROTO_ROLE_DECODE, 22, other_page), "");
    assert_int_equal(look().record.page_tokens, 64);
}

static void pairs_form_among_equals(void **state) {
    (void)state;
    fake_worker newer = {.role = PROTO_ROLE_PREFILL, .incarnation = 33};
    proto_message hello, streams, ready;
    fake_join(n, &decode, PROTO_ROLE_DECODE, 22);
    fake_hello(&newer, &hello);
    new_row_format(&hello.hello);
    fake_dial(n, &newer, &hello);
    newer.id = fake_expect(n, newer.control, PROTO_WELCOME).welcome.worker_id;
    streams = hello;
    streams.hello.lane = PROTO_LANE_STREAMS;
    newer.streams = n->next_link++;
    fake_say(n, newer.streams, &streams);
    memset(&ready, 0, sizeof ready);
    ready.kind = PROTO_READY;
    ready.ready = (proto_ready){.address_bytes = 1,
                                .pages_total = 10,
                                .page_tokens = FAKE_PAGE_TOKENS,
                                .rows_total = 1,
                                .sequences_max = 1,
                                .step_tokens = 64};
    fake_say(n, newer.control, &ready);
    assert_int_equal(fake_count(n, newer.control, PROTO_PEER), 0);
    assert_int_equal(fake_count(n, decode.control, PROTO_PEER), 0);
    /* A report about a pair that was never offered. */
    fake_pair(n, &decode, &newer, BT_OK);
    assert_true(fake_is_closed(n, decode.control));
    assert_false(n->is_ready);
}

static void peers_learn_of_each_other(void **state) {
    (void)state;
    fake_enter(n, &prefill, PROTO_ROLE_PREFILL, 11);
    fake_enter(n, &decode, PROTO_ROLE_DECODE, 22);
    proto_message ready;
    memset(&ready, 0, sizeof ready);
    ready.kind = PROTO_READY;
    ready.ready = (proto_ready){.address_bytes = 3,
                                .address = {7, 8, 9},
                                .pages_total = 10,
                                .page_tokens = FAKE_PAGE_TOKENS,
                                .rows_total = 1,
                                .sequences_max = 1,
                                .step_tokens = 1};
    fake_say(n, prefill.control, &ready);
    assert_int_equal(fake_count(n, prefill.control, PROTO_PEER), 0);
    fake_say(n, decode.control, &ready);
    const proto_message to_prefill = fake_expect(n, prefill.control, PROTO_PEER);
    const proto_message to_decode = fake_expect(n, decode.control, PROTO_PEER);
    assert_int_equal(to_prefill.peer.worker_id, decode.id);
    assert_int_equal(to_prefill.peer.incarnation, 22);
    assert_int_equal(to_prefill.peer.role, PROTO_ROLE_DECODE);
    assert_int_equal(to_decode.peer.worker_id, prefill.id);
    assert_int_equal(to_decode.peer.role, PROTO_ROLE_PREFILL);
    assert_int_equal(to_decode.peer.address_bytes, 3);
    assert_memory_equal(to_decode.peer.address, "\x07\x08\x09", 3);
    assert_false(n->is_ready); /* not before decode has seen hellos both ways */
    fake_pair(n, &decode, &prefill, BT_OK);
    assert_true(n->is_ready);
    fake_drop(n, prefill.streams);
    const proto_message gone = fake_expect(n, decode.control, PROTO_PEER_GONE);
    assert_int_equal(gone.pair.worker_id, prefill.id);
    assert_int_equal(gone.pair.incarnation, 11);
    assert_false(n->is_ready);
    assert_int_equal(n->ready_changes, 2);
    /* It comes back at the same address: a new worker. */
    fake_worker again;
    fake_enter(n, &again, PROTO_ROLE_PREFILL, 12);
    assert_int_not_equal(again.id, prefill.id);
    /* A report about its former life is late, not wrong. */
    fake_pair(n, &decode, &prefill, BT_OK);
    assert_int_equal(look().late_total, 1);
    assert_false(n->is_ready);
    assert_false(fake_is_closed(n, decode.control));
}

static void a_broken_pair_is_offered_again(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefill, &decode};
    fake_cluster(n, &prefill, &decode);
    fake_submit(n, 1, 40, 8);
    const proto_attempt attempt = fake_run(n, &prefill, &decode);
    fake_pair(n, &prefill, &decode, BT_ERR_PEER_GONE); /* either side may notice */
    assert_false(n->is_ready);
    const proto_message cancel = fake_expect(n, decode.control, PROTO_CANCEL);
    assert_true(proto_attempt_equal(cancel.cancel.attempt, attempt));
    fake_pair(n, &decode, &prefill, BT_ERR_PEER_GONE); /* the other side notices too */
    fake_live(n, 950, workers, 2);
    assert_int_equal(fake_count(n, decode.control, PROTO_PEER), 0);
    fake_live(n, 100, workers, 2);
    fake_expect(n, decode.control, PROTO_PEER);
    fake_expect(n, prefill.control, PROTO_PEER);
    assert_int_equal(fake_count(n, decode.control, PROTO_RESERVE), 0);
    fake_pair(n, &decode, &prefill, BT_OK);
    assert_true(n->is_ready);
    (void)fake_run(n, &prefill, &decode);
    assert_int_equal(look().retries_total, 1);
}

static void an_offer_that_nobody_confirms_is_repeated(void **state) {
    (void)state;
    fake_worker *const workers[] = {&prefill, &decode};
    fake_join(n, &prefill, PROTO_ROLE_PREFILL, 11);
    fake_join(n, &decode, PROTO_ROLE_DECODE, 22);
    fake_live(n, 29900, workers, 2);
    assert_int_equal(fake_count(n, decode.control, PROTO_PEER), 0);
    fake_live(n, 1300, workers, 2);
    fake_expect(n, decode.control, PROTO_PEER);
    fake_expect(n, prefill.control, PROTO_PEER);
}

/* ---- protocol errors close the link that made them, and no other ----------------------------- */

static void the_first_frame_must_be_a_hello(void **state) {
    (void)state;
    fake_cluster(n, &prefill, &decode);
    proto_message ping;
    memset(&ping, 0, sizeof ping);
    ping.kind = PROTO_PONG;
    ping.ping.sequence = 1;
    fake_say(n, 500, &ping);
    assert_true(fake_is_closed(n, 500));
    assert_int_equal(look().protocol_errors_total, 1);
    assert_int_equal(look().worker_count, 2);
}

static void a_silent_connection_is_closed(void **state) {
    (void)state;
    dispatch_on_opened(n->d, 500, n->now_us);
    fake_tick(n, 9999);
    assert_false(fake_is_closed(n, 500));
    fake_tick(n, 1);
    assert_true(fake_is_closed(n, 500));
}

static void a_second_life_of_an_incarnation_is_closed(void **state) {
    (void)state;
    fake_cluster(n, &prefill, &decode);
    fake_worker twin = {.role = PROTO_ROLE_DECODE, .incarnation = 22};
    proto_message hello;
    fake_hello(&twin, &hello);
    fake_dial(n, &twin, &hello);
    assert_true(fake_is_closed(n, twin.control));
    assert_false(fake_is_closed(n, decode.control));
    assert_int_equal(look().refused_total, 0);
    assert_true(n->is_ready);
}

static void streams_need_their_control(void **state) {
    (void)state;
    fake_cluster(n, &prefill, &decode);
    static const struct {
        proto_role role;
        uint64_t incarnation;
    } cases[] = {{PROTO_ROLE_DECODE, 99},  /* unknown */
                 {PROTO_ROLE_DECODE, 22},  /* it has one */
                 {PROTO_ROLE_DECODE, 11}}; /* of the other role */
    for (size_t i = 0; i < 3; i++) {
        fake_worker w = {.role = cases[i].role, .incarnation = cases[i].incarnation};
        proto_message hello;
        fake_hello(&w, &hello);
        hello.hello.lane = PROTO_LANE_STREAMS;
        fake_dial(n, &w, &hello);
        assert_true(fake_is_closed(n, w.control));
    }
    assert_int_equal(look().worker_count, 2);
}

static void expect_thrown_out(const fake_worker *w, uint32_t left) {
    assert_true(fake_is_closed(n, w->control));
    assert_true(fake_is_closed(n, w->streams));
    assert_int_equal(look().worker_count, left);
    assert_int_equal(look().protocol_errors_total, 1);
}

static void ready_comes_once_and_fits_the_record(void **state) {
    (void)state;
    proto_message ready;
    memset(&ready, 0, sizeof ready);
    ready.kind = PROTO_READY;
    for (int i = 0; i < 4; i++) {
        (void)tear_down(NULL);
        (void)set_up(NULL);
        fake_worker w;
        const proto_role role = i == 3 ? PROTO_ROLE_DECODE : PROTO_ROLE_PREFILL;
        fake_enter(n, &w, role, 11);
        if (i == 0) fake_ready(n, &w, 10);
        ready.ready = (proto_ready){.address_bytes = 1,
                                    .pages_total = 10,
                                    .page_tokens = i == 1 ? 64 : FAKE_PAGE_TOKENS,
                                    .rows_total = 1,
                                    .sequences_max = i == 3 ? 0 : 1,
                                    .step_tokens = i == 2 ? 0 : 1};
        fake_say(n, w.control, &ready);
        expect_thrown_out(&w, 0);
    }
}

/* Every kind that does not belong on a lane of a role. */
static void kinds_belong_to_lanes_and_roles(void **state) {
    (void)state;
    static const struct {
        proto_kind kind;
        bool on_prefill_control, on_decode_control, on_decode_streams;
    } cases[] = {
        {PROTO_HELLO, false, false, false},      {PROTO_WELCOME, false, false, false},
        {PROTO_PING, false, false, false},       {PROTO_RESERVE, false, false, false},
        {PROTO_CANCEL, false, false, false},     {PROTO_CREDIT, false, false, false},
        {PROTO_PEER_GONE, false, false, false},  {PROTO_PREFILL_DONE, true, false, false},
        {PROTO_RESERVATION, false, true, false}, {PROTO_CAPACITY, false, true, false},
        {PROTO_CHUNK, false, false, true},       {PROTO_ABORT, false, false, false},
    };
    const proto_attempt old = {.router_incarnation = 5, .counter = 5};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int where = 0; where < 4; where++) {
            (void)tear_down(NULL);
            (void)set_up(NULL);
            fake_cluster(n, &prefill, &decode);
            const fake_worker *w = where < 2 ? &prefill : &decode;
            const dispatch_link link = where % 2 == 0 ? w->control : w->streams;
            const bool is_allowed = (where == 0 && cases[i].on_prefill_control) ||
                                    (where == 2 && cases[i].on_decode_control) ||
                                    (where == 3 && cases[i].on_decode_streams);
            proto_message message;
            memset(&message, 0, sizeof message);
            message.kind = cases[i].kind;
            message.prefill_done.attempt = old;
            if (message.kind == PROTO_CHUNK) message.chunk.finish = PROTO_FINISH_LENGTH;
            dispatch_on_message(n->d, link, &message, n->now_us);
            if (is_allowed) {
                assert_int_equal(look().protocol_errors_total, 0);
            } else {
                expect_thrown_out(w, 1);
            }
        }
    }
}

static void workers_say_only_what_they_were_asked(void **state) {
    (void)state;
    for (int i = 0; i < 5; i++) {
        (void)tear_down(NULL);
        (void)set_up(NULL);
        fake_cluster(n, &prefill, &decode);
        fake_submit(n, 1, 40, 8);
        if (i == 0) { /* prefill_done before RUN */
            const proto_message reserve = fake_expect(n, decode.control, PROTO_RESERVE);
            fake_done(n, &prefill, reserve.reserve.attempt, BT_OK);
            expect_thrown_out(&prefill, 1);
            continue;
        }
        const proto_attempt attempt = fake_run(n, &prefill, &decode);
        if (i == 1) { /* a second reservation */
            fake_reserve_reply(n, &decode, attempt, BT_OK);
            expect_thrown_out(&decode, 1);
        } else if (i == 2) { /* a second end of the prompt */
            fake_done(n, &prefill, attempt, BT_OK);
            fake_done(n, &prefill, attempt, BT_OK);
            expect_thrown_out(&prefill, 1);
        } else if (i == 3) { /* another worker's attempt */
            fake_worker other;
            fake_join(n, &other, PROTO_ROLE_PREFILL, 33);
            fake_done(n, &other, attempt, BT_OK);
            expect_thrown_out(&other, 2);
        } else { /* an answer to no ping */
            proto_message pong;
            memset(&pong, 0, sizeof pong);
            pong.kind = PROTO_PONG;
            pong.ping.sequence = 1;
            fake_say(n, decode.control, &pong);
            expect_thrown_out(&decode, 1);
        }
    }
}

/* ---- heartbeats ------------------------------------------------------------------------------ */

static void a_silent_worker_is_dead(void **state) {
    (void)state;
    fake_worker *const alive[] = {&prefill};
    fake_cluster(n, &prefill, &decode);
    fake_submit(n, 1, 40, 8);
    (void)fake_run(n, &prefill, &decode);
    fake_live(n, 950, alive, 1);
    assert_false(fake_is_closed(n, decode.control));
    fake_live(n, 50, alive, 1);
    assert_true(fake_is_closed(n, decode.control));
    assert_true(fake_is_closed(n, decode.streams));
    fake_expect(n, prefill.control, PROTO_PEER_GONE);
    fake_expect(n, prefill.streams, PROTO_CANCEL);
    assert_false(n->is_ready);
    fake_live(n, 6000, alive, 1);
    const dispatch_end *end = fake_end_of(n, 1, true);
    assert_int_equal(end->status, BT_ERR_REQUEST_NO_WORKER);
    assert_non_null(strstr(end->text, "decode worker at hostA (pid 22) is gone: no heartbeat for "
                                      "1000 ms"));
}

static void a_slow_answer_still_counts(void **state) {
    (void)state;
    fake_cluster(n, &prefill, &decode);
    fake_worker *const workers[] = {&prefill, &decode};
    for (int i = 0; i < 10; i++) {
        for (int k = 0; k < 8; k++)
            fake_tick(n, 100); /* several heartbeats late, but before death */
        assert_int_equal(fake_count(n, decode.control, PROTO_PING), 1);
        fake_live(n, 50, workers, 2);
    }
    assert_int_equal(look().worker_count, 2);
}

static void streams_must_follow_ready(void **state) {
    (void)state;
    fake_worker w = {.role = PROTO_ROLE_DECODE, .incarnation = 22};
    fake_worker *const workers[] = {&w};
    proto_message hello;
    fake_hello(&w, &hello);
    fake_dial(n, &w, &hello);
    w.id = fake_expect(n, w.control, PROTO_WELCOME).welcome.worker_id;
    fake_live(n, 20000, workers, 1); /* loading a model takes its time */
    fake_ready(n, &w, 10);
    fake_live(n, 9950, workers, 1);
    assert_int_equal(look().worker_count, 1);
    fake_live(n, 50, workers, 1);
    assert_int_equal(look().worker_count, 0);
    assert_true(fake_is_closed(n, w.control));
}

static void there_is_room_for_a_bounded_number(void **state) {
    (void)state;
    fake_worker w;
    for (uint64_t i = 0; i < 256; i++)
        fake_enter(n, &w, PROTO_ROLE_PREFILL, 1000 + i);
    assert_string_equal(
        try_hello(PROTO_ROLE_DECODE, 22, NULL),
        "router hostB has no room for decode worker at hostA (pid 22): its limit is 256 workers");
    for (dispatch_link link = 10000; link < 10100; link++)
        dispatch_on_opened(n->d, link, n->now_us);
    uint32_t closed = 0;
    for (dispatch_link link = 10000; link < 10100; link++)
        closed += fake_is_closed(n, link) ? 1 : 0;
    assert_int_equal(closed, 36); /* 2 per worker and 64 strangers */
    assert_int_equal(look().worker_count, 256);
}

static void options_must_know_what_the_router_governs(void **state) {
    (void)state;
    const dispatch_ops ops = {0};
    dispatch_options options;
    dispatch *d = NULL;
    fake_options(&options);
    options.record.sampling_mask_max_tokens = 0;
    assert_int_equal(dispatch_create(&options, &ops, &d), BT_ERR_CALLER_CONFIG);
    fake_options(&options);
    options.record.kv_checksum = 0;
    assert_int_equal(dispatch_create(&options, &ops, &d), BT_ERR_CALLER_CONFIG);
    fake_options(&options);
    options.incarnation = 0;
    assert_int_equal(dispatch_create(&options, &ops, &d), BT_ERR_CALLER_CONFIG);
    assert_null(d);
    dispatch_destroy(NULL);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(refusals_name_field_values_and_hosts),
        TEST(a_tokenizer_may_fill_the_vocabulary_and_no_more),
        TEST(the_cap_is_adopted_unless_pinned),
        TEST(the_foundation_goes_with_the_last_worker),
        TEST(pairs_form_among_equals),
        TEST(peers_learn_of_each_other),
        TEST(a_broken_pair_is_offered_again),
        TEST(an_offer_that_nobody_confirms_is_repeated),
        TEST(the_first_frame_must_be_a_hello),
        TEST(a_silent_connection_is_closed),
        TEST(a_second_life_of_an_incarnation_is_closed),
        TEST(streams_need_their_control),
        TEST(ready_comes_once_and_fits_the_record),
        TEST(kinds_belong_to_lanes_and_roles),
        TEST(workers_say_only_what_they_were_asked),
        TEST(a_silent_worker_is_dead),
        TEST(a_slow_answer_still_counts),
        TEST(streams_must_follow_ready),
        TEST(there_is_room_for_a_bounded_number),
        TEST(options_must_know_what_the_router_governs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
