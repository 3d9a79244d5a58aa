#include "checked/chooser.h"

#include <algorithm>

namespace cokernel::checked {

int32_t ReadySet::nth(int32_t position) const {
  for (std::size_t w = 0;; ++w) {
    const int32_t here = __builtin_popcountll(words_[w]);
    if (position < here) {
      uint64_t word = words_[w];
      for (; position > 0; --position) word &= word - 1;
      return static_cast<int32_t>(w * 64) + __builtin_ctzll(word);
    }
    position -= here;
  }
}

int32_t ReadySet::from(int32_t core) const {
  std::size_t w = static_cast<std::size_t>(core) >> 6;
  if (w >= words_.size()) return -1;
  uint64_t word = words_[w] & (~uint64_t{0} << (core & 63));
  while (word == 0) {
    if (++w == words_.size()) return -1;
    word = words_[w];
  }
  return static_cast<int32_t>(w * 64) + __builtin_ctzll(word);
}

Chooser::Chooser(const Schedule& schedule, int32_t cores)
    : schedule_(schedule), random_(mix(schedule.seed, static_cast<uint64_t>(schedule.launch))) {
  // Some launches are of many small steps and some of long ones, in some copies are fast and in
  // others slow: no single frequency shows all mistakes.
  constexpr uint32_t kDmaFirst[] = {32, 256, 512, 768};
  constexpr uint32_t kStay[] = {0, 512, 896, 1000};
  dma_first_ = kDmaFirst[random_.below(4)];
  stay_ = kStay[random_.below(4)];
  if (schedule.strategy != Strategy::kPct) return;
  priority_seed_ = random_.next();
  for (int32_t core = 0; core < cores; ++core) {
    priorities_.push_back(
        static_cast<int64_t>(mix(priority_seed_, static_cast<uint64_t>(core)) >> 2));
  }
  // How many decisions a launch takes is not known, so its magnitude is drawn as well.
  const uint32_t horizon = uint32_t{8} << random_.below(12);
  for (int32_t i = 1; i < schedule.depth; ++i) changes_.push_back(random_.below(horizon));
}

Choice Chooser::choose(const Situation& situation) {
  const Choice choice = [&] {
    switch (schedule_.strategy) {
      case Strategy::kRandom:
        return random(situation);
      case Strategy::kPct:
        return pct(situation);
      case Strategy::kRoundRobin:
        return round_robin(situation);
      case Strategy::kDelayDma:
        return delay_dma(situation);
      case Strategy::kChoices:
        return recorded(situation);
      case Strategy::kRunToBlock:
        break;
    }
    return run_to_block(situation);
  }();
  ++decision_;
  return choice;
}

int32_t Chooser::random_core(const Situation& situation) {
  const int32_t current = situation.current;
  if (situation.continues() && random_.chance(stay_)) {
    return current;
  }
  return situation.ready.nth(
      static_cast<int32_t>(random_.below(static_cast<uint32_t>(situation.ready.count()))));
}

Choice Chooser::random(const Situation& situation) {
  const auto dmas = static_cast<uint32_t>(situation.dmas.size());
  if (dmas > 0 && (situation.ready.count() == 0 || random_.chance(dma_first_))) {
    return {true, static_cast<int32_t>(random_.below(dmas))};
  }
  return {false, random_core(situation)};
}

Choice Chooser::delay_dma(const Situation& situation) {
  if (situation.ready.count() > 0 && !situation.only_polling) {
    return {false, random_core(situation)};
  }
  const auto dmas = static_cast<uint32_t>(situation.dmas.size());
  if (dmas == 0) return {false, random_core(situation)};
  return {true, static_cast<int32_t>(random_.below(dmas))};
}

Choice Chooser::pct(const Situation& situation) {
  // Who polls waits for somebody else.
  if (situation.has_polled && situation.current >= 0) {
    priorities_[situation.current] = --lowest_;
  }
  const auto best = [&] {
    Choice choice{false, -1};
    int64_t highest = INT64_MIN;
    situation.ready.for_each([&](int32_t core) {
      if (priorities_[core] > highest) {
        highest = priorities_[core];
        choice = {false, core};
      }
    });
    for (std::size_t i = 0; i < situation.dmas.size(); ++i) {
      const auto number = static_cast<uint64_t>(situation.dmas[i]);
      const auto priority = static_cast<int64_t>(mix(~priority_seed_, number) >> 2);
      if (priority > highest) {
        highest = priority;
        choice = {true, static_cast<int32_t>(i)};
      }
    }
    return choice;
  };
  Choice choice = best();
  for (const int64_t change : changes_) {
    if (change != decision_ || choice.is_dma) continue;
    priorities_[choice.number] = --lowest_;
    choice = best();
  }
  return choice;
}

// One step for each core in turn, then one for the oldest DMA.
Choice Chooser::round_robin(const Situation& situation) {
  const int32_t core = situation.ready.from(turn_);
  if (core >= 0) {
    turn_ = core + 1;
    return {false, core};
  }
  turn_ = 0;
  if (!situation.dmas.empty()) return {true, 0};
  turn_ = situation.ready.from(0) + 1;
  return {false, turn_ - 1};
}

Choice Chooser::run_to_block(const Situation& situation) {
  const int32_t current = situation.current;
  if (situation.continues()) return {false, current};
  if (!situation.dmas.empty()) return {true, 0};
  const int32_t next = situation.ready.from(current + 1);
  return {false, next >= 0 ? next : situation.ready.from(0)};
}

Choice Chooser::recorded(const Situation& situation) {
  if (next_choice_ >= schedule_.choices.size()) return run_to_block(situation);
  const int32_t cores = situation.ready.count();
  const int32_t all = cores + static_cast<int32_t>(situation.dmas.size());
  int32_t position = std::max(schedule_.choices[next_choice_++], 0);
  if (position >= all) {
    // The list was made for another kernel; the launch comes to an end all the same.
    fits_ = false;
    position %= all;
  }
  if (position >= cores) return {true, position - cores};
  if (!situation.continues()) return {false, situation.ready.nth(position)};
  // The core that could go on comes first, then the others by number.
  if (position == 0) return {false, situation.current};
  const int32_t other = situation.ready.nth(position - 1);
  return {false, other < situation.current ? other : situation.ready.nth(position)};
}

}  // namespace cokernel::checked
