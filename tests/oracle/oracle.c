/* baton-oracle: both roles in one process, with kernels alone: no handoff, no queue, no wire. What
 * it prints is what any cluster must answer, bit for bit, whatever the batch, the chunks, the pages
 * or the threads. Cases come from stdin (cases.h).
 *
 *   baton-oracle --model PATH [--threads N] [--chunk-tokens N] [--page-tokens N] [--kv-dtype D]
 *                [--weights F] [--batch N] [--sampling-mask-max-tokens N] */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/options.h"
#include "kernels/model.h"
#include "tests/oracle/cases.h"

typedef struct settings {
    const char *model;
    uint32_t threads, chunk_tokens, page_tokens, kv_dtype, weights, batch, cap;
} settings;

static const char *const kv_dtypes[] = {"bf16", "f32", NULL};
static const char *const weights[] = {"auto", "bf16", "int8", "native", NULL};

static const bt_option option_rows[] = {
    {.name = "model",
     .type = BT_OPTION_STRING,
     .help = "GGUF file or folder.",
     .offset = offsetof(settings, model),
     .flags = BT_OPTION_REQUIRED},
    {.name = "threads",
     .type = BT_OPTION_U32,
     .default_text = "1",
     .min = 1,
     .max = 256,
     .help = "Compute threads.",
     .offset = offsetof(settings, threads)},
    {.name = "chunk-tokens",
     .type = BT_OPTION_U32,
     .default_text = "512",
     .min = 1,
     .max = 1u << 16,
     .help = "Prompt tokens of one step.",
     .offset = offsetof(settings, chunk_tokens)},
    {.name = "page-tokens",
     .type = BT_OPTION_U32,
     .default_text = "32",
     .min = 16,
     .max = 64,
     .help = "Tokens of a page.",
     .offset = offsetof(settings, page_tokens)},
    {.name = "kv-dtype",
     .type = BT_OPTION_ENUM,
     .default_text = "bf16",
     .choices = kv_dtypes,
     .help = "Type of keys and values.",
     .offset = offsetof(settings, kv_dtype)},
    {.name = "weights",
     .type = BT_OPTION_ENUM,
     .default_text = "auto",
     .choices = weights,
     .help = "Form of the weights.",
     .offset = offsetof(settings, weights)},
    {.name = "batch",
     .type = BT_OPTION_U32,
     .default_text = "1",
     .min = 1,
     .max = 256,
     .help = "Sequences of one decode step.",
     .offset = offsetof(settings, batch)},
    {.name = "sampling-mask-max-tokens",
     .type = BT_OPTION_U32,
     .default_text = "4096",
     .min = 1,
     .max = 1u << 20,
     .help = "Cap of a mask row.",
     .offset = offsetof(settings, cap)},
};

static const bt_option_table option_table = {
    .program = "baton-oracle",
    .version = "0",
    .summary = "Generates from stdin's cases in one process.",
    .options = option_rows,
    .count = BT_ARRAY_COUNT(option_rows),
};

/* One sample in work. Its pages are its own, [place * pages_each, (place + 1) * pages_each), but
 * for the full pages of the prompt, which all samples of a case share: those of `shared`. */
typedef struct sequence {
    const oracle_case *c;
    uint32_t sample;
    uint32_t place;
    uint32_t shared_place;
    int32_t *outputs; /* [max_new_tokens] */
    uint32_t rows;
    const char *finish; /* NULL while it runs */
    char *text;         /* its output, printed in the order of cases and samples */
    size_t text_bytes;
    FILE *out;
} sequence;

typedef struct oracle {
    settings settings;
    model *model;
    model_runner *runner;
    kv_page_layout kv;
    uint8_t *kv_memory;
    uint32_t pages_each;
    uint32_t rows_max;
    int32_t *support_ids;    /* [rows_max][cap] */
    float *support_logprobs; /* [rows_max][cap] */
    sampler_top *top;        /* [rows_max][SAMPLER_TOP_MAX] */
    float *id_logprobs;      /* [rows_max][CASE_LOGPROB_IDS_MAX] */
} oracle;

/* Sample 0 has the seed itself, sample i the i-th output of splitmix64 that starts at it. */
static uint64_t sample_seed(uint64_t seed, uint32_t sample) {
    if (sample == 0) return seed;
    uint64_t z = seed + sample * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

/* Of the sample's next row. */
static sampler_params sampling_of(const oracle *o, const sequence *s) {
    const oracle_case *c = s->c;
    return (sampler_params){.temperature = c->temperature,
                            .top_p = c->top_p,
                            .top_k = c->top_k,
                            .mask_mode = c->mask_mode,
                            .mask_max_tokens = c->mask_mode != 0 ? o->settings.cap : 0,
                            .mask_bounded = c->mask_bounded,
                            .vocab_limit = c->vocab_limit,
                            .wants_logprob = c->wants_logprob,
                            .seed = sample_seed(c->seed, s->sample),
                            .filter = c->filter,
                            .min_p = c->min_p,
                            .frequency_penalty = c->frequency_penalty,
                            .presence_penalty = c->presence_penalty,
                            .repetition_penalty = c->repetition_penalty,
                            .output_ids = s->outputs,
                            .output_count = s->rows,
                            .banned_ids = c->stop_ids,
                            .banned_count = s->rows < c->min_new_tokens ? c->stop_count : 0,
                            .bias_ids = c->bias_ids,
                            .biases = c->biases,
                            .bias_count = c->bias_count,
                            .top_logprobs = c->top_logprobs,
                            .logprob_ids = c->logprob_ids,
                            .logprob_id_count = c->logprob_id_count};
}

static bool is_stop(const oracle_case *c, int32_t token) {
    for (uint32_t i = 0; c->ignores_stop == 0 && i < c->stop_count; i++) {
        if (c->stop_ids[i] == token) return true;
    }
    return false;
}

static void take_row(sequence *s, const sampler_row *row) {
    if (row->status != SAMPLER_OK) {
        s->finish = row->status == SAMPLER_OVERFLOW ? "overflow" : "capture";
        return;
    }
    const oracle_row printed = {
        .token = row->token,
        .token_logprob = row->token_logprob,
        .selected_logprob = row->selected_logprob,
        .support_count = row->support_count,
        .support_size = row->cap_needed,
        .support_ids = row->support_ids,
        .support_logprobs = s->c->mask_mode == SAMPLER_MASK_SUPPORT ? row->support_logprobs : NULL,
        .top_count = row->top_count,
        .top = (const oracle_top *)row->top,
        .id_logprobs = row->id_logprobs,
    };
    cases_print_row(s->out, s->c, s->sample, s->rows, &printed);
    s->outputs[s->rows++] = row->token;
    if (s->rows >= s->c->max_new_tokens) {
        s->finish = "length";
    } else if (is_stop(s->c, row->token)) {
        s->finish = "stop";
    }
}

static sampler_row row_at(oracle *o, uint32_t at) {
    return (sampler_row){.support_ids = o->support_ids + (size_t)at * o->settings.cap,
                         .support_logprobs = o->support_logprobs + (size_t)at * o->settings.cap,
                         .top = o->top + (size_t)at * SAMPLER_TOP_MAX,
                         .id_logprobs = o->id_logprobs + (size_t)at * CASE_LOGPROB_IDS_MAX};
}

/* Pages of a place in reverse: nothing may depend on where a page lies. */
static uint32_t page_at(const oracle *o, uint32_t place, uint32_t index) {
    return (place + 1) * o->pages_each - 1 - index;
}

static void fill_pages(const oracle *o, const sequence *s, uint32_t *to, uint32_t count) {
    const uint32_t full = s->c->id_count / o->settings.page_tokens;
    for (uint32_t i = 0; i < count; i++)
        to[i] = page_at(o, i < full ? s->shared_place : s->place, i);
}

/* ---- prompts --------------------------------------------------------------------------------- */

enum { BATCH_MAX = 256 };

/* Log-probabilities of a whole prompt; entry i is of the token at position from + 1 + i. */
typedef struct prompt_scores {
    uint32_t count;
    float *logprobs;
    sampler_top *top;
    float *id_logprobs;
} prompt_scores;

static bt_status create_scores(const oracle_case *c, prompt_scores *out) {
    *out = (prompt_scores){0};
    if (!c->wants_prompt_logprobs) return BT_OK;
    out->count = c->id_count - 1 - c->prompt_logprobs_from;
    out->logprobs = bt_calloc(out->count + 1, sizeof *out->logprobs);
    out->top = bt_calloc((size_t)out->count * c->top_logprobs + 1, sizeof *out->top);
    out->id_logprobs =
        bt_calloc((size_t)out->count * c->logprob_id_count + 1, sizeof *out->id_logprobs);
    const bool is_complete = out->logprobs != NULL && out->top != NULL && out->id_logprobs != NULL;
    return is_complete ? BT_OK : BT_ERR_WORKER_MEMORY;
}

static void free_scores(prompt_scores *scores) {
    bt_free(scores->logprobs);
    bt_free(scores->top);
    bt_free(scores->id_logprobs);
}

/* What of them a chunk [at, at + count) of the prompt gives. */
static model_scores scores_of_chunk(const oracle_case *c, prompt_scores *all, uint32_t at,
                                    uint32_t count) {
    const uint32_t from = c->prompt_logprobs_from;
    const uint32_t first = at > from ? at : from;
    const uint32_t end = at + count < c->id_count - 1 ? at + count : c->id_count - 1;
    if (all->count == 0 || first >= end) return (model_scores){0};
    const size_t done = first - from;
    return (model_scores){.first = first - at,
                          .count = end - first,
                          .targets = c->ids + first + 1,
                          .vocab_limit = c->vocab_limit,
                          .top_count = c->top_logprobs,
                          .id_count = c->logprob_id_count,
                          .ids = c->logprob_ids,
                          .logprobs = all->logprobs + done,
                          .top = all->top + done * c->top_logprobs,
                          .id_logprobs = all->id_logprobs + done * c->logprob_id_count};
}

static void print_scores(const oracle_case *c, const prompt_scores *scores, FILE *out) {
    for (uint32_t i = 0; i < scores->count; i++) {
        const uint32_t position = c->prompt_logprobs_from + 1 + i;
        const uint32_t found = c->top_logprobs;
        const oracle_row row = {
            .token = c->ids[position],
            .token_logprob = scores->logprobs[i],
            .top_count = found,
            .top = (const oracle_top *)(scores->top + (size_t)i * found),
            .id_logprobs = scores->id_logprobs + (size_t)i * c->logprob_id_count,
        };
        cases_print_prompt(out, c, position, &row);
    }
}

/* One chunk of the prompt of samples[0]; the last one draws a row of each sample. */
static bt_status run_chunk(oracle *o, sequence *samples, uint32_t at, uint32_t count,
                           prompt_scores *all, uint32_t *page_ids) {
    static sampler_params sampling[CASE_SAMPLES_MAX];
    static sampler_row rows[CASE_SAMPLES_MAX];
    const oracle_case *c = samples->c;
    const uint32_t pages = kv_pages_for(at + count, o->settings.page_tokens);
    const uint32_t token_offsets[2] = {0, count};
    const uint32_t page_offsets[2] = {0, pages};
    const uint8_t is_drawn = at + count == c->id_count && c->max_new_tokens > 0;
    const uint32_t draw_offsets[2] = {0, is_drawn ? c->samples : 0};
    const model_scores scores = scores_of_chunk(c, all, at, count);
    for (uint32_t i = 0; i < draw_offsets[1]; i++) {
        sampling[i] = sampling_of(o, &samples[i]);
        rows[i] = row_at(o, i);
    }
    fill_pages(o, samples, page_ids, pages);
    const model_batch batch = {.sequences = 1,
                               .tokens = count,
                               .token_offsets = token_offsets,
                               .token_ids = c->ids + at,
                               .first_positions = &at,
                               .page_offsets = page_offsets,
                               .page_ids = page_ids,
                               .samples = &is_drawn,
                               .sampling = sampling,
                               .rows = rows,
                               .scores = &scores,
                               .draw_offsets = draw_offsets};
    const bt_status status = model_step(o->runner, &batch);
    if (status == BT_OK && at + count == c->id_count) print_scores(c, all, samples->out);
    for (uint32_t i = 0; status == BT_OK && i < draw_offsets[1]; i++)
        take_row(&samples[i], &rows[i]);
    return status;
}

/* The prompt of a case, whose samples are samples[0 .. n), and their first rows. */
static bt_status prefill(oracle *o, sequence *samples, uint32_t *page_ids) {
    const oracle_case *c = samples->c;
    prompt_scores scores;
    bt_status status = create_scores(c, &scores);
    for (uint32_t at = 0; status == BT_OK && at < c->id_count;) {
        const uint32_t left = c->id_count - at;
        const uint32_t count = left < o->settings.chunk_tokens ? left : o->settings.chunk_tokens;
        status = run_chunk(o, samples, at, count, &scores, page_ids);
        at += count;
    }
    free_scores(&scores);
    const size_t page_bytes = kv_page_bytes(&o->kv);
    const uint32_t last = c->id_count / o->settings.page_tokens;
    for (uint32_t i = 0; i < c->samples; i++) {
        if (c->max_new_tokens == 0) samples[i].finish = "length";
        if (i == 0 || c->id_count % o->settings.page_tokens == 0) continue;
        memcpy(o->kv_memory + page_at(o, samples[i].place, last) * page_bytes,
               o->kv_memory + page_at(o, samples->place, last) * page_bytes, page_bytes);
    }
    return status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* One token of each sample that runs. *count_out = how many did. */
static bt_status decode(oracle *o, sequence *sequences, uint32_t count, uint32_t *page_ids,
                        uint32_t *count_out) {
    static uint32_t token_offsets[BATCH_MAX + 1], page_offsets[BATCH_MAX + 1];
    static uint32_t first_positions[BATCH_MAX], places[BATCH_MAX];
    static int32_t token_ids[BATCH_MAX];
    static uint8_t samples[BATCH_MAX];
    static sampler_params sampling[BATCH_MAX];
    static sampler_row rows[BATCH_MAX];
    uint32_t n = 0;
    for (uint32_t i = 0; i < count; i++) {
        const sequence *s = &sequences[i];
        if (s->finish != NULL) continue;
        places[n] = i;
        token_ids[n] = s->outputs[s->rows - 1];
        first_positions[n] = s->c->id_count + s->rows - 1;
        const uint32_t pages = first_positions[n] / o->settings.page_tokens + 1;
        fill_pages(o, s, page_ids + page_offsets[n], pages);
        page_offsets[n + 1] = page_offsets[n] + pages;
        token_offsets[n + 1] = n + 1;
        samples[n] = 1;
        sampling[n] = sampling_of(o, s);
        rows[n] = row_at(o, n);
        n++;
    }
    *count_out = n;
    if (n == 0) return BT_OK;
    const model_batch batch = {.sequences = n,
                               .tokens = n,
                               .token_offsets = token_offsets,
                               .token_ids = token_ids,
                               .first_positions = first_positions,
                               .page_offsets = page_offsets,
                               .page_ids = page_ids,
                               .samples = samples,
                               .sampling = sampling,
                               .rows = rows};
    const bt_status status = model_step(o->runner, &batch);
    if (status != BT_OK) return status;
    for (uint32_t i = 0; i < n; i++)
        take_row(&sequences[places[i]], &rows[i]);
    return BT_OK;
}

static bt_status open_sequence(sequence *s, const oracle_case *c, uint32_t sample, uint32_t place) {
    *s = (sequence){.c = c, .sample = sample, .place = place, .shared_place = place - sample};
    s->outputs = bt_calloc(c->max_new_tokens + 1, sizeof *s->outputs);
    s->out = open_memstream(&s->text, &s->text_bytes);
    return s->out != NULL && s->outputs != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
}

static void close_sequence(sequence *s, bool is_printed) {
    bt_free(s->outputs);
    if (s->out == NULL) return;
    (void)fclose(s->out);
    if (is_printed) {
        (void)fputs(s->text, stdout);
        cases_print_finish(stdout, s->c, s->sample, s->finish, s->rows);
    }
    free(s->text); /* open_memstream's own */
}

/* Cases whose samples, rows_max at most, make one batch. */
static bt_status run_group(oracle *o, const oracle_case *cases, uint32_t count) {
    static sequence sequences[BATCH_MAX];
    uint32_t *page_ids = bt_calloc((size_t)o->rows_max * o->pages_each, sizeof *page_ids);
    bt_status status = page_ids != NULL ? BT_OK : BT_ERR_WORKER_MEMORY;
    uint32_t n = 0;
    for (uint32_t i = 0; status == BT_OK && i < count; i++) {
        sequence *samples = &sequences[n];
        for (uint32_t j = 0; status == BT_OK && j < cases[i].samples; j++) {
            status = open_sequence(&sequences[n], &cases[i], j, n);
            n++;
        }
        if (status == BT_OK) status = prefill(o, samples, page_ids);
    }
    uint32_t running = 1;
    while (status == BT_OK && running > 0) {
        status = decode(o, sequences, n, page_ids, &running);
    }
    for (uint32_t i = 0; i < n; i++)
        close_sequence(&sequences[i], status == BT_OK);
    bt_free(page_ids);
    return status;
}

/* How many of the next cases go into one batch: as many as fit, at least one. */
static uint32_t group_of(const oracle *o, const oracle_case *cases, uint32_t count) {
    uint32_t samples = 0;
    for (uint32_t i = 0; i < count; i++) {
        samples += cases[i].samples;
        if (i > 0 && samples > o->settings.batch) return i;
    }
    return count;
}

/* ---- program --------------------------------------------------------------------------------- */

static bt_status check_cases(oracle *o, const oracle_case *cases, uint32_t count,
                             uint32_t *tokens_out, bt_error *error) {
    o->rows_max = o->settings.batch;
    const model_geometry *g = &model_get_card(o->model)->geometry;
    uint32_t most = 1;
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t tokens = (uint64_t)cases[i].id_count + cases[i].max_new_tokens;
        if (tokens > g->context_tokens) {
            return bt_fail(error, BT_ERR_CALLER_FILE, "case %s: %" PRIu64 " tokens are too many",
                           cases[i].name, tokens);
        }
        if (tokens > most) most = (uint32_t)tokens;
        if (cases[i].samples > o->rows_max) o->rows_max = cases[i].samples;
    }
    *tokens_out = most;
    return BT_OK;
}

static bt_status set_up(oracle *o, const oracle_case *cases, uint32_t count, bt_error *error) {
    const settings *s = &o->settings;
    const model_load_options load = {.weights = (model_weights)s->weights};
    bt_status status = model_load(s->model, &load, &o->model, error);
    uint32_t tokens = 0;
    if (status == BT_OK) status = check_cases(o, cases, count, &tokens, error);
    if (status != BT_OK) return status;
    o->pages_each = kv_pages_for(tokens, s->page_tokens);
    o->kv = model_kv_layout(o->model, s->page_tokens, (kv_dtype)s->kv_dtype);
    const size_t rows = o->rows_max;
    const uint32_t pages = o->pages_each * o->rows_max;
    o->kv_memory = bt_calloc_aligned(4096, pages * kv_page_bytes(&o->kv));
    o->support_ids = bt_calloc(rows * s->cap, sizeof *o->support_ids);
    o->support_logprobs = bt_calloc(rows * s->cap, sizeof *o->support_logprobs);
    o->top = bt_calloc(rows * SAMPLER_TOP_MAX, sizeof *o->top);
    o->id_logprobs = bt_calloc(rows * CASE_LOGPROB_IDS_MAX, sizeof *o->id_logprobs);
    if (o->kv_memory == NULL || o->support_ids == NULL || o->support_logprobs == NULL ||
        o->top == NULL || o->id_logprobs == NULL) {
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    }
    const model_runner_options options = {
        .threads = s->threads,
        .tokens_max = s->chunk_tokens > o->rows_max ? s->chunk_tokens : o->rows_max,
        .rows_max = o->rows_max,
        .kv = o->kv,
        .kv_memory = o->kv_memory,
        .kv_page_count = pages};
    return model_runner_create(o->model, &options, &o->runner, error);
}

int main(int argc, char **argv) {
    static oracle o;
    bt_options *options = NULL;
    int exit_status = 0;
    bt_log_set_level(BT_LOG_WARN);
    if (!bt_options_start(&option_table, argc, argv, &o.settings, &options, &exit_status)) {
        return exit_status;
    }
    oracle_case *cases = NULL;
    uint32_t count = 0;
    bt_error error = {0};
    bt_status status = cases_read(stdin, &cases, &count, &error);
    if (status == BT_OK) status = set_up(&o, cases, count, &error);
    for (uint32_t at = 0; status == BT_OK && at < count;) {
        const uint32_t group = group_of(&o, cases + at, count - at);
        status = run_group(&o, cases + at, group);
        if (status != BT_OK) (void)bt_fail(&error, status, "%s", bt_status_string(status));
        at += group;
    }
    if (status != BT_OK) (void)fprintf(stderr, "baton-oracle: %s\n", error.text);
    model_runner_destroy(o.runner);
    model_destroy(o.model);
    bt_free(o.kv_memory);
    bt_free(o.support_ids);
    bt_free(o.support_logprobs);
    bt_free(o.top);
    bt_free(o.id_logprobs);
    cases_free(cases, count);
    bt_options_destroy(options);
    return status == BT_OK ? 0 : 1;
}
