// The Python module hlo_passes._packing; _packing.pyi gives its types.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "occupancy.h"

namespace py = pybind11;

namespace memplan {
namespace {

using Integers = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

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

Integers Place(int64_t moments, const Integers& sizes, const Integers& counts,
               const Integers& starts, const Integers& ends, int64_t alignment, bool lowest) {
  if (sizes.ndim() != 1 || counts.ndim() != 1 || starts.ndim() != 1 || ends.ndim() != 1 ||
      counts.size() != sizes.size() || ends.size() != starts.size()) {
    throw std::invalid_argument("sizes and counts, starts and ends are equally many");
  }
  if (alignment < 1) throw std::invalid_argument("the alignment must be positive");
  const int64_t* next_start = starts.data();
  const int64_t* next_end = ends.data();
  int64_t left = starts.size();
  Integers offsets(sizes.size());
  int64_t* offset = offsets.mutable_data();
  {
    py::gil_scoped_release unlocked;
    Occupancy occupancy(moments);
    std::vector<Interval> lives;
    Runs runs;
    for (int64_t group = 0; group < sizes.size(); ++group, ++offset) {
      const int64_t size = sizes.data()[group], count = counts.data()[group];
      if (count < 1 || count > left) {
        throw std::invalid_argument("counts must be positive and add up to the lives");
      }
      lives.clear();
      for (int64_t k = 0; k < count; ++k) lives.emplace_back(*next_start++, *next_end++);
      left -= count;
      *offset = 0;
      if (size == 0) continue;
      Join(&lives);
      runs.Clear();
      for (const Interval& live : lives) occupancy.Taken(live, &runs);
      *offset = Gap(runs.United(), size, lowest);
      // Up to the next offset that can be given: what lies between is lost.
      const int64_t top = (*offset + size + alignment - 1) / alignment * alignment;
      for (const Interval& live : lives) occupancy.Take(live, *offset, top);
    }
  }
  return offsets;
}

std::vector<Interval> Taken(const Occupancy& occupancy, Interval live) {
  Runs runs;
  occupancy.Taken(live, &runs);
  return runs.United();
}

}  // namespace
}  // namespace memplan

PYBIND11_MODULE(_packing, module) {
  module.def("place", &memplan::Place);
  py::class_<memplan::Occupancy>(module, "Occupancy")
      .def(py::init<int64_t>())
      .def("take", &memplan::Occupancy::Take)
      .def("taken", &memplan::Taken);
}
