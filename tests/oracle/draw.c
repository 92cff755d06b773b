/* baton-draw: the sampler alone, for an oracle in another language. Case i of stdin (cases.h) draws
 * from row i of a file of float32 rows; its ids are the output so far, and the position is their
 * number minus 1. Prints a row each; with prompt_logprobs_from also the row's score at the first of
 * the ids.
 *
 *   baton-draw LOGITS VOCABULARY [ISA] */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "kernels/sampler.h"
#include "tests/oracle/cases.h"

enum { VOCAB_MAX = 65536 };

typedef struct drawer {
    sampler_workspace *workspace;
    uint32_t vocab_size;
    float *logits;
    int32_t *support_ids;
    float *support_logprobs;
    sampler_top top[SAMPLER_TOP_MAX];
    float id_logprobs[CASE_LOGPROB_IDS_MAX];
} drawer;

static sampler_params params_of(const drawer *d, const oracle_case *c) {
    const uint32_t cap = c->cap != 0 ? c->cap : d->vocab_size;
    return (sampler_params){.temperature = c->temperature,
                            .top_p = c->top_p,
                            .top_k = c->top_k,
                            .mask_mode = c->mask_mode,
                            .mask_max_tokens = c->mask_mode != 0 ? cap : 0,
                            .mask_bounded = c->mask_bounded,
                            .vocab_limit = c->vocab_limit,
                            .wants_logprob = c->wants_logprob,
                            .seed = c->seed,
                            .filter = c->filter,
                            .min_p = c->min_p,
                            .frequency_penalty = c->frequency_penalty,
                            .presence_penalty = c->presence_penalty,
                            .repetition_penalty = c->repetition_penalty,
                            .output_ids = c->ids,
                            .output_count = c->id_count,
                            .banned_ids = c->stop_ids,
                            .banned_count = c->id_count < c->min_new_tokens ? c->stop_count : 0,
                            .bias_ids = c->bias_ids,
                            .biases = c->biases,
                            .bias_count = c->bias_count,
                            .top_logprobs = c->top_logprobs,
                            .logprob_ids = c->logprob_ids,
                            .logprob_id_count = c->logprob_id_count};
}

static bool draw(drawer *d, const oracle_case *c) {
    const sampler_params params = params_of(d, c);
    sampler_row row = {.support_ids = d->support_ids,
                       .support_logprobs = d->support_logprobs,
                       .top = d->top,
                       .id_logprobs = d->id_logprobs};
    if (!sampler_params_are_valid(&params, d->vocab_size)) return false;
    sampler_draw(d->workspace, &params, d->logits, d->vocab_size, c->id_count - 1, &row);
    if (row.status != SAMPLER_OK) {
        cases_print_finish(stdout, c, 0, "invalid", 0);
        return true;
    }
    const oracle_row printed = {
        .token = row.token,
        .token_logprob = row.token_logprob,
        .selected_logprob = row.selected_logprob,
        .support_count = row.support_count,
        .support_size = row.cap_needed,
        .support_ids = row.support_ids,
        .support_logprobs = c->mask_mode == SAMPLER_MASK_SUPPORT ? row.support_logprobs : NULL,
        .top_count = row.top_count,
        .top = (const oracle_top *)row.top,
        .id_logprobs = row.id_logprobs};
    cases_print_row(stdout, c, 0, 0, &printed);
    return true;
}

static void score(drawer *d, const oracle_case *c) {
    const sampler_scoring scoring = {.target = c->ids[0],
                                     .vocab_limit = c->vocab_limit,
                                     .top_count = c->top_logprobs,
                                     .id_count = c->logprob_id_count,
                                     .ids = c->logprob_ids};
    oracle_row row = {.token = c->ids[0],
                      .top_count = c->top_logprobs,
                      .top = (const oracle_top *)d->top,
                      .id_logprobs = d->id_logprobs};
    if (sampler_score_row(d->workspace, &scoring, d->logits, d->vocab_size, &row.token_logprob,
                          d->top, d->id_logprobs)) {
        cases_print_prompt(stdout, c, 0, &row);
    }
}

static bool create(drawer *d, const char *isa) {
    d->logits = bt_calloc(d->vocab_size, sizeof *d->logits);
    d->support_ids = bt_calloc(d->vocab_size, sizeof *d->support_ids);
    d->support_logprobs = bt_calloc(d->vocab_size, sizeof *d->support_logprobs);
    return d->logits != NULL && d->support_ids != NULL && d->support_logprobs != NULL &&
           sampler_workspace_create_isa(d->vocab_size, isa, &d->workspace) == BT_OK;
}

static void destroy(drawer *d) {
    sampler_workspace_destroy(d->workspace);
    bt_free(d->logits);
    bt_free(d->support_ids);
    bt_free(d->support_logprobs);
}

int main(int argc, char **argv) {
    static drawer d;
    const unsigned long vocab_size = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
    FILE *file = argc > 2 ? fopen(argv[1], "rbe") : NULL;
    if (file == NULL || vocab_size == 0 || vocab_size > VOCAB_MAX) {
        (void)fprintf(stderr, "usage: baton-draw LOGITS VOCABULARY [ISA] < CASES\n");
        return 2;
    }
    d.vocab_size = (uint32_t)vocab_size;
    oracle_case *cases = NULL;
    uint32_t count = 0;
    bt_error error = {.text = "out of memory, or no such instruction set"};
    bool is_ok = create(&d, argc > 3 ? argv[3] : NULL);
    if (is_ok) is_ok = cases_read(stdin, &cases, &count, &error) == BT_OK;
    for (uint32_t i = 0; is_ok && i < count; i++) {
        (void)bt_fail(&error, BT_ERR_CALLER_FILE, "case %s: bad logits or ids", cases[i].name);
        is_ok = fread(d.logits, sizeof(float), vocab_size, file) == vocab_size;
        if (is_ok) is_ok = cases[i].ids[0] >= 0 && (uint32_t)cases[i].ids[0] < vocab_size;
        if (is_ok) is_ok = draw(&d, &cases[i]);
        if (is_ok && cases[i].wants_prompt_logprobs) score(&d, &cases[i]);
    }
    if (!is_ok) (void)fprintf(stderr, "baton-draw: %s\n", error.text);
    cases_free(cases, count);
    destroy(&d);
    (void)fclose(file);
    return is_ok ? 0 : 1;
}
