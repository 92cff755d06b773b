/* Files of packed weights: found, verified, held, stored. See model_cache.h for what a file looks
 * like and when it is believed. */
#include "kernels/model/model_cache.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/hex.h"
#include "base/log.h"
#include "base/mem.h"
#include "kernels/host/memory.h"
#include "kernels/host/pool.h"

enum {
    FORMAT_VERSION = 1,
    BODY_ALIGN = 4096,
    CHUNK_BYTES = 4 << 20,
    NAME_BYTES = 2 * MODEL_CACHE_KEY_BYTES + 16,
    POLL_MS = 20,
    ENTRIES_MAX = 4096, /* looked at when old ones are removed */
};

static const char component[] = "weights";
static const char magic[16] = "baton weights";
static const char suffix[] = ".weights", temporary_suffix[] = ".partial";

typedef struct footer {
    char magic[16];
    uint32_t version;
    uint32_t chunk_bytes;
    uint64_t body_bytes;
    uint8_t key[MODEL_CACHE_KEY_BYTES];
    uint8_t fingerprint[MODEL_CACHE_FINGERPRINT_BYTES];
    uint32_t table_crc; /* of the checksums of all chunks */
    uint32_t crc;       /* of the fields before */
} footer;
static_assert(sizeof(footer) == 104, "the footer has no padding");

struct model_cache {
    char *path; /* for sentences */
    int folder;
    int locks; /* -1, or open for byte-range locks, one byte per key */
};

/* ---- names and sizes */

static void name_entry(const model_cache_entry *entry, const char *ending, char out[NAME_BYTES]) {
    static const char digits[] = "0123456789abcdef";
    char *at = out;
    for (size_t i = 0; i < sizeof entry->key; i++) {
        *at++ = digits[entry->key[i] >> 4];
        *at++ = digits[entry->key[i] & 15];
    }
    (void)snprintf(at, NAME_BYTES - 2 * sizeof entry->key, "%s", ending);
}

static size_t chunk_count(size_t body_bytes) {
    return (body_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
}

static size_t chunk_size(size_t body_bytes, size_t index) {
    const size_t rest = body_bytes - index * CHUNK_BYTES;
    return rest < CHUNK_BYTES ? rest : CHUNK_BYTES;
}

static size_t padded(size_t body_bytes) {
    return (body_bytes + BODY_ALIGN - 1) / BODY_ALIGN * BODY_ALIGN;
}

static size_t file_bytes(size_t body_bytes) {
    return padded(body_bytes) + chunk_count(body_bytes) * sizeof(uint32_t) + sizeof(footer);
}

/* ---- the folder */

/* Whether only this user, or root, can have written this. */
static bool is_trusted(const struct stat *info) {
    const bool is_ours = info->st_uid == geteuid() || info->st_uid == 0;
    return is_ours && (info->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

static bool make_folders(const char *path) {
    char copy[4096];
    const int length = snprintf(copy, sizeof copy, "%s", path);
    if (length <= 0 || (size_t)length >= sizeof copy) return false;
    for (char *at = copy + 1; *at != '\0'; at++) {
        if (*at != '/') continue;
        *at = '\0';
        (void)mkdir(copy, 0700); /* what cannot be made is found out at the end */
        *at = '/';
    }
    return mkdir(copy, 0700) == 0 || errno == EEXIST;
}

static bool open_folder(model_cache *cache) {
    struct stat info;
    if (!make_folders(cache->path)) {
        bt_log_warn(component, "%s cannot be made, weights are not shared: %s", cache->path,
                    strerror(errno));
        return false;
    }
    cache->folder = open(cache->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (cache->folder < 0 || fstat(cache->folder, &info) != 0) {
        bt_log_warn(component, "%s cannot be opened, weights are not shared: %s", cache->path,
                    strerror(errno));
        return false;
    }
    if (is_trusted(&info)) return true;
    bt_log_warn(component,
                "%s belongs to another user or others may write to it, weights are not shared; "
                "--weights-cache takes a folder of your own",
                cache->path);
    return false;
}

bool model_cache_open(const char *folder, model_cache **out) {
    model_cache *cache = bt_calloc(1, sizeof *cache);
    if (cache == NULL) return false;
    cache->folder = cache->locks = -1;
    cache->path = bt_strdup(folder);
    if (cache->path == NULL || !open_folder(cache)) {
        model_cache_close(cache);
        return false;
    }
    cache->locks = openat(cache->folder, "locks", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    *out = cache;
    return true;
}

void model_cache_close(model_cache *cache) {
    if (cache == NULL) return;
    if (cache->locks >= 0) close(cache->locks);
    if (cache->folder >= 0) close(cache->folder);
    bt_free(cache->path);
    bt_free(cache);
}

/* ---- finding */

static bool read_exactly(int fd, void *out, size_t bytes, size_t offset) {
    uint8_t *at = out;
    while (bytes > 0) {
        const ssize_t got = pread(fd, at, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got;
        offset += (size_t)got;
        bytes -= (size_t)got;
    }
    return true;
}

/* Why the file cannot be used; NULL when it can. `table` has room for the checksums. */
static const char *check_file(int fd, const model_cache_entry *entry, footer *f, uint32_t *table) {
    const size_t body_bytes = entry->body_bytes;
    const size_t table_bytes = chunk_count(body_bytes) * sizeof *table;
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return "is not a regular file";
    if (!is_trusted(&info)) return "belongs to another user or others may write to it";
    if (info.st_size < 0 || (size_t)info.st_size != file_bytes(body_bytes))
        return "has not the right length";
    if (!read_exactly(fd, f, sizeof *f, padded(body_bytes) + table_bytes) ||
        !read_exactly(fd, table, table_bytes, padded(body_bytes)))
        return "cannot be read";
    if (memcmp(f->magic, magic, sizeof magic) != 0 || f->version != FORMAT_VERSION)
        return "is not of this version";
    if (f->crc != bt_crc32c(0, f, offsetof(footer, crc))) return "has a damaged footer";
    if (f->chunk_bytes != CHUNK_BYTES || f->body_bytes != body_bytes ||
        memcmp(f->key, entry->key, sizeof f->key) != 0)
        return "is of another model";
    if (f->table_crc != bt_crc32c(0, table, table_bytes)) return "has damaged checksums";
    return NULL;
}

typedef struct verify_run {
    const uint8_t *body;
    size_t bytes;
    const uint32_t *table;
    _Atomic uint32_t damaged;
} verify_run;

static void verify_item(void *context, uint32_t item, uint32_t thread) {
    (void)thread;
    verify_run *run = context;
    const uint32_t crc =
        bt_crc32c(0, run->body + (size_t)item * CHUNK_BYTES, chunk_size(run->bytes, item));
    if (crc != run->table[item]) run->damaged++;
}

static const char *verify(const uint8_t *body, size_t bytes, const uint32_t *table,
                          uint32_t threads) {
    verify_run run = {.body = body, .bytes = bytes, .table = table};
    pool *workers;
    if (pool_create(threads, &workers) != BT_OK) return "cannot be verified without memory";
    pool_run(workers, (uint32_t)chunk_count(bytes), verify_item, &run);
    pool_destroy(workers);
    return run.damaged == 0 ? NULL : "has damaged weights";
}

static const char *use_file(int fd, model_cache_entry *entry, uint32_t threads,
                            uint8_t **body_out) {
    footer f;
    uint32_t *table = bt_malloc(chunk_count(entry->body_bytes) * sizeof *table);
    if (table == NULL) return "cannot be checked without memory";
    uint8_t *body = NULL;
    const char *why = check_file(fd, entry, &f, table);
    if (why == NULL) {
        body = host_memory_map_file(fd, entry->body_bytes);
        why = body == NULL ? "cannot be mapped" : verify(body, entry->body_bytes, table, threads);
    }
    bt_free(table);
    if (why != NULL) {
        host_memory_unmap(body, entry->body_bytes);
        return why;
    }
    memcpy(entry->fingerprint, f.fingerprint, sizeof f.fingerprint);
    *body_out = body;
    return NULL;
}

static int open_entry(const model_cache *cache, const model_cache_entry *entry,
                      char name[NAME_BYTES]) {
    name_entry(entry, suffix, name);
    /* O_NONBLOCK: a named pipe must not hold us up. */
    return openat(cache->folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

bool model_cache_find(model_cache *cache, model_cache_entry *entry, uint32_t threads,
                      uint8_t **body_out) {
    char name[NAME_BYTES];
    BT_ASSERT(entry->body_bytes > 0);
    const int fd = open_entry(cache, entry, name);
    if (fd < 0) {
        if (errno != ENOENT)
            bt_log_warn(component, "%s/%s is not used: %s", cache->path, name, strerror(errno));
        return false;
    }
    const char *why = use_file(fd, entry, threads, body_out);
    close(fd);
    if (why != NULL) {
        bt_log_warn(component, "%s/%s is not used: it %s", cache->path, name, why);
        return false;
    }
    /* The time of use, for prune(). A folder that cannot be written to is not pruned either. */
    (void)utimensat(cache->folder, name, NULL, AT_SYMLINK_NOFOLLOW);
    return true;
}

bool model_cache_map_stored(model_cache *cache, const model_cache_entry *entry,
                            uint8_t **body_out) {
    char name[NAME_BYTES];
    const int fd = open_entry(cache, entry, name);
    if (fd < 0) return false;
    *body_out = host_memory_map_file(fd, entry->body_bytes);
    close(fd);
    return *body_out != NULL;
}

/* ---- holding */

/* The byte of a key in the file of locks. Two keys may share one; then they only wait for each
 * other. */
static struct flock lock_of(const uint8_t *key) {
    uint64_t at = 0;
    for (int i = 0; i < 7; i++)
        at = at << 8 | key[i];
    return (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)at, .l_len = 1};
}

bool model_cache_hold(model_cache *cache, const model_cache_entry *entry, uint64_t wait_ms) {
    const bt_clock clock = bt_clock_system();
    const uint64_t end_us = bt_clock_now_us(&clock) + wait_ms * 1000;
    struct flock lock = lock_of(entry->key);
    bool is_announced = false;
    for (;;) {
        /* Of the open file, not of the process: it ends with the descriptor. */
        if (cache->locks >= 0 && fcntl(cache->locks, F_OFD_SETLK, &lock) == 0) return true;
        if (cache->locks < 0 || (errno != EAGAIN && errno != EACCES && errno != EINTR)) {
            bt_log_warn(component, "%s cannot be locked, weights are not shared: %s", cache->path,
                        strerror(cache->locks < 0 ? EROFS : errno));
            return false;
        }
        if (bt_clock_now_us(&clock) >= end_us) {
            bt_log_warn(component, "another process has been packing these weights for too long; "
                                   "this one packs its own");
            return false;
        }
        if (!is_announced)
            bt_log_info(component, "waiting for another process that packs these weights");
        is_announced = true;
        (void)nanosleep(&(struct timespec){.tv_nsec = POLL_MS * 1000000L}, NULL);
    }
}

/* ---- storing */

static bool write_exactly(int fd, const void *data, size_t bytes, size_t offset) {
    const uint8_t *at = data;
    while (bytes > 0) {
        const ssize_t put =
            pwrite(fd, at, bytes < CHUNK_BYTES ? bytes : CHUNK_BYTES, (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        at += put;
        offset += (size_t)put;
        bytes -= (size_t)put;
    }
    return true;
}

static bool write_file(int fd, const model_cache_entry *entry, const uint8_t *body) {
    const size_t count = chunk_count(entry->body_bytes);
    const size_t table_bytes = count * sizeof(uint32_t);
    uint32_t *table = bt_malloc(table_bytes);
    if (table == NULL) {
        errno = ENOMEM;
        return false;
    }
    /* A disk that is full says so before anything is written. */
    errno = posix_fallocate(fd, 0, (off_t)file_bytes(entry->body_bytes));
    bool is_written = errno == 0 || errno == EOPNOTSUPP;
    for (size_t i = 0; i < count && is_written; i++) {
        const uint8_t *chunk = body + i * CHUNK_BYTES;
        const size_t bytes = chunk_size(entry->body_bytes, i);
        table[i] = bt_crc32c(0, chunk, bytes);
        is_written = write_exactly(fd, chunk, bytes, i * CHUNK_BYTES);
    }
    footer f = {.version = FORMAT_VERSION,
                .chunk_bytes = CHUNK_BYTES,
                .body_bytes = entry->body_bytes,
                .table_crc = bt_crc32c(0, table, table_bytes)};
    memcpy(f.magic, magic, sizeof magic);
    memcpy(f.key, entry->key, sizeof f.key);
    memcpy(f.fingerprint, entry->fingerprint, sizeof f.fingerprint);
    f.crc = bt_crc32c(0, &f, offsetof(footer, crc));
    const size_t table_at = padded(entry->body_bytes);
    is_written = is_written && write_exactly(fd, table, table_bytes, table_at) &&
                 write_exactly(fd, &f, sizeof f, table_at + table_bytes) && fsync(fd) == 0;
    bt_free(table);
    return is_written;
}

typedef struct cached_file {
    char name[NAME_BYTES];
    struct timespec used;
    uint64_t bytes;
} cached_file;

static bool has_ending(const char *name, const char *ending) {
    const size_t length = strlen(name);
    return length == 2 * MODEL_CACHE_KEY_BYTES + strlen(ending) &&
           strcmp(name + 2 * MODEL_CACHE_KEY_BYTES, ending) == 0;
}

/* A partial file whose maker is gone: nobody holds its key. */
static void remove_partial(const model_cache *cache, const char *name) {
    uint8_t key[MODEL_CACHE_KEY_BYTES];
    for (size_t i = 0; i < sizeof key; i++) {
        const int high = bt_hex_digit(name[2 * i]), low = bt_hex_digit(name[2 * i + 1]);
        if (high < 0 || low < 0) return;
        key[i] = (uint8_t)(high << 4 | low);
    }
    struct flock lock = lock_of(key);
    const int own = openat(cache->folder, "locks", O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (own < 0) return;
    if (fcntl(own, F_OFD_SETLK, &lock) == 0) (void)unlinkat(cache->folder, name, 0);
    close(own);
}

/* Fills `files` and returns how many there are; removes partial files on the way. */
static size_t list_entries(const model_cache *cache, const char *kept, cached_file *files) {
    size_t count = 0;
    const int fd = openat(cache->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *listing = fd < 0 ? NULL : fdopendir(fd);
    if (listing == NULL) {
        if (fd >= 0) close(fd);
        return 0;
    }
    for (const struct dirent *at; (at = readdir(listing)) != NULL && count < ENTRIES_MAX;) {
        struct stat info;
        if (has_ending(at->d_name, temporary_suffix)) remove_partial(cache, at->d_name);
        if (!has_ending(at->d_name, suffix) || strcmp(at->d_name, kept) == 0) continue;
        if (fstatat(cache->folder, at->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
        cached_file *file = &files[count++];
        (void)snprintf(file->name, sizeof file->name, "%s", at->d_name);
        file->used = info.st_mtim;
        file->bytes = info.st_size > 0 ? (uint64_t)info.st_size : 0;
    }
    closedir(listing);
    return count;
}

static int by_last_use(const void *a, const void *b) {
    const struct timespec x = ((const cached_file *)a)->used, y = ((const cached_file *)b)->used;
    if (x.tv_sec != y.tv_sec) return x.tv_sec < y.tv_sec ? 1 : -1;
    return x.tv_nsec == y.tv_nsec ? 0 : x.tv_nsec < y.tv_nsec ? 1 : -1;
}

/* Whoever has mapped a removed file keeps it. */
static void prune(const model_cache *cache, const char *kept, uint64_t kept_bytes,
                  uint64_t bytes_max) {
    cached_file *files = bt_calloc(ENTRIES_MAX, sizeof *files);
    if (files == NULL) return;
    const size_t count = list_entries(cache, kept, files);
    qsort(files, count, sizeof *files, by_last_use);
    uint64_t sum = kept_bytes;
    for (size_t i = 0; i < count; i++) {
        if (!__builtin_add_overflow(sum, files[i].bytes, &sum) && sum <= bytes_max) continue;
        sum = bytes_max;
        if (unlinkat(cache->folder, files[i].name, 0) == 0)
            bt_log_info(component, "%s/%s is removed, to stay below --weights-cache-bytes",
                        cache->path, files[i].name);
    }
    bt_free(files);
}

bool model_cache_store(model_cache *cache, const model_cache_entry *entry, const uint8_t *body,
                       uint64_t bytes_max) {
    char name[NAME_BYTES], temporary[NAME_BYTES];
    const size_t bytes = file_bytes(entry->body_bytes);
    if (bytes > bytes_max) {
        bt_log_warn(component,
                    "%zu bytes of weights are more than --weights-cache-bytes, they are not shared",
                    bytes);
        return false;
    }
    name_entry(entry, suffix, name);
    name_entry(entry, temporary_suffix, temporary);
    (void)unlinkat(cache->folder, temporary, 0); /* of a maker that died: the key is ours now */
    const int fd = openat(cache->folder, temporary,
                          O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    bool is_stored = fd >= 0 && write_file(fd, entry, body) &&
                     renameat(cache->folder, temporary, cache->folder, name) == 0;
    if (!is_stored) {
        bt_log_warn(component, "weights cannot be kept in %s, they are not shared: %s", cache->path,
                    strerror(errno));
        (void)unlinkat(cache->folder, temporary, 0);
    }
    if (fd >= 0) close(fd);
    if (!is_stored) return false;
    (void)fsync(cache->folder); /* the name; without it the entry would only be packed again */
    prune(cache, name, bytes, bytes_max);
    return true;
}
