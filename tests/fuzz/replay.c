/* Runs a fuzz target over its committed corpus without libFuzzer: replay FOLDER. Each file is one
 * test case; it is given whole and cut at every length (of the first 4096 bytes), each time in a
 * block of exactly its size, so that a sanitizer sees one byte too many. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tests/fuzz/fuzz.h"

enum { FILES_MAX = 1024, FILE_BYTES_MAX = 1 << 20, CUTS_MAX = 4096 };

static void run_copy(const uint8_t *data, size_t bytes) {
    uint8_t *copy = bt_malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, data, bytes);
    assert_int_equal(LLVMFuzzerTestOneInput(copy, bytes), 0);
    bt_free(copy);
}

static void replays(void **state) {
    const char *path = *state;
    FILE *file = fopen(path, "rbe");
    assert_non_null(file);
    uint8_t *data = bt_malloc(FILE_BYTES_MAX);
    assert_non_null(data);
    const size_t bytes = fread(data, 1, FILE_BYTES_MAX, file);
    assert_int_equal(fclose(file), 0);
    run_copy(data, bytes);
    for (size_t cut = 0; cut < bytes && cut < CUTS_MAX; cut++)
        run_copy(data, cut);
    bt_free(data);
}

static int compare_paths(const void *a, const void *b) {
    const struct CMUnitTest *x = a;
    const struct CMUnitTest *y = b;
    return strcmp(x->name, y->name);
}

int main(int argc, char **argv) {
    static struct CMUnitTest tests[FILES_MAX];
    size_t count = 0;
    DIR *listing = argc == 2 ? opendir(argv[1]) : NULL;
    if (listing == NULL) {
        (void)fprintf(stderr, "usage: replay FOLDER (of a corpus)\n");
        return 2;
    }
    for (struct dirent *e = readdir(listing); e != NULL && count < FILES_MAX;
         e = readdir(listing)) {
        char path[4096];
        if (e->d_name[0] == '.') continue;
        (void)snprintf(path, sizeof path, "%s/%s", argv[1], e->d_name);
        char *kept = bt_strdup(path);
        if (kept == NULL) return 2;
        tests[count++] = (struct CMUnitTest){kept, replays, NULL, NULL, kept};
    }
    closedir(listing);
    qsort(tests, count, sizeof tests[0], compare_paths);
    const int failed = _cmocka_run_group_tests(argv[1], tests, count, NULL, NULL);
    for (size_t i = 0; i < count; i++)
        bt_free(tests[i].initial_state);
    return count == 0 ? 1 : failed;
}
