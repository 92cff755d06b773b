/* model.safetensors.index.json: {"metadata": {...}, "weight_map": {tensor: file}}. The JSON tree is
 * kept, because the entries point into it. The metadata says nothing that is needed. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/json_file.h"
#include "base/mem.h"
#include "base/safetensors_set.h"

struct bt_safetensors_index {
    json_t *json;
    size_t count;
    bt_safetensors_index_entry *entries; /* sorted by file, then by tensor */
};

/* Whether the name is that of a file in the index's own folder: no separator, not hidden. */
static bool is_file_name(const char *name) {
    static const char suffix[] = ".safetensors";
    const size_t bytes = strlen(name);
    if (bytes < sizeof suffix || bytes > BT_SAFETENSORS_NAME_BYTES_MAX || name[0] == '.')
        return false;
    for (size_t i = 0; i < bytes; i++)
        if (name[i] < 0x20 || name[i] > 0x7e || name[i] == '/' || name[i] == '\\') return false;
    return strcmp(name + bytes - (sizeof suffix - 1), suffix) == 0;
}

static int compare_entries(const void *a, const void *b) {
    const bt_safetensors_index_entry *x = a;
    const bt_safetensors_index_entry *y = b;
    const int order = strcmp(x->file, y->file);
    return order != 0 ? order : strcmp(x->tensor, y->tensor);
}

static bt_status read_entries(bt_safetensors_index *index, json_t *map, const char *name,
                              bt_error *error) {
    const size_t count = json_object_size(map);
    if (count > BT_SAFETENSORS_TENSORS_MAX) {
        return bt_fail(error, BT_ERR_CALLER_LIMIT, "%s: names %zu tensors, at most %d are allowed",
                       name, count, BT_SAFETENSORS_TENSORS_MAX);
    }
    index->entries = bt_calloc(count, sizeof index->entries[0]);
    if (index->entries == NULL) {
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "%s: out of memory", name);
    }
    const char *tensor = NULL;
    json_t *file = NULL;
    json_object_foreach(map, tensor, file) {
        const char *file_name = json_string_value(file);
        if (file_name == NULL || !is_file_name(file_name)) {
            return bt_fail(error, BT_ERR_CALLER_FILE,
                           "%s: the file given for a tensor (number %zu of weight_map) is not the "
                           "name of a .safetensors file in this folder",
                           name, index->count);
        }
        index->entries[index->count++] =
            (bt_safetensors_index_entry){.tensor = tensor, .file = file_name};
    }
    qsort(index->entries, index->count, sizeof index->entries[0], compare_entries);
    return BT_OK;
}

bt_status bt_safetensors_index_open(const char *text, size_t bytes, const char *name,
                                    bt_safetensors_index **out, bt_error *error) {
    bt_safetensors_index *index = bt_calloc(1, sizeof *index);
    if (index == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "%s: out of memory", name);
    bt_status status = bt_json_load_object(text, bytes, name, &index->json, error);
    if (status != BT_OK) goto fail;
    json_t *map = json_object_get(index->json, "weight_map");
    if (!json_is_object(map) || json_object_size(map) == 0) {
        status = bt_fail(error, BT_ERR_CALLER_FILE,
                         "%s: weight_map is missing, empty or not an object", name);
        goto fail;
    }
    status = read_entries(index, map, name, error);
    if (status != BT_OK) goto fail;
    *out = index;
    return BT_OK;
fail:
    bt_safetensors_index_close(index);
    return status;
}

void bt_safetensors_index_close(bt_safetensors_index *index) {
    if (index == NULL) return;
    bt_free(index->entries);
    json_decref(index->json);
    bt_free(index);
}

size_t bt_safetensors_index_count(const bt_safetensors_index *index) {
    return index->count;
}

const bt_safetensors_index_entry *bt_safetensors_index_at(const bt_safetensors_index *index,
                                                          size_t at) {
    BT_ASSERT(at < index->count);
    return &index->entries[at];
}
