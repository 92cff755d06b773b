/* Words of an attempt: parts in order, and everything else by name. */
#include "pd_buffers/attempt_words.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum { VOCAB = 100 };

/* Three prompt ids, two biases, two ids asked for. */
static const union {
    int32_t words[9];
    struct {
        int32_t prompt[3], bias_ids[2];
        float biases[2];
        int32_t ids[2];
    } parts;
} whole = {.parts = {{5, 99, 5}, {0, 7}, {-1.5f, 3.0f}, {7, 8}}};

static proto_generation make_generation(void) {
    proto_generation g = proto_generation_default();
    g.bias_count = 2;
    g.logprob_id_count = 2;
    return g;
}

static void parts_come_together(void **state) {
    (void)state;
    const proto_generation g = make_generation();
    for (uint32_t step = 1; step <= 9; step++) {
        attempt_words words;
        bt_error error;
        assert_int_equal(attempt_words_init(&g, 3, &words), BT_OK);
        for (uint32_t at = 0; at < 9; at += step) {
            const uint32_t count = step < 9 - at ? step : 9 - at;
            assert_false(attempt_words_are_complete(&words));
            assert_int_equal(
                attempt_words_add(&words, at, whole.words + at, 4 * count, VOCAB, &error), BT_OK);
        }
        assert_true(attempt_words_are_complete(&words));
        assert_memory_equal(attempt_words_prompt(&words), whole.parts.prompt, 12);
        assert_memory_equal(attempt_words_bias_ids(&words), whole.parts.bias_ids, 8);
        assert_memory_equal(attempt_words_biases(&words), whole.parts.biases, 8);
        assert_memory_equal(attempt_words_logprob_ids(&words), whole.parts.ids, 8);
        assert_int_equal(attempt_words_add(&words, 9, whole.words, 4, VOCAB, &error),
                         BT_ERR_REQUEST_DUPLICATE);
        attempt_words_fini(&words);
        attempt_words_fini(&words);
    }
}

static void a_prompt_alone_has_no_other_parts(void **state) {
    (void)state;
    const proto_generation g = proto_generation_default();
    attempt_words words;
    bt_error error;
    assert_int_equal(attempt_words_init(&g, 3, &words), BT_OK);
    assert_int_equal(attempt_words_add(&words, 0, whole.words, 12, VOCAB, &error), BT_OK);
    assert_true(attempt_words_are_complete(&words));
    assert_null(attempt_words_bias_ids(&words));
    assert_null(attempt_words_biases(&words));
    assert_null(attempt_words_logprob_ids(&words));
    attempt_words_fini(&words);
}

static void what_is_wrong_is_named(void **state) {
    (void)state;
    static const uint32_t not_a_number = 0x7fc00000u;
    static const struct {
        uint32_t at;
        int32_t word;
        const char *what;
    } cases[] = {
        {0, -1, "prompt token -1"},
        {2, VOCAB, "prompt token 100"},
        {3, VOCAB, "biased id 100"},
        {4, 0, "biased id 0 comes twice"},
        {8, 7, "log-probabilities 7 comes"},
        {7, -3, "id of log-probabilities -3"},
        {5, (int32_t)0x7f800000, "not finite"},
    };
    const proto_generation g = make_generation();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t changed[9];
        attempt_words words;
        bt_error error;
        memcpy(changed, whole.words, sizeof changed);
        changed[cases[i].at] = cases[i].word;
        assert_int_equal(attempt_words_init(&g, 3, &words), BT_OK);
        assert_int_equal(attempt_words_add(&words, 0, changed, sizeof changed, VOCAB, &error),
                         BT_ERR_REQUEST_INVALID);
        assert_non_null(strstr(error.text, cases[i].what));
        attempt_words_fini(&words);
    }
    attempt_words words;
    bt_error error;
    int32_t changed[9];
    memcpy(changed, whole.words, sizeof changed);
    memcpy(&changed[6], &not_a_number, 4);
    assert_int_equal(attempt_words_init(&g, 3, &words), BT_OK);
    assert_int_equal(attempt_words_add(&words, 1, changed, 4, VOCAB, &error),
                     BT_ERR_REQUEST_DUPLICATE);
    assert_int_equal(attempt_words_add(&words, 0, changed, 3, VOCAB, &error),
                     BT_ERR_REQUEST_INVALID);
    assert_int_equal(attempt_words_add(&words, 0, changed, 40, VOCAB, &error),
                     BT_ERR_REQUEST_INVALID);
    assert_int_equal(attempt_words_add(&words, 0, changed, 36, VOCAB, &error),
                     BT_ERR_REQUEST_INVALID);
    attempt_words_fini(&words);
    /* A second part that is longer than what is missing. */
    assert_int_equal(attempt_words_init(&g, 3, &words), BT_OK);
    assert_int_equal(attempt_words_add(&words, 0, whole.words, 32, VOCAB, &error), BT_OK);
    assert_int_equal(attempt_words_add(&words, 8, whole.words + 7, 8, VOCAB, &error),
                     BT_ERR_REQUEST_INVALID);
    assert_int_equal(words.received, 8);
    attempt_words_fini(&words);
}

/* The i-th sample has the i-th output of splitmix64 that starts at the seed; the outputs for
 * 1234567 are the generator's published ones. */
static void sample_seeds_have_known_answers(void **state) {
    (void)state;
    static const uint64_t known[] = {1234567,
                                     6457827717110365317u,
                                     3203168211198807973u,
                                     9817491932198370423u,
                                     4593380528125082431u,
                                     16408922859458223821u};
    for (uint32_t i = 0; i < sizeof known / sizeof known[0]; i++)
        assert_true(proto_sample_seed(1234567, i) == known[i]);
    assert_true(proto_sample_seed(UINT64_MAX, 0) == UINT64_MAX);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_come_together),
        cmocka_unit_test(a_prompt_alone_has_no_other_parts),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(sample_seeds_have_known_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
