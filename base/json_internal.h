/* What the reader and the writer of JSON share. */
#ifndef BT_BASE_JSON_INTERNAL_H
#define BT_BASE_JSON_INTERNAL_H

#include <stddef.h>

/* Bytes of the well-formed UTF-8 sequence at text [available > 0], 0 when it is not one. */
size_t json_utf8_bytes(const char *text, size_t available);

#endif
