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

/* One case in work: its pages are its own, [first_page, first_page + pages_each). */
typedef struct sequence {
    const oracle_case *c;
    uint32_t rows;
    int32_t last_token;
    const char *finish; /* NULL while it runs */
    char *text;         /* its output, printed in the order of the cases */
    size_t text_bytes;
    FILE *out;
} sequence;

typedef struct oracle {
    settings settings;
    model *model;
    model_runner *runner;
    void *kv_memory;
    uint32_t pages_each;
    int32_t *support_ids; /* [batch][cap] */
    float *support_logprobs;
} oracle;

static sampler_params sampling_of(const oracle *o, const oracle_case *c) {
    return (sampler_params){.temperature = c->temperature,
                            .top_p = c->top_p,
                            .top_k = c->top_k,
                            .mask_mode = c->mask_mode,
                            .mask_max_tokens = c->mask_mode != 0 ? o->settings.cap : 0,
                            .vocab_limit = c->vocab_limit,
                            .wants_logprob = c->wants_logprob,
                            .seed = c->seed};
}

static bool is_stop(const oracle_case *c, int32_t token) {
    for (uint32_t i = 0; i < c->stop_count; i++) {
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
        .support_ids = row->support_ids,
        .support_logprobs = s->c->mask_mode == SAMPLER_MASK_SUPPORT ? row->support_logprobs : NULL,
    };
    cases_print_row(s->out, s->c, s->rows, &printed);
    s->rows++;
    s->last_token = row->token;
    if (s->rows >= s->c->max_new_tokens) {
        s->finish = "length";
    } else if (is_stop(s->c, row->token)) {
        s->finish = "stop";
    }
}

static sampler_row row_at(oracle *o, uint32_t at) {
    return (sampler_row){.support_ids = o->support_ids + (size_t)at * o->settings.cap,
                         .support_logprobs = o->support_logprobs + (size_t)at * o->settings.cap};
}

/* Pages of a place in the batch, in reverse: nothing may depend on where a page lies. */
static void fill_pages(const oracle *o, uint32_t place, uint32_t *to, uint32_t count) {
    const uint32_t end = (place + 1) * o->pages_each;
    for (uint32_t i = 0; i < count; i++)
        to[i] = end - 1 - i;
}

static bt_status prefill(oracle *o, sequence *s, uint32_t place, uint32_t *page_ids) {
    const oracle_case *c = s->c;
    const sampler_params sampling = sampling_of(o, c);
    for (uint32_t at = 0; at < c->id_count;) {
        const uint32_t left = c->id_count - at;
        const uint32_t count = left < o->settings.chunk_tokens ? left : o->settings.chunk_tokens;
        const uint32_t pages = kv_pages_for(at + count, o->settings.page_tokens);
        const uint32_t token_offsets[2] = {0, count};
        const uint32_t page_offsets[2] = {0, pages};
        const uint8_t samples = count == left && c->max_new_tokens > 0;
        sampler_row row = row_at(o, place);
        fill_pages(o, place, page_ids, pages);
        const model_batch batch = {.sequences = 1,
                                   .tokens = count,
                                   .token_offsets = token_offsets,
                                   .token_ids = c->ids + at,
                                   .first_positions = &at,
                                   .page_offsets = page_offsets,
                                   .page_ids = page_ids,
                                   .samples = &samples,
                                   .sampling = &sampling,
                                   .rows = &row};
        const bt_status status = model_step(o->runner, &batch);
        if (status != BT_OK) return status;
        if (samples) take_row(s, &row);
        at += count;
    }
    if (c->max_new_tokens == 0) s->finish = "length";
    return BT_OK;
}

enum { BATCH_MAX = 256 };

/* One token of each sequence that runs. *count_out = how many did. */
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
        token_ids[n] = s->last_token;
        first_positions[n] = s->c->id_count + s->rows - 1;
        const uint32_t pages = first_positions[n] / o->settings.page_tokens + 1;
        fill_pages(o, i, page_ids + page_offsets[n], pages);
        page_offsets[n + 1] = page_offsets[n] + pages;
        token_offsets[n + 1] = n + 1;
        samples[n] = 1;
        sampling[n] = sampling_of(o, s->c);
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

static bt_status run_group(oracle *o, const oracle_case *cases, uint32_t count) {
    static sequence sequences[BATCH_MAX];
    uint32_t *page_ids = bt_calloc((size_t)count * o->pages_each, sizeof *page_ids);
    if (page_ids == NULL) return BT_ERR_WORKER_MEMORY;
    bt_status status = BT_OK;
    for (uint32_t i = 0; i < count; i++) {
        sequence *s = &sequences[i];
        *s = (sequence){.c = &cases[i]};
        s->out = open_memstream(&s->text, &s->text_bytes);
        if (s->out == NULL) status = BT_ERR_WORKER_MEMORY;
    }
    for (uint32_t i = 0; status == BT_OK && i < count; i++) {
        status = prefill(o, &sequences[i], i, page_ids);
    }
    uint32_t running = 1;
    while (status == BT_OK && running > 0) {
        status = decode(o, sequences, count, page_ids, &running);
    }
    for (uint32_t i = 0; i < count; i++) {
        sequence *s = &sequences[i];
        if (s->out == NULL) continue;
        (void)fclose(s->out);
        if (status == BT_OK) {
            (void)fputs(s->text, stdout);
            cases_print_finish(stdout, s->c, s->finish, s->rows);
        }
        free(s->text); /* open_memstream's own */
    }
    bt_free(page_ids);
    return status;
}

/* ---- program --------------------------------------------------------------------------------- */

static bt_status check_cases(const oracle *o, const oracle_case *cases, uint32_t count,
                             uint32_t *tokens_out, bt_error *error) {
    const model_geometry *g = &model_get_card(o->model)->geometry;
    uint32_t most = 1;
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t tokens = (uint64_t)cases[i].id_count + cases[i].max_new_tokens;
        if (tokens > g->context_tokens) {
            return bt_fail(error, BT_ERR_CALLER_FILE, "case %s: %" PRIu64 " tokens are too many",
                           cases[i].name, tokens);
        }
        if (tokens > most) most = (uint32_t)tokens;
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
    const kv_page_layout kv = model_kv_layout(o->model, s->page_tokens, (kv_dtype)s->kv_dtype);
    const uint32_t pages = o->pages_each * s->batch;
    o->kv_memory = bt_calloc_aligned(4096, pages * kv_page_bytes(&kv));
    const size_t entries = (size_t)s->batch * s->cap;
    o->support_ids = bt_calloc(entries, sizeof *o->support_ids);
    o->support_logprobs = bt_calloc(entries, sizeof *o->support_logprobs);
    if (o->kv_memory == NULL || o->support_ids == NULL || o->support_logprobs == NULL) {
        return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    }
    const model_runner_options options = {.threads = s->threads,
                                          .tokens_max = s->chunk_tokens > s->batch ? s->chunk_tokens
                                                                                   : s->batch,
                                          .rows_max = s->batch,
                                          .kv = kv,
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
    for (uint32_t at = 0; status == BT_OK && at < count; at += o.settings.batch) {
        const uint32_t left = count - at;
        status = run_group(&o, cases + at, left < o.settings.batch ? left : o.settings.batch);
        if (status != BT_OK) (void)bt_fail(&error, status, "%s", bt_status_string(status));
    }
    if (status != BT_OK) (void)fprintf(stderr, "baton-oracle: %s\n", error.text);
    model_runner_destroy(o.runner);
    model_destroy(o.model);
    bt_free(o.kv_memory);
    bt_free(o.support_ids);
    bt_free(o.support_logprobs);
    cases_free(cases, count);
    bt_options_destroy(options);
    return status == BT_OK ? 0 : 1;
}
