/* What a worker of either role computes with on the sim device: a card without a model file, the
 * layout of its pages and the compute, all from a few numbers. Used by worker_model. */
#ifndef BT_KERNELS_WORKER_SIM_H
#define BT_KERNELS_WORKER_SIM_H

#include <stdint.h>

#include "base/compute_settings.h"
#include "base/status.h"
#include "kernels/kv_page.h"
#include "kernels/model.h"

/* Reads `support`: 0 is realistic. CALLER_CONFIG with a sentence that names the option. */
BT_MUST_CHECK bt_status worker_sim_read_support(const bt_sim_settings *settings,
                                                uint32_t *width_out, bt_error *error);
/* The card (its fingerprint is a hash of what shapes rows, so that workers that would not draw
 * alike are refused by the router) and the layout. CALLER_CONFIG as above. */
BT_MUST_CHECK bt_status worker_sim_describe(const bt_sim_settings *settings, uint32_t page_tokens,
                                            kv_dtype dtype, model_card *card_out,
                                            kv_page_layout *kv_out, bt_error *error);

#endif
