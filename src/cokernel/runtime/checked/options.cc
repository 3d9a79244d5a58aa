#include "checked/options.h"

#include <mutex>
#include <stdexcept>

namespace cokernel::checked {

namespace {

struct Named {
  Strategy strategy;
  const char* name;
};
constexpr Named kStrategies[] = {
    {Strategy::kRandom, "random"},           {Strategy::kPct, "pct"},
    {Strategy::kRoundRobin, "round_robin"},  {Strategy::kDelayDma, "delay_dma"},
    {Strategy::kRunToBlock, "run_to_block"}, {Strategy::kChoices, "choices"},
};

std::mutex override_mutex;
std::optional<Schedule> override_schedule;
int64_t override_launches = 0;
std::atomic<bool> takes_claims{true};

}  // namespace

Strategy strategy_from(const std::string& name) {
  std::string names;
  for (const Named& known : kStrategies) {
    if (name == known.name) return known.strategy;
    names += std::string(names.empty() ? "" : ", ") + known.name;
  }
  throw std::invalid_argument("the strategy of a schedule must be one of " + names + ", not '" +
                              name + "'");
}

const char* name_of(Strategy strategy) {
  for (const Named& known : kStrategies) {
    if (known.strategy == strategy) return known.name;
  }
  return "unknown";
}

std::optional<Schedule> set_schedule(std::optional<Schedule> schedule) {
  const std::lock_guard<std::mutex> lock(override_mutex);
  std::swap(schedule, override_schedule);
  override_launches = 0;
  return schedule;
}

bool set_claims(bool are_taken) { return takes_claims.exchange(are_taken); }

bool claims_are_taken() { return takes_claims.load(std::memory_order_relaxed); }

Schedule next_schedule(const CheckedOptions& options, std::atomic<int64_t>& launches) {
  const std::lock_guard<std::mutex> lock(override_mutex);
  Schedule schedule = override_schedule.value_or(options.schedule);
  const int64_t number = override_schedule.has_value()
                             ? override_launches++
                             : launches.fetch_add(1, std::memory_order_relaxed);
  if (schedule.launch < 0) schedule.launch = number;
  return schedule;
}

}  // namespace cokernel::checked
