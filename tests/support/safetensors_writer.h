/* Makes safetensors files for tests. One thread. */
#ifndef BT_TESTS_SUPPORT_SAFETENSORS_WRITER_H
#define BT_TESTS_SUPPORT_SAFETENSORS_WRITER_H

#include "tests/support/test_bytes.h"

typedef struct safetensors_writer {
    test_bytes entries; /* JSON text of the header, without the braces around it */
    test_bytes data;
} safetensors_writer;

void safetensors_writer_fini(safetensors_writer *w);
/* A tensor of one (rows 0) or two dimensions, placed after the ones before it. */
void safetensors_writer_tensor(safetensors_writer *w, const char *name, const char *dtype,
                               uint64_t rows, uint64_t columns, const test_bytes *data);
/* The file; the caller frees it. */
test_bytes safetensors_writer_finish(const safetensors_writer *w);
/* A file of any header text and `data_bytes` zeros. */
test_bytes safetensors_file(const char *header, size_t data_bytes);

#endif
