/* Time of one number as JSON text, in lists with commas: log-probabilities (float32 log-softmax of
 * random logits, most likely first as a support has them) and ids of a vocabulary of 151936.
 *
 *   bench_json_number [ROUNDS]
 *
 * All writers take the same values in turn, round by round, so that what disturbs the machine
 * disturbs all; figures are medians over the rounds, and a ratio is the median of each round's. A
 * buffer is warm and stays in the second cache, as that of a reply being written does. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/json_number.h"
#include "base/mem.h"
#ifdef BENCH_TO_CHARS
#include "tests/bench/bench_to_chars.h"
#endif

enum { VOCABULARY = 151936, ROW = 1000, ROWS = 8, NUMBERS = ROW * ROWS, ROUNDS_MAX = 1001 };

typedef struct values {
    float *floats;
    int32_t *ints;
    char *text; /* what bt_json_* makes of them, for memcpy */
    size_t text_bytes;
} values;

typedef size_t (*writer)(char *out, const values *v);

typedef struct contender {
    const char *name;
    writer write;
    double ns[ROUNDS_MAX]; /* of one number */
    size_t bytes;
} contender;

static size_t floats_list(char *out, const values *v) {
    return bt_json_floats(out, v->floats, NUMBERS);
}

static size_t floats_each(char *out, const values *v) {
    char *end = out;
    for (size_t i = 0; i < NUMBERS; i++) {
        end += bt_json_float(end, v->floats[i]);
        *end++ = ',';
    }
    return (size_t)(end - out) - 1;
}

static size_t floats_as_doubles(char *out, const values *v) {
    char *end = out;
    for (size_t i = 0; i < NUMBERS; i++) {
        end += bt_json_double(end, (double)v->floats[i]);
        *end++ = ',';
    }
    return (size_t)(end - out) - 1;
}

static size_t floats_printf(char *out, const values *v) {
    char *end = out;
    for (size_t i = 0; i < NUMBERS; i++)
        end += snprintf(end, BT_JSON_NUMBER_ROOM, "%.17g,", (double)v->floats[i]);
    return (size_t)(end - out) - 1;
}

static size_t ints_list(char *out, const values *v) {
    return bt_json_ints(out, v->ints, NUMBERS);
}

static size_t ints_each(char *out, const values *v) {
    char *end = out;
    for (size_t i = 0; i < NUMBERS; i++) {
        end += bt_json_int(end, v->ints[i]);
        *end++ = ',';
    }
    return (size_t)(end - out) - 1;
}

static size_t ints_printf(char *out, const values *v) {
    char *end = out;
    for (size_t i = 0; i < NUMBERS; i++)
        end += snprintf(end, BT_JSON_NUMBER_ROOM, "%d,", v->ints[i]);
    return (size_t)(end - out) - 1;
}

static size_t text_copy(char *out, const values *v) {
    memcpy(out, v->text, v->text_bytes);
    return v->text_bytes;
}

#ifdef BENCH_TO_CHARS
static size_t floats_to_chars(char *out, const values *v) {
    return bench_to_chars_floats(out, v->floats, NUMBERS);
}

static size_t ints_to_chars(char *out, const values *v) {
    return bench_to_chars_ints(out, v->ints, NUMBERS);
}
#endif

static double now_ns(void) {
    struct timespec t;
    BT_ASSERT(clock_gettime(CLOCK_MONOTONIC, &t) == 0);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *from, size_t count) {
    static double sorted[ROUNDS_MAX];
    memcpy(sorted, from, count * sizeof *from);
    qsort(sorted, count, sizeof *sorted, compare_doubles);
    return sorted[count / 2];
}

/* The first contender is what the others are compared with. */
static void measure(const char *title, contender *all, size_t count, const values *v,
                    size_t rounds) {
    char *out = bt_malloc(bt_json_floats_room(NUMBERS));
    BT_ASSERT(out != NULL);
    for (size_t round = 0; round <= rounds; round++)
        for (size_t i = 0; i < count; i++) {
            const double start = now_ns();
            all[i].bytes = all[i].write(out, v);
            if (round > 0) all[i].ns[round - 1] = (now_ns() - start) / NUMBERS;
        }
    printf("%s: %zu values, %zu rounds\n", title, (size_t)NUMBERS, rounds);
    printf("%-28s %8s %10s %8s\n", "", "ns", "characters", "ratio");
    for (size_t i = 0; i < count; i++) {
        static double ratios[ROUNDS_MAX];
        for (size_t round = 0; round < rounds; round++)
            ratios[round] = all[i].ns[round] / all[0].ns[round];
        printf("%-28s %8.2f %10.2f %8.3f\n", all[i].name, median(all[i].ns, rounds),
               (double)all[i].bytes / NUMBERS, median(ratios, rounds));
    }
    bt_free(out);
}

static double next_uniform(uint64_t *state) {
    *state = *state * 6364136223846793005U + 1442695040888963407U;
    return (double)((*state >> 11) + 1) * 0x1p-53;
}

static int compare_floats_down(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The ROW most likely of a vocabulary of normal logits; each row at its own temperature. */
static void fill_row(float *row, float *logits, double spread, uint64_t *state) {
    double sum = 0.0;
    for (size_t i = 0; i < VOCABULARY; i++) {
        const double radius = sqrt(-2.0 * log(next_uniform(state)));
        logits[i] = (float)(spread * radius * cos(6.283185307179586 * next_uniform(state)));
        sum += exp((double)logits[i]);
    }
    qsort(logits, VOCABULARY, sizeof *logits, compare_floats_down);
    const float log_sum = (float)log(sum);
    for (size_t i = 0; i < ROW; i++)
        row[i] = logits[i] - log_sum;
}

static void values_init(values *v) {
    float *logits = bt_calloc(VOCABULARY, sizeof *logits);
    *v = (values){.floats = bt_calloc(NUMBERS, sizeof(float)),
                  .ints = bt_calloc(NUMBERS, sizeof(int32_t)),
                  .text = bt_malloc(bt_json_floats_room(NUMBERS))};
    BT_ASSERT(logits != NULL && v->floats != NULL && v->ints != NULL && v->text != NULL);
    uint64_t state = 1;
    for (size_t row = 0; row < ROWS; row++)
        fill_row(v->floats + row * ROW, logits, 1.0 + 0.5 * (double)row, &state);
    for (size_t i = 0; i < NUMBERS; i++)
        v->ints[i] = (int32_t)(next_uniform(&state) * (VOCABULARY - 1));
    bt_free(logits);
}

static void values_fini(values *v) {
    bt_free(v->floats);
    bt_free(v->ints);
    bt_free(v->text);
}

int main(int argc, char **argv) {
    static contender floats[] = {
#ifdef BENCH_TO_CHARS
        {.name = "std::to_chars", .write = floats_to_chars},
#endif
        {.name = "bt_json_floats", .write = floats_list},
        {.name = "bt_json_float, one by one", .write = floats_each},
        {.name = "bt_json_double", .write = floats_as_doubles},
        {.name = "snprintf %.17g", .write = floats_printf},
        {.name = "memcpy of the text", .write = text_copy},
    };
    static contender ints[] = {
#ifdef BENCH_TO_CHARS
        {.name = "std::to_chars", .write = ints_to_chars},
#endif
        {.name = "bt_json_ints", .write = ints_list},
        {.name = "bt_json_int, one by one", .write = ints_each},
        {.name = "snprintf %d", .write = ints_printf},
        {.name = "memcpy of the text", .write = text_copy},
    };
    const long asked = argc > 1 ? strtol(argv[1], NULL, 10) : 201;
    const size_t rounds = asked < 1 ? 1 : asked > ROUNDS_MAX ? ROUNDS_MAX : (size_t)asked;
    values v;
    values_init(&v);
    v.text_bytes = bt_json_floats(v.text, v.floats, NUMBERS);
    measure("log-probabilities", floats, sizeof floats / sizeof floats[0], &v, rounds);
    v.text_bytes = bt_json_ints(v.text, v.ints, NUMBERS);
    measure("ids", ints, sizeof ints / sizeof ints[0], &v, rounds);
    values_fini(&v);
    return 0;
}
