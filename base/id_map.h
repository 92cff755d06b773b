/* A map from ids to pointers, of fixed capacity: what is found again at every message.
 *
 * An id is a number within a space: the counter of an attempt means nothing without the incarnation
 * of the router that counted. Both halves are compared, so no two ids are ever taken for one. The
 * map allocates in init and nowhere else; the values are borrowed and never NULL. One thread. */
#ifndef BT_BASE_ID_MAP_H
#define BT_BASE_ID_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct bt_id {
    uint64_t space; /* 0 where there is one only */
    uint64_t number;
} bt_id;

typedef struct bt_id_map_entry {
    bt_id id;
    void *value; /* NULL: empty */
} bt_id_map_entry;

typedef struct bt_id_map {
    bt_id_map_entry *entries; /* [mask + 1] */
    size_t mask;
    size_t count, count_max;
} bt_id_map;

/* The id of a number that is unique by itself. */
static inline bt_id bt_id_of(uint64_t number) {
    return (bt_id){.space = 0, .number = number};
}

/* WORKER_MEMORY; the map is zeroed then, and fini may be called. */
BT_MUST_CHECK bt_status bt_id_map_init(bt_id_map *map, size_t count_max);
/* A zeroed map is ignored. */
void bt_id_map_fini(bt_id_map *map);
void *bt_id_map_get(const bt_id_map *map, bt_id id); /* NULL: not there */
/* The id must not be there yet, and count below count_max: asserted. */
void bt_id_map_put(bt_id_map *map, bt_id id, void *value);
void bt_id_map_remove(bt_id_map *map, bt_id id); /* unknown ids are ignored */

#endif
