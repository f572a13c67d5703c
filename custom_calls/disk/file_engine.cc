#include "file_engine.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <new>
#include <utility>

namespace memplan {
namespace {

uint64_t RoundDown(uint64_t value, uint64_t alignment) { return value & ~(alignment - 1); }

std::byte* AllocatePages(uint64_t bytes) {
  void* const memory = std::aligned_alloc(File::kMaxAlignment, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

void FreePages(std::byte* memory) { std::free(memory); }

}  // namespace

FileEngine::FileEngine(const FileEngineOptions& options)
    : options_(options),
      queue_(IoQueue::Make(options.depth, options.use_uring)),
      parts_(options.depth),
      // A bounced part begins and ends anywhere in a block.
      buffer_bytes_(options.chunk + File::kMaxAlignment),
      buffers_(AllocatePages(options.depth * buffer_bytes_), FreePages) {
  for (uint32_t tag = 0; tag < options.depth; ++tag) free_.push_back(tag);
  if (options_.device != nullptr) {
    options_.device->Pin(buffers_.get(), options_.depth * buffer_bytes_);
  }
  thread_ = std::thread(&FileEngine::Serve, this);
}

FileEngine::~FileEngine() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
  }
  enqueued_.notify_one();
  thread_.join();
  if (options_.device != nullptr) options_.device->Unpin(buffers_.get());
}

void FileEngine::Enqueue(FileCopy* copy) {
  copy->submitted_ = copy->under_way_ = 0;
  copy->found_ = {};
  copy->error_.clear();
  copy->next_ = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    (queued_last_ == nullptr ? queued_first_ : queued_last_->next_) = copy;
    queued_last_ = copy;
  }
  enqueued_.notify_one();
}

void FileEngine::Serve() {
  while (true) {
    const bool is_idle = first_ == nullptr && free_.size() == options_.depth;
    if (!TakeQueued(/*wait=*/is_idle)) return;
    while (!free_.empty() && SubmitNext()) {
    }
    if (free_.size() < options_.depth) Complete(queue_->Wait());
  }
}

// Whether there is, or may be, anything left to do.
bool FileEngine::TakeQueued(bool wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (wait) {
    enqueued_.wait(lock, [this] { return is_closed_ || queued_first_ != nullptr; });
    if (queued_first_ == nullptr) return false;
  }
  if (queued_first_ != nullptr) {
    (last_ == nullptr ? first_ : last_->next_) = queued_first_;
    last_ = queued_last_;
    queued_first_ = queued_last_ = nullptr;
  }
  return true;
}

// Submits the next part of the first copy that has one left; whether there was one.
bool FileEngine::SubmitNext() {
  FileCopy* const copy = first_;
  if (copy == nullptr) return false;
  if (copy->submitted_ == 0) copy->Began();
  const Part part = NextPart(copy);
  copy->submitted_ += part.bytes;
  copy->under_way_++;
  if (copy->submitted_ == copy->bytes) {
    first_ = copy->next_;
    if (first_ == nullptr) last_ = nullptr;
  }
  const uint32_t tag = free_.back();
  free_.pop_back();
  parts_[tag] = part;
  SubmitPart(tag);
  return true;
}

FileEngine::Part FileEngine::NextPart(FileCopy* copy) const {
  const uint64_t block = copy->file->offset_alignment();
  const uint64_t left = copy->bytes - copy->submitted_;
  Part part;
  part.copy = copy;
  part.offset = copy->offset + copy->submitted_;
  part.memory = copy->memory + copy->submitted_;
  const auto address = reinterpret_cast<uint64_t>(part.memory);
  const uint64_t memory_mask = copy->file->memory_alignment() - 1;
  const uint64_t before = part.offset & (block - 1);  // Bytes of its block before the part.
  if (options_.device != nullptr) {
    part.is_bounced = true;
    part.skipped = static_cast<uint32_t>(before);
    part.bytes = static_cast<uint32_t>(std::min<uint64_t>(left, options_.chunk - before));
    return part;
  }
  if (before == 0 && (address & memory_mask) == 0 && left >= block) {
    part.bytes = static_cast<uint32_t>(std::min<uint64_t>(options_.chunk, RoundDown(left, block)));
    return part;
  }
  part.is_bounced = true;
  part.skipped = static_cast<uint32_t>(before);
  // Only up to the next block if what comes after it can go directly.
  const uint64_t to_block = block - before;
  const bool is_congruent = ((address + to_block) & memory_mask) == 0;
  const uint64_t most = is_congruent ? to_block : options_.chunk;
  part.bytes = static_cast<uint32_t>(std::min(left, most));
  return part;
}

// Empty, or what went wrong.
std::string FileEngine::Move(std::byte* to, const std::byte* from, uint64_t bytes) const {
  if (options_.device != nullptr) return options_.device->Copy(to, from, bytes);
  std::memcpy(to, from, bytes);
  return {};
}

void FileEngine::SubmitPart(uint32_t tag) {
  const Part& part = parts_[tag];
  const File& file = *part.copy->file;
  IoRequest request;
  request.is_write = part.copy->is_write;
  request.descriptor = file.direct();
  request.memory = part.memory;
  request.offset = part.offset;
  request.bytes = part.bytes;
  if (part.is_bounced && request.is_write) {
    // The rest of a block is not this copy's: the kernel puts the bytes into the block.
    const bool is_whole = ((part.offset | part.bytes) & (file.offset_alignment() - 1)) == 0;
    if (!is_whole || options_.device == nullptr) request.descriptor = file.buffered();
    if (options_.device != nullptr) {
      request.memory = Buffer(tag);
      std::string& error = part.copy->error_;
      std::string problem = Move(request.memory, part.memory, part.bytes);
      if (error.empty()) error = std::move(problem);
      if (!error.empty()) request.descriptor = -1;  // Ends like any other that fails.
    }
  } else if (part.is_bounced) {
    const uint64_t block = file.offset_alignment();
    request.memory = Buffer(tag);
    request.offset = part.offset - part.skipped;
    request.bytes =
        static_cast<uint32_t>(RoundDown(part.skipped + part.bytes + block - 1, block));
  }
  queue_->Submit(tag, request);
}

void FileEngine::Complete(const IoCompletion& completion) {
  Part& part = parts_[completion.tag];
  FileCopy* const copy = part.copy;
  const char* const verb = copy->is_write ? "writing" : "reading";
  const auto fail = [&](const std::string& problem) {
    if (!copy->error_.empty()) return;  // The first is the cause.
    copy->error_ = std::string(verb) + " " + copy->file->path() + " at byte " +
                   std::to_string(part.offset) + ": " + problem;
  };
  const bool is_read_bounced = part.is_bounced && !copy->is_write;
  // Bytes of the part itself that were transferred.
  int64_t done = completion.result;
  if (is_read_bounced) done = std::min<int64_t>(done - part.skipped, part.bytes);
  if (completion.result == -EINTR || completion.result == -EAGAIN) {
    SubmitPart(completion.tag);
    return;
  }
  if (completion.result < 0) {
    fail(strerror(-completion.result));
  } else if (done <= 0) {
    fail(copy->is_write ? "nothing was written"
                        : "the file ends there, " + std::to_string(part.bytes) +
                              " bytes before what was asked for");
  } else {
    std::string problem;
    const auto bytes = static_cast<uint64_t>(done);
    const std::byte* const read = is_read_bounced ? Buffer(completion.tag) + part.skipped : part.memory;
    if (is_read_bounced) problem = Move(part.memory, read, bytes);
    if (copy->checksum && !copy->is_write) {
      copy->found_.Add(read, bytes, copy->offset + copy->bytes - part.offset - bytes);
    }
    if (!problem.empty()) {
      fail(problem);
    } else if (done < part.bytes) {
      // A short one goes on where it ended; at the end of the file the next one has nothing.
      part.memory += done;
      part.offset += static_cast<uint64_t>(done);
      part.bytes -= static_cast<uint32_t>(done);
      const uint64_t block = copy->file->offset_alignment();
      if (part.is_bounced || (part.offset & (block - 1)) != 0) {
        part.is_bounced = true;
        part.skipped = static_cast<uint32_t>(part.offset & (block - 1));
      }
      SubmitPart(completion.tag);
      return;
    }
  }
  part.copy = nullptr;
  free_.push_back(completion.tag);
  copy->under_way_--;
  EndIfDone(copy);
}

void FileEngine::EndIfDone(FileCopy* copy) {
  if (!copy->error_.empty() && copy->submitted_ < copy->bytes) {
    // What was not asked for yet is not asked for any more; the copy is the first of those.
    copy->submitted_ = copy->bytes;
    first_ = copy->next_;
    if (first_ == nullptr) last_ = nullptr;
  }
  if (copy->submitted_ < copy->bytes || copy->under_way_ > 0) return;
  std::string error = std::move(copy->error_);
  if (error.empty() && copy->checksum && !copy->is_write) {
    const uint32_t found = copy->found_.Of(copy->bytes);
    if (found != *copy->checksum) {
      char sums[64];
      std::snprintf(sums, sizeof(sums), "0x%08x, expected 0x%08x", found, *copy->checksum);
      error = "reading " + copy->file->path() + ", bytes " + std::to_string(copy->offset) + " to " +
              std::to_string(copy->offset + copy->bytes) + ": their checksum is " + sums +
              ": they are not what was written";
    }
  }
  copy->Ended(error.empty() ? nullptr : &error);
}

std::string CopyAndWait(const std::string& path, uint64_t offset, std::byte* memory,
                        uint64_t bytes, bool is_write, const FileEngineOptions& options) {
  struct Copy : FileCopy {
    std::promise<std::string> ended;
    void Ended(const std::string* error) override {
      ended.set_value(error == nullptr ? std::string() : *error);
    }
  };
  std::string error;
  Copy copy;
  copy.file = File::Open(path, is_write, &error);
  if (copy.file == nullptr || bytes == 0) return error;
  copy.offset = offset;
  copy.memory = memory;
  copy.bytes = bytes;
  copy.is_write = is_write;
  FileEngine engine(options);
  engine.Enqueue(&copy);
  return copy.ended.get_future().get();
}

}  // namespace memplan
