/* Threads that read bodies, and the rings to and from them: one pair of rings for each HTTP thread
 * at each tokenizer thread, so that every ring has one producer and one consumer. The ring back is
 * as deep as the ring there, and the giver counts what is out: pushing back cannot fail. Jobs
 * belong to their HTTP threads all the time; this file never frees or copies one. What a body
 * means is api_request.c's. */
#include "router/intake.h"

#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"

/* One HTTP thread's jobs at one tokenizer thread. */
typedef struct intake_lane {
    struct intake_thread *thread;
    bt_ring *jobs, *done;
    bt_loop_source *source;
    uint32_t job_count; /* given and not back; the HTTP thread's */
} intake_lane;

typedef struct intake_thread {
    intake *in;
    bt_loop *loop;
    intake_lane *lanes; /* [http_threads] */
    int stop_fd;
    bt_loop_source *stop_source;
    pthread_t id;
    bool is_running;
} intake_thread;

struct intake {
    intake_options options;
    intake_thread *threads;
    uint32_t *turns; /* [http_threads], each the HTTP thread's own */
};

static void read_job(intake *in, intake_job *job) {
    api_model model;
    control_get_model(in->options.control, &model);
    job->is_good =
        api_batch_read(&job->body, in->options.settings, &model, &job->batch, &job->failure);
}

/* One job of each lane at a time, so that a burst of one HTTP thread does not hold up the others.
 */
static bool read_one(intake_lane *lane) {
    intake_job *job;
    if (!bt_ring_pop(lane->jobs, &job)) return false;
    read_job(lane->thread->in, job);
    /* As deep as the ring of jobs, and a job leaves that one first. */
    bool is_pushed = bt_ring_push(lane->done, &job);
    BT_ASSERT(is_pushed);
    return true;
}

static void on_jobs(void *context) {
    intake_lane *woken = context;
    intake_thread *thread = woken->thread;
    uint32_t count = thread->in->options.http_threads;
    bt_ring_disarm(woken->jobs);
    do {
        bool has_more = true;
        while (has_more) {
            has_more = false;
            for (uint32_t i = 0; i < count; i++) {
                if (read_one(&thread->lanes[i])) has_more = true;
            }
        }
    } while (!bt_ring_arm(woken->jobs));
}

static void on_stop(void *context) {
    intake_thread *thread = context;
    bt_loop_stop(thread->loop);
}

static void *thread_main(void *context) {
    intake_thread *thread = context;
    bt_status status = bt_loop_run(thread->loop, NULL, NULL);
    if (status != BT_OK)
        bt_log_error("intake", "a tokenizer thread ended: %s", bt_status_string(status));
    return NULL;
}

static bt_status create_lane(intake_thread *thread, intake_lane *lane) {
    uint32_t depth = thread->in->options.depth;
    lane->thread = thread;
    bt_status status = bt_ring_create(depth, sizeof(intake_job *), &lane->jobs);
    if (status == BT_OK) status = bt_ring_create(depth, sizeof(intake_job *), &lane->done);
    if (status != BT_OK) return status;
    return bt_loop_watch(thread->loop, bt_ring_get_fd(lane->jobs), on_jobs, lane, &lane->source);
}

static bt_status create_thread(intake *in, intake_thread *thread) {
    thread->in = in;
    thread->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    thread->lanes = bt_calloc(in->options.http_threads, sizeof(*thread->lanes));
    if (thread->stop_fd < 0 || thread->lanes == NULL) return BT_ERR_WORKER_MEMORY;
    bt_status status = bt_loop_create(&thread->loop);
    if (status == BT_OK)
        status =
            bt_loop_watch(thread->loop, thread->stop_fd, on_stop, thread, &thread->stop_source);
    for (uint32_t i = 0; status == BT_OK && i < in->options.http_threads; i++) {
        status = create_lane(thread, &thread->lanes[i]);
    }
    return status;
}

bt_status intake_create(const intake_options *options, intake **out) {
    intake *in = bt_calloc(1, sizeof(*in));
    if (in == NULL) return BT_ERR_WORKER_MEMORY;
    in->options = *options;
    in->threads = bt_calloc(options->threads, sizeof(*in->threads));
    in->turns = bt_calloc(options->http_threads, sizeof(*in->turns));
    bt_status status = in->threads != NULL && in->turns != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
    for (uint32_t i = 0; in->threads != NULL && i < options->threads; i++) {
        in->threads[i].stop_fd = -1;
    }
    for (uint32_t i = 0; status == BT_OK && i < options->threads; i++) {
        status = create_thread(in, &in->threads[i]);
    }
    if (status != BT_OK) {
        intake_destroy(in);
        return status;
    }
    *out = in;
    return BT_OK;
}

bt_status intake_start(intake *in) {
    for (uint32_t i = 0; i < in->options.threads; i++) {
        intake_thread *thread = &in->threads[i];
        if (pthread_create(&thread->id, NULL, thread_main, thread) != 0) return BT_ERR_WORKER_IO;
        thread->is_running = true;
    }
    return BT_OK;
}

void intake_stop(intake *in) {
    for (uint32_t i = 0; i < in->options.threads; i++) {
        intake_thread *thread = &in->threads[i];
        if (!thread->is_running) continue;
        (void)eventfd_write(thread->stop_fd, 1);
        pthread_join(thread->id, NULL);
        thread->is_running = false;
    }
}

static void destroy_thread(intake_thread *thread) {
    for (uint32_t i = 0; thread->lanes != NULL && i < thread->in->options.http_threads; i++) {
        intake_lane *lane = &thread->lanes[i];
        bt_loop_source_free(lane->source);
        bt_ring_destroy(lane->jobs);
        bt_ring_destroy(lane->done);
    }
    bt_loop_source_free(thread->stop_source);
    bt_loop_destroy(thread->loop);
    if (thread->stop_fd >= 0) close(thread->stop_fd);
    bt_free(thread->lanes);
}

void intake_destroy(intake *in) {
    if (in == NULL) return;
    for (uint32_t i = 0; in->threads != NULL && i < in->options.threads; i++) {
        destroy_thread(&in->threads[i]);
    }
    bt_free(in->threads);
    bt_free(in->turns);
    bt_free(in);
}

/* The thread with the fewest jobs of this giver, in turn among equals: small requests go around a
 * huge one. */
static intake_lane *choose_lane(intake *in, uint32_t http_thread) {
    uint32_t first = in->turns[http_thread]++;
    intake_lane *best = NULL;
    for (uint32_t i = 0; i < in->options.threads; i++) {
        intake_lane *lane = &in->threads[(first + i) % in->options.threads].lanes[http_thread];
        if (best == NULL || lane->job_count < best->job_count) best = lane;
    }
    return best;
}

bool intake_give(intake *in, uint32_t http_thread, intake_job *job) {
    intake_lane *lane = choose_lane(in, http_thread);
    if (lane->job_count == in->options.depth) return false;
    bool is_pushed = bt_ring_push(lane->jobs, &job);
    BT_ASSERT(is_pushed);
    lane->job_count++;
    return true;
}

bt_ring *intake_ring(intake *in, uint32_t http_thread, uint32_t thread) {
    return in->threads[thread].lanes[http_thread].done;
}

intake_job *intake_next(intake *in, uint32_t http_thread, uint32_t thread) {
    intake_lane *lane = &in->threads[thread].lanes[http_thread];
    intake_job *job;
    if (!bt_ring_pop(lane->done, &job)) return NULL;
    lane->job_count--;
    return job;
}
