/* A dispatch with a fake network: what it sends is kept per link until a test takes it, workers are
 * scripted by hand, time is a number. */
#ifndef BT_TESTS_ROUTER_DISPATCH_FIXTURE_H
#define BT_TESTS_ROUTER_DISPATCH_FIXTURE_H

#include "proto/row_stream.h"
#include "router/dispatch.h"

enum {
    FAKE_CAP = 64,
    FAKE_PAGE_TOKENS = 16,
    FAKE_STEP_TOKENS = 128,
    FAKE_PAGES = 100,
    FAKE_ROWS = 64,
    FAKE_VOCAB = 1000,
    FAKE_ENDS_MAX = 4096,
    FAKE_SENT_MAX = 8192,
    FAKE_COUNTED_SAMPLES = 4, /* of a request, whose rows are counted */
};

typedef struct fake_sent {
    dispatch_link link;
    proto_message message; /* owns its payload */
} fake_sent;

typedef struct fake_end {
    uint64_t request;
    dispatch_end end;
} fake_end;

typedef struct fake_sample_end {
    uint64_t request;
    uint32_t sample;
    dispatch_end end;
} fake_sample_end;

typedef struct fake_network {
    dispatch *d;
    uint64_t now_us;
    dispatch_link next_link;
    fake_sent sent[FAKE_SENT_MAX];
    uint32_t sent_count;
    dispatch_link closed[FAKE_SENT_MAX];
    uint32_t closed_count;
    fake_end ends[FAKE_ENDS_MAX];
    uint32_t end_count;
    fake_sample_end sample_ends[FAKE_ENDS_MAX];
    uint32_t sample_end_count;
    uint32_t sample;                         /* what fake_chunk and its like say */
    uint32_t sample_rows[PROTO_SAMPLES_MAX]; /* of all requests together */
    uint32_t restarts;                       /* of on_restart */
    /* What stands of each request's rows (by its id, modulo); every end is checked against it. */
    uint32_t standing_rows[FAKE_ENDS_MAX][FAKE_COUNTED_SAMPLES];
    uint32_t positions_calls, positions_restarts; /* of on_prompt_logprobs */
    uint32_t next_position;                       /* after the last one */
    float logprobs[FAKE_VOCAB];                   /* by position, what was handed on */
    uint64_t rows_request;                        /* of the last on_rows */
    uint32_t rows_calls, rows_count;
    uint32_t rows_cached_tokens; /* of the last on_rows */
    uint32_t cached_tokens;      /* what fake_chunk says */
    uint8_t rows[1 << 20];       /* everything handed on, in order */
    size_t rows_bytes;
    uint32_t ready_changes;
    bool is_ready;
} fake_network;

typedef struct fake_worker {
    proto_role role;
    uint64_t incarnation;
    dispatch_link control, streams;
    uint32_t id;
    proto_welcome welcome;
    uint32_t queued_tokens, pages_used, rows_used; /* what its PONGs say */
} fake_worker;

/* Options of the tests: small times, cap FAKE_CAP. */
void fake_options(dispatch_options *out);
fake_network *fake_network_create(const dispatch_options *options); /* NULL: fake_options */
void fake_network_destroy(fake_network *n);

/* A valid control hello of that worker. */
void fake_hello(const fake_worker *w, proto_message *out);
/* Says hello on a new control link; the reply is there to take. */
void fake_dial(fake_network *n, fake_worker *w, const proto_message *hello);
/* Hello, WELCOME, streams hello: asserts that it is welcome. */
void fake_enter(fake_network *n, fake_worker *w, proto_role role, uint64_t incarnation);
/* READY with that many pages; takes the PEERs that follow away. */
void fake_ready(fake_network *n, fake_worker *w, uint32_t pages);
/* Enters and is ready with FAKE_PAGES. */
void fake_join(fake_network *n, fake_worker *w, proto_role role, uint64_t incarnation);
/* decode reports the pair (status OK) or its break. */
void fake_pair(fake_network *n, const fake_worker *from, const fake_worker *about,
               bt_status status);
/* One prefill and one decode, paired. */
void fake_cluster(fake_network *n, fake_worker *prefill, fake_worker *decode);

void fake_say(fake_network *n, dispatch_link link, const proto_message *message);
void fake_drop(fake_network *n, dispatch_link link);
void fake_tick(fake_network *n, uint64_t ms); /* time passes, then a tick */
/* Time passes with a tick every 50 ms, all PINGs of `workers` answered. */
void fake_live(fake_network *n, uint64_t ms, fake_worker *const *workers, uint32_t count);

/* Takes the oldest message of that kind on that link; false: there is none. */
bool fake_take(fake_network *n, dispatch_link link, proto_kind kind, proto_message *out);
/* The same, asserted; the payload is freed unless taken with fake_take. */
proto_message fake_expect(fake_network *n, dispatch_link link, proto_kind kind);
uint32_t fake_count(const fake_network *n, dispatch_link link, proto_kind kind);
void fake_forget(fake_network *n); /* all that was sent */
bool fake_is_closed(const fake_network *n, dispatch_link link);

/* A greedy request of that shape; not credited. */
void fake_request(uint64_t id, uint32_t prompt_tokens, uint32_t max_new_tokens,
                  dispatch_request *out);
void fake_submit(fake_network *n, uint64_t id, uint32_t prompt_tokens, uint32_t max_new_tokens);
/* The end of that request, asserted to be there once; NULL with must_exist false: none yet. */
const dispatch_end *fake_end_of(const fake_network *n, uint64_t id, bool must_exist);

/* The end of one sample, as fake_end_of. */
const dispatch_end *fake_sample_end_of(const fake_network *n, uint64_t id, uint32_t sample,
                                       bool must_exist);

dispatch_view fake_look(const fake_network *n);
/* Nobody has anything of a request any more: no attempts, no queued tokens, all pages free. */
void fake_expect_rest(const fake_network *n);

/* Worker replies. A granted reservation brings the slots of that many samples. */
void fake_reserve_samples(fake_network *n, const fake_worker *decode, proto_attempt attempt,
                          uint32_t samples);
/* `count` log-probabilities from `first` on: that of position p is -p. */
void fake_logprobs(fake_network *n, const fake_worker *prefill, proto_attempt attempt,
                   uint32_t first, uint32_t count);
void fake_reserve_reply(fake_network *n, const fake_worker *decode, proto_attempt attempt,
                        bt_status status);
void fake_done(fake_network *n, const fake_worker *prefill, proto_attempt attempt,
               bt_status status);
/* `bytes` of the stream at offset, with a finish. */
void fake_chunk(fake_network *n, const fake_worker *decode, proto_attempt attempt, uint64_t offset,
                const void *bytes, size_t count, proto_finish finish, uint32_t rows_total);
void fake_chunk_error(fake_network *n, const fake_worker *decode, proto_attempt attempt,
                      bt_status status, uint32_t rows_total, const char *text);
/* RESERVE taken, answered OK, RUN taken: the attempt of the only request that moves. */
proto_attempt fake_run(fake_network *n, const fake_worker *prefill, const fake_worker *decode);

/* `count` plain records (mask off) of tokens first, first + 1, ... */
size_t fake_rows(uint8_t *out, uint32_t first, uint32_t count);

#endif
