/* The table of a worker's options: rows before and behind the role's own. */
#include "pd_buffers/worker_options.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/system.h"
#include "base/version.h"
#include "proto/record.h"

/* Without --kv-pages and --kv-bytes: an eighth of the memory that is free, at most 1 GiB. */
static const uint64_t kv_bytes_auto_max = UINT64_C(1) << 30;
enum { KV_MEMORY_SHARE = 8 };

static const char *const kv_dtypes[] = {"bf16", "f32", NULL}; /* kv_dtype's numbers */
static const char *const weights[] = {"auto", "bf16", "int8", "native", NULL}; /* model_weights's */
static const char *const devices[] = {"host", "sim", "cuda", NULL}; /* bt_compute_device's */
static const char *const log_levels[] = {"error", "warn", "info", "debug", "trace", NULL};

static const bt_option rows_before[] = {
    {.name = "model",
     .type = BT_OPTION_STRING,
     .value_name = "PATH",
     .help = "GGUF file or Hugging Face folder; the sim device has none.",
     .offset = offsetof(worker_settings, compute.model)},
    {.name = "device",
     .type = BT_OPTION_ENUM,
     .default_text = "host",
     .choices = devices,
     .help = "What computes: host, this machine's CPUs; sim keeps time instead of computing "
             "(docs/sim.md); cuda is not built yet.",
     .offset = offsetof(worker_settings, compute.device)},
    {.name = "router",
     .type = BT_OPTION_STRING,
     .value_name = "HOST:PORT",
     .default_text = "127.0.0.1:30001",
     .help = "The router's control port.",
     .offset = offsetof(worker_settings, router)},
    {.name = "host",
     .type = BT_OPTION_STRING,
     .value_name = "NAME",
     .help = "This machine's name in logs and errors; by default its host name.",
     .offset = offsetof(worker_settings, host)},
    {.name = "threads",
     .type = BT_OPTION_U32,
     .default_text = "0",
     .max = 1024,
     .help = "Compute threads; 0 is one per CPU.",
     .offset = offsetof(worker_settings, compute.threads)},
    {.name = "weights",
     .type = BT_OPTION_ENUM,
     .default_text = "auto",
     .choices = weights,
     .help = "Form of the weights in memory, the same in the whole cluster: auto keeps Q8_0 as it "
             "is and makes the rest bf16; bf16; int8 (a scale per output); native also keeps Q4_0 "
             "and Q4_1.",
     .offset = offsetof(worker_settings, compute.weights)},
    {.name = "weights-cache",
     .type = BT_OPTION_STRING,
     .default_text = "auto",
     .value_name = "DIR",
     .help = "Folder of packed weights that the workers of this machine share; auto is "
             "$XDG_CACHE_HOME/baton/weights or ~/.cache/baton/weights, off none.",
     .offset = offsetof(worker_settings, compute.weights_cache)},
    {.name = "weights-cache-bytes",
     .type = BT_OPTION_BYTES,
     .default_text = "32GiB",
     .help = "What the folder may hold; packed weights not used for longest are removed.",
     .offset = offsetof(worker_settings, compute.weights_cache_bytes)},
    {.name = "kv-pages",
     .type = BT_OPTION_U32,
     .default_text = "0",
     .max = 1u << 24,
     .help = "KV pages; 0 goes by --kv-bytes.",
     .offset = offsetof(worker_settings, kv_pages)},
    {.name = "kv-bytes",
     .type = BT_OPTION_BYTES,
     .default_text = "0",
     .help = "Memory of the KV pages; 0 is an eighth of the free memory, at most 1 GiB.",
     .offset = offsetof(worker_settings, kv_bytes)},
    {.name = "page-tokens",
     .type = BT_OPTION_U32,
     .default_text = "32",
     .min = 16,
     .max = 64,
     .help = "Tokens of a KV page (16, 32 or 64), the same in the whole cluster.",
     .offset = offsetof(worker_settings, compute.page_tokens)},
    {.name = "kv-dtype",
     .type = BT_OPTION_ENUM,
     .default_text = "bf16",
     .choices = kv_dtypes,
     .help = "Type of keys and values, the same in the whole cluster.",
     .offset = offsetof(worker_settings, compute.kv_dtype)},
};

#define SIM(field) .offset = offsetof(worker_settings, compute.sim.field)
static const bt_option rows_of_sim[] = {
    {.name = "sim-step-us",
     .type = BT_OPTION_U64,
     .default_text = "14000",
     .max = 60 * 1000 * 1000,
     .value_name = "US",
     .help = "Time of a step of the sim device.",
     SIM(step_us)},
    {.name = "sim-token-us",
     .type = BT_OPTION_U64,
     .default_text = "0",
     .max = 1000 * 1000,
     .value_name = "US",
     .help = "And of each token in it.",
     SIM(token_us)},
    {.name = "sim-vocab",
     .type = BT_OPTION_U32,
     .default_text = "151936",
     .min = 1,
     .max = 1u << 22,
     .value_name = "IDS",
     .help =
         "Its vocabulary, at least the tokenizer's; the same in the whole cluster, as the rest.",
     SIM(vocab_size)},
    {.name = "sim-support",
     .type = BT_OPTION_STRING,
     .default_text = "realistic",
     .value_name = "IDS",
     .help =
         "Ids of every support, where top_k lets them; realistic: 1 to 256, half of them 1 or 2, "
         "8 on average.",
     SIM(support)},
    {.name = "sim-seed",
     .type = BT_OPTION_U64,
     .default_text = "1",
     .value_name = "N",
     .help = "Another one gives other ids and numbers.",
     SIM(seed)},
    {.name = "sim-context",
     .type = BT_OPTION_U32,
     .default_text = "32768",
     .min = 2,
     .max = 1u << 24,
     .value_name = "TOKENS",
     .help = "Prompt and reply together at most.",
     SIM(context_tokens)},
    {.name = "sim-layers",
     .type = BT_OPTION_U32,
     .default_text = "2",
     .min = 1,
     .max = 1024,
     .help = "Layers of its KV pages.",
     SIM(layers)},
    {.name = "sim-kv-bytes",
     .type = BT_OPTION_U32,
     .default_text = "256",
     .min = 16,
     .max = 1u << 20,
     .value_name = "BYTES",
     .help = "Keys and values of one token in all layers together.",
     SIM(kv_bytes)},
    {.name = "sim-check-pages",
     .type = BT_OPTION_BOOL,
     .default_text = "false",
     .help = "Read the whole prefix back from the pages at every step, not only its last token.",
     SIM(checks_pages)},
    {.name = "sim-report-ms",
     .type = BT_OPTION_U32,
     .default_text = "0",
     .max = 3600 * 1000,
     .value_name = "MS",
     .help = "Log every so often how well the time was kept; 0: at the end only.",
     SIM(report_ms)},
};
#undef SIM

static const bt_option rows_behind[] = {
    {.name = "sampling-mask-max-tokens",
     .type = BT_OPTION_U32,
     .min = 1,
     .max = 1u << 20,
     .help = "Insist on this cap: the worker is refused when the router's differs. By default the "
             "router's is taken.",
     .offset = offsetof(worker_settings, sampling_mask_max_tokens)},
    {.name = "kv-checksum",
     .type = BT_OPTION_ENUM,
     .choices = record_checksum_names,
     .help = "Insist on this checksum of KV pages; by default the router's is taken.",
     .offset = offsetof(worker_settings, kv_checksum)},
    {.name = "ucx-tls",
     .type = BT_OPTION_STRING,
     .default_text = "tcp",
     .value_name = "LIST",
     .help = "UCX transports: tcp, or shm on one machine.",
     .offset = offsetof(worker_settings, ucx_tls)},
    {.name = "ucx-net-devices",
     .type = BT_OPTION_STRING,
     .default_text = "lo",
     .value_name = "LIST",
     .help = "Network devices that UCX may use. A reachable UCX port is full control of the "
             "process: only trusted networks.",
     .offset = offsetof(worker_settings, ucx_net_devices)},
    {.name = "ucx-allow-all-devices",
     .type = BT_OPTION_BOOL,
     .default_text = "false",
     .help = "Let --ucx-net-devices be all.",
     .offset = offsetof(worker_settings, ucx_allow_all_devices)},
    {.name = "ucx-port-range",
     .type = BT_OPTION_STRING,
     .value_name = "A-B",
     .help = "TCP ports that UCX may listen on; by default any.",
     .offset = offsetof(worker_settings, ucx_port_range)},
    {.name = "log-level",
     .type = BT_OPTION_ENUM,
     .default_text = "info",
     .choices = log_levels,
     .help = "What is logged.",
     .offset = offsetof(worker_settings, log_level)},
};

static void add_rows(worker_options *options, const bt_option *rows, size_t count) {
    BT_ASSERT(count <= BT_OPTIONS_MAX - options->table.count);
    memcpy(&options->rows[options->table.count], rows, count * sizeof rows[0]);
    options->table.count += count;
}

bool worker_options_start(worker_options *options, const worker_options_role *role, int argc,
                          char **argv, void *settings, int *exit_status) {
    *options = (worker_options){0};
    options->table = (bt_option_table){
        .program = role->program,
        .version = bt_version,
        .summary = role->summary,
        .options = options->rows,
    };
    add_rows(options, rows_before, BT_ARRAY_COUNT(rows_before));
    add_rows(options, rows_of_sim, BT_ARRAY_COUNT(rows_of_sim));
    add_rows(options, role->rows, role->count);
    add_rows(options, rows_behind, BT_ARRAY_COUNT(rows_behind));
    return bt_options_start(&options->table, argc, argv, settings, &options->parsed, exit_status);
}

void worker_options_fini(worker_options *options) {
    bt_options_destroy(options->parsed);
    options->parsed = NULL;
}

static bt_status check_host(const worker_options *options, const worker_settings *settings,
                            bt_error *error) {
    if (settings->compute.model == NULL) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG,
                       "option --model is required with --device host; see --help");
    }
    for (size_t i = 0; i < BT_ARRAY_COUNT(rows_of_sim); i++) {
        const char *name = rows_of_sim[i].name;
        if (!bt_options_is_given(options->parsed, name)) continue;
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "--%s is for --device sim only", name);
    }
    return BT_OK;
}

static bt_status check_device(const worker_options *options, const worker_settings *settings,
                              bt_error *error) {
    switch ((bt_compute_device)settings->compute.device) {
    case BT_COMPUTE_HOST: return check_host(options, settings, error);
    case BT_COMPUTE_SIM:
        if (settings->compute.model == NULL) return BT_OK;
        return bt_fail(error, BT_ERR_CALLER_CONFIG,
                       "--model is not for --device sim, which has no model file");
    case BT_COMPUTE_CUDA: break;
    }
    return bt_fail(error, BT_ERR_CALLER_CONFIG, "--device %s is not built yet",
                   devices[settings->compute.device]);
}

bt_status worker_options_check(const worker_options *options, const worker_settings *settings,
                               proto_address *router_out, bt_error *error) {
    const uint32_t page_tokens = settings->compute.page_tokens;
    bt_error why = {0};
    const bt_status has_device = check_device(options, settings, error);
    if (has_device != BT_OK) return has_device;
    if (page_tokens != 16 && page_tokens != 32 && page_tokens != 64) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG, "--page-tokens is 16, 32 or 64, not %" PRIu32,
                       page_tokens);
    }
    const bt_status status = proto_address_parse(settings->router, router_out, &why);
    if (status == BT_OK) return BT_OK;
    return bt_fail(error, status, "--router: %.300s", why.text);
}

bt_status worker_options_page_count(const worker_settings *settings, size_t page_bytes,
                                    uint32_t *out, bt_error *error) {
    uint64_t count = settings->kv_pages;
    if (count == 0) {
        uint64_t bytes = settings->kv_bytes;
        if (bytes == 0) {
            bytes = bt_system_memory_available_bytes() / KV_MEMORY_SHARE;
            if (bytes > kv_bytes_auto_max) bytes = kv_bytes_auto_max;
        }
        count = bytes / page_bytes;
    }
    if (count == 0 || count > UINT32_MAX) {
        return bt_fail(error, BT_ERR_CALLER_CONFIG,
                       "%" PRIu64 " KV pages of %zu bytes cannot be used; see --kv-bytes", count,
                       page_bytes);
    }
    *out = (uint32_t)count;
    return BT_OK;
}

void worker_options_fill_record(const worker_options *options, const worker_settings *settings,
                                proto_hello *hello) {
    cluster_record *record = &hello->record;
    record->page_tokens = settings->compute.page_tokens;
    (void)snprintf(record->kv_dtype, sizeof record->kv_dtype, "%s",
                   kv_dtypes[settings->compute.kv_dtype]);
    if (bt_options_is_given(options->parsed, "sampling-mask-max-tokens")) {
        record->sampling_mask_max_tokens = settings->sampling_mask_max_tokens;
        hello->pins |= 1u << RECORD_SAMPLING_MASK_MAX_TOKENS;
    }
    if (bt_options_is_given(options->parsed, "kv-checksum")) {
        record->kv_checksum = settings->kv_checksum + 1;
        hello->pins |= 1u << RECORD_KV_CHECKSUM;
    }
}
