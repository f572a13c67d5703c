// Files whose bytes have addresses, so that arrays can be made of them, and which are read past
// those addresses: a transfer out of one reads the file itself.

#ifndef CUSTOM_CALLS_DISK_MAPPED_FILE_H_
#define CUSTOM_CALLS_DISK_MAPPED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "file.h"

namespace memplan {

// What is known of a stretch of a file.
struct Summed {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t checksum = 0;  // CRC-32C.
};

class MappedFile {
 public:
  // Maps all of a file, read-only. On failure nothing, and `error` is a sentence.
  static std::unique_ptr<MappedFile> Map(const std::string& path, const std::vector<Summed>& summed,
                                         std::string* error);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Whoever touches them has the kernel read pages on demand.
  const std::byte* data() const { return data_; }
  uint64_t size() const { return file_->size(); }

 private:
  MappedFile() = default;

  std::shared_ptr<const File> file_;
  const std::byte* data_ = nullptr;
};

struct FilePlace {
  std::shared_ptr<const File> file;
  uint64_t offset = 0;
  std::optional<Summed> summed;  // The stretch that begins there, where one does.
};

// Where the bytes at an address stand in a file; nothing if they are in none that is mapped here.
std::optional<FilePlace> FilePlaceOf(const std::byte* address);

}  // namespace memplan

#endif  // CUSTOM_CALLS_DISK_MAPPED_FILE_H_
