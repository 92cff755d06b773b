/* Parsing and printing; see the header. */
#include "tests/oracle/cases.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static bool parse_number(const char *text, uint64_t max, uint64_t *out) {
    char *end = NULL;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || text[0] == '-' || value > max) return false;
    *out = value;
    return true;
}

static bool parse_u32(const char *text, uint32_t *out) {
    uint64_t value = 0;
    if (!parse_number(text, UINT32_MAX, &value)) return false;
    *out = (uint32_t)value;
    return true;
}

static bool parse_float(const char *text, float *out) {
    char *end = NULL;
    *out = strtof(text, &end);
    return end != text && *end == '\0';
}

/* Comma-separated ids into to [max]; false when there are more or one is no number. */
static bool parse_list(const char *text, int32_t *to, uint32_t max, uint32_t *count_out) {
    uint32_t count = 0;
    while (*text != '\0') {
        char *end = NULL;
        const long value = strtol(text, &end, 10);
        if (end == text || value < INT32_MIN || value > INT32_MAX || count == max) return false;
        to[count++] = (int32_t)value;
        if (*end == ',') end++;
        text = end;
    }
    *count_out = count;
    return true;
}

/* ID:VALUE,ID:VALUE,... */
static bool parse_biases(const char *text, oracle_case *c) {
    while (*text != '\0') {
        char *end = NULL;
        const long id = strtol(text, &end, 10);
        if (end == text || *end != ':' || id < 0 || id > INT32_MAX) return false;
        if (c->bias_count == CASE_BIASES_MAX) return false;
        text = end + 1;
        c->bias_ids[c->bias_count] = (int32_t)id;
        c->biases[c->bias_count++] = strtof(text, &end);
        if (end == text || (*end != ',' && *end != '\0')) return false;
        text = *end == ',' ? end + 1 : end;
    }
    return true;
}

static bool parse_name(const char *text, const char *const *names, uint32_t *out) {
    for (uint32_t i = 0; names[i] != NULL; i++) {
        if (strcmp(text, names[i]) != 0) continue;
        *out = i;
        return true;
    }
    return false;
}

static bool parse_ids(const char *text, oracle_case *c) {
    const uint32_t most = (uint32_t)strlen(text) / 2 + 1;
    bt_free(c->ids);
    c->ids = bt_calloc(most, sizeof *c->ids);
    return c->ids != NULL && parse_list(text, c->ids, most, &c->id_count);
}

static const char *const masks[] = {"off", "selected", "support", NULL};
static const char *const filters[] = {"joint", "rank", NULL};

typedef enum field_kind { FIELD_U32, FIELD_U64, FIELD_FLOAT, FIELD_MASK, FIELD_FILTER } field_kind;

static const struct {
    const char *key;
    field_kind kind;
    size_t offset;
} fields[] = {
    {"max_new_tokens", FIELD_U32, offsetof(oracle_case, max_new_tokens)},
    {"min_new_tokens", FIELD_U32, offsetof(oracle_case, min_new_tokens)},
    {"temperature", FIELD_FLOAT, offsetof(oracle_case, temperature)},
    {"top_p", FIELD_FLOAT, offsetof(oracle_case, top_p)},
    {"top_k", FIELD_U32, offsetof(oracle_case, top_k)},
    {"min_p", FIELD_FLOAT, offsetof(oracle_case, min_p)},
    {"filter", FIELD_FILTER, offsetof(oracle_case, filter)},
    {"frequency_penalty", FIELD_FLOAT, offsetof(oracle_case, frequency_penalty)},
    {"presence_penalty", FIELD_FLOAT, offsetof(oracle_case, presence_penalty)},
    {"repetition_penalty", FIELD_FLOAT, offsetof(oracle_case, repetition_penalty)},
    {"mask", FIELD_MASK, offsetof(oracle_case, mask_mode)},
    {"bounded", FIELD_U32, offsetof(oracle_case, mask_bounded)},
    {"cap", FIELD_U32, offsetof(oracle_case, cap)},
    {"logprob", FIELD_U32, offsetof(oracle_case, wants_logprob)},
    {"top", FIELD_U32, offsetof(oracle_case, top_logprobs)},
    {"prompt_logprobs_from", FIELD_U32, offsetof(oracle_case, prompt_logprobs_from)},
    {"vocab_limit", FIELD_U32, offsetof(oracle_case, vocab_limit)},
    {"ignore_stop", FIELD_U32, offsetof(oracle_case, ignores_stop)},
    {"n", FIELD_U32, offsetof(oracle_case, samples)},
    {"seed", FIELD_U64, offsetof(oracle_case, seed)},
};

static bool parse_field(field_kind kind, const char *value, void *to) {
    switch (kind) {
    case FIELD_U32: return parse_u32(value, to);
    case FIELD_U64: return parse_number(value, UINT64_MAX, to);
    case FIELD_FLOAT: return parse_float(value, to);
    case FIELD_MASK: return parse_name(value, masks, to);
    case FIELD_FILTER: return parse_name(value, filters, to);
    }
    return false;
}

static bool set_field(oracle_case *c, const char *key, const char *value) {
    if (strcmp(key, "name") == 0) {
        return strlen(value) < sizeof c->name && snprintf(c->name, sizeof c->name, "%s", value) > 0;
    }
    if (strcmp(key, "ids") == 0) return parse_ids(value, c);
    if (strcmp(key, "stop") == 0)
        return parse_list(value, c->stop_ids, CASE_STOP_MAX, &c->stop_count);
    if (strcmp(key, "bias") == 0) return parse_biases(value, c);
    if (strcmp(key, "logprob_ids") == 0)
        return parse_list(value, c->logprob_ids, CASE_LOGPROB_IDS_MAX, &c->logprob_id_count);
    if (strcmp(key, "prompt_logprobs_from") == 0) c->wants_prompt_logprobs = true;
    for (size_t i = 0; i < BT_ARRAY_COUNT(fields); i++) {
        if (strcmp(key, fields[i].key) != 0) continue;
        return parse_field(fields[i].kind, value, (char *)c + fields[i].offset);
    }
    return false;
}

/* NULL, or what is wrong with a case as a whole. */
static const char *find_fault(const oracle_case *c) {
    if (c->name[0] == '\0' || c->id_count == 0) return "name and ids are required";
    if (c->samples == 0 || c->samples > CASE_SAMPLES_MAX) return "n is out of range";
    if (c->top_logprobs > CASE_TOP_MAX) return "top is out of range";
    if (c->min_new_tokens > c->max_new_tokens) return "min_new_tokens is above max_new_tokens";
    const bool has_more =
        c->top_logprobs > 0 || c->logprob_id_count > 0 || c->wants_prompt_logprobs;
    if (has_more && c->wants_logprob == 0) return "log-probabilities need logprob=1";
    if (c->wants_prompt_logprobs && c->prompt_logprobs_from >= c->id_count)
        return "prompt_logprobs_from is behind the prompt";
    return NULL;
}

static bt_status parse_line(char *line, unsigned number, oracle_case *c, bt_error *error) {
    *c = (oracle_case){
        .max_new_tokens = 16, .temperature = 1, .top_p = 1, .repetition_penalty = 1, .samples = 1};
    char *rest = NULL;
    for (char *word = strtok_r(line, " \t\r\n", &rest); word != NULL;
         word = strtok_r(NULL, " \t\r\n", &rest)) {
        char *equals = strchr(word, '=');
        if (equals != NULL) *equals = '\0';
        if (equals == NULL || !set_field(c, word, equals + 1)) {
            return bt_fail(error, BT_ERR_CALLER_FILE, "line %u: bad word '%.60s'", number, word);
        }
    }
    const char *fault = find_fault(c);
    if (fault != NULL) return bt_fail(error, BT_ERR_CALLER_FILE, "line %u: %s", number, fault);
    return BT_OK;
}

bt_status cases_read(FILE *file, oracle_case **cases_out, uint32_t *count_out, bt_error *error) {
    oracle_case *cases = NULL;
    uint32_t count = 0;
    char *line = NULL;
    size_t capacity = 0;
    bt_status status = BT_OK;
    for (unsigned number = 1; status == BT_OK && getline(&line, &capacity, file) >= 0; number++) {
        if (line[strspn(line, " \t\r\n")] == '\0' || line[0] == '#') continue;
        oracle_case *more = bt_realloc(cases, (count + 1) * sizeof *cases);
        if (more == NULL) {
            status = bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
            break;
        }
        cases = more;
        status = parse_line(line, number, &cases[count++], error);
    }
    free(line);
    if (status != BT_OK) {
        cases_free(cases, count);
        return status;
    }
    *cases_out = cases;
    *count_out = count;
    return BT_OK;
}

void cases_free(oracle_case *cases, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        bt_free(cases[i].ids);
    bt_free(cases);
}

static void print_name(FILE *out, const oracle_case *c, uint32_t sample) {
    (void)fprintf(out, "%s", c->name);
    if (c->samples > 1) (void)fprintf(out, "#%" PRIu32, sample);
}

static void print_logprobs(FILE *out, const oracle_case *c, const oracle_row *row) {
    if (c->top_logprobs > 0) (void)fprintf(out, " top");
    for (uint32_t i = 0; c->top_logprobs > 0 && i < row->top_count; i++)
        (void)fprintf(out, " %" PRId32 ":%a", row->top[i].id, (double)row->top[i].logprob);
    if (c->logprob_id_count > 0) (void)fprintf(out, " ids");
    for (uint32_t i = 0; i < c->logprob_id_count; i++)
        (void)fprintf(out, " %" PRId32 ":%a", c->logprob_ids[i], (double)row->id_logprobs[i]);
    (void)fprintf(out, "\n");
}

void cases_print_row(FILE *out, const oracle_case *c, uint32_t sample, uint32_t index,
                     const oracle_row *row) {
    print_name(out, c, sample);
    (void)fprintf(out, " row %" PRIu32 " token %" PRId32, index, row->token);
    if (c->wants_logprob != 0) (void)fprintf(out, " logprob %a", (double)row->token_logprob);
    if (c->mask_mode != 0) {
        (void)fprintf(out, " selected %a", (double)row->selected_logprob);
        if (c->mask_bounded != 0) (void)fprintf(out, " size %" PRIu32, row->support_size);
        (void)fprintf(out, " support");
        for (uint32_t i = 0; i < row->support_count; i++) {
            (void)fprintf(out, " %" PRId32, row->support_ids[i]);
            if (row->support_logprobs == NULL) continue;
            (void)fprintf(out, ":%a", (double)row->support_logprobs[i]);
        }
    }
    print_logprobs(out, c, row);
}

void cases_print_prompt(FILE *out, const oracle_case *c, uint32_t position, const oracle_row *row) {
    (void)fprintf(out, "%s prompt %" PRIu32 " token %" PRId32 " logprob %a", c->name, position,
                  row->token, (double)row->token_logprob);
    print_logprobs(out, c, row);
}

void cases_print_finish(FILE *out, const oracle_case *c, uint32_t sample, const char *finish,
                        uint32_t rows) {
    print_name(out, c, sample);
    (void)fprintf(out, " finish %s rows %" PRIu32 "\n", finish, rows);
}
