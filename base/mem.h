/* Allocation and checked size arithmetic. Everything outside base/ allocates through here, so that
 * a fault point can fail the nth allocation (base/fault.h, fault build only). */
#ifndef BT_BASE_MEM_H
#define BT_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>

#include "base/compiler.h"

/* NULL when memory is out (or count * bytes overflows); zeroed; free with bt_free. */
BT_MUST_CHECK void *bt_calloc(size_t count, size_t bytes);
BT_MUST_CHECK void *bt_malloc(size_t bytes);
/* As realloc: on failure the old block stays valid and NULL is returned. */
BT_MUST_CHECK void *bt_realloc(void *block, size_t bytes);
void bt_free(void *block);
/* A zeroed block at an `alignment` that is a power of two; free with bt_free. */
BT_MUST_CHECK void *bt_calloc_aligned(size_t alignment, size_t bytes);
/* A heap copy of a string; NULL when memory is out. */
BT_MUST_CHECK char *bt_strdup(const char *text);

/* false on overflow, and *out is left alone. */
BT_MUST_CHECK static inline bool bt_mul_size(size_t a, size_t b, size_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
BT_MUST_CHECK static inline bool bt_add_size(size_t a, size_t b, size_t *out) {
    return !__builtin_add_overflow(a, b, out);
}

#endif
