/* The decode core against a real prefill core, the loopback mover and a scripted router. */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "world.h"

static world_stream stream; /* large; the tests run one after the other */

static void rows_equal_one_process(void **state) {
    (void)state;
    for (uint32_t mode = SAMPLER_MASK_OFF; mode <= SAMPLER_MASK_SUPPORT; mode++) {
        world *w = world_create(NULL);
        world_register(w);
        const proto_generation g = world_generation(20, mode);
        const proto_attempt a = world_start(w, 100, &g, UINT64_MAX);
        world_settle(w);
        world_read(w, a, &stream);
        assert_true(stream.has_finish);
        assert_int_equal(stream.last.finish, PROTO_FINISH_LENGTH);
        world_expect_rows(w, &stream, 100, &g, 20);
        world_expect_empty(w);
        world_destroy(w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_equal_one_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
