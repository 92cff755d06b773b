/* Recognising ChatML in a Jinja source. The source is brought to one spelling (white space between
 * tokens dropped, one kind of quote, escapes resolved), and then must contain the exact expression
 * that writes a message and the one that opens the answer; a template that trims, adds dates or
 * writes roles in another way does not. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "router/chat_template.h"

/* How a line end and a quote inside of a string are spelled after folding. */
#define LINE  "\x01"
#define QUOTE "\x02"

typedef struct jinja_fold {
    char *out;
    size_t bytes;
    bool is_code; /* inside of {{ }} or {% %} */
    char quote;   /* of the string we are in; 0 = none */
} jinja_fold;

static void fold_put(jinja_fold *fold, char c) {
    fold->out[fold->bytes++] = c;
}

/* One character of a string literal; returns how many were read. */
static size_t fold_string(jinja_fold *fold, const char *at, size_t left) {
    if (*at == '\\' && left > 1) {
        const char c = at[1];
        fold_put(fold, c == 'n' ? LINE[0] : c == '\'' ? QUOTE[0] : c == '"' ? '"' : '\\');
        return 2;
    }
    if (*at == fold->quote) {
        fold->quote = 0;
        fold_put(fold, '\'');
    } else if (*at == '\n') {
        fold_put(fold, LINE[0]);
    } else {
        fold_put(fold, *at == '\'' ? QUOTE[0] : *at);
    }
    return 1;
}

static void fold_code(jinja_fold *fold, const char *at, size_t left) {
    if (*at == '\'' || *at == '"') {
        fold->quote = *at;
        fold_put(fold, '\'');
    } else if (strchr(" \t\r\n", *at) == NULL || *at == '\0') {
        fold_put(fold, *at);
    }
    if (left > 1 && (*at == '}' || *at == '%') && at[1] == '}') fold->is_code = false;
}

/* `out` has room for `bytes` + 1. */
static void fold_source(const char *source, size_t bytes, char *out) {
    jinja_fold fold = {.out = out};
    for (size_t i = 0; i < bytes;) {
        const char *at = source + i;
        const size_t left = bytes - i;
        if (fold.quote != 0) {
            i += fold_string(&fold, at, left);
            continue;
        }
        if (left > 1 && *at == '{' && (at[1] == '{' || at[1] == '%')) fold.is_code = true;
        if (fold.is_code)
            fold_code(&fold, at, left);
        else
            fold_put(&fold, *at);
        i++;
    }
    out[fold.bytes] = '\0';
}

static bool has_any(const char *text, const char *const *needles, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strstr(text, needles[i]) != NULL) return true;
    return false;
}

static bool writes_messages(const char *folded) {
    static const char *const spellings[] = {
        "'<|im_start|>'+message.role+'" LINE "'+message.content+'<|im_end|>'+'" LINE "'",
        "'<|im_start|>'+message.role+'" LINE "'+message.content+'<|im_end|>" LINE "'",
        "'<|im_start|>'+message['role']+'" LINE "'+message['content']+'<|im_end|>'+'" LINE "'",
        "'<|im_start|>'+message['role']+'" LINE "'+message['content']+'<|im_end|>" LINE "'",
    };
    static const char by_name[] =
        "'<|im_start|>'+message.role+'" LINE "'+content+'<|im_end|>'+'" LINE "'";
    if (has_any(folded, spellings, BT_ARRAY_COUNT(spellings))) return true;
    return strstr(folded, "setcontent=message.content%}") != NULL &&
           strstr(folded, by_name) != NULL;
}

/* The text of "<|im_start|>system ... <|im_end|>" that the template says by itself. Two different
 * ones, or an escape that is not resolved here, make the template an unknown one. */
static bt_status find_default_system(const char *folded, chat_template *out) {
    static const char head[] = "'<|im_start|>system" LINE;
    static const char tail[] = "<|im_end|>";
    for (const char *at = strstr(folded, head); at != NULL; at = strstr(at, head)) {
        at += sizeof head - 1;
        const char *end = strstr(at, tail);
        if (end == NULL || memchr(at, '\'', (size_t)(end - at)) != NULL) continue;
        char *system = bt_calloc((size_t)(end - at) + 1, 1);
        if (system == NULL) return BT_ERR_WORKER_MEMORY;
        for (size_t i = 0; at + i < end; i++)
            system[i] = at[i] == LINE[0] ? '\n' : at[i] == QUOTE[0] ? '\'' : at[i];
        const bool differs =
            out->default_system != NULL && strcmp(out->default_system, system) != 0;
        if (differs || strchr(system, '\\') != NULL) out->style = CHAT_STYLE_NONE;
        bt_free(out->default_system);
        out->default_system = system;
    }
    return BT_OK;
}

static bool has_all(const char *text, const char *const *needles, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strstr(text, needles[i]) == NULL) return false;
    return true;
}

/* Tool answers become user turns. */
static const char *const tool_parts[] = {"'<|im_start|>user'", "'" LINE "<tool_response>" LINE "'",
                                         "'" LINE "</tool_response>'"};
/* Thoughts are cut off, put back after the last question, and switched off by an empty one. */
static const char *const thinking_parts[] = {
    ".split('</think>')[-1].lstrip('" LINE "')",     "loop.index0>ns.last_query_index",
    "loop.lastor(notloop.lastandreasoning_content)", "enable_thinkingisfalse",
    "'<think>" LINE LINE "</think>" LINE LINE "'",
};

static chat_style style_of(const char *folded) {
    static const char *const foreign[] = {"<|im_sep|>", "bos_token", "strftime_now",
                                          "raise_exception", "|trim"};
    if (has_any(folded, foreign, BT_ARRAY_COUNT(foreign)) || !writes_messages(folded) ||
        strstr(folded, "'<|im_start|>assistant" LINE "'") == NULL)
        return CHAT_STYLE_NONE;
    const bool names_tools = strstr(folded, "<tool_response>") != NULL;
    if (names_tools && !has_all(folded, tool_parts, BT_ARRAY_COUNT(tool_parts)))
        return CHAT_STYLE_NONE;
    if (strstr(folded, "think>") != NULL || strstr(folded, "strip(") != NULL)
        return names_tools && has_all(folded, thinking_parts, BT_ARRAY_COUNT(thinking_parts))
                   ? CHAT_STYLE_QWEN3
                   : CHAT_STYLE_NONE;
    return names_tools ? CHAT_STYLE_QWEN : CHAT_STYLE_CHATML;
}

bt_status chat_template_detect(const char *source, size_t bytes, chat_template *out) {
    *out = (chat_template){0};
    if (source == NULL) {
        (void)snprintf(out->reason, sizeof out->reason, "it has no chat template");
        return BT_OK;
    }
    char *folded = bt_malloc(bytes + 1);
    if (folded == NULL) return BT_ERR_WORKER_MEMORY;
    fold_source(source, bytes, folded);
    out->style = style_of(folded);
    bt_status status = BT_OK;
    if (out->style != CHAT_STYLE_NONE) status = find_default_system(folded, out);
    bt_free(folded);
    if (out->style == CHAT_STYLE_NONE) {
        chat_template_fini(out);
        (void)snprintf(out->reason, sizeof out->reason,
                       "its chat template is not one of the known ChatML ones");
    }
    return status;
}
