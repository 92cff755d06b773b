/* Runs simulated clusters: test_sim [FIRST [LAST]] [--trace]. Without numbers: one without any
 * fault, then SEEDS seeds with faults. A seed that fails is printed; given as the only number it
 * runs again exactly the same, --trace shows what the cores log. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "tests/sim/sim.h"

enum { SEEDS = 120, GROUP = 10 };

static uint64_t first_seed = 1, last_seed = SEEDS;
static sim_tally total;

static void print_tally(const sim_tally *t) {
    const struct {
        const char *name;
        uint64_t value;
    } lines[] = {
        {"clients", t->clients},
        {"ok", t->ok},
        {"overflow", t->overflow},
        {"cancelled", t->cancelled},
        {"deadline", t->deadline},
        {"peer", t->peer},
        {"no worker", t->no_worker},
        {"other errors", t->other},
        {"refused", t->refused},
        {"lost with the router", t->lost},
        {"rows", t->rows},
        {"retries", t->retries},
        {"late messages", t->late},
        {"events", t->events},
        {"crashes", t->crashes},
        {"lost links", t->losses},
        {"freezes", t->freezes},
        {"mover drops", t->drops},
        {"corruptions", t->corruptions},
        {"stalls", t->stalls},
        {"router crashes", t->router_crashes},
        {"failed steps", t->step_failures},
        {"samples", t->samples},
        {"requests of mixed ends", t->mixed},
        {"samples cancelled", t->sample_cancels},
        {"log-probabilities of prompts", t->logprobs},
        {"retractions", t->retractions},
        {"tokens from the prefix cache", t->cached},
        {"restarts", t->restarts},
        {"samples aborted", t->aborts},
        {"again", t->aborts_again},
        {"after the end", t->aborts_late},
        {"outrun by the end", t->aborts_outrun},
        {"ended in the queue", t->aborted_in_queue},
        {"in prefill", t->aborted_in_prefill},
        {"without a row", t->aborted_running},
        {"with rows", t->aborted_with_rows},
        {"with rows that came later", t->aborted_with_more},
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        print_message("%s %llu  ", lines[i].name, (unsigned long long)lines[i].value);
    print_message("\n");
}

static void a_cluster_without_faults_answers_everything(void **state) {
    (void)state;
    sim_scenario scenario;
    sim_tally tally = {0};
    sim_scenario_calm(1, &scenario);
    sim_run(&scenario, &tally);
    print_tally(&tally);
    assert_int_equal(tally.ok + tally.overflow, tally.clients);
    assert_true(tally.ok > 40);
    assert_int_equal(tally.retries, 0);
    assert_int_equal(tally.restarts, 0);
}

/* Everybody aborts, nothing else goes wrong. */
static void a_cluster_without_faults_ends_what_is_aborted(void **state) {
    (void)state;
    sim_tally tally = {0};
    for (uint64_t seed = 1; seed <= 10; seed++) {
        sim_scenario scenario;
        sim_scenario_calm(seed, &scenario);
        scenario.clients = 120;
        scenario.abort_permille = 1000;
        scenario.has_no_masks = seed % 2 == 0;
        sim_run(&scenario, &tally);
    }
    print_tally(&tally);
    assert_int_equal(tally.ok + tally.overflow, tally.clients);
    assert_int_equal(tally.retries, 0);
    assert_int_equal(tally.restarts, 0);
    assert_true(tally.aborts > 500);
}

static void seeds_with_faults(void **state) {
    const uint64_t first = *(const uint64_t *)*state;
    for (uint64_t seed = first; seed < first + GROUP && seed <= last_seed; seed++) {
        sim_scenario scenario;
        /* The last line before a failure names the seed. */
        print_message("seed %llu (again: test_sim %llu)\n", (unsigned long long)seed,
                      (unsigned long long)seed);
        sim_scenario_wild(seed, &scenario);
        sim_run(&scenario, &total);
    }
}

/* Without this no failure could be looked at twice. */
static void a_seed_runs_the_same_twice(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        sim_scenario scenario;
        sim_tally first = {0}, second = {0};
        sim_scenario_wild(seed, &scenario);
        sim_run(&scenario, &first);
        sim_run(&scenario, &second);
        assert_memory_equal(&first, &second, sizeof first);
    }
}

/* No opt-in, no cost: without masks every byte that moves and every allocation is the same,
 * whatever the cap is; with them they are not, or the comparison would be of nothing. */
static void without_masks_nothing_depends_on_the_cap(void **state) {
    (void)state;
    sim_watch seen[3] = {{0}};
    sim_tally tallies[3] = {{0}};
    for (uint32_t i = 0; i < 3; i++) {
        sim_scenario scenario;
        sim_scenario_calm(7, &scenario);
        scenario.cap = i == 0 ? 1 : 65536;
        scenario.support_max = 1;
        scenario.has_no_masks = i < 2;
        scenario.watch = &seen[i];
        sim_run(&scenario, &tallies[i]);
    }
    assert_true(seen[0].frames > 1000 && seen[0].messages > 100);
    assert_memory_equal(&seen[0], &seen[1], sizeof seen[0]);
    assert_memory_equal(&tallies[0], &tallies[1], sizeof tallies[0]);
    assert_int_equal(tallies[0].ok, tallies[0].clients);
    assert_int_not_equal(seen[1].frame_digest, seen[2].frame_digest);
    assert_int_not_equal(seen[1].message_digest, seen[2].message_digest);
#ifdef BT_FAULT
    assert_true(seen[0].allocated.count > 1000);
    assert_int_not_equal(seen[1].allocated.digest, seen[2].allocated.digest);
#endif
    print_message("%llu frames of %llu bytes, %llu allocations of %llu bytes\n",
                  (unsigned long long)seen[0].frames, (unsigned long long)seen[0].frame_bytes,
                  (unsigned long long)seen[0].allocated.count,
                  (unsigned long long)seen[0].allocated.bytes);
}

/* No support has more ids than there are, so that a cap above the vocabulary costs what one that is
 * as large costs: with masks of either kind every byte, every window of credit and every allocation
 * is the same. */
static void beyond_the_vocabulary_nothing_depends_on_the_cap(void **state) {
    (void)state;
    static const uint32_t caps[2] = {SIM_VOCAB, 1u << 20};
    sim_watch seen[2] = {{0}};
    sim_tally tallies[2] = {{0}};
    for (uint32_t i = 0; i < 2; i++) {
        sim_scenario scenario;
        sim_scenario_calm(7, &scenario);
        scenario.cap = caps[i];
        scenario.watch = &seen[i];
        sim_run(&scenario, &tallies[i]);
    }
    assert_true(seen[0].frames > 1000 && seen[0].messages > 100);
    assert_memory_equal(&seen[0], &seen[1], sizeof seen[0]);
    assert_memory_equal(&tallies[0], &tallies[1], sizeof tallies[0]);
    assert_int_equal(tallies[0].ok, tallies[0].clients);
}

/* A run in which nothing happens proves nothing. */
static void everything_happened(void **state) {
    (void)state;
    const uint64_t *seen = (const uint64_t *)(const void *)&total;
    print_tally(&total);
    for (size_t i = 0; i < sizeof total / sizeof *seen; i++)
        assert_true(seen[i] > 0);
    assert_true(total.ok * 2 > total.clients);
}

int main(int argc, char **argv) {
    static uint64_t firsts[SEEDS + 6];
    static struct CMUnitTest tests[SEEDS + 6];
    size_t count = 0;
    int numbers = 0;
    bt_log_set_level((bt_log_level)-1);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--trace") == 0) {
            bt_log_set_level(BT_LOG_DEBUG);
        } else if (numbers++ == 0) {
            first_seed = last_seed = strtoull(argv[i], NULL, 10);
        } else {
            last_seed = strtoull(argv[i], NULL, 10);
        }
    }
    if (numbers == 0) {
        tests[count++] =
            (struct CMUnitTest)cmocka_unit_test(a_cluster_without_faults_answers_everything);
        tests[count++] =
            (struct CMUnitTest)cmocka_unit_test(a_cluster_without_faults_ends_what_is_aborted);
        tests[count++] = (struct CMUnitTest)cmocka_unit_test(a_seed_runs_the_same_twice);
        tests[count++] =
            (struct CMUnitTest)cmocka_unit_test(without_masks_nothing_depends_on_the_cap);
        tests[count++] =
            (struct CMUnitTest)cmocka_unit_test(beyond_the_vocabulary_nothing_depends_on_the_cap);
    }
    for (uint64_t seed = first_seed; seed <= last_seed && count <= SEEDS; seed += GROUP) {
        firsts[count] = seed;
        tests[count] =
            (struct CMUnitTest)cmocka_unit_test_prestate(seeds_with_faults, &firsts[count]);
        count++;
    }
    if (numbers == 0) tests[count++] = (struct CMUnitTest)cmocka_unit_test(everything_happened);
    return _cmocka_run_group_tests("sim", tests, count, NULL, NULL);
}
