/* A UCX worker for each pair of processes, where the transports are within one machine's memory.
 *
 * There, UCX gives each worker one queue that all its senders write into, and a sender that is
 * killed while it writes leaves an entry that never completes: the receiver then hears nobody any
 * more (measured with 1.13.1: about one kill in thirty during a transfer). And a receiver that is
 * killed with a full queue leaves its senders with lanes that never flush, so that their sends do
 * not end. With a worker per pair both harm only the pair, and destroying the worker ends
 * everything: nothing of that peer is read or written by UCX afterwards.
 *
 * The mover's own worker, over tcp, introduces the two: each tells the other the address of the
 * worker made for it, when it connects and again in answer to the first it hears (what comes before
 * one side has connected is dropped). It also notices the peer's death at once, which shared memory
 * shows only to the keepalive. Sends wait until there is an endpoint. */
#include <string.h>
#include <sys/epoll.h>

#include "base/crc32c.h"
#include "base/little_endian.h"
#include "base/log.h"
#include "base/mem.h"
#include "pd_buffers/xfer_ucx_internal.h"

enum {
    PAIR_HEADER_BYTES = 8, /* u32 is an answer, u32 CRC32C of the address */
    ADDRESS_MAX = 64 * 1024,
};

static ucs_status_t open_worker(ucx_peer *peer) {
    const ucx_mover *mover = peer->mover;
    ucx_pair *pair = &peer->pair;
    const uint64_t events = mover->is_memory_only ? UCP_WORKER_PARAM_FIELD_EVENTS : 0;
    const ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | events,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
        .events = UCP_WAKEUP_RX,
    };
    ucs_status_t status = ucp_worker_create(mover->pair_context, &params, &pair->worker);
    if (status != UCS_OK) {
        pair->worker = NULL;
        return status;
    }
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = UCX_MESSAGE_ID,
        .cb = xfer_ucx_on_pair_message,
        .arg = peer,
    };
    status = ucp_worker_set_am_recv_handler(pair->worker, &handler);
    if (status != UCS_OK) return status;
    return ucp_worker_get_address(pair->worker, &pair->address, &pair->address_bytes);
}

static bool watch(const ucx_peer *peer, int operation) {
    struct epoll_event event = {.events = EPOLLIN};
    int fd = -1;
    return ucp_worker_get_efd(peer->pair.worker, &fd) == UCS_OK &&
           epoll_ctl(peer->mover->event_fd, operation, fd, &event) == 0;
}

static bt_status tell_address(ucx_peer *peer, bool is_answer) {
    const ucx_pair *pair = &peer->pair;
    const xfer_iov payload = {.base = pair->address, .bytes = pair->address_bytes};
    uint8_t header[PAIR_HEADER_BYTES];
    bt_store_le32(header, is_answer);
    bt_store_le32(header + 4, bt_crc32c(0, pair->address, pair->address_bytes));
    return xfer_ucx_send_own(peer, peer->endpoint, UCX_PAIR_ID, header, sizeof header, &payload);
}

bt_status xfer_ucx_pair_open(ucx_peer *peer) {
    const ucs_status_t status = open_worker(peer);
    if (status != UCS_OK || !watch(peer, EPOLL_CTL_ADD)) {
        bt_log_warn("xfer", "no UCX worker for the pair with worker %u: %s", peer->id.worker_id,
                    ucs_status_string(status));
        return BT_ERR_WORKER_MEMORY;
    }
    peer->pair.waiting_end = &peer->pair.waiting;
    return tell_address(peer, false);
}

ucs_status_t xfer_ucx_on_pair(void *arg, const void *header, size_t header_bytes, void *data,
                              size_t bytes, const ucp_am_recv_param_t *param) {
    ucx_peer *peer = xfer_ucx_find_sender(arg, header, header_bytes);
    const uint8_t *own = (const uint8_t *)header + UCX_PREFIX_BYTES;
    if (peer == NULL || header_bytes != UCX_PREFIX_BYTES + PAIR_HEADER_BYTES) return UCS_OK;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return UCS_OK;
    if (bytes == 0 || bytes > ADDRESS_MAX) return UCS_OK;
    if (bt_load_le32(own + 4) != bt_crc32c(0, data, bytes)) return UCS_OK;
    ucx_pair *pair = &peer->pair;
    const bool is_answer = bt_load_le32(own) != 0;
    pair->has_answered = pair->has_answered || is_answer; /* it has ours: no answer is due */
    if (pair->worker == NULL || pair->endpoint != NULL || pair->remote_address != NULL)
        return UCS_OK;
    pair->remote_address = bt_malloc(bytes);
    if (pair->remote_address == NULL) return UCS_OK; /* the pair is not proven, and times out */
    memcpy(pair->remote_address, data, bytes);
    return UCS_OK;
}

static void post_waiting(ucx_pair *pair) {
    while (pair->waiting != NULL) {
        ucx_operation *op = pair->waiting;
        pair->waiting = op->next;
        xfer_ucx_post_waiting(op);
    }
    pair->waiting_end = &pair->waiting;
}

void xfer_ucx_pair_go_on(ucx_peer *peer) {
    ucx_pair *pair = &peer->pair;
    if (pair->remote_address == NULL || pair->endpoint != NULL) return;
    const ucs_status_t status =
        xfer_ucx_open_endpoint(peer, pair->worker, pair->remote_address, &pair->endpoint);
    bt_free(pair->remote_address);
    pair->remote_address = NULL;
    if (status != UCS_OK) {
        pair->endpoint = NULL;
        xfer_ucx_break_peer(peer, status);
        return;
    }
    post_waiting(pair);
    if (pair->has_answered) return;
    pair->has_answered = true;
    if (tell_address(peer, true) != BT_OK) xfer_ucx_break_peer(peer, UCS_ERR_NO_MEMORY);
}

void xfer_ucx_pair_mute(ucx_peer *peer) {
    if (peer->pair.worker != NULL) (void)watch(peer, EPOLL_CTL_DEL);
}

void xfer_ucx_pair_close(ucx_peer *peer) {
    ucx_pair *pair = &peer->pair;
    if (pair->worker == NULL) return;
    xfer_ucx_pair_mute(peer);
    if (pair->endpoint != NULL) {
        void *request = xfer_ucx_close_endpoint(peer, pair->endpoint);
        if (request != NULL) ucp_request_free(request);
    }
    if (pair->address != NULL) ucp_worker_release_address(pair->worker, pair->address);
    ucp_worker_destroy(pair->worker);
    bt_free(pair->remote_address);
    *pair = (ucx_pair){.waiting_end = NULL};
}
