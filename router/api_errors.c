/* The bodies of error answers and the names that go with a status. Three shapes, because clients of
 * the two APIs look in different places; which one applies is the caller's choice, and two of them
 * exist for 400 only. The message is escaped here and may hold anything the client
 * sent. Headers and the status line are not made here. */
#include "router/api_errors.h"

#include <string.h>

const char *api_error_type(int http_status) {
    switch (http_status) {
    case 400: return "BadRequestError";
    case 404: return "NotFoundError";
    case 405: return "MethodNotAllowedError";
    case 408: return "RequestTimeoutError";
    case 413: return "PayloadTooLargeError";
    case 415: return "UnsupportedMediaTypeError";
    case 417: return "ExpectationFailedError";
    case 429: return "RateLimitError";
    case 431: return "HeaderFieldsTooLargeError";
    case 503: return "ServiceUnavailableError";
    case 504: return "GatewayTimeoutError";
    }
    return http_status < 500 ? "BadRequestError" : "InternalServerError";
}

/* "message":T,"type":T,"param":null,"code":C */
static void add_fields(bt_text *out, const char *type, int http_status, const char *code,
                       const char *message) {
    bt_text_add_string(out, "\"message\":");
    bt_json_add_string(out, message, strlen(message));
    bt_text_add_format(out, ",\"type\":\"%s\",\"param\":null,\"code\":", type);
    if (code != NULL) {
        bt_text_add_format(out, "\"%s\"", code);
    } else {
        bt_json_add_int(out, http_status);
    }
}

static void add_both(bt_text *out, const char *type, int http_status, const char *code,
                     const char *message) {
    bt_text_add_string(out, "{\"error\":{");
    add_fields(out, type, http_status, code, message);
    bt_text_add_string(out, "},\"object\":\"error\",");
    add_fields(out, type, http_status, code, message);
    bt_text_add_string(out, "}");
}

void api_error_write_code(bt_text *out, int http_status, const char *code, const char *message) {
    add_both(out, api_error_type(http_status), http_status, code, message);
}

void api_error_write(bt_text *out, api_error_shape shape, int http_status, const char *message) {
    switch (shape) {
    case API_ERROR_GENERATE:
        /* SGLang keeps this short form for 400 only. */
        if (http_status != 400) break;
        bt_text_add_string(out, "{\"error\":{\"message\":");
        bt_json_add_string(out, message, strlen(message));
        bt_text_add_string(out, "}}");
        return;
    case API_ERROR_SCHEMA:
        if (http_status != 400) break;
        add_both(out, "Bad Request", http_status, NULL, message);
        return;
    case API_ERROR_OPENAI: break;
    }
    add_both(out, api_error_type(http_status), http_status, NULL, message);
}
