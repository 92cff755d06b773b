/* Assertions about our own state; input from outside is validated instead, never asserted.
 * BT_ASSERT stays on in release. BT_DEBUG_ASSERT is for costly checks and only on with sanitizers
 * or in the fault build. */
#ifndef BT_BASE_ASSERT_H
#define BT_BASE_ASSERT_H

#include "base/compiler.h"

BT_NORETURN void bt_assert_failed(const char *condition, const char *file, int line);

#define BT_ASSERT(condition)                                                                       \
    do {                                                                                           \
        if (BT_UNLIKELY(!(condition))) bt_assert_failed(#condition, __FILE__, __LINE__);           \
    } while (0)

#if defined(BT_FAULT) || defined(__SANITIZE_ADDRESS__)
#define BT_DEBUG_ASSERT(condition) BT_ASSERT(condition)
#else
#define BT_DEBUG_ASSERT(condition)                                                                 \
    do {                                                                                           \
    } while (0)
#endif

#endif
