/* Checks of what two processes pass to each other about one generation. The router validates its
 * clients' requests with sentences for humans; this is the workers' own check of the router. Pure.
 */
#ifndef BT_PROTO_GENERATION_H
#define BT_PROTO_GENERATION_H

#include "proto/message.h"

/* REQUEST_INVALID with the field and its value: temperature finite and > 0, top_p in (0, 1],
 * mask_mode 0..2, stop ids within their limit. */
BT_MUST_CHECK bt_status proto_generation_check(const proto_generation *generation, bt_error *error);
/* Is `id` one of the stop ids? */
bool proto_generation_is_stop(const proto_generation *generation, int32_t id);

#endif
