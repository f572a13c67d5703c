#include "history.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

namespace memplan {
namespace {

// Classes of reuse: by how often a block was asked for, if by one alone; else by how often by
// others; and what was declared.
constexpr int kUses = 12;
constexpr int kEnded = 2 * kUses;
constexpr int kReturning = kEnded + 1;
constexpr std::array<double, 3> kSpreads = {0.25, 0.5, 1};

// Traits: of blocks that others ask for, none; else how many of its request's blocks were new, and
// whether that had been there before.
constexpr int kNews = 24;
constexpr int kTraits = 1 + kNews + 8;

// A declared time is this many units of its class: ages are fine around it.
constexpr double kUnits = 64;

// Requests whose hints are taken to have come true, before any did.
constexpr double kBelief = 20;

std::vector<int> Like(bool has_hints) {
  std::vector<int> like(2 * kUses);
  for (int of = 0; of < 2 * kUses; ++of) like[of] = of == kUses ? 0 : of - 1;
  if (has_hints) {
    like.push_back(0);
    for (size_t spread = 0; spread < kSpreads.size(); ++spread) like.push_back(-1);
  }
  return like;
}

int Power(uint64_t of) { return of == 0 ? 0 : 63 - __builtin_clzll(of); }

// 1, 2, 3, 4, 6, 8, 12, ...
int UsesClass(uint32_t times) {
  const int power = Power(times);
  const bool is_more = power > 0 && (times >> (power - 1) & 1);
  return std::min(2 * power - (power > 0) + is_more, kUses - 1);
}

}  // namespace

History::History(Trie* trie, int64_t remembered, Policy policy)
    : trie_(trie),
      most_ghosts_(remembered),
      learns_(policy != Policy::kLru),
      plain_(Like(false), kTraits),
      hinted_(Like(true), kTraits) {
  if (remembered < 0) throw std::invalid_argument("history: at least 0 blocks");
  hinted_.Believe(kEnded, 0, kUnits, 1, kBelief);
  for (size_t spread = 0; spread < kSpreads.size(); ++spread) {
    hinted_.Believe(kReturning + spread, kBelief, kUnits, kSpreads[spread], 0);
  }
}

// --- requests --------------------------------------------------------------------------------

void History::Take(VisitId visit, VisitId* into) {
  if (visit != kNone) ++seen_[visit].references;
  Let(into);
  *into = visit;
}

void History::Let(VisitId* visit) {
  if (*visit != kNone && --seen_[*visit].references == 0) free_.push_back(*visit);
  *visit = kNone;
}

VisitId History::Arrive(const std::vector<uint64_t>& keys, const std::vector<BlockId>& path,
                        double now) {
  now_ = visits_ == 0 ? now : std::max(now_, now);
  if (++visits_ > next_fit_ && learns_) Fit();
  if (free_.empty()) {
    free_.push_back(static_cast<VisitId>(seen_.size()));
    seen_.emplace_back();
  }
  const VisitId id = free_.back();
  free_.pop_back();
  seen_[id] = {};
  seen_[id].references = 1;
  if (keys.empty()) return id;
  seen_[id].has_end = true;
  seen_[id].end = keys.back();

  const size_t blocks = keys.size();
  use_.assign(blocks, {});
  double away = -1;  // Who asked last for the last block that is known, if this goes on from there.
  for (size_t k = 0; k < blocks; ++k) {
    const auto ghost = path[k] == kNone ? ghosts_.find(keys[k]) : ghosts_.end();
    if (path[k] == kNone && ghost == ghosts_.end()) continue;
    const Ghost was = path[k] == kNone ? ghost->second : Left((*trie_)[path[k]]);
    const bool is_end = path[k] == kNone || (*trie_)[path[k]].is_end;
    use_[k] = was.use;
    if (is_end) Count(was, true);
    away = -1;
    if (seen_[was.visit].end == keys[k]) {
      seen_[was.visit].is_over = true;
      away = now_ - was.last;
    }
    if (path[k] != kNone) continue;
    Let(&ghost->second.visit);
    ghosts_.erase(ghost);
  }
  // Blocks before an end that are forgotten were asked for as often as that.
  for (size_t k = blocks - 1; k-- > 0;) {
    use_[k].times = std::max(use_[k].times, use_[k + 1].times);
    use_[k].others = std::max(use_[k].others, use_[k + 1].others);
  }
  size_t known = blocks;
  while (known > 0 && use_[known - 1].times == 0) --known;
  const int news = known == blocks ? 0 : 1 + Power(blocks - known);
  seen_[id].traits[0] = static_cast<uint8_t>(1 + std::min(news, kNews - 1));
  int since = 0;
  if (away >= 0) since = 1 + std::clamp(Power(1 + static_cast<uint64_t>(away)) / 2 - 1, 0, 6);
  seen_[id].traits[1] = static_cast<uint8_t>(1 + kNews + since);
  return id;
}

void History::Touch(VisitId visit, const std::vector<BlockId>& path) {
  const size_t blocks = path.size();
  for (size_t k = 0; k < blocks; ++k) {
    Block& block = (*trie_)[path[k]];
    if (block.visit != kNone && !seen_[block.visit].is_over) ++use_[k].others;
    ++use_[k].times;
    Take(visit, &block.visit);
    block.use = use_[k];
    block.last = now_;
    block.order = visits_;
    ++block.touches;
  }
  for (size_t k = 0; k < blocks; ++k) {
    (*trie_)[path[k]].is_end = k + 1 == blocks || !(use_[k] == use_[k + 1]);
  }
}

void History::Extend(VisitId visit, BlockId id) {
  Block& block = (*trie_)[id];
  if (block.visit == kNone) {
    if (const auto ghost = ghosts_.find(block.key); ghost != ghosts_.end()) {
      block.use = ghost->second.use;
      Count(ghost->second, true);
      Let(&ghost->second.visit);
      ghosts_.erase(ghost);
    }
    ++block.use.times;
    block.last = now_;
    block.order = visits_;
    Take(visit, &block.visit);
    block.is_end = !seen_[visit].has_end;
    ++block.touches;
  }
  if (!std::exchange(seen_[visit].has_end, true)) seen_[visit].end = block.key;
}

void History::Say(VisitId id, const Hint& hint) {
  Visit& visit = seen_[id];
  visit.kind = hint.kind;
  if (hint.kind != Hint::kReturns) return;
  visit.unit = std::max(hint.seconds, 1e-3) / kUnits;
  visit.spread = hint.spread < 0.35 ? 0 : hint.spread < 0.75 ? 1 : 2;
}

void History::Leave(VisitId visit) { Let(&visit); }

void History::Forget(BlockId id) {
  Block& block = (*trie_)[id];
  if (block.is_end && block.visit != kNone) {
    Let(&ghosts_[block.key].visit);
    ghosts_[block.key] = {block.last, block.use, std::exchange(block.visit, kNone)};
    ghost_order_.emplace_back(block.key, block.last);
  }
  Let(&block.visit);
  trie_->Remove(id);
  Trim();
}

void History::Trim() {
  while (static_cast<int64_t>(ghosts_.size()) > most_ghosts_ ||
         ghost_order_.size() > 2 * ghosts_.size() + 16) {
    const auto [key, last] = ghost_order_.front();
    ghost_order_.pop_front();
    const auto ghost = ghosts_.find(key);
    if (ghost == ghosts_.end() || ghost->second.last != last) continue;
    Count(ghost->second, false);
    Let(&ghost->second.visit);
    ghosts_.erase(ghost);
  }
}

// --- what is learned -------------------------------------------------------------------------

History::Kind History::PlainKind(const Use& use, const Visit& visit) const {
  if (use.others > 0) return {kUses + UsesClass(use.others), {}};
  return {UsesClass(use.times), {visit.traits[0], visit.traits[1]}};
}

History::Kind History::HintKind(const Use& use, const Visit& visit) const {
  if (use.others > 0 || visit.kind == Hint::kUnknown) return PlainKind(use, visit);
  // Who came back has left this out.
  const bool is_ended = visit.kind == Hint::kEnds || visit.is_over;
  return {is_ended ? kEnded : kReturning + visit.spread, {}};
}

void History::Count(const Ghost& of, bool is_used) {
  const Visit& visit = seen_[of.visit];
  const double age = now_ - of.last;
  const Kind plain = PlainKind(of.use, visit), hinted = HintKind(of.use, visit);
  const double unit = hinted.of >= kReturning ? visit.unit : 1;
  if (is_used) {
    plain_.Used(plain, age);
    hinted_.Used(hinted, age / unit);
  } else {
    plain_.Forgotten(plain, age);
    hinted_.Forgotten(hinted, age / unit);
  }
}

void History::Fit() {
  std::vector<std::pair<Kind, double>> plain, hinted;
  const auto wait = [&](const Ghost& of) {
    const Visit& visit = seen_[of.visit];
    const Kind kind = HintKind(of.use, visit);
    plain.emplace_back(PlainKind(of.use, visit), now_ - of.last);
    hinted.emplace_back(kind, (now_ - of.last) / (kind.of >= kReturning ? visit.unit : 1));
  };
  for (const auto& [key, id] : trie_->known()) {
    const Block& block = (*trie_)[id];
    if (block.is_end && block.visit != kNone) wait(Left(block));
  }
  for (const auto& [key, ghost] : ghosts_) wait(ghost);
  plain_.Fit(plain);
  hinted_.Fit(hinted);
  next_fit_ = visits_ + std::max<int64_t>(64, static_cast<int64_t>(plain.size()) / 16);
}

double History::Index(Policy policy, const Block& block) const {
  if (policy == Policy::kLru) return static_cast<double>(block.order);
  const Visit& visit = seen_[block.visit];
  const double age = now_ - block.last;
  if (policy == Policy::kLearned) return plain_.Index(PlainKind(block.use, visit), age);
  // Others may come back to it, or who asked last for it.
  const double of_others =
      block.use.others > 0 ? hinted_.Index(PlainKind(block.use, visit), age) : 0;
  const Kind kind = HintKind({block.use.times, 0}, visit);
  const double unit = kind.of >= kReturning ? visit.unit : 1;
  return std::max(of_others, hinted_.Index(kind, age / unit) / unit);
}

}  // namespace memplan
