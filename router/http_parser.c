/* One byte-driven state machine for the head, chunk sizes and trailers; bodies are passed through
 * as slices and never copied. The head is kept in the caller's buffer, where its lines are cut in
 * place: strings of the request point there. Counters bound everything that a peer could repeat
 * (blank lines, fields, digits, extensions, trailers), and an error is final. What is refused, and
 * why, is said in the header. */
#include "router/http_parser.h"

#include <string.h>
#include <strings.h>

#include "base/assert.h"
#include "base/compiler.h"
#include "base/hex.h"

enum {
    BLANK_LINES_MAX = 2,       /* RFC 9112 2.2: some clients end a body with an extra CRLF */
    CHUNK_DIGITS_MAX = 16,     /* of a chunk size */
    EXTENSION_BYTES_MAX = 512, /* of one chunk's extensions */
};

static const struct {
    const char *name;
    http_method method;
} METHODS[] = {
    {"GET", HTTP_METHOD_GET}, {"HEAD", HTTP_METHOD_HEAD},     {"POST", HTTP_METHOD_POST},
    {"PUT", HTTP_METHOD_PUT}, {"DELETE", HTTP_METHOD_DELETE}, {"OPTIONS", HTTP_METHOD_OPTIONS},
};

/* RFC 9110 5.6.2: the characters of a token. */
static bool is_token_char(unsigned char c) {
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return true;
    return c != 0 && strchr("!#$%&'*+-.^_`|~", c) != NULL;
}

static bool is_token(const char *text) {
    if (*text == 0) return false;
    for (; *text != 0; text++) {
        if (!is_token_char((unsigned char)*text)) return false;
    }
    return true;
}

/* Bytes that may stand in a field value or a chunk extension. */
static bool is_value_char(unsigned char c) {
    return c == '\t' || (c >= 0x20 && c != 0x7f);
}

static char lower(char c) {
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

const char *http_request_field(const http_request *request, const char *name) {
    for (uint32_t i = 0; i < request->field_count; i++) {
        if (strcmp(request->fields[i].name, name) == 0) return request->fields[i].value;
    }
    return NULL;
}

void http_parser_init(http_parser *parser, char *buffer, size_t buffer_bytes,
                      uint64_t body_bytes_max) {
    memset(parser, 0, sizeof(*parser));
    parser->buffer = buffer;
    parser->buffer_bytes = buffer_bytes;
    parser->body_bytes_max = body_bytes_max;
}

void http_parser_next(http_parser *parser) {
    http_parser_init(parser, parser->buffer, parser->buffer_bytes, parser->body_bytes_max);
}

bool http_parser_is_idle(const http_parser *parser) {
    return parser->state == HTTP_PARSER_START && parser->blank_lines == 0 && !parser->saw_cr;
}

static void fail(http_parser *parser, int status, const char *text) {
    parser->state = HTTP_PARSER_FAILED;
    parser->status = status;
    parser->text = text;
}

/* ---- the request line ------------------------------------------------------------------------ */

/* The path of "/path?query", "http://host/path?query" or "*", cut in place. */
static void split_target(http_request *request, char *target) {
    char *path = target;
    if (strncasecmp(target, "http://", 7) == 0 || strncasecmp(target, "https://", 8) == 0) {
        path = strchr(target, ':') + 3;
        path += strcspn(path, "/?");
    }
    char *question = strchr(path, '?');
    request->query = "";
    if (question != NULL) {
        *question = 0;
        request->query = question + 1;
    }
    request->path = *path != 0 ? path : "/";
}

static void take_request_line(http_parser *parser, char *line, size_t bytes) {
    http_request *request = &parser->request;
    if (memchr(line, 0, bytes) != NULL) {
        fail(parser, 400, "NUL in the request line");
        return;
    }
    char *first = strchr(line, ' ');
    char *last = strrchr(line, ' ');
    if (first == NULL || first == last) {
        fail(parser, 400, "the request line is not 'method target version'");
        return;
    }
    *first = 0;
    *last = 0;
    char *target = first + 1;
    if (!is_token(line)) {
        fail(parser, 400, "the method is not a token");
        return;
    }
    if (strcmp(last + 1, "HTTP/1.1") != 0 && strcmp(last + 1, "HTTP/1.0") != 0) {
        fail(parser, 400, "the version is neither HTTP/1.0 nor HTTP/1.1");
        return;
    }
    for (const char *c = target; *c != 0; c++) {
        if (*c >= 0x21 && *c <= 0x7e) continue;
        fail(parser, 400, "a byte outside 0x21-0x7e in the request target");
        return;
    }
    if (*target == 0) {
        fail(parser, 400, "the request target is empty");
        return;
    }
    request->version_minor = last[8] == '1';
    request->method = HTTP_METHOD_OTHER;
    request->method_name = line;
    for (size_t i = 0; i < BT_ARRAY_COUNT(METHODS); i++) {
        if (strcmp(line, METHODS[i].name) == 0) request->method = METHODS[i].method;
    }
    split_target(request, target);
    parser->has_request_line = true;
}

/* ---- fields ---------------------------------------------------------------------------------- */

static void take_content_length(http_parser *parser, const char *value) {
    uint64_t length = 0;
    if (++parser->length_count > 1) {
        fail(parser, 400, "Content-Length is repeated");
        return;
    }
    if (*value == 0) {
        fail(parser, 400, "Content-Length is empty");
        return;
    }
    for (; *value != 0; value++) {
        if (*value < '0' || *value > '9') {
            fail(parser, 400, "Content-Length is not a number");
            return;
        }
        if (__builtin_mul_overflow(length, 10u, &length) ||
            __builtin_add_overflow(length, (uint64_t)(*value - '0'), &length)) {
            length = UINT64_MAX; /* larger than any limit: 413 once the head is complete */
        }
    }
    parser->request.content_length = length;
}

static void take_host(http_parser *parser, const char *value) {
    if (++parser->host_count > 1) {
        fail(parser, 400, "Host is repeated");
        return;
    }
    for (; *value != 0; value++) {
        bool is_visible = *value >= 0x21 && *value <= 0x7e;
        if (is_visible && strchr("/\\?#@<>\"{}|^`", *value) == NULL) continue;
        fail(parser, 400, "Host is not a host name");
        return;
    }
}

static void take_connection(http_parser *parser, const char *value) {
    while (*value != 0) {
        value += strspn(value, " \t,");
        size_t bytes = strcspn(value, " \t,");
        if (bytes == 5 && strncasecmp(value, "close", 5) == 0) parser->wants_close = true;
        if (bytes == 10 && strncasecmp(value, "keep-alive", 10) == 0)
            parser->wants_keep_alive = true;
        value += bytes;
    }
}

/* What the framing of this message depends on. */
static void take_known_field(http_parser *parser, const http_field *field) {
    http_request *request = &parser->request;
    if (strcmp(field->name, "content-length") == 0) {
        take_content_length(parser, field->value);
    } else if (strcmp(field->name, "transfer-encoding") == 0) {
        request->is_chunked = true;
        if (++parser->encoding_count > 1 || strcasecmp(field->value, "chunked") != 0)
            fail(parser, 400, "Transfer-Encoding is not one 'chunked'");
    } else if (strcmp(field->name, "host") == 0) {
        take_host(parser, field->value);
    } else if (strcmp(field->name, "connection") == 0) {
        take_connection(parser, field->value);
    } else if (strcmp(field->name, "expect") == 0) {
        bool is_continue = strcasecmp(field->value, "100-continue") == 0;
        request->expectation = is_continue ? HTTP_EXPECT_CONTINUE : HTTP_EXPECT_UNKNOWN;
    }
}

/* "Name: value" in place: name in lower case, value trimmed. */
static bool split_field(http_parser *parser, char *line, size_t bytes, http_field *field_out) {
    if (*line == ' ' || *line == '\t') {
        fail(parser, 400, "a folded header field");
        return false;
    }
    char *colon = memchr(line, ':', bytes);
    if (colon == NULL) {
        fail(parser, 400, "a header field without a colon");
        return false;
    }
    *colon = 0;
    if (memchr(line, 0, (size_t)(colon - line)) != NULL || !is_token(line)) {
        fail(parser, 400, "a header name that is not a token");
        return false;
    }
    for (char *c = line; *c != 0; c++) {
        *c = lower(*c);
    }
    char *value = colon + 1;
    char *end = line + bytes;
    while (value < end && (*value == ' ' || *value == '\t')) {
        value++;
    }
    while (end > value && (end[-1] == ' ' || end[-1] == '\t')) {
        end--;
    }
    for (const char *c = value; c < end; c++) {
        if (is_value_char((unsigned char)*c)) continue;
        fail(parser, 400, "a control character in a header value");
        return false;
    }
    *end = 0;
    field_out->name = line;
    field_out->value = value;
    return true;
}

static void take_field(http_parser *parser, char *line, size_t bytes) {
    http_request *request = &parser->request;
    http_field field;
    if (!split_field(parser, line, bytes, &field)) return;
    if (request->field_count == HTTP_FIELDS_MAX) {
        fail(parser, 431, "too many header fields");
        return;
    }
    request->fields[request->field_count++] = field;
    take_known_field(parser, &field);
}

/* The empty line after the fields: decides how the body is framed. */
static void take_head(http_parser *parser, http_event *event) {
    http_request *request = &parser->request;
    if (parser->host_count == 0) {
        fail(parser, 400, "Host is missing");
    } else if (request->is_chunked && parser->length_count > 0) {
        fail(parser, 400, "Content-Length and Transfer-Encoding together");
    } else if (request->is_chunked && request->version_minor == 0) {
        fail(parser, 400, "Transfer-Encoding on HTTP/1.0");
    } else if (request->content_length > parser->body_bytes_max) {
        fail(parser, 413, "the body is larger than the limit");
    }
    if (parser->state == HTTP_PARSER_FAILED) return;
    request->keeps_alive =
        !parser->wants_close && (request->version_minor == 1 || parser->wants_keep_alive);
    if (request->version_minor == 0) request->expectation = HTTP_EXPECT_NOTHING;
    parser->body_left = request->content_length;
    if (request->is_chunked) {
        parser->state = HTTP_PARSER_CHUNK_SIZE;
        parser->body_left = 0;
    } else {
        parser->state = parser->body_left > 0 ? HTTP_PARSER_BODY : HTTP_PARSER_DONE;
    }
    event->kind = HTTP_EVENT_HEAD;
}

/* ---- lines ----------------------------------------------------------------------------------- */

static void take_line(http_parser *parser, http_event *event) {
    char *line = parser->buffer + parser->line_start;
    size_t bytes = parser->used - parser->line_start;
    if (parser->used == parser->buffer_bytes) {
        fail(parser, 431, "the request head is too large");
        return;
    }
    parser->buffer[parser->used++] = 0;
    if (parser->state == HTTP_PARSER_TRAILER) {
        http_field ignored;
        if (bytes == 0) {
            parser->state = HTTP_PARSER_DONE;
        } else if (split_field(parser, line, bytes, &ignored)) {
            parser->used = parser->line_start;
        }
        return;
    }
    if (!parser->has_request_line) {
        take_request_line(parser, line, bytes);
    } else if (bytes == 0) {
        take_head(parser, event);
    } else {
        take_field(parser, line, bytes);
    }
    parser->line_start = parser->used;
}

/* One byte of a line; the line is taken at its CRLF. */
static void take_line_byte(http_parser *parser, char c, http_event *event) {
    if (parser->state == HTTP_PARSER_TRAILER && ++parser->trailer_bytes > parser->buffer_bytes) {
        fail(parser, 431, "the trailer is too large");
        return;
    }
    if (parser->saw_cr) {
        parser->saw_cr = false;
        if (c == '\n') {
            take_line(parser, event);
        } else {
            fail(parser, 400, "a CR without LF");
        }
        return;
    }
    if (c == '\n') {
        fail(parser, 400, "a bare LF");
    } else if (c == '\r') {
        parser->saw_cr = true;
    } else if (parser->used + 1 >= parser->buffer_bytes) {
        fail(parser, 431, "the request head is too large");
    } else {
        parser->buffer[parser->used++] = c;
    }
}

/* Empty lines before a request line are skipped, a few of them. */
static void take_start_byte(http_parser *parser, char c, http_event *event) {
    if (parser->saw_cr || c == '\r') {
        if (parser->saw_cr && c != '\n') {
            fail(parser, 400, "a CR without LF");
        } else if (parser->saw_cr && ++parser->blank_lines > BLANK_LINES_MAX) {
            fail(parser, 400, "empty lines instead of a request");
        }
        parser->saw_cr = c == '\r';
        return;
    }
    parser->state = HTTP_PARSER_LINE;
    take_line_byte(parser, c, event);
}

/* ---- chunked bodies -------------------------------------------------------------------------- */

static void begin_chunk(http_parser *parser) {
    parser->digit_count = 0;
    parser->extension_bytes = 0;
    if (parser->body_left == 0) {
        parser->state = HTTP_PARSER_TRAILER;
        parser->line_start = parser->used;
        return;
    }
    if (parser->body_left > parser->body_bytes_max - parser->body_total) {
        fail(parser, 413, "the body is larger than the limit");
        return;
    }
    parser->body_total += parser->body_left;
    parser->state = HTTP_PARSER_CHUNK_DATA;
}

static void take_size_byte(http_parser *parser, char c) {
    int digit = bt_hex_digit(c);
    if (digit >= 0) {
        if (++parser->digit_count > CHUNK_DIGITS_MAX) {
            fail(parser, 400, "a chunk size is too long");
            return;
        }
        parser->body_left = parser->body_left * 16 + (uint64_t)digit;
    } else if (parser->digit_count == 0) {
        fail(parser, 400, "a chunk size is not a number");
    } else if (c == '\r') {
        parser->state = HTTP_PARSER_CHUNK_LF;
    } else if (c == ';') {
        parser->state = HTTP_PARSER_CHUNK_EXT;
    } else {
        fail(parser, 400, "a chunk size is not a number");
    }
}

static void take_extension_byte(http_parser *parser, char c) {
    if (c == '\r') {
        parser->state = HTTP_PARSER_CHUNK_LF;
    } else if (!is_value_char((unsigned char)c) ||
               ++parser->extension_bytes > EXTENSION_BYTES_MAX) {
        fail(parser, 400, "a chunk extension that cannot be read");
    }
}

static void take_byte(http_parser *parser, char c, http_event *event) {
    switch (parser->state) {
    case HTTP_PARSER_START: take_start_byte(parser, c, event); break;
    case HTTP_PARSER_LINE:
    case HTTP_PARSER_TRAILER: take_line_byte(parser, c, event); break;
    case HTTP_PARSER_CHUNK_SIZE: take_size_byte(parser, c); break;
    case HTTP_PARSER_CHUNK_EXT: take_extension_byte(parser, c); break;
    case HTTP_PARSER_CHUNK_LF:
        if (c == '\n') {
            begin_chunk(parser);
        } else {
            fail(parser, 400, "a chunk size line not ended by CRLF");
        }
        break;
    case HTTP_PARSER_CHUNK_END:
        parser->state = HTTP_PARSER_CHUNK_END_LF;
        if (c != '\r') fail(parser, 400, "chunk data not ended by CRLF");
        break;
    case HTTP_PARSER_CHUNK_END_LF:
        parser->state = HTTP_PARSER_CHUNK_SIZE;
        if (c != '\n') fail(parser, 400, "chunk data not ended by CRLF");
        break;
    case HTTP_PARSER_BODY:
    case HTTP_PARSER_CHUNK_DATA:
    case HTTP_PARSER_DONE:
    case HTTP_PARSER_FAILED: BT_ASSERT(false);
    }
}

/* A slice of the body, straight from the input. */
static size_t take_body(http_parser *parser, const char *bytes, size_t count, http_event *event) {
    size_t taken = count < parser->body_left ? count : (size_t)parser->body_left;
    event->kind = HTTP_EVENT_BODY;
    event->body = bytes;
    event->body_bytes = taken;
    parser->body_left -= taken;
    if (parser->body_left > 0) return taken;
    bool is_chunk = parser->state == HTTP_PARSER_CHUNK_DATA;
    parser->state = is_chunk ? HTTP_PARSER_CHUNK_END : HTTP_PARSER_DONE;
    return taken;
}

size_t http_parser_feed(http_parser *parser, const char *bytes, size_t count,
                        http_event *event_out) {
    size_t used = 0;
    *event_out = (http_event){.kind = HTTP_EVENT_MORE};
    while (event_out->kind == HTTP_EVENT_MORE) {
        if (parser->state == HTTP_PARSER_FAILED) {
            event_out->kind = HTTP_EVENT_ERROR;
            event_out->status = parser->status;
            event_out->text = parser->text;
        } else if (parser->state == HTTP_PARSER_DONE) {
            event_out->kind = HTTP_EVENT_END;
        } else if (used == count) {
            break;
        } else if (parser->state == HTTP_PARSER_BODY || parser->state == HTTP_PARSER_CHUNK_DATA) {
            used += take_body(parser, bytes + used, count - used, event_out);
        } else {
            take_byte(parser, bytes[used++], event_out);
        }
    }
    return used;
}
