/* The rig's machinery; see the header. */
#include "rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"

enum {
    ROUTER = 0x7007,
    SETTLE_ROUNDS = 100000,
    NETWORK_STEPS = 1000000,
};

/* ---- what the core sends --------------------------------------------------------------------- */

static rig_attempt *find_attempt(const rig *r, proto_attempt id) {
    assert_in_range(id.counter, 1, r->attempt_count);
    return r->attempts[id.counter - 1];
}

static void take_chunk(rig *r, const proto_message *m) {
    rig_attempt *a = find_attempt(r, m->chunk.attempt);
    assert_true(m->chunk.sample < a->generation.samples);
    rig_stream *s = &a->streams[m->chunk.sample];
    assert_int_equal(s->finishes, 0);
    assert_int_equal(m->chunk.offset, s->byte_count);
    assert_true(m->chunk.retractions >= s->retractions);
    s->retractions = m->chunk.retractions;
    if (m->payload_bytes > 0) {
        s->bytes = bt_realloc(s->bytes, s->byte_count + m->payload_bytes);
        assert_non_null(s->bytes);
        memcpy(s->bytes + s->byte_count, m->payload, m->payload_bytes);
        s->byte_count += m->payload_bytes;
    }
    if (m->chunk.finish == PROTO_FINISH_NONE) return;
    s->finishes++;
    s->last = m->chunk;
}

static void on_send(void *context, proto_lane lane, proto_message *message) {
    rig *r = context;
    bt_error error = {0};
    if (proto_message_check(message, &error) != BT_OK) fail_msg("%s", error.text);
    r->sent++;
    if (message->kind == PROTO_CHUNK) {
        assert_int_equal(lane, PROTO_LANE_STREAMS);
        take_chunk(r, message);
    }
    if (message->kind == PROTO_RESERVATION)
        find_attempt(r, message->reservation.attempt)->answer = message->reservation;
    r->capacities += message->kind == PROTO_CAPACITY;
    proto_message_drop_payload(message);
}

static bool can_stream(void *context) {
    (void)context;
    return true;
}

static void open_streams(void *context) {
    ((rig *)context)->wants_streams = true;
}

static void on_hang_up(void *context, const char *why) {
    print_error("hang up: %s\n", why);
    ((rig *)context)->hang_ups++;
}

static void on_refused(void *context, const char *text) {
    (void)context;
    fail_msg("refused: %s", text);
}

static void on_broken(void *context, bt_status status, const char *text) {
    (void)context;
    fail_msg("broken: %d %s", status, text);
}

static uint64_t rig_now(void *context) {
    return ((rig *)context)->now_us;
}

/* ---- the prefill side ------------------------------------------------------------------------ */

static void release_prompt(rig *r, proto_attempt id) {
    rig_attempt *a = find_attempt(r, id);
    kv_pool_release(r->prefill_pages, id.counter, a->pages, a->page_count);
    a->page_count = 0;
}

static void on_acked(void *context, proto_attempt id) {
    release_prompt(context, id);
}

static void on_sender_failed(void *context, proto_attempt id, bt_status status, const char *text) {
    (void)context;
    (void)id;
    (void)text;
    assert_int_not_equal(status, BT_OK);
}

static void on_peer(void *context, xfer_peer peer) {
    (void)context;
    (void)peer;
}

static void on_prefill_computed(void *context, bt_status status) {
    (void)context;
    assert_int_equal(status, BT_OK);
}

static compute_sim_options sim_options(const rig *r, kv_pool *pages) {
    return (compute_sim_options){
        .kv_memory = kv_pool_memory(pages),
        .kv_page_count = kv_pool_count(pages).total,
        .page_bytes = kv_pool_get_options(pages)->page_bytes,
        .page_tokens = r->options.page_tokens,
        .vocab_size = RIG_VOCAB,
        .support_max = RIG_SUPPORT_MAX,
    };
}

static void create_sender(rig *r) {
    const handoff_sender_options options = {
        .mover = r->prefill_mover,
        .pages = r->prefill_pages,
        .rows = r->prefill_rows,
        .checksum = RECORD_CHECKSUM_FULL,
        .page_tokens = r->options.page_tokens,
        .attempts_max = RIG_ATTEMPTS_MAX,
        .incarnation = rig_prefill_peer.incarnation,
        .clock = {.now_us = rig_now, .context = r},
        .events = {.on_acked = on_acked,
                   .on_failed = on_sender_failed,
                   .on_quiet = on_acked,
                   .context = r},
        .peer_events = {.on_hello = on_peer, .on_stuck = on_peer, .context = r},
    };
    r->prefill_mover->self = rig_prefill_peer;
    assert_int_equal(handoff_sender_create(&options, &r->sender), BT_OK);
}

/* ---- creation -------------------------------------------------------------------------------- */

static void set_default(uint32_t *value, uint32_t fallback) {
    if (*value == 0) *value = fallback;
}

static void create_pool(rig *r, uint32_t count, kv_pool **out) {
    const kv_pool_options options = {
        .page_count = count, .page_bytes = r->options.page_tokens * 32u, .layers = 2};
    assert_int_equal(kv_pool_create(&options, out), BT_OK);
}

static void create_core(rig *r) {
    const rig_options *o = &r->options;
    const decode_core_options options = {
        .hello = {.role = PROTO_ROLE_DECODE,
                  .incarnation = rig_decode_peer.incarnation,
                  .host = "decode-host",
                  .pid = 1,
                  .vocab_size = RIG_VOCAB,
                  .context_tokens = o->context_tokens,
                  .tp_count = 1,
                  .pp_count = 1,
                  .dp_count = 1,
                  .record = {.page_tokens = o->page_tokens, .kv_dtype = "sim", .numerics = "sim"}},
        .clock = {.now_us = rig_now, .context = r},
        .mover = r->mover,
        .pages = r->pages,
        .compute = r->compute,
        .page_tokens = o->page_tokens,
        .vocab_size = RIG_VOCAB,
        .context_tokens = o->context_tokens,
        .sequences_max = o->sequences_max,
        .chunk_tokens = o->chunk_tokens,
        .pages_us = o->pages_us,
        .queue_bytes = o->queue_bytes,
        .ops = {.send = on_send,
                .can_stream = can_stream,
                .open_streams = open_streams,
                .hang_up = on_hang_up,
                .on_refused = on_refused,
                .on_broken = on_broken,
                .context = r},
    };
    assert_int_equal(decode_core_create(&options, &r->core), BT_OK);
}

static void say(rig *r, proto_lane lane, const proto_message *message) {
    bt_error error = {0};
    if (proto_message_check(message, &error) != BT_OK) fail_msg("%s", error.text);
    decode_core_on_message(r->core, lane, message);
    assert_true(decode_core_check(r->core));
}

static void join_cluster(rig *r) {
    const proto_message welcome = {
        .kind = PROTO_WELCOME,
        .welcome = {.router_incarnation = ROUTER,
                    .router_host = "router-host",
                    .worker_id = rig_decode_peer.worker_id,
                    .record = {.sampling_mask_max_tokens = RIG_SUPPORT_MAX,
                               .kv_checksum = RECORD_CHECKSUM_FULL + 1,
                               .weights_version = RIG_WEIGHTS},
                    .heartbeat_ms = 100,
                    .dead_after_ms = 500}};
    const uint8_t *address = NULL;
    size_t bytes = 0;
    decode_core_on_open(r->core, PROTO_LANE_CONTROL);
    decode_core_on_message(r->core, PROTO_LANE_CONTROL, &welcome);
    rig_settle(r);
    assert_true(r->wants_streams);
    decode_core_on_open(r->core, PROTO_LANE_STREAMS);
    create_sender(r);
    assert_int_equal(r->mover->ops->get_address(r->mover, &address, &bytes), BT_OK);
    assert_int_equal(
        r->prefill_mover->ops->connect(r->prefill_mover, rig_decode_peer, address, bytes), BT_OK);
    assert_int_equal(handoff_sender_hello(r->sender, rig_decode_peer), BT_OK);
    assert_int_equal(r->prefill_mover->ops->get_address(r->prefill_mover, &address, &bytes), BT_OK);
    proto_message peer = {.kind = PROTO_PEER,
                          .peer = {.worker_id = rig_prefill_peer.worker_id,
                                   .incarnation = rig_prefill_peer.incarnation,
                                   .role = PROTO_ROLE_PREFILL,
                                   .host = "prefill-host",
                                   .address_bytes = (uint32_t)bytes}};
    memcpy(peer.peer.address, address, bytes);
    say(r, PROTO_LANE_CONTROL, &peer);
    rig_settle(r);
}

rig *rig_create(const rig_options *options) {
    bt_log_set_level(BT_LOG_ERROR);
    rig *r = bt_calloc(1, sizeof *r);
    assert_non_null(r);
    if (options != NULL) r->options = *options;
    set_default(&r->options.pages, 64);
    set_default(&r->options.sequences_max, 16);
    set_default(&r->options.chunk_tokens, 32);
    set_default(&r->options.page_tokens, 16);
    set_default(&r->options.context_tokens, 1024);
    r->now_us = 1000;
    const xfer_loop_options network = {.part_bytes = 100, .is_stepped = true, .sends_max = 4096};
    assert_int_equal(xfer_loop_network_create(&network, &r->network), BT_OK);
    create_pool(r, r->options.pages, &r->pages);
    create_pool(r, RIG_PREFILL_PAGES, &r->prefill_pages);
    assert_int_equal(row_pool_create(RIG_ATTEMPTS_MAX * 4, RIG_SUPPORT_MAX, &r->prefill_rows),
                     BT_OK);
    r->sim = sim_options(r, r->pages);
    const compute_sim_options prefill_sim = sim_options(r, r->prefill_pages);
    assert_int_equal(compute_sim_create(&r->sim, &r->compute), BT_OK);
    assert_int_equal(compute_sim_create(&prefill_sim, &r->prefill_compute), BT_OK);
    r->prefill_compute->on_done = on_prefill_computed;
    assert_int_equal(xfer_loop_create(r->network, 1, &r->mover), BT_OK);
    assert_int_equal(xfer_loop_create(r->network, 2, &r->prefill_mover), BT_OK);
    create_core(r);
    join_cluster(r);
    return r;
}

void rig_destroy(rig *r) {
    rig_expect_empty(r);
    assert_int_equal(r->hang_ups, 0);
    r->compute->ops->destroy(r->compute);
    r->prefill_compute->ops->destroy(r->prefill_compute);
    r->mover->ops->destroy(r->mover);
    r->prefill_mover->ops->destroy(r->prefill_mover);
    decode_core_destroy(r->core);
    handoff_sender_destroy(r->sender);
    const kv_pool_counts counts = kv_pool_count(r->prefill_pages);
    assert_int_equal(counts.free, counts.total);
    kv_pool_destroy(r->pages);
    kv_pool_destroy(r->prefill_pages);
    row_pool_destroy(r->prefill_rows);
    xfer_loop_network_destroy(r->network);
    for (uint32_t i = 0; i < r->attempt_count; i++) {
        for (uint32_t n = 0; n < PROTO_SAMPLES_MAX; n++)
            bt_free(r->attempts[i]->streams[n].bytes);
        bt_free(r->attempts[i]->words);
        bt_free(r->attempts[i]);
    }
    bt_free(r);
}

/* ---- time ------------------------------------------------------------------------------------ */

/* Ends at most `steps` steps. */
static void settle(rig *r, uint32_t steps) {
    for (uint32_t round = 0;; round++) {
        const uint64_t before = r->sent;
        assert_true(round < SETTLE_ROUNDS);
        bool has_done = !r->is_network_held && xfer_loop_run(r->network, NETWORK_STEPS) > 0;
        if (steps > 0 && compute_sim_poll(r->compute, r->now_us)) {
            steps--;
            has_done = true;
        }
        decode_core_turn(r->core);
        assert_true(decode_core_check(r->core));
        if (!has_done && r->sent == before) return;
    }
}

void rig_settle(rig *r) {
    settle(r, r->is_compute_held ? 0 : UINT32_MAX);
}

void rig_run_steps(rig *r, uint32_t steps) {
    const uint64_t before = rig_view(r).steps_total;
    settle(r, steps);
    assert_int_equal(rig_view(r).steps_total, before + steps);
}

void rig_advance(rig *r, uint64_t us) {
    const proto_message ping = {.kind = PROTO_PING, .ping = {.sequence = 1}};
    while (us > 0) {
        const uint64_t step = us < RIG_TICK_US ? us : RIG_TICK_US;
        r->now_us += step;
        us -= step;
        say(r, PROTO_LANE_CONTROL, &ping);
        decode_core_tick(r->core);
        handoff_sender_tick(r->sender);
        rig_settle(r);
    }
}

/* ---- the router's part ----------------------------------------------------------------------- */

proto_generation rig_generation(uint32_t max_new_tokens, uint32_t samples) {
    proto_generation g = proto_generation_default();
    g.max_new_tokens = max_new_tokens;
    g.samples = samples;
    g.mask_mode = SAMPLER_MASK_SUPPORT;
    g.wants_logprob = 1;
    g.seed = 77;
    return g;
}

rig_attempt *rig_add(rig *r, uint32_t prompt_tokens, const proto_generation *g) {
    assert_true(r->attempt_count < RIG_ATTEMPTS_MAX);
    rig_attempt *a = bt_calloc(1, sizeof *a);
    assert_non_null(a);
    r->attempts[r->attempt_count++] = a;
    a->id = (proto_attempt){.router_incarnation = ROUTER, .counter = r->attempt_count};
    a->generation = *g;
    a->prompt_tokens = prompt_tokens;
    a->word_count = proto_words(g, prompt_tokens);
    a->words = bt_calloc(a->word_count, sizeof *a->words);
    assert_non_null(a->words);
    int32_t *at = a->words;
    for (uint32_t i = 0; i < prompt_tokens; i++)
        *at++ = (int32_t)((i * 37 + r->attempt_count * 1009) % RIG_VOCAB);
    for (uint32_t i = 0; i < g->bias_count; i++)
        *at++ = (int32_t)(3 * i);
    for (uint32_t i = 0; i < g->bias_count; i++) {
        const float bias = 0.5f * (float)(i + 1);
        memcpy(at++, &bias, sizeof bias);
    }
    for (uint32_t i = 0; i < g->logprob_id_count; i++)
        *at++ = (int32_t)(7 * i);
    return a;
}

bt_status rig_reserve(rig *r, rig_attempt *a, uint64_t credit) {
    const proto_message message = {.kind = PROTO_RESERVE,
                                   .reserve = {.attempt = a->id,
                                               .prefill_worker_id = rig_prefill_peer.worker_id,
                                               .prefill_incarnation = rig_prefill_peer.incarnation,
                                               .prompt_tokens = a->prompt_tokens,
                                               .deadline_ms = RIG_DEADLINE_MS,
                                               .credit_bytes = credit,
                                               .emission_rows = (uint32_t)(a->id.counter % 5),
                                               .generation = a->generation}};
    a->answer = (proto_reservation){.status = 1};
    say(r, PROTO_LANE_CONTROL, &message);
    assert_int_not_equal(a->answer.status, 1);
    const bool is_granted = a->answer.status == BT_OK;
    assert_int_equal(a->answer.slot_count, is_granted ? a->generation.samples : 0);
    return (bt_status)a->answer.status;
}

void rig_say_words(rig *r, rig_attempt *a, uint32_t words) {
    const uint32_t left = a->word_count - a->words_sent;
    if (words > left) words = left;
    const proto_message message = {
        .kind = PROTO_PROMPT,
        .prompt = {.attempt = a->id, .first_word = a->words_sent},
        .payload = a->words + a->words_sent,
        .payload_bytes = words * sizeof *a->words,
    };
    a->words_sent += words;
    say(r, PROTO_LANE_STREAMS, &message);
}

void rig_cancel(rig *r, const rig_attempt *a, uint32_t sample) {
    const proto_message message = {.kind = PROTO_CANCEL,
                                   .cancel = {.attempt = a->id, .sample = sample}};
    say(r, PROTO_LANE_CONTROL, &message);
}

void rig_abort(rig *r, const rig_attempt *a, uint32_t sample) {
    const proto_message message = {.kind = PROTO_ABORT,
                                   .abort = {.attempt = a->id, .sample = sample}};
    say(r, PROTO_LANE_CONTROL, &message);
}

void rig_credit(rig *r, const rig_attempt *a, uint32_t sample, uint64_t bytes) {
    const proto_message message = {.kind = PROTO_CREDIT,
                                   .credit = {.attempt = a->id, .sample = sample, .bytes = bytes}};
    say(r, PROTO_LANE_STREAMS, &message);
}

rig_attempt *rig_start(rig *r, uint32_t prompt_tokens, const proto_generation *g, uint64_t credit) {
    rig_attempt *a = rig_add(r, prompt_tokens, g);
    if (rig_reserve(r, a, credit) != BT_OK) fail_msg("%s", a->answer.text);
    rig_say_words(r, a, UINT32_MAX);
    rig_deliver(r, a, NULL);
    return a;
}

/* ---- looking --------------------------------------------------------------------------------- */

decode_view rig_view(const rig *r) {
    decode_view view;
    decode_core_look(r->core, &view);
    return view;
}

void rig_expect_empty(const rig *r) {
    const decode_view view = rig_view(r);
    assert_int_equal(view.attempts, 0);
    assert_int_equal(view.samples, 0);
    assert_int_equal(view.pages_free, view.pages_total);
    assert_int_equal(view.rows_free, view.rows_total);
}

decode_sample *rig_sample(const rig *r, const rig_attempt *a, uint32_t sample) {
    return decode_find_sample(r->core, a->id, sample);
}
