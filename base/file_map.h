/* A whole file, mapped read-only. For files that are read once at start-up: weights and
 * configuration. The caller owns the map; everything that points into it dies with it. A file that
 * another process shortens while it is mapped kills the reader (SIGBUS), as with every mapping;
 * model files are replaced, not rewritten. */
#ifndef BT_BASE_FILE_MAP_H
#define BT_BASE_FILE_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct bt_file_map {
    const uint8_t *data; /* borrowed from the mapping */
    size_t bytes;        /* > 0 */
} bt_file_map;

/* Maps the regular file at `path`. A file that is missing, unreadable, a folder, a device or empty
 * is BT_ERR_CALLER_FILE with a sentence that names the path. On success the caller closes *map_out.
 */
BT_MUST_CHECK bt_status bt_file_map_open(const char *path, bt_file_map *map_out, bt_error *error);
/* Says that `bytes` from `data`, which lie in the map, are not read again soon: their pages leave
 * this process's memory and come back when they are touched. Nothing for a zeroed map. Any thread.
 */
void bt_file_map_release(const bt_file_map *map, const uint8_t *data, size_t bytes);
/* Unmaps; a zeroed map is fine. */
void bt_file_map_close(bt_file_map *map);

#endif
