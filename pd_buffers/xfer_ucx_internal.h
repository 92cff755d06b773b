/* Between the UCX mover and its configuration. */
#ifndef BT_PD_BUFFERS_XFER_UCX_INTERNAL_H
#define BT_PD_BUFFERS_XFER_UCX_INTERNAL_H

#include <ucp/api/ucp.h>

#include "pd_buffers/xfer_ucx.h"

/* Reads UCX's configuration with our settings in it. What UCX takes only from the environment (the
 * settings of single transports) is put there for as long as the mover is being created; end both
 * with xfer_ucx_configured. */
BT_MUST_CHECK bt_status xfer_ucx_configure(const xfer_ucx_options *options, ucp_config_t **out,
                                           bt_error *error);
void xfer_ucx_configured(ucp_config_t *config);
/* UCX's status as one of ours: what ends an endpoint is PEER_GONE. */
bt_status xfer_ucx_status(ucs_status_t status);

#endif
