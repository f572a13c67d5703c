// Reads and writes that are under way at once: io_uring, or threads where the kernel has none.

#ifndef CUSTOM_CALLS_DISK_IO_QUEUE_H_
#define CUSTOM_CALLS_DISK_IO_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace memplan {

struct IoRequest {
  int descriptor = -1;
  bool is_write = false;
  std::byte* memory = nullptr;
  uint32_t bytes = 0;
  uint64_t offset = 0;
};

struct IoCompletion {
  uint32_t tag = 0;
  int32_t result = 0;  // Bytes, or a negative errno.
};

// One thread uses it. After construction nothing is allocated.
class IoQueue {
 public:
  // At most `depth` requests are under way, tagged 0 to depth - 1.
  // `use_uring` false: threads, as where io_uring is missing or forbidden (containers do so).
  static std::unique_ptr<IoQueue> Make(uint32_t depth, bool use_uring = true);
  virtual ~IoQueue() = default;

  virtual const char* name() const = 0;
  // Begins a request. Its tag must not be under way.
  virtual void Submit(uint32_t tag, const IoRequest& request) = 0;
  // Waits until a request has ended. At least one must be under way.
  virtual IoCompletion Wait() = 0;
};

}  // namespace memplan

#endif  // CUSTOM_CALLS_DISK_IO_QUEUE_H_
