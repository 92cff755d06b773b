/* Streaming detokenisation: complete characters go through untouched, the start of one is held, and
 * what can no longer become one is replaced. Each maximal subpart becomes one U+FFFD, as browsers
 * and Python do, so the text does not depend on how the bytes were cut. */
#include "base/assert.h"
#include "base/utf8.h"
#include "router/tokenizer.h"

static const char replacement[] = "\xEF\xBF\xBD";

void detokenizer_init(detokenizer *d) {
    *d = (detokenizer){0};
}

static void emit_replacement(detokenizer *d, text_sink sink, void *context) {
    d->held_count = 0;
    sink(context, replacement, sizeof replacement - 1);
}

/* Gives one byte to the sequence that is held. Returns the bytes consumed: 0 when the byte does not
 * belong to it, and the held part was replaced. */
static size_t extend_held(detokenizer *d, uint8_t byte, text_sink sink, void *context) {
    BT_ASSERT(d->held_count > 0 && d->held_count < sizeof d->held);
    if (!bt_utf8_can_follow(d->held[0], d->held_count, byte)) {
        emit_replacement(d, sink, context);
        return 0;
    }
    d->held[d->held_count++] = byte;
    if (d->held_count == bt_utf8_sequence_bytes(d->held[0])) {
        const size_t count = d->held_count;
        d->held_count = 0;
        sink(context, (const char *)d->held, count);
    }
    return 1;
}

void detokenizer_push(detokenizer *d, const char *bytes, size_t count, text_sink sink,
                      void *context) {
    size_t at = 0;
    while (at < count) {
        if (d->held_count > 0) {
            at += extend_held(d, (uint8_t)bytes[at], sink, context);
            continue;
        }
        const size_t whole = bt_utf8_valid_prefix(bytes + at, count - at);
        if (whole > 0) sink(context, bytes + at, whole);
        at += whole;
        if (at == count) break;
        const uint8_t lead = (uint8_t)bytes[at++];
        if (bt_utf8_sequence_bytes(lead) == 0) {
            emit_replacement(d, sink, context);
        } else {
            d->held[0] = lead;
            d->held_count = 1;
        }
    }
}

bool detokenizer_breaks(const detokenizer *d, const char *bytes, size_t count) {
    return d->held_count > 0 && count > 0 &&
           !bt_utf8_can_follow(d->held[0], d->held_count, (uint8_t)bytes[0]);
}

void detokenizer_finish(detokenizer *d, text_sink sink, void *context) {
    if (d->held_count > 0) emit_replacement(d, sink, context);
}
