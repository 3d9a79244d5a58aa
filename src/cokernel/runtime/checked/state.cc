#include "checked/state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checked/streaming.h"
#include "launch.h"

namespace cokernel::checked {

namespace {

// A core that polls is suspected to do so forever from here on, and at every power of two. To look
// at once would cost programs that poll for a short time.
constexpr int64_t kSuspectedPolls = 64;

// A loop may let others go on several times before it comes to where it was: for each of the
// semaphores that it reads, and at its own end.
constexpr int64_t kLongestRound = 32;

constexpr int32_t kManyCores = 1024;

// What is copied to a buffer of so many bytes has left the caches when all of it has been written,
// if it comes in pieces of at least so many.
constexpr int64_t kLargeBufferBytes = int64_t{2} << 20;
constexpr int64_t kStreamedBytes = int64_t{4} << 10;

}  // namespace

uint64_t hash_of(const Place& place) {
  return mix(static_cast<uint64_t>(place.owner) << 56 ^ static_cast<uint64_t>(place.program) << 32 ^
                 static_cast<uint64_t>(place.index),
             static_cast<uint64_t>(place.offset));
}

State::State(Launch& launch, const CheckedOptions& options, const Schedule& schedule)
    : record(options.max_findings),
      launch_(launch),
      options_(options),
      schedule_(schedule),
      cores_(static_cast<std::size_t>(launch.core_count)),
      ready_(launch.core_count),
      candidates_(launch.core_count),
      chooser_(schedule, launch.core_count),
      semaphores_(launch),
      shadow_(accesses_, *this, options.races) {
  record.schedule = schedule;
  record.counts.cores = launch.core_count;
  for (int32_t i = 0; i < launch.core_count; ++i) {
    cores_[i].agent.id = cores_[i].agent.core = static_cast<uint32_t>(i);
    ready_.add(i);
  }
}

State::~State() = default;

int32_t State::number_of(const Core* core) const {
  return static_cast<int32_t>(core - launch_.cores);
}

bool State::is_stopped() const { return launch_.is_over(); }

void State::fill(char* begin, int64_t bytes) {
  switch (options_.fill) {
    case Fill::kKeep:
      return;
    case Fill::kByte:
      std::memset(begin, options_.fill_byte, static_cast<std::size_t>(bytes));
      return;
    case Fill::kRandom: {
      // Depends on the place and not on what was filled before, as that follows the schedule.
      Random random(mix(mix(schedule_.seed, static_cast<uint64_t>(schedule_.launch)),
                        hash_of(place_of(launch_, begin))));
      while (bytes > 0) {
        const uint64_t word = random.next();
        const int64_t part = std::min<int64_t>(bytes, sizeof(word));
        std::memcpy(begin, &word, static_cast<std::size_t>(part));
        begin += part;
        bytes -= part;
      }
    }
  }
}

void State::fill_unwritten(uintptr_t begin, uintptr_t end) {
  for (const auto& [first, last] : unfilled_) {
    if (begin >= last || end <= first) continue;
    shadow_.for_each_undefined(*shadow_.find(first), std::max(begin, first), std::min(end, last),
                               [&](uintptr_t from, uintptr_t to, uint32_t write, uint32_t read) {
                                 // What has been added to was filled then.
                                 if (write != kUndefined || accesses_.has_atomics(read)) return;
                                 fill(reinterpret_cast<char*>(from),
                                      static_cast<int64_t>(to - from));
                               });
  }
}

void State::prepare_memory() {
  const Executable& executable = launch_.executable;
  char* const block = reinterpret_cast<char*>(launch_.cores);
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
  const auto add_range = [&](const void* data, int64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    if (data != nullptr && bytes > 0)
      ranges.emplace_back(begin, begin + static_cast<uintptr_t>(bytes));
  };
  const int64_t first = executable.programs[0].first_private;
  add_range(block + first, executable.block_bytes - first);
  for (std::size_t b = 0; b < launch_.buffers.size(); ++b) {
    add_range(launch_.buffers[b], launch_.buffer_bytes[b]);
    const auto* begin = static_cast<const char*>(launch_.buffers[b]);
    const int64_t bytes = launch_.buffer_bytes[b];
    if (bytes >= kLargeBufferBytes) large_buffers_.emplace_back(begin, begin + bytes);
  }
  shadow_.set_ranges(ranges);

  // What is drawn at random depends on where a piece begins, so that it has to be all in one.
  const bool fills_later =
      options_.uninitialised && options_.sees_all && options_.fill == Fill::kByte;
  const auto begin_life = [&](char* data, int64_t bytes, bool is_output = false) {
    if (bytes <= 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(data);
    if (is_output && fills_later) {
      unfilled_.emplace_back(begin, begin + static_cast<uintptr_t>(bytes));
      unfilled_begin_ = std::min(unfilled_begin_, begin);
      unfilled_end_ = std::max(unfilled_end_, unfilled_.back().second);
    } else {
      fill(data, bytes);
    }
    if (!options_.uninitialised) return;
    shadow_.make_undefined(*shadow_.find(begin), begin, begin + static_cast<uintptr_t>(bytes));
  };
  for (const Executable::Program& program : executable.programs) {
    const int64_t semaphores = program.spec.semaphore_bytes;
    for (int32_t i = 0; i < program.core_count; ++i) {
      begin_life(launch_.cores[program.first_core + i].memory + semaphores,
                 program.spec.private_bytes - semaphores);
    }
  }
  const ExecutableSpec& spec = executable.spec;
  for (int32_t group = 0; group < spec.group_count; ++group) {
    begin_life(
        launch_.shared_memory + group * executable.shared_stride + spec.shared_semaphore_bytes,
        spec.shared_bytes - spec.shared_semaphore_bytes);
  }
  begin_life(block + executable.device_offset + spec.device_semaphore_bytes,
             spec.device_bytes - spec.device_semaphore_bytes);
  for (const auto& [buffer, element_bytes] : options_.outputs) {
    if (buffer < 0 || buffer >= static_cast<int32_t>(launch_.buffers.size())) continue;
    auto* data = static_cast<char*>(launch_.buffers[buffer]);
    const int64_t bytes = launch_.buffer_bytes[buffer];
    bool is_operand = false;
    for (std::size_t other = 0; other < launch_.buffers.size(); ++other) {
      const auto* start = static_cast<const char*>(launch_.buffers[other]);
      is_operand |= static_cast<int32_t>(other) != buffer &&
                    data < start + launch_.buffer_bytes[other] && start < data + bytes;
    }
    if (!is_operand) begin_life(data, bytes, true);
  }
}

void State::move(char* target, const char* source, int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  if (bytes >= kStreamedBytes) {
    for (const auto& [begin, end] : large_buffers_) {
      if (target >= begin && target < end) return stream(target, source, size);
    }
  }
  std::memmove(target, source, size);
}

void State::run() {
  prepare_memory();
  while (!is_stopped()) {
    int32_t core = next_core_;
    next_core_ = -1;
    if (core < 0) {
      core = decide(last_core_, last_polled_);
      if (is_stopped()) break;
    }
    if (core < 0) {
      if (launch_.unfinished.load(std::memory_order_relaxed) > 0) {
        report_blocked_waits();
        launch_.fail_deadlocked();
      }
      break;
    }
    run_core(core);
  }
  if (launch_.unfinished.load(std::memory_order_relaxed) == 0 && !is_stopped()) finish_dmas();
  record_effects();
  record.fits = chooser_.fits() && (is_stopped() || !chooser_.has_choices_left());
  if (!is_stopped()) {
    for (const auto& [begin, end] : unfilled_) fill_unwritten(begin, end);
    look_at_end();
  }
  settle();
  note_use_that_failed();
  uint64_t behaviour = mix(element_behaviour_);
  for (const auto& semaphore : semaphores_.all()) {
    behaviour += mix(hash_of(semaphore->place), semaphore->behaviour);
  }
  record.behaviour = behaviour;
}

void State::run_core(int32_t number) {
  Core* core = &launch_.cores[number];
  CoreInfo& known = cores_[number];
  if (known.wait.semaphore != nullptr) complete_wait(core);
  last_core_ = number;
  last_polled_ = false;
  const bool is_fresh = core->state.load(std::memory_order_relaxed) == CoreState::kUnstarted;
  core->state.store(CoreState::kRunning, std::memory_order_relaxed);
  core->worker = &launch_.workers[0];
  if (!is_fresh) {
    ++core->resumes;
    void* handle = core->handle;
    (*static_cast<void (**)(void*)>(handle))(handle);
  } else if (core->is_coroutine) {
    core->entry.ramp(core);
  } else {
    core->entry.function(core);
  }
  if (core->state.load(std::memory_order_relaxed) == CoreState::kFinished) {
    ready_.remove(number);
    // Only who polls what it wrote asks for its clock any more. Those of very many cores would fill
    // the memory.
    if (launch_.core_count > kManyCores) known.agent.seen = Clock();
    changed();
  }
}

int32_t State::decide(int32_t current, bool has_polled) {
  while (!is_stopped()) {
    const int32_t count = ready_.count() + static_cast<int32_t>(in_flight_.size());
    if (count == 0) return -1;
    Choice choice;
    const bool is_listed = schedule_.lists_choices();
    if (is_listed) {
      candidates_ = ready_;
      ready_.for_each([&](int32_t core) {
        if (is_stutter(core)) candidates_.remove(core);
      });
    }
    if (count == 1) {
      choice = in_flight_.empty() ? Choice{false, ready_.from(0)} : Choice{true, 0};
    } else {
      const bool any = candidates_.count() > 0 || !in_flight_.empty();
      const ReadySet& ready = is_listed && any ? candidates_ : ready_;
      Situation situation{ready, in_flight_numbers_, current, has_polled, false};
      if (schedule_.strategy == Strategy::kDelayDma && has_polled) {
        situation.only_polling = only_polling();
      }
      choice = chooser_.choose(situation);
      ++record.decisions;
      if (schedule_.record) record_decision(choice, situation);
    }
    if (!choice.is_dma) return choice.number;
    take_effect(static_cast<std::size_t>(choice.number));
  }
  return -1;
}

// Whether a core polls and would find all as it has found it: it comes back to where it is, so that
// nothing is lost where others go first.
bool State::is_stutter(int32_t core) const {
  return cores_[core].is_stuck && cores_[core].polls_at_change == changes_;
}

// What the step has done that the decision before this one has chosen.
void State::record_effects() {
  if (!schedule_.record) return;
  if (!record.choices.empty()) {
    const auto places = [&](const Parts<uintptr_t>& parts) {
      std::vector<MemoryRange> ranges;
      for (const auto& [begin, end] : parts.all()) ranges.push_back(range_of(begin, end, 1));
      return ranges;
    };
    record.effects.push_back({places(step_polled_), places(step_written_),
                              step_polled_.is_cut_off() || step_written_.is_cut_off()});
  }
  step_polled_ = Parts<uintptr_t>();
  step_written_ = Parts<uintptr_t>();
}

void State::record_decision(const Choice& choice, const Situation& situation) {
  record_effects();
  std::vector<Candidate> candidates;
  int32_t position = 0;
  const auto note = [&](int32_t core) {
    if (!choice.is_dma && core == choice.number) position = static_cast<int32_t>(candidates.size());
    candidates.push_back({core, cores_[core].operation, objects_of(core), core});
  };
  const bool continues = situation.continues();
  if (continues) note(situation.current);
  situation.ready.for_each([&](int32_t core) {
    if (!continues || core != situation.current) note(core);
  });
  if (choice.is_dma) position = static_cast<int32_t>(candidates.size()) + choice.number;
  for (const auto& dma : in_flight_) {
    const auto core = static_cast<int32_t>(dma->agent.core);
    std::vector<int64_t> objects;
    for (const SemaphoreState* semaphore : {dma->arrival, dma->departure}) {
      if (semaphore != nullptr) objects.push_back(object_at(semaphore->semaphore));
    }
    const int64_t agent = -1 - (dma->of_core * launch_.core_count + core);
    candidates.push_back({agent, "copy", std::move(objects), core});
  }
  record.choices.push_back(position);
  record.candidates.push_back(std::move(candidates));
  record.continuing.push_back(continues);
}

// The same in every schedule, and not below zero.
int64_t State::object_at(const void* address) const {
  return static_cast<int64_t>(hash_of(place_of(launch_, address)) >> 1);
}

// What the next step of a core synchronises by. A step that synchronises with nobody has an object
// of its own.
std::vector<int64_t> State::objects_of(int32_t core) const {
  const CoreInfo& known = cores_[core];
  if (known.wait.semaphore != nullptr) return {object_at(known.wait.semaphore->semaphore)};
  if (known.operation == kStep && known.object >= 0) return {known.object};
  // What it polls in memory is told of the step when it is taken.
  if (known.operation == kPoll && known.object >= 0) return {known.object};
  return {-1 - core};
}

bool State::go_on_or_queue(Core* core, const char* operation) {
  const int32_t number = number_of(core);
  if (is_stopped()) return false;
  cores_[number].operation = operation;
  const int32_t next = decide(number, false);
  if (next == number) return true;
  if (core->state.load(std::memory_order_relaxed) == CoreState::kRunning) {
    core->state.store(CoreState::kReady, std::memory_order_relaxed);
  }
  next_core_ = next;
  return false;
}

bool State::step(Core* core, int32_t site, const void* object) {
  core->site.store(site, std::memory_order_relaxed);
  // Only who writes decisions down asks for it.
  if (schedule_.record) info(core).object = object == nullptr ? -1 : object_at(object);
  return go_on_or_queue(core, kStep);
}

void State::yield(Core* core, int32_t site, const void* object) {
  core->site.store(site, std::memory_order_relaxed);
  core->state.store(CoreState::kReady, std::memory_order_relaxed);
  const int32_t number = number_of(core);
  CoreInfo& known = cores_[number];
  known.operation = kPoll;
  if (schedule_.record) known.object = object == nullptr ? -1 : object_at(object);
  last_polled_ = true;
  if (known.polls_at_change != changes_) {
    known.polls_at_change = changes_;
    known.polls = known.digest_at = 0;
    known.is_stuck = false;
  }
  const int64_t polls = ++known.polls;
  // Whoever visits all schedules has to know at once: see is_stutter().
  const bool is_listed = schedule_.lists_choices();
  if (known.is_stuck || (!is_listed && polls < kSuspectedPolls)) return;
  const bool is_noted = (polls & (polls - 1)) == 0;
  const bool is_compared = known.digest_at > 0 && polls - known.digest_at <= kLongestRound;
  if (!is_noted && !is_compared) return;
  const uint64_t digest = digest_of(core);
  if (is_compared && digest == known.digest) {
    // All it remembers is as it was some polls before, so that it will poll again and again what it
    // has looked at since.
    known.is_stuck = true;
    if (in_flight_.empty() && only_polling()) fail_livelocked(number);
  } else if (is_noted) {
    known.digest = digest;
    known.digest_at = polls;
    known.looks.clear();
  }
}

// Whether all cores that could go on have polled and will poll again until somebody else changes
// something.
bool State::only_polling() const {
  bool result = true;
  const int64_t enough = schedule_.strategy == Strategy::kDelayDma && !in_flight_.empty() ? 2 : 0;
  ready_.for_each([&](int32_t core) {
    const CoreInfo& known = cores_[core];
    const bool unchanged = known.polls_at_change == changes_;
    result = result && unchanged && (known.is_stuck || (enough > 0 && known.polls >= enough));
  });
  return result;
}

uint64_t State::digest_of(const Core* core) const {
  uint64_t digest = static_cast<uint64_t>(core->site.load(std::memory_order_relaxed));
  const auto include = [&](const char* data, int64_t bytes) {
    int64_t at = 0;
    for (; at + 8 <= bytes; at += 8) {
      uint64_t word;
      std::memcpy(&word, data + at, sizeof(word));
      digest = (digest ^ word) * 0x9e3779b97f4a7c15;
      digest ^= digest >> 32;
    }
    for (; at < bytes; ++at) digest = (digest ^ static_cast<uint8_t>(data[at])) * 0x100000001b3;
  };
  if (core->frame != nullptr) include(static_cast<const char*>(core->frame), core->frame_bytes);
  include(core->memory, launch_.executable.programs[core->program].spec.private_bytes);
  return digest;
}

void State::take_effect(std::size_t position) {
  std::unique_ptr<Dma> dma = std::move(in_flight_[position]);
  in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(position));
  in_flight_numbers_.erase(in_flight_numbers_.begin() + static_cast<std::ptrdiff_t>(position));
  Core* core = &launch_.cores[dma->agent.core];
  const int32_t site = core->site.load(std::memory_order_relaxed);
  begin_event();
  dma_ = dma.get();
  has_read_undefined_ = false;
  dma->run(core, dma->arguments);
  dma_ = nullptr;
  core->site.store(site, std::memory_order_relaxed);
  changed();
  const Agent& agent = dma->agent;
  dma_last_epochs_[agent.id - cores_.size()] = agent.write_epoch;
  if (is_stopped()) return;
  const int64_t key = mix(agent.core, static_cast<uint64_t>(dma->of_core));
  const auto signal_to = [&](SemaphoreState* semaphore, int64_t amount, uint32_t epoch) {
    if (semaphore == nullptr) return;
    Signal signal;
    signal.left = amount;
    signal.release = {agent.seen, agent.id, epoch};
    signal.core = static_cast<int32_t>(agent.core);
    signal.site = dma->site;
    signal.is_dma = true;
    if (dma->departure == nullptr) signal.reading_epoch = agent.read_epoch;
    add_signal(*semaphore, std::move(signal), key);
  };
  signal_to(dma->departure, dma->departure_amount, agent.read_epoch);
  signal_to(dma->arrival, dma->arrival_amount, agent.write_epoch);
  spare_dmas_.push_back(std::move(dma));
  if (in_flight_.empty()) ended_.clear();
}

// What is still in flight when all cores have finished takes effect, as it does in a native launch.
void State::finish_dmas() {
  while (!in_flight_.empty() && !is_stopped()) take_effect(0);
}

}  // namespace cokernel::checked
