/* One worker's data plane as a process of its own: an end of the handoff over UCX, told what to do
 * by a controller over the socket at file descriptor 3.
 *
 *   handoff_node ROLE WORKER INCARNATION TLS PORTS PAGES PAGE_BYTES CAP CHECKSUM
 *
 * ROLE is prefill or decode, PORTS a UCX port range or "any". It runs as one cmocka test, so that a
 * failed assertion shows in its output and its exit status. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <cmocka.h>

#include "ends.h"
#include "note.h"
#include "pd_buffers/xfer_ucx.h"

enum { CONTROL_FD = 3, TICK_MS = 50, PAGE_TOKENS = 32, LAYERS = 8, ROWS = 16, ARGUMENTS = 10 };

typedef struct node {
    end *e;
    bool is_finished;
    /* What the controller was told already. */
    bool is_told[ENDS_ATTEMPTS_MAX];
    uint64_t told_numbers[ENDS_ATTEMPTS_MAX];
    end_peer told_peers[ENDS_PEERS_MAX];
    uint64_t told_chunks;
} node;

static char **arguments;

static void tell(const note *n) {
    assert_int_equal(send(CONTROL_FD, n, sizeof *n, 0), sizeof *n);
}

static void tell_peer(note_kind kind, xfer_peer peer) {
    const note n = {.kind = kind, .peer = peer};
    tell(&n);
}

static void report_attempts(node *self) {
    for (uint32_t i = 0; i < ENDS_ATTEMPTS_MAX; i++) {
        const end_attempt *a = &self->e->attempts[i];
        if (self->told_numbers[i] != a->id.counter) {
            self->told_numbers[i] = a->id.counter;
            self->is_told[i] = false;
        }
        if (a->id.counter == 0 || self->is_told[i]) continue;
        if (a->ready + a->acked + a->quiet == 0) continue;
        self->is_told[i] = true;
        if (a->ready != 0) assert_true(a->is_intact);
        note n = {.kind = NOTE_DONE, .data = a->data, .status = a->status};
        if (a->quiet != 0 && a->failed == 0) n.status = BT_ERR_REQUEST_CANCELLED;
        tell(&n);
    }
}

static void report_peers(node *self) {
    for (uint32_t i = 0; i < ENDS_PEERS_MAX; i++) {
        const end_peer *now = &self->e->peers[i];
        end_peer *told = &self->told_peers[i];
        if (memcmp(&now->id, &told->id, sizeof told->id) != 0) *told = (end_peer){.id = now->id};
        if (now->hellos > told->hellos) tell_peer(NOTE_PAIRED, now->id);
        if (now->failed > told->failed) tell_peer(NOTE_PEER_FAILED, now->id);
        if (now->closed > told->closed) tell_peer(NOTE_PEER_CLOSED, now->id);
        *told = *now;
    }
}

static void report(node *self) {
    report_attempts(self);
    report_peers(self);
    if (self->e->receiver == NULL) return;
    const uint64_t chunks = handoff_receiver_get_counts(self->e->receiver).chunks;
    if (chunks == self->told_chunks) return;
    self->told_chunks = chunks;
    const note n = {.kind = NOTE_CHUNKS, .chunks = chunks};
    tell(&n);
}

static void expect(node *self, const note *n, uint64_t deadline_us) {
    note reply = {.kind = NOTE_EXPECTED, .data = n->data};
    reply.status = end_expect(self->e, &n->data, n->peer, deadline_us);
    if (reply.status == BT_OK) {
        const end_attempt *a = end_find(self->e, n->data.number);
        memcpy(reply.slots, a->slots, sizeof reply.slots);
    }
    tell(&reply);
}

static void obey(node *self, const note *n) {
    const uint64_t now = bt_clock_now_us(&self->e->options.clock);
    const uint64_t deadline_us = now + (uint64_t)n->deadline_ms * 1000;
    switch (n->kind) {
    case NOTE_CONNECT:
        assert_int_equal(end_connect(self->e, n->peer, n->address, n->address_bytes), BT_OK);
        break;
    case NOTE_EXPECT: expect(self, n, deadline_us); break;
    case NOTE_SEND: {
        const bt_status status =
            end_send(self->e, &n->data, n->peer, n->slots, deadline_us, n->run_pages);
        if (status == BT_OK) break;
        const note reply = {.kind = NOTE_DONE, .data = n->data, .status = status};
        tell(&reply);
        break;
    }
    case NOTE_CANCEL: end_cancel(self->e, n->data.number); break;
    case NOTE_FINISH: self->is_finished = true; break;
    case NOTE_STARTED:
    case NOTE_PAIRED:
    case NOTE_EXPECTED:
    case NOTE_CHUNKS:
    case NOTE_DONE:
    case NOTE_PEER_FAILED:
    case NOTE_PEER_CLOSED: fail_msg("a note that controllers do not send");
    }
}

/* true: a note was obeyed. */
static bool read_note(node *self) {
    static note n;
    const ssize_t got = recv(CONTROL_FD, &n, sizeof n, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got == 0) exit(3); /* the controller is gone */
    assert_int_equal(got, sizeof n);
    obey(self, &n);
    return true;
}

static void tick(const end *e) {
    if (e->sender != NULL) handoff_sender_tick(e->sender);
    if (e->receiver != NULL) handoff_receiver_tick(e->receiver);
}

static void serve(node *self) {
    xfer *mover = self->e->options.mover;
    struct pollfd fds[2] = {{.fd = mover->ops->get_event_fd(mover), .events = POLLIN},
                            {.fd = CONTROL_FD, .events = POLLIN}};
    assert_true(fds[0].fd >= 0);
    while (!self->is_finished) {
        const bool is_busy = mover->ops->progress(mover);
        end_loop(self->e);
        report(self);
        if (read_note(self) || is_busy || !mover->ops->arm(mover)) continue;
        const int count = poll(fds, 2, TICK_MS);
        assert_true(count >= 0 || errno == EINTR);
        tick(self->e);
    }
}

static uint64_t number_of(int index) {
    return strtoull(arguments[index], NULL, 10);
}

static void run(void **state) {
    (void)state;
    node self = {0};
    bt_error error;
    const bool is_prefill = strcmp(arguments[1], "prefill") == 0;
    const xfer_ucx_options ucx = {
        .tls = arguments[4],
        .port_range = strcmp(arguments[5], "any") == 0 ? NULL : arguments[5],
    };
    end_options options = {
        .incarnation = number_of(3),
        .page_count = (uint32_t)number_of(6),
        .page_bytes = number_of(7),
        .layers = LAYERS,
        .page_tokens = PAGE_TOKENS,
        .cap = (uint32_t)number_of(8),
        .rows = ROWS,
        .checksum = (record_checksum)number_of(9),
        .clock = bt_clock_system(),
    };
    const bt_status status = xfer_ucx_create(&ucx, &options.mover, &error);
    if (status != BT_OK) fail_msg("%s", error.text);
    options.mover->self =
        (xfer_peer){.worker_id = (uint32_t)number_of(2), .incarnation = options.incarnation};
    self.e = is_prefill ? end_create_prefill(&options) : end_create_decode(&options);

    static note started = {.kind = NOTE_STARTED};
    const uint8_t *address = NULL;
    size_t bytes = 0;
    assert_int_equal(options.mover->ops->get_address(options.mover, &address, &bytes), BT_OK);
    assert_true(bytes <= sizeof started.address);
    memcpy(started.address, address, bytes);
    started.address_bytes = (uint32_t)bytes;
    started.peer = options.mover->self;
    tell(&started);

    serve(&self);
    end_assert_clean(self.e);
    end_destroy(self.e);
}

int main(int argc, char **argv) {
    if (argc != ARGUMENTS) {
        (void)fprintf(stderr, "handoff_node is started by tests\n");
        return 2;
    }
    arguments = argv;
    const struct CMUnitTest tests[] = {cmocka_unit_test(run)};
    return cmocka_run_group_tests_name("node", tests, NULL, NULL);
}
