/* Valid messages to start from. */
#include "samples.h"

#include <stdio.h>
#include <string.h>

static const proto_attempt attempt = {.router_incarnation = 0xfedcba9876543210u,
                                      .counter = 0x100000001u};

static void set_record(cluster_record *r) {
    r->sampling_mask_max_tokens = 4096;
    r->kv_checksum = RECORD_CHECKSUM_FULL + 1;
    r->page_tokens = 32;
    (void)snprintf(r->kv_dtype, sizeof r->kv_dtype, "bf16");
    (void)snprintf(r->kv_layout, sizeof r->kv_layout, "layers=30 kv_heads=3 head_dim=64");
    (void)snprintf(r->numerics, sizeof r->numerics, "host/exact/1");
    memset(r->model_fingerprint, 'a', 64);
    memset(r->tokenizer_fingerprint, 'b', 64);
    r->row_format = 1;
    r->protocol_minor = 2;
    r->weights_version = 1ull << 40;
}

static void set_generation(proto_generation *g) {
    g->max_new_tokens = 64;
    g->temperature = 0.8f;
    g->top_p = 0.95f;
    g->top_k = 50;
    g->mask_mode = 2;
    g->mask_bounded = 1;
    g->wants_logprob = 1;
    g->vocab_limit = 49152;
    g->seed = UINT64_MAX - 1;
    g->min_new_tokens = 7;
    g->samples = 3;
    g->min_p = 0.125f;
    g->filter = 1;
    g->frequency_penalty = -1.5f;
    g->presence_penalty = 1.25f;
    g->repetition_penalty = 0.5f;
    g->top_logprobs = 5;
    g->logprob_id_count = 6;
    g->bias_count = 8;
    g->wants_prompt_logprobs = 1;
    g->prompt_logprobs_from = 9;
    g->cache_salt[0] = UINT64_MAX - 2;
    g->cache_salt[1] = 11;
    g->stop_id_count = 10;
    g->banned_id_count = PROTO_STOP_IDS_MAX;
    for (uint32_t i = 0; i < PROTO_STOP_IDS_MAX; i++)
        g->stop_ids[i] = (int32_t)(i * 1000);
}

static void set_hello(proto_hello *h) {
    h->version_major = PROTO_VERSION_MAJOR;
    h->version_minor = PROTO_VERSION_MINOR;
    h->lane = PROTO_LANE_CONTROL;
    h->role = PROTO_ROLE_DECODE;
    h->incarnation = UINT64_MAX;
    memset(h->host, 'h', sizeof h->host - 1);
    h->pid = 4242;
    set_record(&h->record);
    h->pins = 1u << RECORD_SAMPLING_MASK_MAX_TOKENS;
    (void)snprintf(h->model_name, sizeof h->model_name, "SmolLM2-135M-Instruct \xc3\xa9");
    h->vocab_size = 49152;
    h->context_tokens = 8192;
    h->eos_count = PROTO_EOS_IDS_MAX;
    for (uint32_t i = 0; i < h->eos_count; i++)
        h->eos_ids[i] = (int32_t)i;
    h->tp_count = 2;
    h->tp_rank = 1;
    h->pp_count = 3;
    h->pp_rank = 2;
    h->dp_count = 4;
    h->dp_rank = 3;
}

static void set_worker_message(proto_message *m) {
    switch (m->kind) {
    case PROTO_HELLO: set_hello(&m->hello); return;
    case PROTO_READY:
        m->ready.address_bytes = PROTO_ADDRESS_MAX;
        memset(m->ready.address, 0xa5, PROTO_ADDRESS_MAX);
        m->ready.pages_total = 1000;
        m->ready.page_tokens = 32;
        m->ready.rows_total = 64;
        m->ready.sequences_max = 32;
        m->ready.step_tokens = 2048;
        return;
    case PROTO_PAIR_READY:
        m->pair = (proto_pair){.worker_id = 7, .incarnation = 77, .status = BT_ERR_PEER_GONE};
        return;
    case PROTO_PONG:
        m->ping = (proto_ping){.sequence = 9,
                               .queued_tokens = 10,
                               .pages_free = 11,
                               .rows_free = 12,
                               .sequences_running = 13};
        return;
    case PROTO_RESERVATION:
        m->reservation.attempt = attempt;
        m->reservation.status = BT_OK;
        m->reservation.slot_count = PROTO_SAMPLES_MAX;
        for (uint32_t i = 0; i < PROTO_SAMPLES_MAX; i++)
            m->reservation.slots[i] = (proto_slot){.index = i, .generation = UINT32_MAX - i};
        (void)snprintf(m->reservation.text, sizeof m->reservation.text, "here they are");
        return;
    case PROTO_PREFILL_DONE:
        m->prefill_done.attempt = attempt;
        m->prefill_done.status = BT_ERR_REQUEST_OVERFLOW;
        m->prefill_done.cached_tokens = 32;
        m->prefill_done.cap_needed = 5000;
        memset(m->prefill_done.text, 't', sizeof m->prefill_done.text - 1);
        return;
    case PROTO_CHUNK:
        m->chunk.attempt = attempt;
        m->chunk.offset = 1ull << 33;
        m->chunk.finish = PROTO_FINISH_ERROR;
        m->chunk.matched_id = -1;
        m->chunk.status = BT_ERR_REQUEST_OVERFLOW;
        m->chunk.rows_total = 17;
        m->chunk.cached_tokens = 18;
        m->chunk.cap_needed = 19;
        m->chunk.sample = PROTO_SAMPLES_MAX - 1;
        m->chunk.retractions = 2;
        (void)snprintf(m->chunk.text, sizeof m->chunk.text, "why");
        return;
    case PROTO_CAPACITY:
        m->capacity = (proto_capacity){.pages_free = 1, .rows_free = 2, .sequences_free = 3};
        return;
    case PROTO_PROMPT_LOGPROBS:
        m->prompt_logprobs =
            (proto_prompt_logprobs){.attempt = attempt, .first_position = 17, .count = 2};
        return;
    case PROTO_WELCOME:
    case PROTO_REFUSE:
    case PROTO_PEER:
    case PROTO_PEER_GONE:
    case PROTO_PING:
    case PROTO_RESERVE:
    case PROTO_RUN:
    case PROTO_CANCEL:
    case PROTO_ABORT:
    case PROTO_PROMPT:
    case PROTO_CREDIT: return;
    }
}

static void set_router_message(proto_message *m) {
    switch (m->kind) {
    case PROTO_WELCOME:
        m->welcome.router_incarnation = 0x1234567890abcdefu;
        (void)snprintf(m->welcome.router_host, sizeof m->welcome.router_host, "router.example");
        m->welcome.worker_id = 5;
        set_record(&m->welcome.record);
        m->welcome.heartbeat_ms = 500;
        m->welcome.dead_after_ms = 3000;
        return;
    case PROTO_REFUSE: memset(m->refuse.text, 'r', sizeof m->refuse.text - 1); return;
    case PROTO_PEER:
        m->peer.worker_id = 6;
        m->peer.incarnation = 66;
        m->peer.role = PROTO_ROLE_PREFILL;
        (void)snprintf(m->peer.host, sizeof m->peer.host, "peer.example");
        m->peer.address_bytes = 3;
        memcpy(m->peer.address, "\0\1\2", 3);
        return;
    case PROTO_PEER_GONE: m->pair = (proto_pair){.worker_id = 8, .incarnation = 88}; return;
    case PROTO_PING: m->ping.sequence = UINT64_MAX; return;
    case PROTO_RESERVE:
        m->reserve.attempt = attempt;
        m->reserve.prefill_worker_id = 1;
        m->reserve.prefill_incarnation = 2;
        m->reserve.prompt_tokens = 1000;
        m->reserve.deadline_ms = 60000;
        m->reserve.credit_bytes = UINT64_MAX;
        m->reserve.emission_rows = 50;
        set_generation(&m->reserve.generation);
        return;
    case PROTO_RUN:
        m->run.attempt = attempt;
        m->run.decode_worker_id = 3;
        m->run.decode_incarnation = 4;
        m->run.slot_count = 3;
        for (uint32_t i = 0; i < 3; i++)
            m->run.slots[i] = (proto_slot){.index = i, .generation = 6 + i};
        m->run.prompt_tokens = 1000;
        m->run.first_word = 500;
        m->run.deadline_ms = 60000;
        set_generation(&m->run.generation);
        return;
    case PROTO_CANCEL:
        m->cancel = (proto_cancel){.attempt = attempt, .sample = PROTO_ALL_SAMPLES};
        return;
    case PROTO_ABORT:
        m->abort = (proto_cancel){.attempt = attempt, .sample = PROTO_SAMPLES_MAX - 1};
        return;
    case PROTO_CREDIT:
        m->credit = (proto_credit){.attempt = attempt, .bytes = 1ull << 35, .sample = 5};
        return;
    case PROTO_PROMPT:
        m->prompt = (proto_prompt){.attempt = attempt, .first_word = PROTO_TOKENS_MAX};
        return;
    case PROTO_HELLO:
    case PROTO_READY:
    case PROTO_PAIR_READY:
    case PROTO_PONG:
    case PROTO_RESERVATION:
    case PROTO_PREFILL_DONE:
    case PROTO_CHUNK:
    case PROTO_PROMPT_LOGPROBS:
    case PROTO_CAPACITY: return;
    }
}

void sample_message(proto_kind kind, void *payload, size_t payload_bytes, proto_message *out) {
    memset(out, 0, sizeof *out);
    out->kind = kind;
    if (kind == PROTO_RUN || kind == PROTO_CHUNK || kind == PROTO_PROMPT ||
        kind == PROTO_PROMPT_LOGPROBS) {
        out->payload = payload;
        out->payload_bytes = payload_bytes;
    }
    set_worker_message(out);
    set_router_message(out);
}
