// Memory of whole pages that is there before anything runs, of the host or of a GPU.

#ifndef CUSTOM_CALLS_RUNTIME_ARENA_H_
#define CUSTOM_CALLS_RUNTIME_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "../disk/device.h"

namespace memplan {

class Arena {
 public:
  // `device`: null for the host's memory. `alignment`: of the first byte, a power of two. Every page
  // is there when this returns. On failure nothing, and `error` is a sentence.
  static std::unique_ptr<Arena> Allocate(std::shared_ptr<Device> device, uint64_t bytes,
                                         uint64_t alignment, std::string* error);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  uint64_t allocated_bytes() const { return allocated_bytes_; }  // Whole pages.

 private:
  Arena() = default;

  std::shared_ptr<Device> device_;
  std::byte* allocation_ = nullptr;  // Of the device.
  std::byte* data_ = nullptr;
  uint64_t allocated_bytes_ = 0;
};

}  // namespace memplan

#endif  // CUSTOM_CALLS_RUNTIME_ARENA_H_
