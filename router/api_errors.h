/* The bodies of error answers. Three shapes, because clients read different ones:
 *   GENERATE  {"error":{"message":T}}, what /generate answers to a request it understood
 *   SCHEMA    nested and flat together, type "Bad Request": a body that could not be read
 *   OPENAI    nested and flat together, type "BadRequestError" and so on: everything else */
#ifndef BT_ROUTER_API_ERRORS_H
#define BT_ROUTER_API_ERRORS_H

#include "base/json_writer.h"
#include "base/status.h"

typedef enum api_error_shape {
    API_ERROR_GENERATE,
    API_ERROR_SCHEMA,
    API_ERROR_OPENAI,
} api_error_shape;

/* Appends the JSON object. */
void api_error_write(bt_text *out, api_error_shape shape, int http_status, const char *message);
/* The same with a word for "code" ("model_not_found"). */
void api_error_write_code(bt_text *out, int http_status, const char *code, const char *message);
/* "BadRequestError", "InternalServerError", ... */
const char *api_error_type(int http_status);

#endif
