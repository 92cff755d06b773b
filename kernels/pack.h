/* The run-time form of a weight matrix: *panels* of 64 output columns, so that one panel is one
 * sequential read for every row of activations. The *format* says how a panel keeps its weights;
 * it is the same for every instruction set, so that packed weights can be shared.
 *
 *   BF16   [depth][64] bf16. The 64 stand in groups of 16 as 0 8 1 9 2 10 .. 7 15: the even and odd
 *          halves of a vector of words are then eight neighbouring columns each, and widening costs
 *          one shift or one mask.
 *   INT8   f32 scale [64], then [depth][64] int8: one scale for each column, made at load.
 *   Q8_0   for every 32 inputs: f16 d [64], then [32][64] int8.
 *   Q4_0   for every 32 inputs: f16 d [64], then [4][64] words of eight inputs each, four bits an
 *          input, the first lowest.
 *   Q4_1   the same with f16 m [64] behind d.
 *
 * What a weight is, in f32 (q the stored integer):
 *   BF16   its bits                                 exact
 *   INT8   q; the chain's end is multiplied by the column's scale, rounded once
 *   Q8_0   q * d                                    exact in f32: 8 and 11 bits
 *   Q4_0   fma(q, d, -8 d)                          exact likewise
 *   Q4_1   fma(q, d, m)                             rounded once
 * All products but INT8's are thus one FMA chain over the same weights that a reader of the file in
 * f32 would see. The embedding is gathered from the same panels; there an INT8 weight is q * scale.
 *
 * A matrix in a model file has `rows` outputs of `depth` inputs; the last panel is filled with zero
 * weights. The formats with blocks of 32 need a depth that is a multiple of 32. */
#ifndef BT_KERNELS_PACK_H
#define BT_KERNELS_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PACK_PANEL_COLUMNS = 64, PACK_ALIGN_BYTES = 128, PACK_BLOCK = 32 };

/* Changes whenever the bytes of packed weights change; part of the key of
 * kernels/model/model_cache.h.
 */
enum { PACK_VERSION = 1 };

/* Part of fingerprints by number: append only. */
typedef enum pack_format {
    PACK_BF16,
    PACK_INT8,
    PACK_Q8_0,
    PACK_Q4_0,
    PACK_Q4_1,
    PACK_FORMAT_COUNT,
} pack_format;

typedef struct pack_matrix {
    const uint8_t *panels; /* [panel][pack_panel_bytes], borrowed, aligned to PACK_ALIGN_BYTES */
    uint32_t columns;      /* outputs */
    uint32_t depth;        /* inputs: the length of each FMA chain */
    pack_format format;
} pack_matrix;

/* "bf16", "int8", "q8_0" and so on. */
const char *pack_format_name(pack_format format);
/* Whether rows of this many inputs can be kept so. */
bool pack_format_takes(pack_format format, uint32_t depth);

static inline uint32_t pack_panels(uint32_t columns) {
    return (columns + PACK_PANEL_COLUMNS - 1) / PACK_PANEL_COLUMNS;
}
/* Bytes of one block of 32 inputs of a panel; 0 for the formats without blocks. */
static inline size_t pack_block_bytes(pack_format format) {
    switch (format) {
    case PACK_Q8_0: return (2 + 32) * PACK_PANEL_COLUMNS;
    case PACK_Q4_0: return (2 + 16) * PACK_PANEL_COLUMNS;
    case PACK_Q4_1: return (4 + 16) * PACK_PANEL_COLUMNS;
    case PACK_BF16:
    case PACK_INT8:
    case PACK_FORMAT_COUNT: break;
    }
    return 0;
}
static inline size_t pack_panel_bytes(pack_format format, uint32_t depth) {
    if (format == PACK_BF16) return (size_t)depth * PACK_PANEL_COLUMNS * sizeof(uint16_t);
    if (format == PACK_INT8) return (sizeof(float) + (size_t)depth) * PACK_PANEL_COLUMNS;
    return depth / PACK_BLOCK * pack_block_bytes(format);
}
static inline size_t pack_bytes(pack_format format, uint32_t columns, uint32_t depth) {
    return pack_panels(columns) * pack_panel_bytes(format, depth);
}
static inline const uint8_t *pack_panel_at(const pack_matrix *m, uint32_t panel) {
    return m->panels + panel * pack_panel_bytes(m->format, m->depth);
}
/* Where a column of 0..63 stands among the 64 of one k of a BF16 panel. */
static inline uint32_t pack_slot(uint32_t column) {
    const uint32_t in_group = column % 16;
    return column / 16 * 16 + (in_group < 8 ? 2 * in_group : 2 * (in_group - 8) + 1);
}

/* Bytes of one row before it is packed: `depth` bf16; an f32 scale and `depth` int8 (from
 * pack_quantise_row); or the blocks of a GGUF file: Q8_0 {f16 d, int8 [32]}, Q4_0 {f16 d, 16
 * bytes}, Q4_1 {f16 d, f16 m, 16 bytes}, where byte j holds input j (low half) and j + 16. */
size_t pack_row_bytes(pack_format format, uint32_t depth);
/* An INT8 row from bf16 weights: scale = max |w| / 127 in f32; q = w / scale, rounded to the
 * nearest integer, ties to even, at most 127 either way. A row of zeros has the scale zero.
 * `row_out` may start anywhere. */
void pack_quantise_row(uint8_t *row_out, uint32_t depth, const uint16_t *weights);
/* Whether every scale of `count` rows is a number; rows of bf16 are not looked at. */
bool pack_rows_are_finite(pack_format format, uint32_t depth, const uint8_t *rows, uint32_t count);
/* Puts `count` rows, one behind the other, into the panels as the columns from `column`. Rows of
 * different panels may be packed by different threads at once. */
void pack_rows(pack_format format, uint8_t *panels, uint32_t column, uint32_t depth,
               const uint8_t *rows, uint32_t count);
/* The weights of one column, out [depth], as the list above has them. */
void pack_gather(const pack_matrix *m, uint32_t column, float *out);

#endif
