#include "schedule.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

namespace memplan {
namespace {

double Seconds(int64_t size, const Link& link, double margin) {
  return static_cast<double>(size) / link.bytes_per_s * margin;
}

// The latest start ticks with which every fetch is done at its first read, if the link does
// nothing but what compute asks of it, and is `margin` times slower than it says.
std::vector<Tick> JustInTime(const std::vector<Fetch>& fetches, const Compute& compute,
                             const Link& link, double margin) {
  std::vector<Tick> latest(fetches.size());
  std::vector<double> idle(compute.ticks + 1);  // Seconds before each tick that the link has free.
  double busy = 0;
  for (Tick tick = 0; tick <= compute.ticks; ++tick) {
    idle[tick] = compute.clock[tick] - busy;
    if (tick < compute.ticks) busy += compute.in_busy[tick];
  }
  double deadline = std::numeric_limits<double>::infinity();
  for (size_t i = fetches.size(); i-- > 0;) {
    deadline = std::min(deadline, idle[fetches[i].first]) - Seconds(fetches[i].size, link, margin);
    const auto behind = std::upper_bound(idle.begin(), idle.end(), deadline - link.latency_s);
    latest[i] = std::max<Tick>(0, behind - idle.begin() - 1);
  }
  return latest;
}

// Fetches at the offsets that best fit gives them in the order of their starts.
class Ring {
 public:
  Ring(int64_t capacity, int64_t alignment) : capacity_(capacity), alignment_(alignment) {}

  // The first tick from `earliest` on with a gap for `fetch`, which is taken; -1 where there is
  // none before its first reader.
  Tick Place(const Fetch& fetch, Tick earliest) {
    std::vector<Tick> ticks{earliest};
    for (const Held& held : held_) {
      if (earliest < held.end && held.end <= fetch.first) ticks.push_back(held.end);
    }
    std::sort(ticks.begin(), ticks.end());
    for (const Tick tick : ticks) {
      held_.erase(std::remove_if(held_.begin(), held_.end(),
                                 [tick](const Held& held) { return held.end <= tick; }),
                  held_.end());
      const int64_t offset = Offset(fetch.size);
      if (offset + fetch.size > capacity_) continue;
      held_.push_back({offset, offset + fetch.size, fetch.end});
      std::sort(held_.begin(), held_.end(), [](const Held& a, const Held& b) {
        return std::tie(a.offset, a.top, a.end) < std::tie(b.offset, b.top, b.end);
      });
      return tick;
    }
    return -1;
  }

 private:
  struct Held {
    int64_t offset, top;
    Tick end;
  };

  // Of the smallest gap that has room, of equal ones the lowest; else above all.
  int64_t Offset(int64_t size) const {
    int64_t floor = 0, found = -1, smallest = 0;
    for (const Held& held : held_) {
      const int64_t room = held.offset - floor;
      if (room >= size && (found < 0 || room < smallest)) {
        found = floor;
        smallest = room;
      }
      floor = (held.top + alignment_ - 1) / alignment_ * alignment_;
    }
    return found < 0 ? floor : found;
  }

  int64_t capacity_, alignment_;
  std::vector<Held> held_;  // By offset.
};

}  // namespace

std::vector<Departure> ScheduleEvictions(const std::vector<Eviction>& evictions,
                                         const std::vector<Fetch>& fetches, const Compute& compute,
                                         int64_t capacity, const Link& link, double margin) {
  const Tick ticks = compute.ticks;
  const size_t count = evictions.size();
  std::vector<Tick> due;
  for (const Eviction& e : evictions) due.push_back(e.returned < 0 ? ticks : e.returned);
  std::vector<int64_t> change(ticks + 1, 0);
  for (const Fetch& fetch : fetches) {
    change[fetch.first] += fetch.size;
    change[fetch.end] -= fetch.size;
    if (fetch.eviction >= 0) due[fetch.eviction] = std::min(due[fetch.eviction], fetch.first);
  }
  std::vector<Departure> departures;
  for (const Eviction& e : evictions) departures.push_back({e.written, e.free});
  std::vector<size_t> by_free(count);
  std::iota(by_free.begin(), by_free.end(), 0);
  std::stable_sort(by_free.begin(), by_free.end(),
                   [&](size_t a, size_t b) { return evictions[a].free < evictions[b].free; });
  std::vector<double> ends(count, 0.0);
  double now = 0, link_free = 0;
  int64_t held = 0, fetched = 0;
  size_t issued = 0, freed = 0;
  std::vector<size_t> waiting;  // Nobody reads them any more; in the order of the link.
  for (Tick tick = 0; tick <= ticks; ++tick) {
    fetched += change[tick];
    const int64_t room = capacity - fetched - (tick < ticks ? compute.load[tick] : 0);
    for (; issued < count && evictions[issued].written <= tick; ++issued) {
      const double begin = std::max(now + link.latency_s, link_free);
      link_free = begin + Seconds(evictions[issued].size, link, margin);
      ends[issued] = link_free;
    }
    for (; freed < count && evictions[by_free[freed]].free <= tick; ++freed) {
      waiting.insert(std::upper_bound(waiting.begin(), waiting.end(), by_free[freed]),
                     by_free[freed]);
      held += evictions[by_free[freed]].size;
    }
    size_t still = 0;
    for (const size_t n : waiting) {
      const bool is_needed = held > room || due[n] <= tick || !evictions[n].is_held;
      if (is_needed || ends[n] <= now || tick == ticks) {
        now = std::max(now, ends[n]);
        held -= evictions[n].size;
        departures[n] = {evictions[n].written, tick};
      } else {
        waiting[still++] = n;
      }
    }
    waiting.resize(still);
    if (tick == ticks) break;
    if (compute.out_busy[tick] > 0) link_free = std::max(link_free, now) + compute.out_busy[tick];
    now += compute.costs[tick];
  }
  return departures;
}

Starts ScheduleStarts(const std::vector<Fetch>& fetches, const std::vector<Departure>& departures,
                      const Compute& compute, int64_t capacity, const Link& link, double margin,
                      int64_t slots, int64_t ring_alignment) {
  std::vector<int64_t> used(compute.load, compute.load + compute.ticks);
  std::vector<int64_t> held(slots < 0 ? 0 : compute.ticks, 0);
  int64_t most = 0;
  for (const int64_t bytes : used) most = std::max(most, bytes);
  Ring ring(capacity - most, std::max<int64_t>(1, ring_alignment));
  const std::vector<Tick> latest = JustInTime(fetches, compute, link, margin);
  Starts found;
  Tick previous = 0;
  for (size_t i = 0; i < fetches.size(); ++i) {
    const Fetch& fetch = fetches[i];
    const int64_t room = capacity - fetch.size;
    const auto tightest = std::max_element(used.begin() + fetch.first, used.begin() + fetch.end);
    if (tightest != used.begin() + fetch.end && *tightest > room) {
      found.tight = tightest - used.begin();
      found.needed = *tightest + fetch.size;
      return found;
    }
    if (slots >= 0) {
      const auto fullest = std::max_element(held.begin() + fetch.first, held.begin() + fetch.end);
      if (fullest != held.begin() + fetch.end && *fullest >= slots) {
        found.tight = fullest - held.begin();
        found.needed = capacity + fetch.size;
        return found;
      }
    }
    const Tick released = fetch.eviction < 0 || departures.empty()
                              ? 0
                              : departures[fetch.eviction].done;
    const Tick low = std::min(std::max({previous, latest[i], released}), fetch.first);
    Tick start = fetch.first;
    while (start > low && used[start - 1] <= room && (slots < 0 || held[start - 1] < slots)) {
      --start;
    }
    if (ring_alignment >= 0) {
      start = ring.Place(fetch, start);
      if (start < 0) {
        found.tight = fetch.first;
        found.needed = capacity - most + 1;
        return found;
      }
    }
    for (Tick tick = start; tick < fetch.end; ++tick) {
      used[tick] += fetch.size;
      if (slots >= 0) ++held[tick];
    }
    found.ticks.push_back(start);
    previous = start;
  }
  return found;
}

Times StepTimes(const std::vector<Fetch>& fetches, const std::vector<Tick>& starts,
                const std::vector<Eviction>& evictions, const std::vector<Departure>& departures,
                const Compute& compute, const Link& in, const Link& out, bool is_one_queue) {
  // Starts come before dones of the same tick; evictions, which may be waited for by a fetch,
  // before both; what moves bytes itself then runs.
  enum Kind { kLeaves, kLeft, kComes, kCame, kRuns };
  std::vector<std::tuple<Tick, Kind, size_t>> events;
  for (size_t i = 0; i < fetches.size(); ++i) {
    events.emplace_back(starts[i], kComes, i);
    events.emplace_back(fetches[i].first, kCame, i);
  }
  for (size_t i = 0; i < departures.size(); ++i) {
    events.emplace_back(departures[i].start, kLeaves, i);
    events.emplace_back(departures[i].done, kLeft, i);
  }
  for (Tick tick = 0; tick < compute.ticks; ++tick) {
    if (compute.in_busy[tick] > 0 || compute.out_busy[tick] > 0) {
      events.emplace_back(tick, kRuns, 0);
    }
  }
  std::sort(events.begin(), events.end());
  Times found;
  found.begins.assign(fetches.size(), 0.0);
  std::vector<double> came(fetches.size(), 0.0), left(evictions.size(), 0.0);
  std::vector<double> waited(compute.ticks + 2, 0.0);
  // With one queue for both directions there is one moment at which it is free.
  double stall = 0, free_in = 0, free_out = 0;
  double& queue_out = is_one_queue ? free_in : free_out;
  for (const auto& [tick, kind, i] : events) {
    const double now = compute.clock[tick] + stall;
    if (kind == kLeft || kind == kCame) {
      const double wait = std::max(0.0, (kind == kCame ? came[i] : left[i]) - now);
      stall += wait;
      // What starts at a tick waits for the evictions that are done there.
      waited[tick + (kind == kCame)] += wait;
    } else if (kind == kComes) {
      // The latency of a queued transfer passes while the one before it moves.
      found.begins[i] = std::max(free_in, now + in.latency_s);
      free_in = came[i] = found.begins[i] + Seconds(fetches[i].size, in, 1.0);
    } else if (kind == kRuns) {
      // Its transfers stand behind those that are under way.
      const double end = now + compute.clock[tick + 1] - compute.clock[tick];
      const auto over = [&](double busy, double* free) {
        if (busy <= 0) return 0.0;
        *free = std::max(*free, now) + busy;
        return std::max(0.0, *free - end);
      };
      const double wait = std::max(over(compute.in_busy[tick], &free_in),
                                   is_one_queue ? 0.0 : over(compute.out_busy[tick], &free_out));
      stall += wait;
      waited[tick + 1] += wait;
    } else {
      const double begin = std::max(queue_out, now + out.latency_s);
      queue_out = left[i] = begin + Seconds(evictions[i].size, out, 1.0);
    }
  }
  double so_far = 0;
  found.before.reserve(compute.ticks + 1);
  for (Tick tick = 0; tick <= compute.ticks; ++tick) {
    so_far += waited[tick];
    found.before.push_back(compute.clock[tick] + so_far);
  }
  found.step_s = std::max({compute.clock[compute.ticks] + stall, free_in, free_out});
  return found;
}

}  // namespace memplan
