/* Settings given to UCX, each unless the user's environment has it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "pd_buffers/xfer_ucx_internal.h"

enum {
    KEEPALIVE_MS = 1000,
    VALUE_BYTES = 256,
};

/* Shared memory without a network. */
static const char *const shm_tls = "posix,sysv,cma,self";

typedef struct setting {
    const char *name; /* without UCX_ */
    char value[VALUE_BYTES];
} setting;

typedef struct variable {
    char name[64];
} variable;

static variable variable_of(const char *name) {
    variable v;
    (void)snprintf(v.name, sizeof v.name, "UCX_%s", name);
    return v;
}

/* The user's value, or NULL. */
static const char *from_environment(const char *name) {
    return getenv(variable_of(name).name);
}

static bt_status set_value(setting *s, const char *value, bt_error *error) {
    const int wanted = snprintf(s->value, sizeof s->value, "%s", value);
    if (wanted >= 0 && (size_t)wanted < sizeof s->value) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_CONFIG, "the value of UCX_%s is too long", s->name);
}

/* ---- settings of single transports ----------------------------------------------------------- */

/* The port range in the environment is that of an earlier mover of this process, not the user's. */
static bool is_port_range_ours;

static bt_status put(const char *name, const char *value, bt_error *error) {
    bt_log_info("xfer", "UCX_%s=%s", name, value);
    if (setenv(variable_of(name).name, value, 1) == 0) return BT_OK;
    return bt_fail(error, BT_ERR_WORKER_MEMORY, "UCX_%s cannot be set", name);
}

static ucx_transports look_at(const char *tls) {
    static const char *const names[] = {"posix", "sysv", "cma", "shm", "sm", "mm"};
    ucx_transports kinds = {.has_pairs = false, .is_memory_only = true};
    for (const char *at = tls; *at != '\0';) {
        const size_t length = strcspn(at, ",");
        bool is_memory = false;
        for (size_t i = 0; i < BT_ARRAY_COUNT(names); i++)
            is_memory =
                is_memory || (strlen(names[i]) == length && strncmp(names[i], at, length) == 0);
        const bool is_self = length == 4 && strncmp(at, "self", length) == 0;
        const bool is_all = length == 3 && strncmp(at, "all", length) == 0;
        kinds.has_pairs = kinds.has_pairs || is_memory || is_all;
        kinds.is_memory_only = kinds.is_memory_only && (is_memory || is_self);
        at += length;
        if (*at == ',') at++;
    }
    return kinds;
}

static const char *effective_tls(const xfer_ucx_options *options) {
    const char *users = from_environment("TLS");
    if (users != NULL) return users;
    if (options->tls == NULL) return "tcp";
    return strcmp(options->tls, "shm") == 0 ? shm_tls : options->tls;
}

/* UCX takes what it cannot read as no range at all. */
static bt_status check_ports(const char *range, bt_error *error) {
    unsigned first = 0, last = 0;
    int used = 0;
    const bool is_read = strspn(range, "0123456789-") == strlen(range) && strlen(range) <= 11 &&
                         sscanf(range, "%u-%u%n", &first, &last, &used) == 2 && range[used] == '\0';
    if (is_read && first >= 1 && first <= last && last <= UINT16_MAX) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_CONFIG,
                   "the port range '%.80s' is not FIRST-LAST, two ports from 1 to %d", range,
                   UINT16_MAX);
}

static bt_status set_ports(const char *range, bt_error *error) {
    if (is_port_range_ours) (void)unsetenv(variable_of("TCP_PORT_RANGE").name);
    is_port_range_ours = false;
    if (range == NULL || range[0] == '\0') return BT_OK;
    bt_status status = check_ports(range, error);
    if (status != BT_OK || from_environment("TCP_PORT_RANGE") != NULL) return status;
    status = put("TCP_PORT_RANGE", range, error);
    is_port_range_ours = status == BT_OK;
    return status;
}

bt_status xfer_ucx_set_transports(const xfer_ucx_options *options, ucx_transports *out,
                                  bt_error *error) {
    static const char *const memory_names[] = {"POSIX_ERROR_HANDLING", "SYSV_ERROR_HANDLING"};
    *out = look_at(effective_tls(options));
    bt_status status = set_ports(options->port_range, error);
    for (size_t i = 0; i < BT_ARRAY_COUNT(memory_names); i++) {
        const bool is_wanted = out->has_pairs && from_environment(memory_names[i]) == NULL;
        if (is_wanted && status == BT_OK) status = put(memory_names[i], "y", error);
    }
    return status;
}

/* ---- settings of a context ------------------------------------------------------------------- */

/* Whether a comma-separated list names `word` itself. */
static bool is_named(const char *list, const char *word) {
    const size_t bytes = strlen(word);
    while (*list != '\0') {
        const size_t item = strcspn(list, ",");
        if (item == bytes && memcmp(list, word, bytes) == 0) return true;
        list += item + (list[item] == ',' ? 1 : 0);
    }
    return false;
}

static bt_status check_devices(const char *devices, const xfer_ucx_options *options,
                               bt_error *error) {
    if (options->allow_all_devices) return BT_OK;
    if (devices[0] != '\0' && !is_named(devices, "all")) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_CONFIG,
                   "UCX_NET_DEVICES is '%s': every network of this machine could reach the "
                   "transfer port; name a device, or allow all devices",
                   devices);
}

/* is_forced: in spite of the environment. */
static bt_status apply(ucp_config_t *config, const setting *s, bool is_forced, bt_error *error) {
    const char *users = is_forced ? NULL : from_environment(s->name);
    if (users == NULL) {
        const ucs_status_t status = ucp_config_modify(config, s->name, s->value);
        if (status != UCS_OK)
            return bt_fail(error, BT_ERR_CALLER_CONFIG, "UCX does not take %s=%s: %s", s->name,
                           s->value, ucs_status_string(status));
    }
    bt_log_info("xfer", "UCX_%s=%s%s", s->name, users != NULL ? users : s->value,
                users != NULL ? " (environment)" : "");
    return BT_OK;
}

static bt_status apply_all(ucp_config_t *config, const xfer_ucx_options *options,
                           const setting *tls, bool is_tls_forced, bt_error *error) {
    setting devices = {.name = "NET_DEVICES"};
    setting keepalive = {.name = "KEEPALIVE_INTERVAL"};
    /* The newer protocols abort the survivor of a killed peer (measured with 1.13.1). */
    const setting proto = {.name = "PROTO_ENABLE", .value = "n"};
    const uint32_t keepalive_ms = options->keepalive_ms == 0 ? KEEPALIVE_MS : options->keepalive_ms;
    const char *device_list = options->net_devices == NULL ? "lo" : options->net_devices;
    const char *users_devices = from_environment("NET_DEVICES");
    (void)snprintf(keepalive.value, sizeof keepalive.value, "%ums", keepalive_ms);
    bt_status status = set_value(&devices, device_list, error);
    if (status == BT_OK)
        status =
            check_devices(users_devices != NULL ? users_devices : devices.value, options, error);
    if (status == BT_OK) status = apply(config, tls, is_tls_forced, error);
    if (status == BT_OK) status = apply(config, &devices, false, error);
    if (status == BT_OK) status = apply(config, &keepalive, false, error);
    if (status == BT_OK) status = apply(config, &proto, false, error);
    return status;
}

bt_status xfer_ucx_configure(const xfer_ucx_options *options, ucx_transports kinds, bool is_pair,
                             ucp_config_t **out, bt_error *error) {
    /* Where pairs carry the data, the shared worker only introduces them and notices deaths. */
    const bool is_forced = kinds.has_pairs && !is_pair;
    setting tls = {.name = "TLS"};
    ucp_config_t *config = NULL;
    bt_status status = set_value(&tls, is_forced ? "tcp" : effective_tls(options), error);
    if (status != BT_OK) return status;
    const ucs_status_t read = ucp_config_read(NULL, NULL, &config);
    if (read != UCS_OK)
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "UCX's configuration cannot be read: %s",
                       ucs_status_string(read));
    status = apply_all(config, options, &tls, is_forced, error);
    if (status != BT_OK) {
        ucp_config_release(config);
        return status;
    }
    *out = config;
    return BT_OK;
}

bt_status xfer_ucx_status(ucs_status_t status) {
    if (status == UCS_OK) return BT_OK;
    if (status == UCS_ERR_MESSAGE_TRUNCATED) return BT_ERR_PEER_PROTOCOL;
    return BT_ERR_PEER_GONE;
}
