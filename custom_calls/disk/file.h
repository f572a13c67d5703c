// A file that is read and written past the page cache, where its file system can.

#ifndef CUSTOM_CALLS_DISK_FILE_H_
#define CUSTOM_CALLS_DISK_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

namespace memplan {

class File {
 public:
  // Opens `path`; on failure nothing, and `error` is a sentence.
  static std::shared_ptr<const File> Open(const std::string& path, bool writable,
                                          std::string* error);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }  // Bytes, when it was opened.
  // For transfers whose offset, bytes and address are multiples of the alignments.
  int direct() const { return direct_; }
  // For any others, through the page cache.
  int buffered() const { return buffered_; }
  static constexpr uint64_t kMaxAlignment = 4096;
  // Of offsets and bytes, and of addresses: powers of two up to kMaxAlignment; 1 where nothing is
  // asked.
  uint64_t offset_alignment() const { return offset_alignment_; }
  uint64_t memory_alignment() const { return memory_alignment_; }

 private:
  File() = default;

  std::string path_;
  uint64_t size_ = 0;
  int direct_ = -1;
  int buffered_ = -1;
  uint64_t offset_alignment_ = 1;
  uint64_t memory_alignment_ = 1;
};

}  // namespace memplan

#endif  // CUSTOM_CALLS_DISK_FILE_H_
