/* What the tests of the prefill core have in common: prompts, and what became of them. */
#ifndef BT_TESTS_PREFILL_PROMPTS_H
#define BT_TESTS_PREFILL_PROMPTS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "world.h"

/* Tokens [from, to) of the next prompt, by a seed. */
static inline void prompts_fill(world *w, uint32_t from, uint32_t to, uint64_t seed) {
    assert_true(to <= WORLD_PROMPT_MAX);
    for (uint32_t i = from; i < to; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        w->prompt[i] = (int32_t)((seed >> 33) % WORLD_VOCAB);
    }
}

/* Reserves and runs, with any number of words behind w->prompt, in frames of any size. */
static inline proto_attempt prompts_start(world *w, uint32_t tokens, const proto_generation *g,
                                          uint32_t frame_words) {
    const proto_attempt a = world_new_attempt(w);
    proto_reservation slot = {0};
    const uint32_t words = proto_words(g, tokens);
    if (g->max_new_tokens > 0) {
        slot = world_reserve(w, a, tokens, g, UINT64_MAX);
        assert_int_equal(slot.status, BT_OK);
    }
    for (uint32_t at = 0; at < words; at += frame_words) {
        const uint32_t count = words - at < frame_words ? words - at : frame_words;
        const proto_message prompt = {.kind = PROTO_PROMPT,
                                      .prompt = {.attempt = a, .first_word = at},
                                      .payload = w->prompt + at,
                                      .payload_bytes = count * sizeof(int32_t)};
        if (g->max_new_tokens > 0) world_say(w, &w->decode, PROTO_LANE_STREAMS, &prompt);
    }
    for (uint32_t at = 0; at < words; at += frame_words) {
        const uint32_t count = words - at < frame_words ? words - at : frame_words;
        proto_message run = {
            .kind = PROTO_RUN,
            .run = {.attempt = a,
                    .decode_worker_id = g->max_new_tokens > 0 ? w->decode.worker_id : 0,
                    .decode_incarnation = g->max_new_tokens > 0 ? w->decode.incarnation : 0,
                    .slot_count = slot.slot_count,
                    .prompt_tokens = tokens,
                    .first_word = at,
                    .deadline_ms = 5000,
                    .generation = *g},
            .payload = w->prompt + at,
            .payload_bytes = count * sizeof(int32_t)};
        memcpy(run.run.slots, slot.slots, sizeof run.run.slots);
        world_say(w, &w->prefill, PROTO_LANE_STREAMS, &run);
    }
    return a;
}

/* Takes the oldest PREFILL_DONE, whosever it is; false: there is none. */
static inline bool prompts_take_done(world *w, proto_prefill_done *out) {
    proto_message done = {0};
    const bool is_there = world_take(&w->prefill, PROTO_PREFILL_DONE, &done);
    *out = done.prefill_done;
    return is_there;
}

static inline proto_prefill_done prompts_expect_done(world *w, proto_attempt a, bt_status status) {
    proto_prefill_done done;
    assert_true(prompts_take_done(w, &done));
    assert_true(proto_attempt_equal(done.attempt, a));
    assert_int_equal(done.status, status);
    return done;
}

static inline void prompts_expect_none(world *w) {
    proto_prefill_done done;
    assert_false(prompts_take_done(w, &done));
}

#endif
