/* The router's threads together, as in the program: HTTP clients on one side, scripted workers on
 * the other, real sockets and real rings between them. */
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
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "router/front.h"
#include "tests/support/test_bytes.h"
#include "tests/support/tiny_model.h"
#include "tests/unit/router/scripted_workers.h"

enum { THREADS = 2, WAIT_MS = 20000, ANSWER_MAX = 1 << 22, REQUESTS_MAX = 64 };

typedef struct fixture {
    tokenizer *tokenizer;
    api_settings settings;
    reply_limits limits;
    budget bodies;
    bt_loop *loop;
    bt_loop_source *stop_source;
    int stop_fd;
    control *control;
    intake *intake;
    front *front;
    pthread_t control_thread;
    scripted_workers *workers;
    uint64_t in_flight_bytes; /* of rows between the threads */
} fixture;

/* ---- the router ------------------------------------------------------------------------------ */

static void load_tokenizer(fixture *f) {
    const tiny_model m = {.family = MODEL_FAMILY_QWEN3, .seed = 1};
    bt_error error;
    test_folder folder = test_folder_make();
    assert_int_equal(tiny_model_write_hf(&m, folder.path), BT_OK);
    if (tokenizer_load(folder.path, &f->tokenizer, &error) != BT_OK) fail_msg("%s", error.text);
    test_folder_remove(&folder);
}

static void on_stop(void *context) {
    bt_loop_stop(((fixture *)context)->loop);
}

static void *run_control(void *context) {
    fixture *f = context;
    assert_int_equal(bt_loop_run(f->loop, control_step, f->control), BT_OK);
    return NULL;
}

static void create_control(fixture *f) {
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

static void create_front(fixture *f) {
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

static int set_up_with(void **state, uint64_t in_flight_bytes) {
    fixture *f = calloc(1, sizeof(*f));
    f->in_flight_bytes = in_flight_bytes;
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
    budget_init(&f->bodies, 64 << 20);
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

static int set_up(void **state) {
    return set_up_with(state, 64 << 20);
}

/* A few rows fit between the threads. */
static int set_up_with_little_room(void **state) {
    return set_up_with(state, 1024);
}

/* No row fits between the threads. */
static int set_up_without_room(void **state) {
    return set_up_with(state, 1);
}

static int tear_down(void **state) {
    fixture *f = *state;
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

static int dial(const fixture *f) {
    const struct sockaddr_in address = {.sin_family = AF_INET,
                                        .sin_port = htons(front_port(f->front)),
                                        .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

static void put(int fd, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t now = send(fd, bytes, count, MSG_NOSIGNAL);
        assert_true(now > 0);
        bytes += now;
        count -= (size_t)now;
    }
}

static void put_post(int fd, const char *path, const char *body) {
    char head[256];
    int bytes = snprintf(head, sizeof(head),
                         "POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: "
                         "%zu\r\n\r\n",
                         path, strlen(body));
    put(fd, head, (size_t)bytes);
    put(fd, body, strlen(body));
}

static char *take(int fd, const char *until);

static char *ask(const fixture *f, const char *method, const char *path, const char *fields) {
    char head[512];
    int fd = dial(f);
    int bytes =
        snprintf(head, sizeof(head), "%s %s HTTP/1.1\r\nHost: a\r\n%sConnection: close\r\n\r\n",
                 method, path, fields);
    put(fd, head, (size_t)bytes);
    char *answer = take(fd, NULL);
    close(fd);
    return answer;
}

/* Everything until the server closes, or until `until` came. Returns owned. */
static char *take(int fd, const char *until) {
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

static char *post(const fixture *f, const char *path, const char *body) {
    int fd = dial(f);
    put_post(fd, path, body);
    char *answer = take(fd, NULL);
    close(fd);
    return answer;
}

static char *get(const fixture *f, const char *path) {
    return ask(f, "GET", path, "");
}

static void assert_has(char *answer, const char *needle) {
    if (strstr(answer, needle) == NULL) fail_msg("'%s' is not in '%.3000s'", needle, answer);
}

static void expect(char *answer, const char *status, const char *needle) {
    assert_has(answer, status);
    assert_has(answer, needle);
    free(answer);
}

/* Turns of at most 10 ms until the condition holds. */
static void wait_for(bool (*condition)(fixture *f, uint64_t value), fixture *f, uint64_t value) {
    for (int i = 0; i < WAIT_MS / 10; i++) {
        if (condition(f, value)) return;
        (void)poll(NULL, 0, 10);
    }
    fail_msg("a condition did not come true");
}

static bool is_ready(fixture *f, uint64_t value) {
    (void)value;
    return control_is_ready(f->control);
}

static bool has_cancelled(fixture *f, uint64_t value) {
    return scripted_workers_counts(f->workers).cancelled == value;
}

static bool has_open(fixture *f, uint64_t value) {
    return scripted_workers_counts(f->workers).open == value;
}

static void join_workers(fixture *f) {
    f->workers = scripted_workers_start(control_port(f->control), 0);
    wait_for(is_ready, f, 0);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_before_and_after_the_workers(void **state) {
    fixture *f = *state;
    expect(get(f, "/health"), "HTTP/1.1 503 ", "no pair of a prefill and a decode worker");
    expect(post(f, "/generate", "{\"text\":\"a\"}"), "HTTP/1.1 503 ", "Retry-After: 1");
    join_workers(f);
    expect(get(f, "/health"), "HTTP/1.1 200 ", "Content-Length: 0\r\n");
    expect(get(f, "/server_info"), "HTTP/1.1 200 ", "\"role\":\"decode\"");
    expect(get(f, "/v1/models"), "HTTP/1.1 200 ", "\"max_model_len\":1048576");
    expect(get(f, "/nothing"), "HTTP/1.1 404 ", "there is nothing at /nothing");
    char *head = ask(f, "HEAD", "/v1/models", "");
    assert_memory_equal(head + strlen(head) - 4, "\r\n\r\n", 4);
    expect(head, "HTTP/1.1 200 ", "Content-Type: application/json\r\nContent-Length: ");
    expect(ask(f, "OPTIONS", "/generate", "Access-Control-Request-Headers: x-a, authorization\r\n"),
           "HTTP/1.1 204 ", "\r\nAccess-Control-Allow-Headers: x-a, authorization\r\n");
    expect(get(f, "/generate"), "HTTP/1.1 405 ", "\r\nAllow: POST, PUT, OPTIONS\r\n");
}

static void test_replies(void **state) {
    fixture *f = *state;
    join_workers(f);
    expect(post(f, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":3}}"),
           "HTTP/1.1 200 ", "{\"text\":\"abc\",\"output_ids\":[97,98,99],");
    expect(post(f, "/generate",
                "{\"text\":\"a\",\"stream\":true,\"return_sampling_mask\":true,"
                "\"sampling_params\":{\"max_new_tokens\":2,\"top_k\":2}}"),
           "Transfer-Encoding: chunked\r\n",
           "\"output_token_sampling_mask\":[[97,98],[98,99]],"
           "\"output_token_sampling_logprobs\":[-1.0,-1.0],");
    expect(post(f, "/v1/chat/completions",
                "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"max_tokens\":2}"),
           "HTTP/1.1 200 ", "\"content\":\"ab\"");
    expect(post(f, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"stop\":\"cd\"}}"),
           "\"text\":\"ab\",\"output_ids\":[97,98,99,100],", "\"matched\":\"cd\"");
    expect(post(f, "/generate", "{"), "HTTP/1.1 400 ", "invalid JSON at byte 1");
    /* Prefill's refusal is the status of a stream, too; a later one is its last event. */
    expect(post(f, "/generate",
                "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"sampling_seed\":1001}}"),
           "HTTP/1.1 400 ", "exceeds --sampling-mask-max-tokens=64");
    expect(post(f, "/generate",
                "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"sampling_seed\":1002}}"),
           "HTTP/1.1 200 ", "\"type\":\"abort\",\"message\":\"The sampling backend");
    expect(post(f, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"sampling_seed\":1002}}"),
           "HTTP/1.1 500 ", "captured sampling support");
    wait_for(has_open, f, 0);
}

static void test_keep_alive_and_large_bodies(void **state) {
    fixture *f = *state;
    join_workers(f);
    /* 1.2 MB of prompt in one body, then another request on the same connection. */
    enum { IDS = 300000 };
    bt_text body;
    bt_text_init(&body, 8 << 20);
    bt_text_add_string(&body, "{\"sampling_params\":{\"max_new_tokens\":1},\"input_ids\":[97");
    for (int i = 1; i < IDS; i++) {
        bt_text_add_string(&body, ", 98");
    }
    bt_text_add_string(&body, "]}");
    int fd = dial(f);
    for (int i = 0; i < 2; i++) {
        char head[128];
        int bytes = snprintf(head, sizeof(head),
                             "POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %zu\r\n\r\n",
                             body.used);
        put(fd, head, (size_t)bytes);
        put(fd, body.bytes, body.used);
        expect(take(fd, "response_sent"), "HTTP/1.1 200 ", "\"prompt_tokens\":300000,");
    }
    close(fd);
    bt_text_fini(&body);
}

typedef struct client {
    fixture *f;
    unsigned index;
} client;

static void *run_client(void *context) {
    const client *c = context;
    char body[256], text[64];
    unsigned tokens = 1 + c->index % 26;
    for (unsigned i = 0; i < 8; i++) {
        bool is_stream = (c->index + i) % 2 == 0;
        snprintf(
            body, sizeof(body),
            "{\"text\":\"a\",\"stream\":%s,\"return_sampling_mask\":true,"
            "\"sampling_logprobs_mode\":\"support\",\"sampling_params\":{\"max_new_tokens\":%u,"
            "\"top_k\":3}}",
            is_stream ? "true" : "false", tokens);
        snprintf(text, sizeof(text), "\"text\":\"%.*s\"", (int)tokens,
                 "abcdefghijklmnopqrstuvwxyz");
        expect(post(c->f, "/generate", body), "HTTP/1.1 200 ", text);
    }
    return NULL;
}

static void test_many_clients(void **state) {
    enum { CLIENTS = 16 };
    fixture *f = *state;
    pthread_t threads[CLIENTS];
    client clients[CLIENTS];
    join_workers(f);
    for (unsigned i = 0; i < CLIENTS; i++) {
        clients[i] = (client){f, i};
        assert_int_equal(pthread_create(&threads[i], NULL, run_client, &clients[i]), 0);
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(scripted_workers_counts(f->workers).attempts, CLIENTS * 8);
    assert_int_equal(scripted_workers_counts(f->workers).cancelled, 0);
}

static void *run_refused_client(void *context) {
    const client *c = context;
    for (unsigned i = 0; i < 20; i++) {
        expect(
            post(c->f, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":2}}"),
            "HTTP/1.1 503 ", "the router cannot take in more rows now");
    }
    return NULL;
}

/* Rows that there is no room for end their request, often in the message that also ends it at its
 * worker, and the request is released while the control thread reads on. */
static void test_rows_without_room(void **state) {
    enum { CLIENTS = 16 };
    fixture *f = *state;
    pthread_t threads[CLIENTS];
    client c = {f, 0};
    join_workers(f);
    for (unsigned i = 0; i < CLIENTS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, run_refused_client, &c), 0);
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        pthread_join(threads[i], NULL);
    }
    wait_for(has_open, f, 0);
}

/* What the rows took between the threads is given back: many times as much passes, one request
 * after the other. */
static void test_rows_through_little_room(void **state) {
    fixture *f = *state;
    join_workers(f);
    for (unsigned i = 0; i < 100; i++) {
        expect(post(f, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":2}}"),
               "HTTP/1.1 200 ", "\"completion_tokens\":2,");
    }
}

/* Clients that leave: before the first row, in the middle of a stream, behind a stop string. */
static void test_cancels(void **state) {
    fixture *f = *state;
    join_workers(f);
    int fd = dial(f);
    put_post(fd, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"sampling_seed\":1000}}");
    wait_for(has_open, f, 1);
    close(fd);
    wait_for(has_cancelled, f, 1);
    fd = dial(f);
    put_post(fd, "/generate",
             "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"max_new_tokens\":1000000}}");
    free(take(fd, "data: "));
    close(fd);
    wait_for(has_cancelled, f, 2);
    wait_for(has_open, f, 0);
}

/* A client that does not read gets no more credit; another one is not held up by it. */
static void test_a_reader_that_stops(void **state) {
    fixture *f = *state;
    join_workers(f);
    int fd = dial(f);
    put_post(fd, "/generate",
             "{\"text\":\"a\",\"stream\":true,\"return_sampling_mask\":true,\"sampling_params\":"
             "{\"max_new_tokens\":1000000,\"top_k\":8}}");
    free(take(fd, "data: "));
    uint64_t sent = 0;
    for (int quiet = 0; quiet < 20;) {
        uint64_t now = scripted_workers_counts(f->workers).row_bytes;
        quiet = now == sent ? quiet + 1 : 0;
        sent = now;
        (void)poll(NULL, 0, 10);
    }
    assert_true(sent < 8u << 20);
    expect(post(f, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":2}}"),
           "HTTP/1.1 200 ", "\"text\":\"ab\"");
    close(fd);
    wait_for(has_open, f, 0);
}

static void test_request_ids_are_unique_while_they_live(void **state) {
    fixture *f = *state;
    join_workers(f);
    int fd = dial(f);
    put_post(fd, "/generate",
             "{\"text\":\"a\",\"rid\":\"one\",\"sampling_params\":{\"sampling_seed\":1000}}");
    wait_for(has_open, f, 1);
    expect(post(f, "/generate", "{\"text\":\"a\",\"rid\":\"one\"}"), "HTTP/1.1 400 ",
           "Duplicate request ID detected: one");
    close(fd);
    wait_for(has_open, f, 0);
    expect(post(f, "/generate",
                "{\"text\":\"a\",\"rid\":\"one\",\"sampling_params\":{\"max_new_tokens\":1}}"),
           "HTTP/1.1 200 ", "\"id\":\"one\"");
}

/* More requests than the queue holds are refused, and those that run go on. */
static void test_the_queue_is_bounded(void **state) {
    fixture *f = *state;
    int fds[REQUESTS_MAX];
    join_workers(f);
    for (int i = 0; i < REQUESTS_MAX; i++) {
        fds[i] = dial(f);
        put_post(fds[i], "/generate",
                 "{\"text\":\"a\",\"sampling_params\":{\"sampling_seed\":1000}}");
    }
    wait_for(has_open, f, REQUESTS_MAX);
    expect(post(f, "/generate", "{\"text\":\"a\"}"), "HTTP/1.1 503 ", "Retry-After: 1");
    for (int i = 0; i < REQUESTS_MAX; i++) {
        close(fds[i]);
    }
    wait_for(has_cancelled, f, REQUESTS_MAX);
}

/* ---- batches --------------------------------------------------------------------------------- */

/* {HEAD,"text":["a", ... COUNT of them], TAIL}. Returns owned. */
static char *batch_of(unsigned count, const char *tail) {
    bt_text body;
    bt_text_init(&body, 1 << 20);
    bt_text_add_string(&body, "{\"text\":[\"a\"");
    for (unsigned i = 1; i < count; i++) {
        bt_text_add_string(&body, ",\"a\"");
    }
    bt_text_add_format(&body, "]%s}", tail);
    char *copy = strdup(body.bytes);
    bt_text_fini(&body);
    return copy;
}

static char *post_batch(const fixture *f, unsigned count, const char *tail) {
    char *body = batch_of(count, tail);
    char *answer = post(f, "/generate", body);
    free(body);
    return answer;
}

static unsigned count_of(const char *text, const char *needle) {
    unsigned count = 0;
    for (; (text = strstr(text, needle)) != NULL; text++) {
        count++;
    }
    return count;
}

static void *run_batch_client(void *context) {
    const client *c = context;
    for (unsigned i = 0; i < 6; i++) {
        const bool is_stream = (c->index + i) % 2 == 0;
        char *answer =
            post_batch(c->f, 1 + (c->index + i) % 5,
                       is_stream ? ",\"stream\":true,\"sampling_params\":"
                                   "{\"n\":2,\"max_new_tokens\":3}"
                                 : ",\"sampling_params\":{\"n\":2,\"max_new_tokens\":3}");
        assert_has(answer, "HTTP/1.1 200 ");
        assert_int_equal(count_of(answer, "\"type\":\"length\",\"length\":3"),
                         2 * (1 + (c->index + i) % 5));
        free(answer);
    }
    return NULL;
}

static void test_many_batches(void **state) {
    enum { CLIENTS = 8 };
    fixture *f = *state;
    pthread_t threads[CLIENTS];
    client clients[CLIENTS];
    join_workers(f);
    for (unsigned i = 0; i < CLIENTS; i++) {
        clients[i] = (client){f, i};
        assert_int_equal(pthread_create(&threads[i], NULL, run_batch_client, &clients[i]), 0);
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        pthread_join(threads[i], NULL);
    }
    wait_for(has_open, f, 0);
    /* As many as the queue takes at once; one more makes the list too long. */
    char *answer = post_batch(f, REQUESTS_MAX, ",\"sampling_params\":{\"max_new_tokens\":1}");
    assert_int_equal(count_of(answer, "\"type\":\"length\",\"length\":1"), REQUESTS_MAX);
    free(answer);
    expect(post_batch(f, REQUESTS_MAX + 1, ""), "HTTP/1.1 400 ", "--batch-max=64");
}

/* Items that the queue has no room for, or whose id is taken, fail alone; a batch for which a
 * thread has no room at all is refused. */
static void test_batches_beside_others(void **state) {
    fixture *f = *state;
    join_workers(f);
    char *body = batch_of(REQUESTS_MAX - 2, ",\"rid\":\"b\",\"sampling_params\":"
                                            "{\"sampling_seed\":1000}");
    int fd = dial(f);
    put_post(fd, "/generate", body);
    free(body);
    wait_for(has_open, f, REQUESTS_MAX - 2);
    const char tail[] =
        ",\"rid\":[\"b_1\",\"c\",\"d\",\"e\"],\"sampling_params\":{\"max_new_tokens\":1}";
    char *answer = post_batch(f, 4, tail);
    assert_has(answer, "HTTP/1.1 200 ");
    assert_has(answer, "Duplicate request ID detected: b_1");
    assert_int_equal(count_of(answer, "\"type\":\"length\",\"length\":1"), 2);
    assert_int_equal(count_of(answer, "\"status_code\":503"), 1);
    free(answer);
    bool is_refused_by_thread = false;
    for (int i = 0; i < THREADS; i++) { /* which get connections in turn */
        answer = post_batch(f, 20, ",\"sampling_params\":{\"max_new_tokens\":1}");
        if (strstr(answer, "too many requests are being served") != NULL) {
            assert_has(answer, "HTTP/1.1 503 ");
            is_refused_by_thread = true;
        }
        free(answer);
    }
    assert_true(is_refused_by_thread);
    /* The client leaves: all its items are cancelled. */
    close(fd);
    wait_for(has_cancelled, f, REQUESTS_MAX - 2);
    wait_for(has_open, f, 0);
    expect(post_batch(f, 2, ",\"rid\":\"b\",\"sampling_params\":{\"max_new_tokens\":1}"),
           "HTTP/1.1 200 ", "\"id\":\"b_1\"");
}

/* Stopping with requests of every kind under way frees them all (see tear_down). */
static void test_stopping_with_open_requests(void **state) {
    fixture *f = *state;
    join_workers(f);
    int hanging = dial(f);
    put_post(hanging, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"sampling_seed\":1000}}");
    int stream = dial(f);
    put_post(stream, "/generate",
             "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"sampling_seed\":1000}}");
    int streaming = dial(f);
    put_post(streaming, "/generate",
             "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"max_new_tokens\":1000000}}");
    int batch = dial(f);
    put_post(batch, "/generate",
             "{\"text\":[\"a\",\"b\"],\"stream\":true,\"sampling_params\":["
             "{\"max_new_tokens\":1000000},{\"sampling_seed\":1000}]}");
    wait_for(has_open, f, 5);
    free(take(streaming, "data: "));
    free(take(batch, "data: "));
    tear_down(state);
    expect(take(hanging, NULL), "HTTP/1.1 503 ", "the router is stopping");
    expect(take(stream, NULL), "HTTP/1.1 503 ", "the router is stopping");
    close(stream);
    close(hanging);
    close(batch);
    close(streaming);
    set_up(state);
}

static bool is_refused(fixture *f, uint64_t value) {
    (void)value;
    return scripted_workers_refusal(f->workers)[0] != 0;
}

static void test_a_model_smaller_than_the_tokenizer(void **state) {
    fixture *f = *state;
    f->workers = scripted_workers_start(control_port(f->control), 100);
    wait_for(is_refused, f, 0);
    assert_non_null(strstr(scripted_workers_refusal(f->workers),
                           "the tokenizer does not fit the model: it has 320 ids, the model of"));
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_before_and_after_the_workers),
        CASE(test_replies),
        CASE(test_keep_alive_and_large_bodies),
        CASE(test_many_clients),
        CASE(test_cancels),
        CASE(test_a_reader_that_stops),
        CASE(test_request_ids_are_unique_while_they_live),
        CASE(test_the_queue_is_bounded),
        CASE(test_many_batches),
        CASE(test_batches_beside_others),
        CASE(test_stopping_with_open_requests),
        CASE(test_a_model_smaller_than_the_tokenizer),
        cmocka_unit_test_setup_teardown(test_rows_through_little_room, set_up_with_little_room,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_rows_without_room, set_up_without_room, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
