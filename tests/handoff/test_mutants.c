/* Proof that the handoff tests can fail: each wrong behaviour of base/fault.h, switched on in a
 * child process, makes at least one test of the handoff fail, and without any all of them pass.
 * Only in a fault build. What the children print goes to mutant-NAME.log beside the test programs.
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/fault.h"

static const char *const programs[] = {"test_handoff_row", "test_handoff_bad"};

enum { PROGRAMS = sizeof programs / sizeof programs[0] };

static char folder[4096];

static void become(const char *program, const char *log, const char *mutant) {
    char path[sizeof folder + 64];
    const int out = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (out < 0 || dup2(out, STDOUT_FILENO) < 0 || dup2(out, STDERR_FILENO) < 0) _exit(120);
    if (setenv("BATON_MUTANT", mutant, 1) != 0) _exit(121);
    if (setenv("CMOCKA_MESSAGE_OUTPUT", "STDOUT", 1) != 0) _exit(121);
    (void)snprintf(path, sizeof path, "%s/%s", folder, program);
    execl(path, path, (char *)NULL);
    _exit(122);
}

/* The number of tests that failed in a program under a mutant. */
static int failed_tests(const char *program, const char *mutant) {
    char log[sizeof folder + 64];
    int status = 0;
    (void)snprintf(log, sizeof log, "%s/mutant-%s.log", folder, mutant);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) become(program, log, mutant);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) >= 120)
        fail_msg("%s ended with wait status %d (see %s)", program, status, log);
    return WEXITSTATUS(status);
}

static int find_folder(void **state) {
    (void)state;
    const ssize_t length = readlink("/proc/self/exe", folder, sizeof folder - 1);
    if (length <= 0) return -1;
    folder[length] = '\0';
    *strrchr(folder, '/') = '\0';
    for (int id = BT_MUTANT_NONE; id < BT_MUTANT_COUNT; id++) {
        char log[sizeof folder + 64];
        (void)snprintf(log, sizeof log, "%s/mutant-%s.log", folder,
                       bt_mutant_name((bt_mutant_id)id));
        (void)unlink(log);
    }
    return 0;
}

static void without_a_mutant_all_pass(void **state) {
    (void)state;
    for (int i = 0; i < PROGRAMS; i++)
        assert_int_equal(failed_tests(programs[i], bt_mutant_name(BT_MUTANT_NONE)), 0);
}

static void assert_noticed(bt_mutant_id id) {
    int failed = 0;
    for (int i = 0; i < PROGRAMS; i++)
        failed += failed_tests(programs[i], bt_mutant_name(id));
    print_message("%s: %d tests fail\n", bt_mutant_name(id), failed);
    assert_true(failed > 0);
}

static void selected_full_width_is_noticed(void **state) {
    (void)state;
    assert_noticed(BT_MUTANT_SELECTED_FULL_WIDTH);
}

static void drop_id_is_noticed(void **state) {
    (void)state;
    assert_noticed(BT_MUTANT_DROP_ID);
}

static void first_logprob_only_is_noticed(void **state) {
    (void)state;
    assert_noticed(BT_MUTANT_FIRST_LOGPROB_ONLY);
}

static void queue_not_cleared_is_noticed(void **state) {
    (void)state;
    assert_noticed(BT_MUTANT_QUEUE_NOT_CLEARED);
}

static void ignore_generation_is_noticed(void **state) {
    (void)state;
    assert_noticed(BT_MUTANT_IGNORE_GENERATION);
}

static void row_before_kv_is_noticed(void **state) {
    (void)state;
    assert_noticed(BT_MUTANT_ROW_BEFORE_KV);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_a_mutant_all_pass),
        cmocka_unit_test(selected_full_width_is_noticed),
        cmocka_unit_test(drop_id_is_noticed),
        cmocka_unit_test(first_logprob_only_is_noticed),
        cmocka_unit_test(queue_not_cleared_is_noticed),
        cmocka_unit_test(ignore_generation_is_noticed),
        cmocka_unit_test(row_before_kv_is_noticed),
    };
    return cmocka_run_group_tests(tests, find_folder, NULL);
}
