/* Cutting text into pieces with PCRE2, one compiled expression per rule.
 *
 * The expressions are those of the model families, with three changes that keep their meaning and
 * pin it. White space is spelled out, because \s of PCRE2 under UCP has U+180E and Unicode's
 * White_Space has not. Letters and numbers get the ranges that Unicode 15 and 16 added, which are
 * not yet in PCRE2 10.42 (Unicode 14) but are in the engines of Hugging Face tokenizers 0.23; with
 * a newer PCRE2 the ranges are redundant. And where a family cuts single digits out first, the cut
 * is folded into the one expression: at a digit, white space then behaves as at the end of the
 * text.
 *
 * Every expression is anchored and linear: the only backtracking is over a run of white space,
 * once, and the run is consumed (but for one character) by the same match. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <string.h>

#include "base/assert.h"
#include "base/mem.h"
#include "router/tokenizer_internal.h"

/* Far above what a linear expression needs; the interpreter counts each step back. */
enum { MATCH_LIMIT = 1 << 28, MATCH_DEPTH_LIMIT = 1 << 20, MATCH_HEAP_KIB = 1 << 18 };

#define LETTER                                                                                     \
    "\\p{L}\\x{1c89}-\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}"         \
    "\\x{10d4a}-\\x{10d65}\\x{10d6f}-\\x{10d85}\\x{10ec2}-\\x{10ec4}\\x{1123f}-\\x{11240}"         \
    "\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}"           \
    "\\x{113d3}\\x{11bc0}-\\x{11be0}\\x{11f02}\\x{11f04}-\\x{11f10}\\x{11f12}-\\x{11f33}"          \
    "\\x{1342f}\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}"                    \
    "\\x{16d40}-\\x{16d6c}\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}"                     \
    "\\x{1e030}-\\x{1e06d}\\x{1e4d0}-\\x{1e4eb}\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}"          \
    "\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}"
#define NUMBER                                                                                     \
    "\\p{N}\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}"                        \
    "\\x{11f50}-\\x{11f59}\\x{16130}-\\x{16139}\\x{16d70}-\\x{16d79}\\x{1ccf0}-\\x{1ccf9}"         \
    "\\x{1d2c0}-\\x{1d2d3}\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}"
#define SPACE                                                                                      \
    "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"       \
    "\\x{3000}"

#define CONTRACTION "'s|'t|'re|'ve|'m|'ll|'d"
#define LLAMA_LIKE(numbers)                                                                        \
    "(?i:" CONTRACTION ")|[^\\r\\n" LETTER NUMBER "]?[" LETTER "]+|" numbers                       \
    "| ?[^" SPACE LETTER NUMBER "]+[\\r\\n]*|[" SPACE "]*[\\r\\n]+|[" SPACE "]+(?![^" SPACE        \
    "])|[" SPACE "]+"

/* NULL: the rule needs no expression. */
static const char *const expressions[SPLIT_RULE_COUNT] = {
    [SPLIT_RULE_GPT2] = CONTRACTION "| ?[" LETTER "]+| ?[" NUMBER "]+| ?[^" SPACE LETTER NUMBER
                                    "]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+",
    [SPLIT_RULE_DIGITS_GPT2] = CONTRACTION "|[" NUMBER "]| ?[" LETTER "]+| ?[^" SPACE LETTER NUMBER
                                           "]+|[" SPACE "]+(?![^" SPACE NUMBER "])|[" SPACE "]+",
    [SPLIT_RULE_LLAMA3] = LLAMA_LIKE("[" NUMBER "]{1,3}"),
    [SPLIT_RULE_QWEN2] = LLAMA_LIKE("[" NUMBER "]"),
};

/* As the files of the families spell them. */
#define LLAMA_LIKE_FILE(numbers)                                                                   \
    "(?i:" CONTRACTION ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" numbers                                  \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
static const char *const file_expressions[SPLIT_RULE_COUNT] = {
    [SPLIT_RULE_GPT2] = CONTRACTION "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
    [SPLIT_RULE_LLAMA3] = LLAMA_LIKE_FILE("\\p{N}{1,3}"),
    [SPLIT_RULE_QWEN2] = LLAMA_LIKE_FILE("\\p{N}"),
};

struct split_pattern {
    pcre2_code *code; /* NULL: the whole text is one piece */
    pcre2_match_context *limits;
    bool is_jit;
};

struct split_scratch {
    pcre2_match_data *match;
};

const char *split_rule_name(split_rule rule) {
    switch (rule) {
    case SPLIT_RULE_WHOLE: return "whole";
    case SPLIT_RULE_GPT2: return "gpt2";
    case SPLIT_RULE_DIGITS_GPT2: return "digits-gpt2";
    case SPLIT_RULE_LLAMA3: return "llama3";
    case SPLIT_RULE_QWEN2: return "qwen2";
    case SPLIT_RULE_COUNT: break;
    }
    return "unknown";
}

bool split_rule_of_regex(const char *regex, split_rule *rule_out) {
    for (int i = 0; i < SPLIT_RULE_COUNT; i++) {
        if (file_expressions[i] == NULL || strcmp(file_expressions[i], regex) != 0) continue;
        *rule_out = (split_rule)i;
        return true;
    }
    return false;
}

static bt_status compile(split_pattern *pattern, const char *expression, bt_error *error) {
    int code = 0;
    PCRE2_SIZE offset = 0;
    pattern->code = pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED,
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &code, &offset, NULL);
    if (pattern->code == NULL)
        return bt_fail(error, BT_ERR_WORKER_INTERNAL, "PCRE2 refuses a split expression (error %d)",
                       code);
    pattern->limits = pcre2_match_context_create(NULL);
    if (pattern->limits == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    (void)pcre2_set_match_limit(pattern->limits, MATCH_LIMIT);
    (void)pcre2_set_depth_limit(pattern->limits, MATCH_DEPTH_LIMIT);
    (void)pcre2_set_heap_limit(pattern->limits, MATCH_HEAP_KIB);
    /* Where executable memory is forbidden the interpreter gives the same answers. */
    pattern->is_jit = pcre2_jit_compile(pattern->code, PCRE2_JIT_COMPLETE) == 0;
    return BT_OK;
}

bt_status split_pattern_create(split_rule rule, split_pattern **out, bt_error *error) {
    BT_ASSERT(rule < SPLIT_RULE_COUNT);
    split_pattern *pattern = bt_calloc(1, sizeof *pattern);
    if (pattern == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    bt_status status = BT_OK;
    if (expressions[rule] != NULL) status = compile(pattern, expressions[rule], error);
    if (status != BT_OK) {
        split_pattern_destroy(pattern);
        return status;
    }
    *out = pattern;
    return BT_OK;
}

void split_pattern_destroy(split_pattern *pattern) {
    if (pattern == NULL) return;
    pcre2_match_context_free(pattern->limits);
    pcre2_code_free(pattern->code);
    bt_free(pattern);
}

bt_status split_scratch_create(const split_pattern *pattern, split_scratch **out) {
    split_scratch *scratch = bt_calloc(1, sizeof *scratch);
    if (scratch == NULL) return BT_ERR_WORKER_MEMORY;
    if (pattern->code != NULL) {
        scratch->match = pcre2_match_data_create(1, NULL);
        if (scratch->match == NULL) {
            bt_free(scratch);
            return BT_ERR_WORKER_MEMORY;
        }
    }
    *out = scratch;
    return BT_OK;
}

void split_scratch_destroy(split_scratch *scratch) {
    if (scratch == NULL) return;
    pcre2_match_data_free(scratch->match);
    bt_free(scratch);
}

bt_status split_next(const split_pattern *pattern, split_scratch *scratch, const char *text,
                     size_t bytes, size_t start, size_t *end_out) {
    BT_ASSERT(start < bytes);
    if (pattern->code == NULL) {
        *end_out = bytes;
        return BT_OK;
    }
    int found = PCRE2_ERROR_JIT_STACKLIMIT;
    if (pattern->is_jit)
        found = pcre2_jit_match(pattern->code, (PCRE2_SPTR)text, bytes, start, PCRE2_NO_UTF_CHECK,
                                scratch->match, pattern->limits);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT)
        found = pcre2_match(pattern->code, (PCRE2_SPTR)text, bytes, start,
                            PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, scratch->match, pattern->limits);
    if (found == PCRE2_ERROR_NOMEMORY) return BT_ERR_WORKER_MEMORY;
    if (found < 0) return BT_ERR_REQUEST_TOO_LARGE; /* one of the limits */
    const PCRE2_SIZE end = pcre2_get_ovector_pointer(scratch->match)[1];
    BT_ASSERT(end > start && end <= bytes);
    *end_out = end;
    return BT_OK;
}
