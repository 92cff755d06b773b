/* One valid message of every kind, with every field set to something that is not its default. */
#ifndef BT_TESTS_PROTO_SAMPLES_H
#define BT_TESTS_PROTO_SAMPLES_H

#include "proto/message.h"

enum { SAMPLE_KINDS = PROTO_ABORT };

/* kind is 1 to SAMPLE_KINDS. payload (may be NULL) is used where the kind carries one. */
void sample_message(proto_kind kind, void *payload, size_t payload_bytes, proto_message *out);

#endif
