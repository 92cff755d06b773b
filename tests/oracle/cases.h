/* Generation cases as text, and their results as text that can be compared with diff: what the
 * oracle (one process, kernels only) and pd_run (a cluster) both read and write.
 *
 * A case is one line of `key=value` words, in any order; lines that are empty or start with # are
 * skipped:
 *   name=a ids=1,2,3 max_new_tokens=8 temperature=0.8 top_p=0.95 top_k=50 mask=off|selected|support
 *   logprob=0|1 seed=7 stop=2,9 vocab_limit=0
 * name and ids are required.
 *
 * Results: a line per row and a last one; floats are hexadecimal, so that every bit shows.
 *   a row 0 token 17 logprob -0x1.8p+1 selected -0x1p-1 support 17:-0x1p-1 9:-0x1.4p+0
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
};

typedef struct oracle_case {
    char name[CASE_NAME_BYTES];
    int32_t *ids; /* owned */
    uint32_t id_count;
    uint32_t max_new_tokens;
    float temperature, top_p;
    uint32_t top_k;
    uint32_t mask_mode; /* sampler_mask_mode's numbers */
    uint32_t wants_logprob;
    uint32_t vocab_limit;
    uint64_t seed;
    uint32_t stop_count;
    int32_t stop_ids[CASE_STOP_MAX];
} oracle_case;

typedef struct oracle_row {
    int32_t token;
    float token_logprob, selected_logprob;
    uint32_t support_count;
    const int32_t *support_ids;
    const float *support_logprobs; /* NULL unless support mode */
} oracle_row;

/* Reads all cases of a stream; CALLER_FILE with the line number. *cases_out is owned by the caller.
 */
BT_MUST_CHECK bt_status cases_read(FILE *file, oracle_case **cases_out, uint32_t *count_out,
                                   bt_error *error);
void cases_free(oracle_case *cases, uint32_t count);
void cases_print_row(FILE *out, const oracle_case *c, uint32_t index, const oracle_row *row);
/* finish: "stop", "length", "error: ..." */
void cases_print_finish(FILE *out, const oracle_case *c, const char *finish, uint32_t rows);

#endif
