/* The files beside tokenizer.json: which tokens end a sequence, and the chat template. All of them
 * may be missing; one that is there must be sound. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file_map.h"
#include "base/json_file.h"
#include "router/tokenizer_internal.h"

enum { PATH_BYTES_MAX = 4096 };

/* *root_out stays NULL when there is no such file. */
static bt_status load_optional(const char *folder, const char *name, json_t **root_out,
                               bt_error *error) {
    char path[PATH_BYTES_MAX];
    const int written = snprintf(path, sizeof path, "%s%s", folder, name);
    if (written < 0 || (size_t)written >= sizeof path)
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "the tokenizer's path is too long");
    if (access(path, F_OK) != 0) return BT_OK;
    return bt_json_file_load(path, root_out, error);
}

/* "eos_token_id" is a number, an array of numbers, null or absent. */
static bt_status load_eos_ids(const char *folder, const char *name, tokenizer *t, bt_error *error) {
    json_t *root = NULL;
    bt_status status = load_optional(folder, name, &root, error);
    if (status != BT_OK || root == NULL) return status;
    const json_t *ids = json_object_get(root, "eos_token_id");
    const bool is_list = json_is_array(ids);
    const size_t count = is_list ? json_array_size(ids) : ids == NULL || json_is_null(ids) ? 0 : 1;
    for (size_t i = 0; i < count && status == BT_OK; i++) {
        const json_t *id = is_list ? json_array_get(ids, i) : ids;
        if (json_is_integer(id))
            status = tokenizer_put_eos(t, json_integer_value(id), error);
        else
            status = bt_fail(error, BT_ERR_CALLER_FILE, "%s%s: eos_token_id is not a number",
                             folder, name);
    }
    json_decref(root);
    return status;
}

/* "eos_token" is a string or an object with its content. */
static bt_status load_eos_token(const json_t *root, tokenizer *t, bt_error *error) {
    const json_t *token = json_object_get(root, "eos_token");
    if (json_is_object(token)) token = json_object_get(token, "content");
    if (!json_is_string(token)) return BT_OK;
    const int32_t id = tokenizer_find(t, json_string_value(token));
    if (id < 0)
        return bt_fail(error, BT_ERR_CALLER_FILE,
                       "tokenizer_config.json: eos_token \"%.100s\" is not in the vocabulary",
                       json_string_value(token));
    return tokenizer_put_eos(t, id, error);
}

/* The template itself, or the one called "default" of a list. */
static const json_t *find_template(const json_t *root) {
    const json_t *found = json_object_get(root, "chat_template");
    if (!json_is_array(found)) return found;
    for (size_t i = 0; i < json_array_size(found); i++) {
        const json_t *entry = json_array_get(found, i);
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name != NULL && strcmp(name, "default") == 0) return json_object_get(entry, "template");
    }
    return NULL;
}

/* A file chat_template.jinja goes before the string in tokenizer_config.json. */
static bt_status load_template(const char *folder, const json_t *root, tokenizer *t,
                               bt_error *error) {
    char path[PATH_BYTES_MAX];
    const int written = snprintf(path, sizeof path, "%schat_template.jinja", folder);
    bt_status status = BT_OK;
    if (written > 0 && (size_t)written < sizeof path && access(path, F_OK) == 0) {
        bt_file_map map = {0};
        status = bt_file_map_open(path, &map, error);
        if (status != BT_OK) return status;
        status = chat_template_detect((const char *)map.data, map.bytes, &t->chat);
        bt_file_map_close(&map);
    } else {
        const json_t *source = find_template(root);
        status =
            chat_template_detect(json_string_value(source), json_string_length(source), &t->chat);
    }
    return status == BT_OK ? BT_OK : bt_fail(error, status, "out of memory for the tokenizer");
}

bt_status tokenizer_load_config(const char *folder, tokenizer *t, bt_error *error) {
    json_t *root = NULL;
    bt_status status = load_eos_ids(folder, "generation_config.json", t, error);
    if (status == BT_OK) status = load_eos_ids(folder, "config.json", t, error);
    if (status == BT_OK) status = load_optional(folder, "tokenizer_config.json", &root, error);
    if (status == BT_OK) status = load_eos_token(root, t, error);
    if (status == BT_OK) status = load_template(folder, root, t, error);
    json_decref(root);
    return status;
}
