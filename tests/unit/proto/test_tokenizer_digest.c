/* The digest is the same for a folder and its tokenizer.json, changes with every byte of it, and a
 * path without a tokenizer is refused in a sentence that names it. */
#include "proto/tokenizer_digest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[64];
static char file[128];

static int make_folder(void **state) {
    (void)state;
    (void)snprintf(folder, sizeof folder, "/tmp/baton-digest.XXXXXX");
    if (mkdtemp(folder) == NULL) return -1;
    (void)snprintf(file, sizeof file, "%s/tokenizer.json", folder);
    return 0;
}

static int remove_folder(void **state) {
    (void)state;
    (void)unlink(file);
    return rmdir(folder);
}

static void write_file(const char *text) {
    FILE *stream = fopen(file, "w");
    assert_non_null(stream);
    assert_int_equal(fwrite(text, 1, strlen(text), stream), strlen(text));
    assert_int_equal(fclose(stream), 0);
}

static void a_folder_equals_its_file(void **state) {
    (void)state;
    char of_folder[TOKENIZER_DIGEST_TEXT_BYTES], of_file[TOKENIZER_DIGEST_TEXT_BYTES];
    write_file("{\"model\":1}");
    assert_int_equal(proto_tokenizer_digest(folder, of_folder, NULL), BT_OK);
    assert_int_equal(proto_tokenizer_digest(file, of_file, NULL), BT_OK);
    assert_string_equal(of_folder, of_file);
    assert_int_equal(strlen(of_file), 64);
    write_file("{\"model\":2}");
    assert_int_equal(proto_tokenizer_digest(file, of_file, NULL), BT_OK);
    assert_string_not_equal(of_folder, of_file);
}

static void no_tokenizer_is_named(void **state) {
    (void)state;
    char text[TOKENIZER_DIGEST_TEXT_BYTES];
    bt_error error;
    (void)unlink(file);
    assert_int_equal(proto_tokenizer_digest(folder, text, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "tokenizer.json"));
}

static void a_gguf_without_tokens_is_refused(void **state) {
    (void)state;
    const unsigned char header[24] = {'G', 'G', 'U', 'F', 3};
    FILE *stream = fopen(file, "w");
    assert_non_null(stream);
    assert_int_equal(fwrite(header, 1, sizeof header, stream), sizeof header);
    assert_int_equal(fclose(stream), 0);
    char text[TOKENIZER_DIGEST_TEXT_BYTES];
    bt_error error;
    assert_int_equal(proto_tokenizer_digest(file, text, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "tokenizer.ggml.tokens"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_folder_equals_its_file),
        cmocka_unit_test(no_tokenizer_is_named),
        cmocka_unit_test(a_gguf_without_tokens_is_refused),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
