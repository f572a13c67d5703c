#include "gap_state.h"

#include <algorithm>
#include <stdexcept>

namespace memplan {
namespace {

// A dead operand is held rather than made again if it is smaller by this factor than what is made
// from it.
constexpr int64_t kHoldShare = 16;

}  // namespace

double Traffic::MovingSeconds(int64_t size, bool is_away) const {
  const auto bytes = static_cast<double>(size);
  const double seconds = bytes / in.bytes_per_s + in.latency_s;
  return is_away ? seconds : seconds + bytes / out.bytes_per_s + out.latency_s;
}

double Traffic::MovingCharge(int64_t size, bool is_away) const {
  return byte_s * static_cast<double>(is_away ? size : 2 * size);
}

GapState::GapState(const Catalog* catalog, int64_t* load, double* costs, int64_t ticks,
                   int64_t depth)
    : catalog_(catalog),
      load_(load),
      costs_(costs),
      ticks_(ticks),
      depth_(depth),
      accesses_(catalog->accesses),
      taken_(catalog->temporaries.size()),
      on_the_way_(ticks, 0),
      most_s_(std::numeric_limits<double>::infinity()) {}

GapState::GapState(const GapState& other, int64_t* load, double* costs) : GapState(other) {
  load_ = load;
  costs_ = costs;
}

void GapState::Evict(int64_t n, Tick start) {
  const Tick end = GapEnd(n, start);
  SetTaken(n, {start, Action::kEvict, end});
  AddLoad(start + 1, end, -catalog_->temporaries[n].size);
  undo_.clear();
}

bool GapState::Recompute(int64_t n, Tick start, int64_t capacity, double most_s) {
  Tick end = GapEnd(n, start);
  capacity_ = capacity;
  over_ = 0;
  added_s_ = 0;
  most_s_ = most_s;
  if (const Tick shared = SiblingTick(n, start, end, capacity); shared >= 0) {
    InsertAccess(n, shared);
    end = shared;
  }
  SetTaken(n, {start, Action::kRecompute, end});
  AddLoad(start + 1, end, -catalog_->temporaries[n].size);
  if (MakeAgain(n, end, 0) && added_s_ <= most_s) {
    PassBy(n, start);
    CountClones();
    if (over_ < 0) {
      undo_.clear();
      return true;
    }
  }
  RollBack();
  return false;
}

void GapState::GiveBack(int64_t capacity, const std::vector<GapKey>& among) {
  for (const auto& [n, start] : among) {
    const Gap* gap = Find(n, start);
    if (gap == nullptr) throw std::invalid_argument("a gap that is not taken");
    const Action action = gap->action;
    const Tick end = gap->end;
    const int64_t size = catalog_->temporaries[n].size;
    // Not a gap of the program's: it is made for another one only.
    if (start == LastOwnAccess(n) || end <= start + 1) continue;
    if (IsPassing(n, start) || IsPassing(n, end)) continue;
    if (MostLoad(start + 1, end) > capacity - size) continue;
    RemoveTaken(n, start);
    for (Tick tick = start + 1; tick < end; ++tick) load_[tick] += size;
    if (action == Action::kRecompute) {
      if (!SiblingsMadeAt(n, end)) costs_[end] -= catalog_->temporaries[n].maker_s;
      SetRole(n, end, Role::kNone);
      CountClones();
    }
  }
  ForgetUnread();
  undo_.clear();
}

// What was given back left clones that nobody reads, and what was held for these.
//
//     before   ── read ┤  (held)  ├ c ┤      ├ read ──     c was for a clone that is gone
//     after    ── read ┤                     ├ read ──     one gap
void GapState::ForgetUnread() {
  std::set<GapKey> read;  // Of each piece that is read, temporary and first tick.
  const std::map<int64_t, std::vector<Tick>> by_clones = ReadByClones(&read);
  std::set<Tick> ticks;
  for (const auto& [tick, roles] : clones_) ticks.insert(tick);
  std::vector<int64_t> changed;
  for (int64_t n = 0; n < count(); ++n) {
    if (taken_[n].empty() && accesses_[n].size() == catalog_->accesses[n].size()) continue;
    changed.push_back(n);
    CountHeld(n, -1);
  }
  clones_.clear();
  for (const int64_t n : changed) {
    std::vector<Tick> accesses = catalog_->accesses[n];
    if (const auto at = by_clones.find(n); at != by_clones.end()) {
      accesses.insert(accesses.end(), at->second.begin(), at->second.end());
    }
    std::vector<Gap> gaps;
    for (const Gap& gap : taken_[n]) {
      if (!read.count({n, gap.end})) continue;
      gaps.push_back(gap);
      accesses.push_back(gap.end);
    }
    std::sort(accesses.begin(), accesses.end());
    accesses.erase(std::unique(accesses.begin(), accesses.end()), accesses.end());
    for (Gap& gap : gaps) {
      gap.start = *(std::lower_bound(accesses.begin(), accesses.end(), gap.end) - 1);
    }
    accesses_[n] = std::move(accesses);
    taken_[n] = std::move(gaps);
  }
  for (const int64_t n : changed) FindRoles(n);
  for (const int64_t n : changed) CountHeld(n, 1);
  for (const auto& [tick, roles] : clones_) ticks.insert(tick);
  for (const Tick tick : ticks) {
    changed_.insert(tick);
    costs_[tick] = catalog_->costs[tick];
    for (const Clone& clone : ClonesBefore(tick)) {
      costs_[tick] += catalog_->temporaries[clone.elements[0]].maker_s;
    }
  }
  CountClones();
}

// At which ticks clones read each temporary, of all pieces that the program reads itself, or that
// these clones read.
std::map<int64_t, std::vector<Tick>> GapState::ReadByClones(std::set<GapKey>* read) const {
  std::map<int64_t, std::vector<Tick>> found;
  std::set<GapKey> clones;  // Maker and tick.
  std::vector<GapKey> pending;
  for (int64_t n = 0; n < count(); ++n) {
    if (taken_[n].empty()) continue;
    for (const Tick tick : catalog_->accesses[n]) pending.emplace_back(n, tick);
  }
  while (!pending.empty()) {
    const auto [n, tick] = pending.back();
    pending.pop_back();
    const Gap* behind = nullptr;  // The piece that is there at the tick, if not the original.
    for (const Gap& gap : taken_[n]) {
      if (gap.end <= tick) behind = &gap;
    }
    if (behind == nullptr || !read->insert({n, behind->end}).second) continue;
    const Temporary& t = catalog_->temporaries[n];
    if (behind->action == Action::kEvict || !clones.insert({t.maker, behind->end}).second) continue;
    for (const Operand& operand : t.operands) {
      if (operand.temporary < 0) continue;
      found[operand.temporary].push_back(behind->end);
      pending.emplace_back(operand.temporary, behind->end);
    }
  }
  return found;
}

bool GapState::IsOwn(int64_t n, Tick tick) const {
  const std::vector<Tick>& own = catalog_->accesses[n];
  return std::binary_search(own.begin(), own.end(), tick);
}

// Adds `sign` times the bytes of a temporary beyond those that it has with nothing taken.
void GapState::CountHeld(int64_t n, int64_t sign) {
  const int64_t size = sign * catalog_->temporaries[n].size;
  const auto add = [&](Tick first, Tick last, int64_t bytes) {
    for (Tick tick = first; tick <= last; ++tick) load_[tick] += bytes;
  };
  const std::vector<Tick>& own = catalog_->accesses[n];
  // What is read behind the last tick is never away.
  const auto end = [&](Tick last) { return std::min(last, ticks_ - 1); };
  add(own.front(), end(own.back()), -size);
  Tick first = own.front();
  for (size_t k = 0; k <= taken_[n].size(); ++k) {
    const Tick last = k < taken_[n].size() ? taken_[n][k].start : accesses_[n].back();
    add(first, end(last), size);
    if (IsPassing(n, first)) add(first, first, -size);
    if (last != first && last < ticks_ && IsPassing(n, last)) add(last, last, -size);
    if (k < taken_[n].size()) first = taken_[n][k].end;
  }
}

// Finds what a temporary is to the clones that make it or are its last readers.
void GapState::FindRoles(int64_t n) {
  const std::vector<Gap>& gaps = taken_[n];
  for (size_t k = 0; k <= gaps.size(); ++k) {
    const bool is_last = k == gaps.size();
    const Tick last = is_last ? accesses_[n].back() : gaps[k].start;
    const bool is_made = k > 0 && gaps[k - 1].action == Action::kRecompute;
    const bool is_passed = !IsOwn(n, last) && (is_last || gaps[k].action == Action::kRecompute);
    if (is_made) {
      const Tick first = gaps[k - 1].end;
      PutRole(n, first, is_passed && first == last ? Role::kPassing : Role::kMade);
      if (first == last) continue;
    }
    if (is_passed && last < ticks_) PutRole(n, last, Role::kWaiting);
  }
}

Tick GapState::LastOwnAccess(int64_t n) const {
  const Temporary& t = catalog_->temporaries[n];
  return t.reads.empty() ? t.written : t.reads.back();
}

const Gap* GapState::Find(int64_t n, Tick start) const {
  for (const Gap& gap : taken_[n]) {
    if (gap.start == start) return &gap;
  }
  return nullptr;
}

// The access behind the one at `start`.
Tick GapState::GapEnd(int64_t n, Tick start) const {
  const auto behind = std::upper_bound(accesses_[n].begin(), accesses_[n].end(), start);
  if (behind == accesses_[n].end()) throw std::out_of_range("there is no access behind this one");
  return *behind;
}

// Whether a copy of a temporary is on the host already.
bool GapState::IsAway(int64_t n) const {
  return std::any_of(taken_[n].begin(), taken_[n].end(),
                     [](const Gap& gap) { return gap.action == Action::kEvict; });
}

int64_t GapState::MostLoad(Tick start, Tick end) const {
  int64_t most = 0;
  for (Tick tick = start; tick < end; ++tick) most = std::max(most, load_[tick]);
  return most;
}

// Runs the maker of a temporary right before `tick`.
bool GapState::MakeAgain(int64_t n, Tick tick, int64_t depth) {
  const Temporary& t = catalog_->temporaries[n];
  if (!t.repeatable || depth >= depth_ || tick >= ticks_) return false;
  const Role role = RoleOf(n, tick);
  if (role == Role::kNone) SetRole(n, tick, Role::kMade);
  if (role == Role::kWaiting) SetRole(n, tick, Role::kPassing);
  if (SiblingsMadeAt(n, tick)) return true;
  AddCost(tick, t.maker_s);
  added_s_ += t.charge_s;
  if (added_s_ > most_s_) return false;
  for (const Operand& operand : t.operands) {
    if (!Ensure(operand, tick, t.size, depth + 1)) return false;
  }
  return true;
}

// Has an operand on the device at `tick`, for something of `size` bytes.
bool GapState::Ensure(const Operand& operand, Tick tick, int64_t size, int64_t depth) {
  const int64_t n = operand.temporary;
  if (n < 0) return tick < operand.until;
  const Temporary& t = catalog_->temporaries[n];
  const std::vector<Tick>& accesses = accesses_[n];
  const size_t at = std::lower_bound(accesses.begin(), accesses.end(), tick) - accesses.begin();
  if (at == 0) return false;  // It is not made yet.
  const bool is_dead = at == accesses.size();
  if (!is_dead && accesses[at] == tick) return true;
  const Tick start = accesses[at - 1];
  InsertAccess(n, tick);
  if (is_dead) {
    const bool is_small = t.size * kHoldShare <= size;
    if (is_small || !t.repeatable) {
      KeepFrom(n, start);
      AddLoad(start + 1, tick + 1, t.size);
      PassBy(n, tick);
      return is_small;
    }
    SetTaken(n, {start, Action::kRecompute, tick});
    SetRole(n, tick, Role::kPassing);
    return MakeAgain(n, tick, depth);
  }
  const Gap* found = Find(n, start);
  if (found == nullptr) return true;
  // It comes back for this one already, and stays.
  const Gap gap = *found;
  SetTaken(n, {start, gap.action, tick});
  AddLoad(tick, gap.end, t.size);
  if (gap.action == Action::kEvict) return tick > start + 1;
  KeepFrom(n, gap.end);
  SetRole(n, gap.end, Role::kNone);
  if (!SiblingsMadeAt(n, gap.end)) {
    AddCost(gap.end, -t.maker_s);
    added_s_ -= t.charge_s;
  }
  return MakeAgain(n, tick, depth);
}

GapState::Role GapState::RoleOf(int64_t n, Tick tick) const {
  const auto at = clones_.find(tick);
  if (at == clones_.end()) return Role::kNone;
  const auto found = at->second.find(n);
  return found == at->second.end() ? Role::kNone : found->second;
}

// Whether clones before `tick` are all that needs a temporary there, and later none.
bool GapState::IsPassing(int64_t n, Tick tick) const {
  const Role role = RoleOf(n, tick);
  return role == Role::kPassing || role == Role::kWaiting;
}

// Counts a temporary with the clones before `tick`, if they are all that needs it there.
void GapState::PassBy(int64_t n, Tick tick) {
  const Temporary& t = catalog_->temporaries[n];
  const Role role = RoleOf(n, tick);
  const bool is_last = tick == accesses_[n].back() || IsTaken(n, tick);
  if (is_last && !IsOwn(n, tick) && (role == Role::kMade || role == Role::kNone)) {
    SetRole(n, tick, role == Role::kNone ? Role::kWaiting : Role::kPassing);
    AddLoad(tick, tick + 1, -t.size);
  }
}

// Counts a temporary at `tick` like any other.
void GapState::KeepFrom(int64_t n, Tick tick) {
  if (!IsPassing(n, tick)) return;
  SetRole(n, tick, RoleOf(n, tick) == Role::kPassing ? Role::kMade : Role::kNone);
  AddLoad(tick, tick + 1, catalog_->temporaries[n].size);
}

// Brings the load up to date with what is made again on the way to something else.
void GapState::CountClones() {
  for (const Tick tick : changed_) {
    const int64_t before = on_the_way_[tick], now = MostOnTheWay(tick);
    on_the_way_[tick] = now;
    undo_.push_back({Undo::Kind::kOnTheWay, Role::kNone, Action::kEvict, 0, tick, 0, before, 0});
    AddLoad(tick, tick + 1, now - before);
  }
  changed_.clear();
}

std::vector<GapState::Clone> GapState::ClonesBefore(Tick tick) const {
  std::vector<Clone> made;
  const auto at = clones_.find(tick);
  if (at == clones_.end()) return made;
  const std::map<int64_t, Role>& clones = at->second;
  const std::vector<Temporary>& temporaries = catalog_->temporaries;
  std::map<int64_t, size_t> of_maker, last;
  for (const auto& [n, role] : clones) {
    if (role == Role::kWaiting) continue;
    const auto [found, is_new] = of_maker.try_emplace(temporaries[n].maker, made.size());
    if (is_new) made.push_back({temporaries[n].maker, {}, {}});
    made[found->second].elements.push_back(n);
  }
  for (size_t k = 0; k < made.size(); ++k) {
    for (const int64_t n : made[k].elements) last[n] = k;
    for (const Operand& operand : temporaries[made[k].elements[0]].operands) {
      if (operand.temporary >= 0 && clones.count(operand.temporary)) last[operand.temporary] = k;
    }
  }
  for (const auto& [n, k] : last) {
    if (clones.at(n) != Role::kMade) made[k].last_read.push_back(n);
  }
  return made;
}

// What a clone before `tick` reads of weights that are not there for the program itself.
std::set<int64_t> GapState::WeightsFor(const Clone& clone, Tick tick) const {
  std::set<int64_t> found;
  for (const Operand& operand : catalog_->temporaries[clone.elements[0]].operands) {
    if (!operand.is_weight() || catalog_->weights[operand.weight()].IsThere(tick)) continue;
    found.insert(operand.weight());
  }
  return found;
}

// By how many bytes the clones before `tick`, with all they make and what waits for them, take
// more than what is there of it at the tick.
int64_t GapState::MostOnTheWay(Tick tick) const {
  const auto at = clones_.find(tick);
  if (at == clones_.end()) return 0;
  const std::vector<Temporary>& temporaries = catalog_->temporaries;
  int64_t there = 0, stay = 0;
  for (const auto& [n, role] : at->second) {
    if (role == Role::kWaiting) there += temporaries[n].size;
    if (role == Role::kMade) stay += temporaries[n].size;
  }
  int64_t most = there;
  for (const Clone& clone : ClonesBefore(tick)) {
    std::vector<int64_t> left = clone.last_read;
    int64_t reused = 0, all = 0;  // Bytes of operands over which the maker writes.
    for (const int64_t n : clone.elements) {
      const Temporary& t = temporaries[n];
      all += t.size;
      const auto over = std::find_if(left.begin(), left.end(),
                                     [&t](int64_t operand) { return t.MayLieIn(operand); });
      if (over == left.end()) continue;
      left.erase(over);
      reused += t.size;
    }
    there += all;
    const Temporary& first = temporaries[clone.elements[0]];
    int64_t beside = std::max<int64_t>(0, first.beside - (all - first.size));
    for (const int64_t m : WeightsFor(clone, tick)) beside += catalog_->weights[m].size;
    most = std::max(most, there + beside - reused);
    for (const int64_t n : clone.last_read) there -= temporaries[n].size;
  }
  return std::max<int64_t>(0, most - stay - catalog_->written[tick]);
}

// Whether the maker of a temporary runs before `tick` for another element already.
bool GapState::SiblingsMadeAt(int64_t n, Tick tick) const {
  for (const int64_t other : catalog_->made_by[catalog_->temporaries[n].maker]) {
    if (other == n) continue;
    for (const Gap& gap : taken_[other]) {
      if (gap.action == Action::kRecompute && gap.end == tick) return true;
    }
  }
  return false;
}

// The last tick within a gap at which its maker runs again anyway, if there is room to keep what
// it makes from then on; -1 where there is none.
Tick GapState::SiblingTick(int64_t n, Tick start, Tick end, int64_t capacity) const {
  Tick found = -1;
  for (const int64_t other : catalog_->made_by[catalog_->temporaries[n].maker]) {
    if (other == n) continue;
    for (const Gap& gap : taken_[other]) {
      if (gap.action == Action::kRecompute && start < gap.end && gap.end < end &&
          gap.end > found && MostLoad(gap.end, end) <= capacity) {
        found = gap.end;
      }
    }
  }
  return found;
}

void GapState::RollBack() {
  for (; !undo_.empty(); undo_.pop_back()) {
    const Undo& undo = undo_.back();
    switch (undo.kind) {
      case Undo::Kind::kTaken:
        PutTaken(undo.n, {undo.tick, undo.action, undo.end});
        break;
      case Undo::Kind::kNotTaken:
        RemoveTaken(undo.n, undo.tick);
        break;
      case Undo::Kind::kRole:
        PutRole(undo.n, undo.tick, undo.role);
        break;
      case Undo::Kind::kAccess: {
        std::vector<Tick>& accesses = accesses_[undo.n];
        accesses.erase(std::lower_bound(accesses.begin(), accesses.end(), undo.tick));
        break;
      }
      case Undo::Kind::kLoad:
        for (Tick tick = undo.tick; tick < undo.end; ++tick) load_[tick] -= undo.bytes;
        break;
      case Undo::Kind::kCost:  // Not by subtraction: that rounds.
        costs_[undo.tick] = undo.seconds;
        break;
      case Undo::Kind::kOnTheWay:
        on_the_way_[undo.tick] = undo.bytes;
        break;
    }
  }
  changed_.clear();
}

void GapState::PutTaken(int64_t n, const Gap& gap) {
  std::vector<Gap>& gaps = taken_[n];
  const auto at = std::lower_bound(gaps.begin(), gaps.end(), gap.start,
                                   [](const Gap& g, Tick start) { return g.start < start; });
  if (at != gaps.end() && at->start == gap.start) {
    *at = gap;
  } else {
    gaps.insert(at, gap);
  }
}

void GapState::RemoveTaken(int64_t n, Tick start) {
  std::vector<Gap>& gaps = taken_[n];
  gaps.erase(std::find_if(gaps.begin(), gaps.end(),
                          [start](const Gap& gap) { return gap.start == start; }));
}

void GapState::PutRole(int64_t n, Tick tick, Role role) {
  if (role != Role::kNone) {
    clones_[tick][n] = role;
    return;
  }
  const auto at = clones_.find(tick);
  if (at == clones_.end()) return;
  at->second.erase(n);
  if (at->second.empty()) clones_.erase(at);
}

void GapState::SetTaken(int64_t n, const Gap& gap) {
  const Gap* before = Find(n, gap.start);
  if (before == nullptr) {
    undo_.push_back({Undo::Kind::kNotTaken, Role::kNone, gap.action, n, gap.start, 0, 0, 0});
  } else {
    undo_.push_back(
        {Undo::Kind::kTaken, Role::kNone, before->action, n, gap.start, before->end, 0, 0});
  }
  PutTaken(n, gap);
}

// Takes note of what a temporary is to the clones before `tick`.
void GapState::SetRole(int64_t n, Tick tick, Role role) {
  changed_.insert(tick);
  undo_.push_back({Undo::Kind::kRole, RoleOf(n, tick), Action::kEvict, n, tick, 0, 0, 0});
  PutRole(n, tick, role);
}

void GapState::InsertAccess(int64_t n, Tick tick) {
  std::vector<Tick>& accesses = accesses_[n];
  accesses.insert(std::upper_bound(accesses.begin(), accesses.end(), tick), tick);
  undo_.push_back({Undo::Kind::kAccess, Role::kNone, Action::kEvict, n, tick, 0, 0, 0});
}

void GapState::AddLoad(Tick start, Tick end, int64_t size) {
  for (Tick tick = start; tick < end; ++tick) {
    const int64_t over = load_[tick] - capacity_;
    over_ += std::max<int64_t>(over + size, 0) - std::max<int64_t>(over, 0);
    load_[tick] += size;
  }
  undo_.push_back({Undo::Kind::kLoad, Role::kNone, Action::kEvict, 0, start, end, size, 0});
}

void GapState::AddCost(Tick tick, double seconds) {
  undo_.push_back({Undo::Kind::kCost, Role::kNone, Action::kEvict, 0, tick, 0, 0, costs_[tick]});
  added_s_ += seconds;
  costs_[tick] += seconds;
}

}  // namespace memplan
