// The Python module custom_calls._transfer; _transfer.pyi gives its types.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <optional>

#include "transfer.h"

namespace {

PyObject* TraceBegin(PyObject*, PyObject* args) {
  Py_ssize_t capacity;
  if (!PyArg_ParseTuple(args, "n", &capacity)) return nullptr;
  if (capacity < 0) {
    PyErr_SetString(PyExc_ValueError, "the capacity of a trace must not be negative");
    return nullptr;
  }
  if (!memplan::BeginTrace(static_cast<size_t>(capacity))) {
    PyErr_SetString(PyExc_RuntimeError, "a trace is being recorded already in this process");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* RecordToTuple(const memplan::TransferRecord& r) {
  return Py_BuildValue(
      "LLLLLLKKLLLLL", static_cast<long long>(r.transfer_id), static_cast<long long>(r.engine),
      static_cast<long long>(r.bytes), static_cast<long long>(r.run),
      static_cast<long long>(r.device), static_cast<long long>(r.sequence),
      static_cast<unsigned long long>(r.start_thread),
      static_cast<unsigned long long>(r.done_thread), static_cast<long long>(r.start_issued),
      static_cast<long long>(r.copy_began), static_cast<long long>(r.copy_ended),
      static_cast<long long>(r.done_called), static_cast<long long>(r.done_returned));
}

PyObject* TraceEnd(PyObject*, PyObject*) {
  const std::optional<memplan::TraceResult> trace = memplan::EndTrace();
  if (!trace) {
    PyErr_SetString(PyExc_RuntimeError, "no trace is being recorded");
    return nullptr;
  }
  PyObject* records = PyList_New(static_cast<Py_ssize_t>(trace->records.size()));
  if (records == nullptr) return nullptr;
  for (size_t i = 0; i < trace->records.size(); ++i) {
    PyObject* record = RecordToTuple(trace->records[i]);
    if (record == nullptr || PyList_SetItem(records, static_cast<Py_ssize_t>(i), record) < 0) {
      Py_DECREF(records);
      return nullptr;
    }
  }
  return Py_BuildValue("NL", records, static_cast<long long>(trace->dropped));
}

PyObject* SetLinkBandwidth(PyObject*, PyObject* args) {
  double bytes_per_second;
  if (!PyArg_ParseTuple(args, "d", &bytes_per_second)) return nullptr;
  memplan::SetLinkBandwidth(bytes_per_second);
  Py_RETURN_NONE;
}

// XLA looks for handlers in nameless capsules (jax.ffi.pycapsule makes the same).
int AddHandler(PyObject* module, const char* name, XLA_FFI_Handler* handler) {
  PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
  const int status = PyModule_AddObjectRef(module, name, capsule);
  Py_XDECREF(capsule);
  return status;
}

int Exec(PyObject* module) {
  if (AddHandler(module, "copy_start", memplan::CopyStart) < 0) return -1;
  return AddHandler(module, "copy_done", memplan::CopyDone);
}

PyMethodDef methods[] = {
    {"trace_begin", TraceBegin, METH_VARARGS, nullptr},
    {"trace_end", TraceEnd, METH_NOARGS, nullptr},
    {"set_link_bandwidth", SetLinkBandwidth, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(Exec)},
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_transfer", nullptr, 0, methods, slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__transfer() { return PyModuleDef_Init(&definition); }
