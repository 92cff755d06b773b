/* What the parts of the options reader share: values (options_value.c), precedence (options.c) and
 * what is printed (options_print.c). */
#ifndef BT_BASE_OPTIONS_INTERNAL_H
#define BT_BASE_OPTIONS_INTERNAL_H

#include "base/options.h"

typedef struct options_entry {
    char *text; /* owned; NULL = the default, or nothing */
    bt_option_source source;
} options_entry;

struct bt_options {
    const bt_option_table *table; /* borrowed: tables are static */
    bt_options_action action;
    options_entry entries[BT_OPTIONS_MAX];
};

bool options_parse_bool(const char *text, bool *out);
/* Writes the field of one option. `text` must outlive the values; `where` begins the sentence. */
bt_status options_write_value(const bt_option *option, const char *text, const char *where,
                              void *values, bt_error *error);
/* "long-name" -> "BT_LONG_NAME". */
void options_environment_name(const char *name, char out[BT_OPTION_NAME_BYTES_MAX + 4]);

#endif
