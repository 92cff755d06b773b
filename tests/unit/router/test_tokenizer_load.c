/* Files that are no tokenizer, or one that is not built: each is refused with a sentence that says
 * what and where, and nothing leaks. */
#include "router/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/tiny_bpe.h"

static const tiny_merge merges[] = {{"a", "b"}, {"ab", "c"}};
static const tiny_bpe usual = {.merges = merges, .merge_count = 2};

static void check_refused(bt_status status, const bt_error *error, tokenizer *t, bt_status wanted,
                          const char *words) {
    if (status != wanted || strstr(error->text, words) == NULL)
        fail_msg("wanted %d with \"%s\", got %d with \"%s\"", wanted, words, status, error->text);
    assert_int_equal(error->status, wanted);
    assert_null(t);
}

static void refuse_text(const char *text, size_t bytes, bt_status wanted, const char *words) {
    test_bytes file = {0};
    tokenizer *t = NULL;
    bt_error error = {0};
    (void)test_bytes_add(&file, text, bytes);
    const bt_status status = tiny_bpe_load_text(&file, &t, &error);
    check_refused(status, &error, t, wanted, words);
    test_bytes_fini(&file);
}

static void refuse(const tiny_bpe *bpe, bt_status wanted, const char *words) {
    tokenizer *t = NULL;
    bt_error error = {0};
    const bt_status status = tiny_bpe_load(bpe, &t, &error);
    check_refused(status, &error, t, wanted, words);
}

static void refuse_path(const char *path, bt_status wanted, const char *words) {
    tokenizer *t = NULL;
    bt_error error = {0};
    const bt_status status = tokenizer_load(path, &t, &error);
    check_refused(status, &error, t, wanted, words);
}

static void paths_without_a_tokenizer(void **state) {
    (void)state;
    const test_folder folder = test_folder_make();
    char path[512];
    test_bytes empty = {0};
    refuse_path(folder.path, BT_ERR_CALLER_FILE, "tokenizer.json");
    (void)snprintf(path, sizeof path, "%s/none", folder.path);
    refuse_path(path, BT_ERR_CALLER_FILE, "none");
    assert_int_equal(test_bytes_write(&empty, folder.path, "tokenizer.json"), BT_OK);
    refuse_path(folder.path, BT_ERR_CALLER_FILE, "tokenizer.json");
    refuse_path("/dev/null", BT_ERR_CALLER_FILE, "/dev/null");
    test_folder_remove(&folder);
}

static void text_that_is_no_json(void **state) {
    (void)state;
    static const char *const texts[] = {
        "hello",      "[]",   "3", "{\"model\": ", "{\"a\": \"\\ud83d\"}", "{\"a\": 1, \"a\": 2}",
        "\xFF\xFE{}", "{} {}"};
    for (size_t i = 0; i < BT_ARRAY_COUNT(texts); i++)
        refuse_text(texts[i], strlen(texts[i]), BT_ERR_CALLER_FILE, "tokenizer.json");
    refuse_text("{\"a\0b\": 1}", 10, BT_ERR_CALLER_FILE, "tokenizer.json");
    refuse_text("{}", 2, BT_ERR_CALLER_FILE, "model");
    refuse_text("{\"model\": 3}", 12, BT_ERR_CALLER_FILE, "model");
}

static void truncated_files(void **state) {
    (void)state;
    test_bytes whole = tiny_bpe_json(&usual);
    for (size_t bytes = 1; bytes + 2 < whole.count; bytes += 61)
        refuse_text((const char *)whole.data, bytes, BT_ERR_CALLER_FILE, "tokenizer.json");
    test_bytes_fini(&whole);
}

/* Model objects of their own, with the usual parts around them. */
static void models_that_are_not_sound(void **state) {
    (void)state;
    static const struct {
        const char *model;
        bt_status status;
        const char *words;
    } cases[] = {
        {"{\"type\": \"Unigram\"}", BT_ERR_CALLER_UNSUPPORTED, "\"Unigram\""},
        {"{\"type\": \"WordPiece\", \"vocab\": {}}", BT_ERR_CALLER_UNSUPPORTED, "\"WordPiece\""},
        {"{\"vocab\": {}, \"merges\": []}", BT_ERR_CALLER_UNSUPPORTED, "BPE"},
        {"{\"type\": 3}", BT_ERR_CALLER_UNSUPPORTED, "BPE"},
        {"{\"type\": \"BPE\"}", BT_ERR_CALLER_FILE, "model.merges"},
        {"{\"type\": \"BPE\", \"merges\": []}", BT_ERR_CALLER_FILE, "model.vocab"},
        {"{\"type\": \"BPE\", \"merges\": [], \"vocab\": []}", BT_ERR_CALLER_FILE, "model.vocab"},
        {"{\"type\": \"BPE\", \"merges\": [], \"vocab\": {}}", BT_ERR_CALLER_FILE, "empty"},
        {"{\"type\": \"BPE\", \"merges\": [], \"vocab\": {\"a\": -1}}", BT_ERR_CALLER_FILE,
         "\"a\""},
        {"{\"type\": \"BPE\", \"merges\": [], \"vocab\": {\"a\": 1.0}}", BT_ERR_CALLER_FILE,
         "\"a\""},
        {"{\"type\": \"BPE\", \"merges\": [], \"vocab\": {\"a\": 4194304}}", BT_ERR_CALLER_LIMIT,
         "4194304"},
        {"{\"type\": \"BPE\", \"merges\": [], \"vocab\": {\"a\": 9007199254740993}}",
         BT_ERR_CALLER_LIMIT, "9007199254740993"},
        {"{\"type\": \"BPE\", \"merges\": [], \"vocab\": {\"a\": 1, \"b\": 1}}", BT_ERR_CALLER_FILE,
         "id 1 is given twice"},
        {"{\"type\": \"BPE\", \"merges\": [\"a z\"], \"vocab\": {\"a\": 0}}", BT_ERR_CALLER_FILE,
         "\"z\""},
        {"{\"type\": \"BPE\", \"merges\": [[\"z\", \"a\"]], \"vocab\": {\"a\": 0}}",
         BT_ERR_CALLER_FILE, "\"z\""},
        {"{\"type\": \"BPE\", \"merges\": [\"a b\"], \"vocab\": {\"a\": 0, \"b\": 1}}",
         BT_ERR_CALLER_FILE, "merge 0 makes a token"},
        {"{\"type\": \"BPE\", \"merges\": [\"ab\"], \"vocab\": {\"a\": 0}}", BT_ERR_CALLER_FILE,
         "merges[0]"},
        {"{\"type\": \"BPE\", \"merges\": [\"a b c\"], \"vocab\": {\"a\": 0}}", BT_ERR_CALLER_FILE,
         "merges[0]"},
        {"{\"type\": \"BPE\", \"merges\": [[\"a\"]], \"vocab\": {\"a\": 0}}", BT_ERR_CALLER_FILE,
         "merges[0]"},
        {"{\"type\": \"BPE\", \"merges\": [3], \"vocab\": {\"a\": 0}}", BT_ERR_CALLER_FILE,
         "merges[0]"},
        /* A merge that gives one of its own parts would go round for ever. */
        {"{\"type\": \"BPE\", \"merges\": [[\"\", \"a\"]], \"vocab\": {\"\": 0, \"a\": 1}}",
         BT_ERR_CALLER_FILE, "merge 0 has an empty"},
        {"{\"type\": \"BPE\", \"merges\": [\"a \"], \"vocab\": {\"\": 0, \"a\": 1}}",
         BT_ERR_CALLER_FILE, "merge 0 has an empty"},
        {"{\"type\": \"BPE\", \"byte_fallback\": true, \"merges\": [], \"vocab\": {\"a\": 0}}",
         BT_ERR_CALLER_UNSUPPORTED, "byte_fallback"},
        {"{\"type\": \"BPE\", \"dropout\": 0.1, \"merges\": [], \"vocab\": {\"a\": 0}}",
         BT_ERR_CALLER_UNSUPPORTED, "dropout"},
        {"{\"type\": \"BPE\", \"end_of_word_suffix\": \"</w>\", \"merges\": [], \"vocab\": "
         "{\"a\": 0}}",
         BT_ERR_CALLER_UNSUPPORTED, "end_of_word_suffix"},
        {"{\"type\": \"BPE\", \"unk_token\": \"<unk>\", \"merges\": [], \"vocab\": {\"a\": 0}}",
         BT_ERR_CALLER_FILE, "<unk>"},
        {"{\"type\": \"BPE\", \"unk_token\": 3, \"merges\": [], \"vocab\": {\"a\": 0}}",
         BT_ERR_CALLER_FILE, "unk_token"},
        {"{\"type\": \"BPE\", \"merges\": [], \"vocab\": {\"\\ud83d\": 0}}", BT_ERR_CALLER_FILE,
         "tokenizer.json"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        test_bytes text = {0};
        test_bytes_print(&text, "{\"pre_tokenizer\": {\"type\": \"ByteLevel\"}, \"model\": %s}",
                         cases[i].model);
        refuse_text((const char *)text.data, text.count, cases[i].status, cases[i].words);
        test_bytes_fini(&text);
    }
}

static void parts_that_are_not_built(void **state) {
    (void)state;
    static const struct {
        tiny_bpe bpe;
        const char *words;
    } cases[] = {
        {{.pre_tokenizer = "null"}, "pre_tokenizer \"null\""},
        {{.pre_tokenizer = "{\"type\": \"Metaspace\"}"}, "\"Metaspace\""},
        {{.pre_tokenizer = "{\"type\": \"ByteLevel\", \"add_prefix_space\": true}"},
         "add_prefix_space"},
        {{.pre_tokenizer = "{\"type\": \"Digits\", \"individual_digits\": false}"}, "Digits"},
        {{.pre_tokenizer = "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"a+\"}, "
                           "\"behavior\": \"Isolated\"}"},
         "\"a+\""},
        {{.pre_tokenizer = "{\"type\": \"Split\", \"pattern\": {\"String\": \"a\"}, "
                           "\"behavior\": \"Isolated\"}"},
         "Split without"},
        {{.pre_tokenizer = "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"a+\"}, "
                           "\"behavior\": \"MergedWithNext\"}"},
         "\"MergedWithNext\""},
        {{.pre_tokenizer = "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": "
                           "\"Digits\", \"individual_digits\": true}]}"},
         "combination"},
        {{.pre_tokenizer = "{\"type\": \"Sequence\", \"pretokenizers\": []}"}, "combination"},
        {{.pre_tokenizer = "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": "
                           "\"Sequence\"}]}"},
         "\"Sequence\""},
        {{.normalizer = "{\"type\": \"NFKC\"}"}, "\"NFKC\""},
        {{.normalizer = "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}, "
                        "{\"type\": \"Lowercase\"}]}"},
         "\"Lowercase\""},
        {{.post_processor = "{\"type\": \"RobertaProcessing\"}"}, "\"RobertaProcessing\""},
        {{.decoder = "{\"type\": \"WordPiece\"}"}, "\"WordPiece\""},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++)
        refuse(&cases[i].bpe, BT_ERR_CALLER_UNSUPPORTED, cases[i].words);
}

static void added_tokens_that_contradict(void **state) {
    (void)state;
    static const struct {
        const char *added;
        const char *words;
    } cases[] = {
        {"3", "added_tokens[0]"},
        {"{\"id\": 300}", "added_tokens[0]"},
        {"{\"content\": \"<s>\"}", "added_tokens[0]"},
        {"{\"id\": -1, \"content\": \"<s>\"}", "added_tokens[0]"},
        {"{\"id\": 300, \"content\": \"\"}", "empty"},
        {"{\"id\": 97, \"content\": \"<s>\"}", "97 has another text"},
        {"{\"id\": 300, \"content\": \"abc\"}", "300 is token 257"},
        {"{\"id\": 300, \"content\": \"<s>\"}, {\"id\": 300, \"content\": \"<t>\"}", "twice"},
        {"{\"id\": 300, \"content\": \"<s>\"}, {\"id\": 301, \"content\": \"<s>\"}", "repeats"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        tiny_bpe bpe = usual;
        bpe.added_tokens = cases[i].added;
        refuse(&bpe, BT_ERR_CALLER_FILE, cases[i].words);
    }
    /* The same id and text as in the vocabulary is how many files are written. */
    tokenizer *t = NULL;
    tiny_bpe bpe = usual;
    bpe.added_tokens = "{\"id\": 257, \"content\": \"abc\", \"special\": true}";
    assert_int_equal(tiny_bpe_load(&bpe, &t, NULL), BT_OK);
    assert_true(tokenizer_is_special(t, 257));
    tokenizer_destroy(t);
}

static void post_processors_that_name_nothing(void **state) {
    (void)state;
    tiny_bpe bpe = usual;
    bpe.post_processor = "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": "
                         "{\"id\": \"<nope>\"}}]}";
    refuse(&bpe, BT_ERR_CALLER_FILE, "<nope>");
    bpe.post_processor = "{\"type\": \"TemplateProcessing\"}";
    refuse(&bpe, BT_ERR_CALLER_FILE, "post_processor.single");
    bpe.post_processor =
        "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"a\"}}, "
        "{\"SpecialToken\": {\"id\": \"a\"}}, {\"SpecialToken\": {\"id\": \"a\"}}, "
        "{\"SpecialToken\": {\"id\": \"a\"}}, {\"SpecialToken\": {\"id\": \"a\"}}]}";
    refuse(&bpe, BT_ERR_CALLER_LIMIT, "post_processor");
}

/* The files beside tokenizer.json. */
static void write_text(const test_folder *folder, const char *name, const char *text) {
    test_bytes bytes = {0};
    (void)test_bytes_add_text(&bytes, text);
    assert_int_equal(test_bytes_write(&bytes, folder->path, name), BT_OK);
    test_bytes_fini(&bytes);
}

static test_folder folder_with_tokenizer(void) {
    const test_folder folder = test_folder_make();
    test_bytes text = tiny_bpe_json(&usual);
    assert_int_equal(test_bytes_write(&text, folder.path, "tokenizer.json"), BT_OK);
    test_bytes_fini(&text);
    return folder;
}

static void companions_give_the_end_tokens(void **state) {
    (void)state;
    const test_folder folder = folder_with_tokenizer();
    char path[512];
    int32_t ids[TOKENIZER_EOS_MAX];
    write_text(&folder, "generation_config.json", "{\"eos_token_id\": [98, 97]}");
    write_text(&folder, "config.json", "{\"eos_token_id\": 97}");
    write_text(&folder, "tokenizer_config.json", "{\"eos_token\": {\"content\": \"c\"}}");
    (void)snprintf(path, sizeof path, "%s/tokenizer.json", folder.path);
    const char *const ways[] = {folder.path, path};
    for (size_t i = 0; i < BT_ARRAY_COUNT(ways); i++) {
        tokenizer *t = NULL;
        assert_int_equal(tokenizer_load(ways[i], &t, NULL), BT_OK);
        assert_int_equal(tokenizer_eos(t, ids), 3);
        assert_int_equal(ids[0], 98);
        assert_int_equal(ids[1], 97);
        assert_int_equal(ids[2], 'c');
        tokenizer_destroy(t);
    }
    test_folder_remove(&folder);
}

static void companions_must_be_sound(void **state) {
    (void)state;
    static const struct {
        const char *name;
        const char *text;
        const char *words;
    } cases[] = {
        {"config.json", "{", "config.json"},
        {"config.json", "{\"eos_token_id\": \"2\"}", "eos_token_id"},
        {"config.json", "{\"eos_token_id\": [2, null]}", "eos_token_id"},
        {"generation_config.json", "{\"eos_token_id\": -3}", "out of range"},
        {"tokenizer_config.json", "{\"eos_token\": \"<none>\"}", "<none>"},
        {"tokenizer_config.json", "no", "tokenizer_config.json"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        const test_folder folder = folder_with_tokenizer();
        write_text(&folder, cases[i].name, cases[i].text);
        refuse_path(folder.path, BT_ERR_CALLER_FILE, cases[i].words);
        test_folder_remove(&folder);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(paths_without_a_tokenizer),
        cmocka_unit_test(text_that_is_no_json),
        cmocka_unit_test(truncated_files),
        cmocka_unit_test(models_that_are_not_sound),
        cmocka_unit_test(parts_that_are_not_built),
        cmocka_unit_test(added_tokens_that_contradict),
        cmocka_unit_test(post_processors_that_name_nothing),
        cmocka_unit_test(companions_give_the_end_tokens),
        cmocka_unit_test(companions_must_be_sound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
