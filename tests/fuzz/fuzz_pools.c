/* Sequences of operations on the page pool and the row slots against a plain model: counts add up,
 * no page has two owners, and an old slot is never reached. */
#include "tests/fuzz/fuzz.h"

#include <string.h>

#include "base/assert.h"
#include "pd_buffers/kv_pool.h"
#include "pd_buffers/row_pool.h"

enum { PAGES = 12, OWNERS = 4, SLOTS = 3, PAST = 8 };

typedef struct model {
    kv_pool *pages;
    row_pool *rows;
    uint32_t held[OWNERS][PAGES];
    uint32_t count[OWNERS];
    row_slot slots[SLOTS];
    uint32_t slot_count;
    row_slot past[PAST]; /* released; must not be found */
    uint32_t past_count;
} model;

static void use_pages(model *m, uint32_t owner, uint8_t what) {
    const uint64_t id = owner + 1;
    if (m->count[owner] == 0) {
        const uint32_t wanted = what % (PAGES + 3);
        const kv_pool_counts counts = kv_pool_count(m->pages);
        const bt_status status = kv_pool_acquire(m->pages, id, wanted, m->held[owner]);
        if (wanted > PAGES)
            BT_ASSERT(status == BT_ERR_REQUEST_TOO_LARGE);
        else
            BT_ASSERT(status == (wanted <= counts.free ? BT_OK : BT_ERR_REQUEST_FULL));
        m->count[owner] = status == BT_OK ? wanted : 0;
        return;
    }
    /* A part of what is held, from its end. */
    const uint32_t part = 1 + what / 2 % m->count[owner];
    const uint32_t first = m->count[owner] - part;
    if (what % 2 == 0) {
        kv_pool_quarantine(m->pages, id, m->held[owner] + first, part);
        return;
    }
    kv_pool_release(m->pages, id, m->held[owner] + first, part);
    m->count[owner] = first;
}

static void use_slots(model *m, uint8_t what) {
    row_slot slot;
    if (what % 2 == 0) {
        const bt_status status = row_pool_acquire(m->rows, &slot);
        BT_ASSERT(status == (m->slot_count < SLOTS ? BT_OK : BT_ERR_REQUEST_FULL));
        if (status == BT_OK) m->slots[m->slot_count++] = slot;
        return;
    }
    if (m->slot_count == 0) return;
    const uint32_t index = what / 2 % m->slot_count;
    slot = m->slots[index];
    row_pool_release(m->rows, slot);
    m->slots[index] = m->slots[--m->slot_count];
    m->past[m->past_count++ % PAST] = slot;
}

static void check(const model *m) {
    bool is_held[PAGES] = {false};
    uint32_t total = 0;
    BT_ASSERT(kv_pool_check(m->pages));
    for (uint32_t owner = 0; owner < OWNERS; owner++) {
        for (uint32_t i = 0; i < m->count[owner]; i++) {
            const uint32_t page = m->held[owner][i];
            BT_ASSERT(page < PAGES);
            BT_ASSERT(!is_held[page]);
            BT_ASSERT(kv_pool_owner(m->pages, page) == owner + 1);
            is_held[page] = true;
            total++;
        }
    }
    BT_ASSERT(kv_pool_count(m->pages).free == PAGES - total);
    BT_ASSERT(row_pool_free_count(m->rows) == SLOTS - m->slot_count);
    for (uint32_t i = 0; i < m->slot_count; i++)
        BT_ASSERT(row_pool_get(m->rows, m->slots[i]) != NULL);
    for (uint32_t i = 0; i < PAST && i < m->past_count; i++)
        BT_ASSERT(row_pool_get(m->rows, m->past[i]) == NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const kv_pool_options options = {.page_count = PAGES, .page_bytes = 64, .layers = 1};
    model m;
    memset(&m, 0, sizeof m);
    bt_status status = kv_pool_create(&options, &m.pages);
    BT_ASSERT(status == BT_OK);
    status = row_pool_create(SLOTS, 4, &m.rows);
    BT_ASSERT(status == BT_OK);
    for (size_t i = 0; i + 1 < bytes; i += 2) {
        if (data[i] % 5 == 4)
            use_slots(&m, data[i + 1]);
        else
            use_pages(&m, data[i] % 5, data[i + 1]);
        check(&m);
    }
    row_pool_destroy(m.rows);
    kv_pool_destroy(m.pages);
    return 0;
}
