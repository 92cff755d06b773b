/* Any bytes as HTTP requests: the events are the same however the input is cut, a body never passes
 * its limit, strings of a head end inside its buffer. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "router/http_parser.h"

enum { HEAD_BYTES = 256, BODY_MAX = 100, INPUT_MAX = 4096 };

/* What a run said, as one number: every event, every byte of a body, every string of a head. */
typedef struct outcome {
    uint64_t hash;
    unsigned messages;
    int status;
} outcome;

static void mix(outcome *o, const char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        o->hash = (o->hash ^ (unsigned char)bytes[i]) * 1099511628211u;
    }
}

static void mix_string(outcome *o, const http_parser *parser, const char *text) {
    const char *end = parser->buffer + parser->buffer_bytes;
    bool is_inside = text >= parser->buffer && text < end;
    BT_ASSERT(!is_inside || memchr(text, 0, (size_t)(end - text)) != NULL);
    mix(o, text, strlen(text) + 1);
}

static void mix_head(outcome *o, const http_parser *parser) {
    const http_request *request = &parser->request;
    const uint64_t numbers[] = {
        request->method,      request->version_minor,  request->is_chunked, request->keeps_alive,
        request->expectation, request->content_length, request->field_count};
    mix(o, (const char *)numbers, sizeof(numbers));
    mix_string(o, parser, request->method_name);
    mix_string(o, parser, request->path);
    mix_string(o, parser, request->query);
    for (uint32_t i = 0; i < request->field_count; i++) {
        mix_string(o, parser, request->fields[i].name);
        mix_string(o, parser, request->fields[i].value);
    }
    BT_ASSERT(request->content_length <= BODY_MAX);
    BT_ASSERT(!request->is_chunked || request->content_length == 0);
}

/* false: the parser refused the input. */
static bool feed(http_parser *parser, const char *bytes, size_t count, outcome *o,
                 size_t *body_bytes) {
    for (;;) {
        http_event event;
        size_t used = http_parser_feed(parser, bytes, count, &event);
        BT_ASSERT(used <= count);
        bytes += used;
        count -= used;
        if (event.kind == HTTP_EVENT_BODY) {
            *body_bytes += event.body_bytes;
            BT_ASSERT(*body_bytes <= BODY_MAX && event.body_bytes > 0);
            mix(o, event.body, event.body_bytes);
            continue;
        }
        if (event.kind == HTTP_EVENT_MORE) return true;
        mix(o, (const char *)&event.kind, sizeof(event.kind));
        if (event.kind == HTTP_EVENT_HEAD) {
            *body_bytes = 0;
            mix_head(o, parser);
        } else if (event.kind == HTTP_EVENT_END) {
            o->messages++;
            http_parser_next(parser);
        } else {
            BT_ASSERT(event.status == 400 || event.status == 413 || event.status == 431);
            o->status = event.status;
            mix_string(o, parser, event.text);
            return false;
        }
    }
}

/* One run in pieces of the given sizes, in turn; pieces in blocks of their own. */
static outcome run(const uint8_t *data, size_t bytes, size_t first, size_t second) {
    outcome o = {.hash = 1469598103934665603u};
    char buffer[HEAD_BYTES];
    http_parser parser;
    size_t body_bytes = 0;
    http_parser_init(&parser, buffer, sizeof(buffer), BODY_MAX);
    for (size_t at = 0, turn = 0; at < bytes; turn++) {
        size_t count = turn % 2 == 0 ? first : second;
        if (count > bytes - at) count = bytes - at;
        char *piece = bt_malloc(count);
        BT_ASSERT(piece != NULL);
        memcpy(piece, data + at, count);
        bool goes_on = feed(&parser, piece, count, &o, &body_bytes);
        bt_free(piece);
        if (!goes_on) break;
        at += count;
    }
    return o;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes == 0 || bytes > INPUT_MAX) return 0;
    const outcome whole = run(data, bytes, bytes, bytes);
    static const size_t CUTS[][2] = {{1, 1}, {2, 3}, {7, 1}, {64, 5}};
    for (size_t i = 0; i < BT_ARRAY_COUNT(CUTS); i++) {
        const outcome other = run(data, bytes, CUTS[i][0], CUTS[i][1]);
        BT_ASSERT(other.hash == whole.hash);
        BT_ASSERT(other.messages == whole.messages && other.status == whole.status);
    }
    return 0;
}
