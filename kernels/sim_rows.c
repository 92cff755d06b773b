/* Log-weights begin at 0 and fall like a power of the rank, each by a step of its own:
 * log w[i + 1] = log w[i] - 1.2 / (i + 4) * (0.5 + u), u in [0, 1) from the seed. The mass of any
 * piece of them is a difference of two sums, so a row costs one logarithm and one subtraction per
 * entry. Everything goes through kernels/math.h: the same bits on every machine. */
#include "kernels/sim_rows.h"

#include <assert.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/math.h"

static uint32_t least(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

enum { SHAPES = 256 }; /* places in the weights where a distribution may begin */

struct sim_rows {
    sim_rows_options options;
    float *log_weights; /* [vocab_size + SHAPES] */
    double *sums;       /* [vocab_size + SHAPES + 1]: of the weights before each */
    uint32_t limit;     /* the ids below it are in order; 0: not made */
    int32_t *order;     /* [2 * vocab_size]: a permutation of them, twice, so that it goes round */
    uint32_t *ranks;    /* [vocab_size]: of each id in it */
    uint8_t *marks;     /* [vocab_size]: 1 where an id cannot be drawn now; else 0 */
};

/* ---- widths ---------------------------------------------------------------------------------- */

/* `weight` of 1024 supports have one of `count` widths from `first` on, each as often. */
typedef struct width_class {
    uint32_t first, count, weight;
} width_class;

static const width_class width_classes[] = {
    {1, 1, 460}, {2, 1, 154},  {3, 2, 102},  {5, 4, 102},
    {9, 8, 102}, {17, 16, 61}, {33, 50, 33}, {83, SIM_ROWS_REALISTIC_MAX - 82, 10},
};

uint32_t sim_rows_width(const sim_rows *rows, uint64_t hash) {
    if (rows->options.width != 0) return rows->options.width;
    const uint64_t drawn = sim_mix(hash, 1);
    uint32_t at = (uint32_t)(drawn % 1024);
    const width_class *c = width_classes;
    for (; at >= c->weight; c++)
        at -= c->weight;
    return c->first + (uint32_t)(((drawn >> 32) * c->count) >> 32);
}

/* ---- making ---------------------------------------------------------------------------------- */

static void make_weights(sim_rows *rows) {
    const uint32_t count = rows->options.vocab_size + SHAPES;
    double log_weight = 0.0;
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        rows->log_weights[i] = (float)log_weight;
        rows->sums[i] = sum;
        sum += math_exp_f64((double)rows->log_weights[i]);
        const double u = (double)(sim_mix(rows->options.seed, 2 * (uint64_t)i) >> 11) * 0x1p-53;
        log_weight -= 1.2 / ((double)i + 4.0) * (0.5 + u);
    }
    rows->sums[count] = sum;
}

/* Fisher and Yates's shuffle of the ids below `limit`. */
static void make_order(sim_rows *rows, uint32_t limit) {
    if (rows->limit == limit) return;
    int32_t *order = rows->order;
    for (uint32_t i = 0; i < limit; i++) {
        const uint64_t drawn = sim_mix(rows->options.seed, 2 * (uint64_t)i + 1) >> 32;
        const uint32_t other = (uint32_t)((drawn * (i + 1)) >> 32);
        order[i] = order[other];
        order[other] = (int32_t)i;
    }
    for (uint32_t i = 0; i < limit; i++)
        rows->ranks[order[i]] = i;
    memcpy(order + limit, order, limit * sizeof *order);
    rows->limit = limit;
}

bt_status sim_rows_create(const sim_rows_options *options, sim_rows **out) {
    BT_ASSERT(options->vocab_size >= 1 && options->vocab_size <= SAMPLER_VOCAB_MAX);
    BT_ASSERT(options->width <= SIM_ROWS_WIDTH_MAX);
    sim_rows *rows = bt_calloc(1, sizeof *rows);
    if (rows == NULL) return BT_ERR_WORKER_MEMORY;
    const size_t vocab = options->vocab_size;
    rows->options = *options;
    rows->log_weights = bt_calloc(vocab + SHAPES, sizeof *rows->log_weights);
    rows->sums = bt_calloc(vocab + SHAPES + 1, sizeof *rows->sums);
    rows->order = bt_calloc(2 * vocab, sizeof *rows->order);
    rows->ranks = bt_calloc(vocab, sizeof *rows->ranks);
    rows->marks = bt_calloc(vocab, sizeof *rows->marks);
    if (rows->log_weights == NULL || rows->sums == NULL || rows->order == NULL ||
        rows->ranks == NULL || rows->marks == NULL) {
        sim_rows_destroy(rows);
        return BT_ERR_WORKER_MEMORY;
    }
    make_weights(rows);
    *out = rows;
    return BT_OK;
}

void sim_rows_destroy(sim_rows *rows) {
    if (rows == NULL) return;
    bt_free(rows->log_weights);
    bt_free(rows->sums);
    bt_free(rows->order);
    bt_free(rows->ranks);
    bt_free(rows->marks);
    bt_free(rows);
}

/* ---- places ---------------------------------------------------------------------------------- */

typedef struct place {
    const float *log_weights; /* from its beginning on, as the two below */
    const double *sums;
    const int32_t *order;
    const uint32_t *ranks;
    const uint8_t *marks; /* of ids; NULL: all can be drawn */
    uint32_t start;       /* in the order */
    uint32_t limit;
    uint32_t drawable;
} place;

static bool is_banned(const place *p, int32_t id) {
    return p->marks != NULL && p->marks[id] != 0;
}

/* Marks an id, or takes the mark away; the number of marks that came. */
static uint32_t mark(sim_rows *rows, uint32_t limit, int32_t id, uint8_t value) {
    if (id < 0 || (uint32_t)id >= limit || rows->marks[id] == value) return 0;
    rows->marks[id] = value;
    return 1;
}

/* The same for all ids that the parameters ban: by name, or by a bias of -inf. */
static uint32_t mark_all(sim_rows *rows, uint32_t limit, const sampler_params *params,
                         uint8_t value) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < params->banned_count; i++)
        count += mark(rows, limit, params->banned_ids[i], value);
    for (uint32_t i = 0; i < params->bias_count; i++) {
        if (params->biases[i] == -math_inf_f32())
            count += mark(rows, limit, params->bias_ids[i], value);
    }
    return count;
}

/* Marks stay until close_place. */
static place open_place(sim_rows *rows, const sampler_params *params, uint64_t hash) {
    const uint32_t vocab = rows->options.vocab_size;
    const uint32_t limit = params->vocab_limit != 0 ? least(params->vocab_limit, vocab) : vocab;
    make_order(rows, limit);
    const uint32_t banned = mark_all(rows, limit, params, 1);
    const uint32_t shape = (uint32_t)(sim_mix(hash, 2) % SHAPES);
    const uint32_t start = (uint32_t)(sim_mix(hash, 3) % limit);
    return (place){.log_weights = rows->log_weights + shape,
                   .sums = rows->sums + shape,
                   .order = rows->order + start,
                   .ranks = rows->ranks,
                   .marks = banned > 0 ? rows->marks : NULL,
                   .start = start,
                   .limit = limit,
                   .drawable = limit - banned};
}

static void close_place(sim_rows *rows, const place *p, const sampler_params *params) {
    if (p->marks != NULL) (void)mark_all(rows, p->limit, params, 0);
}

/* What the log-weights of the first `count` less it are log-probabilities of: the logarithm of
 * their mass. */
static float log_mass(const place *p, uint32_t count) {
    if (count == 1) return p->log_weights[0];
    return (float)math_log_f64(p->sums[count] - p->sums[0]);
}

/* The first `count` ids that can be drawn. */
static void copy_ids(const place *p, uint32_t count, int32_t *ids) {
    if (p->marks == NULL) {
        memcpy(ids, p->order, count * sizeof *ids);
        return;
    }
    for (uint32_t i = 0, at = 0; i < count; at++) {
        if (!is_banned(p, p->order[at])) ids[i++] = p->order[at];
    }
}

static int32_t id_at(const place *p, uint32_t rank) {
    if (p->marks == NULL) return p->order[rank];
    for (uint32_t at = 0;; at++) {
        if (is_banned(p, p->order[at])) continue;
        if (rank-- == 0) return p->order[at];
    }
}

static void copy_logprobs(const place *p, uint32_t count, float mass, float *logprobs) {
    const float *restrict from = p->log_weights;
    float *restrict to = logprobs;
    for (uint32_t i = 0; i < count; i++)
        to[i] = from[i] - mass;
}

/* The rank that `seeded` draws among the first `count`, each as often as its weight says. */
static uint32_t draw_rank(const place *p, uint32_t count, uint64_t seeded) {
    const double u = (double)(seeded >> 11) * 0x1p-53;
    const double wanted = p->sums[0] + u * (p->sums[count] - p->sums[0]);
    uint32_t low = 0;
    uint32_t high = count; /* sums[low] <= wanted < sums[high], but for rounding */
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (p->sums[middle] <= wanted) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* ---- over the whole vocabulary --------------------------------------------------------------- */

static uint32_t copy_top(const place *p, uint32_t wanted, sampler_top *top) {
    const uint32_t count = wanted < p->drawable ? wanted : p->drawable;
    const float mass = log_mass(p, p->drawable);
    for (uint32_t i = 0, at = 0; i < count; at++) {
        const int32_t id = p->order[at];
        if (is_banned(p, id)) continue;
        top[i] = (sampler_top){.id = id, .logprob = p->log_weights[i] - mass};
        i++;
    }
    return count;
}

static float id_logprob(const place *p, int32_t id) {
    if (id < 0 || (uint32_t)id >= p->limit || is_banned(p, id)) return -math_inf_f32();
    const uint32_t at = (p->ranks[id] + p->limit - p->start) % p->limit;
    uint32_t rank = at;
    for (uint32_t i = 0; p->marks != NULL && i < at; i++)
        rank -= is_banned(p, p->order[i]);
    return p->log_weights[rank] - log_mass(p, p->drawable);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Of `count` entries those that the cap lets in, the drawn one in the last one's place if it is not
 * among them; values are over all. */
static void fill_mask(const place *p, const sampler_params *params, uint32_t count, uint32_t rank,
                      sampler_row *row) {
    const float mass = log_mass(p, count);
    const uint32_t kept = least(count, params->mask_max_tokens);
    const bool has_logprobs = params->mask_mode == SAMPLER_MASK_SUPPORT;
    row->support_count = kept;
    row->selected_logprob = p->log_weights[rank] - mass;
    copy_ids(p, kept, row->support_ids);
    if (has_logprobs) copy_logprobs(p, kept, mass, sampler_row_logprobs(row, kept));
    if (rank < kept) return;
    row->support_ids[kept - 1] = row->token;
    if (has_logprobs) row->support_logprobs[kept - 1] = row->selected_logprob;
}

static void draw(const sim_rows *rows, const place *p, const sampler_params *params, uint64_t hash,
                 uint64_t seeded, sampler_row *row) {
    uint32_t count = least(sim_rows_width(rows, hash), p->drawable);
    if (params->top_k != 0) count = least(count, params->top_k);
    const bool has_mask = params->mask_mode != SAMPLER_MASK_OFF;
    if (has_mask) row->cap_needed = count;
    if (has_mask && count > params->mask_max_tokens && params->mask_bounded == 0) {
        row->status = SAMPLER_OVERFLOW;
        return;
    }
    const uint32_t rank = draw_rank(p, count, seeded);
    row->token = id_at(p, rank);
    row->status = SAMPLER_OK;
    if (has_mask) fill_mask(p, params, count, rank, row);
    if (params->wants_logprob == 0) return;
    row->token_logprob = p->log_weights[rank] - log_mass(p, p->drawable);
    row->top_count = copy_top(p, params->top_logprobs, row->top);
    for (uint32_t i = 0; i < params->logprob_id_count; i++)
        row->id_logprobs[i] = id_logprob(p, params->logprob_ids[i]);
}

void sim_rows_draw(sim_rows *rows, const sampler_params *params, uint64_t hash, uint64_t seeded,
                   sampler_row *row) {
    const place p = open_place(rows, params, hash);
    if (p.drawable > 0) draw(rows, &p, params, hash, seeded, row);
    close_place(rows, &p, params);
}

void sim_rows_score(sim_rows *rows, const sampler_scoring *scoring, uint64_t hash,
                    float *target_out, sampler_top *top_out, float *ids_out) {
    const sampler_params neutral = {.vocab_limit = scoring->vocab_limit};
    const place p = open_place(rows, &neutral, hash);
    *target_out = id_logprob(&p, scoring->target);
    const uint32_t found = copy_top(&p, scoring->top_count, top_out);
    for (uint32_t i = found; i < scoring->top_count; i++)
        top_out[i] = (sampler_top){.id = -1, .logprob = -math_inf_f32()};
    for (uint32_t i = 0; i < scoring->id_count; i++)
        ids_out[i] = id_logprob(&p, scoring->ids[i]);
}
