/* kill -9 of a prefill or decode worker over real UCX, idle or in the middle of a transfer of 64
 * MB, again and again, while another pair of the survivor goes on transferring:
 *
 *   kill_harness [--tls tcp|shm] [--victim prefill|decode] [--phase idle|transfer] [--count N]
 *                [--seed S]
 *
 * Without --tls, --victim or --phase it takes both, --count kills for each of tls x victim. For
 * every kill: the survivor hears of it within the bound, closes the endpoint, gets its pages and
 * slots back; the other pair's transfers arrive; the victim is started again (a new incarnation,
 * over tcp at the same port) and works. At the end the survivors check themselves and exit with
 * status 0. Figures go to standard output. */
#include <dirent.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "controller.h"

enum {
    PAGE_TOKENS = 32,
    PAGE_BYTES = 256 * 1024,
    LARGE_PAGES = 256, /* 64 MB: eight chunks */
    SMALL_PAGES = 16,
    POOL_PAGES = 384,
    DEADLINE_MS = 120000,
    BOUND_MS = 15000, /* UCX's own keepalive would take up to 20 s */
    NOT_HIT_MAX = 20, /* transfers that were over before the kill, per kill */
};

static const xfer_peer any_peer = {0};
static controller the_controller;

static struct {
    const char *tls, *victim, *phase;
    uint32_t count;
    uint64_t seed;
} options = {.count = 4, .seed = 1};

/* Three workers: the survivor between the victim and another one of the victim's role. */
typedef struct harness {
    controller *c;
    controller_node *survivor, *victim, *other;
    bool is_prefill_victim;
    char ports[32];
    uint64_t background; /* the attempt between survivor and other that runs now */
    uint32_t background_done;
    uint64_t random;
    uint64_t latency_sum_us, latency_max_us;
    uint32_t kills, hits, not_hit;
} harness;

static uint64_t now_us(void) {
    const bt_clock clock = bt_clock_system();
    return bt_clock_now_us(&clock);
}

static uint32_t choose(harness *h, uint32_t below) {
    h->random ^= h->random << 13;
    h->random ^= h->random >> 7;
    h->random ^= h->random << 17;
    return (uint32_t)((h->random >> 32) % below);
}

/* A range outside of the ephemeral ports, so that the option is used. Not a single port: UCX cannot
 * bind again a port that a dead process left in TIME_WAIT (measured with 1.13.1). */
static void pick_ports(harness *h, char *out, size_t bytes) {
    const uint32_t first = 20000 + 64 * choose(h, 150);
    (void)snprintf(out, bytes, "%u-%u", first, first + 63);
}

static uint32_t open_files(pid_t process) {
    char path[64];
    uint32_t count = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/fd", (int)process);
    DIR *folder = opendir(path);
    assert_non_null(folder);
    while (readdir(folder) != NULL)
        count++;
    (void)closedir(folder);
    return count;
}

static uint64_t resident_kb(pid_t process) {
    char path[64];
    uint64_t total = 0;
    uint64_t resident = 0;
    (void)snprintf(path, sizeof path, "/proc/%d/statm", (int)process);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%" SCNu64 " %" SCNu64, &total, &resident), 2);
    (void)fclose(file);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE) / 1024;
}

static uint64_t begin(harness *h, controller_node *peer, uint32_t pages) {
    const sample s = {.prompt_tokens = pages * PAGE_TOKENS,
                      .mask_mode = 1 + choose(h, 2),
                      .support_count = 1 + choose(h, 1000)};
    controller_node *prefill = h->is_prefill_victim ? peer : h->survivor;
    controller_node *decode = h->is_prefill_victim ? h->survivor : peer;
    const uint64_t number = controller_begin(h->c, prefill, decode, &s, DEADLINE_MS);
    assert_int_not_equal(number, 0);
    return number;
}

/* Keeps one transfer between survivor and other going; none may fail. */
static void keep_background(harness *h) {
    controller_note ours;
    if (h->background != 0) {
        if (!controller_take(h->c, h->survivor, NOTE_DONE, h->background, any_peer, &ours)) return;
        assert_int_equal(ours.status, BT_OK);
        const controller_note theirs =
            controller_wait(h->c, h->other, NOTE_DONE, h->background, any_peer);
        assert_int_equal(theirs.status, BT_OK);
        h->background_done++;
    }
    h->background = begin(h, h->other, SMALL_PAGES);
}

/* As controller_wait, with the background going on. */
static controller_note await(harness *h, const controller_node *from, note_kind kind,
                             uint64_t number, xfer_peer peer, uint32_t limit_ms) {
    const uint64_t limit = now_us() + UINT64_C(1000) * limit_ms;
    controller_note found = {0};
    while (!controller_take(h->c, from, kind, number, peer, &found)) {
        keep_background(h);
        (void)controller_listen(h->c, 50);
        if (now_us() <= limit) continue;
        controller_show_log(from);
        fail_msg("worker %u: no note %d within %u ms", from->self.worker_id, (int)kind, limit_ms);
    }
    return found;
}

static void transfer(harness *h, controller_node *peer) {
    const uint64_t number = begin(h, peer, SMALL_PAGES);
    assert_int_equal(await(h, peer, NOTE_DONE, number, any_peer, DEADLINE_MS).status, BT_OK);
    assert_int_equal(await(h, h->survivor, NOTE_DONE, number, any_peer, DEADLINE_MS).status, BT_OK);
}

static void start_victim(harness *h) {
    h->victim =
        controller_start(h->c, 1, h->is_prefill_victim, h->ports[0] == '\0' ? NULL : h->ports);
    controller_pair(h->c, h->is_prefill_victim ? h->victim : h->survivor,
                    h->is_prefill_victim ? h->survivor : h->victim);
    transfer(h, h->victim);
}

/* Starts 64 MB with the victim and returns when `chunks` of its eight arrived (with those of the
 * background, where the survivor receives). 0: it was over before. */
static uint64_t begin_large(harness *h, uint32_t chunks) {
    controller_node *receiver = h->is_prefill_victim ? h->survivor : h->victim;
    controller_note over;
    const uint64_t number = begin(h, h->victim, LARGE_PAGES);
    const uint64_t wanted = receiver->chunks + chunks;
    while (receiver->chunks < wanted) {
        (void)controller_listen(h->c, 50);
        if (controller_take(h->c, receiver, NOTE_DONE, number, any_peer, &over)) {
            assert_int_equal(over.status, BT_OK);
            const controller_node *sender = h->is_prefill_victim ? h->victim : h->survivor;
            (void)await(h, sender, NOTE_DONE, number, any_peer, DEADLINE_MS);
            return 0;
        }
    }
    return number;
}

static void kill_once(harness *h, bool is_transferring) {
    uint64_t number = 0;
    keep_background(h);
    for (uint32_t i = 0; is_transferring && number == 0; i++) {
        assert_true(i < NOT_HIT_MAX);
        number = begin_large(h, choose(h, 6));
        if (number == 0) h->not_hit++;
    }
    const xfer_peer dead = h->victim->self;
    const uint64_t start = now_us();
    controller_kill(h->c, h->victim);
    (void)await(h, h->survivor, NOTE_PEER_FAILED, 0, dead, BOUND_MS);
    const uint64_t latency = now_us() - start;
    h->latency_sum_us += latency;
    if (latency > h->latency_max_us) h->latency_max_us = latency;
    (void)await(h, h->survivor, NOTE_PEER_CLOSED, 0, dead, BOUND_MS);
    if (number != 0) {
        /* The transfer may have been through in the moment of the kill: then it counts as idle. */
        const bt_status status =
            await(h, h->survivor, NOTE_DONE, number, any_peer, BOUND_MS).status;
        if (status != BT_OK) assert_int_equal(status, BT_ERR_PEER_GONE);
        if (status != BT_OK) h->hits++;
    }
    /* One transfer of the other pair from begin to end after the death. */
    const uint32_t before = h->background_done;
    while (h->background_done < before + 2) {
        keep_background(h);
        (void)controller_listen(h->c, 50);
    }
    start_victim(h);
    h->kills++;
}

static void drain_background(harness *h) {
    if (h->background == 0) return;
    const uint64_t number = h->background;
    assert_int_equal(controller_wait(h->c, h->survivor, NOTE_DONE, number, any_peer).status, BT_OK);
    assert_int_equal(controller_wait(h->c, h->other, NOTE_DONE, number, any_peer).status, BT_OK);
    h->background = 0;
}

static void print_figures(const harness *h, const char *tls, uint32_t files, uint64_t kb) {
    print_message(
        "%s, %s killed: %u kills, %u of them in mid-transfer (%u were over before); heard "
        "after %.1f ms on average, %.1f ms at most; %u transfers of the other pair, none "
        "failed; survivor: open files %u -> %u, resident %" PRIu64 " -> %" PRIu64 " kB\n",
        tls, h->is_prefill_victim ? "prefill" : "decode", h->kills, h->hits, h->not_hit,
        (double)h->latency_sum_us / 1000 / h->kills, (double)h->latency_max_us / 1000,
        h->background_done, files, open_files(h->survivor->process), kb,
        resident_kb(h->survivor->process));
}

static void run(const char *tls, bool is_prefill_victim) {
    const char *role = is_prefill_victim ? "prefill" : "decode";
    if (options.tls != NULL && strcmp(options.tls, tls) != 0) skip();
    if (options.victim != NULL && strcmp(options.victim, role) != 0) skip();
    const controller_options c = {.tls = tls,
                                  .log_folder = "/tmp",
                                  .pages = POOL_PAGES,
                                  .page_bytes = PAGE_BYTES,
                                  .cap = 1024,
                                  .checksum = RECORD_CHECKSUM_FULL};
    controller_init(&the_controller, &c);
    harness h = {.c = &the_controller,
                 .is_prefill_victim = is_prefill_victim,
                 .random = options.seed * UINT64_C(0x9E3779B97F4A7C15) + 1};
    if (strcmp(tls, "tcp") == 0) pick_ports(&h, h.ports, sizeof h.ports);
    h.survivor = controller_start(h.c, 0, !is_prefill_victim, NULL);
    h.other = controller_start(h.c, 2, is_prefill_victim, NULL);
    controller_pair(h.c, is_prefill_victim ? h.other : h.survivor,
                    is_prefill_victim ? h.survivor : h.other);
    start_victim(&h);
    uint32_t files = 0;
    uint64_t kb = 0;
    for (uint32_t i = 0; i < options.count; i++) {
        const bool is_second = i % 2 == 1;
        kill_once(&h, options.phase == NULL ? is_second : strcmp(options.phase, "transfer") == 0);
        if (i != 0) continue;
        files = open_files(h.survivor->process);
        kb = resident_kb(h.survivor->process);
    }
    drain_background(&h);
    print_figures(&h, tls, files, kb);
    assert_true(open_files(h.survivor->process) <= files + 2);
    controller_finish(h.c, h.survivor);
    controller_finish(h.c, h.victim);
    controller_finish(h.c, h.other);
}

static int kill_nodes(void **state) {
    (void)state;
    controller_fini(&the_controller);
    return 0;
}

static void prefill_over_tcp(void **state) {
    (void)state;
    run("tcp", true);
}

static void decode_over_tcp(void **state) {
    (void)state;
    run("tcp", false);
}

static void prefill_over_shared_memory(void **state) {
    (void)state;
    run("shm", true);
}

static void decode_over_shared_memory(void **state) {
    (void)state;
    run("shm", false);
}

/* false: an option that is not known or has a value that cannot be. */
static bool read_option(const char *name, const char *value) {
    if (strcmp(name, "--tls") == 0) {
        options.tls = value;
        return strcmp(value, "tcp") == 0 || strcmp(value, "shm") == 0;
    }
    if (strcmp(name, "--victim") == 0) {
        options.victim = value;
        return strcmp(value, "prefill") == 0 || strcmp(value, "decode") == 0;
    }
    if (strcmp(name, "--phase") == 0) {
        options.phase = value;
        return strcmp(value, "idle") == 0 || strcmp(value, "transfer") == 0;
    }
    if (strcmp(name, "--count") == 0) {
        options.count = (uint32_t)strtoul(value, NULL, 10);
        return options.count > 0;
    }
    if (strcmp(name, "--seed") == 0) {
        options.seed = strtoull(value, NULL, 10);
        return true;
    }
    return false;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && read_option(argv[i], argv[i + 1])) continue;
        (void)fprintf(stderr, "kill_harness: '%s' with that value is not an option\n", argv[i]);
        return 2;
    }
    print_message("seed %" PRIu64 "\n", options.seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(prefill_over_tcp, kill_nodes),
        cmocka_unit_test_teardown(decode_over_tcp, kill_nodes),
        cmocka_unit_test_teardown(prefill_over_shared_memory, kill_nodes),
        cmocka_unit_test_teardown(decode_over_shared_memory, kill_nodes),
    };
    return cmocka_run_group_tests_name("kill_harness", tests, NULL, NULL);
}
