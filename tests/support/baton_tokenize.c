/* baton-tokenize: ids of texts, for comparison with other tokenizers. Not installed.
 *
 *   baton-tokenize MODEL [--special] [--parse] [--chat | --decode | --fingerprint] < records
 *
 * Standard input is read as records that end with NUL. For each one a line of ids is printed
 * ("error NAME" when it is refused). --special adds the post-processor's tokens, --parse recognises
 * special tokens in the text. --chat: a record is {"messages": [...], "thinking": "default" | "off"
 * | "on", "continues": bool}. --decode: a record is ids; the bytes of their text, a line end and
 * the text are printed. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "router/tokenizer.h"

enum { CHAT_MESSAGES_MAX = 64 };

typedef enum mode {
    MODE_TEXT,
    MODE_CHAT,
    MODE_DECODE,
    MODE_FINGERPRINT,
} mode;

typedef struct settings {
    const char *model;
    mode mode;
    tokenizer_encode_options options;
} settings;

static bool parse_arguments(int count, char **values, settings *out) {
    *out = (settings){0};
    for (int i = 1; i < count; i++) {
        if (strcmp(values[i], "--special") == 0)
            out->options.adds_special = true;
        else if (strcmp(values[i], "--parse") == 0)
            out->options.parses_special = true;
        else if (strcmp(values[i], "--chat") == 0)
            out->mode = MODE_CHAT;
        else if (strcmp(values[i], "--decode") == 0)
            out->mode = MODE_DECODE;
        else if (strcmp(values[i], "--fingerprint") == 0)
            out->mode = MODE_FINGERPRINT;
        else if (out->model == NULL)
            out->model = values[i];
        else
            return false;
    }
    return out->model != NULL;
}

static void print_ids(bt_status status, const token_list *list) {
    if (status != BT_OK) {
        printf("error %s\n", bt_status_string(status));
        return;
    }
    for (uint32_t i = 0; i < list->count; i++)
        printf(i == 0 ? "%d" : " %d", list->ids[i]);
    printf("\n");
}

static bt_status read_messages(const json_t *root, chat_message *messages, size_t *count_out) {
    const json_t *array = json_object_get(root, "messages");
    *count_out = json_array_size(array);
    if (*count_out > CHAT_MESSAGES_MAX) return BT_ERR_CALLER_LIMIT;
    for (size_t i = 0; i < *count_out; i++) {
        const json_t *message = json_array_get(array, i);
        const json_t *content = json_object_get(message, "content");
        messages[i] = (chat_message){json_string_value(json_object_get(message, "role")),
                                     json_string_value(content), json_string_length(content)};
        if (messages[i].role == NULL || messages[i].content == NULL) return BT_ERR_CALLER_FILE;
    }
    return BT_OK;
}

static bt_status encode_chat(const tokenizer *t, const char *record, size_t bytes,
                             token_list *list) {
    chat_message messages[CHAT_MESSAGES_MAX];
    chat_options options = {0};
    size_t count = 0;
    json_t *root = json_loadb(record, bytes, JSON_ALLOW_NUL, NULL);
    const char *thinking = json_string_value(json_object_get(root, "thinking"));
    if (thinking != NULL && strcmp(thinking, "off") == 0) options.thinking = CHAT_THINKING_OFF;
    if (thinking != NULL && strcmp(thinking, "on") == 0) options.thinking = CHAT_THINKING_ON;
    options.continues_final = json_is_true(json_object_get(root, "continues"));
    bt_status status = read_messages(root, messages, &count);
    bt_error error;
    if (status == BT_OK) status = tokenizer_encode_chat(t, messages, count, options, list, &error);
    json_decref(root);
    return status;
}

static void keep_text(void *context, const char *text, size_t bytes) {
    (void)fwrite(text, 1, bytes, context);
}

/* `record` is terminated. */
static void decode(const tokenizer *t, const char *record) {
    char *text = NULL;
    size_t text_bytes = 0;
    FILE *kept = open_memstream(&text, &text_bytes);
    detokenizer d;
    if (kept == NULL) return;
    detokenizer_init(&d);
    for (char *end = NULL;; record = end) {
        const long id = strtol(record, &end, 10);
        if (end == record) break;
        const char *bytes = NULL;
        size_t count = 0;
        (void)tokenizer_token_bytes(t, (int32_t)id, &bytes, &count);
        detokenizer_push(&d, bytes, count, keep_text, kept);
    }
    detokenizer_finish(&d, keep_text, kept);
    (void)fclose(kept);
    printf("%zu\n", text_bytes);
    (void)fwrite(text, 1, text_bytes, stdout);
    free(text);
}

static void answer(const tokenizer *t, const settings *with, const char *record, size_t bytes) {
    token_list list = {0};
    switch (with->mode) {
    case MODE_TEXT:
        print_ids(tokenizer_encode(t, record, bytes, with->options, &list), &list);
        break;
    case MODE_CHAT: print_ids(encode_chat(t, record, bytes, &list), &list); break;
    case MODE_DECODE: decode(t, record); break;
    case MODE_FINGERPRINT: break;
    }
    token_list_fini(&list);
}

static void print_fingerprint(const tokenizer *t) {
    for (int i = 0; i < TOKENIZER_FINGERPRINT_BYTES; i++)
        printf("%02x", tokenizer_fingerprint(t)[i]);
    printf("\n");
}

int main(int count, char **values) {
    settings with;
    if (!parse_arguments(count, values, &with)) {
        fprintf(stderr, "usage: baton-tokenize MODEL [--special] [--parse] "
                        "[--chat | --decode | --fingerprint] < records\n");
        return 2;
    }
    tokenizer *t = NULL;
    bt_error error;
    if (tokenizer_load(with.model, &t, &error) != BT_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    char *record = NULL;
    size_t capacity = 0;
    if (with.mode == MODE_FINGERPRINT) print_fingerprint(t);
    while (with.mode != MODE_FINGERPRINT) {
        const ssize_t read = getdelim(&record, &capacity, '\0', stdin);
        if (read <= 0) break;
        const size_t bytes = (size_t)read - (record[read - 1] == '\0' ? 1 : 0);
        answer(t, &with, record, bytes);
    }
    free(record);
    tokenizer_destroy(t);
    return 0;
}
