// The Python module hlo_passes.memory._packing; _packing.pyi gives its types.

#include "../extension.h"

#include <vector>

#include "place.h"

namespace memplan {
namespace {

using Integers = Array<int64_t>;

void Place(int64_t moments, const Integers& sizes, const Integers& counts, const Integers& starts,
           const Integers& ends, int64_t alignment, bool lowest, const Integers& offsets) {
  if (counts.size() != sizes.size() || offsets.size() != sizes.size() ||
      ends.size() != starts.size()) {
    throw std::invalid_argument("sizes, counts and offsets, starts and ends are equally many");
  }
  const int64_t* next_start = starts.data();
  const int64_t* next_end = ends.data();
  int64_t left = starts.size();
  Placer placer(moments, alignment, lowest);
  std::vector<Interval> lives;
  for (int64_t group = 0; group < sizes.size(); ++group) {
    const int64_t count = counts.data()[group];
    if (count < 1 || count > left) {
      throw std::invalid_argument("counts must be positive and add up to the lives");
    }
    lives.clear();
    for (int64_t k = 0; k < count; ++k) lives.emplace_back(*next_start++, *next_end++);
    left -= count;
    offsets.data()[group] = placer.Put(sizes.data()[group], &lives);
  }
}

PyObject* PyPlace(PyObject*, PyObject* args) {
  long long moments, alignment;
  int lowest;
  PyObject* of[5];
  if (!PyArg_ParseTuple(args, "LOOOOLpO", &moments, &of[0], &of[1], &of[2], &of[3], &alignment,
                        &lowest, &of[4])) {
    return nullptr;
  }
  Integers sizes, counts, starts, ends, offsets;
  if (!sizes.Of(of[0], false) || !counts.Of(of[1], false) || !starts.Of(of[2], false) ||
      !ends.Of(of[3], false) || !offsets.Of(of[4], true)) {
    return nullptr;
  }
  std::exception_ptr thrown;
  Py_BEGIN_ALLOW_THREADS;
  try {
    Place(moments, sizes, counts, starts, ends, alignment, lowest != 0, offsets);
  } catch (...) {
    thrown = std::current_exception();
  }
  Py_END_ALLOW_THREADS;
  if (thrown && !Caught([&] { std::rethrow_exception(thrown); })) return nullptr;
  Py_RETURN_NONE;
}

struct PyOccupancy {
  PyObject_HEAD
  Occupancy* occupancy;
};

Occupancy* Of(PyObject* self) { return reinterpret_cast<PyOccupancy*>(self)->occupancy; }

PyObject* New(PyTypeObject* type, PyObject* args, PyObject*) {
  long long moments;
  if (!PyArg_ParseTuple(args, "L", &moments)) return nullptr;
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  Occupancy*& made = reinterpret_cast<PyOccupancy*>(self)->occupancy;
  if (Caught([&] { made = new Occupancy(moments); })) return self;
  Py_DECREF(self);
  return nullptr;
}

void Dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete Of(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* Take(PyObject* self, PyObject* args) {
  long long start, end, bottom, top;
  if (!PyArg_ParseTuple(args, "(LL)LL", &start, &end, &bottom, &top)) return nullptr;
  if (!Caught([&] { Of(self)->Take({start, end}, bottom, top); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* Taken(PyObject* self, PyObject* args) {
  long long start, end;
  if (!PyArg_ParseTuple(args, "(LL)", &start, &end)) return nullptr;
  std::vector<Interval> united;
  if (!Caught([&] {
        Runs runs;
        Of(self)->Taken({start, end}, &runs);
        united = runs.United();
      })) {
    return nullptr;
  }
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(united.size()));
  for (size_t i = 0; found != nullptr && i < united.size(); ++i) {
    PyObject* interval = Py_BuildValue("LL", static_cast<long long>(united[i].first),
                                       static_cast<long long>(united[i].second));
    if (interval == nullptr || PyList_SetItem(found, static_cast<Py_ssize_t>(i), interval) < 0) {
      Py_CLEAR(found);
    }
  }
  return found;
}

PyMethodDef occupancy_methods[] = {
    {"take", Take, METH_VARARGS, nullptr},
    {"taken", Taken, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot occupancy_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(New)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Dealloc)},
    {Py_tp_methods, occupancy_methods},
    {0, nullptr},
};

PyType_Spec occupancy_spec = {
    "hlo_passes.memory._packing.Occupancy", sizeof(PyOccupancy), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, occupancy_slots,
};

int Exec(PyObject* module) {
  PyObject* type = PyType_FromModuleAndSpec(module, &occupancy_spec, nullptr);
  const int status = type == nullptr ? -1 : PyModule_AddObjectRef(module, "Occupancy", type);
  Py_XDECREF(type);
  return status;
}

PyMethodDef methods[] = {
    {"place", PyPlace, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(Exec)},
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_packing", nullptr, 0, methods, slots, nullptr, nullptr, nullptr,
};

}  // namespace
}  // namespace memplan

PyMODINIT_FUNC PyInit__packing() { return PyModuleDef_Init(&memplan::definition); }
