/* Generation cases as text, and their results as text that can be compared with diff: what the
 * oracle (one process, kernels only) and pd_run (a cluster) both read and write.
 *
 * A case is one line of `key=value` words, in any order; lines that are empty or start with # are
 * skipped. name and ids (the prompt) are required:
 *   name=a ids=1,2,3 max_new_tokens=8 temperature=0.8 top_p=0.95 top_k=50 min_p=0.1
 *   filter=joint|rank frequency_penalty=0.5 presence_penalty=0.5 repetition_penalty=1.1
 *   bias=5:1.5,9:-2   additions to logits
 *   stop=2,9          ids that end a sample, and with min_new_tokens=4 cannot be drawn before
 *   ignore_stop=1     they end nothing; min_new_tokens still bans them
 *   n=3 seed=7        samples of the prompt; sample i > 0 draws with the i-th splitmix64 output
 *   mask=off|selected|support vocab_limit=0
 *   bounded=0|1       a support above the cap is cut to it; rows then say its true size
 *   cap=N             of this case, for baton-draw; the others have an option for all
 *   logprob=0|1 top=5 logprob_ids=3,4   log-probabilities; the others need logprob=1
 *   prompt_logprobs_from=0              also of the prompt's tokens behind that position
 *
 * Results: per case the scored tokens of the prompt, then per sample a line per row and a last one.
 * Floats are hexadecimal, so that every bit shows. With n > 1 the name of sample i is NAME#i.
 *   a prompt 1 token 2 logprob -0x1.8p+1 top 2:-0x1.8p+1 ids 3:-0x1p+3 4:-0x1p+2
 *   a row 0 token 17 logprob -0x1.8p+1 selected -0x1p-1 support 17:-0x1p-1 9:-0x1.4p+0 top 17:-0x..
 *   a finish length rows 8 */
#ifndef BT_TESTS_ORACLE_CASES_H
#define BT_TESTS_ORACLE_CASES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/status.h"

enum {
    CASE_NAME_BYTES = 64,
    CASE_STOP_MAX = 64,
    CASE_BIASES_MAX = 256,
    CASE_LOGPROB_IDS_MAX = 64,
    CASE_TOP_MAX = 128,
    CASE_SAMPLES_MAX = 128,
};

typedef struct oracle_case {
    char name[CASE_NAME_BYTES];
    int32_t *ids; /* owned */
    uint32_t id_count;
    uint32_t max_new_tokens;
    float temperature, top_p, min_p;
    uint32_t top_k;
    uint32_t filter; /* sampler_filter's numbers */
    float frequency_penalty, presence_penalty, repetition_penalty;
    uint32_t mask_mode; /* sampler_mask_mode's numbers */
    uint32_t mask_bounded, cap;
    uint32_t vocab_limit;
    uint64_t seed;
    uint32_t samples; /* n */
    uint32_t stop_count;
    int32_t stop_ids[CASE_STOP_MAX];
    uint32_t ignores_stop;
    uint32_t min_new_tokens;
    uint32_t bias_count;
    int32_t bias_ids[CASE_BIASES_MAX];
    float biases[CASE_BIASES_MAX];
    uint32_t wants_logprob;
    uint32_t top_logprobs;
    uint32_t logprob_id_count;
    int32_t logprob_ids[CASE_LOGPROB_IDS_MAX];
    bool wants_prompt_logprobs;
    uint32_t prompt_logprobs_from;
} oracle_case;

/* Laid out as sampler_top and row_top. */
typedef struct oracle_top {
    int32_t id;
    float logprob;
} oracle_top;

/* Arrays are borrowed; id_logprobs [the case's logprob_id_count]. */
typedef struct oracle_row {
    int32_t token;
    float token_logprob, selected_logprob;
    uint32_t support_count, support_size;
    const int32_t *support_ids;
    const float *support_logprobs; /* NULL unless support mode */
    uint32_t top_count;
    const oracle_top *top;
    const float *id_logprobs;
} oracle_row;

/* Reads all cases of a stream; CALLER_FILE with the line number. *cases_out is owned by the caller.
 */
BT_MUST_CHECK bt_status cases_read(FILE *file, oracle_case **cases_out, uint32_t *count_out,
                                   bt_error *error);
void cases_free(oracle_case *cases, uint32_t count);
void cases_print_row(FILE *out, const oracle_case *c, uint32_t sample, uint32_t index,
                     const oracle_row *row);
/* A scored token of the prompt: of the row token, token_logprob, top and id_logprobs count. */
void cases_print_prompt(FILE *out, const oracle_case *c, uint32_t position, const oracle_row *row);
/* finish: "stop", "length", "error: ..." */
void cases_print_finish(FILE *out, const oracle_case *c, uint32_t sample, const char *finish,
                        uint32_t rows);

#endif
