#include "router/api_abort.h"

#include <stdio.h>
#include <string.h>

#include "router/api_fields.h"

typedef enum abort_field {
    ABORT_RID,
    ABORT_PREFIX,
    ABORT_ALL,
    ABORT_FIRST_REFUSED,
    ABORT_FINISHED_REASON = ABORT_FIRST_REFUSED,
    ABORT_MESSAGE,
    ABORT_FIELD_COUNT,
} abort_field;

static const char *const NAMES[ABORT_FIELD_COUNT] = {
    [ABORT_RID] = "rid",
    [ABORT_PREFIX] = "prefix",
    [ABORT_ALL] = "abort_all",
    [ABORT_FINISHED_REASON] = "finished_reason",
    [ABORT_MESSAGE] = "abort_message",
};

static void refuse_field(void *context, const bt_json *key) {
    api_failure *failure = context;
    const int bytes = key->bytes < 80 ? (int)key->bytes - 2 : 78;
    (void)api_fail(failure, 400, API_ERROR_SCHEMA, "Unexpected field '%.*s' of /abort_request.",
                   bytes, key->text + 1);
}

bool api_abort_read(const char *text, size_t bytes, api_abort *out, api_failure *failure_out) {
    bt_json root;
    bt_error error;
    api_fields fields;
    memset(out, 0, sizeof(*out));
    memset(failure_out, 0, sizeof(*failure_out));
    if (bt_json_parse(text, bytes, &root, &error) != BT_OK)
        return api_fail(failure_out, 400, API_ERROR_SCHEMA, "%s", error.text);
    if (root.kind != BT_JSON_OBJECT)
        return api_fail(failure_out, 400, API_ERROR_SCHEMA,
                        "the body must be a JSON object, got %s.", bt_json_kind_name(root.kind));
    api_fields_collect(&fields, &root, NAMES, ABORT_FIELD_COUNT, failure_out, refuse_field,
                       failure_out);
    api_get_string(&fields, ABORT_RID, out->rid, sizeof(out->rid));
    api_get_bool(&fields, ABORT_PREFIX, &out->is_prefix);
    api_get_bool(&fields, ABORT_ALL, &out->is_all);
    for (size_t field = ABORT_FIRST_REFUSED; field < ABORT_FIELD_COUNT; field++) {
        api_refuse_unless_neutral(&fields, field, "");
    }
    return failure_out->http_status == 0;
}

bool api_abort_names(const api_abort *abort, const char *rid, size_t list_rid_bytes) {
    const size_t bytes = strlen(abort->rid);
    if (abort->is_all) return true;
    if (bytes == 0 || strncmp(rid, abort->rid, bytes) != 0) return false;
    return abort->is_prefix || rid[bytes] == 0 || list_rid_bytes == bytes;
}

bool api_abort_names_sample(const api_abort *abort, const char *rid, uint32_t sample) {
    char id[API_ABORT_RID_MAX + 1];
    const size_t bytes = strlen(abort->rid);
    if (bytes == 0 || strncmp(abort->rid, rid, strlen(rid)) != 0) return false;
    snprintf(id, sizeof(id), "%s_%u", rid, sample);
    return abort->is_prefix ? strncmp(id, abort->rid, bytes) == 0 : strcmp(id, abort->rid) == 0;
}
