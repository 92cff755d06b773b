/* Each field of the record is compared, adopted and printed according to its class. */
#include "proto/record.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void fill(cluster_record *r) {
    memset(r, 0, sizeof *r);
    r->sampling_mask_max_tokens = 4096;
    r->kv_checksum = RECORD_CHECKSUM_FULL + 1;
    r->page_tokens = 32;
    (void)snprintf(r->kv_dtype, sizeof r->kv_dtype, "bf16");
    (void)snprintf(r->kv_layout, sizeof r->kv_layout, "layers=30 kv_heads=3 head_dim=64");
    (void)snprintf(r->numerics, sizeof r->numerics, "host/exact/1");
    memset(r->model_fingerprint, 'a', 64);
    memset(r->tokenizer_fingerprint, 'b', 64);
    r->row_format = 1;
    r->protocol_minor = 3;
    r->weights_version = 12;
}

static void change(cluster_record *r, record_field field) {
    switch (field) {
    case RECORD_SAMPLING_MASK_MAX_TOKENS: r->sampling_mask_max_tokens = 128; return;
    case RECORD_KV_CHECKSUM: r->kv_checksum = RECORD_CHECKSUM_OFF + 1; return;
    case RECORD_PAGE_TOKENS: r->page_tokens = 16; return;
    case RECORD_KV_DTYPE: (void)snprintf(r->kv_dtype, sizeof r->kv_dtype, "f32"); return;
    case RECORD_KV_LAYOUT: r->kv_layout[0] = 'L'; return;
    case RECORD_NUMERICS: (void)snprintf(r->numerics, sizeof r->numerics, "host/exact/2"); return;
    case RECORD_MODEL_FINGERPRINT: r->model_fingerprint[3] = 'c'; return;
    case RECORD_TOKENIZER_FINGERPRINT: r->tokenizer_fingerprint[63] = 'd'; return;
    case RECORD_ROW_FORMAT: r->row_format++; return;
    case RECORD_PROTOCOL_MINOR: r->protocol_minor++; return;
    case RECORD_WEIGHTS_VERSION: r->weights_version = 1ull << 50; return;
    case RECORD_FIELD_COUNT: break;
    }
    fail();
}

static void forget(cluster_record *r, record_field field) {
    switch (field) {
    case RECORD_SAMPLING_MASK_MAX_TOKENS: r->sampling_mask_max_tokens = 0; return;
    case RECORD_KV_CHECKSUM: r->kv_checksum = 0; return;
    case RECORD_PAGE_TOKENS: r->page_tokens = 0; return;
    case RECORD_KV_DTYPE: r->kv_dtype[0] = '\0'; return;
    case RECORD_KV_LAYOUT: r->kv_layout[0] = '\0'; return;
    case RECORD_NUMERICS: r->numerics[0] = '\0'; return;
    case RECORD_MODEL_FINGERPRINT: r->model_fingerprint[0] = '\0'; return;
    case RECORD_TOKENIZER_FINGERPRINT: r->tokenizer_fingerprint[0] = '\0'; return;
    case RECORD_ROW_FORMAT: r->row_format = 0; return;
    case RECORD_PROTOCOL_MINOR: r->protocol_minor = 0; return;
    case RECORD_WEIGHTS_VERSION: r->weights_version = 0; return;
    case RECORD_FIELD_COUNT: break;
    }
    fail();
}

static void each_field_is_compared_by_its_class(void **state) {
    (void)state;
    for (int i = 0; i < RECORD_FIELD_COUNT; i++) {
        const record_field field = (record_field)i;
        cluster_record ours, theirs;
        bt_error error = {0};
        record_field found = RECORD_FIELD_COUNT;
        fill(&ours);
        theirs = ours;
        assert_true(record_compare(&theirs, "w", &ours, "c", &found, &error));
        assert_true(record_is_pairable(&theirs, &ours));
        change(&theirs, field);
        const bool must_equal = record_field_class(field) == RECORD_MUST_EQUAL;
        assert_int_equal(record_compare(&theirs, "w", &ours, "c", &found, &error), !must_equal);
        assert_int_equal(record_is_pairable(&theirs, &ours), must_equal);
        if (!must_equal) continue;
        assert_int_equal(found, field);
        assert_int_equal(error.status, BT_ERR_PEER_REFUSED);
        assert_memory_equal(error.text, record_field_name(field), strlen(record_field_name(field)));
        forget(&theirs, field); /* what one side does not know is not compared */
        assert_true(record_compare(&theirs, "w", &ours, "c", &found, &error));
        assert_true(record_compare(&ours, "w", &theirs, "c", &found, &error));
    }
}

static void each_field_is_adopted_only_when_unknown(void **state) {
    (void)state;
    for (int i = 0; i < RECORD_FIELD_COUNT; i++) {
        const record_field field = (record_field)i;
        cluster_record from, into, wanted;
        fill(&from);
        fill(&wanted);
        into = wanted;
        change(&from, field);
        assert_true(record_field_is_known(&into, field));
        record_adopt(&into, &from);
        assert_memory_equal(&into, &wanted, sizeof into);
        forget(&into, field);
        assert_false(record_field_is_known(&into, field));
        record_adopt(&into, &from);
        assert_memory_equal(&into, &from, sizeof into);
    }
}

static void the_sentence_names_field_values_and_hosts(void **state) {
    (void)state;
    cluster_record ours, theirs;
    record_field field;
    bt_error error;
    fill(&ours);
    theirs = ours;
    theirs.sampling_mask_max_tokens = 128;
    assert_false(record_compare(&theirs, "worker decode at hostA (pid 7)", &ours, "router hostB",
                                &field, &error));
    assert_string_equal(error.text, "sampling_mask_max_tokens differs: 128 on worker decode at "
                                    "hostA (pid 7), 4096 on router hostB");
    theirs = ours;
    theirs.kv_checksum = RECORD_CHECKSUM_SAMPLED + 1;
    assert_false(record_compare(&theirs, "A", &ours, "B", NULL, &error));
    assert_string_equal(error.text, "kv_checksum differs: sampled on A, full on B");
    theirs = ours;
    theirs.model_fingerprint[0] = 'f';
    assert_false(record_compare(&theirs, "A", &ours, "B", NULL, &error));
    assert_string_equal(error.text,
                        "model_fingerprint differs: faaaaaaaaaaaaaaa on A, aaaaaaaaaaaaaaaa on B");
    theirs = ours;
    (void)snprintf(theirs.kv_dtype, sizeof theirs.kv_dtype, "f32");
    assert_false(record_compare(&theirs, "A", &ours, "B", NULL, NULL));
    assert_false(record_compare(&theirs, "A", &ours, "B", NULL, &error));
    assert_string_equal(error.text, "kv_dtype differs: \"f32\" on A, \"bf16\" on B");
}

static void checksums_have_names(void **state) {
    (void)state;
    static const char *const by_value[] = {"unknown", "off", "sampled", "full", "unknown"};
    for (uint32_t value = 0; value < 5; value++)
        assert_string_equal(record_checksum_name(value), by_value[value]);
    assert_string_equal(record_checksum_name(UINT32_MAX), "unknown");
    assert_string_equal(record_checksum_names[RECORD_CHECKSUM_SAMPLED], "sampled");
    assert_null(record_checksum_names[RECORD_CHECKSUM_FULL + 1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checksums_have_names),
        cmocka_unit_test(each_field_is_compared_by_its_class),
        cmocka_unit_test(each_field_is_adopted_only_when_unknown),
        cmocka_unit_test(the_sentence_names_field_values_and_hosts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
