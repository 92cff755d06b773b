/* What is hashed per file: its name (of files in a folder), the numbers of stat and the head. The
 * digests of a folder's files are sorted, because a folder has no order. */
#include "kernels/model/model_identity.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"

enum { FILES_MAX = 4096, PIECE_BYTES = 1 << 16 };

/* Metadata of GGUF files with large vocabularies take some MiB; more does not matter, since the
 * numbers of stat already tell one content from another. */
static const size_t head_bytes_max = (size_t)4 << 20;

/* A change within one tick of the file system's clock leaves the times alone; a tick is 10 ms at
 * most. */
static const int64_t settle_ns = 100000000;

static int64_t nanoseconds(struct timespec t) {
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static bool hash_stat(EVP_MD_CTX *hash, const struct stat *info) {
    const uint64_t numbers[] = {(uint64_t)info->st_dev, (uint64_t)info->st_ino,
                                (uint64_t)info->st_size, (uint64_t)nanoseconds(info->st_mtim),
                                (uint64_t)nanoseconds(info->st_ctim)};
    return EVP_DigestUpdate(hash, numbers, sizeof numbers) == 1;
}

static bool hash_head(EVP_MD_CTX *hash, int fd) {
    uint8_t piece[PIECE_BYTES];
    size_t done = 0;
    while (done < head_bytes_max) {
        const ssize_t got = pread(fd, piece, sizeof piece, (off_t)done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 || EVP_DigestUpdate(hash, piece, (size_t)got) != 1) return false;
        if (got == 0) break;
        done += (size_t)got;
    }
    return true;
}

static bool hash_open_file(EVP_MD_CTX *hash, int fd, const char *name, bool *is_settled) {
    struct stat info;
    struct timespec now;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return false;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) return false;
    const int64_t age = nanoseconds(now) - nanoseconds(info.st_ctim);
    if (age < settle_ns) *is_settled = false;
    return EVP_DigestUpdate(hash, name, strlen(name) + 1) == 1 && hash_stat(hash, &info) &&
           hash_head(hash, fd);
}

/* `name` in the folder `at`; `counted_name` is hashed. */
static bool digest_file(int at, const char *name, const char *counted_name,
                        uint8_t out[MODEL_IDENTITY_BYTES], bool *is_settled) {
    const int fd = openat(at, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return false;
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    unsigned int bytes = 0;
    const bool is_hashed = hash != NULL && EVP_DigestInit_ex(hash, EVP_sha256(), NULL) == 1 &&
                           hash_open_file(hash, fd, counted_name, is_settled) &&
                           EVP_DigestFinal_ex(hash, out, &bytes) == 1 &&
                           bytes == MODEL_IDENTITY_BYTES;
    EVP_MD_CTX_free(hash);
    close(fd);
    return is_hashed;
}

static bool is_counted(const char *name) {
    const char *ending = strrchr(name, '.');
    return ending != NULL && (strcmp(ending, ".json") == 0 || strcmp(ending, ".safetensors") == 0);
}

static int compare_digests(const void *a, const void *b) {
    return memcmp(a, b, MODEL_IDENTITY_BYTES);
}

static bool digest_listing(DIR *listing, uint8_t (*digests)[MODEL_IDENTITY_BYTES], size_t *count,
                           bool *is_settled) {
    for (const struct dirent *at; (at = readdir(listing)) != NULL;) {
        if (!is_counted(at->d_name)) continue;
        if (*count == FILES_MAX) return false;
        if (!digest_file(dirfd(listing), at->d_name, at->d_name, digests[*count], is_settled))
            return false;
        (*count)++;
    }
    return *count > 0;
}

static bool digest_folder(DIR *listing, model_identity *out) {
    uint8_t(*digests)[MODEL_IDENTITY_BYTES] = bt_calloc(FILES_MAX, sizeof *digests);
    if (digests == NULL) return false;
    size_t count = 0;
    bool is_complete = digest_listing(listing, digests, &count, &out->is_settled);
    qsort(digests, count, sizeof *digests, compare_digests);
    unsigned int bytes = 0;
    is_complete = is_complete && EVP_Digest(digests, count * sizeof *digests, out->digest, &bytes,
                                            EVP_sha256(), NULL) == 1;
    bt_free(digests);
    return is_complete && bytes == MODEL_IDENTITY_BYTES;
}

bool model_identity_read(const char *path, model_identity *out) {
    out->is_settled = true;
    DIR *listing = opendir(path);
    if (listing == NULL) {
        if (errno != ENOTDIR) return false;
        return digest_file(AT_FDCWD, path, "", out->digest, &out->is_settled);
    }
    const bool is_complete = digest_folder(listing, out);
    closedir(listing);
    return is_complete;
}
