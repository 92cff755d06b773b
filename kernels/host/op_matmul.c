/* Matrix products: one item is one panel for one block of rows. Neighbouring items share the panel.
 * Bound by memory for few rows (each weight is read once per HOST_BLOCK_ROWS rows), by FMA for
 * many.
 */
#include "kernels/host/dev_host_internal.h"

enum {
    FEW_ITEMS = 16,  /* a thread: with more, an uneven end costs little */
    SHARED_ROWS = 8, /* rows that pay for reading a panel from a shared cache */
};

typedef struct matmul_run {
    dev_host *dev;
    const void *params;
    uint32_t blocks; /* of rows */
} matmul_run;

/* Blocks of rows for a product of so many panels. Where the threads would end unevenly because the
 * panels are few, and there are rows enough to be bound by FMA, the rows are cut once more: two
 * threads then share a panel. */
static uint32_t row_blocks(const dev_host *dev, uint32_t rows, uint32_t panels) {
    const uint32_t blocks = (rows + HOST_BLOCK_ROWS - 1) / HOST_BLOCK_ROWS;
    const uint32_t threads = dev_host_threads(dev);
    const bool is_uneven = panels * blocks % threads != 0 && panels * blocks < FEW_ITEMS * threads;
    return is_uneven && rows >= 2 * blocks * SHARED_ROWS ? 2 * blocks : blocks;
}

/* Blocks of nearly equal height: row `block` starts here. */
static uint32_t block_start(uint32_t rows, uint32_t blocks, uint32_t block) {
    return (uint32_t)((uint64_t)rows * block / blocks);
}

/* acc [rows][64] = x times one panel. The scratch of widened weights lies behind two such blocks.
 */
static void panel_product(const dev_host *dev, float *acc, const float *x, size_t x_stride,
                          const pack_matrix *weights, uint32_t panel, uint32_t rows) {
    const uint8_t *data = pack_panel_at(weights, panel);
    if (weights->format == PACK_BF16) {
        dev->isa->panel_matmul(acc, x, x_stride, (const uint16_t *)(const void *)data,
                               weights->depth, rows);
        return;
    }
    const host_panel quantised = {.data = data, .depth = weights->depth, .format = weights->format};
    dev->isa->quantised_matmul(acc, x, x_stride, &quantised, rows);
}

static void matmul_item(void *context, uint32_t item, uint32_t thread) {
    const matmul_run *run = context;
    const op_matmul_params *p = run->params;
    const host_isa *isa = run->dev->isa;
    const uint32_t panel = item / run->blocks;
    const uint32_t block = item % run->blocks;
    const uint32_t row = block_start(p->rows, run->blocks, block);
    const uint32_t rows = block_start(p->rows, run->blocks, block + 1) - row;
    const uint32_t column = panel * PACK_PANEL_COLUMNS;
    const uint32_t rest = p->weights.columns - column;
    float *acc = dev_host_scratch(run->dev, thread);
    panel_product(run->dev, acc, p->x + row * p->x_stride, p->x_stride, &p->weights, panel, rows);
    isa->matmul_finish(p->out + row * p->out_stride + column, p->out_stride, acc,
                       p->bias == NULL ? NULL : p->bias + column, rows,
                       rest < PACK_PANEL_COLUMNS ? rest : PACK_PANEL_COLUMNS, p->adds);
}

void op_matmul(dev_host *dev, const op_matmul_params *p) {
    const uint32_t panels = pack_panels(p->weights.columns);
    matmul_run run = {.dev = dev, .params = p, .blocks = row_blocks(dev, p->rows, panels)};
    pool_run(dev->workers, panels * run.blocks, matmul_item, &run);
}

static void gate_up_item(void *context, uint32_t item, uint32_t thread) {
    const matmul_run *run = context;
    const op_gate_up_params *p = run->params;
    const host_isa *isa = run->dev->isa;
    const uint32_t pair = item / run->blocks;
    const uint32_t block = item % run->blocks;
    const uint32_t row = block_start(p->rows, run->blocks, block);
    const uint32_t rows = block_start(p->rows, run->blocks, block + 1) - row;
    const uint32_t column = pair * PACK_PANEL_COLUMNS;
    const uint32_t rest = p->width - column;
    const uint32_t depth = p->weights.depth;
    float *gate = dev_host_scratch(run->dev, thread);
    float *up = gate + (size_t)HOST_BLOCK_ROWS * PACK_PANEL_COLUMNS;
    const float *x = p->x + (size_t)row * depth;
    panel_product(run->dev, gate, x, depth, &p->weights, 2 * pair, rows);
    panel_product(run->dev, up, x, depth, &p->weights, 2 * pair + 1, rows);
    isa->silu_mul(p->out + (size_t)row * p->width + column, p->width, gate, up, rows,
                  rest < PACK_PANEL_COLUMNS ? rest : PACK_PANEL_COLUMNS);
}

void op_gate_up(dev_host *dev, const op_gate_up_params *p) {
    const uint32_t pairs = pack_panels(p->width);
    matmul_run run = {.dev = dev, .params = p, .blocks = row_blocks(dev, p->rows, pairs)};
    pool_run(dev->workers, pairs * run.blocks, gate_up_item, &run);
}
