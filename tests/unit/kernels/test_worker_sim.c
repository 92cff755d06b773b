/* What the sim device's options become, and what of them is refused. */
#include "kernels/worker_sim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/sim_rows.h"
#include "kernels/worker_model.h"

static bt_sim_settings good(void) {
    return (bt_sim_settings){.step_us = 10,
                             .vocab_size = 1000,
                             .context_tokens = 500,
                             .support = "20",
                             .seed = 1,
                             .layers = 4,
                             .kv_bytes = 256};
}

static void options_become_a_card_and_a_layout(void **state) {
    (void)state;
    const bt_sim_settings settings = good();
    model_card card;
    kv_page_layout kv;
    assert_int_equal(worker_sim_describe(&settings, 32, KV_DTYPE_BF16, &card, &kv, NULL), BT_OK);
    assert_string_equal(card.name, "sim");
    assert_int_equal(card.eos_count, 0);
    assert_int_equal(card.geometry.vocab_size, 1000);
    assert_int_equal(card.geometry.context_tokens, 500);
    assert_int_equal(kv.head_dim, 16);
    assert_int_equal(kv_page_bytes(&kv), 32 * 256);
    assert_int_equal(worker_sim_describe(&settings, 32, KV_DTYPE_F32, &card, &kv, NULL), BT_OK);
    assert_int_equal(kv_page_bytes(&kv), 32 * 256);
}

static void fingerprint(bt_sim_settings settings, uint8_t *out) {
    model_card card;
    kv_page_layout kv;
    assert_int_equal(worker_sim_describe(&settings, 32, KV_DTYPE_BF16, &card, &kv, NULL), BT_OK);
    memcpy(out, card.fingerprint, MODEL_FINGERPRINT_BYTES);
}

/* Who would not draw alike is another model; how long a step takes is nobody else's business. */
static void the_fingerprint_is_of_what_shapes_rows(void **state) {
    (void)state;
    uint8_t base[MODEL_FINGERPRINT_BYTES], other[MODEL_FINGERPRINT_BYTES];
    fingerprint(good(), base);
    bt_sim_settings same = good();
    same.step_us = 99;
    same.token_us = 99;
    same.report_ms = 99;
    same.checks_pages = true;
    fingerprint(same, other);
    assert_memory_equal(base, other, sizeof base);
    bt_sim_settings changed[6];
    for (size_t i = 0; i < 6; i++)
        changed[i] = good();
    changed[0].vocab_size = 1001;
    changed[1].context_tokens = 501;
    changed[2].support = "realistic";
    changed[3].seed = 2;
    changed[4].layers = 8;
    changed[5].kv_bytes = 512;
    for (size_t i = 0; i < 6; i++) {
        fingerprint(changed[i], other);
        assert_memory_not_equal(base, other, sizeof base);
    }
}

static void supports_are_a_number_or_realistic(void **state) {
    (void)state;
    bt_sim_settings settings = good();
    bt_error error = {0};
    uint32_t width = 7;
    settings.support = "realistic";
    assert_int_equal(worker_sim_read_support(&settings, &width, &error), BT_OK);
    assert_int_equal(width, 0);
    settings.support = "1000";
    assert_int_equal(worker_sim_read_support(&settings, &width, &error), BT_OK);
    assert_int_equal(width, 1000);
    static const char *const bad[] = {
        "0", "1001", "", "-1", " 5", "5x", "+5", "real", "99999999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        settings.support = bad[i];
        assert_int_equal(worker_sim_read_support(&settings, &width, &error), BT_ERR_CALLER_CONFIG);
        assert_ptr_equal(strstr(error.text, "--sim-support is realistic, or 1 to 1000 ids"),
                         error.text);
    }
    settings.vocab_size = 1 << 20;
    settings.support = "131073";
    assert_int_equal(worker_sim_read_support(&settings, &width, &error), BT_ERR_CALLER_CONFIG);
    settings.support = "131072";
    assert_int_equal(worker_sim_read_support(&settings, &width, &error), BT_OK);
    assert_int_equal(width, SIM_ROWS_WIDTH_MAX);
}

static void bytes_that_do_not_divide_are_refused(void **state) {
    (void)state;
    bt_sim_settings settings = good();
    bt_error error = {0};
    model_card card;
    kv_page_layout kv;
    settings.kv_bytes = 255;
    assert_int_equal(worker_sim_describe(&settings, 32, KV_DTYPE_BF16, &card, &kv, &error),
                     BT_ERR_CALLER_CONFIG);
    assert_string_equal(error.text, "--sim-kv-bytes 255 is not a multiple of 16 (a key and a value "
                                    "in each of 4 layers) of at least 16");
    settings.layers = 1;
    settings.kv_bytes = 12;
    assert_int_equal(worker_sim_describe(&settings, 32, KV_DTYPE_BF16, &card, &kv, &error),
                     BT_ERR_CALLER_CONFIG);
}

/* The whole way of a worker program: load, start, a step, stop. */
static void a_worker_runs_on_it(void **state) {
    (void)state;
    static uint8_t pages[2 * 32 * 256];
    worker_model w = {0};
    bt_error error = {0};
    const bt_compute_settings settings = {
        .device = BT_COMPUTE_SIM, .page_tokens = 32, .sim = good()};
    const worker_model_limits limits = {.tokens_max = 1, .rows_max = 1};
    assert_int_equal(worker_model_load(&w, "test", &settings, &error), BT_OK);
    assert_string_equal(w.numerics, "sim/exact/1");
    int fd = -1;
    assert_int_equal(worker_model_start(&w, &limits, pages, 2, &fd, &error), BT_OK);
    assert_true(fd >= 0);
    assert_string_equal(w.compute->ops->name, "sim");
    worker_model_poll(&w); /* nothing to report */
    worker_model_fini(&w);
    assert_null(w.compute);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_become_a_card_and_a_layout),
        cmocka_unit_test(the_fingerprint_is_of_what_shapes_rows),
        cmocka_unit_test(supports_are_a_number_or_realistic),
        cmocka_unit_test(bytes_that_do_not_divide_are_refused),
        cmocka_unit_test(a_worker_runs_on_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
