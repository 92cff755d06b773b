/* Safetensors bytes of any kind: either a sentence, or tensors that cover the data exactly. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "base/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    bt_safetensors *file = NULL;
    bt_error error = {0};
    if (bt_safetensors_open_memory(data, bytes, "fuzz", &file, &error) != BT_OK) {
        BT_ASSERT(error.text[0] != '\0');
        return 0;
    }
    size_t covered = 0;
    uint64_t first = bytes;
    for (size_t i = 0; i < bt_safetensors_count(file); i++) {
        const bt_safetensors_tensor *tensor = bt_safetensors_at(file, i);
        BT_ASSERT(tensor->offset <= bytes);
        BT_ASSERT(tensor->bytes <= bytes - tensor->offset);
        BT_ASSERT(tensor->data == data + tensor->offset);
        BT_ASSERT(tensor->bytes == tensor->elements * bt_safetensors_dtype_bytes(tensor->dtype));
        BT_ASSERT(bt_safetensors_find(file, tensor->name) == tensor);
        covered += tensor->bytes;
        if (tensor->offset < first) first = tensor->offset;
    }
    BT_ASSERT(first + covered == bytes);
    bt_safetensors_close(file);
    return 0;
}
