/* Rows that wait for each other on their way to the router: how many frames a reply takes, and what
 * never waits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "proto/row_stream.h"
#include "tests/unit/workers/world.h"

enum { ROWS = 80 /* fit in one block */, PROMPT = 20 };

static world_stream stream; /* large; the tests run one after the other */

static world *create(uint32_t emission_rows) {
    world *w = world_create(&(world_options){.support_max = 64,
                                             .cap = 64,
                                             .context_tokens = 4096,
                                             .decode_pages = 256,
                                             .emission_rows = emission_rows});
    world_register(w);
    return w;
}

/* The first row and the end go alone whatever the number is. */
static void frames_hold_as_many_rows_as_may_wait(void **state) {
    (void)state;
    const struct {
        uint32_t emission_rows, frames;
    } cases[] = {
        {0, ROWS},
        {1, ROWS},
        {2, 1 + (ROWS - 1) / 2 + 1}, /* 1, 39 x 2, and the last one with the finish */
        {50, 1 + 1 + 1},             /* 1, 50, 29 */
        {1000, 1 + 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        world *w = create(cases[i].emission_rows);
        const proto_generation g = world_generation(ROWS, SAMPLER_MASK_OFF);
        const proto_attempt a = world_start(w, PROMPT, &g, UINT64_MAX);
        world_settle(w);
        world_read(w, a, &stream);
        assert_int_equal(stream.frames, cases[i].frames);
        world_expect_rows(w, &stream, PROMPT, &g, ROWS);
        world_expect_empty(w);
        world_destroy(w);
    }
}

/* Wide rows are many bytes soon: half a queue does not wait, so that none is parked for rows that
 * could have gone. */
static void many_bytes_do_not_wait(void **state) {
    (void)state;
    world *w = create(1000);
    const proto_generation g = world_generation(1000, SAMPLER_MASK_SUPPORT);
    const proto_attempt a = world_start(w, PROMPT, &g, UINT64_MAX);
    world_settle(w);
    world_read(w, a, &stream);
    assert_true(stream.bytes > 4 * 64 * 1024);
    assert_in_range(stream.frames, 4, 40);
    world_expect_rows(w, &stream, PROMPT, &g, 1000);
    world_expect_empty(w);
    world_destroy(w);
}

/* Samples that are in a step at different times, and rows as wide as the cap allows: with the
 * smallest queue that there is, nobody is left out of a step while the connection takes all. */
static void nobody_is_parked_while_rows_can_go(void **state) {
    (void)state;
    enum { SAMPLES = 3, LENGTH = 100 };
    uint64_t steps[2];
    for (size_t i = 0; i < 2; i++) {
        world *w = world_create(&(world_options){.support_max = 64,
                                                 .cap = 64,
                                                 .context_tokens = 4096,
                                                 .decode_pages = 256,
                                                 .emission_rows = 50,
                                                 .queue_bytes = i == 0 ? 1024 * 1024 : 1});
        const proto_generation g = world_generation(LENGTH, SAMPLER_MASK_SUPPORT);
        proto_attempt attempts[SAMPLES];
        world_register(w);
        for (uint32_t k = 0; k < SAMPLES; k++)
            attempts[k] = world_start(w, PROMPT + k, &g, UINT64_MAX);
        world_settle(w);
        for (uint32_t k = 0; k < SAMPLES; k++) {
            world_read(w, attempts[k], &stream);
            world_expect_rows(w, &stream, PROMPT + k, &g, LENGTH);
        }
        steps[i] = world_decode_view(w).steps_total;
        world_expect_empty(w);
        world_destroy(w);
    }
    assert_int_equal(steps[1], steps[0]);
}

/* What was due when credit cut it is due when credit comes, though fewer rows are left of it. */
static void credit_does_not_make_due_rows_wait_again(void **state) {
    (void)state;
    world *w = create(50);
    const proto_generation g = world_generation(ROWS, SAMPLER_MASK_OFF);
    const size_t row = ROW_RECORD_HEADER_BYTES;
    const proto_attempt a = world_start(w, PROMPT, &g, row * 30 + 4);
    world_settle(w);
    world_read(w, a, &stream);
    assert_int_equal(stream.bytes, row * 30 + 4);
    world_credit(w, a, row * 21 - 4);
    world_settle(w);
    world_read(w, a, &stream);
    assert_int_equal(stream.bytes, row * 51);
    world_credit(w, a, UINT64_MAX / 2);
    world_settle(w);
    world_read(w, a, &stream);
    world_expect_rows(w, &stream, PROMPT, &g, ROWS);
    world_expect_empty(w);
    world_destroy(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frames_hold_as_many_rows_as_may_wait),
        cmocka_unit_test(many_bytes_do_not_wait),
        cmocka_unit_test(nobody_is_parked_while_rows_can_go),
        cmocka_unit_test(credit_does_not_make_due_rows_wait_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
