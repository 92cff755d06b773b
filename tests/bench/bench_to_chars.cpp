#include "tests/bench/bench_to_chars.h"

#include <charconv>
#include <cstddef>
#include <cstdint>

namespace {
constexpr std::ptrdiff_t ROOM = 40;

template <typename Wide, typename Narrow>
std::size_t write_list(char *out, const Narrow *values, std::size_t count) {
    char *end = out;
    for (std::size_t i = 0; i < count; i++) {
        end = std::to_chars(end, end + ROOM, static_cast<Wide>(values[i])).ptr;
        *end++ = ',';
    }
    return static_cast<std::size_t>(end - out) - (count > 0 ? 1 : 0);
}
} // namespace

std::size_t bench_to_chars_floats(char *out, const float *values, std::size_t count) {
    return write_list<double>(out, values, count);
}

std::size_t bench_to_chars_ints(char *out, const std::int32_t *values, std::size_t count) {
    return write_list<std::int32_t>(out, values, count);
}
