/* Shared by the two halves of the tiny model: weights (tiny_model.c) and text (tiny_tokenizer.c).
 */
#ifndef BT_TESTS_SUPPORT_TINY_MODEL_INTERNAL_H
#define BT_TESTS_SUPPORT_TINY_MODEL_INTERNAL_H

#include "tests/support/tiny_model.h"

/* tokenizer.json and tokenizer_config.json. */
BT_MUST_CHECK bt_status tiny_tokenizer_write_hf(const tiny_model *m, const char *folder);
/* The tokenizer.* keys. */
void tiny_tokenizer_add_gguf(const tiny_model *m, gguf_writer *w);

#endif
