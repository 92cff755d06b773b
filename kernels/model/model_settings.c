#include "kernels/model/model_settings.h"

const json_t *model_settings_find(const model_settings *s, const char *key) {
    const json_t *value = json_object_get(s->object, key);
    return json_is_null(value) ? NULL : value;
}

bt_status model_settings_fail(const model_settings *s, const char *key, const char *wanted) {
    return bt_fail(s->error, BT_ERR_CALLER_FILE, "%s: %s is missing or not %s", s->path, key,
                   wanted);
}

bt_status model_settings_u32(const model_settings *s, const char *key, bool is_required,
                             uint32_t *out) {
    const json_t *value = model_settings_find(s, key);
    if (value == NULL && !is_required) return BT_OK;
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) > UINT32_MAX) {
        return model_settings_fail(s, key, "a whole number of 32 bits");
    }
    *out = (uint32_t)json_integer_value(value);
    return BT_OK;
}

bt_status model_settings_number(const model_settings *s, const char *key, bool is_required,
                                double *out) {
    const json_t *value = model_settings_find(s, key);
    if (value == NULL && !is_required) return BT_OK;
    if (!json_is_number(value)) return model_settings_fail(s, key, "a number");
    *out = json_number_value(value);
    return BT_OK;
}

bt_status model_settings_bool(const model_settings *s, const char *key, bool *out) {
    const json_t *value = model_settings_find(s, key);
    if (value == NULL) return BT_OK;
    if (!json_is_boolean(value)) return model_settings_fail(s, key, "true or false");
    *out = json_is_true(value);
    return BT_OK;
}

bt_status model_settings_string(const model_settings *s, const char *key, const char **out) {
    const json_t *value = model_settings_find(s, key);
    if (value == NULL) return BT_OK;
    if (!json_is_string(value)) return model_settings_fail(s, key, "a string");
    *out = json_string_value(value);
    return BT_OK;
}

bt_status model_settings_require_false(const model_settings *s, const char *key) {
    bool value = false;
    const bt_status status = model_settings_bool(s, key, &value);
    if (status != BT_OK || !value) return status;
    return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED, "%s: %s true is not supported", s->path,
                   key);
}

bt_status model_settings_require_absent(const model_settings *s, const char *key) {
    if (model_settings_find(s, key) == NULL) return BT_OK;
    return bt_fail(s->error, BT_ERR_CALLER_UNSUPPORTED, "%s: %s is not supported", s->path, key);
}
