// Memory of a GPU, and copies between it and the host's, by CUDA's driver. That is looked for when a
// device is opened: nothing of CUDA is needed to build this, and nothing is loaded without a GPU.

#ifndef CUSTOM_CALLS_DISK_DEVICE_H_
#define CUSTOM_CALLS_DISK_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace memplan {

// CUDA's names for these, so that callers need none of its headers.
using CudaStream = void*;
using CudaHostFunction = void (*)(void*);

// One GPU's primary context, which XLA uses as well, and a stream for copies in it. Copies wait for
// each other; whoever wants them at once opens two.
class Device {
 public:
  // The GPU of that number among those that the process sees. On failure nothing, and `error` is a
  // sentence.
  static std::shared_ptr<Device> Open(int ordinal, std::string* error);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  std::byte* Allocate(uint64_t bytes, std::string* error);
  void Free(std::byte* memory);
  // Host memory that copies go straight from and to, until it is freed; where that cannot be had they
  // take longer, and it is no error.
  void Pin(std::byte* memory, uint64_t bytes);
  void Unpin(std::byte* memory);
  // Between any two of its memory and the host's. Empty when the bytes are there, or what went wrong.
  std::string Copy(std::byte* to, const std::byte* from, uint64_t bytes);

  // Until nothing runs on the GPU any more that this process has begun.
  void Wait();
  // Calls a function when what is on a stream of XLA's has run, and before what comes after that.
  // Empty, or what went wrong.
  static std::string Launch(CudaStream stream, CudaHostFunction function, void* data);

 private:
  Device() = default;

  int handle_ = 0;
  void* context_ = nullptr;
  CudaStream stream_ = nullptr;
};

}  // namespace memplan

#endif  // CUSTOM_CALLS_DISK_DEVICE_H_
