/* The folder of packed weights: what is stored is found, whatever is wrong with a file makes it
 * absent, one process makes an entry at a time, and old entries go. */
#include "kernels/model/model_cache.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/mem.h"
#include "kernels/host/memory.h"
#include "tests/support/test_bytes.h"

enum {
    BODY_BYTES = (9 << 20) + 5,
    FOOTER_BYTES = 104,
    TABLE_BYTES = 3 * 4,
    PADDED = (9 << 20) + 4096
};
static const uint64_t no_limit = UINT64_C(1) << 40;

typedef struct fixture {
    test_folder folder;
    model_cache *cache;
    uint8_t *body;
    model_cache_entry entry;
    char path[400]; /* of the entry's file */
} fixture;

static void path_of(const fixture *f, const model_cache_entry *entry, const char *ending,
                    char out[400]) {
    char name[65];
    for (size_t i = 0; i < 32; i++)
        (void)snprintf(name + 2 * i, 3, "%02x", entry->key[i]);
    (void)snprintf(out, 400, "%s/%s%s", f->folder.path, name, ending);
}

static int set_up(void **state) {
    static fixture f;
    f = (fixture){.folder = test_folder_make(), .entry = {.body_bytes = BODY_BYTES}};
    for (size_t i = 0; i < 32; i++) {
        f.entry.key[i] = (uint8_t)(i * 9);
        f.entry.fingerprint[i] = (uint8_t)(200 - i);
    }
    f.body = bt_malloc(BODY_BYTES);
    for (size_t i = 0; i < BODY_BYTES; i++)
        f.body[i] = (uint8_t)(i * 2654435761U >> 13);
    path_of(&f, &f.entry, ".weights", f.path);
    *state = &f;
    return model_cache_open(f.folder.path, &f.cache) ? 0 : -1;
}

static int tear_down(void **state) {
    fixture *f = *state;
    model_cache_close(f->cache);
    bt_free(f->body);
    test_folder_remove(&f->folder);
    return 0;
}

static void store(fixture *f) {
    assert_true(model_cache_hold(f->cache, &f->entry, 0));
    assert_true(model_cache_store(f->cache, &f->entry, f->body, no_limit));
}

static bool is_found(const fixture *f) {
    model_cache_entry wanted = {.body_bytes = f->entry.body_bytes};
    memcpy(wanted.key, f->entry.key, sizeof wanted.key);
    uint8_t *body;
    if (!model_cache_find(f->cache, &wanted, 2, &body)) return false;
    assert_memory_equal(body, f->body, wanted.body_bytes);
    assert_memory_equal(wanted.fingerprint, f->entry.fingerprint, sizeof wanted.fingerprint);
    host_memory_unmap(body, wanted.body_bytes);
    return true;
}

static void what_is_stored_is_found(void **state) {
    fixture *f = *state;
    assert_false(is_found(f));
    store(f);
    assert_true(is_found(f));
    uint8_t *body;
    assert_true(model_cache_map_stored(f->cache, &f->entry, &body));
    assert_memory_equal(body, f->body, BODY_BYTES);
    /* What is mapped outlives its file. */
    assert_int_equal(unlink(f->path), 0);
    assert_memory_equal(body, f->body, BODY_BYTES);
    host_memory_unmap(body, BODY_BYTES);
    assert_false(is_found(f));
}

static void other_keys_and_sizes_are_not_found(void **state) {
    fixture *f = *state;
    store(f);
    f->entry.body_bytes--;
    assert_false(is_found(f));
    f->entry.body_bytes++;
    /* The file of another key under the name of this one. */
    char other[400];
    f->entry.key[31] ^= 1;
    path_of(f, &f->entry, ".weights", other);
    assert_false(is_found(f));
    assert_int_equal(rename(f->path, other), 0);
    assert_false(is_found(f));
}

static void flip(const char *path, off_t at) {
    const int fd = open(path, O_RDWR);
    uint8_t byte;
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void damaged_files_are_replaced(void **state) {
    fixture *f = *state;
    static const off_t places[] = {
        0,
        4 << 20,
        BODY_BYTES - 1,
        PADDED,
        PADDED + TABLE_BYTES - 1,
        PADDED + TABLE_BYTES,
        PADDED + TABLE_BYTES + 17,
        PADDED + TABLE_BYTES + 70,
        PADDED + TABLE_BYTES + FOOTER_BYTES - 1,
    };
    store(f);
    for (size_t i = 0; i < BT_ARRAY_COUNT(places); i++) {
        flip(f->path, places[i]);
        if (is_found(f)) fail_msg("a bit at %ld is not noticed", (long)places[i]);
        assert_true(model_cache_store(f->cache, &f->entry, f->body, no_limit));
        assert_true(is_found(f));
    }
    static const off_t lengths[] = {0,
                                    1,
                                    4096,
                                    BODY_BYTES,
                                    PADDED + TABLE_BYTES,
                                    PADDED + TABLE_BYTES + FOOTER_BYTES - 1,
                                    PADDED + TABLE_BYTES + FOOTER_BYTES + 1};
    for (size_t i = 0; i < BT_ARRAY_COUNT(lengths); i++) {
        assert_int_equal(truncate(f->path, lengths[i]), 0);
        assert_false(is_found(f));
        assert_true(model_cache_store(f->cache, &f->entry, f->body, no_limit));
        assert_true(is_found(f));
    }
}

static void files_of_others_are_not_used(void **state) {
    fixture *f = *state;
    store(f);
    assert_int_equal(chmod(f->path, 0620), 0);
    assert_false(is_found(f));
    assert_int_equal(chmod(f->path, 0602), 0);
    assert_false(is_found(f));
    assert_int_equal(chmod(f->path, 0644), 0);
    assert_true(is_found(f));
    if (geteuid() == 0) {
        assert_int_equal(chown(f->path, 65534, 65534), 0);
        assert_false(is_found(f));
        assert_true(model_cache_store(f->cache, &f->entry, f->body, no_limit));
        assert_true(is_found(f));
    }
    /* Nothing but a regular file is opened. */
    char moved[410];
    (void)snprintf(moved, sizeof moved, "%s/moved", f->folder.path);
    assert_int_equal(rename(f->path, moved), 0);
    assert_int_equal(symlink(moved, f->path), 0);
    assert_false(is_found(f));
    assert_int_equal(unlink(f->path), 0);
    assert_int_equal(mkfifo(f->path, 0600), 0);
    assert_false(is_found(f));
}

static void folders_that_others_may_write_to_are_refused(void **state) {
    fixture *f = *state;
    model_cache *cache;
    char path[300];
    for (size_t i = 0; i < 3; i++) {
        static const mode_t modes[] = {0770, 0707, 01777};
        assert_int_equal(chmod(f->folder.path, modes[i]), 0);
        assert_false(model_cache_open(f->folder.path, &cache));
    }
    assert_int_equal(chmod(f->folder.path, 0700), 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(f->folder.path, 65534, 65534), 0);
        assert_false(model_cache_open(f->folder.path, &cache));
        assert_int_equal(chown(f->folder.path, 0, 0), 0);
    }
    (void)snprintf(path, sizeof path, "%s/file", f->folder.path);
    const int fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_false(model_cache_open(path, &cache));
    assert_false(model_cache_open("", &cache));
    assert_false(model_cache_open("/proc/none/here", &cache));
}

static void missing_folders_are_made_for_this_user(void **state) {
    fixture *f = *state;
    model_cache *cache;
    char path[300];
    struct stat info;
    (void)snprintf(path, sizeof path, "%s/a/b", f->folder.path);
    assert_true(model_cache_open(path, &cache));
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0700);
    model_cache_close(cache);
    (void)snprintf(path, sizeof path, "%s/a/b/locks", f->folder.path);
    assert_int_equal(unlink(path), 0);
    (void)snprintf(path, sizeof path, "%s/a/b", f->folder.path);
    assert_int_equal(rmdir(path), 0);
    (void)snprintf(path, sizeof path, "%s/a", f->folder.path);
    assert_int_equal(rmdir(path), 0);
}

static void one_at_a_time_holds_an_entry(void **state) {
    fixture *f = *state;
    model_cache *other;
    assert_true(model_cache_open(f->folder.path, &other));
    assert_true(model_cache_hold(f->cache, &f->entry, 0));
    assert_true(model_cache_hold(f->cache, &f->entry, 0)); /* it already does */
    assert_false(model_cache_hold(other, &f->entry, 0));
    model_cache_entry another = f->entry;
    another.key[0] ^= 1;
    assert_true(model_cache_hold(other, &another, 0));
    model_cache_close(f->cache);
    f->cache = other;
    assert_true(model_cache_hold(other, &f->entry, 0));
}

/* A child that stops in the middle of its work, and is killed there. */
static pid_t start_maker(const fixture *f) {
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
        model_cache *cache;
        if (!model_cache_open(f->folder.path, &cache) || !model_cache_hold(cache, &f->entry, 0))
            _exit(1);
        char partial[400];
        path_of(f, &f->entry, ".partial", partial);
        const int fd = open(partial, O_CREAT | O_WRONLY, 0600);
        if (write(fd, f->body, 100000) != 100000 || write(ready[1], "x", 1) != 1) _exit(1);
        for (;;)
            (void)pause();
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
    return child;
}

static void a_killed_maker_leaves_nothing_that_is_used(void **state) {
    fixture *f = *state;
    const pid_t child = start_maker(f);
    char partial[400];
    path_of(f, &f->entry, ".partial", partial);
    assert_false(model_cache_hold(f->cache, &f->entry, 0));
    assert_false(is_found(f));
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    store(f); /* the system let go of what it held */
    assert_true(is_found(f));
    assert_int_equal(access(partial, F_OK), -1);
}

static void partial_files_go_when_nobody_makes_them(void **state) {
    fixture *f = *state;
    char partial[400];
    const pid_t child = start_maker(f);
    path_of(f, &f->entry, ".partial", partial);
    model_cache_entry another = f->entry;
    another.key[1] ^= 1;
    assert_true(model_cache_hold(f->cache, &another, 0));
    assert_true(model_cache_store(f->cache, &another, f->body, no_limit));
    assert_int_equal(access(partial, F_OK), 0); /* its maker lives */
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_true(model_cache_store(f->cache, &another, f->body, no_limit));
    assert_int_equal(access(partial, F_OK), -1);
}

static void entries_not_used_for_longest_are_removed(void **state) {
    fixture *f = *state;
    const uint64_t bytes = PADDED + TABLE_BYTES + FOOTER_BYTES;
    const model_cache_entry first = f->entry;
    char paths[4][400];
    for (uint8_t i = 0; i < 4; i++) {
        f->entry = first;
        f->entry.key[5] = i;
        path_of(f, &f->entry, ".weights", paths[i]);
        assert_true(model_cache_hold(f->cache, &f->entry, 0));
        assert_true(model_cache_store(f->cache, &f->entry, f->body, 3 * bytes));
        const struct timespec used[2] = {{.tv_sec = 1000 + i}, {.tv_sec = 1000 + i}};
        if (i == 1) {
            f->entry.key[5] = 0; /* used again: now the newest */
            assert_true(is_found(f));
        } else if (i != 0) {
            assert_int_equal(utimensat(AT_FDCWD, paths[i], used, 0), 0);
        }
        if (i == 1) assert_int_equal(utimensat(AT_FDCWD, paths[i], used, 0), 0);
    }
    assert_int_equal(access(paths[0], F_OK), 0);
    assert_int_equal(access(paths[1], F_OK), -1);
    assert_int_equal(access(paths[2], F_OK), 0);
    assert_int_equal(access(paths[3], F_OK), 0);
    /* One that is larger than the folder may be is not stored. */
    f->entry.key[5] = 9;
    assert_true(model_cache_hold(f->cache, &f->entry, 0));
    assert_false(model_cache_store(f->cache, &f->entry, f->body, bytes - 1));
    assert_false(is_found(f));
    assert_true(model_cache_store(f->cache, &f->entry, f->body, bytes));
    assert_int_equal(access(paths[0], F_OK), -1);
    assert_true(is_found(f));
}

static void a_full_disk_leaves_nothing(void **state) {
    fixture *f = *state;
    struct rlimit old, small;
    char partial[400];
    path_of(f, &f->entry, ".partial", partial);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    small.rlim_cur = 1 << 20;
    (void)signal(SIGXFSZ, SIG_IGN);
    assert_true(model_cache_hold(f->cache, &f->entry, 0));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    const bool is_stored = model_cache_store(f->cache, &f->entry, f->body, no_limit);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_false(is_stored);
    assert_false(is_found(f));
    assert_int_equal(access(partial, F_OK), -1);
    assert_true(model_cache_store(f->cache, &f->entry, f->body, no_limit));
    assert_true(is_found(f));
}

/* Some file systems, tmpfs among them, would not choose such a place by themselves. */
static void files_are_mapped_where_a_huge_page_can_begin(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 4096, (size_t)2 << 20, ((size_t)5 << 20) + 1};
    for (size_t i = 0; i < BT_ARRAY_COUNT(sizes); i++) {
        const int fd = memfd_create("weights", MFD_CLOEXEC);
        uint8_t byte = (uint8_t)(7 + i);
        assert_true(fd >= 0);
        assert_int_equal(ftruncate(fd, (off_t)sizes[i]), 0);
        assert_int_equal(pwrite(fd, &byte, 1, (off_t)sizes[i] - 1), 1);
        const uint8_t *block = host_memory_map_file(fd, sizes[i]);
        assert_non_null(block);
        close(fd);
        assert_int_equal((uintptr_t)block % (2U << 20), 0);
        assert_int_equal(block[sizes[i] - 1], byte);
        union {
            const uint8_t *block;
            void *address;
        } at = {.block = block};
        host_memory_unmap(at.address, sizes[i]);
    }
    assert_null(host_memory_map_file(-1, 4096));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_stored_is_found, set_up, tear_down),
        cmocka_unit_test_setup_teardown(other_keys_and_sizes_are_not_found, set_up, tear_down),
        cmocka_unit_test_setup_teardown(damaged_files_are_replaced, set_up, tear_down),
        cmocka_unit_test_setup_teardown(files_of_others_are_not_used, set_up, tear_down),
        cmocka_unit_test_setup_teardown(folders_that_others_may_write_to_are_refused, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(missing_folders_are_made_for_this_user, set_up, tear_down),
        cmocka_unit_test_setup_teardown(one_at_a_time_holds_an_entry, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_killed_maker_leaves_nothing_that_is_used, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(partial_files_go_when_nobody_makes_them, set_up, tear_down),
        cmocka_unit_test_setup_teardown(entries_not_used_for_longest_are_removed, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_full_disk_leaves_nothing, set_up, tear_down),
        cmocka_unit_test(files_are_mapped_where_a_huge_page_can_begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
