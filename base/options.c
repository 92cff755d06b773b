/* Precedence: default, then the file of --config, then the environment, then flags, each applied
 * over the one before and each validated, so that a mistake is found even where it is overridden.
 */
#include "base/options.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/mem.h"
#include "base/options_internal.h"

void options_environment_name(const char *name, char out[BT_OPTION_NAME_BYTES_MAX + 4]) {
    BT_ASSERT(strlen(name) <= BT_OPTION_NAME_BYTES_MAX);
    memcpy(out, "BT_", 3);
    size_t i = 0;
    for (; name[i] != '\0'; i++) {
        out[3 + i] = name[i] == '-' ? '_' : (char)toupper((unsigned char)name[i]);
    }
    out[3 + i] = '\0';
}

/* The index of a name of `bytes` bytes, or the table's count. */
static size_t find_option(const bt_option_table *table, const char *name, size_t bytes) {
    for (size_t i = 0; i < table->count; i++) {
        if (strlen(table->options[i].name) == bytes &&
            memcmp(table->options[i].name, name, bytes) == 0) {
            return i;
        }
    }
    return table->count;
}

static bool is_word(const char *text, size_t bytes, const char *word) {
    return strlen(word) == bytes && memcmp(text, word, bytes) == 0;
}

static bt_status take_value(bt_options *options, size_t index, const char *text,
                            bt_option_source source, const char *where, void *values,
                            bt_error *error) {
    const bt_option *option = &options->table->options[index];
    if (strlen(text) > BT_OPTION_VALUE_BYTES_MAX) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "%s: the value of --%s is longer than %d bytes",
                       where, option->name, (int)BT_OPTION_VALUE_BYTES_MAX);
    }
    char *copy = bt_strdup(text);
    if (copy == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    const bt_status status = options_write_value(option, copy, where, values, error);
    if (status != BT_OK) {
        bt_free(copy);
        return status;
    }
    bt_free(options->entries[index].text);
    options->entries[index] = (options_entry){.text = copy, .source = source};
    return BT_OK;
}

static bt_status apply_defaults(bt_options *options, void *values, bt_error *error) {
    for (size_t i = 0; i < options->table->count; i++) {
        const bt_option *option = &options->table->options[i];
        if (option->default_text == NULL) continue;
        const bt_status status = take_value(options, i, option->default_text,
                                            BT_OPTION_FROM_DEFAULT, "default", values, error);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

/* ---- file ------------------------------------------------------------------------------------ */

static char *trim(char *text) {
    while (isspace((unsigned char)*text))
        text++;
    size_t bytes = strlen(text);
    while (bytes > 0 && isspace((unsigned char)text[bytes - 1]))
        bytes--;
    text[bytes] = '\0';
    return text;
}

static bt_status apply_line(bt_options *options, char *line, const char *where, void *values,
                            bt_error *error) {
    char *text = trim(line);
    if (*text == '\0' || *text == '#') return BT_OK;
    char *equals = strchr(text, '=');
    if (equals == NULL) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "%s: expected 'long-name = value'", where);
    }
    *equals = '\0';
    const char *name = trim(text);
    const size_t index = find_option(options->table, name, strlen(name));
    if (index == options->table->count) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "%s: unknown option '%.80s'", where, name);
    }
    return take_value(options, index, trim(equals + 1), BT_OPTION_FROM_FILE, where, values, error);
}

static bt_status apply_stream(bt_options *options, FILE *file, const char *path, void *values,
                              bt_error *error) {
    char *line = NULL;
    size_t capacity = 0;
    size_t total = 0;
    bt_status status = BT_OK;
    for (unsigned number = 1; status == BT_OK; number++) {
        const ssize_t bytes = getline(&line, &capacity, file);
        if (bytes < 0) break;
        char where[300];
        (void)snprintf(where, sizeof where, "%.250s:%u", path, number);
        total += (size_t)bytes;
        if (total > BT_OPTIONS_FILE_BYTES_MAX) {
            status = bt_fail(error, BT_ERR_CALLER_FILE, "%s: the file is larger than %d bytes",
                             where, (int)BT_OPTIONS_FILE_BYTES_MAX);
        } else if (strlen(line) != (size_t)bytes) {
            status = bt_fail(error, BT_ERR_CALLER_FILE, "%s: a NUL byte", where);
        } else {
            status = apply_line(options, line, where, values, error);
        }
    }
    if (status == BT_OK && ferror(file)) {
        status =
            bt_fail(error, BT_ERR_CALLER_FILE, "cannot read %.250s: %s", path, strerror(errno));
    }
    free(line); /* getline's own, not bt_malloc's */
    return status;
}

static bt_status apply_file(bt_options *options, const char *path, void *values, bt_error *error) {
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return bt_fail(error, BT_ERR_CALLER_FILE, "cannot open configuration file %.250s: %s", path,
                       strerror(errno));
    }
    const bt_status status = apply_stream(options, file, path, values, error);
    (void)fclose(file);
    return status;
}

/* ---- environment ----------------------------------------------------------------------------- */

static const char *find_environment(const char *const *environment, const char *name) {
    const size_t bytes = strlen(name);
    for (size_t i = 0; environment != NULL && environment[i] != NULL; i++) {
        if (strncmp(environment[i], name, bytes) == 0 && environment[i][bytes] == '=') {
            return environment[i] + bytes + 1;
        }
    }
    return NULL;
}

static bt_status apply_environment(bt_options *options, const char *const *environment,
                                   void *values, bt_error *error) {
    for (size_t i = 0; i < options->table->count; i++) {
        char name[BT_OPTION_NAME_BYTES_MAX + 4];
        options_environment_name(options->table->options[i].name, name);
        const char *text = find_environment(environment, name);
        if (text == NULL) continue;
        const bt_status status =
            take_value(options, i, text, BT_OPTION_FROM_ENVIRONMENT, name, values, error);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

/* ---- flags ----------------------------------------------------------------------------------- */

/* One flag as it stands on the command line. */
typedef struct flag {
    const char *name; /* behind the dashes */
    size_t name_bytes;
    const char *value; /* NULL: none was given */
    int used;          /* arguments consumed */
} flag;

static bt_options_action action_of(const flag *f) {
    static const struct {
        const char *word;
        bt_options_action action;
    } words[] = {
        {"help", BT_OPTIONS_HELP},
        {"version", BT_OPTIONS_VERSION},
        {"print-config", BT_OPTIONS_PRINT_CONFIG},
        {"list-options", BT_OPTIONS_LIST},
    };
    for (size_t i = 0; i < BT_ARRAY_COUNT(words); i++) {
        if (is_word(f->name, f->name_bytes, words[i].word)) return words[i].action;
    }
    return BT_OPTIONS_RUN;
}

/* Reads argv[at]; a value may stand in the next argument. A bare boolean is "true" unless a word
 * for true or false follows. */
static bt_status read_flag(const bt_option_table *table, int argc, const char *const *argv, int at,
                           flag *out, bt_error *error) {
    const char *argument = argv[at];
    if (strcmp(argument, "-h") == 0) argument = "--help";
    if (strncmp(argument, "--", 2) != 0 || argument[2] == '\0') {
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "unexpected argument '%.80s'; see --help",
                       argument);
    }
    const char *equals = strchr(argument, '=');
    *out = (flag){.name = argument + 2, .used = 1};
    out->name_bytes = equals != NULL ? (size_t)(equals - argument) - 2 : strlen(argument) - 2;
    if (equals != NULL) out->value = equals + 1;
    if (action_of(out) != BT_OPTIONS_RUN) return BT_OK;

    const size_t index = find_option(table, out->name, out->name_bytes);
    const bool is_config = is_word(out->name, out->name_bytes, "config");
    if (index == table->count && !is_config) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "unknown option '--%.*s'; see --help",
                       (int)(out->name_bytes > 80 ? 80 : out->name_bytes), out->name);
    }
    if (out->value != NULL) return BT_OK;
    const bool is_bool = !is_config && table->options[index].type == BT_OPTION_BOOL;
    bool ignored = false;
    const bool has_next = at + 1 < argc && (!is_bool || options_parse_bool(argv[at + 1], &ignored));
    if (has_next) {
        out->value = argv[at + 1];
        out->used = 2;
    } else if (is_bool) {
        out->value = "true";
    } else {
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "option --%.*s needs a value",
                       (int)out->name_bytes, out->name);
    }
    return BT_OK;
}

/* First reading: what is asked for, and which file. Stops at a flag that only prints. */
static bt_status scan_flags(bt_options *options, int argc, const char *const *argv,
                            const char **config_out, bt_error *error) {
    flag f;
    for (int at = 1; at < argc; at += f.used) {
        const bt_status status = read_flag(options->table, argc, argv, at, &f, error);
        if (status != BT_OK) return status;
        const bt_options_action action = action_of(&f);
        if (action != BT_OPTIONS_RUN) options->action = action;
        if (action != BT_OPTIONS_RUN && action != BT_OPTIONS_PRINT_CONFIG) return BT_OK;
        if (is_word(f.name, f.name_bytes, "config")) *config_out = f.value;
    }
    return BT_OK;
}

static bt_status apply_flags(bt_options *options, int argc, const char *const *argv, void *values,
                             bt_error *error) {
    flag f;
    for (int at = 1; at < argc; at += f.used) {
        bt_status status = read_flag(options->table, argc, argv, at, &f, error);
        if (status != BT_OK) return status;
        const size_t index = find_option(options->table, f.name, f.name_bytes);
        if (index == options->table->count) continue; /* config, print-config */
        status =
            take_value(options, index, f.value, BT_OPTION_FROM_FLAG, "command line", values, error);
        if (status != BT_OK) return status;
    }
    return BT_OK;
}

static bt_status check_required(const bt_options *options, bt_error *error) {
    for (size_t i = 0; i < options->table->count; i++) {
        const bt_option *option = &options->table->options[i];
        if ((option->flags & BT_OPTION_REQUIRED) == 0 || options->entries[i].text != NULL) continue;
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "option --%s is required; see --help",
                       option->name);
    }
    return BT_OK;
}

/* ---- public ---------------------------------------------------------------------------------- */

static bt_status apply_all(bt_options *options, int argc, const char *const *argv,
                           const char *const *environment, void *values, bt_error *error) {
    bt_status status = apply_defaults(options, values, error);
    if (status != BT_OK) return status;
    const char *config = find_environment(environment, "BT_CONFIG");
    status = scan_flags(options, argc, argv, &config, error);
    if (status != BT_OK) return status;
    if (options->action != BT_OPTIONS_RUN && options->action != BT_OPTIONS_PRINT_CONFIG) {
        return BT_OK;
    }
    if (config != NULL) status = apply_file(options, config, values, error);
    if (status == BT_OK) status = apply_environment(options, environment, values, error);
    if (status == BT_OK) status = apply_flags(options, argc, argv, values, error);
    if (status == BT_OK && options->action == BT_OPTIONS_RUN) {
        status = check_required(options, error);
    }
    return status;
}

bt_status bt_options_parse(const bt_option_table *table, int argc, const char *const *argv,
                           const char *const *environment, void *values, bt_options **out,
                           bt_error *error) {
    BT_ASSERT(table->count <= BT_OPTIONS_MAX);
    bt_options *options = bt_calloc(1, sizeof *options);
    if (options == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    options->table = table;
    const bt_status status = apply_all(options, argc, argv, environment, values, error);
    if (status != BT_OK) {
        bt_options_destroy(options);
        return status;
    }
    *out = options;
    return BT_OK;
}

void bt_options_destroy(bt_options *options) {
    if (options == NULL) return;
    for (size_t i = 0; i < options->table->count; i++)
        bt_free(options->entries[i].text);
    bt_free(options);
}

bt_options_action bt_options_get_action(const bt_options *options) {
    return options->action;
}

bt_option_source bt_options_source(const bt_options *options, const char *name) {
    const size_t index = find_option(options->table, name, strlen(name));
    BT_ASSERT(index < options->table->count);
    return options->entries[index].source;
}

bool bt_options_start(const bt_option_table *table, int argc, char **argv, void *values,
                      bt_options **out, int *exit_status) {
    bt_error error;
    bt_options *options = NULL;
    const bt_status status =
        bt_options_parse(table, argc, (const char *const *)argv, (const char *const *)environ,
                         values, &options, &error);
    if (status != BT_OK) {
        (void)fprintf(stderr, "%s: %s\n", table->program, error.text);
        *exit_status = 2;
        return false;
    }
    if (options->action != BT_OPTIONS_RUN) {
        bt_options_print(options, options->action, stdout);
        bt_options_destroy(options);
        *exit_status = 0;
        return false;
    }
    *out = options;
    return true;
}
