// Replays a chain under a sanitizer: every stream that executes has a thread, which reads what its
// segments read and writes what they write, and some are cancelled in between.
//
//     stress CHAIN REPLAYS use_uring CANCEL_AT
//
// CANCEL_AT: a replay during which another thread cancels; 0 for none. Prints what became of it.

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
  const auto drive = [&](uint32_t stream) {
    const auto& of = runtime->chain();
    while (const auto k = runtime->Enter(stream)) {
      entered++;
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
  std::printf("%s, %zu records\n", problem.empty() ? "replayed" : problem.c_str(),
              runtime->Log().size());
  return 0;
}
