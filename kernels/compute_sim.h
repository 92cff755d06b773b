/* Compute without a model, for tests, the simulator and the sim device: the next token is a hash of
 * the prefix. What a step writes into a page for one token is {running hash, token} and a pattern;
 * every step reads the whole prefix back from the pages and checks the chain, so that a page that
 * was lost, mixed up or not received gives SAMPLER_INVALID (NaN in scores) and never a plausible
 * token. With `trusts_pages` only the last token before a step's first is read, so that a step
 * costs no more behind a long prefix; the answers are the same where the pages are whole.
 * Tokens, supports and log-probabilities are a pure function of (prefix, parameters), so a PD run
 * can be compared with compute_sim_expect bit for bit. Every parameter of sampler_params that is
 * not neutral counts: penalties through how often each id is among output_ids (with none they are
 * neutral), biases and banned ids in any order; a banned id, also one
 * with a bias of -inf, is never drawn or in a support. Pages
 * are checked as model_step does. Rows are made here, every number a hash, or with `rows` by those:
 * numbers that fit together, cheaply.
 *
 * Steps take time on a clock that the owner drives: started by start, done by compute_sim_poll. */
#ifndef BT_KERNELS_COMPUTE_SIM_H
#define BT_KERNELS_COMPUTE_SIM_H

#include "kernels/compute.h"
#include "kernels/sim_rows.h"

enum { COMPUTE_SIM_TOKEN_BYTES_MIN = 16 };

typedef struct compute_sim_options {
    void *kv_memory; /* borrowed */
    uint32_t kv_page_count;
    size_t page_bytes; /* >= page_tokens * COMPUTE_SIM_TOKEN_BYTES_MIN, a multiple of page_tokens */
    uint32_t page_tokens;
    uint32_t vocab_size;
    uint32_t support_max; /* supports have 1 .. support_max ids (and at most top_k), >= 1 */
    uint64_t step_us;     /* time of a step, and of each of its tokens */
    uint64_t token_us;
    bool trusts_pages;
    sim_rows *rows; /* borrowed; NULL: rows of hashes. With them support_max is not looked at */
} compute_sim_options;

BT_MUST_CHECK bt_status compute_sim_create(const compute_sim_options *options, compute **out);
/* The step that runs ends at this time (of the clock that compute_sim_poll is given): the start's
 * time plus its length. UINT64_MAX when none runs. The first poll after a start fixes its start. */
uint64_t compute_sim_due_us(const compute *c);
/* Ends the running step if it is due: writes pages and rows, calls on_done. true when one ended. */
bool compute_sim_poll(compute *c, uint64_t now_us);
/* Runs a step at once, whatever its time, without on_done: for who keeps the time in a thread of
 * its own, which is then the only one that uses it. Statuses of model_step. */
BT_MUST_CHECK bt_status compute_sim_run(compute *c, const model_batch *batch);
/* The status that the next step ends with instead of running (then OK again). */
void compute_sim_fail_next(compute *c, bt_status status);

/* What any correct cluster answers: draws `count` rows after prompt [prompt_tokens] as one process
 * would. rows [count]; their arrays as in sampler.h, for the caller's cap. Rows that were drawn
 * join params->output_ids for the ones behind them. Stops early behind a row whose status is not
 * OK; returns the rows drawn. */
uint32_t compute_sim_expect(const compute_sim_options *options, const sampler_params *params,
                            const int32_t *prompt, uint32_t prompt_tokens, uint32_t count,
                            sampler_row *rows);
/* The same with the banned ids for the first `banned_rows` rows only, as min_new_tokens does. */
uint32_t compute_sim_expect_banned(const compute_sim_options *options, const sampler_params *params,
                                   uint32_t banned_rows, const int32_t *prompt,
                                   uint32_t prompt_tokens, uint32_t count, sampler_row *rows);
/* Fills scores as steps over the prompt would, whatever the chunks: scores->first counts from the
 * start of the prompt, which has at least first + count tokens. */
void compute_sim_expect_scores(const compute_sim_options *options, const int32_t *prompt,
                               const model_scores *scores);

#endif
