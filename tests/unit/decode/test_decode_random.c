/* Random histories: pools of a few pages, samples, lengths, credits, words, cancels in any order.
 * Every sample ends once with exactly its rows, with silence when it was cancelled, with the first
 * of its rows when it was aborted; every page, hold, slot and place comes back. Arguments are seeds
 * to run alone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "rig.h"

enum { SEEDS = 400, ATTEMPTS = 14, SAMPLES_MAX = 4, ACTIONS = 260, TURNS_MAX = 400 };

typedef struct history {
    uint64_t random;
    rig *r;
    rig_attempt *attempts[ATTEMPTS];
    bool is_reserved[ATTEMPTS];
    bool is_cancelled[ATTEMPTS][SAMPLES_MAX];
    bool is_aborted[ATTEMPTS][SAMPLES_MAX];
    bool is_over[ATTEMPTS][SAMPLES_MAX]; /* its row is not waited for */
} history;

/* What happened in all seeds; a test in which nothing happens proves nothing. */
static struct {
    uint64_t full, retractions, recomputed, cancelled, answers, parked, parked_retracted, waiting,
        aborted, aborted_rows;
} tally;

static uint32_t pick(history *h, uint32_t bound) {
    h->random += 0x9E3779B97F4A7C15u;
    uint64_t x = h->random;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((x ^ (x >> 31)) >> 32) % bound;
}

/* Lengths that one sample alone fits. */
static void make_attempt(history *h, uint32_t i) {
    const uint32_t tokens = h->r->options.pages * 16;
    uint32_t prompt = 1 + pick(h, tokens > 60 ? 60 : tokens);
    if (pick(h, 4) == 0) prompt = (prompt + 15) / 16 * 16;
    if (prompt > tokens) prompt = tokens;
    uint32_t most = tokens + 1 - prompt;
    if (most > 90) most = 90;
    const uint32_t places = h->r->options.sequences_max;
    const uint32_t samples_max = places < SAMPLES_MAX ? places : SAMPLES_MAX;
    proto_generation g = rig_generation(1 + pick(h, most), 1 + pick(h, samples_max));
    g.seed = pick(h, 1000);
    g.mask_mode = pick(h, 3);
    if (pick(h, 3) == 0) g.frequency_penalty = 0.5f;
    if (pick(h, 4) == 0) g.bias_count = 1 + pick(h, 5);
    if (pick(h, 4) == 0) g.top_logprobs = 1 + pick(h, RIG_TOP_MAX);
    if (pick(h, 4) == 0) g.logprob_id_count = 1 + pick(h, RIG_TOP_MAX);
    h->attempts[i] = rig_add(h->r, prompt, &g);
    if (pick(h, 3) != 0) return;
    /* A stop id that one of the samples draws. */
    proto_finish finish;
    const uint32_t sample = pick(h, g.samples);
    const uint32_t rows = rig_answer(h->r, h->attempts[i], sample, &finish);
    h->attempts[i]->generation.stop_ids[0] = rig_token(h->r, h->attempts[i], sample, pick(h, rows));
    h->attempts[i]->generation.stop_id_count = 1;
}

static void reserve(history *h, uint32_t i) {
    rig_attempt *a = h->attempts[i];
    if (h->is_reserved[i]) return;
    const uint64_t credit = pick(h, 2) == 0 ? UINT64_MAX : 1 + pick(h, 3000);
    const bt_status status = rig_reserve(h->r, a, credit);
    tally.full += status == BT_ERR_REQUEST_FULL;
    if (status == BT_ERR_REQUEST_FULL) return;
    assert_int_equal(status, BT_OK);
    h->is_reserved[i] = true;
}

/* Cancels or aborts. */
static void cancel(history *h, uint32_t i) {
    const rig_attempt *a = h->attempts[i];
    if (!h->is_reserved[i] || pick(h, 4) != 0) return;
    const bool is_abort = pick(h, 2) == 0;
    const uint32_t sample = pick(h, a->generation.samples);
    const bool is_whole = pick(h, 4) == 0;
    for (uint32_t n = 0; n < a->generation.samples; n++) {
        if (a->streams[n].finishes > 0 || !(is_whole || n == sample)) continue;
        if (is_abort) {
            h->is_aborted[i][n] = true;
            h->is_over[i][n] |= !a->is_delivered;
        } else {
            h->is_cancelled[i][n] = h->is_over[i][n] = true;
            tally.cancelled++;
        }
    }
    if (is_abort) {
        rig_abort(h->r, a, is_whole ? PROTO_ALL_SAMPLES : sample);
    } else {
        rig_cancel(h->r, a, is_whole ? PROTO_ALL_SAMPLES : sample);
    }
}

static bool is_wholly_over(const history *h, uint32_t i) {
    for (uint32_t n = 0; n < h->attempts[i]->generation.samples; n++)
        if (!h->is_over[i][n]) return false;
    return true;
}

static void act(history *h, uint32_t i) {
    rig_attempt *a = h->attempts[i];
    switch (pick(h, 9)) {
    case 0:
    case 1: reserve(h, i); break;
    case 2:
        if (h->is_reserved[i] && a->words_sent < a->word_count)
            rig_say_words(h->r, a, 1 + pick(h, a->word_count));
        break;
    case 3:
    case 4:
        if (h->is_reserved[i] && !a->is_delivered && !is_wholly_over(h, i))
            rig_deliver(h->r, a, NULL);
        break;
    case 5: cancel(h, i); break;
    case 6:
        if (h->is_reserved[i])
            rig_credit(h->r, a, pick(h, a->generation.samples), 1 + pick(h, 3000));
        break;
    default:
        for (uint32_t steps = pick(h, 12); steps > 0 && rig_view(h->r).is_step_running; steps--)
            rig_run_steps(h->r, 1);
        rig_settle(h->r);
    }
    const decode_view view = rig_view(h->r);
    tally.parked += view.parked > 0;
    tally.parked_retracted += view.parked > 0 && view.retracted > 0;
    tally.waiting += view.waiting > 0;
}

/* From here on everybody gets what it waits for, and everything ends. */
static void finish_all(history *h) {
    h->r->is_compute_held = false;
    bool is_done = false;
    for (uint32_t turn = 0; !is_done; turn++) {
        assert_true(turn < TURNS_MAX);
        is_done = true;
        for (uint32_t i = 0; i < ATTEMPTS; i++) {
            rig_attempt *a = h->attempts[i];
            if (is_wholly_over(h, i)) continue;
            reserve(h, i);
            if (!h->is_reserved[i]) is_done = false;
            if (!h->is_reserved[i]) continue;
            if (a->words_sent < a->word_count) rig_say_words(h->r, a, UINT32_MAX);
            if (!a->is_delivered) rig_deliver(h->r, a, NULL);
            for (uint32_t n = 0; n < a->generation.samples; n++)
                rig_credit(h->r, a, n, UINT64_MAX);
        }
        rig_settle(h->r);
    }
}

static void run_seed(uint64_t seed) {
    history h = {.random = seed};
    const rig_options options = {
        .pages = 2 + pick(&h, 14),
        .sequences_max = 1 + pick(&h, 8),
        .chunk_tokens = 1 + pick(&h, 40),
        .queue_bytes = pick(&h, 2) == 0 ? 1 : 0, /* three rows at the cap: parked often */
    };
    h.r = rig_create(&options);
    h.r->is_compute_held = true;
    for (uint32_t i = 0; i < ATTEMPTS; i++)
        make_attempt(&h, i);
    for (uint32_t i = 0; i < ACTIONS; i++)
        act(&h, pick(&h, ATTEMPTS));
    finish_all(&h);
    for (uint32_t i = 0; i < ATTEMPTS; i++) {
        for (uint32_t n = 0; n < h.attempts[i]->generation.samples; n++) {
            if (h.is_cancelled[i][n]) {
                rig_expect_silence(h.attempts[i], n);
                (void)rig_rows(h.r, h.attempts[i], n); /* right as far as they go */
                continue;
            }
            const rig_stream *s = &h.attempts[i]->streams[n];
            if (h.is_aborted[i][n] && s->last.finish == PROTO_FINISH_ABORT) {
                rig_expect_abort(h.r, h.attempts[i], n, s->last.rows_total);
                tally.aborted++;
                tally.aborted_rows += s->last.rows_total;
                continue;
            }
            rig_expect_answer(h.r, h.attempts[i], n);
            tally.answers++;
        }
    }
    tally.retractions += rig_view(h.r).retractions_total;
    tally.recomputed += rig_view(h.r).recomputed_tokens_total;
    rig_destroy(h.r);
}

static uint64_t seed_first = 1, seed_count = SEEDS;

static void random_histories(void **state) {
    (void)state;
    for (uint64_t seed = seed_first; seed < seed_first + seed_count; seed++) {
        print_message("seed %llu\r", (unsigned long long)seed);
        run_seed(seed);
    }
    print_message("answers %llu  full %llu  retractions %llu  tokens again %llu  cancelled %llu\n",
                  (unsigned long long)tally.answers, (unsigned long long)tally.full,
                  (unsigned long long)tally.retractions, (unsigned long long)tally.recomputed,
                  (unsigned long long)tally.cancelled);
    if (seed_count == 1) return;
    assert_true(tally.answers > 0 && tally.full > 0 && tally.retractions > 0);
    assert_true(tally.cancelled > 0 && tally.waiting > 0);
    assert_true(tally.aborted > 0 && tally.aborted_rows > 0);
    assert_true(tally.parked > 0 && tally.parked_retracted > 0);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        seed_first = strtoull(argv[1], NULL, 10);
        seed_count = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_histories)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
