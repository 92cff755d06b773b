/* Answers: status line, fields, body in one piece or in chunks. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/json_writer.h"
#include "router/http_internal.h"

enum { FIELDS_BYTES_MAX = 8192, GIVEN_BYTES_MIN = 16 * 1024 };

static const struct {
    int status;
    const char *text;
} REASONS[] = {
    {200, "OK"},
    {204, "No Content"},
    {400, "Bad Request"},
    {404, "Not Found"},
    {405, "Method Not Allowed"},
    {408, "Request Timeout"},
    {413, "Content Too Large"},
    {415, "Unsupported Media Type"},
    {417, "Expectation Failed"},
    {429, "Too Many Requests"},
    {431, "Request Header Fields Too Large"},
    {500, "Internal Server Error"},
    {503, "Service Unavailable"},
    {504, "Gateway Timeout"},
};

static const char *reason_of(int status) {
    for (size_t i = 0; i < BT_ARRAY_COUNT(REASONS); i++) {
        if (REASONS[i].status == status) return REASONS[i].text;
    }
    return "Unknown";
}

/* "Sun, 06 Nov 1994 08:49:37 GMT", made once a second. */
static const char *date_of(http_server *server) {
    time_t now = time(NULL);
    if ((int64_t)now != server->date_second) {
        struct tm utc;
        gmtime_r(&now, &utc);
        strftime(server->date, sizeof(server->date), "%a, %d %b %Y %H:%M:%S GMT", &utc);
        server->date_second = (int64_t)now;
    }
    return server->date;
}

void http_exchange_own(http_exchange *exchange, const http_owner *owner) {
    exchange->owner = *owner;
}

void http_exchange_wake(http_exchange *exchange) {
    BT_ASSERT(exchange->state == HTTP_STATE_ANSWERING);
    exchange->is_woken = true;
    bufferevent_trigger(exchange->bev, EV_WRITE, BEV_TRIG_DEFER_CALLBACKS);
}

size_t http_exchange_room(const http_exchange *exchange) {
    size_t queued = evbuffer_get_length(bufferevent_get_output(exchange->bev));
    return queued < HTTP_OUTPUT_HIGH ? HTTP_OUTPUT_HIGH - queued : 0;
}

static void add_length(bt_text *text, http_exchange *exchange, const http_head *head) {
    if (head->content_type == NULL) {
        if (head->status != 204) bt_text_add_string(text, "Content-Length: 0\r\n");
        return;
    }
    bt_text_add_format(text, "Content-Type: %s\r\n", head->content_type);
    if (head->content_bytes >= 0) {
        bt_text_add_format(text, "Content-Length: %lld\r\n", (long long)head->content_bytes);
    } else if (exchange->parser.request.version_minor == 1) {
        exchange->is_chunked = true;
        bt_text_add_string(text, "Transfer-Encoding: chunked\r\n");
    } else {
        exchange->keeps_alive = false; /* the end of the body is the end of the connection */
    }
}

void http_exchange_begin(http_exchange *exchange, const http_head *head) {
    bt_text text;
    BT_ASSERT(exchange->state == HTTP_STATE_ANSWERING && !exchange->has_begun);
    bt_text_init(&text, FIELDS_BYTES_MAX);
    exchange->has_begun = true;
    exchange->is_chunked = false;
    bt_text_add_format(&text, "HTTP/1.1 %d %s\r\nDate: %s\r\n", head->status,
                       reason_of(head->status), date_of(exchange->server));
    add_length(&text, exchange, head);
    bt_text_add_string(&text, "Access-Control-Allow-Origin: *\r\n"
                              "Access-Control-Expose-Headers: x-request-id\r\n");
    bt_text_add_format(&text, "x-request-id: %s\r\n", exchange->request_id);
    if (head->fields != NULL) bt_text_add_string(&text, head->fields);
    bt_text_add_format(&text, "Connection: %s\r\n\r\n",
                       exchange->keeps_alive ? "keep-alive" : "close");
    if (text.has_failed) {
        bt_text_fini(&text);
        exchange->keeps_alive = false;
        return;
    }
    bufferevent_write(exchange->bev, text.bytes, text.used);
    bt_text_fini(&text);
}

void http_exchange_add(http_exchange *exchange, const char *bytes, size_t count) {
    BT_ASSERT(exchange->state == HTTP_STATE_ANSWERING && exchange->has_begun);
    if (count == 0 || exchange->is_head_only) return;
    struct evbuffer *output = bufferevent_get_output(exchange->bev);
    if (exchange->is_chunked) evbuffer_add_printf(output, "%zx\r\n", count);
    evbuffer_add(output, bytes, count);
    if (exchange->is_chunked) evbuffer_add(output, "\r\n", 2);
}

static void on_written(const void *bytes, size_t count, void *context) {
    (void)bytes;
    (void)count;
    bt_block_release(context);
}

/* Little in a large block would be memory held for nothing; below some size a copy is cheaper. */
static bool is_worth_giving(const bt_text *text) {
    return text->block != NULL && text->used >= GIVEN_BYTES_MIN && text->used >= text->capacity / 2;
}

void http_exchange_give(http_exchange *exchange, bt_text *text) {
    BT_ASSERT(exchange->state == HTTP_STATE_ANSWERING && exchange->has_begun);
    struct evbuffer *output = bufferevent_get_output(exchange->bev);
    const size_t count = text->used;
    if (exchange->is_head_only || !is_worth_giving(text)) {
        if (count > 0) http_exchange_add(exchange, text->bytes, count);
        bt_text_clear(text);
        return;
    }
    bt_block *block = bt_text_take_block(text);
    if (exchange->is_chunked) evbuffer_add_printf(output, "%zx\r\n", count);
    if (evbuffer_add_reference(output, block->bytes, count, on_written, block) != 0) {
        evbuffer_add(output, block->bytes, count);
        bt_block_release(block);
    }
    if (exchange->is_chunked) evbuffer_add(output, "\r\n", 2);
}

void http_exchange_end(http_exchange *exchange) {
    BT_ASSERT(exchange->state == HTTP_STATE_ANSWERING && exchange->has_begun);
    if (exchange->is_chunked && !exchange->is_head_only)
        bufferevent_write(exchange->bev, "0\r\n\r\n", 5);
    exchange->owner = (http_owner){0};
    if (!exchange->keeps_alive) {
        bufferevent_setwatermark(exchange->bev, EV_WRITE, 0, 0);
        http_set_state(exchange, HTTP_STATE_FLUSHING);
        return;
    }
    http_set_state(exchange, HTTP_STATE_IDLE);
    http_receive(exchange);
}

void http_exchange_cut(http_exchange *exchange) {
    BT_ASSERT(exchange->state == HTTP_STATE_ANSWERING);
    exchange->owner = (http_owner){0};
    http_free(exchange);
}

void http_exchange_reply(http_exchange *exchange, const http_head *head, const char *body) {
    http_exchange_begin(exchange, head);
    if (head->content_bytes > 0) http_exchange_add(exchange, body, (size_t)head->content_bytes);
    http_exchange_end(exchange);
}
