// Rectangles, in time and bytes, get offsets one after the other.

#ifndef MEMPLAN_HLO_PASSES_PLACE_H_
#define MEMPLAN_HLO_PASSES_PLACE_H_

#include <cstdint>
#include <vector>

#include "occupancy.h"

namespace memplan {

class Placer {
 public:
  // Ranges of time end at `moments` at the latest. Every offset is a multiple of `alignment`; of
  // the gaps that have room the lowest is taken, or else the smallest, of equal ones the lowest.
  Placer(int64_t moments, int64_t alignment, bool lowest);

  // The offset of `size` bytes during some ranges, which are put in order.
  int64_t Put(int64_t size, std::vector<Interval>* lives);

 private:
  int64_t alignment_;
  bool lowest_;
  Occupancy occupancy_;
  Runs runs_;
};

struct Rectangle {
  int64_t size, start, end;
};

// In which order: see `assignment.assign_offsets`.
enum class Order { kSpatial, kTemporal, kStart };

// What a packing takes, and by how much each rectangle reaches above some limit, in all.
struct Packed {
  int64_t bytes, over;
};

// The least of several orders, in each of which the smallest gap that fits is taken. O(n log n) and
// unions of intervals, as long as there are holes.
Packed Pack(const std::vector<Rectangle>& rectangles, int64_t alignment,
            const std::vector<Order>& orders, int64_t within);

}  // namespace memplan

#endif  // MEMPLAN_HLO_PASSES_PLACE_H_
