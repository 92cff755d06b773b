/* The head of a reply as safetensors: known bytes, and for any sizes a file that the strict reader
 * takes, with each tensor where its size says and 4-byte ones aligned. */
#include "router/tensor_header.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/little_endian.h"
#include "base/safetensors.h"

enum { SAMPLES_MAX = 200 };

/* The whole head, written sample by sample as a reply does. */
static uint64_t write_head(bt_text *out, const tensor_sample *samples, size_t count, bool is_list,
                           uint64_t json_bytes) {
    tensor_header header = {0};
    bt_text part;
    uint64_t before = 0;
    bt_text_init(&part, 1 << 20);
    tensor_header_begin(out);
    for (size_t i = 0; i < count; i++) {
        bt_text_clear(&part);
        tensor_header_add(&header, &part, is_list ? (int64_t)i : -1, &samples[i]);
        bt_text_add(out, part.bytes, part.used);
    }
    before = out->used;
    bt_text_clear(&part);
    tensor_header_end(&header, &part, before, json_bytes);
    bt_text_add(out, part.bytes, part.used);
    bt_text_fini(&part);
    assert_false(out->has_failed);
    return header.data_bytes;
}

static void test_known_bytes(void **state) {
    static const tensor_sample plain = {.rows = 3};
    static const tensor_sample support = {
        .rows = 2, .entries = 5, .has_masks = true, .is_support = true};
    bt_text out;
    (void)state;
    bt_text_init(&out, 1 << 16);
    assert_int_equal(write_head(&out, &plain, 1, false, 10), 22);
    assert_string_equal(out.bytes, "{\"__metadata__\":{\"format\":\"baton-1\"},\"output_ids\":{"
                                   "\"dtype\":\"I32\",\"shape\":[3],\"data_offsets\":[0,12]},"
                                   "\"reply_json\":{\"dtype\":\"U8\",\"shape\":[10],"
                                   "\"data_offsets\":[12,22]}}    ");
    bt_text_clear(&out);
    assert_int_equal(write_head(&out, &support, 1, true, 7), 8 + 8 + 20 + 20 + 7);
    assert_string_equal(
        out.bytes,
        "{\"__metadata__\":{\"format\":\"baton-1\"},\"0.output_ids\":{\"dtype\":\"I32\","
        "\"shape\":[2],\"data_offsets\":[0,8]},\"0.sampling_mask_lengths\":{\"dtype\":"
        "\"I32\",\"shape\":[2],\"data_offsets\":[8,16]},\"0.sampling_mask_token_ids\":{"
        "\"dtype\":\"I32\",\"shape\":[5],\"data_offsets\":[16,36]},"
        "\"0.sampling_logprobs\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[36,"
        "56]},\"reply_json\":{\"dtype\":\"U8\",\"shape\":[7],\"data_offsets\":[56,63]}}");
    bt_text_fini(&out);
}

static void expect_tensor(const bt_safetensors *file, const char *prefix, const char *name,
                          uint64_t elements) {
    char whole[64];
    snprintf(whole, sizeof(whole), "%s%s", prefix, name);
    const bt_safetensors_tensor *tensor = bt_safetensors_find(file, whole);
    if (tensor == NULL) fail_msg("no tensor %s", whole);
    assert_int_equal(tensor->dimension_count, 1);
    assert_int_equal(tensor->elements, elements);
    assert_int_equal(tensor->offset % 4, 0);
    assert_int_equal(tensor->dtype,
                     strstr(name, "logprobs") != NULL ? BT_SAFETENSORS_F32 : BT_SAFETENSORS_I32);
}

static void expect_sample(const bt_safetensors *file, const char *prefix, const tensor_sample *s) {
    expect_tensor(file, prefix, "output_ids", s->rows);
    if (s->has_masks) {
        expect_tensor(file, prefix, "sampling_mask_lengths", s->rows);
        expect_tensor(file, prefix, "sampling_mask_token_ids", s->entries);
        expect_tensor(file, prefix, "sampling_logprobs", s->is_support ? s->entries : s->rows);
    }
    if (s->is_bounded) {
        expect_tensor(file, prefix, "sampling_mask_truncated", s->rows);
        expect_tensor(file, prefix, "sampling_mask_support_sizes", s->rows);
    }
}

static void check_file(const tensor_sample *samples, size_t count, bool is_list,
                       uint64_t json_bytes) {
    bt_text out;
    bt_safetensors *file;
    bt_error error;
    bt_text_init(&out, 1 << 24);
    const uint64_t data_bytes = write_head(&out, samples, count, is_list, json_bytes);
    assert_int_equal(out.used % 8, 0);
    const size_t bytes = 8 + out.used + (size_t)data_bytes;
    uint8_t *all = calloc(1, bytes);
    assert_non_null(all);
    bt_store_le64(all, out.used);
    memcpy(all + 8, out.bytes, out.used);
    if (bt_safetensors_open_memory(all, bytes, "reply", &file, &error) != BT_OK)
        fail_msg("%s", error.text);
    size_t tensors = 1;
    for (size_t i = 0; i < count; i++) {
        char prefix[16] = "";
        if (is_list) snprintf(prefix, sizeof(prefix), "%zu.", i);
        expect_sample(file, prefix, &samples[i]);
        tensors += 1u + (samples[i].has_masks ? 3 : 0) + (samples[i].is_bounded ? 2 : 0);
    }
    assert_int_equal(bt_safetensors_count(file), tensors);
    const bt_safetensors_tensor *json = bt_safetensors_find(file, "reply_json");
    assert_non_null(json);
    assert_int_equal(json->dtype, BT_SAFETENSORS_U8);
    assert_int_equal(json->elements, json_bytes);
    assert_int_equal(json->offset + json->bytes, bytes);
    bt_safetensors_close(file);
    free(all);
    bt_text_fini(&out);
}

static void test_any_sizes(void **state) {
    static tensor_sample samples[SAMPLES_MAX];
    uint64_t random = 5;
    (void)state;
    for (unsigned round = 0; round < 60; round++) {
        const size_t count = round < 20 ? 1 : 1 + round % SAMPLES_MAX;
        for (size_t i = 0; i < count; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            samples[i] = (tensor_sample){.has_masks = round % 4 != 0,
                                         .is_support = round % 4 >= 2,
                                         .is_bounded = round % 4 == 3};
            samples[i].rows = (random >> 40) % 4 == 0 ? 0 : (random >> 33) % 300;
            if (samples[i].rows > 0) samples[i].entries = (random >> 50) % 2000;
        }
        check_file(samples, count, round % 3 != 0 || count > 1, (random >> 20) % 50);
    }
}

/* Without any token every tensor but the reply is there and empty. */
static void test_no_rows(void **state) {
    static const tensor_sample samples[3] = {
        {.has_masks = true, .is_bounded = true}, {.has_masks = true}, {0}};
    (void)state;
    check_file(samples, 3, true, 2);
    check_file(samples, 1, false, 2);
    check_file(NULL, 0, true, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_bytes),
        cmocka_unit_test(test_any_sizes),
        cmocka_unit_test(test_no_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
