#include "transfer.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <sstream>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "disk/file_engine.h"
#include "disk/mapped_file.h"

namespace memplan {
namespace {

namespace ffi = xla::ffi;
using Clock = std::chrono::steady_clock;

constexpr int64_t kEngines = 2;                // targets.py: TO_DEVICE and TO_HOST.
constexpr int64_t kFromDisk = 2;               // targets.py: FROM_DISK.
constexpr size_t kThrottledChunk = 256 << 10;  // Bytes; 0.26 ms at 1 GB/s.

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

uint64_t ThisThread() { return std::hash<std::thread::id>{}(std::this_thread::get_id()); }

// ---------------------------------------------------------------------------------- Trace

class Trace {
 public:
  // Where a transfer belongs in the trace. Generation 0: it is not traced.
  struct Ticket {
    int64_t generation = 0;
    int64_t sequence = 0;
  };

  bool Begin(size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (recording_) return false;
    recording_ = true;
    capacity_ = capacity;
    generation_++;
    next_sequence_ = 0;
    return true;
  }

  std::optional<TraceResult> End() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!recording_) return std::nullopt;
    recording_ = false;
    return std::exchange(result_, TraceResult{});
  }

  Ticket Admit() {
    // Without a trace a transfer costs this one load: no clock is read and no lock taken.
    if (!recording_.load(std::memory_order_relaxed)) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    if (!recording_) return {};
    return {generation_, next_sequence_++};
  }

  void Append(const Ticket& ticket, const TransferRecord& record) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!recording_ || ticket.generation != generation_) return;
    if (result_.records.size() == capacity_) {
      result_.dropped++;
      return;
    }
    result_.records.push_back(record);
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> recording_{false};  // Written under mutex_.
  size_t capacity_ = 0;
  int64_t generation_ = 0;
  int64_t next_sequence_ = 0;
  TraceResult result_;
};

// The singletons are never destroyed: engine threads and XLA's own outlive static destructors.
Trace& TheTrace() {
  static auto* trace = new Trace;
  return *trace;
}

// -------------------------------------------------------------------------------- Engines

struct Transfer : FileCopy {
  const std::byte* source;
  Trace::Ticket ticket;
  TransferRecord record;
  std::string error;  // Empty, or why the copy failed; written before `copied` is set.
  std::promise<void> copied;
  std::shared_ptr<Transfer> itself;  // While an engine that knows pointers only has it.

  bool traced() const { return ticket.generation != 0; }
  void Began() override {
    if (traced()) record.copy_began = Now();
  }
  void Ended(const std::string* failure) override {
    const std::shared_ptr<Transfer> until_return = std::move(itself);
    if (failure != nullptr) error = *failure;
    if (traced()) record.copy_ended = Now();
    copied.set_value();
  }
};

std::atomic<double> link_bandwidth{0};

// Copies a chunk at the moment a link of this rate would have delivered its last byte. Late
// reads of the source and late writes to the destination are what a slow link does, so a
// program that breaks the contract in targets.py breaks here as well.
void CopyAtRate(const Transfer& transfer, double bytes_per_second) {
  const Clock::time_point began = Clock::now();
  for (size_t offset = 0; offset < transfer.bytes; offset += kThrottledChunk) {
    const size_t size = std::min(kThrottledChunk, transfer.bytes - offset);
    const std::chrono::duration<double> due(static_cast<double>(offset + size) /
                                            bytes_per_second);
    std::this_thread::sleep_until(began + std::chrono::duration_cast<Clock::duration>(due));
    std::memcpy(transfer.memory + offset, transfer.source + offset, size);
  }
}

// A DMA engine: a queue and the one thread that serves it, first in, first out.
class Engine {
 public:
  Engine() { std::thread(&Engine::Serve, this).detach(); }

  void Enqueue(std::shared_ptr<Transfer> transfer) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(transfer));
    }
    queued_.notify_one();
  }

 private:
  [[noreturn]] void Serve() {
    while (true) Copy(*Next());
  }

  std::shared_ptr<Transfer> Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    queued_.wait(lock, [this] { return !queue_.empty(); });
    std::shared_ptr<Transfer> transfer = std::move(queue_.front());
    queue_.pop_front();
    return transfer;
  }

  static void Copy(Transfer& transfer) {
    transfer.Began();
    if (const double rate = link_bandwidth; rate > 0) {
      CopyAtRate(transfer, rate);
    } else {
      std::memcpy(transfer.memory, transfer.source, transfer.bytes);
    }
    transfer.Ended(nullptr);
  }

  std::mutex mutex_;
  std::condition_variable queued_;
  std::deque<std::shared_ptr<Transfer>> queue_;
};

Engine& EngineOf(int64_t index) {
  static auto* engines = new std::array<Engine, kEngines>;
  return (*engines)[index];
}

// The engine of what is read from files.
FileEngine& TheFileEngine() {
  static auto* engine = new FileEngine;
  return *engine;
}

// Pages that a program has not touched yet come from the kernel one by one, as a disk writes to
// them; large ones are that many fewer.
void AdviseHugePages(std::byte* memory, size_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (address + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (address + bytes) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

void Begin(std::shared_ptr<Transfer> transfer) {
  std::optional<FilePlace> place = FilePlaceOf(transfer->source);
  if (!place) {
    EngineOf(transfer->record.engine).Enqueue(std::move(transfer));
    return;
  }
  transfer->record.engine = kFromDisk;
  transfer->file = std::move(place->file);
  transfer->offset = place->offset;
  if (place->summed && place->summed->bytes == transfer->bytes) {
    transfer->checksum = place->summed->checksum;
  }
  AdviseHugePages(transfer->memory, transfer->bytes);
  FileCopy* const copy = transfer.get();
  transfer->itself = std::move(transfer);
  TheFileEngine().Enqueue(copy);
}

// ----------------------------------------------------------------------------- Rendezvous

// The transfers between their start and their done, by destination: while it is live no two
// buffers of the process share an address, whatever threads, devices, modules and loop
// iterations are under way. (A transfer_id is the same in all of those.)
class InFlight {
 public:
  void Put(std::shared_ptr<Transfer> transfer) {
    std::lock_guard<std::mutex> lock(mutex_);
    const void* destination = transfer->memory;
    by_destination_.insert_or_assign(destination, std::move(transfer));
  }

  // Null if there is none. Whoever takes a transfer is the only one to wait for it.
  std::shared_ptr<Transfer> Take(const void* destination) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto node = by_destination_.extract(destination);
    return node ? std::move(node.mapped()) : nullptr;
  }

  std::vector<std::shared_ptr<Transfer>> TakeAll(int64_t run, int32_t device) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Transfer>> taken;
    for (auto entry = by_destination_.begin(); entry != by_destination_.end();) {
      const TransferRecord& record = entry->second->record;
      if (record.run != run || record.device != device) {
        ++entry;
        continue;
      }
      taken.push_back(std::move(entry->second));
      entry = by_destination_.erase(entry);
    }
    return taken;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<Transfer>> by_destination_;
};

InFlight& TheInFlight() {
  static auto* in_flight = new InFlight;
  return *in_flight;
}

// ------------------------------------------------------------------------------- Handlers

// The error that ends a run. XLA frees the buffers of a run that fails, so the copies that use
// them have to end first: no done will wait for them any more.
template <typename... Parts>
ffi::Error Fail(ffi::RunId run, int32_t device, const Parts&... parts) {
  for (const auto& transfer : TheInFlight().TakeAll(run.run_id, device)) {
    transfer->copied.get_future().wait();
  }
  std::ostringstream sentence;
  (sentence << ... << parts);
  return ffi::Error::InvalidArgument(sentence.str());
}

constexpr char kNoTransferId[] = "attribute transfer_id (an int64) is missing";

// Read one by one, not bound: an error of XLA's own binding would not pass through Fail.
std::optional<int64_t> Int64(const ffi::Dictionary& attributes, std::string_view name) {
  if (!attributes.contains<int64_t>(name)) return std::nullopt;
  return *attributes.get<int64_t>(name);
}

bool NarrowerThanAByte(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::S1:
    case ffi::DataType::S2:
    case ffi::DataType::S4:
    case ffi::DataType::U1:
    case ffi::DataType::U2:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN:
      return true;
    default:
      return false;
  }
}

bool SameShape(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  const auto x = a.dimensions(), y = b.dimensions();
  return a.element_type() == b.element_type() &&
         std::equal(x.begin(), x.end(), y.begin(), y.end());
}

ffi::Error Start(ffi::AnyBuffer source, ffi::RemainingArgs /*fences*/,
                 ffi::Result<ffi::AnyBuffer> destination, ffi::Dictionary attributes,
                 ffi::RunId run, int32_t device) {
  const std::optional<int64_t> transfer_id = Int64(attributes, "transfer_id");
  const int64_t engine = Int64(attributes, "engine").value_or(0);
  if (!transfer_id) return Fail(run, device, "memplan.copy_start: ", kNoTransferId);
  const auto fail = [&](const auto&... parts) {
    return Fail(run, device, "memplan.copy_start: transfer ", *transfer_id, ": ", parts...);
  };
  if (engine < 0 || engine >= kEngines) {
    return fail("engine ", engine, " is not in [0, ", kEngines, ")");
  }
  if (!SameShape(source, *destination)) {
    return fail("source and destination differ in type or dimensions");
  }
  if (NarrowerThanAByte(source.element_type())) {
    return fail("element type ", source.element_type(),
                " is narrower than a byte; convert or bitcast it to 8 bits");
  }
  // Empty buffers may share an address, and there is nothing to wait for.
  if (source.size_bytes() == 0) return ffi::Error::Success();

  auto transfer = std::make_shared<Transfer>();
  transfer->source = static_cast<const std::byte*>(source.untyped_data());
  transfer->memory = static_cast<std::byte*>(destination->untyped_data());
  transfer->bytes = source.size_bytes();
  if (std::less<>()(transfer->source, transfer->memory + transfer->bytes) &&
      std::less<>()(transfer->memory, transfer->source + transfer->bytes)) {
    return fail("source and destination overlap");
  }
  if (const auto previous = TheInFlight().Take(transfer->memory)) {
    // Its copy may still be queued on the other engine, and must not land on top of this one.
    previous->copied.get_future().wait();
    // A transfer of another run is what a run that failed before its done left behind: XLA has
    // given the buffer to this one since. Within a run it is a schedule that lacks a done.
    if (previous->record.run == run.run_id) {
      return fail("transfer ", previous->record.transfer_id,
                  " into the same buffer has no memplan.copy_done yet");
    }
  }

  transfer->ticket = TheTrace().Admit();
  TransferRecord& record = transfer->record;
  record.transfer_id = *transfer_id;
  record.engine = engine;
  record.bytes = static_cast<int64_t>(transfer->bytes);
  record.run = run.run_id;
  record.device = device;
  if (transfer->traced()) {
    record.sequence = transfer->ticket.sequence;
    record.start_thread = ThisThread();
    record.start_issued = Now();
  }
  TheInFlight().Put(transfer);
  Begin(std::move(transfer));
  return ffi::Error::Success();
}

ffi::Error Done(ffi::AnyBuffer buffer, ffi::RemainingArgs source_and_fences,
                ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary attributes, ffi::RunId run,
                int32_t device) {
  const std::optional<int64_t> transfer_id = Int64(attributes, "transfer_id");
  if (!transfer_id) return Fail(run, device, "memplan.copy_done: ", kNoTransferId);
  const auto fail = [&](const auto&... parts) {
    return Fail(run, device, "memplan.copy_done: transfer ", *transfer_id, ": ", parts...);
  };
  if (buffer.size_bytes() == 0) return ffi::Error::Success();

  const std::shared_ptr<Transfer> transfer = TheInFlight().Take(buffer.untyped_data());
  if (transfer == nullptr) return fail("no transfer was started into operand 0");
  TransferRecord& record = transfer->record;
  if (transfer->traced()) record.done_called = Now();
  // Before any error: XLA frees the buffers of a run that fails, and the copy still uses them.
  transfer->copied.get_future().wait();
  if (buffer.untyped_data() != result->untyped_data()) {
    return fail("the result is not operand 0: output_operand_aliasing is missing");
  }
  if (record.transfer_id != *transfer_id) {
    return fail("operand 0 is the destination of transfer ", record.transfer_id);
  }
  if (!transfer->error.empty()) return fail(transfer->error);
  const ffi::ErrorOr<ffi::AnyBuffer> source = source_and_fences.get<ffi::AnyBuffer>(0);
  if (source.has_error() || source->untyped_data() != transfer->source) {
    return fail("operand 1 is not the buffer that memplan.copy_start read");
  }
  if (transfer->traced()) {
    record.done_thread = ThisThread();
    record.done_returned = Now();
    TheTrace().Append(transfer->ticket, record);
  }
  return ffi::Error::Success();
}

}  // namespace

bool BeginTrace(size_t capacity) { return TheTrace().Begin(capacity); }

std::optional<TraceResult> EndTrace() { return TheTrace().End(); }

void SetLinkBandwidth(double bytes_per_second) { link_bandwidth = bytes_per_second; }

XLA_FFI_Error* CopyStart(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attrs()
                             .Ctx<ffi::RunId>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .To(Start)
                             .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* CopyDone(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attrs()
                             .Ctx<ffi::RunId>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .To(Done)
                             .release();
  return handler->Call(call_frame);
}

}  // namespace memplan
