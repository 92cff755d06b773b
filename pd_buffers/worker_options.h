/* The command line of a worker program: the options that both roles have, around the few rows that
 * a role adds, and what can be said of their values before a model is there. No word about models:
 * --model is a path here, and the sim device's options are numbers. One thread, at start-up. */
#ifndef BT_PD_BUFFERS_WORKER_OPTIONS_H
#define BT_PD_BUFFERS_WORKER_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/compute_settings.h"
#include "base/options.h"
#include "base/status.h"
#include "proto/address.h"
#include "proto/message.h"

/* Strings belong to the worker_options that wrote them. */
typedef struct worker_settings {
    bt_compute_settings compute;
    const char *router, *host, *ucx_tls, *ucx_net_devices, *ucx_port_range;
    bool ucx_allow_all_devices;
    uint32_t kv_pages;
    uint32_t sampling_mask_max_tokens, kv_checksum, log_level;
    uint64_t kv_bytes;
} worker_settings;

/* What a role adds. Offsets of its rows are in the struct that begins with worker_settings. */
typedef struct worker_options_role {
    const char *program; /* "baton-decode" */
    const char *summary; /* one sentence, for --help */
    const bt_option *rows;
    size_t count;
} worker_options_role;

/* In the caller's storage, as long as the settings are used. */
typedef struct worker_options {
    bt_option rows[BT_OPTIONS_MAX];
    bt_option_table table; /* of these rows */
    bt_options *parsed;    /* owned; NULL before a start that succeeded */
} worker_options;

/* bt_options_start with the table of this role. `settings` is the struct that begins with
 * worker_settings. */
bool worker_options_start(worker_options *options, const worker_options_role *role, int argc,
                          char **argv, void *settings, int *exit_status);
void worker_options_fini(worker_options *options);

/* What no model is needed for, before minutes go by with loading one: also that each device has the
 * options that it needs, and no other's. CALLER_CONFIG with a sentence that names the option. */
BT_MUST_CHECK bt_status worker_options_check(const worker_options *options,
                                             const worker_settings *settings,
                                             proto_address *router_out, bt_error *error);
/* How many KV pages of page_bytes there are to be. */
BT_MUST_CHECK bt_status worker_options_page_count(const worker_settings *settings,
                                                  size_t page_bytes, uint32_t *out,
                                                  bt_error *error);
/* The fields of the cluster record that were given here, and their pins. */
void worker_options_fill_record(const worker_options *options, const worker_settings *settings,
                                proto_hello *hello);

#endif
