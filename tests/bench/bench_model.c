/* Times model_step on one machine, on command: one command a line on standard input, one JSON
 * object a line on standard output. tests/bench/run asks it in turn with a peer and makes a table.
 *
 *   bench_model MODEL [--threads N] [--isa NAME] [--context N] [--batch N] [--ceiling-mib N]
 *               [--weights auto|bf16|int8|native]
 *
 * MODEL is a GGUF file or an HF folder, or "qwen3-0.6b": random weights of that shape. --context
 * (256) is the number of tokens before the generated ones, --batch (64) the largest batch,
 * --ceiling-mib (1024) the memory that the read ceiling is measured on. Seconds
 * are of the whole command, or means per step; cpu
 * is the CPU time by the number of threads, which other programs disturb less.
 *
 *   ceilings                      memory read and FMA peak, all threads
 *   prompt TOKENS                 one prompt, in chunks of 512, the first token drawn
 *   linear TOKENS                 the matrix products of one such chunk alone
 *   generate BATCH MODE STEPS     one token of BATCH sequences; MODE off, selected, support
 *   parts BATCH STEPS             the ops of such a step by themselves, without the sampler:
 * seconds and cpu of each capture BATCH STEPS           the same with masks off and support in
 * turn, and the medians of both and of their differences; inside is the time in the capture code,
 * of all threads together, over that of its steps */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"
#include "kernels/host/memory.h"
#include "kernels/model.h"
#include "kernels/model/model_generate.h"
#include "kernels/model/model_internal.h"
#include "tests/bench/bench_parts.h"
#include "tests/bench/ceilings.h"

enum {
    CHUNK = 512, /* tokens of a prompt in one step */
    PROMPT_MAX = 8192,
    STEPS_MAX = 64,
    PAGE_TOKENS = 32,
    TOP_K = 1000,
    MASK_MAX = 4096,
};

typedef struct options {
    const char *model;
    model_weights weights;
    const char *isa;
    uint32_t threads;
    uint32_t context;
    uint32_t batch_max;
    uint32_t ceiling_mib;
} options;

typedef struct bench {
    options o;
    model *m;
    model_runner *runner;
    dev_host *dev; /* for what is timed without a runner */
    ceilings *top;
    uint8_t *kv;
    kv_page_layout layout;
    uint32_t pages_max;
    double cpu_seconds; /* of the steps of this command */
    uint32_t prompted;  /* sequences whose pages hold `context` tokens */
    float *linear_in;   /* [CHUNK, widest], and out */
    float *linear_out;

    /* The batch; arrays of `batch_max`. */
    uint32_t *token_offsets, *first_positions, *page_offsets, *page_ids;
    int32_t *token_ids; /* [PROMPT_MAX] */
    uint8_t *samples;
    sampler_params *sampling;
    sampler_row *rows;
} bench;

static const model_geometry qwen3_06b = {.family = MODEL_FAMILY_QWEN3,
                                         .vocab_size = 151936,
                                         .context_tokens = 40960,
                                         .hidden_size = 1024,
                                         .intermediate_size = 3072,
                                         .layers = 28,
                                         .heads = 16,
                                         .kv_heads = 8,
                                         .head_dim = 128,
                                         .norm_epsilon = 1e-6F,
                                         .rope_theta = 1e6,
                                         .has_tied_embeddings = true,
                                         .has_qk_norm = true};

static void check(bt_status status, const bt_error *error) {
    if (status == BT_OK) return;
    fprintf(stderr, "bench_model: %s\n", error->text);
    exit(1);
}

static void *must(void *block) {
    if (block != NULL) return block;
    fprintf(stderr, "bench_model: out of memory\n");
    exit(1);
}

static double now_seconds(void) {
    const bt_clock clock = bt_clock_system();
    return (double)bt_clock_now_us(&clock) * 1e-6;
}

/* Of all threads together. */
static double cpu_seconds(void) {
    struct timespec t;
    BT_ASSERT(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t) == 0);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- what a step costs at least */

static double layer_weights(const model_layer *layer) {
    const pack_matrix *all[] = {&layer->qkv, &layer->attention_out, &layer->gate_up, &layer->down};
    double sum = 0.0;
    for (size_t i = 0; i < BT_ARRAY_COUNT(all); i++)
        sum += (double)all[i]->columns * all[i]->depth;
    return sum;
}

static double output_weights(const model *m) {
    return (double)m->output.columns * m->output.depth;
}

/* Multiplications and additions of the matrix products of `tokens` tokens in one step; in the last
 * layer only q, k and v are made of those that do not sample. */
static double linear_flops(const bench *b, uint32_t tokens, uint32_t samples) {
    const model_geometry *g = &b->m->card.geometry;
    double sum = 0.0;
    for (uint32_t i = 0; i < g->layers; i++) {
        const model_layer *layer = &b->m->layers[i];
        const double all = layer_weights(layer);
        const double qkv = (double)layer->qkv.columns * layer->qkv.depth;
        sum += i + 1 < g->layers ? all * tokens : qkv * tokens + (all - qkv) * samples;
    }
    return 2.0 * (sum + output_weights(b->m) * samples);
}

/* Of scores and values of `tokens` tokens after `first` others. */
static double attention_flops(const bench *b, uint32_t first, uint32_t tokens) {
    const model_geometry *g = &b->m->card.geometry;
    const double keys = (double)tokens * first + (double)tokens * (tokens + 1) / 2;
    return 4.0 * keys * g->heads * g->head_dim * g->layers;
}

static double matrix_bytes(const pack_matrix *m) {
    return (double)pack_bytes(m->format, m->columns, m->depth);
}

/* Bytes of weights that one step reads. */
static double weight_bytes(const bench *b) {
    double sum = matrix_bytes(&b->m->output);
    for (uint32_t i = 0; i < b->m->card.geometry.layers; i++) {
        const model_layer *layer = &b->m->layers[i];
        sum += matrix_bytes(&layer->qkv) + matrix_bytes(&layer->attention_out) +
               matrix_bytes(&layer->gate_up) + matrix_bytes(&layer->down);
    }
    return sum;
}

static double kv_bytes(const bench *b, uint32_t tokens) {
    return (double)kv_page_bytes(&b->layout) / PAGE_TOKENS * tokens;
}

/* ---- steps */

/* `sequences` sequences of `tokens` tokens after `first` others, their pages in order. */
static void fill(bench *b, uint32_t sequences, uint32_t tokens, uint32_t first) {
    const uint32_t pages = kv_pages_for(b->o.context + STEPS_MAX, PAGE_TOKENS);
    const uint32_t needed = kv_pages_for(first + tokens, PAGE_TOKENS);
    BT_ASSERT(sequences == 1 ? needed <= b->pages_max : needed <= pages);
    const uint32_t vocab_size = b->m->card.geometry.vocab_size;
    for (uint32_t s = 0; s < sequences; s++) {
        b->token_offsets[s + 1] = (s + 1) * tokens;
        b->first_positions[s] = first;
        b->page_offsets[s + 1] = (s + 1) * needed;
        b->samples[s] = 1;
        for (uint32_t i = 0; i < needed; i++)
            b->page_ids[s * needed + i] = s * pages + i;
        for (uint32_t i = 0; i < tokens; i++)
            b->token_ids[s * tokens + i] = (int32_t)((i * 7919 + s * 104729 + first) % vocab_size);
    }
}

static void set_sampling(bench *b, uint32_t sequences, uint32_t top_k, uint32_t mask_mode) {
    for (uint32_t s = 0; s < sequences; s++)
        b->sampling[s] = (sampler_params){.temperature = 1.0F,
                                          .top_p = 1.0F,
                                          .top_k = top_k,
                                          .mask_mode = mask_mode,
                                          .mask_max_tokens = MASK_MAX,
                                          .seed = s};
}

static double step_seconds(bench *b, uint32_t sequences) {
    const model_batch batch = {.sequences = sequences,
                               .tokens = b->token_offsets[sequences],
                               .token_offsets = b->token_offsets,
                               .token_ids = b->token_ids,
                               .first_positions = b->first_positions,
                               .page_offsets = b->page_offsets,
                               .page_ids = b->page_ids,
                               .samples = b->samples,
                               .sampling = b->sampling,
                               .rows = b->rows};
    const double start = now_seconds(), cpu_start = cpu_seconds();
    const bt_status status = model_step(b->runner, &batch);
    const double seconds = now_seconds() - start;
    b->cpu_seconds += cpu_seconds() - cpu_start;
    check(status, &(bt_error){.text = "a step failed"});
    for (uint32_t s = 0; s < sequences; s++)
        if (b->samples[s] == 1 && b->rows[s].status != SAMPLER_OK)
            check(BT_ERR_WORKER_INTERNAL, &(bt_error){.text = "a row was not drawn"});
    return seconds;
}

static double prompt_seconds(bench *b, uint32_t tokens) {
    double seconds = 0.0;
    set_sampling(b, 1, 1, SAMPLER_MASK_OFF);
    for (uint32_t done = 0; done < tokens; done += CHUNK) {
        const uint32_t count = tokens - done < CHUNK ? tokens - done : CHUNK;
        fill(b, 1, count, done);
        b->samples[0] = done + count == tokens;
        seconds += step_seconds(b, 1);
    }
    b->prompted = 0;
    return seconds;
}

/* The pages of `batch` sequences hold a prompt: computed once, copied to the others. */
static void prompt_batch(bench *b, uint32_t batch) {
    if (b->prompted >= batch) return;
    if (b->prompted == 0) (void)prompt_seconds(b, b->o.context);
    const size_t stride =
        kv_pages_for(b->o.context + STEPS_MAX, PAGE_TOKENS) * kv_page_bytes(&b->layout);
    const size_t used = kv_pages_for(b->o.context, PAGE_TOKENS) * kv_page_bytes(&b->layout);
    for (uint32_t s = b->prompted == 0 ? 1 : b->prompted; s < batch; s++)
        memcpy(b->kv + s * stride, b->kv, used);
    b->prompted = batch;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t count) {
    qsort(values, count, sizeof *values, compare_doubles);
    return count % 2 == 1 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static double mean(const double *values, size_t count) {
    double sum = 0.0;
    for (size_t i = 0; i < count; i++)
        sum += values[i];
    return sum / (double)count;
}

/* ---- commands */

static bool parse_mode(const char *text, uint32_t *mode) {
    static const char *const names[] = {"off", "selected", "support"};
    for (uint32_t i = 0; i < BT_ARRAY_COUNT(names); i++)
        if (strcmp(text, names[i]) == 0) {
            *mode = i;
            return true;
        }
    return false;
}

static void run_ceilings(bench *b) {
    const double read = ceilings_read(b->top);
    printf("{\"read\": %.0f, \"fma\": %.0f}\n", read, ceilings_fma(b->top));
}

static void run_prompt(bench *b, uint32_t tokens) {
    double flops = attention_flops(b, 0, tokens);
    for (uint32_t done = 0; done < tokens; done += CHUNK) {
        const uint32_t count = tokens - done < CHUNK ? tokens - done : CHUNK;
        flops += linear_flops(b, count, done + count == tokens);
    }
    b->cpu_seconds = 0.0;
    const double seconds = prompt_seconds(b, tokens);
    printf("{\"seconds\": %.6f, \"cpu\": %.6f, \"flops\": %.0f}\n", seconds,
           b->cpu_seconds / b->o.threads, flops);
}

static void linear_matmul(bench *b, const pack_matrix *weights, uint32_t rows) {
    op_matmul(b->dev, &(op_matmul_params){.out = b->linear_out,
                                          .x = b->linear_in,
                                          .weights = *weights,
                                          .out_stride = weights->columns,
                                          .x_stride = weights->depth,
                                          .rows = rows});
}

static void run_linear(bench *b, uint32_t rows) {
    const model_geometry *g = &b->m->card.geometry;
    double flops = 0.0;
    const double start = now_seconds(), cpu_start = cpu_seconds();
    for (uint32_t i = 0; i < g->layers; i++) {
        const model_layer *layer = &b->m->layers[i];
        linear_matmul(b, &layer->qkv, rows);
        linear_matmul(b, &layer->attention_out, rows);
        op_gate_up(b->dev, &(op_gate_up_params){.out = b->linear_out,
                                                .x = b->linear_in,
                                                .weights = layer->gate_up,
                                                .rows = rows,
                                                .width = g->intermediate_size});
        linear_matmul(b, &layer->down, rows);
        flops += 2.0 * rows * layer_weights(layer);
    }
    printf("{\"seconds\": %.6f, \"cpu\": %.6f, \"flops\": %.0f}\n", now_seconds() - start,
           (cpu_seconds() - cpu_start) / b->o.threads, flops);
}

static double generate_step(bench *b, uint32_t batch, uint32_t position, uint32_t mode) {
    fill(b, batch, 1, position);
    set_sampling(b, batch, TOP_K, mode);
    return step_seconds(b, batch);
}

static void run_generate(bench *b, uint32_t batch, uint32_t mode, uint32_t steps) {
    double seconds[STEPS_MAX];
    prompt_batch(b, batch);
    b->cpu_seconds = 0.0;
    for (uint32_t i = 0; i < steps; i++)
        seconds[i] = generate_step(b, batch, b->o.context + i, mode);
    const uint32_t context = b->o.context + steps / 2;
    printf("{\"seconds\": %.6f, \"cpu\": %.6f, \"flops\": %.0f, \"weight_bytes\": %.0f, "
           "\"kv_bytes\": %.0f}\n",
           mean(seconds, steps), b->cpu_seconds / steps / b->o.threads,
           linear_flops(b, batch, batch) + batch * attention_flops(b, context, 1), weight_bytes(b),
           batch * kv_bytes(b, context));
}

static void run_parts(bench *b, uint32_t batch, uint32_t steps) {
    prompt_batch(b, batch);
    fill(b, batch, 1, b->o.context);
    bench_parts_run(&(bench_parts){.m = b->m,
                                   .dev = b->dev,
                                   .kv = {.layout = b->layout,
                                          .memory = b->kv,
                                          .page_ids = b->page_ids,
                                          .page_offsets = b->page_offsets},
                                   .first_positions = b->first_positions,
                                   .sequences = batch,
                                   .steps = steps});
}

/* Each pair at one position: the same step but for the rows. */
static void run_capture(bench *b, uint32_t batch, uint32_t steps) {
    double off[STEPS_MAX], support[STEPS_MAX], difference[STEPS_MAX];
    prompt_batch(b, batch);
    model_runner_time_capture(b->runner, true);
    (void)model_runner_take_capture_ns(b->runner);
    for (uint32_t i = 0; i < steps; i++) {
        const uint32_t position = b->o.context + i;
        const bool is_off_first = i % 2 == 0;
        if (is_off_first) off[i] = generate_step(b, batch, position, SAMPLER_MASK_OFF);
        support[i] = generate_step(b, batch, position, SAMPLER_MASK_SUPPORT);
        if (!is_off_first) off[i] = generate_step(b, batch, position, SAMPLER_MASK_OFF);
        difference[i] = support[i] - off[i];
    }
    model_runner_time_capture(b->runner, false);
    const double capture = (double)model_runner_take_capture_ns(b->runner) * 1e-9;
    const double inside = capture / (mean(support, steps) * steps);
    printf("{\"off\": %.6f, \"support\": %.6f, \"difference\": %.6f, \"inside\": %.6f}\n",
           median(off, steps), median(support, steps), median(difference, steps), inside);
}

/* False when the line is no command. */
static bool run_command(bench *b, char *line) {
    char name[16], mode_name[16];
    uint32_t count, steps, mode;
    if (strcmp(line, "ceilings\n") == 0) {
        run_ceilings(b);
        return true;
    }
    if (sscanf(line, "generate %u %15s %u", &count, mode_name, &steps) == 3) {
        if (count == 0 || count > b->o.batch_max || steps == 0 || steps > STEPS_MAX ||
            !parse_mode(mode_name, &mode))
            return false;
        run_generate(b, count, mode, steps);
        return true;
    }
    if (sscanf(line, "parts %u %u", &count, &steps) == 2) {
        if (count == 0 || count > b->o.batch_max || steps == 0) return false;
        run_parts(b, count, steps);
        return true;
    }
    if (sscanf(line, "capture %u %u", &count, &steps) == 2) {
        if (count == 0 || count > b->o.batch_max || steps == 0 || steps > STEPS_MAX) return false;
        run_capture(b, count, steps);
        return true;
    }
    if (sscanf(line, "%15s %u", name, &count) != 2 || count == 0) return false;
    if (strcmp(name, "prompt") == 0 && count <= PROMPT_MAX)
        run_prompt(b, count);
    else if (strcmp(name, "linear") == 0 && count <= CHUNK)
        run_linear(b, count);
    else
        return false;
    return true;
}

/* ---- set up */

static void open_model(bench *b) {
    const model_load_options load = {.weights = b->o.weights, .threads = b->o.threads};
    bt_error error;
    if (strcmp(b->o.model, "qwen3-0.6b") == 0)
        check(model_generate_stored(&qwen3_06b, 1, PACK_BF16, load.weights, &b->m, &error), &error);
    else
        check(model_load(b->o.model, &load, &b->m, &error), &error);
}

static void open_batch(bench *b) {
    const uint32_t batch = b->o.batch_max;
    b->token_offsets = must(bt_calloc(batch + 1, sizeof *b->token_offsets));
    b->first_positions = must(bt_calloc(batch, sizeof *b->first_positions));
    b->page_offsets = must(bt_calloc(batch + 1, sizeof *b->page_offsets));
    b->page_ids = must(bt_calloc(b->pages_max, sizeof *b->page_ids));
    b->token_ids = must(bt_calloc(PROMPT_MAX, sizeof *b->token_ids));
    b->samples = must(bt_calloc(batch, sizeof *b->samples));
    b->sampling = must(bt_calloc(batch, sizeof *b->sampling));
    b->rows = must(bt_calloc(batch, sizeof *b->rows));
    for (uint32_t s = 0; s < batch; s++) {
        b->rows[s].support_ids = must(bt_calloc(MASK_MAX, sizeof(int32_t)));
        b->rows[s].support_logprobs = must(bt_calloc(MASK_MAX, sizeof(float)));
    }
}

static void open_linear(bench *b) {
    const model_geometry *g = &b->m->card.geometry;
    size_t widest = g->hidden_size > g->intermediate_size ? g->hidden_size : g->intermediate_size;
    const size_t qkv = (size_t)(g->heads + 2 * g->kv_heads) * g->head_dim;
    if (qkv > widest) widest = qkv;
    b->linear_in = must(bt_calloc_aligned(64, CHUNK * widest * sizeof(float)));
    b->linear_out = must(bt_calloc_aligned(64, CHUNK * widest * sizeof(float)));
    for (size_t i = 0; i < CHUNK * widest; i++)
        b->linear_in[i] = (float)(i * 7919 % 2003) * 0.001F - 1.0F;
}

static void open_runner(bench *b) {
    bt_error error;
    const options *o = &b->o;
    const model_geometry *g = &b->m->card.geometry;
    const uint32_t prompt = kv_pages_for(PROMPT_MAX, PAGE_TOKENS);
    b->layout = model_kv_layout(b->m, PAGE_TOKENS, KV_DTYPE_BF16);
    b->pages_max = o->batch_max * kv_pages_for(o->context + STEPS_MAX, PAGE_TOKENS);
    if (b->pages_max < prompt) b->pages_max = prompt;
    b->kv = must(host_memory_map(b->pages_max * kv_page_bytes(&b->layout)));
    const model_runner_options runner = {.threads = o->threads,
                                         .tokens_max = CHUNK,
                                         .rows_max = o->batch_max,
                                         .isa = o->isa,
                                         .kv = b->layout,
                                         .kv_memory = b->kv,
                                         .kv_page_count = b->pages_max};
    check(model_runner_create(b->m, &runner, &b->runner, &error), &error);
    const dev_host_options device = {.threads = o->threads,
                                     .isa = o->isa,
                                     .head_dim_max = g->head_dim,
                                     .group_max = g->heads / g->kv_heads};
    check(dev_host_create(&device, &b->dev, &error), &error);
    b->top = must(ceilings_create(b->dev, o->ceiling_mib));
}

static void close_all(bench *b) {
    ceilings_destroy(b->top);
    dev_host_destroy(b->dev);
    model_runner_destroy(b->runner);
    host_memory_unmap(b->kv, b->pages_max * kv_page_bytes(&b->layout));
    for (uint32_t s = 0; s < b->o.batch_max; s++) {
        bt_free(b->rows[s].support_ids);
        bt_free(b->rows[s].support_logprobs);
    }
    bt_free(b->token_offsets);
    bt_free(b->first_positions);
    bt_free(b->page_offsets);
    bt_free(b->page_ids);
    bt_free(b->token_ids);
    bt_free(b->samples);
    bt_free(b->sampling);
    bt_free(b->rows);
    bt_free(b->linear_in);
    bt_free(b->linear_out);
    model_destroy(b->m);
}

static uint32_t parse_number(const char *text, uint32_t low, uint32_t high) {
    char *end;
    const unsigned long value = strtoul(text, &end, 10);
    if (*text != '\0' && *end == '\0' && value >= low && value <= high) return (uint32_t)value;
    fprintf(stderr, "bench_model: '%s' is not a number from %u to %u\n", text, low, high);
    exit(2);
}

static bool parse_weights(const char *text, model_weights *weights) {
    static const char *const names[] = {"auto", "bf16", "int8", "native"};
    for (int i = 0; i < (int)BT_ARRAY_COUNT(names); i++)
        if (strcmp(text, names[i]) == 0) {
            *weights = (model_weights)i;
            return true;
        }
    return false;
}

static bool parse_options(options *o, int argc, char **argv) {
    if (argc < 2 || argc % 2 != 0) return false;
    o->model = argv[1];
    for (int i = 2; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--threads") == 0)
            o->threads = parse_number(argv[i + 1], 1, 1024);
        else if (strcmp(argv[i], "--context") == 0)
            o->context = parse_number(argv[i + 1], 1, PROMPT_MAX - STEPS_MAX);
        else if (strcmp(argv[i], "--batch") == 0)
            o->batch_max = parse_number(argv[i + 1], 1, 4096);
        else if (strcmp(argv[i], "--ceiling-mib") == 0)
            o->ceiling_mib = parse_number(argv[i + 1], 1, 1 << 20);
        else if (strcmp(argv[i], "--isa") == 0)
            o->isa = argv[i + 1];
        else if (strcmp(argv[i], "--weights") != 0 || !parse_weights(argv[i + 1], &o->weights))
            return false;
    }
    return true;
}

int main(int argc, char **argv) {
    static bench b = {.o = {.threads = 2,
                            .context = 256,
                            .batch_max = 64,
                            .ceiling_mib = 1024,
                            .weights = MODEL_WEIGHTS_BF16}};
    if (!parse_options(&b.o, argc, argv)) {
        fprintf(stderr, "usage: bench_model MODEL|qwen3-0.6b [--threads N] [--isa NAME]"
                        " [--context N] [--batch N] [--ceiling-mib N]"
                        " [--weights auto|bf16|int8|native]\n");
        return 2;
    }
    open_model(&b);
    open_runner(&b);
    open_batch(&b);
    open_linear(&b);
    printf("{\"model\": \"%s\", \"threads\": %u, \"isa\": \"%s\", \"context\": %u}\n",
           model_get_card(b.m)->name, b.o.threads, dev_host_isa_name(b.dev), b.o.context);
    fflush(stdout);
    char line[128];
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (!run_command(&b, line)) {
            fprintf(stderr, "bench_model: not a command: %s", line);
            return 2;
        }
        fflush(stdout);
    }
    close_all(&b);
    return 0;
}
