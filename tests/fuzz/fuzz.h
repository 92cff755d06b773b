/* The entry point of every fuzz target: fuzz_NAME.c defines it, libFuzzer or replay.c calls it. It
 * checks properties with BT_ASSERT, keeps no state between calls and returns 0. */
#ifndef BT_TESTS_FUZZ_FUZZ_H
#define BT_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#endif
