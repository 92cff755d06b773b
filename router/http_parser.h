/* A strict, incremental HTTP/1.1 request parser: bytes in, events out. Pure: no I/O, no clock and
 * no memory but the caller's head buffer, which holds request line and header fields of one message
 * and bounds them. Splitting the input anywhere gives the same events (a body may come in other
 * slices).
 *
 * Refused with 400, because two parsers that read such a message differently can be played against
 * each other: a bare LF or CR, obs-fold, white space before a colon, a missing (HTTP/1.1) or
 * repeated Host, a repeated or non-digit Content-Length, Content-Length with Transfer-Encoding, any
 * Transfer-Encoding but one `chunked`, Transfer-Encoding on HTTP/1.0, chunk data not ended by CRLF,
 * bytes outside 0x21-0x7e in the target, control characters in a field, versions other than 1.0 and
 * 1.1. A head that does not fit is 431, a body above the limit 413. */
#ifndef BT_ROUTER_HTTP_PARSER_H
#define BT_ROUTER_HTTP_PARSER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HTTP_FIELDS_MAX = 96 };

typedef enum http_method {
    HTTP_METHOD_GET,
    HTTP_METHOD_HEAD,
    HTTP_METHOD_POST,
    HTTP_METHOD_PUT,
    HTTP_METHOD_DELETE,
    HTTP_METHOD_OPTIONS,
    HTTP_METHOD_OTHER, /* a valid token that we do not serve anywhere */
} http_method;

typedef enum http_expectation {
    HTTP_EXPECT_NOTHING,
    HTTP_EXPECT_CONTINUE, /* send "100 Continue" before waiting for the body */
    HTTP_EXPECT_UNKNOWN,  /* 417 */
} http_expectation;

/* One header field: name in lower case, value without the white space around it. */
typedef struct http_field {
    const char *name;
    const char *value;
} http_field;

/* The head of a message. Strings are terminated and live in the head buffer until the next message
 * begins. */
typedef struct http_request {
    http_method method;
    const char *method_name;
    const char *path;  /* percent-encoded, without scheme, host and query; "*" for OPTIONS * */
    const char *query; /* after '?', or "" */
    uint32_t version_minor;
    bool is_chunked;
    bool keeps_alive;
    http_expectation expectation;
    uint64_t content_length; /* 0 when chunked or without a body */
    uint32_t field_count;
    http_field fields[HTTP_FIELDS_MAX];
} http_request;

/* The value of a field (name in lower case), or NULL. The first one, when it is repeated. */
const char *http_request_field(const http_request *request, const char *name);

typedef enum http_event_kind {
    HTTP_EVENT_MORE,  /* everything given was consumed; feed more */
    HTTP_EVENT_HEAD,  /* request is filled */
    HTTP_EVENT_BODY,  /* the next bytes of the body; a slice of the input */
    HTTP_EVENT_END,   /* the message is complete; http_parser_next starts another */
    HTTP_EVENT_ERROR, /* answer with status and close; the parser stays in this state */
} http_event_kind;

typedef struct http_event {
    http_event_kind kind;
    const char *body;
    size_t body_bytes;
    int status;       /* ERROR: 400, 413 or 431 */
    const char *text; /* ERROR: what was wrong; static */
} http_event;

typedef enum http_parser_state {
    HTTP_PARSER_START,      /* before the request line; empty lines are skipped */
    HTTP_PARSER_LINE,       /* in the request line or a field */
    HTTP_PARSER_BODY,       /* content_length bytes */
    HTTP_PARSER_CHUNK_SIZE, /* hexadecimal digits */
    HTTP_PARSER_CHUNK_EXT,  /* after ';', ignored */
    HTTP_PARSER_CHUNK_LF,   /* the LF of the size line */
    HTTP_PARSER_CHUNK_DATA, /* remaining bytes of the chunk */
    HTTP_PARSER_CHUNK_END,  /* the CR after the data */
    HTTP_PARSER_CHUNK_END_LF /* and its LF */,
    HTTP_PARSER_TRAILER, /* field lines after the last chunk; checked and dropped */
    HTTP_PARSER_DONE,
    HTTP_PARSER_FAILED,
} http_parser_state;

/* In the caller's storage; members are private. */
typedef struct http_parser {
    http_parser_state state;
    char *buffer;
    size_t buffer_bytes, used, line_start;
    uint64_t body_bytes_max, body_left, body_total;
    uint32_t blank_lines, line_count, digit_count, extension_bytes, trailer_bytes;
    uint32_t host_count, length_count, encoding_count;
    bool saw_cr, has_request_line, wants_close, wants_keep_alive;
    int status;
    const char *text;
    http_request request;
} http_parser;

/* buffer [buffer_bytes] is borrowed for the parser's life. */
void http_parser_init(http_parser *parser, char *buffer, size_t buffer_bytes,
                      uint64_t body_bytes_max);
/* Forgets the message and expects the next one. */
void http_parser_next(http_parser *parser);
/* true before the first byte of a message. */
bool http_parser_is_idle(const http_parser *parser);
/* Consumes up to count bytes and stops after one event; returns how many it took. Call again (with
 * 0 bytes too) until the event is MORE, END or ERROR. */
size_t http_parser_feed(http_parser *parser, const char *bytes, size_t count,
                        http_event *event_out);

#endif
