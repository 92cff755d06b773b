/* Shared by front.c (threads), front_route.c (paths) and front_call.c (requests to generate). */
#ifndef BT_ROUTER_FRONT_INTERNAL_H
#define BT_ROUTER_FRONT_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "proto/listener.h"
#include "router/front.h"

typedef struct front_thread front_thread;

typedef struct front_call front_call;

/* One item of a call at the control thread. */
typedef struct front_flow {
    control_flow flow; /* first: the control thread gives it back as a flow */
    front_call *call;
    uint32_t item;
} front_flow;

/* One HTTP request to generate, from its body to its last byte.
 *
 *   READING    the intake has the job
 *   RUNNING    the control thread has the flows, one for each item; ends with the last one's end
 * It is over when the exchange was answered (or its client left) and neither has it any more. Then
 * its flows are released together, and with the last one that the control thread lets go its memory
 * is freed. */
struct front_call {
    front_thread *thread;
    front_call *previous, *next;
    http_exchange *exchange; /* NULL: answered, or the client left */
    char *body;
    intake_job job;
    uint64_t started_us;
    uint64_t abort_mark;
    uint64_t held_bytes;     /* of what was read of its body, charged to the budget of bodies */
    uint32_t flow_count;     /* 0 while it is read */
    uint32_t flows_left;     /* once they are released: the control thread's */
    front_flow *flows;       /* [flow_count] */
    control_sample *samples; /* of all flows */
    bool has_call;           /* call is initialised */
    api_call call;
};

struct front_thread {
    front *front;
    uint32_t index;
    bt_loop *loop;
    http_server *server;
    bt_ring *sockets; /* accepted by thread 0 */
    bt_loop_source *sockets_source, *control_source, *stop_source, *stop_tick;
    struct front_intake_watch *watches; /* [intake_threads] */
    int stop_fd;
    pthread_t id;
    bool is_running;
    bool is_stopping; /* requests are refused; calls are kept until all threads have ended */
    uint32_t stop_ticks;
    front_call *calls;
    /* Requests to the workers, and what is being read counts as one: at most flows_per_thread_max.
     * The control thread takes off what it has let go, so that its commands never overflow. */
    _Atomic uint32_t flow_count;
    bt_block_pool *texts; /* blocks of scratch, and of texts on their way to clients */
    bt_text scratch;
    api_snapshot snapshot; /* while an answer is made */
};

typedef struct front_intake_watch {
    front_thread *thread;
    uint32_t index;
    bt_loop_source *source;
} front_intake_watch;

struct front {
    front_options options;
    front_thread *threads;
    proto_listener *listener;
    uint32_t next_thread;
    bt_clock clock;
    int64_t started_s;
};

double front_wall_seconds(void *context);
/* The handler of http_server. */
void front_on_request(void *context, http_exchange *exchange, const http_request *request,
                      char *body, size_t body_bytes);
/* Takes body [given->bytes], which becomes the text of what is given. */
void front_generate(front_thread *thread, http_exchange *exchange, char *body,
                    const api_body *given);
/* What the intake and the control thread give back. */
void front_on_intake(void *context);
void front_on_control(void *context);
/* Answers every call that it is over; nothing more comes from intake and control. */
void front_calls_end(front_thread *thread);
/* Frees every call; nothing else refers to them any more. */
void front_calls_free(front_thread *thread);

#endif
