/* Messages on their way: the operations, receiving and sending of the UCX mover. UCX's callbacks
 * only note that an operation is over; the user hears of it from progress. The wire's own header:
 *
 *   u32 magic "BXFR"   u32 user header bytes   u32 from worker   u32 to worker
 *   u64 from incarnation   u64 to incarnation */
#include <string.h>

#include "base/assert.h"
#include "base/fault.h"
#include "base/little_endian.h"
#include "base/log.h"
#include "base/mem.h"
#include "pd_buffers/xfer_ucx_internal.h"

static const uint32_t message_magic = 0x52465842; /* "BXFR" */

/* ---- operations ------------------------------------------------------------------------------ */

static ucx_operation *take_operation(ucx_mover *mover) {
    ucx_operation *op = mover->free_operations;
    if (op == NULL) return bt_calloc(1, sizeof *op);
    mover->free_operations = op->next;
    op->next = NULL;
    return op;
}

static void give_operation(ucx_mover *mover, ucx_operation *op) {
    op->next = mover->free_operations;
    mover->free_operations = op;
}

static void start_operation(ucx_operation *op, ucx_peer *peer, bool is_send, uint64_t token) {
    op->peer = peer;
    op->is_send = is_send;
    op->is_own = false;
    op->is_over = false;
    op->token = token;
    op->status = BT_OK;
    op->before = NULL;
    op->after = peer->operations;
    if (op->after != NULL) op->after->before = op;
    peer->operations = op;
}

static void leave_peer(ucx_operation *op) {
    if (op->before != NULL)
        op->before->after = op->after;
    else
        op->peer->operations = op->after;
    if (op->after != NULL) op->after->before = op->before;
}

static void end_operation(ucx_operation *op, bt_status status) {
    ucx_mover *mover = op->peer->mover;
    BT_ASSERT(!op->is_over);
    op->status = status;
    op->is_over = true;
    op->next = NULL;
    *mover->done_end = op;
    mover->done_end = &op->next;
}

/* Copies the list into UCX's form. */
static bool set_iov(ucx_operation *op, const xfer_iov *iov, uint32_t count) {
    if (count > op->iov_capacity) {
        ucp_dt_iov_t *grown = bt_realloc(op->iov, sizeof *grown * count);
        if (grown == NULL) return false;
        op->iov = grown;
        op->iov_capacity = count;
    }
    op->bytes = 0;
    op->iov_count = count;
    for (uint32_t i = 0; i < count; i++) {
        op->iov[i] = (ucp_dt_iov_t){.buffer = iov[i].base, .length = iov[i].bytes};
        op->bytes += iov[i].bytes;
    }
    return true;
}

/* One part goes as plain bytes, which lets UCX send it without a copy where a transport can. */
static void set_buffer(const ucx_operation *op, ucp_request_param_t *param, void **buffer_out,
                       size_t *count_out) {
    param->op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param->memory_type = UCS_MEMORY_TYPE_HOST;
    if (op->iov_count > 1) {
        param->datatype = ucp_dt_make_iov();
        *buffer_out = op->iov;
        *count_out = op->iov_count;
        return;
    }
    param->datatype = ucp_dt_make_contig(1);
    *buffer_out = op->iov_count == 0 ? NULL : op->iov[0].buffer;
    *count_out = op->iov_count == 0 ? 0 : op->iov[0].length;
}

/* ---- receiving ------------------------------------------------------------------------------- */

static void on_receive_done(void *request, ucs_status_t status, size_t length, void *user_data) {
    ucx_operation *op = user_data;
    bt_status result = xfer_ucx_status(status);
    if (result == BT_OK && length != op->bytes) result = BT_ERR_PEER_PROTOCOL;
    end_operation(op, result);
    ucp_request_free(request);
}

static void copy_inline(ucx_operation *op, const uint8_t *data) {
    for (uint32_t i = 0; i < op->iov_count; i++) {
        memcpy(op->iov[i].buffer, data, op->iov[i].length);
        data += op->iov[i].length;
    }
    end_operation(op, BT_OK);
}

static ucp_worker_h worker_of(const ucx_peer *peer) {
    return peer->pair.worker != NULL ? peer->pair.worker : peer->mover->worker;
}

/* UCX owns the descriptor from here on, whatever comes of it. */
static ucs_status_t post_receive(ucx_operation *op, void *descriptor) {
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.recv_am = on_receive_done,
        .user_data = op,
    };
    void *buffer = NULL;
    size_t count = 0;
    set_buffer(op, &param, &buffer, &count);
    void *request = ucp_am_recv_data_nbx(worker_of(op->peer), descriptor, buffer, count, &param);
    if (request == NULL)
        end_operation(op, BT_OK);
    else if (UCS_PTR_IS_ERR(request))
        end_operation(op, xfer_ucx_status(UCS_PTR_STATUS(request)));
    return UCS_INPROGRESS;
}

ucx_peer *xfer_ucx_find_sender(const ucx_mover *mover, const uint8_t *header, size_t bytes) {
    if (mover->is_destroying) return NULL;
    if (bytes < UCX_PREFIX_BYTES || bytes > UCX_PREFIX_BYTES + XFER_HEADER_BYTES_MAX) return NULL;
    if (bt_load_le32(header) != message_magic) return NULL;
    if (bt_load_le32(header + 4) != bytes - UCX_PREFIX_BYTES) return NULL;
    if (bt_load_le32(header + 12) != mover->base.self.worker_id) return NULL;
    if (bt_load_le64(header + 24) != mover->base.self.incarnation) return NULL;
    const xfer_peer from = {.worker_id = bt_load_le32(header + 8),
                            .incarnation = bt_load_le64(header + 16)};
    ucx_peer *peer = xfer_ucx_find_peer(mover, from);
    return peer != NULL && peer->state == UCX_PEER_OPEN ? peer : NULL;
}

static ucs_status_t take_message(ucx_peer *peer, const uint8_t *header, size_t header_bytes,
                                 void *data, size_t bytes, const ucp_am_recv_param_t *param) {
    ucx_mover *mover = peer->mover;
    const xfer_handler *handler = &mover->base.handler;
    ucx_operation *op = take_operation(mover);
    if (op == NULL) {
        bt_log_error("xfer", "no memory for a message of worker %u", peer->id.worker_id);
        return UCS_OK;
    }
    xfer_receive receive = {0};
    const xfer_decision decision =
        handler->on_message(handler->context, peer->id, header + UCX_PREFIX_BYTES,
                            header_bytes - UCX_PREFIX_BYTES, bytes, &receive);
    if (decision == XFER_DROP || bytes == 0) {
        give_operation(mover, op);
        return UCS_OK;
    }
    start_operation(op, peer, false, receive.token);
    if (!set_iov(op, receive.iov, receive.iov_count)) {
        end_operation(op, BT_ERR_WORKER_MEMORY);
        return UCS_OK;
    }
    BT_ASSERT(op->bytes == bytes);
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return post_receive(op, data);
    copy_inline(op, data);
    return UCS_OK;
}

ucs_status_t xfer_ucx_on_message(void *arg, const void *header, size_t header_bytes, void *data,
                                 size_t bytes, const ucp_am_recv_param_t *param) {
    ucx_peer *peer = xfer_ucx_find_sender(arg, header, header_bytes);
    return peer == NULL ? UCS_OK : take_message(peer, header, header_bytes, data, bytes, param);
}

ucs_status_t xfer_ucx_on_pair_message(void *arg, const void *header, size_t header_bytes,
                                      void *data, size_t bytes, const ucp_am_recv_param_t *param) {
    ucx_peer *peer = arg;
    if (xfer_ucx_find_sender(peer->mover, header, header_bytes) != peer) return UCS_OK;
    return take_message(peer, header, header_bytes, data, bytes, param);
}

/* ---- sending --------------------------------------------------------------------------------- */

static void on_send_done(void *request, ucs_status_t status, void *user_data) {
    end_operation(user_data, xfer_ucx_status(status));
    ucp_request_free(request);
}

static void write_header(const ucx_mover *mover, ucx_operation *op, xfer_peer to,
                         const void *header, size_t header_bytes) {
    uint8_t *out = op->header;
    bt_store_le32(out, message_magic);
    bt_store_le32(out + 4, (uint32_t)header_bytes);
    bt_store_le32(out + 8, mover->base.self.worker_id);
    bt_store_le32(out + 12, to.worker_id);
    bt_store_le64(out + 16, mover->base.self.incarnation);
    bt_store_le64(out + 24, to.incarnation);
    memcpy(out + UCX_PREFIX_BYTES, header, header_bytes);
    op->header_bytes = UCX_PREFIX_BYTES + header_bytes;
}

static void post_send(ucx_operation *op, ucp_ep_h endpoint, unsigned id, uint32_t flags) {
    ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = flags,
        .cb.send = on_send_done,
        .user_data = op,
    };
    void *buffer = NULL;
    size_t count = 0;
    set_buffer(op, &param, &buffer, &count);
    void *request =
        ucp_am_send_nbx(endpoint, id, op->header, op->header_bytes, buffer, count, &param);
    if (request == NULL)
        end_operation(op, BT_OK);
    else if (UCS_PTR_IS_ERR(request))
        end_operation(op, xfer_ucx_status(UCS_PTR_STATUS(request)));
}

static void post_message(ucx_operation *op, ucp_ep_h endpoint) {
    post_send(op, endpoint, UCX_MESSAGE_ID,
              op->bytes == 0 ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV);
}

void xfer_ucx_post_waiting(ucx_operation *op) {
    post_message(op, op->peer->pair.endpoint);
}

static bt_status prepare(ucx_peer *peer, const void *header, size_t header_bytes,
                         const xfer_iov *iov, uint32_t iov_count, ucx_operation **out) {
    ucx_operation *op = take_operation(peer->mover);
    if (op == NULL) return BT_ERR_WORKER_MEMORY;
    if (!set_iov(op, iov, iov_count)) {
        give_operation(peer->mover, op);
        return BT_ERR_WORKER_MEMORY;
    }
    write_header(peer->mover, op, peer->id, header, header_bytes);
    *out = op;
    return BT_OK;
}

bt_status xfer_ucx_send(xfer *x, xfer_peer to, const void *header, size_t header_bytes,
                        const xfer_iov *iov, uint32_t iov_count, uint64_t token) {
    ucx_mover *mover = (ucx_mover *)x;
    ucx_peer *peer = xfer_ucx_find_peer(mover, to);
    ucx_operation *op = NULL;
    BT_ASSERT(header_bytes <= XFER_HEADER_BYTES_MAX);
    BT_ASSERT(iov_count <= XFER_IOV_MAX);
    if (peer == NULL || peer->state != UCX_PEER_OPEN) return BT_ERR_PEER_GONE;
    if (bt_fault_hit(BT_FAULT_XFER_POST)) return BT_ERR_PEER_GONE;
    if (mover->sends == mover->sends_max) return BT_ERR_REQUEST_FULL;
    const bt_status status = prepare(peer, header, header_bytes, iov, iov_count, &op);
    if (status != BT_OK) return status;
    start_operation(op, peer, true, token);
    mover->sends++;
    if (mover->pair_context == NULL) {
        post_message(op, peer->endpoint);
    } else if (peer->pair.endpoint != NULL) {
        post_message(op, peer->pair.endpoint);
    } else {
        op->next = NULL;
        *peer->pair.waiting_end = op;
        peer->pair.waiting_end = &op->next;
    }
    return BT_OK;
}

bt_status xfer_ucx_send_own(ucx_peer *peer, ucp_ep_h endpoint, unsigned id, const void *header,
                            size_t header_bytes, const xfer_iov *payload) {
    ucx_operation *op = NULL;
    const bt_status status = prepare(peer, header, header_bytes, payload, 1, &op);
    if (status != BT_OK) return status;
    start_operation(op, peer, true, 0);
    op->is_own = true;
    post_send(op, endpoint, id, UCP_AM_SEND_FLAG_EAGER);
    return BT_OK;
}

/* ---- ends ------------------------------------------------------------------------------------ */

void xfer_ucx_end_all(ucx_peer *peer, bt_status status) {
    for (ucx_operation *op = peer->operations; op != NULL; op = op->after)
        if (!op->is_over) end_operation(op, status);
}

void xfer_ucx_tell_done(ucx_mover *mover) {
    const xfer_handler *handler = &mover->base.handler;
    while (mover->done != NULL) {
        ucx_operation *op = mover->done;
        mover->done = op->next;
        if (mover->done == NULL) mover->done_end = &mover->done;
        const uint64_t token = op->token;
        const bool is_send = op->is_send;
        const bool is_own = op->is_own;
        bt_status status = op->status;
        leave_peer(op);
        give_operation(mover, op);
        if (is_own) continue;
        if (is_send) mover->sends--;
        if (mover->is_destroying) continue;
        if (bt_fault_hit(BT_FAULT_XFER_DONE)) status = BT_ERR_PEER_GONE;
        if (is_send)
            handler->on_sent(handler->context, token, status);
        else
            handler->on_received(handler->context, token, status);
    }
}

void xfer_ucx_free_operations(ucx_mover *mover) {
    while (mover->free_operations != NULL) {
        ucx_operation *op = mover->free_operations;
        mover->free_operations = op->next;
        bt_free(op->iov);
        bt_free(op);
    }
}
