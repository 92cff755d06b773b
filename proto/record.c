/* The cluster record as a table of fields: comparing, adopting and printing are loops over it. */
#include "proto/record.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

const char *const record_checksum_names[] = {
    [RECORD_CHECKSUM_OFF] = "off",
    [RECORD_CHECKSUM_SAMPLED] = "sampled",
    [RECORD_CHECKSUM_FULL] = "full",
    NULL,
};

const char *record_checksum_name(uint32_t kv_checksum) {
    const bool is_known = kv_checksum >= 1 && kv_checksum <= RECORD_CHECKSUM_FULL + 1;
    return is_known ? record_checksum_names[kv_checksum - 1] : "unknown";
}

typedef enum field_type {
    FIELD_U32,
    FIELD_U64,
    FIELD_TEXT,
    FIELD_CHECKSUM,
    FIELD_FINGERPRINT,
} field_type;

typedef struct field_entry {
    const char *name;
    record_class class;
    field_type type;
    size_t offset;
    size_t bytes;
} field_entry;

#define FIELD(member, class_, type_)                                                               \
    {                                                                                              \
        .name = #member, .class = (class_), .type = (type_),                                       \
        .offset = offsetof(cluster_record, member),                                                \
        .bytes = sizeof(((const cluster_record *)0)->member)                                       \
    }

static const field_entry fields[RECORD_FIELD_COUNT] = {
    [RECORD_SAMPLING_MASK_MAX_TOKENS] =
        FIELD(sampling_mask_max_tokens, RECORD_MUST_EQUAL, FIELD_U32),
    [RECORD_KV_CHECKSUM] = FIELD(kv_checksum, RECORD_MUST_EQUAL, FIELD_CHECKSUM),
    [RECORD_PAGE_TOKENS] = FIELD(page_tokens, RECORD_MUST_EQUAL, FIELD_U32),
    [RECORD_KV_DTYPE] = FIELD(kv_dtype, RECORD_MUST_EQUAL, FIELD_TEXT),
    [RECORD_KV_LAYOUT] = FIELD(kv_layout, RECORD_MUST_EQUAL, FIELD_TEXT),
    [RECORD_NUMERICS] = FIELD(numerics, RECORD_MUST_EQUAL, FIELD_TEXT),
    [RECORD_MODEL_FINGERPRINT] = FIELD(model_fingerprint, RECORD_MUST_EQUAL, FIELD_FINGERPRINT),
    [RECORD_TOKENIZER_FINGERPRINT] =
        FIELD(tokenizer_fingerprint, RECORD_MUST_EQUAL, FIELD_FINGERPRINT),
    [RECORD_ROW_FORMAT] = FIELD(row_format, RECORD_PAIRABLE, FIELD_U32),
    [RECORD_PROTOCOL_MINOR] = FIELD(protocol_minor, RECORD_PAIRABLE, FIELD_U32),
    [RECORD_WEIGHTS_VERSION] = FIELD(weights_version, RECORD_EPOCH, FIELD_U64),
};

static const field_entry *get_entry(record_field field) {
    BT_ASSERT((unsigned)field < RECORD_FIELD_COUNT);
    return &fields[field];
}

static const char *field_at(const cluster_record *record, const field_entry *entry) {
    return (const char *)record + entry->offset;
}

static bool is_text(field_type type) {
    return type == FIELD_TEXT || type == FIELD_FINGERPRINT;
}

static uint64_t number_at(const cluster_record *record, const field_entry *entry) {
    uint64_t wide = 0;
    uint32_t narrow = 0;
    if (entry->type == FIELD_U64) {
        memcpy(&wide, field_at(record, entry), sizeof wide);
        return wide;
    }
    memcpy(&narrow, field_at(record, entry), sizeof narrow);
    return narrow;
}

const char *record_field_name(record_field field) {
    return get_entry(field)->name;
}

record_class record_field_class(record_field field) {
    return get_entry(field)->class;
}

bool record_field_is_known(const cluster_record *record, record_field field) {
    const field_entry *entry = get_entry(field);
    if (is_text(entry->type)) return field_at(record, entry)[0] != '\0';
    return number_at(record, entry) != 0;
}

static bool is_equal(const cluster_record *a, const cluster_record *b, const field_entry *entry) {
    if (is_text(entry->type)) {
        return strncmp(field_at(a, entry), field_at(b, entry), entry->bytes) == 0;
    }
    return number_at(a, entry) == number_at(b, entry);
}

void record_field_print(const cluster_record *record, record_field field, char *out,
                        size_t capacity) {
    const field_entry *entry = get_entry(field);
    switch (entry->type) {
    case FIELD_U32:
    case FIELD_U64: (void)snprintf(out, capacity, "%" PRIu64, number_at(record, entry)); return;
    case FIELD_TEXT: (void)snprintf(out, capacity, "\"%s\"", field_at(record, entry)); return;
    case FIELD_CHECKSUM:
        (void)snprintf(out, capacity, "%s", record_checksum_name(record->kv_checksum));
        return;
    case FIELD_FINGERPRINT: (void)snprintf(out, capacity, "%.16s", field_at(record, entry)); return;
    }
}

bool record_compare(const cluster_record *theirs, const char *worker, const cluster_record *ours,
                    const char *cluster, record_field *field_out, bt_error *error) {
    for (int i = 0; i < RECORD_FIELD_COUNT; i++) {
        const record_field field = (record_field)i;
        if (fields[field].class != RECORD_MUST_EQUAL) continue;
        if (!record_field_is_known(theirs, field) || !record_field_is_known(ours, field)) continue;
        if (is_equal(theirs, ours, &fields[field])) continue;
        char their_value[128], our_value[128];
        record_field_print(theirs, field, their_value, sizeof their_value);
        record_field_print(ours, field, our_value, sizeof our_value);
        if (field_out != NULL) *field_out = field;
        (void)bt_fail(error, BT_ERR_PEER_REFUSED, "%s differs: %s on %s, %s on %s",
                      fields[field].name, their_value, worker, our_value, cluster);
        return false;
    }
    return true;
}

bool record_is_pairable(const cluster_record *a, const cluster_record *b) {
    for (int i = 0; i < RECORD_FIELD_COUNT; i++) {
        if (fields[i].class == RECORD_MUST_EQUAL) continue;
        if (!is_equal(a, b, &fields[i])) return false;
    }
    return true;
}

void record_adopt(cluster_record *into, const cluster_record *from) {
    for (int i = 0; i < RECORD_FIELD_COUNT; i++) {
        if (record_field_is_known(into, (record_field)i)) continue;
        memcpy((char *)into + fields[i].offset, field_at(from, &fields[i]), fields[i].bytes);
    }
}
