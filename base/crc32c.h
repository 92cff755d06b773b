/* CRC32C (Castagnoli, reflected 0x82F63B78): the checksum of KV chunks, metadata rows and message
 * headers. The value of "123456789" is 0xE3069283. Uses the CRC instruction of the processor where
 * there is one (SSE4.2, ARMv8 CRC32), chosen once at run time; the same bits everywhere. Any
 * thread; no allocation. */
#ifndef BT_BASE_CRC32C_H
#define BT_BASE_CRC32C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The checksum of what `crc` covers followed by data [bytes]. Start with 0. */
uint32_t bt_crc32c(uint32_t crc, const void *data, size_t bytes);

/* The implementations behind it. */
typedef enum bt_crc32c_path {
    BT_CRC32C_TABLE,
    BT_CRC32C_INSTRUCTION,
} bt_crc32c_path;
/* As above by one of them, for tests: *crc goes in and comes out. false: not on this machine, and
 * *crc is left alone. */
bool bt_crc32c_by(bt_crc32c_path path, uint32_t *crc, const void *data, size_t bytes);

#endif
