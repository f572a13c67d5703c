// Reads changed chains: ./fuzz COUNT SEED FILE... prints how many inputs were taken and refused,
// and how many fields were ever the problem. Built with sanitizers, which end it at the first
// byte that is read out of range.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "hlo_passes/chains/reader.h"

namespace memplan::chains {
namespace {

using Bytes = std::vector<uint8_t>;

// Follows everything that a reader of a good chain may follow.
uint64_t Follow(const Chain& chain) {
  uint64_t sum = 0;
  const auto text = [&](uint32_t begin, uint32_t bytes) {
    if (uint64_t{begin} + bytes > chain.strings.size()) std::abort();
    for (const char c : chain.Text(begin, bytes)) sum += static_cast<uint8_t>(c);
  };
  const auto within = [&](uint32_t slot, uint64_t offset, uint64_t bytes) {
    const Slot& s = chain.slots.at(slot);
    const uint64_t end = s.offset + offset + bytes;
    if (offset + bytes > s.bytes || end > chain.spaces.at(s.space).bytes) std::abort();
  };
  for (const Space& s : chain.spaces) {
    text(s.name_begin, s.name_bytes);
    text(s.tier_begin, s.tier_bytes);
    text(s.path_begin, s.path_bytes);
  }
  for (uint32_t i = 0; i < chain.slots.size(); ++i) {
    text(chain.slots[i].name_begin, chain.slots[i].name_bytes);
    within(i, 0, chain.slots[i].bytes);
  }
  for (const Stream& s : chain.streams) text(s.name_begin, s.name_bytes);
  for (const Segment& s : chain.segments) {
    text(s.name_begin, s.name_bytes);
    for (uint64_t k = 0; k < uint64_t{s.arguments} + s.results; ++k) {
      within(chain.operands.at(s.first_operand + k).slot, 0, 1);
    }
  }
  for (size_t i = 0; i < chain.descriptors.size(); ++i) {
    const Descriptor& d = chain.descriptors[i];
    sum += chain.streams.at(d.stream).name_bytes;
    if (d.op == kMemplanChainOpCopy) {
      within(d.source, d.source_offset, d.bytes);
      within(d.destination, d.destination_offset, d.bytes);
    } else if (d.op == kMemplanChainOpExecute) {
      sum += chain.segments.at(d.segment).results;
    } else if (d.op == kMemplanChainOpRelease) {
      within(d.source, 0, 1);
    }
    for (size_t k = 0; k < d.wait_count; ++k) {
      const size_t limit = d.previous >> k & 1 ? chain.descriptors.size() : i;
      if (d.waits[k] >= limit) std::abort();
    }
  }
  return sum;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  Bytes Changed(Bytes bytes) {
    for (uint64_t edits = 1 + Below(3); edits != 0 && !bytes.empty(); --edits) Change(&bytes);
    const bool has_header = bytes.size() >= sizeof(Header);
    if (has_header && Below(8) != 0) Put(&bytes, offsetof(Header, file_bytes), bytes.size(), 8);
    if (has_header && Below(16) != 0) {
      const uint32_t crc = FileCrc32(bytes.data(), bytes.size());
      Put(&bytes, offsetof(Header, crc32), crc, 4);
    }
    bytes.shrink_to_fit();  // So that one byte too far is seen.
    return bytes;
  }

  uint64_t Below(uint64_t limit) { return random_() % limit; }

 private:
  static void Put(Bytes* bytes, size_t at, uint64_t value, size_t size) {
    std::memcpy(bytes->data() + at, &value, std::min(size, bytes->size() - at));
  }

  void Change(Bytes* bytes) {
    static constexpr uint64_t kValues[] = {0, 1, 2, 255, 1u << 31, ~0u, 1ull << 32, 1ull << 63, ~0ull};
    const size_t at = Below(bytes->size());
    switch (Below(16)) {
      case 0:
        bytes->resize(at);
        break;
      case 1:
        bytes->insert(bytes->end(), 1 + Below(80), static_cast<uint8_t>(Below(256)));
        break;
      case 2:
        (*bytes)[at] ^= 1 << Below(8);
        break;
      case 3: {  // A piece again, somewhere else.
        const size_t from = Below(bytes->size());
        const size_t size = std::min(Below(64), bytes->size() - std::max(at, from));
        std::memmove(bytes->data() + at, bytes->data() + from, size);
        break;
      }
      default: {
        const size_t size = size_t{1} << Below(4);
        uint64_t value = 0;
        const size_t aligned = at / size * size;
        std::memcpy(&value, bytes->data() + aligned, std::min(size, bytes->size() - aligned));
        const uint64_t kind = Below(4);
        if (kind == 0) value = kValues[Below(std::size(kValues))];
        if (kind == 1) value = Below(16);
        if (kind == 2) value += Below(5) - 2;
        if (kind == 3) value = random_();
        Put(bytes, aligned, value, size);
      }
    }
  }

  std::mt19937_64 random_;
};

// A problem without its numbers: which field of which table.
std::string Field(const std::string& text) {
  std::string field;
  for (const char c : text.substr(0, text.find(':'))) {
    if (c < '0' || c > '9') field += c;
  }
  return field;
}

int Main(int argc, char** argv) {
  std::vector<Bytes> files;
  for (int k = 3; k < argc; ++k) {
    std::ifstream file(argv[k], std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  Mutator mutator(std::strtoull(argv[2], nullptr, 10));
  uint64_t taken = 0, refused = 0, sum = 0;
  std::set<std::string> fields;
  for (uint64_t left = std::strtoull(argv[1], nullptr, 10); left != 0; --left) {
    const Bytes bytes = mutator.Changed(files[mutator.Below(files.size())]);
    Chain chain;
    if (const auto problem = Read(bytes.data(), bytes.size(), &chain)) {
      if (problem->offset > bytes.size()) std::abort();
      fields.insert(Field(problem->text));
      ++refused;
    } else {
      sum += Follow(chain);
      ++taken;
    }
  }
  std::printf("taken %llu refused %llu fields %zu sum %llu\n",
              static_cast<unsigned long long>(taken), static_cast<unsigned long long>(refused),
              fields.size(), static_cast<unsigned long long>(sum));
  return 0;
}

}  // namespace
}  // namespace memplan::chains

int main(int argc, char** argv) { return memplan::chains::Main(argc, argv); }
