#include "tests/support/safetensors_writer.h"

#include <inttypes.h>
#include <string.h>

void safetensors_writer_fini(safetensors_writer *w) {
    test_bytes_fini(&w->entries);
    test_bytes_fini(&w->data);
}

void safetensors_writer_tensor(safetensors_writer *w, const char *name, const char *dtype,
                               uint64_t rows, uint64_t columns, const test_bytes *data) {
    const size_t start = test_bytes_add(&w->data, data->data, data->count);
    if (w->entries.count > 0) test_bytes_add_text(&w->entries, ",");
    test_bytes_print(&w->entries, "\"%s\":{\"dtype\":\"%s\",\"shape\":[", name, dtype);
    if (rows > 0) test_bytes_print(&w->entries, "%" PRIu64 ",", rows);
    test_bytes_print(&w->entries, "%" PRIu64 "],\"data_offsets\":[%zu,%zu]}", columns, start,
                     w->data.count);
}

test_bytes safetensors_writer_finish(const safetensors_writer *w) {
    test_bytes header = {0};
    test_bytes_add_text(&header, "{\"__metadata__\":{\"format\":\"pt\"}");
    if (w->entries.count > 0) test_bytes_add_text(&header, ",");
    test_bytes_add(&header, w->entries.data, w->entries.count);
    test_bytes_add_text(&header, "}");
    test_bytes file = {0};
    test_bytes_add_u64(&file, header.count);
    test_bytes_add(&file, header.data, header.count);
    test_bytes_add(&file, w->data.data, w->data.count);
    test_bytes_fini(&header);
    return file;
}

test_bytes safetensors_file(const char *header, size_t data_bytes) {
    test_bytes file = {0};
    test_bytes_add_u64(&file, strlen(header));
    test_bytes_add_text(&file, header);
    test_bytes_add(&file, NULL, data_bytes);
    return file;
}
