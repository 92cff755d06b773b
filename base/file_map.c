/* Owns the mapping of one file. The descriptor is closed at once; the mapping keeps the file. */
#include "base/file_map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"

static bt_status map_descriptor(const char *path, int descriptor, bt_file_map *map_out,
                                bt_error *error) {
    struct stat info;
    if (fstat(descriptor, &info) != 0) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: cannot be examined: %s", path,
                       strerror(errno));
    }
    if (S_ISDIR(info.st_mode)) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: is a folder, a file was expected", path);
    }
    if (!S_ISREG(info.st_mode)) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: is not a regular file", path);
    }
    if (info.st_size == 0) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: is empty", path);
    }
    size_t bytes = (size_t)info.st_size;
    void *data = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (data == MAP_FAILED) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: cannot be mapped (%zu bytes): %s", path,
                       bytes, strerror(errno));
    }
    *map_out = (bt_file_map){.data = data, .bytes = bytes};
    return BT_OK;
}

bt_status bt_file_map_open(const char *path, bt_file_map *map_out, bt_error *error) {
    /* O_NONBLOCK: opening a named pipe must not wait for a writer. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: cannot be opened: %s", path,
                       strerror(errno));
    }
    bt_status status = map_descriptor(path, descriptor, map_out, error);
    close(descriptor);
    return status;
}

void bt_file_map_release(const bt_file_map *map, const uint8_t *data, size_t bytes) {
    if (map->data == NULL || bytes == 0) return;
    BT_ASSERT(data >= map->data && (size_t)(data - map->data) <= map->bytes);
    BT_ASSERT(bytes <= map->bytes - (size_t)(data - map->data));
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t from = (uintptr_t)data / page * page;
    const uintptr_t end = (uintptr_t)data + bytes;
    (void)madvise((void *)from, end - from, MADV_DONTNEED); /* only advice */
}

void bt_file_map_close(bt_file_map *map) {
    if (map->data != NULL) {
        /* munmap takes a plain pointer although it never writes. */
        union {
            const uint8_t *data;
            void *address;
        } at = {.data = map->data};
        munmap(at.address, map->bytes);
    }
    *map = (bt_file_map){0};
}
