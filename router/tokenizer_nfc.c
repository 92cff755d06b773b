/* Normalisation form C. Most text is already normal, so only the stretches around characters that
 * may change are decomposed, ordered and composed again; the rest is copied, and plain text below
 * U+0300 is not even copied. Ordering is our own, because a long run of marks makes utf8proc's
 * quadratic.
 *
 * The reference (the normaliser of Hugging Face tokenizers 0.21) has the data of Unicode 9: a mark
 * that came later is an ordinary character there. Such marks, and a later second half of a
 * composition, are barriers here: they pass unchanged and nothing moves over them. */
#include <string.h>
#include <utf8proc.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "router/tokenizer_internal.h"

typedef enum point_kind {
    POINT_BOUNDARY, /* stays as it is, and nothing before it depends on it */
    POINT_BARRIER,  /* so too, and nothing after it depends on it */
    POINT_INSIDE,   /* may change, move or join what is before it */
} point_kind;

typedef struct point_range {
    uint32_t first;
    uint32_t last;
} point_range;

static const point_range barriers[] = {
    {0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
    {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},
    {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27},
    {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85},
    {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A},
    {0x11930, 0x11930}, {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0},
    {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42},
    {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1},
    {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF},
    {0x1E4EC, 0x1E4EF},
};

/* Characters of combining class 0 that join the character before them. */
static const point_range joiners[] = {
    {0x9BE, 0x9BE},     {0x9D7, 0x9D7},     {0xB3E, 0xB3E},     {0xB56, 0xB57},
    {0xBBE, 0xBBE},     {0xBD7, 0xBD7},     {0xCC2, 0xCC2},     {0xCD5, 0xCD6},
    {0xD3E, 0xD3E},     {0xD57, 0xD57},     {0xDCF, 0xDCF},     {0xDDF, 0xDDF},
    {0x102E, 0x102E},   {0x1161, 0x1175},   {0x11A8, 0x11C2},   {0x1B35, 0x1B35},
    {0x11127, 0x11127}, {0x1133E, 0x1133E}, {0x11357, 0x11357}, {0x114B0, 0x114B0},
    {0x114BA, 0x114BA}, {0x114BD, 0x114BD}, {0x115AF, 0x115AF},
};

static bool is_in(const point_range *ranges, size_t count, uint32_t c) {
    size_t low = 0;
    size_t high = count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (ranges[middle].last < c)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && ranges[low].first <= c;
}

static point_kind kind_of(uint32_t c) {
    if (c < 0x300) return POINT_BOUNDARY;
    /* Most of CJK and all of Hangul's syllables, without a look at the tables. */
    if ((c >= 0x3100 && c < 0xA000) || (c >= 0xAC00 && c < 0xD7A4)) return POINT_BOUNDARY;
    if (is_in(barriers, BT_ARRAY_COUNT(barriers), c)) return POINT_BARRIER;
    if (is_in(joiners, BT_ARRAY_COUNT(joiners), c)) return POINT_INSIDE;
    const utf8proc_property_t *property = utf8proc_get_property((utf8proc_int32_t)c);
    const bool is_canonical = property->decomp_seqindex != UINT16_MAX && property->decomp_type == 0;
    return is_canonical || property->combining_class != 0 ? POINT_INSIDE : POINT_BOUNDARY;
}

void nfc_buffer_fini(nfc_buffer *buffer) {
    bt_free(buffer->text);
    bt_free(buffer->points);
    *buffer = (nfc_buffer){0};
}

static bt_status reserve_text(nfc_buffer *buffer, size_t bytes) {
    const size_t needed = buffer->text_bytes + bytes;
    if (needed <= buffer->text_capacity) return BT_OK;
    size_t capacity = buffer->text_capacity == 0 ? 1024 : buffer->text_capacity;
    while (capacity < needed)
        capacity *= 2;
    char *text = bt_realloc(buffer->text, capacity);
    if (text == NULL) return BT_ERR_WORKER_MEMORY;
    buffer->text = text;
    buffer->text_capacity = capacity;
    return BT_OK;
}

static bt_status append(nfc_buffer *buffer, const char *text, size_t bytes) {
    const bt_status status = reserve_text(buffer, bytes);
    if (status != BT_OK) return status;
    if (bytes > 0) memcpy(buffer->text + buffer->text_bytes, text, bytes);
    buffer->text_bytes += bytes;
    return BT_OK;
}

static uint8_t class_of(int32_t point) {
    return (uint8_t)utf8proc_get_property(point)->combining_class;
}

/* Orders one run of marks by class, equal ones as they came. */
static void sort_run(int32_t *points, size_t count, int32_t *spare) {
    size_t starts[257] = {0};
    for (size_t i = 0; i < count; i++)
        starts[class_of(points[i]) + 1]++;
    for (size_t i = 1; i < 257; i++)
        starts[i] += starts[i - 1];
    for (size_t i = 0; i < count; i++)
        spare[starts[class_of(points[i])]++] = points[i];
    memcpy(points, spare, count * sizeof *points);
}

static void order_marks(int32_t *points, size_t count, int32_t *spare) {
    size_t at = 0;
    while (at < count) {
        size_t end = at;
        bool is_ordered = true;
        uint8_t previous = 0;
        for (; end < count && class_of(points[end]) != 0; end++) {
            is_ordered = is_ordered && class_of(points[end]) >= previous;
            previous = class_of(points[end]);
        }
        if (!is_ordered) sort_run(points + at, end - at, spare);
        at = end + 1;
    }
}

/* A canonical decomposition has at most 4 code points, and the shortest character that has one
 * takes 2 bytes; half of the room is spare for sorting. */
static bt_status reserve_points(nfc_buffer *buffer, size_t bytes) {
    const size_t needed = 2 * (2 * bytes + 8);
    if (needed <= buffer->point_capacity) return BT_OK;
    int32_t *points = bt_realloc(buffer->points, needed * sizeof *points);
    if (points == NULL) return BT_ERR_WORKER_MEMORY;
    buffer->points = points;
    buffer->point_capacity = needed;
    return BT_OK;
}

static bt_status normalize_stretch(nfc_buffer *buffer, const char *text, size_t bytes) {
    bt_status status = reserve_points(buffer, bytes);
    if (status != BT_OK) return status;
    const size_t capacity = buffer->point_capacity / 2;
    size_t count = 0;
    for (size_t at = 0; at < bytes;) {
        uint32_t c = 0;
        int bound_class = 0;
        at += bt_utf8_decode(text + at, &c);
        const utf8proc_ssize_t step = utf8proc_decompose_char(
            (utf8proc_int32_t)c, buffer->points + count, (utf8proc_ssize_t)(capacity - count),
            UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &bound_class);
        if (step < 0 || (size_t)step > capacity - count) return BT_ERR_WORKER_INTERNAL;
        count += (size_t)step;
    }
    order_marks(buffer->points, count, buffer->points + capacity);
    const utf8proc_ssize_t composed = utf8proc_normalize_utf32(
        buffer->points, (utf8proc_ssize_t)count, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    if (composed < 0) return BT_ERR_WORKER_INTERNAL;
    status = reserve_text(buffer, 4 * (size_t)composed);
    for (size_t i = 0; i < (size_t)composed && status == BT_OK; i++)
        buffer->text_bytes +=
            bt_utf8_encode((uint32_t)buffer->points[i], buffer->text + buffer->text_bytes);
    return status;
}

/* The end of the characters from `at` on that may change. */
static size_t inside_end(const char *text, size_t bytes, size_t at) {
    while (at < bytes) {
        uint32_t c = 0;
        const uint32_t step = bt_utf8_decode(text + at, &c);
        if (kind_of(c) != POINT_INSIDE) break;
        at += step;
    }
    return at;
}

bt_status nfc_normalize(nfc_buffer *buffer, const char *text, size_t bytes, const char **text_out,
                        size_t *bytes_out) {
    buffer->text_bytes = 0;
    bt_status status = BT_OK;
    size_t copied = 0;   /* what of the text is in the buffer */
    size_t boundary = 0; /* where a stretch that begins now would start */
    for (size_t at = 0; at < bytes && status == BT_OK;) {
        uint32_t c = 0;
        const size_t start = at;
        at += bt_utf8_decode(text + at, &c);
        const point_kind kind = kind_of(c);
        if (kind != POINT_INSIDE) {
            boundary = kind == POINT_BARRIER ? at : start;
            continue;
        }
        at = inside_end(text, bytes, at);
        status = append(buffer, text + copied, boundary - copied);
        if (status == BT_OK) status = normalize_stretch(buffer, text + boundary, at - boundary);
        copied = at;
        boundary = at;
    }
    if (status == BT_OK && copied > 0) status = append(buffer, text + copied, bytes - copied);
    if (status != BT_OK) return status;
    *text_out = copied > 0 ? buffer->text : text;
    *bytes_out = copied > 0 ? buffer->text_bytes : bytes;
    return BT_OK;
}
