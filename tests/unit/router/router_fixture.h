/* The router's threads together, as in the program: HTTP clients on one side, scripted workers on
 * the other, real sockets and real rings between them. */
#ifndef BT_TESTS_UNIT_ROUTER_ROUTER_FIXTURE_H
#define BT_TESTS_UNIT_ROUTER_ROUTER_FIXTURE_H

#include <pthread.h>

#include "router/front.h"
#include "tests/unit/router/scripted_workers.h"

enum { THREADS = 2, REQUESTS_MAX = 64 };

typedef struct router_fixture {
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
    uint64_t body_bytes;      /* of bodies and prompts */
} router_fixture;

/* For cmocka: *state becomes a router_fixture. */
int fixture_set_up(void **state);
/* A few rows fit between the threads; none does; a few bodies fit, and their prompts do not. */
int fixture_set_up_with_little_room(void **state);
int fixture_set_up_without_room(void **state);
int fixture_set_up_with_little_memory(void **state);
int fixture_tear_down(void **state);
/* Scripted workers join, and a pair is ready. */
void fixture_join_workers(router_fixture *f);
/* Turns of at most 10 ms until the condition holds. */
void fixture_wait_for(bool (*condition)(router_fixture *f, uint64_t value), router_fixture *f,
                      uint64_t value);
bool fixture_has_cancelled(router_fixture *f, uint64_t value);
bool fixture_has_open(router_fixture *f, uint64_t value);

/* A connection, and what goes over it. */
int client_dial(const router_fixture *f);
void client_put(int fd, const char *bytes, size_t count);
void client_put_post(int fd, const char *path, const char *body);
/* Everything until the server closes, or until `until` came. Returns owned. */
char *client_take(int fd, const char *until);
/* A request on a connection of its own. Returns the answer, owned. */
char *client_ask(const router_fixture *f, const char *method, const char *path, const char *fields);
char *client_post(const router_fixture *f, const char *path, const char *body);
char *client_get(const router_fixture *f, const char *path);
void answer_has(char *answer, const char *needle);
/* Frees it. */
void answer_expect(char *answer, const char *status, const char *needle);

#endif
