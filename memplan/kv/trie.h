// The blocks of all prefixes that are known: tokens, who came before them, and where they are.

#ifndef MEMPLAN_KV_TRIE_H_
#define MEMPLAN_KV_TRIE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace memplan {

using BlockId = int32_t;
using VisitId = int32_t;
using Page = int32_t;
constexpr int32_t kNone = -1;

// Tiers hold bytes; policies are followed in numbers only.
constexpr int kTiers = 3;
constexpr int kHolders = kTiers + 3;

// How often a block was asked for; and of that by others than who was to come back to it.
struct Use {
  uint32_t times = 0, others = 0;
  bool operator==(const Use& of) const { return times == of.times && others == of.others; }
};

struct Block {
  uint64_t key = 0;
  BlockId parent = kNone;
  Page page = kNone;       // In the tier that holds it.
  uint32_t pins = 0;       // Requests that read it now.
  uint8_t holders = 0;     // A bit each.
  bool is_end = false;     // Behind it come blocks of another use, or none: reuse is counted here.
  std::array<uint32_t, kHolders> kids{};  // Blocks behind it, by holder.
  // What is known of its use (History).
  uint32_t touches = 0;
  Use use;
  double last = 0;          // When it was asked for,
  int64_t order = 0;        // by which request,
  VisitId visit = kNone;  // with what hint.
};

class Trie {
 public:
  // salt: what keys begin with. Who does not know it cannot make prefixes whose keys collide.
  Trie(int64_t block_tokens, uint64_t salt);

  // Of all the tokens from the first on: `before` is the key of the block before; `salt` at first.
  uint64_t KeyOf(uint64_t before, const int32_t* tokens) const;

  // The block with these tokens behind `parent`, or kNone. Keys may collide: tokens are compared.
  BlockId Find(uint64_t key, BlockId parent, const int32_t* tokens) const;

  // Whether a block has these tokens.
  bool Has(BlockId id, const int32_t* tokens) const;

  // Such a block; kNone if another one has its key.
  BlockId Make(uint64_t key, BlockId parent, const int32_t* tokens);
  // Nobody finds it from now on.
  void Hide(BlockId id);
  void Remove(BlockId id);

  Block& operator[](BlockId id) { return blocks_[id]; }
  const Block& operator[](BlockId id) const { return blocks_[id]; }
  const std::unordered_map<uint64_t, BlockId>& known() const { return known_; }
  size_t size() const { return blocks_.size(); }
  int64_t block_tokens() const { return block_tokens_; }
  uint64_t salt() const { return salt_; }

 private:
  const int64_t block_tokens_;
  const uint64_t salt_;
  std::vector<Block> blocks_;
  std::vector<int32_t> tokens_;  // [blocks, block_tokens]
  std::vector<BlockId> free_;
  std::unordered_map<uint64_t, BlockId> known_;
};

}  // namespace memplan

#endif  // MEMPLAN_KV_TRIE_H_
