/* Node processes are started by fork and exec, so that none inherits any state of UCX. */
#include "controller.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"

enum { CHILD_FD = 3 };

static const xfer_peer any_peer = {0};

void controller_init(controller *c, const controller_options *options) {
    *c = (controller){.options = *options, .next_incarnation = 1, .next_number = 1};
    c->next_incarnation += (uint64_t)getpid() << 32;
    for (uint32_t i = 0; i < CONTROLLER_NODES_MAX; i++)
        c->nodes[i].socket = -1;
}

void controller_show_log(const controller_node *node) {
    char line[512];
    FILE *log = fopen(node->log, "r");
    if (log == NULL) return;
    while (fgets(line, sizeof line, log) != NULL)
        print_error("| %s", line);
    (void)fclose(log);
}

/* In the child. Only calls that are safe after fork. */
static void become_node(int socket, const char *log, char *const *arguments) {
    const int out = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (out < 0 || dup2(out, STDOUT_FILENO) < 0 || dup2(out, STDERR_FILENO) < 0) _exit(120);
    if (socket == CHILD_FD ? fcntl(socket, F_SETFD, 0) < 0 : dup2(socket, CHILD_FD) < 0) _exit(121);
    execv(arguments[0], arguments);
    _exit(122);
}

static void node_program(char *path, size_t bytes) {
    const ssize_t length = readlink("/proc/self/exe", path, bytes - 1);
    assert_true(length > 0);
    path[length] = '\0';
    char *slash = strrchr(path, '/');
    assert_non_null(slash);
    const size_t left = bytes - (size_t)(slash + 1 - path);
    assert_true((size_t)snprintf(slash + 1, left, "handoff_node") < left);
}

controller_node *controller_start(controller *c, uint32_t index, bool is_prefill,
                                  const char *ports) {
    controller_node *node = &c->nodes[index];
    const controller_options *o = &c->options;
    int sockets[2];
    char program[4096];
    char numbers[6][24];
    assert_int_equal(node->socket, -1);
    *node = (controller_node){.is_prefill = is_prefill};
    node->self = (xfer_peer){.worker_id = index + 1, .incarnation = c->next_incarnation++};
    node_program(program, sizeof program);
    (void)snprintf(node->log, sizeof node->log, "%s/node-%d-%" PRIu64 ".log", o->log_folder,
                   (int)getpid(), node->self.incarnation & 0xffffffff);
    (void)snprintf(numbers[0], sizeof numbers[0], "%" PRIu32, node->self.worker_id);
    (void)snprintf(numbers[1], sizeof numbers[1], "%" PRIu64, node->self.incarnation);
    (void)snprintf(numbers[2], sizeof numbers[2], "%" PRIu32, o->pages);
    (void)snprintf(numbers[3], sizeof numbers[3], "%zu", o->page_bytes);
    (void)snprintf(numbers[4], sizeof numbers[4], "%" PRIu32, o->cap);
    (void)snprintf(numbers[5], sizeof numbers[5], "%d", (int)o->checksum);
    char role[8];
    char tls[64];
    char range[32];
    (void)snprintf(role, sizeof role, "%s", is_prefill ? "prefill" : "decode");
    (void)snprintf(tls, sizeof tls, "%s", o->tls);
    (void)snprintf(range, sizeof range, "%s", ports == NULL ? "any" : ports);
    char *const arguments[] = {program,    role,       numbers[0], numbers[1], tls, range,
                               numbers[2], numbers[3], numbers[4], numbers[5], NULL};
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
    node->process = fork();
    assert_true(node->process >= 0);
    if (node->process == 0) become_node(sockets[1], node->log, arguments);
    (void)close(sockets[1]);
    node->socket = sockets[0];
    (void)controller_wait(c, node, NOTE_STARTED, 0, any_peer);
    return node;
}

void controller_tell(controller *c, controller_node *to, const note *n) {
    (void)c;
    assert_int_equal(send(to->socket, n, sizeof *n, MSG_NOSIGNAL), sizeof *n);
}

static void store(controller *c, controller_node *from, const note *n) {
    if (n->kind == NOTE_CHUNKS) {
        from->chunks = n->chunks;
        return;
    }
    if (n->kind == NOTE_STARTED) {
        from->address_bytes = n->address_bytes;
        memcpy(from->address, n->address, n->address_bytes);
    }
    assert_true(c->note_count < CONTROLLER_NOTES_MAX);
    c->notes[c->note_count++] = (controller_note){.from = from,
                                                  .kind = n->kind,
                                                  .status = n->status,
                                                  .peer = n->peer,
                                                  .number = n->data.number};
    memcpy(c->notes[c->note_count - 1].slots, n->slots, sizeof n->slots);
}

static void read_from(controller *c, controller_node *node) {
    static note n;
    const ssize_t got = recv(node->socket, &n, sizeof n, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got != (ssize_t)sizeof n) {
        int status = 0;
        (void)waitpid(node->process, &status, 0);
        node->process = 0;
        (void)close(node->socket);
        node->socket = -1;
        controller_show_log(node);
        fail_msg("worker %u ended with wait status %d", node->self.worker_id, status);
    }
    store(c, node, &n);
}

bool controller_listen(controller *c, int wait_ms) {
    struct pollfd fds[CONTROLLER_NODES_MAX];
    for (uint32_t i = 0; i < CONTROLLER_NODES_MAX; i++)
        fds[i] = (struct pollfd){.fd = c->nodes[i].socket, .events = POLLIN};
    const int count = poll(fds, CONTROLLER_NODES_MAX, wait_ms);
    assert_true(count >= 0 || errno == EINTR);
    for (uint32_t i = 0; i < CONTROLLER_NODES_MAX && count > 0; i++)
        if (fds[i].fd >= 0 && fds[i].revents != 0) read_from(c, &c->nodes[i]);
    return count > 0;
}

bool controller_take(controller *c, const controller_node *from, note_kind kind, uint64_t number,
                     xfer_peer peer, controller_note *out) {
    for (uint32_t i = 0; i < c->note_count; i++) {
        const controller_note n = c->notes[i];
        if (n.from != from || n.kind != kind) continue;
        if (number != 0 && n.number != number) continue;
        if (peer.incarnation != 0 && n.peer.incarnation != peer.incarnation) continue;
        memmove(&c->notes[i], &c->notes[i + 1], sizeof n * (c->note_count - i - 1));
        c->note_count--;
        *out = n;
        return true;
    }
    return false;
}

controller_note controller_wait(controller *c, const controller_node *from, note_kind kind,
                                uint64_t number, xfer_peer peer) {
    const bt_clock clock = bt_clock_system();
    const uint64_t limit = bt_clock_now_us(&clock) + UINT64_C(1000) * CONTROLLER_WAIT_MS;
    controller_note found = {0};
    while (!controller_take(c, from, kind, number, peer, &found)) {
        (void)controller_listen(c, 100);
        if (bt_clock_now_us(&clock) < limit) continue;
        controller_show_log(from);
        fail_msg("worker %u did not say note %d (number %" PRIu64 ") in time", from->self.worker_id,
                 (int)kind, number);
    }
    return found;
}

static void connect_to(controller *c, controller_node *node, const controller_node *peer) {
    static note n;
    n = (note){.kind = NOTE_CONNECT, .peer = peer->self, .address_bytes = peer->address_bytes};
    memcpy(n.address, peer->address, peer->address_bytes);
    controller_tell(c, node, &n);
}

void controller_pair(controller *c, controller_node *prefill, controller_node *decode) {
    connect_to(c, prefill, decode);
    connect_to(c, decode, prefill);
    (void)controller_wait(c, prefill, NOTE_PAIRED, 0, decode->self);
    (void)controller_wait(c, decode, NOTE_PAIRED, 0, prefill->self);
}

uint64_t controller_begin(controller *c, controller_node *prefill, controller_node *decode,
                          const sample *shape, uint32_t deadline_ms) {
    static note n;
    n = (note){.kind = NOTE_EXPECT,
               .peer = prefill->self,
               .data = *shape,
               .deadline_ms = deadline_ms,
               .run_pages = 16};
    n.data.number = c->next_number++;
    controller_tell(c, decode, &n);
    const controller_note expected =
        controller_wait(c, decode, NOTE_EXPECTED, n.data.number, any_peer);
    if (expected.status == BT_ERR_REQUEST_FULL) return 0;
    assert_int_equal(expected.status, BT_OK);
    n.kind = NOTE_SEND;
    n.peer = decode->self;
    memcpy(n.slots, expected.slots, sizeof n.slots);
    controller_tell(c, prefill, &n);
    return n.data.number;
}

static void forget(controller *c, controller_node *node) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < c->note_count; i++)
        if (c->notes[i].from != node) c->notes[kept++] = c->notes[i];
    c->note_count = kept;
    (void)close(node->socket);
    node->socket = -1;
    node->process = 0;
}

void controller_kill(controller *c, controller_node *node) {
    assert_true(node->process > 0);
    assert_int_equal(kill(node->process, SIGKILL), 0);
    assert_int_equal(waitpid(node->process, NULL, 0), node->process);
    (void)unlink(node->log);
    forget(c, node);
}

void controller_finish(controller *c, controller_node *node) {
    static const note finish = {.kind = NOTE_FINISH};
    int status = 0;
    controller_tell(c, node, &finish);
    assert_int_equal(waitpid(node->process, &status, 0), node->process);
    if (status != 0) {
        controller_show_log(node);
        forget(c, node);
        fail_msg("worker %u ended with wait status %d", node->self.worker_id, status);
    }
    (void)unlink(node->log);
    forget(c, node);
}

void controller_fini(controller *c) {
    for (uint32_t i = 0; i < CONTROLLER_NODES_MAX; i++)
        if (c->nodes[i].process > 0) controller_kill(c, &c->nodes[i]);
}
