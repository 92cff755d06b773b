/* What three processes of this machine could carry: a producer that has so many bytes ready at
 * every step, a relay that passes them on, and a client that throws them away, over loopback TCP
 * with one socket each. Nothing is made, looked at or copied besides, so it is the ceiling of any
 * decode - router - client pipeline with the same bytes.
 *
 *   socket_relay --step-us N --frame-bytes N --reply-bytes N [--warmup-ms N] [--window-ms N]
 *
 * At the end of each step the producer has --frame-bytes to write; meanwhile the next step runs.
 * When writing takes longer than a step, the step waits. For what it read the relay writes in the
 * ratio of
 * --reply-bytes to --frame-bytes.
 *
 * Standard output is one JSON line: steps_per_second, bytes_per_second (to the client), and the CPU
 * seconds of producer, relay and client in the window. */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/version.h"

enum { BLOCK_BYTES = 256 * 1024, PROCESSES = 2 };

typedef struct settings {
    uint64_t step_us, frame_bytes, reply_bytes;
    uint32_t warmup_ms, window_ms;
} settings;

static settings set;
static char *block; /* [BLOCK_BYTES] */

#define SETTING(field) .offset = offsetof(settings, field)
static const bt_option rows[] = {
    {"step-us", BT_OPTION_U64, "14000", .min = 1, .max = 1000 * 1000, .help = "time of a step",
     SETTING(step_us)},
    {"frame-bytes", BT_OPTION_BYTES, NULL, .min = 1, .max = 1ull << 40, .flags = BT_OPTION_REQUIRED,
     .help = "from the producer to the relay, each step", SETTING(frame_bytes)},
    {"reply-bytes", BT_OPTION_BYTES, NULL, .min = 1, .max = 1ull << 40, .flags = BT_OPTION_REQUIRED,
     .help = "from the relay to the client, each step", SETTING(reply_bytes)},
    {"warmup-ms", BT_OPTION_U32, "300", .help = "not counted", SETTING(warmup_ms)},
    {"window-ms", BT_OPTION_U32, "1000", .min = 1, .max = 600 * 1000, .help = "counted",
     SETTING(window_ms)},
};
#undef SETTING

static const bt_option_table table = {.program = "socket_relay",
                                      .version = bt_version,
                                      .summary = "Carries bytes over three bare processes.",
                                      .options = rows,
                                      .count = BT_ARRAY_COUNT(rows)};

static void die(const char *what) {
    fprintf(stderr, "socket_relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_us(void) {
    const bt_clock clock = bt_clock_system();
    return bt_clock_now_us(&clock);
}

/* ---- sockets --------------------------------------------------------------------------------- */

static int listen_anywhere(struct sockaddr_in *at) {
    socklen_t bytes = sizeof *at;
    *at = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)at, sizeof *at) != 0 || listen(fd, 1) != 0 ||
        getsockname(fd, (struct sockaddr *)at, &bytes) != 0)
        die("listen");
    return fd;
}

static int connect_to(const struct sockaddr_in *at) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)at, sizeof *at) != 0) die("connect");
    return fd;
}

static void write_bytes(int fd, uint64_t bytes) {
    while (bytes > 0) {
        const size_t some = bytes < BLOCK_BYTES ? (size_t)bytes : BLOCK_BYTES;
        const ssize_t sent = send(fd, block, some, MSG_NOSIGNAL);
        if (sent < 0) exit(0); /* the other side ended: so does this one */
        bytes -= (uint64_t)sent;
    }
}

static size_t read_some(int fd) {
    const ssize_t bytes = recv(fd, block, BLOCK_BYTES, 0);
    if (bytes <= 0) exit(0);
    return (size_t)bytes;
}

/* ---- processes ------------------------------------------------------------------------------- */

static void sleep_until(uint64_t due_us) {
    const struct timespec due = {.tv_sec = (time_t)(due_us / 1000000),
                                 .tv_nsec = (long)(due_us % 1000000 * 1000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {
    }
}

static void produce(int to) {
    uint64_t due_us = now_us() + set.step_us;
    for (;;) {
        const uint64_t now = now_us();
        if (now > due_us) due_us = now;
        sleep_until(due_us);
        due_us += set.step_us;
        write_bytes(to, set.frame_bytes);
    }
}

static void relay(int from, int to) {
    double owed = 0.0;
    const double ratio = (double)set.reply_bytes / (double)set.frame_bytes;
    for (;;) {
        owed += (double)read_some(from) * ratio;
        const uint64_t bytes = (uint64_t)owed;
        owed -= (double)bytes;
        write_bytes(to, bytes);
    }
}

static uint64_t discard_until(int from, uint64_t end_us) {
    uint64_t bytes = 0;
    while (now_us() < end_us)
        bytes += read_some(from);
    return bytes;
}

static double cpu_of(const struct rusage *used) {
    return (double)(used->ru_utime.tv_sec + used->ru_stime.tv_sec) +
           (double)(used->ru_utime.tv_usec + used->ru_stime.tv_usec) * 1e-6;
}

static double own_cpu(void) {
    struct rusage used;
    BT_ASSERT(getrusage(RUSAGE_SELF, &used) == 0);
    return cpu_of(&used);
}

/* CPU time of another process so far, by its own clock. */
static double cpu_seconds(pid_t pid) {
    clockid_t clock;
    struct timespec t;
    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &t) != 0) die("CPU clock");
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void measure(int from, const pid_t *pids) {
    double cpu[PROCESSES + 1];
    (void)discard_until(from, now_us() + set.warmup_ms * UINT64_C(1000));
    for (int i = 0; i < PROCESSES; i++)
        cpu[i] = cpu_seconds(pids[i]);
    cpu[PROCESSES] = own_cpu();
    const uint64_t start_us = now_us();
    const uint64_t bytes = discard_until(from, start_us + set.window_ms * UINT64_C(1000));
    const double seconds = (double)(now_us() - start_us) * 1e-6;
    for (int i = 0; i < PROCESSES; i++)
        cpu[i] = cpu_seconds(pids[i]) - cpu[i];
    cpu[PROCESSES] = own_cpu() - cpu[PROCESSES];
    printf("{\"steps_per_second\":%.3f,\"bytes_per_second\":%.0f,\"seconds\":%.6f,"
           "\"producer_cpu\":%.6f,\"relay_cpu\":%.6f,\"client_cpu\":%.6f}\n",
           (double)bytes / (double)set.reply_bytes / seconds, (double)bytes / seconds, seconds,
           cpu[0], cpu[1], cpu[2]);
}

int main(int argc, char **argv) {
    bt_options *options = NULL;
    int status = 0;
    if (!bt_options_start(&table, argc, argv, &set, &options, &status)) return status;
    block = bt_calloc(1, BLOCK_BYTES);
    if (block == NULL) die("memory");
    struct sockaddr_in relay_at, client_at;
    const int for_relay = listen_anywhere(&relay_at), for_client = listen_anywhere(&client_at);
    pid_t pids[PROCESSES];
    for (int i = 0; i < PROCESSES; i++) {
        pids[i] = fork();
        if (pids[i] < 0) die("fork");
        if (pids[i] > 0) continue;
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (i == 0) produce(connect_to(&relay_at));
        relay(accept(for_relay, NULL, NULL), connect_to(&client_at));
    }
    measure(accept(for_client, NULL, NULL), pids);
    for (int i = 0; i < PROCESSES; i++) {
        (void)kill(pids[i], SIGKILL);
        (void)waitpid(pids[i], NULL, 0);
    }
    bt_free(block);
    bt_options_destroy(options);
    return 0;
}
