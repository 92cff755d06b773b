/* Accept fields: which of two types the client wants, by quality and by how exactly it says so. */
#include "router/http_accept.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define TENSORS "application/x-safetensors"
#define JSON    "application/json"

static void test_one_type(void **state) {
    static const struct {
        const char *value;
        http_accept_match match;
        uint32_t quality;
    } cases[] = {
        {"", HTTP_ACCEPT_NOT_NAMED, 0},
        {",, ,", HTTP_ACCEPT_NOT_NAMED, 0},
        {"text/html", HTTP_ACCEPT_NOT_NAMED, 0},
        {JSON, HTTP_ACCEPT_EXACT, 1000},
        {"Application/JSON", HTTP_ACCEPT_EXACT, 1000},
        {"*/*", HTTP_ACCEPT_ANY, 1000},
        {"application/*", HTTP_ACCEPT_SUBTYPE, 1000},
        {"APPLICATION/*;q=0.5", HTTP_ACCEPT_SUBTYPE, 500},
        {"app/*", HTTP_ACCEPT_NOT_NAMED, 0},
        {"applications/*", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/jso", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/json5", HTTP_ACCEPT_NOT_NAMED, 0},
        {"*", HTTP_ACCEPT_NOT_NAMED, 0},
        {"*/json", HTTP_ACCEPT_NOT_NAMED, 0},
        /* The most specific one counts, whatever its place and quality. */
        {"*/*;q=0.9, application/json;q=0.1, application/*;q=0.5", HTTP_ACCEPT_EXACT, 100},
        {"application/json;q=0, */*", HTTP_ACCEPT_EXACT, 0},
        {"application/json;q=0.25,application/json;q=0.5", HTTP_ACCEPT_EXACT, 500},
        {"application/json;q=0.5,application/json;q=0.25", HTTP_ACCEPT_EXACT, 500},
        /* White space, other parameters, quoted strings. */
        {" \t application/json \t;\t q=0.125 ", HTTP_ACCEPT_EXACT, 125},
        {"application/json;charset=utf-8;Q=0.3", HTTP_ACCEPT_EXACT, 300},
        {"application/json;q=0.3;x=y", HTTP_ACCEPT_EXACT, 300},
        {"application/json;x=\"a,b;q=0\"", HTTP_ACCEPT_EXACT, 1000},
        {"application/json;x=\"\\\",\";q=0.7", HTTP_ACCEPT_EXACT, 700},
        {"text/html;x=\", application/json", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/json;x=\"\\", HTTP_ACCEPT_EXACT, 1000},
        {"application/json;;", HTTP_ACCEPT_EXACT, 1000},
        /* Qualities. */
        {"application/json;q=0", HTTP_ACCEPT_EXACT, 0},
        {"application/json;q=0.000", HTTP_ACCEPT_EXACT, 0},
        {"application/json;q=1.000", HTTP_ACCEPT_EXACT, 1000},
        {"application/json;q=1.", HTTP_ACCEPT_EXACT, 1000},
        {"application/json;q=0.001", HTTP_ACCEPT_EXACT, 1},
        /* What is none drops the element. */
        {"application/json;q", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/json;q=", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/json;q=1.001", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/json;q=2", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/json;q=-1", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/json;q=0.1234", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/json;q=.5", HTTP_ACCEPT_NOT_NAMED, 0},
        {"application/json;q=0,5", HTTP_ACCEPT_EXACT, 0},
        {"application/json;q=0.x, */*;q=0.2", HTTP_ACCEPT_ANY, 200},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        http_accepted accepted = {0};
        http_accept_read(cases[i].value, JSON, &accepted);
        if (accepted.match != cases[i].match || accepted.quality != cases[i].quality)
            fail_msg("'%s': match %d, quality %u", cases[i].value, (int)accepted.match,
                     accepted.quality);
    }
}

static bool prefers(const char *first, const char *second) {
    static http_request request;
    request.field_count = 0;
    request.fields[request.field_count++] = (http_field){"host", TENSORS};
    if (first != NULL) request.fields[request.field_count++] = (http_field){"accept", first};
    request.fields[request.field_count++] = (http_field){"accept-encoding", "gzip"};
    if (second != NULL) request.fields[request.field_count++] = (http_field){"accept", second};
    return http_accept_prefers(&request, TENSORS, JSON);
}

static void test_which_is_preferred(void **state) {
    (void)state;
    assert_true(prefers(TENSORS, NULL));
    assert_true(prefers(TENSORS ", " JSON, NULL));
    assert_true(prefers(JSON ", " TENSORS, NULL));
    assert_true(prefers(JSON ";q=0.5, " TENSORS ";q=0.5", NULL));
    assert_true(prefers(TENSORS ", */*", NULL));
    assert_true(prefers(TENSORS ";q=0.5, */*;q=0.1", NULL));
    assert_true(prefers(JSON ";q=0.9", TENSORS));
    assert_true(prefers(NULL, "application/X-SafeTensors"));
    /* A star never asks for tensors, and what is liked less is not sent. */
    assert_false(prefers(NULL, NULL));
    assert_false(prefers("*/*", NULL));
    assert_false(prefers("application/*", NULL));
    assert_false(prefers(JSON, NULL));
    assert_false(prefers("text/html", NULL));
    assert_false(prefers("", ""));
    assert_false(prefers(TENSORS ";q=0", NULL));
    assert_false(prefers(TENSORS ";q=0, */*;q=0", NULL));
    assert_false(prefers(TENSORS ";q=0.5, " JSON, NULL));
    assert_false(prefers(TENSORS ";q=0.5, */*", NULL));
    assert_false(prefers(TENSORS ";q=0.5", JSON ";q=0.6"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_type),
        cmocka_unit_test(test_which_is_preferred),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
