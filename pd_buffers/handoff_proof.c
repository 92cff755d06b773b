/* From received bytes to a proven attempt: chunk checksums, what the rows say against what was
 * offered, and completeness. */
#include <inttypes.h>

#include "base/assert.h"
#include "base/fault.h"
#include "pd_buffers/handoff_receiver_internal.h"

/* What a row says of a support that is there or not, and of its true size. */
static const char *support_contradiction(const handoff_receiver *receiver, const incoming *in,
                                         const metadata_row *row) {
    const uint32_t count = row->support_count;
    const uint32_t cap = row_pool_cap(receiver->options.rows);
    if (count > cap) return "support size";
    if (row->mask_mode == ROW_MASK_OFF) return row->cap_needed == 0 ? NULL : "cap needed";
    if (count == 0) return "support size";
    if (row->cap_needed == count) return NULL;
    const bool is_cut = in->offer.mask_bounded != 0 && row->cap_needed > count && count == cap;
    return is_cut ? NULL : "cap needed";
}

/* A sample that got no token is told so only where others did: without any there is no handoff. An
 * exact support that fits, or a bounded one, is no overflow. */
static const char *status_contradiction(const handoff_receiver *receiver, const incoming *in,
                                        const metadata_row *row) {
    const uint32_t cap = row_pool_cap(receiver->options.rows);
    if (row->status == 0) return support_contradiction(receiver, in, row);
    if (in->offer.sample_count == 1 || row->status > 2) return "status";
    if (row->first_token != -1) return "first token";
    if (row->support_count != 0) return "support size";
    if (row->status == 2) return row->cap_needed == 0 ? NULL : "cap needed";
    if (row->mask_mode == ROW_MASK_OFF || in->offer.mask_bounded != 0) return "status";
    return row->cap_needed > cap ? NULL : "cap needed";
}

static const char *row_contradiction(const handoff_receiver *receiver, const incoming *in,
                                     uint32_t sample) {
    const metadata_row *row = &in->decoded[sample];
    const handoff_offer *offer = &in->offer;
    const row_slot slot = in->rows[sample].slot;
    if (!proto_attempt_equal(row->attempt, offer->attempt)) return "attempt";
    if (row->slot != slot.index) return "slot";
    if (row->slot_generation != slot.generation && !bt_mutant(BT_MUTANT_IGNORE_GENERATION))
        return "slot generation";
    if (row->writer_incarnation != offer->peer.incarnation) return "writer incarnation";
    if (row->sample_index != sample) return "sample index";
    if (row->prompt_tokens != offer->prompt_tokens) return "prompt tokens";
    if (row->cached_tokens >= offer->prompt_tokens) return "cached tokens";
    if (row->page_count != offer->page_count) return "page count";
    if (row->kv_bytes != (uint64_t)offer->page_count * receiver->geometry.page_bytes)
        return "KV bytes";
    if (row->mask_mode != offer->mask_mode) return "mask mode";
    if (in->announced != 0 && row->chunk_count != in->announced) return "chunk count";
    if (row->chunk_count == 0 || row->chunk_count > in->unit_count) return "chunk count";
    if (row->chunk_count < in->chunk_index_end) return "chunk count";
    return status_contradiction(receiver, in, row);
}

static void become_ready(handoff_receiver *receiver, incoming *in) {
    const proto_attempt attempt = in->offer.attempt;
    receiver->counts.ready++;
    in->state = INCOMING_ACKING;
    in->is_telling = true; /* the rows are the record's, so it stays */
    receiver->options.events.on_ready(receiver->options.events.context, attempt, in->decoded);
    in->is_telling = false;
    handoff_incoming_ack(receiver, in);
}

/* The index of a row that does not prove itself; sample_count: all do. */
static uint32_t find_unproven(const handoff_receiver *receiver, const incoming *in) {
    uint32_t sample = 0;
    for (; sample < in->offer.sample_count; sample++) {
        const incoming_row *row = &in->rows[sample];
        const void *slot = row_pool_get(receiver->options.rows, row->slot);
        BT_ASSERT(slot != NULL);
        if (row_prove(slot, row->bytes, in->checksums, in->announced) != BT_OK) break;
    }
    return sample;
}

/* Ready when exactly the announced chunks are there, cover everything, and the rows prove
 * themselves. */
static void check_complete(handoff_receiver *receiver, incoming *in) {
    if (in->rows_done < in->offer.sample_count) return;
    const uint32_t announced = in->announced;
    if (bt_mutant(BT_MUTANT_ROW_BEFORE_KV) && in->posted == 0 && in->chunks_done + 1 >= announced) {
        become_ready(receiver, in);
        return;
    }
    if (in->chunks_posted < announced) {
        if (in->units_covered == in->unit_count)
            handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_CORRUPT,
                                  "the row announces %" PRIu32
                                  " chunks, but all KV came in %" PRIu32,
                                  announced, in->chunks_posted);
        return;
    }
    if (in->chunks_done < announced) return;
    BT_ASSERT(in->posted == 0);
    if (in->units_covered != in->unit_count) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_CORRUPT,
                              "all %" PRIu32 " chunks came and cover %" PRIu32 " of %" PRIu32
                              " pieces of KV",
                              announced, in->units_covered, in->unit_count);
        return;
    }
    const uint32_t unproven = find_unproven(receiver, in);
    if (unproven < in->offer.sample_count) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_CORRUPT,
                              "the metadata row of sample %" PRIu32 " does not prove itself",
                              unproven);
        return;
    }
    become_ready(receiver, in);
}

void handoff_incoming_chunk(handoff_receiver *receiver, incoming *in, uint32_t index) {
    incoming_chunk *chunk = &in->chunks[index];
    const uint32_t crc = handoff_span_checksum(&receiver->geometry, &chunk->span, in->pages,
                                               receiver->options.checksum, in->offer.attempt);
    if (crc != chunk->crc) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_CORRUPT,
                              "chunk %" PRIu32 " (pages %" PRIu32 "+%" PRIu32
                              ") has checksum %08" PRIx32 ", not %08" PRIx32,
                              index, chunk->span.first_page, chunk->span.page_count, crc,
                              chunk->crc);
        return;
    }
    in->checksums[index] = crc;
    in->chunks_done++;
    receiver->counts.chunks++;
    receiver->counts.bytes += handoff_span_bytes(&receiver->geometry, &chunk->span);
    check_complete(receiver, in);
}

void handoff_incoming_row(handoff_receiver *receiver, incoming *in, uint32_t sample) {
    const incoming_row *row = &in->rows[sample];
    const void *slot = row_pool_get(receiver->options.rows, row->slot);
    BT_ASSERT(slot != NULL);
    const bt_status status = row_decode(slot, row->bytes, &in->decoded[sample]);
    if (status != BT_OK) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_CORRUPT,
                              "the metadata row cannot be read: %s", row_fault(slot, row->bytes));
        return;
    }
    const char *field = row_contradiction(receiver, in, sample);
    if (field != NULL) {
        handoff_incoming_fail(receiver, in, BT_ERR_REQUEST_CORRUPT,
                              "the metadata row's %s is not what was offered", field);
        return;
    }
    in->announced = in->decoded[sample].chunk_count;
    in->rows_done++;
    check_complete(receiver, in);
}
