/* Layout of one KV page: plain data, shared by everything that computes on pages. One contiguous
 * block [layer][K, V][kv_head][token][dim]; `page_tokens` tokens of consecutive positions. Unused
 * tail tokens of a page are zero before it is sent. */
#ifndef BT_KERNELS_KV_PAGE_H
#define BT_KERNELS_KV_PAGE_H

#include <stddef.h>
#include <stdint.h>

typedef enum kv_dtype {
    KV_DTYPE_BF16 = 0,
    KV_DTYPE_F32 = 1, /* for oracles */
} kv_dtype;

typedef struct kv_page_layout {
    uint32_t layers;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t page_tokens; /* 16, 32 or 64 */
    kv_dtype dtype;
} kv_page_layout;

static inline size_t kv_element_bytes(kv_dtype dtype) {
    return dtype == KV_DTYPE_BF16 ? 2u : 4u;
}
/* Bytes of one head's K (or V) in one layer of one page: [token][dim]. */
static inline size_t kv_head_bytes(const kv_page_layout *layout) {
    return (size_t)layout->page_tokens * layout->head_dim * kv_element_bytes(layout->dtype);
}
/* Bytes of one layer of one page: K then V. Pages are cut at these boundaries for transfer. */
static inline size_t kv_layer_bytes(const kv_page_layout *layout) {
    return 2u * layout->kv_heads * kv_head_bytes(layout);
}
static inline size_t kv_page_bytes(const kv_page_layout *layout) {
    return layout->layers * kv_layer_bytes(layout);
}
/* Offset in a page of K (which = 0) or V (which = 1) of one head of one layer. */
static inline size_t kv_page_offset(const kv_page_layout *layout, uint32_t layer, uint32_t which,
                                    uint32_t kv_head) {
    return layer * kv_layer_bytes(layout) +
           ((size_t)which * layout->kv_heads + kv_head) * kv_head_bytes(layout);
}
/* Pages that hold `tokens` tokens. */
static inline uint32_t kv_pages_for(uint32_t tokens, uint32_t page_tokens) {
    return (tokens + page_tokens - 1) / page_tokens;
}

#endif
