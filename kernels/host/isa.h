/* What differs between instruction sets: the inner kernels, as one table of functions per set, all
 * compiled from the same *_impl.h sources and giving the same bits. Internal to kernels/host. */
#ifndef BT_KERNELS_HOST_ISA_H
#define BT_KERNELS_HOST_ISA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kv_page.h"
#include "kernels/pack.h"

/* Softmax state of some query rows: values [rows][width], maximum [rows], sum [rows]. */
typedef struct host_attention_state {
    float *values;
    float *maximum;
    float *sum;
} host_attention_state;

/* Keys and values that are needed after a block's own: asked for meanwhile. */
typedef struct host_attention_next {
    const uint32_t *page_ids; /* of their sequence; NULL: nothing follows */
    uint32_t kv_head;
    uint32_t position; /* of the first tile */
    uint32_t end;      /* of the keys */
} host_attention_next;

/* Some consecutive query tokens of one sequence and the query heads of one KV head. Row t * group +
 * h is head h of token t. `width` is head_dim rounded up to 64. */
typedef struct host_attention_block {
    const kv_page_layout *layout;
    const uint8_t *kv_memory;
    const uint32_t *page_ids; /* of the sequence, logical order */
    uint32_t page_shift;      /* log2 of the tokens of a page */
    uint32_t layer;
    uint32_t kv_head;
    uint32_t width;
    uint32_t group;
    uint32_t tokens;
    uint32_t first_position;
    uint32_t window; /* 0: all keys */
    uint32_t end;    /* of the keys that are walked: behind the last query, or a partition's end */
    host_attention_next next;
    float scale;
    const float *q; /* [rows][head_dim] */
    float *keys;    /* scratch [head_dim][64] */
    float *values;  /* scratch [64][width] */
    float *scores;  /* scratch [rows][64] */
} host_attention_block;

/* The columns [first, first + columns) of a panel: all 64, or half of them if it is PACK_BF16. */
typedef struct host_panel {
    const uint8_t *data;
    uint32_t depth;
    pack_format format;
    uint32_t first;
    uint32_t columns;
} host_panel;
enum { HOST_HALF_COLUMNS = PACK_PANEL_COLUMNS / 2 };

typedef struct host_isa {
    const char *name;
    bool (*is_supported)(void);
    /* These columns of out [rows][64] = x [rows][depth] times the panel, which is PACK_BF16. */
    void (*panel_matmul)(float *out, const float *x, size_t x_stride, const host_panel *panel,
                         uint32_t rows);
    /* The same with quantised weights. */
    void (*quantised_matmul)(float *out, const float *x, size_t x_stride, const host_panel *panel,
                             uint32_t rows);
    /* out [rows][columns] = acc [rows][columns of 64] (+ bias) (+ out). */
    void (*matmul_finish)(float *out, size_t out_stride, const float *acc, const float *bias,
                          uint32_t rows, uint32_t columns, bool adds);
    /* out [rows][columns] = silu(gate) * up, both [rows][columns of 64]. */
    void (*silu_mul)(float *out, size_t out_stride, const float *gate, const float *up,
                     uint32_t rows, uint32_t columns);
    void (*rms_norm)(float *out, const float *x, const float *weight, uint32_t width,
                     float epsilon);
    /* Rotates one head; `table` is cos [head_dim / 2], sin [head_dim / 2]. */
    void (*rope)(float *x, const float *table, uint32_t head_dim);
    void (*store_bf16)(uint16_t *out, const float *x, uint32_t count);
    /* One partition of the keys, into `state`. */
    void (*attention_partition)(const host_attention_block *block, uint32_t partition,
                                const host_attention_state *state);
    /* Folds the next partition of rows [first_row, rows) into `total`. */
    void (*attention_fold)(const host_attention_state *total, const host_attention_state *part,
                           uint32_t first_row, uint32_t rows, uint32_t width);
    void (*attention_finish)(float *out, const float *values, float sum, uint32_t head_dim);
} host_isa;

/* The first key that the query at this position sees. */
static inline uint32_t host_first_key(uint32_t query, uint32_t window) {
    return window != 0 && query >= window ? query - window + 1 : 0;
}

/* The best set this CPU has, or the one with this name; NULL when it cannot be used here. */
const host_isa *host_isa_find(const char *name);
/* Sets that can be used here, best first; NULL past the end. */
const host_isa *host_isa_at(uint32_t index);

extern const host_isa host_isa_portable;
#if defined(__x86_64__)
extern const host_isa host_isa_avx2;
extern const host_isa host_isa_avx512;
#elif defined(__aarch64__)
extern const host_isa host_isa_neon;
#endif

#endif
