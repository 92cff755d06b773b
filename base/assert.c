/* A failed assertion prints where and aborts: a wrong state must not go on to serve tokens. */
#include "base/assert.h"

#include <stdio.h>
#include <stdlib.h>

void bt_assert_failed(const char *condition, const char *file, int line) {
    (void)fprintf(stderr, "assertion failed: %s at %s:%d\n", condition, file, line);
    abort();
}
