/* Megabytes of text per second and core, after one warming round: bench_tokenizer MODEL FILE
 * [ROUNDS]. The file is encoded in pieces of 4 KiB (cut at line ends), as prompts come, and as a
 * whole; then its ids are turned into text again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file_map.h"
#include "base/utf8.h"
#include "router/tokenizer.h"

enum { PROMPT_BYTES = 4096 };

static uint64_t now_us(void) {
    const bt_clock clock = bt_clock_system();
    return bt_clock_now_us(&clock);
}

static size_t prompt_end(const char *text, size_t bytes, size_t start) {
    if (bytes - start <= PROMPT_BYTES) return bytes;
    const char *line = memrchr(text + start, '\n', PROMPT_BYTES);
    if (line != NULL) return (size_t)(line - text) + 1;
    size_t end = start + PROMPT_BYTES;
    while (((uint8_t)text[end] & 0xC0) == 0x80)
        end--;
    return end;
}

static uint64_t encode(const tokenizer *t, const char *text, size_t bytes, bool is_whole,
                       token_list *list) {
    const uint64_t start_us = now_us();
    list->count = 0;
    for (size_t at = 0; at < bytes;) {
        const size_t end = is_whole ? bytes : prompt_end(text, bytes, at);
        if (tokenizer_encode(t, text + at, end - at, (tokenizer_encode_options){0}, list) != BT_OK)
            exit(1);
        at = end;
    }
    return now_us() - start_us;
}

static void count_text(void *context, const char *text, size_t bytes) {
    (void)text;
    *(size_t *)context += bytes;
}

static uint64_t decode(const tokenizer *t, const token_list *list, size_t *bytes_out) {
    const uint64_t start_us = now_us();
    detokenizer d;
    detokenizer_init(&d);
    *bytes_out = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const char *bytes = NULL;
        size_t count = 0;
        (void)tokenizer_token_bytes(t, list->ids[i], &bytes, &count);
        detokenizer_push(&d, bytes, count, count_text, bytes_out);
    }
    detokenizer_finish(&d, count_text, bytes_out);
    return now_us() - start_us;
}

static double rate(size_t bytes, uint64_t time_us) {
    return (double)bytes / (double)(time_us == 0 ? 1 : time_us);
}

int main(int count, char **values) {
    bt_error error = {0};
    tokenizer *t = NULL;
    bt_file_map file = {0};
    token_list list = {0};
    if (count < 3) {
        (void)fprintf(stderr, "usage: bench_tokenizer MODEL FILE [ROUNDS]\n");
        return 2;
    }
    const uint64_t start_us = now_us();
    if (tokenizer_load(values[1], &t, &error) != BT_OK ||
        bt_file_map_open(values[2], &file, &error) != BT_OK) {
        (void)fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    printf("load %.1f ms\n", (double)(now_us() - start_us) / 1e3);
    const char *text = (const char *)file.data;
    const size_t bytes = bt_utf8_valid_prefix(text, file.bytes);
    const long rounds = count > 3 ? strtol(values[3], NULL, 10) : 3;
    for (long round = 0; round <= rounds; round++) {
        size_t decoded = 0;
        const uint64_t prompts_us = encode(t, text, bytes, false, &list);
        const uint64_t whole_us = encode(t, text, bytes, true, &list);
        const uint64_t decode_us = decode(t, &list, &decoded);
        printf("%s %zu bytes, %u tokens: prompts %.1f MB/s, whole %.1f MB/s, to text %.1f MB/s\n",
               round == 0 ? "warming" : "round  ", bytes, list.count, rate(bytes, prompts_us),
               rate(bytes, whole_us), rate(decoded, decode_us));
    }
    token_list_fini(&list);
    bt_file_map_close(&file);
    tokenizer_destroy(t);
    return 0;
}
