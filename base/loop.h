/* Small glue over libevent: one loop per event thread, with precise timers, descriptors, stop
 * signals and a step of the owner's that runs before every block.
 *
 * The step is where a transport that is not libevent's makes progress (UCX): any call into it from
 * any callback can leave work that does not show on its descriptor, so it must be drained before
 * the loop sleeps. libevent 2.1 has no hook for that, hence bt_loop_run's own loop.
 *
 * One thread makes all calls. A bt_loop owns its event_base; sources are owned by the caller and
 * freed before the loop. SIGPIPE is ignored from creation on. Target bt_base_io. */
#ifndef BT_BASE_LOOP_H
#define BT_BASE_LOOP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

struct event_base;
typedef struct bt_loop bt_loop;
typedef struct bt_loop_source bt_loop_source; /* a timer or a descriptor */
typedef void (*bt_loop_callback)(void *context);

BT_MUST_CHECK bt_status bt_loop_create(bt_loop **out);
void bt_loop_destroy(bt_loop *loop);
/* Borrowed; for bufferevents and listeners. */
struct event_base *bt_loop_get_base(bt_loop *loop);

/* Calls back every time `fd` is readable, until the source is freed. */
BT_MUST_CHECK bt_status bt_loop_watch(bt_loop *loop, int fd, bt_loop_callback on_readable,
                                      void *context, bt_loop_source **out);
/* Calls back every period_us (> 0), the first time after one period. */
BT_MUST_CHECK bt_status bt_loop_every(bt_loop *loop, uint64_t period_us, bt_loop_callback on_time,
                                      void *context, bt_loop_source **out);
/* A timer that is not running; start it with bt_loop_timer_start. */
BT_MUST_CHECK bt_status bt_loop_timer(bt_loop *loop, bt_loop_callback on_time, void *context,
                                      bt_loop_source **out);
/* (Re)starts a timer of bt_loop_timer: one call after delay_us. */
void bt_loop_timer_start(bt_loop_source *timer, uint64_t delay_us);
void bt_loop_timer_stop(bt_loop_source *timer);
/* May be called from the source's own callback. NULL is fine. */
void bt_loop_source_free(bt_loop_source *source);

/* SIGINT and SIGTERM call on_stop instead of killing the process; NULL = bt_loop_stop. */
BT_MUST_CHECK bt_status bt_loop_handle_stop_signals(bt_loop *loop, bt_loop_callback on_stop,
                                                    void *context);

/* Runs until bt_loop_stop. Before each turn `step` (may be NULL) does the owner's work; true =
 * there is more, so the loop looks at its sources without sleeping and comes back. WORKER_IO when
 * libevent fails. */
BT_MUST_CHECK bt_status bt_loop_run(bt_loop *loop, bool (*step)(void *context), void *context);
/* Makes bt_loop_run return after the current turn, for good. From callbacks, from the step, and
 * before bt_loop_run. */
void bt_loop_stop(bt_loop *loop);

#endif
