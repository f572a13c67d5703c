#include "place.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <tuple>

namespace memplan {
namespace {

// The same moments in as few ranges as there can be.
void Join(std::vector<Interval>* lives) {
  std::sort(lives->begin(), lives->end());
  size_t last = 0;
  for (size_t next = 1; next < lives->size(); ++next) {
    if ((*lives)[next].first <= (*lives)[last].second) {
      (*lives)[last].second = std::max((*lives)[last].second, (*lives)[next].second);
    } else {
      (*lives)[++last] = (*lives)[next];
    }
  }
  lives->resize(last + 1);
}

// The offset of the smallest (or the lowest) gap of `size` bytes between sorted intervals that do
// not touch; of equal gaps the lowest; above them all when there is none.
int64_t Gap(const std::vector<Interval>& taken, int64_t size, bool lowest) {
  int64_t floor = 0, offset = -1, smallest = 0;
  for (const auto& [bottom, top] : taken) {
    const int64_t room = bottom - floor;
    if (room >= size && (offset < 0 || room < smallest)) {
      smallest = room;
      offset = floor;
      if (lowest || room == size) break;
    }
    floor = top;
  }
  return offset < 0 ? floor : offset;
}

}  // namespace

Placer::Placer(int64_t moments, int64_t alignment, bool lowest)
    : alignment_(alignment), lowest_(lowest), occupancy_(moments) {
  if (alignment < 1) throw std::invalid_argument("the alignment must be positive");
}

int64_t Placer::Put(int64_t size, std::vector<Interval>* lives) {
  if (size == 0) return 0;
  Join(lives);
  runs_.Clear();
  for (const Interval& live : *lives) occupancy_.Taken(live, &runs_);
  const int64_t offset = Gap(runs_.United(), size, lowest_);
  // Up to the next offset that can be given: what lies between is lost.
  const int64_t top = (offset + size + alignment_ - 1) / alignment_ * alignment_;
  for (const Interval& live : *lives) occupancy_.Take(live, offset, top);
  return offset;
}

Packed Pack(const std::vector<Rectangle>& rectangles, int64_t alignment,
            const std::vector<Order>& orders, int64_t within) {
  int64_t moments = 1;
  for (const Rectangle& r : rectangles) moments = std::max(moments, r.end);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Packed best{kMost, kMost};
  if (rectangles.empty()) best = {0, 0};
  std::vector<size_t> order(rectangles.size());
  std::vector<Interval> live(1);
  for (const Order by : orders) {
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](size_t k) {
      const Rectangle& r = rectangles[k];
      const int64_t length = r.end - r.start;
      if (by == Order::kSpatial) return std::make_tuple(-r.size, -length, k);
      return std::make_tuple(by == Order::kTemporal ? -length : r.start, -r.size, k);
    };
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
    Placer placer(moments, alignment, false);
    Packed now{0, 0};
    for (const size_t k : order) {
      const Rectangle& r = rectangles[k];
      live.assign(1, {r.start, r.end});
      const int64_t top = placer.Put(r.size, &live) + r.size;
      now.bytes = std::max(now.bytes, top);
      now.over += std::max<int64_t>(0, top - within);
    }
    best = {std::min(best.bytes, now.bytes), std::min(best.over, now.over)};
  }
  return best;
}

}  // namespace memplan
