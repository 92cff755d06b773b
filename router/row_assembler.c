/* What is pending is completed first, by as many bytes as its length says; the rest of the payload
 * is read in place. A payload that is not aligned for that (nobody here sends one) is copied. */
#include "router/row_assembler.h"

#include <string.h>

#include "base/assert.h"
#include "base/little_endian.h"
#include "proto/message.h"
#include "proto/row.h"
#include "proto/row_stream.h"

enum { LENGTH_BYTES = 4 };

void row_assembler_init(row_assembler *a, const row_expectation *expect, bt_block_pool *blocks) {
    *a = (row_assembler){.expect = *expect, .blocks = blocks};
}

static void drop_handed(row_assembler *a) {
    for (size_t i = 0; i < 2; i++) {
        bt_block_release(a->handed[i]);
        a->handed[i] = NULL;
    }
}

void row_assembler_fini(row_assembler *a) {
    drop_handed(a);
    bt_block_release(a->partial);
    a->partial = NULL;
}

size_t row_assembler_pending(const row_assembler *a) {
    return a->partial != NULL ? a->partial->used : 0;
}

/* Adds the whole records at the beginning of bytes to the batches, and says how long they are. A
 * record that has begun says how long it is; an impossible one is not waited for. */
static bt_status scan(row_assembler *a, const row_bytes *in, row_batches *out, size_t *bytes_out) {
    size_t bytes = 0;
    uint32_t rows = 0;
    for (;;) {
        const uint8_t *at = in->bytes + bytes;
        const size_t left = in->count - bytes;
        token_row row;
        size_t used = 0;
        const bt_status status = row_record_decode(at, left, a->expect.cap, &row, &used);
        a->fault =
            used > 0 ? row_check(&a->expect, &row) : row_record_fault(at, left, a->expect.cap);
        if (status != BT_OK || a->fault != NULL) return BT_ERR_PEER_PROTOCOL;
        if (used == 0) break;
        bytes += used;
        rows++;
    }
    *bytes_out = bytes;
    if (rows == 0) return BT_OK;
    BT_ASSERT(out->count < 2);
    out->runs[out->count] = (row_bytes){.bytes = in->bytes, .count = bytes, .block = in->block};
    out->rows[out->count++] = rows;
    return BT_OK;
}

/* Bytes that the pending record needs next: those of its length, then all. */
static size_t wanted_bytes(const row_assembler *a) {
    if (a->partial->used < LENGTH_BYTES) return LENGTH_BYTES;
    return bt_load_le32(a->partial->bytes);
}

/* A block of `capacity` bytes for what is pending. */
static bt_status make_room(row_assembler *a, size_t capacity) {
    bt_block *old = a->partial;
    if (old != NULL && old->capacity >= capacity) return BT_OK;
    bt_block *block = bt_block_acquire(a->blocks, capacity);
    if (block == NULL) return BT_ERR_WORKER_MEMORY;
    if (old != NULL) {
        memcpy(block->bytes, old->bytes, old->used);
        block->used = old->used;
        bt_block_release(old);
    }
    a->partial = block;
    return BT_OK;
}

/* Bytes of `in` behind what is pending, up to its end. */
static bt_status fill(row_assembler *a, row_bytes *in) {
    while (in->count > 0 && a->partial->used < wanted_bytes(a)) {
        const size_t missing = wanted_bytes(a) - a->partial->used;
        const size_t taken = missing < in->count ? missing : in->count;
        const bt_status status = make_room(a, wanted_bytes(a));
        if (status != BT_OK) return status;
        memcpy(a->partial->bytes + a->partial->used, in->bytes, taken);
        a->partial->used += taken;
        in->bytes += taken;
        in->count -= taken;
        a->fault = row_record_fault(a->partial->bytes, a->partial->used, a->expect.cap);
        if (a->fault != NULL) return BT_ERR_PEER_PROTOCOL;
    }
    return BT_OK;
}

/* The pending record; when it is whole it is handed on. */
static bt_status complete(row_assembler *a, row_bytes *in, row_batches *out) {
    size_t bytes = 0;
    bt_status status = fill(a, in);
    if (status != BT_OK || a->partial->used < wanted_bytes(a)) return status;
    bt_block *block = a->partial;
    const row_bytes record = {.bytes = block->bytes, .count = block->used, .block = block};
    a->handed[0] = block;
    a->partial = NULL;
    status = scan(a, &record, out, &bytes);
    BT_ASSERT(status != BT_OK || bytes == block->used);
    return status;
}

static bt_status copy_aligned(row_assembler *a, row_bytes *in) {
    bt_block *block = bt_block_acquire(a->blocks, in->count);
    if (block == NULL) return BT_ERR_WORKER_MEMORY;
    memcpy(block->bytes, in->bytes, in->count);
    a->handed[1] = block;
    in->bytes = block->bytes;
    in->block = block;
    return BT_OK;
}

bt_status row_assembler_push(row_assembler *a, const row_bytes *payload, row_batches *out) {
    BT_ASSERT(payload->count <= PROTO_FRAME_PAYLOAD_MAX);
    row_bytes in = *payload;
    size_t bytes = 0;
    out->count = 0;
    drop_handed(a);
    bt_status status = a->partial != NULL ? complete(a, &in, out) : BT_OK;
    if (status != BT_OK || in.count == 0) return status;
    if ((uintptr_t)in.bytes % sizeof(int32_t) != 0) status = copy_aligned(a, &in);
    if (status == BT_OK) status = scan(a, &in, out, &bytes);
    in.bytes += bytes;
    in.count -= bytes;
    if (status != BT_OK || in.count == 0) return status;
    /* The scan has looked at what there is of the header. */
    status = make_room(a, in.count < LENGTH_BYTES ? LENGTH_BYTES : bt_load_le32(in.bytes));
    return status == BT_OK ? fill(a, &in) : status;
}
