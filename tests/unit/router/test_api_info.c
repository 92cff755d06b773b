/* Paths and methods, and the bodies of the endpoints that tell. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/version.h"
#include "router/api_info.h"

static const api_settings SETTINGS = {.mask_max_tokens = 4096,
                                      .stream_interval = 1,
                                      .model_name = "org/model \"1\"",
                                      .model_path = "/models/m",
                                      .control_address = "127.0.0.1:30001"};
static const api_model MODEL = {.is_known = true, .vocab_size = 100, .context_tokens = 2048};

static void test_routes(void **state) {
    (void)state;
    static const struct {
        http_method method;
        const char *path;
        api_route route;
        const char *allow;
    } CASES[] = {
        {HTTP_METHOD_POST, "/generate", API_ROUTE_GENERATE, NULL},
        {HTTP_METHOD_PUT, "/generate", API_ROUTE_GENERATE, NULL},
        {HTTP_METHOD_GET, "/generate", API_ROUTE_GENERATE, "POST, PUT, OPTIONS"},
        {HTTP_METHOD_DELETE, "/generate", API_ROUTE_GENERATE, "POST, PUT, OPTIONS"},
        {HTTP_METHOD_OPTIONS, "/generate", API_ROUTE_GENERATE, NULL},
        {HTTP_METHOD_OTHER, "/health", API_ROUTE_HEALTH, "GET, HEAD, OPTIONS"},
        {HTTP_METHOD_PUT, "/v1/chat/completions", API_ROUTE_CHAT, "POST, OPTIONS"},
        {HTTP_METHOD_POST, "/v1/completions", API_ROUTE_COMPLETION, NULL},
        {HTTP_METHOD_GET, "/v1/completions", API_ROUTE_COMPLETION, "POST, OPTIONS"},
        {HTTP_METHOD_HEAD, "/health_generate", API_ROUTE_HEALTH, NULL},
        {HTTP_METHOD_GET, "/readiness", API_ROUTE_HEALTH, NULL},
        {HTTP_METHOD_GET, "/liveness", API_ROUTE_LIVENESS, NULL},
        {HTTP_METHOD_GET, "/get_server_info", API_ROUTE_SERVER_INFO, NULL},
        {HTTP_METHOD_GET, "/get_model_info", API_ROUTE_MODEL_INFO, NULL},
        {HTTP_METHOD_GET, "/v1/models", API_ROUTE_MODELS, NULL},
        {HTTP_METHOD_GET, "/v1/models/a/b", API_ROUTE_MODEL, NULL},
        {HTTP_METHOD_POST, "/v1/models/a", API_ROUTE_MODEL, "GET, HEAD, OPTIONS"},
        {HTTP_METHOD_GET, "/", API_ROUTE_ROOT, NULL},
        {HTTP_METHOD_GET, "/healthy", API_ROUTE_NONE, NULL},
        {HTTP_METHOD_GET, "*", API_ROUTE_NONE, NULL},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        const char *allow, *rest;
        assert_int_equal(api_route_find(CASES[i].method, CASES[i].path, &allow, &rest),
                         CASES[i].route);
        if (CASES[i].allow == NULL) {
            assert_null(allow);
        } else {
            assert_string_equal(allow, CASES[i].allow);
        }
    }
}

static void test_models(void **state) {
    (void)state;
    bt_text out;
    bt_text_init(&out, 1 << 16);
    api_models_write(&out, &SETTINGS, &MODEL, 1770000000);
    assert_string_equal(
        out.bytes, "{\"object\":\"list\",\"data\":[{\"id\":\"org/model \\\"1\\\"\",\"object\":"
                   "\"model\",\"created\":1770000000,\"owned_by\":\"baton\",\"root\":\"org/model "
                   "\\\"1\\\"\",\"parent\":null,\"max_model_len\":2048}]}");
    bt_text_clear(&out);
    assert_true(api_model_write(&out, &SETTINGS, &MODEL, 1, "org%2Fmodel%20%221%22"));
    assert_memory_equal(out.bytes, "{\"id\":\"org/model", 16);
    bt_text_clear(&out);
    assert_false(api_model_write(&out, &SETTINGS, &MODEL, 1, "other%2"));
    assert_string_equal(out.bytes,
                        "{\"error\":{\"message\":\"The model `other%2` does not exist.\",\"type\":"
                        "\"NotFoundError\",\"param\":null,\"code\":\"model_not_found\"},\"object\":"
                        "\"error\",\"message\":\"The model `other%2` does not exist.\",\"type\":"
                        "\"NotFoundError\",\"param\":null,\"code\":\"model_not_found\"}");
    bt_text_fini(&out);
}

static json_t *parse(const bt_text *text) {
    json_error_t error;
    json_t *value = json_loads(text->bytes, 0, &error);
    if (value == NULL) fail_msg("%s: %s", error.text, text->bytes);
    return value;
}

static void test_server_info(void **state) {
    (void)state;
    static api_snapshot snapshot;
    snapshot.model = MODEL;
    snapshot.view.is_ready = true;
    snapshot.view.requests_running = 3;
    snapshot.view.record.page_tokens = 32;
    snapshot.worker_count = 2;
    snapshot.workers[0] =
        (dispatch_worker_view){.worker_id = 1, .role = PROTO_ROLE_PREFILL, .host = "a\"b"};
    snapshot.workers[1] = (dispatch_worker_view){
        .worker_id = 2, .role = PROTO_ROLE_DECODE, .pages_free = 5, .pages_total = 7};
    bt_text out;
    bt_text_init(&out, 1 << 16);
    api_server_info_write(&out, &SETTINGS, &snapshot);
    json_t *info = parse(&out);
    json_t *workers = json_object_get(info, "workers");
    json_t *states = json_object_get(info, "internal_states");
    assert_int_equal(json_integer_value(json_object_get(info, "sampling_mask_max_tokens")), 4096);
    assert_int_equal(json_integer_value(json_object_get(info, "max_total_num_tokens")), 7 * 32);
    assert_int_equal(json_integer_value(json_object_get(info, "requests_running")), 3);
    assert_true(json_is_null(json_object_get(info, "speculative_algorithm")));
    assert_string_equal(json_string_value(json_object_get(info, "version")), bt_version);
    assert_string_equal(json_string_value(json_object_get(info, "control_address")),
                        "127.0.0.1:30001");
    /* Load generators read internal_states[0]. */
    assert_int_equal(json_array_size(states), 1);
    assert_true(json_is_object(json_array_get(states, 0)));
    assert_int_equal(json_array_size(workers), 2);
    json_t *first = json_array_get(workers, 0);
    json_t *second = json_array_get(workers, 1);
    assert_string_equal(json_string_value(json_object_get(first, "role")), "prefill");
    assert_string_equal(json_string_value(json_object_get(first, "host")), "a\"b");
    assert_string_equal(json_string_value(json_object_get(second, "role")), "decode");
    assert_int_equal(json_integer_value(json_object_get(second, "pages_free")), 5);
    json_decref(info);
    bt_text_clear(&out);
    api_model_info_write(&out, &SETTINGS, &snapshot);
    info = parse(&out);
    assert_true(json_is_true(json_object_get(info, "is_generation")));
    assert_string_equal(json_string_value(json_object_get(info, "weight_version")), "default");
    json_decref(info);
    bt_text_fini(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_routes),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_server_info),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
