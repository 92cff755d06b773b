/* The sampler with capture: one row of logits in, one drawn token and its sampling mask row out.
 *
 * Nouns. The *support* is the set of token ids that could have been drawn; a *row* is the support
 * with the behaviour log-probability of the drawn token (selected mode) or of every entry (support
 * mode). The filter is the `joint` rule: with p the softmax of logits / temperature,
 *     i is in the support  iff  #{j : p[j] > p[i]} < top_k  and  sum{p[j] : p[j] > p[i]} < top_p
 * so that ties at the cutoff live or die together. Rows are sorted by descending weight, then
 * ascending id. The draw is a pure function of (seed, position, row): Gumbel-max over the row with
 * murmur3 noise (SGLang's deterministic sampler; the formula is at sampler_noise).
 *
 * The arithmetic, so that every implementation gives the same bits (all float32 unless said
 * otherwise; exp and log are kernels/math.h's):
 *     z[i]    = logits[i] / temperature                       ids >= vocab_limit do not exist
 *     w[i]    = exp(z[i] - max z), and 0 below 2^-126         "p" above is w: same order, same ties
 *     q[i]    = w[i] * 2^40 rounded to the nearest integer, ties to even    (64 bits, exact)
 *     Q       = the sum of q over the vocabulary: an integer, so no order of summation matters
 *     top_p   : sum of q over w[j] > w[i], as a double, is < (double)top_p * (double)Q;
 *               top_p 1 filters nothing
 *     mass    = the sum of q over the support, rounded once to float32, times 2^-40
 *     entry   = log(w[i] / mass)                              exactly 0 for a singleton
 *     score   = log((double)w[i]) + noise, in double; the first largest in order of columns wins
 *     token_logprob = (z[i] - max z) - log(Q * 2^-40), in double, rounded once
 * Greedy (top_k 1) is the lowest id among the largest logits, and draws nothing.
 *
 * Threads: a sampler_workspace belongs to one thread at a time; everything else is pure. Nothing is
 * computed or written for the mask unless mask_mode asks for it. */
#ifndef BT_KERNELS_SAMPLER_H
#define BT_KERNELS_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

/* What the parameters do to a row of logits, in this order, before anything above:
 *     x = logits[i]
 *     x = fmaf(-frequency_penalty, (float)count[i], x)       count[i]: times i is in output_ids
 *     x = x - presence_penalty                               where count[i] > 0
 *     x = x > 0 ? x / repetition_penalty : x * repetition_penalty      where count[i] > 0
 *     x = -inf                                               where i is banned
 *     x = x + bias                                           where i is biased; a banned id stays
 * so as SGLang applies them: penalties look at the output alone, not at the prompt. What is neutral
 * (0, 0, 1, none) is not computed. The `rank` rule keeps, of the ids in order (w descending, id
 * ascending), rank r iff  r < top_k  and  sum{q of ranks before r} <= top_p * Q  and  w[r] >= min_p
 * * w[0]. min_p in `joint` selects the sequential rule for that request: top_k as above (ties
 * kept), then top_p over the mass Q' of what is left (sum of q over w[j] > w[i] < top_p * Q'), then
 * w[i] >= min_p * max w. */

/* The mass arithmetic stays exact up to this vocabulary. */
enum { SAMPLER_VOCAB_MAX = 1 << 22, SAMPLER_TOP_MAX = 128, SAMPLER_IDS_MAX = 1024 };

typedef enum sampler_mask_mode {
    SAMPLER_MASK_OFF = 0,
    SAMPLER_MASK_SELECTED = 1, /* ids, and the log-probability of the drawn token */
    SAMPLER_MASK_SUPPORT = 2,  /* ids, and the log-probability of every id */
} sampler_mask_mode;

typedef enum sampler_filter {
    SAMPLER_FILTER_JOINT = 0, /* ties at a cutoff live or die together */
    SAMPLER_FILTER_RANK = 1,  /* ties are cut by position: never more than top_k entries */
} sampler_filter;

/* One of the largest log-probabilities. */
typedef struct sampler_top {
    int32_t id;
    float logprob;
} sampler_top;

/* Ordered by severity; the numbers travel in the metadata row. */
typedef enum sampler_status {
    SAMPLER_OK = 0,
    SAMPLER_OVERFLOW = 1, /* the support is larger than mask_max_tokens: HTTP 400 */
    SAMPLER_INVALID = 2,  /* the drawn token has no finite log-probability in it: HTTP 500 */
} sampler_status;

/* Sampling parameters of one request, validated by the router. They never affect another request.
 * top_k 1 means greedy: the singleton of the lowest id among the maxima, log-probability 0. */
typedef struct sampler_params {
    float temperature;        /* > 0, finite */
    float top_p;              /* (0, 1] */
    uint32_t top_k;           /* 0 = all; larger than the vocabulary is allowed */
    uint32_t mask_mode;       /* sampler_mask_mode */
    uint32_t mask_max_tokens; /* cap of the row, > 0 when mask_mode is not off */
    uint32_t vocab_limit;     /* ids >= this have no text and weight 0; 0 = whole vocabulary */
    uint32_t wants_logprob;   /* fill token_logprob */
    uint64_t seed;
    uint32_t filter;                           /* sampler_filter */
    float min_p;                               /* [0, 1] */
    float frequency_penalty, presence_penalty; /* [-2, 2] */
    float repetition_penalty;                  /* (0, 2]; 0 is read as 1 */
    /* What was drawn so far, for the penalties; borrowed, may be NULL without them. */
    const int32_t *output_ids;
    uint32_t output_count;
    /* Ids that cannot be drawn now, and additions to logits; borrowed. Ids are unique and in the
     * vocabulary. */
    uint32_t banned_count;
    const int32_t *banned_ids;
    uint32_t bias_count;
    const int32_t *bias_ids;
    const float *biases;
    /* With wants_logprob: how many of the largest log-probabilities (fewer where the vocabulary is
     * smaller), and of which ids besides; borrowed. */
    uint32_t top_logprobs;
    uint32_t logprob_id_count;
    const int32_t *logprob_ids;
} sampler_params;

/* What one draw gives. The two arrays are the caller's (at least mask_max_tokens entries where
 * mask_mode needs them, else NULL) and are written only up to support_count. What was not asked for
 * is 0. */
typedef struct sampler_row {
    int32_t token;
    uint32_t status;        /* sampler_status; token is -1 and the arrays untouched unless OK */
    float token_logprob;    /* log-softmax over the whole vocabulary of logits / temperature */
    float selected_logprob; /* log(w[token] / mass) over the support; mask_mode not off */
    uint32_t support_count; /* realised entries; 0 with masks off or status not OK */
    uint32_t cap_needed;    /* realised support size, also on OVERFLOW; 0 with masks off */
    int32_t *support_ids;
    float *support_logprobs; /* support mode only */
    /* The caller's arrays [top_logprobs] and [logprob_id_count], or NULL without them. Best first,
     * then ascending id; -inf for what cannot be drawn (an id at or beyond vocab_limit too). Over
     * the whole vocabulary, as token_logprob. */
    uint32_t top_count;
    sampler_top *top;
    float *id_logprobs;
} sampler_row;

typedef struct sampler_workspace sampler_workspace;

/* Whether the fields are in the ranges written above: for whoever receives them from a peer. */
bool sampler_params_are_valid(const sampler_params *params);

/* Scratch for vocabularies of up to vocab_size ids, [1, SAMPLER_VOCAB_MAX], else CALLER_LIMIT.
 * Returns owned. */
BT_MUST_CHECK bt_status sampler_workspace_create(uint32_t vocab_size, sampler_workspace **out);
/* The same with a chosen instruction set, "portable", "avx2" or "avx512" (NULL: the best one), for
 * tests. CALLER_UNSUPPORTED when it is unknown, not compiled in or not in this CPU. */
BT_MUST_CHECK bt_status sampler_workspace_create_isa(uint32_t vocab_size, const char *isa,
                                                     sampler_workspace **out);
void sampler_workspace_destroy(sampler_workspace *workspace);

/* Draws from logits [vocab_size] (borrowed, not changed) at `position`: the absolute index of the
 * last token already consumed (prompt length - 1 for the first output token). Never fails: what
 * goes wrong is in row->status. A NaN or +inf among the logits, or nothing but -inf, gives
 * SAMPLER_INVALID. The parameters must be valid. */
void sampler_draw(sampler_workspace *workspace, const sampler_params *params, const float *logits,
                  uint32_t vocab_size, uint32_t position, sampler_row *row);

/* Scores a row without drawing: log-softmax of the logits as they are (temperature 1, no
 * processing) at `target`, at the `top_count` largest, and at ids. The order of operations is
 * token_logprob's with temperature 1. Arrays are the caller's, NULL where their count is 0. false,
 * and nothing written, when a logit is NaN or +inf, or all are -inf. */
typedef struct sampler_scoring {
    int32_t target;
    uint32_t vocab_limit;
    uint32_t top_count;
    uint32_t id_count;
    const int32_t *ids;
} sampler_scoring;
bool sampler_score_row(sampler_workspace *workspace, const sampler_scoring *request,
                       const float *logits, uint32_t vocab_size, float *target_out,
                       sampler_top *top_out, float *ids_out);

/* Nanoseconds spent in the code that captures masks (nothing else) since the workspace was made or
 * this was last called; counted only after sampler_time_capture(workspace, true). */
void sampler_time_capture(sampler_workspace *workspace, bool is_on);
uint64_t sampler_take_capture_ns(sampler_workspace *workspace);

/* The plain C reference of sampler_draw: full sort, no shortcuts; same bits. Allocates. */
BT_MUST_CHECK bt_status sampler_draw_ref(const sampler_params *params, const float *logits,
                                         uint32_t vocab_size, uint32_t position, sampler_row *row);

/* murmur3_32 over the words seed low, seed high, position, column (state 0, length 16). */
uint32_t sampler_hash(uint64_t seed, uint32_t position, uint32_t column);
/* g = -log(-min(log(h / 4294967295), -2^-32)), the inner log clamped below at -DBL_MAX. The column
 * is the rank in the sorted row when top_k is finite, else the token id. */
double sampler_noise(uint32_t hash);

#endif
