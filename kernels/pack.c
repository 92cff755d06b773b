/* Packing is a transposition, done in blocks that keep both sides in the first cache. */
#include "kernels/pack.h"

#include "base/assert.h"

enum { BLOCK_DEPTH = 32 };

void pack_column(uint16_t *panels, uint32_t column, uint32_t depth, const uint16_t *weights) {
    uint16_t *out = panels + column / PACK_PANEL_COLUMNS * pack_panel_elements(depth) +
                    pack_slot(column % PACK_PANEL_COLUMNS);
    for (size_t k = 0; k < depth; k++)
        out[k * PACK_PANEL_COLUMNS] = weights[k];
}

static void pack_block(uint16_t *out, const uint16_t *rows, size_t depth, size_t block_depth) {
    for (uint32_t column = 0; column < PACK_PANEL_COLUMNS; column++) {
        uint16_t *to = out + pack_slot(column);
        const uint16_t *from = rows + column * depth;
        for (size_t k = 0; k < block_depth; k++)
            to[k * PACK_PANEL_COLUMNS] = from[k];
    }
}

void pack_panel(uint16_t *panels, uint32_t column, uint32_t depth, const uint16_t *rows) {
    BT_ASSERT(column % PACK_PANEL_COLUMNS == 0);
    uint16_t *out = panels + column / PACK_PANEL_COLUMNS * pack_panel_elements(depth);
    for (size_t k = 0; k < depth; k += BLOCK_DEPTH) {
        const size_t rest = depth - k;
        pack_block(out + k * PACK_PANEL_COLUMNS, rows + k, depth,
                   rest < BLOCK_DEPTH ? rest : BLOCK_DEPTH);
    }
}
