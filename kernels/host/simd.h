/* The sixteen virtual lanes of rule 4. A v16 is sixteen floats, whatever registers hold them; every
 * operation is correctly rounded lane by lane, so all instruction sets give the same bits. An
 * isa_*.c file defines one SIMD_* macro and is compiled with the flags of that instruction set.
 *
 *   v16_sum              the one tree: lane l takes l+8, then l+4, l+2, l+1
 *   v16_max, v16_top     of two vectors, of the lanes of one; of zeros and NaN, either
 *   v16_load_packed      weights of SIMD_PACKED_VECTORS * 16 columns, in the packed order of
 *                        kernels/pack.h; v16_swap_packed brings them into the order of columns,
 *                        and back
 *   v16_transpose_bf16   16 rows x SIMD_TRANSPOSE_DIMS bf16 into [dim][row] floats
 *   v16_load_words       with SIMD_WORDS: the same in registers, as pairs of bf16, one vector of 16
 *                        rows for each two dims (even halves are the first)
 *
 * SIMD_TILE_ROWS x SIMD_VECTORS_6 is the register tile of the matrix kernels; SIMD_VECTORS_1 and
 * SIMD_VECTORS_2 are the widths for one and two rows. A panel is worked on in blocks of
 * SIMD_BLOCK_DEPTH, which stay in the first or second cache while all rows pass. SIMD_ASKS_AHEAD is
 * 1 where the passes of several tiles over a block ask for the next one meanwhile, which they would
 * not reach by themselves; for at most SIMD_FAR_ROWS rows only into the second cache, since the
 * block that is worked on would have to leave the first one before its few passes are over.
 */
#ifndef BT_KERNELS_HOST_SIMD_H
#define BT_KERNELS_HOST_SIMD_H

#if defined(SIMD_AVX512)
#include "kernels/host/simd_avx512.h"
#elif defined(SIMD_AVX2)
#include "kernels/host/simd_avx2.h"
#elif defined(SIMD_NEON)
#include "kernels/host/simd_neon.h"
#else
#include "kernels/host/simd_portable.h"
#endif

#endif
