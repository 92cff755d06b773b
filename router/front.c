/* The threads and the public port. */
#include "router/front.h"

#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "router/front_internal.h"

enum {
    SOCKETS_PER_THREAD = 4096,
    SCRATCH_BYTES_MAX = 64 << 20,
    TEXT_IDLE_BYTES = 4 << 20, /* of blocks for texts that are kept, for each thread */
    STOP_TICK_US = 10 * 1000,
    STOP_TICKS_MAX = 100, /* a second for the last words of all connections */
};

double front_wall_seconds(void *context) {
    (void)context;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Before the rings that are watched are destroyed. */
static void free_sources(front_thread *thread) {
    bt_loop_source **const sources[] = {&thread->sockets_source, &thread->control_source,
                                        &thread->stop_source, &thread->stop_tick};
    for (uint32_t i = 0; thread->watches != NULL && i < thread->front->options.intake_threads;
         i++) {
        bt_loop_source_free(thread->watches[i].source);
        thread->watches[i].source = NULL;
    }
    for (size_t i = 0; i < BT_ARRAY_COUNT(sources); i++) {
        bt_loop_source_free(*sources[i]);
        *sources[i] = NULL;
    }
}

static void on_stop_tick(void *context) {
    front_thread *thread = context;
    thread->stop_ticks++;
    if (http_server_is_flushed(thread->server) || thread->stop_ticks >= STOP_TICKS_MAX)
        bt_loop_stop(thread->loop);
}

/* Nothing is taken in any more, every client is told, and what they are told is written. */
static void on_stop(void *context) {
    front_thread *thread = context;
    front *f = thread->front;
    thread->is_stopping = true;
    free_sources(thread);
    if (thread->index == 0) {
        proto_listener_close(f->listener);
        f->listener = NULL;
    }
    front_calls_end(thread);
    bt_status status =
        bt_loop_every(thread->loop, STOP_TICK_US, on_stop_tick, thread, &thread->stop_tick);
    if (status != BT_OK) bt_loop_stop(thread->loop);
}

static void on_sockets(void *context) {
    front_thread *thread = context;
    int fd;
    bt_ring_disarm(thread->sockets);
    do {
        while (bt_ring_pop(thread->sockets, &fd)) {
            http_server_adopt(thread->server, fd);
        }
    } while (!bt_ring_arm(thread->sockets));
}

/* On thread 0: connections go to the threads in turn. */
static void on_accept(void *context, int fd, const char *peer) {
    (void)peer;
    front *f = context;
    front_thread *thread = &f->threads[f->next_thread++ % f->options.threads];
    if (thread->index == 0 || !bt_ring_push(thread->sockets, &fd))
        http_server_adopt(f->threads[0].server, fd);
}

static bt_status watch_intake(front_thread *thread) {
    const front_options *options = &thread->front->options;
    thread->watches = bt_calloc(options->intake_threads, sizeof(*thread->watches));
    if (thread->watches == NULL) return BT_ERR_WORKER_MEMORY;
    for (uint32_t i = 0; i < options->intake_threads; i++) {
        front_intake_watch *watch = &thread->watches[i];
        bt_ring *ring = intake_ring(options->intake, thread->index, i);
        watch->thread = thread;
        watch->index = i;
        bt_status status = bt_loop_watch(thread->loop, bt_ring_get_fd(ring), front_on_intake, watch,
                                         &watch->source);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

static bt_status create_thread(front *f, front_thread *thread, uint32_t index) {
    const front_options *options = &f->options;
    http_server_options http = options->http;
    const http_handler handler = {.on_request = front_on_request, .context = thread};
    http.connections_max = (http.connections_max + options->threads - 1) / options->threads;
    thread->front = f;
    thread->index = index;
    const bt_block_pool_options texts = {.idle_bytes_max = TEXT_IDLE_BYTES};
    if (bt_block_pool_create(&texts, &thread->texts) != BT_OK) return BT_ERR_WORKER_MEMORY;
    bt_text_init_pooled(&thread->scratch, SCRATCH_BYTES_MAX, thread->texts, API_TEXT_BLOCK_BYTES);
    thread->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (thread->stop_fd < 0) return BT_ERR_WORKER_IO;
    bt_status status = bt_loop_create(&thread->loop);
    if (status == BT_OK)
        status = http_server_create(&http, thread->loop, &handler, &thread->server);
    if (status == BT_OK) status = bt_ring_create(SOCKETS_PER_THREAD, sizeof(int), &thread->sockets);
    if (status == BT_OK)
        status = bt_loop_watch(thread->loop, bt_ring_get_fd(thread->sockets), on_sockets, thread,
                               &thread->sockets_source);
    if (status == BT_OK)
        status = bt_loop_watch(thread->loop, bt_ring_get_fd(control_ring(options->control, index)),
                               front_on_control, thread, &thread->control_source);
    if (status == BT_OK)
        status =
            bt_loop_watch(thread->loop, thread->stop_fd, on_stop, thread, &thread->stop_source);
    return status == BT_OK ? watch_intake(thread) : status;
}

bt_status front_create(const front_options *options, front **out, bt_error *error) {
    const proto_listener_events events = {.on_accept = on_accept};
    front *f = bt_calloc(1, sizeof(*f));
    if (f == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "no memory for the HTTP threads");
    f->options = *options;
    f->clock = bt_clock_system();
    f->started_s = (int64_t)front_wall_seconds(NULL);
    bt_status status = BT_OK;
    f->threads = bt_calloc(options->threads, sizeof(*f->threads));
    if (f->threads == NULL) status = BT_ERR_WORKER_MEMORY;
    for (uint32_t i = 0; f->threads != NULL && i < options->threads; i++) {
        f->threads[i].stop_fd = -1;
    }
    for (uint32_t i = 0; status == BT_OK && i < options->threads; i++) {
        status = create_thread(f, &f->threads[i], i);
    }
    if (status != BT_OK) {
        (void)bt_fail(error, status, "the HTTP threads cannot start: %s", bt_status_string(status));
    } else {
        proto_listener_events own = events;
        own.context = f;
        status = proto_listener_open(bt_loop_get_base(f->threads[0].loop), &options->address, &own,
                                     &f->listener, error);
    }
    if (status != BT_OK) {
        front_destroy(f);
        return status;
    }
    *out = f;
    return BT_OK;
}

static void *thread_main(void *context) {
    front_thread *thread = context;
    bt_status status = bt_loop_run(thread->loop, NULL, NULL);
    if (status != BT_OK) bt_log_error("http", "an HTTP thread ended: %s", bt_status_string(status));
    return NULL;
}

bt_status front_start(front *f) {
    for (uint32_t i = 0; i < f->options.threads; i++) {
        front_thread *thread = &f->threads[i];
        if (pthread_create(&thread->id, NULL, thread_main, thread) != 0) return BT_ERR_WORKER_IO;
        thread->is_running = true;
    }
    return BT_OK;
}

void front_stop(front *f) {
    for (uint32_t i = 0; i < f->options.threads; i++) {
        front_thread *thread = &f->threads[i];
        if (!thread->is_running) continue;
        (void)eventfd_write(thread->stop_fd, 1);
        pthread_join(thread->id, NULL);
        thread->is_running = false;
        free_sources(thread);
    }
}

static void destroy_thread(front_thread *thread) {
    int fd;
    /* Calls first: no owner of an exchange is left to be told that it is gone. */
    front_calls_free(thread);
    http_server_destroy(thread->server);
    while (thread->sockets != NULL && bt_ring_pop(thread->sockets, &fd)) {
        close(fd);
    }
    free_sources(thread);
    bt_ring_destroy(thread->sockets);
    bt_loop_destroy(thread->loop);
    bt_free(thread->watches);
    bt_text_fini(&thread->scratch);
    bt_block_pool_destroy(thread->texts); /* what is still to be written holds its block */
    if (thread->stop_fd >= 0) close(thread->stop_fd);
}

void front_destroy(front *f) {
    if (f == NULL) return;
    proto_listener_close(f->listener);
    for (uint32_t i = 0; f->threads != NULL && i < f->options.threads; i++) {
        destroy_thread(&f->threads[i]);
    }
    bt_free(f->threads);
    bt_free(f);
}

uint16_t front_port(const front *f) {
    return proto_listener_port(f->listener);
}
