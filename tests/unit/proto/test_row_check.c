/* What a row must be for its request: each thing that can be wrong is named, and nothing else is.
 */
#include "proto/row_check.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { CAP = 100, VOCAB = 5000, LIMIT = 4000, TOPS = 3, ASKED = 2 };

typedef struct fixture {
    row_expectation expect;
    token_row row;
    int32_t ids[CAP + 1];
    float logprobs[CAP + 1];
    row_top top[TOPS + 1];
    float asked[ASKED + 1];
} fixture;

/* A right row of `count` entries whose token is entry `drawn`. */
static void prepare(fixture *f, uint32_t mask_mode, uint32_t count, uint32_t drawn) {
    memset(f, 0, sizeof *f);
    for (uint32_t i = 0; i <= CAP; i++) {
        f->ids[i] = (int32_t)(LIMIT - 1 - 17 * i);
        f->logprobs[i] = -0.125f * (float)i;
    }
    for (uint32_t i = 0; i <= TOPS; i++)
        f->top[i] = (row_top){.id = (int32_t)i, .logprob = -(float)i};
    for (uint32_t i = 0; i <= ASKED; i++)
        f->asked[i] = i == 0 ? -INFINITY : -2.0f;
    f->expect = (row_expectation){.cap = CAP,
                                  .mask_mode = mask_mode,
                                  .has_logprob = 1,
                                  .vocab_size = VOCAB,
                                  .vocab_limit = LIMIT,
                                  .top_count = TOPS,
                                  .id_logprob_count = ASKED};
    const bool has_mask = mask_mode != ROW_MASK_OFF;
    f->row = (token_row){
        .token = f->ids[drawn],
        .mask_mode = mask_mode,
        .has_logprob = 1,
        .token_logprob = -3.0f,
        .selected_logprob = has_mask ? f->logprobs[drawn] : 0.0f,
        .support_count = has_mask ? count : 0,
        .support_size = has_mask ? count : 0,
        .support_ids = has_mask ? f->ids : NULL,
        .support_logprobs = mask_mode == ROW_MASK_SUPPORT ? f->logprobs : NULL,
        .top_count = TOPS,
        .top = f->top,
        .id_logprob_count = ASKED,
        .id_logprobs = f->asked,
    };
}

static void assert_fault(const fixture *f, const char *wanted) {
    const char *fault = row_check(&f->expect, &f->row);
    if (fault == NULL) fail_msg("nothing is wrong, not even '%s'", wanted);
    if (strstr(fault, wanted) == NULL) fail_msg("'%s' is not '%s'", fault, wanted);
}

static void assert_good(const fixture *f) {
    const char *fault = row_check(&f->expect, &f->row);
    if (fault != NULL) fail_msg("'%s'", fault);
}

static void right_rows_pass(void **state) {
    (void)state;
    fixture f;
    for (uint32_t mode = ROW_MASK_OFF; mode <= ROW_MASK_SUPPORT; mode++) {
        for (uint32_t count = 1; count <= CAP; count++) {
            for (uint32_t drawn = 0; drawn < count; drawn += 1 + count / 5) {
                prepare(&f, mode, count, drawn);
                assert_good(&f);
            }
        }
    }
    prepare(&f, ROW_MASK_SUPPORT, 3, 1);
    f.expect.vocab_limit = f.expect.vocab_size = 0; /* nothing is known */
    f.ids[2] = INT32_MAX;
    assert_good(&f);
    prepare(&f, ROW_MASK_SUPPORT, CAP, 5);
    f.expect.mask_bounded = 1;
    f.row.support_size = LIMIT;
    assert_good(&f);
    prepare(&f, ROW_MASK_OFF, 0, 0);
    f.row.has_logprob = f.expect.has_logprob = 0;
    f.row.token_logprob = NAN; /* of no meaning */
    assert_good(&f);
}

/* At each place of rows of each length around the block of the loop. */
static void the_support_is_looked_at_everywhere(void **state) {
    (void)state;
    static const uint32_t counts[] = {1, 2, 15, 16, 17, 31, 32, 33, 48, CAP};
    static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY, 1e-30f, 1.0f};
    fixture f;
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        const uint32_t count = counts[c];
        for (uint32_t at = 0; at < count; at++) {
            const uint32_t drawn = (at + 1) % count;
            prepare(&f, ROW_MASK_SUPPORT, count, drawn);
            f.ids[at] = LIMIT;
            assert_fault(&f, "support id outside");
            f.ids[at] = -1;
            assert_fault(&f, "support id outside");
            prepare(&f, ROW_MASK_SELECTED, count, at);
            assert_good(&f);
            f.ids[at] = 3;
            assert_fault(&f, "not in its support");
            for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
                prepare(&f, ROW_MASK_SUPPORT, count, drawn);
                f.logprobs[at] = bad[i];
                assert_fault(&f, "a support log-probability");
            }
            prepare(&f, ROW_MASK_SUPPORT, count, at);
            f.logprobs[at] -= 0.5f;
            assert_fault(&f, "not its entry's");
        }
    }
    /* What lies behind the support is nobody's concern. */
    prepare(&f, ROW_MASK_SUPPORT, 17, 16);
    f.ids[17] = -1;
    f.logprobs[17] = NAN;
    assert_good(&f);
    f.row.token = f.ids[18];
    assert_fault(&f, "not in its support");
}

typedef void (*change)(fixture *f);

static void other_mode(fixture *f) {
    f->expect.mask_mode = ROW_MASK_SELECTED;
}
static void no_logprob(fixture *f) {
    f->row.has_logprob = 0;
}
static void a_logprob_too_many(fixture *f) {
    f->expect.has_logprob = 0;
}
static void token_too_large(fixture *f) {
    f->row.token = LIMIT;
}
static void token_negative(fixture *f) {
    f->row.token = -1;
}
static void token_past_the_model(fixture *f) {
    f->expect.vocab_limit = 0;
    f->row.token = VOCAB;
}
static void token_logprob_nan(fixture *f) {
    f->row.token_logprob = NAN;
}
static void token_logprob_positive(fixture *f) {
    f->row.token_logprob = 0.5f;
}
static void token_logprob_infinite(fixture *f) {
    f->row.token_logprob = -INFINITY;
}
static void no_support(fixture *f) {
    f->row.support_count = 0;
}
static void too_wide(fixture *f) {
    f->row.support_count = f->row.support_size = CAP + 1;
}
static void size_below(fixture *f) {
    f->row.support_size--;
}
static void cut_in_exact_mode(fixture *f) {
    f->row.support_count = CAP;
    f->row.support_size = CAP + 1;
}
static void cut_below_the_cap(fixture *f) {
    f->expect.mask_bounded = 1;
    f->row.support_size = CAP + 1;
}
static void larger_than_the_vocabulary(fixture *f) {
    f->expect.mask_bounded = 1;
    f->row.support_count = CAP;
    f->row.support_size = LIMIT + 1;
}
static void selected_nan(fixture *f) {
    f->row.selected_logprob = NAN;
}
static void selected_positive(fixture *f) {
    f->row.selected_logprob = 1e-10f;
}
static void selected_other(fixture *f) {
    f->row.selected_logprob = f->logprobs[3];
}
static void too_few_tops(fixture *f) {
    f->row.top_count--;
}
static void too_many_tops(fixture *f) {
    f->row.top_count++;
}
static void top_outside(fixture *f) {
    f->top[TOPS - 1].id = LIMIT;
}
static void top_nan(fixture *f) {
    f->top[TOPS - 1].logprob = NAN;
}
static void top_infinite(fixture *f) {
    f->top[0].logprob = INFINITY;
}
static void too_few_asked(fixture *f) {
    f->row.id_logprob_count--;
}
static void too_many_asked(fixture *f) {
    f->row.id_logprob_count++;
}
static void asked_nan(fixture *f) {
    f->asked[1] = NAN;
}
static void asked_positive(fixture *f) {
    f->asked[1] = 2.0f;
}

static void each_fault_has_its_name(void **state) {
    (void)state;
    static const struct {
        change change;
        const char *name;
    } cases[] = {
        {other_mode, "another mask mode"},
        {no_logprob, "missing or not asked for"},
        {a_logprob_too_many, "missing or not asked for"},
        {token_too_large, "a token outside the vocabulary"},
        {token_negative, "a token outside the vocabulary"},
        {token_past_the_model, "a token outside the vocabulary"},
        {token_logprob_nan, "a token log-probability"},
        {token_logprob_positive, "a token log-probability"},
        {token_logprob_infinite, "a token log-probability"},
        {no_support, "a mask without a support"},
        {too_wide, "wider than the cap"},
        {size_below, "size below"},
        {cut_in_exact_mode, "exact mode"},
        {cut_below_the_cap, "truncated below the cap"},
        {larger_than_the_vocabulary, "larger than the vocabulary"},
        {selected_nan, "a selected log-probability that is none"},
        {selected_positive, "a selected log-probability that is none"},
        {selected_other, "not its entry's"},
        {too_few_tops, "another number of top"},
        {too_many_tops, "another number of top"},
        {top_outside, "a top token outside"},
        {top_nan, "a top log-probability"},
        {top_infinite, "a top log-probability"},
        {too_few_asked, "another number of asked"},
        {too_many_asked, "another number of asked"},
        {asked_nan, "an asked log-probability"},
        {asked_positive, "an asked log-probability"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture f;
        prepare(&f, ROW_MASK_SUPPORT, 50, 7);
        assert_good(&f);
        cases[i].change(&f);
        assert_fault(&f, cases[i].name);
    }
    fixture f;
    prepare(&f, ROW_MASK_OFF, 0, 0);
    f.row.support_size = 1;
    assert_fault(&f, "without a mask");
}

/* A small vocabulary has fewer top log-probabilities than were asked for, and not fewer still. */
static void tops_are_as_many_as_there_are_ids(void **state) {
    (void)state;
    fixture f;
    prepare(&f, ROW_MASK_OFF, 0, 0);
    f.row.token = 0;
    f.expect.vocab_limit = 2;
    f.row.top_count = 2;
    assert_good(&f);
    f.row.top_count = 1;
    assert_fault(&f, "another number of top");
}

static void repeated_ids_are_found(void **state) {
    (void)state;
    static uint8_t seen[(VOCAB + 7) / 8];
    static const uint8_t none[sizeof seen];
    fixture f;
    assert_int_equal(row_seen_bytes(VOCAB), sizeof seen);
    for (uint32_t a = 0; a < CAP; a++) {
        for (uint32_t b = 0; b < CAP; b += 1 + a % 7) {
            prepare(&f, ROW_MASK_SELECTED, CAP, 0);
            f.ids[a] = f.ids[b];
            assert_int_equal(row_ids_repeat(f.ids, CAP, seen), a != b);
            assert_memory_equal(seen, none, sizeof seen);
        }
    }
    f.ids[0] = VOCAB - 1;
    f.ids[1] = 0;
    assert_false(row_ids_repeat(f.ids, 2, seen));
    assert_false(row_ids_repeat(f.ids, 0, seen));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_rows_pass),
        cmocka_unit_test(the_support_is_looked_at_everywhere),
        cmocka_unit_test(each_fault_has_its_name),
        cmocka_unit_test(tops_are_as_many_as_there_are_ids),
        cmocka_unit_test(repeated_ids_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
