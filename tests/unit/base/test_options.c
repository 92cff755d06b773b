/* Options: precedence, types, bounds, errors that name the option, and what is printed. */
#include "base/options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct values {
    const char *name;
    const char *model;
    uint32_t count;
    uint64_t seed;
    uint64_t memory;
    bool is_fast;
    uint32_t level;
    double ratio;
    const char *token;
} values;

static const char *const levels[] = {"error", "info", "debug", NULL};

static const bt_option rows[] = {
    {.name = "name",
     .type = BT_OPTION_STRING,
     .default_text = "baton",
     .help = "A name.",
     .offset = offsetof(values, name)},
    {.name = "model",
     .type = BT_OPTION_STRING,
     .value_name = "PATH",
     .help = "A path.",
     .offset = offsetof(values, model),
     .flags = BT_OPTION_REQUIRED},
    {.name = "count-max",
     .type = BT_OPTION_U32,
     .default_text = "4",
     .min = 1,
     .max = 64,
     .help = "A count.",
     .offset = offsetof(values, count)},
    {.name = "seed",
     .type = BT_OPTION_U64,
     .default_text = "0",
     .help = "A seed.",
     .offset = offsetof(values, seed)},
    {.name = "memory",
     .type = BT_OPTION_BYTES,
     .default_text = "1MiB",
     .help = "Some memory.",
     .offset = offsetof(values, memory)},
    {.name = "is-fast",
     .type = BT_OPTION_BOOL,
     .default_text = "false",
     .help = "Fast.",
     .offset = offsetof(values, is_fast)},
    {.name = "log-level",
     .type = BT_OPTION_ENUM,
     .default_text = "info",
     .choices = levels,
     .help = "A level.",
     .offset = offsetof(values, level)},
    {.name = "ratio",
     .type = BT_OPTION_DOUBLE,
     .default_text = "0.5",
     .double_min = 0,
     .double_max = 1,
     .help = "A ratio.",
     .offset = offsetof(values, ratio)},
    {.name = "token",
     .type = BT_OPTION_STRING,
     .help = "A secret.",
     .offset = offsetof(values, token),
     .flags = BT_OPTION_SECRET},
};
static const bt_option_table table = {.program = "baton-test",
                                      .version = "1.2.3",
                                      .summary = "A test.",
                                      .options = rows,
                                      .count = BT_ARRAY_COUNT(rows)};

#define ARGS(...)                                                                                  \
    (const char *const[]) {                                                                        \
        "baton-test", __VA_ARGS__                                                                  \
    }
#define PARSE(v, o, e, env, ...)                                                                   \
    bt_options_parse(&table, (int)BT_ARRAY_COUNT(((const char *const[]){"x", __VA_ARGS__})),       \
                     ARGS(__VA_ARGS__), env, v, o, e)

static void defaults_and_flags(void **state) {
    (void)state;
    values v = {0};
    bt_options *o = NULL;
    bt_error error;
    assert_int_equal(PARSE(&v, &o, &error, NULL, "--model", "a.gguf", "--count-max=7", "--is-fast",
                           "--memory", "2G", "--log-level", "debug", "--ratio=0.25"),
                     BT_OK);
    assert_int_equal(bt_options_get_action(o), BT_OPTIONS_RUN);
    assert_string_equal(v.name, "baton");
    assert_string_equal(v.model, "a.gguf");
    assert_int_equal(v.count, 7);
    assert_true(v.memory == UINT64_C(2) << 30);
    assert_true(v.is_fast);
    assert_int_equal(v.level, 2);
    assert_true(v.ratio == 0.25);
    assert_null(v.token);
    assert_true(bt_options_is_given(o, "count-max"));
    assert_false(bt_options_is_given(o, "seed"));
    bt_options_destroy(o);
    bt_options_destroy(NULL);
}

static void last_flag_counts_and_bools_take_words(void **state) {
    (void)state;
    values v = {0};
    bt_options *o = NULL;
    assert_int_equal(PARSE(&v, &o, NULL, NULL, "--model", "a", "--model=b", "--is-fast", "on",
                           "--is-fast", "false", "--seed", "18446744073709551615"),
                     BT_OK);
    assert_string_equal(v.model, "b");
    assert_false(v.is_fast);
    assert_true(v.seed == UINT64_MAX);
    bt_options_destroy(o);
}

static char *write_file(const char *text) {
    static char path[64];
    (void)strncpy(path, "/tmp/baton-options-XXXXXX", sizeof path - 1);
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    (void)close(fd);
    return path;
}

static void precedence_is_flag_environment_file_default(void **state) {
    (void)state;
    values v = {0};
    bt_options *o = NULL;
    bt_error error = {0};
    const char *const environment[] = {"BT_SEED=2", "BT_NAME=env", "BT_UNRELATED=1", "HOME=/",
                                       NULL};
    char *path = write_file("# comment\n\n seed = 1\nname=file\n count-max = 9 \nmodel = m # n\n");
    assert_int_equal(PARSE(&v, &o, &error, environment, "--seed", "3", "--config", path), BT_OK);
    assert_true(v.seed == 3);
    assert_string_equal(v.name, "env");
    assert_int_equal(v.count, 9);
    assert_string_equal(v.model, "m # n");
    assert_int_equal(bt_options_source(o, "seed"), BT_OPTION_FROM_FLAG);
    assert_int_equal(bt_options_source(o, "name"), BT_OPTION_FROM_ENVIRONMENT);
    assert_int_equal(bt_options_source(o, "count-max"), BT_OPTION_FROM_FILE);
    assert_int_equal(bt_options_source(o, "ratio"), BT_OPTION_FROM_DEFAULT);
    bt_options_destroy(o);
    (void)unlink(path);
}

static void file_errors_name_the_line(void **state) {
    (void)state;
    static const char *const bad[][2] = {
        {"model = x\nnope = 1\n", ":2: unknown option 'nope'"},
        {"model = x\nmodel\n", ":2: expected 'long-name = value'"},
        {"count-max = 65\n", "count-max"},
        {"config = other\n", "unknown option 'config'"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(bad); i++) {
        values v = {0};
        bt_options *o = NULL;
        bt_error error = {0};
        char *path = write_file(bad[i][0]);
        /* The flag overrides the value, and the mistake in the file is an error all the same. */
        assert_int_equal(PARSE(&v, &o, &error, NULL, "--count-max=1", "--config", path),
                         BT_ERR_CALLER_CONFIG);
        assert_non_null(strstr(error.text, bad[i][1]));
        assert_null(o);
        (void)unlink(path);
    }
    values v = {0};
    bt_options *o = NULL;
    bt_error error = {0};
    assert_int_equal(PARSE(&v, &o, &error, NULL, "--config", "/nonexistent/file"),
                     BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "/nonexistent/file"));
}

static void bad_values_name_the_option(void **state) {
    (void)state;
    static const char *const bad[][2] = {
        {"--count-max=0", "--count-max"},
        {"--count-max=65", "1 to 64"},
        {"--count-max=-1", "whole number"},
        {"--count-max= 1", "whole number"},
        {"--count-max=", "whole number"},
        {"--count-max=0x10", "whole number"},
        {"--seed=18446744073709551616", "whole number"},
        {"--memory=1X", "--memory"},
        {"--memory=17179869184G", "--memory"},
        {"--memory=G", "--memory"},
        {"--is-fast=maybe", "true or false"},
        {"--log-level=loud", "one of error, info, debug"},
        {"--ratio=nan", "finite"},
        {"--ratio=1.5", "0 to 1"},
        {"--ratio=1x", "finite"},
        {"--unknown=1", "--unknown"},
        {"positional", "positional"},
        {"--", "unexpected"},
        {"--seed", "needs a value"},
        {"--is-fasty", "--is-fasty"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(bad); i++) {
        values v = {0};
        bt_options *o = NULL;
        bt_error error = {0};
        assert_int_equal(PARSE(&v, &o, &error, NULL, "--model", "m", bad[i][0]),
                         BT_ERR_CALLER_CONFIG);
        if (strstr(error.text, bad[i][1]) == NULL) fail_msg("%s: %s", bad[i][0], error.text);
    }
}

static void environment_errors_name_the_variable(void **state) {
    (void)state;
    values v = {0};
    bt_options *o = NULL;
    bt_error error = {0};
    const char *const environment[] = {"BT_COUNT_MAX=many", NULL};
    assert_int_equal(PARSE(&v, &o, &error, environment, "--model", "m"), BT_ERR_CALLER_CONFIG);
    assert_non_null(strstr(error.text, "BT_COUNT_MAX"));
}

static void required_is_required(void **state) {
    (void)state;
    values v = {0};
    bt_options *o = NULL;
    bt_error error = {0};
    assert_int_equal(PARSE(&v, &o, &error, NULL, "--seed", "1"), BT_ERR_CALLER_CONFIG);
    assert_non_null(strstr(error.text, "--model is required"));
}

static char *printed(const bt_options *o, bt_options_action action) {
    static char text[8192];
    memset(text, 0, sizeof text);
    FILE *out = fmemopen(text, sizeof text - 1, "w");
    assert_non_null(out);
    bt_options_print(o, action, out);
    (void)fclose(out);
    return text;
}

static void prints_come_from_the_table(void **state) {
    (void)state;
    values v = {0};
    bt_options *o = NULL;
    assert_int_equal(PARSE(&v, &o, NULL, NULL, "--help"), BT_OK);
    assert_int_equal(bt_options_get_action(o), BT_OPTIONS_HELP);
    assert_non_null(strstr(printed(o, BT_OPTIONS_HELP), "--count-max N\n      A count. 1 to 64."));
    assert_string_equal(printed(o, BT_OPTIONS_VERSION), "baton-test 1.2.3\n");
    assert_string_equal(printed(o, BT_OPTIONS_LIST),
                        "name\nmodel\ncount-max\nseed\nmemory\nis-fast\nlog-level\nratio\ntoken\n"
                        "config\n");
    bt_options_destroy(o);
}

static void print_config_can_be_read_again(void **state) {
    (void)state;
    values v = {0};
    bt_options *o = NULL;
    assert_int_equal(PARSE(&v, &o, NULL, NULL, "--print-config", "--seed=9", "--token=hidden"),
                     BT_OK);
    assert_int_equal(bt_options_get_action(o), BT_OPTIONS_PRINT_CONFIG);
    char *text = printed(o, BT_OPTIONS_PRINT_CONFIG);
    assert_null(strstr(text, "hidden"));
    assert_non_null(strstr(text, "# model is not set"));
    char *path = write_file(text);
    bt_options_destroy(o);
    values again = {0};
    assert_int_equal(PARSE(&again, &o, NULL, NULL, "--config", path, "--model", "m"), BT_OK);
    assert_true(again.seed == 9);
    assert_int_equal(bt_options_source(o, "seed"), BT_OPTION_FROM_FILE);
    bt_options_destroy(o);
    (void)unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_and_flags),
        cmocka_unit_test(last_flag_counts_and_bools_take_words),
        cmocka_unit_test(precedence_is_flag_environment_file_default),
        cmocka_unit_test(file_errors_name_the_line),
        cmocka_unit_test(bad_values_name_the_option),
        cmocka_unit_test(environment_errors_name_the_variable),
        cmocka_unit_test(required_is_required),
        cmocka_unit_test(prints_come_from_the_table),
        cmocka_unit_test(print_config_can_be_read_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
