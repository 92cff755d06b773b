/* Paths and the bodies that tell about the server. A path is known by one table, which also says
 * the methods it takes; what is done there is front_route.c's. The bodies are written from a
 * snapshot that the control thread published, so they may be a moment old, and field order and
 * names are those that clients of the two APIs read. Pure: no locks, no clock (the time of creation
 * is given). */
#include "router/api_info.h"

#include <string.h>

#include "base/hex.h"
#include "base/version.h"
#include "router/api_sampling.h"

#define GET_METHODS  "GET, HEAD, OPTIONS"
#define POST_METHODS "POST, OPTIONS"

static const struct {
    const char *path;
    api_route route;
    const char *allow;
} ROUTES[] = {
    {"/generate", API_ROUTE_GENERATE, "POST, PUT, OPTIONS"},
    {"/v1/chat/completions", API_ROUTE_CHAT, POST_METHODS},
    {"/v1/completions", API_ROUTE_COMPLETION, POST_METHODS},
    {"/abort_request", API_ROUTE_ABORT, POST_METHODS},
    {"/v1/models", API_ROUTE_MODELS, GET_METHODS},
    {"/health", API_ROUTE_HEALTH, GET_METHODS},
    {"/health_generate", API_ROUTE_HEALTH, GET_METHODS},
    {"/readiness", API_ROUTE_HEALTH, GET_METHODS},
    {"/liveness", API_ROUTE_LIVENESS, GET_METHODS},
    {"/ping", API_ROUTE_LIVENESS, GET_METHODS},
    {"/server_info", API_ROUTE_SERVER_INFO, GET_METHODS},
    {"/get_server_info", API_ROUTE_SERVER_INFO, GET_METHODS},
    {"/model_info", API_ROUTE_MODEL_INFO, GET_METHODS},
    {"/get_model_info", API_ROUTE_MODEL_INFO, GET_METHODS},
    {"/get_weight_version", API_ROUTE_WEIGHT_VERSION, GET_METHODS},
    {"/", API_ROUTE_ROOT, GET_METHODS},
};

static const char MODEL_PREFIX[] = "/v1/models/";

static const char *method_text(http_method method) {
    switch (method) {
    case HTTP_METHOD_GET: return "GET";
    case HTTP_METHOD_HEAD: return "HEAD";
    case HTTP_METHOD_POST: return "POST";
    case HTTP_METHOD_PUT: return "PUT";
    case HTTP_METHOD_DELETE: return "DELETE";
    case HTTP_METHOD_OPTIONS: return "OPTIONS";
    case HTTP_METHOD_OTHER: break;
    }
    return "?";
}

api_route api_route_find(http_method method, const char *path, const char **allow_out,
                         const char **rest_out) {
    api_route route = API_ROUTE_NONE;
    const char *allow = NULL;
    *allow_out = NULL;
    *rest_out = "";
    for (size_t i = 0; i < BT_ARRAY_COUNT(ROUTES); i++) {
        if (strcmp(path, ROUTES[i].path) != 0) continue;
        route = ROUTES[i].route;
        allow = ROUTES[i].allow;
    }
    if (route == API_ROUTE_NONE && strncmp(path, MODEL_PREFIX, sizeof(MODEL_PREFIX) - 1) == 0) {
        route = API_ROUTE_MODEL;
        allow = GET_METHODS;
        *rest_out = path + sizeof(MODEL_PREFIX) - 1;
    }
    if (allow != NULL && strstr(allow, method_text(method)) == NULL) *allow_out = allow;
    return route;
}

static void add_quoted(bt_text *out, const char *text) {
    bt_json_add_string(out, text, strlen(text));
}

/* "name":"text", */
static void add_string(bt_text *out, const char *name, const char *text) {
    bt_text_add_format(out, "\"%s\":", name);
    add_quoted(out, text);
    bt_text_add(out, ",", 1);
}

static void add_number(bt_text *out, const char *name, uint64_t value) {
    bt_text_add_format(out, "\"%s\":%llu,", name, (unsigned long long)value);
}

static void add_model(bt_text *out, const api_settings *settings, const api_model *model,
                      int64_t created_s) {
    bt_text_add_string(out, "{\"id\":");
    add_quoted(out, settings->model_name);
    bt_text_add_format(out,
                       ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"baton\",\"root\":",
                       (long long)created_s);
    add_quoted(out, settings->model_name);
    bt_text_add_string(out, ",\"parent\":null,\"max_model_len\":");
    if (model->is_known) {
        bt_json_add_int(out, model->context_tokens);
    } else {
        bt_text_add_string(out, "null");
    }
    bt_text_add_string(out, "}");
}

void api_models_write(bt_text *out, const api_settings *settings, const api_model *model,
                      int64_t created_s) {
    bt_text_add_string(out, "{\"object\":\"list\",\"data\":[");
    add_model(out, settings, model, created_s);
    bt_text_add_string(out, "]}");
}

/* "%2F" and the like; a '%' that is no escape stands for itself. */
static void percent_decode(const char *encoded, char *out, size_t capacity) {
    size_t used = 0;
    while (*encoded != 0 && used + 1 < capacity) {
        int high = *encoded == '%' ? bt_hex_digit(encoded[1]) : -1;
        int low = high >= 0 ? bt_hex_digit(encoded[2]) : -1;
        bool is_escape = low >= 0 && high * 16 + low > 0;
        out[used++] = is_escape ? (char)(high * 16 + low) : *encoded;
        encoded += is_escape ? 3 : 1;
    }
    out[used] = 0;
}

bool api_model_write(bt_text *out, const api_settings *settings, const api_model *model,
                     int64_t created_s, const char *encoded_id) {
    char id[API_NAME_MAX * 2];
    percent_decode(encoded_id, id, sizeof(id));
    if (strcmp(id, settings->model_name) == 0) {
        add_model(out, settings, model, created_s);
        return true;
    }
    bt_text message;
    bt_text_init(&message, 4096);
    bt_text_add_format(&message, "The model `%s` does not exist.", encoded_id);
    api_error_write_code(out, 404, "model_not_found",
                         message.has_failed ? "The model does not exist." : message.bytes);
    bt_text_fini(&message);
    return false;
}

/* ---- /server_info ---------------------------------------------------------------------------- */

static void add_worker(bt_text *out, const dispatch_worker_view *worker) {
    bt_text_add_string(out, "{");
    add_number(out, "id", worker->worker_id);
    add_string(out, "role", worker->role == PROTO_ROLE_PREFILL ? "prefill" : "decode");
    add_string(out, "host", worker->host);
    add_number(out, "pid", worker->pid);
    bt_text_add_format(out, "\"is_ready\":%s,", worker->is_ready ? "true" : "false");
    add_number(out, "attempts", worker->attempts);
    add_number(out, "queued_tokens", worker->queued_tokens);
    add_number(out, "sequences_running", worker->sequences_running);
    add_number(out, "pages_free", worker->pages_free);
    add_number(out, "pages_total", worker->pages_total);
    add_number(out, "rows_free", worker->rows_free);
    add_number(out, "heartbeats", worker->heartbeats);
    bt_text_add_format(out, "\"rows_total\":%u}", worker->rows_total);
}

static void add_record(bt_text *out, const cluster_record *record) {
    bt_text_add_string(out, "\"cluster_record\":{");
    add_number(out, "sampling_mask_max_tokens", record->sampling_mask_max_tokens);
    add_string(out, "kv_checksum", record_checksum_name(record->kv_checksum));
    add_number(out, "page_tokens", record->page_tokens);
    add_string(out, "kv_dtype", record->kv_dtype);
    add_string(out, "kv_layout", record->kv_layout);
    add_string(out, "numerics", record->numerics);
    add_string(out, "model_fingerprint", record->model_fingerprint);
    add_string(out, "tokenizer_fingerprint", record->tokenizer_fingerprint);
    add_number(out, "row_format", record->row_format);
    add_number(out, "protocol_minor", record->protocol_minor);
    bt_text_add_format(out, "\"weights_version\":%llu},",
                       (unsigned long long)record->weights_version);
}

static uint64_t kv_tokens_of(const api_snapshot *snapshot) {
    uint64_t pages = 0;
    for (uint32_t i = 0; i < snapshot->worker_count; i++) {
        const dispatch_worker_view *worker = &snapshot->workers[i];
        if (worker->role == PROTO_ROLE_DECODE) pages += worker->pages_total;
    }
    return pages * snapshot->view.record.page_tokens;
}

static void add_settings(bt_text *out, const api_settings *settings) {
    add_string(out, "version", bt_version);
    add_string(out, "model_path", settings->model_path);
    add_string(out, "tokenizer_path", settings->model_path);
    add_string(out, "served_model_name", settings->model_name);
    add_string(out, "control_address", settings->control_address);
    add_number(out, "sampling_mask_max_tokens", settings->mask_max_tokens);
    add_string(out, "sampling_filter", api_filter_names[settings->sampling_filter]);
    add_number(out, "stream_interval", settings->stream_interval);
    bt_text_add_format(out, "\"incremental_streaming_output\":%s,",
                       settings->is_incremental ? "true" : "false");
    bt_text_add_string(out, "\"speculative_algorithm\":null,\"disaggregation_mode\":\"null\","
                            "\"tp_size\":1,\"pp_size\":1,\"dp_size\":1,\"ep_size\":1,"
                            "\"weight_version\":\"default\",");
}

void api_server_info_write(bt_text *out, const api_settings *settings,
                           const api_snapshot *snapshot) {
    const dispatch_view *view = &snapshot->view;
    bt_text_add_string(out, "{");
    add_settings(out, settings);
    add_number(out, "vocab_size", snapshot->model.vocab_size);
    add_number(out, "context_length", snapshot->model.context_tokens);
    add_number(out, "max_req_input_len", snapshot->model.context_tokens);
    add_number(out, "max_total_num_tokens", kv_tokens_of(snapshot));
    add_record(out, &view->record);
    bt_text_add_format(out, "\"is_ready\":%s,", view->is_ready ? "true" : "false");
    add_number(out, "requests_running", view->requests_running);
    add_number(out, "requests_queued", view->requests_queued);
    add_number(out, "requests_total", view->requests_total);
    add_number(out, "retries_total", view->retries_total);
    add_number(out, "workers_refused_total", view->refused_total);
    bt_text_add_string(out, "\"workers\":[");
    for (uint32_t i = 0; i < snapshot->worker_count; i++) {
        if (i > 0) bt_text_add(out, ",", 1);
        add_worker(out, &snapshot->workers[i]);
    }
    bt_text_add_string(out, "],\"internal_states\":[{}]}");
}

void api_model_info_write(bt_text *out, const api_settings *settings,
                          const api_snapshot *snapshot) {
    bt_text_add_string(out, "{");
    add_string(out, "model_path", settings->model_path);
    add_string(out, "tokenizer_path", settings->model_path);
    add_string(out, "served_model_name", settings->model_name);
    add_number(out, "context_length", snapshot->model.context_tokens);
    add_number(out, "vocab_size", snapshot->model.vocab_size);
    bt_text_add_string(out, "\"is_generation\":true,\"preferred_sampling_params\":null,"
                            "\"weight_version\":\"default\",\"has_image_understanding\":false,"
                            "\"has_audio_understanding\":false,\"model_type\":null,"
                            "\"architectures\":null}");
}
