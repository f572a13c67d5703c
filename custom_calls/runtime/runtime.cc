#include "runtime.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <shared_mutex>
#include <utility>

namespace memplan {
namespace {

// Copies of a file that one stream has under way at once. The second one keeps the disk's queue
// full while the first one's last requests end; more gain nothing.
constexpr uint64_t kAhead = 3;

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Extent {
  uint32_t space;
  uint64_t begin;
  uint64_t end;
};

bool Overlap(const Extent& a, const Extent& b) {
  return a.space == b.space && a.begin < b.end && b.begin < a.end;
}

// Arenas by their first address. Never destroyed: XLA's threads outlive static objects.
struct Registry {
  struct Entry {
    uint64_t bytes;
    Runtime* runtime;
  };
  std::shared_mutex mutex;
  std::map<const std::byte*, Entry, std::less<>> arenas;
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

struct Runtime::Operation final : FileCopy {
  Runtime* runtime = nullptr;
  Stream* stream = nullptr;
  bool is_done = false;
  LogRecord record{};

  void Ended(const std::string* error) override {
    if (error == nullptr) {
      runtime->Complete(stream, this);
    } else {
      const auto descriptor = static_cast<uint32_t>(record.descriptor);
      runtime->Fail(runtime->Describe(descriptor, record.replay) + ": " + *error);
    }
  }
};

struct Runtime::Stream {
  std::vector<uint32_t> descriptors;
  // Of each: how many of those just before it touch other bytes than it does, and may be under way
  // when it begins.
  std::vector<uint64_t> ahead;
  bool executes = false;
  std::unique_ptr<FileEngine> files;
  std::shared_ptr<Device> device;  // Null where the arenas are the host's memory.
  std::thread thread;

  // Positions count from the first descriptor of the first replay, and go on.
  uint64_t length() const { return descriptors.size(); }
  std::mutex mutex;  // For what follows, but for `completed`, which any thread reads.
  uint64_t next = 0;
  uint64_t retired = 0;
  std::array<Operation, kAhead + 1> under_way;
  std::vector<LogRecord> log;
  uint64_t logged = 0;
  Counter completed;
};

Runtime::Runtime(chains::Chain chain, const RuntimeOptions& options)
    : chain_(std::move(chain)), options_(options) {}

std::unique_ptr<Runtime> Runtime::Open(chains::Chain chain, std::vector<std::byte*> bound,
                                       const RuntimeOptions& options, std::string* error) {
  std::unique_ptr<Runtime> runtime(new Runtime(std::move(chain), options));
  if (!runtime->Prepare(error)) return nullptr;
  runtime->Bind(std::move(bound));
  {
    std::unique_lock<std::shared_mutex> lock(TheRegistry().mutex);
    for (const auto& arena : runtime->arenas_) {
      TheRegistry().arenas[arena->data()] = {arena->allocated_bytes(), runtime.get()};
    }
  }
  for (const auto& stream : runtime->streams_) {
    if (!stream->executes && stream->length() > 0) {
      stream->thread = std::thread(&Runtime::Serve, runtime.get(), stream.get());
    }
  }
  return runtime;
}

bool Runtime::Prepare(std::string* error) {
  const auto fail = [error](const std::string& sentence) {
    *error = sentence;
    return false;
  };
  std::string problem;
  const auto open_device = [&] {
    return options_.gpu < 0 ? nullptr : Device::Open(options_.gpu, &problem);
  };
  device_ = open_device();
  if (!problem.empty()) return fail("GPU " + std::to_string(options_.gpu) + ": " + problem);
  for (const chains::Space& space : chain_.spaces) {
    std::byte* base = nullptr;
    std::shared_ptr<const File> file;
    const std::string name = Name(space.name_begin, space.name_bytes);
    if (space.kind == kMemplanChainSpaceKindArena) {
      std::unique_ptr<Arena> arena =
          Arena::Allocate(device_, space.bytes, space.alignment, &problem);
      if (arena == nullptr) {
        return fail("arena " + name + " of " + std::to_string(space.bytes) + " bytes: " + problem);
      }
      base = arena->data();
      arenas_.push_back(std::move(arena));
    } else if (space.kind == kMemplanChainSpaceKindFile) {
      file = File::Open(Name(space.path_begin, space.path_bytes), space.writable != 0, &problem);
      if (file == nullptr) return fail("file " + name + ": " + problem);
      if (file->size() < space.bytes) {
        return fail("file " + name + ": " + file->path() + " has " + std::to_string(file->size()) +
                    " bytes, the chain needs " + std::to_string(space.bytes));
      }
    }
    bases_.push_back(base);
    files_.push_back(std::move(file));
  }
  for (size_t k = 0; k < chain_.streams.size(); ++k) {
    streams_.push_back(std::make_unique<Stream>());
  }
  std::vector<std::array<Extent, 2>> touched;  // What copies read and write.
  for (uint32_t d = 0; d < chain_.descriptors.size(); ++d) {
    const chains::Descriptor& descriptor = chain_.descriptors[d];
    Stream& stream = *streams_[descriptor.stream];
    places_.push_back(stream.length());
    stream.descriptors.push_back(d);
    stream.executes |= descriptor.op == kMemplanChainOpExecute;
    std::array<Extent, 2> extents{};
    if (descriptor.op == kMemplanChainOpCopy) {
      const chains::Slot& from = chain_.slots[descriptor.source];
      const chains::Slot& to = chain_.slots[descriptor.destination];
      const uint64_t read = from.offset + descriptor.source_offset;
      const uint64_t write = to.offset + descriptor.destination_offset;
      extents = {Extent{from.space, read, read + descriptor.bytes},
                 Extent{to.space, write, write + descriptor.bytes}};
      if (files_[from.space] != nullptr && files_[to.space] != nullptr) {
        return fail(Describe(d, 0) + ": from file to file; copy through an arena");
      }
      const bool is_file = files_[from.space] != nullptr || files_[to.space] != nullptr;
      if (stream.device == nullptr) stream.device = open_device();
      if (!problem.empty()) return fail("GPU " + std::to_string(options_.gpu) + ": " + problem);
      if (is_file && stream.files == nullptr) {
        FileEngineOptions options = options_.files;
        options.device = stream.device;
        stream.files = std::make_unique<FileEngine>(options);
      }
    }
    touched.push_back(extents);
  }
  uint64_t executions = 0;
  for (const chains::Descriptor& d : chain_.descriptors) {
    if (d.op != kMemplanChainOpExecute) continue;
    if (executions == 0) compute_ = d.stream;
    executions += d.stream == compute_ ? 1 : 0;
  }
  segments_ = executions / std::max<uint64_t>(options_.steps, 1);
  if (segments_ * options_.steps != executions) {
    return fail(std::to_string(executions) + " segments are not " +
                std::to_string(options_.steps) + " steps of equally many");
  }
  for (const auto& stream : streams_) {
    stream->log.resize(options_.log_records);
    for (Operation& operation : stream->under_way) {
      operation.runtime = this;
      operation.stream = stream.get();
    }
    const uint64_t length = stream->length();
    for (uint64_t place = 0; place < length; ++place) {
      const auto& [read, written] = touched[stream->descriptors[place]];
      uint64_t ahead = 0;
      while (ahead < std::min(kAhead, length - 1)) {
        const uint64_t before = (place + length - ahead - 1) % length;
        const auto& [other_read, other_written] = touched[stream->descriptors[before]];
        if (Overlap(read, other_written) || Overlap(written, other_read) ||
            Overlap(written, other_written)) {
          break;
        }
        ahead++;
      }
      stream->ahead.push_back(ahead);
    }
  }
  return true;
}

Runtime::~Runtime() {
  Cancel("the runtime is closed");
  {
    std::unique_lock<std::shared_mutex> lock(TheRegistry().mutex);
    for (const auto& arena : arenas_) TheRegistry().arenas.erase(arena->data());
  }
  for (const auto& stream : streams_) {
    if (stream->thread.joinable()) stream->thread.join();
  }
  // A program that failed may have left on its stream what completes segments here.
  if (device_ != nullptr) device_->Wait();
  // Copies that are under way complete streams.
  for (const auto& stream : streams_) stream->files.reset();
}

void Runtime::Bind(std::vector<std::byte*> bound) {
  size_t next = 0;
  for (size_t k = 0; k < chain_.spaces.size(); ++k) {
    if (chain_.spaces[k].kind == kMemplanChainSpaceKindBound) bases_[k] = bound.at(next++);
  }
}

void Runtime::Start(uint64_t replays) {
  std::lock_guard<std::mutex> lock(mutex_);
  goal_.Set(goal_.value() + replays);
}

std::string Runtime::Wait() {
  const uint64_t goal = goal_.value();
  for (const auto& stream : streams_) {
    if (!stream->completed.WaitFor(goal * stream->length())) break;
  }
  return failure();
}

std::string Runtime::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Runtime::Cancel(const std::string& why) { Fail(why); }

bool Runtime::is_running() const {
  if (has_failed_) return false;
  return std::any_of(streams_.begin(), streams_.end(), [this](const auto& stream) {
    return stream->completed.value() < goal_.value() * stream->length();
  });
}

// ------------------------------------------------------------------------------ One stream

void Runtime::Serve(Stream* stream) {
  while (goal_.WaitFor(stream->next / stream->length() + 1)) {
    if (!Issue(stream)) return;
  }
}

bool Runtime::WaitForAll(const Stream& stream, uint64_t position) {
  const uint64_t replay = position / stream.length();
  const chains::Descriptor& descriptor =
      chain_.descriptors[stream.descriptors[position % stream.length()]];
  for (uint32_t k = 0; k < descriptor.wait_count; ++k) {
    const bool is_previous = (descriptor.previous >> k & 1) != 0;
    if (is_previous && replay == 0) continue;
    const uint32_t awaited = descriptor.waits[k];
    Stream& other = *streams_[chain_.descriptors[awaited].stream];
    const uint64_t begin = (replay - (is_previous ? 1 : 0)) * other.length();
    if (!other.completed.WaitFor(begin + places_[awaited] + 1)) return false;
  }
  return true;
}

// Begins what is next on a stream, when its waits hold; false if nothing is replayed any more.
// A segment is over for this one when it has begun: `Leave` completes it.
bool Runtime::Issue(Stream* stream) {
  const uint64_t position = stream->next;
  const uint64_t place = position % stream->length();
  const uint32_t d = stream->descriptors[place];
  const chains::Descriptor& descriptor = chain_.descriptors[d];
  const bool is_logged = options_.log_records > 0;
  const int64_t issued = is_logged ? Now() : 0;
  if (!WaitForAll(*stream, position)) return false;

  std::byte* source = nullptr;
  std::byte* destination = nullptr;
  const std::shared_ptr<const File>* file = nullptr;
  uint64_t file_offset = 0;
  if (descriptor.op == kMemplanChainOpCopy) {
    const chains::Slot& from = chain_.slots[descriptor.source];
    const chains::Slot& to = chain_.slots[descriptor.destination];
    const uint64_t read = from.offset + descriptor.source_offset;
    const uint64_t write = to.offset + descriptor.destination_offset;
    if (files_[from.space] != nullptr) {
      file = &files_[from.space];
      file_offset = read;
    } else {
      source = bases_[from.space] + read;
    }
    if (files_[to.space] != nullptr) {
      file = &files_[to.space];
      file_offset = write;
    } else {
      destination = bases_[to.space] + write;
    }
  }
  uint64_t ahead = file != nullptr ? stream->ahead[place] : 0;
  // A GPU runs one segment after the other, however early they are launched.
  if (descriptor.op == kMemplanChainOpExecute && options_.gpu >= 0) ahead = kAhead;
  if (!stream->completed.WaitFor(position - std::min(position, ahead))) return false;
  if (has_failed_) return false;

  Operation* operation;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    operation = &stream->under_way[position % stream->under_way.size()];
    operation->is_done = false;
    operation->record = {position / stream->length(), d, issued, is_logged ? Now() : 0, 0};
    stream->next++;
  }
  if (descriptor.op == kMemplanChainOpExecute) return true;
  if (file != nullptr && descriptor.bytes > 0) {
    operation->file = *file;
    operation->offset = file_offset;
    operation->is_write = source != nullptr;
    operation->memory = source != nullptr ? source : destination;
    operation->bytes = descriptor.bytes;
    const chains::Slot& from = chain_.slots[descriptor.source];
    operation->checksum.reset();
    if (from.checksum != 0 && descriptor.bytes == from.bytes) operation->checksum = from.checksum;
    stream->files->Enqueue(operation);
    return true;
  }
  if (source != nullptr && destination != nullptr) {
    if (stream->device == nullptr) {
      std::memcpy(destination, source, descriptor.bytes);
    } else if (const std::string problem =
                   stream->device->Copy(destination, source, descriptor.bytes);
               !problem.empty()) {
      Fail(Describe(d, position / stream->length()) + ": " + problem);
      return false;
    }
  }
  Complete(stream, operation);
  return true;
}

void Runtime::Complete(Stream* stream, Operation* operation) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  if (options_.log_records > 0) operation->record.ended = Now();
  operation->is_done = true;
  while (stream->retired < stream->next) {
    Operation& oldest = stream->under_way[stream->retired % stream->under_way.size()];
    if (!oldest.is_done) break;
    oldest.is_done = false;
    if (!stream->log.empty()) stream->log[stream->logged++ % stream->log.size()] = oldest.record;
    stream->retired++;
  }
  stream->completed.Set(stream->retired);
}

std::optional<uint32_t> Runtime::Enter(uint32_t index) {
  Stream* const stream = streams_[index].get();
  while (!has_failed_ && stream->next < goal_.value() * stream->length()) {
    const uint32_t d = stream->descriptors[stream->next % stream->length()];
    if (!Issue(stream)) return std::nullopt;
    const chains::Descriptor& descriptor = chain_.descriptors[d];
    if (descriptor.op == kMemplanChainOpExecute) return descriptor.segment;
  }
  return std::nullopt;
}

void Runtime::Leave(uint32_t index) {
  Stream* const stream = streams_[index].get();
  const uint64_t position = stream->next - 1;
  Complete(stream, &stream->under_way[position % stream->under_way.size()]);
  // What comes before the next segment has nobody else to issue it, and others may wait for it.
  while (stream->next < goal_.value() * stream->length()) {
    const uint32_t d = stream->descriptors[stream->next % stream->length()];
    if (chain_.descriptors[d].op == kMemplanChainOpExecute || !Issue(stream)) return;
  }
}

std::string Runtime::Step(uint64_t step) {
  if (std::string problem = Check(step); !problem.empty()) return problem;
  if (step > 0) Leave(compute_);
  return EnterNext(step);
}

std::string Runtime::StepOn(CudaStream stream, uint64_t step) {
  if (std::string problem = Check(step); !problem.empty()) return problem;
  if (step > 0) {
    Stream& compute = *streams_[compute_];
    Operation* const segment = &compute.under_way[(compute.next - 1) % compute.under_way.size()];
    const auto complete = [](void* data) {
      auto* const operation = static_cast<Operation*>(data);
      operation->runtime->Complete(operation->stream, operation);
    };
    if (std::string problem = Device::Launch(stream, complete, segment); !problem.empty()) {
      Fail(problem);
      return problem;
    }
  }
  return EnterNext(step);
}

std::string Runtime::Check(uint64_t step) const {
  if (step == entered_ && step <= segments_) return {};
  return "step " + std::to_string(step) + " of a program, expected step " +
         std::to_string(entered_) + " of " + std::to_string(segments_) +
         ": two calls of it are under way at once, or one has failed";
}

std::string Runtime::EnterNext(uint64_t step) {
  entered_ = step == segments_ ? 0 : step + 1;
  if (step == segments_ || Enter(compute_)) return {};
  const std::string cause = failure();
  return cause.empty() ? "no replay was started" : cause;
}

Runtime* Runtime::Of(const std::byte* address) {
  std::shared_lock<std::shared_mutex> lock(TheRegistry().mutex);
  auto entry = TheRegistry().arenas.upper_bound(address);
  if (entry == TheRegistry().arenas.begin()) return nullptr;
  --entry;
  const auto offset = static_cast<uint64_t>(address - entry->first);
  return offset < entry->second.bytes ? entry->second.runtime : nullptr;
}

// ---------------------------------------------------------------------------------- Rest

void Runtime::Fail(const std::string& sentence) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_failed_) return;  // The first is the cause.
    failure_ = sentence;
    has_failed_ = true;
  }
  goal_.Close();
  for (const auto& stream : streams_) stream->completed.Close();
}

std::string Runtime::Describe(uint32_t d, uint64_t replay) const {
  const chains::Descriptor& descriptor = chain_.descriptors[d];
  std::string what = "descriptor " + std::to_string(d);
  if (descriptor.op == kMemplanChainOpCopy) {
    const chains::Slot& from = chain_.slots[descriptor.source];
    const chains::Slot& to = chain_.slots[descriptor.destination];
    what += " (copy " + Name(from.name_begin, from.name_bytes) + " to " +
            Name(to.name_begin, to.name_bytes) + ")";
  }
  const chains::Stream& stream = chain_.streams[descriptor.stream];
  return what + " of stream " + Name(stream.name_begin, stream.name_bytes) + ", replay " +
         std::to_string(replay);
}

std::byte* Runtime::Address(uint32_t slot) const {
  std::byte* const base = bases_[chain_.slots[slot].space];
  return base == nullptr ? nullptr : base + chain_.slots[slot].offset;
}

uint64_t Runtime::allocated_bytes() const {
  uint64_t total = 0;
  for (const auto& arena : arenas_) total += arena->allocated_bytes();
  return total;
}

std::vector<LogRecord> Runtime::Log() const {
  std::vector<LogRecord> records;
  for (const auto& stream : streams_) {
    std::lock_guard<std::mutex> lock(stream->mutex);
    const std::vector<LogRecord>& log = stream->log;
    const uint64_t size = log.size();
    const uint64_t first = stream->logged < size ? 0 : stream->logged;
    for (uint64_t k = 0; k < std::min(stream->logged, size); ++k) {
      records.push_back(log[(first + k) % size]);
    }
  }
  return records;
}

}  // namespace memplan
