// Reads a descriptor chain from bytes, as hlo_passes/chains/binary.py does. Without Python.

#ifndef MEMPLAN_HLO_PASSES_CHAINS_READER_H_
#define MEMPLAN_HLO_PASSES_CHAINS_READER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chain_layout.h"

namespace memplan::chains {

using Header = MemplanChainHeader;
using Descriptor = MemplanChainDescriptor;
using Space = MemplanChainSpace;
using Slot = MemplanChainSlot;
using Stream = MemplanChainStream;
using Segment = MemplanChainSegment;
using Operand = MemplanChainOperand;

// The records, as chain_layout.h has them. Of what Read took, every index, range and text is good.
struct Chain {
  Header header;
  std::vector<Descriptor> descriptors;
  std::vector<Space> spaces;
  std::vector<Slot> slots;
  std::vector<Stream> streams;
  std::vector<Segment> segments;
  std::vector<Operand> operands;
  std::string strings;

  std::string_view Text(uint32_t begin, uint32_t bytes) const {
    return std::string_view(strings).substr(begin, bytes);
  }
};

// The first thing that is wrong, and at which byte.
struct Problem {
  uint64_t offset;
  std::string text;
};

// Reads `size` bytes, at any alignment, of which nothing is trusted. O(size).
std::optional<Problem> Read(const uint8_t* data, size_t size, Chain* chain);

// CRC-32 as zlib's crc32(value, data) has it.
uint32_t Crc32(uint32_t value, const uint8_t* data, size_t size);

// The CRC-32 that the header of `size` bytes, at least a header, should have.
uint32_t FileCrc32(const uint8_t* data, size_t size);

}  // namespace memplan::chains

#endif  // MEMPLAN_HLO_PASSES_CHAINS_READER_H_
