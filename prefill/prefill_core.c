/* The core's surface: messages in, turns, deadlines, looking. */
#include "prefill/prefill_core.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "prefill/prefill_internal.h"

enum { CHECK_US = 1000 * 1000 };

/* ---- membership ------------------------------------------------------------------------------ */

static void end_attempts(void *context) {
    prefill_core *core = context;
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        prefill_end(core, &core->attempts[i], "router gone");
    }
}

static bool is_at_rest(void *context) {
    const prefill_core *core = context;
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        if (core->attempts[i].state != PREFILL_FREE) return false;
    }
    return core->sender == NULL || handoff_sender_active_count(core->sender) == 0;
}

static bt_status create_end(void *context) {
    prefill_core *core = context;
    const prefill_core_options *o = &core->options;
    const uint64_t weights_version = core->member.session.record.weights_version;
    if (core->cache != NULL && weights_version != core->weights_version)
        prefix_cache_clear(core->cache);
    core->weights_version = weights_version;
    handoff_sender_destroy(core->sender);
    core->sender = NULL;
    const handoff_sender_options options = {
        .mover = o->mover,
        .pages = o->pages,
        .rows = core->member.rows,
        .checksum = (record_checksum)(core->member.session.record.kv_checksum - 1),
        .page_tokens = o->page_tokens,
        .attempts_max = o->attempts_max,
        .incarnation = o->hello.incarnation,
        .chunk_bytes_max = o->chunk_bytes_max,
        .chunk_grace_us = o->chunk_grace_us,
        .clock = o->clock,
        .events = prefill_sender_events(core),
        .peer_events = membership_peer_events(&core->member),
    };
    return handoff_sender_create(&options, &core->sender);
}

static bt_status say_hello(void *context, xfer_peer peer) {
    return handoff_sender_hello(((prefill_core *)context)->sender, peer);
}

static void fill_ready(void *context, proto_ready *ready) {
    const prefill_core_options *o = &((prefill_core *)context)->options;
    ready->pages_total = kv_pool_count(o->pages).total;
    ready->page_tokens = o->page_tokens;
    ready->sequences_max = o->attempts_max;
    ready->step_tokens = o->chunk_tokens;
}

/* Prompt tokens that are here and not computed yet. */
static uint32_t queued_tokens(const prefill_core *core) {
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        const prefill_attempt *a = &core->attempts[i];
        const bool is_waiting = a->state == PREFILL_ASSEMBLING || a->state == PREFILL_QUEUED ||
                                a->state == PREFILL_COMPUTING;
        if (is_waiting) tokens += a->prompt_tokens - a->computed_tokens;
    }
    return tokens;
}

static void fill_pong(void *context, proto_ping *pong) {
    const prefill_core *core = context;
    pong->queued_tokens = queued_tokens(core);
    pong->pages_free = prefill_pages_free(core);
    pong->sequences_running = core->step.is_running ? core->step.batch.sequences : 0;
}

static bt_status init_membership(prefill_core *core) {
    const prefill_core_options *o = &core->options;
    const membership_options options = {
        .hello = o->hello,
        .clock = o->clock,
        .mover = o->mover,
        /* So that one prompt of the most samples fits beside as many others as there may be. */
        .row_slots = o->attempts_max + PROTO_SAMPLES_MAX - 1,
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

bt_status prefill_core_create(const prefill_core_options *options, prefill_core **out) {
    BT_ASSERT(options->attempts_max >= 1 && options->attempts_max <= PREFILL_ATTEMPTS_MAX);
    BT_ASSERT(options->page_tokens > 0 && options->context_tokens > 0);
    BT_ASSERT(options->chunk_tokens > 0 && options->prompts_max <= PREFILL_PROMPTS_MAX);
    prefill_core *core = bt_calloc(1, sizeof *core);
    if (core == NULL) return BT_ERR_WORKER_MEMORY;
    core->options = *options;
    if (core->options.step_us == 0) core->options.step_us = PREFILL_STEP_US;
    if (core->options.prompts_max == 0) core->options.prompts_max = PREFILL_PROMPTS_DEFAULT;
    core->pages_per_attempt = kv_pages_for(options->context_tokens, options->page_tokens);
    const size_t n = options->attempts_max;
    bt_status status = BT_ERR_WORKER_MEMORY;
    core->attempts = bt_calloc(n, sizeof *core->attempts);
    core->page_lists = bt_calloc(n * core->pages_per_attempt, sizeof *core->page_lists);
    if (core->attempts == NULL || core->page_lists == NULL) goto destroy;
    status = bt_id_map_init(&core->by_id, n);
    if (status == BT_OK) status = init_membership(core);
    if (status == BT_OK) status = prefill_batch_init(core);
    if (status == BT_OK && options->has_prefix_cache)
        status = prefix_cache_create(options->pages, options->page_tokens, &core->cache);
    if (status != BT_OK) goto destroy;
    options->compute->on_done = prefill_on_step_done;
    options->compute->context = core;
    *out = core;
    return BT_OK;

destroy:
    prefill_core_destroy(core);
    return status;
}

void prefill_core_destroy(prefill_core *core) {
    if (core == NULL) return;
    /* Nothing is computed and nothing moves any more, so every record can be given back. */
    for (uint32_t i = 0; core->attempts != NULL && i < core->options.attempts_max; i++) {
        core->attempts[i].is_in_step = false;
    }
    handoff_sender_destroy(core->sender);
    core->sender = NULL;
    for (uint32_t i = 0; core->attempts != NULL && i < core->options.attempts_max; i++) {
        prefill_attempt *a = &core->attempts[i];
        a->has_handoff = false;
        prefill_release(core, a, "end of the process");
    }
    membership_fini(&core->member);
    prefill_batch_fini(core);
    prefix_cache_destroy(core->cache);
    bt_id_map_fini(&core->by_id);
    bt_free(core->page_lists);
    bt_free(core->attempts);
    bt_free(core);
}

/* ---- messages -------------------------------------------------------------------------------- */

void prefill_core_on_open(prefill_core *core, proto_lane lane) {
    membership_on_open(&core->member, lane);
    prefill_core_turn(core);
}

void prefill_core_on_closed(prefill_core *core) {
    membership_end(&core->member);
    prefill_core_turn(core);
}

static void on_work(prefill_core *core, const proto_message *message) {
    switch (message->kind) {
    case PROTO_RUN:
        prefill_on_run(core, &message->run, message->payload, message->payload_bytes);
        return;
    case PROTO_CANCEL: prefill_on_cancel(core, message->cancel.attempt); return;
    case PROTO_HELLO:
    case PROTO_WELCOME:
    case PROTO_REFUSE:
    case PROTO_READY:
    case PROTO_PEER:
    case PROTO_PEER_GONE:
    case PROTO_PAIR_READY:
    case PROTO_PING:
    case PROTO_PONG:
    case PROTO_RESERVE:
    case PROTO_RESERVATION:
    case PROTO_PREFILL_DONE:
    case PROTO_CHUNK:
    case PROTO_CREDIT:
    case PROTO_CAPACITY:
    case PROTO_PROMPT:
    case PROTO_PROMPT_LOGPROBS:
    case PROTO_ABORT: break;
    }
    membership_reject(&core->member, message);
}

void prefill_core_on_message(prefill_core *core, proto_lane lane, const proto_message *message) {
    const bool is_stream_kind = message->kind == PROTO_RUN || message->kind == PROTO_CANCEL;
    if (membership_on_message(&core->member, lane, message, is_stream_kind)) {
        on_work(core, message);
    }
    prefill_core_turn(core);
}

/* ---- turning --------------------------------------------------------------------------------- */

void prefill_core_turn(prefill_core *core) {
    membership_turn(&core->member);
    prefill_step_turn(core);
}

static void expire(prefill_core *core, prefill_attempt *a, uint64_t now_us) {
    switch (a->state) {
    case PREFILL_ASSEMBLING:
    case PREFILL_QUEUED:
    case PREFILL_COMPUTING:
        if (now_us < a->deadline_us) return;
        prefill_fail(core, a, BT_ERR_REQUEST_DEADLINE,
                     "prefill: the deadline passed while %s, with %" PRIu32 " of %" PRIu32
                     " prompt tokens computed",
                     prefill_state_name(a->state), a->computed_tokens, a->prompt_tokens);
        return;
    case PREFILL_SENDING:    /* the sender keeps this deadline and reports it */
    case PREFILL_LEAVING:    /* the step has one */
    case PREFILL_QUARANTINE: /* the sender reports a peer that must be closed (on_stuck) */
    case PREFILL_FREE:
    case PREFILL_STATE_COUNT: return;
    }
}

void prefill_core_tick(prefill_core *core) {
    const uint64_t now_us = prefill_now(core);
    membership_tick(&core->member);
    core->changes++; /* whatever else a prompt may have waited for */
    /* The sender knows the same deadlines, but not what was waited for. */
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        expire(core, &core->attempts[i], now_us);
    }
    if (core->sender != NULL) handoff_sender_tick(core->sender);
    prefill_step_tick(core, now_us);
    if (now_us >= core->next_check_us) {
        core->next_check_us = now_us + CHECK_US;
        BT_ASSERT(prefill_core_check(core));
    }
    prefill_core_turn(core);
}

/* ---- looking --------------------------------------------------------------------------------- */

void prefill_core_look(const prefill_core *core, prefill_view *view_out) {
    const kv_pool_counts pages = kv_pool_count(core->options.pages);
    prefill_view view = {
        .session = core->member.session.state,
        .pages_total = pages.total,
        .pages_free = prefill_pages_free(core),
        .pages_cached = core->cache != NULL ? prefix_cache_count(core->cache).entries : 0,
        .pages_quarantined = pages.quarantined,
        .rows_total = membership_rows_total(&core->member),
        .rows_free = membership_rows_free(&core->member),
        .steps_total = core->steps_total,
        .tokens_total = core->tokens_total,
        .cached_tokens_total = core->cached_tokens_total,
        .accepted_total = core->accepted_total,
        .refused_total = core->refused_total,
        .released_total = core->released_total,
        .queued_tokens = queued_tokens(core),
        .is_step_running = core->step.is_running,
    };
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        const prefill_state state = core->attempts[i].state;
        view.attempts += state != PREFILL_FREE;
        view.queued += state == PREFILL_ASSEMBLING || state == PREFILL_QUEUED;
        view.computing += state == PREFILL_COMPUTING || state == PREFILL_LEAVING;
        view.sending += state == PREFILL_SENDING;
        view.quarantined += state == PREFILL_QUARANTINE;
    }
    *view_out = view;
}

/* Everything that one attempt owns or holds; false when something is not as its state says. */
static bool check_attempt(const prefill_core *core, const prefill_attempt *a) {
    const bool is_free = a->state == PREFILL_FREE;
    if (is_free) return a->page_count == 0 && !a->has_handoff && a->words.words == NULL;
    if (bt_id_map_get(&core->by_id, proto_attempt_id(a->id)) != a) return false;
    if (a->shared_count > a->page_count) return false;
    for (uint32_t p = 0; p < a->shared_count; p++)
        if (kv_pool_state(core->options.pages, a->pages[p]) != KV_PAGE_SHARED) return false;
    for (uint32_t p = a->shared_count; p < a->page_count; p++)
        if (kv_pool_owner(core->options.pages, a->pages[p]) != prefill_owner(a)) return false;
    return true;
}

bool prefill_core_check(const prefill_core *core) {
    uint32_t own_pages = 0;
    uint32_t attempts = 0;
    uint32_t slots = 0;
    uint64_t holds = 0;
    for (uint32_t i = 0; i < core->options.attempts_max; i++) {
        const prefill_attempt *a = &core->attempts[i];
        if (!check_attempt(core, a)) return false;
        attempts += a->state != PREFILL_FREE;
        own_pages += a->page_count - a->shared_count;
        holds += a->shared_count;
        slots += a->has_handoff ? a->generation.samples : 0;
    }
    if (core->by_id.count != attempts) return false;
    if (core->cache != NULL && !prefix_cache_check(core->cache)) return false;
    if (core->cache != NULL) holds += prefix_cache_count(core->cache).entries;
    const kv_pool_counts counts = kv_pool_count(core->options.pages);
    if (counts.owned + counts.quarantined != own_pages || counts.holds != holds) return false;
    const uint32_t held =
        membership_rows_total(&core->member) - membership_rows_free(&core->member);
    return held == slots && kv_pool_check(core->options.pages);
}
