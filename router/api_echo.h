/* The prompt as a completion begins with it when `echo` asks for it: its text, and where in it each
 * of its tokens begins. The text of a prompt of text is as the client wrote it, that of ids is what
 * they decode to. Pure. */
#ifndef BT_ROUTER_API_ECHO_H
#define BT_ROUTER_API_ECHO_H

#include "base/json_reader.h"
#include "router/api_request.h"

/* Fill request->echo from its prompt. `string` is what the prompt was tokenized from.
 * WORKER_MEMORY.
 */
BT_MUST_CHECK bt_status api_echo_from_text(api_request *request, const tokenizer *t,
                                           const bt_json *string);
BT_MUST_CHECK bt_status api_echo_from_ids(api_request *request, const tokenizer *t);
void api_echo_fini(api_echo *echo);

#endif
