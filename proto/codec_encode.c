/* proto_message -> protobuf header. The protobuf-c structs live on the stack and borrow the
 * message's strings and arrays; one pack call writes them out. */
#include "proto/codec.h"

#include <string.h>

#include "baton.pb-c.h"

typedef struct encoding {
    Baton__Frame frame;
    Baton__Attempt attempt;
    Baton__Generation generation;
    Baton__Record record;
    uint32_t slots[PROTO_SAMPLES_MAX], slot_generations[PROTO_SAMPLES_MAX];
    union {
        Baton__Hello hello;
        Baton__Welcome welcome;
        Baton__Refuse refuse;
        Baton__Ready ready;
        Baton__Peer peer;
        Baton__Pair pair;
        Baton__Beat beat;
        Baton__Reserve reserve;
        Baton__Reservation reservation;
        Baton__Run run;
        Baton__PrefillDone prefill_done;
        Baton__Cancel cancel;
        Baton__Chunk chunk;
        Baton__Credit credit;
        Baton__Capacity capacity;
        Baton__Prompt prompt;
        Baton__PromptLogprobs prompt_logprobs;
    };
} encoding;

/* protobuf-c's structs are not const-correct; packing only reads. */
static char *borrow_text(const char *text) {
    return (char *)(uintptr_t)text;
}

static int32_t *borrow_ids(const int32_t *ids) {
    return (int32_t *)(uintptr_t)ids;
}

static Baton__Attempt *put_attempt(encoding *e, proto_attempt attempt) {
    baton__attempt__init(&e->attempt);
    e->attempt.router_incarnation = attempt.router_incarnation;
    e->attempt.counter = attempt.counter;
    return &e->attempt;
}

static Baton__Record *put_record(encoding *e, const cluster_record *r) {
    baton__record__init(&e->record);
    e->record.sampling_mask_max_tokens = r->sampling_mask_max_tokens;
    e->record.kv_checksum = r->kv_checksum;
    e->record.page_tokens = r->page_tokens;
    e->record.kv_dtype = borrow_text(r->kv_dtype);
    e->record.kv_layout = borrow_text(r->kv_layout);
    e->record.numerics = borrow_text(r->numerics);
    e->record.model_fingerprint = borrow_text(r->model_fingerprint);
    e->record.tokenizer_fingerprint = borrow_text(r->tokenizer_fingerprint);
    e->record.row_format = r->row_format;
    e->record.protocol_minor = r->protocol_minor;
    e->record.weights_version = r->weights_version;
    return &e->record;
}

static Baton__Generation *put_generation(encoding *e, const proto_generation *g) {
    baton__generation__init(&e->generation);
    e->generation.max_new_tokens = g->max_new_tokens;
    e->generation.temperature = g->temperature;
    e->generation.top_p = g->top_p;
    e->generation.top_k = g->top_k;
    e->generation.mask_mode = g->mask_mode;
    e->generation.mask_bounded = g->mask_bounded;
    e->generation.wants_logprob = g->wants_logprob;
    e->generation.vocab_limit = g->vocab_limit;
    e->generation.seed = g->seed;
    e->generation.n_stop_ids =
        g->stop_id_count > g->banned_id_count ? g->stop_id_count : g->banned_id_count;
    e->generation.stop_ids = borrow_ids(g->stop_ids);
    e->generation.stop_id_count = g->stop_id_count;
    e->generation.banned_id_count = g->banned_id_count;
    e->generation.min_new_tokens = g->min_new_tokens;
    e->generation.samples = g->samples;
    e->generation.min_p = g->min_p;
    e->generation.filter = g->filter;
    e->generation.frequency_penalty = g->frequency_penalty;
    e->generation.presence_penalty = g->presence_penalty;
    e->generation.repetition_penalty = g->repetition_penalty;
    e->generation.top_logprobs = g->top_logprobs;
    e->generation.logprob_id_count = g->logprob_id_count;
    e->generation.bias_count = g->bias_count;
    e->generation.wants_prompt_logprobs = g->wants_prompt_logprobs;
    e->generation.prompt_logprobs_from = g->prompt_logprobs_from;
    e->generation.cache_salt_low = g->cache_salt[0];
    e->generation.cache_salt_high = g->cache_salt[1];
    return &e->generation;
}

static void put_hello(encoding *e, const proto_hello *h) {
    baton__hello__init(&e->hello);
    e->hello.version_major = h->version_major;
    e->hello.version_minor = h->version_minor;
    e->hello.lane = (Baton__Lane)h->lane;
    e->hello.role = (Baton__Role)h->role;
    e->hello.incarnation = h->incarnation;
    e->hello.host = borrow_text(h->host);
    e->hello.pid = h->pid;
    e->hello.record = put_record(e, &h->record);
    e->hello.pins = h->pins;
    e->hello.model_name = borrow_text(h->model_name);
    e->hello.vocab_size = h->vocab_size;
    e->hello.context_tokens = h->context_tokens;
    e->hello.n_eos_ids = h->eos_count;
    e->hello.eos_ids = borrow_ids(h->eos_ids);
    e->hello.tp_rank = h->tp_rank;
    e->hello.tp_count = h->tp_count;
    e->hello.pp_rank = h->pp_rank;
    e->hello.pp_count = h->pp_count;
    e->hello.dp_rank = h->dp_rank;
    e->hello.dp_count = h->dp_count;
    e->frame.hello = &e->hello;
}

static void put_welcome(encoding *e, const proto_welcome *w) {
    baton__welcome__init(&e->welcome);
    e->welcome.router_incarnation = w->router_incarnation;
    e->welcome.router_host = borrow_text(w->router_host);
    e->welcome.worker_id = w->worker_id;
    e->welcome.record = put_record(e, &w->record);
    e->welcome.heartbeat_ms = w->heartbeat_ms;
    e->welcome.dead_after_ms = w->dead_after_ms;
    e->frame.welcome = &e->welcome;
}

static void put_refuse(encoding *e, const proto_refuse *r) {
    baton__refuse__init(&e->refuse);
    e->refuse.text = borrow_text(r->text);
    e->frame.refuse = &e->refuse;
}

static void put_ready(encoding *e, const proto_ready *r) {
    baton__ready__init(&e->ready);
    e->ready.address.len = r->address_bytes;
    e->ready.address.data = (uint8_t *)(uintptr_t)r->address;
    e->ready.pages_total = r->pages_total;
    e->ready.page_tokens = r->page_tokens;
    e->ready.rows_total = r->rows_total;
    e->ready.sequences_max = r->sequences_max;
    e->ready.step_tokens = r->step_tokens;
    e->frame.ready = &e->ready;
}

static void put_peer(encoding *e, const proto_peer *p) {
    baton__peer__init(&e->peer);
    e->peer.worker_id = p->worker_id;
    e->peer.incarnation = p->incarnation;
    e->peer.role = (Baton__Role)p->role;
    e->peer.host = borrow_text(p->host);
    e->peer.address.len = p->address_bytes;
    e->peer.address.data = (uint8_t *)(uintptr_t)p->address;
    e->frame.peer = &e->peer;
}

/* peer_gone and pair_ready, ping and pong share a struct and differ by the frame's body case. */
static void put_pair(encoding *e, const proto_pair *p) {
    baton__pair__init(&e->pair);
    e->pair.worker_id = p->worker_id;
    e->pair.incarnation = p->incarnation;
    e->pair.status = p->status;
    e->frame.pair_ready = &e->pair;
}

static void put_beat(encoding *e, const proto_ping *p) {
    baton__beat__init(&e->beat);
    e->beat.sequence = p->sequence;
    e->beat.queued_tokens = p->queued_tokens;
    e->beat.pages_free = p->pages_free;
    e->beat.sequences_running = p->sequences_running;
    e->beat.rows_free = p->rows_free;
    e->frame.ping = &e->beat;
}

static void put_reserve(encoding *e, const proto_reserve *r) {
    baton__reserve__init(&e->reserve);
    e->reserve.attempt = put_attempt(e, r->attempt);
    e->reserve.prefill_worker_id = r->prefill_worker_id;
    e->reserve.prefill_incarnation = r->prefill_incarnation;
    e->reserve.prompt_tokens = r->prompt_tokens;
    e->reserve.deadline_ms = r->deadline_ms;
    e->reserve.credit_bytes = r->credit_bytes;
    e->reserve.emission_rows = r->emission_rows;
    e->reserve.generation = put_generation(e, &r->generation);
    e->frame.reserve = &e->reserve;
}

static void put_slots(encoding *e, const proto_slot *slots, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        e->slots[i] = slots[i].index;
        e->slot_generations[i] = slots[i].generation;
    }
}

static void put_reservation(encoding *e, const proto_reservation *r) {
    baton__reservation__init(&e->reservation);
    e->reservation.attempt = put_attempt(e, r->attempt);
    e->reservation.status = r->status;
    put_slots(e, r->slots, r->slot_count);
    e->reservation.n_slots = e->reservation.n_slot_generations = r->slot_count;
    e->reservation.slots = e->slots;
    e->reservation.slot_generations = e->slot_generations;
    e->reservation.text = borrow_text(r->text);
    e->frame.reservation = &e->reservation;
}

static void put_run(encoding *e, const proto_run *r) {
    baton__run__init(&e->run);
    e->run.attempt = put_attempt(e, r->attempt);
    e->run.decode_worker_id = r->decode_worker_id;
    e->run.decode_incarnation = r->decode_incarnation;
    put_slots(e, r->slots, r->slot_count);
    e->run.n_slots = e->run.n_slot_generations = r->slot_count;
    e->run.slots = e->slots;
    e->run.slot_generations = e->slot_generations;
    e->run.prompt_tokens = r->prompt_tokens;
    e->run.first_word = r->first_word;
    e->run.deadline_ms = r->deadline_ms;
    e->run.generation = put_generation(e, &r->generation);
    e->frame.run = &e->run;
}

static void put_prefill_done(encoding *e, const proto_prefill_done *p) {
    baton__prefill_done__init(&e->prefill_done);
    e->prefill_done.attempt = put_attempt(e, p->attempt);
    e->prefill_done.status = p->status;
    e->prefill_done.cached_tokens = p->cached_tokens;
    e->prefill_done.cap_needed = p->cap_needed;
    e->prefill_done.text = borrow_text(p->text);
    e->frame.prefill_done = &e->prefill_done;
}

static void put_cancel(encoding *e, const proto_cancel *c) {
    baton__cancel__init(&e->cancel);
    e->cancel.attempt = put_attempt(e, c->attempt);
    e->cancel.sample = c->sample;
    e->frame.cancel = &e->cancel; /* or abort: members of one union */
}

static void put_chunk(encoding *e, const proto_chunk *c) {
    baton__chunk__init(&e->chunk);
    e->chunk.attempt = put_attempt(e, c->attempt);
    e->chunk.offset = c->offset;
    e->chunk.finish = (Baton__Finish)c->finish;
    e->chunk.matched_id = c->matched_id;
    e->chunk.status = c->status;
    e->chunk.rows_total = c->rows_total;
    e->chunk.cached_tokens = c->cached_tokens;
    e->chunk.cap_needed = c->cap_needed;
    e->chunk.text = borrow_text(c->text);
    e->chunk.sample = c->sample;
    e->chunk.retractions = c->retractions;
    e->frame.chunk = &e->chunk;
}

static void put_credit(encoding *e, const proto_credit *c) {
    baton__credit__init(&e->credit);
    e->credit.attempt = put_attempt(e, c->attempt);
    e->credit.bytes = c->bytes;
    e->credit.sample = c->sample;
    e->frame.credit = &e->credit;
}

static void put_capacity(encoding *e, const proto_capacity *c) {
    baton__capacity__init(&e->capacity);
    e->capacity.pages_free = c->pages_free;
    e->capacity.rows_free = c->rows_free;
    e->capacity.sequences_free = c->sequences_free;
    e->frame.capacity = &e->capacity;
}

static void put_prompt(encoding *e, const proto_prompt *p) {
    baton__prompt__init(&e->prompt);
    e->prompt.attempt = put_attempt(e, p->attempt);
    e->prompt.first_word = p->first_word;
    e->frame.prompt = &e->prompt;
}

static void put_prompt_logprobs(encoding *e, const proto_prompt_logprobs *p) {
    baton__prompt_logprobs__init(&e->prompt_logprobs);
    e->prompt_logprobs.attempt = put_attempt(e, p->attempt);
    e->prompt_logprobs.first_position = p->first_position;
    e->prompt_logprobs.count = p->count;
    e->frame.prompt_logprobs = &e->prompt_logprobs;
}

static void put_body(encoding *e, const proto_message *m) {
    switch (m->kind) {
    case PROTO_HELLO: put_hello(e, &m->hello); return;
    case PROTO_WELCOME: put_welcome(e, &m->welcome); return;
    case PROTO_REFUSE: put_refuse(e, &m->refuse); return;
    case PROTO_READY: put_ready(e, &m->ready); return;
    case PROTO_PEER: put_peer(e, &m->peer); return;
    case PROTO_PEER_GONE:
    case PROTO_PAIR_READY: put_pair(e, &m->pair); return;
    case PROTO_PING:
    case PROTO_PONG: put_beat(e, &m->ping); return;
    case PROTO_RESERVE: put_reserve(e, &m->reserve); return;
    case PROTO_RESERVATION: put_reservation(e, &m->reservation); return;
    case PROTO_RUN: put_run(e, &m->run); return;
    case PROTO_PREFILL_DONE: put_prefill_done(e, &m->prefill_done); return;
    case PROTO_CANCEL: put_cancel(e, &m->cancel); return;
    case PROTO_ABORT: put_cancel(e, &m->abort); return;
    case PROTO_CHUNK: put_chunk(e, &m->chunk); return;
    case PROTO_CREDIT: put_credit(e, &m->credit); return;
    case PROTO_CAPACITY: put_capacity(e, &m->capacity); return;
    case PROTO_PROMPT: put_prompt(e, &m->prompt); return;
    case PROTO_PROMPT_LOGPROBS: put_prompt_logprobs(e, &m->prompt_logprobs); return;
    }
}

bt_status proto_encode(const proto_message *message, uint8_t *out, size_t capacity,
                       size_t *bytes_out, bt_error *error) {
    if (proto_message_check(message, error) != BT_OK) return BT_ERR_CALLER_ARGUMENT;
    encoding e;
    baton__frame__init(&e.frame);
    e.frame.body_case = (Baton__Frame__BodyCase)message->kind;
    put_body(&e, message);
    const size_t bytes = baton__frame__get_packed_size(&e.frame);
    if (bytes > capacity || bytes > PROTO_FRAME_HEADER_MAX) {
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "%s header of %zu bytes does not fit",
                       proto_kind_name(message->kind), bytes);
    }
    *bytes_out = baton__frame__pack(&e.frame, out);
    return BT_OK;
}
