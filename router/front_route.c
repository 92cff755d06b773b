/* Paths: what is answered at once, and what is refused. */
#include <stdio.h>
#include <string.h>

#include "router/front_internal.h"
#include "router/http_accept.h"

static void reply(http_exchange *exchange, int status, const char *content_type,
                  const bt_text *body, const char *fields) {
    const http_head head = {status, content_type, (int64_t)body->used, fields};
    http_exchange_reply(exchange, &head, body->used > 0 ? body->bytes : "");
}

static void reply_json(front_thread *thread, http_exchange *exchange, int status) {
    if (thread->scratch.has_failed) {
        bt_text_clear(&thread->scratch);
        api_error_write(&thread->scratch, API_ERROR_OPENAI, 503, "out of memory");
        status = 503;
    }
    reply(exchange, status, "application/json", &thread->scratch, NULL);
}

/* CORS: browsers ask before they send a JSON body. What they want to send is allowed. */
static void answer_preflight(front_thread *thread, http_exchange *exchange,
                             const http_request *request) {
    const char *wanted = http_request_field(request, "access-control-request-headers");
    bt_text_clear(&thread->scratch);
    bt_text_add_format(&thread->scratch,
                       "Access-Control-Allow-Methods: GET, HEAD, POST, PUT, OPTIONS\r\n"
                       "Access-Control-Allow-Headers: %.2000s\r\nAccess-Control-Max-Age: 86400\r\n",
                       wanted != NULL && wanted[0] != 0 ? wanted : "*");
    const http_head head = {204, NULL, 0, thread->scratch.bytes};
    http_exchange_reply(exchange, &head, "");
}

static void answer_not_found(front_thread *thread, http_exchange *exchange,
                             const http_request *request) {
    char text[300];
    snprintf(text, sizeof(text), "there is nothing at %.200s", request->path);
    bt_text_clear(&thread->scratch);
    api_error_write(&thread->scratch, API_ERROR_OPENAI, 404, text);
    reply_json(thread, exchange, 404);
}

static void answer_not_allowed(front_thread *thread, http_exchange *exchange,
                               const http_request *request, const char *allow) {
    char text[300];
    char fields[128];
    snprintf(text, sizeof(text), "%.32s is not allowed at %.200s, only %s", request->method_name,
             request->path, allow);
    snprintf(fields, sizeof(fields), "Allow: %s\r\n", allow);
    bt_text_clear(&thread->scratch);
    api_error_write(&thread->scratch, API_ERROR_OPENAI, 405, text);
    reply(exchange, 405, "application/json", &thread->scratch, fields);
}

static void answer_health(front_thread *thread, http_exchange *exchange) {
    bt_text_clear(&thread->scratch);
    if (control_is_ready(thread->front->options.control)) {
        reply(exchange, 200, NULL, &thread->scratch, NULL);
        return;
    }
    api_error_write(&thread->scratch, API_ERROR_OPENAI, 503,
                    "no pair of a prefill and a decode worker is ready");
    reply(exchange, 503, "application/json", &thread->scratch, "Retry-After: 1\r\n");
}

static void answer_root(front_thread *thread, http_exchange *exchange) {
    bt_text_clear(&thread->scratch);
    bt_text_add_string(&thread->scratch,
                       "Baton router. POST /generate, /v1/chat/completions or /v1/completions.\n");
    reply(exchange, 200, "text/plain", &thread->scratch, NULL);
}

static void answer_info(front_thread *thread, http_exchange *exchange, api_route route,
                        const char *rest) {
    const front *f = thread->front;
    const api_settings *settings = f->options.settings;
    api_snapshot *snapshot = &thread->snapshot;
    bt_text *out = &thread->scratch;
    int status = 200;
    control_get_snapshot(f->options.control, snapshot);
    bt_text_clear(out);
    switch (route) {
    case API_ROUTE_MODELS: api_models_write(out, settings, &snapshot->model, f->started_s); break;
    case API_ROUTE_MODEL:
        if (!api_model_write(out, settings, &snapshot->model, f->started_s, rest)) status = 404;
        break;
    case API_ROUTE_SERVER_INFO: api_server_info_write(out, settings, snapshot); break;
    case API_ROUTE_MODEL_INFO: api_model_info_write(out, settings, snapshot); break;
    case API_ROUTE_WEIGHT_VERSION:
        bt_text_add_string(out, "{\"weight_version\":\"default\"}");
        break;
    case API_ROUTE_NONE:
    case API_ROUTE_GENERATE:
    case API_ROUTE_CHAT:
    case API_ROUTE_COMPLETION:
    case API_ROUTE_ABORT:
    case API_ROUTE_HEALTH:
    case API_ROUTE_LIVENESS:
    case API_ROUTE_ROOT: break;
    }
    reply_json(thread, exchange, status);
}

/* Everything that is answered from here. */
static void answer_now(front_thread *thread, http_exchange *exchange, const http_request *request) {
    const char *allow, *rest;
    api_route route = api_route_find(request->method, request->path, &allow, &rest);
    if (request->method == HTTP_METHOD_OPTIONS) {
        answer_preflight(thread, exchange, request);
        return;
    }
    if (route == API_ROUTE_NONE) {
        answer_not_found(thread, exchange, request);
        return;
    }
    if (allow != NULL) {
        answer_not_allowed(thread, exchange, request, allow);
        return;
    }
    switch (route) {
    case API_ROUTE_HEALTH: answer_health(thread, exchange); break;
    case API_ROUTE_LIVENESS:
        bt_text_clear(&thread->scratch);
        reply(exchange, 200, NULL, &thread->scratch, NULL);
        break;
    case API_ROUTE_ROOT: answer_root(thread, exchange); break;
    case API_ROUTE_NONE:
    case API_ROUTE_GENERATE:
    case API_ROUTE_CHAT:
    case API_ROUTE_COMPLETION:
    case API_ROUTE_ABORT:
    case API_ROUTE_MODELS:
    case API_ROUTE_MODEL:
    case API_ROUTE_SERVER_INFO:
    case API_ROUTE_MODEL_INFO:
    case API_ROUTE_WEIGHT_VERSION: answer_info(thread, exchange, route, rest); break;
    }
}

/* What is asked for is done when it can be; the answer does not wait for it. */
static void answer_abort(front_thread *thread, http_exchange *exchange, const char *body,
                         size_t body_bytes) {
    api_abort abort;
    api_failure failure;
    bt_text *out = &thread->scratch;
    bt_text_clear(out);
    if (!api_abort_read(body != NULL ? body : "", body_bytes, &abort, &failure)) {
        api_error_write(out, failure.shape, failure.http_status, failure.text);
        reply_json(thread, exchange, failure.http_status);
    } else if (!control_abort(thread->front->options.control, thread->index, &abort)) {
        api_error_write(out, API_ERROR_OPENAI, 503, "too many aborts are waiting");
        reply(exchange, 503, "application/json", out, "Retry-After: 1\r\n");
    } else {
        reply(exchange, 200, NULL, out, NULL);
    }
}

/* true: a request to generate. */
static bool kind_of(api_route route, api_kind *kind_out) {
    if (route == API_ROUTE_GENERATE) *kind_out = API_GENERATE;
    if (route == API_ROUTE_CHAT) *kind_out = API_CHAT;
    if (route == API_ROUTE_COMPLETION) *kind_out = API_COMPLETION;
    return route == API_ROUTE_GENERATE || route == API_ROUTE_CHAT || route == API_ROUTE_COMPLETION;
}

void front_on_request(void *context, http_exchange *exchange, const http_request *request,
                      char *body, size_t body_bytes) {
    front_thread *thread = context;
    const char *allow, *rest;
    api_route route = api_route_find(request->method, request->path, &allow, &rest);
    bool is_for_reading = allow == NULL && request->method != HTTP_METHOD_OPTIONS;
    api_body given = {.bytes = body_bytes};
    if (is_for_reading && kind_of(route, &given.kind)) {
        given.wants_safetensors =
            http_accept_prefers(request, "application/x-safetensors", "application/json");
        front_generate(thread, exchange, body, &given);
        return;
    }
    budget *bodies = thread->front->options.http.body_budget;
    if (is_for_reading && route == API_ROUTE_ABORT) {
        answer_abort(thread, exchange, body, body_bytes);
        http_server_body_free(bodies, body, body_bytes);
        return;
    }
    http_server_body_free(bodies, body, body_bytes);
    answer_now(thread, exchange, request);
}
