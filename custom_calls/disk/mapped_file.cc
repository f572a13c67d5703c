#include "mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace memplan {
namespace {

// The mapped files, by their first address. Never destroyed: XLA's threads outlive static objects.
struct Registry {
  struct Entry {
    std::shared_ptr<const File> file;
    std::map<uint64_t, Summed> summed;  // By offset.
  };
  std::shared_mutex mutex;
  std::map<const std::byte*, Entry, std::less<>> files;
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

std::unique_ptr<MappedFile> MappedFile::Map(const std::string& path,
                                            const std::vector<Summed>& summed,
                                            std::string* error) {
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
  Registry::Entry entry{mapped->file_, {}};
  for (const Summed& stretch : summed) entry.summed.emplace(stretch.offset, stretch);
  Registry& registry = TheRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  registry.files.emplace(mapped->data_, std::move(entry));
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
  const Registry::Entry& found = entry->second;
  if (offset >= found.file->size()) return std::nullopt;
  FilePlace place{found.file, offset, std::nullopt};
  const auto summed = found.summed.find(offset);
  if (summed != found.summed.end()) place.summed = summed->second;
  return place;
}

}  // namespace memplan
