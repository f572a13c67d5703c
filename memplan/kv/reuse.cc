#include "reuse.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace memplan {
namespace {

// Ages begin at 0, 0.5 and then each this much later, up to 500,000: waits of seconds and of days.
constexpr double kFirst = 0.5;
constexpr double kFactor = 1.25;

// Reuses that a class is taken to have had at the rate of the class that it is like; and a trait,
// at that of its blocks' classes.
constexpr double kShared = 1;
constexpr double kUsual = 8;

// Blocks after which older ones count half.
constexpr double kMemory = 1 << 17;

template <typename Counts>
void Halve(Counts* counts) {
  for (double& count : *counts) count /= 2;
}

}  // namespace

const ReuseTable::ByAge ReuseTable::kBegins = [] {
  ByAge begins;
  begins[0] = 0;
  for (int age = 1; age < kAges; ++age) begins[age] = kFirst * std::pow(kFactor, age - 1);
  return begins;
}();

ReuseTable::ReuseTable(std::vector<int> like, int traits)
    : like_(std::move(like)),
      seen_(like_.size()),
      rates_(like_.size()),
      expected_(like_.size()),
      index_(like_.size()),
      used_(traits),
      expected_of_(traits),
      factor_(traits, 1) {
  Fit({});
}

int ReuseTable::AgeOf(double age) {
  if (!(age >= kFirst)) return 0;
  // About the logarithm, and from there on to where it is.
  static const double kSteps = 1 / std::log2(kFactor);
  int exponent;
  std::frexp(age / kFirst, &exponent);
  int at = std::min(1 + static_cast<int>((exponent - 1) * kSteps), kAges - 1);
  while (at + 1 < kAges && kBegins[at + 1] <= age) ++at;
  return at;
}

void ReuseTable::Add(double age, double count, Seen* seen) {
  const int at = AgeOf(age);
  seen->ended[at] += count;
  seen->rest[at] += count * (age - kBegins[at]);
}

void ReuseTable::Believe(int of, double count, double median, double spread, double never) {
  constexpr int kParts = 64;
  for (int part = 0; part < kParts; ++part) {
    // The normal distribution's quantile, by bisection.
    const double share = (part + 0.5) / kParts;
    double low = -6, high = 6;
    while (high - low > 1e-6) {
      const double middle = (low + high) / 2;
      (std::erfc(-middle / std::sqrt(2.0)) / 2 < share ? low : high) = middle;
    }
    const double age = median * std::exp(spread * low);
    Add(age, count / kParts, &seen_[of]);
    seen_[of].used[AgeOf(age)] += count / kParts;
  }
  Add(kBegins[kAges - 1], never, &seen_[of]);
  Fit({});
}

void ReuseTable::Used(Kind kind, double age) {
  seen_[kind.of].used[AgeOf(age)] += 1;
  for (const int trait : kind.traits) used_[trait] += 1;
  Forgotten(kind, age);
}

void ReuseTable::Forgotten(Kind kind, double age) {
  Add(age, 1, &seen_[kind.of]);
  for (const int trait : kind.traits) expected_of_[trait] += Expected(kind, age) / factor_[trait];
  total_ += 1;
}

// Reuses until an age.
double ReuseTable::Expected(Kind kind, double age) const {
  const int at = AgeOf(age);
  return Factor(kind) * (expected_[kind.of][at] + rates_[kind.of][at] * (age - kBegins[at]));
}

// For how long blocks were watched at each age.
ReuseTable::ByAge ReuseTable::Watched(const Seen& seen) {
  ByAge watched;
  double beyond = 0;
  for (int age = kAges; age-- > 0;) {
    const double width = age + 1 < kAges ? kBegins[age + 1] - kBegins[age] : 0;
    watched[age] = beyond * width + seen.rest[age];
    beyond += seen.ended[age];
  }
  return watched;
}

void ReuseTable::Fit(const std::vector<std::pair<Kind, double>>& waiting) {
  const int classes = static_cast<int>(seen_.size());
  std::vector<Seen> all = seen_;
  for (const auto& [kind, age] : waiting) Add(age, 1, &all[kind.of]);
  for (int of = 0; of < classes; ++of) {
    const ByAge watched = Watched(all[of]);
    ByAge likely;
    double used = 0, expected = 0;
    for (int age = 0; age < kAges; ++age) {
      // Of what nothing is known: as likely as not used again before it is a few times as old.
      likely[age] = like_[of] < 0 ? 0.5 / (kBegins[age] + kFirst) : rates_[like_[of]][age];
      used += all[of].used[age];
      expected += watched[age] * likely[age];
    }
    const double factor = (used + kShared) / (expected + kShared);
    double sum = 0;
    for (int age = 0; age < kAges; ++age) {
      const double rate = factor * likely[age];
      rates_[of][age] = (all[of].used[age] + kShared) / (watched[age] + kShared / rate);
      expected_[of][age] = sum;
      if (age + 1 < kAges) sum += rates_[of][age] * (kBegins[age + 1] - kBegins[age]);
    }
    index_[of] = Indices(rates_[of]);
  }
  std::vector<double> expected = expected_of_;
  for (const auto& [kind, age] : waiting) {
    for (const int trait : kind.traits) expected[trait] += Expected(kind, age) / factor_[trait];
  }
  for (size_t trait = 1; trait < factor_.size(); ++trait) {
    factor_[trait] = (used_[trait] + kUsual) / (expected[trait] + kUsual);
  }
  if (total_ > kMemory) {
    total_ /= 2;
    Halve(&used_);
    Halve(&expected_of_);
    for (Seen& seen : seen_) {
      Halve(&seen.used);
      Halve(&seen.ended);
      Halve(&seen.rest);
    }
  }
}

ReuseTable::ByAge ReuseTable::Indices(const ByAge& rates) {
  ByAge used{}, stays{}, index{};
  for (int age = 0; age + 1 < kAges; ++age) {
    used[age] = -std::expm1(-rates[age] * (kBegins[age + 1] - kBegins[age]));
    stays[age] = used[age] / rates[age];
  }
  for (int from = 0; from < kAges; ++from) {
    double hits = 0, held = 0, left = 1;
    for (int age = from; age + 1 < kAges && left > 1e-6; ++age) {
      hits += left * used[age];
      held += left * stays[age];
      left *= 1 - used[age];
      index[from] = std::max(index[from], hits / held);
    }
  }
  return index;
}

}  // namespace memplan
