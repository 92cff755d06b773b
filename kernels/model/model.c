/* What can be asked of a model. */
#include "kernels/model.h"

#include "base/mem.h"
#include "kernels/host/memory.h"
#include "kernels/model/model_internal.h"
#include "kernels/ops.h"

void model_destroy(model *m) {
    if (m == NULL) return;
    host_memory_unmap(m->block, m->block_bytes);
    bt_free(m->layers);
    bt_free(m);
}

const model_card *model_get_card(const model *m) {
    return &m->card;
}

kv_page_layout model_kv_layout(const model *m, uint32_t page_tokens, kv_dtype dtype) {
    const model_geometry *g = &m->card.geometry;
    return (kv_page_layout){.layers = g->layers,
                            .kv_heads = g->kv_heads,
                            .head_dim = g->head_dim,
                            .page_tokens = page_tokens,
                            .dtype = dtype};
}

const char *model_numerics(void) {
    return "host/exact/1";
}

const char *model_get_numerics(const model *m) {
    return m->numerics;
}

const char *model_isa_name(void) {
    return dev_host_isa_at(0);
}
