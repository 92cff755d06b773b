/* Weights as stored in files, turned into bf16. Exact arithmetic: each weight is computed in f32 as
 * its format defines it and rounded once more to bf16, to nearest with ties to even. Pure
 * functions; sources are read bytewise and may start anywhere. */
#ifndef BT_KERNELS_MODEL_DEQUANT_H
#define BT_KERNELS_MODEL_DEQUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The quantised ones are GGUF's; d and m are f16, q a whole number. */
typedef enum dequant_encoding {
    DEQUANT_ENCODING_F32,
    DEQUANT_ENCODING_F16,
    DEQUANT_ENCODING_BF16,
    DEQUANT_ENCODING_Q4_0, /* blocks of 32 weights: q * d, q of 4 bits, signed */
    DEQUANT_ENCODING_Q4_1, /* blocks of 32: q * d + m */
    DEQUANT_ENCODING_Q5_0, /* blocks of 32: q * d, q of 5 bits, signed */
    DEQUANT_ENCODING_Q5_1, /* blocks of 32: q * d + m */
    DEQUANT_ENCODING_Q8_0, /* blocks of 32: q * d, q of 8 bits, signed */
    DEQUANT_ENCODING_Q4_K, /* blocks of 256: q * (d * scale) - m * minimum, both per 32 weights */
    DEQUANT_ENCODING_Q5_K, /* likewise, q of 5 bits */
    DEQUANT_ENCODING_Q6_K, /* blocks of 256: q * (d * scale), q of 6 bits, scale per 16 weights */
} dequant_encoding;

/* Bytes of one row; `columns` must be a whole number of blocks (asserted). */
size_t dequant_row_bytes(dequant_encoding encoding, size_t columns);
/* One row of `columns` weights into out [columns], bf16 bits. false when one of them is NaN or
 * infinite (also after rounding); out is then unspecified. */
bool dequant_row(dequant_encoding encoding, const uint8_t *source, size_t columns, uint16_t *out);
/* The same without the rounding to bf16, whatever the numbers are. */
void dequant_row_f32(dequant_encoding encoding, const uint8_t *source, size_t columns, float *out);

#endif
