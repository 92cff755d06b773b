/* Time and length of one number as JSON text, in a loop over a buffer: log-probabilities and ids.
 */
#include <math.h>
#include <stdio.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/json_number.h"
#include "base/mem.h"

enum { NUMBERS = 1 << 16, REPEATS = 40 };

typedef struct bench {
    float *logprobs;
    int64_t *ids;
    char *text;
} bench;

static size_t print_floats(const bench *b) {
    size_t length = 0;
    for (size_t i = 0; i < NUMBERS; i++) {
        length += bt_json_float(b->text + length, b->logprobs[i]);
        b->text[length++] = ',';
    }
    return length - NUMBERS;
}

static size_t print_ints(const bench *b) {
    size_t length = 0;
    for (size_t i = 0; i < NUMBERS; i++) {
        length += bt_json_int(b->text + length, b->ids[i]);
        b->text[length++] = ',';
    }
    return length - NUMBERS;
}

static void measure(const char *name, const bench *b, size_t (*print)(const bench *)) {
    const bt_clock clock = bt_clock_system();
    uint64_t best = UINT64_MAX;
    size_t length = 0;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        const uint64_t start = bt_clock_now_us(&clock);
        length = print(b);
        const uint64_t took = bt_clock_now_us(&clock) - start;
        best = took < best ? took : best;
    }
    printf("%-18s %6.1f ns %6.1f characters\n", name, (double)best * 1e3 / NUMBERS,
           (double)length / NUMBERS);
}

int main(void) {
    bench b = {
        .logprobs = bt_calloc(NUMBERS, sizeof(float)),
        .ids = bt_calloc(NUMBERS, sizeof(int64_t)),
        .text = bt_calloc(NUMBERS + 2, BT_JSON_DOUBLE_MAX + 1),
    };
    BT_ASSERT(b.logprobs != NULL && b.ids != NULL && b.text != NULL);
    uint64_t state = 1;
    for (size_t i = 0; i < NUMBERS; i++) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        b.logprobs[i] = logf((float)((state >> 40) + 1) * 0x1p-24F);
        b.ids[i] = (int64_t)((state >> 20) % 151936U);
    }
    measure("log-probabilities", &b, print_floats);
    measure("ids", &b, print_ints);
    bt_free(b.logprobs);
    bt_free(b.ids);
    bt_free(b.text);
    return 0;
}
