// Copies between files and memory: one thread, and many requests under way at once.
//
// A copy goes past the page cache, straight into the memory that it is for, where the alignments
// of the file allow it: address and offset must be congruent. What lies on the edges (and all of
// a copy whose address is not congruent) goes through buffers of the engine's own, and so does all
// that is for a GPU's memory.

#ifndef CUSTOM_CALLS_DISK_FILE_ENGINE_H_
#define CUSTOM_CALLS_DISK_FILE_ENGINE_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "checksum.h"
#include "device.h"
#include "file.h"
#include "io_queue.h"

namespace memplan {

// One copy. It belongs to whoever enqueued it, and must live until it has `Ended`.
class FileCopy {
 public:
  std::shared_ptr<const File> file;
  uint64_t offset = 0;
  std::byte* memory = nullptr;
  uint64_t bytes = 0;  // At least 1.
  bool is_write = false;
  std::optional<uint32_t> checksum;  // CRC-32C that what is read has; nothing where none is known.

  virtual ~FileCopy() = default;
  // Both are called on the engine's thread, and must not block it.
  virtual void Began() {}
  // `error`: null, or a sentence that names the file and the byte at which the copy ended. Then
  // nothing is known of the bytes at the destination. The copy may be destroyed by this call.
  virtual void Ended(const std::string* error) = 0;

 private:
  friend class FileEngine;
  uint64_t submitted_ = 0;
  uint32_t under_way_ = 0;
  Checksum found_;
  std::string error_;
  FileCopy* next_ = nullptr;
};

struct FileEngineOptions {
  uint32_t depth = 16;          // Requests under way at once.
  uint32_t chunk = 1u << 20;    // Bytes of a request, a multiple of every alignment.
  bool use_uring = true;
  std::shared_ptr<Device> device;  // Whose memory the copies are for; null for the host's.
};

class FileEngine {
 public:
  explicit FileEngine(const FileEngineOptions& options = {});
  // Waits for the copies that were enqueued.
  ~FileEngine();

  // Copies begin in the order in which they are enqueued, and overlap: a later one may end first.
  void Enqueue(FileCopy* copy);
  const char* queue_name() const { return queue_->name(); }

 private:
  // A part of a copy, and the request under way for it.
  struct Part {
    FileCopy* copy = nullptr;  // Null: this tag is free.
    std::byte* memory = nullptr;
    uint64_t offset = 0;
    uint32_t bytes = 0;
    bool is_bounced = false;
    uint32_t skipped = 0;  // Bytes of a bounced request that stand before the part's own.
  };

  void Serve();
  bool TakeQueued(bool wait);
  bool SubmitNext();
  void SubmitPart(uint32_t tag);
  std::string Move(std::byte* to, const std::byte* from, uint64_t bytes) const;
  void Complete(const IoCompletion& completion);
  void EndIfDone(FileCopy* copy);
  Part NextPart(FileCopy* copy) const;
  std::byte* Buffer(uint32_t tag) const { return buffers_.get() + tag * buffer_bytes_; }

  const FileEngineOptions options_;
  std::unique_ptr<IoQueue> queue_;
  std::vector<Part> parts_;
  std::vector<uint32_t> free_;
  uint64_t buffer_bytes_;
  std::unique_ptr<std::byte[], void (*)(std::byte*)> buffers_;  // Touched by bounced parts only.

  // Copies with bytes that were not submitted yet, in order; the engine's thread only.
  FileCopy* first_ = nullptr;
  FileCopy* last_ = nullptr;

  std::mutex mutex_;
  std::condition_variable enqueued_;
  FileCopy* queued_first_ = nullptr;
  FileCopy* queued_last_ = nullptr;
  bool is_closed_ = false;
  std::thread thread_;
};

// Copies between memory and a file with an engine of its own, and waits. Empty, or what went wrong.
std::string CopyAndWait(const std::string& path, uint64_t offset, std::byte* memory,
                        uint64_t bytes, bool is_write, const FileEngineOptions& options);

}  // namespace memplan

#endif  // CUSTOM_CALLS_DISK_FILE_ENGINE_H_
