#include "tests/support/test_bytes.h"

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/mem.h"

void test_bytes_fini(test_bytes *bytes) {
    bt_free(bytes->data);
    *bytes = (test_bytes){0};
}

size_t test_bytes_add(test_bytes *bytes, const void *data, size_t count) {
    const size_t offset = bytes->count;
    uint8_t *grown = bt_realloc(bytes->data, offset + count);
    BT_ASSERT(grown != NULL);
    if (data != NULL) {
        memcpy(grown + offset, data, count);
    } else {
        memset(grown + offset, 0, count);
    }
    bytes->data = grown;
    bytes->count = offset + count;
    return offset;
}

size_t test_bytes_add_text(test_bytes *bytes, const char *text) {
    return test_bytes_add(bytes, text, strlen(text));
}

static size_t add_integer(test_bytes *bytes, uint64_t value, size_t count) {
    uint8_t data[8];
    for (size_t i = 0; i < count; i++)
        data[i] = (uint8_t)(value >> (8 * i));
    return test_bytes_add(bytes, data, count);
}

size_t test_bytes_add_u16(test_bytes *bytes, uint16_t value) {
    return add_integer(bytes, value, 2);
}

size_t test_bytes_add_u32(test_bytes *bytes, uint32_t value) {
    return add_integer(bytes, value, 4);
}

size_t test_bytes_add_u64(test_bytes *bytes, uint64_t value) {
    return add_integer(bytes, value, 8);
}

size_t test_bytes_add_f32(test_bytes *bytes, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return add_integer(bytes, bits, 4);
}

void test_bytes_print(test_bytes *bytes, const char *format, ...) {
    char text[4096];
    va_list args;
    va_start(args, format);
    const int count = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    BT_ASSERT(count >= 0 && (size_t)count < sizeof text);
    test_bytes_add(bytes, text, (size_t)count);
}

void test_bytes_align(test_bytes *bytes, size_t alignment) {
    test_bytes_add(bytes, NULL, (alignment - bytes->count % alignment) % alignment);
}

void test_bytes_set_u64(test_bytes *bytes, size_t offset, uint64_t value) {
    BT_ASSERT(offset + 8 <= bytes->count);
    for (size_t i = 0; i < 8; i++)
        bytes->data[offset + i] = (uint8_t)(value >> (8 * i));
}

bt_status test_bytes_write(const test_bytes *bytes, const char *folder, const char *name) {
    char path[4096];
    const int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (length < 0 || (size_t)length >= sizeof path) return BT_ERR_CALLER_ARGUMENT;
    FILE *file = fopen(path, "wbe");
    if (file == NULL) return BT_ERR_WORKER_IO;
    const size_t written = bytes->count > 0 ? fwrite(bytes->data, 1, bytes->count, file) : 0;
    const int closed = fclose(file);
    return written == bytes->count && closed == 0 ? BT_OK : BT_ERR_WORKER_IO;
}

test_folder test_folder_make(void) {
    test_folder folder;
    const char *parent = getenv("TMPDIR");
    const int length = snprintf(folder.path, sizeof folder.path, "%s/baton-test-XXXXXX",
                                parent != NULL && parent[0] != '\0' ? parent : "/tmp");
    BT_ASSERT(length > 0 && (size_t)length < sizeof folder.path);
    BT_ASSERT(mkdtemp(folder.path) != NULL);
    return folder;
}

void test_folder_remove(const test_folder *folder) {
    DIR *listing = opendir(folder->path);
    if (listing == NULL) return;
    for (struct dirent *entry = readdir(listing); entry != NULL; entry = readdir(listing))
        (void)unlinkat(dirfd(listing), entry->d_name, 0);
    closedir(listing);
    (void)rmdir(folder->path);
}
