/* The demo model's tokenizer against recorded ids (tests/vectors/demo_tokenizer.py), its text
 * against a round trip, and its chat template. Skipped when BATON_DEMO_MODEL is not set. */
#include "router/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json_file.h"

enum { SKIPPED = 77 };

static tokenizer *demo;

static void recorded_ids(void **state) {
    (void)state;
    json_t *root = NULL;
    bt_error error = {0};
    if (bt_json_file_load("tests/vectors/demo_tokenizer.json", &root, &error) != BT_OK)
        fail_msg("%s", error.text);
    const json_t *cases = json_object_get(root, "cases");
    assert_true(json_array_size(cases) > 40);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *one = json_array_get(cases, i);
        const json_t *text = json_object_get(one, "text");
        const json_t *ids = json_object_get(one, "ids");
        const tokenizer_encode_options options = {
            .parses_special = json_is_true(json_object_get(one, "parses_special"))};
        token_list list = {0};
        assert_int_equal(tokenizer_encode(demo, json_string_value(text), json_string_length(text),
                                          options, &list),
                         BT_OK);
        assert_int_equal(list.count, json_array_size(ids));
        for (size_t k = 0; k < list.count; k++)
            assert_int_equal(list.ids[k], json_integer_value(json_array_get(ids, k)));
        token_list_fini(&list);
    }
    json_decref(root);
}

static void keep(void *context, const char *text, size_t bytes) {
    (void)fwrite(text, 1, bytes, context);
}

/* Text to ids, and the ids one by one through the detokeniser, gives the text. */
static void text_survives_the_round_trip(void **state) {
    (void)state;
    static const char *const texts[] = {
        "plain words, and 12 numbers\n",
        "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7 family",
        "\xE4\xBD\xA0\xE5\xA5\xBD\xE4\xB8\x96\xE7\x95\x8C",
        "\xD7\xA9\xD7\x9C\xD7\x95\xD7\x9D \xE0\xA4\xA8\xE0\xA4\xAE",
        "<|im_start|>user\nhi<|im_end|>",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char *text = NULL;
        size_t bytes = 0;
        FILE *kept = open_memstream(&text, &bytes);
        token_list list = {0};
        detokenizer d;
        assert_non_null(kept);
        detokenizer_init(&d);
        assert_int_equal(tokenizer_encode(demo, texts[i], strlen(texts[i]),
                                          (tokenizer_encode_options){.parses_special = true},
                                          &list),
                         BT_OK);
        for (uint32_t k = 0; k < list.count; k++) {
            const char *token = NULL;
            size_t count = 0;
            assert_true(tokenizer_token_bytes(demo, list.ids[k], &token, &count));
            detokenizer_push(&d, token, count, keep, kept);
        }
        detokenizer_finish(&d, keep, kept);
        assert_int_equal(fclose(kept), 0);
        assert_string_equal(text, texts[i]);
        free(text);
        token_list_fini(&list);
    }
}

static void facts_of_the_file(void **state) {
    (void)state;
    int32_t eos[TOKENIZER_EOS_MAX];
    assert_int_equal(tokenizer_vocab_count(demo), 49152);
    assert_int_equal(tokenizer_find(demo, "<|im_start|>"), 1);
    assert_int_equal(tokenizer_find(demo, "<|im_end|>"), 2);
    assert_true(tokenizer_is_special(demo, 2));
    assert_int_equal(tokenizer_eos(demo, eos), 1);
    assert_int_equal(eos[0], 2);
}

/* The default system message is in front; a message of the client's own replaces it. */
static void chat_has_the_default_system_message(void **state) {
    (void)state;
    const chat_message messages[] = {{"system", "Rhyme.", 6}, {"user", "Hi", 2}};
    token_list with = {0};
    token_list without = {0};
    bt_error error = {0};
    assert_int_equal(tokenizer_encode_chat(demo, messages, 2, (chat_options){0}, &with, &error),
                     BT_OK);
    assert_int_equal(
        tokenizer_encode_chat(demo, messages + 1, 1, (chat_options){0}, &without, &error), BT_OK);
    assert_int_equal(with.ids[0], 1);
    assert_int_equal(without.ids[0], 1);
    assert_true(without.count > with.count);
    token_list_fini(&with);
    token_list_fini(&without);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recorded_ids),
        cmocka_unit_test(text_survives_the_round_trip),
        cmocka_unit_test(facts_of_the_file),
        cmocka_unit_test(chat_has_the_default_system_message),
    };
    const char *path = getenv("BATON_DEMO_MODEL");
    bt_error error = {0};
    if (path == NULL || path[0] == '\0') {
        (void)printf("1..0 # SKIP BATON_DEMO_MODEL is not set\n");
        return SKIPPED;
    }
    if (tokenizer_load(path, &demo, &error) != BT_OK) {
        (void)fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tokenizer_destroy(demo);
    return failed;
}
