// How the compiler will pack the arena, as far as is known before a selection is written down.
//
//     resident      ████████████░░░░░░░░░░░░░░░░░░████████     one rectangle before a gap that is
//     fetched                        ████████████████████      taken, and another behind it
//     made again                             a b c████████     with what is there on the way to it
//
// Time is counted in instructions of the module as it will be, since compilers go by the length of
// lives: those of the program, what is made again before each, and the halves of transfers.

#include <algorithm>
#include <limits>
#include <tuple>

#include "gap_state.h"

namespace memplan {
namespace {

constexpr int64_t kContextBytes = 4;

// How often a schedule gets fewer bytes.
constexpr int64_t kTightened = 3;

// XLA's heap counts time in its own events: what is made at one moment, then what ends there. What
// is joined ends what lay there, and is made.
void CountInEvents(const std::vector<int64_t>& joined, std::vector<Rectangle>* found) {
  std::vector<std::tuple<int64_t, bool, size_t>> events;
  for (size_t k = 0; k < found->size(); ++k) {
    events.emplace_back((*found)[k].start, false, k);
    events.emplace_back((*found)[k].end - 1, true, k);
  }
  for (const int64_t time : joined) events.insert(events.end(), 2, {time, false, found->size()});
  std::sort(events.begin(), events.end());
  for (size_t now = 0; now < events.size(); ++now) {
    const auto& [time, is_end, k] = events[now];
    if (k == found->size()) continue;
    Rectangle& r = (*found)[k];
    (is_end ? r.end : r.start) = static_cast<int64_t>(now) + is_end;
  }
}

}  // namespace

// The rectangles of one selection. Members are called in the order in which they stand.
class GapState::Sketch {
 public:
  Sketch(const GapState& state, const Moves& moves)
      : state_(state), catalog_(*state.catalog_), moves_(moves) {}

  Packed Pack(int64_t within) {
    SetTimes();
    AddClones();
    AddTransfers();
    AddTemporaries();
    HoldUntilLeft();
    LieInOperands();
    std::vector<Rectangle> found = InOrder();
    const Shared& shared = catalog_.shared;
    if (shared.in_order) {
      const int64_t tables = shared.table * clone_count_;
      Packed packed = memplan::Pack(found, shared.alignment, {Order::kStart}, within - tables);
      packed.bytes += tables;
      return packed;
    }
    CountInEvents(joined_, &found);
    return memplan::Pack(found, shared.alignment, {Order::kSpatial, Order::kTemporal}, within);
  }

 private:
  using Piece = size_t;  // A rectangle, by its number.

  // Where each instruction of the program stands, and in front of it, in this order: what leaves
  // and has left, comes and has come, clones.
  void SetTimes() {
    const Tick ticks = state_.ticks_;
    left_at_.assign(ticks + 1, 0);
    comes_at_.assign(ticks + 1, 0);
    time_.resize(ticks + 1);
    std::vector<int64_t> before(ticks + 1, 0);
    for (const auto& [tick, roles] : state_.clones_) {
      clones_[tick] = state_.ClonesBefore(tick);
      before[tick] = static_cast<int64_t>(clones_[tick].size());
      clone_count_ += before[tick];
    }
    for (const Departure& departure : moves_.departures) {
      ++left_at_[departure.start];
      ++left_at_[departure.done];
    }
    for (size_t k = 0; k < moves_.fetches.size(); ++k) {
      ++comes_at_[moves_.starts[k]];
      ++before[moves_.fetches[k].first];
    }
    for (Tick tick = 0, now = 0; tick <= ticks; ++tick) {
      left_at_[tick] = now += left_at_[tick];
      const int64_t coming = comes_at_[tick];
      comes_at_[tick] = now;
      time_[tick] = now += coming + before[tick];
      ++now;
    }
  }

  // When each temporary that is made again is there, and the end of what waits for clones.
  void AddClones() {
    const Shared& shared = catalog_.shared;
    for (const auto& [tick, made] : clones_) {
      int64_t now = time_[tick] - static_cast<int64_t>(made.size());
      for (const Clone& clone : made) {
        int64_t all = 0;
        for (const int64_t n : clone.elements) {
          made_at_[{n, tick}] = now;
          all += catalog_.temporaries[n].size;
        }
        for (const int64_t n : clone.last_read) read_until_[{n, tick}] = now + 1;
        for (const int64_t m : state_.WeightsFor(clone, tick)) weights_until_[{tick, m}] = now + 1;
        const Temporary& t = catalog_.temporaries[clone.elements[0]];
        const int64_t beside = t.beside - (all - t.size);
        if (beside > 0 && beside >= shared.smallest) found_.push_back({beside, now, now + 1});
        ++now;
      }
    }
  }

  // What moves whatever is taken, what clones read of weights, and on GPU the word that a copy has
  // while it is on its way, but for what is evicted.
  void AddTransfers() {
    const bool has_contexts = !catalog_.shared.in_order && catalog_.traffic.can_evict;
    for (size_t k = 0; k < moves_.evicted.size(); ++k) {
      const auto [start_tick, done_tick] = moves_.departures[k];
      if (moves_.evicted[k] >= 0) {
        left_[moves_.evicted[k]] = left_at_[done_tick];
      } else if (has_contexts) {
        const int64_t start = left_at_[start_tick] - 1;
        found_.push_back({kContextBytes, start, std::max(start + 1, left_at_[done_tick])});
      }
    }
    const auto fixed = static_cast<int64_t>(catalog_.traffic.fetches.size());
    for (size_t k = 0; k < moves_.fetches.size(); ++k) {
      const Fetch& fetch = moves_.fetches[k];
      const int64_t start = comes_at_[moves_.starts[k]]++;
      if (has_contexts) found_.push_back({kContextBytes, start, time_[fetch.first]});
      if (moves_.fetched[k] >= 0) {
        begun_[{moves_.fetched[k], fetch.first}] = start;
        continue;
      }
      const int64_t number = -1 - moves_.fetched[k];
      const int64_t end = number < fixed ? time_[fetch.end - 1] + 1
                                         : weights_until_.at(moves_.for_clones[number - fixed]);
      arrived_[number] = found_.size();
      found_.push_back({fetch.size, start, end});
    }
  }

  // Of each resident what is left of it in front of the next gap; it is cut where a temporary in it
  // is away. What is made again behind its last reader lies elsewhere.
  void AddTemporaries() {
    for (const Rectangle& r : catalog_.shared.residents) {
      rest_.push_back(found_.size());
      found_.push_back({r.size, time_[r.start], time_[r.end - 1] + 1});
    }
    pieces_.resize(catalog_.temporaries.size());
    for (int64_t n = 0; n < state_.count(); ++n) {
      const Temporary& t = catalog_.temporaries[n];
      if (t.resident >= 0) {
        AddTemporary(n);
      } else if (t.size >= catalog_.shared.smallest) {
        AddCopies(n);
      }
    }
  }

  // What comes behind the gaps of a temporary that itself lies in bytes that are there anyway.
  void AddCopies(int64_t n) {
    const std::vector<Gap>& gaps = state_.taken_[n];
    for (size_t k = 0; k < gaps.size(); ++k) {
      const Tick last = k + 1 < gaps.size() ? gaps[k + 1].start : state_.accesses_[n].back();
      const int64_t start = ThereFrom({n, gaps[k].end});
      pieces_[n].push_back(found_.size());
      found_.push_back({catalog_.temporaries[n].size, start,
                        std::max(start + 1, ReadUntil(n, last))});
    }
  }

  // The time from which a temporary is there again at the end of a gap.
  int64_t ThereFrom(const GapKey& key) const {
    if (const auto fetched = begun_.find(key); fetched != begun_.end()) return fetched->second;
    const auto made = made_at_.find(key);
    return made != made_at_.end() ? made->second : time_[key.second];
  }

  void AddTemporary(int64_t n) {
    const Temporary& t = catalog_.temporaries[n];
    const std::vector<Gap>& gaps = state_.taken_[n];
    const Tick last = state_.accesses_[n].back(), last_own = state_.LastOwnAccess(n);
    Piece piece = rest_[t.resident];
    pieces_[n].push_back(piece);
    for (size_t k = 0; k < gaps.size(); ++k) {
      const Gap& gap = gaps[k];
      const bool is_own = gap.start < last_own;
      const int64_t end = found_[piece].end;
      int64_t gone = ReadUntil(n, gap.start);
      if (const auto at = left_.find(n); at != left_.end() && k == 0) {
        read_last_[piece] = gone;
        gone = std::max(gone, at->second);
      }
      if (is_own || piece != rest_[t.resident] || gone > end) found_[piece].end = gone;
      const GapKey key{n, gap.end};
      const int64_t start = ThereFrom(key);
      piece = found_.size();
      if (begun_.count(key)) brought_.insert(piece);
      found_.push_back({t.size, start, std::max(start + 1, is_own ? end : start + 1)});
      pieces_[n].push_back(piece);
      if (is_own) rest_[t.resident] = piece;
    }
    if (last > last_own || state_.IsPassing(n, last) || piece != rest_[t.resident]) {
      found_[piece].end =
          std::max({found_[piece].end, found_[piece].start + 1, ReadUntil(n, last)});
    }
  }

  // The time behind the reader of a temporary at `last`.
  int64_t ReadUntil(int64_t n, Tick last) const {
    if (!state_.IsPassing(n, last)) return time_[last] + 1;
    const auto until = read_until_.find({n, last});
    return until == read_until_.end() ? time_[last] : until->second;
  }

  // What leaves whatever is taken is there until it has left.
  void HoldUntilLeft() {
    const std::vector<int64_t>& holders = catalog_.shared.holders;
    const auto residents = static_cast<int64_t>(rest_.size());
    for (size_t k = 0; k < moves_.evicted.size(); ++k) {
      const int64_t holder = moves_.evicted[k] < 0 ? holders[-1 - moves_.evicted[k]] : -1;
      if (holder < 0) continue;
      // A copy that is kept for a clone behind the last reader is another one's, and there for longer.
      const auto copy = arrived_.find(holder - residents);
      if (holder >= residents && copy == arrived_.end()) continue;
      const Piece piece = holder < residents ? rest_[holder] : copy->second;
      read_last_.try_emplace(piece, found_[piece].end);
      found_[piece].end = std::max(found_[piece].end, left_at_[moves_.departures[k].done]);
    }
  }

  // What is written over an operand takes no bytes of its own.
  void LieInOperands() {
    for (const Tick tick : catalog_.shared.joined) joined_.push_back(time_[tick]);
    for (int64_t n = 0; n < state_.count(); ++n) {
      const Temporary& t = catalog_.temporaries[n];
      LieInOneOf(t.over, n, time_[t.written]);
    }
    for (const auto& [tick, made] : clones_) {
      for (const Clone& clone : made) {
        for (const int64_t n : clone.elements) LieInOneOf(clone.last_read, n, made_at_[{n, tick}]);
      }
    }
  }

  // Has what is made at `now` lie in the first of these that ends there and may be written over.
  void LieInOneOf(const std::vector<int64_t>& operands, int64_t n, int64_t now) {
    const Piece own = PieceOf(n, [&](Piece k) { return found_[k].start == now; });
    if (own == found_.size()) return;
    for (const int64_t operand : operands) {
      if (!catalog_.temporaries[n].MayLieIn(operand)) continue;
      const Piece over = PieceOf(
          operand, [&](Piece k) { return found_[k].end == now + 1 && !brought_.count(k); });
      if (over == found_.size() || over == own) continue;
      found_[own].start = found_[over].start;
      found_[over].end = found_[over].start;
      joined_.push_back(now);
      return;
    }
  }

  // The first piece of a temporary for which that is true, or the number of all.
  template <typename IsIt>
  Piece PieceOf(int64_t n, IsIt&& is_it) const {
    const auto at = std::find_if(pieces_[n].begin(), pieces_[n].end(), is_it);
    return at == pieces_[n].end() ? found_.size() : *at;
  }

  // Of what starts at once and is as large, what is read for longer comes later.
  std::vector<Rectangle> InOrder() const {
    std::vector<std::pair<int64_t, Rectangle>> ordered;
    for (Piece k = 0; k < found_.size(); ++k) {
      if (found_[k].end <= found_[k].start) continue;
      const auto at = read_last_.find(k);
      ordered.emplace_back(at == read_last_.end() ? found_[k].end : at->second, found_[k]);
    }
    std::stable_sort(ordered.begin(), ordered.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<Rectangle> found;
    for (const auto& [end, rectangle] : ordered) found.push_back(rectangle);
    return found;
  }

  const GapState& state_;
  const Catalog& catalog_;
  const Moves& moves_;
  std::vector<Rectangle> found_;
  // Of each tick: the time of its instruction; behind what leaves there; of the next that comes.
  std::vector<int64_t> time_, left_at_, comes_at_;
  std::map<Tick, std::vector<Clone>> clones_;
  int64_t clone_count_ = 0;
  std::map<GapKey, int64_t> made_at_, read_until_;  // By the tick in front of which clones stand.
  std::map<std::pair<Tick, int64_t>, int64_t> weights_until_;  // Read by clones.
  std::map<int64_t, int64_t> left_;   // Of what is evicted, the time at which it has gone.
  std::map<GapKey, int64_t> begun_;   // Of what is fetched.
  std::map<int64_t, Piece> arrived_;  // Of what is fetched whatever is taken.
  std::vector<Piece> rest_;           // Of each resident, behind the gaps so far.
  std::vector<std::vector<Piece>> pieces_;  // Of each temporary.
  std::set<Piece> brought_;                 // Those that are fetched.
  std::map<Piece, int64_t> read_last_;      // Of what is there until it has left.
  std::vector<int64_t> joined_;  // When something else is written into bytes that are taken.
};

GapState::Fitted GapState::Tightened(int64_t capacity, int64_t packed, int64_t slots,
                                     double enough) const {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const int64_t least = MostLoad(0, ticks_);
  Fitted best{{}, std::numeric_limits<double>::infinity(), {kMost, kMost}};
  for (int64_t tightened = 0; tightened <= kTightened; ++tightened) {
    Moves moves;
    if (!Schedule(capacity, slots, &moves)) break;
    const double cost = Cost(moves);
    if (tightened == 0) best.cost = cost;
    if (cost >= enough) break;
    const Packed now = Sketch(*this, moves).Pack(packed);
    if (now.over < best.packed.over) best = {std::move(moves), cost, now};
    if (now.over == 0 || capacity <= least || tightened == kTightened) break;
    // Steps double, and the last one leaves transfers no bytes but those they need.
    const int64_t spare = (capacity - least) >> (kTightened - 1 - tightened);
    const int64_t step = std::max(now.bytes - packed, spare);
    capacity = std::max(least, capacity - step);
  }
  return best;
}

}  // namespace memplan
