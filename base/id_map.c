/* Open addressing with linear probing at a load of at most one half, so that every search meets an
 * empty entry; a removal shifts the rest of its run back, so that no tombstones gather. */
#include "base/id_map.h"

#include <stdbool.h>

#include "base/assert.h"
#include "base/mem.h"

/* Numbers are mostly consecutive and spaces random. The odd constants are 2^64 over the golden
 * ratio (Fibonacci hashing takes the high half of the product) and a second one unrelated to it. */
static size_t home_of(const bt_id_map *map, bt_id id) {
    uint64_t mixed = id.number ^ id.space * UINT64_C(0xD6E8FEB86659FD93);
    mixed ^= mixed >> 32;
    mixed *= UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(mixed >> 32) & map->mask;
}

static bool is_same(bt_id a, bt_id b) {
    return a.space == b.space && a.number == b.number;
}

bt_status bt_id_map_init(bt_id_map *map, size_t count_max) {
    size_t slots = 16;
    while (slots / 2 < count_max)
        slots *= 2;
    *map = (bt_id_map){0};
    map->entries = bt_calloc(slots, sizeof *map->entries);
    if (map->entries == NULL) return BT_ERR_WORKER_MEMORY;
    map->mask = slots - 1;
    map->count_max = count_max;
    return BT_OK;
}

void bt_id_map_fini(bt_id_map *map) {
    bt_free(map->entries);
    *map = (bt_id_map){0};
}

/* The place of id, or the empty one where it would go. */
static size_t find(const bt_id_map *map, bt_id id) {
    size_t at = home_of(map, id);
    while (map->entries[at].value != NULL && !is_same(map->entries[at].id, id))
        at = (at + 1) & map->mask;
    return at;
}

void *bt_id_map_get(const bt_id_map *map, bt_id id) {
    return map->entries[find(map, id)].value;
}

void bt_id_map_put(bt_id_map *map, bt_id id, void *value) {
    BT_ASSERT(value != NULL);
    BT_ASSERT(map->count < map->count_max);
    const size_t at = find(map, id);
    BT_ASSERT(map->entries[at].value == NULL);
    map->entries[at] = (bt_id_map_entry){.id = id, .value = value};
    map->count++;
}

void bt_id_map_remove(bt_id_map *map, bt_id id) {
    size_t hole = find(map, id);
    if (map->entries[hole].value == NULL) return;
    map->count--;
    for (size_t at = (hole + 1) & map->mask; map->entries[at].value != NULL;
         at = (at + 1) & map->mask) {
        const size_t home = home_of(map, map->entries[at].id);
        /* An entry may move into the hole unless its home lies behind the hole, up to itself. */
        const bool stays = ((at - home) & map->mask) < ((at - hole) & map->mask);
        if (stays) continue;
        map->entries[hole] = map->entries[at];
        hole = at;
    }
    map->entries[hole] = (bt_id_map_entry){0};
}
