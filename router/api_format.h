/* How the endpoints' JSON looks. These fill call->writer; api_call.c decides when. */
#ifndef BT_ROUTER_API_FORMAT_H
#define BT_ROUTER_API_FORMAT_H

#include "router/api_call.h"

/* The meta_info object over the writer's range. */
void api_meta_add(api_call *call);
/* The finish_reason object, or null. */
void api_finish_add(const api_call *call, bt_text *out);

/* /generate: one whole reply, or one event, over the writer's range. */
void api_generate_add(api_call *call);

/* Chat: a whole reply; and the next event of a stream, if one is due. */
void api_chat_add(api_call *call);
bool api_chat_add_event(api_call *call, const reply_range *next);

#endif
