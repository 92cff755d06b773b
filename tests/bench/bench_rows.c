/* The way of a row from the sampler to the client's socket, stage by stage, in support mode:
 *
 *     bench_rows [--width N] [--batch N] [--steps N] [--rounds N] [--texts N] [--only
 * decode|router]
 *
 * Prints a line for each stage: name, width, bytes, wall and CPU nanoseconds of one emission, which
 * is --steps steps (50) of --batch sequences (256); medians. tests/bench/rows makes tables of them.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/compiler.h"
#include "base/log.h"
#include "tests/bench/rows_bench.h"

static uint32_t number(const char *name, const char *text, uint32_t most) {
    char *end = NULL;
    errno = 0;
    const unsigned long value = text == NULL ? 0 : strtoul(text, &end, 10);
    if (errno != 0 || value == 0 || value > most || *end != '\0') {
        (void)fprintf(stderr, "bench_rows: %s: a number from 1 to %u is needed\n", name, most);
        exit(2);
    }
    return (uint32_t)value;
}

int main(int argc, char **argv) {
    bench_options o = {.width = 1000, .batch = 256, .steps = 50, .rounds = 5, .texts = 16};
    const struct {
        const char *name;
        uint32_t *value;
        uint32_t most;
    } options[] = {{"--width", &o.width, 1 << 17},
                   {"--batch", &o.batch, 4096},
                   {"--steps", &o.steps, 256},
                   {"--rounds", &o.rounds, 1000},
                   {"--texts", &o.texts, 4096}};
    const char *only = "";
    for (int i = 1; i < argc; i += 2) {
        size_t at = 0;
        if (strcmp(argv[i], "--only") == 0 && argv[i + 1] != NULL) {
            only = argv[i + 1];
            continue;
        }
        while (at < BT_ARRAY_COUNT(options) && strcmp(argv[i], options[at].name) != 0)
            at++;
        if (at == BT_ARRAY_COUNT(options)) {
            (void)fprintf(stderr, "bench_rows: unknown option %s\n", argv[i]);
            return 2;
        }
        *options[at].value = number(argv[i], argv[i + 1], options[at].most);
    }
    (void)signal(SIGPIPE, SIG_IGN);
    bt_log_set_level(BT_LOG_WARN);
    bench_rows rows;
    bench_rows_make(&rows, &o);
    if (strcmp(only, "router") != 0) bench_decode(&o, &rows);
    if (strcmp(only, "decode") != 0) bench_router(&o, &rows);
    bench_rows_free(&rows);
    return 0;
}
