// The rules are those of tables.py, in the same order: a column is checked from its first row to
// its last before the next one is, so what a rule follows was checked before.

#include "reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>

namespace memplan::chains {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are read as they are");

using Found = std::optional<Problem>;

constexpr uint64_t kMost = uint64_t{1} << 63;
constexpr uint64_t kIndices = uint64_t{1} << 32;

std::string Number(uint64_t number) { return std::to_string(number); }

std::string RangeText(uint64_t low, uint64_t high) {
  if (high - low == 1) return Number(low);
  return low == 0 ? "below " + Number(high) : Number(low) + " to " + Number(high - 1);
}

std::string Sentence(const std::string& at, const std::string& expected, const std::string& found) {
  return at + ": expected " + expected + ", found " + found;
}

// Half-open.
struct Limits {
  uint64_t low, high;
};

// Of a field that not every record uses: the others have 0 there.
Limits Used(bool is_used, uint64_t low, uint64_t high) {
  return is_used ? Limits{low, high} : Limits{0, 1};
}

// The rows of a table, and where they began in the file.
template <typename Record>
struct Table {
  const char* name;
  const std::vector<Record>& rows;
  uint64_t base;

  Problem At(size_t row, size_t offset, const char* field, const std::string& expected,
             const std::string& found) const {
    const std::string at = std::string(name) + "[" + Number(row) + "]." + field;
    return {base + row * sizeof(Record) + offset, Sentence(at, expected, found)};
  }

  // `value` and `limits` of a row, by its index.
  template <typename Value, typename Of>
  Found Range(const char* field, size_t offset, Value&& value, Of&& limits) const {
    for (size_t row = 0; row < rows.size(); ++row) {
      const uint64_t found = value(rows[row]);
      const Limits in = limits(row);
      if (found < in.low || found >= in.high) {
        return At(row, offset, field, RangeText(in.low, in.high), Number(found));
      }
    }
    return {};
  }
};

// Returns, if a field of `table` is outside of the limits of its row, `i` and `r`.
#define IN_RANGE(table, Record, field, ...)                                                     \
  if (Found problem = (table).Range(                                                            \
          #field, offsetof(Record, field), [](const Record& r) -> uint64_t { return r.field; }, \
          [&]([[maybe_unused]] size_t i) -> Limits {                                            \
            [[maybe_unused]] const Record& r = (table).rows[i];                                 \
            return __VA_ARGS__;                                                                 \
          })) {                                                                                 \
    return problem;                                                                             \
  }

constexpr auto kCrcTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t value = tables[k - 1][byte];
      tables[k][byte] = value >> 8 ^ tables[0][value & 255];
    }
  }
  return tables;
}();

// How long a character is that begins here; 0 if none does, or NUL (Unicode 16, table 3-7).
size_t CharacterBytes(std::string_view text) {
  const auto at = [&](size_t k) { return k < text.size() ? static_cast<uint8_t>(text[k]) : 0u; };
  const auto follows = [&](size_t k, uint32_t low = 0x80, uint32_t high = 0xBF) {
    return at(k) >= low && at(k) <= high;
  };
  const uint32_t lead = at(0);
  if (lead < 0x80) return lead != 0;
  if (lead >= 0xC2 && lead <= 0xDF) return follows(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const bool is_good = follows(1, lead == 0xE0 ? 0xA0 : 0x80, lead == 0xED ? 0x9F : 0xBF);
    return is_good && follows(2) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const bool is_good = follows(1, lead == 0xF0 ? 0x90 : 0x80, lead == 0xF4 ? 0x8F : 0xBF);
    return is_good && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

// Reads one file.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size, Chain* chain)
      : data_(data), size_(size), chain_(*chain), header_(chain->header) {}

  Found Run() {
    if (Found problem = TakeHeader()) return problem;
    uint64_t offset = sizeof(Header);
    const auto take = [&](auto* rows, uint64_t count) {
      using Record = typename std::remove_pointer_t<decltype(rows)>::value_type;
      const uint64_t base = offset;
      rows->resize(count);
      if (count != 0) std::memcpy(rows->data(), data_ + base, count * sizeof(Record));
      offset += count * sizeof(Record);
      return base;
    };
    descriptors_.base = take(&chain_.descriptors, header_.descriptors);
    spaces_.base = take(&chain_.spaces, header_.spaces);
    slots_.base = take(&chain_.slots, header_.slots);
    streams_.base = take(&chain_.streams, header_.streams);
    segments_.base = take(&chain_.segments, header_.segments);
    operands_.base = take(&chain_.operands, header_.operands);
    strings_base_ = offset;
    chain_.strings.assign(reinterpret_cast<const char*>(data_) + offset, header_.strings);
    for (const auto rule : {&Reader::CheckSpaces, &Reader::CheckSlots, &Reader::CheckSegments,
                            &Reader::CheckDescriptors, &Reader::CheckExtentsOfStrings,
                            &Reader::CheckStrings}) {
      if (Found problem = (this->*rule)()) return problem;
    }
    return {};
  }

 private:
  // A text of a record.
  struct Item {
    const char* table;
    size_t row;
    const char* field;
    uint64_t at;  // Where its `_begin` is in the file; `_bytes` follows.
    uint64_t begin, bytes;
  };

  static Found HeaderIs(size_t offset, const char* field, uint64_t found, uint64_t expected) {
    if (found == expected) return {};
    const std::string at = std::string("header.") + field;
    return Problem{offset, Sentence(at, Number(expected), Number(found))};
  }

  Found TakeHeader() {
    if (size_ < sizeof(Header)) {
      return Problem{size_, "expected a header of " + Number(sizeof(Header)) + " bytes, found " +
                                Number(size_)};
    }
    std::memcpy(&header_, data_, sizeof(Header));
    if (std::memcmp(header_.magic, MEMPLAN_CHAIN_MAGIC, sizeof(header_.magic)) != 0) {
      return Problem{0, "header.magic: expected MPCHAIN, found other bytes"};
    }
#define HEADER_IS(field, expected)                                                              \
  if (Found problem = HeaderIs(offsetof(Header, field), #field, header_.field, expected)) {     \
    return problem;                                                                             \
  }
    HEADER_IS(version, kMemplanChainVersion);
    HEADER_IS(header_bytes, sizeof(Header));
    HEADER_IS(file_bytes, size_);
    HEADER_IS(crc32, FileCrc32(data_, size_));
    HEADER_IS(reserved, 0);
    HEADER_IS(reserved_end, 0);
    // Indices are of 32 bits; and so the sum below is of 64.
    uint64_t sum = sizeof(Header);
#define COUNT(field, bytes)                                                                     \
  if (header_.field >= kIndices) {                                                              \
    return Problem{offsetof(Header, field), Sentence("header." #field, RangeText(0, kIndices),  \
                                                     Number(header_.field))};                   \
  }                                                                                             \
  sum += header_.field * (bytes);
    COUNT(descriptors, sizeof(Descriptor));
    COUNT(spaces, sizeof(Space));
    COUNT(slots, sizeof(Slot));
    COUNT(streams, sizeof(Stream));
    COUNT(segments, sizeof(Segment));
    COUNT(operands, sizeof(Operand));
    COUNT(strings, 1);
    HEADER_IS(file_bytes, sum);
    return {};
  }

  Found CheckSpaces() {
    const auto is_arena = [](const Space& r) { return r.kind == kMemplanChainSpaceKindArena; };
    IN_RANGE(spaces_, Space, kind, {0, kMemplanChainSpaceKindBound + 1});
    IN_RANGE(spaces_, Space, writable, {is_arena(r), 2});
    IN_RANGE(spaces_, Space, bytes, {1, kMost});
    IN_RANGE(spaces_, Space, alignment, Used(is_arena(r), 1, kMost));
    for (size_t i = 0; i < chain_.spaces.size(); ++i) {
      const uint64_t alignment = chain_.spaces[i].alignment;
      if (is_arena(chain_.spaces[i]) && (alignment & (alignment - 1)) != 0) {
        return spaces_.At(i, offsetof(Space, alignment), "alignment", "a power of two",
                          Number(alignment));
      }
    }
    return {};
  }

  Found CheckSlots() {
    IN_RANGE(slots_, Slot, space, {0, chain_.spaces.size()});
    const auto room = [&](const Slot& r) -> uint64_t { return chain_.spaces[r.space].bytes; };
    IN_RANGE(slots_, Slot, bytes, {1, room(r) + 1});
    IN_RANGE(slots_, Slot, offset, {0, room(r) - r.bytes + 1});
    const auto is_read = [&](const Slot& r) {
      const Space& space = chain_.spaces[r.space];
      return space.kind == kMemplanChainSpaceKindFile && space.writable == 0;
    };
    IN_RANGE(slots_, Slot, checksum, Used(is_read(r), 0, kIndices));
    return {};
  }

  Found CheckSegments() {
    uint64_t used = 0;
    // Rows are asked in order; the first whose sum is beyond 32 bits is refused.
    IN_RANGE(segments_, Segment, first_operand, [&]() -> Limits {
      const uint64_t first = used;
      used += uint64_t{r.arguments} + r.results;
      return {first, first + 1};
    }());
    IN_RANGE(segments_, Segment, reserved, {0, 1});
    if (Found problem = HeaderIs(offsetof(Header, operands), "operands", header_.operands, used)) {
      return problem;
    }
    IN_RANGE(operands_, Operand, slot, {0, chain_.slots.size()});
    return {};
  }

  Found CheckDescriptors() {
    const auto is_copy = [](const Descriptor& r) { return r.op == kMemplanChainOpCopy; };
    const auto has_source = [&](const Descriptor& r) {
      return is_copy(r) || r.op == kMemplanChainOpRelease;
    };
    const auto bytes = [&](uint32_t slot) -> uint64_t { return chain_.slots[slot].bytes; };
    IN_RANGE(descriptors_, Descriptor, op, {0, kMemplanChainOpRelease + 1});
    IN_RANGE(descriptors_, Descriptor, stream, {0, chain_.streams.size()});
    IN_RANGE(descriptors_, Descriptor, wait_count, {0, kMemplanChainMaxWaits + 1});
    IN_RANGE(descriptors_, Descriptor, previous, {0, uint64_t{1} << r.wait_count});
    IN_RANGE(descriptors_, Descriptor, reserved, {0, 1});
    IN_RANGE(descriptors_, Descriptor, source, Used(has_source(r), 0, chain_.slots.size()));
    IN_RANGE(descriptors_, Descriptor, destination, Used(is_copy(r), 0, chain_.slots.size()));
    IN_RANGE(descriptors_, Descriptor, segment,
             Used(r.op == kMemplanChainOpExecute, 0, chain_.segments.size()));
    IN_RANGE(descriptors_, Descriptor, bytes,
             is_copy(r) ? Limits{1, std::min(bytes(r.source), bytes(r.destination)) + 1}
                        : Limits{0, 1});
    IN_RANGE(descriptors_, Descriptor, source_offset,
             is_copy(r) ? Limits{0, bytes(r.source) - r.bytes + 1} : Limits{0, 1});
    IN_RANGE(descriptors_, Descriptor, destination_offset,
             is_copy(r) ? Limits{0, bytes(r.destination) - r.bytes + 1} : Limits{0, 1});
    for (size_t k = 0; k < kMemplanChainMaxWaits; ++k) {
      const std::string field = "waits[" + Number(k) + "]";
      const Found problem = descriptors_.Range(
          field.c_str(), offsetof(Descriptor, waits) + k * sizeof(uint32_t),
          [&](const Descriptor& r) -> uint64_t { return r.waits[k]; },
          [&](size_t i) {
            const Descriptor& r = chain_.descriptors[i];
            const bool is_previous = r.previous >> k & 1;
            return Used(k < r.wait_count, 0, is_previous ? chain_.descriptors.size() : i);
          });
      if (problem) return problem;
    }
    return {};
  }

  void CollectStrings() {
#define TEXTS(table, Record, field)                                                             \
  items_.push_back({(table).name, i, #field,                                                    \
                    (table).base + i * sizeof(Record) + offsetof(Record, field##_begin),        \
                    (table).rows[i].field##_begin, (table).rows[i].field##_bytes});
    for (size_t i = 0; i < chain_.spaces.size(); ++i) {
      TEXTS(spaces_, Space, name);
      TEXTS(spaces_, Space, tier);
      TEXTS(spaces_, Space, path);
    }
    for (size_t i = 0; i < chain_.slots.size(); ++i) TEXTS(slots_, Slot, name);
    for (size_t i = 0; i < chain_.streams.size(); ++i) TEXTS(streams_, Stream, name);
    for (size_t i = 0; i < chain_.segments.size(); ++i) TEXTS(segments_, Segment, name);
  }

  static Problem AtText(const Item& item, bool is_begin, const std::string& expected,
                        const std::string& found) {
    const std::string at = std::string(item.table) + "[" + Number(item.row) + "]." + item.field +
                           (is_begin ? "_begin" : "_bytes");
    return {item.at + (is_begin ? 0 : sizeof(uint32_t)), Sentence(at, expected, found)};
  }

  Found CheckExtentsOfStrings() {
    CollectStrings();
    uint64_t begin = 0;
    for (const Item& item : items_) {
      if (item.begin != begin) return AtText(item, true, Number(begin), Number(item.begin));
      const uint64_t left = header_.strings - begin;
      if (item.bytes > left) {
        return AtText(item, false, RangeText(0, left + 1), Number(item.bytes));
      }
      begin += item.bytes;
    }
    return HeaderIs(offsetof(Header, strings), "strings", header_.strings, begin);
  }

  Found CheckStrings() {
    const auto is_file = [](const Space& r) { return r.kind == kMemplanChainSpaceKindFile; };
    IN_RANGE(spaces_, Space, name_bytes, {1, kIndices});
    IN_RANGE(spaces_, Space, tier_bytes, {1, kIndices});
    IN_RANGE(spaces_, Space, path_bytes, Used(is_file(r), 1, kIndices));
    IN_RANGE(slots_, Slot, name_bytes, {1, kIndices});
    IN_RANGE(streams_, Stream, name_bytes, {1, kIndices});
    IN_RANGE(segments_, Segment, name_bytes, {1, kIndices});
    const std::string_view strings = chain_.strings;
    for (const Item& item : items_) {
      const std::string_view text = strings.substr(item.begin, item.bytes);
      for (size_t at = 0; at < text.size();) {
        const size_t bytes = CharacterBytes(text.substr(at));
        if (bytes == 0) {
          const uint64_t row = item.begin + at;
          return Problem{strings_base_ + row,
                         Sentence("strings[" + Number(row) + "]", "UTF-8 without NUL",
                                  "byte " + Number(static_cast<uint8_t>(text[at])))};
        }
        at += bytes;
      }
    }
    // Names are of a table; the path of a file, by which it is opened, is too.
    std::unordered_map<std::string_view, size_t> names, paths;
    const char* table = "";
    for (const Item& item : items_) {
      if (item.table != table) names.clear();
      table = item.table;
      if (item.field[0] == 't' || item.bytes == 0) continue;
      auto& firsts = item.field[0] == 'p' ? paths : names;
      const auto [first, is_new] =
          firsts.try_emplace(strings.substr(item.begin, item.bytes), item.row);
      if (!is_new) {
        return AtText(item, true,
                      std::string("another ") + item.field + " than that of " + item.table + "[" +
                          Number(first->second) + "]",
                      "the same");
      }
    }
    return {};
  }

  const uint8_t* data_;
  const uint64_t size_;
  Chain& chain_;
  Header& header_;
  Table<Descriptor> descriptors_{"descriptors", chain_.descriptors, 0};
  Table<Space> spaces_{"spaces", chain_.spaces, 0};
  Table<Slot> slots_{"slots", chain_.slots, 0};
  Table<Stream> streams_{"streams", chain_.streams, 0};
  Table<Segment> segments_{"segments", chain_.segments, 0};
  Table<Operand> operands_{"operands", chain_.operands, 0};
  uint64_t strings_base_ = 0;
  std::vector<Item> items_;
};

}  // namespace

uint32_t Crc32(uint32_t value, const uint8_t* data, size_t size) {
  value = ~value;
  for (; size >= 8; size -= 8, data += 8) {
    uint32_t low, high;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= value;
    value = kCrcTables[7][low & 255] ^ kCrcTables[6][low >> 8 & 255] ^
            kCrcTables[5][low >> 16 & 255] ^ kCrcTables[4][low >> 24] ^
            kCrcTables[3][high & 255] ^ kCrcTables[2][high >> 8 & 255] ^
            kCrcTables[1][high >> 16 & 255] ^ kCrcTables[0][high >> 24];
  }
  for (; size != 0; --size) value = value >> 8 ^ kCrcTables[0][(value ^ *data++) & 255];
  return ~value;
}

uint32_t FileCrc32(const uint8_t* data, size_t size) {
  constexpr uint8_t kZeros[4] = {};
  constexpr size_t kAt = offsetof(Header, crc32), kAfter = kAt + sizeof(kZeros);
  const uint32_t value = Crc32(Crc32(0, data, kAt), kZeros, sizeof(kZeros));
  return Crc32(value, data + kAfter, size - kAfter);
}

std::optional<Problem> Read(const uint8_t* data, size_t size, Chain* chain) {
  return Reader(data, size, chain).Run();
}

}  // namespace memplan::chains
