// The binary form of a descriptor chain, as hlo_passes/chains/layout.py defines it.
// Written by `python -m hlo_passes.chains.layout`: change that, not this.

#ifndef MEMPLAN_HLO_PASSES_CHAINS_CHAIN_LAYOUT_H_
#define MEMPLAN_HLO_PASSES_CHAINS_CHAIN_LAYOUT_H_

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define MEMPLAN_CHAIN_MAGIC "MPCHAIN\000"  // 8 bytes

enum {
  kMemplanChainVersion = 1,
  kMemplanChainMaxWaits = 4,
};

enum MemplanChainOp {
  kMemplanChainOpCopy = 0,
  kMemplanChainOpExecute = 1,
  kMemplanChainOpFence = 2,
  kMemplanChainOpRelease = 3,
};

enum MemplanChainSpaceKind {
  kMemplanChainSpaceKindArena = 0,
  kMemplanChainSpaceKindFile = 1,
  kMemplanChainSpaceKindBound = 2,
};

#pragma pack(push, 1)

struct MemplanChainHeader {
  uint8_t magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint64_t file_bytes;
  uint32_t crc32;  // zlib's, over the file with this field 0
  uint32_t reserved;
  uint8_t fingerprint[32];  // of the module; zeros for none
  uint64_t descriptors;  // how many
  uint64_t spaces;  // how many
  uint64_t slots;  // how many
  uint64_t streams;  // how many
  uint64_t segments;  // how many
  uint64_t operands;  // how many
  uint64_t strings;  // bytes
  uint64_t reserved_end;
};
static_assert(sizeof(struct MemplanChainHeader) == 128, "Header");
static_assert(offsetof(struct MemplanChainHeader, magic) == 0, "Header.magic");
static_assert(offsetof(struct MemplanChainHeader, version) == 8, "Header.version");
static_assert(offsetof(struct MemplanChainHeader, header_bytes) == 12, "Header.header_bytes");
static_assert(offsetof(struct MemplanChainHeader, file_bytes) == 16, "Header.file_bytes");
static_assert(offsetof(struct MemplanChainHeader, crc32) == 24, "Header.crc32");
static_assert(offsetof(struct MemplanChainHeader, reserved) == 28, "Header.reserved");
static_assert(offsetof(struct MemplanChainHeader, fingerprint) == 32, "Header.fingerprint");
static_assert(offsetof(struct MemplanChainHeader, descriptors) == 64, "Header.descriptors");
static_assert(offsetof(struct MemplanChainHeader, spaces) == 72, "Header.spaces");
static_assert(offsetof(struct MemplanChainHeader, slots) == 80, "Header.slots");
static_assert(offsetof(struct MemplanChainHeader, streams) == 88, "Header.streams");
static_assert(offsetof(struct MemplanChainHeader, segments) == 96, "Header.segments");
static_assert(offsetof(struct MemplanChainHeader, operands) == 104, "Header.operands");
static_assert(offsetof(struct MemplanChainHeader, strings) == 112, "Header.strings");
static_assert(offsetof(struct MemplanChainHeader, reserved_end) == 120, "Header.reserved_end");

struct MemplanChainDescriptor {
  uint64_t source_offset;  // COPY: within the slot
  uint64_t destination_offset;  // COPY: within the slot
  uint64_t bytes;  // COPY
  uint32_t stream;
  uint32_t tick;  // logical time, for people
  uint32_t source;  // COPY: slot that is read; RELEASE: slot
  uint32_t destination;  // COPY: slot that is written
  uint32_t segment;  // EXECUTE
  uint8_t op;
  uint8_t wait_count;
  uint8_t previous;  // bit k: waits[k] is of the previous replay
  uint8_t reserved;
  uint32_t waits[4];  // descriptors
};
static_assert(sizeof(struct MemplanChainDescriptor) == 64, "Descriptor");
static_assert(offsetof(struct MemplanChainDescriptor, source_offset) == 0, "Descriptor.source_offset");
static_assert(offsetof(struct MemplanChainDescriptor, destination_offset) == 8, "Descriptor.destination_offset");
static_assert(offsetof(struct MemplanChainDescriptor, bytes) == 16, "Descriptor.bytes");
static_assert(offsetof(struct MemplanChainDescriptor, stream) == 24, "Descriptor.stream");
static_assert(offsetof(struct MemplanChainDescriptor, tick) == 28, "Descriptor.tick");
static_assert(offsetof(struct MemplanChainDescriptor, source) == 32, "Descriptor.source");
static_assert(offsetof(struct MemplanChainDescriptor, destination) == 36, "Descriptor.destination");
static_assert(offsetof(struct MemplanChainDescriptor, segment) == 40, "Descriptor.segment");
static_assert(offsetof(struct MemplanChainDescriptor, op) == 44, "Descriptor.op");
static_assert(offsetof(struct MemplanChainDescriptor, wait_count) == 45, "Descriptor.wait_count");
static_assert(offsetof(struct MemplanChainDescriptor, previous) == 46, "Descriptor.previous");
static_assert(offsetof(struct MemplanChainDescriptor, reserved) == 47, "Descriptor.reserved");
static_assert(offsetof(struct MemplanChainDescriptor, waits) == 48, "Descriptor.waits");

struct MemplanChainSpace {
  uint64_t bytes;
  uint64_t alignment;  // ARENA: a power of two
  uint32_t name_begin;  // in the strings
  uint32_t name_bytes;
  uint32_t tier_begin;  // in the strings
  uint32_t tier_bytes;
  uint32_t path_begin;  // in the strings
  uint32_t path_bytes;
  uint32_t kind;
  uint32_t writable;  // 0 or 1
};
static_assert(sizeof(struct MemplanChainSpace) == 48, "Space");
static_assert(offsetof(struct MemplanChainSpace, bytes) == 0, "Space.bytes");
static_assert(offsetof(struct MemplanChainSpace, alignment) == 8, "Space.alignment");
static_assert(offsetof(struct MemplanChainSpace, name_begin) == 16, "Space.name_begin");
static_assert(offsetof(struct MemplanChainSpace, name_bytes) == 20, "Space.name_bytes");
static_assert(offsetof(struct MemplanChainSpace, tier_begin) == 24, "Space.tier_begin");
static_assert(offsetof(struct MemplanChainSpace, tier_bytes) == 28, "Space.tier_bytes");
static_assert(offsetof(struct MemplanChainSpace, path_begin) == 32, "Space.path_begin");
static_assert(offsetof(struct MemplanChainSpace, path_bytes) == 36, "Space.path_bytes");
static_assert(offsetof(struct MemplanChainSpace, kind) == 40, "Space.kind");
static_assert(offsetof(struct MemplanChainSpace, writable) == 44, "Space.writable");

struct MemplanChainSlot {
  uint64_t offset;  // within the space
  uint64_t bytes;
  uint32_t space;
  uint32_t name_begin;  // in the strings
  uint32_t name_bytes;
  uint32_t checksum;  // FILE that is not written: CRC-32C of the bytes; 0 for none
};
static_assert(sizeof(struct MemplanChainSlot) == 32, "Slot");
static_assert(offsetof(struct MemplanChainSlot, offset) == 0, "Slot.offset");
static_assert(offsetof(struct MemplanChainSlot, bytes) == 8, "Slot.bytes");
static_assert(offsetof(struct MemplanChainSlot, space) == 16, "Slot.space");
static_assert(offsetof(struct MemplanChainSlot, name_begin) == 20, "Slot.name_begin");
static_assert(offsetof(struct MemplanChainSlot, name_bytes) == 24, "Slot.name_bytes");
static_assert(offsetof(struct MemplanChainSlot, checksum) == 28, "Slot.checksum");

struct MemplanChainStream {
  uint32_t name_begin;  // in the strings
  uint32_t name_bytes;
};
static_assert(sizeof(struct MemplanChainStream) == 8, "Stream");
static_assert(offsetof(struct MemplanChainStream, name_begin) == 0, "Stream.name_begin");
static_assert(offsetof(struct MemplanChainStream, name_bytes) == 4, "Stream.name_bytes");

struct MemplanChainSegment {
  uint32_t name_begin;  // in the strings
  uint32_t name_bytes;
  uint32_t first_operand;  // arguments, then results
  uint32_t arguments;  // how many
  uint32_t results;  // how many
  uint32_t reserved;
};
static_assert(sizeof(struct MemplanChainSegment) == 24, "Segment");
static_assert(offsetof(struct MemplanChainSegment, name_begin) == 0, "Segment.name_begin");
static_assert(offsetof(struct MemplanChainSegment, name_bytes) == 4, "Segment.name_bytes");
static_assert(offsetof(struct MemplanChainSegment, first_operand) == 8, "Segment.first_operand");
static_assert(offsetof(struct MemplanChainSegment, arguments) == 12, "Segment.arguments");
static_assert(offsetof(struct MemplanChainSegment, results) == 16, "Segment.results");
static_assert(offsetof(struct MemplanChainSegment, reserved) == 20, "Segment.reserved");

struct MemplanChainOperand {
  uint32_t slot;
};
static_assert(sizeof(struct MemplanChainOperand) == 4, "Operand");
static_assert(offsetof(struct MemplanChainOperand, slot) == 0, "Operand.slot");

#pragma pack(pop)

#endif  // MEMPLAN_HLO_PASSES_CHAINS_CHAIN_LAYOUT_H_
