// The Python module hlo_passes.chains._reader; _reader.pyi gives its types.

#include "../extension.h"

#include <string>

#include "reader.h"

namespace memplan::chains {
namespace {

// A contiguous run of bytes, while it is looked at.
class Bytes {
 public:
  explicit Bytes(PyObject* object) { PyObject_GetBuffer(object, &buffer_, PyBUF_SIMPLE); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  }

  bool is_there() const { return buffer_.obj != nullptr; }
  std::optional<Problem> ReadTo(Chain* chain) const {
    return Read(static_cast<const uint8_t*>(buffer_.buf), static_cast<size_t>(buffer_.len), chain);
  }

 private:
  Py_buffer buffer_ = {};
};

// A tuple of what `make` says of 0 to `count`.
template <typename Make>
PyObject* Tuple(size_t count, Make&& make) {
  PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(count));
  for (size_t k = 0; found != nullptr && k < count; ++k) {
    PyObject* item = make(k);
    if (item == nullptr || PyTuple_SetItem(found, static_cast<Py_ssize_t>(k), item) < 0) {
      Py_CLEAR(found);
    }
  }
  return found;
}

using Number = unsigned long long;

PyObject* Content(const Chain& chain) {
  const auto text = [&](uint32_t begin, uint32_t bytes) {
    const std::string_view view = chain.Text(begin, bytes);
    return PyUnicode_FromStringAndSize(view.data(), static_cast<Py_ssize_t>(view.size()));
  };
  const auto operands = [&](size_t first, size_t count) {
    return Tuple(count,
                 [&](size_t k) { return PyLong_FromUnsignedLong(chain.operands[first + k].slot); });
  };
  PyObject* spaces = Tuple(chain.spaces.size(), [&](size_t i) {
    const Space& s = chain.spaces[i];
    return Py_BuildValue("NINKKNN", text(s.name_begin, s.name_bytes), s.kind,
                         text(s.tier_begin, s.tier_bytes), Number{s.bytes}, Number{s.alignment},
                         text(s.path_begin, s.path_bytes), PyBool_FromLong(s.writable));
  });
  PyObject* slots = Tuple(chain.slots.size(), [&](size_t i) {
    const Slot& s = chain.slots[i];
    return Py_BuildValue("NIKK", text(s.name_begin, s.name_bytes), s.space, Number{s.offset},
                         Number{s.bytes});
  });
  PyObject* streams = Tuple(chain.streams.size(), [&](size_t i) {
    return text(chain.streams[i].name_begin, chain.streams[i].name_bytes);
  });
  PyObject* segments = Tuple(chain.segments.size(), [&](size_t i) {
    const Segment& s = chain.segments[i];
    return Py_BuildValue("NNN", text(s.name_begin, s.name_bytes),
                         operands(s.first_operand, s.arguments),
                         operands(size_t{s.first_operand} + s.arguments, s.results));
  });
  PyObject* descriptors = Tuple(chain.descriptors.size(), [&](size_t i) {
    const Descriptor& d = chain.descriptors[i];
    PyObject* waits = Tuple(d.wait_count, [&](size_t k) {
      return Py_BuildValue("IN", d.waits[k], PyBool_FromLong(d.previous >> k & 1));
    });
    return Py_BuildValue("IIIIIIKKKN", static_cast<unsigned>(d.op), d.stream, d.tick, d.source,
                         d.destination, d.segment, Number{d.bytes}, Number{d.source_offset},
                         Number{d.destination_offset}, waits);
  });
  return Py_BuildValue("y#NNNNN", reinterpret_cast<const char*>(chain.header.fingerprint),
                       static_cast<Py_ssize_t>(sizeof(chain.header.fingerprint)), spaces, slots,
                       streams, segments, descriptors);
}

// Reads `object`; false with an error set if that cannot be tried.
bool Try(PyObject* object, Chain* chain, std::optional<Problem>* problem) {
  const Bytes bytes(object);
  return bytes.is_there() && Caught([&] { *problem = bytes.ReadTo(chain); });
}

PyObject* PyCheck(PyObject*, PyObject* object) {
  Chain chain;
  std::optional<Problem> problem;
  if (!Try(object, &chain, &problem)) return nullptr;
  if (!problem) Py_RETURN_NONE;
  return Py_BuildValue("Ks#", Number{problem->offset}, problem->text.data(),
                       static_cast<Py_ssize_t>(problem->text.size()));
}

PyObject* PyContent(PyObject*, PyObject* object) {
  Chain chain;
  std::optional<Problem> problem;
  if (!Try(object, &chain, &problem)) return nullptr;
  if (!problem) return Content(chain);
  PyErr_SetString(PyExc_ValueError, problem->text.c_str());
  return nullptr;
}

PyMethodDef methods[] = {
    {"check", PyCheck, METH_O, nullptr},
    {"content", PyContent, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot slots[] = {{0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_reader", nullptr, 0, methods, slots, nullptr, nullptr, nullptr,
};

}  // namespace
}  // namespace memplan::chains

PyMODINIT_FUNC PyInit__reader() { return PyModuleDef_Init(&memplan::chains::definition); }
