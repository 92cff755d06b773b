/* A record is its length in 4 bytes and then the entry as it travelled (proto/message.h). The
 * numbers are looked at when they come, so that formatting cannot fail over them. */
#include "router/prompt_logprobs.h"

#include <math.h>
#include <string.h>

#include "base/little_endian.h"

enum {
    LENGTH_BYTES = 4,
    RECORD_BYTES_MAX = LENGTH_BYTES + 4 * (1 + 2 * PROTO_TOP_LOGPROBS_MAX + PROTO_LOGPROB_IDS_MAX),
};

static size_t entry_bytes(const prompt_logprobs *p) {
    return sizeof(float) * (1 + 2 * (size_t)p->top_count + p->id_count);
}

void prompt_logprobs_init(prompt_logprobs *p, const api_request *request, reply_spill *spill) {
    const proto_generation *asked = &request->generation;
    memset(p, 0, sizeof(*p));
    reply_store_init(&p->store, spill);
    p->is_wanted = asked->wants_prompt_logprobs != 0;
    p->from = asked->prompt_logprobs_from;
    if (p->is_wanted) p->expected = request->prompt.count - 1 - p->from;
    p->top_count = asked->top_logprobs;
    p->id_count = asked->logprob_id_count;
}

void prompt_logprobs_fini(prompt_logprobs *p) {
    reply_store_fini(&p->store);
}

static void read_entry(const prompt_logprobs *p, const uint8_t *bytes, prompt_entry *out) {
    const uint8_t *top = bytes + sizeof(float);
    out->logprob = bt_load_le_float(bytes);
    out->top = (const void *)top;
    out->id_logprobs = (const void *)(top + sizeof(row_top) * p->top_count);
}

/* A NaN means that the forward pass broke. */
static bool has_numbers(const prompt_logprobs *p, const prompt_entry *entry) {
    bool is_good = !isnan(entry->logprob);
    for (uint32_t i = 0; i < p->top_count; i++) {
        is_good = is_good && !isnan(entry->top[i].logprob);
    }
    for (uint32_t i = 0; i < p->id_count; i++) {
        is_good = is_good && !isnan(entry->id_logprobs[i]);
    }
    return is_good;
}

static bt_status take_entry(prompt_logprobs *p, const uint8_t *bytes) {
    uint32_t record[RECORD_BYTES_MAX / sizeof(uint32_t)]; /* aligned for what is read from it */
    uint8_t *at = (uint8_t *)record;
    const size_t count = entry_bytes(p);
    prompt_entry entry;
    bt_store_le32(at, (uint32_t)(LENGTH_BYTES + count));
    memcpy(at + LENGTH_BYTES, bytes, count);
    read_entry(p, at + LENGTH_BYTES, &entry);
    if (!has_numbers(p, &entry)) return BT_ERR_WORKER_INTERNAL;
    bt_status status = reply_store_append(&p->store, at, LENGTH_BYTES + count, NULL);
    if (status == BT_OK) p->count++;
    return status;
}

bt_status prompt_logprobs_take(prompt_logprobs *p, const dispatch_prompt_logprobs *given) {
    const size_t each = entry_bytes(p);
    if (!p->is_wanted) return BT_ERR_PEER_PROTOCOL;
    if (given->first_position == p->from + 1 && p->count > 0) {
        reply_store_fini(&p->store);
        p->count = 0;
    }
    if (given->first_position != p->from + 1 + p->count || given->count > p->expected - p->count ||
        given->bytes != each * given->count)
        return BT_ERR_PEER_PROTOCOL;
    bt_status status = BT_OK;
    for (uint32_t i = 0; i < given->count && status == BT_OK; i++) {
        status = take_entry(p, given->entries + each * i);
    }
    return status;
}

bool prompt_logprobs_is_complete(const prompt_logprobs *p) {
    return p->count == p->expected;
}

bt_status prompt_logprobs_next(prompt_logprobs *p, reply_place *place, prompt_entry *out) {
    const uint8_t *record;
    size_t bytes;
    bt_status status = reply_store_next(&p->store, place, &record, &bytes);
    if (status != BT_OK) return status;
    if (bytes != LENGTH_BYTES + entry_bytes(p)) return BT_ERR_WORKER_INTERNAL;
    read_entry(p, record + LENGTH_BYTES, out);
    return BT_OK;
}
