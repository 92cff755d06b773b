/* The GGUF reader on files made here: every kind of value, and every kind of damage. */
#include "base/gguf.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "tests/support/gguf_writer.h"

static void add_u64(gguf_writer *w, const char *key, bt_gguf_type type, uint64_t bits,
                    size_t bytes) {
    gguf_writer_key(w, key, type);
    const size_t at = test_bytes_add_u64(&w->keys, bits);
    w->keys.count = at + bytes;
}

/* One of everything, two tensors. */
static void fill(gguf_writer *w) {
    gguf_writer_init(w);
    gguf_writer_string(w, "general.architecture", "any");
    gguf_writer_string(w, "empty", "");
    gguf_writer_u32(w, "u32", 4000000000u);
    gguf_writer_f32(w, "f32", 1.5f);
    gguf_writer_bool(w, "yes", 1);
    gguf_writer_bool(w, "no", 0);
    add_u64(w, "u8", BT_GGUF_TYPE_U8, 200, 1);
    add_u64(w, "i8", BT_GGUF_TYPE_I8, 100, 1);
    add_u64(w, "negative", BT_GGUF_TYPE_I8, 0x80, 1);
    add_u64(w, "u16", BT_GGUF_TYPE_U16, 60000, 2);
    add_u64(w, "i16", BT_GGUF_TYPE_I16, 30000, 2);
    add_u64(w, "i32", BT_GGUF_TYPE_I32, 2000000000, 4);
    add_u64(w, "u64", BT_GGUF_TYPE_U64, UINT64_MAX, 8);
    add_u64(w, "i64", BT_GGUF_TYPE_I64, INT64_MAX, 8);
    add_u64(w, "f64", BT_GGUF_TYPE_F64, 0x400C000000000000u, 8); /* 3.5 */
    add_u64(w, "nan", BT_GGUF_TYPE_F32, 0x7fc00000u, 4);
    gguf_writer_array(w, "words", BT_GGUF_TYPE_STRING, 3);
    gguf_writer_text(w, "one", 3);
    gguf_writer_text(w, "", 0);
    gguf_writer_text(w, "a\0b", 3);
    gguf_writer_array(w, "numbers", BT_GGUF_TYPE_I32, 2);
    test_bytes_add_u32(&w->keys, 7);
    test_bytes_add_u32(&w->keys, 0xffffffffu);
    gguf_writer_array(w, "scores", BT_GGUF_TYPE_F32, 1);
    test_bytes_add_f32(&w->keys, -2.5f);
    gguf_writer_array(w, "flags", BT_GGUF_TYPE_BOOL, 2);
    test_bytes_add_u16(&w->keys, 0x0100);
    gguf_writer_array(w, "nothing", BT_GGUF_TYPE_U64, 0);
    test_bytes data = {0};
    for (uint32_t i = 0; i < 6; i++)
        test_bytes_add_f32(&data, (float)i);
    gguf_writer_tensor(w, "matrix", BT_GGUF_TENSOR_F32, 3, 2, &data);
    data.count = 0;
    test_bytes_add(&data, NULL, 34);
    gguf_writer_tensor(w, "blocks", BT_GGUF_TENSOR_Q8_0, 32, 0, &data);
    test_bytes_fini(&data);
}

static bt_status open_bytes(const test_bytes *bytes, bt_gguf **out, bt_error *error) {
    *out = NULL;
    return bt_gguf_open_memory(bytes->data, bytes->count, "file", out, error);
}

/* Opens what the writer holds; the bytes must outlive the file. */
static bt_gguf *open_good(const gguf_writer *w, test_bytes *bytes) {
    bt_gguf *file = NULL;
    bt_error error = {0};
    *bytes = gguf_writer_finish(w);
    if (open_bytes(bytes, &file, &error) != BT_OK) fail_msg("%s", error.text);
    return file;
}

static void check_text(bt_gguf_string string, const char *text, size_t bytes) {
    assert_int_equal(string.bytes, bytes);
    assert_memory_equal(string.text, text, bytes);
}

static void reads_scalars(void **state) {
    (void)state;
    const struct {
        const char *key;
        uint64_t value;
    } integers[] = {
        {"u8", 200},          {"i8", 100},         {"u16", 60000},      {"i16", 30000},
        {"u32", 4000000000u}, {"i32", 2000000000}, {"u64", UINT64_MAX}, {"i64", INT64_MAX},
    };
    for (uint32_t version = 2; version <= 3; version++) {
        gguf_writer w;
        test_bytes bytes;
        fill(&w);
        w.version = version;
        bt_gguf *file = open_good(&w, &bytes);
        for (size_t i = 0; i < BT_ARRAY_COUNT(integers); i++) {
            uint64_t value = 0;
            assert_int_equal(bt_gguf_get_u64(file, integers[i].key, &value, NULL), BT_OK);
            assert_true(value == integers[i].value);
        }
        double number = 0;
        bool flag = false;
        bt_gguf_string string;
        assert_int_equal(bt_gguf_get_f64(file, "f32", &number, NULL), BT_OK);
        assert_true(number == 1.5);
        assert_int_equal(bt_gguf_get_f64(file, "f64", &number, NULL), BT_OK);
        assert_true(number == 3.5);
        assert_int_equal(bt_gguf_get_bool(file, "yes", &flag, NULL), BT_OK);
        assert_true(flag);
        assert_int_equal(bt_gguf_get_bool(file, "no", &flag, NULL), BT_OK);
        assert_false(flag);
        assert_int_equal(bt_gguf_get_string(file, "general.architecture", &string, NULL), BT_OK);
        check_text(string, "any", 3);
        assert_int_equal(bt_gguf_get_string(file, "empty", &string, NULL), BT_OK);
        assert_int_equal(string.bytes, 0);
        assert_true(bt_gguf_has_key(file, "nothing"));
        assert_false(bt_gguf_has_key(file, "noth"));
        assert_string_equal(bt_gguf_path(file), "file");
        bt_gguf_close(file);
        test_bytes_fini(&bytes);
        gguf_writer_fini(&w);
    }
}

static void reads_arrays(void **state) {
    (void)state;
    gguf_writer w;
    test_bytes bytes;
    fill(&w);
    bt_gguf *file = open_good(&w, &bytes);
    bt_gguf_array array;
    bt_gguf_string string;
    bt_gguf_string_cursor cursor = {0};
    assert_int_equal(bt_gguf_get_array(file, "words", BT_GGUF_TYPE_STRING, &array, NULL), BT_OK);
    assert_int_equal(array.count, 3);
    assert_true(bt_gguf_array_next_string(&array, &cursor, &string));
    check_text(string, "one", 3);
    assert_true(bt_gguf_array_next_string(&array, &cursor, &string));
    assert_int_equal(string.bytes, 0);
    assert_true(bt_gguf_array_next_string(&array, &cursor, &string));
    check_text(string, "a\0b", 3);
    assert_false(bt_gguf_array_next_string(&array, &cursor, &string));
    assert_int_equal(bt_gguf_get_array(file, "numbers", BT_GGUF_TYPE_I32, &array, NULL), BT_OK);
    assert_int_equal(array.count, 2);
    assert_int_equal(bt_gguf_array_i32(&array, 0), 7);
    assert_int_equal(bt_gguf_array_i32(&array, 1), -1);
    assert_int_equal(bt_gguf_get_array(file, "scores", BT_GGUF_TYPE_F32, &array, NULL), BT_OK);
    assert_true(bt_gguf_array_f32(&array, 0) == -2.5f);
    assert_int_equal(bt_gguf_get_array(file, "nothing", BT_GGUF_TYPE_U64, &array, NULL), BT_OK);
    assert_int_equal(array.count, 0);
    bt_gguf_close(file);
    test_bytes_fini(&bytes);
    gguf_writer_fini(&w);
}

static void reads_tensors(void **state) {
    (void)state;
    gguf_writer w;
    test_bytes bytes;
    fill(&w);
    bt_gguf *file = open_good(&w, &bytes);
    assert_int_equal(bt_gguf_tensor_count(file), 2);
    assert_string_equal(bt_gguf_tensor_at(file, 0)->name, "blocks");
    const bt_gguf_tensor *matrix = bt_gguf_find_tensor(file, "matrix");
    assert_ptr_equal(matrix, bt_gguf_tensor_at(file, 1));
    assert_int_equal(matrix->type, BT_GGUF_TENSOR_F32);
    assert_int_equal(matrix->dimension_count, 2);
    assert_int_equal(matrix->dimensions[0], 3);
    assert_int_equal(matrix->dimensions[1], 2);
    assert_int_equal(matrix->dimensions[2], 1);
    assert_int_equal(matrix->bytes, 24);
    assert_int_equal(matrix->offset % 32, 0);
    float last = 0;
    memcpy(&last, matrix->data + 20, sizeof last);
    assert_true(last == 5.0f);
    assert_ptr_equal(matrix->data, bytes.data + matrix->offset);
    assert_int_equal(bt_gguf_find_tensor(file, "blocks")->bytes, 34);
    assert_null(bt_gguf_find_tensor(file, "matri"));
    assert_string_equal(bt_gguf_tensor_type_name(BT_GGUF_TENSOR_Q6_K), "Q6_K");
    assert_null(bt_gguf_tensor_type_name(4));
    assert_null(bt_gguf_tensor_type_name(UINT32_MAX));
    bt_gguf_close(file);
    test_bytes_fini(&bytes);
    gguf_writer_fini(&w);
}

static void type_bytes_are_whole_blocks(void **state) {
    (void)state;
    const struct {
        uint32_t type;
        size_t bytes; /* of 512 values */
    } cases[] = {{0, 2048}, {1, 1024}, {2, 288},  {3, 320},  {6, 352},  {7, 384},
                 {8, 544},  {12, 288}, {13, 352}, {14, 420}, {30, 1024}};
    size_t bytes = 0;
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        assert_true(bt_gguf_tensor_type_bytes(cases[i].type, 512, &bytes));
        assert_int_equal(bytes, cases[i].bytes);
    }
    assert_false(bt_gguf_tensor_type_bytes(BT_GGUF_TENSOR_Q8_0, 33, &bytes));
    assert_false(bt_gguf_tensor_type_bytes(BT_GGUF_TENSOR_F32, UINT64_MAX / 2, &bytes));
    assert_false(bt_gguf_tensor_type_bytes(5, 32, &bytes));
}

/* A getter that must fail, and a part of its sentence. */
static void getters_refuse_other_types(void **state) {
    (void)state;
    gguf_writer w;
    test_bytes bytes;
    fill(&w);
    bt_gguf *file = open_good(&w, &bytes);
    bt_error error;
    uint64_t u64;
    uint32_t u32;
    double f64;
    bool flag;
    bt_gguf_string string;
    bt_gguf_array array;
    assert_int_equal(bt_gguf_get_u64(file, "absent", &u64, &error), BT_ERR_CALLER_FILE);
    assert_string_equal(error.text, "file: key 'absent' is missing");
    assert_int_equal(bt_gguf_get_u64(file, "f32", &u64, &error), BT_ERR_CALLER_FILE);
    assert_string_equal(error.text, "file: key 'f32' is of type f32, an integer is needed");
    assert_int_equal(bt_gguf_get_u64(file, "negative", &u64, &error), BT_ERR_CALLER_FILE);
    assert_string_equal(error.text, "file: key 'negative' is negative");
    assert_int_equal(bt_gguf_get_u32(file, "u64", &u32, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "more than 32 bits"));
    assert_int_equal(bt_gguf_get_f64(file, "nan", &f64, &error), BT_ERR_CALLER_FILE);
    assert_string_equal(error.text, "file: key 'nan' is not finite");
    assert_int_equal(bt_gguf_get_f64(file, "u32", &f64, &error), BT_ERR_CALLER_FILE);
    assert_int_equal(bt_gguf_get_bool(file, "u8", &flag, &error), BT_ERR_CALLER_FILE);
    assert_int_equal(bt_gguf_get_string(file, "words", &string, &error), BT_ERR_CALLER_FILE);
    assert_int_equal(bt_gguf_get_array(file, "empty", BT_GGUF_TYPE_STRING, &array, &error),
                     BT_ERR_CALLER_FILE);
    assert_int_equal(bt_gguf_get_array(file, "words", BT_GGUF_TYPE_I32, &array, &error),
                     BT_ERR_CALLER_FILE);
    assert_string_equal(error.text,
                        "file: key 'words' is an array of string, an array of i32 is needed");
    bt_gguf_close(file);
    test_bytes_fini(&bytes);
    gguf_writer_fini(&w);
}

static void refuses_every_truncation(void **state) {
    (void)state;
    gguf_writer w;
    fill(&w);
    test_bytes whole = gguf_writer_finish(&w);
    for (size_t count = 0; count < whole.count; count++) {
        test_bytes part = {0};
        bt_gguf *file;
        bt_error error = {0};
        test_bytes_add(&part, whole.data, count);
        assert_int_equal(open_bytes(&part, &file, &error), BT_ERR_CALLER_FILE);
        assert_null(file);
        assert_int_equal(error.status, BT_ERR_CALLER_FILE);
        assert_true(strlen(error.text) > 10);
        test_bytes_fini(&part);
    }
    test_bytes_fini(&whole);
    gguf_writer_fini(&w);
}

/* Damages: each changes a good file in one way. */
static void spoil_magic(test_bytes *file) {
    memcpy(file->data, "GGML", 4);
}
static void set_version(test_bytes *file, uint32_t version) {
    memcpy(file->data + 4, &version, sizeof version);
}
static void spoil_version_1(test_bytes *file) {
    set_version(file, 1);
}
static void spoil_version_4(test_bytes *file) {
    set_version(file, 4);
}
static void spoil_endianness(test_bytes *file) {
    set_version(file, 3u << 24);
}
static void spoil_tensor_count(test_bytes *file) {
    test_bytes_set_u64(file, 8, UINT64_MAX);
}
static void spoil_tensor_count_little(test_bytes *file) {
    test_bytes_set_u64(file, 8, 60000);
}
static void spoil_key_count(test_bytes *file) {
    test_bytes_set_u64(file, 16, 1ull << 40);
}
static void spoil_first_key_length(test_bytes *file) {
    test_bytes_set_u64(file, 24, UINT64_MAX - 8);
}
static void spoil_first_key_empty(test_bytes *file) {
    test_bytes_set_u64(file, 24, 0);
}
static void spoil_first_key_text(test_bytes *file) {
    file->data[32] = '\n';
}

static void spoiled_headers_are_refused(void **state) {
    (void)state;
    const struct {
        void (*spoil)(test_bytes *);
        bt_status status;
        const char *sentence;
    } cases[] = {
        {spoil_magic, BT_ERR_CALLER_FILE, "is not a GGUF file"},
        {spoil_version_1, BT_ERR_CALLER_UNSUPPORTED, "GGUF version 1"},
        {spoil_version_4, BT_ERR_CALLER_UNSUPPORTED, "GGUF version 4"},
        {spoil_endianness, BT_ERR_CALLER_UNSUPPORTED, "big-endian"},
        {spoil_tensor_count, BT_ERR_CALLER_FILE, "claims 18446744073709551615 tensors, at most"},
        {spoil_tensor_count_little, BT_ERR_CALLER_FILE, "truncated: claims 60000 tensors"},
        {spoil_key_count, BT_ERR_CALLER_FILE, "keys, at most"},
        {spoil_first_key_length, BT_ERR_CALLER_FILE, "truncated: a key at byte 32"},
        {spoil_first_key_empty, BT_ERR_CALLER_FILE, "a key at byte 24 has 0 bytes"},
        {spoil_first_key_text, BT_ERR_CALLER_FILE, "is not printable ASCII"},
    };
    gguf_writer w;
    fill(&w);
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        test_bytes bytes = gguf_writer_finish(&w);
        bt_gguf *file;
        bt_error error = {0};
        cases[i].spoil(&bytes);
        assert_int_equal(open_bytes(&bytes, &file, &error), cases[i].status);
        if (strstr(error.text, cases[i].sentence) == NULL) fail_msg("%s", error.text);
        test_bytes_fini(&bytes);
    }
    gguf_writer_fini(&w);
}

/* Files that are built wrong from the start. */
static void build_unknown_value_type(gguf_writer *w) {
    add_u64(w, "odd", (bt_gguf_type)13, 0, 4);
}
static void build_nested_array(gguf_writer *w) {
    gguf_writer_array(w, "odd", BT_GGUF_TYPE_ARRAY, 0);
}
static void build_huge_array(gguf_writer *w) {
    gguf_writer_array(w, "odd", BT_GGUF_TYPE_U64, UINT64_MAX / 4);
}
static void build_huge_string_array(gguf_writer *w) {
    gguf_writer_array(w, "odd", BT_GGUF_TYPE_STRING, 1ull << 61);
}
static void build_long_string_in_array(gguf_writer *w) {
    gguf_writer_array(w, "odd", BT_GGUF_TYPE_STRING, 1);
    test_bytes_add_u64(&w->keys, UINT64_MAX);
}
static void build_odd_bool(gguf_writer *w) {
    gguf_writer_bool(w, "odd", 2);
}
static void build_odd_bool_in_array(gguf_writer *w) {
    gguf_writer_array(w, "odd", BT_GGUF_TYPE_BOOL, 2);
    test_bytes_add_u16(&w->keys, 0x0201);
}
static void build_key_twice(gguf_writer *w) {
    gguf_writer_u32(w, "u32", 1);
}
static void build_alignment_zero(gguf_writer *w) {
    gguf_writer_u32(w, "general.alignment", 0);
}
static void build_alignment_odd(gguf_writer *w) {
    gguf_writer_u32(w, "general.alignment", 24);
}
static void build_alignment_text(gguf_writer *w) {
    gguf_writer_string(w, "general.alignment", "32");
}
static void add_info(gguf_writer *w, const char *name, uint32_t type, uint64_t columns,
                     uint64_t rows, uint64_t offset) {
    const gguf_writer_tensor_info info = {.name = name,
                                          .type = type,
                                          .dimension_count = 2,
                                          .dimensions = {columns, rows},
                                          .offset = offset};
    gguf_writer_info(w, &info);
}
static void build_overlap(gguf_writer *w) {
    add_info(w, "late", BT_GGUF_TENSOR_F32, 2, 1, 0);
}
static void build_partial_overlap(gguf_writer *w) {
    add_info(w, "late", BT_GGUF_TENSOR_F32, 8, 1, 32);
}
static void build_name_twice(gguf_writer *w) {
    const test_bytes none = {0};
    test_bytes data = none;
    test_bytes_add(&data, NULL, 4);
    gguf_writer_tensor(w, "matrix", BT_GGUF_TENSOR_F32, 1, 0, &data);
    test_bytes_fini(&data);
}
static void build_dimension_zero(gguf_writer *w) {
    add_info(w, "late", BT_GGUF_TENSOR_F32, 0, 4, 64);
}
static void build_dimension_product(gguf_writer *w) {
    add_info(w, "late", BT_GGUF_TENSOR_F32, 1ull << 33, 1ull << 33, 64);
}
static void build_byte_product(gguf_writer *w) {
    add_info(w, "late", BT_GGUF_TENSOR_F32, 1ull << 31, 1ull << 31, 64);
}
static void build_large(gguf_writer *w) {
    add_info(w, "late", BT_GGUF_TENSOR_F32, 1ull << 30, 1ull << 30, 64);
}
static void build_dimension_count(gguf_writer *w) {
    const gguf_writer_tensor_info info = {
        .name = "late", .type = 0, .dimension_count = 5, .dimensions = {1, 1, 1, 1}};
    gguf_writer_info(w, &info);
}
static void build_dimension_none(gguf_writer *w) {
    const gguf_writer_tensor_info info = {.name = "late", .type = 0, .dimension_count = 0};
    gguf_writer_info(w, &info);
}
static void build_partial_block(gguf_writer *w) {
    add_info(w, "late", BT_GGUF_TENSOR_Q8_0, 16, 2, 64);
}
static void build_unknown_tensor_type(gguf_writer *w) {
    add_info(w, "late", 5, 32, 1, 64);
}
static void build_offset_odd(gguf_writer *w) {
    add_info(w, "late", BT_GGUF_TENSOR_F32, 1, 1, 65);
}
static void build_offset_far(gguf_writer *w) {
    add_info(w, "late", BT_GGUF_TENSOR_F32, 1, 1, UINT64_MAX - 31);
}
static void build_name_long(gguf_writer *w) {
    char name[200];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    add_info(w, name, BT_GGUF_TENSOR_F32, 1, 1, 64);
}

static void spoiled_contents_are_refused(void **state) {
    (void)state;
    const struct {
        void (*build)(gguf_writer *);
        bt_status status;
        const char *sentence;
    } cases[] = {
        {build_unknown_value_type, BT_ERR_CALLER_UNSUPPORTED, "key 'odd' has a value of type 13"},
        {build_nested_array, BT_ERR_CALLER_UNSUPPORTED, "has elements of type 9"},
        {build_huge_array, BT_ERR_CALLER_FILE, "more than the file holds"},
        {build_huge_string_array, BT_ERR_CALLER_FILE, "more than the file holds"},
        {build_long_string_in_array, BT_ERR_CALLER_FILE, "truncated: a string of an array"},
        {build_odd_bool, BT_ERR_CALLER_FILE, "only 0 and 1"},
        {build_odd_bool_in_array, BT_ERR_CALLER_FILE, "only 0 and 1"},
        {build_key_twice, BT_ERR_CALLER_FILE, "key 'u32' is given twice"},
        {build_alignment_zero, BT_ERR_CALLER_FILE, "general.alignment is 0"},
        {build_alignment_odd, BT_ERR_CALLER_FILE, "general.alignment is 24"},
        {build_alignment_text, BT_ERR_CALLER_FILE, "'general.alignment' is of type string"},
        {build_overlap, BT_ERR_CALLER_FILE, "overlap at byte"},
        {build_partial_overlap, BT_ERR_CALLER_FILE, "overlap at byte"},
        {build_name_twice, BT_ERR_CALLER_FILE, "tensor matrix is given twice"},
        {build_dimension_zero, BT_ERR_CALLER_FILE, "tensor late has an impossible dimension 0"},
        {build_dimension_product, BT_ERR_CALLER_FILE, "tensor late has an impossible dimension 1"},
        {build_byte_product, BT_ERR_CALLER_FILE, "F32 blocks or too large"},
        {build_large, BT_ERR_CALLER_FILE, "truncated: tensor late needs"},
        {build_dimension_count, BT_ERR_CALLER_FILE, "tensor late has 5 dimensions"},
        {build_dimension_none, BT_ERR_CALLER_FILE, "tensor late has 0 dimensions"},
        {build_partial_block, BT_ERR_CALLER_FILE, "not a whole number of Q8_0 blocks"},
        {build_unknown_tensor_type, BT_ERR_CALLER_UNSUPPORTED, "tensor late has type number 5"},
        {build_offset_odd, BT_ERR_CALLER_FILE, "not a multiple of the alignment 32"},
        {build_offset_far, BT_ERR_CALLER_FILE, "truncated: tensor late needs 4 bytes"},
        {build_name_long, BT_ERR_CALLER_FILE, "a tensor's name at byte"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        gguf_writer w;
        bt_gguf *file;
        bt_error error = {0};
        fill(&w);
        cases[i].build(&w);
        test_bytes bytes = gguf_writer_finish(&w);
        assert_int_equal(open_bytes(&bytes, &file, &error), cases[i].status);
        assert_null(file);
        if (strstr(error.text, cases[i].sentence) == NULL) fail_msg("%s", error.text);
        test_bytes_fini(&bytes);
        gguf_writer_fini(&w);
    }
}

static void other_alignments_are_read(void **state) {
    (void)state;
    for (uint32_t alignment = 1; alignment <= 256; alignment *= 2) {
        gguf_writer w;
        test_bytes bytes;
        test_bytes data = {0};
        gguf_writer_init(&w);
        w.alignment = alignment;
        gguf_writer_u32(&w, "general.alignment", alignment);
        test_bytes_add(&data, "abcde", 5);
        gguf_writer_tensor(&w, "a", 24, 5, 0, &data);
        gguf_writer_tensor(&w, "b", 24, 5, 0, &data);
        bt_gguf *file = open_good(&w, &bytes);
        assert_memory_equal(bt_gguf_find_tensor(file, "b")->data, "abcde", 5);
        bt_gguf_close(file);
        test_bytes_fini(&bytes);
        test_bytes_fini(&data);
        gguf_writer_fini(&w);
    }
}

static void a_file_without_tensors_is_read(void **state) {
    (void)state;
    gguf_writer w;
    test_bytes bytes;
    gguf_writer_init(&w);
    gguf_writer_u32(&w, "x", 1);
    bt_gguf *file = open_good(&w, &bytes);
    assert_int_equal(bt_gguf_tensor_count(file), 0);
    assert_null(bt_gguf_find_tensor(file, "x"));
    bt_gguf_close(file);
    test_bytes_fini(&bytes);
    gguf_writer_fini(&w);
}

static void opens_files_and_refuses_what_is_not_one(void **state) {
    (void)state;
    const test_folder folder = test_folder_make();
    gguf_writer w;
    fill(&w);
    test_bytes bytes = gguf_writer_finish(&w);
    char path[300];
    bt_gguf *file = NULL;
    bt_error error;
    assert_int_equal(test_bytes_write(&bytes, folder.path, "good.gguf"), BT_OK);
    (void)snprintf(path, sizeof path, "%s/good.gguf", folder.path);
    assert_int_equal(bt_gguf_open(path, &file, &error), BT_OK);
    assert_int_equal(bt_gguf_tensor_count(file), 2);
    bt_gguf_close(file);
    bytes.count = 0;
    assert_int_equal(test_bytes_write(&bytes, folder.path, "empty"), BT_OK);
    (void)snprintf(path, sizeof path, "%s/empty", folder.path);
    assert_int_equal(bt_gguf_open(path, &file, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "is empty"));
    (void)snprintf(path, sizeof path, "%s/absent", folder.path);
    assert_int_equal(bt_gguf_open(path, &file, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "No such file"));
    assert_int_equal(bt_gguf_open(folder.path, &file, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "is a folder"));
    assert_int_equal(bt_gguf_open("/dev/null", &file, &error), BT_ERR_CALLER_FILE);
    assert_non_null(strstr(error.text, "not a regular file"));
    test_bytes_fini(&bytes);
    gguf_writer_fini(&w);
    test_folder_remove(&folder);
}

#ifdef BT_FAULT
static void failed_allocations_are_reported(void **state) {
    (void)state;
    gguf_writer w;
    fill(&w);
    test_bytes bytes = gguf_writer_finish(&w);
    bt_status status = BT_ERR_WORKER_MEMORY;
    uint64_t nth = 0;
    while (status != BT_OK) {
        bt_gguf *file;
        bt_fault_set(BT_FAULT_ALLOC, ++nth);
        status = open_bytes(&bytes, &file, NULL);
        bt_fault_set(BT_FAULT_ALLOC, 0);
        assert_true(status == BT_OK || status == BT_ERR_WORKER_MEMORY);
        bt_gguf_close(file);
    }
    assert_true(nth > 3);
    test_bytes_fini(&bytes);
    gguf_writer_fini(&w);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_scalars),
        cmocka_unit_test(reads_arrays),
        cmocka_unit_test(reads_tensors),
        cmocka_unit_test(type_bytes_are_whole_blocks),
        cmocka_unit_test(getters_refuse_other_types),
        cmocka_unit_test(refuses_every_truncation),
        cmocka_unit_test(spoiled_headers_are_refused),
        cmocka_unit_test(spoiled_contents_are_refused),
        cmocka_unit_test(other_alignments_are_read),
        cmocka_unit_test(a_file_without_tensors_is_read),
        cmocka_unit_test(opens_files_and_refuses_what_is_not_one),
#ifdef BT_FAULT
        cmocka_unit_test(failed_allocations_are_reported),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
