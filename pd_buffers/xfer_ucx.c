/* The UCX mover. UCX's callbacks only note what happened (the message callback also asks the user
 * where a payload goes); the user's other callbacks run from progress, when UCX's own progress has
 * returned. Header on the wire, before the user's:
 *
 *   u32 magic "BXFR"   u32 user header bytes   u32 from worker   u32 to worker
 *   u64 from incarnation   u64 to incarnation
 *
 * An endpoint is freed only after UCX finished its forced close and every operation of the peer
 * ended; until then it cannot be connected anew. */
#include "pd_buffers/xfer_ucx.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/fault.h"
#include "base/little_endian.h"
#include "base/log.h"
#include "base/mem.h"
#include "pd_buffers/xfer_ucx_internal.h"

enum {
    MESSAGE_ID = 1,
    PREFIX_BYTES = 32,
    PROGRESS_BUDGET = 64,
    SENDS_MAX = 256,
    CLOSING_POLLS = 1000, /* turns in a row that progress asks to be called for a close */
    ADDRESS_PREFIX_BYTES = 12,
    DESTROY_LIMIT_US = 2 * 1000 * 1000,
};

static const uint32_t message_magic = 0x52465842; /* "BXFR" */
static const uint32_t address_magic = 0x41465842; /* "BXFA" */

typedef enum peer_state {
    PEER_OPEN,
    PEER_BROKEN,  /* UCX's error callback came; on_peer_failed is to be called */
    PEER_FAILED,  /* it was called */
    PEER_CLOSING, /* disconnect was called */
} peer_state;

typedef struct ucx_peer {
    struct ucx_mover *mover;
    xfer_peer id;
    peer_state state;
    bt_status failure;
    ucp_ep_h endpoint;   /* NULL: never opened, or closed */
    void *close_request; /* NULL when the close is over */
    uint32_t operations; /* sends and receives that have not been told */
    struct ucx_peer *next;
} ucx_peer;

/* One send or receive. Unused ones lie in a list of the mover. */
typedef struct operation {
    ucx_peer *peer;
    bool is_send;
    bt_status status;
    uint64_t token;
    size_t bytes;
    ucp_dt_iov_t *iov; /* [iov_capacity], kept */
    uint32_t iov_capacity;
    uint8_t header[PREFIX_BYTES + XFER_HEADER_BYTES_MAX];
    struct operation *next;
} operation;

typedef struct mapping {
    ucp_mem_h handle;
    struct mapping *next;
} mapping;

typedef struct ucx_mover {
    xfer base;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_address_t *worker_address;
    uint8_t *address; /* prefix and worker_address */
    size_t address_bytes;
    ucx_peer *peers;
    mapping *mappings;
    operation *free_operations;
    operation *done, **done_end; /* over, not told yet; oldest first */
    uint32_t sends, sends_max;
    uint32_t closing_polls;
    bool is_destroying;
    bool has_broken; /* some peer is PEER_BROKEN */
} ucx_mover;

static ucx_mover *mover_of(xfer *x) {
    return (ucx_mover *)x;
}

static ucx_peer *find_peer(const ucx_mover *mover, xfer_peer id) {
    ucx_peer *peer = mover->peers;
    while (peer != NULL &&
           (peer->id.worker_id != id.worker_id || peer->id.incarnation != id.incarnation))
        peer = peer->next;
    return peer;
}

/* ---- operations ------------------------------------------------------------------------------ */

static operation *take_operation(ucx_mover *mover) {
    operation *op = mover->free_operations;
    if (op == NULL) return bt_calloc(1, sizeof *op);
    mover->free_operations = op->next;
    op->next = NULL;
    return op;
}

static void give_operation(ucx_mover *mover, operation *op) {
    op->next = mover->free_operations;
    mover->free_operations = op;
}

static void start_operation(operation *op, ucx_peer *peer, bool is_send, uint64_t token) {
    op->peer = peer;
    op->is_send = is_send;
    op->token = token;
    op->status = BT_OK;
    peer->operations++;
}

static void end_operation(operation *op, bt_status status) {
    ucx_mover *mover = op->peer->mover;
    op->status = status;
    op->next = NULL;
    *mover->done_end = op;
    mover->done_end = &op->next;
}

/* Copies the list into UCX's form. */
static bool set_iov(operation *op, const xfer_iov *iov, uint32_t count) {
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

/* One part goes as plain bytes: over tcp a list costs half of the speed. */
static void set_buffer(const operation *op, uint32_t iov_count, ucp_request_param_t *param,
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
    operation *op = user_data;
    bt_status result = xfer_ucx_status(status);
    if (result == BT_OK && length != op->bytes) result = BT_ERR_PEER_PROTOCOL;
    end_operation(op, result);
    ucp_request_free(request);
}

static void copy_inline(operation *op, const uint8_t *data, uint32_t iov_count) {
    for (uint32_t i = 0; i < iov_count; i++) {
        memcpy(op->iov[i].buffer, data, op->iov[i].length);
        data += op->iov[i].length;
    }
    end_operation(op, BT_OK);
}

/* UCX owns the descriptor from here on, whatever comes of it. */
static ucs_status_t post_receive(ucx_mover *mover, operation *op, void *descriptor,
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
    if (bytes < PREFIX_BYTES || bytes > PREFIX_BYTES + XFER_HEADER_BYTES_MAX) return NULL;
    if (bt_load_le32(header) != message_magic) return NULL;
    if (bt_load_le32(header + 4) != bytes - PREFIX_BYTES) return NULL;
    if (bt_load_le32(header + 12) != mover->base.self.worker_id) return NULL;
    if (bt_load_le64(header + 24) != mover->base.self.incarnation) return NULL;
    const xfer_peer from = {.worker_id = bt_load_le32(header + 8),
                            .incarnation = bt_load_le64(header + 16)};
    ucx_peer *peer = find_peer(mover, from);
    return peer != NULL && peer->state == PEER_OPEN ? peer : NULL;
}

static ucs_status_t on_message(void *arg, const void *header, size_t header_bytes, void *data,
                               size_t bytes, const ucp_am_recv_param_t *param) {
    ucx_mover *mover = arg;
    const xfer_handler *handler = &mover->base.handler;
    ucx_peer *peer = mover->is_destroying ? NULL : find_sender(mover, header, header_bytes);
    if (peer == NULL) return UCS_OK;
    operation *op = take_operation(mover);
    if (op == NULL) {
        bt_log_error("xfer", "no memory for a message of worker %u", peer->id.worker_id);
        return UCS_OK;
    }
    xfer_receive receive = {0};
    const xfer_decision decision =
        handler->on_message(handler->context, peer->id, (const uint8_t *)header + PREFIX_BYTES,
                            header_bytes - PREFIX_BYTES, bytes, &receive);
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

static bt_status ucx_send(xfer *x, xfer_peer to, const void *header, size_t header_bytes,
                          const xfer_iov *iov, uint32_t iov_count, uint64_t token) {
    ucx_mover *mover = mover_of(x);
    ucx_peer *peer = find_peer(mover, to);
    BT_ASSERT(header_bytes <= XFER_HEADER_BYTES_MAX);
    BT_ASSERT(iov_count <= XFER_IOV_MAX);
    if (peer == NULL || peer->state != PEER_OPEN) return BT_ERR_PEER_GONE;
    if (bt_fault_hit(BT_FAULT_XFER_POST)) return BT_ERR_PEER_GONE;
    if (mover->sends == mover->sends_max) return BT_ERR_REQUEST_FULL;
    operation *op = take_operation(mover);
    if (op == NULL) return BT_ERR_WORKER_MEMORY;
    if (!set_iov(op, iov, iov_count)) {
        give_operation(mover, op);
        return BT_ERR_WORKER_MEMORY;
    }
    write_prefix(mover, to, header_bytes, op->header);
    memcpy(op->header + PREFIX_BYTES, header, header_bytes);
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
    void *request = ucp_am_send_nbx(peer->endpoint, MESSAGE_ID, op->header,
                                    PREFIX_BYTES + header_bytes, buffer, count, &param);
    if (request == NULL)
        end_operation(op, BT_OK);
    else if (UCS_PTR_IS_ERR(request))
        end_operation(op, xfer_ucx_status(UCS_PTR_STATUS(request)));
    return BT_OK;
}

/* ---- peers ----------------------------------------------------------------------------------- */

static void on_endpoint_error(void *arg, ucp_ep_h endpoint, ucs_status_t status) {
    ucx_peer *peer = arg;
    (void)endpoint;
    if (peer->state != PEER_OPEN) return;
    peer->state = PEER_BROKEN;
    peer->failure = xfer_ucx_status(status);
    peer->mover->has_broken = true;
    bt_log_warn("xfer", "the endpoint to worker %u broke: %s", peer->id.worker_id,
                ucs_status_string(status));
}

static ucx_peer *add_peer(ucx_mover *mover, xfer_peer id) {
    ucx_peer *peer = bt_calloc(1, sizeof *peer);
    if (peer == NULL) return NULL;
    peer->mover = mover;
    peer->id = id;
    peer->next = mover->peers;
    mover->peers = peer;
    return peer;
}

static void remove_peer(ucx_mover *mover, ucx_peer *peer) {
    ucx_peer **link = &mover->peers;
    while (*link != peer)
        link = &(*link)->next;
    *link = peer->next;
    bt_free(peer);
}

/* The part of an address that UCX understands; NULL when the bytes are not what get_address gave.
 */
static const ucp_address_t *read_address(const uint8_t *address, size_t bytes) {
    if (bytes <= ADDRESS_PREFIX_BYTES || bt_load_le32(address) != address_magic) return NULL;
    const size_t inner = bytes - ADDRESS_PREFIX_BYTES;
    if (bt_load_le32(address + 4) != inner) return NULL;
    if (bt_load_le32(address + 8) != bt_crc32c(0, address + ADDRESS_PREFIX_BYTES, inner))
        return NULL;
    return (const ucp_address_t *)(const void *)(address + ADDRESS_PREFIX_BYTES);
}

static bt_status ucx_connect(xfer *x, xfer_peer id, const uint8_t *address, size_t address_bytes) {
    ucx_mover *mover = mover_of(x);
    const ucp_address_t *remote = read_address(address, address_bytes);
    if (remote == NULL) return BT_ERR_PEER_PROTOCOL;
    if (find_peer(mover, id) != NULL) return BT_ERR_REQUEST_DUPLICATE;
    ucx_peer *peer = add_peer(mover, id);
    if (peer == NULL) return BT_ERR_WORKER_MEMORY;
    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = remote,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_endpoint_error, .arg = peer},
    };
    const ucs_status_t status = ucp_ep_create(mover->worker, &params, &peer->endpoint);
    if (status == UCS_OK) return BT_OK;
    bt_log_warn("xfer", "no endpoint to worker %u: %s", id.worker_id, ucs_status_string(status));
    remove_peer(mover, peer);
    return BT_ERR_PEER_GONE;
}

static void close_by_force(ucx_peer *peer) {
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
    };
    peer->state = PEER_CLOSING;
    if (peer->endpoint == NULL) return;
    void *request = ucp_ep_close_nbx(peer->endpoint, &param);
    peer->endpoint = NULL;
    if (UCS_PTR_IS_ERR(request))
        bt_log_warn("xfer", "closing the endpoint to worker %u: %s", peer->id.worker_id,
                    ucs_status_string(UCS_PTR_STATUS(request)));
    else
        peer->close_request = request;
}

static void ucx_disconnect(xfer *x, xfer_peer id) {
    ucx_mover *mover = mover_of(x);
    ucx_peer *peer = find_peer(mover, id);
    if (peer == NULL) peer = add_peer(mover, id); /* only waits to be told closed */
    BT_ASSERT(peer != NULL);
    mover->closing_polls = 0;
    if (peer->state != PEER_CLOSING) close_by_force(peer);
}

static bool is_closed(ucx_peer *peer) {
    if (peer->close_request != NULL) {
        if (ucp_request_check_status(peer->close_request) == UCS_INPROGRESS) return false;
        ucp_request_free(peer->close_request);
        peer->close_request = NULL;
    }
    return peer->operations == 0;
}

/* ---- progress -------------------------------------------------------------------------------- */

static void tell_done(ucx_mover *mover) {
    const xfer_handler *handler = &mover->base.handler;
    while (mover->done != NULL) {
        operation *op = mover->done;
        mover->done = op->next;
        if (mover->done == NULL) mover->done_end = &mover->done;
        const uint64_t token = op->token;
        const bool is_send = op->is_send;
        bt_status status = op->status;
        op->peer->operations--;
        if (is_send) mover->sends--;
        give_operation(mover, op);
        if (mover->is_destroying) continue;
        if (bt_fault_hit(BT_FAULT_XFER_DONE)) status = BT_ERR_PEER_GONE;
        if (is_send)
            handler->on_sent(handler->context, token, status);
        else
            handler->on_received(handler->context, token, status);
    }
}

static void tell_broken(ucx_mover *mover) {
    if (!mover->has_broken) return;
    mover->has_broken = false;
    for (ucx_peer *peer = mover->peers; peer != NULL; peer = peer->next) {
        if (peer->state != PEER_BROKEN) continue;
        peer->state = PEER_FAILED;
        if (!mover->is_destroying)
            mover->base.handler.on_peer_failed(mover->base.handler.context, peer->id,
                                               peer->failure);
    }
}

/* true: some endpoint is still closing. */
static bool tell_closed(ucx_mover *mover) {
    bool is_waiting = false;
    for (ucx_peer *peer = mover->peers, *next = NULL; peer != NULL; peer = next) {
        next = peer->next;
        if (peer->state != PEER_CLOSING) continue;
        if (!is_closed(peer)) {
            is_waiting = true;
            continue;
        }
        const xfer_peer id = peer->id;
        remove_peer(mover, peer);
        if (!mover->is_destroying)
            mover->base.handler.on_peer_closed(mover->base.handler.context, id);
    }
    return is_waiting;
}

static bool ucx_progress(xfer *x) {
    ucx_mover *mover = mover_of(x);
    int turns = 0;
    while (turns < PROGRESS_BUDGET && ucp_worker_progress(mover->worker) != 0)
        turns++;
    tell_done(mover);
    tell_broken(mover);
    if (tell_closed(mover) && mover->closing_polls < CLOSING_POLLS) {
        mover->closing_polls++;
        return true;
    }
    return turns == PROGRESS_BUDGET || mover->done != NULL;
}

static int ucx_get_event_fd(xfer *x) {
    int fd = -1;
    return ucp_worker_get_efd(mover_of(x)->worker, &fd) == UCS_OK ? fd : -1;
}

static bool ucx_arm(xfer *x) {
    ucx_mover *mover = mover_of(x);
    if (mover->done != NULL || mover->has_broken) return false;
    return ucp_worker_arm(mover->worker) != UCS_ERR_BUSY;
}

/* ---- creation and end ------------------------------------------------------------------------ */

static bt_status ucx_get_address(xfer *x, const uint8_t **bytes_out, size_t *count_out) {
    const ucx_mover *mover = mover_of(x);
    *bytes_out = mover->address;
    *count_out = mover->address_bytes;
    return BT_OK;
}

static bt_status ucx_register_memory(xfer *x, void *base, size_t bytes) {
    ucx_mover *mover = mover_of(x);
    const ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = base,
        .length = bytes,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    mapping *m = bt_calloc(1, sizeof *m);
    if (m == NULL) return BT_ERR_WORKER_MEMORY;
    const ucs_status_t status = ucp_mem_map(mover->context, &params, &m->handle);
    if (status != UCS_OK) {
        bt_free(m);
        return BT_ERR_WORKER_MEMORY;
    }
    m->next = mover->mappings;
    mover->mappings = m;
    return BT_OK;
}

static void end_peers(ucx_mover *mover) {
    const bt_clock clock = bt_clock_system();
    const uint64_t limit = bt_clock_now_us(&clock) + DESTROY_LIMIT_US;
    mover->is_destroying = true;
    for (ucx_peer *peer = mover->peers; peer != NULL; peer = peer->next)
        if (peer->state != PEER_CLOSING) close_by_force(peer);
    do {
        (void)ucx_progress(&mover->base);
    } while (mover->peers != NULL && bt_clock_now_us(&clock) < limit);
    while (mover->peers != NULL)
        remove_peer(mover, mover->peers);
}

static void free_lists(ucx_mover *mover) {
    while (mover->mappings != NULL) {
        mapping *m = mover->mappings;
        mover->mappings = m->next;
        (void)ucp_mem_unmap(mover->context, m->handle);
        bt_free(m);
    }
    while (mover->free_operations != NULL) {
        operation *op = mover->free_operations;
        mover->free_operations = op->next;
        bt_free(op->iov);
        bt_free(op);
    }
}

static void ucx_destroy(xfer *x) {
    if (x == NULL) return;
    ucx_mover *mover = mover_of(x);
    if (mover->worker != NULL) {
        end_peers(mover);
        if (mover->worker_address != NULL)
            ucp_worker_release_address(mover->worker, mover->worker_address);
        ucp_worker_destroy(mover->worker);
    }
    free_lists(mover);
    if (mover->context != NULL) ucp_cleanup(mover->context);
    bt_free(mover->address);
    bt_free(mover);
}

static const xfer_ops ucx_ops = {
    .name = "ucx",
    .get_address = ucx_get_address,
    .connect = ucx_connect,
    .disconnect = ucx_disconnect,
    .send = ucx_send,
    .progress = ucx_progress,
    .get_event_fd = ucx_get_event_fd,
    .arm = ucx_arm,
    .register_memory = ucx_register_memory,
    .destroy = ucx_destroy,
};

static ucs_status_t open_worker(ucx_mover *mover, const ucp_config_t *config) {
    const ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
        .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        .name = "baton",
    };
    ucs_status_t status = ucp_init(&params, config, &mover->context);
    if (status != UCS_OK) return status;
    const ucp_worker_params_t worker = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    status = ucp_worker_create(mover->context, &worker, &mover->worker);
    if (status != UCS_OK) return status;
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = MESSAGE_ID,
        .cb = on_message,
        .arg = mover,
    };
    return ucp_worker_set_am_recv_handler(mover->worker, &handler);
}

static bt_status make_address(ucx_mover *mover) {
    size_t bytes = 0;
    if (ucp_worker_get_address(mover->worker, &mover->worker_address, &bytes) != UCS_OK)
        return BT_ERR_WORKER_IO;
    mover->address_bytes = ADDRESS_PREFIX_BYTES + bytes;
    mover->address = bt_malloc(mover->address_bytes);
    if (mover->address == NULL) return BT_ERR_WORKER_MEMORY;
    bt_store_le32(mover->address, address_magic);
    bt_store_le32(mover->address + 4, (uint32_t)bytes);
    bt_store_le32(mover->address + 8, bt_crc32c(0, mover->worker_address, bytes));
    memcpy(mover->address + ADDRESS_PREFIX_BYTES, mover->worker_address, bytes);
    return BT_OK;
}

bt_status xfer_ucx_create(const xfer_ucx_options *options, xfer **out, bt_error *error) {
    ucp_config_t *config = NULL;
    bt_status status = xfer_ucx_configure(options, &config, error);
    if (status != BT_OK) return status;
    ucx_mover *mover = bt_calloc(1, sizeof *mover);
    if (mover == NULL) {
        xfer_ucx_configured(config);
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "no memory for the mover");
    }
    mover->base.ops = &ucx_ops;
    mover->done_end = &mover->done;
    mover->sends_max = options->sends_max == 0 ? SENDS_MAX : options->sends_max;
    const ucs_status_t opened = open_worker(mover, config);
    xfer_ucx_configured(config);
    if (opened != UCS_OK)
        status =
            bt_fail(error, BT_ERR_WORKER_IO, "UCX does not start: %s", ucs_status_string(opened));
    else if ((status = make_address(mover)) != BT_OK)
        status = bt_fail(error, status, "UCX gives no address of this process");
    if (status != BT_OK) {
        ucx_destroy(&mover->base);
        return status;
    }
    *out = &mover->base;
    return BT_OK;
}
