/* Who may join: protocol versions, parallel ranks, and the cluster record. The first live worker
 * founds the fields that the router does not know; when the last one leaves, what it founded is
 * forgotten. A refusal is one sentence that names field, values and hosts: sent, counted, logged.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "router/dispatch_internal.h"

/* Fields that the router governs: workers adopt them unless they pin them. */
static bool is_governed(record_field field) {
    return field == RECORD_SAMPLING_MASK_MAX_TOKENS || field == RECORD_KV_CHECKSUM;
}

static void BT_PRINTF(3, 4) refuse(dispatch *d, connection *from, const char *format, ...) {
    char text[2 * PROTO_TEXT_MAX];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    proto_message message = {.kind = PROTO_REFUSE};
    proto_text_copy(message.refuse.text, sizeof message.refuse.text, text);
    bt_log_warn("dispatch", "worker refused: %s", message.refuse.text);
    d->refused_total++;
    dispatch_send(d, from, &message);
    dispatch_close(d, from);
}

static void print_name(const proto_hello *hello, char *out, size_t capacity) {
    (void)snprintf(out, capacity, "%s worker at %s (pid %u)", proto_role_name(hello->role),
                   hello->host, hello->pid);
}

worker *dispatch_hello_founder(const dispatch *d) {
    worker *oldest = NULL;
    for (uint32_t i = 0; i < DISPATCH_WORKERS_MAX; i++) {
        worker *w = d->workers[i];
        if (w != NULL && (oldest == NULL || w->id < oldest->id)) oldest = w;
    }
    return oldest;
}

/* Ranks are in the hello from day one; more than one is refused by name until it is built. */
static bool check_ranks(dispatch *d, connection *from, const proto_hello *hello, const char *name) {
    const struct {
        const char *field;
        uint32_t count;
    } counts[] = {{"tp_count", hello->tp_count},
                  {"pp_count", hello->pp_count},
                  {"dp_count", hello->dp_count}};
    for (size_t i = 0; i < BT_ARRAY_COUNT(counts); i++) {
        if (counts[i].count <= 1) continue;
        refuse(d, from, "%s %u of %s is not supported yet: only 1 is", counts[i].field,
               counts[i].count, name);
        return false;
    }
    return true;
}

/* A field that a worker leaves out could differ without anyone noticing. */
static bool check_stated(dispatch *d, connection *from, const cluster_record *record,
                         const char *name) {
    for (int i = 0; i < RECORD_FIELD_COUNT; i++) {
        const record_field field = (record_field)i;
        if (record_field_class(field) != RECORD_MUST_EQUAL || is_governed(field)) continue;
        if (record_field_is_known(record, field)) continue;
        if (field == RECORD_TOKENIZER_FINGERPRINT) continue; /* a worker may have no tokenizer */
        refuse(d, from, "%s is not stated by %s", record_field_name(field), name);
        return false;
    }
    return true;
}

static bool check_record(dispatch *d, connection *from, const cluster_record *record,
                         const char *name) {
    char router[PROTO_HOST_MAX + 16];
    bt_error error;
    (void)snprintf(router, sizeof router, "router %s", d->options.host);
    if (!record_compare(record, name, &d->options.record, router, NULL, &error)) {
        refuse(d, from, "%s", error.text);
        return false;
    }
    const worker *founder = dispatch_hello_founder(d);
    if (founder == NULL) return true;
    if (!record_compare(record, name, &d->record, founder->name, NULL, &error)) {
        refuse(d, from, "%s", error.text);
        return false;
    }
    return true;
}

/* Prefills of another format pair with nobody here; what a decode streams, the router must read. */
static bool check_row_format(dispatch *d, connection *from, const proto_hello *hello,
                             const char *name) {
    const uint32_t theirs = hello->record.row_format, ours = d->options.record.row_format;
    if (hello->role != PROTO_ROLE_DECODE || ours == 0 || theirs == ours) return true;
    refuse(d, from, "row_format differs: %u on %s, %u on router %s", theirs, name, ours,
           d->options.host);
    return false;
}

static bool check_vocabulary(dispatch *d, connection *from, const proto_hello *hello,
                             const char *name) {
    const worker *founder = dispatch_hello_founder(d);
    if (hello->vocab_size < d->options.vocab_min) {
        refuse(d, from,
               "the tokenizer does not fit the model: it has %u ids, the model of %s only %u",
               d->options.vocab_min, name, hello->vocab_size);
        return false;
    }
    if (founder == NULL || founder->hello.vocab_size == hello->vocab_size) return true;
    refuse(d, from, "vocab_size differs: %u on %s, %u on %s", hello->vocab_size, name,
           founder->hello.vocab_size, founder->name);
    return false;
}

static worker *find_incarnation(const dispatch *d, uint64_t incarnation) {
    for (uint32_t i = 0; i < DISPATCH_WORKERS_MAX; i++) {
        worker *w = d->workers[i];
        if (w != NULL && w->hello.incarnation == incarnation) return w;
    }
    return NULL;
}

static void welcome(dispatch *d, worker *w) {
    proto_message message = {.kind = PROTO_WELCOME};
    proto_welcome *out = &message.welcome;
    out->router_incarnation = d->options.incarnation;
    proto_text_copy(out->router_host, sizeof out->router_host, d->options.host);
    out->worker_id = w->id;
    out->record = w->record;
    out->heartbeat_ms = d->options.heartbeat_ms;
    out->dead_after_ms = d->options.dead_after_ms;
    dispatch_send(d, w->control, &message);
}

void dispatch_hello_on_control(dispatch *d, connection *from, const proto_hello *hello) {
    char name[WORKER_NAME_MAX];
    print_name(hello, name, sizeof name);
    if (hello->version_major != PROTO_VERSION_MAJOR) {
        refuse(d, from, "protocol version differs: %u.%u on %s, %u.%u on router %s",
               hello->version_major, hello->version_minor, name, PROTO_VERSION_MAJOR,
               PROTO_VERSION_MINOR, d->options.host);
        return;
    }
    if (find_incarnation(d, hello->incarnation) != NULL) {
        /* Most likely the same process, behind a connection that is lost without the router
         * knowing it yet. It dials again; the old one ends by itself or by its heartbeat. */
        bt_log_info("dispatch", "%s is connected already: its new connection is closed", name);
        dispatch_close(d, from);
        return;
    }
    cluster_record record = hello->record;
    const uint32_t pins = hello->pins;
    if ((pins & 1u << RECORD_SAMPLING_MASK_MAX_TOKENS) == 0) record.sampling_mask_max_tokens = 0;
    if ((pins & 1u << RECORD_KV_CHECKSUM) == 0) record.kv_checksum = 0;
    if (!check_ranks(d, from, hello, name)) return;
    if (!check_stated(d, from, &record, name)) return;
    if (!check_record(d, from, &record, name)) return;
    if (!check_row_format(d, from, hello, name)) return;
    if (!check_vocabulary(d, from, hello, name)) return;
    worker *w = dispatch_registry_add_worker(d, from, hello);
    if (w == NULL) {
        refuse(d, from, "router %s has no room for %s: its limit is %d workers", d->options.host,
               name, DISPATCH_WORKERS_MAX);
        return;
    }
    memcpy(w->name, name, sizeof name);
    /* The pairable and epoch fields stay the worker's own, also when they are zero. */
    const uint32_t row_format = record.row_format, protocol_minor = record.protocol_minor;
    const uint64_t weights_version = record.weights_version;
    record_adopt(&d->record, &record);
    record_adopt(&record, &d->record);
    record.row_format = row_format;
    record.protocol_minor = protocol_minor;
    record.weights_version = weights_version;
    w->record = record;
    bt_log_info("dispatch", "%s joins as worker %u", w->name, w->id);
    welcome(d, w);
}

void dispatch_hello_on_streams(dispatch *d, connection *from, const proto_hello *hello) {
    worker *w = find_incarnation(d, hello->incarnation);
    if (w == NULL) {
        /* Its control connection ended meanwhile, or was another router's before a restart. */
        d->late_total++;
        dispatch_close(d, from);
        return;
    }
    if (w->hello.role != hello->role || w->streams != NULL) {
        dispatch_registry_protocol_error(d, from, "a second streams connection of one worker");
        return;
    }
    from->lane = PROTO_LANE_STREAMS;
    from->worker = w;
    w->streams = from;
    dispatch_registry_join(d, w);
}
