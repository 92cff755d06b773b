/* tiny-model NAME FOLDER [--gguf] [--seed N] [--context N] [--window N] [--shards N]: writes a tiny
 * model for tests and prints the path to give to --model. NAME is as for tiny_model_parse (llama,
 * qwen2, qwen3, wide, mistral, smollm2, llama-yarn, ...); FOLDER is made when it is missing. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/support/tiny_model.h"

static int fail_usage(void) {
    (void)fprintf(stderr,
                  "usage: tiny-model llama|smollm2|mistral|qwen2|qwen3|wide[-linear|-llama3|-yarn|"
                  "-bias] FOLDER [--gguf] [--seed N] [--context N] [--window N] "
                  "[--shards N]\n");
    return 2;
}

static bool parse_number(const char *text, uint64_t limit, uint64_t *out) {
    char *end = NULL;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value > limit) return false;
    *out = value;
    return true;
}

int main(int argc, char **argv) {
    tiny_model m = {.seed = 1};
    bool is_gguf = false;
    if (argc < 3 || !tiny_model_parse(argv[1], &m)) return fail_usage();
    const char *folder = argv[2];
    for (int i = 3; i < argc; i++) {
        uint64_t value = 0;
        if (strcmp(argv[i], "--gguf") == 0) {
            is_gguf = true;
        } else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc &&
                   parse_number(argv[i + 1], UINT64_MAX, &value)) {
            m.seed = value;
            i++;
        } else if (strcmp(argv[i], "--context") == 0 && i + 1 < argc &&
                   parse_number(argv[i + 1], 1 << 20, &value)) {
            m.context_tokens = (uint32_t)value;
            i++;
        } else if (strcmp(argv[i], "--window") == 0 && i + 1 < argc &&
                   parse_number(argv[i + 1], 1 << 20, &value)) {
            m.sliding_window = (uint32_t)value;
            i++;
        } else if (strcmp(argv[i], "--shards") == 0 && i + 1 < argc &&
                   parse_number(argv[i + 1], 99, &value)) {
            m.shards = (uint32_t)value;
            i++;
        } else {
            return fail_usage();
        }
    }
    if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
        (void)fprintf(stderr, "%s: cannot be made: %s\n", folder, strerror(errno));
        return 1;
    }
    const bt_status status =
        is_gguf ? tiny_model_write_gguf(&m, folder, "model.gguf") : tiny_model_write_hf(&m, folder);
    if (status != BT_OK) {
        (void)fprintf(stderr, "%s: cannot write the model: %s\n", folder, strerror(errno));
        return 1;
    }
    (void)printf("%s%s\n", folder, is_gguf ? "/model.gguf" : "");
    return 0;
}
