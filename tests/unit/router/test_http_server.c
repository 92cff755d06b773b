/* The server over socket pairs: framing of answers, keep-alive, pipelining, back-pressure, clients
 * that leave, refusals. The loop is turned by hand until nothing happens any more. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/mem.h"
#include "router/http_server.h"

enum { TURNS = 40, ANSWER_MAX = 1 << 20, HELD_MAX = 8 };

/* What the handler does by path: /now answers at once with the method and body; /later keeps the
 * exchange; /stream begins an answer of unknown length. */
typedef struct fixture {
    bt_loop *loop;
    http_server *server;
    budget bodies;
    http_server_options options;
    http_exchange *held[HELD_MAX];
    unsigned held_count, request_count, gone_count, room_count;
    int client;
    char *answer;
    size_t answer_bytes;
} fixture;

static void on_room(void *context) {
    ((fixture *)context)->room_count++;
}

static void on_gone(void *context) {
    ((fixture *)context)->gone_count++;
}

static void on_request(void *context, http_exchange *exchange, const http_request *request,
                       char *body, size_t body_bytes) {
    fixture *f = context;
    f->request_count++;
    if (strcmp(request->path, "/now") == 0) {
        char text[256];
        int bytes = snprintf(text, sizeof(text), "%s:%.*s", request->method_name, (int)body_bytes,
                             body != NULL ? body : "");
        const http_head head = {200, "text/plain", bytes, "X-Extra: 1\r\n"};
        http_exchange_reply(exchange, &head, text);
    } else {
        const http_owner owner = {on_room, on_gone, f};
        http_exchange_own(exchange, &owner);
        if (strcmp(request->path, "/stream") == 0) {
            const http_head head = {200, "text/event-stream", -1, NULL};
            http_exchange_begin(exchange, &head);
        }
        assert_true(f->held_count < HELD_MAX);
        f->held[f->held_count++] = exchange;
    }
    http_server_body_free(&f->bodies, body, body_bytes);
}

static int open_client(fixture *f) {
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
    http_server_adopt(f->server, pair[0]);
    return pair[1];
}

static int set_up_with(void **state, uint32_t timeout_ms) {
    fixture *f = calloc(1, sizeof(*f));
    f->answer = calloc(1, ANSWER_MAX);
    budget_init(&f->bodies, 100000);
    f->options = (http_server_options){.connections_max = 3,
                                       .head_bytes_max = 1024,
                                       .body_bytes_max = 200000,
                                       .body_budget = &f->bodies,
                                       .head_timeout_ms = timeout_ms,
                                       .body_timeout_ms = timeout_ms,
                                       .idle_timeout_ms = timeout_ms,
                                       .write_timeout_ms = timeout_ms};
    const http_handler handler = {on_request, f};
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(http_server_create(&f->options, f->loop, &handler, &f->server), BT_OK);
    f->client = open_client(f);
    *state = f;
    return 0;
}

static int set_up(void **state) {
    return set_up_with(state, 600000);
}

static int set_up_impatient(void **state) {
    return set_up_with(state, 20);
}

static int tear_down(void **state) {
    fixture *f = *state;
    http_server_destroy(f->server);
    assert_int_equal(budget_used(&f->bodies), 0);
    bt_loop_destroy(f->loop);
    if (f->client >= 0) close(f->client);
    free(f->answer);
    free(f);
    return 0;
}

static void turn(fixture *f) {
    for (int i = 0; i < TURNS; i++) {
        assert_true(event_base_loop(bt_loop_get_base(f->loop), EVLOOP_NONBLOCK) >= 0);
    }
}

static void put(fixture *f, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t put_now = send(f->client, bytes, count, MSG_NOSIGNAL);
        if (put_now < 0) {
            assert_int_equal(errno, EAGAIN);
            turn(f);
            continue;
        }
        bytes += put_now;
        count -= (size_t)put_now;
    }
    turn(f);
}

/* Reads what is there; true = the server closed. */
static bool take(fixture *f) {
    for (;;) {
        turn(f);
        ssize_t got =
            recv(f->client, f->answer + f->answer_bytes, ANSWER_MAX - 1 - f->answer_bytes, 0);
        if (got == 0) return true;
        if (got < 0) {
            if (errno == ECONNRESET) return true;
            assert_int_equal(errno, EAGAIN);
            f->answer[f->answer_bytes] = 0;
            return false;
        }
        f->answer_bytes += (size_t)got;
        f->answer[f->answer_bytes] = 0;
    }
}

static const char *ask(fixture *f, const char *request) {
    f->answer_bytes = 0;
    f->answer[0] = 0;
    put(f, request, strlen(request));
    (void)take(f);
    return f->answer;
}

static unsigned count_of(const char *text, const char *needle) {
    unsigned count = 0;
    for (const char *at = strstr(text, needle); at != NULL; at = strstr(at + 1, needle)) {
        count++;
    }
    return count;
}

static void assert_has(const char *text, const char *needle) {
    if (strstr(text, needle) == NULL) fail_msg("'%s' is not in '%s'", needle, text);
}

#define H "Host: a\r\n"

static void test_reply_and_keep_alive(void **state) {
    fixture *f = *state;
    const char *answer = ask(f, "GET /now HTTP/1.1\r\n" H "X-Request-Id: my id\r\n\r\n");
    assert_int_equal(strncmp(answer, "HTTP/1.1 200 OK\r\nDate: ", 23), 0);
    assert_has(answer, "\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n"
                       "Access-Control-Allow-Origin: *\r\n");
    assert_has(answer,
               "\r\nx-request-id: my id\r\nX-Extra: 1\r\nConnection: keep-alive\r\n\r\nGET:");
    answer = ask(f, "POST /now HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nhello");
    assert_has(answer, "\r\n\r\nPOST:hello");
    answer =
        ask(f, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n");
    assert_has(answer, "\r\n\r\nPOST:ab");
    answer = ask(f, "HEAD /now HTTP/1.1\r\n" H "\r\n");
    assert_has(answer, "Content-Length: 5\r\n");
    assert_int_equal(strcmp(answer + strlen(answer) - 4, "\r\n\r\n"), 0);
    assert_int_equal(f->request_count, 4);
}

static void test_close_and_http_1_0(void **state) {
    fixture *f = *state;
    const char *answer = ask(f, "GET /now HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n");
    assert_has(answer, "Connection: keep-alive\r\n");
    answer = ask(f, "GET /now HTTP/1.0\r\nHost: a\r\n\r\n");
    assert_has(answer, "Connection: close\r\n");
    assert_true(take(f));
}

static void test_pipelined_requests_are_answered_in_order(void **state) {
    fixture *f = *state;
    const char *answer = ask(f, "GET /now HTTP/1.1\r\n" H "\r\nGET /later HTTP/1.1\r\n" H
                                "\r\nPOST /now HTTP/1.1\r\n" H "Content-Length: 1\r\n\r\nx");
    assert_int_equal(count_of(answer, "HTTP/1.1 200"), 1);
    assert_int_equal(f->held_count, 1);
    const http_head head = {200, "text/plain", 5, NULL};
    http_exchange_reply(f->held[0], &head, "later");
    (void)take(f);
    assert_int_equal(count_of(f->answer, "HTTP/1.1 200"), 3);
    assert_true(strstr(f->answer, "later") < strstr(f->answer, "POST:x"));
}

static void test_many_pipelined_requests(void **state) {
    fixture *f = *state;
    enum { COUNT = 3000 };
    static const char REQUEST[] = "GET /now HTTP/1.1\r\n" H "\r\n";
    for (int i = 0; i < COUNT; i++) {
        size_t sent = 0;
        while (sent < sizeof(REQUEST) - 1) {
            ssize_t now = send(f->client, REQUEST + sent, sizeof(REQUEST) - 1 - sent, MSG_NOSIGNAL);
            if (now > 0) sent += (size_t)now;
            if (now < 0) (void)take(f);
        }
    }
    (void)take(f);
    assert_int_equal(count_of(f->answer, "HTTP/1.1 200"), COUNT);
}

static void test_expect_continue(void **state) {
    fixture *f = *state;
    const char *answer =
        ask(f, "POST /now HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    assert_string_equal(answer, "HTTP/1.1 100 Continue\r\n\r\n");
    answer = ask(f, "ok");
    assert_has(answer, "POST:ok");
    answer = ask(f, "POST /now HTTP/1.1\r\n" H "Expect: tea\r\nContent-Length: 2\r\n\r\n");
    assert_int_equal(strncmp(answer, "HTTP/1.1 417 ", 13), 0);
}

static void test_refusals_close_after_the_answer(void **state) {
    static const struct {
        const char *request;
        const char *status;
    } CASES[] = {
        {"GET /now HTTP/1.1\n" H "\r\n", "HTTP/1.1 400 "},
        {"POST /now HTTP/1.1\r\n" H "Content-Length: 200001\r\n\r\n", "HTTP/1.1 413 "},
        {"POST /now HTTP/1.1\r\n" H "Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\na",
         "HTTP/1.1 415 "},
    };
    fixture *f = *state;
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        const char *answer = ask(f, CASES[i].request);
        assert_int_equal(strncmp(answer, CASES[i].status, strlen(CASES[i].status)), 0);
        assert_has(answer, "Connection: close\r\n");
        assert_has(answer, "{\"error\":{\"message\":\"");
        assert_true(take(f));
        /* What else the client sends is read and dropped until it closes too. */
        put(f, "more", 4);
        close(f->client);
        turn(f);
        assert_int_equal(http_server_connection_count(f->server), 0);
        f->client = open_client(f);
    }
    assert_int_equal(f->request_count, 0);
}

static void test_head_too_large(void **state) {
    fixture *f = *state;
    char request[4096];
    snprintf(request, sizeof(request), "GET /now HTTP/1.1\r\n" H "X: %02000d\r\n\r\n", 0);
    assert_int_equal(strncmp(ask(f, request), "HTTP/1.1 431 ", 13), 0);
}

static void test_bodies_share_a_budget(void **state) {
    fixture *f = *state;
    size_t bytes = 150000;
    char *body = calloc(1, bytes);
    static const char HEAD[] = "POST /now HTTP/1.1\r\n" H "Content-Length: 150000\r\n\r\n";
    put(f, HEAD, sizeof(HEAD) - 1);
    /* The server answers in the middle of the body. */
    size_t sent = 0;
    while (sent < bytes) {
        ssize_t now = send(f->client, body + sent, bytes - sent, MSG_NOSIGNAL);
        if (now > 0) sent += (size_t)now;
        if (take(f)) break;
    }
    free(body);
    assert_int_equal(strncmp(f->answer, "HTTP/1.1 503 ", 13), 0);
    assert_has(f->answer, "Retry-After: 1\r\n");
    assert_int_equal(budget_used(&f->bodies), 0);
}

static void test_connections_are_capped(void **state) {
    fixture *f = *state;
    int second = open_client(f);
    int third = open_client(f);
    close(f->client);
    turn(f);
    f->client = open_client(f);
    int beyond = open_client(f);
    char text[256] = {0};
    assert_true(recv(beyond, text, sizeof(text) - 1, 0) > 0);
    assert_has(text, "HTTP/1.1 503 ");
    const char *at = strstr(text, "\r\n\r\n");
    assert_int_equal(strlen(at + 4), 55);
    assert_has(ask(f, "GET /now HTTP/1.1\r\n" H "\r\n"), "200 OK");
    close(second);
    close(third);
    close(beyond);
}

static void test_stream_in_chunks(void **state) {
    fixture *f = *state;
    (void)ask(f, "GET /stream HTTP/1.1\r\n" H "\r\n");
    assert_has(f->answer, "Transfer-Encoding: chunked\r\n");
    http_exchange_add(f->held[0], "data: 1\n\n", 9);
    http_exchange_add(f->held[0], "", 0);
    http_exchange_end(f->held[0]);
    (void)take(f);
    assert_has(f->answer, "\r\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n");
    assert_has(ask(f, "GET /now HTTP/1.1\r\n" H "\r\n"), "200 OK");
    (void)ask(f, "GET /stream HTTP/1.0\r\nHost: a\r\n\r\n");
    assert_null(strstr(f->answer, "Transfer-Encoding"));
    http_exchange_add(f->held[1], "abc", 3);
    http_exchange_end(f->held[1]);
    assert_true(take(f));
    assert_has(f->answer, "Connection: close\r\n\r\nabc");
}

/* A client that does not read fills the room; the producer is told when there is some again. */
/* Texts of any size, in blocks of a pool or not: what the client gets is what was given, whole or
 * in chunks, and each block comes back when it is written. */
static void give_texts(fixture *f, bt_block_pool *pool, const char *request, bool is_chunked) {
    static const size_t SIZES[] = {0, 5, 20000, 40000, 100000, 70000};
    static char expected[300000];
    size_t used = 0;
    bt_text text;
    bt_text_init_pooled(&text, 1 << 20, pool, 64 * 1024);
    f->answer_bytes = 0;
    f->held_count = 0;
    put(f, request, strlen(request));
    const http_head head = {200, "text/plain", 235005, NULL};
    if (!is_chunked) http_exchange_begin(f->held[0], &head);
    for (size_t i = 0; i < sizeof(SIZES) / sizeof(SIZES[0]); i++) {
        for (size_t k = 0; k < SIZES[i]; k++) {
            const char c = (char)('a' + (i + k) % 26);
            bt_text_add(&text, &c, 1);
            expected[used++] = c;
        }
        http_exchange_give(f->held[0], &text);
        assert_int_equal(text.used, 0);
        assert_false(text.has_failed);
        (void)take(f);
    }
    http_exchange_end(f->held[0]);
    (void)take(f);
    bt_text_fini(&text);
    assert_int_equal(bt_block_pool_used_bytes(pool), 0);
    const char *body = strstr(f->answer, "\r\n\r\n") + 4;
    if (!is_chunked) {
        assert_int_equal(f->answer + f->answer_bytes - body, used);
        assert_memory_equal(body, expected, used);
        return;
    }
    size_t found = 0;
    for (;;) {
        char *end;
        const size_t bytes = strtoul(body, &end, 16);
        assert_memory_equal(end, "\r\n", 2);
        if (bytes == 0) break;
        assert_memory_equal(end + 2, expected + found, bytes);
        found += bytes;
        body = end + 2 + bytes + 2;
    }
    assert_int_equal(found, used);
}

static void test_giving_texts(void **state) {
    fixture *f = *state;
    bt_block_pool *pool;
    bt_text text;
    const bt_block_pool_options options = {.idle_bytes_max = 1 << 20};
    assert_int_equal(bt_block_pool_create(&options, &pool), BT_OK);
    give_texts(f, pool, "GET /later HTTP/1.1\r\n" H "\r\n", false);
    give_texts(f, pool, "GET /stream HTTP/1.1\r\n" H "\r\n", true);
    /* One without a pool, a HEAD, and a client that leaves before it has read. */
    bt_text_init(&text, 1 << 20);
    assert_non_null(bt_text_reserve(&text, 50000));
    memset(text.bytes, 'x', 50000);
    text.used = 50000;
    f->held_count = 0;
    put(f, "GET /stream HTTP/1.1\r\n" H "\r\n", strlen("GET /stream HTTP/1.1\r\n" H "\r\n"));
    http_exchange_give(f->held[0], &text);
    assert_int_equal(text.used, 0);
    assert_true(text.capacity >= 50000);
    http_exchange_end(f->held[0]);
    bt_text_fini(&text);
    (void)take(f);
    bt_text_init_pooled(&text, 1 << 20, pool, 64 * 1024);
    assert_non_null(bt_text_reserve(&text, 60000));
    text.used = 60000;
    f->held_count = 0;
    put(f, "HEAD /stream HTTP/1.1\r\n" H "\r\n", strlen("HEAD /stream HTTP/1.1\r\n" H "\r\n"));
    http_exchange_give(f->held[0], &text);
    assert_int_equal(bt_block_pool_used_bytes(pool), text.capacity);
    http_exchange_end(f->held[0]);
    (void)take(f);
    f->held_count = 0;
    put(f, "GET /stream HTTP/1.1\r\n" H "\r\n", strlen("GET /stream HTTP/1.1\r\n" H "\r\n"));
    for (int i = 0; i < 5; i++) {
        assert_non_null(bt_text_reserve(&text, 60000));
        memset(text.bytes, 'y', 60000);
        text.used = 60000;
        http_exchange_give(f->held[0], &text);
    }
    bt_text_fini(&text);
    assert_true(bt_block_pool_used_bytes(pool) > 0);
    bt_block_pool_destroy(pool); /* before those who hold its blocks */
    close(f->client);
    f->client = -1;
    turn(f);
    assert_int_equal(f->gone_count, 1);
}

static void test_back_pressure(void **state) {
    fixture *f = *state;
    put(f, "GET /stream HTTP/1.1\r\n" H "\r\n", strlen("GET /stream HTTP/1.1\r\n" H "\r\n"));
    static char block[16384];
    size_t added = 0;
    for (unsigned rounds = 0; rounds < 1000; rounds++) {
        size_t room = http_exchange_room(f->held[0]);
        if (room == 0) break;
        http_exchange_add(f->held[0], block, sizeof(block));
        added += sizeof(block);
        /* What waits is no room. */
        const size_t left = room > sizeof(block) ? room - sizeof(block) : 0;
        assert_true(http_exchange_room(f->held[0]) <= left);
        turn(f);
    }
    assert_int_equal(http_exchange_room(f->held[0]), 0);
    assert_true(added < 4u << 20);
    f->room_count = 0;
    turn(f);
    assert_int_equal(f->room_count, 0);
    f->answer_bytes = 0;
    (void)take(f);
    assert_true(f->room_count > 0);
    assert_true(http_exchange_room(f->held[0]) > 0);
    http_exchange_end(f->held[0]);
}

/* Long work before an answer begins, in slices: the owner hears once for each time it asks, also
 * behind an answer that is still on its way, and not when the client has left. */
static void test_wake(void **state) {
    static const char REQUEST[] = "GET /later HTTP/1.1\r\n" H "\r\n";
    fixture *f = *state;
    put(f, REQUEST, strlen(REQUEST));
    turn(f);
    assert_int_equal(f->room_count, 0);
    for (unsigned i = 1; i < 4; i++) {
        http_exchange_wake(f->held[0]);
        assert_int_equal(f->room_count, i - 1); /* not inside the call */
        turn(f);
        assert_int_equal(f->room_count, i);
    }
    static char block[100000];
    const http_head head = {200, "text/plain", sizeof(block), NULL};
    http_exchange_reply(f->held[0], &head, block);
    put(f, REQUEST, strlen(REQUEST));
    assert_int_equal(f->held_count, 2);
    f->room_count = 0;
    http_exchange_wake(f->held[1]);
    (void)take(f);
    assert_int_equal(f->room_count, 1);
    http_exchange_wake(f->held[1]);
    close(f->client);
    f->client = -1;
    turn(f);
    assert_int_equal(f->gone_count, 1);
}

static void test_clients_that_leave(void **state) {
    fixture *f = *state;
    /* Half close while the answer is awaited, and a full close in the middle of a stream. */
    put(f, "GET /later HTTP/1.1\r\n" H "\r\n", strlen("GET /later HTTP/1.1\r\n" H "\r\n"));
    assert_int_equal(shutdown(f->client, SHUT_WR), 0);
    turn(f);
    assert_int_equal(f->gone_count, 1);
    close(f->client);
    f->client = open_client(f);
    put(f, "GET /stream HTTP/1.1\r\n" H "\r\n", strlen("GET /stream HTTP/1.1\r\n" H "\r\n"));
    http_exchange_add(f->held[1], "data: 1\n\n", 9);
    close(f->client);
    turn(f);
    assert_int_equal(f->gone_count, 2);
    /* In the middle of a head and of a body nobody is told. */
    f->client = open_client(f);
    put(f, "GET /la", 7);
    close(f->client);
    f->client = open_client(f);
    put(f, "POST /now HTTP/1.1\r\n" H "Content-Length: 9\r\n\r\nabc",
        strlen("POST /now HTTP/1.1\r\n" H "Content-Length: 9\r\n\r\nabc"));
    close(f->client);
    f->client = -1;
    turn(f);
    assert_int_equal(f->gone_count, 2);
    assert_int_equal(http_server_connection_count(f->server), 0);
}

/* A whole request followed by a half close still gets the answer that was made at once. */
static void test_answer_before_a_half_close(void **state) {
    fixture *f = *state;
    static const char REQUEST[] = "GET /now HTTP/1.1\r\n" H "\r\n";
    assert_int_equal(send(f->client, REQUEST, sizeof(REQUEST) - 1, MSG_NOSIGNAL),
                     sizeof(REQUEST) - 1);
    assert_int_equal(shutdown(f->client, SHUT_WR), 0);
    assert_true(take(f));
    assert_has(f->answer, "200 OK");
}

static void test_cut(void **state) {
    fixture *f = *state;
    (void)ask(f, "GET /stream HTTP/1.1\r\n" H "\r\n");
    http_exchange_add(f->held[0], "data: 1\n\n", 9);
    turn(f);
    http_exchange_cut(f->held[0]);
    assert_true(take(f));
    assert_int_equal(f->gone_count, 0);
    assert_null(strstr(f->answer, "0\r\n\r\n"));
}

/* Turns the loop, sleeping in it, until the server closes the connection. */
static void turn_until_closed(fixture *f) {
    while (!take(f)) {
        assert_true(event_base_loop(bt_loop_get_base(f->loop), EVLOOP_ONCE) >= 0);
    }
}

static void test_deadlines(void **state) {
    fixture *f = *state;
    /* Between requests the connection is closed without a word. */
    turn_until_closed(f);
    assert_int_equal(f->answer_bytes, 0);
    /* Half a head, and half a body. */
    static const char *const HALVES[] = {"GET /now HTTP/1.1\r\nHo",
                                         "POST /now HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nab"};
    for (int i = 0; i < 2; i++) {
        close(f->client);
        f->client = open_client(f);
        f->answer_bytes = 0;
        put(f, HALVES[i], strlen(HALVES[i]));
        turn_until_closed(f);
        assert_int_equal(strncmp(f->answer, "HTTP/1.1 408 ", 13), 0);
    }
    assert_int_equal(f->request_count, 0);
}

/* A client that stops reading is given up, and who answers it is told. */
static void test_write_deadline(void **state) {
    fixture *f = *state;
    static char block[16384];
    put(f, "GET /stream HTTP/1.1\r\n" H "\r\n", strlen("GET /stream HTTP/1.1\r\n" H "\r\n"));
    while (f->gone_count == 0) {
        if (http_exchange_room(f->held[0]) > 0) http_exchange_add(f->held[0], block, sizeof(block));
        assert_true(event_base_loop(bt_loop_get_base(f->loop), http_exchange_room(f->held[0]) > 0
                                                                   ? EVLOOP_NONBLOCK
                                                                   : EVLOOP_ONCE) >= 0);
    }
    assert_int_equal(http_server_connection_count(f->server), 0);
}

/* What is on its way when the server ends is dropped, and its owners are told. */
static void test_destroy_with_open_exchanges(void **state) {
    fixture *f = *state;
    (void)ask(f, "GET /stream HTTP/1.1\r\n" H "\r\n");
    http_server_destroy(f->server);
    f->server = NULL;
    assert_int_equal(f->gone_count, 1);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_reply_and_keep_alive),
        CASE(test_close_and_http_1_0),
        CASE(test_pipelined_requests_are_answered_in_order),
        CASE(test_many_pipelined_requests),
        CASE(test_expect_continue),
        CASE(test_refusals_close_after_the_answer),
        CASE(test_head_too_large),
        CASE(test_bodies_share_a_budget),
        CASE(test_connections_are_capped),
        CASE(test_stream_in_chunks),
        CASE(test_giving_texts),
        CASE(test_back_pressure),
        CASE(test_wake),
        CASE(test_clients_that_leave),
        CASE(test_answer_before_a_half_close),
        CASE(test_cut),
        CASE(test_destroy_with_open_exchanges),
        cmocka_unit_test_setup_teardown(test_deadlines, set_up_impatient, tear_down),
        cmocka_unit_test_setup_teardown(test_write_deadline, set_up_impatient, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
