/* Settings taken from a JSON object of an HF folder. A key that is absent and one that is null mean
 * the same in these files. A value of another type is CALLER_FILE with a sentence. Internal to the
 * model file reader. */
#ifndef BT_KERNELS_MODEL_MODEL_SETTINGS_H
#define BT_KERNELS_MODEL_MODEL_SETTINGS_H

#include <jansson.h>
#include <stdbool.h>

#include "base/status.h"

typedef struct model_settings {
    const json_t *object; /* borrowed */
    const char *path;     /* for sentences */
    bt_error *error;
} model_settings;

/* NULL when the key is absent or null. */
const json_t *model_settings_find(const model_settings *s, const char *key);
/* Fails with "KEY is missing or not WANTED". */
bt_status model_settings_fail(const model_settings *s, const char *key, const char *wanted);
/* Absent: *out keeps its value, unless the key is required. */
BT_MUST_CHECK bt_status model_settings_u32(const model_settings *s, const char *key,
                                           bool is_required, uint32_t *out);
BT_MUST_CHECK bt_status model_settings_number(const model_settings *s, const char *key,
                                              bool is_required, double *out);
BT_MUST_CHECK bt_status model_settings_bool(const model_settings *s, const char *key, bool *out);
/* *out is borrowed from the object. */
BT_MUST_CHECK bt_status model_settings_string(const model_settings *s, const char *key,
                                              const char **out);
/* CALLER_UNSUPPORTED unless the flag is absent, null or false. */
BT_MUST_CHECK bt_status model_settings_require_false(const model_settings *s, const char *key);
/* CALLER_UNSUPPORTED unless the key is absent or null. */
BT_MUST_CHECK bt_status model_settings_require_absent(const model_settings *s, const char *key);

#endif
