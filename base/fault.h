/* Fault points and mutants: places where the fault build (BT_FAULT=ON) can be told, at run time, to
 * fail or to misbehave. In every other build bt_fault_hit and bt_mutant are the constant false, so
 * that nothing of them is left in the program.
 *
 *   BATON_FAULT=alloc:17      the 17th allocation fails (counted from 1)
 *   BATON_MUTANT=drop_id      one wrong behaviour is switched on, to prove that a test notices
 *
 * The tests may also set both with bt_fault_set and bt_mutant_set. */
#ifndef BT_BASE_FAULT_H
#define BT_BASE_FAULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum bt_fault_point {
    BT_FAULT_ALLOC,     /* an allocation through base/mem.h */
    BT_FAULT_XFER_POST, /* the mover refuses to post a transfer */
    BT_FAULT_XFER_DONE, /* a transfer completes with an error */
    BT_FAULT_COUNT,
} bt_fault_point;

typedef enum bt_mutant_id {
    BT_MUTANT_NONE,
    BT_MUTANT_SELECTED_FULL_WIDTH, /* decode reads the full log-probability width in selected mode
                                    */
    BT_MUTANT_DROP_ID,             /* decode drops a support id */
    BT_MUTANT_FIRST_LOGPROB_ONLY,  /* prefill writes only the first log-probability */
    BT_MUTANT_QUEUE_NOT_CLEARED,   /* queued lengths are not cleared on hand-off */
    BT_MUTANT_IGNORE_GENERATION,   /* the slot generation is ignored */
    BT_MUTANT_ROW_BEFORE_KV,       /* the row is accepted before the last KV chunk */
    BT_MUTANT_COUNT,
} bt_mutant_id;

/* What was allocated through base/mem.h: how often, how much, and a digest of the sizes that does
 * not depend on their order. */
typedef struct bt_alloc_tally {
    uint64_t count, bytes, digest;
} bt_alloc_tally;

#ifdef BT_FAULT
/* true when this visit of `point` is the one that was asked to fail. Any thread. */
bool bt_fault_hit(bt_fault_point point);
/* The nth coming visit of `point` fails, counted from 1; 0 switches the point off. */
void bt_fault_set(bt_fault_point point, uint64_t nth);
/* Visits of `point` since bt_fault_set. */
uint64_t bt_fault_visits(bt_fault_point point);
bool bt_mutant(bt_mutant_id id);
void bt_mutant_set(bt_mutant_id id);
/* "drop_id" and the like; NULL past the end. */
const char *bt_mutant_name(bt_mutant_id id);
void bt_fault_note_alloc(size_t bytes);
/* Since the last reset. Any thread. */
bt_alloc_tally bt_fault_alloc_tally(void);
void bt_fault_alloc_reset(void);
#else
static inline void bt_fault_note_alloc(size_t bytes) {
    (void)bytes;
}
static inline bool bt_fault_hit(bt_fault_point point) {
    (void)point;
    return false;
}
static inline bool bt_mutant(bt_mutant_id id) {
    (void)id;
    return false;
}
#endif

#endif
