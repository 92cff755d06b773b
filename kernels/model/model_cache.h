/* A folder of packed weights, one file per model and form, that the workers of a machine map
 * instead of packing for themselves. Internal to kernels/.
 *
 * Nouns. The *body* is the arena of a model (kernels/model/model_internal.h). The *key* says what
 * decides its bytes; it is the name of the file and stands in it once more. The *fingerprint* is
 * kept for whoever stored it. A *hold* is the right to make one entry; it is let go by the system
 * when its process dies.
 *
 *   body, padded to 4096 | CRC32C of each 4 MiB of the body | footer with its own CRC32C
 *
 * A file is used only when it is a regular file of this user (or root) that nobody else may write,
 * is exactly as long as key and body say, and all checksums are right; anything else counts as
 * absent and is replaced. It is written under another name, synced and renamed, so that a half
 * written one is never found. Nothing in it is an offset.
 *
 * Trouble with the folder is never an error of a load: functions return false, and log one warning
 * with the reason where a user could do something about it. One thread, at start-up; blocking. */
#ifndef BT_KERNELS_MODEL_MODEL_CACHE_H
#define BT_KERNELS_MODEL_MODEL_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/compiler.h"

enum { MODEL_CACHE_KEY_BYTES = 32, MODEL_CACHE_FINGERPRINT_BYTES = 32 };

typedef struct model_cache model_cache;

/* One entry: what is looked for, and what was found. */
typedef struct model_cache_entry {
    uint8_t key[MODEL_CACHE_KEY_BYTES];
    size_t body_bytes;                                  /* > 0 */
    uint8_t fingerprint[MODEL_CACHE_FINGERPRINT_BYTES]; /* out of find, into store */
} model_cache_entry;

/* Opens the folder, making it (and the folders above it) for this user alone where it is missing.
 * False when it belongs to another user or others may write to it, or cannot be used. */
BT_MUST_CHECK bool model_cache_open(const char *folder, model_cache **out);
void model_cache_close(model_cache *cache);

/* Maps the entry read-only, its body verified by `threads` threads. The mapping is the caller's, of
 * body_bytes, for host_memory_unmap; it stays valid when the file is replaced or removed. False
 * when there is no such entry that can be used. */
BT_MUST_CHECK bool model_cache_find(model_cache *cache, model_cache_entry *entry, uint32_t threads,
                                    uint8_t **body_out);
/* Waits until this process holds the entry, at most `wait_ms`. False when another still holds it,
 * or when the folder cannot be locked. */
BT_MUST_CHECK bool model_cache_hold(model_cache *cache, const model_cache_entry *entry,
                                    uint64_t wait_ms);
/* Writes the entry, which is held, and then removes the entries not used for longest until all
 * others and this one have at most `bytes_max`. */
BT_MUST_CHECK bool model_cache_store(model_cache *cache, const model_cache_entry *entry,
                                     const uint8_t *body, uint64_t bytes_max);
/* Maps what store has just written, without verifying it again. */
BT_MUST_CHECK bool model_cache_map_stored(model_cache *cache, const model_cache_entry *entry,
                                          uint8_t **body_out);

#endif
