/* CPUs, memory, randomness and the host's name. */
#include "base/system.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

uint32_t bt_system_cpu_count(void) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) {
        return (uint32_t)CPU_COUNT(&set);
    }
    const long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 0 ? (uint32_t)count : 1;
}

/* A number alone in a file of the cgroup; UINT64_MAX for "max" or when there is none. */
static uint64_t read_number(const char *path) {
    uint64_t value = UINT64_MAX;
    FILE *file = fopen(path, "re");
    if (file == NULL) return UINT64_MAX;
    if (fscanf(file, "%" SCNu64, &value) != 1) value = UINT64_MAX;
    (void)fclose(file);
    return value;
}

uint64_t bt_system_memory_available_bytes(void) {
    uint64_t available = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    char line[128];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        uint64_t kib = 0;
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kib) == 1) available = kib * 1024;
    }
    if (file != NULL) (void)fclose(file);
    const uint64_t limit = read_number("/sys/fs/cgroup/memory.max");
    const uint64_t used = read_number("/sys/fs/cgroup/memory.current");
    if (limit != UINT64_MAX && used != UINT64_MAX) {
        const uint64_t left = limit > used ? limit - used : 0;
        if (left < available) available = left;
    }
    return available;
}

bt_status bt_system_random_u64(uint64_t *out) {
    uint64_t value = 0;
    for (int tries = 0; tries < 8 && value == 0; tries++) {
        if (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value) value = 0;
    }
    if (value == 0) return BT_ERR_WORKER_IO;
    *out = value;
    return BT_OK;
}

void bt_system_host_name(char *out, size_t capacity) {
    if (gethostname(out, capacity) != 0 || out[0] == '\0') {
        (void)snprintf(out, capacity, "localhost");
    }
    out[capacity - 1] = '\0';
}
