/* The newest piece grows while what is added lies right behind it, so a run of short messages is
 * one piece. */
#include "proto/output.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "base/assert.h"
#include "base/mem.h"

enum {
    GATHER_BYTES = 16 * 1024,
    PIECES_MIN = 16,
    PARTS_MAX = 256, /* of one system call */
};

void proto_output_init(proto_output *output, bt_block_pool *blocks) {
    *output = (proto_output){.blocks = blocks};
}

static proto_output_piece *piece_at(const proto_output *output, size_t index) {
    return &output->pieces[(output->first + index) & (output->capacity - 1)];
}

static void drop_first(proto_output *output) {
    const proto_output_piece *piece = piece_at(output, 0);
    bt_block_release(piece->block);
    bt_free(piece->owned);
    output->first = (output->first + 1) & (output->capacity - 1);
    output->count--;
}

void proto_output_fini(proto_output *output) {
    while (output->count > 0)
        drop_first(output);
    bt_block_release(output->gathering);
    bt_free(output->pieces);
    *output = (proto_output){.blocks = output->blocks};
}

/* ---- in -------------------------------------------------------------------------------------- */

static bool grow(proto_output *output) {
    const size_t capacity = output->capacity == 0 ? PIECES_MIN : 2 * output->capacity;
    proto_output_piece *grown = bt_malloc(capacity * sizeof *grown);
    if (grown == NULL) return false;
    for (size_t i = 0; i < output->count; i++)
        grown[i] = *piece_at(output, i);
    bt_free(output->pieces);
    output->pieces = grown;
    output->first = 0;
    output->capacity = capacity;
    return true;
}

/* The piece's holds are the output's when it is true. */
static bool push(proto_output *output, proto_output_piece piece) {
    if (output->count == output->capacity && !grow(output)) return false;
    output->count++;
    *piece_at(output, output->count - 1) = piece;
    output->bytes += piece.count;
    return true;
}

/* A block with room for `count` short bytes. */
static bt_block *gather(proto_output *output, size_t count) {
    bt_block *block = output->gathering;
    if (block != NULL && !bt_block_is_shared(block)) block->used = 0; /* all of it is written */
    if (block != NULL && block->capacity - block->used >= count) return block;
    bt_block_release(block);
    output->gathering =
        bt_block_acquire(output->blocks, count > GATHER_BYTES ? count : GATHER_BYTES);
    return output->gathering;
}

bool proto_output_add(proto_output *output, const void *bytes, size_t count) {
    bt_block *block = gather(output, count);
    if (block == NULL) return false;
    uint8_t *to = block->bytes + block->used;
    memcpy(to, bytes, count);
    proto_output_piece *last = output->count > 0 ? piece_at(output, output->count - 1) : NULL;
    if (last != NULL && last->block == block) { /* it ends where the block's free part begins */
        BT_ASSERT(last->bytes + last->count == to);
        last->count += count;
        output->bytes += count;
    } else {
        if (!push(output, (proto_output_piece){.bytes = to, .count = count, .block = block}))
            return false;
        bt_block_hold(block);
    }
    block->used += count;
    return true;
}

bool proto_output_add_payload(proto_output *output, proto_message *message) {
    bool is_added = true;
    if (message->payload_bytes >= PROTO_OUTPUT_COPY_BYTES) {
        const proto_output_piece piece = {
            .bytes = message->payload,
            .count = message->payload_bytes,
            .block = message->block,
            .owned = message->block == NULL ? message->payload : NULL,
        };
        is_added = push(output, piece);
        if (is_added) {
            message->payload = NULL;
            message->block = NULL;
        }
    } else if (message->payload_bytes > 0) {
        is_added = proto_output_add(output, message->payload, message->payload_bytes);
    }
    proto_message_drop_payload(message);
    return is_added;
}

/* ---- out ------------------------------------------------------------------------------------- */

static void advance(proto_output *output, size_t written) {
    BT_ASSERT(written <= output->bytes);
    output->bytes -= written;
    while (written > 0) {
        proto_output_piece *piece = piece_at(output, 0);
        if (written < piece->count) {
            piece->bytes += written;
            piece->count -= written;
            return;
        }
        written -= piece->count;
        drop_first(output);
    }
}

/* The first pieces as parts of one call; returns the bytes. */
static size_t collect(const proto_output *output, size_t bytes_max, struct iovec *parts,
                      size_t *count_out) {
    size_t bytes = 0;
    size_t count = 0;
    while (count < output->count && count < PARTS_MAX && bytes < bytes_max) {
        const proto_output_piece *piece = piece_at(output, count);
        const size_t left = bytes_max - bytes;
        const size_t taken = piece->count < left ? piece->count : left;
        /* sendmsg takes what it reads from as not const. */
        parts[count++] = (struct iovec){(void *)(uintptr_t)piece->bytes, taken};
        bytes += taken;
    }
    *count_out = count;
    return bytes;
}

int proto_output_write(proto_output *output, int fd, size_t bytes_max) {
    while (output->bytes > 0 && bytes_max > 0) {
        struct iovec parts[PARTS_MAX];
        struct msghdr message = {.msg_iov = parts};
        const size_t bytes = collect(output, bytes_max, parts, &message.msg_iovlen);
        const ssize_t written = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno == EWOULDBLOCK ? EAGAIN : errno;
        advance(output, (size_t)written);
        bytes_max -= (size_t)written;
        if ((size_t)written < bytes) return EAGAIN; /* the next call would say so */
    }
    return 0;
}
