// When what moves with the gaps that are taken moves, and what a step takes then.

#include <algorithm>
#include <numeric>
#include <tuple>

#include "gap_state.h"

namespace memplan {

// Schedules all transfers; false where they do not fit. Copies are dropped between two reads, or
// kept where there is room for them, whichever is faster; see `placement`.
bool GapState::Schedule(int64_t capacity, int64_t slots, Moves* moves) const {
  const bool fits = Schedule(capacity, slots, false, moves);
  if (!fits || catalog_->weights.empty()) return fits;
  Moves kept;
  if (Schedule(capacity, slots, true, &kept) && kept.fetches.size() < moves->fetches.size() &&
      Cost(kept) < Cost(*moves)) {
    *moves = std::move(kept);
  }
  return true;
}

// Has one fetch for several reads where there is room for the copy between them, the shortest time
// first; see `problem.fetches`.
void GapState::KeepCopies(std::vector<int64_t> room, std::vector<Coming>* coming) const {
  std::vector<std::vector<Coming>> apart(catalog_->weights.size());
  std::vector<Coming> others;
  for (const Coming& c : *coming) {
    for (Tick tick = c.fetch.first; tick < c.fetch.end; ++tick) room[tick] -= c.fetch.size;
    (c.weight < 0 ? others : apart[c.weight]).push_back(c);
  }
  std::vector<std::tuple<Tick, size_t, Tick>> gaps;  // How long, of which weight, from where on.
  for (size_t m = 0; m < apart.size(); ++m) {
    std::sort(apart[m].begin(), apart[m].end(),
              [](const Coming& a, const Coming& b) { return a.fetch.first < b.fetch.first; });
    for (size_t k = 0; k + 1 < apart[m].size(); ++k) {
      const Tick end = apart[m][k].fetch.end;
      gaps.emplace_back(apart[m][k + 1].fetch.first - end, m, end);
    }
  }
  std::sort(gaps.begin(), gaps.end());
  for (const auto& [ticks, m, start] : gaps) {
    const int64_t size = catalog_->weights[m].size;
    const auto first = room.begin() + start, end = first + ticks;
    if (ticks > 0 && *std::min_element(first, end) < size) continue;
    for (auto tick = first; tick < end; ++tick) *tick -= size;
    const auto before = std::find_if(apart[m].begin(), apart[m].end(), [start = start](const Coming& c) {
      return c.fetch.end == start;
    });
    before->fetch.end = (before + 1)->fetch.end;
    before->of = (before + 1)->of;
    apart[m].erase(before + 1);
  }
  coming->swap(others);
  for (const std::vector<Coming>& kept : apart) {
    coming->insert(coming->end(), kept.begin(), kept.end());
  }
}

bool GapState::Schedule(int64_t capacity, int64_t slots, bool keeps, Moves* moves) const {
  if (MostLoad(0, ticks_) > capacity) return false;
  const Traffic& traffic = catalog_->traffic;
  std::vector<int64_t> load(load_, load_ + ticks_);
  for (Tick tick = 0; tick < ticks_; ++tick) load[tick] -= catalog_->fetched[tick];
  struct Leaving {
    Eviction eviction;
    int64_t temporary, number;
  };
  std::vector<Leaving> leaving;
  std::vector<Coming> coming;
  for (const Eviction& eviction : traffic.evictions) {
    const auto number = static_cast<int64_t>(leaving.size());
    leaving.push_back({eviction, -1 - number, number});
  }
  for (const Fetch& fetch : traffic.fetches) {
    const size_t k = coming.size();
    coming.push_back({fetch, -1 - static_cast<int64_t>(k), traffic.weights[k]});
  }
  for (const auto& [tick, roles] : clones_) {
    if (catalog_->weights.empty()) break;
    std::set<int64_t> read;
    for (const Clone& clone : ClonesBefore(tick)) read.merge(WeightsFor(clone, tick));
    for (const int64_t m : read) {
      // One after the other: the load has the most at once.
      const int64_t size = catalog_->weights[m].size;
      load[tick] -= size;
      coming.push_back({{size, tick, tick + 1, -1}, -1 - static_cast<int64_t>(coming.size()), m});
      moves->for_clones.emplace_back(tick, m);
    }
  }
  for (int64_t n = 0; n < count(); ++n) {
    if (!IsAway(n)) continue;
    const Temporary& t = catalog_->temporaries[n];
    const std::vector<Gap>& gaps = taken_[n];
    const auto number = static_cast<int64_t>(leaving.size());
    leaving.push_back({{t.size, t.written + 1, gaps[0].start + 1, -1, true}, n, number});
    for (size_t k = 0; k < gaps.size(); ++k) {
      if (gaps[k].action != Action::kEvict) continue;
      const Tick end = (k + 1 < gaps.size() ? gaps[k + 1].start : accesses_[n].back()) + 1;
      coming.push_back({{t.size, gaps[k].end, end, number}, n, -1});
      for (Tick tick = gaps[k].end; tick < end; ++tick) load[tick] -= t.size;
    }
  }
  std::stable_sort(leaving.begin(), leaving.end(), [](const Leaving& a, const Leaving& b) {
    return a.eviction.written < b.eviction.written;
  });
  std::vector<int64_t> place(leaving.size());
  for (size_t k = 0; k < leaving.size(); ++k) place[leaving[k].number] = static_cast<int64_t>(k);
  if (keeps) {
    std::vector<int64_t> room(ticks_);
    for (Tick tick = 0; tick < ticks_; ++tick) room[tick] = capacity - load[tick];
    KeepCopies(std::move(room), &coming);
  }
  std::stable_sort(coming.begin(), coming.end(), [](const Coming& a, const Coming& b) {
    return std::tie(a.fetch.first, a.fetch.end) < std::tie(b.fetch.first, b.fetch.end);
  });
  for (const Leaving& l : leaving) {
    moves->evictions.push_back(l.eviction);
    moves->evicted.push_back(l.temporary);
  }
  for (Coming& c : coming) {
    if (c.fetch.eviction >= 0) c.fetch.eviction = place[c.fetch.eviction];
    moves->fetches.push_back(c.fetch);
    moves->fetched.push_back(c.of);
  }
  moves->clock.assign(ticks_ + 1, 0.0);
  std::partial_sum(costs_, costs_ + ticks_, moves->clock.begin() + 1);
  const Compute compute{costs_,
                        moves->clock.data(),
                        load.data(),
                        catalog_->in_busy.data(),
                        catalog_->out_busy.data(),
                        ticks_};
  moves->departures = ScheduleEvictions(moves->evictions, moves->fetches, compute, capacity,
                                        traffic.out, traffic.margin);
  for (size_t n = 0; n < moves->evictions.size(); ++n) {
    const Eviction& eviction = moves->evictions[n];
    if (!eviction.is_held) continue;
    for (Tick tick = eviction.free; tick < moves->departures[n].done; ++tick) {
      load[tick] += eviction.size;
    }
  }
  const Starts starts = ScheduleStarts(moves->fetches, moves->departures, compute, capacity,
                                       traffic.in, traffic.margin, slots, -1);
  moves->starts = starts.ticks;
  return starts.tight < 0;
}

double GapState::Cost(int64_t capacity, int64_t slots) const {
  Moves moves;
  return Schedule(capacity, slots, &moves) ? Cost(moves)
                                          : std::numeric_limits<double>::infinity();
}

double GapState::Cost(const Moves& moves) const {
  const Compute compute{
      costs_,  moves.clock.data(),        nullptr, catalog_->in_busy.data(),
      catalog_->out_busy.data(), ticks_};
  const Traffic& traffic = catalog_->traffic;
  const double step_s = StepTimes(moves.fetches, moves.starts, moves.evictions, moves.departures,
                                  compute, traffic.in, traffic.out, traffic.is_one_queue)
                            .step_s;
  return step_s + Charge(moves);
}

// What is charged beside the seconds of a step: see `Prices`.
double GapState::Charge(const Moves& moves) const {
  int64_t bytes = 0;
  for (const Fetch& fetch : moves.fetches) bytes += fetch.size;
  for (const Eviction& eviction : moves.evictions) bytes += eviction.size;
  double found = catalog_->traffic.byte_s * static_cast<double>(bytes);
  for (const auto& [tick, roles] : clones_) {
    for (const Clone& clone : ClonesBefore(tick)) {
      found += catalog_->temporaries[clone.elements[0]].charge_s;
    }
  }
  return found;
}

}  // namespace memplan
