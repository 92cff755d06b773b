/* GGUF files of Llama models of any size whose matrices are stored in one type, for tests of what
 * becomes of weights in memory. No tokenizer. */
#ifndef BT_TESTS_SUPPORT_STORED_MODEL_H
#define BT_TESTS_SUPPORT_STORED_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/model.h"

typedef struct stored_model {
    model_geometry geometry; /* family Llama, plain rope */
    uint32_t type;           /* BT_GGUF_TENSOR_* of the matrices; vectors are F32 */
    uint64_t seed;           /* of the bytes; 0: all weights are zero and the file is sparse */
} stored_model;

/* Writes the file. Random blocks have small scales (Q4_0, Q4_1, Q8_0); random BF16 is small as
 * well. */
BT_MUST_CHECK bt_status stored_model_write(const stored_model *m, const char *path);

#endif
