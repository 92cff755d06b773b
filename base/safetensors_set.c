/* One file or many, seen as one table of tensors. */
#include "base/safetensors_set.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/file_map.h"
#include "base/json_file.h"
#include "base/mem.h"

enum { PATH_BYTES_MAX = 4096 };

typedef struct shard {
    char *name;
    bt_safetensors *file;
} shard;

typedef struct member {
    const bt_safetensors_tensor *tensor;
    uint32_t shard;
} member;

struct bt_safetensors_set {
    shard *shards; /* in the order of their names */
    uint32_t shard_count;
    member *members; /* sorted by the tensors' names */
    size_t count;
};

static bt_status join_path(const char *folder, const char *name, char out[PATH_BYTES_MAX],
                           bt_error *error) {
    const int bytes = snprintf(out, PATH_BYTES_MAX, "%s/%s", folder, name);
    if (bytes > 0 && bytes < PATH_BYTES_MAX) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_FILE, "%s: the path is too long", folder);
}

static bt_status fail_memory(const char *folder, bt_error *error) {
    return bt_fail(error, BT_ERR_WORKER_MEMORY, "%s: out of memory", folder);
}

/* Opens one more file; set->shards has room for it. */
static bt_status add_shard(bt_safetensors_set *set, const char *folder, const char *name,
                           bt_error *error) {
    char path[PATH_BYTES_MAX];
    shard *s = &set->shards[set->shard_count++];
    bt_status status = join_path(folder, name, path, error);
    if (status != BT_OK) return status;
    s->name = bt_strdup(name);
    if (s->name == NULL) return fail_memory(folder, error);
    return bt_safetensors_open(path, &s->file, error);
}

static int compare_members(const void *a, const void *b) {
    return strcmp(((const member *)a)->tensor->name, ((const member *)b)->tensor->name);
}

static bt_status merge(bt_safetensors_set *set, const char *folder, bt_error *error) {
    size_t count = 0;
    for (uint32_t s = 0; s < set->shard_count; s++)
        count += bt_safetensors_count(set->shards[s].file);
    if (count > BT_SAFETENSORS_TENSORS_MAX) {
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "%s: has %zu tensors, at most %d are allowed",
                       folder, count, BT_SAFETENSORS_TENSORS_MAX);
    }
    set->members = bt_calloc(count, sizeof set->members[0]);
    if (set->members == NULL) return fail_memory(folder, error);
    for (uint32_t s = 0; s < set->shard_count; s++)
        for (size_t i = 0; i < bt_safetensors_count(set->shards[s].file); i++)
            set->members[set->count++] =
                (member){.tensor = bt_safetensors_at(set->shards[s].file, i), .shard = s};
    qsort(set->members, set->count, sizeof set->members[0], compare_members);
    for (size_t i = 1; i < set->count; i++) {
        const member *a = &set->members[i - 1];
        const member *b = &set->members[i];
        if (strcmp(a->tensor->name, b->tensor->name) != 0) continue;
        const bool is_swapped = a->shard > b->shard;
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: tensor %s is in both %s and %s", folder,
                       a->tensor->name, set->shards[is_swapped ? b->shard : a->shard].name,
                       set->shards[is_swapped ? a->shard : b->shard].name);
    }
    return BT_OK;
}

static int compare_member_name(const void *name, const void *m) {
    return strcmp(name, ((const member *)m)->tensor->name);
}

static const member *find_member(const bt_safetensors_set *set, const char *name) {
    return bsearch(name, set->members, set->count, sizeof set->members[0], compare_member_name);
}

static bt_status check_index(const bt_safetensors_set *set, const bt_safetensors_index *index,
                             const char *folder, bt_error *error) {
    for (size_t i = 0; i < bt_safetensors_index_count(index); i++) {
        const bt_safetensors_index_entry *entry = bt_safetensors_index_at(index, i);
        const member *found = find_member(set, entry->tensor);
        if (found != NULL && strcmp(set->shards[found->shard].name, entry->file) == 0) continue;
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "%s: the index says that tensor %.100s is in %s, which lacks it", folder,
                       entry->tensor, entry->file);
    }
    return BT_OK;
}

/* The entries are sorted by file, so equal names stand together. */
static bt_status open_shards(bt_safetensors_set *set, const bt_safetensors_index *index,
                             const char *folder, bt_error *error) {
    set->shards = bt_calloc(BT_SAFETENSORS_FILES_MAX, sizeof set->shards[0]);
    if (set->shards == NULL) return fail_memory(folder, error);
    const char *last = "";
    for (size_t i = 0; i < bt_safetensors_index_count(index); i++) {
        const char *name = bt_safetensors_index_at(index, i)->file;
        if (strcmp(name, last) == 0) continue;
        if (set->shard_count == BT_SAFETENSORS_FILES_MAX) {
            return bt_fail(error, BT_ERR_CALLER_LIMIT,
                           "%s: the index names more than %d files, the most that are allowed",
                           folder, BT_SAFETENSORS_FILES_MAX);
        }
        char path[PATH_BYTES_MAX];
        bt_status status = join_path(folder, name, path, error);
        if (status != BT_OK) return status;
        if (access(path, F_OK) != 0) {
            return bt_fail(error, BT_ERR_CALLER_FILE,
                           "%s: shard %s, named by the index, is missing", folder, name);
        }
        status = add_shard(set, folder, name, error);
        if (status != BT_OK) return status;
        last = name;
    }
    return BT_OK;
}

static bt_status open_index(const char *path, bt_safetensors_index **out, bt_error *error) {
    bt_file_map map = {0};
    bt_status status = bt_file_map_open(path, &map, error);
    if (status != BT_OK) return status;
    if (map.bytes > BT_JSON_FILE_BYTES_MAX) {
        status = bt_fail(error, BT_ERR_CALLER_LIMIT, "%s: has %zu bytes, at most %d are read", path,
                         map.bytes, BT_JSON_FILE_BYTES_MAX);
    } else {
        status = bt_safetensors_index_open((const char *)map.data, map.bytes, path, out, error);
    }
    bt_file_map_close(&map);
    return status;
}

static bt_status open_sharded(bt_safetensors_set *set, const char *folder, const char *path,
                              bt_error *error) {
    bt_safetensors_index *index = NULL;
    bt_status status = open_index(path, &index, error);
    if (status == BT_OK) status = open_shards(set, index, folder, error);
    if (status == BT_OK) status = merge(set, folder, error);
    if (status == BT_OK) status = check_index(set, index, folder, error);
    bt_safetensors_index_close(index);
    return status;
}

static bt_status open_single(bt_safetensors_set *set, const char *folder, bt_error *error) {
    set->shards = bt_calloc(1, sizeof set->shards[0]);
    if (set->shards == NULL) return fail_memory(folder, error);
    const bt_status status = add_shard(set, folder, "model.safetensors", error);
    return status == BT_OK ? merge(set, folder, error) : status;
}

bt_status bt_safetensors_set_open(const char *folder, bt_safetensors_set **out, bt_error *error) {
    char single[PATH_BYTES_MAX];
    char index[PATH_BYTES_MAX];
    bt_status status = join_path(folder, "model.safetensors", single, error);
    if (status == BT_OK) status = join_path(folder, "model.safetensors.index.json", index, error);
    if (status != BT_OK) return status;
    bt_safetensors_set *set = bt_calloc(1, sizeof *set);
    if (set == NULL) return fail_memory(folder, error);
    if (access(single, F_OK) != 0 && access(index, F_OK) == 0) {
        status = open_sharded(set, folder, index, error);
    } else {
        status = open_single(set, folder, error);
    }
    if (status != BT_OK) {
        bt_safetensors_set_close(set);
        return status;
    }
    *out = set;
    return BT_OK;
}

void bt_safetensors_set_close(bt_safetensors_set *set) {
    if (set == NULL) return;
    for (uint32_t s = 0; s < set->shard_count; s++) {
        bt_safetensors_close(set->shards[s].file);
        bt_free(set->shards[s].name);
    }
    bt_free(set->shards);
    bt_free(set->members);
    bt_free(set);
}

size_t bt_safetensors_set_count(const bt_safetensors_set *set) {
    return set->count;
}

const bt_safetensors_tensor *bt_safetensors_set_at(const bt_safetensors_set *set, size_t index) {
    BT_ASSERT(index < set->count);
    return set->members[index].tensor;
}

const bt_safetensors_tensor *bt_safetensors_set_find(const bt_safetensors_set *set,
                                                     const char *name) {
    const member *found = find_member(set, name);
    return found != NULL ? found->tensor : NULL;
}

void bt_safetensors_set_release(const bt_safetensors_set *set, const char *name,
                                const uint8_t *data, size_t bytes) {
    const member *found = find_member(set, name);
    BT_ASSERT(found != NULL);
    bt_safetensors_release(set->shards[found->shard].file, data, bytes);
}
