/* Large blocks that are read from end to end: mapped, zero, on huge pages where the system has them
 * (walking weights on 4 KiB pages costs translations). */
#ifndef BT_KERNELS_HOST_MEMORY_H
#define BT_KERNELS_HOST_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#include "base/compiler.h"

/* NULL when memory is out; bytes > 0. Returns owned. */
BT_MUST_CHECK void *host_memory_map(size_t bytes);
/* The first `bytes` of a file, read-only and shared, with the advice to use huge pages. NULL when
 * it cannot be mapped. Returns owned, for host_memory_unmap. */
BT_MUST_CHECK void *host_memory_map_file(int fd, size_t bytes);
/* Whether a block is, or could now be brought, on huge pages; some of its pages are touched to find
 * out. True for blocks so small that it does not matter. A file's pages are huge where its file
 * system keeps large folios (ext4 since Linux 6.16, XFS) or the kernel can collapse them (tmpfs
 * since 6.1). */
bool host_memory_is_on_huge_pages(const void *block, size_t bytes);
/* Says that this part of a mapped file is not read again soon: its pages leave the memory of this
 * process. */
void host_memory_release(const void *part, size_t bytes);
/* `bytes` as given to host_memory_map; NULL is legal. */
void host_memory_unmap(void *block, size_t bytes);

#endif
