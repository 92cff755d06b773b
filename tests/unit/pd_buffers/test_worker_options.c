/* The options that both worker programs share, around the rows of a role. */
#include "pd_buffers/worker_options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/assert.h"

typedef struct test_worker {
    worker_settings settings;
    uint32_t hands;
} test_worker;

static const bt_option hands_row = {.name = "hands",
                                    .type = BT_OPTION_U32,
                                    .default_text = "2",
                                    .min = 1,
                                    .max = 4,
                                    .help = "How many hands there are.",
                                    .offset = offsetof(test_worker, hands)};
static const worker_options_role role = {
    .program = "baton-test", .summary = "Is tested.", .rows = &hands_row, .count = 1};

static worker_options options;
static test_worker worker;

static int tear_down(void **state) {
    (void)state;
    worker_options_fini(&options);
    worker = (test_worker){0};
    return 0;
}

/* Up to four arguments after the program's name; the exit status, or -1 to go on. */
static int start_with(const char *first, const char *second, const char *third,
                      const char *fourth) {
    const char *const given[] = {"baton-test", first, second, third, fourth};
    char texts[BT_ARRAY_COUNT(given)][64];
    char *argv[BT_ARRAY_COUNT(given) + 1] = {0};
    int argc = 0;
    for (size_t i = 0; i < BT_ARRAY_COUNT(given) && given[i] != NULL; i++) {
        (void)snprintf(texts[i], sizeof texts[i], "%s", given[i]);
        argv[argc++] = texts[i];
    }
    int status = -1;
    return worker_options_start(&options, &role, argc, argv, &worker, &status) ? -1 : status;
}

static int start(const char *first, const char *second, const char *third) {
    return start_with("--model=m", first, second, third);
}

static void rows_of_the_role_are_among_the_others(void **state) {
    (void)state;
    assert_int_equal(start("--hands=3", "--log-level=warn", "--threads=5"), -1);
    assert_int_equal(worker.hands, 3);
    assert_int_equal(worker.settings.compute.threads, 5);
    assert_int_equal(worker.settings.log_level, 1);
    assert_string_equal(worker.settings.compute.model, "m");
    assert_string_equal(worker.settings.router, "127.0.0.1:30001");
    assert_int_equal(worker.settings.compute.page_tokens, 32);
    for (size_t i = 1; i < options.table.count; i++) {
        if (strcmp(options.rows[i].name, "hands") != 0) continue;
        assert_string_equal(options.rows[i - 1].name, "sim-report-ms");
        assert_string_equal(options.rows[i + 1].name, "sampling-mask-max-tokens");
        return;
    }
    fail_msg("the role's row is not in the table");
}

static void bounds_of_the_role_are_kept(void **state) {
    (void)state;
    assert_int_equal(start("--hands=5", NULL, NULL), 2);
    assert_null(options.parsed);
}

static void settings_that_cannot_be_used_are_named(void **state) {
    (void)state;
    proto_address router;
    bt_error error = {0};
    assert_int_equal(start("--page-tokens=48", NULL, NULL), -1);
    assert_int_equal(worker_options_check(&options, &worker.settings, &router, &error),
                     BT_ERR_CALLER_CONFIG);
    assert_string_equal(error.text, "--page-tokens is 16, 32 or 64, not 48");
    worker.settings.compute.page_tokens = 64;
    assert_int_equal(worker_options_check(&options, &worker.settings, &router, &error), BT_OK);
    worker.settings.router = "nowhere";
    assert_int_not_equal(worker_options_check(&options, &worker.settings, &router, &error), BT_OK);
    assert_ptr_equal(strstr(error.text, "--router: "), error.text);
}

static void assert_refused(const char *sentence) {
    proto_address router;
    bt_error error = {0};
    assert_int_equal(worker_options_check(&options, &worker.settings, &router, &error),
                     BT_ERR_CALLER_CONFIG);
    assert_string_equal(error.text, sentence);
    worker_options_fini(&options);
    worker = (test_worker){0};
}

static void every_device_has_its_options_and_no_others(void **state) {
    (void)state;
    proto_address router;
    bt_error error = {0};
    assert_int_equal(start_with(NULL, NULL, NULL, NULL), -1);
    assert_refused("option --model is required with --device host; see --help");
    assert_int_equal(start("--sim-seed=1", NULL, NULL), -1);
    assert_refused("--sim-seed is for --device sim only");
    assert_int_equal(start("--device=sim", NULL, NULL), -1);
    assert_refused("--model is not for --device sim, which has no model file");
    assert_int_equal(start("--device=cuda", NULL, NULL), -1);
    assert_refused("--device cuda is not built yet");
    assert_int_equal(start("--device=tpu", NULL, NULL), 2);
    worker = (test_worker){0};
    assert_int_equal(start_with("--device=sim", "--sim-support=20", "--sim-step-us=7", NULL), -1);
    assert_int_equal(worker_options_check(&options, &worker.settings, &router, &error), BT_OK);
    assert_int_equal(worker.settings.compute.sim.step_us, 7);
    assert_string_equal(worker.settings.compute.sim.support, "20");
    assert_int_equal(worker.settings.compute.sim.vocab_size, 151936);
    assert_null(worker.settings.compute.model);
}

static void pages_go_by_number_or_by_bytes(void **state) {
    (void)state;
    uint32_t count = 0;
    bt_error error = {0};
    assert_int_equal(start("--kv-pages=7", "--kv-bytes=1M", NULL), -1);
    assert_int_equal(worker_options_page_count(&worker.settings, 1000, &count, &error), BT_OK);
    assert_int_equal(count, 7);
    worker.settings.kv_pages = 0;
    assert_int_equal(worker_options_page_count(&worker.settings, 1000, &count, &error), BT_OK);
    assert_int_equal(count, (1 << 20) / 1000);
    worker.settings.kv_bytes = 0; /* by the memory that is free, at most 1 GiB */
    assert_int_equal(worker_options_page_count(&worker.settings, 1, &count, &error), BT_OK);
    assert_in_range(count, 1, 1u << 30);
}

static void no_page_and_too_many_are_refused(void **state) {
    (void)state;
    uint32_t count = 9;
    bt_error error = {0};
    assert_int_equal(start("--kv-bytes=999", NULL, NULL), -1);
    assert_int_equal(worker_options_page_count(&worker.settings, 1000, &count, &error),
                     BT_ERR_CALLER_CONFIG);
    assert_string_equal(error.text, "0 KV pages of 1000 bytes cannot be used; see --kv-bytes");
    worker.settings.kv_bytes = UINT64_C(1) << 40;
    assert_int_equal(worker_options_page_count(&worker.settings, 1, &count, &error),
                     BT_ERR_CALLER_CONFIG);
    assert_int_equal(count, 9);
}

static void only_what_was_given_is_pinned(void **state) {
    (void)state;
    proto_hello hello = {0};
    assert_int_equal(start("--kv-dtype=f32", NULL, NULL), -1);
    worker_options_fill_record(&options, &worker.settings, &hello);
    assert_string_equal(hello.record.kv_dtype, "f32");
    assert_int_equal(hello.record.page_tokens, 32);
    assert_int_equal(hello.pins, 0);
    worker_options_fini(&options);

    hello = (proto_hello){0};
    assert_int_equal(start("--kv-checksum=full", "--sampling-mask-max-tokens=9", NULL), -1);
    worker_options_fill_record(&options, &worker.settings, &hello);
    assert_int_equal(hello.record.kv_checksum, RECORD_CHECKSUM_FULL + 1);
    assert_int_equal(hello.record.sampling_mask_max_tokens, 9);
    assert_int_equal(hello.pins, 1u << RECORD_KV_CHECKSUM | 1u << RECORD_SAMPLING_MASK_MAX_TOKENS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(rows_of_the_role_are_among_the_others, tear_down),
        cmocka_unit_test_teardown(bounds_of_the_role_are_kept, tear_down),
        cmocka_unit_test_teardown(settings_that_cannot_be_used_are_named, tear_down),
        cmocka_unit_test_teardown(every_device_has_its_options_and_no_others, tear_down),
        cmocka_unit_test_teardown(pages_go_by_number_or_by_bytes, tear_down),
        cmocka_unit_test_teardown(no_page_and_too_many_are_refused, tear_down),
        cmocka_unit_test_teardown(only_what_was_given_is_pinned, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
