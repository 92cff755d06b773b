/* What the parts of bench_rows share: rows to move, timed parts, sockets that somebody drains.
 *
 * One thread does all the work that is measured. What stands at the other end of a socket (a
 * drain, the workers of rows_worker.c) is a process of its own, so that it runs on another core and
 * its time is not counted. Errors end the program. */
#ifndef BT_TESTS_BENCH_ROWS_BENCH_H
#define BT_TESTS_BENCH_ROWS_BENCH_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"
#include "proto/row_stream.h"

enum {
    BENCH_VOCAB = 151936,
    BENCH_CAP_MIN = 4096, /* the default cap: rows lie so far apart in the sampler's arrays */
    BENCH_WRITE_BYTES = 1 << 20, /* of one write to a raw socket */
};

typedef struct bench_options {
    uint32_t width, batch, steps, rounds;
    uint32_t texts; /* sequences of which text is made in one round */
} bench_options;

/* The rows of one step as the sampler leaves them: arrays [batch][cap]. */
typedef struct bench_rows {
    uint32_t width, batch, cap;
    int32_t *ids;
    float *logprobs;
    size_t record_bytes; /* of one row as a record */
    size_t step_bytes;   /* of all rows of a step */
} bench_rows;

void bench_rows_make(bench_rows *rows, const bench_options *options);
void bench_rows_free(bench_rows *rows);
token_row bench_row(const bench_rows *rows, uint32_t at);

/* The time of one part, measured again and again; the median is what is told. */
typedef struct bench_meter {
    double *wall_ns, *cpu_ns; /* [count] */
    uint32_t count, capacity;
    double wall_start_ns, cpu_start_ns;
    double wall_before_ns, cpu_before_ns; /* of this part, in front of a pause */
} bench_meter;

void bench_begin(bench_meter *meter);
/* What comes until the next begin is not measured, and that one goes on with the same part. */
void bench_pause(bench_meter *meter);
void bench_end(bench_meter *meter);
/* Prints one line: the stage, bytes and medians of one part, `parts` of which are an emission. */
void bench_tell(const char *stage, const bench_options *options, bench_meter *meter, size_t bytes,
                double parts);
void bench_meter_free(bench_meter *meter);

typedef enum bench_socket {
    BENCH_TCP,
    BENCH_UNIX,
} bench_socket;

/* Two connected ends. */
void bench_socket_pair(bench_socket kind, int fds_out[2]);
/* A process that says `greeting` (may be NULL) and then reads until the end of file. Returns our
 * end; *child_out ends once it is closed. */
int bench_drain(bench_socket kind, const char *greeting, pid_t *child_out);
void bench_drain_end(pid_t child);
/* A process that writes zeros for as long as our end, which is returned, is open. */
int bench_source(bench_socket kind, pid_t *child_out);
/* Blocking, in writes of BENCH_WRITE_BYTES. */
void bench_write(int fd, const void *bytes, size_t count);
void bench_die(const char *what, bt_status status);
/* Zeroed; never NULL. */
void *bench_alloc(size_t bytes);

/* The parts; each tells its stages. */
void bench_decode(const bench_options *options, const bench_rows *rows);
void bench_router(const bench_options *options, const bench_rows *rows);

/* rows_worker.c: a prefill and a decode worker at 127.0.0.1:port in a process of their own. Once
 * every one of `batch` requests is ready to run they send a step of rows for each byte that comes
 * on the descriptor, until it is closed. */
pid_t bench_workers_start(uint16_t port, const bench_options *options, const bench_rows *rows,
                          int *go_fd_out);

#endif
