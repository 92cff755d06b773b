/* Appending to a growing block; a failure is kept in the text, not returned. */
#include "base/json_writer.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json_number.h"
#include "base/mem.h"
#include "base/utf8.h"

enum { FIRST_BYTES = 256, PORTION = 256 /* numbers */ };

void bt_text_init(bt_text *text, size_t bytes_max) {
    memset(text, 0, sizeof(*text));
    text->bytes_max = bytes_max;
    text->first_bytes = FIRST_BYTES;
}

void bt_text_init_pooled(bt_text *text, size_t bytes_max, bt_block_pool *pool, size_t first_bytes) {
    bt_text_init(text, bytes_max);
    text->pool = pool;
    text->first_bytes = first_bytes;
}

void bt_text_fini(bt_text *text) {
    if (text->pool == NULL) bt_free(text->bytes);
    bt_block_release(text->block);
    bt_text_init(text, text->bytes_max);
}

bt_block *bt_text_take_block(bt_text *text) {
    bt_block *block = text->block;
    if (block == NULL) return NULL;
    bt_text_init_pooled(text, text->bytes_max, text->pool, text->first_bytes);
    return block;
}

void bt_text_clear(bt_text *text) {
    text->used = 0;
    text->has_failed = false;
    if (text->bytes != NULL) text->bytes[0] = 0;
}

/* false: no memory. */
static bool grow(bt_text *text, size_t capacity) {
    if (text->pool == NULL) {
        char *bytes = bt_realloc(text->bytes, capacity);
        if (bytes == NULL) return false;
        text->bytes = bytes;
        text->capacity = capacity;
        return true;
    }
    bt_block *block = bt_block_acquire(text->pool, capacity);
    if (block == NULL) return false;
    if (text->used > 0) memcpy(block->bytes, text->bytes, text->used);
    bt_block_release(text->block);
    text->block = block;
    text->bytes = (char *)block->bytes;
    text->capacity = block->capacity;
    return true;
}

char *bt_text_reserve(bt_text *text, size_t count) {
    size_t needed; /* with the terminator */
    if (text->has_failed || !bt_add_size(text->used, count, &needed) || needed > text->bytes_max) {
        text->has_failed = true;
        return NULL;
    }
    needed++;
    if (needed > text->capacity) {
        size_t grown = text->capacity > 0 ? text->capacity : text->first_bytes;
        while (grown < needed && grown <= text->bytes_max) {
            grown *= 2;
        }
        if (grown < needed) grown = needed;
        if (!grow(text, grown)) {
            text->has_failed = true;
            return NULL;
        }
    }
    return text->bytes + text->used;
}

void bt_text_add(bt_text *text, const char *bytes, size_t count) {
    char *room = bt_text_reserve(text, count);
    if (room == NULL) return;
    if (count > 0) memcpy(room, bytes, count);
    text->used += count;
    text->bytes[text->used] = 0;
}

void bt_text_add_string(bt_text *text, const char *string) {
    bt_text_add(text, string, strlen(string));
}

void bt_text_add_format(bt_text *text, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int bytes = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *room = bytes >= 0 ? bt_text_reserve(text, (size_t)bytes) : NULL;
    if (room == NULL) {
        text->has_failed = true;
        return;
    }
    va_start(arguments, format);
    vsnprintf(room, (size_t)bytes + 1, format, arguments);
    va_end(arguments);
    text->used += (size_t)bytes;
}

/* The two-character escape of a byte, or 0. */
static char short_escape(unsigned char byte) {
    switch (byte) {
    case '"': return '"';
    case '\\': return '\\';
    case '\b': return 'b';
    case '\f': return 'f';
    case '\n': return 'n';
    case '\r': return 'r';
    case '\t': return 't';
    }
    return 0;
}

static void add_escape(bt_text *text, unsigned char byte) {
    char escape = short_escape(byte);
    if (escape != 0) {
        char pair[2] = {'\\', escape};
        bt_text_add(text, pair, 2);
    } else {
        bt_text_add_format(text, "\\u%04x", byte);
    }
}

void bt_json_add_escaped(bt_text *text, const char *bytes, size_t count) {
    size_t first = 0;
    for (size_t i = 0; i < count; i++) {
        unsigned char byte = (unsigned char)bytes[i];
        if (byte >= 0x20 && byte != '"' && byte != '\\') continue;
        bt_text_add(text, bytes + first, i - first);
        add_escape(text, byte);
        first = i + 1;
    }
    bt_text_add(text, bytes + first, count - first);
}

void bt_json_add_string(bt_text *text, const char *bytes, size_t count) {
    static const char REPLACEMENT[] = "\xef\xbf\xbd"; /* U+FFFD */
    bt_text_add(text, "\"", 1);
    while (count > 0) {
        const size_t good = bt_utf8_valid_prefix(bytes, count);
        bt_json_add_escaped(text, bytes, good);
        if (good == count) break;
        bt_text_add(text, REPLACEMENT, sizeof(REPLACEMENT) - 1);
        bytes += good + 1;
        count -= good + 1;
    }
    bt_text_add(text, "\"", 1);
}

static void end_number(bt_text *text, size_t bytes) {
    text->used += bytes;
    text->bytes[text->used] = 0;
}

void bt_json_add_int(bt_text *text, int64_t value) {
    char *room = bt_text_reserve(text, BT_JSON_NUMBER_ROOM);
    if (room != NULL) end_number(text, bt_json_int(room, value));
}

void bt_json_add_double(bt_text *text, double value) {
    char *room = bt_text_reserve(text, BT_JSON_NUMBER_ROOM);
    if (room != NULL) end_number(text, bt_json_double(room, value));
}

void bt_json_add_float(bt_text *text, float value) {
    char *room = bt_text_reserve(text, BT_JSON_NUMBER_ROOM);
    if (room != NULL) end_number(text, bt_json_float(room, value));
}

void bt_json_add_floats(bt_text *text, const float *values, size_t count) {
    for (size_t done = 0; done < count; done += PORTION) {
        const size_t part = count - done < PORTION ? count - done : PORTION;
        char *room = bt_text_reserve(text, bt_json_floats_room(part));
        if (room == NULL) return;
        size_t bytes = bt_json_floats(room, values + done, part);
        if (done + part < count) room[bytes++] = ',';
        end_number(text, bytes);
    }
}

void bt_json_add_ints(bt_text *text, const int32_t *values, size_t count) {
    for (size_t done = 0; done < count; done += PORTION) {
        const size_t part = count - done < PORTION ? count - done : PORTION;
        char *room = bt_text_reserve(text, bt_json_ints_room(part));
        if (room == NULL) return;
        size_t bytes = bt_json_ints(room, values + done, part);
        if (done + part < count) room[bytes++] = ',';
        end_number(text, bytes);
    }
}

void bt_json_add_bool(bt_text *text, bool value) {
    bt_text_add_string(text, value ? "true" : "false");
}
