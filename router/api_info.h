/* The endpoints that tell: models, server and model information, errors of the router of paths.
 * Each writes one JSON body. Pure. */
#ifndef BT_ROUTER_API_INFO_H
#define BT_ROUTER_API_INFO_H

#include "router/api_request.h"
#include "router/dispatch.h"
#include "router/http_parser.h"

enum { API_WORKERS_MAX = 256 };

/* What the control thread last published. */
typedef struct api_snapshot {
    api_model model;
    dispatch_view view;
    uint32_t worker_count; /* of workers[] */
    dispatch_worker_view workers[API_WORKERS_MAX];
} api_snapshot;

typedef enum api_route {
    API_ROUTE_NONE,
    API_ROUTE_GENERATE,
    API_ROUTE_CHAT,
    API_ROUTE_COMPLETION,
    API_ROUTE_ABORT,
    API_ROUTE_MODELS,
    API_ROUTE_MODEL, /* /v1/models/{id} */
    API_ROUTE_HEALTH,
    API_ROUTE_LIVENESS,
    API_ROUTE_SERVER_INFO,
    API_ROUTE_MODEL_INFO,
    API_ROUTE_WEIGHT_VERSION,
    API_ROUTE_ROOT,
} api_route;

/* The route of a path. When the method is not allowed there, *allow_out is the value of Allow, else
 * NULL. *rest_out: what stands for {id}, percent-encoded. */
api_route api_route_find(http_method method, const char *path, const char **allow_out,
                         const char **rest_out);

void api_models_write(bt_text *out, const api_settings *settings, const api_model *model,
                      int64_t created_s);
/* false: no such model, and the body says so (404). The id is percent-encoded. */
bool api_model_write(bt_text *out, const api_settings *settings, const api_model *model,
                     int64_t created_s, const char *encoded_id);
void api_server_info_write(bt_text *out, const api_settings *settings,
                           const api_snapshot *snapshot);
void api_model_info_write(bt_text *out, const api_settings *settings, const api_snapshot *snapshot);

#endif
