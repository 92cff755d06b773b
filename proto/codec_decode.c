/* Protobuf header -> proto_message. protobuf-c unpacks into a bounded arena on the stack; strings
 * and arrays are copied out with their limits; proto_message_check then has the last word. */
#include <assert.h>
#include <string.h>

#include "baton.pb-c.h"
#include "proto/codec.h"

/* Unpacking needs the header's strings once more, a few structs and, for hostile input, tables of
 * its fields. What does not fit is refused: the largest message of ours needs about 6 KiB. */
enum { ARENA_BYTES = 64 * 1024 };

typedef struct unpack_arena {
    size_t used;
    _Alignas(16) uint8_t memory[ARENA_BYTES];
} unpack_arena;

static void *arena_allocate(void *context, size_t bytes) {
    unpack_arena *arena = context;
    if (bytes > ARENA_BYTES) return NULL;
    const size_t rounded = (bytes + 15u) & ~(size_t)15u;
    if (rounded > ARENA_BYTES - arena->used) return NULL;
    void *block = arena->memory + arena->used;
    arena->used += rounded;
    return block;
}

static void arena_free(void *context, void *block) {
    (void)context;
    (void)block;
}

/* The first thing found wrong; NULL so far. */
typedef struct decoding {
    const char *bad;
} decoding;

static void get_text(decoding *d, const char *from, char *to, size_t capacity, const char *field) {
    const size_t bytes = strlen(from);
    if (bytes >= capacity) {
        d->bad = field;
        return;
    }
    memcpy(to, from, bytes + 1);
}

static uint32_t get_ids(decoding *d, const int32_t *from, size_t count, int32_t *to,
                        size_t capacity, const char *field) {
    if (count > capacity) {
        d->bad = field;
        return 0;
    }
    if (count > 0) memcpy(to, from, count * sizeof *to);
    return (uint32_t)count;
}

static uint32_t get_address(decoding *d, const ProtobufCBinaryData *from, uint8_t *to) {
    if (from->len > PROTO_ADDRESS_MAX) {
        d->bad = "address";
        return 0;
    }
    if (from->len > 0) memcpy(to, from->data, from->len);
    return (uint32_t)from->len;
}

static proto_attempt get_attempt(decoding *d, const Baton__Attempt *a) {
    if (a == NULL) {
        d->bad = "attempt";
        return (proto_attempt){0};
    }
    return (proto_attempt){.router_incarnation = a->router_incarnation, .counter = a->counter};
}

static void get_record(decoding *d, const Baton__Record *r, cluster_record *out) {
    if (r == NULL) return; /* Nothing is known: all fields stay zero. */
    out->sampling_mask_max_tokens = r->sampling_mask_max_tokens;
    out->kv_checksum = r->kv_checksum;
    out->page_tokens = r->page_tokens;
    get_text(d, r->kv_dtype, out->kv_dtype, sizeof out->kv_dtype, "kv_dtype");
    get_text(d, r->kv_layout, out->kv_layout, sizeof out->kv_layout, "kv_layout");
    get_text(d, r->numerics, out->numerics, sizeof out->numerics, "numerics");
    get_text(d, r->model_fingerprint, out->model_fingerprint, sizeof out->model_fingerprint,
             "model_fingerprint");
    get_text(d, r->tokenizer_fingerprint, out->tokenizer_fingerprint,
             sizeof out->tokenizer_fingerprint, "tokenizer_fingerprint");
    out->row_format = r->row_format;
    out->protocol_minor = r->protocol_minor;
    out->weights_version = r->weights_version;
}

static void get_generation(decoding *d, const Baton__Generation *g, proto_generation *out) {
    if (g == NULL) {
        d->bad = "generation";
        return;
    }
    out->max_new_tokens = g->max_new_tokens;
    out->temperature = g->temperature;
    out->top_p = g->top_p;
    out->top_k = g->top_k;
    out->mask_mode = g->mask_mode;
    out->mask_bounded = g->mask_bounded;
    out->wants_logprob = g->wants_logprob;
    out->vocab_limit = g->vocab_limit;
    out->seed = g->seed;
    out->stop_id_count =
        get_ids(d, g->stop_ids, g->n_stop_ids, out->stop_ids, PROTO_STOP_IDS_MAX, "stop_ids");
    out->banned_id_count = g->banned_id_count;
    if (g->stop_id_count > out->stop_id_count || g->banned_id_count > out->stop_id_count)
        d->bad = "stop_ids";
    out->stop_id_count = g->stop_id_count;
    out->min_new_tokens = g->min_new_tokens;
    out->samples = g->samples;
    out->min_p = g->min_p;
    out->filter = g->filter;
    out->frequency_penalty = g->frequency_penalty;
    out->presence_penalty = g->presence_penalty;
    out->repetition_penalty = g->repetition_penalty;
    out->top_logprobs = g->top_logprobs;
    out->logprob_id_count = g->logprob_id_count;
    out->bias_count = g->bias_count;
    out->wants_prompt_logprobs = g->wants_prompt_logprobs;
    out->prompt_logprobs_from = g->prompt_logprobs_from;
    out->cache_salt[0] = g->cache_salt_low;
    out->cache_salt[1] = g->cache_salt_high;
}

static uint32_t get_slots(decoding *d, const uint32_t *indexes, size_t index_count,
                          const uint32_t *generations, size_t generation_count, proto_slot *to) {
    if (index_count != generation_count || index_count > PROTO_SAMPLES_MAX) {
        d->bad = "slots";
        return 0;
    }
    for (size_t i = 0; i < index_count; i++)
        to[i] = (proto_slot){.index = indexes[i], .generation = generations[i]};
    return (uint32_t)index_count;
}

static void get_hello(decoding *d, const Baton__Hello *h, proto_hello *out) {
    out->version_major = h->version_major;
    out->version_minor = h->version_minor;
    out->lane = (proto_lane)h->lane;
    out->role = (proto_role)h->role;
    out->incarnation = h->incarnation;
    get_text(d, h->host, out->host, sizeof out->host, "host");
    out->pid = h->pid;
    get_record(d, h->record, &out->record);
    out->pins = h->pins;
    get_text(d, h->model_name, out->model_name, sizeof out->model_name, "model_name");
    out->vocab_size = h->vocab_size;
    out->context_tokens = h->context_tokens;
    out->eos_count =
        get_ids(d, h->eos_ids, h->n_eos_ids, out->eos_ids, PROTO_EOS_IDS_MAX, "eos_ids");
    out->tp_rank = h->tp_rank;
    out->tp_count = h->tp_count;
    out->pp_rank = h->pp_rank;
    out->pp_count = h->pp_count;
    out->dp_rank = h->dp_rank;
    out->dp_count = h->dp_count;
}

static void get_welcome(decoding *d, const Baton__Welcome *w, proto_welcome *out) {
    out->router_incarnation = w->router_incarnation;
    get_text(d, w->router_host, out->router_host, sizeof out->router_host, "router_host");
    out->worker_id = w->worker_id;
    get_record(d, w->record, &out->record);
    out->heartbeat_ms = w->heartbeat_ms;
    out->dead_after_ms = w->dead_after_ms;
}

static void get_ready(decoding *d, const Baton__Ready *r, proto_ready *out) {
    out->address_bytes = get_address(d, &r->address, out->address);
    out->pages_total = r->pages_total;
    out->page_tokens = r->page_tokens;
    out->rows_total = r->rows_total;
    out->sequences_max = r->sequences_max;
    out->step_tokens = r->step_tokens;
}

static void get_peer(decoding *d, const Baton__Peer *p, proto_peer *out) {
    out->worker_id = p->worker_id;
    out->incarnation = p->incarnation;
    out->role = (proto_role)p->role;
    get_text(d, p->host, out->host, sizeof out->host, "host");
    out->address_bytes = get_address(d, &p->address, out->address);
}

static void get_pair(const Baton__Pair *p, proto_pair *out) {
    out->worker_id = p->worker_id;
    out->incarnation = p->incarnation;
    out->status = p->status;
}

static void get_beat(const Baton__Beat *b, proto_ping *out) {
    out->sequence = b->sequence;
    out->queued_tokens = b->queued_tokens;
    out->pages_free = b->pages_free;
    out->sequences_running = b->sequences_running;
    out->rows_free = b->rows_free;
}

static void get_reserve(decoding *d, const Baton__Reserve *r, proto_reserve *out) {
    out->attempt = get_attempt(d, r->attempt);
    out->prefill_worker_id = r->prefill_worker_id;
    out->prefill_incarnation = r->prefill_incarnation;
    out->prompt_tokens = r->prompt_tokens;
    out->deadline_ms = r->deadline_ms;
    out->credit_bytes = r->credit_bytes;
    out->emission_rows = r->emission_rows;
    get_generation(d, r->generation, &out->generation);
}

static void get_reservation(decoding *d, const Baton__Reservation *r, proto_reservation *out) {
    out->attempt = get_attempt(d, r->attempt);
    out->status = r->status;
    out->slot_count =
        get_slots(d, r->slots, r->n_slots, r->slot_generations, r->n_slot_generations, out->slots);
    get_text(d, r->text, out->text, sizeof out->text, "text");
}

static void get_run(decoding *d, const Baton__Run *r, proto_run *out) {
    out->attempt = get_attempt(d, r->attempt);
    out->decode_worker_id = r->decode_worker_id;
    out->decode_incarnation = r->decode_incarnation;
    out->slot_count =
        get_slots(d, r->slots, r->n_slots, r->slot_generations, r->n_slot_generations, out->slots);
    out->prompt_tokens = r->prompt_tokens;
    out->first_word = r->first_word;
    out->deadline_ms = r->deadline_ms;
    get_generation(d, r->generation, &out->generation);
}

static void get_prefill_done(decoding *d, const Baton__PrefillDone *p, proto_prefill_done *out) {
    out->attempt = get_attempt(d, p->attempt);
    out->status = p->status;
    out->cached_tokens = p->cached_tokens;
    out->cap_needed = p->cap_needed;
    get_text(d, p->text, out->text, sizeof out->text, "text");
}

static void get_cancel(decoding *d, const Baton__Cancel *c, proto_cancel *out) {
    out->attempt = get_attempt(d, c->attempt);
    out->sample = c->sample;
}

static void get_chunk(decoding *d, const Baton__Chunk *c, proto_chunk *out) {
    out->attempt = get_attempt(d, c->attempt);
    out->offset = c->offset;
    out->finish = (proto_finish)c->finish;
    out->matched_id = c->matched_id;
    out->status = c->status;
    out->rows_total = c->rows_total;
    out->cached_tokens = c->cached_tokens;
    out->cap_needed = c->cap_needed;
    out->sample = c->sample;
    out->retractions = c->retractions;
    get_text(d, c->text, out->text, sizeof out->text, "text");
}

static void get_body(decoding *d, const Baton__Frame *f, proto_message *m) {
    switch (m->kind) {
    case PROTO_HELLO: get_hello(d, f->hello, &m->hello); return;
    case PROTO_WELCOME: get_welcome(d, f->welcome, &m->welcome); return;
    case PROTO_REFUSE:
        get_text(d, f->refuse->text, m->refuse.text, sizeof m->refuse.text, "text");
        return;
    case PROTO_READY: get_ready(d, f->ready, &m->ready); return;
    case PROTO_PEER: get_peer(d, f->peer, &m->peer); return;
    case PROTO_PEER_GONE: get_pair(f->peer_gone, &m->pair); return;
    case PROTO_PAIR_READY: get_pair(f->pair_ready, &m->pair); return;
    case PROTO_PING: get_beat(f->ping, &m->ping); return;
    case PROTO_PONG: get_beat(f->pong, &m->ping); return;
    case PROTO_RESERVE: get_reserve(d, f->reserve, &m->reserve); return;
    case PROTO_RESERVATION: get_reservation(d, f->reservation, &m->reservation); return;
    case PROTO_RUN: get_run(d, f->run, &m->run); return;
    case PROTO_PREFILL_DONE: get_prefill_done(d, f->prefill_done, &m->prefill_done); return;
    case PROTO_CANCEL: get_cancel(d, f->cancel, &m->cancel); return;
    case PROTO_ABORT: get_cancel(d, f->abort, &m->abort); return;
    case PROTO_CHUNK: get_chunk(d, f->chunk, &m->chunk); return;
    case PROTO_CREDIT:
        m->credit.attempt = get_attempt(d, f->credit->attempt);
        m->credit.bytes = f->credit->bytes;
        m->credit.sample = f->credit->sample;
        return;
    case PROTO_CAPACITY:
        m->capacity.pages_free = f->capacity->pages_free;
        m->capacity.rows_free = f->capacity->rows_free;
        m->capacity.sequences_free = f->capacity->sequences_free;
        return;
    case PROTO_PROMPT:
        m->prompt.attempt = get_attempt(d, f->prompt->attempt);
        m->prompt.first_word = f->prompt->first_word;
        return;
    case PROTO_PROMPT_LOGPROBS:
        m->prompt_logprobs.attempt = get_attempt(d, f->prompt_logprobs->attempt);
        m->prompt_logprobs.first_position = f->prompt_logprobs->first_position;
        m->prompt_logprobs.count = f->prompt_logprobs->count;
        return;
    }
}

/* The kinds are numbered as the fields of Frame. */
static_assert((int)PROTO_HELLO == (int)BATON__FRAME__BODY_HELLO, "kind numbers");
static_assert((int)PROTO_PAIR_READY == (int)BATON__FRAME__BODY_PAIR_READY, "kind numbers");
static_assert((int)PROTO_RUN == (int)BATON__FRAME__BODY_RUN, "kind numbers");
static_assert((int)PROTO_CAPACITY == (int)BATON__FRAME__BODY_CAPACITY, "kind numbers");
static_assert((int)PROTO_PROMPT_LOGPROBS == (int)BATON__FRAME__BODY_PROMPT_LOGPROBS,
              "kind numbers");
static_assert((int)PROTO_ABORT == (int)BATON__FRAME__BODY_ABORT, "kind numbers");

bt_status proto_decode(const uint8_t *header, size_t header_bytes, void *payload,
                       size_t payload_bytes, proto_message *message_out, bt_error *error) {
    if (header_bytes > PROTO_FRAME_HEADER_MAX) {
        return bt_fail(error, BT_ERR_PEER_PROTOCOL, "frame header of %zu bytes", header_bytes);
    }
    unpack_arena arena;
    arena.used = 0;
    ProtobufCAllocator allocator = {
        .alloc = arena_allocate, .free = arena_free, .allocator_data = &arena};
    const Baton__Frame *frame = baton__frame__unpack(&allocator, header_bytes, header);
    if (frame == NULL) {
        return bt_fail(error, BT_ERR_PEER_PROTOCOL, "frame header of %zu bytes is not readable",
                       header_bytes);
    }
    if (frame->body_case == BATON__FRAME__BODY__NOT_SET) {
        return bt_fail(error, BT_ERR_PEER_PROTOCOL, "frame of a kind that is not known here");
    }
    memset(message_out, 0, sizeof *message_out);
    message_out->kind = (proto_kind)frame->body_case;
    message_out->payload = payload_bytes > 0 ? payload : NULL;
    message_out->payload_bytes = payload_bytes;
    decoding d = {.bad = NULL};
    get_body(&d, frame, message_out);
    if (d.bad != NULL) {
        return bt_fail(error, BT_ERR_PEER_PROTOCOL, "%s frame with a bad %s",
                       proto_kind_name(message_out->kind), d.bad);
    }
    return proto_message_check(message_out, error);
}
