// The Python module hlo_passes.placing._schedule; _schedule.pyi gives its types.

#include "../extension.h"

#include <vector>

#include "schedule_rows.h"

namespace memplan {
namespace {

// A list of the elements of a vector, each as `make` says.
template <typename Element, typename Make>
PyObject* List(const std::vector<Element>& elements, Make&& make) {
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(elements.size()));
  for (size_t k = 0; found != nullptr && k < elements.size(); ++k) {
    PyObject* item = make(elements[k]);
    if (item == nullptr || PyList_SetItem(found, static_cast<Py_ssize_t>(k), item) < 0) {
      Py_CLEAR(found);
    }
  }
  return found;
}

PyObject* PyEvictions(PyObject*, PyObject* args) {
  PyObject* of[5];
  long long capacity;
  Link link;
  double margin;
  if (!PyArg_ParseTuple(args, "OOOOOLddd", &of[0], &of[1], &of[2], &of[3], &of[4], &capacity,
                        &link.bytes_per_s, &link.latency_s, &margin)) {
    return nullptr;
  }
  Integers evictions, fetches, load;
  Floats costs, busy;
  if (!evictions.Of(of[0], false) || !fetches.Of(of[1], false) || !load.Of(of[2], false) ||
      !costs.Of(of[3], false) || !busy.Of(of[4], false)) {
    return nullptr;
  }
  std::vector<Departure> found;
  const bool is_good = Caught([&] {
    const Tick ticks = load.size();
    if (costs.size() != ticks || busy.size() != ticks) {
      throw std::invalid_argument("load, costs and busy: one a tick");
    }
    const Compute compute{costs.data(), nullptr, load.data(), nullptr, busy.data(), ticks};
    const std::vector<Eviction> leaving = Evictions(evictions, ticks);
    const auto count = static_cast<int64_t>(leaving.size());
    found = ScheduleEvictions(leaving, Fetches(fetches, ticks, count), compute, capacity, link,
                              margin);
  });
  if (!is_good) return nullptr;
  return List(found, [](const Departure& d) {
    return Py_BuildValue("LL", static_cast<long long>(d.start), static_cast<long long>(d.done));
  });
}

PyObject* PyStarts(PyObject*, PyObject* args) {
  PyObject* of[5];
  long long capacity, slots, ring_alignment;
  Link link;
  double margin;
  if (!PyArg_ParseTuple(args, "OOOOOLdddLL", &of[0], &of[1], &of[2], &of[3], &of[4],
                        &capacity, &link.bytes_per_s, &link.latency_s, &margin, &slots, &ring_alignment)) {
    return nullptr;
  }
  Integers fetches, departures, load;
  Floats clock, busy;
  if (!fetches.Of(of[0], false) || !departures.Of(of[1], false) || !load.Of(of[2], false) ||
      !clock.Of(of[3], false) || !busy.Of(of[4], false)) {
    return nullptr;
  }
  Starts found;
  const bool is_good = Caught([&] {
    const Tick ticks = load.size();
    if (clock.size() != ticks + 1 || busy.size() != ticks) {
      throw std::invalid_argument("clock: one more than ticks; busy: one a tick");
    }
    const Compute compute{nullptr, clock.data(), load.data(), busy.data(), nullptr, ticks};
    const std::vector<Departure> left = Departures(departures, ticks);
    const int64_t count = left.empty() ? INT64_MAX : static_cast<int64_t>(left.size());
    found = ScheduleStarts(Fetches(fetches, ticks, count), left, compute, capacity, link, margin,
                           slots, ring_alignment);
  });
  if (!is_good) return nullptr;
  PyObject* starts = List(found.ticks, [](Tick tick) { return PyLong_FromLongLong(tick); });
  if (starts == nullptr) return nullptr;
  return Py_BuildValue("NLL", starts, static_cast<long long>(found.tight),
                       static_cast<long long>(found.needed));
}

PyObject* PyTimes(PyObject*, PyObject* args) {
  PyObject* of[7];
  Link in, out;
  int is_one_queue;
  if (!PyArg_ParseTuple(args, "OOOOOOOddddp", &of[0], &of[1], &of[2], &of[3], &of[4], &of[5],
                        &of[6], &in.bytes_per_s, &in.latency_s, &out.bytes_per_s, &out.latency_s,
                        &is_one_queue)) {
    return nullptr;
  }
  Integers fetches, starts, evictions, departures;
  Floats clock, in_busy, out_busy;
  if (!fetches.Of(of[0], false) || !starts.Of(of[1], false) || !evictions.Of(of[2], false) ||
      !departures.Of(of[3], false) || !clock.Of(of[4], false) || !in_busy.Of(of[5], false) ||
      !out_busy.Of(of[6], false)) {
    return nullptr;
  }
  Times found;
  const bool is_good = Caught([&] {
    const Tick ticks = clock.size() - 1;
    if (ticks < 0 || in_busy.size() != ticks || out_busy.size() != ticks) {
      throw std::invalid_argument("clock: one more than ticks; busy: one a tick");
    }
    const Compute compute{nullptr,        clock.data(),    nullptr,
                          in_busy.data(), out_busy.data(), ticks};
    const std::vector<Eviction> leaving = Evictions(evictions, ticks);
    const std::vector<Fetch> coming =
        Fetches(fetches, ticks, static_cast<int64_t>(leaving.size()));
    const std::vector<Tick> begun(starts.data(), starts.data() + starts.size());
    for (const Tick tick : begun) CheckTick(tick, ticks);
    const std::vector<Departure> left = Departures(departures, ticks);
    if (begun.size() != coming.size() || (!left.empty() && left.size() != leaving.size())) {
      throw std::invalid_argument("one start a fetch, one departure an eviction");
    }
    found = StepTimes(coming, begun, leaving, left, compute, in, out, is_one_queue != 0);
  });
  if (!is_good) return nullptr;
  PyObject* begins = List(found.begins, PyFloat_FromDouble);
  PyObject* before = begins == nullptr ? nullptr : List(found.before, PyFloat_FromDouble);
  if (before == nullptr) {
    Py_XDECREF(begins);
    return nullptr;
  }
  return Py_BuildValue("dNN", found.step_s, begins, before);
}

PyMethodDef methods[] = {
    {"schedule_evictions", PyEvictions, METH_VARARGS, nullptr},
    {"schedule_starts", PyStarts, METH_VARARGS, nullptr},
    {"step_times", PyTimes, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot slots[] = {{0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_schedule", nullptr, 0, methods, slots, nullptr, nullptr, nullptr,
};

}  // namespace
}  // namespace memplan

PyMODINIT_FUNC PyInit__schedule() { return PyModuleDef_Init(&memplan::definition); }
