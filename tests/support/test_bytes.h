/* A growable run of bytes, little-endian, from which tests make files; and the temporary folders
 * that they are written to. Out of memory ends the test program. One thread. */
#ifndef BT_TESTS_SUPPORT_TEST_BYTES_H
#define BT_TESTS_SUPPORT_TEST_BYTES_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct test_bytes {
    uint8_t
        *data; /* owned; exactly `count` bytes are allocated, so that a sanitizer sees overruns */
    size_t count;
} test_bytes;

void test_bytes_fini(test_bytes *bytes);
/* Appends `count` bytes, or zeros when data is NULL; returns the offset of the first. */
size_t test_bytes_add(test_bytes *bytes, const void *data, size_t count);
size_t test_bytes_add_text(test_bytes *bytes, const char *text);
size_t test_bytes_add_u16(test_bytes *bytes, uint16_t value);
size_t test_bytes_add_u32(test_bytes *bytes, uint32_t value);
size_t test_bytes_add_u64(test_bytes *bytes, uint64_t value);
size_t test_bytes_add_f32(test_bytes *bytes, float value);
/* Appends text in the manner of printf. */
void test_bytes_print(test_bytes *bytes, const char *format, ...) BT_PRINTF(2, 3);
/* Appends zeros up to a multiple of `alignment`. */
void test_bytes_align(test_bytes *bytes, size_t alignment);
/* Overwrites the 8 bytes at `offset`. */
void test_bytes_set_u64(test_bytes *bytes, size_t offset, uint64_t value);

/* Writes the bytes to folder/name, in place of what was there. */
BT_MUST_CHECK bt_status test_bytes_write(const test_bytes *bytes, const char *folder,
                                         const char *name);
/* Makes a folder under $TMPDIR (or /tmp). The caller removes it with test_folder_remove. */
typedef struct test_folder {
    char path[256];
} test_folder;
test_folder test_folder_make(void);
/* Removes the folder and the files in it (no folders). */
void test_folder_remove(const test_folder *folder);

#endif
