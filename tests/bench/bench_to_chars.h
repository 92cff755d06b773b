/* The standard library of C++ as something to compare with; built where there is a C++ compiler.
 * The same lists as bt_json_floats and bt_json_ints, floats widened to double. */
#ifndef BT_TESTS_BENCH_BENCH_TO_CHARS_H
#define BT_TESTS_BENCH_BENCH_TO_CHARS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

size_t bench_to_chars_floats(char *out, const float *values, size_t count);
size_t bench_to_chars_ints(char *out, const int32_t *values, size_t count);

#ifdef __cplusplus
}
#endif

#endif
