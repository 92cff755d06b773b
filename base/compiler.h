/* Compiler annotations. The one place where GNU extensions are named. */
#ifndef BT_BASE_COMPILER_H
#define BT_BASE_COMPILER_H

#define BT_MUST_CHECK         __attribute__((warn_unused_result))
#define BT_PRINTF(text, args) __attribute__((format(printf, text, args)))
#define BT_LIKELY(x)          __builtin_expect(!!(x), 1)
#define BT_UNLIKELY(x)        __builtin_expect(!!(x), 0)
/* For kernels whose loop bounds must become constants at the call. */
#define BT_ALWAYS_INLINE  inline __attribute__((always_inline))
#define BT_NORETURN       __attribute__((noreturn))
#define BT_ARRAY_COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* Before a loop with a small constant bound: unroll it whole. */
#if defined(__clang__)
#define BT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define BT_UNROLL _Pragma("GCC unroll 64")
#endif

/* For products of two 64-bit numbers. */
__extension__ typedef unsigned __int128 bt_u128;

#endif
