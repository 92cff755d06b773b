/* The control messages between router and workers, as plain C structs: what the pure control cores
 * read and write. proto/codec.h turns them into protobuf-c frames and back, and validates; nothing
 * else touches protobuf-c.
 *
 * Two connections per worker and router, both dialled by the worker, told apart by the first frame,
 * which is a HELLO:
 *   control  small messages, never behind bulk; dialled first
 *   streams  frames of at most PROTO_FRAME_PAYLOAD_MAX bytes of payload: prompts and cancels to
 *            prefill, prompts to decode, row streams from decode, credits to decode, prompt
 *            log-probabilities from prefill; dialled after WELCOME came on control and before READY
 *            is sent
 *
 * A message may have a *payload*: raw little-endian bytes that follow the protobuf header and never
 * pass through a protobuf buffer. Durations travel, never points in time. */
#ifndef BT_PROTO_MESSAGE_H
#define BT_PROTO_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/block_pool.h"
#include "base/id_map.h"
#include "base/status.h"
#include "proto/record.h"

enum {
    PROTO_VERSION_MAJOR = 1,
    PROTO_VERSION_MINOR = 2,
    PROTO_MINOR_OF_ABORT = 2, /* workers from here on know ABORT */
    PROTO_FRAME_HEADER_MAX = 16 * 1024,
    PROTO_FRAME_PAYLOAD_MAX = 256 * 1024,
    PROTO_TEXT_MAX = 512,
    PROTO_ADDRESS_MAX = 4096,
    PROTO_HOST_MAX = 256,
    PROTO_STOP_IDS_MAX = 64,
    PROTO_EOS_IDS_MAX = 8,
    PROTO_MODEL_NAME_MAX = 128,
    PROTO_TOKENS_MAX = 1 << 24, /* of a prompt, and of max_new_tokens */
    PROTO_VOCAB_MAX = 1 << 24,
    PROTO_SAMPLES_MAX = 128,      /* n of one request */
    PROTO_TOP_LOGPROBS_MAX = 128, /* top_logprobs_num */
    PROTO_LOGPROB_IDS_MAX = 1024, /* token_ids_logprob */
    PROTO_BIASES_MAX = 4096,      /* logit_bias */
};

/* In proto_cancel.sample: the whole attempt. */
#define PROTO_ALL_SAMPLES UINT32_MAX

typedef enum proto_role {
    PROTO_ROLE_PREFILL = 1,
    PROTO_ROLE_DECODE = 2,
} proto_role;

typedef enum proto_lane {
    PROTO_LANE_CONTROL = 1,
    PROTO_LANE_STREAMS = 2,
} proto_lane;

/* One try of one request. Minted by the router only; a retry is a new attempt. */
typedef struct proto_attempt {
    uint64_t router_incarnation;
    uint64_t counter;
} proto_attempt;

/* For a table of attempts. */
static inline bt_id proto_attempt_id(proto_attempt a) {
    return (bt_id){.space = a.router_incarnation, .number = a.counter};
}
static inline bool proto_attempt_equal(proto_attempt a, proto_attempt b) {
    return a.router_incarnation == b.router_incarnation && a.counter == b.counter;
}

/* What both workers are told about the generation of one attempt, validated by the router. An
 * attempt has `samples` samples of one prompt, numbered from 0; each has its own rows, stream, end
 * and seed (proto_sample_seed). What is too wide for a header travels behind the prompt's ids: the
 * *words* of an attempt are, each 32 bits,
 *   i32 prompt ids [prompt_tokens]   i32 bias ids [bias_count]   f32 biases [bias_count]
 *   i32 logprob ids [logprob_id_count]
 * A bias is finite, or -inf, and then its id is never drawn. The order of what happens to a logit
 * is in kernels/sampler.h. */
typedef struct proto_generation {
    uint32_t max_new_tokens; /* 0: prefill only, nothing is sampled or handed over */
    float temperature;       /* > 0 */
    float top_p;             /* (0, 1] */
    uint32_t top_k;          /* 0 = all, 1 = greedy */
    uint32_t mask_mode;      /* sampler_mask_mode's numbers */
    uint32_t mask_bounded;   /* a support above the cap is cut to it; needs a mask_mode */
    uint32_t wants_logprob;
    uint32_t vocab_limit;
    uint64_t seed;
    uint32_t stop_id_count; /* EOS and stop_token_ids together; none with ignore_eos */
    /* Before min_new_tokens are drawn, stop_ids[0 .. banned_id_count) cannot be: EOS and
     * stop_token_ids, with ignore_eos too. 0 without min_new_tokens. */
    uint32_t banned_id_count;
    int32_t stop_ids[PROTO_STOP_IDS_MAX]; /* [max(stop_id_count, banned_id_count)] */
    uint32_t min_new_tokens;              /* <= max_new_tokens */
    uint32_t samples;                     /* n, 1 .. PROTO_SAMPLES_MAX */
    float min_p;                          /* [0, 1] */
    uint32_t filter;                      /* sampler_filter's numbers */
    float frequency_penalty;              /* [-2, 2] */
    float presence_penalty;               /* [-2, 2] */
    float repetition_penalty;             /* (0, 2] */
    uint32_t top_logprobs;                /* <= PROTO_TOP_LOGPROBS_MAX; needs wants_logprob */
    uint32_t logprob_id_count;            /* <= PROTO_LOGPROB_IDS_MAX; needs wants_logprob */
    uint32_t bias_count;                  /* <= PROTO_BIASES_MAX */
    /* Log-probabilities of the prompt tokens at positions from + 1 .. prompt_tokens - 1 given those
     * before them, at temperature 1 and without any of the above. */
    uint32_t wants_prompt_logprobs; /* needs wants_logprob */
    uint32_t prompt_logprobs_from;  /* < prompt_tokens */
    uint64_t cache_salt[2]; /* requests of different salts share no cached prefix; 0: none */
} proto_generation;

/* Neutral values of everything that is not a plain 0: temperature, top_p and repetition_penalty 1,
 * one sample. */
proto_generation proto_generation_default(void);
/* Words of an attempt, as above. */
uint32_t proto_words(const proto_generation *generation, uint32_t prompt_tokens);
/* Bytes of one entry of a PROMPT_LOGPROBS payload. */
size_t proto_prompt_logprob_bytes(const proto_generation *generation);
/* Sample 0 uses the seed itself, sample i the i-th output of splitmix64 that starts at the seed. */
uint64_t proto_sample_seed(uint64_t seed, uint32_t sample);

typedef enum proto_kind {
    PROTO_HELLO = 1,
    PROTO_WELCOME,
    PROTO_REFUSE,
    PROTO_READY,
    PROTO_PEER,
    PROTO_PEER_GONE,
    PROTO_PAIR_READY,
    PROTO_PING,
    PROTO_PONG,
    PROTO_RESERVE,
    PROTO_RESERVATION,
    PROTO_RUN,
    PROTO_PREFILL_DONE,
    PROTO_CANCEL,
    PROTO_CHUNK,
    PROTO_CREDIT,
    PROTO_CAPACITY,
    PROTO_PROMPT,
    PROTO_PROMPT_LOGPROBS,
    PROTO_ABORT,
} proto_kind;

/* worker -> router, the first frame on each connection. On streams only lane, role and incarnation
 * count. A worker states every must-equal field of the record but the two that the router governs
 * (cap, kv_checksum); what it leaves unknown cannot be compared, so it is refused. The tokenizer's
 * fingerprint is compared when it is stated: a worker may have no tokenizer. */
typedef struct proto_hello {
    uint32_t version_major, version_minor;
    proto_lane lane;
    proto_role role;
    uint64_t incarnation; /* random per process; a restart is a new peer */
    char host[PROTO_HOST_MAX];
    uint32_t pid;
    cluster_record record;
    uint32_t
        pins; /* bit per record_field: given on the worker's command line, compared, not adopted */
    char model_name[PROTO_MODEL_NAME_MAX];
    uint32_t vocab_size, context_tokens;
    uint32_t eos_count;
    int32_t eos_ids[PROTO_EOS_IDS_MAX];
    uint32_t tp_rank, tp_count, pp_rank, pp_count, dp_rank, dp_count; /* counts above 1: refused */
} proto_hello;

/* router -> worker on control. The worker sizes its row slots by record.sampling_mask_max_tokens,
 * or by its vocabulary where that is smaller (row_entries_max). */
typedef struct proto_welcome {
    uint64_t router_incarnation;
    char router_host[PROTO_HOST_MAX];
    uint32_t worker_id; /* this router's name for the worker, never reused */
    cluster_record record;
    uint32_t heartbeat_ms, dead_after_ms;
} proto_welcome;

/* router -> worker: the sentence of rule 1; the worker prints it and ends. */
typedef struct proto_refuse {
    char text[PROTO_TEXT_MAX];
} proto_refuse;

/* worker -> router on control: pools are allocated and the mover listens. */
typedef struct proto_ready {
    uint32_t address_bytes;
    uint8_t address[PROTO_ADDRESS_MAX]; /* opaque to the router */
    uint32_t pages_total, page_tokens, rows_total, sequences_max;
    uint32_t step_tokens; /* prefill: tokens of one compute step, for "two steps queued" */
} proto_ready;

/* router -> worker: a worker of the other role; connect to it and say HELLO over the mover. PEER
 * for a peer that is known already (same incarnation) means that the pair broke: disconnect to the
 * end, then connect again. */
typedef struct proto_peer {
    uint32_t worker_id;
    uint64_t incarnation;
    proto_role role;
    char host[PROTO_HOST_MAX];
    uint32_t address_bytes;
    uint8_t address[PROTO_ADDRESS_MAX];
} proto_peer;

/* PEER_GONE (router -> worker) and PAIR_READY (decode -> router: a hello went both ways over the
 * mover between this decode and that prefill; or, with a status and from either side, the pair
 * broke, after which the router sends PEER to both again). */
typedef struct proto_pair {
    uint32_t worker_id;
    uint64_t incarnation;
    int32_t status;
} proto_pair;

typedef struct proto_ping {
    uint64_t sequence;
    uint32_t queued_tokens; /* prefill: prompt tokens not yet computed */
    uint32_t pages_free;    /* of the KV pool; quarantined pages are not free, cached ones are */
    uint32_t rows_free;     /* of the row slots */
    uint32_t sequences_running;
} proto_ping;

/* A row slot of decode, in one generation. */
typedef struct proto_slot {
    uint32_t index;
    uint32_t generation; /* never 0 */
} proto_slot;

/* router -> decode on control: keep pages for the prompt (once, whatever the samples) and a row
 * slot per sample. More pages are taken as the samples grow. */
typedef struct proto_reserve {
    proto_attempt attempt;
    uint32_t prefill_worker_id;
    uint64_t prefill_incarnation;
    uint32_t prompt_tokens;
    uint32_t deadline_ms;  /* until the row and all KV are proven */
    uint64_t credit_bytes; /* first window of each row stream; UINT64_MAX = never withheld */
    /* Rows of a sample that may wait for each other, to go in fewer frames: the first row, a
     * finish and what has become many bytes never wait. 0 and 1: none does. */
    uint32_t emission_rows;
    proto_generation generation;
} proto_reserve;

/* decode -> router on control. status OK, REQUEST_FULL (wait for CAPACITY), REQUEST_TOO_LARGE, ...
 */
typedef struct proto_reservation {
    proto_attempt attempt;
    int32_t status;
    uint32_t slot_count; /* OK: the samples; else 0 */
    proto_slot slots[PROTO_SAMPLES_MAX];
    char text[PROTO_TEXT_MAX];
} proto_reservation;

/* router -> decode on streams, when the reservation was granted, payload: words of the attempt from
 * first_word on; more frames follow in order until all are there. Decode needs them for what it
 * draws with and to recompute a sequence that it had to retract; it runs no sample before. */
typedef struct proto_prompt {
    proto_attempt attempt;
    uint32_t first_word;
} proto_prompt;

/* router -> prefill on streams, payload: words of the attempt from first_word on. More than one
 * frame holds follows in further RUN frames with the same attempt and a larger first_word, in
 * order. */
typedef struct proto_run {
    proto_attempt attempt;
    uint32_t decode_worker_id; /* 0 with max_new_tokens 0 */
    uint64_t decode_incarnation;
    uint32_t slot_count; /* as in the reservation; 0 with max_new_tokens 0 */
    proto_slot slots[PROTO_SAMPLES_MAX];
    uint32_t prompt_tokens;
    uint32_t first_word;
    uint32_t deadline_ms;
    proto_generation generation;
} proto_run;

/* prefill -> router on control, once per attempt: its compute ended. OK = the row is on its way (or
 * nothing was to be sampled). A later failure of the transfer is another PREFILL_DONE with a PEER
 * or REQUEST status. REQUEST_OVERFLOW and REQUEST_CAPTURE carry the client's true status: no sample
 * got a token. When some did, OK, and the others' rows carry their status to decode, which ends
 * them. cap_needed is the true size of the support, with REQUEST_OVERFLOW alone (here and in
 * CHUNK). */
typedef struct proto_prefill_done {
    proto_attempt attempt;
    int32_t status;
    uint32_t cached_tokens;
    uint32_t cap_needed;
    char text[PROTO_TEXT_MAX];
} proto_prefill_done;

/* prefill -> router on streams, before PREFILL_DONE, payload: `count` entries for the prompt
 * positions from first_position on, ascending over the frames without gaps; each entry
 *   f32 logprob   {i32 id, f32 logprob} [top_logprobs], best first   f32 [logprob_id_count]
 */
typedef struct proto_prompt_logprobs {
    proto_attempt attempt;
    uint32_t first_position;
    uint32_t count;
} proto_prompt_logprobs;

/* CANCEL: router -> decode on control, router -> prefill on streams (behind its RUN). Idempotent.
 * One sample alone: to decode only, its stream ends without a word.
 * ABORT: router -> decode on control, once RUN is with prefill. Idempotent. Samples that have not
 * ended draw nothing more (the token of a step that runs still counts), and their streams end with
 * FINISH_ABORT behind the rows they have, none if the handoff is not over. */
typedef struct proto_cancel {
    proto_attempt attempt;
    uint32_t sample; /* or PROTO_ALL_SAMPLES */
} proto_cancel;

typedef enum proto_finish {
    PROTO_FINISH_NONE = 0, /* the stream goes on */
    PROTO_FINISH_STOP = 1, /* matched_id is one of stop_ids */
    PROTO_FINISH_LENGTH = 2,
    PROTO_FINISH_ERROR = 3, /* status and text say why; the rows before it stand */
    PROTO_FINISH_ABORT = 4, /* an ABORT ended it; the rows before it stand */
} proto_finish;

/* decode -> router on streams, payload: the next bytes of the row stream of one sample
 * (row_stream.h). Rows may span frames. The last frame of each sample has a finish. */
typedef struct proto_chunk {
    proto_attempt attempt;
    uint32_t sample;
    uint64_t offset; /* of the payload in the stream */
    proto_finish finish;
    int32_t matched_id;
    int32_t status;
    uint32_t rows_total; /* with a finish: rows of the whole stream */
    uint32_t cached_tokens;
    uint32_t cap_needed;
    uint32_t retractions; /* times this sample was recomputed so far */
    char text[PROTO_TEXT_MAX];
} proto_chunk;

/* router -> decode on streams: that many more bytes of the sample's row stream may be sent. */
typedef struct proto_credit {
    proto_attempt attempt;
    uint32_t sample;
    uint64_t bytes;
} proto_credit;

/* decode -> router on control, after a release that follows a FULL. */
typedef struct proto_capacity {
    uint32_t pages_free;
    uint32_t rows_free;
    uint32_t sequences_free;
} proto_capacity;

typedef struct proto_message {
    proto_kind kind;
    union {
        proto_hello hello;
        proto_welcome welcome;
        proto_refuse refuse;
        proto_ready ready;
        proto_peer peer;
        proto_pair pair; /* PEER_GONE, PAIR_READY */
        proto_ping ping; /* PING, PONG */
        proto_reserve reserve;
        proto_reservation reservation;
        proto_run run;
        proto_prefill_done prefill_done;
        proto_cancel cancel;
        proto_cancel abort;
        proto_chunk chunk;
        proto_credit credit;
        proto_capacity capacity;
        proto_prompt prompt;
        proto_prompt_logprobs prompt_logprobs;
    };
    /* NULL and 0 without a payload. Sending: the link takes it, and gives it up once it is written;
     * receiving: borrowed for the call. */
    void *payload;
    size_t payload_bytes;
    /* What the payload lies in. Sending: a hold that goes with it; NULL: payload is a bt_malloc
     * block. Receiving: who wants the payload for longer holds this; NULL: who does copies it. */
    bt_block *block;
} proto_message;

/* Gives up the payload of a message that is not sent. */
void proto_message_drop_payload(proto_message *message);

/* "hello", "reserve", ...; for logs. Never NULL, also for numbers that are not ours. */
const char *proto_kind_name(proto_kind kind);
const char *proto_role_name(proto_role role); /* "prefill", "decode" */

/* Copies a text for a message: control characters and broken UTF-8 become '?', and what does not
 * fit into `capacity` bytes is cut at a character. For every text that is not a literal of ours. */
void proto_text_copy(char *to, size_t capacity, const char *from);

/* What holds of every message, from outside and our own (one of ours that breaks it is not sent,
 * and its link closes): ranges, texts (valid UTF-8 without control characters), counts, finite
 * numbers, payload size. PEER_PROTOCOL with a sentence that names kind and field. `message` must
 * have terminated strings and counts within the arrays, which the codec sees to. */
BT_MUST_CHECK bt_status proto_message_check(const proto_message *message, bt_error *error);
/* The same for the generation alone: REQUEST_INVALID. */
BT_MUST_CHECK bt_status proto_generation_check(const proto_generation *generation, bt_error *error);

#endif
