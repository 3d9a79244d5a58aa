// What a checked executable is asked to look for, and under which schedule it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cokernel::checked {

enum class Strategy { kRandom, kPct, kRoundRobin, kDelayDma, kRunToBlock, kChoices };

// Throws std::invalid_argument for a name that is none.
Strategy strategy_from(const std::string& name);
const char* name_of(Strategy strategy);

struct Schedule {
  Strategy strategy = Strategy::kRandom;
  uint64_t seed = 0;
  int32_t depth = 3;             // kPct: one more than the changes of priority.
  int64_t launch = -1;           // The launch whose part of the schedule is taken; -1: count.
  std::vector<int32_t> choices;  // kChoices: the candidate taken at each decision.
  bool record = false;           // Whether decisions are reported.

  // Whether its choices are given as a list, or are to be; see State::is_stutter.
  bool lists_choices() const { return record || strategy == Strategy::kChoices; }
};

enum class Fill { kKeep, kByte, kRandom };

struct CheckedOptions {
  bool races = true;
  bool uninitialised = true;
  bool leftovers = true;
  bool unwaited_copies = true;
  bool stop_at_first = false;
  int64_t max_findings = 100;
  Fill fill = Fill::kByte;  // Of memory that starts uninitialised.
  uint8_t fill_byte = 0xff;
  int32_t schedules = 1;
  Schedule schedule;
  // Plain result buffers, and the bytes of their elements.
  std::vector<std::pair<int32_t, int64_t>> outputs;
  bool sees_all = false;  // Probes tell of every access.
  // Buffers of one int32 each that say which elements of batches the launch is for.
  std::vector<int32_t> batch;
};

// Overrides the schedule of every checked launch of the process. Returns the one before.
std::optional<Schedule> set_schedule(std::optional<Schedule> schedule);
// Whether what loops claim is taken, in all checked launches of the process. Returns what was set
// before.
bool set_claims(bool are_taken);
bool claims_are_taken();
// The schedule of the next launch of an executable, with `launch` filled in.
Schedule next_schedule(const CheckedOptions& options, std::atomic<int64_t>& launches);

}  // namespace cokernel::checked
