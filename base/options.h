/* One table per program describes its options; everything a user can say or ask about them comes
 * from that table: flags, environment, configuration file, --help, --version, --print-config and
 * --list-options.
 *
 *   --long-name VALUE, --long-name=VALUE     highest precedence; the last one counts
 *   BT_LONG_NAME=VALUE                       environment
 *   long-name = VALUE                        a line of --config FILE ('#' starts a comment line)
 *   default                                  from the table, lowest
 *
 * Values are written into the caller's struct at the offsets of the table, strings as `const char
 * *`. A bt_options owns every string it wrote; the caller keeps it as long as the values are used.
 * Unknown names, missing values and values out of bounds are errors that name the option and where
 * it came from, also where something of higher precedence overrides them. Not thread-safe; libc
 * only. */
#ifndef BT_BASE_OPTIONS_H
#define BT_BASE_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/status.h"

enum {
    BT_OPTIONS_MAX = 128,
    BT_OPTION_NAME_BYTES_MAX = 64,
    BT_OPTION_VALUE_BYTES_MAX = 8192,
    BT_OPTIONS_FILE_BYTES_MAX = 1 << 20,
};

typedef enum bt_option_type {
    BT_OPTION_STRING, /* const char *; NULL when the default is NULL and nothing was given */
    BT_OPTION_U32,    /* uint32_t */
    BT_OPTION_U64,    /* uint64_t */
    BT_OPTION_BYTES,  /* uint64_t; 4096, 64K, 64KiB, 8M, 1G, 1T: powers of 1024 */
    BT_OPTION_BOOL,   /* bool; true, false, yes, no, on, off, 1, 0; the bare flag means true */
    BT_OPTION_ENUM,   /* uint32_t: index into choices */
    BT_OPTION_DOUBLE, /* double, finite */
} bt_option_type;

typedef enum bt_option_flag {
    BT_OPTION_REQUIRED = 1 << 0, /* must be given somewhere */
    BT_OPTION_SECRET = 1 << 1,   /* --print-config does not show its value */
} bt_option_flag;

/* One row of the table. Bounds are inclusive; both 0 = none. A NULL default_text leaves the field
 * as the caller initialised it. */
typedef struct bt_option {
    const char *name; /* "long-name" */
    bt_option_type type;
    const char *default_text;
    uint64_t min, max;             /* U32, U64, BYTES */
    double double_min, double_max; /* DOUBLE */
    const char *const *choices;    /* ENUM: NULL-terminated */
    const char *value_name;        /* "HOST:PORT" in --help; NULL = by type */
    const char *help;              /* one sentence */
    size_t offset;                 /* of the field in the caller's struct */
    uint32_t flags;                /* bt_option_flag */
} bt_option;

typedef struct bt_option_table {
    const char *program; /* "baton-decode" */
    const char *version;
    const char *summary; /* one sentence, for --help */
    const bt_option *options;
    size_t count;
} bt_option_table;

typedef enum bt_option_source {
    BT_OPTION_FROM_DEFAULT,
    BT_OPTION_FROM_FILE,
    BT_OPTION_FROM_ENVIRONMENT,
    BT_OPTION_FROM_FLAG,
} bt_option_source;

typedef enum bt_options_action {
    BT_OPTIONS_RUN,
    BT_OPTIONS_HELP,
    BT_OPTIONS_VERSION,
    BT_OPTIONS_PRINT_CONFIG,
    BT_OPTIONS_LIST, /* one name per line: the names that this program knows */
} bt_options_action;

typedef struct bt_options bt_options;

/* Fills `values`. environment is a NULL-terminated list as in environ (borrowed for the call; NULL
 * = none). --help, --version and --list-options win over every error of other arguments that stand
 * behind them. CALLER_CONFIG or CALLER_FILE with a sentence; returns owned. */
BT_MUST_CHECK bt_status bt_options_parse(const bt_option_table *table, int argc,
                                         const char *const *argv, const char *const *environment,
                                         void *values, bt_options **out, bt_error *error);
void bt_options_destroy(bt_options *options);

bt_options_action bt_options_get_action(const bt_options *options);
/* Where the value of an option came from. The name must be in the table. */
bt_option_source bt_options_source(const bt_options *options, const char *name);
static inline bool bt_options_is_given(const bt_options *options, const char *name) {
    return bt_options_source(options, name) != BT_OPTION_FROM_DEFAULT;
}
/* Writes what HELP, VERSION, PRINT_CONFIG or LIST ask for. What PRINT_CONFIG writes is a valid
 * configuration file. */
void bt_options_print(const bt_options *options, bt_options_action action, FILE *out);

/* What main() does first: parses with the process's environment, prints what was asked for or the
 * error as one line on stderr. true: go on, *out is owned by the caller. false: end with
 * *exit_status (0, or 2 after an error). */
bool bt_options_start(const bt_option_table *table, int argc, char **argv, void *values,
                      bt_options **out, int *exit_status);

#endif
