/* Tokenizers in GGUF files: the good one, and each way to be wrong. */
#include "router/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/tiny_bpe.h"

enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };

/* A file with the 256 bytes, "ab", and three added tokens; a test spoils one field. */
typedef struct sample {
    const char *model; /* NULL: the key is left out */
    const char *pre;
    const char *merge;
    const char *last_token;
    uint32_t last_type;
    uint32_t type_count; /* 0: as many as tokens */
    int64_t bos_id;      /* negative: left out */
    int64_t eos_id;
    int adds_bos; /* negative: left out */
    int adds_space;
} sample;

enum { SAMPLE_TOKENS = 260 };

static const sample good = {.model = "gpt2",
                            .pre = "smollm",
                            .merge = "a b",
                            .last_token = "<tool>",
                            .last_type = USER_DEFINED,
                            .bos_id = 257,
                            .eos_id = 258,
                            .adds_bos = -1,
                            .adds_space = -1};

static void put_tokens(gguf_writer *w, const sample *s) {
    gguf_writer_array(w, "tokenizer.ggml.tokens", BT_GGUF_TYPE_STRING, SAMPLE_TOKENS);
    for (unsigned byte = 0; byte < 256; byte++) {
        const char raw[1] = {(char)byte};
        test_bytes text = {0};
        tiny_bpe_add_alphabet(&text, raw, 1);
        gguf_writer_text(w, (const char *)text.data, text.count);
        test_bytes_fini(&text);
    }
    const char *const more[] = {"ab", "<s>", "</s>", s->last_token};
    for (size_t i = 0; i < BT_ARRAY_COUNT(more); i++)
        gguf_writer_text(w, more[i], strlen(more[i]));
    const uint32_t count = s->type_count == 0 ? SAMPLE_TOKENS : s->type_count;
    gguf_writer_array(w, "tokenizer.ggml.token_type", BT_GGUF_TYPE_I32, count);
    for (uint32_t id = 0; id < count; id++)
        (void)test_bytes_add_u32(&w->keys, id == 259                ? s->last_type
                                           : id == 257 || id == 258 ? CONTROL
                                                                    : NORMAL);
}

static test_bytes make(const sample *s) {
    gguf_writer w;
    gguf_writer_init(&w);
    gguf_writer_string(&w, "general.architecture", "llama");
    if (s->model != NULL) gguf_writer_string(&w, "tokenizer.ggml.model", s->model);
    if (s->pre != NULL) gguf_writer_string(&w, "tokenizer.ggml.pre", s->pre);
    put_tokens(&w, s);
    gguf_writer_array(&w, "tokenizer.ggml.merges", BT_GGUF_TYPE_STRING, 1);
    gguf_writer_text(&w, s->merge, strlen(s->merge));
    if (s->bos_id >= 0) gguf_writer_u32(&w, "tokenizer.ggml.bos_token_id", (uint32_t)s->bos_id);
    if (s->eos_id >= 0) gguf_writer_u32(&w, "tokenizer.ggml.eos_token_id", (uint32_t)s->eos_id);
    if (s->adds_bos >= 0)
        gguf_writer_bool(&w, "tokenizer.ggml.add_bos_token", (uint8_t)s->adds_bos);
    if (s->adds_space >= 0)
        gguf_writer_bool(&w, "tokenizer.ggml.add_space_prefix", (uint8_t)s->adds_space);
    test_bytes file = gguf_writer_finish(&w);
    gguf_writer_fini(&w);
    return file;
}

static bt_status load_bytes(const test_bytes *file, tokenizer **out, bt_error *error) {
    const test_folder folder = test_folder_make();
    char path[512];
    (void)snprintf(path, sizeof path, "%s/model.gguf", folder.path);
    bt_status status = test_bytes_write(file, folder.path, "model.gguf");
    if (status == BT_OK) status = tokenizer_load(path, out, error);
    test_folder_remove(&folder);
    return status;
}

static bt_status load(const sample *s, tokenizer **out, bt_error *error) {
    test_bytes file = make(s);
    const bt_status status = load_bytes(&file, out, error);
    test_bytes_fini(&file);
    return status;
}

static void check_ids(const tokenizer *t, const char *text, tokenizer_encode_options options,
                      const int32_t *ids, size_t count) {
    token_list list = {0};
    assert_int_equal(tokenizer_encode(t, text, strlen(text), options, &list), BT_OK);
    assert_int_equal(list.count, count);
    assert_memory_equal(list.ids, ids, count * sizeof *ids);
    token_list_fini(&list);
}

static void a_good_file(void **state) {
    (void)state;
    tokenizer *t = NULL;
    int32_t eos[TOKENIZER_EOS_MAX];
    sample s = good;
    assert_int_equal(load(&s, &t, NULL), BT_OK);
    assert_int_equal(tokenizer_vocab_count(t), SAMPLE_TOKENS);
    assert_int_equal(tokenizer_eos(t, eos), 1);
    assert_int_equal(eos[0], 258);
    assert_true(tokenizer_is_special(t, 257));
    assert_false(tokenizer_is_special(t, 259));
    check_ids(t, "ab<tool><s>", (tokenizer_encode_options){.parses_special = true},
              (const int32_t[]){256, 259, 257}, 3);
    check_ids(t, "<s>", (tokenizer_encode_options){0}, (const int32_t[]){'<', 's', '>'}, 3);
    check_ids(t, "a", (tokenizer_encode_options){.adds_special = true}, (const int32_t[]){'a'}, 1);
    tokenizer_destroy(t);
    s.adds_bos = 1;
    assert_int_equal(load(&s, &t, NULL), BT_OK);
    check_ids(t, "a", (tokenizer_encode_options){.adds_special = true}, (const int32_t[]){257, 'a'},
              2);
    tokenizer_destroy(t);
}

/* The name of the split rule decides more than the split. */
static void rules_follow_from_the_name(void **state) {
    (void)state;
    static const struct {
        const char *pre;
        const char *text;
        int32_t ids[6];
        size_t count;
    } cases[] = {
        {"smollm", "ab e\xCC\x81", {256, ' ', 'e', 0xCC, 0x81}, 5},
        {"qwen2", "ab e\xCC\x81", {256, ' ', 0xC3, 0xA9}, 4}, /* normalises */
        {"llama-bpe", "ab", {257, 256}, 2},                   /* puts BOS by default */
        {NULL, "ab", {256}, 1},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        tokenizer *t = NULL;
        sample s = good;
        s.pre = cases[i].pre;
        assert_int_equal(load(&s, &t, NULL), BT_OK);
        check_ids(t, cases[i].text, (tokenizer_encode_options){.adds_special = true}, cases[i].ids,
                  cases[i].count);
        tokenizer_destroy(t);
    }
}

static void unused_ids_have_no_text(void **state) {
    (void)state;
    tokenizer *t = NULL;
    const char *bytes = NULL;
    size_t count = 0;
    sample s = good;
    s.last_token = "[PAD0]";
    s.last_type = UNUSED;
    assert_int_equal(load(&s, &t, NULL), BT_OK);
    assert_int_equal(tokenizer_vocab_count(t), SAMPLE_TOKENS);
    assert_false(tokenizer_token_bytes(t, 259, &bytes, &count));
    assert_int_equal(tokenizer_find(t, "[PAD0]"), -1);
    tokenizer_destroy(t);
}

static void refuse(const sample *s, bt_status wanted, const char *words) {
    tokenizer *t = NULL;
    bt_error error = {0};
    const bt_status status = load(s, &t, &error);
    if (status != wanted || strstr(error.text, words) == NULL)
        fail_msg("wanted %d with \"%s\", got %d with \"%s\"", wanted, words, status, error.text);
    assert_non_null(strstr(error.text, "model.gguf"));
    assert_null(t);
}

static void wrong_files_are_refused(void **state) {
    (void)state;
    sample s = good;
    s.model = "llama";
    refuse(&s, BT_ERR_CALLER_UNSUPPORTED, "\"llama\"");
    s.model = NULL;
    refuse(&s, BT_ERR_CALLER_FILE, "tokenizer.ggml.model");
    s = good;
    s.pre = "deepseek-llm";
    refuse(&s, BT_ERR_CALLER_UNSUPPORTED, "\"deepseek-llm\"");
    s = good;
    s.merge = "a z\xC3\xB6z";
    refuse(&s, BT_ERR_CALLER_FILE, "merge 0 names");
    s.merge = "ab";
    refuse(&s, BT_ERR_CALLER_FILE, "not a pair");
    s.merge = "b a";
    refuse(&s, BT_ERR_CALLER_FILE, "merge 0 makes");
    s = good;
    s.type_count = 100;
    refuse(&s, BT_ERR_CALLER_FILE, "100 token types");
    s = good;
    s.last_type = BYTE;
    refuse(&s, BT_ERR_CALLER_UNSUPPORTED, "type 6");
    s = good;
    s.last_token = "ab";
    s.last_type = NORMAL;
    refuse(&s, BT_ERR_CALLER_FILE, "same text");
    s.last_token = "<s>";
    s.last_type = UNKNOWN;
    refuse(&s, BT_ERR_CALLER_FILE, "repeats");
    s.last_token = "\xFF";
    refuse(&s, BT_ERR_CALLER_FILE, "UTF-8");
    s = good;
    s.eos_id = SAMPLE_TOKENS;
    refuse(&s, BT_ERR_CALLER_FILE, "eos_token_id");
    s.eos_id = 259; /* an id without text */
    s.last_type = UNUSED;
    refuse(&s, BT_ERR_CALLER_FILE, "eos_token_id");
    s = good;
    s.bos_id = -1;
    s.adds_bos = 1;
    refuse(&s, BT_ERR_CALLER_FILE, "add_bos_token");
    s = good;
    s.adds_space = 1;
    refuse(&s, BT_ERR_CALLER_UNSUPPORTED, "add_space_prefix");
}

static void truncated_files(void **state) {
    (void)state;
    test_bytes file = make(&good);
    for (size_t bytes = 4; bytes < file.count - 32; bytes += 211) {
        test_bytes part = {0};
        tokenizer *t = NULL;
        bt_error error = {0};
        (void)test_bytes_add(&part, file.data, bytes);
        assert_int_equal(load_bytes(&part, &t, &error), BT_ERR_CALLER_FILE);
        assert_null(t);
        test_bytes_fini(&part);
    }
    test_bytes_fini(&file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_file),
        cmocka_unit_test(rules_follow_from_the_name),
        cmocka_unit_test(unused_ids_have_no_text),
        cmocka_unit_test(wrong_files_are_refused),
        cmocka_unit_test(truncated_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
