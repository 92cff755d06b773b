/* State of the fault points; compiled to nothing outside the fault build. */
#include "base/fault.h"

#ifdef BT_FAULT

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const fault_names[BT_FAULT_COUNT] = {"alloc", "xfer_post", "xfer_done"};
static const char *const mutant_names[BT_MUTANT_COUNT] = {"none",
                                                          "selected_full_width",
                                                          "drop_id",
                                                          "first_logprob_only",
                                                          "queue_not_cleared",
                                                          "ignore_generation",
                                                          "row_before_kv"};

static atomic_uint_fast64_t visits[BT_FAULT_COUNT];
static atomic_uint_fast64_t targets[BT_FAULT_COUNT];
static atomic_int active_mutant;
static pthread_once_t environment_once = PTHREAD_ONCE_INIT;

static void die_unknown(const char *variable, const char *value) {
    (void)fprintf(stderr, "%s: unknown value '%s'\n", variable, value);
    abort();
}

static void read_environment(void) {
    const char *mutant = getenv("BATON_MUTANT");
    if (mutant != NULL) {
        int id = 0;
        while (id < BT_MUTANT_COUNT && strcmp(mutant, mutant_names[id]) != 0)
            id++;
        if (id == BT_MUTANT_COUNT) die_unknown("BATON_MUTANT", mutant);
        atomic_store(&active_mutant, id);
    }
    const char *fault = getenv("BATON_FAULT");
    if (fault == NULL) return;
    for (int point = 0; point < BT_FAULT_COUNT; point++) {
        const size_t length = strlen(fault_names[point]);
        if (strncmp(fault, fault_names[point], length) != 0 || fault[length] != ':') continue;
        atomic_store(&targets[point], strtoull(fault + length + 1, NULL, 10));
        return;
    }
    die_unknown("BATON_FAULT", fault);
}

bool bt_fault_hit(bt_fault_point point) {
    (void)pthread_once(&environment_once, read_environment);
    const uint64_t visit = atomic_fetch_add(&visits[point], 1) + 1;
    return visit == atomic_load(&targets[point]);
}

void bt_fault_set(bt_fault_point point, uint64_t nth) {
    (void)pthread_once(&environment_once, read_environment);
    atomic_store(&visits[point], 0);
    atomic_store(&targets[point], nth);
}

uint64_t bt_fault_visits(bt_fault_point point) {
    return atomic_load(&visits[point]);
}

bool bt_mutant(bt_mutant_id id) {
    (void)pthread_once(&environment_once, read_environment);
    return atomic_load(&active_mutant) == (int)id;
}

void bt_mutant_set(bt_mutant_id id) {
    (void)pthread_once(&environment_once, read_environment);
    atomic_store(&active_mutant, (int)id);
}

const char *bt_mutant_name(bt_mutant_id id) {
    return (unsigned)id < BT_MUTANT_COUNT ? mutant_names[id] : NULL;
}

static atomic_uint_fast64_t alloc_count, alloc_bytes, alloc_digest;

void bt_fault_note_alloc(size_t bytes) {
    const uint64_t mixed = ((uint64_t)bytes + 1) * 0x9E3779B97F4A7C15u;
    atomic_fetch_add(&alloc_count, 1);
    atomic_fetch_add(&alloc_bytes, bytes);
    atomic_fetch_add(&alloc_digest, (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9u);
}

bt_alloc_tally bt_fault_alloc_tally(void) {
    return (bt_alloc_tally){.count = atomic_load(&alloc_count),
                            .bytes = atomic_load(&alloc_bytes),
                            .digest = atomic_load(&alloc_digest)};
}

void bt_fault_alloc_reset(void) {
    atomic_store(&alloc_count, 0);
    atomic_store(&alloc_bytes, 0);
    atomic_store(&alloc_digest, 0);
}

#else

typedef int bt_fault_is_compiled_out; /* ISO C wants a declaration in every file. */

#endif
