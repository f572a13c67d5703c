// Replays a descriptor chain: a thread a stream, arenas and files that are there before anything
// runs, and nothing to decide.
//
//     Open           arenas are allocated, files opened, threads started and parked
//     Start(n)       n more replays; streams go on as far as their waits let them
//     Enter, Leave   the caller's thread is the stream that executes segments
//     Step           the same, for a program that holds all segments of a replay
//     Wait           until the replays that were started have ended
//
// A file's copies of one stream overlap where they touch different bytes: one that could begin when
// the one before it had ended may begin when that has begun, for all that it waits for has happened
// by then; and they complete in order. After Open nothing is allocated.
//
// What goes wrong ends everything: whoever waits is told, and nothing is replayed any more.

#ifndef CUSTOM_CALLS_RUNTIME_RUNTIME_H_
#define CUSTOM_CALLS_RUNTIME_RUNTIME_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../../hlo_passes/chains/reader.h"
#include "../disk/file_engine.h"
#include "arena.h"
#include "counter.h"

namespace memplan {

// What one descriptor did in one replay. Times are nanoseconds of std::chrono::steady_clock.
struct LogRecord {
  uint64_t replay;
  uint64_t descriptor;
  int64_t issued;  // It was looked at: the one before it on its stream had been issued.
  int64_t began;   // What it waits for had happened.
  int64_t ended;
};

struct RuntimeOptions {
  FileEngineOptions files;
  uint64_t steps = 1;        // Steps of a program in a replay; see `Runtime::Step`.
  uint64_t log_records = 0;  // Of each stream, the last ones are kept; 0 for none, no clock is read.
  int gpu = -1;              // Whose memory the arenas are; below 0 for the host's.
};

class Runtime {
 public:
  // `bound`: an address for each bound space, in the order of the spaces. On failure nothing, and
  // `error` is a sentence. The chain is one that `chains::Read` took.
  static std::unique_ptr<Runtime> Open(chains::Chain chain, std::vector<std::byte*> bound,
                                       const RuntimeOptions& options, std::string* error);
  ~Runtime();  // Cancels what runs.
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Other addresses for the bound spaces. Nothing may be running.
  void Bind(std::vector<std::byte*> bound);
  void Start(uint64_t replays);
  // Empty, or what went wrong.
  std::string Wait();
  void Cancel(const std::string& why);
  bool is_running() const;
  std::string failure() const;  // Empty, or what went wrong so far.

  // The next segment of a stream that executes, when all that it waits for has happened; nothing
  // when it does not come any more (`Wait` says why, or all replays that were started are over).
  std::optional<uint32_t> Enter(uint32_t stream);
  // The segment that was entered last has ended.
  void Leave(uint32_t stream);

  // The `step`-th segment of a step of the program begins, the one before has ended; one past the
  // last ends that. On the stream of the chain's first segment. Empty, or what is wrong.
  std::string Step(uint64_t step);
  // The same for a program that runs on a stream of XLA's on a GPU: the segment before has ended when
  // that stream comes to here. The caller waits for what the next one reads, and then lets it begin
  // behind that. (Nothing on the stream waits for the runtime: CUDA loads kernels when they are first
  // launched, and that may wait for all that runs.)
  std::string StepOn(CudaStream stream, uint64_t step);
  // The runtime in whose arenas an address lies; null for none.
  static Runtime* Of(const std::byte* address);

  const chains::Chain& chain() const { return chain_; }
  std::byte* Address(uint32_t slot) const;
  uint64_t allocated_bytes() const;
  // Of all streams, the oldest of each first.
  std::vector<LogRecord> Log() const;

 private:
  struct Stream;
  struct Operation;

  Runtime(chains::Chain chain, const RuntimeOptions& options);
  bool Prepare(std::string* error);
  void Serve(Stream* stream);
  bool Issue(Stream* stream);
  std::string Check(uint64_t step) const;
  std::string EnterNext(uint64_t step);
  bool WaitForAll(const Stream& stream, uint64_t position);
  void Complete(Stream* stream, Operation* operation);
  void Fail(const std::string& sentence);
  std::string Describe(uint32_t descriptor, uint64_t replay) const;
  std::string Name(uint32_t begin, uint32_t bytes) const {
    return std::string(chain_.Text(begin, bytes));
  }

  const chains::Chain chain_;
  const RuntimeOptions options_;
  std::shared_ptr<Device> device_;                   // Of the arenas; null for the host.
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<std::byte*> bases_;                    // Of each space; null for files.
  std::vector<std::shared_ptr<const File>> files_;   // Of each space; null for memory.
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<uint64_t> places_;                     // Of each descriptor, on its stream.
  Counter goal_;                                     // Replays that were started.
  uint32_t compute_ = 0;                             // The stream that `Step` drives.
  uint64_t segments_ = 0;                            // Of a step of the program.
  uint64_t entered_ = 0;                             // Of this step.
  std::atomic<bool> has_failed_{false};
  mutable std::mutex mutex_;
  std::string failure_;
};

}  // namespace memplan

#endif  // CUSTOM_CALLS_RUNTIME_RUNTIME_H_
