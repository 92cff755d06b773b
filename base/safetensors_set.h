/* The tensors of a folder: those of model.safetensors or, where there is no such file, those of the
 * shards that model.safetensors.index.json names.
 *
 * A bt_safetensors_set owns its files; tensors are *borrowed* from it. Immutable after opening, so
 * any thread may read it. What base/safetensors.h checks is checked of every shard; beyond that no
 * name leaves the folder, no tensor is in two shards, and the index is right about each tensor it
 * names. Errors are BT_ERR_CALLER_FILE (CALLER_LIMIT for a limit below). Needs jansson. */
#ifndef BT_BASE_SAFETENSORS_SET_H
#define BT_BASE_SAFETENSORS_SET_H

#include "base/safetensors.h"

enum { BT_SAFETENSORS_FILES_MAX = 1024 };

typedef struct bt_safetensors_set bt_safetensors_set;

/* Maps and validates the files. Returns owned. Blocking (reads the headers from disk). */
BT_MUST_CHECK bt_status bt_safetensors_set_open(const char *folder, bt_safetensors_set **out,
                                                bt_error *error);
void bt_safetensors_set_close(bt_safetensors_set *set);

/* Tensors of all files, sorted by name. */
size_t bt_safetensors_set_count(const bt_safetensors_set *set);
const bt_safetensors_tensor *bt_safetensors_set_at(const bt_safetensors_set *set, size_t index);
/* NULL when there is no such tensor. */
const bt_safetensors_tensor *bt_safetensors_set_find(const bt_safetensors_set *set,
                                                     const char *name);

/* bt_file_map_release of a part of this tensor's data. */
void bt_safetensors_set_release(const bt_safetensors_set *set, const char *name,
                                const uint8_t *data, size_t bytes);

/* The index alone: which tensor is in which file. */
typedef struct bt_safetensors_index_entry {
    const char *tensor; /* borrowed */
    const char *file;   /* borrowed; a plain name that ends in .safetensors */
} bt_safetensors_index_entry;
typedef struct bt_safetensors_index bt_safetensors_index;

/* Parses the text of an index; `name` is used in errors. Returns owned; the text is not kept. */
BT_MUST_CHECK bt_status bt_safetensors_index_open(const char *text, size_t bytes, const char *name,
                                                  bt_safetensors_index **out, bt_error *error);
void bt_safetensors_index_close(bt_safetensors_index *index);
/* Sorted by file. */
size_t bt_safetensors_index_count(const bt_safetensors_index *index);
const bt_safetensors_index_entry *bt_safetensors_index_at(const bt_safetensors_index *index,
                                                          size_t at);

#endif
