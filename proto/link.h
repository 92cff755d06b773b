/* One connection that carries proto_messages: a socket, the framing and the codec. Payloads are
 * sent by reference and given up once the kernel has them, and received into blocks that whoever
 * wants them may keep, so that neither end copies more than a few bytes. Nothing here blocks.
 *
 * Ownership: the creator owns the link and destroys it, also from inside a callback of that link;
 * the link owns its descriptor. Event thread only. Output is bounded: past output_max_bytes the
 * peer is taken for dead and the link closes. SIGPIPE must be ignored (bt_loop does it). */
#ifndef BT_PROTO_LINK_H
#define BT_PROTO_LINK_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "proto/message.h"

struct event_base;
typedef struct proto_link proto_link;

typedef struct proto_link_events {
    /* A message that passed the codec. message->payload is borrowed for the call. */
    void (*on_message)(void *context, proto_link *link, const proto_message *message);
    /* The connection is gone, with the reason; comes once, from the event loop, never from inside a
     * call into the link, and nothing follows. PEER_GONE, PEER_PROTOCOL (their bytes break the
     * framing or the codec), PEER_TIMEOUT (they do not read), WORKER_*. OK after
     * proto_link_finish. */
    void (*on_closed)(void *context, proto_link *link, bt_status status, const char *text);
    /* Output rose above output_high_bytes, or has drained below half of it. May be NULL. */
    void (*on_output)(void *context, proto_link *link, bool is_high);
    void *context;
} proto_link_events;

typedef struct proto_link_options {
    size_t output_high_bytes; /* 0 = 4 MiB */
    size_t output_max_bytes;  /* 0 = 64 MiB */
    /* Where payloads are received, borrowed; its owner's thread is the link's. NULL: one of the
     * link's own. */
    bt_block_pool *blocks;
} proto_link_options;

/* Takes fd (a connected stream socket) also on failure; sets it non-blocking and TCP_NODELAY.
 * options may be NULL. */
BT_MUST_CHECK bt_status proto_link_create(struct event_base *base, int fd,
                                          const proto_link_options *options,
                                          const proto_link_events *events, proto_link **out);
/* Closes at once; no callback follows. NULL is fine. */
void proto_link_destroy(proto_link *link);

/* Queues a message; takes message->payload. What cannot be sent (closed, too much output, no
 * memory) shows as on_closed. */
void proto_link_send(proto_link *link, proto_message *message);
/* Sends what is queued, then closes; nothing is received any more. on_closed follows with OK,
 * within a few seconds even if the peer does not read. */
void proto_link_finish(proto_link *link);
size_t proto_link_output_bytes(const proto_link *link);

#endif
