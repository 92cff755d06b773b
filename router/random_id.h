/* Fresh entropy from the kernel: request ids, seeds, incarnations. Any thread. */
#ifndef BT_ROUTER_RANDOM_ID_H
#define BT_ROUTER_RANDOM_ID_H

#include <stdint.h>

enum { RANDOM_ID_BYTES = 33 };

uint64_t random_u64(void);
/* 32 hexadecimal digits, terminated. */
void random_id(char out[RANDOM_ID_BYTES]);

#endif
