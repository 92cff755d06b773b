#include "tests/unit/router/router_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <arpa/inet.h>
#include <cmocka.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/support/test_bytes.h"
#include "tests/support/tiny_model.h"

enum { WAIT_MS = 20000, ANSWER_MAX = 1 << 22 };

/* ---- the router ------------------------------------------------------------------------------ */

static void load_tokenizer(router_fixture *f) {
    const tiny_model m = {.family = MODEL_FAMILY_QWEN3, .seed = 1};
    bt_error error;
    test_folder folder = test_folder_make();
    assert_int_equal(tiny_model_write_hf(&m, folder.path), BT_OK);
    if (tokenizer_load(folder.path, &f->tokenizer, &error) != BT_OK) fail_msg("%s", error.text);
    test_folder_remove(&folder);
}

static void on_stop(void *context) {
    bt_loop_stop(((router_fixture *)context)->loop);
}

static void *run_control(void *context) {
    router_fixture *f = context;
    assert_int_equal(bt_loop_run(f->loop, control_step, f->control), BT_OK);
    return NULL;
}

static void create_control(router_fixture *f) {
    control_options options = {.dispatch = {.incarnation = 5,
                                            .host = "router",
                                            .requests_max = REQUESTS_MAX,
                                            .vocab_min = tokenizer_vocab_count(f->tokenizer),
                                            .seed = 1},
                               .address = {.host = "127.0.0.1"},
                               .settings = &f->settings,
                               .threads = THREADS,
                               .flows_per_thread_max = REQUESTS_MAX + 8,
                               .in_flight_bytes_max = f->in_flight_bytes};
    bt_error error;
    options.dispatch.record.sampling_mask_max_tokens = f->settings.mask_max_tokens;
    options.dispatch.record.kv_checksum = RECORD_CHECKSUM_FULL + 1;
    options.dispatch.record.row_format = ROW_FORMAT_VERSION;
    if (control_create(&options, f->loop, &f->control, &error) != BT_OK) fail_msg("%s", error.text);
}

static void create_front(router_fixture *f) {
    const front_options options = {.settings = &f->settings,
                                   .control = f->control,
                                   .intake = f->intake,
                                   .intake_threads = THREADS,
                                   .threads = THREADS,
                                   .flows_per_thread_max = REQUESTS_MAX + 8,
                                   .address = {.host = "127.0.0.1"},
                                   .http = {.connections_max = 1000,
                                            .head_bytes_max = 8192,
                                            .body_bytes_max = 8 << 20,
                                            .body_budget = &f->bodies,
                                            .head_timeout_ms = 60000,
                                            .body_timeout_ms = 60000,
                                            .idle_timeout_ms = 60000,
                                            .write_timeout_ms = 60000},
                                   .limits = &f->limits};
    bt_error error;
    if (front_create(&options, &f->front, &error) != BT_OK) fail_msg("%s", error.text);
    assert_int_equal(front_start(f->front), BT_OK);
}

static int set_up_with(void **state, uint64_t in_flight_bytes, uint64_t body_bytes) {
    router_fixture *f = calloc(1, sizeof(*f));
    f->in_flight_bytes = in_flight_bytes;
    f->body_bytes = body_bytes;
    load_tokenizer(f);
    f->settings = (api_settings){.tokenizer = f->tokenizer,
                                 .mask_max_tokens = 64,
                                 .stream_interval = 1,
                                 .batch_max = REQUESTS_MAX,
                                 .model_name = "script",
                                 .model_path = "/script"};
    budget_init(&f->limits.memory, 64 << 20);
    budget_init(&f->limits.spill, 64 << 20);
    f->limits.spill_path = "/tmp";
    budget_init(&f->bodies, f->body_bytes);
    f->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    assert_int_equal(bt_loop_watch(f->loop, f->stop_fd, on_stop, f, &f->stop_source), BT_OK);
    create_control(f);
    const intake_options options = {.settings = &f->settings,
                                    .control = f->control,
                                    .threads = THREADS,
                                    .http_threads = THREADS,
                                    .depth = REQUESTS_MAX};
    assert_int_equal(intake_create(&options, &f->intake), BT_OK);
    assert_int_equal(intake_start(f->intake), BT_OK);
    create_front(f);
    assert_int_equal(pthread_create(&f->control_thread, NULL, run_control, f), 0);
    *state = f;
    return 0;
}

int fixture_set_up(void **state) {
    return set_up_with(state, 64 << 20, 64 << 20);
}

/* A few rows fit between the threads. */
int fixture_set_up_with_little_room(void **state) {
    return set_up_with(state, 1024, 64 << 20);
}

/* No row fits between the threads. */
int fixture_set_up_without_room(void **state) {
    return set_up_with(state, 1, 64 << 20);
}

/* A few bodies fit, and their prompts do not. */
int fixture_set_up_with_little_memory(void **state) {
    return set_up_with(state, 64 << 20, 4000);
}

int fixture_tear_down(void **state) {
    router_fixture *f = *state;
    front_stop(f->front);
    intake_stop(f->intake);
    assert_int_equal(eventfd_write(f->stop_fd, 1), 0);
    pthread_join(f->control_thread, NULL);
    if (f->workers != NULL) scripted_workers_stop(f->workers);
    control_destroy(f->control);
    intake_destroy(f->intake);
    front_destroy(f->front);
    bt_loop_source_free(f->stop_source);
    bt_loop_destroy(f->loop);
    close(f->stop_fd);
    tokenizer_destroy(f->tokenizer);
    assert_int_equal(budget_used(&f->bodies), 0);
    assert_int_equal(budget_used(&f->limits.memory), 0);
    assert_int_equal(budget_used(&f->limits.spill), 0);
    free(f);
    return 0;
}

/* ---- a client -------------------------------------------------------------------------------- */

int client_dial(const router_fixture *f) {
    const struct sockaddr_in address = {.sin_family = AF_INET,
                                        .sin_port = htons(front_port(f->front)),
                                        .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

void client_put(int fd, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t now = send(fd, bytes, count, MSG_NOSIGNAL);
        assert_true(now > 0);
        bytes += now;
        count -= (size_t)now;
    }
}

void client_put_post(int fd, const char *path, const char *body) {
    char head[256];
    int bytes = snprintf(head, sizeof(head),
                         "POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: "
                         "%zu\r\n\r\n",
                         path, strlen(body));
    client_put(fd, head, (size_t)bytes);
    client_put(fd, body, strlen(body));
}

char *client_ask(const router_fixture *f, const char *method, const char *path,
                 const char *fields) {
    char head[512];
    int fd = client_dial(f);
    int bytes =
        snprintf(head, sizeof(head), "%s %s HTTP/1.1\r\nHost: a\r\n%sConnection: close\r\n\r\n",
                 method, path, fields);
    client_put(fd, head, (size_t)bytes);
    char *answer = client_take(fd, NULL);
    close(fd);
    return answer;
}

/* Everything until the server closes, or until `until` came. Returns owned. */
char *client_take(int fd, const char *until) {
    char *answer = calloc(1, ANSWER_MAX);
    size_t used = 0;
    for (;;) {
        struct pollfd entry = {.fd = fd, .events = POLLIN};
        if (poll(&entry, 1, WAIT_MS) != 1) fail_msg("no answer in time: %s", answer);
        ssize_t now = recv(fd, answer + used, ANSWER_MAX - 1 - used, 0);
        if (now <= 0) return answer;
        used += (size_t)now;
        if (until != NULL && strstr(answer, until) != NULL) return answer;
    }
}

char *client_post(const router_fixture *f, const char *path, const char *body) {
    int fd = client_dial(f);
    client_put_post(fd, path, body);
    char *answer = client_take(fd, NULL);
    close(fd);
    return answer;
}

char *client_get(const router_fixture *f, const char *path) {
    return client_ask(f, "GET", path, "");
}

void answer_has(char *answer, const char *needle) {
    if (strstr(answer, needle) == NULL) fail_msg("'%s' is not in '%.3000s'", needle, answer);
}

void answer_expect(char *answer, const char *status, const char *needle) {
    answer_has(answer, status);
    answer_has(answer, needle);
    free(answer);
}

/* Turns of at most 10 ms until the condition holds. */
void fixture_wait_for(bool (*condition)(router_fixture *f, uint64_t value), router_fixture *f,
                      uint64_t value) {
    for (int i = 0; i < WAIT_MS / 10; i++) {
        if (condition(f, value)) return;
        (void)poll(NULL, 0, 10);
    }
    fail_msg("a condition did not come true");
}

static bool is_ready(router_fixture *f, uint64_t value) {
    (void)value;
    return control_is_ready(f->control);
}

bool fixture_has_cancelled(router_fixture *f, uint64_t value) {
    return scripted_workers_counts(f->workers).cancelled == value;
}

bool fixture_has_open(router_fixture *f, uint64_t value) {
    return scripted_workers_counts(f->workers).open == value;
}

void fixture_join_workers(router_fixture *f) {
    f->workers = scripted_workers_start(control_port(f->control), 0);
    fixture_wait_for(is_ready, f, 0);
}
