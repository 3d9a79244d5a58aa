// Semaphores, barriers and the start of DMAs in checked mode.
#include <algorithm>
#include <cstring>
#include <limits>

#include "checked/state.h"
#include "launch.h"

namespace cokernel::checked {

namespace {

// More agents for the copies of one core only slow the launch down. Beyond this the oldest is used
// again although its core may not have heard of its end; then a race may be missed.
constexpr std::size_t kMostDmaAgents = 1024;
// So many of the oldest are asked whether they are free.
constexpr std::size_t kAsked = 8;
constexpr uint32_t kInFlight = ~uint32_t{0};
// Semaphores of the chips count in 32 bits.
constexpr int64_t kLargestCount = std::numeric_limits<int32_t>::max();

enum Operation : int32_t { kSignalled, kTaken, kLooked, kReadCount };

}  // namespace

// Two launches behave alike if every semaphore sees the same operations in the same order.
void State::note_operation(SemaphoreState& semaphore, int64_t agent_key, int32_t operation) {
  // Who looks again before anything has changed does nothing new.
  std::vector<int64_t>& readers = semaphore.readers;
  if (operation != kReadCount) {
    readers.clear();
  } else if (std::find(readers.begin(), readers.end(), agent_key) != readers.end()) {
    return;
  } else {
    readers.push_back(agent_key);
  }
  semaphore.behaviour = mix(semaphore.behaviour ^ static_cast<uint64_t>(agent_key) * 8 ^
                            static_cast<uint64_t>(operation));
}

void State::add_signal(SemaphoreState& semaphore, Signal signal, int64_t agent_key) {
  note_operation(semaphore, agent_key, kSignalled);
  const int64_t before = semaphore.count;
  const int64_t amount = signal.left;
  const int32_t core = signal.core;
  const int32_t site = signal.site;
  const bool is_dma = signal.is_dma;
  semaphore.add(std::move(signal));
  changed();
  // Whoever signals it further does nothing new.
  const bool overflows = before <= kLargestCount && semaphore.count > kLargestCount;
  if (semaphore.count < 0 || overflows) {
    Finding finding;
    finding.kind = semaphore.count < 0 ? "SemaphoreUnderflow" : "SemaphoreOverflow";
    finding.first = party_of_signal(core, site, is_dma);
    if (overflows) finding.more = others_counted(semaphore, core, site);
    set_semaphore(finding, semaphore);
    finding.numbers = {{"wanted", amount < 0 ? -amount : amount},
                       {"value", semaphore.count < 0 ? before : semaphore.count}};
    // Natively a negative signal ends the launch, too.
    const bool ends = semaphore.count < 0;
    add(std::move(finding), ends);
    if (ends) return;
  }
  wake(semaphore);
}

// Makes ready who can go on with what is counted now; the schedule says who takes it.
void State::wake(SemaphoreState& semaphore) {
  for (const int32_t waiter : semaphore.waiters) {
    if (cores_[waiter].wait.value <= semaphore.count) {
      ready_.add(waiter);
    } else {
      ready_.remove(waiter);
    }
  }
}

bool State::wait(Core* core, Semaphore* address, int64_t value, bool decrement, bool is_dma,
                 int32_t site) {
  core->site.store(site, std::memory_order_relaxed);
  ++core->waits;
  ++record.counts.waits;
  const int32_t number = number_of(core);
  SemaphoreState& semaphore = semaphores_.at(address);
  cores_[number].wait = {&semaphore, value, decrement, is_dma, site};
  semaphore.waiters.push_back(number);
  core->semaphore.store(address, std::memory_order_relaxed);
  core->value.store(value, std::memory_order_relaxed);
  core->decrement.store(decrement, std::memory_order_relaxed);
  core->state.store(CoreState::kSemaphore, std::memory_order_relaxed);
  if (semaphore.count < value) {
    ++core->blocked;
    ready_.remove(number);
    cores_[number].operation = kWait;
    return false;
  }
  if (!go_on_or_queue(core, kWait)) return false;
  complete_wait(core);
  core->state.store(CoreState::kRunning, std::memory_order_relaxed);
  return true;
}

// Takes what the core waits for, which is there.
void State::complete_wait(Core* core) {
  const int32_t number = number_of(core);
  CoreInfo& known = cores_[number];
  const Wait wait = known.wait;
  known.wait = Wait();
  SemaphoreState& semaphore = *wait.semaphore;
  semaphore.waiters.erase(std::find(semaphore.waiters.begin(), semaphore.waiters.end(), number));
  note_operation(semaphore, number, wait.decrement ? kTaken : kLooked);
  if (wait.decrement) {
    const Signal* begun = semaphore.take(wait.value, known.agent, number, wait.site);
    if (wait.is_dma) {
      semaphore.matching.take({wait.value, number, wait.site});
    } else {
      semaphore.matching.give_up();
    }
    if (begun != nullptr && wait.is_dma) {
      // This tells of it.
      semaphore.matching.give_up();
      semaphore.is_torn = true;
      add_wait_too_large(number, wait, *begun, {{"moved", semaphore.largest_copy}});
    }
    changed();
    wake(semaphore);
  } else {
    semaphore.look(wait.value, known.agent);
  }
}

void State::signal(Core* core, Semaphore* address, int64_t increment, int32_t site) {
  core->site.store(site, std::memory_order_relaxed);
  ++core->signals;
  ++record.counts.signals;
  const int32_t number = number_of(core);
  Signal signal;
  signal.left = increment;
  signal.release = cores_[number].agent.release();
  signal.core = number;
  signal.site = site;
  add_signal(semaphores_.at(address), std::move(signal), number);
}

int64_t State::read(Core* core, Semaphore* address, int32_t site) {
  core->site.store(site, std::memory_order_relaxed);
  const int32_t number = number_of(core);
  SemaphoreState& semaphore = semaphores_.at(address);
  note_operation(semaphore, number, kReadCount);
  semaphore.read(cores_[number].agent, number);
  note_look(core, {site, &semaphore, 0, 0, 1});
  return semaphore.count;
}

bool State::barrier(Core* core, int32_t site) {
  core->site.store(site, std::memory_order_relaxed);
  ++core->waits;
  ++record.counts.barriers;
  const int32_t number = number_of(core);
  Barrier& barrier = *core->barrier;
  const int64_t arrived = barrier.arrived.load(std::memory_order_relaxed) + 1;
  Clock& joined = barrier_clocks_[&barrier];
  std::vector<int32_t>& present = barrier_cores_[&barrier];
  const Release release = cores_[number].agent.release();
  joined.join(release.clock);
  joined.include(release.agent, release.epoch);
  present.push_back(number);
  cores_[number].operation = kBarrier;
  if (arrived < barrier.expected.load(std::memory_order_relaxed)) {
    ++core->blocked;
    barrier.arrived.store(arrived, std::memory_order_relaxed);
    core->state.store(CoreState::kBarrier, std::memory_order_relaxed);
    ready_.remove(number);
    return false;
  }
  barrier.arrived.store(0, std::memory_order_relaxed);
  for (const int32_t other : present) {
    cores_[other].agent.seen.join(joined);
    if (other == number) continue;
    launch_.cores[other].state.store(CoreState::kReady, std::memory_order_relaxed);
    ready_.add(other);
  }
  present.clear();
  joined = Clock();
  changed();
  return go_on_or_queue(core, kBarrier);
}

// An agent can stand for a new copy once its core has heard of the end of the one before: whoever
// hears of the new one has then heard of the old one as well.
uint32_t State::dma_agent_for(CoreInfo& known) {
  std::vector<uint32_t>& agents = known.dma_agents;
  const std::size_t cores = cores_.size();
  for (std::size_t i = 0; i < std::min(kAsked, agents.size()); ++i) {
    const uint32_t last = dma_last_epochs_[agents[i] - cores];
    if (last == kInFlight || known.agent.seen[agents[i]] < last) continue;
    std::rotate(agents.begin() + static_cast<std::ptrdiff_t>(i),
                agents.begin() + static_cast<std::ptrdiff_t>(i) + 1, agents.end());
    return agents.back();
  }
  if (agents.size() >= kMostDmaAgents) {
    for (std::size_t i = 0; i < agents.size(); ++i) {
      if (dma_last_epochs_[agents[i] - cores] == kInFlight) continue;
      std::rotate(agents.begin() + static_cast<std::ptrdiff_t>(i),
                  agents.begin() + static_cast<std::ptrdiff_t>(i) + 1, agents.end());
      return agents.back();
    }
  }
  agents.push_back(static_cast<uint32_t>(cores + dma_last_epochs_.size()));
  dma_last_epochs_.push_back(0);
  return agents.back();
}

void State::start_dma(Core* core, int32_t site, void (*run)(Core*, void*), const void* arguments,
                      int64_t argument_bytes, Semaphore* arrival, int64_t arrival_amount,
                      Semaphore* departure, int64_t departure_amount) {
  constexpr std::size_t kAlignment = 64;
  core->site.store(site, std::memory_order_relaxed);
  ++record.counts.dmas;
  CoreInfo& known = info(core);
  std::unique_ptr<Dma> dma;
  if (spare_dmas_.empty()) {
    dma = std::make_unique<Dma>();
  } else {
    dma = std::move(spare_dmas_.back());
    spare_dmas_.pop_back();
  }
  dma->number = dmas_started_++;
  dma->of_core = known.dmas++;
  dma->site = site;
  dma->run = run;
  const auto bytes = static_cast<std::size_t>(argument_bytes);
  if (dma->block.size() < bytes + kAlignment) dma->block.resize(bytes + kAlignment);
  const auto at = reinterpret_cast<uintptr_t>(dma->block.data());
  dma->arguments = dma->block.data() + (kAlignment - at % kAlignment) % kAlignment;
  if (bytes > 0) std::memcpy(dma->arguments, arguments, bytes);
  dma->arrival = arrival != nullptr ? &semaphores_.at(arrival) : nullptr;
  dma->arrival_amount = arrival_amount;
  dma->departure = departure != nullptr ? &semaphores_.at(departure) : nullptr;
  dma->departure_amount = departure_amount;
  Agent& agent = dma->agent;
  agent.id = dma_agent_for(known);
  uint32_t& last = dma_last_epochs_[agent.id - cores_.size()];
  agent.read_epoch = last + 1;
  agent.write_epoch = last + 2;
  last = kInFlight;
  agent.core = static_cast<uint32_t>(number_of(core));
  agent.is_dma = true;
  agent.dma_site = site;
  const Release release = known.agent.release();
  agent.seen = release.clock;
  agent.seen.include(release.agent, release.epoch);
  in_flight_numbers_.push_back(dma->number);
  in_flight_.push_back(std::move(dma));
  changed();
}

}  // namespace cokernel::checked
