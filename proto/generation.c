/* Ranges of proto_generation. */
#include "proto/generation.h"

#include <math.h>

bt_status proto_generation_check(const proto_generation *generation, bt_error *error) {
    const proto_generation *g = generation;
    if (!isfinite(g->temperature) || g->temperature <= 0) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "temperature %g is not above 0",
                       (double)g->temperature);
    }
    if (!(g->top_p > 0 && g->top_p <= 1)) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "top_p %g is not in (0, 1]",
                       (double)g->top_p);
    }
    if (g->mask_mode > 2) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "mask mode %u is not known", g->mask_mode);
    }
    if (g->stop_id_count > PROTO_STOP_IDS_MAX) {
        return bt_fail(error, BT_ERR_REQUEST_INVALID, "%u stop ids are more than %d",
                       g->stop_id_count, (int)PROTO_STOP_IDS_MAX);
    }
    return BT_OK;
}

bool proto_generation_is_stop(const proto_generation *generation, int32_t id) {
    for (uint32_t i = 0; i < generation->stop_id_count; i++) {
        if (generation->stop_ids[i] == id) return true;
    }
    return false;
}
