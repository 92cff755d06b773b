/* The tokenizer's fingerprint in the cluster record: computed by every process from its own
 * --model, so that a worker whose files say another tokenizer than the router's is refused by name.
 * Workers never tokenize; this is the only thing they do with these files. */
#ifndef BT_PROTO_TOKENIZER_DIGEST_H
#define BT_PROTO_TOKENIZER_DIGEST_H

#include "base/status.h"

enum { TOKENIZER_DIGEST_TEXT_BYTES = 65 };

/* Hex SHA-256, terminated, of what defines the tokenizer: the bytes of tokenizer.json (of a folder,
 * or given itself), or the tokenizer.ggml.* keys of a GGUF file that decide ids. Blocking.
 * CALLER_FILE with a sentence when there is no tokenizer. */
BT_MUST_CHECK bt_status proto_tokenizer_digest(const char *path,
                                               char hex_out[TOKENIZER_DIGEST_TEXT_BYTES],
                                               bt_error *error);

#endif
