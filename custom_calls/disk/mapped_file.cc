#include "mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace memplan {
namespace {

// The mapped files, by their first address. Never destroyed: XLA's threads outlive static objects.
struct Registry {
  std::shared_mutex mutex;
  std::map<const std::byte*, std::shared_ptr<const File>, std::less<>> files;
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

std::unique_ptr<MappedFile> MappedFile::Map(const std::string& path, std::string* error) {
  std::unique_ptr<MappedFile> mapped(new MappedFile);
  mapped->file_ = File::Open(path, /*writable=*/false, error);
  if (mapped->file_ == nullptr) return nullptr;
  if (mapped->size() == 0) {
    *error = path + ": is empty";
    return nullptr;
  }
  void* const data =
      mmap(nullptr, mapped->size(), PROT_READ, MAP_SHARED, mapped->file_->buffered(), 0);
  if (data == MAP_FAILED) {
    *error = path + ": cannot be mapped (" + strerror(errno) + ")";
    return nullptr;
  }
  mapped->data_ = static_cast<const std::byte*>(data);
  Registry& registry = TheRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  registry.files.emplace(mapped->data_, mapped->file_);
  return mapped;
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  Registry& registry = TheRegistry();
  {
    std::unique_lock<std::shared_mutex> lock(registry.mutex);
    registry.files.erase(data_);
  }
  munmap(const_cast<std::byte*>(data_), size());
}

std::optional<FilePlace> FilePlaceOf(const std::byte* address) {
  Registry& registry = TheRegistry();
  std::shared_lock<std::shared_mutex> lock(registry.mutex);
  auto entry = registry.files.upper_bound(address);
  if (entry == registry.files.begin()) return std::nullopt;
  --entry;
  const auto offset = static_cast<uint64_t>(address - entry->first);
  if (offset >= entry->second->size()) return std::nullopt;
  return FilePlace{entry->second, offset};
}

}  // namespace memplan
