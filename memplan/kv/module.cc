// The Python module memplan.kv._prefix_cache; _prefix_cache.pyi gives its types.

#include "../../hlo_passes/extension.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "prefix_cache.h"

namespace memplan {
namespace {

struct PyCache {
  PyObject_HEAD
  PrefixCache* cache;
};

PrefixCache& Of(PyObject* self) { return *reinterpret_cast<PyCache*>(self)->cache; }

PyObject* New(PyTypeObject* type, PyObject* args, PyObject*) {
  PrefixCache::Settings settings;
  long long block_tokens, pages[kTiers], keep, history;
  unsigned long long salt;
  int policy;
  if (!PyArg_ParseTuple(args, "L(LLL)LLiK", &block_tokens, &pages[0], &pages[1], &pages[2], &keep,
                        &history, &policy, &salt)) {
    return nullptr;
  }
  settings.block_tokens = block_tokens;
  std::copy(std::begin(pages), std::end(pages), settings.pages.begin());
  settings.keep = keep;
  settings.history = history;
  settings.policy = static_cast<Policy>(policy);
  settings.salt = salt;
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  PrefixCache*& made = reinterpret_cast<PyCache*>(self)->cache;
  if (Caught([&] { made = new PrefixCache(settings); })) return self;
  Py_DECREF(self);
  return nullptr;
}

void Dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PyCache*>(self)->cache;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// Whole blocks of int32[n]; false with an error set.
bool Blocks(PyObject* object, const PrefixCache& cache, Array<int32_t>* tokens, int64_t* blocks) {
  if (!tokens->Of(object, false)) return false;
  *blocks = tokens->size() / cache.block_tokens();
  if (*blocks * cache.block_tokens() == tokens->size()) return true;
  PyErr_SetString(PyExc_ValueError, "expected whole blocks of tokens");
  return false;
}

PyObject* PyFind(PyObject* self, PyObject* object) {
  Array<int32_t> tokens;
  int64_t blocks;
  if (!Blocks(object, Of(self), &tokens, &blocks)) return nullptr;
  std::array<int64_t, kTiers> found{};
  if (!Caught([&] { found = Of(self).Find(tokens.data(), blocks); })) return nullptr;
  return Py_BuildValue("(LLL)", static_cast<long long>(found[0]), static_cast<long long>(found[1]),
                       static_cast<long long>(found[2]));
}

PyObject* PyBegin(PyObject* self, PyObject* args) {
  PyObject* object;
  double now;
  if (!PyArg_ParseTuple(args, "Od", &object, &now)) return nullptr;
  Array<int32_t> tokens;
  int64_t blocks;
  if (!Blocks(object, Of(self), &tokens, &blocks)) return nullptr;
  PrefixCache::RequestId id = 0;
  if (!Caught([&] { id = Of(self).Begin(tokens.data(), blocks, now); })) return nullptr;
  return PyLong_FromLongLong(id);
}

PyObject* PyHits(PyObject* self, PyObject* id) {
  const long long of = PyLong_AsLongLong(id);
  if (PyErr_Occurred()) return nullptr;
  int64_t hits = 0;
  if (!Caught([&] { hits = Of(self).Hits(of); })) return nullptr;
  return PyLong_FromLongLong(hits);
}

PyObject* PyPages(PyObject* self, PyObject* id) {
  const long long of = PyLong_AsLongLong(id);
  if (PyErr_Occurred()) return nullptr;
  const std::vector<Page>* pages = nullptr;
  if (!Caught([&] { pages = &Of(self).Pages(of); })) return nullptr;
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(pages->size()));
  if (list == nullptr) return nullptr;
  for (size_t k = 0; k < pages->size(); ++k) {
    PyList_SetItem(list, static_cast<Py_ssize_t>(k), PyLong_FromLong((*pages)[k]));
  }
  return list;
}

PyObject* PyExtend(PyObject* self, PyObject* args) {
  long long id, pages;
  if (!PyArg_ParseTuple(args, "LL", &id, &pages)) return nullptr;
  bool is_there = false;
  if (!Caught([&] { is_there = Of(self).Extend(id, pages); })) return nullptr;
  return PyBool_FromLong(is_there);
}

PyObject* PyCommit(PyObject* self, PyObject* args) {
  long long id;
  PyObject* object;
  if (!PyArg_ParseTuple(args, "LO", &id, &object)) return nullptr;
  Array<int32_t> tokens;
  int64_t blocks;
  if (!Blocks(object, Of(self), &tokens, &blocks)) return nullptr;
  if (!Caught([&] { Of(self).Commit(id, tokens.data(), blocks); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* PySay(PyObject* self, PyObject* args) {
  long long id;
  Hint hint;
  int kind;
  if (!PyArg_ParseTuple(args, "Lidd", &id, &kind, &hint.seconds, &hint.spread)) return nullptr;
  hint.kind = static_cast<Hint::Kind>(kind);
  if (!Caught([&] { Of(self).Say(id, hint); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* PyEnd(PyObject* self, PyObject* id) {
  const long long of = PyLong_AsLongLong(id);
  if (PyErr_Occurred() || !Caught([&] { Of(self).End(of); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* PyLose(PyObject* self, PyObject* page) {
  const long of = PyLong_AsLong(page);
  if (PyErr_Occurred()) return nullptr;
  const Page number = of >= 0 && of <= INT32_MAX ? static_cast<Page>(of) : kNone;
  if (!Caught([&] { Of(self).Lose(number); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* PyClear(PyObject* self, PyObject*) {
  if (!Caught([&] { Of(self).Clear(); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* PyRoom(PyObject* self, PyObject*) { return PyLong_FromLongLong(Of(self).room()); }

PyObject* PyTakeMoves(PyObject* self, PyObject*) {
  const std::vector<PrefixCache::Move> moves = Of(self).TakeMoves();
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(moves.size()));
  if (list == nullptr) return nullptr;
  for (size_t k = 0; k < moves.size(); ++k) {
    const PrefixCache::Move& move = moves[k];
    PyObject* item = Py_BuildValue("((ii)(ii))", move.from.tier, move.from.page, move.to.tier,
                                   move.to.page);
    if (item == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SetItem(list, static_cast<Py_ssize_t>(k), item);
  }
  return list;
}

PyObject* PyHeld(PyObject* self, PyObject*) {
  const PrefixCache& cache = Of(self);
  return Py_BuildValue("(LLL)", static_cast<long long>(cache.held(0)),
                       static_cast<long long>(cache.held(1)),
                       static_cast<long long>(cache.held(2)));
}

PyObject* PyRemembered(PyObject* self, PyObject*) {
  return PyLong_FromLongLong(Of(self).remembered());
}

PyObject* PyFollowed(PyObject* self, PyObject*) {
  return PyLong_FromLong(static_cast<long>(Of(self).followed()));
}

PyObject* PyCheck(PyObject* self, PyObject*) {
  if (!Caught([&] { Of(self).Check(); })) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"find", PyFind, METH_O, nullptr},
    {"begin", PyBegin, METH_VARARGS, nullptr},
    {"hits", PyHits, METH_O, nullptr},
    {"pages", PyPages, METH_O, nullptr},
    {"extend", PyExtend, METH_VARARGS, nullptr},
    {"commit", PyCommit, METH_VARARGS, nullptr},
    {"say", PySay, METH_VARARGS, nullptr},
    {"end", PyEnd, METH_O, nullptr},
    {"lose", PyLose, METH_O, nullptr},
    {"clear", PyClear, METH_NOARGS, nullptr},
    {"room", PyRoom, METH_NOARGS, nullptr},
    {"take_moves", PyTakeMoves, METH_NOARGS, nullptr},
    {"held", PyHeld, METH_NOARGS, nullptr},
    {"remembered", PyRemembered, METH_NOARGS, nullptr},
    {"followed", PyFollowed, METH_NOARGS, nullptr},
    {"check", PyCheck, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot type_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(New)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Dealloc)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"memplan.kv._prefix_cache.PrefixCache", sizeof(PyCache), 0,
                    Py_TPFLAGS_DEFAULT, type_slots};

int Exec(PyObject* module) {
  PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
  if (type == nullptr) return -1;
  const int status = PyModule_AddObjectRef(module, "PrefixCache", type);
  Py_DECREF(type);
  return status;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(Exec)}, {0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_prefix_cache", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr,
};

}  // namespace
}  // namespace memplan

PyMODINIT_FUNC PyInit__prefix_cache() { return PyModuleDef_Init(&memplan::definition); }
