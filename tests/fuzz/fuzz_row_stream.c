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

/* Rows of a batch, each by the rules. */
static void check_batch(const row_expectation *expect, const row_batch *batch) {
    size_t at = 0;
    BT_ASSERT(batch->count == 0 || (uintptr_t)batch->records % 4 == 0);
    for (uint32_t i = 0; i < batch->count; i++) {
        token_row row;
        size_t used = 0;
        const bt_status status =
            row_record_decode(batch->records + at, batch->bytes - at, expect->cap, &row, &used);
        BT_ASSERT(status == BT_OK && used > 0);
        BT_ASSERT(row_rules_hold(expect, &row));
        at += used;
    }
    BT_ASSERT(at == batch->bytes);
}

/* Pieces of lengths that follow from `cuts`; 0: the whole at once. */
static outcome run(const row_expectation *expect, const uint8_t *stream, size_t bytes,
                   uint32_t cuts) {
    static _Alignas(16) uint8_t frame[STREAM_MAX + 16];
    row_assembler assembler;
    outcome result = {0};
    size_t pushed = 0;
    uint32_t state = cuts;
    row_assembler_init(&assembler, expect);
    while (pushed < bytes && !result.is_refused) {
        row_batch batch;
        state = state * 1664525u + 1013904223u;
        size_t piece = cuts == 0 ? bytes : 1 + (state >> 8) % (1 + cuts);
        if (piece > bytes - pushed) piece = bytes - pushed;
        uint8_t *payload = frame + (cuts == 0 ? 0 : state >> 20 & 7);
        memcpy(payload, stream + pushed, piece);
        pushed += piece;
        const bt_status status = row_assembler_push(&assembler, payload, piece, &batch);
        result.is_refused = status != BT_OK;
        if (result.is_refused) {
            BT_ASSERT(status == BT_ERR_PEER_PROTOCOL);
            BT_ASSERT(assembler.fault != NULL);
            break;
        }
        check_batch(expect, &batch);
        result.rows += batch.count;
        result.bytes += batch.bytes;
        BT_ASSERT(result.bytes + row_assembler_pending(&assembler) == pushed);
        BT_ASSERT(row_assembler_pending(&assembler) < row_record_bytes_max(expect->cap));
    }
    row_assembler_fini(&assembler);
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
