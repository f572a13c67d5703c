#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace memplan {
namespace {

// Bytes are polynomials over two elements, and their remainder is linear in them: that of A followed by
// B is that of A times x^(8 |B|), plus that of B. A remainder's highest bit is its coefficient of x^0.
constexpr uint32_t kPolynomial = 0x82F63B78;
constexpr uint32_t kOne = 0x80000000;

constexpr uint32_t TimesX(uint32_t a) { return a >> 1 ^ ((a & 1) != 0 ? kPolynomial : 0); }

constexpr uint32_t Times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = TimesX(b);
  }
  return product;
}

// A remainder when so many zero bytes come after it.
uint32_t Followed(uint32_t state, uint64_t bytes) {
  uint32_t power = kOne >> 8;  // x^8, x^16, x^32, ...
  for (; bytes != 0; bytes >>= 1) {
    if ((bytes & 1) != 0) state = Times(state, power);
    power = Times(power, power);
  }
  return state;
}

constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = TimesX(state);
    tables[0][byte] = state;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t state = tables[k - 1][byte];
      tables[k][byte] = state >> 8 ^ tables[0][state & 255];
    }
  }
  return tables;
}();

// Eight bytes at a time (Kounavis and Berry, 2008).
uint32_t ByTables(const std::byte* data, uint64_t bytes) {
  uint32_t state = 0;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (int k = 0; k < 8; ++k) state ^= kTables[7 - k][word >> 8 * k & 255];
  }
  for (; bytes != 0; --bytes, ++data) {
    state = state >> 8 ^ kTables[0][(state ^ static_cast<uint32_t>(*data)) & 255];
  }
  return state;
}

#if defined(__x86_64__)
// The instruction takes three cycles, and one can begin in each: so three stretches at once.
__attribute__((target("sse4.2,crc32"))) uint32_t ByInstruction(const std::byte* data, uint64_t bytes) {
  const uint64_t stretch = bytes / 24 * 8;
  uint64_t states[3] = {};
  const auto word = [](const std::byte* at) {
    uint64_t value;
    std::memcpy(&value, at, 8);
    return value;
  };
  for (uint64_t at = 0; at < stretch; at += 8) {
    states[0] = _mm_crc32_u64(states[0], word(data + at));
    states[1] = _mm_crc32_u64(states[1], word(data + at + stretch));
    states[2] = _mm_crc32_u64(states[2], word(data + at + 2 * stretch));
  }
  uint32_t state = Followed(static_cast<uint32_t>(states[0]), 2 * stretch) ^
                   Followed(static_cast<uint32_t>(states[1]), stretch) ^
                   static_cast<uint32_t>(states[2]);
  for (uint64_t at = 3 * stretch; at < bytes; ++at) {
    state = _mm_crc32_u8(state, static_cast<uint8_t>(data[at]));
  }
  return state;
}
#endif

uint32_t RemainderOf(const std::byte* data, uint64_t bytes) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ByInstruction(data, bytes);
#endif
  return ByTables(data, bytes);
}

}  // namespace

void Checksum::Add(const std::byte* part, uint64_t bytes, uint64_t after) {
  state_ ^= Followed(RemainderOf(part, bytes), after);
}

uint32_t Checksum::Of(uint64_t bytes) const { return ~(state_ ^ Followed(~0u, bytes)); }

}  // namespace memplan
