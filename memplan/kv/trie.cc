#include "trie.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace memplan {

Trie::Trie(int64_t block_tokens, uint64_t salt) : block_tokens_(block_tokens), salt_(salt) {
  if (block_tokens < 1) throw std::invalid_argument("block_tokens: at least 1");
}

uint64_t Trie::KeyOf(uint64_t before, const int32_t* tokens) const {
  uint64_t key = before + 0x9E3779B97F4A7C15u;
  for (int64_t k = 0; k < block_tokens_; ++k) {
    key = (key ^ static_cast<uint32_t>(tokens[k])) * 0xBF58476D1CE4E5B9u;
    key ^= key >> 31;
  }
  return key;
}

BlockId Trie::Find(uint64_t key, BlockId parent, const int32_t* tokens) const {
  const auto at = known_.find(key);
  if (at == known_.end() || blocks_[at->second].parent != parent) return kNone;
  return Has(at->second, tokens) ? at->second : kNone;
}

bool Trie::Has(BlockId id, const int32_t* tokens) const {
  const int32_t* held = tokens_.data() + id * block_tokens_;
  return std::memcmp(held, tokens, block_tokens_ * sizeof(int32_t)) == 0;
}

BlockId Trie::Make(uint64_t key, BlockId parent, const int32_t* tokens) {
  const auto [at, is_new] = known_.emplace(key, kNone);
  if (!is_new) return kNone;
  BlockId id;
  if (free_.empty()) {
    id = static_cast<BlockId>(blocks_.size());
    blocks_.emplace_back();
    tokens_.resize(tokens_.size() + block_tokens_);
  } else {
    id = free_.back();
    free_.pop_back();
    const uint32_t touches = blocks_[id].touches;
    blocks_[id] = Block();
    blocks_[id].touches = touches;  // So that what is known of who was here before is stale.
  }
  at->second = id;
  blocks_[id].key = key;
  blocks_[id].parent = parent;
  std::copy_n(tokens, block_tokens_, tokens_.data() + id * block_tokens_);
  return id;
}

void Trie::Hide(BlockId id) {
  const auto at = known_.find(blocks_[id].key);
  if (at != known_.end() && at->second == id) known_.erase(at);
}

void Trie::Remove(BlockId id) {
  Hide(id);
  ++blocks_[id].touches;
  free_.push_back(id);
}

}  // namespace memplan
