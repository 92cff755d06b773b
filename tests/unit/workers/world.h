/* One prefill and one decode core in one process, over the loopback mover, with computing that
 * hashes the prefix and a clock that only the test turns; the test plays the router. Everything the
 * cores send is kept until the test takes it. Every wrong turn of the world itself fails the test.
 */
#ifndef BT_TESTS_WORKERS_WORLD_H
#define BT_TESTS_WORKERS_WORLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "decode/decode_core.h"
#include "kernels/compute_sim.h"
#include "pd_buffers/kv_pool.h"
#include "pd_buffers/xfer_loop.h"
#include "prefill/prefill_core.h"
#include "proto/message.h"

enum {
    WORLD_SENT_MAX = 4096,
    WORLD_PROMPT_MAX = 1 << 17,
    WORLD_ROWS_MAX = 2048,
    WORLD_SUPPORT_MAX = 64,
    WORLD_ROUTER = 0x7007,
    WORLD_VOCAB = 5000,
};

/* Zeros become defaults. */
typedef struct world_options {
    uint32_t decode_pages, prefill_pages;
    uint32_t sequences_max, attempts_max;
    uint32_t chunk_tokens, page_tokens, context_tokens;
    uint32_t cap, support_max;
    uint32_t page_bytes;
    uint32_t prefill_vocab; /* of what prefill draws; decode keeps WORLD_VOCAB */
    size_t chunk_bytes_max;
    uint32_t prompts_max; /* of one step of prefill */
    bool has_prefix_cache;
    uint64_t weights_version; /* of the router's welcome */
    uint32_t emission_rows;   /* of every reservation */
    size_t queue_bytes;       /* of decode's rows of a sample */
} world_options;

typedef struct world_sent {
    proto_lane lane;
    bool is_taken;
    proto_message message; /* payload owned */
} world_sent;

typedef struct world_side {
    struct world *world;
    const char *name;
    proto_role role;
    uint32_t worker_id;
    uint64_t incarnation;
    xfer *mover;
    kv_pool *pages;
    compute *compute;
    compute_sim_options sim;
    decode_core *decode; /* one of the two */
    prefill_core *prefill;
    bool is_compute_held; /* a step that runs does not end */
    bool wants_streams;   /* open_streams was called */
    bool is_stream_blocked;
    uint32_t hang_ups;
    char hang_up_text[PROTO_TEXT_MAX];
    char refused[PROTO_TEXT_MAX];
    bt_status broken;
    uint32_t sent_count;
    world_sent *sent;
} world_side;

typedef struct world {
    world_options options;
    uint64_t now_us;
    xfer_loop_network *network;
    bool is_network_held;
    world_side decode, prefill;
    uint64_t router_incarnation;
    uint64_t next_counter;
    int32_t prompt[WORLD_PROMPT_MAX];
} world;

/* The rows of one attempt as decode streamed them. */
typedef struct world_row {
    int32_t token;
    float token_logprob, selected_logprob;
    uint32_t support_count, support_size;
    uint64_t weights_version;
    int32_t ids[WORLD_SUPPORT_MAX];
    float logprobs[WORLD_SUPPORT_MAX];
} world_row;

typedef struct world_stream {
    uint32_t row_count;
    world_row rows[WORLD_ROWS_MAX];
    uint64_t bytes;
    uint32_t frames;
    bool has_finish;
    proto_chunk last; /* the finish */
} world_stream;

world *world_create(const world_options *options);
/* Checks that both cores' accounts add up, and frees everything. */
void world_destroy(world *w);

/* Does what can be done at this instant: messages between the movers, steps, turns. */
void world_settle(world *w);
/* Steps the network until decode has posted a receive, and holds it there. */
void world_run_until_filling(world *w);
/* Turns the clock on in steps of at most 50 ms, with ticks and pings, settling in between. */
void world_advance(world *w, uint64_t us);
/* Both workers through hello, welcome, ready and pairing. */
void world_register(world *w);
/* The first part alone: control and streams open, READY sent. */
void world_welcome(world *w, world_side *side);
void world_introduce(world *w);

/* A message from the router. */
void world_say(world *w, world_side *side, proto_lane lane, const proto_message *message);
/* Takes the oldest message of a kind that the side sent; false when there is none. The payload
 * stays the world's. */
bool world_take(world_side *side, proto_kind kind, proto_message *out);

proto_generation world_generation(uint32_t max_new_tokens, uint32_t mask_mode);
proto_attempt world_new_attempt(world *w);
/* RESERVE and its answer. */
proto_reservation world_reserve(world *w, proto_attempt attempt, uint32_t prompt_tokens,
                                const proto_generation *generation, uint64_t credit);
/* The prompt's words to decode, in one frame. */
void world_prompt(world *w, proto_attempt attempt, uint32_t prompt_tokens);
/* The prompt to decode, and RUN in frames of frame_tokens. Does not settle. */
void world_run(world *w, proto_attempt attempt, const proto_reservation *slot,
               uint32_t prompt_tokens, const proto_generation *generation, uint32_t frame_tokens);
/* Reserves and runs; the first step is not done yet. */
proto_attempt world_start(world *w, uint32_t prompt_tokens, const proto_generation *generation,
                          uint64_t credit);
void world_cancel(world *w, world_side *side, proto_attempt attempt);
void world_credit(world *w, proto_attempt attempt, uint64_t bytes);
/* What decode has sent of this attempt so far; fails on a gap, an oversized frame or a bad row. */
void world_read(world *w, proto_attempt attempt, world_stream *out);
/* Fails unless the stream holds exactly the rows that one process would draw. Epochs are left to
 * the test. */
void world_expect_rows(world *w, const world_stream *stream, uint32_t prompt_tokens,
                       const proto_generation *generation, uint32_t count);
sampler_params world_sampling(const world *w, const proto_generation *generation);
/* Nothing is in hand, no page or slot is taken. */
void world_expect_empty(world *w);

decode_view world_decode_view(const world *w);
prefill_view world_prefill_view(const world *w);

#endif
