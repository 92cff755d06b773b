/* What --help, --version, --print-config and --list-options write. */
#include <inttypes.h>
#include <string.h>

#include "base/options_internal.h"

static const char *value_name(const bt_option *option) {
    if (option->value_name != NULL) return option->value_name;
    switch (option->type) {
    case BT_OPTION_STRING: return "TEXT";
    case BT_OPTION_U32:
    case BT_OPTION_U64: return "N";
    case BT_OPTION_BYTES: return "BYTES";
    case BT_OPTION_BOOL: return "BOOL";
    case BT_OPTION_ENUM: return "NAME";
    case BT_OPTION_DOUBLE: return "X";
    }
    return "VALUE";
}

static void print_bounds(const bt_option *option, FILE *out) {
    if (option->type == BT_OPTION_ENUM) {
        for (size_t i = 0; option->choices[i] != NULL; i++) {
            (void)fprintf(out, "%s%s", i == 0 ? " One of " : ", ", option->choices[i]);
        }
        (void)fprintf(out, ".");
    } else if (option->type == BT_OPTION_DOUBLE &&
               (option->double_min != 0 || option->double_max != 0)) {
        (void)fprintf(out, " %g to %g.", option->double_min, option->double_max);
    } else if (option->max != 0) {
        (void)fprintf(out, " %" PRIu64 " to %" PRIu64 ".", option->min, option->max);
    }
}

static void print_help(const bt_option_table *table, FILE *out) {
    (void)fprintf(out, "Usage: %s [--option VALUE]...\n%s\n\nOptions:\n", table->program,
                  table->summary);
    for (size_t i = 0; i < table->count; i++) {
        const bt_option *option = &table->options[i];
        (void)fprintf(out, "  --%s %s\n      %s", option->name, value_name(option), option->help);
        print_bounds(option, out);
        if ((option->flags & BT_OPTION_REQUIRED) != 0) (void)fprintf(out, " Required.");
        if (option->default_text != NULL && option->default_text[0] != '\0') {
            (void)fprintf(out, " Default: %s.", option->default_text);
        }
        (void)fprintf(out, "\n");
    }
    (void)fprintf(out, "  --config FILE\n      Read 'long-name = value' lines from FILE.\n"
                       "  --help, --version, --print-config, --list-options\n"
                       "      Print and end.\n\n"
                       "An option may also come from the environment (--long-name is "
                       "BT_LONG_NAME).\n"
                       "Precedence: flag, environment, file, default.\n");
}

static void print_config(const bt_options *options, FILE *out) {
    static const char *const sources[] = {"default", "file", "environment", "flag"};
    for (size_t i = 0; i < options->table->count; i++) {
        const bt_option *option = &options->table->options[i];
        const options_entry *entry = &options->entries[i];
        if (entry->text == NULL) {
            (void)fprintf(out, "# %s is not set\n", option->name);
        } else if ((option->flags & BT_OPTION_SECRET) != 0) {
            (void)fprintf(out, "# %s is set (%s) and not shown\n", option->name,
                          sources[entry->source]);
        } else {
            if (entry->source != BT_OPTION_FROM_DEFAULT) {
                (void)fprintf(out, "# from %s\n", sources[entry->source]);
            }
            (void)fprintf(out, "%s = %s\n", option->name, entry->text);
        }
    }
}

void bt_options_print(const bt_options *options, bt_options_action action, FILE *out) {
    const bt_option_table *table = options->table;
    switch (action) {
    case BT_OPTIONS_RUN: break;
    case BT_OPTIONS_HELP: print_help(table, out); break;
    case BT_OPTIONS_VERSION: (void)fprintf(out, "%s %s\n", table->program, table->version); break;
    case BT_OPTIONS_PRINT_CONFIG: print_config(options, out); break;
    case BT_OPTIONS_LIST:
        for (size_t i = 0; i < table->count; i++) {
            (void)fprintf(out, "%s\n", table->options[i].name);
        }
        (void)fprintf(out, "config\n");
        break;
    }
}
