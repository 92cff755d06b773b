/* A whole cluster in one process: the real control cores of router, prefill and decode, the
 * loopback mover, computing that hashes the prefix, and a simulated clock and network. A seed
 * decides everything: sizes, delays, the order of what the mover does, faults, clients.
 *
 * Nouns. An *event* is something that happens at a time; events of one time happen in the order of
 * their making. A *link* is one TCP connection between a worker and the router: ordered, delayed,
 * lossless until it is lost. A *worker* is one process, with *lives* between its crashes. A
 * *client* is one request with what it must be answered.
 *
 * Messages go through the real codec. Every wrong turn fails the running cmocka test. */
#ifndef BT_TESTS_SIM_SIM_H
#define BT_TESTS_SIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"
#include "decode/decode_core.h"
#include "kernels/compute_sim.h"
#include "pd_buffers/kv_pool.h"
#include "pd_buffers/xfer_loop.h"
#include "prefill/prefill_core.h"
#include "router/dispatch.h"

enum {
    SIM_WORKERS_MAX = 6,
    SIM_CLIENTS_MAX = 160,
    SIM_LINKS_MAX = 4096,
    SIM_VOCAB = 5000,
    SIM_STALLS_MAX = 64,
    SIM_SAMPLES_MAX = 4,
    SIM_TOPS_MAX = 4,
    SIM_IDS_MAX = 3,
    SIM_BIASES_MAX = 2,
    SIM_SECOND = 1000 * 1000,
};

typedef struct sim sim;

/* ---- what a seed decides --------------------------------------------------------------------- */

typedef struct sim_scenario {
    uint64_t seed;
    uint32_t prefills, decodes;
    uint32_t page_tokens, page_bytes;
    uint32_t prefill_pages, decode_pages;
    uint32_t sequences_max, attempts_max, chunk_tokens, context_tokens;
    uint32_t prompts_max; /* of one step of prefill */
    bool has_prefix_cache;
    uint32_t cap, support_max;
    record_checksum checksum;
    size_t chunk_bytes_max, part_bytes;
    uint64_t step_us, token_us; /* of computing */
    uint64_t link_us, mover_us; /* mean delays */
    uint64_t stream_bytes_max;  /* of a streams connection before it blocks */
    uint32_t clients;
    uint32_t prompt_tokens_max, new_tokens_max;
    uint32_t samples_max; /* of one request, up to SIM_SAMPLES_MAX */
    uint64_t chaos_us;    /* how long clients come and faults happen */
    uint32_t request_timeout_ms;
    /* Faults during chaos; per thousand, or mean microseconds between two (0 = never). */
    uint32_t cancel_permille, cancel_sample_permille, slow_reader_permille, short_timeout_permille;
    uint32_t mover_drop_permille, mover_corrupt_permille, mover_stall_permille;
    uint64_t crash_us, link_loss_us, freeze_us, step_failure_us, router_crash_us;
    uint32_t abort_permille; /* of clients; how often and when, chance decides */
    bool has_no_masks;
    struct sim_watch *watch; /* NULL: nobody looks */
} sim_scenario;

/* All that moved between processes once every pair was made, and what was allocated meanwhile (in a
 * fault build). */
typedef struct sim_watch {
    uint64_t is_on; /* no padding: watches are compared */
    uint64_t frames, frame_bytes, frame_digest;
    uint64_t messages, message_bytes, message_digest; /* of the mover */
    bt_alloc_tally allocated;
} sim_watch;

/* No faults at all. */
void sim_scenario_calm(uint64_t seed, sim_scenario *out);
/* Sizes and faults by the seed. */
void sim_scenario_wild(uint64_t seed, sim_scenario *out);
/* Something may go wrong that no client did. */
bool sim_has_faults(const sim_scenario *scenario);

/* ---- events ---------------------------------------------------------------------------------- */

/* a and b say whom it is about; they carry lives and numbers, so that a late event is recognised.
 */
typedef void (*sim_action)(sim *s, uint64_t a, uint64_t b);

typedef struct sim_event {
    uint64_t at_us, order;
    sim_action run;
    uint64_t a, b;
} sim_event;

void sim_at(sim *s, uint64_t at_us, sim_action run, uint64_t a, uint64_t b);
void sim_after(sim *s, uint64_t delay_us, sim_action run, uint64_t a, uint64_t b);
/* Runs the next event; false: there is none up to `until_us`, which is the time now. */
bool sim_step(sim *s, uint64_t until_us);
uint64_t sim_random(sim *s, uint64_t bound); /* below bound; bound > 0 */
bool sim_chance(sim *s, uint32_t permille);
uint64_t sim_delay(sim *s, uint64_t mean_us); /* half of it to about four times it */

/* ---- links ----------------------------------------------------------------------------------- */

enum { SIM_AT_ROUTER, SIM_AT_WORKER, SIM_ENDS };

typedef struct sim_frame {
    struct sim_frame *next;
    uint64_t ready_us;
    bool is_close; /* the other end closed */
    size_t header_bytes, payload_bytes;
    uint8_t *bytes; /* header, then the payload at 16-byte alignment */
    void *payload;
    bt_block *block; /* that it lies in, or NULL */
} sim_frame;

typedef struct sim_direction {
    sim_frame *first, *last;
    uint64_t last_us; /* the latest ready_us so far: order is kept */
    size_t bytes;
} sim_direction;

typedef struct sim_link {
    uint32_t worker;
    uint64_t life, router_life;
    proto_lane lane;
    bool is_open[SIM_ENDS];
    sim_direction to[SIM_ENDS];
} sim_link;

/* A worker dials; its end and the router's open a little later, or not if the router is away. */
void sim_link_dial(sim *s, uint32_t worker, proto_lane lane, uint64_t delay_us);
void sim_link_send(sim *s, uint64_t number, int from, proto_message *message);
/* One end closes in order: what it has sent arrives. */
void sim_link_close(sim *s, uint64_t number, int end);
/* One end dies: what it has sent may be lost. */
void sim_link_abort(sim *s, uint64_t number, int end);
/* The network loses it: both ends hear of it at some time, or never. */
void sim_link_lose(sim *s, uint64_t number);
void sim_links_free(sim *s);

/* ---- processes ------------------------------------------------------------------------------- */

typedef struct sim_worker {
    uint32_t index;
    proto_role role;
    uint64_t life;    /* counts starts; 0 before the first */
    uint64_t session; /* counts what its connections belong to */
    bool is_up;
    uint64_t frozen_until_us;
    uint64_t links[3]; /* by lane; 0: none */
    kv_pool *pages;
    compute *compute;
    compute_sim_options compute_options;
    xfer *mover;
    decode_core *decode;
    prefill_core *prefill;
} sim_worker;

void sim_worker_start(sim *s, uint32_t index);
void sim_worker_crash(sim *s, uint32_t index); /* and starts again later */
void sim_worker_stop(sim *s, uint32_t index);  /* for good */
void sim_worker_freeze(sim *s, uint32_t index, uint64_t for_us);
/* The status of its next step instead of computing; OK takes it back. */
void sim_worker_fail_step(sim *s, uint32_t index, bt_status status);
bool sim_worker_is_frozen(const sim *s, const sim_worker *w);
/* From links. */
void sim_worker_on_open(sim *s, uint32_t index, proto_lane lane);
void sim_worker_on_message(sim *s, uint32_t index, proto_lane lane, const proto_message *message);
void sim_worker_on_closed(sim *s, uint32_t index, proto_lane lane);
void sim_worker_turn(sim *s, uint32_t index);
/* What it holds is exactly what its attempts own; with is_idle it holds nothing. */
void sim_worker_check(const sim *s, uint32_t index, bool is_idle);
/* Adds bytes to a digest. */
uint64_t sim_digest(uint64_t digest, const void *bytes, size_t count);
/* The mover's next event, chosen by chance. */
void sim_mover_kick(sim *s);

typedef struct sim_router {
    uint64_t life;
    dispatch *d; /* NULL: it is away */
} sim_router;

void sim_router_start(sim *s);
void sim_router_crash(sim *s); /* and starts again later */
void sim_router_stop(sim *s);
void sim_router_check_idle(const sim *s);

/* ---- clients --------------------------------------------------------------------------------- */

typedef enum client_state {
    CLIENT_NEW,
    CLIENT_WAITING,
    CLIENT_ENDED,
    CLIENT_REFUSED, /* at submit */
    CLIENT_LOST,    /* the router died under it */
} client_state;

/* One sample: what any correct cluster draws, and what came. */
typedef struct sim_sample {
    sampler_row *expected; /* with their arrays in the blocks below */
    uint32_t expected_count;
    int32_t *support_ids;
    float *support_logprobs;
    sampler_top *top;
    float *id_logprobs;
    uint32_t rows;
    bool is_cancelled, has_ended; /* by the client, alone */
    bool is_aborting;             /* aborted before it had ended */
    uint64_t aborted_us;
    uint32_t rows_at_abort;
    dispatch_end end;
} sim_sample;

typedef struct sim_client {
    client_state state;
    dispatch_request request; /* words owned */
    bool is_slow, will_cancel, will_cancel_sample, will_abort, is_probe;
    uint32_t abort_at_row; /* soon after a sample has so many; 0: at any time */
    uint64_t submitted_us, ended_us;
    sim_sample samples[SIM_SAMPLES_MAX];
    float *prompt_logprobs; /* entries as PROMPT_LOGPROBS has them, from the first one */
    uint32_t next_position; /* of what came */
    dispatch_end end;
} sim_client;

/* Makes the next client and submits it at that time. */
void sim_client_add(sim *s, uint64_t at_us, bool is_probe);
void sim_client_on_rows(sim *s, uint64_t request, const dispatch_rows *rows);
void sim_client_on_prompt_logprobs(sim *s, uint64_t request,
                                   const dispatch_prompt_logprobs *logprobs);
void sim_client_on_restart(sim *s, uint64_t request);
void sim_client_on_sample_end(sim *s, uint64_t request, uint32_t sample, const dispatch_end *end);
void sim_client_on_end(sim *s, uint64_t request, const dispatch_end *end);
void sim_clients_on_router_lost(sim *s);
uint32_t sim_clients_waiting(const sim *s);
void sim_clients_free(sim *s);

/* ---- aborts ---------------------------------------------------------------------------------- */

/* Whether this client sends any. */
void sim_abort_plan(sim *s, sim_client *c);
void sim_abort_on_submit(sim *s, sim_client *c);
/* The sample had `before` rows and has more now. */
void sim_abort_on_rows(sim *s, sim_client *c, uint32_t sample, uint32_t before);
bool sim_abort_is_end(const dispatch_end *end);
/* What the end of a sample may be with regard to aborts. */
void sim_abort_check_end(sim *s, const sim_client *c, const sim_sample *of,
                         const dispatch_end *end);

/* ---- the whole ------------------------------------------------------------------------------- */

/* What happened; a run in which nothing happens proves nothing. */
typedef struct sim_tally {
    uint64_t clients, ok, overflow, cancelled, deadline, peer, no_worker, other, refused, lost;
    uint64_t rows, retries, late, events, crashes, losses, freezes, drops, corruptions, stalls;
    uint64_t router_crashes, step_failures;
    uint64_t samples, mixed, sample_cancels, logprobs, retractions, cached, restarts;
    /* Of samples: aborts that hit one, came again, after its end, or that the end outran; and what
     * they ended, with rows that were there, with some that came afterwards, or without. */
    uint64_t aborts, aborts_again, aborts_late, aborts_outrun;
    uint64_t aborted_in_queue, aborted_in_prefill, aborted_running;
    uint64_t aborted_with_rows, aborted_with_more;
} sim_tally;

typedef struct sim_stall {
    uint64_t message, until_us;
} sim_stall;

struct sim {
    sim_scenario scenario;
    uint64_t now_us;
    uint64_t random;
    bool is_chaos;     /* faults may happen */
    sim_event *events; /* a heap */
    size_t event_count, event_capacity;
    uint64_t next_order;
    sim_link links[SIM_LINKS_MAX]; /* link number n is links[n - 1] */
    uint64_t link_count;
    xfer_loop_network *network;
    bool is_mover_scheduled;
    sim_stall stalls[SIM_STALLS_MAX];
    sim_worker workers[SIM_WORKERS_MAX];
    uint32_t worker_count;
    sim_router router;
    sim_client clients[SIM_CLIENTS_MAX];
    uint32_t client_count;
    sim_tally tally;
};

/* Runs one scenario with all its checks and adds to *tally. */
void sim_run(const sim_scenario *scenario, sim_tally *tally);

#endif
