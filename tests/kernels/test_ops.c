/* Every op against its plain C reference, to the bit: each instruction set this processor has, one
 * and several threads, odd shapes, no rows, one row. */
#include "kernels/ops.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tests/kernels/random_data.h"

enum { HEAD_DIM_MAX = 128, GROUP_MAX = 7, DEVICES_MAX = 8 };

typedef struct devices {
    dev_host *at[DEVICES_MAX];
    uint32_t count;
} devices;

static const uint32_t thread_counts[] = {1, 3};

static int open_devices(void **state) {
    static devices all;
    for (uint32_t i = 0; dev_host_isa_at(i) != NULL; i++) {
        for (size_t t = 0; t < BT_ARRAY_COUNT(thread_counts); t++) {
            const dev_host_options options = {.threads = thread_counts[t],
                                              .isa = dev_host_isa_at(i),
                                              .head_dim_max = HEAD_DIM_MAX,
                                              .group_max = GROUP_MAX};
            if (dev_host_create(&options, &all.at[all.count], NULL) != BT_OK) return -1;
            all.count++;
        }
    }
    *state = &all;
    return all.count == 0 ? -1 : 0;
}

static int close_devices(void **state) {
    const devices *all = *state;
    for (uint32_t i = 0; i < all->count; i++)
        dev_host_destroy(all->at[i]);
    return 0;
}

static void *make(size_t count, size_t bytes) {
    void *block = bt_calloc(count, bytes);
    assert_non_null(block);
    return block;
}

static void assert_same(const dev_host *dev, const char *what, const void *got, const void *want,
                        size_t bytes) {
    if (memcmp(got, want, bytes) == 0) return;
    fail_msg("%s differs from the reference on %s with %u threads", what, dev_host_isa_name(dev),
             dev_host_threads(dev));
}

/* Rows of a format with random bits in the weights. Scales are random too, and one in eight of them
 * is subnormal, zero or negative. */
static void random_rows(uint64_t *seed, pack_format format, uint8_t *rows, size_t count,
                        uint32_t depth) {
    const size_t row_bytes = pack_row_bytes(format, depth);
    const size_t block_bytes = pack_row_bytes(format, PACK_BLOCK);
    for (size_t r = 0; r < count; r++, rows += row_bytes) {
        uint16_t weights[4096];
        assert_true(depth <= BT_ARRAY_COUNT(weights));
        random_bf16(seed, weights, depth, 1.0F);
        if (format == PACK_BF16) memcpy(rows, weights, row_bytes);
        if (format == PACK_INT8) pack_quantise_row(rows, depth, weights);
        if (format == PACK_BF16 || format == PACK_INT8) continue;
        for (size_t i = 0; i < row_bytes; i++)
            rows[i] = (uint8_t)random_below(seed, 256);
        for (size_t at = 0; at < row_bytes; at += block_bytes) {
            for (size_t i = 0; i < (format == PACK_Q4_1 ? 2U : 1U); i++) {
                uint16_t half = (uint16_t)(0x2000U + random_below(seed, 0x1000));
                if (random_below(seed, 8) == 0) half = (uint16_t)random_below(seed, 0x400);
                if (random_below(seed, 8) == 0) half |= 0x8000U;
                memcpy(rows + at + 2 * i, &half, sizeof half);
            }
        }
    }
}

static pack_matrix random_matrix(uint64_t *seed, pack_format format, uint32_t columns,
                                 uint32_t depth) {
    uint8_t *rows = make(columns * pack_row_bytes(format, depth) + 1, 1);
    uint8_t *panels = bt_calloc_aligned(PACK_ALIGN_BYTES, pack_bytes(format, columns, depth) + 64);
    assert_non_null(panels);
    random_rows(seed, format, rows, columns, depth);
    pack_rows(format, panels, 0, depth, rows, columns);
    bt_free(rows);
    return (pack_matrix){.panels = panels, .columns = columns, .depth = depth, .format = format};
}

static void free_matrix(pack_matrix m) {
    void *panels;
    memcpy(&panels, &m.panels, sizeof panels);
    bt_free(panels);
}

/* ---- packing */

static void rows_are_packed_alone_as_together(void **state) {
    (void)state;
    static const uint32_t depths[] = {1, 31, 32, 33, 96, 100};
    for (size_t i = 0; i < BT_ARRAY_COUNT(depths) * PACK_FORMAT_COUNT; i++) {
        const uint32_t depth = depths[i / PACK_FORMAT_COUNT];
        const pack_format format = (pack_format)(i % PACK_FORMAT_COUNT);
        if (!pack_format_takes(format, depth)) continue;
        uint64_t seed = 11 + i;
        const size_t row_bytes = pack_row_bytes(format, depth),
                     bytes = pack_bytes(format, 192, depth);
        uint8_t *rows = make(130, row_bytes);
        uint8_t *a = make(bytes, 1), *b = make(bytes, 1);
        random_rows(&seed, format, rows, 130, depth);
        pack_rows(format, a, 5, depth, rows, 130);
        for (uint32_t c = 0; c < 130; c++)
            pack_rows(format, b, 5 + c, depth, rows + c * row_bytes, 1);
        assert_memory_equal(a, b, bytes);
        bt_free(rows);
        bt_free(a);
        bt_free(b);
    }
}

static void columns_of_bf16_stand_in_halves(void **state) {
    (void)state;
    uint16_t rows[10][3], panel[3 * PACK_PANEL_COLUMNS] = {0};
    uint64_t seed = 5;
    random_bf16(&seed, rows[0], 30, 1.0F);
    pack_rows(PACK_BF16, (uint8_t *)panel, 0, 3, (const uint8_t *)rows, 10);
    /* Column 9 stands in slot 3 of its group. */
    assert_int_equal(panel[2 * PACK_PANEL_COLUMNS + 3], rows[9][2]);
}

/* What one row of a format says its weights are, from its bytes. */
static void gathered_weights_are_those_of_the_rows(void **state) {
    (void)state;
    static const uint8_t q8_0[34] = {0x00, 0x38, 1, 0xff, 0x80, 0x7f};    /* d = 0.5 */
    static const uint8_t q4_0[18] = {0x00, 0xbc, 0xf0, 0x08};             /* d = -1 */
    static const uint8_t q4_1[20] = {0x00, 0x3c, 0x00, 0x40, 0xf0, 0x08}; /* d = 1, m = 2 */
    uint8_t panel[64 * 36] = {0};
    float out[32];
    pack_rows(PACK_Q8_0, panel, 7, 32, q8_0, 1);
    pack_matrix m = {.panels = panel, .columns = 64, .depth = 32, .format = PACK_Q8_0};
    pack_gather(&m, 7, out);
    assert_true(out[0] == 0.5F && out[1] == -0.5F && out[2] == -64.0F && out[3] == 63.5F);
    pack_rows(PACK_Q4_0, panel, 63, 32, q4_0, 1);
    m.format = PACK_Q4_0;
    pack_gather(&m, 63, out);
    assert_true(out[0] == 8.0F && out[16] == -7.0F && out[1] == 0.0F && out[17] == 8.0F);
    pack_rows(PACK_Q4_1, panel, 0, 32, q4_1, 1);
    m.format = PACK_Q4_1;
    pack_gather(&m, 0, out);
    assert_true(out[0] == 2.0F && out[16] == 17.0F && out[1] == 10.0F && out[17] == 2.0F);
}

static void rows_are_quantised_to_the_nearest(void **state) {
    (void)state;
    const float weights[] = {127.0F, -127.0F, 0.5F, 1.5F, -0.5F, -2.5F, 63.25F, 0.0F};
    uint16_t bits[BT_ARRAY_COUNT(weights)];
    uint8_t row[sizeof(float) + BT_ARRAY_COUNT(weights)];
    for (size_t i = 0; i < BT_ARRAY_COUNT(weights); i++)
        bits[i] = bf16_from_f32(weights[i]);
    pack_quantise_row(row, BT_ARRAY_COUNT(weights), bits);
    const float one = 1.0F;
    static const int8_t want[] = {127, -127, 0, 2, 0, -2, 63, 0};
    assert_memory_equal(row, &one, sizeof one);
    assert_memory_equal(row + sizeof one, want, sizeof want);
    /* The smallest bf16 still has a scale. */
    static const uint16_t tiny[] = {1, 0x8001, 0}, none[] = {0, 0x8000, 0};
    static const int8_t ends[] = {127, -127, 0}, zeros[sizeof one + 3] = {0};
    pack_quantise_row(row, 3, tiny);
    assert_memory_equal(row + sizeof one, ends, sizeof ends);
    pack_quantise_row(row, 3, none);
    assert_memory_equal(row, zeros, sizeof zeros);
}

static void scales_that_are_no_numbers_are_seen(void **state) {
    (void)state;
    static const uint16_t bad[] = {0x7c00, 0xfc00, 0x7e00, 0x7c01};
    for (size_t i = 0; i < BT_ARRAY_COUNT(bad); i++) {
        uint8_t row[3 * 34] = {0};
        memset(row + 36, 0x7f, 30); /* weights may be anything */
        assert_true(pack_rows_are_finite(PACK_Q8_0, 96, row, 1));
        memcpy(row + 68, &bad[i], sizeof bad[i]);
        assert_false(pack_rows_are_finite(PACK_Q8_0, 96, row, 1));
        uint8_t q4_1[40] = {0};
        assert_true(pack_rows_are_finite(PACK_Q4_1, 32, q4_1, 2));
        memcpy(q4_1 + 22, &bad[i], sizeof bad[i]);
        assert_false(pack_rows_are_finite(PACK_Q4_1, 32, q4_1, 2));
    }
}

/* ---- matrix products */

typedef struct matmul_case {
    pack_format format;
    uint32_t rows, columns, depth;
    bool has_bias, adds;
} matmul_case;

static void check_matmul(const devices *all, matmul_case c, uint64_t seed) {
    const size_t x_stride = c.depth + 3;
    const size_t out_stride = c.columns + 5;
    const size_t out_count = c.rows * out_stride + 1;
    float *x = make(c.rows * x_stride + 1, sizeof *x);
    float *bias = make(c.columns, sizeof *bias);
    float *start = make(out_count, sizeof *start);
    float *want = make(out_count, sizeof *want);
    float *got = make(out_count, sizeof *got);
    random_floats(&seed, x, c.rows * x_stride, 2.0F);
    random_floats(&seed, bias, c.columns, 1.0F);
    random_floats(&seed, start, out_count, 1.0F);
    op_matmul_params p = {.x = x,
                          .weights = random_matrix(&seed, c.format, c.columns, c.depth),
                          .bias = c.has_bias ? bias : NULL,
                          .out_stride = out_stride,
                          .x_stride = x_stride,
                          .rows = c.rows,
                          .adds = c.adds};
    memcpy(want, start, out_count * sizeof *want);
    p.out = want;
    op_matmul_ref(&p);
    for (uint32_t d = 0; d < all->count; d++) {
        memcpy(got, start, out_count * sizeof *got);
        p.out = got;
        op_matmul(all->at[d], &p);
        assert_same(all->at[d], "op_matmul", got, want, out_count * sizeof *got);
    }
    free_matrix(p.weights);
    bt_free(x);
    bt_free(bias);
    bt_free(start);
    bt_free(want);
    bt_free(got);
}

static void matmul_equals_its_reference(void **state) {
    static const matmul_case cases[] = {
        {PACK_BF16, 0, 64, 8, false, false},
        {PACK_BF16, 1, 1, 1, false, false},
        {PACK_BF16, 1, 64, 576, false, true},
        {PACK_BF16, 2, 65, 7, true, false},
        {PACK_BF16, 3, 130, 257, true, true},
        {PACK_BF16, 4, 192, 64, false, false},
        {PACK_BF16, 5, 63, 100, false, true},
        {PACK_BF16, 6, 64, 300, true, false},
        {PACK_BF16, 7, 128, 256, false, false},
        {PACK_BF16, 13, 70, 513, false, false},
        {PACK_BF16, 96, 64, 40, false, false},
        {PACK_BF16, 97, 100, 260, true, true},
        {PACK_BF16, 200, 65, 33, false, false},
        {PACK_BF16, 11, 64, 1024, true, false},
        /* panels that are cut in half between threads, some with nothing in one half */
        {PACK_BF16, 8, 97, 300, true, true},
        {PACK_BF16, 9, 161, 257, false, true},
        {PACK_BF16, 14, 320, 70, true, false},
        {PACK_BF16, 101, 190, 300, true, true},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++)
        check_matmul(*state, cases[i], 100 + i);
}

static void quantised_matmul_equals_its_reference(void **state) {
    static const matmul_case cases[] = {
        {PACK_INT8, 0, 64, 32, false, false},  {PACK_INT8, 1, 1, 1, false, false},
        {PACK_INT8, 2, 65, 33, true, false},   {PACK_INT8, 1, 130, 257, true, true},
        {PACK_INT8, 0, 64, 32, false, false},  {PACK_INT8, 1, 64, 32, false, false},
        {PACK_INT8, 1, 70, 576, true, true},   {PACK_INT8, 2, 65, 64, true, false},
        {PACK_INT8, 3, 130, 256, true, true},  {PACK_INT8, 5, 63, 96, false, true},
        {PACK_INT8, 6, 64, 320, true, false},  {PACK_INT8, 7, 128, 160, false, false},
        {PACK_INT8, 97, 100, 288, true, true}, {PACK_INT8, 200, 65, 32, false, false},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        for (int format = PACK_INT8; format < PACK_FORMAT_COUNT; format++) {
            matmul_case c = cases[i];
            c.format = (pack_format)format;
            if (pack_format_takes(c.format, c.depth)) check_matmul(*state, c, 200 + i);
        }
    }
}

static void gate_up_equals_its_reference(void **state) {
    static const uint32_t shapes[][4] = {
        {0, 64, 8, PACK_BF16},    {1, 64, 64, PACK_BF16},   {1, 100, 48, PACK_BF16},
        {5, 65, 31, PACK_BF16},   {7, 192, 300, PACK_BF16}, {98, 70, 20, PACK_BF16},
        {1, 100, 64, PACK_INT8},  {7, 70, 31, PACK_INT8},   {1, 70, 96, PACK_Q8_0},
        {98, 100, 64, PACK_Q8_0}, {1, 65, 64, PACK_Q4_0},   {3, 64, 160, PACK_Q4_1},
        {8, 97, 70, PACK_BF16},   {13, 190, 64, PACK_BF16}, {97, 160, 33, PACK_BF16},
    };
    const devices *all = *state;
    for (size_t i = 0; i < BT_ARRAY_COUNT(shapes); i++) {
        const uint32_t rows = shapes[i][0], width = shapes[i][1], depth = shapes[i][2];
        uint64_t seed = 300 + i;
        float *x = make((size_t)rows * depth + 1, sizeof *x);
        float *want = make((size_t)rows * width + 1, sizeof *want);
        float *got = make((size_t)rows * width + 1, sizeof *got);
        random_floats(&seed, x, (size_t)rows * depth, 2.0F);
        const uint32_t columns = 2 * PACK_PANEL_COLUMNS * pack_panels(width);
        op_gate_up_params p = {.out = want,
                               .x = x,
                               .weights =
                                   random_matrix(&seed, (pack_format)shapes[i][3], columns, depth),
                               .rows = rows,
                               .width = width};
        op_gate_up_ref(&p);
        p.out = got;
        for (uint32_t d = 0; d < all->count; d++) {
            memset(got, 0x55, (size_t)rows * width * sizeof *got);
            op_gate_up(all->at[d], &p);
            assert_same(all->at[d], "op_gate_up", got, want, (size_t)rows * width * sizeof *got);
        }
        free_matrix(p.weights);
        bt_free(x);
        bt_free(want);
        bt_free(got);
    }
}

/* ---- rows */

static void embed_equals_its_reference(void **state) {
    const devices *all = *state;
    static const uint32_t shapes[][3] = {{0, 8, 10}, {1, 48, 1}, {9, 33, 200}, {40, 64, 129}};
    for (size_t i = 0; i < BT_ARRAY_COUNT(shapes) * PACK_FORMAT_COUNT; i++) {
        const uint32_t *shape = shapes[i / PACK_FORMAT_COUNT];
        const uint32_t rows = shape[0], width = shape[1], vocabulary = shape[2];
        const pack_format format = (pack_format)(i % PACK_FORMAT_COUNT);
        if (!pack_format_takes(format, width)) continue;
        uint64_t seed = 400 + i;
        int32_t *ids = make(rows + 1, sizeof *ids);
        float *want = make((size_t)rows * width + 1, sizeof *want);
        float *got = make((size_t)rows * width + 1, sizeof *got);
        for (uint32_t r = 0; r < rows; r++)
            ids[r] = (int32_t)random_below(&seed, vocabulary);
        op_embed_params p = {.out = want,
                             .token_ids = ids,
                             .rows = rows,
                             .weights = random_matrix(&seed, format, vocabulary, width)};
        op_embed_ref(&p);
        p.out = got;
        for (uint32_t d = 0; d < all->count; d++) {
            memset(got, 0x55, (size_t)rows * width * sizeof *got);
            op_embed(all->at[d], &p);
            assert_same(all->at[d], "op_embed", got, want, (size_t)rows * width * sizeof *got);
        }
        free_matrix(p.weights);
        bt_free(ids);
        bt_free(want);
        bt_free(got);
    }
}

static void rms_norm_equals_its_reference(void **state) {
    const devices *all = *state;
    static const uint32_t shapes[][2] = {{0, 16},  {1, 1},   {1, 16},   {3, 17},
                                         {8, 576}, {9, 100}, {33, 1024}};
    for (size_t i = 0; i < BT_ARRAY_COUNT(shapes); i++) {
        const uint32_t rows = shapes[i][0], width = shapes[i][1];
        const size_t stride = width + 7;
        uint64_t seed = 500 + i;
        float *x = make(rows * stride + 1, sizeof *x);
        float *weight = make(width, sizeof *weight);
        float *want = make((size_t)rows * width + 1, sizeof *want);
        float *got = make((size_t)rows * width + 1, sizeof *got);
        random_floats(&seed, x, rows * stride, 3.0F);
        random_floats(&seed, weight, width, 2.0F);
        op_rms_norm_params p = {.x = x,
                                .weight = weight,
                                .x_stride = stride,
                                .rows = rows,
                                .width = width,
                                .epsilon = 1e-5F};
        p.out = want;
        op_rms_norm_ref(&p);
        p.out = got;
        for (uint32_t d = 0; d < all->count; d++) {
            memset(got, 0, (size_t)rows * width * sizeof *got);
            op_rms_norm(all->at[d], &p);
            assert_same(all->at[d], "op_rms_norm", got, want, (size_t)rows * width * sizeof *got);
        }
        bt_free(x);
        bt_free(weight);
        bt_free(want);
        bt_free(got);
    }
}

static void rope_table_equals_its_reference(void **state) {
    const devices *all = *state;
    static const uint32_t positions[] = {0, 1, 2, 31, 511, 512, 8191, 40959, 131071};
    static const uint32_t head_dims[] = {2, 16, 64, 128};
    float want[BT_ARRAY_COUNT(positions) * HEAD_DIM_MAX];
    float got[BT_ARRAY_COUNT(positions) * HEAD_DIM_MAX];
    float frequencies[HEAD_DIM_MAX];
    for (size_t i = 0; i < HEAD_DIM_MAX; i++)
        frequencies[i] = 1.0F / (float)(1 + 7 * i * i);
    for (size_t i = 0; i < BT_ARRAY_COUNT(head_dims); i++) {
        op_rope_table_params p = {.out = want,
                                  .positions = positions,
                                  .rows = BT_ARRAY_COUNT(positions),
                                  .head_dim = head_dims[i],
                                  .frequencies = frequencies,
                                  .magnitude = i % 2 == 0 ? 1.0F : 1.1386F};
        op_rope_table_ref(&p);
        assert_true(want[0] == p.magnitude && want[head_dims[i] / 2] == 0.0F);
        p.out = got;
        const size_t bytes = BT_ARRAY_COUNT(positions) * head_dims[i] * sizeof *got;
        for (uint32_t d = 0; d < all->count; d++) {
            memset(got, 0, sizeof got);
            op_rope_table(all->at[d], &p);
            assert_same(all->at[d], "op_rope_table", got, want, bytes);
        }
    }
}

/* ---- pages: some sequences with random pages and random contents */

typedef struct kv_case {
    kv_dtype dtype;
    uint32_t page_tokens, head_dim, kv_heads, group;
    uint32_t sequences;
    uint32_t first[4];
    uint32_t tokens[4];
    uint32_t window;
} kv_case;

static const kv_case kv_cases[] = {
    {KV_DTYPE_BF16, 16, 64, 3, 3, 1, {0}, {1}, 0},
    {KV_DTYPE_BF16, 32, 64, 1, 1, 0, {0}, {0}, 0},
    {KV_DTYPE_BF16, 32, 64, 3, 3, 2, {5, 0}, {1, 40}, 0},
    {KV_DTYPE_BF16, 64, 128, 2, 2, 3, {63, 64, 0}, {1, 65, 64}, 0},
    {KV_DTYPE_F32, 16, 32, 2, 7, 2, {100, 3}, {9, 30}, 0},
    {KV_DTYPE_BF16, 16, 8, 1, 4, 2, {0, 17}, {70, 2}, 0},
    {KV_DTYPE_F32, 64, 16, 1, 2, 1, {511}, {3}, 0},
    {KV_DTYPE_BF16, 32, 24, 2, 2, 2, {1030, 500}, {1, 30}, 0},
    {KV_DTYPE_BF16, 32, 64, 1, 3, 2, {1700, 512}, {1, 1}, 0},
    {KV_DTYPE_BF16, 64, 66, 1, 1, 1, {480}, {100}, 0},
    /* Windows: of one key, within a tile, across tiles, across partitions, as wide as everything;
     * decoding, and blocks in which only some queries see a tile or a partition. */
    {KV_DTYPE_BF16, 16, 64, 3, 3, 3, {0, 63, 700}, {30, 3, 1}, 1},
    {KV_DTYPE_BF16, 32, 64, 2, 2, 3, {0, 500, 1700}, {100, 90, 1}, 5},
    {KV_DTYPE_F32, 16, 16, 1, 4, 2, {3, 480}, {9, 120}, 24},
    {KV_DTYPE_BF16, 32, 64, 1, 3, 2, {1700, 512}, {1, 1}, 64},
    {KV_DTYPE_BF16, 32, 24, 2, 2, 3, {1030, 500, 0}, {1, 30, 200}, 65},
    {KV_DTYPE_BF16, 64, 66, 1, 1, 2, {480, 1100}, {100, 120}, 100},
    {KV_DTYPE_BF16, 64, 128, 1, 2, 3, {1023, 1500, 600}, {1, 70, 40}, 513},
    {KV_DTYPE_F32, 32, 32, 2, 1, 3, {1023, 1500, 0}, {2, 1, 130}, 1025},
    {KV_DTYPE_BF16, 32, 64, 1, 2, 2, {1023, 0}, {2, 40}, 100000},
};

typedef struct kv_setup {
    op_kv kv;
    uint8_t *memory;
    size_t memory_bytes;
    uint32_t page_ids[256];
    uint32_t page_offsets[5];
    uint32_t token_offsets[5];
    uint32_t positions[512];
    uint32_t sequence_of[512];
    uint32_t tokens;
} kv_setup;

static void fill_pages(kv_setup *s, uint64_t *seed) {
    const size_t elements = s->memory_bytes / kv_element_bytes(s->kv.layout.dtype);
    if (s->kv.layout.dtype == KV_DTYPE_BF16)
        random_bf16(seed, (uint16_t *)(void *)s->memory, elements, 2.0F);
    else
        random_floats(seed, (float *)(void *)s->memory, elements, 2.0F);
}

static void set_up(kv_setup *s, const kv_case *c, uint64_t *seed) {
    *s = (kv_setup){.kv.layout = {.layers = 2,
                                  .kv_heads = c->kv_heads,
                                  .head_dim = c->head_dim,
                                  .page_tokens = c->page_tokens,
                                  .dtype = c->dtype}};
    uint32_t pages = 0;
    for (uint32_t i = 0; i < c->sequences; i++) {
        pages += kv_pages_for(c->first[i] + c->tokens[i], c->page_tokens);
        s->page_offsets[i + 1] = pages;
        for (uint32_t t = 0; t < c->tokens[i]; t++) {
            s->positions[s->tokens] = c->first[i] + t;
            s->sequence_of[s->tokens++] = i;
        }
        s->token_offsets[i + 1] = s->tokens;
    }
    random_order(seed, s->page_ids, 1, pages);
    s->memory_bytes = (pages + 2) * kv_page_bytes(&s->kv.layout);
    s->memory = make(s->memory_bytes, 1);
    fill_pages(s, seed);
    s->kv.memory = s->memory;
    s->kv.page_ids = s->page_ids;
    s->kv.page_offsets = s->page_offsets;
}

static void check_rope_store(const devices *all, const kv_case *c, uint64_t seed) {
    kv_setup s;
    set_up(&s, c, &seed);
    const uint32_t heads = c->group * c->kv_heads;
    const size_t count = (size_t)s.tokens * (heads + 2 * c->kv_heads) * c->head_dim + 1;
    float *start = make(count, sizeof *start);
    float *want = make(count, sizeof *want);
    float *got = make(count, sizeof *got);
    float *rope = make((size_t)s.tokens * c->head_dim + 1, sizeof *rope);
    uint8_t *want_memory = make(s.memory_bytes, 1);
    uint8_t *first_memory = make(s.memory_bytes, 1);
    float norms[2][HEAD_DIM_MAX];
    random_floats(&seed, start, count, 2.0F);
    random_floats(&seed, norms[0], 2 * (size_t)HEAD_DIM_MAX, 1.0F);
    random_floats(&seed, rope, (size_t)s.tokens * c->head_dim, 1.0F);
    op_rope_store_params p = {.qkv = want,
                              .kv = s.kv,
                              .rope = rope,
                              .positions = s.positions,
                              .sequence_of = s.sequence_of,
                              .q_norm = c->group > 2 ? norms[0] : NULL,
                              .k_norm = c->group > 2 ? norms[1] : NULL,
                              .tokens = s.tokens,
                              .heads = heads,
                              .layer = 1,
                              .epsilon = 1e-6F};
    memcpy(first_memory, s.memory, s.memory_bytes);
    memcpy(want, start, count * sizeof *want);
    op_rope_store_ref(&p);
    memcpy(want_memory, s.memory, s.memory_bytes);
    p.qkv = got;
    for (uint32_t d = 0; d < all->count; d++) {
        memcpy(s.memory, first_memory, s.memory_bytes);
        memcpy(got, start, count * sizeof *got);
        op_rope_store(all->at[d], &p);
        assert_same(all->at[d], "op_rope_store", got, want, count * sizeof *got);
        assert_same(all->at[d], "a KV page", s.memory, want_memory, s.memory_bytes);
    }
    bt_free(start);
    bt_free(want);
    bt_free(got);
    bt_free(rope);
    bt_free(want_memory);
    bt_free(first_memory);
    bt_free(s.memory);
}

static void rope_store_equals_its_reference(void **state) {
    for (size_t i = 0; i < BT_ARRAY_COUNT(kv_cases); i++)
        check_rope_store(*state, &kv_cases[i], 600 + i);
}

static void check_attention(const devices *all, const kv_case *c, uint64_t seed) {
    kv_setup s;
    set_up(&s, c, &seed);
    const uint32_t heads = c->group * c->kv_heads;
    const size_t q_stride = (size_t)heads * c->head_dim + 9;
    const size_t out_count = (size_t)s.tokens * heads * c->head_dim + 1;
    float *q = make(s.tokens * q_stride + 1, sizeof *q);
    float *want = make(out_count, sizeof *want);
    float *got = make(out_count, sizeof *got);
    random_floats(&seed, q, s.tokens * q_stride, 3.0F);
    op_attention_params p = {.out = want,
                             .q = q,
                             .kv = s.kv,
                             .token_offsets = s.token_offsets,
                             .first_positions = c->first,
                             .q_stride = q_stride,
                             .sequences = c->sequences,
                             .heads = heads,
                             .layer = 1,
                             .window = c->window,
                             .scale = 0.125F};
    op_attention_ref(&p);
    p.out = got;
    for (uint32_t d = 0; d < all->count; d++) {
        memset(got, 0, out_count * sizeof *got);
        assert_int_equal(
            op_attention_plan_create(all->at[d], 256, 4, 2048, heads, &s.kv.layout, &p.plan),
            BT_OK);
        op_attention_prepare(all->at[d], &p);
        op_attention(all->at[d], &p);
        op_attention_plan_destroy(p.plan);
        assert_same(all->at[d], "op_attention", got, want, out_count * sizeof *got);
    }
    bt_free(q);
    bt_free(want);
    bt_free(got);
    bt_free(s.memory);
}

static void attention_equals_its_reference(void **state) {
    for (size_t i = 0; i < BT_ARRAY_COUNT(kv_cases); i++)
        check_attention(*state, &kv_cases[i], 700 + i);
}

/* ---- devices */

static void unknown_instruction_sets_are_refused(void **state) {
    (void)state;
    dev_host *dev = NULL;
    bt_error error;
    const dev_host_options options = {.threads = 1, .isa = "mmx", .head_dim_max = 64};
    assert_int_equal(dev_host_create(&options, &dev, &error), BT_ERR_CALLER_UNSUPPORTED);
    assert_non_null(strstr(error.text, "mmx"));
    assert_null(dev);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_packed_alone_as_together),
        cmocka_unit_test(columns_of_bf16_stand_in_halves),
        cmocka_unit_test(gathered_weights_are_those_of_the_rows),
        cmocka_unit_test(rows_are_quantised_to_the_nearest),
        cmocka_unit_test(scales_that_are_no_numbers_are_seen),
        cmocka_unit_test(matmul_equals_its_reference),
        cmocka_unit_test(quantised_matmul_equals_its_reference),
        cmocka_unit_test(gate_up_equals_its_reference),
        cmocka_unit_test(embed_equals_its_reference),
        cmocka_unit_test(rms_norm_equals_its_reference),
        cmocka_unit_test(rope_table_equals_its_reference),
        cmocka_unit_test(rope_store_equals_its_reference),
        cmocka_unit_test(attention_equals_its_reference),
        cmocka_unit_test(unknown_instruction_sets_are_refused),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
