/* JSON files read at start-up (configuration, vocabularies), parsed by jansson: duplicate keys, NUL
 * in strings and invalid UTF-8 are refused. Request bodies do not come through here. */
#ifndef BT_BASE_JSON_FILE_H
#define BT_BASE_JSON_FILE_H

#include <jansson.h>
#include <stddef.h>

#include "base/status.h"

enum { BT_JSON_FILE_BYTES_MAX = 256 << 20 };

/* Parses the file, whose top must be an object. Anything else is BT_ERR_CALLER_FILE with a sentence
 * naming path, line and column. The caller drops the reference with json_decref. Blocking. */
BT_MUST_CHECK bt_status bt_json_file_load(const char *path, json_t **out, bt_error *error);
/* The same over bytes; `name` is used in errors. */
BT_MUST_CHECK bt_status bt_json_load_object(const char *text, size_t bytes, const char *name,
                                            json_t **out, bt_error *error);

#endif
