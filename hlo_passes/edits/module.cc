// The Python module hlo_passes.edits._gap_state; _gap_state.pyi gives its types.

#include "../extension.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../placing/schedule_rows.h"
#include "gap_state.h"

namespace memplan {
namespace {

struct PyCatalog {
  PyObject_HEAD
  Catalog* catalog;
};

struct Held {
  PyObject* catalog = nullptr;  // Its owner.
  Array<int64_t> load;
  Array<double> costs;
  std::unique_ptr<GapState> state;

  ~Held() { Py_XDECREF(catalog); }
};

struct PyState {
  PyObject_HEAD
  Held* held;
};

GapState& Of(PyObject* self) { return *reinterpret_cast<PyState*>(self)->held->state; }

void Free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// The numbers of a sequence of pairs.
bool Pairs(PyObject* sequence, std::vector<std::pair<int64_t, int64_t>>* found) {
  const Py_ssize_t count = PySequence_Size(sequence);
  for (Py_ssize_t k = 0; k < count; ++k) {
    PyObject* item = PySequence_GetItem(sequence, k);
    long long first, second;
    const bool is_pair = item != nullptr && PyArg_ParseTuple(item, "LL", &first, &second);
    Py_XDECREF(item);
    if (!is_pair) return false;
    found->emplace_back(first, second);
  }
  return count >= 0;
}

// A list of what `make` returns for each of `count` numbers.
template <typename Make>
PyObject* List(size_t count, Make&& make) {
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(count));
  for (size_t k = 0; found != nullptr && k < count; ++k) {
    PyObject* item = make(k);
    if (item == nullptr || PyList_SetItem(found, static_cast<Py_ssize_t>(k), item) < 0) {
      Py_CLEAR(found);
    }
  }
  return found;
}

bool Numbers(PyObject* sequence, std::vector<int64_t>* found) {
  const Py_ssize_t count = PySequence_Size(sequence);
  for (Py_ssize_t k = 0; k < count; ++k) {
    PyObject* item = PySequence_GetItem(sequence, k);
    if (item == nullptr) return false;
    found->push_back(PyLong_AsLongLong(item));
    Py_DECREF(item);
  }
  return count >= 0 && !PyErr_Occurred();
}

bool ParseTemporary(PyObject* row, Temporary* t) {
  long long size, added, beside, maker, resident, written;
  int obstacle, repeatable;
  PyObject *reads, *operands, *over;
  if (!PyArg_ParseTuple(row, "LLLLLLddppOOO", &size, &added, &beside, &maker, &resident,
                        &written, &t->maker_s, &t->charge_s,
                        &obstacle, &repeatable, &reads, &operands, &over)) {
    return false;
  }
  t->size = size;
  t->added = added;
  t->beside = beside;
  t->maker = maker;
  t->resident = resident;
  t->written = written;
  t->obstacle = obstacle != 0;
  t->repeatable = repeatable != 0;
  if (!Numbers(reads, &t->reads) || !Numbers(over, &t->over)) return false;
  std::vector<std::pair<int64_t, int64_t>> pairs;
  if (!Pairs(operands, &pairs)) return false;
  for (const auto& [temporary, until] : pairs) t->operands.push_back({temporary, until});
  return true;
}

bool ParseTemporaries(PyObject* rows, std::vector<Temporary>* found) {
  const Py_ssize_t count = PySequence_Size(rows);
  for (Py_ssize_t k = 0; k < count; ++k) {
    PyObject* row = PySequence_GetItem(rows, k);
    found->emplace_back();
    const bool is_row = row != nullptr && ParseTemporary(row, &found->back());
    Py_XDECREF(row);
    if (!is_row) return false;
  }
  return count >= 0;
}

// The arrays of a catalog, as they are given.
struct Columns {
  Array<double> costs, in_busy, out_busy;
  Integers weights, fetches, fetched_weights, evictions, residents, holders, joined;
};

std::vector<int64_t> Copy(const Integers& of) { return {of.data(), of.data() + of.size()}; }

void SetCompute(const Columns& columns, Catalog* made) {
  const int64_t ticks = columns.costs.size();
  if (columns.in_busy.size() != ticks || columns.out_busy.size() != ticks) {
    throw std::invalid_argument("costs and busy: one a tick");
  }
  made->costs.assign(columns.costs.data(), columns.costs.data() + ticks);
  made->in_busy.assign(columns.in_busy.data(), columns.in_busy.data() + ticks);
  made->out_busy.assign(columns.out_busy.data(), columns.out_busy.data() + ticks);
  made->clock.assign(1, 0.0);
  for (const double seconds : made->costs) made->clock.push_back(made->clock.back() + seconds);
}

void SetTransfers(const Columns& columns, Catalog* made) {
  const auto ticks = static_cast<int64_t>(made->costs.size());
  Traffic& traffic = made->traffic;
  traffic.evictions = Evictions(columns.evictions, ticks);
  traffic.fetches =
      Fetches(columns.fetches, ticks, static_cast<int64_t>(traffic.evictions.size()));
  traffic.weights = Copy(columns.fetched_weights);
  if (traffic.weights.size() != traffic.fetches.size()) {
    throw std::invalid_argument("fetched weights: one a fetch");
  }
  for (const int64_t size : Copy(columns.weights)) made->weights.push_back({size, {}});
  made->fetched.assign(ticks, 0);
  for (size_t k = 0; k < traffic.fetches.size(); ++k) {
    const Fetch& fetch = traffic.fetches[k];
    if (const int64_t m = traffic.weights[k]; m >= 0) {
      made->weights.at(m).there.emplace_back(fetch.first, fetch.end);
    }
    for (Tick tick = fetch.first; tick < fetch.end; ++tick) made->fetched[tick] += fetch.size;
  }
}

// After transfers, whose numbers holders may be.
void SetPacking(const Columns& columns, Catalog* made) {
  const auto ticks = static_cast<int64_t>(made->costs.size());
  Shared& shared = made->shared;
  shared.residents = Rows<Rectangle>(columns.residents, 3, [ticks](const int64_t* row) {
    if (row[1] < 0 || row[2] <= row[1] || row[2] > ticks) {
      throw std::out_of_range("there is no such tick");
    }
    return Rectangle{row[0], row[1], row[2]};
  });
  shared.joined = Copy(columns.joined);
  for (const Tick tick : shared.joined) CheckTick(tick, ticks - 1);
  shared.holders = Copy(columns.holders);
  const auto numbered =
      static_cast<int64_t>(shared.residents.size() + made->traffic.fetches.size());
  for (const int64_t of : shared.holders) {
    if (of >= numbered) throw std::out_of_range("nothing has the number of a holder");
  }
  if (shared.holders.size() != made->traffic.evictions.size()) {
    throw std::invalid_argument("holders: one an eviction");
  }
}

// Whether what is said of a temporary is within the bounds of the catalog.
void Check(const Temporary& t, const Catalog& catalog) {
  const auto ticks = static_cast<int64_t>(catalog.costs.size());
  const auto count = static_cast<int64_t>(catalog.temporaries.size());
  const auto is_tick = [ticks](Tick tick) { return tick >= 0 && tick < ticks; };
  if (t.maker < 0 || t.maker >= count || !is_tick(t.written) ||
      t.resident >= static_cast<int64_t>(catalog.shared.residents.size())) {
    throw std::invalid_argument("a maker, a resident or a tick is out of range");
  }
  for (const Tick tick : t.reads) {
    // What is read behind the last tick stays.
    if (!is_tick(tick) && !(tick == ticks && t.obstacle)) {
      throw std::invalid_argument("a tick is out of range");
    }
  }
  for (const int64_t n : t.over) {
    if (n < 0 || n >= count) throw std::invalid_argument("an operand is out of range");
  }
  for (const Operand& operand : t.operands) {
    if (operand.temporary >= count ||
        (operand.is_weight() &&
         operand.weight() >= static_cast<int64_t>(catalog.weights.size()))) {
      throw std::invalid_argument("an operand is out of range");
    }
  }
}

// Last, since temporaries name what all others have set.
void SetTemporaries(std::vector<Temporary> temporaries, Catalog* made) {
  made->temporaries = std::move(temporaries);
  made->made_by.resize(made->temporaries.size());
  made->written.assign(made->costs.size(), 0);
  for (size_t n = 0; n < made->temporaries.size(); ++n) {
    const Temporary& t = made->temporaries[n];
    Check(t, *made);
    made->made_by[t.maker].push_back(static_cast<int64_t>(n));
    made->written[t.written] += t.added;
    std::vector<Tick> accesses = t.reads;
    accesses.push_back(t.written);
    std::sort(accesses.begin(), accesses.end());
    accesses.erase(std::unique(accesses.begin(), accesses.end()), accesses.end());
    made->accesses.push_back(std::move(accesses));
  }
}

PyObject* NewCatalog(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *rows, *weights, *costs, *in_busy, *out_busy;
  PyObject *fetches, *fetched_weights, *evictions, *residents, *holders, *joined;
  auto made = std::make_unique<Catalog>();
  Traffic& traffic = made->traffic;
  int is_one_queue, can_evict, in_order;
  long long alignment, smallest, table;
  if (!PyArg_ParseTuple(args, "OO(OOO)(ddddddpp)(OOO)(OOOLpLL)", &rows, &weights,  //
                        &costs, &in_busy, &out_busy,                             //
                        &traffic.in.bytes_per_s, &traffic.in.latency_s, &traffic.out.bytes_per_s,
                        &traffic.out.latency_s, &traffic.margin, &traffic.byte_s, &is_one_queue, &can_evict,  //
                        &fetches, &fetched_weights, &evictions,                              //
                        &residents, &holders, &joined, &alignment, &in_order, &smallest,
                        &table)) {
    return nullptr;
  }
  traffic.is_one_queue = is_one_queue != 0;
  traffic.can_evict = can_evict != 0;
  made->shared = {{}, {}, {}, alignment, in_order != 0, smallest, table};

  Columns columns;
  std::vector<Temporary> temporaries;
  if (!columns.costs.Of(costs, false) || !columns.in_busy.Of(in_busy, false) ||
      !columns.out_busy.Of(out_busy, false) || !columns.weights.Of(weights, false) ||
      !columns.fetches.Of(fetches, false) || !columns.evictions.Of(evictions, false) ||
      !columns.fetched_weights.Of(fetched_weights, false) ||
      !columns.residents.Of(residents, false) || !columns.holders.Of(holders, false) ||
      !columns.joined.Of(joined, false) || !ParseTemporaries(rows, &temporaries)) {
    return nullptr;
  }
  const bool is_good = Caught([&] {
    SetCompute(columns, made.get());
    SetTransfers(columns, made.get());
    SetPacking(columns, made.get());
    SetTemporaries(std::move(temporaries), made.get());
  });
  if (!is_good) return nullptr;
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self != nullptr) reinterpret_cast<PyCatalog*>(self)->catalog = made.release();
  return self;
}

void DeallocCatalog(PyObject* self) {
  delete reinterpret_cast<PyCatalog*>(self)->catalog;
  Free(self);
}

// A state over arrays of the caller's, which are as long as the catalog has ticks.
PyObject* Make(PyTypeObject* type, PyObject* catalog, PyObject* load, PyObject* costs,
               const GapState* other, long long depth) {
  auto held = std::make_unique<Held>();
  if (!held->load.Of(load, true) || !held->costs.Of(costs, true)) return nullptr;
  const Catalog* of = reinterpret_cast<PyCatalog*>(catalog)->catalog;
  const bool is_good = Caught([&] {
    const auto ticks = static_cast<int64_t>(of->written.size());
    if (held->load.size() != ticks || held->costs.size() != ticks) {
      throw std::invalid_argument("load and costs have one number for each tick");
    }
    held->state = other != nullptr
                      ? std::make_unique<GapState>(*other, held->load.data(), held->costs.data())
                      : std::make_unique<GapState>(of, held->load.data(), held->costs.data(),
                                                   ticks, depth);
  });
  if (!is_good) return nullptr;
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  held->catalog = Py_NewRef(catalog);
  reinterpret_cast<PyState*>(self)->held = held.release();
  return self;
}

PyObject* NewState(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *catalog, *load, *costs;
  long long depth;
  if (!PyArg_ParseTuple(args, "OOOL", &catalog, &load, &costs, &depth)) return nullptr;
  auto* owner = *static_cast<PyTypeObject**>(PyType_GetModuleState(type));
  if (!PyObject_TypeCheck(catalog, owner)) {
    PyErr_SetString(PyExc_TypeError, "expected a Catalog");
    return nullptr;
  }
  return Make(type, catalog, load, costs, nullptr, depth);
}

void DeallocState(PyObject* self) {
  delete reinterpret_cast<PyState*>(self)->held;
  Free(self);
}

PyObject* Copied(PyObject* self, PyObject* args) {
  PyObject *load, *costs;
  if (!PyArg_ParseTuple(args, "OO", &load, &costs)) return nullptr;
  Held* held = reinterpret_cast<PyState*>(self)->held;
  return Make(Py_TYPE(self), held->catalog, load, costs, held->state.get(), 0);
}

// The temporary and the tick of a call, checked.
bool ParseGap(PyObject* self, long long n, long long start) {
  if (n >= 0 && n < Of(self).count() && start >= 0) return true;
  PyErr_SetString(PyExc_IndexError, "there is no such temporary or tick");
  return false;
}

PyObject* Evict(PyObject* self, PyObject* args) {
  long long n, start;
  if (!PyArg_ParseTuple(args, "LL", &n, &start) || !ParseGap(self, n, start)) return nullptr;
  if (!Caught([&] { Of(self).Evict(n, start); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* Recompute(PyObject* self, PyObject* args) {
  long long n, start, capacity;
  double most_s;
  if (!PyArg_ParseTuple(args, "LLLd", &n, &start, &capacity, &most_s) ||
      !ParseGap(self, n, start)) {
    return nullptr;
  }
  bool is_taken = false;
  if (!Caught([&] { is_taken = Of(self).Recompute(n, start, capacity, most_s); })) return nullptr;
  return PyBool_FromLong(is_taken);
}

PyObject* Take(PyObject* self, PyObject* args) {
  long long capacity, smallest;
  Terms terms;
  if (!PyArg_ParseTuple(args, "LddL", &capacity, &terms.link_price, &terms.link_s, &smallest)) {
    return nullptr;
  }
  if (!Caught([&] { Of(self).Take(capacity, terms, smallest); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* Improve(PyObject* self, PyObject* args) {
  long long capacity, packed, smallest, slots, times;
  PyObject* rows;
  if (!PyArg_ParseTuple(args, "LLOLLL", &capacity, &packed, &rows, &smallest, &slots, &times)) {
    return nullptr;
  }
  Array<double> numbers;
  if (!numbers.Of(rows, false)) return nullptr;
  const bool is_good = Caught([&] {
    if (numbers.size() < 2 || numbers.size() % 2) throw std::invalid_argument("terms are pairs");
    std::vector<Terms> terms;
    for (int64_t k = 0; k < numbers.size(); k += 2) {
      terms.push_back({numbers.data()[k], numbers.data()[k + 1]});
    }
    Of(self).Improve(capacity, packed, terms, smallest, slots, times);
  });
  if (!is_good) return nullptr;
  Py_RETURN_NONE;
}

PyObject* Cost(PyObject* self, PyObject* args) {
  long long capacity, slots;
  if (!PyArg_ParseTuple(args, "LL", &capacity, &slots)) return nullptr;
  double cost = 0;
  if (!Caught([&] { cost = Of(self).Cost(capacity, slots); })) return nullptr;
  return PyFloat_FromDouble(cost);
}

PyObject* Fitted(PyObject* self, PyObject* args) {
  long long capacity, slots;
  if (!PyArg_ParseTuple(args, "LL", &capacity, &slots)) return nullptr;
  GapState::Fitted found;
  const bool is_good = Caught([&] {
    found = Of(self).Tightened(capacity, capacity, slots, std::numeric_limits<double>::infinity());
  });
  if (!is_good) return nullptr;
  const GapState::Moves& moves = found.moves;
  const Traffic& traffic = Of(self).catalog().traffic;
  const auto weight = [&](int64_t number) {
    const auto fixed = static_cast<int64_t>(traffic.fetches.size());
    return number < fixed ? traffic.weights[number] : moves.for_clones[number - fixed].second;
  };
  PyObject* departures = List(moves.departures.size(), [&](size_t k) {
    return Py_BuildValue("LLL", static_cast<long long>(moves.evicted[k]),
                         static_cast<long long>(moves.departures[k].start),
                         static_cast<long long>(moves.departures[k].done));
  });
  PyObject* fetches = List(moves.fetches.size(), [&](size_t k) {
    const int64_t of = moves.fetched[k];
    return Py_BuildValue("LLL", static_cast<long long>(of < 0 ? -1 - weight(-1 - of) : of),
                         static_cast<long long>(moves.fetches[k].first),
                         static_cast<long long>(moves.starts[k]));
  });
  return Py_BuildValue("LdNN", static_cast<long long>(found.packed.bytes), found.cost, departures,
                       fetches);
}

PyObject* Dearest(PyObject* self, PyObject*) {
  std::vector<GapKey> found;
  if (!Caught([&] { found = Of(self).Dearest(); })) return nullptr;
  return List(found.size(), [&](size_t k) {
    return Py_BuildValue("LL", static_cast<long long>(found[k].first),
                         static_cast<long long>(found[k].second));
  });
}

PyObject* GiveBack(PyObject* self, PyObject* args) {
  long long capacity;
  PyObject* among;
  std::vector<GapKey> gaps;
  if (!PyArg_ParseTuple(args, "LO", &capacity, &among) || !Pairs(among, &gaps)) return nullptr;
  for (const auto& [n, start] : gaps) {
    if (!ParseGap(self, n, start)) return nullptr;
  }
  if (!Caught([&] { Of(self).GiveBack(capacity, gaps); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* Gaps(PyObject* self, PyObject*) {
  struct Row {
    int64_t n;
    Gap gap;
  };
  std::vector<Row> rows;
  const bool is_good = Caught([&] {
    for (int64_t n = 0; n < Of(self).count(); ++n) {
      for (const Gap& gap : Of(self).taken(n)) rows.push_back({n, gap});
    }
  });
  if (!is_good) return nullptr;
  return List(rows.size(), [&](size_t k) {
    const auto& [n, gap] = rows[k];
    return Py_BuildValue("LLsL", static_cast<long long>(n), static_cast<long long>(gap.start),
                         gap.action == Action::kEvict ? "evict" : "recompute",
                         static_cast<long long>(gap.end));
  });
}

PyObject* Accesses(PyObject* self, PyObject* args) {
  long long n;
  if (!PyArg_ParseTuple(args, "L", &n) || !ParseGap(self, n, 0)) return nullptr;
  const std::vector<Tick>& found = Of(self).accesses(n);
  return List(found.size(), [&](size_t k) { return PyLong_FromLongLong(found[k]); });
}

PyMethodDef state_methods[] = {
    {"copied", Copied, METH_VARARGS, nullptr},
    {"evict", Evict, METH_VARARGS, nullptr},
    {"recompute", Recompute, METH_VARARGS, nullptr},
    {"take", Take, METH_VARARGS, nullptr},
    {"improve", Improve, METH_VARARGS, nullptr},
    {"cost", Cost, METH_VARARGS, nullptr},
    {"fitted", Fitted, METH_VARARGS, nullptr},
    {"dearest", Dearest, METH_NOARGS, nullptr},
    {"give_back", GiveBack, METH_VARARGS, nullptr},
    {"gaps", Gaps, METH_NOARGS, nullptr},
    {"accesses", Accesses, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot catalog_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(NewCatalog)},
    {Py_tp_dealloc, reinterpret_cast<void*>(DeallocCatalog)},
    {0, nullptr},
};

PyType_Spec catalog_spec = {
    "hlo_passes.edits._gap_state.Catalog", sizeof(PyCatalog), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, catalog_slots,
};

PyType_Slot state_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(NewState)},
    {Py_tp_dealloc, reinterpret_cast<void*>(DeallocState)},
    {Py_tp_methods, state_methods},
    {0, nullptr},
};

PyType_Spec state_spec = {
    "hlo_passes.edits._gap_state.State", sizeof(PyState), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, state_slots,
};

// The module's state is the type of catalogs, which states check for.
PyObject*& CatalogType(PyObject* module) {
  return *static_cast<PyObject**>(PyModule_GetState(module));
}

int Exec(PyObject* module) {
  PyObject*& catalog = CatalogType(module);
  catalog = PyType_FromModuleAndSpec(module, &catalog_spec, nullptr);
  if (catalog == nullptr || PyModule_AddObjectRef(module, "Catalog", catalog) < 0) return -1;
  PyObject* state = PyType_FromModuleAndSpec(module, &state_spec, nullptr);
  const int status = state == nullptr ? -1 : PyModule_AddObjectRef(module, "State", state);
  Py_XDECREF(state);
  return status;
}

int Clear(PyObject* module) {
  Py_CLEAR(CatalogType(module));
  return 0;
}

int Traverse(PyObject* module, visitproc visit, void* arg) {
  Py_VISIT(CatalogType(module));
  return 0;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(Exec)},
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_gap_state", nullptr, sizeof(PyObject*), nullptr,
    slots,                 Traverse,     Clear,   nullptr,
};

}  // namespace
}  // namespace memplan

PyMODINIT_FUNC PyInit__gap_state() { return PyModuleDef_Init(&memplan::definition); }
