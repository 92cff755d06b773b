/* Requests: bytes of the input through the parser, bodies collected, the handler called. */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "router/api_errors.h"
#include "router/http_internal.h"

enum { BODY_FIRST_BYTES = 4096 };

void http_refuse(http_exchange *exchange, int status, const char *text) {
    bt_text body;
    bt_text_init(&body, 4096);
    api_error_write(&body, API_ERROR_SCHEMA, status, text);
    exchange->keeps_alive = false;
    if (exchange->request_id[0] == 0) random_id(exchange->request_id);
    http_body_drop(exchange);
    exchange->state = HTTP_STATE_ANSWERING;
    const http_head head = {.status = status,
                            .content_type = "application/json",
                            .content_bytes = (int64_t)body.used,
                            .fields = status == 503 ? "Retry-After: 1\r\n" : NULL};
    http_exchange_reply(exchange, &head, body.bytes != NULL ? body.bytes : "");
    bt_text_fini(&body);
}

/* The client's id if it is short and visible, else one of ours. */
static void choose_request_id(http_exchange *exchange) {
    const char *given = http_request_field(&exchange->parser.request, "x-request-id");
    size_t bytes = given != NULL ? strlen(given) : 0;
    bool is_good = bytes > 0 && bytes <= HTTP_REQUEST_ID_MAX;
    for (size_t i = 0; is_good && i < bytes; i++) {
        is_good = given[i] >= 0x20 && given[i] <= 0x7e;
    }
    if (is_good) {
        memcpy(exchange->request_id, given, bytes + 1);
    } else {
        random_id(exchange->request_id);
    }
}

static void take_head(http_exchange *exchange) {
    const http_request *request = &exchange->parser.request;
    const char *encoding = http_request_field(request, "content-encoding");
    choose_request_id(exchange);
    exchange->keeps_alive = request->keeps_alive;
    exchange->is_head_only = request->method == HTTP_METHOD_HEAD;
    if (encoding != NULL && strcmp(encoding, "identity") != 0) {
        http_refuse(exchange, 415, "request bodies with a Content-Encoding are not supported");
        return;
    }
    if (request->expectation == HTTP_EXPECT_UNKNOWN) {
        http_refuse(exchange, 417, "an expectation other than 100-continue");
        return;
    }
    http_set_state(exchange, HTTP_STATE_BODY);
    bool waits = request->is_chunked || request->content_length > 0;
    struct evbuffer *input = bufferevent_get_input(exchange->bev);
    if (request->expectation == HTTP_EXPECT_CONTINUE && waits && evbuffer_get_length(input) == 0) {
        static const char CONTINUE[] = "HTTP/1.1 100 Continue\r\n\r\n";
        bufferevent_write(exchange->bev, CONTINUE, sizeof(CONTINUE) - 1);
    }
}

/* Room for `bytes` more, charged to the budget of all bodies. */
static bool grow_body(http_exchange *exchange, size_t bytes) {
    size_t needed = exchange->body_bytes + bytes;
    if (needed <= exchange->body_capacity) return true;
    uint64_t length = exchange->parser.request.content_length;
    size_t grown = exchange->body_capacity > 0 ? exchange->body_capacity : BODY_FIRST_BYTES;
    while (grown < needed) {
        grown *= 2;
    }
    if (length >= needed && length < grown) grown = (size_t)length;
    size_t more = grown - exchange->body_capacity;
    if (!budget_take(exchange->server->options.body_budget, more)) return false;
    char *body = bt_realloc(exchange->body, grown);
    if (body == NULL) {
        budget_give(exchange->server->options.body_budget, more);
        return false;
    }
    exchange->body = body;
    exchange->body_capacity = grown;
    return true;
}

static void take_body(http_exchange *exchange, const http_event *event) {
    if (!grow_body(exchange, event->body_bytes)) {
        http_refuse(exchange, 503, "no memory for the request body now");
        return;
    }
    memcpy(exchange->body + exchange->body_bytes, event->body, event->body_bytes);
    exchange->body_bytes += event->body_bytes;
    exchange->body_progress += event->body_bytes;
}

/* The handler takes the body with exactly its length charged. */
static void take_end(http_exchange *exchange) {
    http_server *server = exchange->server;
    char *body = exchange->body;
    size_t bytes = exchange->body_bytes;
    budget_give(server->options.body_budget, exchange->body_capacity - bytes);
    exchange->body = NULL;
    exchange->body_bytes = 0;
    exchange->body_capacity = 0;
    http_set_state(exchange, HTTP_STATE_ANSWERING);
    server->handler.on_request(server->handler.context, exchange, &exchange->parser.request, body,
                               bytes);
    /* Thousands of open streams and idle connections keep no head. */
    bt_free(exchange->head_buffer);
    exchange->head_buffer = NULL;
}

static void take_event(http_exchange *exchange, const http_event *event) {
    switch (event->kind) {
    case HTTP_EVENT_MORE: break;
    case HTTP_EVENT_HEAD: take_head(exchange); break;
    case HTTP_EVENT_BODY: take_body(exchange, event); break;
    case HTTP_EVENT_END: take_end(exchange); break;
    case HTTP_EVENT_ERROR: http_refuse(exchange, event->status, event->text); break;
    }
}

/* Starts a request when its first byte is here. */
static bool begin_request(http_exchange *exchange) {
    const http_server_options *options = &exchange->server->options;
    if (exchange->head_buffer == NULL) exchange->head_buffer = bt_malloc(options->head_bytes_max);
    if (exchange->head_buffer == NULL) {
        http_free(exchange);
        return false;
    }
    exchange->request_id[0] = 0;
    exchange->is_head_only = false;
    exchange->has_begun = false;
    exchange->owner = (http_owner){0};
    http_parser_init(&exchange->parser, exchange->head_buffer, options->head_bytes_max,
                     options->body_bytes_max);
    http_set_state(exchange, HTTP_STATE_HEAD);
    return true;
}

static bool is_receiving_state(http_state state) {
    return state == HTTP_STATE_IDLE || state == HTTP_STATE_HEAD || state == HTTP_STATE_BODY;
}

/* One event of the parser from the first piece of the input. false: nothing more to do now. */
static bool receive_some(http_exchange *exchange) {
    struct evbuffer *input = bufferevent_get_input(exchange->bev);
    struct evbuffer_iovec piece = {0};
    if (!is_receiving_state(exchange->state)) return false;
    /* An answer that is not read yet holds back the next request. */
    if (http_exchange_room(exchange) == 0) return false;
    int pieces = evbuffer_peek(input, -1, NULL, &piece, 1);
    if (exchange->state == HTTP_STATE_IDLE) {
        if (pieces < 1) return false;
        if (!begin_request(exchange)) return false;
    }
    http_event event;
    size_t used = http_parser_feed(&exchange->parser, piece.iov_base, piece.iov_len, &event);
    if (event.kind == HTTP_EVENT_BODY) take_event(exchange, &event);
    evbuffer_drain(input, used);
    if (event.kind != HTTP_EVENT_BODY) take_event(exchange, &event);
    return event.kind != HTTP_EVENT_MORE || evbuffer_get_length(input) > 0;
}

void http_receive(http_exchange *exchange) {
    if (exchange->is_receiving) return;
    exchange->is_receiving = true;
    while (receive_some(exchange)) {
    }
    exchange->is_receiving = false;
    if (exchange->state == HTTP_STATE_DEAD) http_free(exchange);
}
