/* Weights as stored in files, turned into bf16. Exact arithmetic: each weight is computed in f32 as
 * its format defines it and rounded once more to bf16, to nearest with ties to even. Pure
 * functions; sources are read bytewise and may start anywhere. */
#ifndef BT_KERNELS_MODEL_DEQUANT_H
#define BT_KERNELS_MODEL_DEQUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum dequant_encoding {
    DEQUANT_ENCODING_F32,
    DEQUANT_ENCODING_F16,
    DEQUANT_ENCODING_BF16,
    DEQUANT_ENCODING_Q4_1, /* blocks of 32 weights: f16 d, f16 m, 16 bytes of nibbles; q * d + m */
    DEQUANT_ENCODING_Q8_0, /* blocks of 32 weights: f16 d, 32 signed bytes; q * d */
} dequant_encoding;

/* Bytes of one row; `columns` must be a multiple of 32 for the block formats (asserted). */
size_t dequant_row_bytes(dequant_encoding encoding, size_t columns);
/* One row of `columns` weights into out [columns], bf16 bits. false when one of them is NaN or
 * infinite (also after rounding); out is then unspecified. */
bool dequant_row(dequant_encoding encoding, const uint8_t *source, size_t columns, uint16_t *out);

/* IEEE half bits to f32, exact. */
float dequant_widen_f16(uint16_t bits);

#endif
