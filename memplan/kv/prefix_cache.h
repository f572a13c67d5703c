// Which blocks of which prefixes are kept, and where: on the device, on the host, on a disk.
//
// Three policies are followed at once, in numbers only: which blocks each would hold in as much
// room. What is held follows the one whose hits were most lately, so that no table and no hint
// that is wrong costs more than it takes to find out.
//
// Along a path tiers only get slower, and who is held has all before it: what leaves a tier is a
// leaf of it. Where it goes, the moves say, which are to be carried out in their order.

#ifndef MEMPLAN_KV_PREFIX_CACHE_H_
#define MEMPLAN_KV_PREFIX_CACHE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "history.h"
#include "trie.h"

namespace memplan {

class PrefixCache {
 public:
  using RequestId = int64_t;

  struct Place {
    int tier;
    Page page;
  };
  struct Move {
    Place from, to;
  };

  struct Settings {
    int64_t block_tokens = 1;
    std::array<int64_t, kTiers> pages{};  // Of each tier.
    int64_t keep = 0;  // Blocks that stay on the device while no request has them, at most.
    int64_t history = 0;
    uint64_t salt = 0;
    Policy policy = Policy::kLru;
  };

  explicit PrefixCache(const Settings& settings);

  // How many of these blocks, from the first on, each tier holds; changes nothing.
  std::array<int64_t, kTiers> Find(const int32_t* tokens, int64_t blocks) const;

  // A request whose prompt begins with whole blocks of tokens. Those it finds are on the device
  // when the moves are done, and stay there until it ends. now: seconds; does not fall.
  RequestId Begin(const int32_t* tokens, int64_t blocks, double now);

  // How many blocks, from the first on, are there and need not be computed.
  int64_t Hits(RequestId id) const { return RequestOf(id).hits; }

  // Pages on the device, block by block: those of its hits, and behind them its own.
  const std::vector<Page>& Pages(RequestId id) const { return RequestOf(id).pages; }

  // So many more pages of its own; false, and nothing is changed, where there is no room for them.
  bool Extend(RequestId id, int64_t pages);

  // The blocks behind its last hit, or the last ones that were committed, are computed, and serve
  // others from now on. Its pages may change: who computed them first has them.
  void Commit(RequestId id, const int32_t* tokens, int64_t blocks);

  // What is said of when its prefix is asked for again. Also of one that has ended, until others
  // are remembered instead.
  void Say(RequestId id, const Hint& hint);

  void End(RequestId id);

  // The bytes of a page on the device are lost: its block, and all behind that, are forgotten; what
  // requests have of them, when these end.
  void Lose(Page page);

  // So is all.
  void Clear();

  // Pages on the device that requests do not have.
  int64_t room() const;

  // What is to be copied, in this order, before pages that were given since are written or read.
  std::vector<Move> TakeMoves();

  int64_t block_tokens() const { return trie_.block_tokens(); }
  int64_t held(int tier) const { return holders_[tier].held; }
  int64_t remembered() const { return history_.remembered(); }
  Policy followed() const { return holders_[best_].policy; }

  // Raises std::logic_error with what is not as it must be.
  void Check() const;

 private:
  struct Request {
    std::vector<BlockId> path;
    std::vector<Page> pages;
    int64_t hits = 0, committed = 0;
    VisitId visit = kNone;
    bool is_whole = true;  // Else no more of it is kept: of two prefixes with one key, one is.
  };

  // An ended request, of which something may still be said.
  struct Ended {
    VisitId visit = kNone;
    BlockId last = kNone;
    uint32_t touches = 0;
  };

  struct Candidate {
    double index;
    BlockId block;
    uint32_t touches;
    bool operator<(const Candidate& other) const {
      return index != other.index ? index > other.index : block > other.block;
    }
  };

  // A tier, or a policy that is followed: blocks, of which the least leaf goes first.
  struct Holder {
    Policy policy = Policy::kLru;
    int64_t most = 0;  // Blocks.
    int64_t held = 0, evictions = 0;
    double hits = 0;
    std::vector<Candidate> leaves = {};  // A heap; stale ones among them.
    std::vector<Page> free = {};
    Page pages = 0;  // That were ever given.
  };

  const Request& RequestOf(RequestId id) const;
  Request& RequestOf(RequestId id);
  int TierOf(const Block& block) const;
  Policy PolicyOf(int holder) const;
  double Index(int holder, const Block& block) const;
  bool IsLeaf(int holder, BlockId id) const;
  void Offer(int holder, BlockId id);
  void Rank(int holder);
  BlockId Least(int holder);
  void Hold(int holder, BlockId id);
  void Drop(int holder, BlockId id);
  void Follow(const std::vector<BlockId>& path);
  void Choose();
  void Shrink();
  Page TakePage(int tier);
  void FreePage(int tier, Page page) { holders_[tier].free.push_back(page); }
  void Leave(int tier, BlockId id);
  void Transfer(BlockId id, int from, int to, Page page);
  void Release(BlockId id);
  void Pin(BlockId id);
  void Unpin(BlockId id);
  void Forget(std::vector<BlockId> blocks);

  Trie trie_;
  History history_;
  const int64_t keep_, most_ended_;
  std::vector<Holder> holders_;  // Tiers, and behind them policies.
  std::vector<uint32_t> ranked_;  // By block: the ranking that it was last seen in.
  uint32_t rankings_ = 0;
  int best_ = 0;
  int64_t pinned_ = 0;  // Blocks on the device that requests have.
  std::unordered_set<BlockId> hidden_;  // Lost, and a request's.
  std::unordered_map<RequestId, Request> requests_;
  std::unordered_map<RequestId, Ended> ended_;
  std::deque<RequestId> ended_order_;
  RequestId next_ = 0;
  std::vector<Move> moves_;
};

}  // namespace memplan

#endif  // MEMPLAN_KV_PREFIX_CACHE_H_
