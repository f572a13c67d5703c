// What the C++ extensions have in common. Of Python they take the stable ABI and the buffer
// protocol, so that one build serves every Python and numpy.

#ifndef MEMPLAN_HLO_PASSES_EXTENSION_H_
#define MEMPLAN_HLO_PASSES_EXTENSION_H_

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <type_traits>

namespace memplan {

// Runs `body`; what it throws becomes Python's error. Returns whether it threw nothing.
template <typename Body>
bool Caught(Body&& body) {
  try {
    body();
    return true;
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return false;
}

// An array's elements, int32, int64 or float64, while they are looked at or written.
template <typename Element>
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  }

  // Whether `object` has such; false with an error set.
  bool Of(PyObject* object, bool written) {
    constexpr bool kIsFloat = std::is_same_v<Element, double>;
    constexpr const char* kName =
        kIsFloat ? "float64" : std::is_same_v<Element, int32_t> ? "int32" : "int64";
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &buffer_, flags) < 0) return false;
    const char kind = buffer_.format == nullptr ? 'B' : buffer_.format[0];
    const bool is_kind = kIsFloat ? kind == 'd' : kind == 'i' || kind == 'l' || kind == 'q';
    if (buffer_.ndim == 1 && buffer_.itemsize == sizeof(Element) && is_kind) return true;
    PyErr_Format(PyExc_TypeError, "expected an array %s[n]", kName);
    return false;
  }

  Element* data() const { return static_cast<Element*>(buffer_.buf); }
  int64_t size() const { return buffer_.len / static_cast<int64_t>(sizeof(Element)); }

 private:
  Py_buffer buffer_ = {};
};

}  // namespace memplan

#endif  // MEMPLAN_HLO_PASSES_EXTENSION_H_
