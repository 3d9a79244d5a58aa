// Barriers of whole programs and of groups.
#include "support.h"

namespace cokernel::testing {
namespace {

constexpr int kRounds = 50;

// In every round each core checks that all of its group have reached it.
struct Rounds : Coroutine {
  int round;
  void body() {
    auto* reached = static_cast<std::atomic<int32_t>*>(core->buffers[0]);  // [program][group]
    const auto expected = static_cast<int32_t>(core->barrier->expected.load());
    std::atomic<int32_t>& mine = reached[core->program * 8 + core->group];
    COROUTINE_BEGIN;
    for (round = 0; round < kRounds; ++round) {
      mine.fetch_add(1);
      BARRIER();
      CHECK(mine.load() >= (round + 1) * expected);
      CHECK(mine.load() <= (round + 2) * expected);
    }
    COROUTINE_END;
  }
};

void groups_meet_among_themselves() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Rounds>({2, 16}), coroutine_program<Rounds>({5}),
                     coroutine_program<Rounds>({1})};
    spec.programs[0].group_axis = 0;
    Kernel kernel(spec);
    for (int launch = 0; launch < 20; ++launch) {
      std::vector<std::atomic<int32_t>> reached(24);
      for (auto& count : reached) count = 0;
      CHECK(kernel.launch({{reached.data(), 0}}).empty());
      CHECK_EQUAL(reached[0], 16 * kRounds);
      CHECK_EQUAL(reached[1], 16 * kRounds);
      CHECK_EQUAL(reached[8], 5 * kRounds);
      CHECK_EQUAL(reached[16], kRounds);
    }
  }
}

// One core never comes.
struct Missing : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    if (core->index != 3) BARRIER();
    COROUTINE_END;
  }
};

void a_missing_core_is_a_deadlock_that_says_how_many_came() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Missing>({4})};
    Kernel kernel(spec);
    for (int launch = 0; launch < 100; ++launch) {
      CHECK(kernel.launch() == "Deadlock");
      const std::vector<CoreSnapshot>& cores = kernel.hooks->failure.cores;
      CHECK_EQUAL(cores.size(), 4);
      for (int i = 0; i < 3; ++i) {
        CHECK(cores[i].state == CoreState::kBarrier);
        CHECK_EQUAL(cores[i].arrived, 3);
        CHECK_EQUAL(cores[i].expected, 4);
      }
      CHECK(cores[3].state == CoreState::kFinished);
    }
  }
}

}  // namespace
}  // namespace cokernel::testing

int main() {
  using namespace cokernel::testing;
  groups_meet_among_themselves();
  a_missing_core_is_a_deadlock_that_says_how_many_came();
}
