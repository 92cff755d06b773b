/* Names of kinds and roles, and the checks that every message passes on its way in and out. A check
 * is a list of conditions per kind; the first one that fails names the field. */
#include "proto/message.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"

void proto_message_drop_payload(proto_message *message) {
    if (message->block != NULL) {
        bt_block_release(message->block);
    } else {
        bt_free(message->payload);
    }
    message->payload = NULL;
    message->payload_bytes = 0;
    message->block = NULL;
}

const char *proto_kind_name(proto_kind kind) {
    switch (kind) {
    case PROTO_HELLO: return "hello";
    case PROTO_WELCOME: return "welcome";
    case PROTO_REFUSE: return "refuse";
    case PROTO_READY: return "ready";
    case PROTO_PEER: return "peer";
    case PROTO_PEER_GONE: return "peer_gone";
    case PROTO_PAIR_READY: return "pair_ready";
    case PROTO_PING: return "ping";
    case PROTO_PONG: return "pong";
    case PROTO_RESERVE: return "reserve";
    case PROTO_RESERVATION: return "reservation";
    case PROTO_RUN: return "run";
    case PROTO_PREFILL_DONE: return "prefill_done";
    case PROTO_CANCEL: return "cancel";
    case PROTO_CHUNK: return "chunk";
    case PROTO_CREDIT: return "credit";
    case PROTO_CAPACITY: return "capacity";
    case PROTO_PROMPT: return "prompt";
    case PROTO_PROMPT_LOGPROBS: return "prompt_logprobs";
    case PROTO_ABORT: return "abort";
    }
    return "unknown";
}

const char *proto_role_name(proto_role role) {
    switch (role) {
    case PROTO_ROLE_PREFILL: return "prefill";
    case PROTO_ROLE_DECODE: return "decode";
    }
    return "unknown";
}

/* Bytes of the character at text [available > 0]; 0 for what may not reach a log, an error sentence
 * or JSON: control characters and bytes that are not UTF-8. */
static size_t clean_bytes(const char *text, size_t available) {
    const unsigned char first = (unsigned char)*text;
    return first < 0x20 || first == 0x7f ? 0 : bt_utf8_next(text, available);
}

static bool is_clean_text(const char *text) {
    const char *end = text + strlen(text);
    while (text < end) {
        const size_t length = clean_bytes(text, (size_t)(end - text));
        if (length == 0) return false;
        text += length;
    }
    return true;
}

void proto_text_copy(char *to, size_t capacity, const char *from) {
    const char *end = from + strlen(from);
    size_t used = 0;
    while (from < end) {
        size_t length = clean_bytes(from, (size_t)(end - from));
        const bool is_bad = length == 0;
        if (is_bad) length = 1;
        if (used + length + 1 > capacity) break;
        if (is_bad) {
            to[used] = '?';
        } else {
            memcpy(to + used, from, length);
        }
        used += length;
        from += length;
    }
    if (capacity > 0) to[used] = '\0';
}

proto_generation proto_generation_default(void) {
    return (proto_generation){
        .temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f, .samples = 1};
}

uint32_t proto_words(const proto_generation *generation, uint32_t prompt_tokens) {
    return prompt_tokens + 2 * generation->bias_count + generation->logprob_id_count;
}

size_t proto_prompt_logprob_bytes(const proto_generation *generation) {
    return sizeof(float) * (1 + 2u * generation->top_logprobs + generation->logprob_id_count);
}

uint64_t proto_sample_seed(uint64_t seed, uint32_t sample) {
    if (sample == 0) return seed;
    uint64_t z = seed + sample * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

static bool is_status(int32_t status) {
    return status == BT_OK ||
           (status < 0 && status > -500 && bt_status_scope((bt_status)status) != BT_SCOPE_NONE);
}

/* NULL, or the name of the first field that is out of range. */

#define CHECK(condition, field)                                                                    \
    do {                                                                                           \
        if (!(condition)) return field;                                                            \
    } while (0)

static const char *check_attempt(const proto_attempt *a) {
    CHECK(a->router_incarnation != 0, "attempt.router_incarnation");
    CHECK(a->counter != 0, "attempt.counter");
    return NULL;
}

static bool is_within(float value, float low, float high) {
    return isfinite(value) && value >= low && value <= high;
}

static const char *check_extras(const proto_generation *g) {
    CHECK(g->min_new_tokens <= g->max_new_tokens, "min_new_tokens");
    CHECK(g->samples >= 1 && g->samples <= PROTO_SAMPLES_MAX, "samples");
    CHECK(is_within(g->min_p, 0.0f, 1.0f), "min_p");
    CHECK(g->filter <= 1, "filter");
    CHECK(is_within(g->frequency_penalty, -2.0f, 2.0f), "frequency_penalty");
    CHECK(is_within(g->presence_penalty, -2.0f, 2.0f), "presence_penalty");
    CHECK(is_within(g->repetition_penalty, 0.0f, 2.0f) && g->repetition_penalty > 0.0f,
          "repetition_penalty");
    CHECK(g->top_logprobs <= PROTO_TOP_LOGPROBS_MAX, "top_logprobs");
    CHECK(g->logprob_id_count <= PROTO_LOGPROB_IDS_MAX, "logprob_ids");
    CHECK(g->bias_count <= PROTO_BIASES_MAX, "biases");
    CHECK(g->wants_prompt_logprobs <= 1, "wants_prompt_logprobs");
    CHECK(g->wants_logprob == 1 ||
              (g->top_logprobs == 0 && g->logprob_id_count == 0 && g->wants_prompt_logprobs == 0),
          "wants_logprob");
    return NULL;
}

static const char *check_generation(const proto_generation *g) {
    CHECK(g->max_new_tokens <= PROTO_TOKENS_MAX, "max_new_tokens");
    CHECK(isfinite(g->temperature) && g->temperature > 0.0f, "temperature");
    CHECK(isfinite(g->top_p) && g->top_p > 0.0f && g->top_p <= 1.0f, "top_p");
    CHECK(g->mask_mode <= 2, "mask_mode");
    CHECK(g->mask_bounded <= 1 && (g->mask_bounded == 0 || g->mask_mode != 0), "mask_bounded");
    CHECK(g->wants_logprob <= 1, "wants_logprob");
    CHECK(g->vocab_limit <= PROTO_VOCAB_MAX, "vocab_limit");
    CHECK(g->stop_id_count <= PROTO_STOP_IDS_MAX, "stop_ids");
    CHECK(g->banned_id_count <= PROTO_STOP_IDS_MAX, "stop_ids");
    for (uint32_t i = 0; i < g->stop_id_count || i < g->banned_id_count; i++) {
        CHECK(g->stop_ids[i] >= 0 && g->stop_ids[i] < PROTO_VOCAB_MAX, "stop_ids");
    }
    return check_extras(g);
}

static const char *check_record(const cluster_record *r) {
    CHECK(r->sampling_mask_max_tokens <= PROTO_VOCAB_MAX, "sampling_mask_max_tokens");
    CHECK(r->kv_checksum <= RECORD_CHECKSUM_FULL + 1, "kv_checksum");
    CHECK(r->page_tokens <= 4096, "page_tokens");
    CHECK(is_clean_text(r->kv_dtype), "kv_dtype");
    CHECK(is_clean_text(r->kv_layout), "kv_layout");
    CHECK(is_clean_text(r->numerics), "numerics");
    CHECK(is_clean_text(r->model_fingerprint), "model_fingerprint");
    CHECK(is_clean_text(r->tokenizer_fingerprint), "tokenizer_fingerprint");
    return NULL;
}

static const char *check_ranks(const proto_hello *h) {
    CHECK(h->tp_count >= 1, "tp_count");
    CHECK(h->tp_rank < h->tp_count, "tp_rank");
    CHECK(h->pp_count >= 1, "pp_count");
    CHECK(h->pp_rank < h->pp_count, "pp_rank");
    CHECK(h->dp_count >= 1, "dp_count");
    CHECK(h->dp_rank < h->dp_count, "dp_rank");
    return NULL;
}

static bool is_role(proto_role role) {
    return role == PROTO_ROLE_PREFILL || role == PROTO_ROLE_DECODE;
}

static const char *check_hello(const proto_hello *h) {
    CHECK(h->lane == PROTO_LANE_CONTROL || h->lane == PROTO_LANE_STREAMS, "lane");
    CHECK(is_role(h->role), "role");
    CHECK(h->incarnation != 0, "incarnation");
    CHECK(is_clean_text(h->host), "host");
    CHECK(is_clean_text(h->model_name), "model_name");
    const char *bad = check_record(&h->record);
    CHECK(bad == NULL, bad);
    /* A peer of another major version gets this far, so that it can be refused with a sentence. */
    if (h->lane == PROTO_LANE_STREAMS || h->version_major != PROTO_VERSION_MAJOR) return NULL;
    CHECK(h->host[0] != '\0', "host");
    CHECK(h->pins < 1u << RECORD_FIELD_COUNT, "pins");
    CHECK(h->vocab_size >= 1 && h->vocab_size <= PROTO_VOCAB_MAX, "vocab_size");
    CHECK(h->context_tokens >= 1 && h->context_tokens <= PROTO_TOKENS_MAX, "context_tokens");
    CHECK(h->eos_count <= PROTO_EOS_IDS_MAX, "eos_ids");
    for (uint32_t i = 0; i < h->eos_count; i++) {
        CHECK(h->eos_ids[i] >= 0 && (uint32_t)h->eos_ids[i] < h->vocab_size, "eos_ids");
    }
    return check_ranks(h);
}

static const char *check_welcome(const proto_welcome *w) {
    CHECK(w->router_incarnation != 0, "router_incarnation");
    CHECK(w->router_host[0] != '\0' && is_clean_text(w->router_host), "router_host");
    CHECK(w->worker_id != 0, "worker_id");
    CHECK(w->heartbeat_ms >= 1, "heartbeat_ms");
    CHECK(w->dead_after_ms > w->heartbeat_ms, "dead_after_ms");
    CHECK(w->record.sampling_mask_max_tokens >= 1, "sampling_mask_max_tokens");
    CHECK(w->record.kv_checksum >= 1, "kv_checksum");
    return check_record(&w->record);
}

static const char *check_ready(const proto_ready *r) {
    CHECK(r->address_bytes >= 1 && r->address_bytes <= PROTO_ADDRESS_MAX, "address");
    CHECK(r->pages_total >= 1, "pages_total");
    CHECK(r->page_tokens >= 1 && r->page_tokens <= 4096, "page_tokens");
    CHECK(r->rows_total >= 1, "rows_total");
    CHECK(r->step_tokens <= PROTO_TOKENS_MAX, "step_tokens");
    return NULL;
}

static const char *check_peer(const proto_peer *p) {
    CHECK(p->worker_id != 0, "worker_id");
    CHECK(p->incarnation != 0, "incarnation");
    CHECK(is_role(p->role), "role");
    CHECK(p->host[0] != '\0' && is_clean_text(p->host), "host");
    CHECK(p->address_bytes >= 1 && p->address_bytes <= PROTO_ADDRESS_MAX, "address");
    return NULL;
}

static const char *check_pair(const proto_pair *p) {
    CHECK(p->worker_id != 0, "worker_id");
    CHECK(p->incarnation != 0, "incarnation");
    CHECK(is_status(p->status), "status");
    return NULL;
}

static const char *check_reserve(const proto_reserve *r) {
    const char *bad = check_attempt(&r->attempt);
    CHECK(bad == NULL, bad);
    CHECK(r->prefill_worker_id != 0, "prefill_worker_id");
    CHECK(r->prefill_incarnation != 0, "prefill_incarnation");
    CHECK(r->prompt_tokens >= 1 && r->prompt_tokens <= PROTO_TOKENS_MAX, "prompt_tokens");
    CHECK(r->deadline_ms >= 1, "deadline_ms");
    CHECK(r->credit_bytes >= 1, "credit_bytes");
    CHECK(r->generation.max_new_tokens >= 1, "max_new_tokens");
    return check_generation(&r->generation);
}

static const char *check_slots(const proto_slot *slots, uint32_t count) {
    CHECK(count <= PROTO_SAMPLES_MAX, "slots");
    for (uint32_t i = 0; i < count; i++) {
        CHECK(slots[i].generation != 0, "slot_generation");
    }
    return NULL;
}

static const char *check_reservation(const proto_reservation *r) {
    const char *bad = check_attempt(&r->attempt);
    CHECK(bad == NULL, bad);
    CHECK(is_status(r->status), "status");
    CHECK((r->status == BT_OK) == (r->slot_count > 0), "slots");
    CHECK(is_clean_text(r->text), "text");
    return check_slots(r->slots, r->slot_count);
}

static const char *check_run(const proto_run *r, size_t payload_bytes) {
    const char *bad = check_attempt(&r->attempt);
    CHECK(bad == NULL, bad);
    const bool is_handed_over = r->generation.max_new_tokens > 0;
    CHECK((r->decode_worker_id != 0) == is_handed_over, "decode_worker_id");
    CHECK((r->decode_incarnation != 0) == is_handed_over, "decode_incarnation");
    CHECK(r->slot_count == (is_handed_over ? r->generation.samples : 0), "slots");
    bad = check_slots(r->slots, r->slot_count);
    CHECK(bad == NULL, bad);
    CHECK(r->prompt_tokens >= 1 && r->prompt_tokens <= PROTO_TOKENS_MAX, "prompt_tokens");
    CHECK(r->deadline_ms >= 1, "deadline_ms");
    bad = check_generation(&r->generation);
    CHECK(bad == NULL, bad);
    CHECK(!r->generation.wants_prompt_logprobs ||
              r->generation.prompt_logprobs_from < r->prompt_tokens,
          "prompt_logprobs_from");
    const uint32_t words = proto_words(&r->generation, r->prompt_tokens);
    CHECK(r->first_word < words, "first_word");
    CHECK(payload_bytes > 0 && payload_bytes % sizeof(int32_t) == 0, "payload");
    CHECK(payload_bytes / sizeof(int32_t) <= words - r->first_word, "payload");
    return NULL;
}

static const char *check_prompt(const proto_prompt *p, size_t payload_bytes) {
    const char *bad = check_attempt(&p->attempt);
    CHECK(bad == NULL, bad);
    CHECK(p->first_word <= 2 * PROTO_TOKENS_MAX, "first_word");
    CHECK(payload_bytes > 0 && payload_bytes % sizeof(int32_t) == 0, "payload");
    return NULL;
}

static const char *check_prompt_logprobs(const proto_prompt_logprobs *p, size_t payload_bytes) {
    const char *bad = check_attempt(&p->attempt);
    CHECK(bad == NULL, bad);
    CHECK(p->first_position >= 1 && p->first_position < PROTO_TOKENS_MAX, "first_position");
    CHECK(p->count >= 1 && p->count <= PROTO_TOKENS_MAX - p->first_position, "count");
    CHECK(payload_bytes > 0 && payload_bytes % (sizeof(float) * p->count) == 0, "payload");
    return NULL;
}

static const char *check_cancel(const proto_cancel *c) {
    const char *bad = check_attempt(&c->attempt);
    CHECK(bad == NULL, bad);
    CHECK(c->sample < PROTO_SAMPLES_MAX || c->sample == PROTO_ALL_SAMPLES, "sample");
    return NULL;
}

static const char *check_prefill_done(const proto_prefill_done *p) {
    const char *bad = check_attempt(&p->attempt);
    CHECK(bad == NULL, bad);
    CHECK(is_status(p->status), "status");
    CHECK(p->cap_needed == 0 || p->status == BT_ERR_REQUEST_OVERFLOW, "cap_needed");
    CHECK(is_clean_text(p->text), "text");
    return NULL;
}

static const char *check_chunk(const proto_chunk *c, size_t payload_bytes) {
    const char *bad = check_attempt(&c->attempt);
    CHECK(bad == NULL, bad);
    CHECK(c->sample < PROTO_SAMPLES_MAX, "sample");
    CHECK(c->finish >= PROTO_FINISH_NONE && c->finish <= PROTO_FINISH_ABORT, "finish");
    CHECK(is_status(c->status), "status");
    CHECK((c->status != BT_OK) == (c->finish == PROTO_FINISH_ERROR), "status");
    CHECK(c->cap_needed == 0 || c->status == BT_ERR_REQUEST_OVERFLOW, "cap_needed");
    CHECK(c->finish != PROTO_FINISH_STOP || c->matched_id >= 0, "matched_id");
    CHECK(c->finish != PROTO_FINISH_NONE || payload_bytes > 0, "payload");
    CHECK(c->offset <= UINT64_MAX - payload_bytes, "offset");
    CHECK(is_clean_text(c->text), "text");
    return NULL;
}

static const char *check_credit(const proto_credit *c) {
    const char *bad = check_attempt(&c->attempt);
    CHECK(bad == NULL, bad);
    CHECK(c->sample < PROTO_SAMPLES_MAX, "sample");
    CHECK(c->bytes >= 1, "bytes");
    return NULL;
}

#undef CHECK

static const char *check_body(const proto_message *m) {
    switch (m->kind) {
    case PROTO_HELLO: return check_hello(&m->hello);
    case PROTO_WELCOME: return check_welcome(&m->welcome);
    case PROTO_REFUSE:
        return m->refuse.text[0] != '\0' && is_clean_text(m->refuse.text) ? NULL : "text";
    case PROTO_READY: return check_ready(&m->ready);
    case PROTO_PEER: return check_peer(&m->peer);
    case PROTO_PEER_GONE:
    case PROTO_PAIR_READY: return check_pair(&m->pair);
    case PROTO_PING:
    case PROTO_PONG: return m->ping.sequence != 0 ? NULL : "sequence";
    case PROTO_RESERVE: return check_reserve(&m->reserve);
    case PROTO_RESERVATION: return check_reservation(&m->reservation);
    case PROTO_RUN: return check_run(&m->run, m->payload_bytes);
    case PROTO_PREFILL_DONE: return check_prefill_done(&m->prefill_done);
    case PROTO_CANCEL: return check_cancel(&m->cancel);
    case PROTO_ABORT: return check_cancel(&m->abort);
    case PROTO_CHUNK: return check_chunk(&m->chunk, m->payload_bytes);
    case PROTO_CREDIT: return check_credit(&m->credit);
    case PROTO_CAPACITY: return NULL;
    case PROTO_PROMPT: return check_prompt(&m->prompt, m->payload_bytes);
    case PROTO_PROMPT_LOGPROBS: return check_prompt_logprobs(&m->prompt_logprobs, m->payload_bytes);
    }
    return "kind";
}

bt_status proto_message_check(const proto_message *message, bt_error *error) {
    const bool may_carry = message->kind == PROTO_RUN || message->kind == PROTO_CHUNK ||
                           message->kind == PROTO_PROMPT || message->kind == PROTO_PROMPT_LOGPROBS;
    const char *bad = NULL;
    if (message->payload_bytes > (may_carry ? PROTO_FRAME_PAYLOAD_MAX : 0)) {
        bad = "payload";
    } else {
        bad = check_body(message);
    }
    if (bad == NULL) return BT_OK;
    return bt_fail(error, BT_ERR_PEER_PROTOCOL, "%s frame with a bad %s",
                   proto_kind_name(message->kind), bad);
}

bt_status proto_generation_check(const proto_generation *generation, bt_error *error) {
    const char *bad = check_generation(generation);
    if (bad == NULL) return BT_OK;
    return bt_fail(error, BT_ERR_REQUEST_INVALID, "%s is out of range", bad);
}
