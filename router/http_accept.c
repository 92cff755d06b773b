/* A walk over the comma-separated elements of a value; a quoted string hides commas and semicolons.
 */
#include "router/http_accept.h"

#include <string.h>

/* A slice of the value. */
typedef struct slice {
    const char *at, *end;
} slice;

static char to_lower(char c) {
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

static bool is_space(char c) {
    return c == ' ' || c == '\t';
}

static slice trim(slice s) {
    while (s.at < s.end && is_space(*s.at)) {
        s.at++;
    }
    while (s.at < s.end && is_space(s.end[-1])) {
        s.end--;
    }
    return s;
}

/* Cuts what is before the next `separator` off *rest; false: nothing is left. */
static bool cut(slice *rest, char separator, slice *out) {
    bool is_quoted = false;
    if (rest->at == NULL) return false;
    out->at = rest->at;
    for (const char *at = rest->at; at < rest->end; at++) {
        if (*at == '"') is_quoted = !is_quoted;
        if (is_quoted && *at == '\\' && at + 1 < rest->end) at++;
        if (is_quoted || *at != separator) continue;
        out->end = at;
        rest->at = at + 1;
        return true;
    }
    out->end = rest->end;
    rest->at = NULL;
    return true;
}

static bool equals(slice s, const char *text) {
    for (; s.at < s.end; s.at++, text++) {
        if (*text == 0 || to_lower(*s.at) != *text) return false;
    }
    return *text == 0;
}

static http_accept_match match_range(slice range, const char *type) {
    const char *slash = strchr(type, '/');
    if (equals(range, type)) return HTTP_ACCEPT_EXACT;
    if (equals(range, "*/*")) return HTTP_ACCEPT_ANY;
    const size_t head = (size_t)(slash - type) + 1; /* with the slash */
    const size_t bytes = (size_t)(range.end - range.at);
    if (bytes != head + 1 || range.end[-1] != '*') return HTTP_ACCEPT_NOT_NAMED;
    for (size_t i = 0; i < head; i++) {
        if (to_lower(range.at[i]) != type[i]) return HTTP_ACCEPT_NOT_NAMED;
    }
    return HTTP_ACCEPT_SUBTYPE;
}

/* 0, 0.5, 0.125, 1, 1.000: at most three digits. */
static bool read_quality(slice s, uint32_t *out) {
    uint32_t value;
    const size_t bytes = (size_t)(s.end - s.at);
    if (bytes == 0 || bytes > 5 || (*s.at != '0' && *s.at != '1')) return false;
    value = (uint32_t)(*s.at - '0') * 1000;
    if (bytes > 1 && s.at[1] != '.') return false;
    uint32_t unit = 100;
    for (size_t i = 2; i < bytes; i++, unit /= 10) {
        if (s.at[i] < '0' || s.at[i] > '9') return false;
        value += (uint32_t)(s.at[i] - '0') * unit;
    }
    *out = value;
    return value <= 1000;
}

/* false: a quality that is none. */
static bool read_parameters(slice parameters, uint32_t *quality_out) {
    slice parameter;
    *quality_out = 1000;
    while (cut(&parameters, ';', &parameter)) {
        slice name;
        const bool has_value = cut(&parameter, '=', &name) && parameter.at != NULL;
        if (!equals(trim(name), "q")) continue;
        if (!has_value || !read_quality(trim(parameter), quality_out)) return false;
    }
    return true;
}

void http_accept_read(const char *value, const char *type, http_accepted *accepted) {
    slice elements = {value, value + strlen(value)};
    slice element, range;
    while (cut(&elements, ',', &element)) {
        uint32_t quality;
        if (!cut(&element, ';', &range)) continue;
        const http_accept_match match = match_range(trim(range), type);
        if (match == HTTP_ACCEPT_NOT_NAMED || match < accepted->match) continue;
        if (!read_parameters(element, &quality)) continue;
        if (match == accepted->match && quality <= accepted->quality) continue;
        *accepted = (http_accepted){match, quality};
    }
}

bool http_accept_prefers(const http_request *request, const char *special, const char *usual) {
    http_accepted of_special = {0};
    http_accepted of_usual = {0};
    for (uint32_t i = 0; i < request->field_count; i++) {
        if (strcmp(request->fields[i].name, "accept") != 0) continue;
        http_accept_read(request->fields[i].value, special, &of_special);
        http_accept_read(request->fields[i].value, usual, &of_usual);
    }
    return of_special.match == HTTP_ACCEPT_EXACT && of_special.quality > 0 &&
           of_special.quality >= of_usual.quality;
}
