/* Which files a model was read from, without reading their weights: for each file its place in the
 * file system (device and inode), size and times to the nanosecond, and the SHA-256 of its head,
 * where the containers keep their metadata. The path does not count. Internal to kernels/. */
#ifndef BT_KERNELS_MODEL_MODEL_IDENTITY_H
#define BT_KERNELS_MODEL_MODEL_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/compiler.h"

enum { MODEL_IDENTITY_BYTES = 32 };

typedef struct model_identity {
    uint8_t digest[MODEL_IDENTITY_BYTES];
    bool is_settled; /* no file changed so recently that a change now might leave its times alone */
} model_identity;

/* Of a file, or of the .json and .safetensors files in a folder. False when something cannot be
 * read or there are too many files. Blocking; any thread. */
BT_MUST_CHECK bool model_identity_read(const char *path, model_identity *out);

#endif
