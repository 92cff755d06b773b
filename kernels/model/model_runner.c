/* A runner: device, workspace and samplers of one model. */
#include <string.h>

#include "base/mem.h"
#include "kernels/model/model_runner_internal.h"

static bool same_layout(const kv_page_layout *a, const kv_page_layout *b) {
    return a->layers == b->layers && a->kv_heads == b->kv_heads && a->head_dim == b->head_dim &&
           a->page_tokens == b->page_tokens && a->dtype == b->dtype;
}

static bt_status check_options(const model *m, const model_runner_options *o, bt_error *error) {
    const kv_page_layout expected = model_kv_layout(m, o->kv.page_tokens, o->kv.dtype);
    if (o->threads == 0 || o->tokens_max == 0 || o->rows_max == 0)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "threads, tokens and rows must be positive");
    if (o->tokens_max > MODEL_BATCH_MAX || o->rows_max > MODEL_BATCH_MAX)
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "a batch of %u tokens and %u rows: at most %d",
                       o->tokens_max, o->rows_max, MODEL_BATCH_MAX);
    if (o->kv.page_tokens != 16 && o->kv.page_tokens != 32 && o->kv.page_tokens != 64)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "a page of %u tokens: only 16, 32 or 64",
                       o->kv.page_tokens);
    if (o->kv.dtype != KV_DTYPE_BF16 && o->kv.dtype != KV_DTYPE_F32)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "unknown KV dtype %d", (int)o->kv.dtype);
    if (!same_layout(&o->kv, &expected))
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "the KV layout is not this model's");
    if (o->kv_memory == NULL || o->kv_page_count == 0)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "no KV memory");
    if ((uintptr_t)o->kv_memory % kv_element_bytes(o->kv.dtype) != 0)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "KV memory is not aligned");
    return BT_OK;
}

/* One array of the workspace; *at stays NULL when memory is out. */
static bool make(void *at, size_t count, size_t width, size_t bytes) {
    size_t elements, total;
    void *block = NULL;
    if (bt_mul_size(count, width, &elements) && bt_mul_size(elements, bytes, &total))
        block = bt_calloc_aligned(64, total);
    memcpy(at, &block, sizeof block);
    return block != NULL;
}

static bt_status create_workspace(model_runner *r) {
    const model_geometry *g = &r->m->card.geometry;
    const size_t t = r->tokens_max;
    const size_t q_width = (size_t)g->heads * g->head_dim;
    const size_t qkv_width = (size_t)(g->heads + 2 * g->kv_heads) * g->head_dim;
    const size_t logit_rows = t < MODEL_LOGIT_ROWS ? t : MODEL_LOGIT_ROWS;
    const bool is_complete =
        make(&r->x, t, g->hidden_size, sizeof *r->x) &&
        make(&r->normed, t, g->hidden_size, sizeof *r->normed) &&
        make(&r->qkv, t, qkv_width, sizeof *r->qkv) &&
        make(&r->attended, t, q_width, sizeof *r->attended) &&
        make(&r->activated, t, g->intermediate_size, sizeof *r->activated) &&
        make(&r->rope_frequency, g->head_dim / 2, 1, sizeof *r->rope_frequency) &&
        make(&r->rope, t, g->head_dim, sizeof *r->rope) &&
        make(&r->position, t, 1, sizeof *r->position) &&
        make(&r->sequence, t, 1, sizeof *r->sequence) &&
        make(&r->logits, logit_rows, g->vocab_size, sizeof *r->logits) &&
        make(&r->kept_token, t, 1, sizeof *r->kept_token) &&
        make(&r->kept_item, t + 1, 1, sizeof *r->kept_item) &&
        make(&r->page_stamp, r->kv_page_count, 1, sizeof *r->page_stamp);
    return is_complete ? BT_OK : BT_ERR_WORKER_MEMORY;
}

static bt_status create_samplers(model_runner *r) {
    const uint32_t threads = dev_host_threads(r->dev);
    r->samplers = bt_calloc(threads, sizeof(sampler_workspace *));
    if (r->samplers == NULL) return BT_ERR_WORKER_MEMORY;
    for (uint32_t i = 0; i < threads; i++) {
        const bt_status status =
            sampler_workspace_create(r->m->card.geometry.vocab_size, &r->samplers[i]);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

bt_status model_runner_create(const model *m, const model_runner_options *options,
                              model_runner **out, bt_error *error) {
    const model_geometry *g = &m->card.geometry;
    bt_status status = check_options(m, options, error);
    if (status != BT_OK) return status;
    model_runner *r = bt_calloc(1, sizeof *r);
    if (r == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    r->m = m;
    r->kv = options->kv;
    r->kv_memory = options->kv_memory;
    r->kv_page_count = options->kv_page_count;
    r->tokens_max = options->tokens_max;
    r->rows_max = options->rows_max;
    status = dev_host_create(&(dev_host_options){.threads = options->threads,
                                                 .isa = options->isa,
                                                 .head_dim_max = g->head_dim,
                                                 .group_max = g->heads / g->kv_heads},
                             &r->dev, error);
    if (status != BT_OK) goto fail;
    status = op_attention_plan_create(r->dev, r->tokens_max, r->rows_max, g->context_tokens,
                                      g->heads, &r->kv, &r->plan);
    if (status == BT_OK) status = create_workspace(r);
    if (status == BT_OK) model_rope_frequencies(g, r->rope_frequency);
    if (status == BT_OK) status = create_samplers(r);
    if (status == BT_OK) {
        *out = r;
        return BT_OK;
    }
    (void)bt_fail(error, status, "cannot make the workspace for %u tokens: %s", r->tokens_max,
                  bt_status_string(status));
fail:
    model_runner_destroy(r);
    return status;
}

void model_runner_destroy(model_runner *r) {
    if (r == NULL) return;
    if (r->samplers != NULL)
        for (uint32_t i = 0; i < dev_host_threads(r->dev); i++)
            sampler_workspace_destroy(r->samplers[i]);
    bt_free(r->samplers);
    op_attention_plan_destroy(r->plan);
    bt_free(r->x);
    bt_free(r->normed);
    bt_free(r->qkv);
    bt_free(r->attended);
    bt_free(r->activated);
    bt_free(r->rope_frequency);
    bt_free(r->rope);
    bt_free(r->position);
    bt_free(r->sequence);
    bt_free(r->logits);
    bt_free(r->kept_token);
    bt_free(r->kept_item);
    bt_free(r->page_stamp);
    dev_host_destroy(r->dev);
    bt_free(r);
}

void model_runner_time_capture(model_runner *runner, bool is_on) {
    for (uint32_t i = 0; i < dev_host_threads(runner->dev); i++)
        sampler_time_capture(runner->samplers[i], is_on);
}

uint64_t model_runner_take_capture_ns(model_runner *runner) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < dev_host_threads(runner->dev); i++)
        sum += sampler_take_capture_ns(runner->samplers[i]);
    return sum;
}
