#include "operations.hpp"

#include <cstring>

namespace host_runtime {

bool Copy::overlaps() const {
    const auto target_start = reinterpret_cast<uintptr_t>(target), source_start = reinterpret_cast<uintptr_t>(source);
    if (target_start >= source_start + source_span() || source_start >= target_start + target_span()) return false;
    if (rows == 1) return true;
    // The target's rows that can touch a row of the source are the last one that begins at or before it and the next one.
    for (size_t row = 0; row < rows; ++row) {
        const uintptr_t first = source_start + row * source_pitch;
        const size_t before = first < target_start ? 0 : (first - target_start) / target_pitch;
        for (size_t other = before; other < rows && other < before + 2; ++other) {
            const uintptr_t written = target_start + other * target_pitch;
            if (written < first + width && first < written + width) return true;
        }
    }
    return false;
}

void Copy::move() const {
    // memmove, since an overlap has been reported by now and must not end the process.
    for (size_t row = 0; row < rows; ++row)
        std::memmove(target + row * target_pitch, source + row * source_pitch, width);
}

void Copy::corrupt() const { target[rows / 2 * target_pitch + width / 2] ^= 0x10; }

size_t Comparison::first_difference() const {
    size_t row = 0;
    while (row < rows && std::memcmp(target + row * target_pitch, source + row * source_pitch, width) == 0) ++row;
    return row;
}

}  // namespace host_runtime
