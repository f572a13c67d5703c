#include "prefix_cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace memplan {
namespace {

// Requests after which older hits count half as much or so; and by how much more another policy
// must hit to be followed instead.
constexpr double kRequests = 1000;
constexpr double kMargin = 1.02;

}  // namespace

PrefixCache::PrefixCache(const Settings& settings)
    : trie_(settings.block_tokens, settings.salt),
      history_(&trie_, settings.history, settings.policy),
      keep_(settings.keep),
      most_ended_(settings.history) {
  int64_t room = 0;
  for (const int64_t pages : settings.pages) {
    if (pages < 0 || pages > INT32_MAX) throw std::invalid_argument("pages: 0 to 2^31 - 1");
    holders_.emplace_back();
    holders_.back().most = pages;
    room += pages;
  }
  if (keep_ < 0) throw std::invalid_argument("keep: at least 0 blocks");
  room -= std::max<int64_t>(settings.pages[0] - keep_, 0);
  if (settings.policy == Policy::kLru) return;
  for (int policy = 0; policy <= static_cast<int>(settings.policy); ++policy) {
    holders_.emplace_back();
    holders_.back().policy = static_cast<Policy>(policy);
    holders_.back().most = room;
  }
  best_ = kTiers + static_cast<int>(settings.policy);
}

const PrefixCache::Request& PrefixCache::RequestOf(RequestId id) const {
  const auto at = requests_.find(id);
  if (at == requests_.end()) throw std::invalid_argument("no such request, or it has ended");
  return at->second;
}

PrefixCache::Request& PrefixCache::RequestOf(RequestId id) {
  return const_cast<Request&>(std::as_const(*this).RequestOf(id));
}

int PrefixCache::TierOf(const Block& block) const {
  for (int tier = 0; tier < kTiers; ++tier) {
    if (block.holders >> tier & 1) return tier;
  }
  return kTiers;
}

// --- leaves ----------------------------------------------------------------------------------

// Tiers follow the best policy.
Policy PrefixCache::PolicyOf(int holder) const {
  return holders_[holder < kTiers ? best_ : holder].policy;
}

double PrefixCache::Index(int holder, const Block& block) const {
  return history_.Index(PolicyOf(holder), block);
}

bool PrefixCache::IsLeaf(int holder, BlockId id) const {
  const Block& block = trie_[id];
  if (!(block.holders >> holder & 1)) return false;
  if (block.pins > 0) return false;
  if (holder >= kTiers) return block.kids[holder] == 0;
  uint32_t kids = 0;
  for (int tier = 0; tier <= holder; ++tier) kids += block.kids[tier];
  return kids == 0;
}

void PrefixCache::Offer(int holder, BlockId id) {
  if (!IsLeaf(holder, id)) return;
  std::vector<Candidate>& leaves = holders_[holder].leaves;
  if (static_cast<int64_t>(leaves.size()) > 64 + 2 * holders_[holder].held) Rank(holder);
  leaves.push_back({Index(holder, trie_[id]), id, trie_[id].touches});
  std::push_heap(leaves.begin(), leaves.end());
}

// Indices but LRU's change with time, and with what is learned: now and then all are asked again.
void PrefixCache::Rank(int holder) {
  Holder& of = holders_[holder];
  std::vector<Candidate>& leaves = of.leaves;
  ranked_.resize(trie_.size());
  ++rankings_;
  size_t kept = 0;
  for (const Candidate& leaf : leaves) {
    const Block& block = trie_[leaf.block];
    if (leaf.touches != block.touches || !IsLeaf(holder, leaf.block)) continue;
    if (std::exchange(ranked_[leaf.block], rankings_) == rankings_) continue;
    leaves[kept++] = {Index(holder, block), leaf.block, leaf.touches};
  }
  leaves.resize(kept);
  std::make_heap(leaves.begin(), leaves.end());
  of.evictions = 0;
}

// The leaf that goes first, which is no candidate from then on; kNone if there is none.
BlockId PrefixCache::Least(int holder) {
  Holder& of = holders_[holder];
  const bool is_lru = PolicyOf(holder) == Policy::kLru;
  if (!is_lru && ++of.evictions > 8 + static_cast<int64_t>(of.leaves.size()) / 2) Rank(holder);
  while (!of.leaves.empty()) {
    std::pop_heap(of.leaves.begin(), of.leaves.end());
    const Candidate leaf = of.leaves.back();
    of.leaves.pop_back();
    if (leaf.touches == trie_[leaf.block].touches && IsLeaf(holder, leaf.block)) return leaf.block;
  }
  return kNone;
}

void PrefixCache::Hold(int holder, BlockId id) {
  Block& block = trie_[id];
  block.holders |= 1 << holder;
  if (block.parent != kNone) ++trie_[block.parent].kids[holder];
  ++holders_[holder].held;
  if (holder == 0 && block.pins > 0) ++pinned_;
}

void PrefixCache::Drop(int holder, BlockId id) {
  Block& block = trie_[id];
  block.holders &= ~(1 << holder);
  --holders_[holder].held;
  if (holder == 0 && block.pins > 0) --pinned_;
  if (block.parent == kNone) return;
  if (--trie_[block.parent].kids[holder] == 0) Offer(holder, block.parent);
}

// --- policies that are followed --------------------------------------------------------------

// Each holds all of a request until that ends: what is said of it until then counts.
void PrefixCache::Follow(const std::vector<BlockId>& path) {
  for (int holder = kTiers; holder < static_cast<int>(holders_.size()); ++holder) {
    size_t hits = 0;
    for (size_t k = 0; k < path.size(); ++k) {
      if (trie_[path[k]].holders >> holder & 1) {
        ++hits;
      } else {
        Hold(holder, path[k]);
      }
    }
    holders_[holder].hits += static_cast<double>(hits) - holders_[holder].hits / kRequests;
  }
}

void PrefixCache::Choose() {
  if (best_ == 0) return;
  int best = best_;
  const double least = holders_[best_].hits * kMargin;
  for (int holder = kTiers; holder < static_cast<int>(holders_.size()); ++holder) {
    if (holders_[holder].hits > std::max(least, holders_[best].hits)) best = holder;
  }
  if (best == best_) return;
  best_ = best;
  for (int tier = 0; tier < kTiers; ++tier) Rank(tier);
}

void PrefixCache::Shrink() {
  for (int holder = kTiers; holder < static_cast<int>(holders_.size()); ++holder) {
    while (holders_[holder].held > holders_[holder].most) {
      const BlockId least = Least(holder);
      if (least == kNone) break;  // All is a request's.
      Drop(holder, least);
      Release(least);
    }
  }
  while (holders_[0].held > keep_) {
    const BlockId least = Least(0);
    if (least == kNone) break;
    Leave(0, least);
  }
}

// --- tiers -----------------------------------------------------------------------------------

Page PrefixCache::TakePage(int tier) {
  Holder& of = holders_[tier];
  if (of.free.empty() && of.pages < of.most) return of.pages++;
  if (of.free.empty()) {
    const BlockId least = Least(tier);
    if (least == kNone) return kNone;
    Leave(tier, least);
  }
  const Page page = of.free.back();
  of.free.pop_back();
  return page;
}

void PrefixCache::Transfer(BlockId id, int from, int to, Page page) {
  Block& block = trie_[id];
  moves_.push_back({{from, block.page}, {to, page}});
  FreePage(from, block.page);
  block.page = page;
  Hold(to, id);
  Drop(from, id);
  Offer(to, id);
}

// A leaf of a tier goes to the next one that has room, or holds what is worth less; else it is
// dropped, but not from before blocks that a slower one holds.
void PrefixCache::Leave(int tier, BlockId id) {
  const Block& block = trie_[id];
  const bool must_stay = block.kids[1] + block.kids[2] > 0;
  for (int to = tier + 1; to < kTiers; ++to) {
    Holder& of = holders_[to];
    if (of.most == 0) continue;
    const bool is_full = of.free.empty() && of.pages == of.most;
    if (is_full) {
      const BlockId least = Least(to);
      if (least == kNone) continue;
      if (!must_stay && Index(to, trie_[least]) >= Index(tier, block)) {
        Offer(to, least);
        continue;
      }
      Leave(to, least);
    }
    Transfer(id, tier, to, TakePage(to));
    return;
  }
  FreePage(tier, block.page);
  trie_[id].page = kNone;
  Drop(tier, id);
  Release(id);
}

void PrefixCache::Pin(BlockId id) {
  if (trie_[id].pins++ == 0 && TierOf(trie_[id]) == 0) ++pinned_;
}

void PrefixCache::Unpin(BlockId id) {
  if (--trie_[id].pins == 0 && TierOf(trie_[id]) == 0) --pinned_;
}

void PrefixCache::Release(BlockId id) {
  const Block& block = trie_[id];
  if (block.holders == 0 && block.pins == 0) history_.Forget(id);
}

// --- requests --------------------------------------------------------------------------------

std::array<int64_t, kTiers> PrefixCache::Find(const int32_t* tokens, int64_t blocks) const {
  std::array<int64_t, kTiers> found{};
  uint64_t key = trie_.salt();
  BlockId parent = kNone;
  for (int64_t k = 0; k < blocks; ++k, tokens += trie_.block_tokens()) {
    key = trie_.KeyOf(key, tokens);
    parent = trie_.Find(key, parent, tokens);
    const int tier = parent == kNone ? kTiers : TierOf(trie_[parent]);
    if (tier == kTiers) break;
    ++found[tier];
  }
  return found;
}

PrefixCache::RequestId PrefixCache::Begin(const int32_t* tokens, int64_t blocks, double now) {
  const RequestId id = next_++;
  Request& request = requests_[id];
  const int64_t size = trie_.block_tokens();
  std::vector<uint64_t> keys(blocks);
  request.path.assign(blocks, kNone);
  uint64_t key = trie_.salt();
  BlockId parent = kNone;
  bool is_known = true;
  for (int64_t k = 0; k < blocks; ++k) {
    keys[k] = key = trie_.KeyOf(key, tokens + k * size);
    if (is_known) parent = trie_.Find(key, parent, tokens + k * size);
    is_known = parent != kNone;
    request.path[k] = parent;
  }
  request.visit = history_.Arrive(keys, request.path, now);
  for (int64_t k = 0; k < blocks; ++k) {
    BlockId& at = request.path[k];
    if (at == kNone) at = trie_.Make(keys[k], k == 0 ? kNone : request.path[k - 1], tokens + k * size);
    if (at == kNone) {
      request.path.resize(k);
      request.is_whole = false;
      break;
    }
    Pin(at);
  }
  history_.Touch(request.visit, request.path);
  Follow(request.path);
  Choose();
  for (const BlockId block : request.path) {
    const int tier = TierOf(trie_[block]);
    if (tier == kTiers) break;
    if (tier > 0) {
      const Page page = TakePage(0);
      if (page == kNone) break;
      Transfer(block, tier, 0, page);
    }
    request.pages.push_back(trie_[block].page);
  }
  request.hits = request.committed = static_cast<int64_t>(request.pages.size());
  return id;
}

int64_t PrefixCache::room() const {
  const Holder& device = holders_[0];
  const int64_t unused = static_cast<int64_t>(device.free.size()) + device.most - device.pages;
  return unused + device.held - pinned_;
}

bool PrefixCache::Extend(RequestId id, int64_t pages) {
  Request& request = RequestOf(id);
  if (pages < 0) throw std::invalid_argument("pages: at least 0");
  if (pages > room()) return false;
  for (int64_t k = 0; k < pages; ++k) {
    const Page page = TakePage(0);
    if (page == kNone) throw std::logic_error("a page that nobody has is not to be had");
    request.pages.push_back(page);
  }
  return true;
}

void PrefixCache::Commit(RequestId id, const int32_t* tokens, int64_t blocks) {
  Request& request = RequestOf(id);
  if (request.committed + blocks > static_cast<int64_t>(request.pages.size())) {
    throw std::invalid_argument("more blocks than the request has pages");
  }
  const int64_t size = trie_.block_tokens();
  for (int64_t k = 0; k < blocks; ++k) {
    const size_t at = request.committed + k;
    if (at >= request.path.size() || hidden_.count(request.path[at]) > 0) break;
    if (!trie_.Has(request.path[at], tokens + k * size)) {
      throw std::invalid_argument("other tokens than those that the request began with");
    }
  }
  for (int64_t k = 0; k < blocks; ++k, tokens += size, ++request.committed) {
    const size_t at = request.committed;
    if (at >= request.path.size() ? !request.is_whole : hidden_.count(request.path[at]) > 0) continue;
    if (at == request.path.size()) {
      const BlockId parent = at == 0 ? kNone : request.path[at - 1];
      const uint64_t key = trie_.KeyOf(at == 0 ? trie_.salt() : trie_[parent].key, tokens);
      BlockId block = trie_.Find(key, parent, tokens);
      if (block == kNone) block = trie_.Make(key, parent, tokens);
      if (block == kNone) {
        request.is_whole = false;
        continue;
      }
      Pin(block);
      request.path.push_back(block);
      history_.Extend(request.visit, block);
      for (int holder = kTiers; holder < static_cast<int>(holders_.size()); ++holder) {
        if (!(trie_[block].holders >> holder & 1)) Hold(holder, block);
      }
    }
    const BlockId block = request.path[at];
    const int tier = TierOf(trie_[block]);
    if (tier == 0) {
      FreePage(0, request.pages[at]);
      request.pages[at] = trie_[block].page;
      continue;
    }
    if (tier < kTiers) {
      FreePage(tier, trie_[block].page);
      Drop(tier, block);
    }
    trie_[block].page = request.pages[at];
    Hold(0, block);
  }
}

void PrefixCache::Say(RequestId id, const Hint& hint) {
  if (const auto at = requests_.find(id); at != requests_.end()) {
    history_.Say(at->second.visit, hint);
    return;
  }
  const auto at = ended_.find(id);
  if (at == ended_.end()) return;
  history_.Say(at->second.visit, hint);
  const BlockId last = at->second.last;
  if (last == kNone || trie_[last].touches != at->second.touches) return;
  at->second.touches = ++trie_[last].touches;  // Where it stands among the leaves is stale.
  for (int holder = 0; holder < static_cast<int>(holders_.size()); ++holder) Offer(holder, last);
}

void PrefixCache::End(RequestId id) {
  Request& request = RequestOf(id);
  for (size_t k = 0; k < request.pages.size(); ++k) {
    const bool is_in_path = k < request.path.size() && TierOf(trie_[request.path[k]]) == 0;
    const bool is_of_block = is_in_path && trie_[request.path[k]].page == request.pages[k];
    if (!is_of_block) FreePage(0, request.pages[k]);
  }
  for (size_t k = request.path.size(); k-- > 0;) {
    const BlockId block = request.path[k];
    Unpin(block);
    for (int holder = 0; holder < static_cast<int>(holders_.size()); ++holder) Offer(holder, block);
  }
  Ended& ended = ended_[id];
  ended.visit = request.visit;
  if (!request.path.empty()) {
    ended.last = request.path.back();
    ended.touches = trie_[ended.last].touches;
  }
  for (size_t k = request.path.size(); k-- > 0;) {
    const BlockId block = request.path[k];
    if (trie_[block].pins == 0 && hidden_.erase(block) > 0 && TierOf(trie_[block]) == 0) {
      FreePage(0, trie_[block].page);
      Drop(0, block);
    }
    Release(block);
  }
  requests_.erase(id);
  ended_order_.push_back(id);
  while (static_cast<int64_t>(ended_order_.size()) > most_ended_) {
    const auto oldest = ended_.find(ended_order_.front());
    history_.Leave(oldest->second.visit);
    ended_.erase(oldest);
    ended_order_.pop_front();
  }
  Shrink();
}

void PrefixCache::Lose(Page page) {
  if (page < 0 || page >= holders_[0].most) throw std::invalid_argument("no page of the device");
  BlockId first = kNone;
  for (const auto& [key, id] : trie_.known()) {
    if (TierOf(trie_[id]) == 0 && trie_[id].page == page) first = id;
  }
  if (first == kNone) return;
  // Whether a block is that one, or behind it.
  std::unordered_map<BlockId, bool> is_behind = {{kNone, false}, {first, true}};
  std::vector<BlockId> lost, way;
  for (const auto& [key, id] : trie_.known()) {
    BlockId at = id;
    for (; is_behind.count(at) == 0; at = trie_[at].parent) way.push_back(at);
    const bool is_so = is_behind[at];
    for (; !way.empty(); way.pop_back()) is_behind[way.back()] = is_so;
    if (is_so) lost.push_back(id);
  }
  Forget(std::move(lost));
}

void PrefixCache::Clear() {
  std::vector<BlockId> all;
  for (const auto& [key, id] : trie_.known()) all.push_back(id);
  Forget(std::move(all));
}

// Blocks, with each all behind it.
void PrefixCache::Forget(std::vector<BlockId> blocks) {
  for (const BlockId id : blocks) {
    trie_.Hide(id);
    if (trie_[id].pins > 0) hidden_.insert(id);
  }
  for (auto& [number, request] : requests_) {
    for (const BlockId id : request.path) request.is_whole &= hidden_.count(id) == 0;
  }
  for (const BlockId id : blocks) {
    const int tier = TierOf(trie_[id]);
    for (int holder = 0; holder < static_cast<int>(holders_.size()); ++holder) {
      const bool stays = holder == 0 && trie_[id].pins > 0;
      if (!(trie_[id].holders >> holder & 1) || stays) continue;
      if (holder == tier) FreePage(tier, trie_[id].page);
      Drop(holder, id);
    }
  }
  for (const BlockId id : blocks) Release(id);
}

std::vector<PrefixCache::Move> PrefixCache::TakeMoves() { return std::exchange(moves_, {}); }

// --- what must hold --------------------------------------------------------------------------

void PrefixCache::Check() const {
  const auto demand = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
  };
  std::vector<int64_t> held(holders_.size());
  std::vector<std::vector<uint8_t>> taken(kTiers);
  for (int tier = 0; tier < kTiers; ++tier) taken[tier].assign(holders_[tier].pages, 0);
  const auto take = [&](int tier, Page page) {
    demand(page >= 0 && page < holders_[tier].pages, "a page is one of its tier's");
    demand(++taken[tier][page] == 1, "a page belongs to one only");
  };
  std::unordered_map<BlockId, std::array<uint32_t, kHolders>> counted;
  std::vector<BlockId> blocks(hidden_.begin(), hidden_.end());
  for (const auto& [key, id] : trie_.known()) {
    demand(trie_[id].key == key, "a block is known by its key");
    blocks.push_back(id);
  }
  int64_t pinned = 0;
  for (const BlockId id : blocks) {
    const Block& block = trie_[id];
    pinned += block.pins > 0 && TierOf(block) == 0;
    demand(block.holders != 0 || block.pins > 0, "a block that nobody has is forgotten");
    const int tier = TierOf(block);
    int tiers = 0;
    for (int holder = 0; holder < static_cast<int>(holders_.size()); ++holder) {
      if (!(block.holders >> holder & 1)) continue;
      ++held[holder];
      tiers += holder < kTiers;
      if (block.parent == kNone) continue;
      ++counted[block.parent][holder];
      const Block& parent = trie_[block.parent];
      demand(holder < kTiers ? TierOf(parent) <= holder : parent.holders >> holder & 1,
             "who is held has all before it, in no slower tier");
    }
    demand(tiers <= 1, "a block is in one tier");
    if (tier < kTiers) take(tier, block.page);
  }
  demand(pinned == pinned_, "what requests have is counted");
  for (const BlockId id : blocks) demand(trie_[id].kids == counted[id], "kids are counted");
  std::unordered_map<BlockId, uint32_t> pins;
  for (const auto& [id, request] : requests_) {
    for (const BlockId block : request.path) ++pins[block];
    for (size_t k = 0; k < request.pages.size(); ++k) {
      const bool is_committed = k < static_cast<size_t>(request.committed);
      const bool is_in_path = is_committed && k < request.path.size();
      const bool is_of_block = is_in_path && TierOf(trie_[request.path[k]]) == 0 &&
                               trie_[request.path[k]].page == request.pages[k];
      if (!is_of_block) {
        demand(!is_in_path || hidden_.count(request.path[k]) > 0, "a request has its blocks' pages");
        take(0, request.pages[k]);
      }
    }
  }
  for (const BlockId id : blocks) demand(trie_[id].pins == pins[id], "pins are those of requests");
  for (int holder = 0; holder < static_cast<int>(holders_.size()); ++holder) {
    demand(held[holder] == holders_[holder].held, "what is held is counted");
    demand(held[holder] <= holders_[holder].most || !requests_.empty(), "all keep to their room");
  }
  for (int tier = 0; tier < kTiers; ++tier) {
    for (const Page page : holders_[tier].free) take(tier, page);
    demand(holders_[tier].pages <= holders_[tier].most, "tiers keep to their pages");
    for (const uint8_t is_taken : taken[tier]) demand(is_taken, "no page is lost");
  }
}

}  // namespace memplan
