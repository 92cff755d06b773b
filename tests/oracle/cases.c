/* Parsing and printing; see the header. */
#include "tests/oracle/cases.h"

#include <errno.h>
#include <inttypes.h>
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

static bool parse_mask(const char *text, uint32_t *out) {
    static const char *const names[] = {"off", "selected", "support"};
    for (uint32_t i = 0; i < BT_ARRAY_COUNT(names); i++) {
        if (strcmp(text, names[i]) != 0) continue;
        *out = i;
        return true;
    }
    return false;
}

static bool set_field(oracle_case *c, const char *key, const char *value) {
    if (strcmp(key, "name") == 0) {
        return strlen(value) < sizeof c->name && snprintf(c->name, sizeof c->name, "%s", value) > 0;
    }
    if (strcmp(key, "ids") == 0) {
        c->ids = bt_calloc(strlen(value) / 2 + 1, sizeof *c->ids);
        return c->ids != NULL &&
               parse_list(value, c->ids, (uint32_t)strlen(value) / 2 + 1, &c->id_count);
    }
    if (strcmp(key, "stop") == 0) {
        return parse_list(value, c->stop_ids, CASE_STOP_MAX, &c->stop_count);
    }
    if (strcmp(key, "max_new_tokens") == 0) return parse_u32(value, &c->max_new_tokens);
    if (strcmp(key, "temperature") == 0) return parse_float(value, &c->temperature);
    if (strcmp(key, "top_p") == 0) return parse_float(value, &c->top_p);
    if (strcmp(key, "top_k") == 0) return parse_u32(value, &c->top_k);
    if (strcmp(key, "mask") == 0) return parse_mask(value, &c->mask_mode);
    if (strcmp(key, "logprob") == 0) return parse_u32(value, &c->wants_logprob);
    if (strcmp(key, "vocab_limit") == 0) return parse_u32(value, &c->vocab_limit);
    if (strcmp(key, "seed") == 0) return parse_number(value, UINT64_MAX, &c->seed);
    return false;
}

static bt_status parse_line(char *line, unsigned number, oracle_case *c, bt_error *error) {
    *c = (oracle_case){.max_new_tokens = 16, .temperature = 1, .top_p = 1};
    char *rest = NULL;
    for (char *word = strtok_r(line, " \t\r\n", &rest); word != NULL;
         word = strtok_r(NULL, " \t\r\n", &rest)) {
        char *equals = strchr(word, '=');
        if (equals != NULL) *equals = '\0';
        if (equals == NULL || !set_field(c, word, equals + 1)) {
            return bt_fail(error, BT_ERR_CALLER_FILE, "line %u: bad word '%.60s'", number, word);
        }
    }
    if (c->name[0] == '\0' || c->id_count == 0) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "line %u: name and ids are required", number);
    }
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

void cases_print_row(FILE *out, const oracle_case *c, uint32_t index, const oracle_row *row) {
    (void)fprintf(out, "%s row %" PRIu32 " token %" PRId32, c->name, index, row->token);
    if (c->wants_logprob != 0) (void)fprintf(out, " logprob %a", (double)row->token_logprob);
    if (c->mask_mode != 0) {
        (void)fprintf(out, " selected %a support", (double)row->selected_logprob);
        for (uint32_t i = 0; i < row->support_count; i++) {
            (void)fprintf(out, " %" PRId32, row->support_ids[i]);
            if (row->support_logprobs == NULL) continue;
            (void)fprintf(out, ":%a", (double)row->support_logprobs[i]);
        }
    }
    (void)fprintf(out, "\n");
}

void cases_print_finish(FILE *out, const oracle_case *c, const char *finish, uint32_t rows) {
    (void)fprintf(out, "%s finish %s rows %" PRIu32 "\n", c->name, finish, rows);
}
