/* The UCX mover: its life, its peers, its progress. UCX's callbacks only note what happened (the
 * message callback also asks the user where a payload goes); the user's other callbacks run from
 * progress, when UCX's own progress has returned.
 *
 * A peer is told closed only after every operation with it ended; until then it cannot be connected
 * anew. One thing UCX 1.13.1 (and later) does not do: a receiver in shared memory that dies with a
 * full queue leaves its senders with a lane that never flushes, so that the sends in flight are
 * never ended. They are given up after a while: the endpoint is closed and its lanes are taken from
 * it, so nothing reads their memory any more; only UCX's record stays until the mover is destroyed.
 * A receive is never given up. For the same reason pending sends must not keep the process from
 * sleeping: in shared memory only arrivals wake it, and a short timer while something is on its
 * way. */
#include "pd_buffers/xfer_ucx.h"

#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/fault.h"
#include "base/little_endian.h"
#include "base/log.h"
#include "base/mem.h"
#include "pd_buffers/xfer_ucx_internal.h"

enum {
    PROGRESS_BUDGET = 64,
    SENDS_MAX = 256,
    CLOSING_POLLS = 1000, /* turns in a row that progress asks to be called for a close */
    BUSY_POLLS = 50,      /* turns without progress before the process sleeps in spite of "busy" */
    BUSY_SLEEP_NS = 1000 * 1000,
    GIVE_UP_SENDS_US = 500 * 1000,
    ADDRESS_PREFIX_BYTES = 12,
    DESTROY_LIMIT_US = 2 * 1000 * 1000,
};

static const uint32_t address_magic = 0x41465842; /* "BXFA" */

static uint64_t now_us(void) {
    const bt_clock clock = bt_clock_system();
    return bt_clock_now_us(&clock);
}

static ucx_mover *mover_of(xfer *x) {
    return (ucx_mover *)x;
}

ucx_peer *xfer_ucx_find_peer(const ucx_mover *mover, xfer_peer id) {
    ucx_peer *peer = mover->peers;
    while (peer != NULL &&
           (peer->id.worker_id != id.worker_id || peer->id.incarnation != id.incarnation))
        peer = peer->next;
    return peer;
}

/* ---- peers ----------------------------------------------------------------------------------- */

static void on_endpoint_error(void *arg, ucp_ep_h endpoint, ucs_status_t status) {
    ucx_peer *peer = arg;
    (void)endpoint;
    if (peer->state != UCX_PEER_OPEN) return;
    peer->state = UCX_PEER_BROKEN;
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
    if (xfer_ucx_find_peer(mover, id) != NULL) return BT_ERR_REQUEST_DUPLICATE;
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
    peer->state = UCX_PEER_CLOSING;
    peer->close_us = now_us();
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
    ucx_peer *peer = xfer_ucx_find_peer(mover, id);
    if (peer == NULL) peer = add_peer(mover, id); /* only waits to be told closed */
    BT_ASSERT(peer != NULL);
    mover->closing_polls = 0;
    if (peer->state != UCX_PEER_CLOSING) close_by_force(peer);
}

static bool is_closed(ucx_peer *peer) {
    if (peer->close_request != NULL) {
        if (ucp_request_check_status(peer->close_request) == UCS_INPROGRESS) return false;
        ucp_request_free(peer->close_request);
        peer->close_request = NULL;
    }
    if (peer->operations != NULL && now_us() - peer->close_us >= GIVE_UP_SENDS_US)
        xfer_ucx_give_up_sends(peer);
    return peer->operations == NULL;
}

/* ---- progress -------------------------------------------------------------------------------- */

static void tell_broken(ucx_mover *mover) {
    if (!mover->has_broken) return;
    mover->has_broken = false;
    for (ucx_peer *peer = mover->peers; peer != NULL; peer = peer->next) {
        if (peer->state != UCX_PEER_BROKEN) continue;
        peer->state = UCX_PEER_FAILED;
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
        if (peer->state != UCX_PEER_CLOSING) continue;
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
    uint64_t expirations = 0;
    int turns = 0;
    if (mover->is_timer_set)
        mover->is_timer_set = read(mover->timer_fd, &expirations, sizeof expirations) < 0;
    while (turns < PROGRESS_BUDGET && ucp_worker_progress(mover->worker) != 0)
        turns++;
    if (turns > 0 || mover->done != NULL) mover->busy_polls = 0;
    xfer_ucx_tell_done(mover);
    tell_broken(mover);
    if (tell_closed(mover) && mover->closing_polls < CLOSING_POLLS) {
        mover->closing_polls++;
        return true;
    }
    return turns == PROGRESS_BUDGET || mover->done != NULL;
}

static int ucx_get_event_fd(xfer *x) {
    return mover_of(x)->event_fd;
}

static void set_timer(ucx_mover *mover) {
    const struct itimerspec soon = {.it_value = {.tv_nsec = BUSY_SLEEP_NS}};
    if (mover->is_timer_set) return;
    mover->is_timer_set = timerfd_settime(mover->timer_fd, 0, &soon, NULL) == 0;
}

static bool ucx_arm(xfer *x) {
    ucx_mover *mover = mover_of(x);
    if (mover->done != NULL || mover->has_broken) return false;
    bool is_busy = mover->is_memory_only && mover->sends > 0;
    if (!is_busy || mover->busy_polls >= BUSY_POLLS)
        is_busy = ucp_worker_arm(mover->worker) == UCS_ERR_BUSY || is_busy;
    if (!is_busy) return true;
    if (mover->busy_polls < BUSY_POLLS) {
        mover->busy_polls++;
        return false;
    }
    set_timer(mover);
    return true;
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
    ucx_mapping *m = bt_calloc(1, sizeof *m);
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
    const uint64_t limit = now_us() + DESTROY_LIMIT_US;
    mover->is_destroying = true;
    for (ucx_peer *peer = mover->peers; peer != NULL; peer = peer->next)
        if (peer->state != UCX_PEER_CLOSING) close_by_force(peer);
    do {
        (void)ucx_progress(&mover->base);
    } while (mover->peers != NULL && now_us() < limit);
    while (mover->peers != NULL) {
        xfer_ucx_abandon(mover->peers);
        remove_peer(mover, mover->peers);
    }
}

static void free_lists(ucx_mover *mover) {
    while (mover->mappings != NULL) {
        ucx_mapping *m = mover->mappings;
        mover->mappings = m->next;
        (void)ucp_mem_unmap(mover->context, m->handle);
        bt_free(m);
    }
    xfer_ucx_free_operations(mover);
}

static void ucx_destroy(xfer *x) {
    if (x == NULL) return;
    ucx_mover *mover = mover_of(x);
    if (mover->worker != NULL) {
        end_peers(mover);
        if (mover->worker_address != NULL)
            ucp_worker_release_address(mover->worker, mover->worker_address);
        ucp_worker_destroy(mover->worker); /* ends what was given up */
        xfer_ucx_tell_done(mover);
    }
    if (mover->event_fd >= 0) (void)close(mover->event_fd);
    if (mover->timer_fd >= 0) (void)close(mover->timer_fd);
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
    .send = xfer_ucx_send,
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
    const uint64_t events = mover->is_memory_only ? UCP_WORKER_PARAM_FIELD_EVENTS : 0;
    const ucp_worker_params_t worker = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | events,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
        .events = UCP_WAKEUP_RX,
    };
    status = ucp_worker_create(mover->context, &worker, &mover->worker);
    if (status != UCS_OK) return status;
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = UCX_MESSAGE_ID,
        .cb = xfer_ucx_on_message,
        .arg = mover,
    };
    return ucp_worker_set_am_recv_handler(mover->worker, &handler);
}

static bool open_event_fd(ucx_mover *mover) {
    struct epoll_event event = {.events = EPOLLIN};
    int ucx_fd = -1;
    mover->event_fd = epoll_create1(EPOLL_CLOEXEC);
    mover->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (mover->event_fd < 0 || mover->timer_fd < 0) return false;
    if (ucp_worker_get_efd(mover->worker, &ucx_fd) != UCS_OK) return false;
    return epoll_ctl(mover->event_fd, EPOLL_CTL_ADD, ucx_fd, &event) == 0 &&
           epoll_ctl(mover->event_fd, EPOLL_CTL_ADD, mover->timer_fd, &event) == 0;
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
    bool is_memory_only = false;
    bt_status status = xfer_ucx_configure(options, &config, &is_memory_only, error);
    if (status != BT_OK) return status;
    ucx_mover *mover = bt_calloc(1, sizeof *mover);
    if (mover == NULL) {
        xfer_ucx_configured(config);
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "no memory for the mover");
    }
    mover->base.ops = &ucx_ops;
    mover->done_end = &mover->done;
    mover->event_fd = mover->timer_fd = -1;
    mover->is_memory_only = is_memory_only;
    mover->sends_max = options->sends_max == 0 ? SENDS_MAX : options->sends_max;
    const ucs_status_t opened = open_worker(mover, config);
    xfer_ucx_configured(config);
    if (opened != UCS_OK)
        status =
            bt_fail(error, BT_ERR_WORKER_IO, "UCX does not start: %s", ucs_status_string(opened));
    else if (!open_event_fd(mover))
        status = bt_fail(error, BT_ERR_WORKER_IO, "no descriptor to wait for UCX with");
    else if ((status = make_address(mover)) != BT_OK)
        status = bt_fail(error, status, "UCX gives no address of this process");
    if (status != BT_OK) {
        ucx_destroy(&mover->base);
        return status;
    }
    *out = &mover->base;
    return BT_OK;
}
