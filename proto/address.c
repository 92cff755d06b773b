/* Splits HOST:PORT. */
#include "proto/address.h"

#include <string.h>

static bool parse_port(const char *text, uint16_t *out) {
    const size_t digits = strspn(text, "0123456789");
    if (digits == 0 || digits > 5 || text[digits] != '\0') return false;
    uint32_t port = 0;
    for (size_t i = 0; i < digits; i++)
        port = port * 10 + (uint32_t)(text[i] - '0');
    if (port > UINT16_MAX) return false;
    *out = (uint16_t)port;
    return true;
}

bt_status proto_address_parse(const char *text, proto_address *out, bt_error *error) {
    const char *colon = strrchr(text, ':');
    if (colon == NULL || colon == text) {
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "\"%s\" is not HOST:PORT", text);
    }
    const char *host = text;
    size_t host_bytes = (size_t)(colon - text);
    const bool is_bracketed = text[0] == '[' && colon[-1] == ']';
    if (is_bracketed) {
        host++;
        host_bytes -= 2;
    } else if (memchr(text, ':', host_bytes) != NULL) {
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT,
                       "\"%s\" is not HOST:PORT (an IPv6 host needs brackets)", text);
    }
    if (host_bytes == 0 || host_bytes >= sizeof out->host) {
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "\"%s\" has no usable host", text);
    }
    uint16_t port;
    if (!parse_port(colon + 1, &port)) {
        return bt_fail(error, BT_ERR_CALLER_ARGUMENT, "\"%s\" has no usable port", text);
    }
    memcpy(out->host, host, host_bytes);
    out->host[host_bytes] = '\0';
    out->port = port;
    return BT_OK;
}
