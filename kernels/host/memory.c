/* Anonymous mappings with the advice to use huge pages. */
#include "kernels/host/memory.h"

#include <sys/mman.h>

#include "base/assert.h"
#include "base/fault.h"

void *host_memory_map(size_t bytes) {
    if (bt_fault_hit(BT_FAULT_ALLOC)) return NULL;
    void *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return NULL;
    (void)madvise(block, bytes, MADV_HUGEPAGE); /* only advice: refusal changes nothing */
    return block;
}

void host_memory_unmap(void *block, size_t bytes) {
    if (block == NULL) return;
    BT_ASSERT(munmap(block, bytes) == 0);
}
