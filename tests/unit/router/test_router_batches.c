/* Lists of prompts through the router's threads: whole and streamed, beside others, items that find
 * no room, and what their prompts take. */
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

static char *post_batch(const router_fixture *f, unsigned count, const char *tail) {
    char *body = batch_of(count, tail);
    char *answer = client_post(f, "/generate", body);
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

typedef struct client {
    router_fixture *f;
    unsigned index;
} client;

static void *run_batch_client(void *context) {
    const client *c = context;
    for (unsigned i = 0; i < 6; i++) {
        const bool is_stream = (c->index + i) % 2 == 0;
        char *answer =
            post_batch(c->f, 1 + (c->index + i) % 5,
                       is_stream ? ",\"stream\":true,\"sampling_params\":"
                                   "{\"n\":2,\"max_new_tokens\":3}"
                                 : ",\"sampling_params\":{\"n\":2,\"max_new_tokens\":3}");
        answer_has(answer, "HTTP/1.1 200 ");
        assert_int_equal(count_of(answer, "\"type\":\"length\",\"length\":3"),
                         2 * (1 + (c->index + i) % 5));
        free(answer);
    }
    return NULL;
}

static void test_many_batches(void **state) {
    enum { CLIENTS = 8 };
    router_fixture *f = *state;
    pthread_t threads[CLIENTS];
    client clients[CLIENTS];
    fixture_join_workers(f);
    for (unsigned i = 0; i < CLIENTS; i++) {
        clients[i] = (client){f, i};
        assert_int_equal(pthread_create(&threads[i], NULL, run_batch_client, &clients[i]), 0);
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        pthread_join(threads[i], NULL);
    }
    fixture_wait_for(fixture_has_open, f, 0);
    /* As many as the queue takes at once; one more makes the list too long. */
    char *answer = post_batch(f, REQUESTS_MAX, ",\"sampling_params\":{\"max_new_tokens\":1}");
    assert_int_equal(count_of(answer, "\"type\":\"length\",\"length\":1"), REQUESTS_MAX);
    free(answer);
    answer_expect(post_batch(f, REQUESTS_MAX + 1, ""), "HTTP/1.1 400 ", "--batch-max=64");
}

/* Items that the queue has no room for, or whose id is taken, fail alone; a batch for which a
 * thread has no room at all is refused. */
static void test_batches_beside_others(void **state) {
    router_fixture *f = *state;
    fixture_join_workers(f);
    char *body = batch_of(REQUESTS_MAX - 2, ",\"rid\":\"b\",\"sampling_params\":"
                                            "{\"sampling_seed\":1000}");
    int fd = client_dial(f);
    client_put_post(fd, "/generate", body);
    free(body);
    fixture_wait_for(fixture_has_open, f, REQUESTS_MAX - 2);
    const char tail[] =
        ",\"rid\":[\"b_1\",\"c\",\"d\",\"e\"],\"sampling_params\":{\"max_new_tokens\":1}";
    char *answer = post_batch(f, 4, tail);
    answer_has(answer, "HTTP/1.1 200 ");
    answer_has(answer, "Duplicate request ID detected: b_1");
    /* Two have room, the third only where one of them has ended by then. */
    const unsigned served = count_of(answer, "\"type\":\"length\",\"length\":1");
    assert_in_range(served, 2, 3);
    assert_int_equal(count_of(answer, "\"status_code\":503"), 3 - served);
    free(answer);
    bool is_refused_by_thread = false;
    for (int i = 0; i < THREADS; i++) { /* which get connections in turn */
        answer = post_batch(f, 20, ",\"sampling_params\":{\"max_new_tokens\":1}");
        if (strstr(answer, "too many requests are being served") != NULL) {
            answer_has(answer, "HTTP/1.1 503 ");
            is_refused_by_thread = true;
        }
        free(answer);
    }
    assert_true(is_refused_by_thread);
    /* The client leaves: all its items are cancelled. */
    close(fd);
    fixture_wait_for(fixture_has_cancelled, f, REQUESTS_MAX - 2);
    fixture_wait_for(fixture_has_open, f, 0);
    answer_expect(post_batch(f, 2, ",\"rid\":\"b\",\"sampling_params\":{\"max_new_tokens\":1}"),
                  "HTTP/1.1 200 ", "\"id\":\"b_1\"");
}

/* Clients leave while their bodies wait behind large ones to be read: nothing is left of them, and
 * nobody answers. */
static void test_clients_that_leave_before_they_are_read(void **state) {
    enum { LEAVING = 20, TEXT_BYTES = 1 << 19 };
    router_fixture *f = *state;
    char *small = batch_of(1, ",\"sampling_params\":{\"max_new_tokens\":1}");
    bt_text body;
    fixture_join_workers(f);
    bt_text_init(&body, 2 * TEXT_BYTES);
    bt_text_add_string(&body,
                       "{\"return_logprob\":true,\"logprob_start_len\":99999999,\"text\":\"");
    while (body.used < TEXT_BYTES) {
        bt_text_add_string(&body, "one two ");
    }
    bt_text_add_string(&body, "\"}"); /* refused when it is tokenized */
    for (int round = 0; round < 2; round++) {
        int busy[2 * THREADS];
        for (int i = 0; i < 2 * THREADS; i++) {
            busy[i] = client_dial(f);
            client_put_post(busy[i], "/generate", body.bytes);
        }
        for (int i = 0; i < LEAVING; i++) {
            const int fd = client_dial(f);
            client_put_post(fd, "/generate", small);
            close(fd);
        }
        for (int i = 0; i < 2 * THREADS; i++) {
            char *answer = client_take(busy[i], NULL);
            answer_has(answer, "HTTP/1.1 400 ");
            free(answer);
            close(busy[i]);
        }
    }
    bt_text_fini(&body);
    free(small);
    answer_expect(post_batch(f, 2, ",\"sampling_params\":{\"max_new_tokens\":1}"), "HTTP/1.1 200 ",
                  "\"length\":1");
    fixture_wait_for(fixture_has_open, f, 0);
}

/* What was read of a body is charged as the body was, and given back at its end. */
static bool bodies_take(router_fixture *f, uint64_t value) {
    return budget_used(&f->bodies) == value;
}

static void test_what_was_read_takes_memory(void **state) {
    router_fixture *f = *state;
    char text[1500], body[1600];
    fixture_join_workers(f);
    memset(text, 'a', sizeof(text));
    snprintf(body, sizeof(body), "{\"text\":[\"%.1000s\",\"%.400s\"]}", text, text);
    for (int i = 0; i < 3; i++) {
        answer_expect(client_post(f, "/generate", body), "HTTP/1.1 503 ",
                      "need more than --body-memory");
    }
    /* Stop strings take much more than their text, but are kept once. */
    for (int i = 0; i < 20; i++) {
        const bool is_long = i % 2 == 1;
        snprintf(body, sizeof(body),
                 "{\"text\":[\"a\",\"b\"],\"sampling_params\":{\"max_new_tokens\":1,"
                 "\"stop\":\"%.*s\"}}",
                 is_long ? 200 : 50, text);
        answer_expect(client_post(f, "/generate", body),
                      is_long ? "HTTP/1.1 503 " : "HTTP/1.1 200 ",
                      is_long ? "need more than --body-memory" : "\"length\":1");
        fixture_wait_for(bodies_take, f, 0); /* given back behind the answer */
    }
    fixture_wait_for(fixture_has_open, f, 0);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_set_up, fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(test_many_batches),
        CASE(test_batches_beside_others),
        CASE(test_clients_that_leave_before_they_are_read),
        cmocka_unit_test_setup_teardown(test_what_was_read_takes_memory,
                                        fixture_set_up_with_little_memory, fixture_tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
