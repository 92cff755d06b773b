/* Linear probing at a load of at most one half; a removal shifts the rest of its run back. */
#include "router/id_map.h"

#include <stdbool.h>

#include "base/assert.h"
#include "base/mem.h"

static size_t home_of(const id_map *map, uint64_t id) {
    id ^= id >> 32;
    id *= 0x9E3779B97F4A7C15u;
    return (size_t)(id >> 32) & map->mask;
}

bt_status id_map_init(id_map *map, size_t count_max) {
    size_t slots = 16;
    while (slots < count_max * 2)
        slots *= 2;
    map->entries = bt_calloc(slots, sizeof *map->entries);
    if (map->entries == NULL) return BT_ERR_WORKER_MEMORY;
    map->mask = slots - 1;
    map->count = 0;
    map->count_max = count_max;
    return BT_OK;
}

void id_map_fini(id_map *map) {
    bt_free(map->entries);
    map->entries = NULL;
}

/* The slot of id, or the empty one where it would go. */
static size_t find(const id_map *map, uint64_t id) {
    size_t at = home_of(map, id);
    while (map->entries[at].id != 0 && map->entries[at].id != id)
        at = (at + 1) & map->mask;
    return at;
}

void *id_map_get(const id_map *map, uint64_t id) {
    return id == 0 ? NULL : map->entries[find(map, id)].value;
}

void id_map_put(id_map *map, uint64_t id, void *value) {
    BT_ASSERT(id != 0);
    BT_ASSERT(map->count < map->count_max);
    const size_t at = find(map, id);
    BT_ASSERT(map->entries[at].id == 0);
    map->entries[at] = (id_map_entry){.id = id, .value = value};
    map->count++;
}

void id_map_remove(id_map *map, uint64_t id) {
    size_t hole = find(map, id);
    if (id == 0 || map->entries[hole].id == 0) return;
    map->count--;
    for (size_t at = (hole + 1) & map->mask; map->entries[at].id != 0; at = (at + 1) & map->mask) {
        const size_t home = home_of(map, map->entries[at].id);
        /* An entry may move into the hole unless its home lies behind the hole, up to itself. */
        const bool stays = ((at - home) & map->mask) < ((at - hole) & map->mask);
        if (stays) continue;
        map->entries[hole] = map->entries[at];
        hole = at;
    }
    map->entries[hole] = (id_map_entry){.id = 0, .value = NULL};
}
