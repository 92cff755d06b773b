/* The queue and the choice of a pair. Requests are served in the order of submission, retries
 * included; the prompts that fit in one step of a prefill and the longer ones wait each for their
 * own kind, so that no long prompt stalls a short one here (the prefill shares its steps among
 * both); one that fits nowhere now is passed by those that do, but the oldest of those that a
 * prefill has room for keeps one decode for itself (the claim), which drains until it fits.
 * Fullness is what a decode answered, not what the router computes: its own numbers only order the
 * candidates, but for the samples that a decode runs at once. */
#include <string.h>

#include "base/assert.h"
#include "router/dispatch_internal.h"

enum { TRIES_MAX = 256 }; /* requests for which a pair is looked for in one pump */

typedef struct choice {
    worker *prefill, *decode;
} choice;

/* ---- the list -------------------------------------------------------------------------------- */

void dispatch_queue_insert(dispatch *d, request *r) {
    /* Retries are older than most and belong near the front; new requests go to the end. */
    request *after = d->queue_last;
    if (d->queue_first != NULL && r->order < d->queue_first->order) {
        after = NULL;
    } else {
        while (after != NULL && after->order > r->order)
            after = after->queue_prev;
    }
    r->queue_prev = after;
    r->queue_next = after == NULL ? d->queue_first : after->queue_next;
    if (r->queue_next == NULL) {
        d->queue_last = r;
    } else {
        r->queue_next->queue_prev = r;
    }
    if (after == NULL) {
        d->queue_first = r;
    } else {
        after->queue_next = r;
    }
    d->queued_count++;
    d->is_queue_dirty = true;
}

void dispatch_queue_remove(dispatch *d, request *r) {
    if (r->queue_prev == NULL) {
        BT_ASSERT(d->queue_first == r);
        d->queue_first = r->queue_next;
    } else {
        r->queue_prev->queue_next = r->queue_next;
    }
    if (r->queue_next == NULL) {
        BT_ASSERT(d->queue_last == r);
        d->queue_last = r->queue_prev;
    } else {
        r->queue_next->queue_prev = r->queue_prev;
    }
    r->queue_prev = r->queue_next = NULL;
    d->queued_count--;
    d->is_queue_dirty = true;
}

/* ---- full decodes ---------------------------------------------------------------------------- */

uint32_t dispatch_queue_pages_for(const worker *w, uint64_t tokens) {
    const uint64_t page = w->ready.page_tokens;
    return (uint32_t)((tokens + page - 1) / page);
}

void dispatch_queue_on_full(dispatch *d, worker *decode, const request *r) {
    if (r->need_pages < decode->full_need) decode->full_need = r->need_pages;
    decode->full_until_us = dispatch_after_ms(d, FULL_RETRY_MS);
}

void dispatch_queue_on_capacity(dispatch *d, worker *decode) {
    decode->full_need = UINT32_MAX;
    d->is_queue_dirty = true;
}

void dispatch_queue_drop_claim(dispatch *d, const request *r) {
    if (d->claim_request != r) return;
    d->claim_request = NULL;
    d->claim_decode = NULL;
    d->is_queue_dirty = true;
}

void dispatch_queue_forget_worker(dispatch *d, const worker *w) {
    if (d->claim_decode == w) dispatch_queue_drop_claim(d, d->claim_request);
}

/* ---- choosing -------------------------------------------------------------------------------- */

static uint64_t queued_tokens(const worker *prefill) {
    return prefill->queued_tokens_left + prefill->queued_tokens_foreign;
}

static uint64_t free_pages(const worker *decode) {
    const uint64_t used = decode->pages_used + decode->pages_foreign;
    return used < decode->ready.pages_total ? decode->ready.pages_total - used : 0;
}

bool dispatch_queue_is_short(const worker *prefill, const request *r) {
    return r->prompt_tokens <= prefill->ready.step_tokens;
}

/* Less than two steps of this kind of prompt are queued there. What of the short ones is computed
 * already is known of all prompts together only. */
static bool is_prefill_open(bool to_short, const worker *w) {
    const uint64_t left = w->queued_tokens_left;
    const uint64_t of_short = w->queued_tokens_short < left ? w->queued_tokens_short : left;
    const uint64_t ours = to_short ? of_short : left - of_short;
    return ours + w->queued_tokens_foreign < 2ull * w->ready.step_tokens;
}

/* Staging slots for the first rows of all samples. */
static bool has_staging(const request *r, const worker *prefill) {
    return r->generation.max_new_tokens == 0 || r->generation.samples <= prefill->ready.rows_total;
}

static bool can_ever_prefill(const request *r, const worker *w) {
    return has_staging(r, w) &&
           dispatch_queue_pages_for(w, r->prompt_tokens) <= w->ready.pages_total;
}

static bool can_prefill(const request *r, const worker *w) {
    return is_prefill_open(dispatch_queue_is_short(w, r), w) && can_ever_prefill(r, w);
}

/* Pages that decode takes for it at first: the prompt's, which all samples share, and a copy of the
 * last one for each further sample. */
static uint32_t need_of(const request *r, const worker *decode) {
    return dispatch_queue_pages_for(decode, r->prompt_tokens) + r->generation.samples - 1;
}

/* Pages of one whole sequence there: whatever else is retracted, one must fit. The last token's KV
 * is never written. */
static uint32_t sequence_pages(const request *r, const worker *decode) {
    return dispatch_queue_pages_for(decode,
                                    (uint64_t)r->prompt_tokens + r->generation.max_new_tokens - 1);
}

static bool has_slots(const request *r, const worker *decode) {
    return r->generation.samples <= decode->ready.rows_total &&
           r->generation.samples <= decode->ready.sequences_max;
}

/* Whether this decode could ever hold the request, as far as anyone has said. */
static bool can_ever_hold(const request *r, const worker *w) {
    return has_slots(r, w) && w->ready.pages_total > r->too_large_pages &&
           sequence_pages(r, w) <= w->ready.pages_total;
}

/* Not known to be full for requests of so many pages and samples. */
static bool is_decode_open(const dispatch *d, const worker *w, uint32_t need_pages,
                           uint32_t samples) {
    if ((uint64_t)w->sample_count + samples > w->ready.sequences_max) return false;
    return need_pages < w->full_need || d->now_us >= w->full_until_us;
}

static bool can_decode(const dispatch *d, const request *r, const worker *w) {
    if (d->claim_decode == w && d->claim_request != r) return false;
    return can_ever_hold(r, w) && is_decode_open(d, w, need_of(r, w), r->generation.samples);
}

static bool is_avoided(const request *r, const worker *prefill, const worker *decode) {
    return r->avoid_ids[LEG_PREFILL] == prefill->id &&
           (decode == NULL || r->avoid_ids[LEG_DECODE] == decode->id);
}

/* The prefill with the fewest queued tokens; ties at random. decode NULL: prefill alone. */
static worker *choose_prefill(dispatch *d, const request *r, const worker *decode,
                              bool with_avoided) {
    worker *best = NULL;
    uint64_t ties = 0;
    for (uint32_t i = 0; i < d->joined_count[LEG_PREFILL]; i++) {
        worker *w = d->joined[LEG_PREFILL][i];
        if (!can_prefill(r, w)) continue;
        if (decode != NULL && !dispatch_registry_is_pair_ready(d, w, decode)) continue;
        if (!with_avoided && is_avoided(r, w, decode)) continue;
        const bool is_better = best == NULL || queued_tokens(w) < queued_tokens(best);
        const bool is_tie = !is_better && queued_tokens(w) == queued_tokens(best);
        ties = is_better ? 1 : ties + (is_tie ? 1 : 0);
        if (is_better || (is_tie && dispatch_random(d, ties) == 0)) best = w;
    }
    return best;
}

/* The decode with the most free pages that has an open prefill; ties at random. */
static choice choose_pair(dispatch *d, const request *r, bool with_avoided) {
    choice best = {NULL, NULL};
    uint64_t ties = 0;
    for (uint32_t i = 0; i < d->joined_count[LEG_DECODE]; i++) {
        worker *w = d->joined[LEG_DECODE][i];
        if (!can_decode(d, r, w)) continue;
        const bool is_better = best.decode == NULL || free_pages(w) > free_pages(best.decode);
        const bool is_tie = !is_better && free_pages(w) == free_pages(best.decode);
        if (!is_better && !is_tie) continue;
        worker *prefill = choose_prefill(d, r, w, with_avoided);
        if (prefill == NULL) continue;
        ties = is_better ? 1 : ties + 1;
        if (is_better || dispatch_random(d, ties) == 0) best = (choice){prefill, w};
    }
    return best;
}

static choice choose(dispatch *d, const request *r) {
    const bool is_alone = r->generation.max_new_tokens == 0;
    choice found = {NULL, NULL};
    for (int pass = 0; pass < 2 && found.prefill == NULL; pass++) {
        const bool with_avoided = pass == 1;
        if (is_alone) {
            found.prefill = choose_prefill(d, r, NULL, with_avoided);
        } else {
            found = choose_pair(d, r, with_avoided);
        }
    }
    return found;
}

/* ---- what fits nowhere ----------------------------------------------------------------------- */

typedef struct largest {
    uint64_t prompt_pages, total_pages; /* of the largest joined prefill and decode */
    uint32_t page_tokens;
    uint32_t samples; /* that a pair of them takes at most */
    bool fits;
} largest;

static largest find_largest(const dispatch *d, const request *r) {
    largest out = {0};
    uint32_t staging = 0, slots = 0;
    bool prefill_fits = false, decode_fits = r->generation.max_new_tokens == 0;
    for (uint32_t i = 0; i < d->joined_count[LEG_PREFILL]; i++) {
        const worker *w = d->joined[LEG_PREFILL][i];
        const uint32_t pages = w->ready.pages_total;
        out.page_tokens = w->ready.page_tokens;
        if (pages > out.prompt_pages) out.prompt_pages = pages;
        if (w->ready.rows_total > staging) staging = w->ready.rows_total;
        prefill_fits |= can_ever_prefill(r, w);
    }
    for (uint32_t i = 0; i < d->joined_count[LEG_DECODE]; i++) {
        const worker *w = d->joined[LEG_DECODE][i];
        if (w->ready.pages_total > out.total_pages) out.total_pages = w->ready.pages_total;
        const uint32_t rows = w->ready.rows_total, sequences = w->ready.sequences_max;
        const uint32_t both = rows < sequences ? rows : sequences;
        if (both > slots) slots = both;
        decode_fits |= can_ever_hold(r, w);
    }
    out.samples = staging < slots ? staging : slots;
    out.fits = prefill_fits && decode_fits;
    return out;
}

/* Ends a request that no worker of a serving cluster can ever hold. */
static bool end_if_too_large(dispatch *d, request *r) {
    if (d->ready_pairs == 0) return false;
    const largest l = find_largest(d, r);
    if (l.fits) return false;
    if (r->last_status == BT_ERR_REQUEST_TOO_LARGE) {
        dispatch_request_end_with(d, r, BT_ERR_REQUEST_TOO_LARGE, "%s", r->last_text);
        return true;
    }
    if (r->generation.max_new_tokens > 0 && r->generation.samples > l.samples) {
        dispatch_request_end_with(d, r, BT_ERR_REQUEST_TOO_LARGE,
                                  "%u samples of one request do not fit: the workers take %u",
                                  r->generation.samples, l.samples);
        return true;
    }
    dispatch_request_end_with(
        d, r, BT_ERR_REQUEST_TOO_LARGE,
        "prompt of %u tokens plus max_new_tokens %u does not fit: the largest prefill "
        "worker holds %llu tokens, the largest decode worker %llu",
        r->prompt_tokens, r->generation.max_new_tokens,
        (unsigned long long)(l.prompt_pages * l.page_tokens),
        (unsigned long long)(l.total_pages * l.page_tokens));
    return true;
}

/* Single samples would pass many of one request for ever: as soon as one ended, the next took its
 * place. */
static bool may_claim(const dispatch *d, const request *r) {
    if (d->claim_request != NULL) return false;
    return r->was_full || (r->generation.samples > 1 && r->generation.max_new_tokens > 0);
}

/* Whether a prefill that could compute it can hand over to this decode. */
static bool is_reachable(const dispatch *d, const request *r, const worker *decode) {
    for (uint32_t i = 0; i < d->joined_count[LEG_PREFILL]; i++) {
        const worker *w = d->joined[LEG_PREFILL][i];
        if (can_ever_prefill(r, w) && dispatch_registry_is_pair_ready(d, w, decode)) return true;
    }
    return false;
}

/* The oldest request keeps the decode where it has the least to wait for. */
static void claim(dispatch *d, request *r) {
    worker *best = NULL;
    for (uint32_t i = 0; i < d->joined_count[LEG_DECODE]; i++) {
        worker *w = d->joined[LEG_DECODE][i];
        if (!can_ever_hold(r, w) || !is_reachable(d, r, w)) continue;
        if (best == NULL || free_pages(w) > free_pages(best)) best = w;
    }
    if (best == NULL) return;
    d->claim_request = r;
    d->claim_decode = best;
}

/* ---- the pump -------------------------------------------------------------------------------- */

/* Prompts that some prefill has room for now: up to so many tokens, or from so many on. */
typedef struct opening {
    uint32_t up_to, from;
} opening;

static opening find_opening(const dispatch *d) {
    opening out = {.up_to = 0, .from = UINT32_MAX};
    for (uint32_t i = 0; i < d->joined_count[LEG_PREFILL]; i++) {
        const worker *w = d->joined[LEG_PREFILL][i];
        const uint32_t longest_short = w->ready.step_tokens;
        if (is_prefill_open(true, w) && longest_short > out.up_to) out.up_to = longest_short;
        if (is_prefill_open(false, w) && longest_short + 1 < out.from) out.from = longest_short + 1;
    }
    return out;
}

static bool is_any_decode_open(const dispatch *d) {
    for (uint32_t i = 0; i < d->joined_count[LEG_DECODE]; i++) {
        if (is_decode_open(d, d->joined[LEG_DECODE][i], 1, 1)) return true;
    }
    return false;
}

/* A saturated cluster costs one look per request, not one per pair. */
static bool is_worth_a_try(const dispatch *d, const request *r, opening prefills) {
    if (r->prompt_tokens > prefills.up_to && r->prompt_tokens < prefills.from) return false;
    return r->generation.max_new_tokens == 0 || is_any_decode_open(d);
}

/* true: an attempt was begun, or the request ended. */
static bool try_request(dispatch *d, request *r, bool is_oldest) {
    if (d->now_us < r->not_before_us) return false;
    const choice found = choose(d, r);
    if (found.prefill != NULL) {
        r->need_pages = found.decode == NULL ? 0 : need_of(r, found.decode);
        dispatch_attempt_begin(d, r, found.prefill, found.decode);
        return true;
    }
    if (end_if_too_large(d, r)) return true;
    if (is_oldest && may_claim(d, r)) claim(d, r);
    return false;
}

void dispatch_queue_pump(dispatch *d) {
    request *r = d->queue_first;
    if (d->claim_request != NULL && !is_reachable(d, d->claim_request, d->claim_decode))
        dispatch_queue_drop_claim(d, d->claim_request);
    opening prefills = find_opening(d);
    bool is_oldest = true; /* of those that are tried and stay */
    for (int tries = 0; tries < TRIES_MAX && r != NULL;) {
        request *next = r->queue_next;
        if (is_worth_a_try(d, r, prefills)) {
            tries++;
            if (try_request(d, r, is_oldest)) {
                prefills = find_opening(d);
            } else {
                is_oldest = false;
            }
        }
        r = next;
    }
    /* Also when an attempt could not be begun (memory) and its request is back in the queue: the
     * next event or tick tries again. */
    d->is_queue_dirty = false;
}
