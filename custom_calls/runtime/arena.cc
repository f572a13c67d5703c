#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace memplan {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kDeviceAlignment = 256;  // Of cuMemAlloc (CUDA C++ Programming Guide, 5.3.2).

uint64_t RoundUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

}  // namespace

std::unique_ptr<Arena> Arena::Allocate(std::shared_ptr<Device> device, uint64_t bytes,
                                       uint64_t alignment, std::string* error) {
  std::unique_ptr<Arena> arena(new Arena);
  const uint64_t size = RoundUp(std::max<uint64_t>(bytes, 1), kPage);
  if (device != nullptr) {
    const uint64_t more = alignment > kDeviceAlignment ? alignment : 0;
    arena->allocation_ = device->Allocate(size + more, error);
    if (!error->empty()) return nullptr;
    arena->device_ = std::move(device);
    const auto begin = reinterpret_cast<uint64_t>(arena->allocation_);
    arena->data_ = reinterpret_cast<std::byte*>(RoundUp(begin, alignment));
    arena->allocated_bytes_ = size;
    return arena;
  }
  // Where large pages fit, they have to begin at their own size.
  const uint64_t begin_at = std::max(alignment, size >= kHugePage ? kHugePage : kPage);
  const uint64_t reserved = size + begin_at;
  void* const region =
      mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const auto fail = [&](const char* what) {
    *error = std::string(what) + " (" + strerror(errno) + ")";
    return nullptr;
  };
  if (region == MAP_FAILED) return fail("its addresses cannot be reserved");
  const auto address = reinterpret_cast<uint64_t>(region);
  const uint64_t begin = RoundUp(address, begin_at);
  if (begin > address) munmap(region, begin - address);
  const uint64_t end = begin + size;
  if (end < address + reserved) {
    munmap(reinterpret_cast<void*>(end), address + reserved - end);
  }
  arena->data_ = reinterpret_cast<std::byte*>(begin);
  arena->allocated_bytes_ = size;
  if (mprotect(arena->data_, size, PROT_READ | PROT_WRITE) < 0) return fail("it cannot be allocated");
  madvise(arena->data_, size, MADV_HUGEPAGE);
  if (madvise(arena->data_, size, MADV_POPULATE_WRITE) < 0) {
    if (errno != EINVAL) return fail("its pages cannot be allocated");
    // Before Linux 5.14: pages come as they are touched.
    for (uint64_t at = 0; at < size; at += kPage) arena->data_[at] = std::byte{0};
  }
  return arena;
}

Arena::~Arena() {
  if (device_ != nullptr) {
    device_->Free(allocation_);
  } else if (data_ != nullptr) {
    munmap(data_, allocated_bytes_);
  }
}

}  // namespace memplan
