/* The handoff over real UCX between two processes: the row that decode queues first equals the row
 * that prefill queued, bit for bit, and so does the KV, in both mask modes and without, over tcp
 * and over shared memory. Each node asserts the bytes itself (ends.c); here both must say so. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "controller.h"

enum { CAP = 4096, DEADLINE_MS = 60000 };

static const xfer_peer any_peer = {0};
static controller the_controller;

static controller_options make_options(const char *tls) {
    return (controller_options){.tls = tls,
                                .log_folder = "/tmp",
                                .pages = 128,
                                .page_bytes = 128 * 1024,
                                .cap = CAP,
                                .checksum = RECORD_CHECKSUM_FULL};
}

static int kill_nodes(void **state) {
    (void)state;
    controller_fini(&the_controller);
    return 0;
}

static void await(controller *c, controller_node *prefill, controller_node *decode,
                  uint64_t number) {
    assert_int_not_equal(number, 0);
    assert_int_equal(controller_wait(c, decode, NOTE_DONE, number, any_peer).status, BT_OK);
    assert_int_equal(controller_wait(c, prefill, NOTE_DONE, number, any_peer).status, BT_OK);
}

static void rows_equal(const char *tls) {
    static const uint32_t counts[] = {1, 2, CAP - 1, CAP};
    static const uint32_t prompts[] = {1, 33, 32 * 100};
    controller *c = &the_controller;
    const controller_options options = make_options(tls);
    controller_init(c, &options);
    controller_node *prefill = controller_start(c, 0, true, NULL);
    controller_node *decode = controller_start(c, 1, false, NULL);
    controller_pair(c, prefill, decode);
    for (uint32_t mode = ROW_MASK_OFF; mode <= ROW_MASK_SUPPORT; mode++) {
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            for (size_t p = 0; p < sizeof prompts / sizeof prompts[0]; p++) {
                const sample s = {.prompt_tokens = prompts[p],
                                  .mask_mode = mode,
                                  .support_count = mode == ROW_MASK_OFF ? 0 : counts[i]};
                await(c, prefill, decode, controller_begin(c, prefill, decode, &s, DEADLINE_MS));
            }
        }
    }
    for (uint32_t samples = 2; samples <= 8; samples += 3) {
        const sample s = {.prompt_tokens = 33,
                          .mask_mode = ROW_MASK_SUPPORT,
                          .support_count = CAP,
                          .samples = samples,
                          .top_count = PROTO_TOP_LOGPROBS_MAX,
                          .id_logprob_count = 5};
        await(c, prefill, decode, controller_begin(c, prefill, decode, &s, DEADLINE_MS));
    }
    controller_finish(c, prefill);
    controller_finish(c, decode);
}

static void rows_equal_over_tcp(void **state) {
    (void)state;
    rows_equal("tcp");
}

static void rows_equal_over_shared_memory(void **state) {
    (void)state;
    rows_equal("shm");
}

/* Two prefill and two decode workers, several attempts at once on every pair. */
static void many_pairs_at_once(const char *tls) {
    enum { ROUNDS = 4 };
    controller *c = &the_controller;
    const controller_options options = make_options(tls);
    controller_node *nodes[4];
    uint64_t numbers[4][ROUNDS];
    controller_init(c, &options);
    for (uint32_t i = 0; i < 4; i++)
        nodes[i] = controller_start(c, i, i < 2, NULL);
    for (uint32_t pair = 0; pair < 4; pair++)
        controller_pair(c, nodes[pair / 2], nodes[2 + pair % 2]);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t pair = 0; pair < 4; pair++) {
            const sample s = {.prompt_tokens = 32 * 10 + round,
                              .mask_mode = 1 + (round + pair) % 2,
                              .support_count = 100 + pair};
            numbers[pair][round] =
                controller_begin(c, nodes[pair / 2], nodes[2 + pair % 2], &s, DEADLINE_MS);
        }
    }
    for (uint32_t pair = 0; pair < 4; pair++)
        for (uint32_t round = 0; round < ROUNDS; round++)
            await(c, nodes[pair / 2], nodes[2 + pair % 2], numbers[pair][round]);
    for (uint32_t i = 0; i < 4; i++)
        controller_finish(c, nodes[i]);
}

static void many_pairs_over_tcp(void **state) {
    (void)state;
    many_pairs_at_once("tcp");
}

static void many_pairs_over_shared_memory(void **state) {
    (void)state;
    many_pairs_at_once("shm");
}

/* Decode cancels when the transfer has begun: its pages come back, prefill's too, the pair works
 * on.
 */
static void cancels(const char *tls) {
    controller *c = &the_controller;
    const controller_options options = make_options(tls);
    const sample s = {
        .prompt_tokens = 32 * 120, .mask_mode = ROW_MASK_SELECTED, .support_count = 9};
    controller_init(c, &options);
    controller_node *prefill = controller_start(c, 0, true, NULL);
    controller_node *decode = controller_start(c, 1, false, NULL);
    controller_pair(c, prefill, decode);
    for (uint32_t round = 0; round < 6; round++) {
        const uint64_t number = controller_begin(c, prefill, decode, &s, DEADLINE_MS);
        static note cancel;
        cancel = (note){.kind = NOTE_CANCEL, .data = {.number = number}};
        controller_tell(c, decode, &cancel);
        controller_tell(c, prefill, &cancel);
        (void)controller_wait(c, decode, NOTE_DONE, number, any_peer);
        (void)controller_wait(c, prefill, NOTE_DONE, number, any_peer);
        await(c, prefill, decode, controller_begin(c, prefill, decode, &s, DEADLINE_MS));
    }
    controller_finish(c, prefill);
    controller_finish(c, decode);
}

static void cancels_over_tcp(void **state) {
    (void)state;
    cancels("tcp");
}

static void cancels_over_shared_memory(void **state) {
    (void)state;
    cancels("shm");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(rows_equal_over_tcp, kill_nodes),
        cmocka_unit_test_teardown(rows_equal_over_shared_memory, kill_nodes),
        cmocka_unit_test_teardown(many_pairs_over_tcp, kill_nodes),
        cmocka_unit_test_teardown(many_pairs_over_shared_memory, kill_nodes),
        cmocka_unit_test_teardown(cancels_over_tcp, kill_nodes),
        cmocka_unit_test_teardown(cancels_over_shared_memory, kill_nodes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
