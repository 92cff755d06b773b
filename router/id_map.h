/* A map from 64-bit ids (never 0) to pointers, of fixed capacity: open addressing, no tombstones.
 * The values are borrowed. */
#ifndef BT_ROUTER_ID_MAP_H
#define BT_ROUTER_ID_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct id_map_entry {
    uint64_t id; /* 0: empty */
    void *value;
} id_map_entry;

typedef struct id_map {
    id_map_entry *entries;
    size_t mask;
    size_t count, count_max;
} id_map;

BT_MUST_CHECK bt_status id_map_init(id_map *map, size_t count_max);
void id_map_fini(id_map *map);
void *id_map_get(const id_map *map, uint64_t id); /* NULL: not there */
/* The id must not be there yet, and count below count_max: asserted. */
void id_map_put(id_map *map, uint64_t id, void *value);
void id_map_remove(id_map *map, uint64_t id); /* unknown ids are ignored */

#endif
