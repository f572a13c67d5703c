// How soon blocks are used again, learned from what was seen; and what that makes them worth.
//
// A block that is kept takes room until it is used again, or is given up. Its index is the most
// hits that a unit of that room can bring, over all times to give it up at (Gittins; of caches:
// "hit density", Beckmann, Chen and Cidon, LHD, NSDI 2018; here with the best horizon instead of
// an endless one). It may rise with age: who reads an answer comes back after a minute, not at
// once, and a cache whose newest blocks push out those of a minute ago loses both.
//
// Rates are learned for each class; and besides, by which factors those of traits are higher
// (proportional hazards, Cox 1972).

#ifndef MEMPLAN_KV_REUSE_H_
#define MEMPLAN_KV_REUSE_H_

#include <array>
#include <cstdint>
#include <vector>

namespace memplan {

// Rates of reuse by class and age. Ages are in a unit of the class's own: seconds, or parts of a
// time that was declared.
class ReuseTable {
 public:
  // What a block is known by.
  struct Kind {
    int of;                     // Its class,
    std::array<int, 2> traits;  // and traits; 0: none.
  };

  // `like[c]` is a class before c which c is taken to be like, but for how often, until it is known
  // better; -1: none.
  ReuseTable(std::vector<int> like, int traits);

  // What is believed of a class before anything is seen: `count` blocks were used again, at ages
  // that are lognormal around `median` with `spread`; `never` were not.
  void Believe(int of, double count, double median, double spread, double never);

  // A block was used again at an age, or was forgotten unused.
  void Used(Kind kind, double age);
  void Forgotten(Kind kind, double age);

  // Makes rates of what was seen, and of blocks that are as old now, and were not yet used.
  void Fit(const std::vector<std::pair<Kind, double>>& waiting);

  // Hits for each block held for a unit of the class's time.
  double Index(Kind kind, double age) const {
    return Factor(kind) * index_[kind.of][AgeOf(age)];
  }

 private:
  static constexpr int kAges = 64;
  using ByAge = std::array<double, kAges>;

  struct Seen {
    ByAge used{};   // Blocks whose reuse fell into an age.
    ByAge ended{};  // Those whose watch ended in it, used or not,
    ByAge rest{};   // and for how long of it they were watched, in sum.
  };

  static const ByAge kBegins;

  static int AgeOf(double age);
  static void Add(double age, double count, Seen* seen);
  static ByAge Watched(const Seen& seen);
  static ByAge Indices(const ByAge& rates);
  double Factor(Kind kind) const { return factor_[kind.traits[0]] * factor_[kind.traits[1]]; }
  double Expected(Kind kind, double age) const;

  std::vector<int> like_;
  std::vector<Seen> seen_;
  std::vector<ByAge> rates_, expected_, index_;
  std::vector<double> used_, expected_of_, factor_;  // By trait.
  double total_ = 0;
};

}  // namespace memplan

#endif  // MEMPLAN_KV_REUSE_H_
