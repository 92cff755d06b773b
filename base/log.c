/* Formats a line into a stack buffer and writes it with one call, so that lines of several threads
 * or processes never interleave. Over-long lines are cut. */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const level_names[] = {"error", "warn", "info", "debug", "trace"};
static atomic_int current_level = BT_LOG_INFO;

void bt_log_set_level(bt_log_level level) {
    atomic_store_explicit(&current_level, (int)level, memory_order_relaxed);
}

bool bt_log_is_enabled(bt_log_level level) {
    return (int)level <= atomic_load_explicit(&current_level, memory_order_relaxed);
}

bt_status bt_log_parse_level(const char *name, bt_log_level *level_out) {
    for (size_t i = 0; i < BT_ARRAY_COUNT(level_names); i++) {
        if (strcmp(name, level_names[i]) == 0) {
            *level_out = (bt_log_level)i;
            return BT_OK;
        }
    }
    return BT_ERR_CALLER_ARGUMENT;
}

void bt_log_write(bt_log_level level, const char *component, const char *format, ...) {
    char line[2048];
    struct timespec now;
    struct tm local;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    (void)localtime_r(&now.tv_sec, &local);
    size_t used = strftime(line, sizeof line, "%H:%M:%S", &local);
    used +=
        (size_t)snprintf(line + used, sizeof line - used, ".%03ld %-5s %s: ", now.tv_nsec / 1000000,
                         level_names[level], component);
    va_list args;
    va_start(args, format);
    const int wanted = vsnprintf(line + used, sizeof line - used - 1, format, args);
    va_end(args);
    if (wanted > 0) used += (size_t)wanted;
    if (used > sizeof line - 2) used = sizeof line - 2;
    line[used++] = '\n';
    if (write(STDERR_FILENO, line, used) < 0) return; /* Nothing sensible can be done about it. */
}

bt_log_level bt_log_level_of(bt_status status) {
    switch (status) {
    case BT_OK:
    case BT_ERR_REQUEST_CANCELLED:
    case BT_ERR_REQUEST_INVALID:
    case BT_ERR_REQUEST_OVERFLOW:
    case BT_ERR_REQUEST_TOO_LARGE:
    case BT_ERR_REQUEST_UNSUPPORTED: return BT_LOG_DEBUG;
    case BT_ERR_REQUEST_DEADLINE:
    case BT_ERR_REQUEST_FULL:
    case BT_ERR_REQUEST_NO_WORKER:
    case BT_ERR_REQUEST_CAPTURE:
    case BT_ERR_REQUEST_UNKNOWN:
    case BT_ERR_REQUEST_DUPLICATE:
    case BT_ERR_REQUEST_CORRUPT:
    case BT_ERR_REQUEST_STALE:
    case BT_ERR_PEER_GONE:
    case BT_ERR_PEER_REFUSED:
    case BT_ERR_PEER_TIMEOUT:
    case BT_ERR_PEER_PROTOCOL:
    case BT_ERR_WORKER_MEMORY:
    case BT_ERR_WORKER_IO:
    case BT_ERR_WORKER_INTERNAL:
    case BT_ERR_CALLER_ARGUMENT:
    case BT_ERR_CALLER_CONFIG:
    case BT_ERR_CALLER_FILE:
    case BT_ERR_CALLER_UNSUPPORTED:
    case BT_ERR_CALLER_LIMIT: break;
    }
    return BT_LOG_WARN;
}
