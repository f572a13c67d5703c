// Gaps that are taken: what that does to the bytes and the seconds of each tick.
//
//     gap of d     ── read ┤                 ├ read ──       evicted: moved out and in
//     recomputed   ── read ┤           a b c d read ──       d from c, c from b, b from a, all of
//                                      └───┘                 which are dead: made again, too
//
// The state is consistent all the time. To run an instruction again, its operands have to be
// there: one that is away comes back then already, by whatever way was chosen for it, and stays;
// one that is dead is held, or made again as well. That is how a whole layer comes to be
// computed again from its input, and each part of it once.
//
// What is made again only for others that are, at the same tick, is on the way: those stand in
// the order of the program, and each is there until the last that reads it, and so is what waited
// for them alone. They count with the most that is there at once, before the program's own result.

#ifndef MEMPLAN_HLO_PASSES_GAP_STATE_H_
#define MEMPLAN_HLO_PASSES_GAP_STATE_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "../memory/place.h"
#include "../placing/schedule.h"

namespace memplan {

// What the maker of a temporary needs to run again: another temporary; or what is there until the
// tick `until`, where it is (`temporary` is -1), or on the host (`temporary` is less).
struct Operand {
  int64_t temporary;
  Tick until;

  bool is_weight() const { return temporary < -1; }
  int64_t weight() const { return -2 - temporary; }
};

// An argument on the host: its bytes, and the ticks during which the program has it on the device
// whatever is taken.
struct Weight {
  int64_t size;
  std::vector<std::pair<Tick, Tick>> there;

  bool IsThere(Tick tick) const {
    return std::any_of(there.begin(), there.end(), [tick](const std::pair<Tick, Tick>& range) {
      return range.first <= tick && tick < range.second;
    });
  }
};

// See `gaps.Temporary`; `maker` is a number, `maker_s` its seconds, and `charge_s` what a run of it
// again is charged beside these (see `Prices`). It lies in `resident`, or where that is -1 in bytes
// that are there anyway.
struct Temporary {
  int64_t size, added, beside, maker, resident;
  Tick written;
  double maker_s, charge_s;
  bool obstacle, repeatable;
  std::vector<Tick> reads;
  std::vector<Operand> operands;
  std::vector<int64_t> over;  // Operands in whose bytes it may lie where they are read last.

  bool MayLieIn(int64_t n) const { return std::find(over.begin(), over.end(), n) != over.end(); }
};

// The links, and what moves on them whatever is taken. `byte_s` is what each byte that moves is
// charged beside the seconds of a step: see `Prices`.
struct Traffic {
  Link in, out;
  double byte_s;
  bool is_one_queue, can_evict;
  double margin;
  std::vector<Fetch> fetches;  // In the order of their first reads.
  std::vector<int64_t> weights;  // Of each, or -1.
  std::vector<Eviction> evictions;

  // Seconds of links to take `size` bytes away, unless they are, and back.
  double MovingSeconds(int64_t size, bool is_away) const;

  // What that is charged.
  double MovingCharge(int64_t size, bool is_away) const;
};

// What shares the arena with fetches, and how the compiler packs it.
struct Shared {
  std::vector<Rectangle> residents;  // In ticks.
  // Of each eviction whatever is taken, the number of the resident in whose bytes it lies, or that
  // of the fetch, behind all residents; -1 where there is none.
  std::vector<int64_t> holders;
  std::vector<Tick> joined;  // When something else is written into the bytes of one of them.
  int64_t alignment;
  bool in_order;     // Offsets are given in the order of the starts.
  int64_t smallest;  // What has fewer bytes lies elsewhere.
  int64_t table;     // Bytes that the compiler takes for every instruction.
};

// The temporaries of a module, which are numbered in the order in which they are written.
struct Catalog {
  std::vector<Temporary> temporaries;
  std::vector<Weight> weights;
  Traffic traffic;
  Shared shared;
  std::vector<std::vector<Tick>> accesses;    // Of each, its making first.
  std::vector<std::vector<int64_t>> made_by;  // The temporaries of each maker.
  std::vector<int64_t> written;  // Bytes that are first taken at each tick.
  std::vector<int64_t> fetched;  // Bytes that are fetched and read at each tick.
  std::vector<double> costs;     // Seconds of each tick with nothing taken.
  std::vector<double> in_busy, out_busy;  // See `Compute`.
  std::vector<double> clock;     // Those before each tick, and of all.
};

enum class Action : uint8_t { kEvict, kRecompute };

// A gap that is not kept: from an access at `start`, until the bytes are there again at `end`.
struct Gap {
  Tick start;
  Action action;
  Tick end;
};

// On which terms gaps are taken: see `greedy.Terms`.
struct Terms {
  double link_price, link_s;
};

// Numbers that look random, the same for everybody.
class Noise {
 public:
  explicit Noise(int64_t seed) : generator_(static_cast<uint64_t>(seed)) {}

  // One from 0 to 1.
  double Uniform() { return static_cast<double>(generator_() >> 11) * 0x1p-53; }
  int64_t Below(int64_t count) { return static_cast<int64_t>(Uniform() * static_cast<double>(count)); }

 private:
  std::mt19937_64 generator_;
};

// A gap by its temporary and the access with which it starts.
using GapKey = std::pair<int64_t, Tick>;

class GapState {
 public:
  // `load` and `costs` are the caller's, one for each tick, and have the selection's effects.
  GapState(const Catalog* catalog, int64_t* load, double* costs, int64_t ticks, int64_t depth);

  // The same gaps, with memory of the caller's that has what this one's has.
  GapState(const GapState& other, int64_t* load, double* costs);

  const Catalog& catalog() const { return *catalog_; }
  const std::vector<Tick>& accesses(int64_t n) const { return accesses_[n]; }
  const std::vector<Gap>& taken(int64_t n) const { return taken_[n]; }
  int64_t count() const { return static_cast<int64_t>(taken_.size()); }
  bool IsTaken(int64_t n, Tick start) const { return Find(n, start) != nullptr; }

  // Evicts a temporary during the gap from `start`.
  void Evict(int64_t n, Tick start);

  // Recomputes a temporary at the end of the gap from `start`, if its operands can be there, all
  // that has to run again for it takes no more than `most_s`, and the load comes nearer to
  // `capacity` by it. Else nothing changes, and it returns false.
  bool Recompute(int64_t n, Tick start, int64_t capacity, double most_s);

  // Takes gaps, the cheapest for each byte and tick over `capacity` first, until the load is
  // within that everywhere or none is left that helps. Temporaries of fewer than `smallest` bytes
  // are left alone.
  //
  // `noise`, if there is one, changes the order a little.
  void Take(int64_t capacity, const Terms& terms, int64_t smallest, Noise* noise = nullptr);

  // Searches for gaps with which a step takes less: some of those that are taken are given back,
  // others are taken on other terms, or a few anyhow, and what is faster is kept. A large
  // neighbourhood search (Shaw, "Using constraint programming and local search methods to solve
  // vehicle routing problems", 1998). So many times, the same each time, and longer where what the
  // compiler would pack is above `packed` bytes, which counts as slower; where it is within them at
  // first, it stays so.
  void Improve(int64_t capacity, int64_t packed, const std::vector<Terms>& terms, int64_t smallest,
               int64_t slots, int64_t times);

  // Predicts the seconds of a step whose transfers have so many bytes, and at most so many slots
  // (-1: any number), and what is charged beside them; infinity where it does not fit.
  double Cost(int64_t capacity, int64_t slots) const;

  // What moves, and when; of each eviction and fetch the temporary, or -1 less its number among those
  // whatever is taken, and behind these among what clones read of weights.
  struct Moves {
    std::vector<Eviction> evictions;
    std::vector<Departure> departures;
    std::vector<Fetch> fetches;
    std::vector<Tick> starts;
    std::vector<int64_t> evicted, fetched;
    std::vector<std::pair<Tick, int64_t>> for_clones;  // Before which tick, and the weight.
    std::vector<double> clock;
  };

  // A schedule, its seconds and what is charged beside them, and its packing.
  struct Fitted {
    Moves moves;
    double cost;
    Packed packed;
  };

  // As in `placement`: what moves gets fewer bytes until all is packed within `packed`. No schedule
  // is looked at that costs `enough`; with none, the packing is the largest there is.
  Fitted Tightened(int64_t capacity, int64_t packed, int64_t slots, double enough) const;

  // Every gap that is taken, the dearest first.
  std::vector<GapKey> Dearest() const;

  // Keeps those temporaries after all whose bytes are not needed to be within `capacity`; what was
  // made again or held for them alone no longer is.
  void GiveBack(int64_t capacity, const std::vector<GapKey>& among);

 private:
  // What a temporary is to the clones before a tick: one of them makes it, for the program or for
  // later; for others of them only; it is there already, for them only, and for the last time.
  enum class Role : uint8_t { kNone, kMade, kPassing, kWaiting };

  // What is made again before one tick, in order: the elements that one maker makes for it, and
  // those (made here or waiting) that it is the last to read.
  struct Clone {
    int64_t maker;
    std::vector<int64_t> elements, last_read;
  };

  // A fetch, with what `Moves` says of it, and the weight or -1.
  struct Coming {
    Fetch fetch;
    int64_t of, weight;
  };

  class Sketch;  // Of the packed arena.

  void KeepCopies(std::vector<int64_t> room, std::vector<Coming>* coming) const;

  // How to take one change back.
  struct Undo {
    enum class Kind : uint8_t { kTaken, kNotTaken, kRole, kAccess, kLoad, kCost, kOnTheWay } kind;
    Role role;
    Action action;
    int64_t n;
    Tick tick, end;
    int64_t bytes;
    double seconds;
  };

  // A gap and what can be done with it; the least comes first.
  struct Option {
    double score;
    int64_t temporary;
    Tick start;
    Action action;
    double most_s;  // Seconds for which the gap can be had in another way.

    bool operator<(const Option& other) const;
  };

  const Gap* Find(int64_t n, Tick start) const;
  Tick GapEnd(int64_t n, Tick start) const;
  bool IsAway(int64_t n) const;
  double Price(int64_t n, Action action) const;
  Tick LastOwnAccess(int64_t n) const;
  int64_t MostLoad(Tick start, Tick end) const;
  std::vector<Option> Options(int64_t capacity, double link_price, int64_t smallest,
                              Noise* noise) const;
  std::vector<GapKey> Some(Noise* noise) const;

  bool MakeAgain(int64_t n, Tick tick, int64_t depth);
  bool Ensure(const Operand& operand, Tick tick, int64_t size, int64_t depth);
  Role RoleOf(int64_t n, Tick tick) const;
  bool IsPassing(int64_t n, Tick tick) const;
  void PassBy(int64_t n, Tick tick);
  void KeepFrom(int64_t n, Tick tick);
  void CountClones();
  std::vector<Clone> ClonesBefore(Tick tick) const;
  int64_t MostOnTheWay(Tick tick) const;
  std::set<int64_t> WeightsFor(const Clone& clone, Tick tick) const;
  bool Schedule(int64_t capacity, int64_t slots, Moves* moves) const;
  bool Schedule(int64_t capacity, int64_t slots, bool keeps, Moves* moves) const;
  double Cost(const Moves& moves) const;
  double Charge(const Moves& moves) const;
  std::vector<GapKey> AllGaps(int64_t smallest) const;
  void ChangeFew(const std::vector<GapKey>& gaps, Noise* noise);
  static double Score(const Fitted& found, int64_t capacity);
  bool SiblingsMadeAt(int64_t n, Tick tick) const;
  Tick SiblingTick(int64_t n, Tick start, Tick end, int64_t capacity) const;
  void ForgetUnread();
  std::map<int64_t, std::vector<Tick>> ReadByClones(std::set<GapKey>* read) const;
  bool IsOwn(int64_t n, Tick tick) const;
  void CountHeld(int64_t n, int64_t sign);
  void FindRoles(int64_t n);

  void RollBack();
  void PutTaken(int64_t n, const Gap& gap);
  void RemoveTaken(int64_t n, Tick start);
  void PutRole(int64_t n, Tick tick, Role role);
  void SetTaken(int64_t n, const Gap& gap);
  void SetRole(int64_t n, Tick tick, Role role);
  void InsertAccess(int64_t n, Tick tick);
  void AddLoad(Tick start, Tick end, int64_t size);
  void AddCost(Tick tick, double seconds);

  const Catalog* catalog_;
  int64_t* load_;
  double* costs_;
  int64_t ticks_, depth_;
  std::vector<std::vector<Tick>> accesses_;
  std::vector<std::vector<Gap>> taken_;              // By start.
  std::map<Tick, std::map<int64_t, Role>> clones_;
  std::vector<int64_t> on_the_way_;  // Bytes for clones before a tick beyond those at it.
  std::set<Tick> changed_;
  std::vector<Undo> undo_;
  // What is being tried: bytes and ticks over this capacity that it adds, and seconds, of which
  // it may add so many.
  int64_t capacity_ = 0, over_ = 0;
  double added_s_ = 0, most_s_;
};

}  // namespace memplan

#endif  // MEMPLAN_HLO_PASSES_GAP_STATE_H_
