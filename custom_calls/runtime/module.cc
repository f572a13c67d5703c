// The Python module custom_calls.runtime._runtime; _runtime.pyi gives its types.

#include "../../hlo_passes/extension.h"

#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gate.h"
#include "runtime.h"

namespace {

using memplan::Runtime;

struct RuntimeObject {
  PyObject_HEAD
  std::unique_ptr<Runtime> runtime;
};

Runtime& Of(PyObject* self) { return *reinterpret_cast<RuntimeObject*>(self)->runtime; }

PyObject* Raise(PyObject* type, const std::string& sentence) {
  PyErr_SetString(type, sentence.c_str());
  return nullptr;
}

// The addresses in a sequence, as many as the chain has bound spaces.
bool Addresses(PyObject* sequence, const memplan::chains::Chain& chain,
               std::vector<std::byte*>* addresses) {
  Py_ssize_t expected = 0;
  for (const memplan::chains::Space& space : chain.spaces) {
    expected += space.kind == kMemplanChainSpaceKindBound ? 1 : 0;
  }
  const Py_ssize_t size = PySequence_Size(sequence);
  if (size < 0) return false;
  if (size != expected) {
    PyErr_Format(PyExc_ValueError, "the chain has %zd bound spaces, found %zd addresses", expected,
                 size);
    return false;
  }
  for (Py_ssize_t k = 0; k < size; ++k) {
    PyObject* item = PySequence_GetItem(sequence, k);
    if (item == nullptr) return false;
    addresses->push_back(static_cast<std::byte*>(PyLong_AsVoidPtr(item)));
    Py_DECREF(item);
    if (PyErr_Occurred() != nullptr) return false;
  }
  return true;
}

PyObject* New(PyTypeObject* type, PyObject* args, PyObject* named) {
  static const char* names[] = {"chain",     "bound", "depth", "chunk",
                                "use_uring", "log",   "steps", "gpu", nullptr};
  Py_buffer bytes;
  PyObject* bound;
  memplan::RuntimeOptions options;
  int use_uring = options.files.use_uring;
  unsigned long long log = 0, steps = 1;
  if (!PyArg_ParseTupleAndKeywords(args, named, "y*O|$IIpKKi", const_cast<char**>(names), &bytes,
                                   &bound, &options.files.depth, &options.files.chunk, &use_uring,
                                   &log, &steps, &options.gpu)) {
    return nullptr;
  }
  options.steps = steps;
  constexpr unsigned long long kMostRecords = 1 << 24;
  if (log > kMostRecords) {
    PyBuffer_Release(&bytes);
    return Raise(PyExc_ValueError, "log must be from 0 to " + std::to_string(kMostRecords));
  }
  options.files.use_uring = use_uring != 0;
  options.log_records = log;
  memplan::chains::Chain chain;
  const std::optional<memplan::chains::Problem> problem = memplan::chains::Read(
      static_cast<const uint8_t*>(bytes.buf), static_cast<size_t>(bytes.len), &chain);
  PyBuffer_Release(&bytes);
  if (problem) {
    return Raise(PyExc_ValueError,
                 "byte " + std::to_string(problem->offset) + ": " + problem->text);
  }
  if (options.files.depth == 0 || options.files.chunk == 0 ||
      options.files.chunk % memplan::File::kMaxAlignment != 0) {
    return Raise(PyExc_ValueError, "depth must be at least 1, and chunk a multiple of 4096");
  }
  std::vector<std::byte*> addresses;
  if (!Addresses(bound, chain, &addresses)) return nullptr;
  std::unique_ptr<Runtime> runtime;
  std::string error;
  std::exception_ptr thrown;
  Py_BEGIN_ALLOW_THREADS;
  try {
    runtime = Runtime::Open(std::move(chain), std::move(addresses), options, &error);
  } catch (...) {
    thrown = std::current_exception();
  }
  Py_END_ALLOW_THREADS;
  const bool has_thrown_nothing = memplan::Caught([&] {
    if (thrown) std::rethrow_exception(thrown);
  });
  if (!has_thrown_nothing) return nullptr;
  if (runtime == nullptr) return Raise(PyExc_OSError, error);
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = allocate(type, 0);
  if (self != nullptr) {
    new (&reinterpret_cast<RuntimeObject*>(self)->runtime) std::unique_ptr(std::move(runtime));
  }
  return self;
}

void Dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  std::unique_ptr<Runtime>& runtime = reinterpret_cast<RuntimeObject*>(self)->runtime;
  Py_BEGIN_ALLOW_THREADS;
  runtime.~unique_ptr();
  Py_END_ALLOW_THREADS;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* Bind(PyObject* self, PyObject* bound) {
  if (Of(self).is_running()) return Raise(PyExc_RuntimeError, "a replay is under way");
  std::vector<std::byte*> addresses;
  if (!Addresses(bound, Of(self).chain(), &addresses)) return nullptr;
  Of(self).Bind(std::move(addresses));
  Py_RETURN_NONE;
}

PyObject* Start(PyObject* self, PyObject* replays) {
  const unsigned long long count = PyLong_AsUnsignedLongLong(replays);
  if (PyErr_Occurred() != nullptr) return nullptr;
  Of(self).Start(count);
  Py_RETURN_NONE;
}

PyObject* Wait(PyObject* self, PyObject*) {
  std::string failure;
  Py_BEGIN_ALLOW_THREADS;
  failure = Of(self).Wait();
  Py_END_ALLOW_THREADS;
  if (!failure.empty()) return Raise(PyExc_OSError, failure);
  Py_RETURN_NONE;
}

PyObject* Cancel(PyObject* self, PyObject* args) {
  const char* why = "the replay was cancelled";
  if (!PyArg_ParseTuple(args, "|s", &why)) return nullptr;
  Of(self).Cancel(why);
  Py_RETURN_NONE;
}

// A stream's index, if it is one.
std::optional<uint32_t> StreamOf(PyObject* self, PyObject* stream) {
  const unsigned long long index = PyLong_AsUnsignedLongLong(stream);
  if (PyErr_Occurred() != nullptr) return std::nullopt;
  if (index < Of(self).chain().streams.size()) return static_cast<uint32_t>(index);
  PyErr_SetString(PyExc_IndexError, "the chain has no such stream");
  return std::nullopt;
}

PyObject* Enter(PyObject* self, PyObject* stream) {
  const std::optional<uint32_t> index = StreamOf(self, stream);
  if (!index) return nullptr;
  std::optional<uint32_t> segment;
  Py_BEGIN_ALLOW_THREADS;
  segment = Of(self).Enter(*index);
  Py_END_ALLOW_THREADS;
  if (!segment) Py_RETURN_NONE;
  return PyLong_FromUnsignedLong(*segment);
}

PyObject* Leave(PyObject* self, PyObject* stream) {
  const std::optional<uint32_t> index = StreamOf(self, stream);
  if (!index) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  Of(self).Leave(*index);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* Address(PyObject* self, PyObject* slot) {
  const unsigned long long index = PyLong_AsUnsignedLongLong(slot);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (index >= Of(self).chain().slots.size()) {
    return Raise(PyExc_IndexError, "the chain has no such slot");
  }
  return PyLong_FromVoidPtr(Of(self).Address(static_cast<uint32_t>(index)));
}

PyObject* AllocatedBytes(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(Of(self).allocated_bytes());
}

PyObject* IsRunning(PyObject* self, PyObject*) { return PyBool_FromLong(Of(self).is_running()); }

PyObject* Failure(PyObject* self, PyObject*) {
  const std::string failure = Of(self).failure();
  return PyUnicode_DecodeFSDefault(failure.c_str());
}

PyObject* Log(PyObject* self, PyObject*) {
  const std::vector<memplan::LogRecord> records = Of(self).Log();
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(records.data()),
                                   static_cast<Py_ssize_t>(records.size() * sizeof(records[0])));
}

PyMethodDef runtime_methods[] = {
    {"bind", Bind, METH_O, nullptr},
    {"start", Start, METH_O, nullptr},
    {"wait", Wait, METH_NOARGS, nullptr},
    {"cancel", Cancel, METH_VARARGS, nullptr},
    {"enter", Enter, METH_O, nullptr},
    {"leave", Leave, METH_O, nullptr},
    {"address", Address, METH_O, nullptr},
    {"allocated_bytes", AllocatedBytes, METH_NOARGS, nullptr},
    {"is_running", IsRunning, METH_NOARGS, nullptr},
    {"failure", Failure, METH_NOARGS, nullptr},
    {"log", Log, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot runtime_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(New)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Dealloc)},
    {Py_tp_methods, runtime_methods},
    {0, nullptr},
};

PyType_Spec runtime_spec = {
    "custom_calls.runtime._runtime.Runtime", sizeof(RuntimeObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, runtime_slots,
};

int Exec(PyObject* module) {
  PyObject* type = PyType_FromModuleAndSpec(module, &runtime_spec, nullptr);
  const int status = PyModule_AddObjectRef(module, "Runtime", type);
  Py_XDECREF(type);
  if (status < 0) return status;
  // XLA looks for handlers in nameless capsules (jax.ffi.pycapsule makes the same).
  using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);
  const std::pair<const char*, Handler> handlers[] = {
      {"gate", memplan::Gate},
      {"gate_on_gpu", memplan::GateOnGpu},
      {"storing_gate", memplan::StoringGate},
      {"store", memplan::Store},
  };
  for (const auto& [name, handler] : handlers) {
    PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
    const int added = PyModule_AddObjectRef(module, name, capsule);
    Py_XDECREF(capsule);
    if (added < 0) return added;
  }
  return 0;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(Exec)},
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_runtime", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__runtime() { return PyModuleDef_Init(&definition); }
