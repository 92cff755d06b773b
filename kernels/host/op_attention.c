/* Attention: how the work is cut. An item is a block of query tokens of one sequence and one KV
 * head, over all its keys; when there are too few items for the threads (decoding few sequences
 * with long contexts), single-token blocks are cut at the partitions too, and folded afterwards in
 * order. The cut decides who computes, never what. */
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/host/dev_host_internal.h"

enum {
    ITEMS_PER_THREAD = 4, /* cut at partitions while there are fewer items than this per thread */
    RUNS_PER_THREAD =
        8, /* items are claimed in runs, so that each can ask for the next one's keys */
    RUN_ITEMS_MAX = 8,
};

typedef struct attention_run {
    dev_host *dev;
    const op_attention_params *p;
} attention_run;

static uint32_t tokens_per_block(const dev_host *dev, uint32_t group) {
    return group >= dev->attention_rows ? 1 : dev->attention_rows / group;
}

static uint32_t partitions_of(uint32_t last_position) {
    return last_position / OP_ATTENTION_PARTITION + 1;
}

bt_status op_attention_plan_create(const dev_host *dev, uint32_t tokens_max, uint32_t sequences_max,
                                   uint32_t context_tokens, uint32_t heads,
                                   const kv_page_layout *layout, op_attention_plan **out) {
    const uint32_t group = heads / layout->kv_heads;
    const uint32_t width = host_round_up(layout->head_dim, PACK_PANEL_COLUMNS);
    op_attention_plan *plan = bt_calloc(1, sizeof *plan);
    if (plan == NULL) return BT_ERR_WORKER_MEMORY;
    const uint32_t blocks = sequences_max + tokens_max / tokens_per_block(dev, group);
    plan->parts_max = ITEMS_PER_THREAD * dev_host_threads(dev) * partitions_of(context_tokens - 1);
    plan->items_max = blocks * layout->kv_heads + plan->parts_max;
    plan->part_floats = group * (width + 2);
    plan->items = bt_calloc(plan->items_max, sizeof *plan->items);
    plan->parts = bt_calloc((size_t)plan->parts_max * plan->part_floats, sizeof *plan->parts);
    if (plan->items == NULL || plan->parts == NULL) {
        op_attention_plan_destroy(plan);
        return BT_ERR_WORKER_MEMORY;
    }
    *out = plan;
    return BT_OK;
}

void op_attention_plan_destroy(op_attention_plan *plan) {
    if (plan == NULL) return;
    bt_free(plan->items);
    bt_free(plan->parts);
    bt_free(plan);
}

static void push_item(op_attention_plan *plan, op_attention_item item, uint32_t window, bool cuts) {
    const uint32_t first = host_first_key(item.first_position, window) / OP_ATTENTION_PARTITION;
    const uint32_t partitions = partitions_of(item.first_position + item.tokens - 1) - first;
    item.first_partition = first;
    item.partitions = partitions;
    item.part = OP_ATTENTION_WHOLE;
    if (!cuts || partitions == 1 || item.tokens > 1) {
        BT_ASSERT(plan->item_count < plan->items_max);
        plan->items[plan->item_count++] = item;
        return;
    }
    BT_ASSERT(plan->part_count + partitions <= plan->parts_max);
    for (uint32_t i = 0; i < partitions; i++) {
        item.first_partition = first + i;
        item.partitions = 1;
        item.part = plan->part_count++;
        item.folds = i == 0 ? partitions : 0;
        plan->items[plan->item_count++] = item;
    }
}

/* Blocks with the most keys first, so that the last items to be claimed are short. */
static void push_sequence(const dev_host *dev, const op_attention_params *p, uint32_t sequence,
                          bool cuts) {
    const uint32_t block = tokens_per_block(dev, p->heads / p->kv.layout.kv_heads);
    const uint32_t tokens = p->token_offsets[sequence + 1] - p->token_offsets[sequence];
    for (uint32_t end = tokens; end > 0;) {
        const uint32_t begin = (end - 1) / block * block;
        for (uint32_t head = 0; head < p->kv.layout.kv_heads; head++)
            push_item(p->plan,
                      (op_attention_item){
                          .sequence = sequence,
                          .kv_head = head,
                          .first_token = p->token_offsets[sequence] + begin,
                          .tokens = end - begin,
                          .first_position = p->first_positions[sequence] + begin,
                      },
                      p->window, cuts);
        end = begin;
    }
}

void op_attention_prepare(const dev_host *dev, const op_attention_params *p) {
    const uint32_t block = tokens_per_block(dev, p->heads / p->kv.layout.kv_heads);
    uint32_t items = 0;
    for (uint32_t s = 0; s < p->sequences; s++) {
        const uint32_t tokens = p->token_offsets[s + 1] - p->token_offsets[s];
        items += (tokens + block - 1) / block * p->kv.layout.kv_heads;
    }
    const uint32_t threads = dev_host_threads(dev);
    const bool cuts = threads > 1 && items < ITEMS_PER_THREAD * threads;
    p->plan->item_count = 0;
    p->plan->part_count = 0;
    for (uint32_t s = 0; s < p->sequences; s++)
        push_sequence(dev, p, s, cuts);
}

static host_attention_state state_at(float *memory, uint32_t rows, uint32_t width) {
    float *maximum = memory + (size_t)rows * width;
    return (host_attention_state){.values = memory, .maximum = maximum, .sum = maximum + rows};
}

/* Where the keys of an item end: behind its last query, or with its partitions. */
static uint32_t keys_end(const op_attention_item *item) {
    const uint64_t end =
        (uint64_t)(item->first_partition + item->partitions) * OP_ATTENTION_PARTITION;
    const uint32_t queries_end = item->first_position + item->tokens;
    return end < queries_end ? (uint32_t)end : queries_end;
}

/* What the item behind this one begins with. */
static host_attention_next next_keys(const op_attention_params *p, const op_attention_item *item) {
    const op_attention_plan *plan = p->plan;
    if (item + 1 == plan->items + plan->item_count) return (host_attention_next){.page_ids = NULL};
    const op_attention_item *next = item + 1;
    const uint32_t begin = next->first_partition * OP_ATTENTION_PARTITION;
    const uint32_t first =
        host_first_key(next->first_position, p->window) / OP_ATTENTION_TILE * OP_ATTENTION_TILE;
    return (host_attention_next){
        .page_ids = p->kv.page_ids + p->kv.page_offsets[next->sequence],
        .kv_head = next->kv_head,
        .position = begin > first ? begin : first,
        .end = keys_end(next),
    };
}

/* Lays the block out in the thread's scratch: q, scores, keys, values; then the free rest. */
static float *open_block(const attention_run *run, const op_attention_item *item, float *scratch,
                         host_attention_block *out) {
    const op_attention_params *p = run->p;
    const kv_page_layout *layout = &p->kv.layout;
    const uint32_t group = p->heads / layout->kv_heads;
    const uint32_t width = host_round_up(layout->head_dim, PACK_PANEL_COLUMNS);
    const size_t rows = (size_t)item->tokens * group;
    float *q = scratch;
    float *scores = q + rows * layout->head_dim;
    float *keys = scores + rows * OP_ATTENTION_TILE;
    float *values = keys + (size_t)layout->head_dim * OP_ATTENTION_TILE;
    const size_t row_floats = (size_t)group * layout->head_dim;
    for (uint32_t t = 0; t < item->tokens; t++)
        memcpy(q + t * row_floats,
               p->q + (item->first_token + t) * p->q_stride + item->kv_head * row_floats,
               row_floats * sizeof *q);
    *out = (host_attention_block){
        .layout = layout,
        .kv_memory = p->kv.memory,
        .page_ids = p->kv.page_ids + p->kv.page_offsets[item->sequence],
        .page_shift = (uint32_t)__builtin_ctz(layout->page_tokens),
        .layer = p->layer,
        .kv_head = item->kv_head,
        .width = width,
        .group = group,
        .tokens = item->tokens,
        .first_position = item->first_position,
        .window = p->window,
        .end = keys_end(item),
        .next = next_keys(p, item),
        .scale = p->scale,
        .q = q,
        .keys = keys,
        .values = values,
        .scores = scores,
    };
    return values + (size_t)OP_ATTENTION_TILE * width;
}

static void finish_rows(const attention_run *run, const op_attention_item *item,
                        const host_attention_state *total) {
    const op_attention_params *p = run->p;
    const uint32_t head_dim = p->kv.layout.head_dim;
    const uint32_t group = p->heads / p->kv.layout.kv_heads;
    const uint32_t width = host_round_up(head_dim, PACK_PANEL_COLUMNS);
    for (uint32_t row = 0; row < item->tokens * group; row++) {
        const size_t token = item->first_token + row / group;
        const size_t head = item->kv_head * group + row % group;
        run->dev->isa->attention_finish(p->out + (token * p->heads + head) * head_dim,
                                        total->values + (size_t)row * width, total->sum[row],
                                        head_dim);
    }
}

/* All partitions of one block, folded on the way. */
static void whole_item(const attention_run *run, const op_attention_item *item, float *scratch) {
    host_attention_block block;
    float *rest = open_block(run, item, scratch, &block);
    const uint32_t rows = item->tokens * block.group;
    const host_attention_state total = state_at(rest, rows, block.width);
    const host_attention_state part = state_at(total.sum + rows, rows, block.width);
    const uint32_t first = item->first_partition;
    run->dev->isa->attention_partition(&block, first, &total);
    for (uint32_t i = first + 1; i < first + item->partitions; i++) {
        run->dev->isa->attention_partition(&block, i, &part);
        const uint32_t begin = i * OP_ATTENTION_PARTITION;
        const uint32_t first_token =
            begin > item->first_position ? begin - item->first_position : 0;
        run->dev->isa->attention_fold(&total, &part, first_token * block.group, rows, block.width);
    }
    finish_rows(run, item, &total);
}

static void one_item(const attention_run *run, const op_attention_item *item, float *scratch) {
    const op_attention_plan *plan = run->p->plan;
    if (item->part == OP_ATTENTION_WHOLE) {
        whole_item(run, item, scratch);
        return;
    }
    host_attention_block block;
    (void)open_block(run, item, scratch, &block);
    const host_attention_state part =
        state_at(plan->parts + (size_t)item->part * plan->part_floats, block.group, block.width);
    run->dev->isa->attention_partition(&block, item->first_partition, &part);
}

static void attention_items(void *context, uint32_t begin, uint32_t end, uint32_t thread) {
    const attention_run *run = context;
    for (uint32_t i = begin; i < end; i++)
        one_item(run, &run->p->plan->items[i], dev_host_scratch(run->dev, thread));
}

/* Runs over all items; those that begin a cut block fold it. */
static void fold_item(void *context, uint32_t index, uint32_t thread) {
    (void)thread;
    const attention_run *run = context;
    const op_attention_plan *plan = run->p->plan;
    const op_attention_item *item = &plan->items[index];
    if (item->folds == 0) return;
    const uint32_t group = run->p->heads / run->p->kv.layout.kv_heads;
    const uint32_t width = host_round_up(run->p->kv.layout.head_dim, PACK_PANEL_COLUMNS);
    float *memory = plan->parts + (size_t)item->part * plan->part_floats;
    const host_attention_state total = state_at(memory, group, width);
    for (uint32_t i = 1; i < item->folds; i++) {
        const host_attention_state part =
            state_at(memory + i * (size_t)plan->part_floats, group, width);
        run->dev->isa->attention_fold(&total, &part, 0, group, width);
    }
    finish_rows(run, item, &total);
}

void op_attention(dev_host *dev, const op_attention_params *p) {
    attention_run run = {.dev = dev, .p = p};
    host_run_stretches(dev, &(host_work){.units = p->plan->item_count,
                                         .align = 1,
                                         .run_min = 1,
                                         .run = attention_items,
                                         .context = &run});
    if (p->plan->part_count > 0) pool_run(dev->workers, p->plan->item_count, fold_item, &run);
}
