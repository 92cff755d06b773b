/* Loading of JSON files; the sentences of its errors come from jansson, shortened to one line. */
#include "base/json_file.h"

#include "base/file_map.h"

bt_status bt_json_load_object(const char *text, size_t bytes, const char *name, json_t **out,
                              bt_error *error) {
    json_error_t parse_error;
    json_t *value = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &parse_error);
    if (value == NULL) {
        if (json_error_code(&parse_error) == json_error_out_of_memory) {
            return bt_fail(error, BT_ERR_WORKER_MEMORY, "%s: out of memory", name);
        }
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: malformed JSON at line %d, column %d: %s",
                       name, parse_error.line, parse_error.column, parse_error.text);
    }
    if (!json_is_object(value)) {
        json_decref(value);
        return bt_fail(error, BT_ERR_CALLER_FILE, "%s: is not a JSON object", name);
    }
    *out = value;
    return BT_OK;
}

bt_status bt_json_file_load(const char *path, json_t **out, bt_error *error) {
    bt_file_map map = {0};
    bt_status status = bt_file_map_open(path, &map, error);
    if (status != BT_OK) return status;
    if (map.bytes > BT_JSON_FILE_BYTES_MAX) {
        status = bt_fail(error, BT_ERR_CALLER_LIMIT, "%s: has %zu bytes, at most %d are read", path,
                         map.bytes, BT_JSON_FILE_BYTES_MAX);
    } else {
        status = bt_json_load_object((const char *)map.data, map.bytes, path, out, error);
    }
    bt_file_map_close(&map);
    return status;
}
