#include "tests/unit/router/scripted_workers.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <arpa/inet.h>
#include <cmocka.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/loop.h"
#include "base/mem.h"
#include "proto/link.h"
#include "proto/row.h"
#include "proto/row_stream.h"

enum {
    ATTEMPTS_MAX = 512,
    PAGES = 100000,
    PAYLOAD_MAX = 64 * 1024,
    SUPPORT_MAX = 8,
    SCORES_PER_FRAME = 500,
};

typedef struct script_sample {
    bool is_open;
    uint64_t credit, offset;
    uint32_t rows;
} script_sample;

typedef struct script_attempt {
    proto_attempt attempt;
    proto_generation generation;
    uint32_t prompt_tokens;
    bool is_open, is_computed, stumbles;
    uint32_t words; /* of the prompt that decode has */
    uint32_t open_samples;
    script_sample samples[PROTO_SAMPLES_MAX];
} script_attempt;

typedef struct script_link {
    scripted_workers *workers;
    proto_link *link;
    proto_role role;
    proto_lane lane;
} script_link;

struct scripted_workers {
    bt_loop *loop;
    bt_loop_source *stop_source;
    int stop_fd;
    uint16_t port;
    uint32_t vocab_size;
    pthread_t thread;
    script_link links[2][2]; /* [role - 1][lane - 1] */
    uint32_t ids[2];
    script_attempt attempts[ATTEMPTS_MAX];
    uint32_t stumbles[SCRIPT_STUMBLES_MAX]; /* attempts of each seed */
    pthread_mutex_t mutex;
    scripted_counts counts; /* under mutex */
    char refusal[PROTO_TEXT_MAX];
};

static proto_link *link_of(scripted_workers *w, proto_role role, proto_lane lane) {
    return w->links[role - 1][lane - 1].link;
}

static void say(scripted_workers *w, proto_role role, proto_lane lane, proto_message *message) {
    proto_link_send(link_of(w, role, lane), message);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static size_t put_row(const script_attempt *a, uint32_t index, uint8_t *out) {
    static _Thread_local int32_t ids[SCRIPT_WIDEST];
    static _Thread_local float logprobs[SCRIPT_WIDEST];
    row_top top[PROTO_TOP_LOGPROBS_MAX];
    float asked[PROTO_LOGPROB_IDS_MAX];
    const proto_generation *g = &a->generation;
    const uint32_t most = g->seed == SCRIPT_WIDE ? SCRIPT_WIDEST : SUPPORT_MAX;
    const uint32_t width = g->top_k < most ? g->top_k : most;
    uint32_t count = g->mask_mode == ROW_MASK_OFF ? 0 : width;
    int32_t token = 97 + (int32_t)((a->samples[index].rows + index) % 26);
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = token + (int32_t)i;
        logprobs[i] = -(float)(i + 1);
    }
    for (uint32_t i = 0; i < g->top_logprobs; i++) {
        top[i] = (row_top){.id = token + (int32_t)i, .logprob = -2.0f - (float)i};
    }
    for (uint32_t i = 0; i < g->logprob_id_count; i++) {
        asked[i] = -10.0f - (float)i;
    }
    const token_row row = {.token = token,
                           .mask_mode = g->mask_mode,
                           .has_logprob = g->wants_logprob,
                           .token_logprob = -2.0f,
                           .selected_logprob = -1.0f,
                           .support_count = count,
                           .support_ids = ids,
                           .support_logprobs = g->mask_mode == ROW_MASK_SUPPORT ? logprobs : NULL,
                           .top_count = g->top_logprobs,
                           .top = top,
                           .id_logprob_count = g->logprob_id_count,
                           .id_logprobs = asked};
    row_record_encode(&row, out);
    return row_record_bytes(token_row_widths(&row));
}

static void close_attempt(scripted_workers *w, script_attempt *a, bool is_cancelled) {
    a->is_open = false;
    pthread_mutex_lock(&w->mutex);
    w->counts.open--;
    w->counts.cancelled += is_cancelled;
    pthread_mutex_unlock(&w->mutex);
}

static void close_sample(scripted_workers *w, script_attempt *a, uint32_t index) {
    if (!a->samples[index].is_open) return;
    a->samples[index].is_open = false;
    if (--a->open_samples == 0) close_attempt(w, a, false);
}

static void send_chunk(scripted_workers *w, script_attempt *a, uint32_t index, uint8_t *payload,
                       size_t bytes, proto_finish finish, bt_status status) {
    script_sample *s = &a->samples[index];
    proto_message message = {.kind = PROTO_CHUNK, .payload = payload, .payload_bytes = bytes};
    message.chunk.attempt = a->attempt;
    message.chunk.sample = index;
    message.chunk.offset = s->offset;
    message.chunk.finish = finish;
    message.chunk.status = status;
    message.chunk.rows_total = finish != PROTO_FINISH_NONE ? s->rows : 0;
    s->offset += bytes;
    if (s->credit != UINT64_MAX) s->credit -= bytes;
    pthread_mutex_lock(&w->mutex);
    w->counts.row_bytes += bytes;
    pthread_mutex_unlock(&w->mutex);
    say(w, PROTO_ROLE_DECODE, PROTO_LANE_STREAMS, &message);
    if (finish != PROTO_FINISH_NONE) close_sample(w, a, index);
}

/* Rows as far as payload and credit go. */
static size_t fill(script_attempt *a, uint32_t index, uint32_t total, uint8_t *payload) {
    static _Alignas(16) uint8_t record[64 * 1024];
    script_sample *s = &a->samples[index];
    size_t bytes = 0;
    while (s->rows < total) {
        size_t more = put_row(a, index, record);
        if (bytes + more > PAYLOAD_MAX || bytes + more > s->credit) break;
        memcpy(payload + bytes, record, more);
        bytes += more;
        s->rows++;
    }
    return bytes;
}

/* Sends rows of one sample for as long as there is credit. */
static void pump_sample(scripted_workers *w, script_attempt *a, uint32_t index) {
    script_sample *s = &a->samples[index];
    bool breaks = a->generation.seed == SCRIPT_BREAKS;
    bool is_wide = a->generation.seed == SCRIPT_OVERFLOWS_ONE && index == 1;
    const bool stumbles = a->stumbles && index == 0;
    const bool holds = a->generation.seed == SCRIPT_HOLDS;
    uint32_t total = is_wide ? 0 : breaks || stumbles || holds ? 2 : a->generation.max_new_tokens;
    if (total > a->generation.max_new_tokens) total = a->generation.max_new_tokens;
    while (s->is_open) {
        uint8_t *payload = bt_malloc(PAYLOAD_MAX);
        assert_non_null(payload);
        size_t bytes = fill(a, index, total, payload);
        bool is_last = s->rows == total && !holds;
        if (bytes == 0) {
            bt_free(payload);
            payload = NULL;
            if (!is_last) return;
        }
        bt_status status = is_wide    ? BT_ERR_REQUEST_OVERFLOW
                           : breaks   ? BT_ERR_REQUEST_CAPTURE
                           : stumbles ? BT_ERR_WORKER_MEMORY
                                      : BT_OK;
        proto_finish finish = !is_last          ? PROTO_FINISH_NONE
                              : status == BT_OK ? PROTO_FINISH_LENGTH
                                                : PROTO_FINISH_ERROR;
        send_chunk(w, a, index, payload, bytes, finish, is_last ? status : BT_OK);
    }
}

static void pump(scripted_workers *w, script_attempt *a) {
    if (!a->is_computed || a->words < proto_words(&a->generation, a->prompt_tokens)) return;
    /* The last first: nobody may count on an order of samples. */
    for (uint32_t i = a->generation.samples; a->is_open && i-- > 0;) {
        pump_sample(w, a, i);
    }
}

/* ---- attempts -------------------------------------------------------------------------------- */

static script_attempt *find(scripted_workers *w, proto_attempt attempt) {
    for (size_t i = 0; i < ATTEMPTS_MAX; i++) {
        if (w->attempts[i].is_open && proto_attempt_equal(w->attempts[i].attempt, attempt))
            return &w->attempts[i];
    }
    return NULL;
}

static void on_reserve(scripted_workers *w, const proto_reserve *reserve) {
    script_attempt *a = w->attempts;
    while (a->is_open) {
        a++;
        assert_true(a < w->attempts + ATTEMPTS_MAX);
    }
    *a = (script_attempt){.attempt = reserve->attempt,
                          .generation = reserve->generation,
                          .prompt_tokens = reserve->prompt_tokens,
                          .open_samples = reserve->generation.samples,
                          .is_open = true};
    const uint64_t stumbling = reserve->generation.seed - SCRIPT_STUMBLES;
    if (stumbling < SCRIPT_STUMBLES_MAX) a->stumbles = w->stumbles[stumbling]++ % 2 == 0;
    for (uint32_t i = 0; i < reserve->generation.samples; i++) {
        a->samples[i] = (script_sample){.is_open = true, .credit = reserve->credit_bytes};
    }
    pthread_mutex_lock(&w->mutex);
    w->counts.attempts++;
    w->counts.open++;
    pthread_mutex_unlock(&w->mutex);
    proto_message reply = {.kind = PROTO_RESERVATION};
    reply.reservation.attempt = reserve->attempt;
    reply.reservation.slot_count = reserve->generation.samples;
    for (uint32_t i = 0; i < reserve->generation.samples; i++) {
        const uint32_t index = (uint32_t)(a - w->attempts) * PROTO_SAMPLES_MAX + i;
        reply.reservation.slots[i] = (proto_slot){.index = index, .generation = 1};
    }
    say(w, PROTO_ROLE_DECODE, PROTO_LANE_CONTROL, &reply);
}

/* The log-probability of the token at position p is -p, its top ones are -p - 1, ... */
static void send_prompt_logprobs(scripted_workers *w, const proto_run *run, uint32_t first,
                                 uint32_t count) {
    const size_t entry = proto_prompt_logprob_bytes(&run->generation) / sizeof(float);
    float *floats = bt_calloc(count * entry, sizeof(float));
    assert_non_null(floats);
    for (uint32_t i = 0; i < count; i++) {
        for (size_t k = 0; k < entry; k++) {
            floats[i * entry + k] = -(float)(first + i + k);
        }
        for (uint32_t k = 0; k < run->generation.top_logprobs; k++) {
            const row_top top = {.id = (int32_t)k, .logprob = -(float)(first + i + k + 1)};
            memcpy(floats + i * entry + 1 + 2 * k, &top, sizeof(top));
        }
    }
    proto_message message = {.kind = PROTO_PROMPT_LOGPROBS,
                             .payload = floats,
                             .payload_bytes = count * entry * sizeof(float)};
    message.prompt_logprobs =
        (proto_prompt_logprobs){.attempt = run->attempt, .first_position = first, .count = count};
    say(w, PROTO_ROLE_PREFILL, PROTO_LANE_STREAMS, &message);
}

static void score(scripted_workers *w, const proto_run *run) {
    if (!run->generation.wants_prompt_logprobs) return;
    uint32_t position = run->generation.prompt_logprobs_from + 1;
    while (position < run->prompt_tokens) {
        uint32_t left = run->prompt_tokens - position;
        uint32_t count = left < SCORES_PER_FRAME ? left : SCORES_PER_FRAME;
        send_prompt_logprobs(w, run, position, count);
        position += count;
    }
}

static void on_run(scripted_workers *w, const proto_run *run, size_t payload_bytes) {
    proto_message done = {.kind = PROTO_PREFILL_DONE};
    const uint32_t words = proto_words(&run->generation, run->prompt_tokens);
    if (run->first_word + payload_bytes / sizeof(int32_t) < words) return;
    if (run->generation.seed == SCRIPT_HANGS) return;
    bool overflows = run->generation.seed == SCRIPT_OVERFLOWS;
    if (!overflows) score(w, run);
    done.prefill_done.attempt = run->attempt;
    done.prefill_done.status = overflows ? BT_ERR_REQUEST_OVERFLOW : BT_OK;
    say(w, PROTO_ROLE_PREFILL, PROTO_LANE_CONTROL, &done);
    script_attempt *a = find(w, run->attempt);
    if (a == NULL || overflows) return;
    a->is_computed = true;
    pump(w, a);
}

static void on_prompt(scripted_workers *w, const proto_prompt *prompt, size_t payload_bytes) {
    script_attempt *a = find(w, prompt->attempt);
    if (a == NULL) return;
    assert_int_equal(prompt->first_word, a->words);
    a->words += (uint32_t)(payload_bytes / sizeof(int32_t));
    pump(w, a);
}

static void on_cancel(scripted_workers *w, const proto_cancel *cancel) {
    script_attempt *a = find(w, cancel->attempt);
    if (a == NULL) return;
    if (cancel->sample == PROTO_ALL_SAMPLES) {
        close_attempt(w, a, true);
        return;
    }
    pthread_mutex_lock(&w->mutex);
    w->counts.cancelled_samples += a->samples[cancel->sample].is_open;
    pthread_mutex_unlock(&w->mutex);
    close_sample(w, a, cancel->sample);
}

/* What is held goes out, and the end. */
static void abort_sample(scripted_workers *w, script_attempt *a, uint32_t index) {
    script_sample *s = &a->samples[index];
    uint8_t *payload = NULL;
    size_t bytes = 0;
    if (!s->is_open) return;
    if (a->generation.seed == SCRIPT_HOLDS && s->rows > 0) {
        payload = bt_malloc(PAYLOAD_MAX);
        assert_non_null(payload);
        bytes = fill(a, index, s->rows + SCRIPT_HELD, payload);
    }
    pthread_mutex_lock(&w->mutex);
    w->counts.aborted_samples++;
    pthread_mutex_unlock(&w->mutex);
    send_chunk(w, a, index, payload, bytes, PROTO_FINISH_ABORT, BT_OK);
}

static void on_abort(scripted_workers *w, const proto_cancel *abort) {
    script_attempt *a = find(w, abort->attempt);
    if (a == NULL) return;
    for (uint32_t i = 0; i < a->generation.samples; i++) {
        if (abort->sample == PROTO_ALL_SAMPLES || abort->sample == i) abort_sample(w, a, i);
    }
}

static void on_credit(scripted_workers *w, const proto_credit *credit) {
    script_attempt *a = find(w, credit->attempt);
    if (a == NULL) return;
    pthread_mutex_lock(&w->mutex);
    w->counts.credits++;
    pthread_mutex_unlock(&w->mutex);
    if (!a->samples[credit->sample].is_open) return;
    a->samples[credit->sample].credit += credit->bytes;
    pump(w, a);
}

/* ---- joining --------------------------------------------------------------------------------- */

static void send_hello(scripted_workers *w, proto_role role, proto_lane lane) {
    proto_message message = {.kind = PROTO_HELLO};
    proto_hello *h = &message.hello;
    h->version_major = PROTO_VERSION_MAJOR;
    h->version_minor = PROTO_VERSION_MINOR;
    h->lane = lane;
    h->role = role;
    h->incarnation = 77 + (uint64_t)role;
    snprintf(h->host, sizeof(h->host), "scripted");
    h->pid = 1;
    h->record.page_tokens = 32;
    snprintf(h->record.kv_dtype, sizeof(h->record.kv_dtype), "bf16");
    snprintf(h->record.kv_layout, sizeof(h->record.kv_layout), "layers=1 kv_heads=1 head_dim=8");
    snprintf(h->record.numerics, sizeof(h->record.numerics), "script/1");
    memset(h->record.model_fingerprint, 'm', 64);
    h->record.row_format = ROW_FORMAT_VERSION;
    snprintf(h->model_name, sizeof(h->model_name), "script");
    h->vocab_size = w->vocab_size;
    h->context_tokens = SCRIPT_CONTEXT;
    h->tp_count = h->pp_count = h->dp_count = 1;
    say(w, role, lane, &message);
}

static void connect_lane(scripted_workers *w, proto_role role, proto_lane lane);

static void on_welcome(scripted_workers *w, proto_role role, const proto_welcome *welcome) {
    proto_message ready = {.kind = PROTO_READY};
    w->ids[role - 1] = welcome->worker_id;
    connect_lane(w, role, PROTO_LANE_STREAMS);
    ready.ready.address_bytes = 1;
    ready.ready.pages_total = PAGES;
    ready.ready.page_tokens = 32;
    ready.ready.rows_total = ATTEMPTS_MAX;
    ready.ready.sequences_max = role == PROTO_ROLE_DECODE ? ATTEMPTS_MAX : 0;
    ready.ready.step_tokens = role == PROTO_ROLE_PREFILL ? 100000 : 0;
    say(w, role, PROTO_LANE_CONTROL, &ready);
}

static void on_peer(scripted_workers *w, proto_role role, const proto_peer *peer) {
    proto_message pair = {.kind = PROTO_PAIR_READY};
    if (role != PROTO_ROLE_DECODE) return;
    pair.pair.worker_id = peer->worker_id;
    pair.pair.incarnation = peer->incarnation;
    say(w, role, PROTO_LANE_CONTROL, &pair);
}

static void on_ping(scripted_workers *w, proto_role role, const proto_ping *ping) {
    proto_message pong = {.kind = PROTO_PONG};
    pong.ping.sequence = ping->sequence;
    pong.ping.pages_free = PAGES;
    pong.ping.rows_free = ATTEMPTS_MAX;
    say(w, role, PROTO_LANE_CONTROL, &pong);
}

static void on_message(void *context, proto_link *link, const proto_message *message) {
    script_link *l = context;
    scripted_workers *w = l->workers;
    (void)link;
    switch (message->kind) {
    case PROTO_WELCOME: on_welcome(w, l->role, &message->welcome); break;
    case PROTO_REFUSE:
        pthread_mutex_lock(&w->mutex);
        memcpy(w->refusal, message->refuse.text, sizeof(w->refusal));
        pthread_mutex_unlock(&w->mutex);
        break;
    case PROTO_PEER: on_peer(w, l->role, &message->peer); break;
    case PROTO_PING: on_ping(w, l->role, &message->ping); break;
    case PROTO_RESERVE: on_reserve(w, &message->reserve); break;
    case PROTO_RUN: on_run(w, &message->run, message->payload_bytes); break;
    case PROTO_PROMPT: on_prompt(w, &message->prompt, message->payload_bytes); break;
    case PROTO_CANCEL: on_cancel(w, &message->cancel); break;
    case PROTO_ABORT: on_abort(w, &message->abort); break;
    case PROTO_CREDIT: on_credit(w, &message->credit); break;
    case PROTO_HELLO:
    case PROTO_READY:
    case PROTO_PEER_GONE:
    case PROTO_PAIR_READY:
    case PROTO_PONG:
    case PROTO_RESERVATION:
    case PROTO_PREFILL_DONE:
    case PROTO_CHUNK:
    case PROTO_PROMPT_LOGPROBS:
    case PROTO_CAPACITY: break;
    }
}

static void on_closed(void *context, proto_link *link, bt_status status, const char *text) {
    (void)context;
    (void)link;
    (void)status;
    (void)text;
}

static void connect_lane(scripted_workers *w, proto_role role, proto_lane lane) {
    script_link *l = &w->links[role - 1][lane - 1];
    const struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(w->port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const proto_link_events events = {
        .on_message = on_message, .on_closed = on_closed, .context = l};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof(address)), 0);
    *l = (script_link){.workers = w, .role = role, .lane = lane};
    assert_int_equal(proto_link_create(bt_loop_get_base(w->loop), fd, NULL, &events, &l->link),
                     BT_OK);
    send_hello(w, role, lane);
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void on_stop(void *context) {
    bt_loop_stop(((scripted_workers *)context)->loop);
}

static void *run_loop(void *context) {
    scripted_workers *w = context;
    assert_int_equal(bt_loop_run(w->loop, NULL, NULL), BT_OK);
    return NULL;
}

scripted_workers *scripted_workers_start(uint16_t port, uint32_t vocab_size) {
    scripted_workers *w = calloc(1, sizeof(*w));
    assert_non_null(w);
    w->port = port;
    w->vocab_size = vocab_size > 0 ? vocab_size : SCRIPT_VOCAB;
    w->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&w->mutex, NULL);
    assert_int_equal(bt_loop_create(&w->loop), BT_OK);
    assert_int_equal(bt_loop_watch(w->loop, w->stop_fd, on_stop, w, &w->stop_source), BT_OK);
    connect_lane(w, PROTO_ROLE_PREFILL, PROTO_LANE_CONTROL);
    connect_lane(w, PROTO_ROLE_DECODE, PROTO_LANE_CONTROL);
    assert_int_equal(pthread_create(&w->thread, NULL, run_loop, w), 0);
    return w;
}

void scripted_workers_stop(scripted_workers *w) {
    assert_int_equal(eventfd_write(w->stop_fd, 1), 0);
    pthread_join(w->thread, NULL);
    for (int i = 0; i < 4; i++) {
        proto_link_destroy(w->links[i / 2][i % 2].link);
    }
    bt_loop_source_free(w->stop_source);
    bt_loop_destroy(w->loop);
    close(w->stop_fd);
    pthread_mutex_destroy(&w->mutex);
    free(w);
}

scripted_counts scripted_workers_counts(scripted_workers *w) {
    pthread_mutex_lock(&w->mutex);
    scripted_counts counts = w->counts;
    pthread_mutex_unlock(&w->mutex);
    return counts;
}

const char *scripted_workers_refusal(scripted_workers *w) {
    static char copy[PROTO_TEXT_MAX];
    pthread_mutex_lock(&w->mutex);
    memcpy(copy, w->refusal, sizeof(copy));
    pthread_mutex_unlock(&w->mutex);
    return copy;
}
