/* Two ways: with nothing pending and an aligned payload the records are read in place; otherwise
 * the payload is appended to what is pending and read there. */
#include "router/row_assembler.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "proto/message.h"
#include "proto/row.h"
#include "proto/row_stream.h"

enum {
    PARTIAL_BYTES_MIN = 4096,
    PARTIAL_BYTES_KEPT = 64 * 1024, /* a larger block is given back when nothing is pending */
};

void row_assembler_init(row_assembler *a, const row_expectation *expect) {
    memset(a, 0, sizeof *a);
    a->expect = *expect;
}

void row_assembler_fini(row_assembler *a) {
    bt_free(a->partial);
    a->partial = NULL;
    a->used = a->capacity = a->handed = 0;
}

size_t row_assembler_pending(const row_assembler *a) {
    return a->used - a->handed;
}

/* Counts the whole records at the beginning of bytes. A record that has begun says how long it is;
 * an impossible one is not waited for. */
static bt_status scan(row_assembler *a, const uint8_t *bytes, size_t available, row_batch *batch) {
    *batch = (row_batch){.records = bytes};
    for (;;) {
        const uint8_t *at = bytes + batch->bytes;
        const size_t left = available - batch->bytes;
        token_row row;
        size_t used = 0;
        const bt_status status = row_record_decode(at, left, a->expect.cap, &row, &used);
        a->fault =
            used > 0 ? row_check(&a->expect, &row) : row_record_fault(at, left, a->expect.cap);
        if (status != BT_OK || a->fault != NULL) return BT_ERR_PEER_PROTOCOL;
        if (used == 0) return BT_OK;
        batch->bytes += used;
        batch->count++;
    }
}

static bt_status make_room(row_assembler *a, size_t bytes) {
    if (bytes <= a->capacity) return BT_OK;
    size_t capacity = PARTIAL_BYTES_MIN;
    while (capacity < bytes)
        capacity *= 2;
    uint8_t *partial = bt_realloc(a->partial, capacity);
    if (partial == NULL) return BT_ERR_WORKER_MEMORY;
    a->partial = partial;
    a->capacity = capacity;
    return BT_OK;
}

static bt_status append(row_assembler *a, const uint8_t *bytes, size_t count) {
    const bt_status status = make_room(a, a->used + count);
    if (status != BT_OK) return status;
    if (count > 0) memcpy(a->partial + a->used, bytes, count);
    a->used += count;
    /* What is pending is less than one record, and records above the cap are refused. */
    BT_ASSERT(a->used <= row_record_bytes_max(a->expect.cap) + PROTO_FRAME_PAYLOAD_MAX);
    return BT_OK;
}

static void drop_handed(row_assembler *a) {
    a->used -= a->handed;
    if (a->handed > 0 && a->used > 0) memmove(a->partial, a->partial + a->handed, a->used);
    a->handed = 0;
    if (a->used == 0 && a->capacity > PARTIAL_BYTES_KEPT) row_assembler_fini(a);
}

bt_status row_assembler_push(row_assembler *a, const uint8_t *bytes, size_t count,
                             row_batch *batch_out) {
    BT_ASSERT(count <= PROTO_FRAME_PAYLOAD_MAX);
    drop_handed(a);
    *batch_out = (row_batch){.records = NULL};
    if (count == 0) return BT_OK;
    if (a->used > 0 || (uintptr_t)bytes % sizeof(int32_t) != 0) {
        bt_status status = append(a, bytes, count);
        if (status != BT_OK) return status;
        status = scan(a, a->partial, a->used, batch_out);
        a->handed = status == BT_OK ? batch_out->bytes : 0;
        return status;
    }
    const bt_status status = scan(a, bytes, count, batch_out);
    if (status != BT_OK) return status;
    return append(a, bytes + batch_out->bytes, count - batch_out->bytes);
}
