/* Encoding with small vocabularies: merging against a plain reference, added tokens, limits. */
#include "router/tokenizer.h"

#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/fault.h"
#include "tests/support/tiny_bpe.h"

enum { MERGES_MAX = 40, LONG_BYTES = 1 << 20 };

static tokenizer *load(const tiny_bpe *bpe) {
    tokenizer *t = NULL;
    bt_error error = {0};
    if (tiny_bpe_load(bpe, &t, &error) != BT_OK) fail_msg("%s", error.text);
    return t;
}

static void check_ids(const tokenizer *t, const char *text, tokenizer_encode_options options,
                      const int32_t *ids, size_t count) {
    token_list list = {0};
    assert_int_equal(tokenizer_encode(t, text, strlen(text), options, &list), BT_OK);
    assert_int_equal(list.count, count);
    if (count > 0) assert_memory_equal(list.ids, ids, count * sizeof *ids);
    token_list_fini(&list);
}

#define PLAIN ((tokenizer_encode_options){0})
#define PARSE ((tokenizer_encode_options){.parses_special = true})
#define ASSERT_IDS(t, text, options, ...)                                                          \
    do {                                                                                           \
        const int32_t wanted[] = {__VA_ARGS__};                                                    \
        check_ids(t, text, options, wanted, BT_ARRAY_COUNT(wanted));                               \
    } while (0)

static void lowest_rank_first_and_leftmost(void **state) {
    (void)state;
    static const tiny_merge merges[] = {{"b", "c"}, {"a", "b"}, {"a", "a"}, {"aa", "bc"}};
    tokenizer *t =
        load(&(tiny_bpe){.merges = merges, .merge_count = 4, .pre_tokenizer = tiny_bpe_whole});
    ASSERT_IDS(t, "abc", PLAIN, 'a', 256);
    ASSERT_IDS(t, "ab", PLAIN, 257);
    ASSERT_IDS(t, "aaa", PLAIN, 258, 'a');
    ASSERT_IDS(t, "aaaa", PLAIN, 258, 258);
    ASSERT_IDS(t, "aabc", PLAIN, 259);
    check_ids(t, "", PLAIN, NULL, 0);
    tokenizer_destroy(t);
}

/* Merging as one would explain it: look at all pairs, take the best, start again. */
static size_t merge_naively(const tiny_merge *merges, size_t merge_count, const char *text,
                            size_t bytes, int32_t *ids) {
    static size_t starts[1024];
    size_t count = bytes;
    for (size_t i = 0; i <= bytes; i++)
        starts[i] = i;
    for (size_t rank = 0; rank < merge_count;) {
        const size_t left = strlen(merges[rank].left);
        const size_t right = strlen(merges[rank].right);
        size_t at = 0;
        while (at + 1 < count &&
               !(starts[at + 1] - starts[at] == left && starts[at + 2] - starts[at + 1] == right &&
                 memcmp(text + starts[at], merges[rank].left, left) == 0 &&
                 memcmp(text + starts[at + 1], merges[rank].right, right) == 0))
            at++;
        if (at + 1 >= count) {
            rank++;
            continue;
        }
        memmove(starts + at + 1, starts + at + 2, (count - at - 1) * sizeof *starts);
        count--;
        rank = 0;
    }
    for (size_t i = 0; i < count; i++) {
        const size_t length = starts[i + 1] - starts[i];
        ids[i] = (uint8_t)text[starts[i]];
        for (size_t k = 0; k < merge_count && length > 1; k++)
            if (strlen(merges[k].left) + strlen(merges[k].right) == length &&
                memcmp(merges[k].left, text + starts[i], strlen(merges[k].left)) == 0 &&
                memcmp(merges[k].right, text + starts[i] + strlen(merges[k].left),
                       strlen(merges[k].right)) == 0)
                ids[i] = 256 + (int32_t)k;
    }
    return count;
}

/* Random merges over a and b: the parts are letters or earlier results, each result is new. */
static size_t make_merges(tiny_merge *merges, char (*texts)[2][64]) {
    size_t count = 0;
    for (int tries = 0; tries < 4 * MERGES_MAX && count < MERGES_MAX; tries++) {
        char whole[128];
        for (int side = 0; side < 2; side++) {
            const size_t from = (size_t)rand() % (count + 2);
            if (from < 2)
                (void)snprintf(texts[count][side], 64, "%c", from == 0 ? 'a' : 'b');
            else
                (void)snprintf(texts[count][side], 64, "%.31s%.31s", texts[from - 2][0],
                               texts[from - 2][1]);
        }
        (void)snprintf(whole, sizeof whole, "%.63s%.63s", texts[count][0], texts[count][1]);
        bool is_new = strlen(whole) < 24;
        for (size_t i = 0; i < count && is_new; i++) {
            char other[128];
            (void)snprintf(other, sizeof other, "%.63s%.63s", texts[i][0], texts[i][1]);
            is_new = strcmp(whole, other) != 0;
        }
        merges[count] = (tiny_merge){texts[count][0], texts[count][1]};
        count += is_new ? 1 : 0;
    }
    return count;
}

/* Texts below and above the length where the heap takes over. */
static void short_and_long_pieces_equal_the_reference(void **state) {
    (void)state;
    static tiny_merge merges[MERGES_MAX];
    static char texts[MERGES_MAX][2][64];
    static int32_t wanted[1024];
    const unsigned seed = 20261129;
    print_message("seed %u\n", seed);
    srand(seed);
    for (int round = 0; round < 20; round++) {
        const size_t merge_count = make_merges(merges, texts);
        tokenizer *t = load(&(tiny_bpe){
            .merges = merges, .merge_count = merge_count, .pre_tokenizer = tiny_bpe_whole});
        for (int i = 0; i < 60; i++) {
            char text[400];
            const size_t bytes = 1 + (size_t)rand() % (i % 2 == 0 ? 64 : sizeof text - 1);
            for (size_t k = 0; k < bytes; k++)
                text[k] = (char)(rand() % 20 == 0 ? 'c' : 'a' + rand() % 2);
            token_list list = {0};
            const size_t count = merge_naively(merges, merge_count, text, bytes, wanted);
            assert_int_equal(tokenizer_encode(t, text, bytes, PLAIN, &list), BT_OK);
            assert_int_equal(list.count, count);
            assert_memory_equal(list.ids, wanted, count * sizeof *wanted);
            token_list_fini(&list);
        }
        tokenizer_destroy(t);
    }
}

static void whole_pieces_before_merges(void **state) {
    (void)state;
    /* "abc" is only made from "ab", which "bc" of a lower rank prevents. */
    static const tiny_merge merges[] = {{"b", "c"}, {"a", "b"}, {"ab", "c"}};
    tiny_bpe bpe = {.merges = merges, .merge_count = 3};
    tokenizer *t = load(&bpe);
    ASSERT_IDS(t, "abc", PLAIN, 'a', 256);
    tokenizer_destroy(t);
    bpe.model_options = "\"ignore_merges\": true,";
    t = load(&bpe);
    ASSERT_IDS(t, "abc", PLAIN, 258);
    ASSERT_IDS(t, "abcabc", PLAIN, 'a', 256, 'a', 256);
    tokenizer_destroy(t);
}

static void bytes_that_the_vocabulary_lacks(void **state) {
    (void)state;
    static const tiny_merge merges[] = {{"a", "b"}};
    tiny_bpe bpe = {.merges = merges, .merge_count = 1, .lacking = "xy"};
    tokenizer *t = load(&bpe);
    ASSERT_IDS(t, "axxb", PLAIN, 256); /* dropped before merging, as in the reference */
    ASSERT_IDS(t, "xa", PLAIN, 'a');
    check_ids(t, "xyx", PLAIN, NULL, 0);
    assert_int_equal(tokenizer_token_bytes_max(t), UINT32_MAX);
    tokenizer_destroy(t);
    bpe.model_options = "\"unk_token\": \"?\",";
    t = load(&bpe);
    ASSERT_IDS(t, "axyb", PLAIN, 'a', '?', '?', 'b');
    assert_int_equal(tokenizer_token_bytes_max(t), 2);
    tokenizer_destroy(t);
    bpe.model_options = "\"unk_token\": \"?\", \"fuse_unk\": true,";
    t = load(&bpe);
    ASSERT_IDS(t, "axybx", PLAIN, 'a', '?', 'b', '?');
    assert_int_equal(tokenizer_token_bytes_max(t), UINT32_MAX);
    tokenizer_destroy(t);
}

#define ADDED(id, content, more) "{\"id\": " #id ", \"content\": \"" content "\"" more "}"

static void added_tokens_are_found_first(void **state) {
    (void)state;
    static const char added[] =
        ADDED(300, "<s>", ", \"special\": true") ", " ADDED(301, "<s>x", "") ", " ADDED(
            302, "cat",
            ", \"single_word\": true") ", " ADDED(303, "<l>",
                                                  ", \"lstrip\": true") ", " ADDED(304, "<r>",
                                                                                   ", \"rstrip\": "
                                                                                   "true") ","
                                                                                           " " ADDED(
                                                                                               305,
                                                                                               "s>",
                                                                                               "");
    tokenizer *t = load(&(tiny_bpe){.added_tokens = added, .pre_tokenizer = tiny_bpe_whole});
    ASSERT_IDS(t, "a<s>b", PARSE, 'a', 300, 'b');
    ASSERT_IDS(t, "<s>x<s>", PARSE, 301, 300);
    /* Untrusted: a special token is text, and hides what is inside of it. */
    ASSERT_IDS(t, "<s>b", PLAIN, '<', 's', '>', 'b');
    ASSERT_IDS(t, "<s>x", PLAIN, 301);
    ASSERT_IDS(t, "as>", PLAIN, 'a', 305);
    ASSERT_IDS(t, "cat", PLAIN, 302);
    ASSERT_IDS(t, ".cat!", PLAIN, '.', 302, '!');
    ASSERT_IDS(t, "cats", PLAIN, 'c', 'a', 't', 's');
    ASSERT_IDS(t,
               "\xC3\xA9"
               "cat",
               PLAIN, 0xC3, 0xA9, 'c', 'a', 't');
    ASSERT_IDS(t, "a \t\xE3\x80\x80<l> b", PLAIN, 'a', 303, ' ', 'b');
    ASSERT_IDS(t, "a <r> \n b", PLAIN, 'a', ' ', 304, 'b');
    ASSERT_IDS(t, "<r>  <l>", PLAIN, 304, 303);
    assert_int_equal(tokenizer_find(t, "<s>"), 300);
    assert_int_equal(tokenizer_find(t, "cat"), 302);
    assert_int_equal(tokenizer_find(t, "A"), 'A');
    assert_int_equal(tokenizer_find(t, "dog"), -1);
    assert_int_equal(tokenizer_find(t, ""), -1);
    assert_true(tokenizer_is_special(t, 300));
    assert_false(tokenizer_is_special(t, 301));
    assert_false(tokenizer_is_special(t, -1));
    assert_false(tokenizer_is_special(t, 306));
    tokenizer_destroy(t);
}

static void normalisation_is_between_the_two_walks(void **state) {
    (void)state;
    /* Both tokens are spelled with a mark; only the normalised one is found composed. */
    static const char added[] =
        ADDED(300, "e\xCC\x81!", ", \"normalized\": true") ", " ADDED(301, "o\xCC\x81!", "");
    tokenizer *t = load(&(tiny_bpe){.added_tokens = added,
                                    .pre_tokenizer = tiny_bpe_whole,
                                    .normalizer = "{\"type\": \"NFC\"}"});
    ASSERT_IDS(t, "\xC3\xA9!", PLAIN, 300);
    ASSERT_IDS(t, "e\xCC\x81!", PLAIN, 300);
    ASSERT_IDS(t, "o\xCC\x81!", PLAIN, 301);
    ASSERT_IDS(t, "\xC3\xB3!", PLAIN, 0xC3, 0xB3, '!');
    ASSERT_IDS(t, "u\xCC\x88", PLAIN, 0xC3, 0xBC);
    assert_int_equal(tokenizer_token_bytes_max(t), 3 * 4);
    tokenizer_destroy(t);
}

static void post_processor_puts_tokens_around(void **state) {
    (void)state;
    tokenizer *t = load(&(tiny_bpe){
        .added_tokens = ADDED(300, "<bos>", ", \"special\": true"),
        .post_processor =
            "{\"type\": \"Sequence\", \"processors\": [{\"type\": \"ByteLevel\"}, {\"type\": "
            "\"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"<bos>\"}}, "
            "{\"Sequence\": {\"id\": \"A\"}}, {\"SpecialToken\": {\"id\": \"!\"}}]}]}"});
    const tokenizer_encode_options both = {.adds_special = true};
    ASSERT_IDS(t, "a", both, 300, 'a', '!');
    ASSERT_IDS(t, "", both, 300, '!');
    ASSERT_IDS(t, "a", PLAIN, 'a');
    tokenizer_destroy(t);
}

static void limits_leave_the_list_alone(void **state) {
    (void)state;
    tokenizer *t = load(&(tiny_bpe){.merge_count = 0});
    token_list list = {0};
    assert_int_equal(token_list_append(&list, 7), BT_OK);
    const tokenizer_encode_options four = {.tokens_max = 4};
    assert_int_equal(tokenizer_encode(t, "abcde", 5, four, &list), BT_ERR_CALLER_LIMIT);
    assert_int_equal(list.count, 1);
    assert_int_equal(tokenizer_encode(t, "abcd", 4, four, &list), BT_OK);
    assert_int_equal(list.count, 5);
    assert_int_equal(tokenizer_encode(t, "ok\xC3", 3, PLAIN, &list), BT_ERR_REQUEST_INVALID);
    assert_int_equal(tokenizer_encode(t, "\xED\xA0\x80", 3, PLAIN, &list), BT_ERR_REQUEST_INVALID);
    assert_int_equal(list.count, 5);
    assert_int_equal(tokenizer_encode(t, "a\0b", 3, PLAIN, &list), BT_OK);
    assert_int_equal(list.count, 8);
    assert_int_equal(list.ids[6], 0);
    token_list_fini(&list);
    tokenizer_destroy(t);
    tokenizer_destroy(NULL);
}

static void tokens_have_bytes_and_holes_have_none(void **state) {
    (void)state;
    static const tiny_merge merges[] = {{"\xE2", "\x82"}};
    tokenizer *t = load(&(tiny_bpe){
        .merges = merges, .merge_count = 1, .added_tokens = ADDED(260, "\xC3\xA9!", "")});
    const char *bytes = NULL;
    size_t count = 9;
    assert_int_equal(tokenizer_vocab_count(t), 261);
    assert_true(tokenizer_token_bytes(t, 256, &bytes, &count));
    assert_int_equal(count, 2);
    assert_memory_equal(bytes, "\xE2\x82", 2);
    assert_true(tokenizer_token_bytes(t, 260, &bytes, &count));
    assert_int_equal(count, 3);
    assert_memory_equal(bytes, "\xC3\xA9!", 3);
    const int32_t none[] = {257, 259, 261, -1, INT_MAX, INT_MIN};
    for (size_t i = 0; i < BT_ARRAY_COUNT(none); i++) {
        assert_false(tokenizer_token_bytes(t, none[i], &bytes, &count));
        assert_int_equal(count, 0);
        assert_string_equal(bytes, "");
    }
    tokenizer_destroy(t);
}

/* The classic bad cases: each would take minutes if anything in the way were quadratic. */
static void long_runs_take_no_longer_than_long_texts(void **state) {
    (void)state;
    static const tiny_merge merges[] = {{" ", " "}, {"a", "a"}, {"  ", "  "}, {"aa", "aa"}};
    static const char *const units[] = {" ", "a", "\n",  "\xCC\x81\xCC\xA3",        "\xE3\x80\x80",
                                        "'", "1", " \n", "\xE1\x84\x80\xE1\x85\xA1"};
    static const char *const rules[] = {tiny_bpe_whole, tiny_bpe_smollm, tiny_bpe_llama3,
                                        tiny_bpe_qwen2, NULL};
    char *text = malloc(LONG_BYTES);
    assert_non_null(text);
    for (size_t rule = 0; rule < BT_ARRAY_COUNT(rules); rule++) {
        tokenizer *t = load(&(tiny_bpe){.merges = merges,
                                        .merge_count = BT_ARRAY_COUNT(merges),
                                        .pre_tokenizer = rules[rule],
                                        .normalizer = "{\"type\": \"NFC\"}"});
        for (size_t i = 0; i < BT_ARRAY_COUNT(units); i++) {
            const size_t unit = strlen(units[i]);
            const size_t bytes = LONG_BYTES / unit * unit;
            for (size_t at = 0; at < bytes; at += unit)
                memcpy(text + at, units[i], unit);
            token_list list = {0};
            assert_int_equal(tokenizer_encode(t, text, bytes, PLAIN, &list), BT_OK);
            assert_true(list.count >= bytes / 4 / 3);
            if (i == 1) assert_int_equal(list.count, bytes / 4);
            token_list_fini(&list);
        }
        tokenizer_destroy(t);
    }
    free(text);
}

static void fingerprints_follow_what_decides_ids(void **state) {
    (void)state;
    static const tiny_merge merges[] = {{"a", "b"}, {"b", "c"}};
    static const tiny_merge swapped[] = {{"b", "c"}, {"a", "b"}};
    const tiny_bpe variants[] = {
        {.merges = merges, .merge_count = 2},
        {.merges = swapped, .merge_count = 2},
        {.merges = merges, .merge_count = 1},
        {.merges = merges, .merge_count = 2, .pre_tokenizer = tiny_bpe_smollm},
        {.merges = merges, .merge_count = 2, .normalizer = "{\"type\": \"NFC\"}"},
        {.merges = merges, .merge_count = 2, .added_tokens = ADDED(300, "<s>", "")},
        {.merges = merges,
         .merge_count = 2,
         .added_tokens = ADDED(300, "<s>", ", \"special\": true")},
        {.merges = merges, .merge_count = 2, .model_options = "\"ignore_merges\": true,"},
        {.merges = merges, .merge_count = 2, .lacking = "x"},
    };
    enum { COUNT = BT_ARRAY_COUNT(variants) };
    tokenizer *loaded[COUNT];
    for (size_t i = 0; i < COUNT; i++)
        loaded[i] = load(&variants[i]);
    for (size_t i = 0; i < COUNT; i++)
        for (size_t k = 0; k < i; k++)
            assert_memory_not_equal(tokenizer_fingerprint(loaded[i]),
                                    tokenizer_fingerprint(loaded[k]), TOKENIZER_FINGERPRINT_BYTES);
    tokenizer *again = load(&variants[0]);
    assert_memory_equal(tokenizer_fingerprint(again), tokenizer_fingerprint(loaded[0]),
                        TOKENIZER_FINGERPRINT_BYTES);
    tokenizer_destroy(again);
    for (size_t i = 0; i < COUNT; i++)
        tokenizer_destroy(loaded[i]);
}

static const tokenizer *shared_tokenizer;
static const char shared_text[] = "the cat's \xF0\x9F\x98\x80 3.1415 e\xCC\x81t\xC3\xA9 \n\n  end";

static void *encode_often(void *context) {
    token_list *list = context;
    for (int i = 0; i < 200; i++) {
        list->count = 0;
        if (tokenizer_encode(shared_tokenizer, shared_text, sizeof shared_text - 1, PLAIN, list) !=
            BT_OK)
            return list;
    }
    return NULL;
}

static void threads_share_a_tokenizer(void **state) {
    (void)state;
    static const tiny_merge merges[] = {{"t", "h"}, {"th", "e"}, {" ", " "}};
    tokenizer *t = load(&(tiny_bpe){.merges = merges,
                                    .merge_count = 3,
                                    .pre_tokenizer = tiny_bpe_qwen2,
                                    .normalizer = "{\"type\": \"NFC\"}"});
    shared_tokenizer = t;
    pthread_t threads[4];
    token_list lists[4] = {0};
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, &lists[i]), 0);
    for (int i = 0; i < 4; i++) {
        void *failed = NULL;
        assert_int_equal(pthread_join(threads[i], &failed), 0);
        assert_null(failed);
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(lists[i].count, lists[0].count);
        assert_memory_equal(lists[i].ids, lists[0].ids, lists[0].count * sizeof(int32_t));
    }
    for (int i = 0; i < 4; i++)
        token_list_fini(&lists[i]);
    tokenizer_destroy(t);
}

#ifdef BT_FAULT
/* Every allocation fails once; each failure is an error, and nothing leaks. */
static void every_failed_allocation_is_an_error(void **state) {
    (void)state;
    static const tiny_merge merges[] = {{"a", "b"}};
    const tiny_bpe bpe = {.merges = merges,
                          .merge_count = 1,
                          .pre_tokenizer = tiny_bpe_whole,
                          .normalizer = "{\"type\": \"NFC\"}",
                          .added_tokens =
                              ADDED(300, "e\xCC\x81", ", \"normalized\": true") ", " ADDED(
                                  301, "<|im_start|>", "") ", " ADDED(302, "<|im_end|>", "")};
    static const char config_text[] =
        "{\"chat_template\": \"{{'<|im_start|>system\\nS<|im_end|>\\n'}}{{'<|im_start|>' + "
        "message.role + '\\n' + message.content + '<|im_end|>' + '\\n'}}"
        "{{'<|im_start|>assistant\\n'}}\"}";
    const chat_message message = {"user", "hi", 2};
    test_bytes config = {0};
    (void)test_bytes_add_text(&config, config_text);
    char text[512];
    memset(text, 'a', sizeof text);
    memcpy(text, "e\xCC\x81", 3);
    test_bytes json = tiny_bpe_json(&bpe);
    const test_folder folder = test_folder_make();
    assert_int_equal(test_bytes_write(&json, folder.path, "tokenizer.json"), BT_OK);
    assert_int_equal(test_bytes_write(&config, folder.path, "tokenizer_config.json"), BT_OK);
    uint64_t nth = 1;
    for (bool done = false; !done; nth++) {
        tokenizer *t = NULL;
        token_list list = {0};
        bt_error error = {0};
        bt_fault_set(BT_FAULT_ALLOC, nth);
        bt_status status = tokenizer_load(folder.path, &t, &error);
        if (status == BT_OK) status = tokenizer_encode(t, text, sizeof text, PLAIN, &list);
        if (status == BT_OK)
            status = tokenizer_encode_chat(t, &message, 1, (chat_options){0}, &list, &error);
        done = bt_fault_visits(BT_FAULT_ALLOC) < nth;
        bt_fault_set(BT_FAULT_ALLOC, 0);
        assert_int_equal(status, done ? BT_OK : BT_ERR_WORKER_MEMORY);
        token_list_fini(&list);
        tokenizer_destroy(t);
    }
    assert_true(nth > 10);
    test_folder_remove(&folder);
    test_bytes_fini(&json);
    test_bytes_fini(&config);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lowest_rank_first_and_leftmost),
        cmocka_unit_test(short_and_long_pieces_equal_the_reference),
        cmocka_unit_test(whole_pieces_before_merges),
        cmocka_unit_test(bytes_that_the_vocabulary_lacks),
        cmocka_unit_test(added_tokens_are_found_first),
        cmocka_unit_test(normalisation_is_between_the_two_walks),
        cmocka_unit_test(post_processor_puts_tokens_around),
        cmocka_unit_test(limits_leave_the_list_alone),
        cmocka_unit_test(tokens_have_bytes_and_holes_have_none),
        cmocka_unit_test(long_runs_take_no_longer_than_long_texts),
        cmocka_unit_test(fingerprints_follow_what_decides_ids),
        cmocka_unit_test(threads_share_a_tokenizer),
#ifdef BT_FAULT
        cmocka_unit_test(every_failed_allocation_is_an_error),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
