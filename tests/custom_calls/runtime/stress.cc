// Replays a chain under a sanitizer: every stream that executes has a thread, which reads what its
// segments read and writes what they write, and some are cancelled in between.
//
//     stress CHAIN REPLAYS use_uring CANCEL_AT
//
// CANCEL_AT: after so many segments another thread cancels; 0 for none. Prints what became of it, and
// how often memory was allocated between the tenth of the segments and the last one, where it was
// compiled to count that.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "../../../custom_calls/runtime/runtime.h"

namespace {

std::atomic<uint64_t> allocations{0};

}  // namespace

#ifdef COUNT_ALLOCATIONS
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* malloc(size_t bytes) {
  allocations++;
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  allocations++;
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, size_t bytes) {
  allocations++;
  return __libc_realloc(memory, bytes);
}
}
#endif

int main(int, char** arguments) {
  std::ifstream file(arguments[1], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  memplan::chains::Chain chain;
  if (memplan::chains::Read(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(), &chain)) {
    return 2;
  }
  const uint64_t replays = std::strtoull(arguments[2], nullptr, 10);
  const uint64_t cancel_at = std::strtoull(arguments[4], nullptr, 10);
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte*> bound;
  for (const auto& space : chain.spaces) {
    if (space.kind != kMemplanChainSpaceKindBound) continue;
    memory.emplace_back(space.bytes);
    bound.push_back(memory.back().data());
  }
  std::vector<bool> executes(chain.streams.size());
  for (const auto& d : chain.descriptors) {
    if (d.op == kMemplanChainOpExecute) executes[d.stream] = true;
  }
  memplan::RuntimeOptions options;
  options.files.use_uring = std::atoi(arguments[3]) != 0;
  options.files.chunk = 1 << 14;
  options.files.depth = 4;
  options.log_records = 64;
  std::string error;
  const auto runtime = memplan::Runtime::Open(std::move(chain), bound, options, &error);
  if (runtime == nullptr) {
    std::fprintf(stderr, "%s\n", error.c_str());
    return 2;
  }
  std::atomic<uint64_t> entered{0};
  uint64_t first = 0, last = 0;
  const auto drive = [&](uint32_t stream) {
    const auto& of = runtime->chain();
    while (const auto k = runtime->Enter(stream)) {
      const uint64_t count = ++entered;
      if (count == 10) first = allocations;
      last = allocations;
      const auto& segment = of.segments[*k];
      uint8_t sum = 0;
      for (uint32_t n = 0; n < segment.arguments + segment.results; ++n) {
        const uint32_t slot = of.operands[segment.first_operand + n].slot;
        std::byte* const at = runtime->Address(slot);
        const uint64_t size = of.slots[slot].bytes;
        if (at == nullptr) continue;
        if (n < segment.arguments) {
          for (uint64_t b = 0; b < size; b += 64) sum += static_cast<uint8_t>(at[b]);
        } else {
          std::memset(at, sum, size);
        }
      }
      runtime->Leave(stream);
    }
  };
  const auto run = [&] {
    runtime->Start(replays);
    std::vector<std::thread> threads;
    for (uint32_t stream = 0; stream < executes.size(); ++stream) {
      if (executes[stream]) threads.emplace_back(drive, stream);
    }
    if (cancel_at != 0) {
      threads.emplace_back([&] {
        while (entered < cancel_at) std::this_thread::yield();
        runtime->Cancel("it was cancelled");
      });
    }
    for (auto& thread : threads) thread.join();
    return runtime->Wait();
  };
  const std::string problem = run();
  std::printf("%s, %zu records, %zu of %zu allocations\n",
              problem.empty() ? "replayed" : problem.c_str(), runtime->Log().size(),
              static_cast<size_t>(last - first), static_cast<size_t>(allocations));
  return 0;
}
