/* The text of a model.safetensors.index.json, of any kind: either a sentence, or entries whose
 * files are in the index's own folder, sorted by file. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "base/safetensors_set.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    bt_safetensors_index *index = NULL;
    bt_error error = {0};
    if (bt_safetensors_index_open((const char *)data, bytes, "fuzz", &index, &error) != BT_OK) {
        BT_ASSERT(error.text[0] != '\0');
        return 0;
    }
    BT_ASSERT(bt_safetensors_index_count(index) > 0);
    for (size_t i = 0; i < bt_safetensors_index_count(index); i++) {
        const bt_safetensors_index_entry *entry = bt_safetensors_index_at(index, i);
        const size_t length = strlen(entry->file);
        BT_ASSERT(strpbrk(entry->file, "/\\") == NULL && entry->file[0] != '.');
        BT_ASSERT(length > 12 && strcmp(entry->file + length - 12, ".safetensors") == 0);
        if (i == 0) continue;
        const bt_safetensors_index_entry *before = bt_safetensors_index_at(index, i - 1);
        const int order = strcmp(before->file, entry->file);
        BT_ASSERT(order < 0 || (order == 0 && strcmp(before->tensor, entry->tensor) < 0));
    }
    bt_safetensors_index_close(index);
    return 0;
}
