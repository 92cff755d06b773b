/* The safetensors reader on files made here: good ones, and every kind of damage. */
#include "base/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/json_file.h"
#include "tests/support/safetensors_writer.h"

static bt_status open_bytes(const test_bytes *bytes, bt_safetensors **out, bt_error *error) {
    *out = NULL;
    return bt_safetensors_open_memory(bytes->data, bytes->count, "file", out, error);
}

static void fill(safetensors_writer *w) {
    *w = (safetensors_writer){0};
    test_bytes data = {0};
    test_bytes_add(&data, "\1", 1); /* everything after it is not aligned */
    safetensors_writer_tensor(w, "flag", "BOOL", 0, 1, &data);
    data.count = 0;
    for (uint16_t i = 0; i < 6; i++)
        test_bytes_add_u16(&data, i);
    safetensors_writer_tensor(w, "matrix", "BF16", 2, 3, &data);
    data.count = 0;
    test_bytes_add_f32(&data, 2.5f);
    safetensors_writer_tensor(w, "a.bias", "F32", 0, 1, &data);
    test_bytes_fini(&data);
}

static void reads_tensors(void **state) {
    (void)state;
    safetensors_writer w;
    fill(&w);
    test_bytes bytes = safetensors_writer_finish(&w);
    bt_safetensors *file;
    bt_error error = {0};
    if (open_bytes(&bytes, &file, &error) != BT_OK) fail_msg("%s", error.text);
    assert_int_equal(bt_safetensors_count(file), 3);
    assert_string_equal(bt_safetensors_at(file, 0)->name, "a.bias");
    assert_string_equal(bt_safetensors_at(file, 1)->name, "flag");
    const bt_safetensors_tensor *matrix = bt_safetensors_find(file, "matrix");
    assert_ptr_equal(matrix, bt_safetensors_at(file, 2));
    assert_int_equal(matrix->dtype, BT_SAFETENSORS_BF16);
    assert_int_equal(matrix->dimension_count, 2);
    assert_int_equal(matrix->dimensions[0], 2);
    assert_int_equal(matrix->dimensions[1], 3);
    assert_int_equal(matrix->elements, 6);
    assert_int_equal(matrix->bytes, 12);
    assert_ptr_equal(matrix->data, bytes.data + matrix->offset);
    uint16_t last;
    memcpy(&last, matrix->data + 10, sizeof last);
    assert_int_equal(last, 5);
    float bias;
    memcpy(&bias, bt_safetensors_find(file, "a.bias")->data, sizeof bias);
    assert_true(bias == 2.5f);
    assert_null(bt_safetensors_find(file, "a"));
    assert_null(bt_safetensors_find(file, "__metadata__"));
    bt_safetensors_close(file);
    test_bytes_fini(&bytes);
    safetensors_writer_fini(&w);
}

static void every_dtype_has_a_size(void **state) {
    (void)state;
    const struct {
        const char *name;
        unsigned bytes;
    } cases[] = {{"F64", 8}, {"F32", 4}, {"F16", 2},  {"BF16", 2},    {"I64", 8},
                 {"I32", 4}, {"I16", 2}, {"I8", 1},   {"U64", 8},     {"U32", 4},
                 {"U16", 2}, {"U8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    assert_int_equal(BT_ARRAY_COUNT(cases), BT_SAFETENSORS_DTYPE_COUNT);
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        char header[200];
        (void)snprintf(header, sizeof header,
                       "{\"t\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%u]}}",
                       cases[i].name, 3 * cases[i].bytes);
        test_bytes bytes = safetensors_file(header, 3 * (size_t)cases[i].bytes);
        bt_safetensors *file;
        assert_int_equal(open_bytes(&bytes, &file, NULL), BT_OK);
        const bt_safetensors_tensor *tensor = bt_safetensors_at(file, 0);
        assert_string_equal(bt_safetensors_dtype_name(tensor->dtype), cases[i].name);
        assert_int_equal(bt_safetensors_dtype_bytes(tensor->dtype), cases[i].bytes);
        bt_safetensors_close(file);
        test_bytes_fini(&bytes);
    }
}

/* Scalars, empty tensors (also where another starts), padding of the header, no tensor at all. */
static void unusual_files_are_read(void **state) {
    (void)state;
    const struct {
        const char *header;
        size_t data_bytes;
        size_t count;
    } cases[] = {
        {"{}", 0, 0},
        {"{}      ", 0, 0},
        {"{\"__metadata__\":{}}", 0, 0},
        {"{\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, 1},
        {"{\"x\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4,0],\"data_offsets\":[2,2]},"
         "\"y\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}  ",
         3, 4},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        test_bytes bytes = safetensors_file(cases[i].header, cases[i].data_bytes);
        bt_safetensors *file;
        bt_error error = {0};
        if (open_bytes(&bytes, &file, &error) != BT_OK) fail_msg("%s", error.text);
        assert_int_equal(bt_safetensors_count(file), cases[i].count);
        bt_safetensors_close(file);
        test_bytes_fini(&bytes);
    }
}

static void refuses_every_truncation(void **state) {
    (void)state;
    safetensors_writer w;
    fill(&w);
    test_bytes whole = safetensors_writer_finish(&w);
    for (size_t count = 0; count < whole.count; count++) {
        test_bytes part = {0};
        bt_safetensors *file;
        bt_error error = {0};
        test_bytes_add(&part, whole.data, count);
        assert_int_equal(open_bytes(&part, &file, &error), BT_ERR_CALLER_FILE);
        assert_null(file);
        assert_true(strlen(error.text) > 10);
        test_bytes_fini(&part);
    }
    test_bytes_add(&whole, "x", 1);
    bt_safetensors *file;
    bt_error error = {0};
    assert_int_equal(open_bytes(&whole, &file, &error), BT_ERR_CALLER_FILE);
    assert_string_equal(error.text, "file: 1 bytes after the last tensor belong to none");
    test_bytes_fini(&whole);
    safetensors_writer_fini(&w);
}

#define TENSOR(name, shape, offsets)                                                               \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void damaged_headers_are_refused(void **state) {
    (void)state;
    const struct {
        const char *header;
        bt_status status;
        const char *sentence;
    } cases[] = {
        {"", BT_ERR_CALLER_FILE, "malformed JSON"},
        {"{", BT_ERR_CALLER_FILE, "malformed JSON at line 1"},
        {"[]", BT_ERR_CALLER_FILE, "is not a JSON object"},
        {"{} x", BT_ERR_CALLER_FILE, "malformed JSON"},
        {"{" TENSOR("t", "[8]", "[0,8]") "," TENSOR("t", "[8]", "[0,8]") "}", BT_ERR_CALLER_FILE,
         "malformed JSON"},
        {"{\"t\":1}", BT_ERR_CALLER_FILE, "tensor t has no dtype"},
        {"{\"t\":{\"dtype\":3}}", BT_ERR_CALLER_FILE, "tensor t has no dtype"},
        {"{\"t\":{\"dtype\":\"F4\",\"shape\":[8],\"data_offsets\":[0,8]}}",
         BT_ERR_CALLER_UNSUPPORTED, "tensor t has dtype F4, which is not known"},
        {"{" TENSOR("", "[8]", "[0,8]") "}", BT_ERR_CALLER_FILE, "a tensor's name"},
        {"{" TENSOR("\\u0007", "[8]", "[0,8]") "}", BT_ERR_CALLER_FILE, "a tensor's name"},
        {"{" TENSOR("a\\u0000b", "[8]", "[0,8]") "}", BT_ERR_CALLER_FILE, "malformed JSON"},
        {"{" TENSOR("t", "8", "[0,8]") "}", BT_ERR_CALLER_FILE, "has no shape"},
        {"{" TENSOR("t", "[1,1,1,1,1,1,1,1,8]", "[0,8]") "}", BT_ERR_CALLER_FILE, "has no shape"},
        {"{" TENSOR("t", "[-8]", "[0,8]") "}", BT_ERR_CALLER_FILE, "impossible dimension 0"},
        {"{" TENSOR("t", "[8.0]", "[0,8]") "}", BT_ERR_CALLER_FILE, "impossible dimension 0"},
        {"{" TENSOR("t", "[\"8\"]", "[0,8]") "}", BT_ERR_CALLER_FILE, "impossible dimension 0"},
        {"{" TENSOR("t", "[4294967296,4294967296]", "[0,8]") "}", BT_ERR_CALLER_FILE,
         "impossible dimension 1"},
        {"{\"t\":{\"dtype\":\"F64\",\"shape\":[2305843009213693953],\"data_offsets\":[0,8]}}",
         BT_ERR_CALLER_FILE, "tensor t is impossibly large"},
        {"{" TENSOR("t", "[99999999999999999999]", "[0,8]") "}", BT_ERR_CALLER_FILE,
         "malformed JSON"},
        {"{" TENSOR("t", "[8]", "[0]") "}", BT_ERR_CALLER_FILE, "no valid data_offsets"},
        {"{" TENSOR("t", "[8]", "[8,0]") "}", BT_ERR_CALLER_FILE, "no valid data_offsets"},
        {"{" TENSOR("t", "[8]", "[-8,0]") "}", BT_ERR_CALLER_FILE, "no valid data_offsets"},
        {"{" TENSOR("t", "[9]", "[0,9]") "}", BT_ERR_CALLER_FILE,
         "truncated: tensor t ends at byte 9 of the data, the file has 8"},
        {"{" TENSOR("t", "[9223372036854775807]", "[0,9223372036854775807]") "}",
         BT_ERR_CALLER_FILE, "truncated: tensor t"},
        {"{" TENSOR("t", "[7]", "[0,8]") "}", BT_ERR_CALLER_FILE,
         "tensor t has 8 bytes, its shape and dtype need 7"},
        {"{" TENSOR("t", "[4]", "[4,8]") "}", BT_ERR_CALLER_FILE, "(a hole)"},
        {"{" TENSOR("t", "[3]", "[0,3]") "," TENSOR("u", "[4]", "[4,8]") "}", BT_ERR_CALLER_FILE,
         "(a hole)"},
        {"{" TENSOR("t", "[5]", "[0,5]") "," TENSOR("u", "[4]", "[4,8]") "}", BT_ERR_CALLER_FILE,
         "(they overlap)"},
        {"{" TENSOR("t", "[8]", "[0,8]") "," TENSOR("u", "[8]", "[0,8]") "}", BT_ERR_CALLER_FILE,
         "(they overlap)"},
        {"{" TENSOR("t", "[4]", "[0,4]") "}", BT_ERR_CALLER_FILE, "belong to none"},
        {"{}", BT_ERR_CALLER_FILE, "belong to none"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        test_bytes bytes = safetensors_file(cases[i].header, 8);
        bt_safetensors *file;
        bt_error error = {0};
        const bt_status status = open_bytes(&bytes, &file, &error);
        if (status != cases[i].status || strstr(error.text, cases[i].sentence) == NULL) {
            fail_msg("%s: %d %s", cases[i].header, status, error.text);
        }
        assert_null(file);
        test_bytes_fini(&bytes);
    }
}

static void impossible_header_lengths_are_refused(void **state) {
    (void)state;
    const uint64_t lengths[] = {3, 100, UINT64_MAX, UINT64_MAX - 7, 1ull << 63};
    for (size_t i = 0; i < BT_ARRAY_COUNT(lengths); i++) {
        test_bytes bytes = safetensors_file("{}", 0);
        bt_safetensors *file;
        bt_error error = {0};
        test_bytes_set_u64(&bytes, 0, lengths[i]);
        assert_int_equal(open_bytes(&bytes, &file, &error), BT_ERR_CALLER_FILE);
        assert_non_null(strstr(error.text, "truncated or not a safetensors file"));
        test_bytes_fini(&bytes);
    }
}

static void a_deep_header_is_refused(void **state) {
    (void)state;
    test_bytes header = {0};
    for (int i = 0; i < 5000; i++)
        test_bytes_add_text(&header, "{\"a\":");
    test_bytes_add(&header, "", 1);
    test_bytes bytes = safetensors_file((const char *)header.data, 0);
    bt_safetensors *file;
    bt_error error = {0};
    assert_int_equal(open_bytes(&bytes, &file, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "malformed JSON"));
    test_bytes_fini(&bytes);
    test_bytes_fini(&header);
}

static void json_files_are_objects(void **state) {
    (void)state;
    const test_folder folder = test_folder_make();
    const struct {
        const char *text;
        bt_status status;
        const char *sentence;
    } cases[] = {
        {"{\"a\": 1}", BT_OK, ""},
        {"", BT_ERR_CALLER_FILE, "is empty"},
        {"3", BT_ERR_CALLER_FILE, "malformed JSON at line 1"},
        {"[1]", BT_ERR_CALLER_FILE, "is not a JSON object"},
        {"{\"a\": 1,\n\"a\": 2}", BT_ERR_CALLER_FILE, "malformed JSON at line 2"},
        {"{\"\xff\": 1}", BT_ERR_CALLER_FILE, "malformed JSON"},
    };
    char path[300];
    (void)snprintf(path, sizeof path, "%s/config.json", folder.path);
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        test_bytes bytes = {0};
        json_t *object = NULL;
        bt_error error = {0};
        test_bytes_add_text(&bytes, cases[i].text);
        assert_int_equal(test_bytes_write(&bytes, folder.path, "config.json"), BT_OK);
        assert_int_equal(bt_json_file_load(path, &object, &error), cases[i].status);
        if (strstr(error.text, cases[i].sentence) == NULL) fail_msg("%s", error.text);
        assert_int_equal(object != NULL, cases[i].status == BT_OK);
        json_decref(object);
        test_bytes_fini(&bytes);
    }
    json_t *object = NULL;
    bt_error error;
    assert_int_equal(bt_json_file_load(folder.path, &object, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "is a folder"));
    test_folder_remove(&folder);
}

#ifdef BT_FAULT
static void failed_allocations_are_reported(void **state) {
    (void)state;
    safetensors_writer w;
    fill(&w);
    test_bytes bytes = safetensors_writer_finish(&w);
    bt_status status = BT_ERR_WORKER_MEMORY;
    uint64_t nth = 0;
    while (status != BT_OK) {
        bt_safetensors *file;
        bt_fault_set(BT_FAULT_ALLOC, ++nth);
        status = open_bytes(&bytes, &file, NULL);
        bt_fault_set(BT_FAULT_ALLOC, 0);
        assert_true(status == BT_OK || status == BT_ERR_WORKER_MEMORY);
        bt_safetensors_close(file);
    }
    assert_true(nth > 3);
    test_bytes_fini(&bytes);
    safetensors_writer_fini(&w);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_tensors),
        cmocka_unit_test(every_dtype_has_a_size),
        cmocka_unit_test(unusual_files_are_read),
        cmocka_unit_test(refuses_every_truncation),
        cmocka_unit_test(damaged_headers_are_refused),
        cmocka_unit_test(impossible_header_lengths_are_refused),
        cmocka_unit_test(a_deep_header_is_refused),
        cmocka_unit_test(json_files_are_objects),
#ifdef BT_FAULT
        cmocka_unit_test(failed_allocations_are_reported),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
