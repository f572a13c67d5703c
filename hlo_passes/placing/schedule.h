// When transfers start and end, and how long a step takes with them: on one link in each direction,
// each of which serves what is issued in order. What the numbers are for, eviction.py and
// prefetch.py say.

#ifndef MEMPLAN_HLO_PASSES_SCHEDULE_H_
#define MEMPLAN_HLO_PASSES_SCHEDULE_H_

#include <cstdint>
#include <vector>

namespace memplan {

using Tick = int64_t;

struct Link {
  double bytes_per_s, latency_s;
};

// See `prefetch.Fetch`; `eviction` is -1 where there is none.
struct Fetch {
  int64_t size;
  Tick first, end;
  int64_t eviction;
};

// See `problem.Evicted`: `is_held` where there is a holder, and `returned` is -1 of a temporary.
struct Eviction {
  int64_t size;
  Tick written, free, returned;
  bool is_held;
};

struct Departure {
  Tick start, done;
};

// A schedule of the compute: seconds of each tick, before each tick and of all; bytes that are
// there at each; and seconds for which what runs there occupies either link itself, no more than
// its own.
struct Compute {
  const double* costs;
  const double* clock;
  const int64_t* load;
  const double* in_busy;
  const double* out_busy;
  int64_t ticks;
};

// See `eviction.schedule_evictions`.
std::vector<Departure> ScheduleEvictions(const std::vector<Eviction>& evictions,
                                         const std::vector<Fetch>& fetches, const Compute& compute,
                                         int64_t capacity, const Link& link, double margin);

struct Starts {
  std::vector<Tick> ticks;
  Tick tight = -1;    // Where it does not fit: this tick needs so many bytes.
  int64_t needed = 0;
};

// See `prefetch.schedule_starts`; `slots` and `ring_alignment` are -1 for none.
Starts ScheduleStarts(const std::vector<Fetch>& fetches, const std::vector<Departure>& departures,
                      const Compute& compute, int64_t capacity, const Link& link, double margin,
                      int64_t slots, int64_t ring_alignment);

// Seconds: of the step; at which the link begins with each fetch; and, of each tick, at which what
// is issued there is.
struct Times {
  double step_s;
  std::vector<double> begins, before;
};

Times StepTimes(const std::vector<Fetch>& fetches, const std::vector<Tick>& starts,
                const std::vector<Eviction>& evictions, const std::vector<Departure>& departures,
                const Compute& compute, const Link& in, const Link& out, bool is_one_queue);

}  // namespace memplan

#endif  // MEMPLAN_HLO_PASSES_SCHEDULE_H_
