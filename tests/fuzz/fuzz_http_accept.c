/* Any text as the value of an Accept field: a quality in range, the same when the value is read as
 * two fields cut at a comma outside of quotes, and no less specific with more text behind it. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "router/http_accept.h"

enum { INPUT_MAX = 4096 };

static const char TYPE[] = "application/json";

static http_accepted read_value(const char *value, http_accepted before) {
    http_accept_read(value, TYPE, &before);
    BT_ASSERT(before.match <= HTTP_ACCEPT_EXACT && before.quality <= 1000);
    BT_ASSERT(before.match != HTTP_ACCEPT_NOT_NAMED || before.quality == 0);
    return before;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char value[INPUT_MAX + 1];
    char longer[INPUT_MAX + 32];
    if (bytes > INPUT_MAX) return 0;
    for (size_t i = 0; i < bytes; i++) {
        value[i] = data[i] != 0 ? (char)data[i] : ' ';
    }
    value[bytes] = 0;
    const http_accepted whole = read_value(value, (http_accepted){0});
    /* Read twice it says the same. */
    const http_accepted twice = read_value(value, whole);
    BT_ASSERT(twice.match == whole.match && twice.quality == whole.quality);
    if (memchr(value, '"', bytes) != NULL) return 0;
    /* Another element may only be more specific, or of equal match and larger quality. */
    memcpy(longer, value, bytes);
    memcpy(longer + bytes, ",application/*;q=0.5", sizeof(",application/*;q=0.5"));
    const http_accepted more = read_value(longer, (http_accepted){0});
    BT_ASSERT(more.match >= whole.match && more.match >= HTTP_ACCEPT_SUBTYPE);
    char *comma = strchr(value, ',');
    if (comma == NULL) return 0;
    *comma = 0;
    const http_accepted head = read_value(value, (http_accepted){0});
    const http_accepted both = read_value(comma + 1, head);
    BT_ASSERT(both.match == whole.match && both.quality == whole.quality);
    return 0;
}
