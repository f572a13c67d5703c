#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace memplan {
namespace {

// What most disks ask for where the kernel does not say (before Linux 6.1).
constexpr uint64_t kUsualAlignment = 4096;

// What Linux 6.1 and later say of direct I/O in statx(2). C libraries and headers older than that
// have neither the call nor the fields.
struct DirectAlignments {
  uint32_t memory = 0;
  uint32_t offset = 0;  // 0: direct I/O is not said to work.
};

DirectAlignments AlignmentsOf(int descriptor) {
  constexpr uint32_t kDioAlign = 0x2000;  // STATX_DIOALIGN.
  uint32_t found[64] = {};                // struct statx; stx_mask is its first word.
  constexpr size_t kMemory = 38, kOffset = 39;
  if (syscall(SYS_statx, descriptor, "", AT_EMPTY_PATH, kDioAlign, found) < 0) return {};
  if ((found[0] & kDioAlign) == 0) return {};
  return {found[kMemory], found[kOffset]};
}

}  // namespace

std::shared_ptr<const File> File::Open(const std::string& path, bool writable,
                                       std::string* error) {
  std::shared_ptr<File> file(new File);
  file->path_ = path;
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  struct stat status;
  file->buffered_ = open(path.c_str(), flags);
  if (file->buffered_ < 0 || fstat(file->buffered_, &status) < 0) {
    *error = path + ": cannot be opened (" + strerror(errno) + ")";
    return nullptr;
  }
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
    *error = path + ": is no regular file";
    return nullptr;
  }
  file->size_ = static_cast<uint64_t>(status.st_size);
  file->direct_ = open(path.c_str(), flags | O_DIRECT);
  if (file->direct_ < 0) {
    // Some file systems have no direct reads; through the page cache the bytes are the same.
    file->direct_ = dup(file->buffered_);
    return file;
  }
  file->offset_alignment_ = file->memory_alignment_ = kUsualAlignment;
  // The alignment that is asked of an address may be finer than that of an offset.
  const DirectAlignments said = AlignmentsOf(file->direct_);
  if (said.offset != 0 && said.memory != 0) {
    file->offset_alignment_ = said.offset;
    file->memory_alignment_ = said.memory;
  }
  if (file->offset_alignment_ > kMaxAlignment || file->memory_alignment_ > kMaxAlignment) {
    dup2(file->buffered_, file->direct_);
    file->offset_alignment_ = file->memory_alignment_ = 1;
  }
  return file;
}

File::~File() {
  if (direct_ >= 0) close(direct_);
  if (buffered_ >= 0) close(buffered_);
}

}  // namespace memplan
