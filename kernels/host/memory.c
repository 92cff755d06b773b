/* Mappings with the advice to use huge pages, and what became of the advice. */
#include "kernels/host/memory.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/fault.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { HUGE_PAGE = 2 << 20, SAMPLES = 8, LINE_BYTES = 256 };
/* What translations of 4 KiB pages cost shows only in blocks far above the reach of the TLB. */
static const size_t small_bytes = (size_t)32 << 20;

void *host_memory_map(size_t bytes) {
    if (bt_fault_hit(BT_FAULT_ALLOC)) return NULL;
    void *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return NULL;
    (void)madvise(block, bytes, MADV_HUGEPAGE); /* only advice: refusal changes nothing */
    return block;
}

/* Address space for `bytes` that begins where a huge page can; NULL when there is none. Not every
 * file system chooses such a place by itself. */
static uint8_t *reserve(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t used = (bytes + page - 1) / page * page, all = used + HUGE_PAGE;
    uint8_t *space = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return NULL;
    const size_t before = (HUGE_PAGE - (uintptr_t)space % HUGE_PAGE) % HUGE_PAGE;
    if (before > 0) BT_ASSERT(munmap(space, before) == 0);
    BT_ASSERT(munmap(space + before + used, HUGE_PAGE - before) == 0);
    return space + before;
}

void *host_memory_map_file(int fd, size_t bytes) {
    if (bt_fault_hit(BT_FAULT_ALLOC)) return NULL;
    uint8_t *space = reserve(bytes);
    if (space == NULL) return NULL;
    void *block = mmap(space, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
    if (block == MAP_FAILED) {
        BT_ASSERT(munmap(space, bytes) == 0);
        return NULL;
    }
    (void)madvise(block, bytes, MADV_HUGEPAGE);
    return block;
}

/* Kilobytes of a block that are mapped by huge pages, as the kernel's list of mappings says. */
static uint64_t huge_kilobytes(const void *block) {
    static const char *const names[] = {"AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"};
    FILE *list = fopen("/proc/self/smaps", "re");
    if (list == NULL) return 0;
    char line[LINE_BYTES];
    uint64_t sum = 0;
    bool is_inside = false;
    while (fgets(line, sizeof line, list) != NULL) {
        uintptr_t first, end;
        uint64_t kilobytes;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &first, &end) == 2)
            is_inside = (uintptr_t)block >= first && (uintptr_t)block < end;
        for (size_t i = 0; is_inside && i < BT_ARRAY_COUNT(names); i++) {
            const size_t length = strlen(names[i]);
            if (strncmp(line, names[i], length) == 0 &&
                sscanf(line + length, "%" SCNu64, &kilobytes) == 1)
                sum += kilobytes;
        }
    }
    (void)fclose(list);
    return sum;
}

/* Three of four samples are enough: the ends of a block need not be on huge pages. */
static bool samples_are_huge(const void *block, size_t bytes) {
    const volatile uint8_t *at = block;
    for (size_t i = 0; i < SAMPLES; i++)
        (void)at[(bytes - 1) / SAMPLES * i + HUGE_PAGE];
    return huge_kilobytes(block) >= (uint64_t)SAMPLES * 3 / 4 * (HUGE_PAGE >> 10);
}

bool host_memory_is_on_huge_pages(const void *block, size_t bytes) {
    if (bytes < small_bytes || samples_are_huge(block, bytes)) return true;
    union {
        const void *block;
        void *address;
    } at = {.block = block};
    (void)madvise(at.address, bytes, MADV_COLLAPSE); /* what could be done shows in the samples */
    return samples_are_huge(block, bytes);
}

void host_memory_release(const void *part, size_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t from = ((uintptr_t)part + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)part + bytes) / page * page;
    if (from < end) (void)madvise((void *)from, end - from, MADV_DONTNEED); /* only advice */
}

void host_memory_unmap(void *block, size_t bytes) {
    if (block == NULL) return;
    BT_ASSERT(munmap(block, bytes) == 0);
}
