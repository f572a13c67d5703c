// Requests at random against a prefix cache, whose bytes are kept beside it: what it says it has,
// it has, whatever others do meanwhile. fuzz SEED ROUNDS; ends with 1 and a sentence.

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "prefix_cache.h"

namespace memplan {
namespace {

using Tokens = std::vector<int32_t>;

struct Open {
  PrefixCache::RequestId id;
  Tokens tokens;
  int64_t committed;
  bool is_lost;  // It may read what nobody else gets.
};

void Demand(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

class Engine {
 public:
  explicit Engine(uint64_t seed) : random_(seed), settings_(Drawn()), cache_(settings_) {}

  void Run(int steps) {
    for (int step = 0; step < steps; ++step) {
      const int which = Below(12);
      if (open_.empty() || (which < 3 && open_.size() < 5)) {
        Begin();
      } else if (which < 7) {
        Compute(&open_[Below(open_.size())]);
      } else if (which < 8) {
        Say();
      } else if (which < 11) {
        End(Below(open_.size()));
      } else if (Below(4) == 0) {
        Below(8) == 0 ? cache_.Clear() : cache_.Lose(Below(settings_.pages[0]));
        for (Open& open : open_) open.is_lost = true;
      }
      cache_.Check();
      Demand(cache_.remembered() <= settings_.history, "no more is remembered than it was told");
    }
    while (!open_.empty()) End(0);
    cache_.Check();
  }

 private:
  int Below(int64_t count) { return static_cast<int>(random_() % count); }

  PrefixCache::Settings Drawn() {
    PrefixCache::Settings settings;
    settings.block_tokens = 1 + Below(2);
    settings.pages = {1 + Below(12), Below(2) ? Below(6) : 0, Below(2) ? Below(8) : 0};
    settings.keep = Below(3) ? settings.pages[0] : Below(settings.pages[0] + 2);
    constexpr int64_t kHistories[] = {0, 1, 5, 1000};
    settings.history = kHistories[Below(4)];
    settings.policy = static_cast<Policy>(Below(3));
    return settings;
  }

  void Copy() {
    for (const PrefixCache::Move& move : cache_.TakeMoves()) {
      bytes_[{move.to.tier, move.to.page}] = bytes_[{move.from.tier, move.from.page}];
    }
  }

  Tokens Prefix(const Tokens& tokens, int64_t block) const {
    return Tokens(tokens.begin(), tokens.begin() + (block + 1) * settings_.block_tokens);
  }

  void Compare(const Open& open) {
    const std::vector<Page>& pages = cache_.Pages(open.id);
    for (int64_t k = 0; k < open.committed && !open.is_lost; ++k) {
      Demand(bytes_[{0, pages[k]}] == Prefix(open.tokens, k), "a page has its tokens' bytes");
    }
  }

  void Begin() {
    Tokens tokens(Below(8) * settings_.block_tokens);
    for (int32_t& token : tokens) token = Below(2);
    now_ += Below(50) * 0.3;
    const int64_t blocks = tokens.size() / settings_.block_tokens;
    const auto found = cache_.Find(tokens.data(), blocks);
    const PrefixCache::RequestId id = cache_.Begin(tokens.data(), blocks, now_);
    Copy();
    const int64_t hits = cache_.Hits(id);
    Demand(hits <= found[0] + found[1] + found[2], "no more is hit than was found");
    open_.push_back({id, tokens, hits, false});
    Compare(open_.back());
  }

  void Compute(Open* open) {
    const int64_t end = open->committed + 1 + Below(3);
    Tokens tokens = open->tokens;
    while (static_cast<int64_t>(tokens.size()) < end * settings_.block_tokens) {
      tokens.push_back(Below(2));
    }
    const int64_t has = cache_.Pages(open->id).size();
    if (end > has && !cache_.Extend(open->id, end - has)) {
      Demand(static_cast<int64_t>(cache_.Pages(open->id).size()) == has, "all pages, or none");
      return;
    }
    Copy();
    for (int64_t k = open->committed; k < end; ++k) {
      bytes_[{0, cache_.Pages(open->id)[k]}] = Prefix(tokens, k);
    }
    cache_.Commit(open->id, tokens.data() + open->committed * settings_.block_tokens,
                  end - open->committed);
    open->tokens = tokens;
    open->committed = end;
    Copy();
    Compare(*open);
  }

  void Say() {
    Hint hint;
    hint.kind = static_cast<Hint::Kind>(Below(3));
    hint.seconds = Below(100);
    hint.spread = Below(10) * 0.1;
    const bool is_late = !ended_.empty() && Below(2);
    cache_.Say(is_late ? ended_[Below(ended_.size())] : open_[Below(open_.size())].id, hint);
  }

  void End(int which) {
    Compare(open_[which]);
    cache_.End(open_[which].id);
    ended_.push_back(open_[which].id);
    open_.erase(open_.begin() + which);
    if (Below(2)) Copy();
  }

  std::mt19937_64 random_;
  const PrefixCache::Settings settings_;
  PrefixCache cache_;
  double now_ = 0;
  std::map<std::pair<int, Page>, Tokens> bytes_;
  std::vector<Open> open_;
  std::vector<PrefixCache::RequestId> ended_;
};

}  // namespace
}  // namespace memplan

int main(int, char** words) {
  const uint64_t first = std::strtoull(words[1], nullptr, 10);
  const uint64_t rounds = std::strtoull(words[2], nullptr, 10);
  for (uint64_t seed = first; seed < first + rounds; ++seed) {
    try {
      memplan::Engine(seed).Run(200);
    } catch (const std::exception& error) {
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
      return 1;
    }
  }
  return 0;
}
