/* The run-time form of a weight matrix: *panels* of 64 output columns, each [k][64] bf16, so that
 * one panel is one sequential read for every row of activations. Within a panel's 64 the columns
 * stand in groups of 16 as 0 8 1 9 2 10 .. 7 15: the even and odd halves of a vector of words are
 * then eight neighbouring columns each, and widening costs one shift or one mask. The order is the
 * same for every instruction set, so that packed weights can be shared.
 *
 * A matrix in a model file has `rows` outputs of `depth` inputs; its last panel is filled with zero
 * weights. */
#ifndef BT_KERNELS_PACK_H
#define BT_KERNELS_PACK_H

#include <stddef.h>
#include <stdint.h>

enum { PACK_PANEL_COLUMNS = 64, PACK_ALIGN_BYTES = 128 };

typedef struct pack_matrix {
    const uint16_t *panels; /* [panel][depth][64], borrowed */
    uint32_t columns;       /* outputs */
    uint32_t depth;         /* inputs: the length of each FMA chain */
} pack_matrix;

static inline uint32_t pack_panels(uint32_t columns) {
    return (columns + PACK_PANEL_COLUMNS - 1) / PACK_PANEL_COLUMNS;
}
static inline size_t pack_panel_elements(uint32_t depth) {
    return (size_t)depth * PACK_PANEL_COLUMNS;
}
static inline size_t pack_elements(uint32_t columns, uint32_t depth) {
    return pack_panels(columns) * pack_panel_elements(depth);
}
/* Where a column of 0..63 stands among the 64 of one k. */
static inline uint32_t pack_slot(uint32_t column) {
    const uint32_t in_group = column % 16;
    return column / 16 * 16 + (in_group < 8 ? 2 * in_group : 2 * (in_group - 8) + 1);
}

/* Puts output `column` (its `depth` weights in a row) into the panels. */
void pack_column(uint16_t *panels, uint32_t column, uint32_t depth, const uint16_t *weights);
/* Puts the 64 columns from `column` (a multiple of 64), given as rows [64][depth], into one panel.
 */
void pack_panel(uint16_t *panels, uint32_t column, uint32_t depth, const uint16_t *rows);

#endif
