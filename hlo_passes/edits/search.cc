// Which gaps are taken; see `greedy.py` and `search.py`.

#include <algorithm>
#include <cmath>
#include <tuple>

#include "gap_state.h"

namespace memplan {
namespace {

// By which factor noise changes the price of a gap at most, as a power of e, up and down.
constexpr double kNoise = 1.0;

// A step counts as slower by this factor where its packing is above the capacity, and by this much
// more where what lies there reaches above it by as much again, all in all: where layers are alike,
// each that comes within it counts.
constexpr double kPackedOver = 2.0, kOver = 8.0;

// How much longer a search goes on where what it finds is not packed within the capacity.
constexpr int64_t kLonger = 5;

// By which share of the capacity a search brings the load below that at most.
constexpr double kLower = 0.25;

// How often all gaps are gone through; what is computed again may hold others longer.
constexpr int kRounds = 4;

// How often a search changes a few gaps, whatever the load needs, and how many of them at most:
// mostly it gives some back, and in half of the cases takes others.
constexpr double kFew = 0.5, kGives = 0.8, kTakes = 0.5;
constexpr int64_t kMostChanged = 4;

constexpr double kDearest = 3.0;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

bool GapState::Option::operator<(const Option& other) const {
  return std::tie(score, temporary, start, action, most_s) <
         std::tie(other.score, other.temporary, other.start, other.action, other.most_s);
}

// This is a covering problem: at every tick enough bytes have to go, for the least time; see
// greedy.py.
void GapState::Take(int64_t capacity, const Terms& terms, int64_t smallest, Noise* noise) {
  double left_s = terms.link_s;
  std::set<GapKey> refused;
  for (int round = 0; round < kRounds && MostLoad(0, ticks_) > capacity; ++round) {
    bool changed = false;
    std::vector<Option> options = Options(capacity, terms.link_price, smallest, noise);
    std::sort(options.begin(), options.end());
    for (const Option& option : options) {
      const int64_t n = option.temporary;
      if (IsTaken(n, option.start)) continue;
      if (MostLoad(option.start + 1, GapEnd(n, option.start)) <= capacity) continue;
      if (option.action == Action::kRecompute) {
        const GapKey key{n, option.start};
        if (refused.count(key)) continue;
        if (Recompute(n, option.start, capacity, option.most_s)) {
          changed = true;
        } else {
          refused.insert(key);
        }
        continue;
      }
      const double needed_s =
          catalog_->traffic.MovingSeconds(catalog_->temporaries[n].size, IsAway(n));
      if (needed_s > left_s) continue;
      left_s -= needed_s;
      Evict(n, option.start);
      changed = true;
    }
    if (!changed) break;
  }
}

// The gaps that cover ticks over the capacity, each way they can be taken.
std::vector<GapState::Option> GapState::Options(int64_t capacity, double link_price,
                                                int64_t smallest, Noise* noise) const {
  const Traffic& traffic = catalog_->traffic;
  const std::vector<double>& clock = catalog_->clock;
  std::vector<int64_t> over(ticks_ + 1, 0);
  for (Tick tick = 0; tick < ticks_; ++tick) over[tick + 1] = over[tick] + (load_[tick] > capacity);
  std::vector<Option> found;
  for (int64_t n = 0; n < count(); ++n) {
    const Temporary& t = catalog_->temporaries[n];
    if (t.obstacle || t.size < smallest || t.size == 0) continue;
    const bool is_away = IsAway(n);
    const std::vector<Tick>& accesses = accesses_[n];
    for (size_t k = 0; k + 1 < accesses.size(); ++k) {
      const Tick start = accesses[k], end = accesses[k + 1];
      const int64_t covered = end > start + 1 ? over[end] - over[start + 1] : 0;
      if (covered == 0 || IsTaken(n, start)) continue;
      double benefit = static_cast<double>(t.size) * static_cast<double>(covered);
      if (noise != nullptr) benefit *= std::exp(kNoise * (noise->Uniform() - 0.5));
      double price = kInfinity;
      if (traffic.can_evict) {
        const double needed = traffic.MovingSeconds(t.size, is_away);
        const double idle = clock[end] - clock[(is_away ? start : t.written) + 1];
        price = link_price * needed + std::max(0.0, needed - idle) +
                traffic.MovingCharge(t.size, is_away);
        found.push_back({price / benefit, n, start, Action::kEvict, kInfinity});
      }
      if (t.repeatable && depth_ > 0) {
        found.push_back({(t.maker_s + t.charge_s) / benefit, n, start, Action::kRecompute, price});
      }
    }
  }
  return found;
}

void GapState::Improve(int64_t capacity, int64_t packed, const std::vector<Terms>& terms,
                       int64_t smallest, int64_t slots, int64_t times) {
  Noise noise(packed);  // Another search for another aim.
  const std::vector<GapKey> gaps = AllGaps(smallest);
  const Fitted first = Tightened(capacity, packed, slots, kInfinity);
  double best = Score(first, capacity);
  bool is_over = first.packed.over > 0;
  int64_t last = 0;  // When something better was found.
  for (int64_t k = 0; k < times || (k < kLonger * times && k < last + times && is_over); ++k) {
    std::vector<int64_t> load(load_, load_ + ticks_);
    std::vector<double> costs(costs_, costs_ + ticks_);
    GapState other(*this, load.data(), costs.data());
    const Terms& now = terms[noise.Below(static_cast<int64_t>(terms.size()))];
    if (noise.Uniform() < kFew) {
      other.ChangeFew(gaps, &noise);
      other.Take(capacity, now, smallest, &noise);
      other.Take(capacity, {kDearest, kInfinity}, smallest);
    } else {
      other.GiveBack(std::numeric_limits<int64_t>::max(), Some(&noise));
      // Where less is live, less is broken up.
      const double lower = noise.Uniform() < 0.5 ? 0.0 : noise.Uniform() * kLower;
      const auto aim = capacity - static_cast<int64_t>(lower * static_cast<double>(capacity));
      other.Take(aim, now, smallest, &noise);
      other.Take(capacity, {kDearest, kInfinity}, smallest);
      other.GiveBack(aim, other.Dearest());
    }
    const Fitted found = other.Tightened(capacity, packed, slots, best);
    const double score = Score(found, capacity);
    // What is packed within the bytes at first is not given up.
    if (score >= best || (found.packed.over > 0 && first.packed.over == 0)) continue;
    best = score;
    is_over = found.packed.over > 0;
    last = k;
    std::copy(load.begin(), load.end(), load_);
    std::copy(costs.begin(), costs.end(), costs_);
    accesses_ = std::move(other.accesses_);
    taken_ = std::move(other.taken_);
    clones_ = std::move(other.clones_);
    on_the_way_ = std::move(other.on_the_way_);
  }
}

// The program's own, of temporaries of at least so many bytes.
std::vector<GapKey> GapState::AllGaps(int64_t smallest) const {
  std::vector<GapKey> found;
  for (int64_t n = 0; n < count(); ++n) {
    const Temporary& t = catalog_->temporaries[n];
    if (t.obstacle || t.size < smallest || t.size == 0) continue;
    const std::vector<Tick>& accesses = catalog_->accesses[n];
    for (size_t k = 0; k + 1 < accesses.size(); ++k) {
      if (accesses[k + 1] > accesses[k] + 1) found.emplace_back(n, accesses[k]);
    }
  }
  return found;
}

// Gives a few gaps back, whether or not the load needs them, and takes a few others: what a packing
// needs is not known of the load.
void GapState::ChangeFew(const std::vector<GapKey>& gaps, Noise* noise) {
  const auto few = [noise](const std::vector<GapKey>& all) {
    std::set<GapKey> found;
    for (int64_t k = all.empty() ? -1 : noise->Below(kMostChanged); k >= 0; --k) {
      found.insert(all[noise->Below(static_cast<int64_t>(all.size()))]);
    }
    return std::vector<GapKey>(found.begin(), found.end());
  };
  const std::vector<GapKey> taken = Dearest();
  const bool gives = !taken.empty() && noise->Uniform() < kGives;
  if (gives) GiveBack(std::numeric_limits<int64_t>::max(), few(taken));
  if (gives && noise->Uniform() >= kTakes) return;
  const bool can_evict = catalog_->traffic.can_evict;
  for (const auto& [n, start] : few(gaps)) {
    // By now that may be a shorter one, or none.
    const std::vector<Tick>& accesses = accesses_[n];
    const auto at = std::find(accesses.begin(), accesses.end(), start);
    if (at == accesses.end() || at + 1 == accesses.end() || *(at + 1) == start + 1) continue;
    if (IsTaken(n, start)) continue;
    const bool can_repeat = catalog_->temporaries[n].repeatable && depth_ > 0;
    if (can_repeat && (!can_evict || noise->Uniform() < 0.5)) {
      Recompute(n, start, 0, kInfinity);
    } else if (can_evict) {
      Evict(n, start);
    }
  }
}

// Some of the gaps that are taken, the dearest first: those around one of them, or any.
std::vector<GapKey> GapState::Some(Noise* noise) const {
  const std::vector<GapKey> all = Dearest();
  if (all.empty()) return all;
  const auto& [n, start] = all[noise->Below(static_cast<int64_t>(all.size()))];
  const Tick middle = noise->Uniform() < 0.5 ? start : Find(n, start)->end;
  const auto reach = static_cast<Tick>(noise->Uniform() * static_cast<double>(ticks_) / 8);
  const bool is_around = noise->Uniform() < 0.5;
  const double share = noise->Uniform() / 2;
  std::vector<GapKey> found;
  for (const GapKey& key : all) {
    const Gap& gap = *Find(key.first, key.second);
    const bool is_near = std::abs(gap.start - middle) <= reach || std::abs(gap.end - middle) <= reach;
    if (is_around ? is_near : noise->Uniform() < share) found.push_back(key);
  }
  return found;
}

// What a step costs, and more where its arena is packed above the bytes it was to have.
double GapState::Score(const Fitted& found, int64_t capacity) {
  if (found.packed.over == 0) return found.cost;
  const double share = static_cast<double>(found.packed.over) /
                       static_cast<double>(std::max<int64_t>(1, capacity));
  return found.cost * (kPackedOver + kOver * share);
}

std::vector<GapKey> GapState::Dearest() const {
  std::vector<std::tuple<double, int64_t, Tick>> gaps;
  for (int64_t n = 0; n < count(); ++n) {
    for (const Gap& gap : taken_[n]) gaps.emplace_back(Price(n, gap.action), n, gap.start);
  }
  std::sort(gaps.rbegin(), gaps.rend());
  std::vector<GapKey> found;
  found.reserve(gaps.size());
  for (const auto& [price, n, start] : gaps) found.emplace_back(n, start);
  return found;
}

double GapState::Price(int64_t n, Action action) const {
  const Temporary& t = catalog_->temporaries[n];
  const Traffic& traffic = catalog_->traffic;
  return action == Action::kRecompute
             ? t.maker_s + t.charge_s
             : traffic.MovingSeconds(t.size, false) + traffic.MovingCharge(t.size, false);
}

}  // namespace memplan
