// CRC-32C (Castagnoli; RFC 3720, appendix B.4) of bytes that come in parts, in any order.

#ifndef CUSTOM_CALLS_DISK_CHECKSUM_H_
#define CUSTOM_CALLS_DISK_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace memplan {

class Checksum {
 public:
  // A part, and how many bytes come after it.
  void Add(const std::byte* part, uint64_t bytes, uint64_t after);
  // Of all `bytes`, when each was added once.
  uint32_t Of(uint64_t bytes) const;

 private:
  uint32_t state_ = 0;
};

}  // namespace memplan

#endif  // CUSTOM_CALLS_DISK_CHECKSUM_H_
