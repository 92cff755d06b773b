/* Matrix products: how the work is cut. A *unit* is one panel for one block of rows, or half of
 * one. The units of a block stand in the order of memory, block after block; each thread has its
 * own stretch of them and claims it in runs that halve, then helps the others with theirs. So a
 * thread reads long pieces of memory (panels claimed in turn are read at three quarters of the
 * speed) and keeps its rows in its second cache, all end together, and one that is held up keeps at
 * most half of its stretch. The cut decides who computes, never what. Bound by memory for few rows
 * (each weight is read once per HOST_BLOCK_ROWS rows), by FMA for many. */
#include "base/assert.h"
#include "kernels/host/dev_host_internal.h"

/* With so many rows two threads can share a panel: it is bound by FMA. With fewer, both would read
 * all of it from memory. */
enum { CUT_ROWS = 8 };

typedef struct matmul_run {
    dev_host *dev;
    const void *params;
    const pack_matrix *weights;
    uint32_t panels; /* pairs of panels of gate_up */
    uint32_t rows;
    uint32_t blocks; /* of rows */
    uint32_t halves; /* units of a panel and block: 2 where it can be cut */
    uint32_t units;
    /* Columns [first, first + columns) of a panel (of gate_up: of both of a pair). */
    void (*part)(const struct matmul_run *run, uint32_t block, const host_panel *panel,
                 uint32_t index, float *scratch);
} matmul_run;

typedef struct unit_range {
    uint32_t begin, end;
} unit_range;

static unit_range stretch_of(const matmul_run *run, uint32_t thread) {
    const uint64_t units = run->units;
    const uint32_t threads = dev_host_threads(run->dev);
    return (unit_range){(uint32_t)(units * thread / threads),
                        (uint32_t)(units * (thread + 1) / threads)};
}

/* Half of what is left, up to the end of a panel and block. */
static unit_range first_run(const matmul_run *run, unit_range rest) {
    const uint32_t half = rest.begin + (rest.end - rest.begin + 1) / 2;
    const uint32_t end = (half + run->halves - 1) / run->halves * run->halves;
    return (unit_range){rest.begin, end < rest.end ? end : rest.end};
}

static uint32_t count_runs(const matmul_run *run, unit_range stretch) {
    uint32_t count = 0;
    for (; stretch.begin < stretch.end; count++)
        stretch.begin = first_run(run, stretch).end;
    return count;
}

static unit_range run_at(const matmul_run *run, unit_range stretch, uint32_t index) {
    for (; index > 0; index--)
        stretch.begin = first_run(run, stretch).end;
    return first_run(run, stretch);
}

/* The next run of this thread's stretch, else of the next one's that has any. There are as many
 * claims as runs. */
static unit_range claim(const matmul_run *run, uint32_t thread) {
    const uint32_t threads = dev_host_threads(run->dev);
    for (uint32_t i = 0; i < threads; i++) {
        const uint32_t owner = (thread + i) % threads;
        const unit_range stretch = stretch_of(run, owner);
        const uint32_t runs = count_runs(run, stretch);
        _Atomic uint32_t *next = &run->dev->claims[owner].next;
        uint32_t index = atomic_load_explicit(next, memory_order_relaxed);
        while (index < runs)
            if (atomic_compare_exchange_weak_explicit(next, &index, index + 1, memory_order_relaxed,
                                                      memory_order_relaxed))
                return run_at(run, stretch, index);
    }
    BT_ASSERT(false);
    return (unit_range){0, 0};
}

/* Blocks of nearly equal height: row `block` starts here. */
static uint32_t block_start(const matmul_run *run, uint32_t block) {
    return (uint32_t)((uint64_t)run->rows * block / run->blocks);
}

static void run_units(void *context, uint32_t item, uint32_t thread) {
    (void)item;
    const matmul_run *run = context;
    const unit_range range = claim(run, thread);
    host_panel panel = {.depth = run->weights->depth, .format = run->weights->format};
    uint32_t taken;
    for (uint32_t unit = range.begin; unit < range.end; unit += taken) {
        const uint32_t half = unit % run->halves;
        taken = half == 0 && range.end - unit >= run->halves ? run->halves : 1;
        panel.first = half * HOST_HALF_COLUMNS;
        panel.columns = taken == run->halves ? PACK_PANEL_COLUMNS : HOST_HALF_COLUMNS;
        const uint32_t whole = unit / run->halves;
        run->part(run, whole / run->panels, &panel, whole % run->panels,
                  dev_host_scratch(run->dev, thread));
    }
}

static void run_matmul(matmul_run run) {
    const uint32_t threads = dev_host_threads(run.dev);
    run.blocks = (run.rows + HOST_BLOCK_ROWS - 1) / HOST_BLOCK_ROWS;
    const bool is_cut = threads > 1 && run.rows >= CUT_ROWS && run.weights->format == PACK_BF16;
    run.halves = is_cut ? 2 : 1;
    run.units = run.panels * run.blocks * run.halves;
    uint32_t runs = 0;
    for (uint32_t i = 0; i < threads; i++) {
        runs += count_runs(&run, stretch_of(&run, i));
        atomic_store_explicit(&run.dev->claims[i].next, 0, memory_order_relaxed);
    }
    pool_run(run.dev->workers, runs, run_units, &run);
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
