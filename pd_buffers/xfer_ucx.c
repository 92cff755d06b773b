/* The UCX mover: its life, its peers, its progress. UCX's callbacks only note what happened (the
 * message callback also asks the user where a payload goes); the user's other callbacks run from
 * progress, when UCX's own progress has returned.
 *
 * A peer is told closed only after every operation with it ended; until then it cannot be connected
 * anew. Transports of a network share one UCX worker among all peers; within one machine's memory
 * every pair has its own (xfer_ucx_pair.c), which is destroyed to close it. */
#include "pd_buffers/xfer_ucx.h"

#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/little_endian.h"
#include "base/log.h"
#include "base/mem.h"
#include "pd_buffers/xfer_ucx_internal.h"

enum {
    PROGRESS_BUDGET = 64,
    SENDS_MAX = 256,
    BUSY_POLLS = 50, /* turns without progress before the process sleeps in spite of "busy" */
    BUSY_SLEEP_NS = 1000 * 1000,
    LINGER_US = 100 * 1000, /* from a close to a living peer until the pair's worker is destroyed:
                             * the peer must not reach for its memory any more */
    ADDRESS_PREFIX_BYTES = 12,
    DESTROY_LIMIT_US = 2 * 1000 * 1000,
};

static const uint32_t shared_magic = 0x41465842; /* "BXFA" */
static const uint32_t pairs_magic = 0x50465842;  /* "BXFP": the address introduces a pair */

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

void xfer_ucx_break_peer(ucx_peer *peer, ucs_status_t status) {
    if (peer->state != UCX_PEER_OPEN) return;
    peer->state = UCX_PEER_BROKEN;
    peer->failure = xfer_ucx_status(status);
    peer->mover->has_broken = true;
    bt_log_warn("xfer", "the endpoint to worker %u broke: %s", peer->id.worker_id,
                ucs_status_string(status));
}

static void on_endpoint_error(void *arg, ucp_ep_h endpoint, ucs_status_t status) {
    (void)endpoint;
    xfer_ucx_break_peer(arg, status);
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
static const ucp_address_t *read_address(const uint8_t *address, size_t bytes,
                                         uint32_t *magic_out) {
    if (bytes <= ADDRESS_PREFIX_BYTES) return NULL;
    const size_t inner = bytes - ADDRESS_PREFIX_BYTES;
    *magic_out = bt_load_le32(address);
    if (*magic_out != shared_magic && *magic_out != pairs_magic) return NULL;
    if (bt_load_le32(address + 4) != inner) return NULL;
    const uint32_t crc = bt_crc32c(*magic_out, address + ADDRESS_PREFIX_BYTES, inner);
    if (bt_load_le32(address + 8) != crc) return NULL;
    return (const ucp_address_t *)(const void *)(address + ADDRESS_PREFIX_BYTES);
}

static uint32_t own_magic(const ucx_mover *mover) {
    return mover->pair_context != NULL ? pairs_magic : shared_magic;
}

ucs_status_t xfer_ucx_open_endpoint(ucx_peer *peer, ucp_worker_h worker, const void *address,
                                    ucp_ep_h *out) {
    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_endpoint_error, .arg = peer},
    };
    const ucs_status_t status = ucp_ep_create(worker, &params, out);
    if (status != UCS_OK)
        bt_log_warn("xfer", "no endpoint to worker %u: %s", peer->id.worker_id,
                    ucs_status_string(status));
    return status;
}

void *xfer_ucx_close_endpoint(ucx_peer *peer, ucp_ep_h endpoint) {
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
    };
    void *request = ucp_ep_close_nbx(endpoint, &param);
    if (!UCS_PTR_IS_ERR(request)) return request;
    bt_log_warn("xfer", "closing the endpoint to worker %u: %s", peer->id.worker_id,
                ucs_status_string(UCS_PTR_STATUS(request)));
    return NULL;
}

static void close_by_force(ucx_peer *peer) {
    const bool is_alive = peer->state == UCX_PEER_OPEN && !peer->mover->is_destroying;
    peer->state = UCX_PEER_CLOSING;
    peer->mover->has_closing = true;
    peer->quiet_us = now_us() + (is_alive ? LINGER_US : 0);
    xfer_ucx_pair_mute(peer);
    if (peer->endpoint != NULL) peer->close_request = xfer_ucx_close_endpoint(peer, peer->endpoint);
    peer->endpoint = NULL;
}

static bt_status ucx_connect(xfer *x, xfer_peer id, const uint8_t *address, size_t address_bytes) {
    ucx_mover *mover = mover_of(x);
    uint32_t magic = 0;
    const ucp_address_t *remote = read_address(address, address_bytes, &magic);
    if (remote == NULL) return BT_ERR_PEER_PROTOCOL;
    if (xfer_ucx_find_peer(mover, id) != NULL) return BT_ERR_REQUEST_DUPLICATE;
    if (magic != own_magic(mover)) {
        bt_log_warn("xfer", "worker %u and this one do not have the same transports", id.worker_id);
        return BT_ERR_PEER_REFUSED;
    }
    ucx_peer *peer = add_peer(mover, id);
    if (peer == NULL) return BT_ERR_WORKER_MEMORY;
    if (xfer_ucx_open_endpoint(peer, mover->worker, remote, &peer->endpoint) != UCS_OK) {
        remove_peer(mover, peer);
        return BT_ERR_PEER_GONE;
    }
    if (mover->pair_context == NULL) return BT_OK;
    /* When the pair cannot be made the peer shows as broken, like one that died at once. */
    if (xfer_ucx_pair_open(peer) != BT_OK) xfer_ucx_break_peer(peer, UCS_ERR_NO_MEMORY);
    return BT_OK;
}

static void ucx_disconnect(xfer *x, xfer_peer id) {
    ucx_mover *mover = mover_of(x);
    ucx_peer *peer = xfer_ucx_find_peer(mover, id);
    if (peer == NULL) peer = add_peer(mover, id); /* only waits to be told closed */
    BT_ASSERT(peer != NULL);
    if (peer->state != UCX_PEER_CLOSING) close_by_force(peer);
}

static bool is_closed(ucx_peer *peer) {
    if (peer->close_request != NULL) {
        if (ucp_request_check_status(peer->close_request) == UCS_INPROGRESS) return false;
        ucp_request_free(peer->close_request);
        peer->close_request = NULL;
    }
    if (peer->pair.worker != NULL) {
        if (now_us() < peer->quiet_us) return false;
        xfer_ucx_pair_close(peer);
        xfer_ucx_end_all(peer, BT_ERR_PEER_GONE);
    }
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

static void tell_closed(ucx_mover *mover) {
    if (!mover->has_closing) return;
    mover->has_closing = false;
    for (ucx_peer *peer = mover->peers, *next = NULL; peer != NULL; peer = next) {
        next = peer->next;
        if (peer->state != UCX_PEER_CLOSING) continue;
        if (!is_closed(peer)) {
            mover->has_closing = true;
            continue;
        }
        const xfer_peer id = peer->id;
        remove_peer(mover, peer);
        if (!mover->is_destroying)
            mover->base.handler.on_peer_closed(mover->base.handler.context, id);
    }
}

/* One turn of every UCX worker; of a pair only while it is whole. */
static unsigned turn(ucx_mover *mover) {
    unsigned count = ucp_worker_progress(mover->worker);
    if (mover->pair_context == NULL) return count;
    for (ucx_peer *peer = mover->peers; peer != NULL; peer = peer->next) {
        if (peer->state != UCX_PEER_OPEN) continue;
        count += ucp_worker_progress(peer->pair.worker);
        xfer_ucx_pair_go_on(peer);
    }
    return count;
}

static bool ucx_progress(xfer *x) {
    ucx_mover *mover = mover_of(x);
    uint64_t expirations = 0;
    int turns = 0;
    if (mover->is_timer_set)
        mover->is_timer_set = read(mover->timer_fd, &expirations, sizeof expirations) < 0;
    while (turns < PROGRESS_BUDGET && turn(mover) != 0)
        turns++;
    if (turns > 0 || mover->done != NULL) mover->busy_polls = 0;
    xfer_ucx_tell_done(mover);
    tell_broken(mover);
    tell_closed(mover);
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

static bool arm_workers(const ucx_mover *mover) {
    bool is_armed = ucp_worker_arm(mover->worker) != UCS_ERR_BUSY;
    if (mover->pair_context == NULL) return is_armed;
    for (const ucx_peer *peer = mover->peers; peer != NULL; peer = peer->next)
        if (peer->state == UCX_PEER_OPEN && ucp_worker_arm(peer->pair.worker) == UCS_ERR_BUSY)
            is_armed = false;
    return is_armed;
}

/* In shared memory nothing tells that a full queue has room again, so that while sends are on their
 * way the process first looks again a few times and then sleeps on a short timer. */
static bool ucx_arm(xfer *x) {
    ucx_mover *mover = mover_of(x);
    if (mover->done != NULL || mover->has_broken) return false;
    const bool is_sending = mover->is_memory_only && mover->sends > 0;
    if (is_sending && mover->busy_polls < BUSY_POLLS) {
        mover->busy_polls++;
        return false;
    }
    const bool is_armed = arm_workers(mover);
    if (!is_armed && mover->busy_polls < BUSY_POLLS) {
        mover->busy_polls++;
        return false;
    }
    if (!is_armed || is_sending || mover->has_closing) set_timer(mover);
    return true;
}

/* ---- creation and end ------------------------------------------------------------------------ */

static bt_status ucx_get_address(xfer *x, const uint8_t **bytes_out, size_t *count_out) {
    const ucx_mover *mover = mover_of(x);
    *bytes_out = mover->address;
    *count_out = mover->address_bytes;
    return BT_OK;
}

/* The context whose workers carry payloads. */
static ucp_context_h data_context(const ucx_mover *mover) {
    return mover->pair_context != NULL ? mover->pair_context : mover->context;
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
    const ucs_status_t status = ucp_mem_map(data_context(mover), &params, &m->handle);
    if (status != UCS_OK) {
        bt_free(m);
        return BT_ERR_WORKER_MEMORY;
    }
    m->base = base;
    m->next = mover->mappings;
    mover->mappings = m;
    return BT_OK;
}

static void ucx_unregister_memory(xfer *x, void *base) {
    ucx_mover *mover = mover_of(x);
    ucx_mapping **at = &mover->mappings;
    while (*at != NULL && (*at)->base != base)
        at = &(*at)->next;
    ucx_mapping *m = *at;
    BT_ASSERT(m != NULL);
    *at = m->next;
    (void)ucp_mem_unmap(data_context(mover), m->handle);
    bt_free(m);
}

static void end_peers(ucx_mover *mover) {
    const uint64_t limit = now_us() + DESTROY_LIMIT_US;
    mover->is_destroying = true;
    for (ucx_peer *peer = mover->peers; peer != NULL; peer = peer->next)
        if (peer->state != UCX_PEER_CLOSING) close_by_force(peer);
    do {
        (void)ucx_progress(&mover->base);
    } while (mover->peers != NULL && now_us() < limit);
    for (ucx_peer *peer = mover->peers; peer != NULL; peer = peer->next)
        bt_log_warn("xfer", "the endpoint to worker %u does not close", peer->id.worker_id);
}

static void free_lists(ucx_mover *mover) {
    while (mover->mappings != NULL) {
        ucx_mapping *m = mover->mappings;
        mover->mappings = m->next;
        (void)ucp_mem_unmap(data_context(mover), m->handle);
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
        ucp_worker_destroy(mover->worker);
    }
    while (mover->peers != NULL) { /* what did not close in time */
        xfer_ucx_end_all(mover->peers, BT_ERR_PEER_GONE);
        xfer_ucx_tell_done(mover);
        remove_peer(mover, mover->peers);
    }
    if (mover->event_fd >= 0) (void)close(mover->event_fd);
    if (mover->timer_fd >= 0) (void)close(mover->timer_fd);
    free_lists(mover);
    if (mover->pair_context != NULL) ucp_cleanup(mover->pair_context);
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
    .unregister_memory = ucx_unregister_memory,
    .destroy = ucx_destroy,
};

static ucs_status_t open_context(const ucp_config_t *config, ucp_context_h *out) {
    const ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
        .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        .name = "baton",
    };
    return ucp_init(&params, config, out);
}

static ucs_status_t open_worker(ucx_mover *mover) {
    const ucp_worker_params_t worker = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    const ucs_status_t status = ucp_worker_create(mover->context, &worker, &mover->worker);
    if (status != UCS_OK) return status;
    const bool has_pairs = mover->pair_context != NULL;
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = has_pairs ? UCX_PAIR_ID : UCX_MESSAGE_ID,
        .cb = has_pairs ? xfer_ucx_on_pair : xfer_ucx_on_message,
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
    bt_store_le32(mover->address, own_magic(mover));
    bt_store_le32(mover->address + 4, (uint32_t)bytes);
    bt_store_le32(mover->address + 8, bt_crc32c(own_magic(mover), mover->worker_address, bytes));
    memcpy(mover->address + ADDRESS_PREFIX_BYTES, mover->worker_address, bytes);
    return BT_OK;
}

static bt_status open_one(const xfer_ucx_options *options, ucx_transports kinds, bool is_pair,
                          ucp_context_h *out, bt_error *error) {
    ucp_config_t *config = NULL;
    const bt_status status = xfer_ucx_configure(options, kinds, is_pair, &config, error);
    if (status != BT_OK) return status;
    const ucs_status_t opened = open_context(config, out);
    ucp_config_release(config);
    if (opened == UCS_OK) return BT_OK;
    *out = NULL;
    return bt_fail(error, BT_ERR_WORKER_IO, "UCX does not start: %s", ucs_status_string(opened));
}

static bt_status open_all(ucx_mover *mover, const xfer_ucx_options *options, bt_error *error) {
    ucx_transports kinds;
    bt_status status = xfer_ucx_set_transports(options, &kinds, error);
    if (status == BT_OK) status = open_one(options, kinds, false, &mover->context, error);
    if (status == BT_OK && kinds.has_pairs)
        status = open_one(options, kinds, true, &mover->pair_context, error);
    if (status != BT_OK) return status;
    mover->is_memory_only = kinds.has_pairs && kinds.is_memory_only;
    const ucs_status_t opened = open_worker(mover);
    if (opened != UCS_OK)
        return bt_fail(error, BT_ERR_WORKER_IO, "UCX does not start: %s",
                       ucs_status_string(opened));
    if (!open_event_fd(mover))
        return bt_fail(error, BT_ERR_WORKER_IO, "no descriptor to wait for UCX with");
    status = make_address(mover);
    if (status != BT_OK) return bt_fail(error, status, "UCX gives no address of this process");
    return BT_OK;
}

bt_status xfer_ucx_create(const xfer_ucx_options *options, xfer **out, bt_error *error) {
    ucx_mover *mover = bt_calloc(1, sizeof *mover);
    if (mover == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "no memory for the mover");
    mover->base.ops = &ucx_ops;
    mover->done_end = &mover->done;
    mover->event_fd = mover->timer_fd = -1;
    mover->sends_max = options->sends_max == 0 ? SENDS_MAX : options->sends_max;
    const bt_status status = open_all(mover, options, error);
    if (status != BT_OK) {
        ucx_destroy(&mover->base);
        return status;
    }
    *out = &mover->base;
    return BT_OK;
}
