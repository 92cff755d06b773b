/* Large blocks that are read from end to end: mapped, zero, on huge pages where the system has them
 * (walking weights on 4 KiB pages costs translations). */
#ifndef BT_KERNELS_HOST_MEMORY_H
#define BT_KERNELS_HOST_MEMORY_H

#include <stddef.h>

#include "base/compiler.h"

/* NULL when memory is out; bytes > 0. Returns owned. */
BT_MUST_CHECK void *host_memory_map(size_t bytes);
/* `bytes` as given to host_memory_map; NULL is legal. */
void host_memory_unmap(void *block, size_t bytes);

#endif
