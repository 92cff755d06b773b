/* The sampler with capture: one row of logits in, one drawn token and its sampling mask row out.
 *
 * Nouns. The *support* is the set of token ids that could have been drawn; a *row* is the support
 * with the behaviour log-probability of the drawn token (selected mode) or of every entry (support
 * mode), sorted by descending weight, then ascending id. A *filter* says what is in the support. It
 * belongs to one request; nothing of one request changes another's row.
 *
 * The arithmetic, so that every implementation gives the same bits (all float32 unless said
 * otherwise; exp and log are kernels/math.h's). Ids >= vocab_limit do not exist.
 *
 * 1. The logits as the parameters change them; what is neutral (0, 0, 1, none) is not computed. As
 *    in SGLang, penalties look at the output alone and not at the prompt:
 *     x[i] = logits[i]
 *     where count[i] > 0, the times i is in output_ids:
 *       x = fmaf(-frequency_penalty, (float)count[i], x)
 *       x = x - presence_penalty
 *       x = x > 0 ? x / repetition_penalty : x * repetition_penalty
 *       x = bound(x)
 *     x = -inf           where i is banned; a bias of -inf bans its id
 *     x = bound(x + bias)  where i is biased, in the order of the biases; a banned id stays -inf
 *    with bound(x) = min(max(x, -B), B), B = 2^127 * temperature below temperature 1, else FLT_MAX,
 *    so that no penalty and no bias takes x / temperature out of range. Logits that are not finite
 *    stay as they are.
 *
 * 2. Weights, and their mass in fixed point:
 *     z[i]    = x[i] / temperature
 *     w[i]    = exp(z[i] - max z), and 0 below 2^-126; an id of weight 0 is in no support
 *     q[i]    = w[i] * 2^40 rounded to the nearest integer, ties to even    (64 bits, exact)
 *     Q       = the sum of q over the vocabulary: an integer, so no order of summation matters
 *
 * 3. The support. Sums of q are compared as doubles with (double)top_p * (double)(the mass named);
 *    top_k 0, top_p 1 and min_p 0 filter nothing; max w is 1.
 *     joint       #{j : w[j] > w[i]} < top_k  and  sum{q[j] : w[j] > w[i]} < top_p * Q
 *                 so that ties at a cutoff live or die together
 *     sequential  what `joint` means for a request with min_p > 0:
 *                 #{j : w[j] > w[i]} < top_k, Q' being the sum of q over these;  of them those with
 *                 sum{q[j] : w[j] > w[i]} < top_p * Q'  and  w[i] >= min_p
 *     rank        of the ids in order (w descending, id ascending), rank r where
 *                 r < top_k  and  sum{q of the ranks before r} <= top_p * Q  and  w[r] >= min_p
 *                 so that ties are cut by position
 *    Greedy (top_k 1, whatever the filter) is the singleton of the lowest id among the largest x,
 *    with log-probability 0, and draws nothing.
 *
 * 4. What is said of the support:
 *     mass    = the sum of q over the support, rounded once to float32, times 2^-40
 *     entry   = log(w[i] / mass)                              exactly 0 for a singleton
 *    The row's entries are the support by descending w, then ascending id. A support of more than
 *    mask_max_tokens ids is an OVERFLOW, whose cap_needed is its true size; or, with mask_bounded,
 *    the row has the first mask_max_tokens entries, the drawn token in the place of the last where
 *    it is not among them (with a cap of 1: it alone). cap_needed is the true size then too, and
 *    mass and log-probabilities are the whole support's. In selected mode the row has the same ids
 *    and the one log-probability.
 *
 * 5. The draw, a pure function of (seed, position, row): Gumbel-max over the support with murmur3
 *    noise, SGLang's deterministic sampler (the formula is at sampler_noise):
 *     score   = log((double)w[i]) + noise(column), in double; the first largest in order of columns
 *    In `joint` the column is the rank in the sorted row when top_k is finite (not 0, however
 *    large), else the token id. In `rank` it is the rank when anything filters at all (top_k
 * finite, top_p < 1 or min_p > 0), else the token id. Masks on, off or bounded never change it.
 *
 * 6. Log-probabilities over the whole vocabulary: of the token drawn, of the largest and of chosen
 *    ids; (z[i] - max z) - log(Q * 2^-40), in double, rounded once; or, where that is smaller and
 *    w[i] not 0, the entry of a support of mass Q, so that none is ever above an entry of its row
 *    (the two differ by a rounding); -inf where x[i] is.
 *
 * Threads: a sampler_workspace belongs to one thread at a time; everything else is pure. Nothing is
 * computed or written for the mask unless mask_mode asks for it, and nothing is copied or computed
 * for step 1 when all of it is neutral. */
#ifndef BT_KERNELS_SAMPLER_H
#define BT_KERNELS_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum {
    SAMPLER_VOCAB_MAX = 1 << 22, /* the mass arithmetic stays exact up to this vocabulary */
    SAMPLER_TOP_MAX = 128,       /* top_logprobs */
    SAMPLER_IDS_MAX = 1024,      /* logprob_id_count */
};

typedef enum sampler_mask_mode {
    SAMPLER_MASK_OFF = 0,
    SAMPLER_MASK_SELECTED = 1, /* ids, and the log-probability of the drawn token */
    SAMPLER_MASK_SUPPORT = 2,  /* ids, and the log-probability of every id */
} sampler_mask_mode;

typedef enum sampler_filter {
    SAMPLER_FILTER_JOINT = 0, /* also the sequential rule, with min_p */
    SAMPLER_FILTER_RANK = 1,  /* never more than top_k entries */
} sampler_filter;

/* One of the largest log-probabilities. The largest are those of the largest x (in a scored row:
 * the largest logits), best first; of equal ones the lower id comes first. */
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

/* Sampling parameters of one draw, validated by the router. Zero is neutral for all but temperature
 * and top_p. Arrays are borrowed and may be NULL where their count is 0. */
typedef struct sampler_params {
    float temperature;        /* > 0, finite */
    float top_p;              /* (0, 1] */
    uint32_t top_k;           /* 0 = all; larger than the vocabulary is allowed */
    uint32_t mask_mode;       /* sampler_mask_mode */
    uint32_t mask_max_tokens; /* cap of the row, > 0 when mask_mode is not off */
    uint32_t mask_bounded;    /* 1: a support above the cap is cut to it; needs a mask_mode */
    uint32_t vocab_limit;     /* ids >= this have no text and weight 0; 0 = whole vocabulary */
    uint32_t wants_logprob;   /* fill token_logprob */
    uint64_t seed;
    uint32_t filter;                           /* sampler_filter */
    float min_p;                               /* [0, 1] */
    float frequency_penalty, presence_penalty; /* [-2, 2] */
    float repetition_penalty;                  /* (0, 2]; 0 is read as 1 */
    /* What was drawn so far, in any order; read only with a penalty that is not neutral. */
    uint32_t output_count;
    const int32_t *output_ids;
    /* Ids that cannot be drawn now. */
    uint32_t banned_count;
    const int32_t *banned_ids;
    /* Additions to logits: finite, or -inf. */
    uint32_t bias_count;
    const int32_t *bias_ids;
    const float *biases;
    /* With wants_logprob: how many of the largest log-probabilities, and of which ids besides. */
    uint32_t top_logprobs;     /* <= SAMPLER_TOP_MAX */
    uint32_t logprob_id_count; /* <= SAMPLER_IDS_MAX */
    const int32_t *logprob_ids;
} sampler_params;

/* What one draw gives. The arrays are the caller's, NULL where the parameters do not ask for them,
 * and written only up to their counts and only when the status is OK. What was not asked for is 0.
 */
typedef struct sampler_row {
    int32_t token;
    uint32_t status;         /* sampler_status; token is -1 unless OK */
    float token_logprob;     /* over the whole vocabulary, not over the support */
    float selected_logprob;  /* log(w[token] / mass) over the support; mask_mode not off */
    uint32_t support_count;  /* entries in the row; 0 with masks off or status not OK */
    uint32_t cap_needed;     /* size of the support, also on OVERFLOW; 0 with masks off */
    int32_t *support_ids;    /* [mask_max_tokens] */
    float *support_logprobs; /* [mask_max_tokens], support mode only */
    /* 1: support_ids has room for both, and in support mode the draw puts the log-probabilities
     * right behind the ids and sets support_logprobs, so that they lie as they travel. */
    uint32_t is_joined;
    uint32_t top_count; /* top_logprobs, or the vocabulary (up to vocab_limit) if smaller */
    sampler_top *top;   /* [top_logprobs] */
    float *id_logprobs; /* [logprob_id_count], in the order of logprob_ids */
} sampler_row;

/* Where the log-probabilities of a support of `count` entries go, which is known before the first
 * of them is. */
static inline float *sampler_row_logprobs(sampler_row *row, uint32_t count) {
    if (row->is_joined != 0) row->support_logprobs = (float *)(void *)(row->support_ids + count);
    return row->support_logprobs;
}

typedef struct sampler_workspace sampler_workspace;

/* Whether the fields are in the ranges written above, ids are in the vocabulary, biases finite or
 * -inf and arrays there: for whoever receives them from a peer. */
bool sampler_params_are_valid(const sampler_params *params, uint32_t vocab_size);
/* The same of the caller's arrays in a row. */
bool sampler_row_is_valid(const sampler_params *params, const sampler_row *row);

/* Scratch for vocabularies of up to vocab_size ids, [1, SAMPLER_VOCAB_MAX], else CALLER_LIMIT.
 * Returns owned. */
BT_MUST_CHECK bt_status sampler_workspace_create(uint32_t vocab_size, sampler_workspace **out);
/* The same with a chosen instruction set, "portable", "avx2", "avx512" or "neon" (NULL: the best
 * one), for tests. CALLER_UNSUPPORTED when it is unknown, not compiled in or not in this CPU. */
BT_MUST_CHECK bt_status sampler_workspace_create_isa(uint32_t vocab_size, const char *isa,
                                                     sampler_workspace **out);
void sampler_workspace_destroy(sampler_workspace *workspace);

/* Draws from logits [vocab_size] (borrowed, not changed) at `position`: the absolute index of the
 * last token already consumed (prompt length - 1 for the first output token). Never fails: what
 * goes wrong is in row->status. A NaN or +inf among the x of step 1, or nothing but -inf, gives
 * SAMPLER_INVALID. Parameters and row must be valid. */
void sampler_draw(sampler_workspace *workspace, const sampler_params *params, const float *logits,
                  uint32_t vocab_size, uint32_t position, sampler_row *row);

/* What to say of a row without drawing. Ids are in the vocabulary. */
typedef struct sampler_scoring {
    int32_t target;
    uint32_t vocab_limit; /* as in sampler_params; the rest of the vocabulary has -inf */
    uint32_t top_count;   /* <= SAMPLER_TOP_MAX */
    uint32_t id_count;
    const int32_t *ids; /* borrowed */
} sampler_scoring;

/* Scores a row: log-softmax of the logits as they are (step 6 at temperature 1, without step 1) at
 * `target`, at the `top_count` largest ({-1, -inf} beyond the vocabulary), and at ids. Arrays are
 * the caller's, NULL where their count is 0. false, and nothing written, when a logit is NaN or
 * +inf, or all are -inf. */
bool sampler_score_row(sampler_workspace *workspace, const sampler_scoring *scoring,
                       const float *logits, uint32_t vocab_size, float *target_out,
                       sampler_top *top_out, float *ids_out);

/* Nanoseconds spent in the code that only masks need, since the workspace was made or this was last
 * called; counted only after sampler_time_capture(workspace, true). */
void sampler_time_capture(sampler_workspace *workspace, bool is_on);
uint64_t sampler_take_capture_ns(sampler_workspace *workspace);

/* The plain C reference of sampler_draw: full sort, no shortcuts; same bits. CALLER_ARGUMENT for
 * parameters that are not valid. Allocates. */
BT_MUST_CHECK bt_status sampler_draw_ref(const sampler_params *params, const float *logits,
                                         uint32_t vocab_size, uint32_t position, sampler_row *row);

/* murmur3_32 over the words seed low, seed high, position, column (state 0, length 16). */
uint32_t sampler_hash(uint64_t seed, uint32_t position, uint32_t column);
/* g = -log(-min(log(h / 4294967295), -2^-32)), the inner log clamped below at -DBL_MAX. */
double sampler_noise(uint32_t hash);

#endif
