/* The table of what the parser accepts and refuses; every case is also fed split at every byte, and
 * byte by byte, and must give the same events. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "router/http_parser.h"

enum { HEAD_BYTES = 512, BODY_MAX = 64, TRACE_MAX = 4096 };

/* All events of an input as text, so that two runs can be compared. */
typedef struct trace {
    char text[TRACE_MAX];
    size_t used;
    int status;
    char body[256];
    size_t body_bytes;
    unsigned messages;
} trace;

static void trace_add(trace *t, const char *text) {
    size_t bytes = strlen(text);
    assert_true(t->used + bytes + 1 < sizeof(t->text));
    memcpy(t->text + t->used, text, bytes + 1);
    t->used += bytes;
}

static void trace_head(trace *t, const http_request *request) {
    char line[1024];
    snprintf(line, sizeof(line), "%s %s ? %s 1.%u chunked=%d keep=%d expect=%d length=%llu\n",
             request->method_name, request->path, request->query, request->version_minor,
             request->is_chunked, request->keeps_alive, request->expectation,
             (unsigned long long)request->content_length);
    trace_add(t, line);
    for (uint32_t i = 0; i < request->field_count; i++) {
        snprintf(line, sizeof(line), "[%s]=[%s]\n", request->fields[i].name,
                 request->fields[i].value);
        trace_add(t, line);
    }
}

/* Feeds one piece until it is used up. false: the parser failed. */
static bool feed(http_parser *parser, trace *t, const char *bytes, size_t count) {
    for (;;) {
        http_event event;
        size_t used = http_parser_feed(parser, bytes, count, &event);
        assert_true(used <= count);
        bytes += used;
        count -= used;
        switch (event.kind) {
        case HTTP_EVENT_MORE: assert_int_equal(count, 0); return true;
        case HTTP_EVENT_HEAD: trace_head(t, &parser->request); break;
        case HTTP_EVENT_BODY:
            assert_true(t->body_bytes + event.body_bytes <= sizeof(t->body));
            memcpy(t->body + t->body_bytes, event.body, event.body_bytes);
            t->body_bytes += event.body_bytes;
            break;
        case HTTP_EVENT_END:
            trace_add(t, "end ");
            t->body[t->body_bytes] = 0;
            trace_add(t, t->body);
            trace_add(t, "\n");
            t->body_bytes = 0;
            t->messages++;
            http_parser_next(parser);
            break;
        case HTTP_EVENT_ERROR:
            trace_add(t, event.text);
            t->status = event.status;
            return false;
        }
    }
}

/* One run; the input is cut at the given places, or everywhere when step is 1. */
static void run(const char *input, size_t bytes, size_t cut, size_t step, trace *t) {
    char buffer[HEAD_BYTES];
    http_parser parser;
    http_parser_init(&parser, buffer, sizeof(buffer), BODY_MAX);
    memset(t, 0, sizeof(*t));
    for (size_t at = 0; at < bytes;) {
        size_t end = step > 0 ? at + step : (at < cut ? cut : bytes);
        /* A fresh block, so that a read past the piece is seen by the sanitizers. */
        char *piece = malloc(end - at);
        assert_non_null(piece);
        memcpy(piece, input + at, end - at);
        bool is_going = feed(&parser, t, piece, end - at);
        free(piece);
        if (!is_going) return;
        at = end;
    }
}

static void run_all_ways(const char *input, size_t bytes, trace *whole) {
    run(input, bytes, bytes, 0, whole);
    trace split;
    run(input, bytes, 0, 1, &split);
    assert_string_equal(split.text, whole->text);
    for (size_t cut = 1; cut < bytes; cut++) {
        run(input, bytes, cut, 0, &split);
        assert_string_equal(split.text, whole->text);
        assert_int_equal(split.status, whole->status);
    }
}

typedef struct parse_case {
    const char *name;
    const char *input;
    int status; /* 0 = accepted */
    unsigned messages;
} parse_case;

#define H "Host: a\r\n"
static const parse_case CASES[] = {
    {"plain get", "GET / HTTP/1.1\r\n" H "\r\n", 0, 1},
    {"1.0 without host", "GET / HTTP/1.0\r\n\r\n", 400, 0},
    {"1.0 with host", "GET / HTTP/1.0\r\n" H "\r\n", 0, 1},
    {"leading empty line", "\r\nGET / HTTP/1.1\r\n" H "\r\n", 0, 1},
    {"length body", "POST /g HTTP/1.1\r\n" H "Content-Length: 3\r\n\r\nabc", 0, 1},
    {"length zero", "POST /g HTTP/1.1\r\n" H "Content-Length: 0\r\n\r\n", 0, 1},
    {"post without a length", "POST /g HTTP/1.1\r\n" H "\r\n", 0, 1},
    {"pipelined",
     "GET /a HTTP/1.1\r\n" H "\r\nPOST /b HTTP/1.1\r\n" H
     "Content-Length: 2\r\n\r\nxyGET /c HTTP/1.1\r\n" H "\r\n",
     0, 3},
    {"chunked",
     "POST / HTTP/1.1\r\n" H
     "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0A\r\n0123456789\r\n0\r\n\r\n",
     0, 1},
    {"chunk extension and trailer",
     "POST / HTTP/1.1\r\n" H
     "Transfer-Encoding: Chunked\r\n\r\n3;a=\"b\"\r\nabc\r\n0;x\r\nX-Sum: 1\r\n\r\n",
     0, 1},
    {"chunked then another",
     "POST / HTTP/1.1\r\n" H
     "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\nGET / HTTP/1.1\r\n" H "\r\n",
     0, 2},
    {"expect", "POST / HTTP/1.1\r\n" H "Expect: 100-Continue\r\nContent-Length: 1\r\n\r\na", 0, 1},
    {"absolute target", "GET http://h:1/p?q=1 HTTP/1.1\r\n" H "\r\n", 0, 1},
    {"options star", "OPTIONS * HTTP/1.1\r\n" H "\r\n", 0, 1},
    {"white space around a value", "GET / HTTP/1.1\r\nHost:\t a \t\r\nX:\r\n\r\n", 0, 1},
    {"bytes above 0x7f in a value", "GET / HTTP/1.1\r\n" H "X: \xc3\xa9\r\n\r\n", 0, 1},

    {"bare LF after the request line", "GET / HTTP/1.1\n" H "\r\n", 400, 0},
    {"bare LF after a field", "GET / HTTP/1.1\r\nHost: a\n\r\n", 400, 0},
    {"bare LF as the end", "GET / HTTP/1.1\r\n" H "\n", 400, 0},
    {"bare LF before the request", "\nGET / HTTP/1.1\r\n" H "\r\n", 400, 0},
    {"CR in a value", "GET / HTTP/1.1\r\n" H "X: a\rb\r\n\r\n", 400, 0},
    {"CR CR LF", "GET / HTTP/1.1\r\r\n" H "\r\n", 400, 0},
    {"many empty lines", "\r\n\r\n\r\nGET / HTTP/1.1\r\n" H "\r\n", 400, 0},
    {"obs-fold", "GET / HTTP/1.1\r\n" H "X: a\r\n b\r\n\r\n", 400, 0},
    {"obs-fold by tab", "GET / HTTP/1.1\r\n" H "X: a\r\n\tb\r\n\r\n", 400, 0},
    {"space before the first field", "GET / HTTP/1.1\r\n " H "\r\n", 400, 0},
    {"space before the colon", "GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400, 0},
    {"tab before the colon", "GET / HTTP/1.1\r\nHost\t: a\r\n\r\n", 400, 0},
    {"space before the colon of a length", "POST / HTTP/1.1\r\n" H "Content-Length : 3\r\n\r\nabc",
     400, 0},
    {"no colon", "GET / HTTP/1.1\r\n" H "X\r\n\r\n", 400, 0},
    {"empty name", "GET / HTTP/1.1\r\n" H ": x\r\n\r\n", 400, 0},
    {"missing host", "GET / HTTP/1.1\r\nX: a\r\n\r\n", 400, 0},
    {"repeated host", "GET / HTTP/1.1\r\n" H H "\r\n", 400, 0},
    {"repeated host on 1.0", "GET / HTTP/1.0\r\n" H H "\r\n", 400, 0},
    {"host with a path", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400, 0},
    {"host of two words", "GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400, 0},
    {"repeated length",
     "POST / HTTP/1.1\r\n" H "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400, 0},
    {"repeated equal length",
     "POST / HTTP/1.1\r\n" H "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400, 0},
    {"length list", "POST / HTTP/1.1\r\n" H "Content-Length: 3, 3\r\n\r\nabc", 400, 0},
    {"length with a plus", "POST / HTTP/1.1\r\n" H "Content-Length: +3\r\n\r\nabc", 400, 0},
    {"length negative", "POST / HTTP/1.1\r\n" H "Content-Length: -3\r\n\r\nabc", 400, 0},
    {"length hexadecimal", "POST / HTTP/1.1\r\n" H "Content-Length: 0x3\r\n\r\nabc", 400, 0},
    {"length empty", "POST / HTTP/1.1\r\n" H "Content-Length:\r\n\r\n", 400, 0},
    {"length with a fraction", "POST / HTTP/1.1\r\n" H "Content-Length: 3.0\r\n\r\nabc", 400, 0},
    {"length and encoding",
     "POST / HTTP/1.1\r\n" H "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     400, 0},
    {"encoding and length",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
     400, 0},
    {"encoding identity", "POST / HTTP/1.1\r\n" H "Transfer-Encoding: identity\r\n\r\n", 400, 0},
    {"encoding list", "POST / HTTP/1.1\r\n" H "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
     400, 0},
    {"encoding twice in one",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400, 0},
    {"encoding repeated",
     "POST / HTTP/1.1\r\n" H
     "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     400, 0},
    {"encoding with a parameter",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n", 400, 0},
    {"encoding empty", "POST / HTTP/1.1\r\n" H "Transfer-Encoding:\r\n\r\n0\r\n\r\n", 400, 0},
    {"encoding on 1.0", "POST / HTTP/1.0\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400,
     0},
    {"chunk data ended by LF",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\n0\r\n\r\n", 400, 0},
    {"chunk data too long",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", 400, 0},
    {"chunk size ended by LF",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n", 400, 0},
    {"chunk size with a space",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n 3\r\nabc\r\n0\r\n\r\n", 400, 0},
    {"chunk size negative",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n", 400, 0},
    {"chunk size with 0x",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n", 400, 0},
    {"chunk size empty",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n\r\nabc\r\n0\r\n\r\n", 400, 0},
    {"chunk size of 17 digits",
     "POST / HTTP/1.1\r\n" H
     "Transfer-Encoding: chunked\r\n\r\n00000000000000003\r\nabc\r\n0\r\n\r\n",
     400, 0},
    {"trailer folded",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\r\nX: a\r\n b\r\n\r\n", 400, 0},
    {"trailer with a bare LF",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\r\nX: a\n\r\n", 400, 0},
    {"space in the target", "GET /a b HTTP/1.1\r\n" H "\r\n", 400, 0},
    {"tab in the target", "GET /a\tb HTTP/1.1\r\n" H "\r\n", 400, 0},
    {"0x7f in the target", "GET /a\x7f HTTP/1.1\r\n" H "\r\n", 400, 0},
    {"UTF-8 in the target", "GET /\xc3\xa9 HTTP/1.1\r\n" H "\r\n", 400, 0},
    {"two spaces", "GET  / HTTP/1.1\r\n" H "\r\n", 400, 0},
    {"no target", "GET HTTP/1.1\r\n" H "\r\n", 400, 0},
    {"version 0.9", "GET /\r\n", 400, 0},
    {"version 2.0", "GET / HTTP/2.0\r\n" H "\r\n", 400, 0},
    {"version 1.2", "GET / HTTP/1.2\r\n" H "\r\n", 400, 0},
    {"version 1.10", "GET / HTTP/1.10\r\n" H "\r\n", 400, 0},
    {"version in lower case", "GET / http/1.1\r\n" H "\r\n", 400, 0},
    {"method not a token", "G(T / HTTP/1.1\r\n" H "\r\n", 400, 0},
    {"control character in a value", "GET / HTTP/1.1\r\n" H "X: a\x01\r\n\r\n", 400, 0},

    {"body above the limit", "POST / HTTP/1.1\r\n" H "Content-Length: 65\r\n\r\n", 413, 0},
    {"length of many digits",
     "POST / HTTP/1.1\r\n" H "Content-Length: 99999999999999999999999\r\n\r\n", 413, 0},
    {"chunk above the limit", "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n41\r\n",
     413, 0},
    {"chunks above the limit together",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n40\r\n", 413, 0},
    {"chunk of 2^64 - 1",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\nFFFFFFFFFFFFFFFF\r\n",
     413, 0},
};

static void test_table(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        const parse_case *c = &CASES[i];
        trace t;
        run_all_ways(c->input, strlen(c->input), &t);
        if (t.status != c->status || t.messages != c->messages)
            fail_msg("%s: status %d, %u messages: %s", c->name, t.status, t.messages, t.text);
    }
}

static void test_nul_bytes(void **state) {
    (void)state;
    static const char IN_VALUE[] = "GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n";
    static const char IN_NAME[] = "GET / HTTP/1.1\r\n" H "X\0Y: b\r\n\r\n";
    static const char IN_TARGET[] = "GET /\0 HTTP/1.1\r\n" H "\r\n";
    trace t;
    run_all_ways(IN_VALUE, sizeof(IN_VALUE) - 1, &t);
    assert_int_equal(t.status, 400);
    run_all_ways(IN_NAME, sizeof(IN_NAME) - 1, &t);
    assert_int_equal(t.status, 400);
    run_all_ways(IN_TARGET, sizeof(IN_TARGET) - 1, &t);
    assert_int_equal(t.status, 400);
}

static void test_what_was_read(void **state) {
    (void)state;
    trace t;
    const char *input = "PUT /v1/models?x=1&y HTTP/1.1\r\nHost: h:80\r\nX-Request-ID:  q 1 \r\n"
                        "Connection: foo, Close\r\nTransfer-Encoding: chunked\r\n\r\n"
                        "2\r\nab\r\n1\r\nc\r\n0\r\n\r\n";
    run_all_ways(input, strlen(input), &t);
    assert_string_equal(t.text, "PUT /v1/models ? x=1&y 1.1 chunked=1 keep=0 expect=0 length=0\n"
                                "[host]=[h:80]\n[x-request-id]=[q 1]\n[connection]=[foo, Close]\n"
                                "[transfer-encoding]=[chunked]\nend abc\n");
    input = "GET http://host:1 HTTP/1.0\r\nHost: a\r\nConnection: Keep-Alive\r\nExpect: "
            "100-continue\r\n\r\n";
    run_all_ways(input, strlen(input), &t);
    assert_string_equal(t.text,
                        "GET / ?  1.0 chunked=0 keep=1 expect=0 length=0\n"
                        "[host]=[a]\n[connection]=[Keep-Alive]\n[expect]=[100-continue]\nend \n");
    input = "PATCH HTTP://host?q HTTP/1.1\r\n" H "Expect: tea\r\n\r\n";
    run_all_ways(input, strlen(input), &t);
    assert_string_equal(t.text, "PATCH / ? q 1.1 chunked=0 keep=1 expect=2 length=0\n"
                                "[host]=[a]\n[expect]=[tea]\nend \n");
}

/* A head is refused with 431 exactly when it does not fit, never by touching memory behind it. */
static void test_head_limit(void **state) {
    (void)state;
    char input[HEAD_BYTES * 2];
    bool was_refused = false;
    for (size_t pad = HEAD_BYTES - 64; pad < HEAD_BYTES + 16; pad++) {
        int bytes =
            snprintf(input, sizeof(input), "GET / HTTP/1.1\r\n" H "X: %0*d\r\n\r\n", (int)pad, 0);
        trace t;
        run_all_ways(input, (size_t)bytes, &t);
        if (was_refused) assert_int_equal(t.status, 431);
        assert_true(t.status == 0 || t.status == 431);
        was_refused = t.status == 431;
    }
    assert_true(was_refused);
}

static void test_field_and_trailer_limits(void **state) {
    (void)state;
    char input[16384];
    char buffer[16384];
    http_parser parser;
    http_event event;
    for (int count = HTTP_FIELDS_MAX - 1; count <= HTTP_FIELDS_MAX + 1; count++) {
        size_t used = (size_t)snprintf(input, sizeof(input), "GET / HTTP/1.1\r\n" H);
        for (int i = 1; i < count; i++) {
            used += (size_t)snprintf(input + used, sizeof(input) - used, "X%d: 1\r\n", i);
        }
        used += (size_t)snprintf(input + used, sizeof(input) - used, "\r\n");
        http_parser_init(&parser, buffer, sizeof(buffer), 0);
        http_parser_feed(&parser, input, used, &event);
        if (count <= HTTP_FIELDS_MAX) {
            assert_int_equal(event.kind, HTTP_EVENT_HEAD);
            assert_string_equal(http_request_field(&parser.request, "x1"), "1");
            assert_null(http_request_field(&parser.request, "y"));
        } else {
            assert_int_equal(event.kind, HTTP_EVENT_ERROR);
            assert_int_equal(event.status, 431);
        }
    }
    size_t used = (size_t)snprintf(
        input, sizeof(input), "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\r\n");
    while (used + 32 < sizeof(input)) {
        used += (size_t)snprintf(input + used, sizeof(input) - used, "X: 1\r\n");
    }
    trace t;
    run(input, used, used, 0, &t);
    assert_int_equal(t.status, 431);
}

static void test_idle(void **state) {
    (void)state;
    char buffer[HEAD_BYTES];
    http_parser parser;
    http_event event;
    http_parser_init(&parser, buffer, sizeof(buffer), 0);
    assert_true(http_parser_is_idle(&parser));
    http_parser_feed(&parser, "G", 1, &event);
    assert_false(http_parser_is_idle(&parser));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_nul_bytes),
        cmocka_unit_test(test_what_was_read),
        cmocka_unit_test(test_head_limit),
        cmocka_unit_test(test_field_and_trailer_limits),
        cmocka_unit_test(test_idle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
