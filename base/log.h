/* One log line per event: time, level, component, sentence. Lines go to standard error in one
 * write. Levels by volume: error, warn, info (per process event), debug (per request), trace (per
 * step). Any thread may log. */
#ifndef BT_BASE_LOG_H
#define BT_BASE_LOG_H

#include <stdbool.h>

#include "base/compiler.h"
#include "base/status.h"

typedef enum bt_log_level {
    BT_LOG_ERROR,
    BT_LOG_WARN,
    BT_LOG_INFO,
    BT_LOG_DEBUG,
    BT_LOG_TRACE,
} bt_log_level;

/* The level below which lines are dropped (default BT_LOG_INFO). Set once at start-up. */
void bt_log_set_level(bt_log_level level);
/* Parses "error", "warn", "info", "debug" or "trace". */
BT_MUST_CHECK bt_status bt_log_parse_level(const char *name, bt_log_level *level_out);
bool bt_log_is_enabled(bt_log_level level);
/* Of the failure of one request: debug for what its client did (it left, it asked for what cannot
 * be), warn for everything else. */
bt_log_level bt_log_level_of(bt_status status);
void bt_log_write(bt_log_level level, const char *component, const char *format, ...)
    BT_PRINTF(3, 4);

#define bt_log(level, component, ...)                                                              \
    do {                                                                                           \
        if (bt_log_is_enabled(level)) bt_log_write(level, component, __VA_ARGS__);                 \
    } while (0)
#define bt_log_error(component, ...) bt_log(BT_LOG_ERROR, component, __VA_ARGS__)
#define bt_log_warn(component, ...)  bt_log(BT_LOG_WARN, component, __VA_ARGS__)
#define bt_log_info(component, ...)  bt_log(BT_LOG_INFO, component, __VA_ARGS__)
#define bt_log_debug(component, ...) bt_log(BT_LOG_DEBUG, component, __VA_ARGS__)
#define bt_log_trace(component, ...) bt_log(BT_LOG_TRACE, component, __VA_ARGS__)

#endif
