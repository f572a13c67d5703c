// Transfers as Python hands them over: rows of numbers, one behind the other.

#ifndef MEMPLAN_HLO_PASSES_SCHEDULE_ROWS_H_
#define MEMPLAN_HLO_PASSES_SCHEDULE_ROWS_H_

#include "../extension.h"

#include <stdexcept>
#include <vector>

#include "schedule.h"

namespace memplan {

using Integers = Array<int64_t>;
using Floats = Array<double>;

// Rows of numbers (see `_schedule.pyi`), of which each is a `Row` that `make` returns.
template <typename Row, typename Make>
std::vector<Row> Rows(const Integers& numbers, int64_t columns, Make&& make) {
  if (numbers.size() % columns) throw std::invalid_argument("rows of another length");
  std::vector<Row> found;
  for (int64_t k = 0; k < numbers.size(); k += columns) found.push_back(make(numbers.data() + k));
  return found;
}

inline void CheckTick(Tick tick, Tick end) {
  if (tick < 0 || tick > end) throw std::out_of_range("there is no such tick");
}

inline std::vector<Fetch> Fetches(const Integers& numbers, Tick ticks, int64_t evictions) {
  return Rows<Fetch>(numbers, 4, [=](const int64_t* row) {
    CheckTick(row[1], row[2]);
    CheckTick(row[2], ticks);
    if (row[3] >= evictions) throw std::out_of_range("there is no such eviction");
    return Fetch{row[0], row[1], row[2], row[3]};
  });
}

inline std::vector<Eviction> Evictions(const Integers& numbers, Tick ticks) {
  return Rows<Eviction>(numbers, 5, [=](const int64_t* row) {
    for (const int64_t tick : {row[1], row[2]}) CheckTick(tick, ticks);
    return Eviction{row[0], row[1], row[2], row[3], row[4] != 0};
  });
}

inline std::vector<Departure> Departures(const Integers& numbers, Tick ticks) {
  return Rows<Departure>(numbers, 2, [=](const int64_t* row) {
    for (const int64_t tick : {row[0], row[1]}) CheckTick(tick, ticks);
    return Departure{row[0], row[1]};
  });
}

}  // namespace memplan

#endif  // MEMPLAN_HLO_PASSES_SCHEDULE_ROWS_H_
