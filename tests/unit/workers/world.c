/* The world's machinery; see the header. */
#include "world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"
#include "proto/row_stream.h"

enum { SETTLE_ROUNDS = 20000, NETWORK_STEPS = 100000, PING_US = 50 * 1000 };

/* ---- what the cores call --------------------------------------------------------------------- */

static void on_send(void *context, proto_lane lane, proto_message *message) {
    world_side *side = context;
    bt_error error = {0};
    if (proto_message_check(message, &error) != BT_OK) {
        fail_msg("%s sends a message that does not check: %s", side->name, error.text);
    }
    assert_true(side->sent_count < WORLD_SENT_MAX);
    side->sent[side->sent_count++] = (world_sent){.lane = lane, .message = *message};
}

static bool on_can_stream(void *context) {
    return !((world_side *)context)->is_stream_blocked;
}

static void on_open_streams(void *context) {
    ((world_side *)context)->wants_streams = true;
}

static void on_hang_up(void *context, const char *why) {
    world_side *side = context;
    side->hang_ups++;
    side->wants_streams = false;
    (void)snprintf(side->hang_up_text, sizeof side->hang_up_text, "%s", why);
}

static void on_refused(void *context, const char *text) {
    world_side *side = context;
    (void)snprintf(side->refused, sizeof side->refused, "%s", text);
}

static void on_broken(void *context, bt_status status, const char *text) {
    (void)text;
    ((world_side *)context)->broken = status;
}

static uint64_t world_now(void *context) {
    return ((world *)context)->now_us;
}

/* ---- creation -------------------------------------------------------------------------------- */

static void set_default(uint32_t *value, uint32_t fallback) {
    if (*value == 0) *value = fallback;
}

static proto_hello make_hello(const world_side *side) {
    const world_options *o = &side->world->options;
    proto_hello hello = {
        .role = side->role,
        .incarnation = side->incarnation,
        .pid = 1,
        .vocab_size = WORLD_VOCAB,
        .context_tokens = o->context_tokens,
        .tp_count = 1,
        .pp_count = 1,
        .dp_count = 1,
        .record = {.page_tokens = o->page_tokens, .kv_dtype = "sim", .numerics = "sim"},
    };
    (void)snprintf(hello.host, sizeof hello.host, "%s-host", side->name);
    return hello;
}

static void create_parts(world *w, world_side *side, uint32_t pages, uint32_t number) {
    const world_options *o = &w->options;
    side->world = w;
    const kv_pool_options pool = {.page_count = pages, .page_bytes = o->page_bytes, .layers = 2};
    assert_int_equal(kv_pool_create(&pool, &side->pages), BT_OK);
    side->sim = (compute_sim_options){
        .kv_memory = kv_pool_memory(side->pages),
        .kv_page_count = pages,
        .page_bytes = o->page_bytes,
        .page_tokens = o->page_tokens,
        .vocab_size = side == &w->prefill ? o->prefill_vocab : WORLD_VOCAB,
        .support_max = o->support_max,
    };
    assert_int_equal(compute_sim_create(&side->sim, &side->compute), BT_OK);
    assert_int_equal(xfer_loop_create(w->network, number, &side->mover), BT_OK);
    side->sent = bt_calloc(WORLD_SENT_MAX, sizeof *side->sent);
    assert_non_null(side->sent);
    side->incarnation = 0x1000u + number;
}

static void create_decode(world *w) {
    world_side *side = &w->decode;
    side->name = "decode";
    side->role = PROTO_ROLE_DECODE;
    create_parts(w, side, w->options.decode_pages, 1);
    const decode_core_options options = {
        .hello = make_hello(side),
        .clock = {.now_us = world_now, .context = w},
        .mover = side->mover,
        .pages = side->pages,
        .compute = side->compute,
        .page_tokens = w->options.page_tokens,
        .vocab_size = WORLD_VOCAB,
        .context_tokens = w->options.context_tokens,
        .queue_bytes = w->options.queue_bytes,
        .sequences_max = w->options.sequences_max,
        .chunk_bytes_max = w->options.chunk_bytes_max,
        .ops = {.send = on_send,
                .can_stream = on_can_stream,
                .open_streams = on_open_streams,
                .hang_up = on_hang_up,
                .on_refused = on_refused,
                .on_broken = on_broken,
                .context = side},
    };
    assert_int_equal(decode_core_create(&options, &side->decode), BT_OK);
}

static void create_prefill(world *w) {
    world_side *side = &w->prefill;
    side->name = "prefill";
    side->role = PROTO_ROLE_PREFILL;
    create_parts(w, side, w->options.prefill_pages, 2);
    const prefill_core_options options = {
        .hello = make_hello(side),
        .clock = {.now_us = world_now, .context = w},
        .mover = side->mover,
        .pages = side->pages,
        .compute = side->compute,
        .page_tokens = w->options.page_tokens,
        .vocab_size = WORLD_VOCAB,
        .context_tokens = w->options.context_tokens,
        .chunk_tokens = w->options.chunk_tokens,
        .attempts_max = w->options.attempts_max,
        .prompts_max = w->options.prompts_max,
        .has_prefix_cache = w->options.has_prefix_cache,
        .chunk_bytes_max = w->options.chunk_bytes_max,
        .ops = {.send = on_send,
                .can_stream = on_can_stream,
                .open_streams = on_open_streams,
                .hang_up = on_hang_up,
                .on_refused = on_refused,
                .on_broken = on_broken,
                .context = side},
    };
    assert_int_equal(prefill_core_create(&options, &side->prefill), BT_OK);
}

world *world_create(const world_options *options) {
    bt_log_set_level(BT_LOG_ERROR);
    world *w = bt_calloc(1, sizeof *w);
    assert_non_null(w);
    if (options != NULL) w->options = *options;
    world_options *o = &w->options;
    set_default(&o->decode_pages, 64);
    set_default(&o->prefill_pages, 64);
    set_default(&o->sequences_max, 8);
    set_default(&o->attempts_max, 8);
    set_default(&o->chunk_tokens, 32);
    set_default(&o->page_tokens, 16);
    set_default(&o->context_tokens, 1024);
    set_default(&o->prompts_max, 4);
    set_default(&o->cap, 8);
    set_default(&o->support_max, 8);
    set_default(&o->page_bytes, 16 * 32);
    set_default(&o->prefill_vocab, WORLD_VOCAB);
    w->now_us = 1000;
    w->router_incarnation = WORLD_ROUTER;
    w->next_counter = 1;
    for (uint32_t i = 0; i < WORLD_PROMPT_MAX; i++)
        w->prompt[i] = (int32_t)(i * 37 % WORLD_VOCAB);
    const xfer_loop_options network = {.part_bytes = 100, .is_stepped = true};
    assert_int_equal(xfer_loop_network_create(&network, &w->network), BT_OK);
    create_decode(w);
    create_prefill(w);
    return w;
}

static void destroy_side(world_side *side) {
    side->compute->ops->destroy(side->compute);
    side->mover->ops->destroy(side->mover);
    decode_core_destroy(side->decode);
    prefill_core_destroy(side->prefill);
    const kv_pool_counts counts = kv_pool_count(side->pages);
    assert_int_equal(counts.free, counts.total);
    kv_pool_destroy(side->pages);
    for (uint32_t i = 0; i < side->sent_count; i++)
        proto_message_drop_payload(&side->sent[i].message);
    bt_free(side->sent);
}

void world_destroy(world *w) {
    assert_true(decode_core_check(w->decode.decode));
    assert_true(prefill_core_check(w->prefill.prefill));
    destroy_side(&w->decode);
    destroy_side(&w->prefill);
    xfer_loop_network_destroy(w->network);
    bt_free(w);
}

/* ---- time ------------------------------------------------------------------------------------ */

static uint64_t side_progress(const world_side *side) {
    return side->sent_count + (side->decode != NULL
                                   ? world_decode_view(side->world).released_total
                                   : world_prefill_view(side->world).released_total);
}

static bool settle_side(world_side *side) {
    const uint64_t before = side_progress(side);
    bool has_done = false;
    if (!side->is_compute_held) has_done = compute_sim_poll(side->compute, side->world->now_us);
    if (side->decode != NULL) decode_core_turn(side->decode);
    if (side->prefill != NULL) prefill_core_turn(side->prefill);
    return has_done || side_progress(side) != before;
}

void world_settle(world *w) {
    bool has_done = true;
    for (int round = 0; has_done; round++) {
        assert_true(round < SETTLE_ROUNDS);
        has_done = false;
        if (!w->is_network_held) has_done = xfer_loop_run(w->network, NETWORK_STEPS) > 0;
        if (settle_side(&w->decode)) has_done = true;
        if (settle_side(&w->prefill)) has_done = true;
        assert_true(decode_core_check(w->decode.decode));
        assert_true(prefill_core_check(w->prefill.prefill));
    }
}

void world_run_until_filling(world *w) {
    w->is_network_held = true;
    world_settle(w);
    for (int i = 0; i < 100000; i++) {
        const uint32_t count = xfer_loop_event_count(w->network);
        for (uint32_t e = 0; e < count; e++) {
            const xfer_loop_event event = xfer_loop_event_at(w->network, e);
            if (event.kind == XFER_LOOP_COPY && event.at == w->decode.mover) return;
        }
        assert_true(count > 0);
        xfer_loop_step(w->network, 0);
        world_settle(w);
    }
    fail_msg("no transfer began");
}

static bool is_session_open(const world *w, const world_side *side) {
    const worker_session_state state =
        side->decode != NULL ? world_decode_view(w).session : world_prefill_view(w).session;
    return state == WORKER_SESSION_WELCOMED || state == WORKER_SESSION_SERVING;
}

void world_advance(world *w, uint64_t us) {
    const proto_message ping = {.kind = PROTO_PING, .ping = {.sequence = w->now_us}};
    while (us > 0) {
        const uint64_t step = us < PING_US ? us : PING_US;
        w->now_us += step;
        us -= step;
        if (is_session_open(w, &w->decode)) world_say(w, &w->decode, PROTO_LANE_CONTROL, &ping);
        if (is_session_open(w, &w->prefill)) world_say(w, &w->prefill, PROTO_LANE_CONTROL, &ping);
        decode_core_tick(w->decode.decode);
        prefill_core_tick(w->prefill.prefill);
        world_settle(w);
        proto_message pong;
        while (world_take(&w->decode, PROTO_PONG, &pong))
            continue;
        while (world_take(&w->prefill, PROTO_PONG, &pong))
            continue;
    }
}

/* ---- the router's part ----------------------------------------------------------------------- */

void world_say(world *w, world_side *side, proto_lane lane, const proto_message *message) {
    (void)w;
    if (side->decode != NULL) decode_core_on_message(side->decode, lane, message);
    if (side->prefill != NULL) prefill_core_on_message(side->prefill, lane, message);
}

bool world_take(world_side *side, proto_kind kind, proto_message *out) {
    for (uint32_t i = 0; i < side->sent_count; i++) {
        world_sent *sent = &side->sent[i];
        if (sent->is_taken || sent->message.kind != kind) continue;
        *out = sent->message;
        sent->is_taken = true;
        if (sent->message.payload == NULL) { /* forgotten: long tests send many */
            memmove(sent, sent + 1, (side->sent_count - i - 1) * sizeof *sent);
            side->sent_count--;
        }
        return true;
    }
    return false;
}

static void open_lane(world_side *side, proto_lane lane) {
    if (side->decode != NULL) decode_core_on_open(side->decode, lane);
    if (side->prefill != NULL) prefill_core_on_open(side->prefill, lane);
    proto_message hello;
    assert_true(world_take(side, PROTO_HELLO, &hello));
    assert_int_equal(hello.hello.lane, lane);
    assert_int_equal(hello.hello.role, side->role);
}

void world_welcome(world *w, world_side *side) {
    static uint32_t next_worker_id = 1;
    open_lane(side, PROTO_LANE_CONTROL);
    side->worker_id = next_worker_id++;
    const proto_message welcome = {
        .kind = PROTO_WELCOME,
        .welcome = {.router_incarnation = w->router_incarnation,
                    .router_host = "router-host",
                    .worker_id = side->worker_id,
                    .record = {.sampling_mask_max_tokens = w->options.cap,
                               .kv_checksum = RECORD_CHECKSUM_FULL + 1,
                               .weights_version = w->options.weights_version},
                    .heartbeat_ms = 100,
                    .dead_after_ms = 500}};
    world_say(w, side, PROTO_LANE_CONTROL, &welcome);
    world_settle(w);
    assert_true(side->wants_streams);
    open_lane(side, PROTO_LANE_STREAMS);
}

static void introduce(world *w, world_side *to, const world_side *peer) {
    const uint8_t *address = NULL;
    size_t bytes = 0;
    assert_int_equal(peer->mover->ops->get_address(peer->mover, &address, &bytes), BT_OK);
    proto_message message = {.kind = PROTO_PEER,
                             .peer = {.worker_id = peer->worker_id,
                                      .incarnation = peer->incarnation,
                                      .role = peer->role,
                                      .host = "peer-host",
                                      .address_bytes = (uint32_t)bytes}};
    memcpy(message.peer.address, address, bytes);
    world_say(w, to, PROTO_LANE_CONTROL, &message);
}

void world_introduce(world *w) {
    introduce(w, &w->decode, &w->prefill);
    introduce(w, &w->prefill, &w->decode);
}

void world_register(world *w) {
    proto_message message;
    world_welcome(w, &w->decode);
    world_welcome(w, &w->prefill);
    assert_true(world_take(&w->decode, PROTO_READY, &message));
    assert_int_equal(message.ready.pages_total, w->options.decode_pages);
    assert_true(world_take(&w->prefill, PROTO_READY, &message));
    assert_int_equal(message.ready.step_tokens, w->options.chunk_tokens);
    world_introduce(w);
    world_settle(w);
    assert_true(world_take(&w->decode, PROTO_PAIR_READY, &message));
    assert_int_equal(message.pair.status, BT_OK);
    assert_int_equal(message.pair.worker_id, w->prefill.worker_id);
    /* Prefill reports only what broke. */
    assert_false(world_take(&w->prefill, PROTO_PAIR_READY, &message));
}

proto_generation world_generation(uint32_t max_new_tokens, uint32_t mask_mode) {
    return (proto_generation){.max_new_tokens = max_new_tokens,
                              .temperature = 1,
                              .repetition_penalty = 1,
                              .samples = 1,
                              .top_p = 1,
                              .top_k = 0,
                              .mask_mode = mask_mode,
                              .wants_logprob = 1,
                              .seed = 7};
}

proto_attempt world_new_attempt(world *w) {
    return (proto_attempt){.router_incarnation = w->router_incarnation,
                           .counter = w->next_counter++};
}

proto_reservation world_reserve(world *w, proto_attempt attempt, uint32_t prompt_tokens,
                                const proto_generation *generation, uint64_t credit) {
    const proto_message message = {.kind = PROTO_RESERVE,
                                   .reserve = {.attempt = attempt,
                                               .prefill_worker_id = w->prefill.worker_id,
                                               .prefill_incarnation = w->prefill.incarnation,
                                               .prompt_tokens = prompt_tokens,
                                               .deadline_ms = 5000,
                                               .credit_bytes = credit,
                                               .emission_rows = w->options.emission_rows,
                                               .generation = *generation}};
    world_say(w, &w->decode, PROTO_LANE_CONTROL, &message);
    proto_message answer;
    assert_true(world_take(&w->decode, PROTO_RESERVATION, &answer));
    assert_true(proto_attempt_equal(answer.reservation.attempt, attempt));
    return answer.reservation;
}

void world_prompt(world *w, proto_attempt attempt, uint32_t prompt_tokens) {
    const proto_message message = {.kind = PROTO_PROMPT,
                                   .prompt = {.attempt = attempt},
                                   .payload = w->prompt,
                                   .payload_bytes = prompt_tokens * sizeof(int32_t)};
    world_say(w, &w->decode, PROTO_LANE_STREAMS, &message);
}

void world_run(world *w, proto_attempt attempt, const proto_reservation *slot,
               uint32_t prompt_tokens, const proto_generation *generation, uint32_t frame_tokens) {
    const bool is_handed_over = generation->max_new_tokens > 0;
    if (is_handed_over) world_prompt(w, attempt, prompt_tokens);
    for (uint32_t at = 0; at < prompt_tokens; at += frame_tokens) {
        const uint32_t left = prompt_tokens - at;
        proto_message message = {
            .kind = PROTO_RUN,
            .run = {.attempt = attempt,
                    .decode_worker_id = is_handed_over ? w->decode.worker_id : 0,
                    .decode_incarnation = is_handed_over ? w->decode.incarnation : 0,
                    .slot_count = is_handed_over ? slot->slot_count : 0,
                    .prompt_tokens = prompt_tokens,
                    .first_word = at,
                    .deadline_ms = 5000,
                    .generation = *generation},
            .payload = w->prompt + at,
            .payload_bytes = (left < frame_tokens ? left : frame_tokens) * sizeof(int32_t)};
        memcpy(message.run.slots, slot->slots, sizeof message.run.slots);
        world_say(w, &w->prefill, PROTO_LANE_STREAMS, &message);
    }
}

proto_attempt world_start(world *w, uint32_t prompt_tokens, const proto_generation *generation,
                          uint64_t credit) {
    const proto_attempt attempt = world_new_attempt(w);
    const proto_reservation slot = world_reserve(w, attempt, prompt_tokens, generation, credit);
    assert_int_equal(slot.status, BT_OK);
    world_run(w, attempt, &slot, prompt_tokens, generation, prompt_tokens);
    return attempt;
}

void world_cancel(world *w, world_side *side, proto_attempt attempt) {
    const proto_message message = {.kind = PROTO_CANCEL,
                                   .cancel = {.attempt = attempt, .sample = PROTO_ALL_SAMPLES}};
    const bool is_decode = side->decode != NULL;
    world_say(w, side, is_decode ? PROTO_LANE_CONTROL : PROTO_LANE_STREAMS, &message);
}

void world_credit(world *w, proto_attempt attempt, uint64_t bytes) {
    const proto_message message = {.kind = PROTO_CREDIT,
                                   .credit = {.attempt = attempt, .bytes = bytes}};
    world_say(w, &w->decode, PROTO_LANE_STREAMS, &message);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static uint8_t *collect(world *w, proto_attempt attempt, world_stream *out) {
    size_t bytes = 0;
    uint8_t *all = bt_calloc(1, 1);
    assert_non_null(all);
    for (uint32_t i = 0; i < w->decode.sent_count; i++) {
        const proto_message *m = &w->decode.sent[i].message;
        if (m->kind != PROTO_CHUNK || !proto_attempt_equal(m->chunk.attempt, attempt)) continue;
        assert_int_equal(w->decode.sent[i].lane, PROTO_LANE_STREAMS);
        assert_false(out->has_finish);
        assert_true(m->chunk.offset == bytes);
        assert_true(m->payload_bytes <= PROTO_FRAME_PAYLOAD_MAX);
        out->frames++;
        all = bt_realloc(all, bytes + m->payload_bytes + 1);
        assert_non_null(all);
        if (m->payload_bytes > 0) memcpy(all + bytes, m->payload, m->payload_bytes);
        bytes += m->payload_bytes;
        if (m->chunk.finish == PROTO_FINISH_NONE) continue;
        out->has_finish = true;
        out->last = m->chunk;
    }
    out->bytes = bytes;
    return all;
}

void world_read(world *w, proto_attempt attempt, world_stream *out) {
    memset(out, 0, sizeof *out);
    uint8_t *all = collect(w, attempt, out);
    for (size_t at = 0; at < out->bytes;) {
        token_row row;
        size_t used = 0;
        assert_int_equal(row_record_decode(all + at, out->bytes - at, w->options.cap, &row, &used),
                         BT_OK);
        if (used == 0) break; /* the rest of this row has not been sent */
        at += used;
        assert_true(out->row_count < WORLD_ROWS_MAX);
        world_row *to = &out->rows[out->row_count++];
        to->token = row.token;
        to->token_logprob = row.token_logprob;
        to->selected_logprob = row.selected_logprob;
        to->support_count = row.support_count;
        to->support_size = row.support_size;
        to->weights_version = row.weights_version;
        assert_true(row.support_count <= WORLD_SUPPORT_MAX);
        if (row.support_count == 0) continue;
        memcpy(to->ids, row.support_ids, row.support_count * sizeof to->ids[0]);
        if (row.support_logprobs == NULL) continue;
        memcpy(to->logprobs, row.support_logprobs, row.support_count * sizeof to->logprobs[0]);
    }
    bt_free(all);
    if (out->has_finish && out->last.finish != PROTO_FINISH_ERROR) {
        assert_int_equal(out->last.rows_total, out->row_count);
    }
}

sampler_params world_sampling(const world *w, const proto_generation *g) {
    return (sampler_params){.temperature = g->temperature,
                            .top_p = g->top_p,
                            .top_k = g->top_k,
                            .mask_mode = g->mask_mode,
                            .mask_max_tokens = w->options.cap,
                            .mask_bounded = g->mask_bounded,
                            .vocab_limit = g->vocab_limit,
                            .wants_logprob = g->wants_logprob,
                            .seed = g->seed};
}

void world_expect_rows(world *w, const world_stream *stream, uint32_t prompt_tokens,
                       const proto_generation *generation, uint32_t count) {
    static int32_t ids[WORLD_ROWS_MAX][WORLD_SUPPORT_MAX];
    static float logprobs[WORLD_ROWS_MAX][WORLD_SUPPORT_MAX];
    static sampler_row rows[WORLD_ROWS_MAX];
    const sampler_params params = world_sampling(w, generation);
    assert_true(count <= WORLD_ROWS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        rows[i] = (sampler_row){.support_ids = ids[i], .support_logprobs = logprobs[i]};
    }
    assert_int_equal(
        compute_sim_expect(&w->decode.sim, &params, w->prompt, prompt_tokens, count, rows), count);
    assert_int_equal(stream->row_count, count);
    for (uint32_t i = 0; i < count; i++) {
        const world_row *row = &stream->rows[i];
        assert_int_equal(row->token, rows[i].token);
        if (generation->wants_logprob) {
            assert_memory_equal(&row->token_logprob, &rows[i].token_logprob, sizeof(float));
        }
        assert_int_equal(row->support_count, rows[i].support_count);
        assert_int_equal(row->support_size, rows[i].cap_needed);
        if (generation->mask_mode == SAMPLER_MASK_OFF) continue;
        assert_memory_equal(&row->selected_logprob, &rows[i].selected_logprob, sizeof(float));
        assert_memory_equal(row->ids, ids[i], row->support_count * sizeof(int32_t));
        if (generation->mask_mode != SAMPLER_MASK_SUPPORT) continue;
        assert_memory_equal(row->logprobs, logprobs[i], row->support_count * sizeof(float));
    }
}

/* ---- looking --------------------------------------------------------------------------------- */

decode_view world_decode_view(const world *w) {
    decode_view view;
    decode_core_look(w->decode.decode, &view);
    return view;
}

prefill_view world_prefill_view(const world *w) {
    prefill_view view;
    prefill_core_look(w->prefill.prefill, &view);
    return view;
}

void world_expect_empty(world *w) {
    const decode_view d = world_decode_view(w);
    const prefill_view p = world_prefill_view(w);
    assert_int_equal(d.attempts, 0);
    assert_int_equal(d.pages_free, d.pages_total);
    assert_int_equal(d.rows_free, d.rows_total);
    assert_int_equal(p.attempts, 0);
    assert_int_equal(p.pages_free, p.pages_total);
    assert_int_equal(p.rows_free, p.rows_total);
    assert_int_equal(p.queued_tokens, 0);
}
