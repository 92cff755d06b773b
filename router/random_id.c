/* Ids of requests, responses and processes, and seeds, from the kernel's random numbers: unique
 * across restarts and routers without any state, and not to be guessed. Any thread. */
#include "router/random_id.h"

#include <errno.h>
#include <stdio.h>
#include <sys/random.h>

#include "base/assert.h"

static void fill(void *out, size_t bytes) {
    ssize_t got;
    do {
        got = getrandom(out, bytes, 0);
    } while (got < 0 && errno == EINTR);
    /* Requests of up to 256 bytes are never cut short. */
    BT_ASSERT(got == (ssize_t)bytes);
}

uint64_t random_u64(void) {
    uint64_t value;
    fill(&value, sizeof(value));
    return value;
}

void random_id(char out[RANDOM_ID_BYTES]) {
    uint64_t halves[2];
    fill(halves, sizeof(halves));
    snprintf(out, RANDOM_ID_BYTES, "%016llx%016llx", (unsigned long long)halves[0],
             (unsigned long long)halves[1]);
}
