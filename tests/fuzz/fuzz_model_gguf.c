/* The bytes of a GGUF file, of any kind, as a model: either a sentence, or a model of which every
 * row can be read (or has weights that are no numbers, which is a sentence again). */
#include "tests/fuzz/fuzz.h"

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/model/model_internal.h"

static void read_tensor(const model_file *file, model_tensor tensor, uint32_t layer) {
    const model_shape shape = model_tensor_shape(&model_file_card(file)->geometry, tensor);
    uint16_t *row = bt_malloc(shape.columns * sizeof *row);
    bt_error error = {0};
    BT_ASSERT(row != NULL);
    for (uint32_t r = 0; r < shape.rows; r++) {
        const bt_status status = model_file_read(file, tensor, layer, r, 1, row, &error);
        BT_ASSERT(status == BT_OK || (status == BT_ERR_CALLER_FILE && error.text[0] != '\0'));
    }
    bt_free(row);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    model_file *file = NULL;
    bt_error error = {0};
    if (model_file_open_memory(data, bytes, "fuzz", &file, &error) != BT_OK) {
        BT_ASSERT(error.text[0] != '\0');
        return 0;
    }
    const model_geometry *g = &model_file_card(file)->geometry;
    for (int t = 0; t < MODEL_TENSOR_COUNT; t++) {
        const uint32_t layers = t < MODEL_TENSOR_ATTENTION_NORM ? 1 : g->layers;
        for (uint32_t layer = 0; layer < layers; layer++)
            if (model_tensor_shape(g, (model_tensor)t).rows != 0)
                read_tensor(file, (model_tensor)t, layer);
    }
    model_file_close(file);
    return 0;
}
