/* A row stream for the router's assembler: five bytes say what is expected and how the stream is
 * cut, the rest is the stream. Rows that come out keep every rule, no byte is lost, and however the
 * stream is cut, the same is refused or nothing is. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "router/row_assembler.h"
#include "tests/fuzz/row_rules.h"

enum { SHAPE_BYTES = 5, VOCAB = 1000, STREAM_MAX = PROTO_FRAME_PAYLOAD_MAX };

typedef struct outcome {
    bool is_refused;
    uint32_t rows;
    size_t bytes;
} outcome;

static row_expectation read_shape(const uint8_t *shape) {
    return (row_expectation){
        .cap = 1 + shape[1],
        .mask_mode = shape[0] % 3,
        .mask_bounded = shape[0] % 3 != 0 && (shape[0] & 0x10) != 0,
        .has_logprob = (shape[0] & 0x20) != 0,
        .vocab_size = (shape[0] & 0x40) != 0 ? VOCAB : 0,
        .vocab_limit = shape[2] == 0 ? 0 : 4u * shape[2],
        .top_count = shape[3] & 7,
        .id_logprob_count = shape[3] >> 4 & 3,
    };
}

/* Rows of a run, each by the rules. */
static void check_run(const row_expectation *expect, const row_bytes *run, uint32_t rows) {
    size_t at = 0;
    BT_ASSERT((uintptr_t)run->bytes % 4 == 0);
    for (uint32_t i = 0; i < rows; i++) {
        token_row row;
        size_t used = 0;
        const bt_status status =
            row_record_decode(run->bytes + at, run->count - at, expect->cap, &row, &used);
        BT_ASSERT(status == BT_OK && used > 0);
        BT_ASSERT(row_rules_hold(expect, &row));
        at += used;
    }
    BT_ASSERT(at == run->count && rows > 0);
}

/* Pieces of lengths that follow from `cuts`; 0: the whole at once. */
static outcome run(const row_expectation *expect, const uint8_t *stream, size_t bytes,
                   uint32_t cuts) {
    static _Alignas(16) uint8_t frame[STREAM_MAX + 16];
    const bt_block_pool_options options = {.idle_bytes_max = 0};
    bt_block_pool *pool = NULL;
    row_assembler assembler;
    outcome result = {0};
    size_t pushed = 0;
    uint32_t state = cuts;
    BT_ASSERT(bt_block_pool_create(&options, &pool) == BT_OK);
    row_assembler_init(&assembler, expect, pool);
    while (pushed < bytes && !result.is_refused) {
        row_batches batches;
        state = state * 1664525u + 1013904223u;
        size_t piece = cuts == 0 ? bytes : 1 + (state >> 8) % (1 + cuts);
        if (piece > bytes - pushed) piece = bytes - pushed;
        uint8_t *payload = frame + (cuts == 0 ? 0 : state >> 20 & 7);
        memcpy(payload, stream + pushed, piece);
        pushed += piece;
        const row_bytes in = {.bytes = payload, .count = piece};
        const bt_status status = row_assembler_push(&assembler, &in, &batches);
        result.is_refused = status != BT_OK;
        if (result.is_refused) {
            BT_ASSERT(status == BT_ERR_PEER_PROTOCOL);
            BT_ASSERT(assembler.fault != NULL);
            break;
        }
        for (uint32_t i = 0; i < batches.count; i++) {
            check_run(expect, &batches.runs[i], batches.rows[i]);
            result.rows += batches.rows[i];
            result.bytes += batches.runs[i].count;
        }
        BT_ASSERT(result.bytes + row_assembler_pending(&assembler) == pushed);
        BT_ASSERT(row_assembler_pending(&assembler) < row_record_bytes_max(expect->cap));
    }
    row_assembler_fini(&assembler);
    BT_ASSERT(bt_block_pool_used_bytes(pool) == 0);
    bt_block_pool_destroy(pool);
    return result;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes < SHAPE_BYTES || bytes - SHAPE_BYTES > STREAM_MAX) return 0;
    const row_expectation expect = read_shape(data);
    const uint8_t *stream = data + SHAPE_BYTES;
    const outcome whole = run(&expect, stream, bytes - SHAPE_BYTES, 0);
    const outcome cut = run(&expect, stream, bytes - SHAPE_BYTES, 1u + data[4]);
    BT_ASSERT(whole.is_refused == cut.is_refused);
    if (!whole.is_refused) BT_ASSERT(whole.rows == cut.rows && whole.bytes == cut.bytes);
    return 0;
}
