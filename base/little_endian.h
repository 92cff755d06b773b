/* Numbers in little-endian byte order at any alignment: how everything on a wire is written. */
#ifndef BT_BASE_LITTLE_ENDIAN_H
#define BT_BASE_LITTLE_ENDIAN_H

#include <stdint.h>
#include <string.h>

static inline uint16_t bt_load_le16(const void *at) {
    uint8_t b[2];
    memcpy(b, at, sizeof b);
    return (uint16_t)(b[0] | (uint16_t)(b[1] << 8));
}
static inline uint32_t bt_load_le32(const void *at) {
    uint8_t b[4];
    memcpy(b, at, sizeof b);
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}
static inline uint64_t bt_load_le64(const void *at) {
    const uint8_t *bytes = at;
    return (uint64_t)bt_load_le32(bytes) | (uint64_t)bt_load_le32(bytes + 4) << 32;
}
static inline float bt_load_le_float(const void *at) {
    const uint32_t bits = bt_load_le32(at);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void bt_store_le16(void *at, uint16_t value) {
    const uint8_t b[2] = {(uint8_t)value, (uint8_t)(value >> 8)};
    memcpy(at, b, sizeof b);
}
static inline void bt_store_le32(void *at, uint32_t value) {
    const uint8_t b[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                          (uint8_t)(value >> 24)};
    memcpy(at, b, sizeof b);
}
static inline void bt_store_le64(void *at, uint64_t value) {
    uint8_t *bytes = at;
    bt_store_le32(bytes, (uint32_t)value);
    bt_store_le32(bytes + 4, (uint32_t)(value >> 32));
}
static inline void bt_store_le_float(void *at, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bt_store_le32(at, bits);
}

#endif
