#include "tests/bench/rows_bench.h"

#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"

void bench_die(const char *what, bt_status status) {
    (void)fprintf(stderr, "bench_rows: %s: %s\n", what, bt_status_string(status));
    exit(1);
}

void *bench_alloc(size_t bytes) {
    void *block = bt_calloc(1, bytes);
    if (block == NULL) bench_die("memory", BT_ERR_WORKER_MEMORY);
    return block;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static uint32_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

void bench_rows_make(bench_rows *rows, const bench_options *options) {
    uint64_t random = 1;
    const uint32_t cap = options->width > BENCH_CAP_MIN ? options->width : BENCH_CAP_MIN;
    *rows = (bench_rows){.width = options->width, .batch = options->batch, .cap = cap};
    rows->ids = bench_alloc((size_t)options->batch * cap * sizeof *rows->ids);
    rows->logprobs = bench_alloc((size_t)options->batch * cap * sizeof *rows->logprobs);
    for (uint32_t b = 0; b < options->batch; b++) {
        for (uint32_t i = 0; i < options->width; i++) {
            rows->ids[(size_t)b * cap + i] = (int32_t)(next_random(&random) % BENCH_VOCAB);
            rows->logprobs[(size_t)b * cap + i] =
                logf((float)((next_random(&random) & 0xffffff) + 1) * 0x1p-24F) - 6.0f;
        }
    }
    rows->record_bytes = row_record_bytes(
        (row_widths){.mask_mode = ROW_MASK_SUPPORT, .support_count = options->width});
    rows->step_bytes = rows->record_bytes * options->batch;
}

void bench_rows_free(bench_rows *rows) {
    bt_free(rows->ids);
    bt_free(rows->logprobs);
}

token_row bench_row(const bench_rows *rows, uint32_t at) {
    const int32_t *ids = rows->ids + (size_t)at * rows->cap;
    const float *logprobs = rows->logprobs + (size_t)at * rows->cap;
    return (token_row){.token = ids[0],
                       .mask_mode = ROW_MASK_SUPPORT,
                       .selected_logprob = logprobs[0],
                       .support_count = rows->width,
                       .support_size = rows->width,
                       .support_ids = ids,
                       .support_logprobs = logprobs};
}

/* ---- time ------------------------------------------------------------------------------------ */

static double now_ns(clockid_t clock) {
    struct timespec now;
    (void)clock_gettime(clock, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

void bench_begin(bench_meter *meter) {
    meter->cpu_start_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);
    meter->wall_start_ns = now_ns(CLOCK_MONOTONIC);
}

static double *grow(double *values, uint32_t capacity) {
    double *grown = bt_realloc(values, capacity * sizeof *grown);
    if (grown == NULL) bench_die("memory", BT_ERR_WORKER_MEMORY);
    return grown;
}

void bench_pause(bench_meter *meter) {
    meter->wall_before_ns += now_ns(CLOCK_MONOTONIC) - meter->wall_start_ns;
    meter->cpu_before_ns += now_ns(CLOCK_THREAD_CPUTIME_ID) - meter->cpu_start_ns;
}

void bench_end(bench_meter *meter) {
    bench_pause(meter);
    const double wall_ns = meter->wall_before_ns;
    const double cpu_ns = meter->cpu_before_ns;
    meter->wall_before_ns = meter->cpu_before_ns = 0.0;
    if (meter->count == meter->capacity) {
        meter->capacity = meter->capacity == 0 ? 64 : 2 * meter->capacity;
        meter->wall_ns = grow(meter->wall_ns, meter->capacity);
        meter->cpu_ns = grow(meter->cpu_ns, meter->capacity);
    }
    meter->wall_ns[meter->count] = wall_ns;
    meter->cpu_ns[meter->count++] = cpu_ns;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, uint32_t count) {
    qsort(values, count, sizeof *values, compare);
    return count % 2 != 0 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

void bench_tell(const char *stage, const bench_options *options, bench_meter *meter, size_t bytes,
                double parts) {
    if (meter->count == 0) bench_die(stage, BT_ERR_WORKER_INTERNAL);
    printf("%s\t%u\t%.0f\t%.0f\t%.0f\n", stage, options->width, (double)bytes * parts,
           median(meter->wall_ns, meter->count) * parts,
           median(meter->cpu_ns, meter->count) * parts);
    (void)fflush(stdout);
}

void bench_meter_free(bench_meter *meter) {
    bt_free(meter->wall_ns);
    bt_free(meter->cpu_ns);
    *meter = (bench_meter){0};
}

/* ---- sockets --------------------------------------------------------------------------------- */

static void need(bool is_done, const char *what) {
    if (is_done) return;
    perror(what);
    exit(1);
}

static void tcp_pair(int fds_out[2]) {
    const int one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t bytes = sizeof address;
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    need(bind(listener, (struct sockaddr *)&address, bytes) == 0, "bind");
    need(listen(listener, 1) == 0, "listen");
    need(getsockname(listener, (struct sockaddr *)&address, &bytes) == 0, "getsockname");
    fds_out[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    need(connect(fds_out[0], (struct sockaddr *)&address, bytes) == 0, "connect");
    fds_out[1] = accept(listener, NULL, NULL);
    need(fds_out[1] >= 0, "accept");
    (void)setsockopt(fds_out[0], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)close(listener);
}

void bench_socket_pair(bench_socket kind, int fds_out[2]) {
    if (kind == BENCH_TCP) {
        tcp_pair(fds_out);
        return;
    }
    need(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds_out) == 0, "socketpair");
}

static void drain(int fd, const char *greeting) {
    static uint8_t buffer[BENCH_WRITE_BYTES];
    if (greeting != NULL) bench_write(fd, greeting, strlen(greeting));
    while (read(fd, buffer, sizeof buffer) > 0) {
    }
    _exit(0);
}

static void source(int fd, const char *unused) {
    static const uint8_t zeros[BENCH_WRITE_BYTES];
    (void)unused;
    while (write(fd, zeros, sizeof zeros) > 0) {
    }
    _exit(0);
}

/* Runs `work` at the other end of our socket. */
static int spawn(bench_socket kind, void (*work)(int fd, const char *text), const char *text,
                 pid_t *child_out) {
    int fds[2];
    bench_socket_pair(kind, fds);
    *child_out = fork();
    need(*child_out >= 0, "fork");
    if (*child_out == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)close(fds[0]);
        work(fds[1], text);
    }
    (void)close(fds[1]);
    return fds[0];
}

int bench_drain(bench_socket kind, const char *greeting, pid_t *child_out) {
    return spawn(kind, drain, greeting, child_out);
}

int bench_source(bench_socket kind, pid_t *child_out) {
    return spawn(kind, source, NULL, child_out);
}

void bench_drain_end(pid_t child) {
    need(waitpid(child, NULL, 0) == child, "waitpid");
}

void bench_write(int fd, const void *bytes, size_t count) {
    const uint8_t *at = bytes;
    while (count > 0) {
        const size_t portion = count < BENCH_WRITE_BYTES ? count : BENCH_WRITE_BYTES;
        const ssize_t written = write(fd, at, portion);
        need(written > 0, "write");
        at += written;
        count -= (size_t)written;
    }
}
