/* Space in the file is never used twice: it is sparse, and ends with the reply. */
#include "router/reply_spill.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"

enum { PART_BYTES = 256 * 1024 };

void reply_spill_init(reply_spill *spill, reply_limits *limits) {
    *spill = (reply_spill){.limits = limits, .fd = -1};
}

void reply_spill_fini(reply_spill *spill) {
    if (spill->fd >= 0) close(spill->fd);
    budget_give(&spill->limits->spill, spill->kept_bytes);
    reply_spill_init(spill, spill->limits);
}

static bt_status open_file(reply_spill *spill) {
    const char *path = spill->limits->spill_path;
    spill->fd = open(path, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (spill->fd >= 0) return BT_OK;
    /* A file system without unnamed files: a named one that loses its name at once. */
    char name[4096];
    size_t bytes = strlen(path);
    static const char TAIL[] = "/baton-reply.XXXXXX";
    if (bytes + sizeof(TAIL) > sizeof(name)) return BT_ERR_WORKER_IO;
    memcpy(name, path, bytes);
    memcpy(name + bytes, TAIL, sizeof(TAIL));
    spill->fd = mkostemp(name, O_CLOEXEC);
    if (spill->fd < 0) {
        bt_log_error("reply", "no temporary file in %s: %s", path, strerror(errno));
        return BT_ERR_WORKER_IO;
    }
    (void)unlink(name);
    return BT_OK;
}

bt_status reply_spill_take(reply_spill *spill, size_t bytes, reply_part *part_out) {
    const size_t room = bytes > PART_BYTES ? bytes : PART_BYTES;
    const bt_status status = spill->fd < 0 ? open_file(spill) : BT_OK;
    if (status != BT_OK) return status;
    *part_out = (reply_part){.at = spill->end, .room = room};
    /* Holes are made of whole pages. */
    spill->end += (room + 4095) / 4096 * 4096;
    return BT_OK;
}

void reply_spill_give(reply_spill *spill, const reply_part *part) {
    const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (part->used > 0 && fallocate(spill->fd, mode, (off_t)part->at, (off_t)part->room) != 0) {
        spill->kept_bytes += part->used;
        return;
    }
    budget_give(&spill->limits->spill, part->used);
}

bt_status reply_spill_write(reply_spill *spill, reply_part *part, const uint8_t *bytes,
                            size_t count) {
    BT_ASSERT(count <= part->room - part->used);
    if (!budget_take(&spill->limits->spill, count)) return BT_ERR_REQUEST_FULL;
    size_t written = 0;
    while (written < count) {
        const ssize_t now = pwrite(spill->fd, bytes + written, count - written,
                                   (off_t)(part->at + part->used + written));
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) {
            bt_log_error("reply", "writing a temporary file failed: %s", strerror(errno));
            budget_give(&spill->limits->spill, count);
            return BT_ERR_WORKER_IO;
        }
        written += (size_t)now;
    }
    part->used += count;
    return BT_OK;
}

bt_status reply_spill_read(const reply_spill *spill, uint64_t at, uint8_t *out, size_t count) {
    size_t done = 0;
    while (done < count) {
        const ssize_t now = pread(spill->fd, out + done, count - done, (off_t)(at + done));
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) {
            bt_log_error("reply", "reading a temporary file failed: %s", strerror(errno));
            return BT_ERR_WORKER_IO;
        }
        done += (size_t)now;
    }
    return BT_OK;
}
