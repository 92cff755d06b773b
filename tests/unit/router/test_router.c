/* Requests through the router's threads: answers, streams, clients that leave or do not read, the
 * bounds between the threads, the end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <poll.h>
#include <unistd.h>

#include "tests/unit/router/router_fixture.h"

static void test_before_and_after_the_workers(void **state) {
    router_fixture *f = *state;
    answer_expect(client_get(f, "/health"), "HTTP/1.1 503 ",
                  "no pair of a prefill and a decode worker");
    answer_expect(client_post(f, "/generate", "{\"text\":\"a\"}"), "HTTP/1.1 503 ",
                  "Retry-After: 1");
    fixture_join_workers(f);
    answer_expect(client_get(f, "/health"), "HTTP/1.1 200 ", "Content-Length: 0\r\n");
    answer_expect(client_get(f, "/server_info"), "HTTP/1.1 200 ", "\"role\":\"decode\"");
    answer_expect(client_get(f, "/v1/models"), "HTTP/1.1 200 ", "\"max_model_len\":1048576");
    answer_expect(client_get(f, "/nothing"), "HTTP/1.1 404 ", "there is nothing at /nothing");
    char *head = client_ask(f, "HEAD", "/v1/models", "");
    assert_memory_equal(head + strlen(head) - 4, "\r\n\r\n", 4);
    answer_expect(head, "HTTP/1.1 200 ", "Content-Type: application/json\r\nContent-Length: ");
    answer_expect(client_ask(f, "OPTIONS", "/generate",
                             "Access-Control-Request-Headers: x-a, authorization\r\n"),
                  "HTTP/1.1 204 ", "\r\nAccess-Control-Allow-Headers: x-a, authorization\r\n");
    answer_expect(client_get(f, "/generate"), "HTTP/1.1 405 ", "\r\nAllow: POST, PUT, OPTIONS\r\n");
}

static void test_replies(void **state) {
    router_fixture *f = *state;
    fixture_join_workers(f);
    answer_expect(
        client_post(f, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":3}}"),
        "HTTP/1.1 200 ", "{\"text\":\"abc\",\"output_ids\":[97,98,99],");
    answer_expect(client_post(f, "/generate",
                              "{\"text\":\"a\",\"stream\":true,\"return_sampling_mask\":true,"
                              "\"sampling_params\":{\"max_new_tokens\":2,\"top_k\":2}}"),
                  "Transfer-Encoding: chunked\r\n",
                  "\"output_token_sampling_mask\":[[97,98],[98,99]],"
                  "\"output_token_sampling_logprobs\":[-1.0,-1.0],");
    answer_expect(
        client_post(f, "/v1/chat/completions",
                    "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"max_tokens\":2}"),
        "HTTP/1.1 200 ", "\"content\":\"ab\"");
    answer_expect(
        client_post(f, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"stop\":\"cd\"}}"),
        "\"text\":\"ab\",\"output_ids\":[97,98,99,100],", "\"matched\":\"cd\"");
    answer_expect(client_post(f, "/generate", "{"), "HTTP/1.1 400 ", "invalid JSON at byte 1");
    /* Prefill's refusal is the status of a stream, too; a later one is its last event. */
    answer_expect(
        client_post(
            f, "/generate",
            "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"sampling_seed\":1001}}"),
        "HTTP/1.1 400 ", "exceeds --sampling-mask-max-tokens=64");
    answer_expect(
        client_post(
            f, "/generate",
            "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"sampling_seed\":1002}}"),
        "HTTP/1.1 200 ", "\"type\":\"abort\",\"message\":\"The sampling backend");
    answer_expect(client_post(f, "/generate",
                              "{\"text\":\"a\",\"sampling_params\":{\"sampling_seed\":1002}}"),
                  "HTTP/1.1 500 ", "captured sampling support");
    fixture_wait_for(fixture_has_open, f, 0);
}

/* Times are no part of a comparison: the digits behind `key`. */
static void blank(char *answer, const char *key) {
    for (char *at = answer; (at = strstr(at, key)) != NULL;) {
        at += strlen(key);
        char *end = at + strspn(at, "0123456789.e-");
        memmove(at, end, strlen(end) + 1);
    }
}

/* The body of the answer; each "@" of the question is the next seed. */
static char *body_of(const router_fixture *f, const char *path, const char *question,
                     unsigned first_seed) {
    bt_text body;
    bt_text_init(&body, 1 << 16);
    for (const char *at = question; *at != 0; at++) {
        if (*at == '@') {
            bt_text_add_format(&body, "%u", first_seed++);
        } else {
            bt_text_add(&body, at, 1);
        }
    }
    char *answer = client_post(f, path, body.bytes);
    bt_text_fini(&body);
    answer_has(answer, "HTTP/1.1 200 ");
    char *from = strstr(answer, "\r\n\r\n");
    assert_non_null(from);
    memmove(answer, from, strlen(from) + 1);
    blank(answer, "\"e2e_latency\":");
    blank(answer, "\"response_sent_to_client_ts\":");
    blank(answer, "\"created\":");
    return answer;
}

/* A reply that is sent when complete is made again after decode failed in its middle, and nobody
 * can tell: the answer is that of a cluster in which nothing failed. */
static void test_a_failed_decode_is_not_seen(void **state) {
    router_fixture *f = *state;
    static const struct {
        const char *path, *body;
        unsigned requests;
    } cases[] = {
        {"/generate",
         "{\"text\":\"a\",\"rid\":\"r\",\"return_sampling_mask\":true,\"return_logprob\":true,"
         "\"logprob_start_len\":0,\"sampling_params\":{\"max_new_tokens\":9,\"top_k\":3,"
         "\"sampling_seed\":@}}",
         1},
        {"/generate",
         "{\"text\":\"a\",\"rid\":\"r\",\"return_sampling_mask\":true,\"sampling_params\":{\"n\":3,"
         "\"max_new_tokens\":9,\"top_k\":3,\"sampling_seed\":@}}",
         1},
        {"/generate",
         "{\"text\":[\"a\",\"bc\",\"d\"],\"rid\":\"r\",\"sampling_params\":["
         "{\"sampling_seed\":@,\"n\":2,\"max_new_tokens\":5},"
         "{\"sampling_seed\":@,\"max_new_tokens\":30},"
         "{\"sampling_seed\":@,\"stop\":\"ef\",\"max_new_tokens\":20}]}",
         3},
        {"/v1/chat/completions",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"rid\":\"r\",\"max_tokens\":8,"
         "\"n\":2,\"logprobs\":true,\"top_logprobs\":2,\"seed\":@}",
         1},
        {"/v1/completions",
         "{\"prompt\":[\"a\",\"b\"],\"rid\":\"r\",\"max_tokens\":8,\"logprobs\":2,\"seed\":@}", 2},
    };
    fixture_join_workers(f);
    uint64_t attempts = scripted_workers_counts(f->workers).attempts;
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *plain = body_of(f, cases[i].path, cases[i].body, 1);
        attempts += cases[i].requests;
        assert_int_equal(scripted_workers_counts(f->workers).attempts, attempts);
        char *again = body_of(f, cases[i].path, cases[i].body, SCRIPT_STUMBLES + 4 * i);
        assert_string_equal(again, plain);
        const uint64_t after = scripted_workers_counts(f->workers).attempts;
        assert_true(after > attempts + cases[i].requests);
        attempts = after;
        free(plain);
        free(again);
    }
    /* A stream has told what it had. */
    answer_expect(client_post(f, "/generate",
                              "{\"text\":\"a\",\"stream\":true,\"sampling_params\":"
                              "{\"max_new_tokens\":9,\"sampling_seed\":1190}}"),
                  "HTTP/1.1 200 ", "\"status_code\":503");
    fixture_wait_for(fixture_has_open, f, 0);
    assert_int_equal(budget_used(&f->limits.memory), 0);
}

static void test_keep_alive_and_large_bodies(void **state) {
    router_fixture *f = *state;
    fixture_join_workers(f);
    /* 1.2 MB of prompt in one body, then another request on the same connection. */
    enum { IDS = 300000 };
    bt_text body;
    bt_text_init(&body, 8 << 20);
    bt_text_add_string(&body, "{\"sampling_params\":{\"max_new_tokens\":1},\"input_ids\":[97");
    for (int i = 1; i < IDS; i++) {
        bt_text_add_string(&body, ", 98");
    }
    bt_text_add_string(&body, "]}");
    int fd = client_dial(f);
    for (int i = 0; i < 2; i++) {
        char head[128];
        int bytes = snprintf(head, sizeof(head),
                             "POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %zu\r\n\r\n",
                             body.used);
        client_put(fd, head, (size_t)bytes);
        client_put(fd, body.bytes, body.used);
        answer_expect(client_take(fd, "response_sent"), "HTTP/1.1 200 ",
                      "\"prompt_tokens\":300000,");
    }
    close(fd);
    bt_text_fini(&body);
}

typedef struct client {
    router_fixture *f;
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
        answer_expect(client_post(c->f, "/generate", body), "HTTP/1.1 200 ", text);
    }
    return NULL;
}

static void test_many_clients(void **state) {
    enum { CLIENTS = 16 };
    router_fixture *f = *state;
    pthread_t threads[CLIENTS];
    client clients[CLIENTS];
    fixture_join_workers(f);
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
        answer_expect(client_post(c->f, "/generate",
                                  "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":2}}"),
                      "HTTP/1.1 503 ", "the router cannot take in more rows now");
    }
    return NULL;
}

/* Rows that there is no room for end their request, often in the message that also ends it at its
 * worker, and the request is released while the control thread reads on. */
static void test_rows_without_room(void **state) {
    enum { CLIENTS = 16 };
    router_fixture *f = *state;
    pthread_t threads[CLIENTS];
    client c = {f, 0};
    fixture_join_workers(f);
    for (unsigned i = 0; i < CLIENTS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, run_refused_client, &c), 0);
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        pthread_join(threads[i], NULL);
    }
    fixture_wait_for(fixture_has_open, f, 0);
}

/* What the rows took between the threads is given back: many times as much passes, one request
 * after the other. */
static void test_rows_through_little_room(void **state) {
    router_fixture *f = *state;
    fixture_join_workers(f);
    for (unsigned i = 0; i < 100; i++) {
        answer_expect(client_post(f, "/generate",
                                  "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":2}}"),
                      "HTTP/1.1 200 ", "\"completion_tokens\":2,");
    }
}

/* Clients that leave: before the first row, in the middle of a stream, behind a stop string. */
static void test_cancels(void **state) {
    router_fixture *f = *state;
    fixture_join_workers(f);
    int fd = client_dial(f);
    client_put_post(fd, "/generate",
                    "{\"text\":\"a\",\"sampling_params\":{\"sampling_seed\":1000}}");
    fixture_wait_for(fixture_has_open, f, 1);
    close(fd);
    fixture_wait_for(fixture_has_cancelled, f, 1);
    fd = client_dial(f);
    client_put_post(
        fd, "/generate",
        "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"max_new_tokens\":1000000}}");
    free(client_take(fd, "data: "));
    close(fd);
    fixture_wait_for(fixture_has_cancelled, f, 2);
    fixture_wait_for(fixture_has_open, f, 0);
}

/* Over HTTP: what decode held comes with the answer; answers to aborts are empty. */
static void test_aborts(void **state) {
    static const char FINISH[] = "\"finish_reason\":{\"type\":\"abort\",\"message\":\"Aborted\","
                                 "\"status_code\":null,\"err_type\":null}";
    router_fixture *f = *state;
    fixture_join_workers(f);
    for (int is_stream = 0; is_stream < 2; is_stream++) {
        int fd = client_dial(f);
        client_put_post(fd, "/generate",
                        is_stream ? "{\"rid\":\"r\",\"text\":\"a\",\"stream\":true,"
                                    "\"sampling_params\":{\"sampling_seed\":1005}}"
                                  : "{\"rid\":\"r\",\"text\":[\"a\",\"b\"],"
                                    "\"sampling_params\":{\"sampling_seed\":1005}}");
        fixture_wait_for(fixture_has_open, f, is_stream ? 1 : 2);
        if (is_stream) free(client_take(fd, "data: "));
        answer_expect(client_post(f, "/abort_request", "{\"rid\":\"\"}"), "HTTP/1.1 200 ",
                      "Content-Length: 0\r\n");
        fixture_wait_for(fixture_has_open, f, is_stream ? 1 : 2);
        answer_expect(client_post(f, "/abort_request", "{\"rid\":\"r\"}"), "HTTP/1.1 200 ",
                      "Content-Length: 0\r\n");
        char *answer = client_take(fd, is_stream ? "[DONE]" : "response_sent");
        if (is_stream) assert_non_null(strstr(answer, "\"text\":\"abcde\""));
        answer_has(answer, FINISH);
        free(answer);
        close(fd);
        fixture_wait_for(fixture_has_open, f, 0);
    }
    answer_expect(client_post(f, "/abort_request", "{\"rid\":1}"), "HTTP/1.1 400 ",
                  "rid must be a string, got a number.");
    answer_expect(client_get(f, "/abort_request"), "HTTP/1.1 405 ", "Allow: POST");
}

/* A client that does not read gets no more credit; another one is not held up by it. */
static void test_a_reader_that_stops(void **state) {
    router_fixture *f = *state;
    fixture_join_workers(f);
    int fd = client_dial(f);
    client_put_post(
        fd, "/generate",
        "{\"text\":\"a\",\"stream\":true,\"return_sampling_mask\":true,\"sampling_params\":"
        "{\"max_new_tokens\":1000000,\"top_k\":8}}");
    free(client_take(fd, "data: "));
    uint64_t sent = 0;
    for (int quiet = 0; quiet < 20;) {
        uint64_t now = scripted_workers_counts(f->workers).row_bytes;
        quiet = now == sent ? quiet + 1 : 0;
        sent = now;
        (void)poll(NULL, 0, 10);
    }
    assert_true(sent < 8u << 20);
    answer_expect(
        client_post(f, "/generate", "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":2}}"),
        "HTTP/1.1 200 ", "\"text\":\"ab\"");
    close(fd);
    fixture_wait_for(fixture_has_open, f, 0);
}

static void test_request_ids_are_unique_while_they_live(void **state) {
    router_fixture *f = *state;
    fixture_join_workers(f);
    int fd = client_dial(f);
    client_put_post(
        fd, "/generate",
        "{\"text\":\"a\",\"rid\":\"one\",\"sampling_params\":{\"sampling_seed\":1000}}");
    fixture_wait_for(fixture_has_open, f, 1);
    answer_expect(client_post(f, "/generate", "{\"text\":\"a\",\"rid\":\"one\"}"), "HTTP/1.1 400 ",
                  "Duplicate request ID detected: one");
    close(fd);
    fixture_wait_for(fixture_has_open, f, 0);
    answer_expect(
        client_post(f, "/generate",
                    "{\"text\":\"a\",\"rid\":\"one\",\"sampling_params\":{\"max_new_tokens\":1}}"),
        "HTTP/1.1 200 ", "\"id\":\"one\"");
}

/* More requests than the queue holds are refused, and those that run go on. */
static void test_the_queue_is_bounded(void **state) {
    router_fixture *f = *state;
    int fds[REQUESTS_MAX];
    fixture_join_workers(f);
    for (int i = 0; i < REQUESTS_MAX; i++) {
        fds[i] = client_dial(f);
        client_put_post(fds[i], "/generate",
                        "{\"text\":\"a\",\"sampling_params\":{\"sampling_seed\":1000}}");
    }
    fixture_wait_for(fixture_has_open, f, REQUESTS_MAX);
    answer_expect(client_post(f, "/generate", "{\"text\":\"a\"}"), "HTTP/1.1 503 ",
                  "Retry-After: 1");
    for (int i = 0; i < REQUESTS_MAX; i++) {
        close(fds[i]);
    }
    fixture_wait_for(fixture_has_cancelled, f, REQUESTS_MAX);
}

/* Stopping with requests of every kind under way frees them all (see fixture_tear_down). */
static void test_stopping_with_open_requests(void **state) {
    router_fixture *f = *state;
    fixture_join_workers(f);
    int hanging = client_dial(f);
    client_put_post(hanging, "/generate",
                    "{\"text\":\"a\",\"sampling_params\":{\"sampling_seed\":1000}}");
    int stream = client_dial(f);
    client_put_post(
        stream, "/generate",
        "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"sampling_seed\":1000}}");
    int streaming = client_dial(f);
    client_put_post(
        streaming, "/generate",
        "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"max_new_tokens\":1000000}}");
    int batch = client_dial(f);
    client_put_post(batch, "/generate",
                    "{\"text\":[\"a\",\"b\"],\"stream\":true,\"sampling_params\":["
                    "{\"max_new_tokens\":1000000},{\"sampling_seed\":1000}]}");
    /* One of its samples has ended by then. */
    int some = client_dial(f);
    client_put_post(
        some, "/generate",
        "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"n\":2,\"max_new_tokens\":"
        "1000000,\"sampling_seed\":1003}}");
    fixture_wait_for(fixture_has_open, f, 6);
    free(client_take(some, "\"type\":\"abort\""));
    free(client_take(streaming, "data: "));
    free(client_take(batch, "data: "));
    fixture_tear_down(state);
    answer_expect(client_take(hanging, NULL), "HTTP/1.1 503 ", "the router is stopping");
    answer_expect(client_take(stream, NULL), "HTTP/1.1 503 ", "the router is stopping");
    close(stream);
    close(hanging);
    close(batch);
    close(streaming);
    close(some);
    fixture_set_up(state);
}

static bool is_refused(router_fixture *f, uint64_t value) {
    (void)value;
    return scripted_workers_refusal(f->workers)[0] != 0;
}

static void test_a_model_smaller_than_the_tokenizer(void **state) {
    router_fixture *f = *state;
    f->workers = scripted_workers_start(control_port(f->control), 100);
    fixture_wait_for(is_refused, f, 0);
    assert_non_null(strstr(scripted_workers_refusal(f->workers),
                           "the tokenizer does not fit the model: it has 320 ids, the model of"));
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_set_up, fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_before_and_after_the_workers),
        CASE(test_replies),
        CASE(test_a_failed_decode_is_not_seen),
        CASE(test_keep_alive_and_large_bodies),
        CASE(test_many_clients),
        CASE(test_cancels),
        CASE(test_aborts),
        CASE(test_a_reader_that_stops),
        CASE(test_request_ids_are_unique_while_they_live),
        CASE(test_the_queue_is_bounded),
        CASE(test_stopping_with_open_requests),
        CASE(test_a_model_smaller_than_the_tokenizer),
        cmocka_unit_test_setup_teardown(test_rows_through_little_room,
                                        fixture_set_up_with_little_room, fixture_tear_down),
        cmocka_unit_test_setup_teardown(test_rows_without_room, fixture_set_up_without_room,
                                        fixture_tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
