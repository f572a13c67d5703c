#include "occupancy.h"

#include <algorithm>
#include <stdexcept>

namespace memplan {
namespace {

constexpr int kBlockBits = 4;
constexpr int64_t kBlockMask = (int64_t{1} << kBlockBits) - 1;

// Adds an interval to sorted intervals that do not touch. Returns whether that changed them.
// O(log) and the move of what lies above.
bool Unite(std::vector<Interval>* intervals, int64_t bottom, int64_t top) {
  // The first that reaches up to `bottom`, and behind the last that begins by `top`.
  auto first = std::lower_bound(
      intervals->begin(), intervals->end(), bottom,
      [](const Interval& interval, int64_t offset) { return interval.second < offset; });
  auto end = std::upper_bound(
      first, intervals->end(), top,
      [](int64_t offset, const Interval& interval) { return offset < interval.first; });
  if (first == end) {
    intervals->insert(first, {bottom, top});
    return true;
  }
  const Interval united{std::min(bottom, first->first), std::max(top, std::prev(end)->second)};
  if (end - first == 1 && united == *first) return false;
  *first = united;
  intervals->erase(first + 1, end);
  return true;
}

}  // namespace

void Runs::Clear() {
  intervals_.clear();
  ends_.clear();
}

void Runs::Add(const std::vector<Interval>& run) {
  if (run.empty()) return;
  intervals_.insert(intervals_.end(), run.begin(), run.end());
  ends_.push_back(intervals_.size());
}

const std::vector<Interval>& Runs::United() {
  while (ends_.size() > 1) {
    merged_.resize(intervals_.size());
    Interval* out = merged_.data();
    size_t begin = 0, kept = 0;
    for (size_t run = 0; run < ends_.size(); run += 2) {
      const Interval* a = intervals_.data() + begin;
      const Interval* const a_end = intervals_.data() + ends_[run];
      const Interval* b = a_end;
      begin = run + 1 < ends_.size() ? ends_[run + 1] : ends_[run];
      const Interval* const b_end = intervals_.data() + begin;
      Interval open = *(b == b_end || *a < *b ? a : b);
      while (a != a_end || b != b_end) {
        const Interval next = b == b_end || (a != a_end && *a < *b) ? *a++ : *b++;
        if (next.first <= open.second) {
          open.second = std::max(open.second, next.second);
        } else {
          *out++ = open;
          open = next;
        }
      }
      *out++ = open;
      ends_[kept++] = out - merged_.data();
    }
    ends_.resize(kept);
    merged_.resize(out - merged_.data());
    intervals_.swap(merged_);
  }
  return intervals_;
}

Occupancy::Occupancy(int64_t moments) : leaves_(1) {
  if (moments < 0) throw std::out_of_range("the number of moments must not be negative");
  while (leaves_ <= moments) leaves_ <<= 1;
  held_.resize(2 * leaves_);
  int64_t blocks = leaves_;
  started_.emplace_back(blocks);
  while (blocks > 1) {
    blocks = (blocks + kBlockMask) >> kBlockBits;
    started_.emplace_back(blocks);
  }
}

void Occupancy::Check(Interval live) const {
  if (live.first < 0 || live.second <= live.first || live.second >= leaves_) {
    throw std::out_of_range("a range of moments is empty or reaches beyond the last");
  }
}

void Occupancy::Take(Interval live, int64_t bottom, int64_t top) {
  Check(live);
  int64_t left = live.first + leaves_, right = live.second + leaves_;
  for (; left < right; left >>= 1, right >>= 1) {
    if (left & 1) Unite(&held_[left++], bottom, top);
    if (right & 1) Unite(&held_[--right], bottom, top);
  }
  int64_t block = live.first;
  for (auto& blocks : started_) {
    if (!Unite(&blocks[block], bottom, top)) break;  // Then the larger ones around have it too.
    block >>= kBlockBits;
  }
}

void Occupancy::Taken(Interval live, Runs* found) const {
  Check(live);
  for (int64_t node = live.first + leaves_; node; node >>= 1) found->Add(held_[node]);
  int64_t first = live.first + 1, end = live.second;
  for (const auto& blocks : started_) {
    if (first >= end) break;
    while (first < end && (first & kBlockMask)) found->Add(blocks[first++]);
    while (first < end && (end & kBlockMask)) found->Add(blocks[--end]);
    first >>= kBlockBits;
    end >>= kBlockBits;
  }
}

}  // namespace memplan
