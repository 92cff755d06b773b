/* What is around a worker's core in its process, whatever its role: options, pages, the mover,
 * sockets, the loop with its timers and signals, and the exit status. The shell knows no models and
 * no kernels; the role brings them through a table of functions.
 *
 * Nouns. A *role* is that table. The *worker* is the role's own struct; it begins with
 * worker_settings and belongs to the program. *Facts* are what the shell is told of the model.
 * *Parts* are what the shell owns and lends to the core.
 *
 * Nothing touches the network before the model is there. One thread makes all calls. */
#ifndef BT_PD_BUFFERS_WORKER_SHELL_H
#define BT_PD_BUFFERS_WORKER_SHELL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"
#include "pd_buffers/kv_pool.h"
#include "pd_buffers/worker_options.h"
#include "pd_buffers/xfer.h"
#include "proto/message.h"

typedef struct worker_shell worker_shell;

/* Borrowed from the model until `stop`. */
typedef struct worker_facts {
    const char *name, *numerics;
    const uint8_t *fingerprint;
    size_t fingerprint_bytes;
    const int32_t *eos_ids;
    uint32_t eos_count;
    uint32_t vocab_size, context_tokens;
    uint32_t layers, kv_heads, head_dim;
    size_t page_bytes; /* of one KV page, a multiple of layers */
} worker_facts;

/* The shell's, alive until `stop` returned. */
typedef struct worker_parts {
    worker_shell *shell; /* context of the worker_shell_* functions below */
    const proto_hello *hello;
    bt_clock clock;
    xfer *mover; /* the pages are registered */
    kv_pool *pages;
} worker_parts;

typedef struct worker_role {
    worker_options_role options;
    proto_role role;

    /* Starting, in this order; each one at most once, with a sentence in *error when it fails. */

    bt_status (*load)(void *worker, worker_facts *facts_out, bt_error *error);
    /* What computes on the pages. *fd_out is readable when on_computed has something to do. */
    bt_status (*start_compute)(void *worker, kv_pool *pages, int *fd_out, bt_error *error);
    bt_status (*create_core)(void *worker, const worker_parts *parts, bt_error *error);

    /* The core's events; on_closed also before a core that exists is stopped. */

    void (*on_open)(void *worker, proto_lane lane);
    void (*on_message)(void *worker, proto_lane lane, const proto_message *message);
    void (*on_closed)(void *worker);
    void (*on_computed)(void *worker);
    void (*turn)(void *worker); /* before every block of the loop, and when streams takes bulk */
    void (*tick)(void *worker);

    /* Stopping, also after a start that failed half-way: what is missing is skipped. */

    void (*stop_compute)(void *worker); /* nothing computes on the pages any more */
    void (*destroy)(void *worker);      /* core and model; the mover is gone */
} worker_role;

/* main() of a worker program: from the arguments to the exit status, which is 0 after SIGTERM or
 * SIGINT, 1 when the worker broke, 2 when it could not start, 3 when the router refused it. Once
 * per process. */
int worker_shell_main(const worker_role *role, void *worker, int argc, char **argv);

/* What a core calls, with the signatures of its table; the context is parts->shell. */
void worker_shell_send(void *shell, proto_lane lane, proto_message *message);
bool worker_shell_can_stream(void *shell);
void worker_shell_open_streams(void *shell);
void worker_shell_hang_up(void *shell, const char *why);
void worker_shell_on_refused(void *shell, const char *text);
void worker_shell_on_broken(void *shell, bt_status status, const char *text);

#endif
