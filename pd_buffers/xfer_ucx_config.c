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

typedef enum setting_place {
    SETTING_CONTEXT,   /* ucp_config_modify takes it */
    SETTING_TRANSPORT, /* read from the environment when a transport is opened */
} setting_place;

typedef struct setting {
    const char *name; /* without UCX_ */
    setting_place place;
    char value[VALUE_BYTES];
} setting;

static const char *const transport_names[] = {"POSIX_ERROR_HANDLING", "SYSV_ERROR_HANDLING",
                                              "POSIX_FIFO_SIZE", "SYSV_FIFO_SIZE",
                                              "TCP_PORT_RANGE"};
static bool is_ours[BT_ARRAY_COUNT(transport_names)]; /* put into the environment by us */

/* Messages that a receiver in shared memory has not read yet, from all senders together. UCX's 64
 * are fewer than many workers have on their way, and a queue that is full when its receiver dies
 * costs a close that does not end (xfer_ucx.c). */
#define FIFO_SIZE "256"

/* Shared memory without a network: posix and sysv for small messages, cma for the payloads. */
static const char *const shm_tls = "posix,sysv,cma,self";

static const char *expand_tls(const char *tls) {
    if (tls == NULL) return "tcp";
    return strcmp(tls, "shm") == 0 ? shm_tls : tls;
}

typedef struct variable {
    char name[64];
} variable;

static variable variable_of(const char *name) {
    variable v;
    (void)snprintf(v.name, sizeof v.name, "UCX_%s", name);
    return v;
}

static bool put_into_environment(const setting *s) {
    const variable v = variable_of(s->name);
    if (setenv(v.name, s->value, 1) != 0) return false;
    for (size_t i = 0; i < BT_ARRAY_COUNT(transport_names); i++)
        if (strcmp(transport_names[i], s->name) == 0) is_ours[i] = true;
    return true;
}

void xfer_ucx_configured(ucp_config_t *config) {
    ucp_config_release(config);
    for (size_t i = 0; i < BT_ARRAY_COUNT(transport_names); i++) {
        if (is_ours[i]) (void)unsetenv(variable_of(transport_names[i]).name);
        is_ours[i] = false;
    }
}

static bt_status set_value(setting *s, const char *value, bt_error *error) {
    const int wanted = snprintf(s->value, sizeof s->value, "%s", value);
    if (wanted >= 0 && (size_t)wanted < sizeof s->value) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_CONFIG, "the value of UCX_%s is too long", s->name);
}

static bt_status check_devices(const char *devices, const xfer_ucx_options *options,
                               bt_error *error) {
    if (options->allow_all_devices) return BT_OK;
    if (devices[0] != '\0' && strstr(devices, "all") == NULL) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_CONFIG,
                   "UCX_NET_DEVICES is '%s': every network of this machine could reach the "
                   "transfer port; name a device, or allow all devices",
                   devices);
}

/* UCX takes what it cannot read as no range at all. */
static bt_status check_ports(const char *range, bt_error *error) {
    unsigned first = 0, last = 0;
    int used = 0;
    if (range[0] == '\0') return BT_OK;
    const bool is_read = strspn(range, "0123456789-") == strlen(range) && strlen(range) <= 11 &&
                         sscanf(range, "%u-%u%n", &first, &last, &used) == 2 && range[used] == '\0';
    if (is_read && first >= 1 && first <= last && last <= UINT16_MAX) return BT_OK;
    return bt_fail(error, BT_ERR_CALLER_CONFIG,
                   "the port range '%.80s' is not FIRST-LAST, two ports from 1 to %d", range,
                   UINT16_MAX);
}

static bt_status apply(ucp_config_t *config, const xfer_ucx_options *options, const setting *s,
                       bt_error *error) {
    const char *users = getenv(variable_of(s->name).name);
    const char *value = users != NULL ? users : s->value;
    ucs_status_t status = UCS_OK;
    if (strcmp(s->name, "NET_DEVICES") == 0) {
        const bt_status checked = check_devices(value, options, error);
        if (checked != BT_OK) return checked;
    }
    if (users == NULL && s->place == SETTING_CONTEXT)
        status = ucp_config_modify(config, s->name, s->value);
    else if (users == NULL && !put_into_environment(s))
        status = UCS_ERR_NO_MEMORY;
    if (status != UCS_OK)
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "UCX does not take %s=%s: %s", s->name,
                       s->value, ucs_status_string(status));
    bt_log_info("xfer", "UCX_%s=%s%s", s->name, value, users != NULL ? " (environment)" : "");
    return BT_OK;
}

typedef struct tls_kinds {
    bool has_memory; /* some transport within one machine's memory */
    bool has_others;
} tls_kinds;

static tls_kinds look_at_tls(const char *tls) {
    static const char *const names[] = {"posix", "sysv", "cma", "shm", "sm", "mm"};
    tls_kinds kinds = {false, false};
    for (const char *at = tls; *at != '\0';) {
        const size_t length = strcspn(at, ",");
        bool is_memory = false;
        for (size_t i = 0; i < BT_ARRAY_COUNT(names); i++)
            is_memory =
                is_memory || (strlen(names[i]) == length && strncmp(names[i], at, length) == 0);
        const bool is_self = length == 4 && strncmp(at, "self", length) == 0;
        kinds.has_memory = kinds.has_memory || is_memory;
        kinds.has_others = kinds.has_others || !(is_memory || is_self);
        at += length;
        if (*at == ',') at++;
    }
    return kinds;
}

/* What is in effect for a setting: the user's, else ours. */
static const char *effective(const setting *s) {
    const char *users = getenv(variable_of(s->name).name);
    return users != NULL ? users : s->value;
}

enum {
    SETTING_TLS,
    SETTING_DEVICES,
    SETTING_KEEPALIVE,
    SETTING_PROTO,
    SETTING_PORTS,
    SETTING_POSIX_ERRORS,
    SETTING_SYSV_ERRORS,
    SETTING_POSIX_FIFO,
    SETTING_SYSV_FIFO,
    SETTING_COUNT
};

static bt_status fill_settings(const xfer_ucx_options *options, setting *settings,
                               bt_error *error) {
    static const setting names[SETTING_COUNT] = {
        [SETTING_TLS] = {.name = "TLS"},
        [SETTING_DEVICES] = {.name = "NET_DEVICES"},
        [SETTING_KEEPALIVE] = {.name = "KEEPALIVE_INTERVAL"},
        /* The newer protocols abort the survivor of a killed peer (measured with 1.13.1). */
        [SETTING_PROTO] = {.name = "PROTO_ENABLE", .value = "n"},
        [SETTING_PORTS] = {.name = "TCP_PORT_RANGE", .place = SETTING_TRANSPORT},
        [SETTING_POSIX_ERRORS] = {"POSIX_ERROR_HANDLING", SETTING_TRANSPORT, "y"},
        [SETTING_SYSV_ERRORS] = {"SYSV_ERROR_HANDLING", SETTING_TRANSPORT, "y"},
        [SETTING_POSIX_FIFO] = {"POSIX_FIFO_SIZE", SETTING_TRANSPORT, FIFO_SIZE},
        [SETTING_SYSV_FIFO] = {"SYSV_FIFO_SIZE", SETTING_TRANSPORT, FIFO_SIZE},
    };
    const char *devices = options->net_devices == NULL ? "lo" : options->net_devices;
    const char *ports = options->port_range == NULL ? "" : options->port_range;
    const uint32_t keepalive_ms = options->keepalive_ms == 0 ? KEEPALIVE_MS : options->keepalive_ms;
    memcpy(settings, names, sizeof names);
    (void)snprintf(settings[SETTING_KEEPALIVE].value, VALUE_BYTES, "%ums", keepalive_ms);
    bt_status status = set_value(&settings[SETTING_TLS], expand_tls(options->tls), error);
    if (status == BT_OK) status = set_value(&settings[SETTING_DEVICES], devices, error);
    if (status == BT_OK) status = check_ports(ports, error);
    if (status == BT_OK) status = set_value(&settings[SETTING_PORTS], ports, error);
    return status;
}

/* A setting of a transport that is not used would only make UCX warn. */
static bool is_wanted(size_t index, const setting *s, tls_kinds kinds) {
    if (index == SETTING_PORTS) return s->value[0] != '\0' && kinds.has_others;
    return index < SETTING_POSIX_ERRORS || kinds.has_memory;
}

bt_status xfer_ucx_configure(const xfer_ucx_options *options, ucp_config_t **out,
                             bool *is_memory_only_out, bt_error *error) {
    setting settings[SETTING_COUNT];
    ucp_config_t *config = NULL;
    bt_status status = fill_settings(options, settings, error);
    if (status != BT_OK) return status;
    const tls_kinds kinds = look_at_tls(effective(&settings[SETTING_TLS]));
    const ucs_status_t read = ucp_config_read(NULL, NULL, &config);
    if (read != UCS_OK)
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "UCX's configuration cannot be read: %s",
                       ucs_status_string(read));
    for (size_t i = 0; i < SETTING_COUNT && status == BT_OK; i++)
        if (is_wanted(i, &settings[i], kinds)) status = apply(config, options, &settings[i], error);
    if (status != BT_OK) {
        xfer_ucx_configured(config);
        return status;
    }
    *is_memory_only_out = kinds.has_memory && !kinds.has_others;
    *out = config;
    return BT_OK;
}

bt_status xfer_ucx_status(ucs_status_t status) {
    if (status == UCS_OK) return BT_OK;
    if (status == UCS_ERR_MESSAGE_TRUNCATED) return BT_ERR_PEER_PROTOCOL;
    return BT_ERR_PEER_GONE;
}
