// Which offsets are taken during a range of time, while rectangles are placed in any order.
//
//     offset
//       │ ┌─────────┐                  taken during q: [0, 2) and [3, 4), whatever the number of
//     3 │ └─────────┘                  rectangles that take them: adjacent ones count as one
//     2 │ ┌──────┐┌─────┐
//       │ │      │└─────┘┌───┐
//     0 └─┴──────┴───────┴───┴► time
//                [─ q ─)
//
// What is live during a range either holds bytes when it begins or starts within it. So two
// indices are kept, and each of their nodes has the *union* of its rectangles' offsets:
//
//     held      a segment tree (Bentley 1977): a rectangle stands at the O(log n) nodes whose
//               spans make up its life, and what is held at a moment at the nodes above its leaf
//     started   blocks of 1, 16, 256, ... moments: a rectangle stands in one of each size
//
// A packing leaves few holes, so that the unions are short lists: of training steps of 50,000
// instructions, with thousands of rectangles live at once, a query looks at 10 to 100 intervals;
// at 2,000 beside as many transfers, whose union is of 400.

#ifndef MEMPLAN_HLO_PASSES_OCCUPANCY_H_
#define MEMPLAN_HLO_PASSES_OCCUPANCY_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace memplan {

using Interval = std::pair<int64_t, int64_t>;  // Half-open, of offsets or of moments.

// Sorted intervals of several sources, of which the union is asked for.
class Runs {
 public:
  void Clear();
  void Add(const std::vector<Interval>& run);

  // Returns the union, sorted; neighbours count as one. A merge sort: of n intervals in k runs
  // O(n log k), and less where the union is shorter than the sum.
  const std::vector<Interval>& United();

 private:
  std::vector<Interval> intervals_, merged_;
  std::vector<size_t> ends_;  // Of each run in `intervals_`.
};

class Occupancy {
 public:
  // Nothing is taken at first, at any of the moments 0 to `moments`.
  explicit Occupancy(int64_t moments);

  // Takes the offsets from `bottom` to `top` during a range of moments, not empty. O(log
  // moments) unions. Throws std::out_of_range for other moments.
  void Take(Interval live, int64_t bottom, int64_t top);

  // Adds what is taken at any moment of a range, as O(log moments) runs.
  void Taken(Interval live, Runs* found) const;

 private:
  void Check(Interval live) const;

  int64_t leaves_;
  std::vector<std::vector<Interval>> held_;
  std::vector<std::vector<std::vector<Interval>>> started_;
};

}  // namespace memplan

#endif  // MEMPLAN_HLO_PASSES_OCCUPANCY_H_
