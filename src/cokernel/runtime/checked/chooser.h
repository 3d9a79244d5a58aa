// Who goes on: the strategies of schedules.
#pragma once

#include <cstdint>
#include <vector>

#include "checked/options.h"
#include "checked/random.h"

namespace cokernel::checked {

// The cores that can go on, by number.
class ReadySet {
 public:
  explicit ReadySet(int32_t cores) : words_((static_cast<std::size_t>(cores) + 63) / 64) {}

  bool has(int32_t core) const { return (words_[core >> 6] >> (core & 63) & 1) != 0; }
  void add(int32_t core) {
    count_ += has(core) ? 0 : 1;
    words_[core >> 6] |= uint64_t{1} << (core & 63);
  }
  void remove(int32_t core) {
    count_ -= has(core) ? 1 : 0;
    words_[core >> 6] &= ~(uint64_t{1} << (core & 63));
  }
  int32_t count() const { return count_; }
  // The core that `position` others of the set precede.
  int32_t nth(int32_t position) const;
  // The first core from `core` on, or -1.
  int32_t from(int32_t core) const;
  template <typename Visit>
  void for_each(Visit visit) const {
    for (int32_t core = from(0); core >= 0; core = from(core + 1)) visit(core);
  }

 private:
  std::vector<uint64_t> words_;
  int32_t count_ = 0;
};

// The next core, or the next DMA to take effect, as a position among those in flight.
struct Choice {
  bool is_dma;
  int32_t number;
};

struct Situation {
  const ReadySet& ready;
  // The numbers of the DMAs in flight, the oldest first.
  const std::vector<int64_t>& dmas;
  int32_t current = -1;       // The core that ran last.
  bool has_polled = false;    // It did so in vain.
  bool only_polling = false;  // All that are ready have polled in vain (kDelayDma alone asks).

  // Whether the core that ran last could go on at once.
  bool continues() const { return current >= 0 && !has_polled && ready.has(current); }
};

class Chooser {
 public:
  Chooser(const Schedule& schedule, int32_t cores);

  // At least two could go on.
  Choice choose(const Situation& situation);
  // Whether the choices of the schedule have all been there to be taken so far.
  bool fits() const { return fits_; }
  bool has_choices_left() const { return next_choice_ < schedule_.choices.size(); }

 private:
  Choice random(const Situation& situation);
  Choice pct(const Situation& situation);
  Choice round_robin(const Situation& situation);
  Choice delay_dma(const Situation& situation);
  Choice run_to_block(const Situation& situation);
  Choice recorded(const Situation& situation);
  int32_t random_core(const Situation& situation);

  const Schedule schedule_;
  Random random_;
  int64_t decision_ = 0;
  // kRandom and kDelayDma: how often, of 1024 times, a DMA goes first and a core stays.
  uint32_t dma_first_ = 0;
  uint32_t stay_ = 0;
  // kPct: those with the highest priority run.
  uint64_t priority_seed_ = 0;
  std::vector<int64_t> priorities_;
  std::vector<int64_t> changes_;
  int64_t lowest_ = 0;
  int32_t turn_ = 0;  // kRoundRobin: the core after which everybody has had a turn.
  std::size_t next_choice_ = 0;
  bool fits_ = true;
};

}  // namespace cokernel::checked
