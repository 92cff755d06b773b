/* What a program asks its machine at start-up. libc only. */
#ifndef BT_BASE_SYSTEM_H
#define BT_BASE_SYSTEM_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* CPUs that this process may run on; at least 1. */
uint32_t bt_system_cpu_count(void);
/* Memory that can be had without swapping, the container's limit respected; 0 when it cannot be
 * told. */
uint64_t bt_system_memory_available_bytes(void);
/* Random bytes of the kernel, never 0; WORKER_IO when there are none. */
BT_MUST_CHECK bt_status bt_system_random_u64(uint64_t *out);
/* This machine's name, terminated; "localhost" when it has none. */
void bt_system_host_name(char *out, size_t capacity);

#endif
