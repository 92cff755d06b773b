/* What is written of rows: lists and arrays against plain loops over the same rows, in portions of
 * any size, over any range, from memory and from the file, of rows far wider than a portion. */
#include "router/reply_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/row_stream.h"

enum { ROWS = 40, WIDTH_MAX = 7000 };

typedef struct fixture {
    reply_limits limits;
    reply_spill spill;
    reply_store store;
    api_request request;
    generation generation;
    weight_runs weights;
    token_row rows[ROWS];
    reply_place places[ROWS + 1]; /* before each row */
    int32_t *ids[ROWS];
    float *logprobs[ROWS];
    bt_text out, expected;
} fixture;

static uint32_t next_random(uint64_t *random) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*random >> 33);
}

static void make_row(fixture *f, uint32_t i, uint32_t mode, uint64_t *random) {
    token_row *row = &f->rows[i];
    const uint32_t kind = next_random(random) % 10;
    const uint32_t size = next_random(random);
    const uint32_t count = 1 + (kind == 0 ? size % WIDTH_MAX : kind < 4 ? size % 300 : size % 9);
    f->ids[i] = malloc(count * sizeof(int32_t));
    f->logprobs[i] = malloc(count * sizeof(float));
    assert_non_null(f->ids[i]);
    assert_non_null(f->logprobs[i]);
    for (uint32_t k = 0; k < count; k++) {
        f->ids[i][k] = (int32_t)(next_random(random) % 151936);
        f->logprobs[i][k] = -(float)next_random(random) / 1e8f;
    }
    *row = (token_row){.token = f->ids[i][0],
                       .mask_mode = mode,
                       .selected_logprob = f->logprobs[i][0],
                       .support_count = count,
                       .support_ids = f->ids[i],
                       .support_logprobs = mode == ROW_MASK_SUPPORT ? f->logprobs[i] : NULL,
                       .support_size = kind % 3 == 1 ? count + size % 100 : count,
                       .weights_version = next_random(random) % 4 == 0 ? i : UINT64_MAX - 1};
}

static void set_up(fixture *f, uint64_t memory, uint32_t mode, uint64_t seed) {
    uint64_t random = seed;
    static uint64_t record[WIDTH_MAX + 100];
    memset(f, 0, sizeof(*f));
    f->limits.spill_path = "/tmp";
    budget_init(&f->limits.memory, memory);
    budget_init(&f->limits.spill, 1 << 30);
    reply_spill_init(&f->spill, &f->limits);
    reply_store_init(&f->store, &f->spill);
    generation_init(&f->generation, &f->request, NULL);
    f->generation.ids = malloc(ROWS * sizeof(int32_t));
    assert_non_null(f->generation.ids);
    f->generation.count = ROWS;
    for (uint32_t i = 0; i < ROWS; i++) {
        make_row(f, i, mode, &random);
        f->places[i] = reply_store_end(&f->store);
        const size_t bytes = row_record_bytes(token_row_widths(&f->rows[i]));
        row_record_encode(&f->rows[i], (uint8_t *)record);
        assert_int_equal(reply_store_append(&f->store, (const uint8_t *)record, bytes, NULL),
                         BT_OK);
        assert_int_equal(weight_runs_push(&f->weights, f->rows[i].weights_version), BT_OK);
        f->generation.ids[i] = f->rows[i].token;
    }
    f->places[0] = reply_store_begin(&f->store);
    bt_text_init(&f->out, 1 << 26);
    bt_text_init(&f->expected, 1 << 26);
}

static void tear_down(fixture *f) {
    for (uint32_t i = 0; i < ROWS; i++) {
        free(f->ids[i]);
        free(f->logprobs[i]);
    }
    free(f->generation.ids);
    f->generation.ids = NULL;
    generation_fini(&f->generation);
    weight_runs_fini(&f->weights);
    reply_store_fini(&f->store);
    reply_spill_fini(&f->spill);
    bt_text_fini(&f->out);
    bt_text_fini(&f->expected);
}

/* ---- what is expected ------------------------------------------------------------------------ */

static void add_ids(bt_text *out, const token_row *row) {
    bt_text_add(out, "[", 1);
    for (uint32_t k = 0; k < row->support_count; k++) {
        if (k > 0) bt_text_add(out, ",", 1);
        bt_json_add_int(out, row->support_ids[k]);
    }
    bt_text_add(out, "]", 1);
}

static void add_logprobs(bt_text *out, const token_row *row) {
    if (row->support_logprobs == NULL) {
        bt_json_add_float(out, row->selected_logprob);
        return;
    }
    bt_text_add(out, "[", 1);
    for (uint32_t k = 0; k < row->support_count; k++) {
        if (k > 0) bt_text_add(out, ",", 1);
        bt_json_add_float(out, row->support_logprobs[k]);
    }
    bt_text_add(out, "]", 1);
}

static void expect_list(fixture *f, reply_piece_kind kind, uint32_t from, uint32_t to) {
    bt_text *out = &f->expected;
    bt_text_clear(out);
    bt_text_add(out, "[", 1);
    for (uint32_t i = from; i < to; i++) {
        const token_row *row = &f->rows[i];
        const bool is_truncated = row->support_size > row->support_count;
        if (i > from) bt_text_add(out, ",", 1);
        if (kind == REPLY_MASK) add_ids(out, row);
        if (kind == REPLY_MASK_LOGPROBS) add_logprobs(out, row);
        if (kind == REPLY_TRUNCATED) bt_json_add_bool(out, is_truncated);
        if (kind == REPLY_SUPPORT_SIZES) bt_json_add_int(out, row->support_size);
        if (kind == REPLY_IDS) bt_json_add_int(out, row->token);
    }
    bt_text_add(out, "]", 1);
}

/* Runs, from the rows alone. */
static void expect_weights(fixture *f, uint32_t from, uint32_t to) {
    bt_text *out = &f->expected;
    bt_text_clear(out);
    bt_text_add(out, "[", 1);
    for (uint32_t i = from; i < to;) {
        uint32_t end = i + 1;
        while (end < to && f->rows[end].weights_version == f->rows[i].weights_version) {
            end++;
        }
        bt_text_add_format(out, "%s[%llu,%u]", i > from ? "," : "",
                           (unsigned long long)f->rows[i].weights_version, end - i);
        i = end;
    }
    bt_text_add(out, "]", 1);
}

static void add_bytes(bt_text *out, const void *data, size_t bytes) {
    bt_text_add(out, data, bytes);
}

static void expect_array(fixture *f, reply_array array, uint32_t from, uint32_t to) {
    bt_text *out = &f->expected;
    bt_text_clear(out);
    for (uint32_t i = from; i < to; i++) {
        const token_row *row = &f->rows[i];
        const uint32_t is_truncated = row->support_size > row->support_count;
        switch (array) {
        case REPLY_ARRAY_OUTPUT_IDS: add_bytes(out, &row->token, 4); break;
        case REPLY_ARRAY_LENGTHS: add_bytes(out, &row->support_count, 4); break;
        case REPLY_ARRAY_TOKEN_IDS:
            add_bytes(out, row->support_ids, 4 * (size_t)row->support_count);
            break;
        case REPLY_ARRAY_LOGPROBS:
            if (row->support_logprobs != NULL)
                add_bytes(out, row->support_logprobs, 4 * (size_t)row->support_count);
            else
                add_bytes(out, &row->selected_logprob, 4);
            break;
        case REPLY_ARRAY_TRUNCATED: add_bytes(out, &is_truncated, 1); break;
        case REPLY_ARRAY_TRUNCATED_WIDE: add_bytes(out, &is_truncated, 4); break;
        case REPLY_ARRAY_SUPPORT_SIZES: add_bytes(out, &row->support_size, 4); break;
        }
    }
}

/* The base64 of what is expected, quoted. */
static void expect_base64(fixture *f) {
    const size_t length = bt_base64_length(f->expected.used);
    char *text = malloc(length + 2);
    assert_non_null(text);
    text[0] = '"';
    (void)bt_base64(text + 1, f->expected.bytes, f->expected.used);
    text[length + 1] = '"';
    bt_text_clear(&f->expected);
    bt_text_add(&f->expected, text, length + 2);
    free(text);
}

/* ---- what is written ------------------------------------------------------------------------- */

/* One piece between two literals, in portions of about `wanted` bytes. */
static void write_piece(fixture *f, const reply_piece *piece, uint32_t from, uint32_t to,
                        size_t wanted) {
    reply_writer writer;
    bt_text portion;
    const reply_range range = {
        .row_from = from, .row_to = to, .place = f->places[from], .weights = &f->weights};
    bt_text_init(&portion, 1 << 26);
    bt_text_clear(&f->out);
    reply_writer_init(&writer, NULL, WIDTH_MAX);
    reply_writer_start(&writer, &f->generation, &f->store, NULL, &range);
    bt_text_add_string(reply_writer_literal(&writer), "<");
    if (piece->kind == REPLY_ARRAY || piece->kind == REPLY_ARRAY_BASE64) {
        reply_writer_add_array(&writer, piece->kind, piece->array);
    } else {
        reply_writer_add(&writer, piece->kind);
    }
    bt_text_add_string(reply_writer_literal(&writer), ">");
    while (!reply_writer_is_done(&writer)) {
        bt_text_clear(&portion);
        assert_int_equal(reply_writer_produce(&writer, &portion, wanted), BT_OK);
        assert_true(portion.used > 0);
        /* A portion is bounded however wide a row is. */
        assert_true(portion.used < wanted + 64 * 1024);
        assert_int_equal(portion.bytes[portion.used], 0);
        bt_text_add(&f->out, portion.bytes, portion.used);
    }
    bt_text_fini(&portion);
    reply_writer_fini(&writer);
}

static void check_piece(fixture *f, const reply_piece *piece, uint32_t from, uint32_t to) {
    static const size_t WANTED[] = {1, 7, 3000, 1 << 25};
    for (size_t i = 0; i < sizeof(WANTED) / sizeof(WANTED[0]); i++) {
        write_piece(f, piece, from, to, WANTED[i]);
        assert_int_equal(f->out.used, f->expected.used + 2);
        assert_int_equal(f->out.bytes[0], '<');
        if (f->expected.used > 0)
            assert_memory_equal(f->out.bytes + 1, f->expected.bytes, f->expected.used);
        assert_int_equal(f->out.bytes[f->out.used - 1], '>');
    }
}

static void check_range(fixture *f, uint32_t from, uint32_t to) {
    static const reply_piece_kind LISTS[] = {REPLY_MASK, REPLY_MASK_LOGPROBS, REPLY_TRUNCATED,
                                             REPLY_SUPPORT_SIZES, REPLY_IDS};
    for (size_t i = 0; i < sizeof(LISTS) / sizeof(LISTS[0]); i++) {
        const reply_piece piece = {.kind = LISTS[i]};
        expect_list(f, LISTS[i], from, to);
        check_piece(f, &piece, from, to);
    }
    const reply_piece weights = {.kind = REPLY_WEIGHTS};
    expect_weights(f, from, to);
    check_piece(f, &weights, from, to);
    for (reply_array array = 0; array <= REPLY_ARRAY_SUPPORT_SIZES; array++) {
        const reply_piece bytes = {.kind = REPLY_ARRAY, .array = array};
        const reply_piece text = {.kind = REPLY_ARRAY_BASE64, .array = array};
        expect_array(f, array, from, to);
        check_piece(f, &bytes, from, to);
        expect_base64(f);
        check_piece(f, &text, from, to);
    }
}

static void check_all(uint64_t memory, uint32_t mode, uint64_t seed) {
    static fixture f;
    uint64_t random = seed;
    set_up(&f, memory, mode, seed);
    check_range(&f, 0, ROWS);
    check_range(&f, 0, 0);
    check_range(&f, ROWS, ROWS);
    for (int i = 0; i < 4; i++) {
        const uint32_t from = next_random(&random) % ROWS;
        check_range(&f, from, from + next_random(&random) % (ROWS - from + 1));
    }
    tear_down(&f);
}

static void test_selected(void **state) {
    (void)state;
    check_all(1 << 30, ROW_MASK_SELECTED, 1);
    check_all(0, ROW_MASK_SELECTED, 2);
}

static void test_support(void **state) {
    (void)state;
    check_all(1 << 30, ROW_MASK_SUPPORT, 3);
    check_all(0, ROW_MASK_SUPPORT, 4);
    check_all(50000, ROW_MASK_SUPPORT, 5);
}

/* Rows that change their weights each time: more runs than are written at once. */
static void test_many_runs(void **state) {
    enum { RUNS = 10000 };
    weight_runs weights = {0};
    (void)state;
    for (uint32_t i = 0; i < RUNS; i++) {
        assert_int_equal(weight_runs_push(&weights, i / 2), BT_OK);
    }
    assert_int_equal(weights.count, RUNS / 2);
    for (uint32_t row = 0; row < RUNS; row += 37) {
        assert_int_equal(weight_runs_find(&weights, row), row / 2);
    }
    generation g = {0};
    reply_limits limits = {.spill_path = "/tmp"};
    reply_spill spill;
    reply_store store;
    reply_writer writer;
    bt_text out, expected;
    reply_spill_init(&spill, &limits);
    reply_store_init(&store, &spill);
    bt_text_init(&out, 1 << 20);
    bt_text_init(&expected, 1 << 20);
    const reply_range range = {.row_from = 1, .row_to = RUNS - 1, .weights = &weights};
    reply_writer_init(&writer, NULL, 1);
    reply_writer_start(&writer, &g, &store, NULL, &range);
    reply_writer_add(&writer, REPLY_WEIGHTS);
    for (size_t wanted = 1; !reply_writer_is_done(&writer); wanted = out.used + 1) {
        assert_int_equal(reply_writer_produce(&writer, &out, wanted), BT_OK);
    }
    bt_text_add_string(&expected, "[[0,1]");
    for (uint32_t i = 1; i < RUNS / 2; i++) {
        bt_text_add_format(&expected, ",[%u,%u]", i, i + 1 < RUNS / 2 ? 2u : 1u);
    }
    bt_text_add_string(&expected, "]");
    assert_string_equal(out.bytes, expected.bytes);
    reply_writer_fini(&writer);
    bt_text_fini(&out);
    bt_text_fini(&expected);
    weight_runs_fini(&weights);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_selected),
        cmocka_unit_test(test_support),
        cmocka_unit_test(test_many_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
