// What is remembered of requests, and which blocks that makes worth keeping.

#ifndef MEMPLAN_KV_HISTORY_H_
#define MEMPLAN_KV_HISTORY_H_

#include <array>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "reuse.h"
#include "trie.h"

namespace memplan {

enum class Policy : uint8_t { kLru, kLearned, kHints };

// What is said of a request's prefix: it is asked for again in about so many seconds, whose
// logarithm is off by about `spread`; or never again, by who asked for it.
struct Hint {
  enum Kind : uint8_t { kUnknown, kReturns, kEnds } kind = kUnknown;
  double seconds = 0, spread = 0;
};

class History {
 public:
  // remembered: ends of requests' paths beyond those of blocks that the trie has. policy: the most
  // that `Index` is asked for; for kLru nothing is learned.
  History(Trie* trie, int64_t remembered, Policy policy);

  // A request for blocks with these keys. `path` has those of them that the trie knows, kNone
  // behind. Returns its number, which it holds until `Leave`.
  VisitId Arrive(const std::vector<uint64_t>& keys, const std::vector<BlockId>& path, double now);
  // `path` has a block for each key of `Arrive` now.
  void Touch(VisitId visit, const std::vector<BlockId>& path);
  // It goes on: a block behind the last one. Whether its prompt is asked for again is what counts:
  // who comes back may leave out what was answered, or some of it.
  void Extend(VisitId visit, BlockId block);
  void Say(VisitId visit, const Hint& hint);
  void Leave(VisitId visit);

  // Nobody holds a block any more: it leaves the trie.
  void Forget(BlockId id);

  // The higher, the longer it should stay. Of kLru the number of its last request; else hits for
  // each block held for a second.
  double Index(Policy policy, const Block& block) const;

  int64_t remembered() const { return static_cast<int64_t>(ghosts_.size()); }

 private:
  struct Visit {
    double unit = 1;  // Seconds of an age of its class.
    Hint::Kind kind = Hint::kUnknown;
    uint8_t spread = 0;
    std::array<uint8_t, 2> traits{};
    bool is_over = false;  // Its end was asked for again.
    bool has_end = false;
    int32_t references = 0;
    uint64_t end = 0;  // The key of its prompt's last block, or of the first behind an empty one.
  };

  // What is left of an end that left the trie.
  struct Ghost {
    double last = 0;
    Use use;
    VisitId visit = kNone;
  };

  using Kind = ReuseTable::Kind;

  static Ghost Left(const Block& block) { return {block.last, block.use, block.visit}; }

  void Take(VisitId visit, VisitId* into);
  void Let(VisitId* visit);
  Kind PlainKind(const Use& use, const Visit& visit) const;
  Kind HintKind(const Use& use, const Visit& visit) const;
  void Count(const Ghost& of, bool is_used);
  void Trim();
  void Fit();

  Trie* const trie_;
  const int64_t most_ghosts_;
  const bool learns_;
  double now_ = 0;
  int64_t visits_ = 0, next_fit_ = 0;
  std::vector<Visit> seen_;
  std::vector<VisitId> free_;
  std::vector<Use> use_;  // Of the request that arrives.
  std::unordered_map<uint64_t, Ghost> ghosts_;
  std::deque<std::pair<uint64_t, double>> ghost_order_;
  ReuseTable plain_, hinted_;
};

}  // namespace memplan

#endif  // MEMPLAN_KV_HISTORY_H_
