/* Matrix products: how the work is cut. A unit is one panel for one block of rows, or half of one;
 * the units of a block stand in the order of memory, block after block. Where there are rows enough
 * each thread has a block of its own, which it then finds in its caches op after op. The cut
 * decides who computes, never what. Bound by memory for few rows (each weight is read once per
 * block), by FMA for many. */
#include "kernels/host/dev_host_internal.h"

/* With so many rows two threads can share a panel: it is bound by FMA. With fewer, both would read
 * all of it from memory. */
enum { CUT_ROWS = 8 };

/* So high a block is worth reading all weights for it. */
enum { OWN_ROWS = 32 };

typedef struct matmul_run {
    dev_host *dev;
    const void *params;
    const pack_matrix *weights;
    uint32_t panels; /* pairs of panels of gate_up */
    uint32_t rows;
    uint32_t blocks; /* of rows */
    uint32_t halves; /* units of a panel and block: 2 where it can be cut */
    /* Columns [first, first + columns) of a panel (of gate_up: of both of a pair). */
    void (*part)(const struct matmul_run *run, uint32_t block, const host_panel *panel,
                 uint32_t index, float *scratch);
} matmul_run;

/* Blocks of nearly equal height: row `block` starts here. */
static uint32_t block_start(const matmul_run *run, uint32_t block) {
    return (uint32_t)((uint64_t)run->rows * block / run->blocks);
}

static void run_units(void *context, uint32_t begin, uint32_t end, uint32_t thread) {
    const matmul_run *run = context;
    host_panel panel = {.depth = run->weights->depth, .format = run->weights->format};
    uint32_t taken;
    for (uint32_t unit = begin; unit < end; unit += taken) {
        const uint32_t half = unit % run->halves;
        taken = half == 0 && end - unit >= run->halves ? run->halves : 1;
        panel.first = half * HOST_HALF_COLUMNS;
        panel.columns = taken == run->halves ? PACK_PANEL_COLUMNS : HOST_HALF_COLUMNS;
        const uint32_t whole = unit / run->halves;
        run->part(run, whole / run->panels, &panel, whole % run->panels,
                  dev_host_scratch(run->dev, thread));
    }
}

/* As few blocks as fit, but one for each thread while they are not low. */
static uint32_t row_blocks(const dev_host *dev, uint32_t rows) {
    const uint32_t fewest = (rows + HOST_BLOCK_ROWS - 1) / HOST_BLOCK_ROWS;
    const uint32_t own = rows / OWN_ROWS;
    const uint32_t threads = dev_host_threads(dev);
    const uint32_t wanted = own < threads ? own : threads;
    return wanted > fewest ? wanted : fewest;
}

static void run_matmul(matmul_run run) {
    const bool is_cut =
        dev_host_threads(run.dev) > 1 && run.rows >= CUT_ROWS && run.weights->format == PACK_BF16;
    run.blocks = row_blocks(run.dev, run.rows);
    run.halves = is_cut ? 2 : 1;
    host_run_stretches(run.dev, &(host_work){.units = run.panels * run.blocks * run.halves,
                                             .align = run.halves,
                                             .run_min = 1,
                                             .run = run_units,
                                             .context = &run});
}

/* These columns of acc [rows][64] = x times panel `index`. */
static void panel_product(const matmul_run *run, float *acc, const float *x, size_t x_stride,
                          host_panel panel, uint32_t index, uint32_t rows) {
    panel.data = pack_panel_at(run->weights, index);
    if (panel.format == PACK_BF16)
        run->dev->isa->panel_matmul(acc, x, x_stride, &panel, rows);
    else
        run->dev->isa->quantised_matmul(acc, x, x_stride, &panel, rows);
}

/* How many columns from `column` on there are of those of the panel. */
static uint32_t columns_there(uint32_t columns, uint32_t column, const host_panel *panel) {
    if (column >= columns) return 0;
    return columns - column < panel->columns ? columns - column : panel->columns;
}

static void matmul_part(const matmul_run *run, uint32_t block, const host_panel *panel,
                        uint32_t index, float *acc) {
    const op_matmul_params *p = run->params;
    const uint32_t row = block_start(run, block);
    const uint32_t rows = block_start(run, block + 1) - row;
    const uint32_t column = index * PACK_PANEL_COLUMNS + panel->first;
    const uint32_t columns = columns_there(p->weights.columns, column, panel);
    if (columns == 0) return;
    panel_product(run, acc, p->x + row * p->x_stride, p->x_stride, *panel, index, rows);
    run->dev->isa->matmul_finish(p->out + row * p->out_stride + column, p->out_stride,
                                 acc + panel->first, p->bias == NULL ? NULL : p->bias + column,
                                 rows, columns, p->adds);
}

void op_matmul(dev_host *dev, const op_matmul_params *p) {
    run_matmul((matmul_run){.dev = dev,
                            .params = p,
                            .weights = &p->weights,
                            .panels = pack_panels(p->weights.columns),
                            .rows = p->rows,
                            .part = matmul_part});
}

static void gate_up_part(const matmul_run *run, uint32_t block, const host_panel *panel,
                         uint32_t index, float *gate) {
    const op_gate_up_params *p = run->params;
    const uint32_t row = block_start(run, block);
    const uint32_t rows = block_start(run, block + 1) - row;
    const uint32_t column = index * PACK_PANEL_COLUMNS + panel->first;
    const uint32_t columns = columns_there(p->width, column, panel);
    if (columns == 0) return;
    const uint32_t depth = p->weights.depth;
    float *up = gate + (size_t)HOST_BLOCK_ROWS * PACK_PANEL_COLUMNS;
    const float *x = p->x + (size_t)row * depth;
    panel_product(run, gate, x, depth, *panel, 2 * index, rows);
    panel_product(run, up, x, depth, *panel, 2 * index + 1, rows);
    run->dev->isa->silu_mul(p->out + (size_t)row * p->width + column, p->width, gate + panel->first,
                            up + panel->first, rows, columns);
}

void op_gate_up(dev_host *dev, const op_gate_up_params *p) {
    run_matmul((matmul_run){.dev = dev,
                            .params = p,
                            .weights = &p->weights,
                            .panels = pack_panels(p->width),
                            .rows = p->rows,
                            .part = gate_up_part});
}
