/* The core's surface: messages in, turns, deadlines, looking. */
#include "decode/decode_core.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/decode_internal.h"

enum { CHECK_US = 1000 * 1000 };

/* ---- membership ------------------------------------------------------------------------------ */

static void end_attempts(void *context) {
    decode_core *core = context;
    core->owes_capacity = false;
    for (uint32_t i = 0; i < core->options.sequences_max; i++)
        decode_end_attempt(core, &core->attempts[i], "router gone");
}

static bool is_at_rest(void *context) {
    const decode_core *core = context;
    if (core->order_count > 0) return false;
    return core->receiver == NULL || handoff_receiver_active_count(core->receiver) == 0;
}

static bt_status create_end(void *context) {
    decode_core *core = context;
    const decode_core_options *o = &core->options;
    handoff_receiver_destroy(core->receiver);
    core->receiver = NULL;
    const handoff_receiver_options options = {
        .mover = o->mover,
        .pages = o->pages,
        .rows = core->member.rows,
        .checksum = (record_checksum)(core->member.session.record.kv_checksum - 1),
        .page_tokens = o->page_tokens,
        /* An attempt whose ack is not sent yet counts there, and no longer here. */
        .attempts_max = 2 * o->sequences_max + 16,
        .chunk_bytes_max = o->chunk_bytes_max,
        .chunk_grace_us = o->chunk_grace_us,
        .clock = o->clock,
        .events = decode_receiver_events(core),
        .peer_events = membership_peer_events(&core->member),
    };
    return handoff_receiver_create(&options, &core->receiver);
}

static bt_status say_hello(void *context, xfer_peer peer) {
    return handoff_receiver_hello(((decode_core *)context)->receiver, peer);
}

static void fill_ready(void *context, proto_ready *ready) {
    const decode_core_options *o = &((decode_core *)context)->options;
    ready->pages_total = kv_pool_count(o->pages).total;
    ready->page_tokens = o->page_tokens;
    ready->sequences_max = o->sequences_max;
}

static void fill_pong(void *context, proto_ping *pong) {
    const decode_core *core = context;
    pong->pages_free = kv_pool_count(core->options.pages).free;
    for (uint32_t i = 0; i < core->order_count; i++) {
        const decode_state state = core->order[i]->state;
        pong->sequences_running += state == DECODE_RUNNING || state == DECODE_RECOMPUTING;
    }
}

static bt_status init_membership(decode_core *core) {
    const decode_core_options *o = &core->options;
    const membership_options options = {
        .hello = o->hello,
        .clock = o->clock,
        .mover = o->mover,
        .row_slots = o->sequences_max,
        .program = {.send = o->ops.send,
                    .open_streams = o->ops.open_streams,
                    .hang_up = o->ops.hang_up,
                    .on_refused = o->ops.on_refused,
                    .on_broken = o->ops.on_broken,
                    .context = o->ops.context},
        .ops = {.end_attempts = end_attempts,
                .is_at_rest = is_at_rest,
                .create_end = create_end,
                .say_hello = say_hello,
                .fill_ready = fill_ready,
                .fill_pong = fill_pong,
                .context = core},
    };
    return membership_init(&core->member, &options);
}

/* ---- creation -------------------------------------------------------------------------------- */

static bt_status make_records(decode_core *core, size_t n) {
    core->pages_per_sample = kv_pages_for(core->options.context_tokens, core->options.page_tokens);
    core->attempts = bt_calloc(n, sizeof *core->attempts);
    core->samples = bt_calloc(n, sizeof *core->samples);
    core->order = bt_calloc(n, sizeof(decode_sample *));
    core->page_lists = bt_calloc(n * core->pages_per_sample, sizeof *core->page_lists);
    core->page_scratch = bt_calloc(core->pages_per_sample, sizeof *core->page_scratch);
    const bool is_made = core->attempts != NULL && core->samples != NULL && core->order != NULL &&
                         core->page_lists != NULL && core->page_scratch != NULL;
    return is_made ? BT_OK : BT_ERR_WORKER_MEMORY;
}

bt_status decode_core_create(const decode_core_options *options, decode_core **out) {
    BT_ASSERT(options->sequences_max >= 1 && options->sequences_max <= DECODE_SEQUENCES_MAX);
    BT_ASSERT(options->page_tokens > 0 && options->context_tokens > 0);
    decode_core *core = bt_calloc(1, sizeof *core);
    if (core == NULL) return BT_ERR_WORKER_MEMORY;
    core->options = *options;
    if (core->options.park_us == 0) core->options.park_us = DECODE_PARK_US;
    if (core->options.step_us == 0) core->options.step_us = DECODE_STEP_US;
    if (core->options.pages_us == 0) core->options.pages_us = DECODE_PAGES_US;
    if (core->options.queue_bytes == 0) core->options.queue_bytes = DECODE_QUEUE_BYTES;
    if (core->options.chunk_tokens == 0) core->options.chunk_tokens = DECODE_CHUNK_TOKENS;
    const size_t n = options->sequences_max;
    bt_status status = make_records(core, n);
    if (status == BT_OK) status = bt_id_map_init(&core->by_id, n);
    /* Queues bound what is out, and what is kept is trimmed to what they use. */
    const bt_block_pool_options blocks = {.idle_bytes_max = SIZE_MAX};
    if (status == BT_OK) status = bt_block_pool_create(&blocks, &core->blocks);
    if (status == BT_OK) status = init_membership(core);
    if (status == BT_OK) status = decode_step_init(core);
    if (status != BT_OK) goto destroy;
    options->compute->on_done = decode_on_step_done;
    options->compute->context = core;
    *out = core;
    return BT_OK;

destroy:
    decode_core_destroy(core);
    return status;
}

void decode_core_destroy(decode_core *core) {
    if (core == NULL) return;
    /* Nothing is computed and nothing moves any more, so every record can be given back. */
    for (uint32_t i = 0; i < core->order_count; i++)
        core->order[i]->is_in_step = false;
    handoff_receiver_destroy(core->receiver);
    core->receiver = NULL;
    while (core->order_count > 0) {
        decode_attempt *a = core->order[0]->attempt;
        if (a->state == DECODE_ATTEMPT_RESERVED) {
            decode_set_attempt_state(core, a, DECODE_ATTEMPT_QUARANTINE, "end of the process");
        }
        decode_release_attempt(core, a, "end of the process");
    }
    membership_fini(&core->member);
    decode_step_fini(core);
    bt_id_map_fini(&core->by_id);
    bt_block_pool_destroy(core->blocks);
    bt_free(core->page_scratch);
    bt_free(core->page_lists);
    bt_free(core->order);
    bt_free(core->samples);
    bt_free(core->attempts);
    bt_free(core);
}

/* ---- messages -------------------------------------------------------------------------------- */

void decode_core_on_open(decode_core *core, proto_lane lane) {
    membership_on_open(&core->member, lane);
    decode_core_turn(core);
}

void decode_core_on_closed(decode_core *core) {
    membership_end(&core->member);
    decode_core_turn(core);
}

static void on_work(decode_core *core, const proto_message *message) {
    switch (message->kind) {
    case PROTO_RESERVE: decode_on_reserve(core, &message->reserve); return;
    case PROTO_CANCEL: decode_on_cancel(core, &message->cancel); return;
    case PROTO_ABORT: decode_on_abort(core, &message->abort); return;
    case PROTO_CREDIT: decode_on_credit(core, &message->credit); return;
    case PROTO_PROMPT: decode_on_prompt(core, message); return;
    case PROTO_HELLO:
    case PROTO_WELCOME:
    case PROTO_REFUSE:
    case PROTO_READY:
    case PROTO_PEER:
    case PROTO_PEER_GONE:
    case PROTO_PAIR_READY:
    case PROTO_PING:
    case PROTO_PONG:
    case PROTO_RESERVATION:
    case PROTO_RUN:
    case PROTO_PREFILL_DONE:
    case PROTO_CHUNK:
    case PROTO_CAPACITY:
    case PROTO_PROMPT_LOGPROBS: break;
    }
    membership_reject(&core->member, message);
}

void decode_core_on_message(decode_core *core, proto_lane lane, const proto_message *message) {
    const bool is_stream_kind = message->kind == PROTO_CREDIT || message->kind == PROTO_PROMPT;
    if (membership_on_message(&core->member, lane, message, is_stream_kind)) {
        on_work(core, message);
    }
    decode_core_turn(core);
}

/* ---- turning --------------------------------------------------------------------------------- */

void decode_core_turn(decode_core *core) {
    membership_turn(&core->member);
    decode_step_turn(core); /* first, so that sending overlaps with the step */
    decode_stream_turn(core);
    decode_step_turn(core); /* what is no longer parked */
    decode_capacity_turn(core);
}

static void expire(decode_core *core, decode_sample *s, uint64_t now_us) {
    const char *text = "decode: waited past the deadline for KV pages";
    switch (s->state) {
    case DECODE_RUNNING: /* a step has a deadline of its own */
        if (s->is_in_step || s->deadline_us == 0) return;
        break;
    case DECODE_RETRACTED:
    case DECODE_PARKED:
    case DECODE_DRAINING:
        if (s->state == DECODE_RETRACTED && !s->lacks_room) break;
        text = "decode: the reader of the row stream took nothing in time";
        break;
    case DECODE_RESERVED:    /* the receiver keeps this deadline and reports it */
    case DECODE_WAITING:     /* the attempt's */
    case DECODE_RECOMPUTING: /* the step's */
    case DECODE_LEAVING:     /* likewise */
    case DECODE_FREE:
    case DECODE_STATE_COUNT: return;
    }
    if (now_us < s->deadline_us) return;
    decode_abandon(core, s, BT_ERR_REQUEST_DEADLINE, text);
    decode_end(core, s, "deadline");
}

/* Samples that wait for the words wait as long as the handoff might have taken. */
static void expire_words(decode_core *core, decode_attempt *a, uint64_t now_us) {
    if (a->state != DECODE_ATTEMPT_LIVE || decode_has_words(a) || now_us < a->deadline_us) return;
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        decode_sample *s = a->samples[i];
        if (s == NULL || (s->state != DECODE_WAITING && s->state != DECODE_RETRACTED)) continue;
        decode_finish_error(core, s, BT_ERR_REQUEST_DEADLINE,
                            "decode: waited past the deadline for the prompt (%" PRIu32
                            " of %" PRIu32 " words) from the router",
                            a->words.received, a->words.count);
    }
}

void decode_core_tick(decode_core *core) {
    const uint64_t now_us = decode_now(core);
    membership_tick(&core->member);
    if (core->receiver != NULL) handoff_receiver_tick(core->receiver);
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        expire(core, &core->samples[i], now_us);
        expire_words(core, &core->attempts[i], now_us);
    }
    decode_step_tick(core, now_us);
    if (now_us >= core->next_check_us) {
        core->next_check_us = now_us + CHECK_US;
        BT_ASSERT(decode_core_check(core));
        bt_block_pool_trim(core->blocks);
    }
    decode_core_turn(core);
}

/* ---- looking --------------------------------------------------------------------------------- */

void decode_core_look(const decode_core *core, decode_view *view_out) {
    const kv_pool_counts pages = kv_pool_count(core->options.pages);
    decode_view view = {
        .session = core->member.session.state,
        .pages_total = pages.total,
        .pages_free = pages.free,
        .pages_quarantined = pages.quarantined,
        .rows_total = membership_rows_total(&core->member),
        .rows_free = membership_rows_free(&core->member),
        .steps_total = core->steps_total,
        .tokens_total = core->tokens_total,
        .accepted_total = core->accepted_total,
        .refused_total = core->refused_total,
        .released_total = core->released_total,
        .retractions_total = core->retractions_total,
        .recomputed_tokens_total = core->recomputed_total,
        .is_step_running = core->step.is_running,
    };
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        const decode_attempt_state state = core->attempts[i].state;
        view.attempts += state != DECODE_ATTEMPT_FREE;
        view.reserved += state == DECODE_ATTEMPT_RESERVED;
        view.quarantined += state == DECODE_ATTEMPT_QUARANTINE;
    }
    for (uint32_t i = 0; i < core->order_count; i++) {
        const decode_state state = core->order[i]->state;
        view.samples++;
        view.waiting += state == DECODE_WAITING;
        view.running += state == DECODE_RUNNING || state == DECODE_LEAVING;
        view.parked += state == DECODE_PARKED;
        view.retracted += state == DECODE_RETRACTED;
        view.recomputing += state == DECODE_RECOMPUTING;
        view.draining += state == DECODE_DRAINING;
    }
    *view_out = view;
}

bool decode_core_check(const decode_core *core) {
    return decode_check(core);
}
