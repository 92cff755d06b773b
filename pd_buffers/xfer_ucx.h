/* The mover over UCX (measured with 1.13.1): active messages, rendezvous for every payload, so that
 * the receiver chooses the destination and owns the operation that fills its memory. No one-sided
 * operation is used: over tcp UCX emulates them, and a sender that dies in the middle of one can
 * take the receiver's process with it.
 *
 * Over tcp a peer's death shows at once. Shared memory does not isolate: a process that is killed
 * while it writes can wedge all its receivers (measured), so that there each pair of processes has
 * a UCX worker of its own, introduced over tcp, which shows the death as well. Both sides must then
 * have the same kind of transports; a peer of the other kind is PEER_REFUSED. A tcp port that a
 * dead process listened on cannot be bound again for a minute: a port range needs room for
 * restarts, and with shared memory a port for each process as well.
 *
 * Settings go to UCX before it starts, and the user's environment (UCX_TLS and so on) wins over
 * them. The device is always named, because whoever reaches a UCX port controls the process: by
 * default the loopback device, and all devices only when asked for twice. The effective settings
 * are logged once. One thread; create before there are others (the environment is changed). */
#ifndef BT_PD_BUFFERS_XFER_UCX_H
#define BT_PD_BUFFERS_XFER_UCX_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "pd_buffers/xfer.h"

typedef struct xfer_ucx_options {
    const char *tls;         /* "tcp" (NULL), "shm" (shared memory alone), or a UCX_TLS list */
    const char *net_devices; /* a UCX_NET_DEVICES list; NULL = "lo" */
    bool allow_all_devices;  /* else "all" is refused, from the environment too */
    const char *port_range;  /* of the tcp listener, "first-last"; NULL = any */
    uint32_t keepalive_ms;   /* how often idle endpoints are probed; 0 = 1000 */
    uint32_t sends_max;      /* messages on their way at once; 0 = 256 */
} xfer_ucx_options;

/* CALLER_CONFIG for settings that UCX does not take, WORKER_IO when it cannot start; *error (may be
 * NULL) says why. Destroy with ops->destroy, which ends every endpoint by force. */
BT_MUST_CHECK bt_status xfer_ucx_create(const xfer_ucx_options *options, xfer **out,
                                        bt_error *error);

#endif
