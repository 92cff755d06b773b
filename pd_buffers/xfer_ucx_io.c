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
    op->mover = peer->mover;
    op->peer = peer;
    op->is_send = is_send;
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
    op->peer = NULL;
}

static void end_operation(ucx_operation *op, bt_status status) {
    ucx_mover *mover = op->mover;
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
    for (uint32_t i = 0; i < count; i++) {
        op->iov[i] = (ucp_dt_iov_t){.buffer = iov[i].base, .length = iov[i].bytes};
        op->bytes += iov[i].bytes;
    }
    return true;
}

/* One part goes as plain bytes, which lets UCX send it without a copy where a transport can. */
static void set_buffer(const ucx_operation *op, uint32_t iov_count, ucp_request_param_t *param,
                       void **buffer_out, size_t *count_out) {
    param->op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param->memory_type = UCS_MEMORY_TYPE_HOST;
    if (iov_count > 1) {
        param->datatype = ucp_dt_make_iov();
        *buffer_out = op->iov;
        *count_out = iov_count;
        return;
    }
    param->datatype = ucp_dt_make_contig(1);
    *buffer_out = iov_count == 0 ? NULL : op->iov[0].buffer;
    *count_out = iov_count == 0 ? 0 : op->iov[0].length;
}

/* ---- receiving ------------------------------------------------------------------------------- */

static void on_receive_done(void *request, ucs_status_t status, size_t length, void *user_data) {
    ucx_operation *op = user_data;
    bt_status result = xfer_ucx_status(status);
    if (result == BT_OK && length != op->bytes) result = BT_ERR_PEER_PROTOCOL;
    end_operation(op, result);
    ucp_request_free(request);
}

static void copy_inline(ucx_operation *op, const uint8_t *data, uint32_t iov_count) {
    for (uint32_t i = 0; i < iov_count; i++) {
        memcpy(op->iov[i].buffer, data, op->iov[i].length);
        data += op->iov[i].length;
    }
    end_operation(op, BT_OK);
}

/* UCX owns the descriptor from here on, whatever comes of it. */
static ucs_status_t post_receive(ucx_mover *mover, ucx_operation *op, void *descriptor,
                                 uint32_t iov_count) {
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.recv_am = on_receive_done,
        .user_data = op,
    };
    void *buffer = NULL;
    size_t count = 0;
    set_buffer(op, iov_count, &param, &buffer, &count);
    void *request = ucp_am_recv_data_nbx(mover->worker, descriptor, buffer, count, &param);
    if (request == NULL)
        end_operation(op, BT_OK);
    else if (UCS_PTR_IS_ERR(request))
        end_operation(op, xfer_ucx_status(UCS_PTR_STATUS(request)));
    return UCS_INPROGRESS;
}

/* The connected peer that sent this, or NULL: not one of ours, or not meant for this process. */
static ucx_peer *find_sender(const ucx_mover *mover, const uint8_t *header, size_t bytes) {
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

ucs_status_t xfer_ucx_on_message(void *arg, const void *header, size_t header_bytes, void *data,
                                 size_t bytes, const ucp_am_recv_param_t *param) {
    ucx_mover *mover = arg;
    const xfer_handler *handler = &mover->base.handler;
    ucx_peer *peer = mover->is_destroying ? NULL : find_sender(mover, header, header_bytes);
    if (peer == NULL) return UCS_OK;
    ucx_operation *op = take_operation(mover);
    if (op == NULL) {
        bt_log_error("xfer", "no memory for a message of worker %u", peer->id.worker_id);
        return UCS_OK;
    }
    xfer_receive receive = {0};
    const xfer_decision decision =
        handler->on_message(handler->context, peer->id, (const uint8_t *)header + UCX_PREFIX_BYTES,
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
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0)
        return post_receive(mover, op, data, receive.iov_count);
    copy_inline(op, data, receive.iov_count);
    return UCS_OK;
}

/* ---- sending --------------------------------------------------------------------------------- */

static void on_send_done(void *request, ucs_status_t status, void *user_data) {
    end_operation(user_data, xfer_ucx_status(status));
    ucp_request_free(request);
}

static void write_prefix(const ucx_mover *mover, xfer_peer to, size_t header_bytes, uint8_t *out) {
    bt_store_le32(out, message_magic);
    bt_store_le32(out + 4, (uint32_t)header_bytes);
    bt_store_le32(out + 8, mover->base.self.worker_id);
    bt_store_le32(out + 12, to.worker_id);
    bt_store_le64(out + 16, mover->base.self.incarnation);
    bt_store_le64(out + 24, to.incarnation);
}

bt_status xfer_ucx_send(xfer *x, xfer_peer to, const void *header, size_t header_bytes,
                        const xfer_iov *iov, uint32_t iov_count, uint64_t token) {
    ucx_mover *mover = (ucx_mover *)x;
    ucx_peer *peer = xfer_ucx_find_peer(mover, to);
    BT_ASSERT(header_bytes <= XFER_HEADER_BYTES_MAX);
    BT_ASSERT(iov_count <= XFER_IOV_MAX);
    if (peer == NULL || peer->state != UCX_PEER_OPEN) return BT_ERR_PEER_GONE;
    if (bt_fault_hit(BT_FAULT_XFER_POST)) return BT_ERR_PEER_GONE;
    if (mover->sends == mover->sends_max) return BT_ERR_REQUEST_FULL;
    ucx_operation *op = take_operation(mover);
    if (op == NULL) return BT_ERR_WORKER_MEMORY;
    if (!set_iov(op, iov, iov_count)) {
        give_operation(mover, op);
        return BT_ERR_WORKER_MEMORY;
    }
    write_prefix(mover, to, header_bytes, op->header);
    memcpy(op->header + UCX_PREFIX_BYTES, header, header_bytes);
    ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = op->bytes == 0 ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV,
        .cb.send = on_send_done,
        .user_data = op,
    };
    void *buffer = NULL;
    size_t count = 0;
    set_buffer(op, iov_count, &param, &buffer, &count);
    start_operation(op, peer, true, token);
    mover->sends++;
    void *request = ucp_am_send_nbx(peer->endpoint, UCX_MESSAGE_ID, op->header,
                                    UCX_PREFIX_BYTES + header_bytes, buffer, count, &param);
    if (request == NULL)
        end_operation(op, BT_OK);
    else if (UCS_PTR_IS_ERR(request))
        end_operation(op, xfer_ucx_status(UCS_PTR_STATUS(request)));
    return BT_OK;
}

/* ---- ends ------------------------------------------------------------------------------------ */

void xfer_ucx_tell_done(ucx_mover *mover) {
    const xfer_handler *handler = &mover->base.handler;
    while (mover->done != NULL) {
        ucx_operation *op = mover->done;
        mover->done = op->next;
        if (mover->done == NULL) mover->done_end = &mover->done;
        const bool was_given_up = op->peer == NULL;
        const uint64_t token = op->token;
        const bool is_send = op->is_send;
        bt_status status = op->status;
        if (!was_given_up) leave_peer(op);
        give_operation(mover, op);
        if (was_given_up) continue;
        if (is_send) mover->sends--;
        if (mover->is_destroying) continue;
        if (bt_fault_hit(BT_FAULT_XFER_DONE)) status = BT_ERR_PEER_GONE;
        if (is_send)
            handler->on_sent(handler->context, token, status);
        else
            handler->on_received(handler->context, token, status);
    }
}

/* The sends that UCX does not end by itself; see above. */
void xfer_ucx_give_up_sends(ucx_peer *peer) {
    ucx_mover *mover = peer->mover;
    const xfer_handler *handler = &mover->base.handler;
    uint32_t count = 0;
    for (ucx_operation *op = peer->operations, *after = NULL; op != NULL; op = after) {
        after = op->after;
        if (!op->is_send || op->is_over) continue;
        leave_peer(op);
        mover->sends--;
        count++;
        if (!mover->is_destroying) handler->on_sent(handler->context, op->token, BT_ERR_PEER_GONE);
    }
    if (count > 0)
        bt_log_warn("xfer", "gave up %u sends to worker %u that did not end", count,
                    peer->id.worker_id);
}

void xfer_ucx_abandon(ucx_peer *peer) {
    while (peer->operations != NULL)
        leave_peer(peer->operations);
}

void xfer_ucx_free_operations(ucx_mover *mover) {
    while (mover->free_operations != NULL) {
        ucx_operation *op = mover->free_operations;
        mover->free_operations = op->next;
        bt_free(op->iov);
        bt_free(op);
    }
}
