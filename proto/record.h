/* The canonical cluster record (rule 1): the settings on which all processes of a cluster must
 * agree, compared field by field before any address is exchanged. Pure; no I/O. */
#ifndef BT_PROTO_RECORD_H
#define BT_PROTO_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum record_checksum {
    RECORD_CHECKSUM_OFF = 0,
    RECORD_CHECKSUM_SAMPLED = 1,
    RECORD_CHECKSUM_FULL = 2,
} record_checksum;

/* By record_checksum, NULL behind the last: the choices of --kv-checksum. */
extern const char *const record_checksum_names[];
/* The name of a cluster_record's kv_checksum; "unknown" for 0 and for what is none. */
const char *record_checksum_name(uint32_t kv_checksum);

/* Zero or "" means "not known here" (a router has no KV layout, a worker adopts the cap). */
typedef struct cluster_record {
    uint32_t sampling_mask_max_tokens; /* governed by the router; adopted by workers */
    uint32_t kv_checksum;              /* record_checksum + 1; governed by the router, adopted */
    uint32_t page_tokens;
    char kv_dtype[16];
    char kv_layout[96];             /* "layers=30 kv_heads=3 head_dim=64" */
    char numerics[64];              /* "host/exact/1" */
    char model_fingerprint[65];     /* hex SHA-256 */
    char tokenizer_fingerprint[65]; /* hex SHA-256 */
    uint32_t row_format;            /* pairable */
    uint32_t protocol_minor;        /* pairable */
    uint64_t weights_version;       /* epoch */
} cluster_record;

typedef enum record_field {
    RECORD_SAMPLING_MASK_MAX_TOKENS,
    RECORD_KV_CHECKSUM,
    RECORD_PAGE_TOKENS,
    RECORD_KV_DTYPE,
    RECORD_KV_LAYOUT,
    RECORD_NUMERICS,
    RECORD_MODEL_FINGERPRINT,
    RECORD_TOKENIZER_FINGERPRINT,
    RECORD_ROW_FORMAT,
    RECORD_PROTOCOL_MINOR,
    RECORD_WEIGHTS_VERSION,
    RECORD_FIELD_COUNT,
} record_field;

typedef enum record_class {
    RECORD_MUST_EQUAL, /* a differing worker is refused */
    RECORD_PAIRABLE,   /* pairs form among equals */
    RECORD_EPOCH,      /* changed by a barrier */
} record_class;

const char *record_field_name(record_field field); /* "sampling_mask_max_tokens" */
record_class record_field_class(record_field field);

/* Not zero and not "". */
bool record_field_is_known(const cluster_record *record, record_field field);
/* The value for a human: "4096", "full", "bf16"; fingerprints are cut to 16 digits. */
void record_field_print(const cluster_record *record, record_field field, char *out,
                        size_t capacity);

/* Compares must-equal fields that are known on both sides. true = equal. On the first difference:
 * false and a sentence "sampling_mask_max_tokens differs: 128 on worker decode at hostA (pid 7),
 * 4096 on router hostB". `worker` and `cluster` name the two sides in it. */
bool record_compare(const cluster_record *theirs, const char *worker, const cluster_record *ours,
                    const char *cluster, record_field *field_out, bt_error *error);
/* Pairs form among equals: the pairable and the epoch fields are the same on both sides. */
bool record_is_pairable(const cluster_record *a, const cluster_record *b);
/* Fields not known in *into are taken from *from: the first worker founds them, a worker adopts. */
void record_adopt(cluster_record *into, const cluster_record *from);

#endif
