/* What a metadata row says of its support against what the request allows, and sections that are
 * none: each lie fails its attempt by name. A rogue plays prefill. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "base/little_endian.h"
#include "rogue.h"

enum { NUMBER = 22, PROMPT = 32, DEADLINE_US = 1000000 }; /* an even number: no log-probability */

static sample make_sample(uint32_t mask_mode, uint32_t count, uint32_t true_size) {
    return (sample){.number = NUMBER,
                    .prompt_tokens = PROMPT,
                    .mask_mode = mask_mode,
                    .support_count = count,
                    .true_size = true_size};
}

static rogue *start(const sample *s, uint32_t checksums[2]) {
    rogue *r = rogue_create(false);
    assert_int_equal(end_expect(r->honest, s, r->self, r->now_us + DEADLINE_US), BT_OK);
    for (uint32_t i = 0; i < 2; i++) {
        const handoff_header chunk =
            rogue_make_chunk(r, s, i, i * ROGUE_CHUNK_PAGES, ROGUE_CHUNK_PAGES);
        checksums[i] = chunk.payload_crc;
        rogue_send(r, &chunk, chunk.payload_bytes);
    }
    return r;
}

/* Ends the test's attempt: NULL, or why it must have failed. */
static void finish(rogue *r, const char *why) {
    const end_attempt *a = end_find(r->honest, NUMBER);
    assert_int_equal(a->ready, why == NULL);
    assert_int_equal(a->failed, why != NULL);
    assert_int_equal(r->heard.kind, HANDOFF_ACK);
    assert_int_equal(r->heard.status, why == NULL ? (int)BT_OK : (int)BT_ERR_REQUEST_CORRUPT);
    if (why != NULL && strstr(a->text, why) == NULL) fail_msg("'%s' is not '%s'", a->text, why);
    rogue_destroy(r);
}

static void expect_row(const sample *s, rogue_row_change change, const char *why) {
    uint32_t checksums[2];
    size_t bytes = 0;
    rogue *r = start(s, checksums);
    const handoff_header header = rogue_make_row(r, s, checksums, change, &bytes);
    rogue_send(r, &header, bytes);
    finish(r, why);
}

static void say_one_more(metadata_row *row) {
    row->cap_needed++;
}
static void say_one_less(metadata_row *row) {
    row->cap_needed--;
}

static void exact_rows_are_whole(void **state) {
    (void)state;
    for (uint32_t mode = ROW_MASK_SELECTED; mode <= ROW_MASK_SUPPORT; mode++) {
        for (uint32_t count = 1; count <= ROGUE_CAP; count += ROGUE_CAP - 1) {
            const sample s = make_sample(mode, count, 0);
            expect_row(&s, NULL, NULL);
            expect_row(&s, say_one_more, "row's cap needed is not");
            expect_row(&s, say_one_less, "row's cap needed is not");
        }
        const sample wide = make_sample(mode, ROGUE_CAP + 1, 0);
        expect_row(&wide, NULL, "row's support size is not");
        const sample none = make_sample(mode, 0, 0);
        expect_row(&none, NULL, "row's support size is not");
    }
    const sample off = make_sample(ROW_MASK_OFF, 0, 0);
    expect_row(&off, NULL, NULL);
    expect_row(&off, say_one_more, "row's cap needed is not");
}

static void bounded_rows_are_cut_at_the_cap_alone(void **state) {
    (void)state;
    static const struct {
        uint32_t count, size;
        const char *why;
    } cases[] = {
        {1, 1, NULL},
        {3, 3, NULL},
        {ROGUE_CAP, ROGUE_CAP, NULL},
        {ROGUE_CAP, ROGUE_CAP + 1, NULL},
        {ROGUE_CAP, UINT32_MAX, NULL}, /* decode knows the vocabulary, the handoff does not */
        {ROGUE_CAP - 1, ROGUE_CAP, "row's cap needed is not"},
        {3, 2, "row's cap needed is not"},
        {ROGUE_CAP + 1, ROGUE_CAP + 1, "row's support size is not"},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        const sample s = make_sample(ROW_MASK_SUPPORT, cases[i].count, cases[i].size);
        expect_row(&s, NULL, cases[i].why);
    }
}

/* Kinds, sizes and ends of sections that a reader must not follow, under headers that agree with
 * them. Nothing depends on the checksum, which none of these reaches. */
static void sections_that_are_none_are_named(void **state) {
    (void)state;
    static const struct {
        uint32_t before_end; /* where the value goes */
        uint16_t value;
        uint32_t more; /* bytes behind the end */
        const char *why;
    } lies[] = {
        {16, 9, 0, "selected log-probability"}, /* the last section's kind, its zero, its bytes */
        {14, 1, 0, "selected log-probability"},
        {12, 8, 0, "selected log-probability"},
        {12, 0, 0, "selected log-probability"},
        {4, 1, 0, "selected log-probability"}, /* its padding */
        {0, 7, 16, "a section that is not known"},
        {0, ROW_SECTION_SUPPORT_IDS, 16, "a section that is not known"},
        {0, 0, 8, "a section that is not known"},
        {0, 0, 4, "bytes behind the last section"},
        {0, ROW_SECTION_FIRST_LOGPROB, 8, "first-token log-probability"},
        {0, ROW_SECTION_TOP_LOGPROBS, 16, "top log-probabilities"},
        {0, ROW_SECTION_ID_LOGPROBS, 8, "asked log-probabilities"},
    };
    const sample s = make_sample(ROW_MASK_SUPPORT, 3, 0);
    for (size_t i = 0; i < BT_ARRAY_COUNT(lies); i++) {
        uint32_t checksums[2];
        size_t bytes = 0;
        rogue *r = start(&s, checksums);
        handoff_header header = rogue_make_row(r, &s, checksums, NULL, &bytes);
        memset(r->payload + bytes, 0, 16);
        bt_store_le16(r->payload + bytes - lies[i].before_end, lies[i].value);
        bytes += lies[i].more;
        bt_store_le32(r->payload + 8, (uint32_t)bytes);
        header.payload_bytes = bytes;
        rogue_send(r, &header, bytes);
        finish(r, lies[i].why);
    }
}

static void headers_that_lie_are_named(void **state) {
    (void)state;
    static const struct {
        uint32_t at, value;
        const char *why;
    } lies[] = {
        {0, 0, "no metadata row"},
        {4, 128u << 16 | 1, "another format version"},
        {4, 128u << 16 | 3, "another format version"},
        {4, 120u << 16 | ROW_FORMAT_VERSION, "header bytes"},
        {8, 0, "total bytes"},
        {60, 2, "support ids"},
        {60, UINT32_MAX, "support ids"},
        {92, 3, "mask mode"},
        {92, ROW_MASK_OFF, "support without a mask"},
        {104, 1, "reserved bytes"},
        {124, 1, "reserved bytes"},
    };
    const sample s = make_sample(ROW_MASK_SUPPORT, 3, 0);
    for (size_t i = 0; i < BT_ARRAY_COUNT(lies); i++) {
        uint32_t checksums[2];
        size_t bytes = 0;
        rogue *r = start(&s, checksums);
        const handoff_header header = rogue_make_row(r, &s, checksums, NULL, &bytes);
        bt_store_le32(r->payload + lies[i].at, lies[i].value);
        rogue_send(r, &header, bytes);
        finish(r, lies[i].why);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_rows_are_whole),
        cmocka_unit_test(bounded_rows_are_cut_at_the_cap_alone),
        cmocka_unit_test(sections_that_are_none_are_named),
        cmocka_unit_test(headers_that_lie_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
