/* Tokenizer files of any kind, tokenizer.json or GGUF by their first bytes: either a sentence, or a
 * tokenizer that encodes a text into ids of its own. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"
#include "router/tokenizer.h"
#include "tests/fuzz/fuzz.h"

static const char text[] = "the cat's \xF0\x9F\x98\x80 3.1415 e\xCC\x81t\xC3\xA9 <s> \n\n  ab";

static void use(const tokenizer *t) {
    token_list list = {0};
    const chat_message message = {"user", text, sizeof text - 1};
    const tokenizer_encode_options options = {.adds_special = true, .parses_special = true};
    BT_ASSERT(tokenizer_encode(t, text, sizeof text - 1, options, &list) == BT_OK);
    for (uint32_t i = 0; i < list.count; i++) {
        const char *bytes = NULL;
        size_t count = 0;
        BT_ASSERT(list.ids[i] >= 0 && (uint32_t)list.ids[i] < tokenizer_vocab_count(t));
        BT_ASSERT(tokenizer_token_bytes(t, list.ids[i], &bytes, &count));
    }
    bt_error error = {0};
    if (tokenizer_encode_chat(t, &message, 1, (chat_options){0}, &list, &error) != BT_OK)
        BT_ASSERT(error.text[0] != '\0');
    token_list_fini(&list);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char path[64];
    tokenizer *t = NULL;
    bt_error error = {0};
    const int file = memfd_create("tokenizer", MFD_CLOEXEC);
    BT_ASSERT(file >= 0);
    BT_ASSERT(write(file, data, bytes) == (ssize_t)bytes);
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (tokenizer_load(path, &t, &error) == BT_OK)
        use(t);
    else
        BT_ASSERT(error.text[0] != '\0');
    tokenizer_destroy(t);
    BT_ASSERT(close(file) == 0);
    return 0;
}
