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

int64_t GapState::PackedBytes(int64_t capacity, int64_t slots) const {
  Moves moves;
  if (!Schedule(capacity, slots, &moves)) return std::numeric_limits<int64_t>::max();
  return PackedBytes(moves);
}

int64_t GapState::PackedBytes(const Moves& moves) const {
  const Shared& shared = catalog_->shared;
  const std::vector<Temporary>& temporaries = catalog_->temporaries;

  // Where each instruction of the program stands, and in front of it, in this order: what leaves and
  // has left, comes and has come, clones.
  std::vector<int64_t> time(ticks_ + 1), left_at(ticks_ + 1, 0), comes_at(ticks_ + 1, 0);
  std::map<Tick, std::vector<Clone>> clones;
  std::vector<int64_t> before(ticks_ + 1, 0);
  int64_t clone_count = 0;
  for (const auto& [tick, roles] : clones_) {
    clones[tick] = ClonesBefore(tick);
    before[tick] = static_cast<int64_t>(clones[tick].size());
    clone_count += before[tick];
  }
  for (const Departure& departure : moves.departures) {
    ++left_at[departure.start];
    ++left_at[departure.done];
  }
  for (size_t k = 0; k < moves.fetches.size(); ++k) {
    ++comes_at[moves.starts[k]];
    ++before[moves.fetches[k].first];
  }
  for (Tick tick = 0, now = 0; tick <= ticks_; ++tick) {
    left_at[tick] = now += left_at[tick];
    const int64_t coming = comes_at[tick];
    comes_at[tick] = now;
    time[tick] = now += coming + before[tick];
    ++now;
  }

  // When each temporary that is made again is there, and the end of what waits for clones.
  std::map<std::pair<int64_t, Tick>, int64_t> made_at;
  std::vector<Rectangle> found;
  std::map<std::pair<int64_t, Tick>, int64_t> read_until;
  std::map<std::pair<Tick, int64_t>, int64_t> weights_until;  // Read by clones.
  for (const auto& [tick, made] : clones) {
    const int64_t first = time[tick] - static_cast<int64_t>(made.size());
    for (size_t k = 0; k < made.size(); ++k) {
      const int64_t now = first + static_cast<int64_t>(k);
      int64_t all = 0;
      for (const int64_t n : made[k].elements) {
        made_at[{n, tick}] = now;
        all += temporaries[n].size;
      }
      for (const int64_t n : made[k].last_read) read_until[{n, tick}] = now + 1;
      for (const int64_t m : WeightsFor(made[k], tick)) weights_until[{tick, m}] = now + 1;
      const Temporary& t = temporaries[made[k].elements[0]];
      const int64_t beside = t.beside - (all - t.size);
      if (beside > 0 && beside >= shared.smallest) found.push_back({beside, now, now + 1});
    }
  }

  const auto end_at = [&](int64_t n, Tick last) {  // Behind the reader at `last`.
    if (!IsPassing(n, last)) return time[last] + 1;
    const auto until = read_until.find({n, last});
    return until == read_until.end() ? time[last] : until->second;
  };
  std::map<int64_t, int64_t> left;  // Of what is evicted, the time at which it has gone.
  for (size_t k = 0; k < moves.evicted.size(); ++k) {
    if (moves.evicted[k] >= 0) left[moves.evicted[k]] = left_at[moves.departures[k].done];
  }
  // On GPU a copy has a word of its own while it is on its way, but for what is evicted.
  const bool has_contexts = !shared.in_order && catalog_->traffic.can_evict;
  for (size_t k = 0; k < moves.evicted.size(); ++k) {
    if (!has_contexts || moves.evicted[k] >= 0) continue;
    const int64_t start = left_at[moves.departures[k].start] - 1;
    found.push_back({kContextBytes, start, std::max(start + 1, left_at[moves.departures[k].done])});
  }
  std::map<std::pair<int64_t, Tick>, int64_t> begun;  // Of what is fetched.
  std::map<int64_t, size_t> arrived;  // Of what is fetched whatever is taken.
  for (size_t k = 0; k < moves.fetches.size(); ++k) {
    const int64_t start = comes_at[moves.starts[k]]++;
    if (has_contexts) found.push_back({kContextBytes, start, time[moves.fetches[k].first]});
    if (moves.fetched[k] >= 0) {
      begun[{moves.fetched[k], moves.fetches[k].first}] = start;
      continue;
    }
    const int64_t number = -1 - moves.fetched[k];
    const auto fixed = static_cast<int64_t>(catalog_->traffic.fetches.size());
    const int64_t end = number < fixed ? time[moves.fetches[k].end - 1] + 1
                                       : weights_until.at(moves.for_clones[number - fixed]);
    arrived[number] = found.size();
    found.push_back({moves.fetches[k].size, start, end});
  }

  // Of each resident what is left of it in front of the next gap; it is cut where a temporary in it
  // is away. What is made again behind its last reader lies elsewhere.
  std::vector<size_t> rest;
  for (const Rectangle& r : shared.residents) {
    rest.push_back(found.size());
    found.push_back({r.size, time[r.start], time[r.end - 1] + 1});
  }
  std::vector<std::vector<size_t>> pieces(temporaries.size());
  std::set<size_t> brought;  // Pieces that are fetched.
  std::vector<int64_t> joined;  // When something else is written into bytes that are taken.
  for (const Tick tick : shared.joined) joined.push_back(time[tick]);
  std::map<size_t, int64_t> read_last;  // Of what is there until it has left.
  for (int64_t n = 0; n < count(); ++n) {
    const Temporary& t = temporaries[n];
    if (t.resident < 0) continue;
    const std::vector<Gap>& gaps = taken_[n];
    const Tick last = accesses_[n].back(), last_own = LastOwnAccess(n);
    size_t piece = rest[t.resident];
    pieces[n].push_back(piece);
    for (size_t k = 0; k < gaps.size(); ++k) {
      const Gap& gap = gaps[k];
      const bool is_own = gap.start < last_own;
      const int64_t end = found[piece].end;
      int64_t gone = end_at(n, gap.start);
      if (const auto at = left.find(n); at != left.end() && k == 0) {
        read_last[piece] = gone;
        gone = std::max(gone, at->second);
      }
      if (is_own || piece != rest[t.resident] || gone > end) found[piece].end = gone;
      const GapKey key{n, gap.end};
      const auto fetched = begun.find(key);
      const auto made = made_at.find(key);
      const int64_t start = fetched != begun.end()  ? fetched->second
                            : made != made_at.end() ? made->second
                                                    : time[gap.end];
      piece = found.size();
      if (fetched != begun.end()) brought.insert(found.size());
      found.push_back({t.size, start, std::max(start + 1, is_own ? end : start + 1)});
      pieces[n].push_back(piece);
      if (is_own) rest[t.resident] = piece;
    }
    if (last > last_own || IsPassing(n, last) || piece != rest[t.resident]) {
      found[piece].end = std::max({found[piece].end, found[piece].start + 1, end_at(n, last)});
    }
  }
  // What leaves whatever is taken is there until it has left.
  const auto residents = static_cast<int64_t>(rest.size());
  for (size_t k = 0; k < moves.evicted.size(); ++k) {
    const int64_t holder = moves.evicted[k] < 0 ? shared.holders[-1 - moves.evicted[k]] : -1;
    if (holder < 0) continue;
    // A copy that is kept for a clone behind the last reader is another one's, and there for longer.
    const auto copy = arrived.find(holder - residents);
    if (holder >= residents && copy == arrived.end()) continue;
    const size_t piece = holder < residents ? rest[holder] : copy->second;
    read_last.try_emplace(piece, found[piece].end);
    found[piece].end = std::max(found[piece].end, left_at[moves.departures[k].done]);
  }
  // What is written over an operand takes no bytes of its own.
  const auto lay_in = [&](int64_t n, int64_t now, const std::vector<int64_t>& operands) {
    const auto piece_at = [&](int64_t of, auto&& is_it) {
      const auto at = std::find_if(pieces[of].begin(), pieces[of].end(), is_it);
      return at == pieces[of].end() ? found.size() : *at;
    };
    const size_t own = piece_at(n, [&](size_t k) { return found[k].start == now; });
    if (own == found.size()) return;
    for (const int64_t operand : operands) {
      if (!temporaries[n].MayLieIn(operand)) continue;
      const size_t over = piece_at(
          operand, [&](size_t k) { return found[k].end == now + 1 && !brought.count(k); });
      if (over == found.size() || over == own) continue;
      found[own].start = found[over].start;
      found[over].end = found[over].start;
      joined.push_back(now);
      return;
    }
  };
  for (int64_t n = 0; n < count(); ++n) {
    lay_in(n, time[temporaries[n].written], temporaries[n].over);
  }
  for (const auto& [tick, made] : clones) {
    for (const Clone& clone : made) {
      for (const int64_t n : clone.elements) lay_in(n, made_at[{n, tick}], clone.last_read);
    }
  }
  // Of what starts at once and is as large, what is read for longer comes later.
  std::vector<std::pair<int64_t, Rectangle>> ordered;
  for (size_t k = 0; k < found.size(); ++k) {
    if (found[k].end <= found[k].start) continue;
    const auto at = read_last.find(k);
    ordered.emplace_back(at == read_last.end() ? found[k].end : at->second, found[k]);
  }
  std::stable_sort(ordered.begin(), ordered.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  found.clear();
  for (const auto& [end, rectangle] : ordered) found.push_back(rectangle);
  if (shared.in_order) {
    const int64_t tables = shared.table * clone_count;
    return tables + memplan::PackedBytes(found, shared.alignment, {Order::kStart});
  }
  CountInEvents(joined, &found);
  return memplan::PackedBytes(found, shared.alignment, {Order::kSpatial, Order::kTemporal});
}

}  // namespace memplan
