/* libevent behind the few calls of the header. Errors of libevent's set-up calls are out of memory
 * or descriptors; both end a program's start. */
#include "base/loop.h"

#include <event2/event.h>
#include <signal.h>
#include <sys/time.h>

#include "base/assert.h"
#include "base/mem.h"

enum { STOP_SIGNALS = 2 };

struct bt_loop {
    struct event_base *base;
    bool is_stopping;
    struct event *signals[STOP_SIGNALS];
    bt_loop_callback on_stop;
    void *stop_context;
};

struct bt_loop_source {
    struct event *event;
    bt_loop_callback callback;
    void *context;
};

static struct timeval timeval_of(uint64_t us) {
    return (struct timeval){.tv_sec = (time_t)(us / 1000000),
                            .tv_usec = (suseconds_t)(us % 1000000)};
}

bt_status bt_loop_create(bt_loop **out) {
    bt_loop *loop = bt_calloc(1, sizeof *loop);
    if (loop == NULL) return BT_ERR_WORKER_MEMORY;
    struct event_config *config = event_config_new();
    if (config != NULL) {
        /* Without it timers are as coarse as the kernel's tick. */
        (void)event_config_set_flag(config, EVENT_BASE_FLAG_PRECISE_TIMER);
        loop->base = event_base_new_with_config(config);
        event_config_free(config);
    }
    if (loop->base == NULL) {
        bt_free(loop);
        return BT_ERR_WORKER_IO;
    }
    (void)signal(SIGPIPE, SIG_IGN);
    *out = loop;
    return BT_OK;
}

void bt_loop_destroy(bt_loop *loop) {
    if (loop == NULL) return;
    for (int i = 0; i < STOP_SIGNALS; i++) {
        if (loop->signals[i] != NULL) event_free(loop->signals[i]);
    }
    event_base_free(loop->base);
    bt_free(loop);
}

struct event_base *bt_loop_get_base(bt_loop *loop) {
    return loop->base;
}

static void on_source(evutil_socket_t fd, short what, void *context) {
    (void)fd;
    (void)what;
    bt_loop_source *source = context;
    source->callback(source->context); /* may free source */
}

static bt_status add_source(bt_loop *loop, int fd, short what, const struct timeval *period,
                            bt_loop_source *source, bt_loop_source **out) {
    source->event = event_new(loop->base, fd, what, on_source, source);
    if (source->event == NULL) {
        bt_free(source);
        return BT_ERR_WORKER_MEMORY;
    }
    const bool is_added = (what & (EV_READ | EV_PERSIST)) != 0;
    if (is_added && event_add(source->event, period) != 0) {
        event_free(source->event);
        bt_free(source);
        return BT_ERR_WORKER_IO;
    }
    *out = source;
    return BT_OK;
}

static bt_loop_source *new_source(bt_loop_callback callback, void *context) {
    bt_loop_source *source = bt_calloc(1, sizeof *source);
    if (source == NULL) return NULL;
    source->callback = callback;
    source->context = context;
    return source;
}

bt_status bt_loop_watch(bt_loop *loop, int fd, bt_loop_callback on_readable, void *context,
                        bt_loop_source **out) {
    bt_loop_source *source = new_source(on_readable, context);
    if (source == NULL) return BT_ERR_WORKER_MEMORY;
    return add_source(loop, fd, EV_READ | EV_PERSIST, NULL, source, out);
}

bt_status bt_loop_every(bt_loop *loop, uint64_t period_us, bt_loop_callback on_time, void *context,
                        bt_loop_source **out) {
    BT_ASSERT(period_us > 0);
    bt_loop_source *source = new_source(on_time, context);
    if (source == NULL) return BT_ERR_WORKER_MEMORY;
    const struct timeval period = timeval_of(period_us);
    return add_source(loop, -1, EV_PERSIST, &period, source, out);
}

bt_status bt_loop_timer(bt_loop *loop, bt_loop_callback on_time, void *context,
                        bt_loop_source **out) {
    bt_loop_source *source = new_source(on_time, context);
    if (source == NULL) return BT_ERR_WORKER_MEMORY;
    return add_source(loop, -1, 0, NULL, source, out);
}

void bt_loop_timer_start(bt_loop_source *timer, uint64_t delay_us) {
    const struct timeval delay = timeval_of(delay_us);
    const int result = event_add(timer->event, &delay);
    BT_ASSERT(result == 0);
}

void bt_loop_timer_stop(bt_loop_source *timer) {
    (void)event_del(timer->event);
}

void bt_loop_source_free(bt_loop_source *source) {
    if (source == NULL) return;
    event_free(source->event);
    bt_free(source);
}

static void on_stop_signal(evutil_socket_t number, short what, void *context) {
    (void)number;
    (void)what;
    bt_loop *loop = context;
    if (loop->on_stop != NULL) {
        loop->on_stop(loop->stop_context);
    } else {
        bt_loop_stop(loop);
    }
}

bt_status bt_loop_handle_stop_signals(bt_loop *loop, bt_loop_callback on_stop, void *context) {
    static const int numbers[STOP_SIGNALS] = {SIGINT, SIGTERM};
    loop->on_stop = on_stop;
    loop->stop_context = context;
    for (int i = 0; i < STOP_SIGNALS; i++) {
        BT_ASSERT(loop->signals[i] == NULL);
        loop->signals[i] = evsignal_new(loop->base, numbers[i], on_stop_signal, loop);
        if (loop->signals[i] == NULL) return BT_ERR_WORKER_MEMORY;
        if (event_add(loop->signals[i], NULL) != 0) return BT_ERR_WORKER_IO;
    }
    return BT_OK;
}

bt_status bt_loop_run(bt_loop *loop, bool (*step)(void *context), void *context) {
    while (!loop->is_stopping) {
        const bool has_more = step != NULL && step(context);
        if (loop->is_stopping) break;
        const int flags = EVLOOP_ONCE | (has_more ? EVLOOP_NONBLOCK : 0);
        const int result = event_base_loop(loop->base, flags | EVLOOP_NO_EXIT_ON_EMPTY);
        if (result < 0) return BT_ERR_WORKER_IO;
    }
    return BT_OK;
}

void bt_loop_stop(bt_loop *loop) {
    loop->is_stopping = true;
    (void)event_base_loopbreak(loop->base);
}
