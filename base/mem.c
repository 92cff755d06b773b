/* The C allocator behind one name. */
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

#include "base/fault.h"

void *bt_calloc(size_t count, size_t bytes) {
    if (bt_fault_hit(BT_FAULT_ALLOC)) return NULL;
    bt_fault_note_alloc(count * bytes);
    return calloc(count == 0 ? 1 : count, bytes == 0 ? 1 : bytes);
}

void *bt_malloc(size_t bytes) {
    if (bt_fault_hit(BT_FAULT_ALLOC)) return NULL;
    bt_fault_note_alloc(bytes);
    return malloc(bytes == 0 ? 1 : bytes);
}

void *bt_realloc(void *block, size_t bytes) {
    if (bt_fault_hit(BT_FAULT_ALLOC)) return NULL;
    bt_fault_note_alloc(bytes);
    return realloc(block, bytes == 0 ? 1 : bytes);
}

void bt_free(void *block) {
    free(block);
}

void *bt_calloc_aligned(size_t alignment, size_t bytes) {
    void *block = NULL;
    if (bt_fault_hit(BT_FAULT_ALLOC)) return NULL;
    bt_fault_note_alloc(bytes);
    if (posix_memalign(&block, alignment, bytes == 0 ? 1 : bytes) != 0) return NULL;
    return memset(block, 0, bytes == 0 ? 1 : bytes);
}

char *bt_strdup(const char *text) {
    const size_t bytes = strlen(text) + 1;
    char *copy = bt_malloc(bytes);
    return copy == NULL ? NULL : memcpy(copy, text, bytes);
}
