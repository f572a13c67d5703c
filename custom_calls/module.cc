// The Python module custom_calls._transfer; _transfer.pyi gives its types.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <new>
#include <optional>
#include <string>

#include "disk/file_engine.h"
#include "disk/mapped_file.h"
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

// Copies between a file and a buffer, and waits: one call of an engine of its own.
PyObject* CopyFile(PyObject* args, PyObject* named, bool is_write) {
  static const char* names[] = {"path", "buffer", "offset", "depth", "chunk", "use_uring", nullptr};
  PyObject* path;
  Py_buffer buffer;
  unsigned long long offset;
  memplan::FileEngineOptions options;
  int use_uring = options.use_uring;
  const char* const format = is_write ? "O&y*K|$IIp" : "O&w*K|$IIp";
  if (!PyArg_ParseTupleAndKeywords(args, named, format, const_cast<char**>(names),
                                   PyUnicode_FSConverter, &path, &buffer, &offset, &options.depth,
                                   &options.chunk, &use_uring)) {
    return nullptr;
  }
  options.use_uring = use_uring != 0;
  const std::string where = PyBytes_AsString(path);
  Py_DECREF(path);
  std::string error;
  if (options.depth == 0 || options.chunk == 0 ||
      options.chunk % memplan::File::kMaxAlignment != 0) {
    error = "depth must be at least 1, and chunk a multiple of 4096";
  } else {
    Py_BEGIN_ALLOW_THREADS;
    error = memplan::CopyAndWait(where, offset, static_cast<std::byte*>(buffer.buf),
                                 static_cast<uint64_t>(buffer.len), is_write, options);
    Py_END_ALLOW_THREADS;
  }
  PyBuffer_Release(&buffer);
  if (error.empty()) Py_RETURN_NONE;
  PyErr_SetString(PyExc_OSError, error.c_str());
  return nullptr;
}

PyObject* ReadFile(PyObject*, PyObject* args, PyObject* named) {
  return CopyFile(args, named, /*is_write=*/false);
}

PyObject* WriteFile(PyObject*, PyObject* args, PyObject* named) {
  return CopyFile(args, named, /*is_write=*/true);
}

// A file as a buffer of bytes, mapped for as long as anything has a view of it.
struct MappedFileObject {
  PyObject_HEAD
  std::unique_ptr<memplan::MappedFile> file;
};

MappedFileObject* MappedFileOf(PyObject* self) {
  return reinterpret_cast<MappedFileObject*>(self);
}

PyObject* MappedFileNew(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* path;
  PyObject* list = nullptr;
  if (!PyArg_ParseTuple(args, "O&|O", PyUnicode_FSConverter, &path, &list)) return nullptr;
  std::vector<memplan::Summed> summed;
  const Py_ssize_t size = list == nullptr ? 0 : PySequence_Size(list);
  for (Py_ssize_t k = 0; k < size; ++k) {
    unsigned long long offset, bytes;
    unsigned int checksum;
    PyObject* item = PySequence_GetItem(list, k);
    if (item != nullptr && !PyTuple_Check(item)) {
      PyErr_SetString(PyExc_TypeError, "expected tuples of an offset, bytes and a checksum");
    }
    const bool is_good = item != nullptr && PyErr_Occurred() == nullptr &&
                         PyArg_ParseTuple(item, "KKI", &offset, &bytes, &checksum);
    Py_XDECREF(item);
    if (!is_good) break;
    summed.push_back({offset, bytes, checksum});
  }
  if (PyErr_Occurred() != nullptr) {
    Py_DECREF(path);
    return nullptr;
  }
  std::string error;
  std::unique_ptr<memplan::MappedFile> file =
      memplan::MappedFile::Map(PyBytes_AsString(path), summed, &error);
  Py_DECREF(path);
  if (file == nullptr) {
    PyErr_SetString(PyExc_OSError, error.c_str());
    return nullptr;
  }
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = allocate(type, 0);
  if (self != nullptr) new (&MappedFileOf(self)->file) std::unique_ptr(std::move(file));
  return self;
}

void MappedFileDealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  MappedFileOf(self)->file.~unique_ptr();
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

int MappedFileGetBuffer(PyObject* self, Py_buffer* view, int flags) {
  const memplan::MappedFile& file = *MappedFileOf(self)->file;
  return PyBuffer_FillInfo(view, self, const_cast<std::byte*>(file.data()),
                           static_cast<Py_ssize_t>(file.size()), /*readonly=*/1, flags);
}

PyType_Slot mapped_file_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(MappedFileNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(MappedFileDealloc)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(MappedFileGetBuffer)},
    {0, nullptr},
};

PyType_Spec mapped_file_spec = {
    "custom_calls._transfer.MappedFile", sizeof(MappedFileObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, mapped_file_slots,
};

PyObject* FilePlace(PyObject*, PyObject* address) {
  const void* const found = PyLong_AsVoidPtr(address);
  if (found == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  const auto place = memplan::FilePlaceOf(static_cast<const std::byte*>(found));
  if (!place) Py_RETURN_NONE;
  PyObject* const path = PyUnicode_DecodeFSDefault(place->file->path().c_str());
  const auto offset = static_cast<unsigned long long>(place->offset);
  if (!place->summed) return Py_BuildValue("NKO", path, offset, Py_None);
  return Py_BuildValue("NK(KI)", path, offset,
                       static_cast<unsigned long long>(place->summed->bytes),
                       place->summed->checksum);
}

PyObject* Crc32c(PyObject*, PyObject* object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) < 0) return nullptr;
  memplan::Checksum checksum;
  const auto bytes = static_cast<uint64_t>(buffer.len);
  Py_BEGIN_ALLOW_THREADS;
  checksum.Add(static_cast<const std::byte*>(buffer.buf), bytes, 0);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&buffer);
  return PyLong_FromUnsignedLong(checksum.Of(bytes));
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
  if (AddHandler(module, "copy_done", memplan::CopyDone) < 0) return -1;
  PyObject* type = PyType_FromModuleAndSpec(module, &mapped_file_spec, nullptr);
  const int status = PyModule_AddObjectRef(module, "MappedFile", type);
  Py_XDECREF(type);
  return status;
}

PyMethodDef methods[] = {
    {"trace_begin", TraceBegin, METH_VARARGS, nullptr},
    {"trace_end", TraceEnd, METH_NOARGS, nullptr},
    {"set_link_bandwidth", SetLinkBandwidth, METH_VARARGS, nullptr},
    {"read_file", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(ReadFile)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"write_file", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(WriteFile)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"file_place", FilePlace, METH_O, nullptr},
    {"crc32c", Crc32c, METH_O, nullptr},
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
