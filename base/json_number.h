/* Numbers as JSON text, in the form that orjson gives them: clients compare bytes.
 *
 *   doubles    the fewest digits that read back as the same double, and of those the nearest;
 *              always a fraction or an exponent (0.0, -0.0, 16777216.0);
 *              plain for 1e-5 <= |x| < 1e16, else 1e16, 1.5e-7, 1.7976931348623157e308 (no plus, no
 *              padding); null for NaN and the infinities
 *   floats     widened to double first, so log 0.5 is -0.6931471824645996
 *   integers   plain
 *
 * Each function writes at `out` and returns the length of the text, which is not terminated. Of one
 * number it may also write anything into the rest of the first BT_JSON_NUMBER_ROOM bytes, of a list
 * into the rest of its room; that must be there. No text is longer than BT_JSON_DOUBLE_MAX or
 * BT_JSON_INT_MAX. Threads: pure. */
#ifndef BT_BASE_JSON_NUMBER_H
#define BT_BASE_JSON_NUMBER_H

#include <stddef.h>
#include <stdint.h>

enum {
    BT_JSON_NUMBER_ROOM = 40,
    BT_JSON_DOUBLE_MAX = 24,
    BT_JSON_INT_MAX = 20,
    BT_JSON_INT32_MAX = 11
};

size_t bt_json_double(char *out, double value);
size_t bt_json_float(char *out, float value);
size_t bt_json_int(char *out, int64_t value);

/* What a list of `count` numbers needs at `out`; the commas count. */
static inline size_t bt_json_floats_room(size_t count) {
    return count * (BT_JSON_DOUBLE_MAX + 1) + BT_JSON_NUMBER_ROOM;
}
static inline size_t bt_json_ints_room(size_t count) {
    return count * (BT_JSON_INT32_MAX + 1) + BT_JSON_NUMBER_ROOM;
}
/* The texts with a comma between each two, no brackets; nothing for a count of 0. */
size_t bt_json_floats(char *out, const float *values, size_t count);
size_t bt_json_ints(char *out, const int32_t *values, size_t count);

#endif
