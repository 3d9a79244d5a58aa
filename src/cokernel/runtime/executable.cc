#include "executable.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "launch.h"
#include "platform.h"

namespace cokernel {

namespace {

constexpr int64_t kMaxCores = int64_t{1} << 24;
constexpr int32_t kMaxWorkers = 1024;

// What is kept of launches that have ended: so many of one executable, and so many bytes of all.
constexpr size_t kKeptLaunches = 64;
constexpr int64_t kKeptBytes = int64_t{1} << 30;
std::atomic<int64_t> kept_bytes{0};

int64_t align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The distance between the blocks of two cores. A multiple of 4096 would put the semaphores of all
// cores into the same few lines of the first-level cache.
int64_t private_stride(int64_t bytes) {
  const int64_t stride = std::max<int64_t>(align64(bytes), 64);
  return stride % 4096 == 0 ? stride + 64 : stride;
}

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void check_prefix(int64_t prefix, int64_t whole, const std::string& what) {
  require(whole >= 0 && prefix >= 0 && prefix <= whole,
          what + ": the zeroed prefix must lie in the block (" + std::to_string(prefix) + " of " +
              std::to_string(whole) + " bytes)");
}

}  // namespace

HelpPlan::Choice HelpPlan::choose() {
  // Shorter launches end before a helper is awake.
  constexpr int64_t kWorthwhileNs = 30'000;
  constexpr int64_t kTryTheOther = 32;
  // Of launches that take long, a try with helpers costs little even where they do not pay.
  constexpr int64_t kLongNs = 300'000;
  constexpr int64_t kTryHelpers = 8;
  // The first launch that is measured alone gets helpers when it has lasted this long.
  constexpr int64_t kFirstAloneNs = 1'000'000;
  const int64_t launch = launches_.fetch_add(1, std::memory_order_relaxed);
  const int64_t alone = alone_ns_.load(std::memory_order_relaxed);
  const int64_t helped = helped_ns_.load(std::memory_order_relaxed);
  // Nothing is known of the first launch, in which memory is touched and code is loaded.
  if (launch == 0) return {true, 0};
  if (alone == 0) return {false, kFirstAloneNs};
  if (alone < kWorthwhileNs) return {false, kWorthwhileNs};
  if (helped == 0) return {true, 0};
  // Where the two are about equal it was chance that decided, more often against helpers: they meet
  // what else the processors do.
  const bool help_is_better = helped < alone + alone / 8;
  bool try_other = launch % kTryTheOther == 0;
  if (!help_is_better) {
    // The few launches that were measured at first may have met a busy processor.
    try_other |= (launch & (launch - 1)) == 0;
    try_other |= alone > kLongNs && launch % kTryHelpers == 0;
  }
  const bool from_start = try_other ? !help_is_better : help_is_better;
  // Otherwise they are asked only when the launch lasts unusually long: sooner, and what it takes
  // alone would never be known.
  return {from_start, from_start ? 0 : 2 * std::max(alone, helped)};
}

void HelpPlan::record(bool from_start, int64_t nanoseconds) {
  if (launches_.load(std::memory_order_relaxed) <= 1) return;
  std::atomic<int64_t>& mean = from_start ? helped_ns_ : alone_ns_;
  // Follows a faster launch at once and a slower one slowly: a launch that lost its processor to
  // another program must not decide how the next ones go.
  const int64_t before = mean.load(std::memory_order_relaxed);
  int64_t now = nanoseconds;
  if (before > 0 && nanoseconds > before) {
    now = before + std::min(nanoseconds - before, before) / 8;
  }
  mean.store(std::max<int64_t>(now, 1), std::memory_order_relaxed);
}

Executable::Executable(uint64_t key, ExecutableSpec given) : key(key), spec(std::move(given)) {
  require(!spec.programs.empty(), "an executable needs a program");
  require(spec.group_count >= 0, "group_count must not be negative");
  require(spec.num_workers >= 0, "num_workers must not be negative");
  check_prefix(spec.shared_semaphore_bytes, spec.shared_bytes, "shared memory");
  check_prefix(spec.device_semaphore_bytes, spec.device_bytes, "device memory");
  int64_t cores = 0;
  for (const ProgramSpec& program_spec : spec.programs) {
    Program program;
    program.spec = program_spec;
    const std::string what = "program '" + program_spec.name + "'";
    require(program_spec.entry != nullptr, what + " has no entry");
    require(program_spec.shape.size() <= 4, what + ": a mesh has at most four axes");
    require(program_spec.group_axis >= -1 &&
                program_spec.group_axis < static_cast<int32_t>(program_spec.shape.size()),
            what + ": group_axis is not an axis of its mesh");
    check_prefix(program_spec.semaphore_bytes, program_spec.private_bytes, what);
    int64_t count = 1;
    for (const int32_t size : program_spec.shape) {
      require(size > 0, what + ": every axis of the mesh must have a core");
      count *= size;
      require(count <= kMaxCores, what + " has too many cores");
    }
    program.first_core = static_cast<int32_t>(cores);
    program.core_count = static_cast<int32_t>(count);
    program.group_count =
        program_spec.group_axis < 0 ? 1 : program_spec.shape[program_spec.group_axis];
    program.first_barrier = barrier_count;
    program.private_stride = private_stride(program_spec.private_bytes);
    barrier_count += program.group_count;
    cores += count;
    require(cores <= kMaxCores, "too many cores");
    programs.push_back(std::move(program));
  }
  core_count = static_cast<int32_t>(cores);
  int64_t offset = cores * static_cast<int64_t>(sizeof(Core));
  for (Program& program : programs) {
    program.first_private = offset;
    offset += program.private_stride * program.core_count;
  }
  shared_stride = align64(spec.shared_bytes);
  shared_offset = offset;
  offset += shared_stride * spec.group_count;
  device_offset = offset;
  block_bytes = offset + align64(spec.device_bytes);
  worker_limit = spec.num_workers == 0 ? hardware_threads() : spec.num_workers;
  worker_limit = std::min({worker_limit, core_count, kMaxWorkers});
  if (spec.help == Help::kNever || spec.checked != nullptr) worker_limit = 1;
  statistics_.programs.resize(programs.size());
}

Executable::~Executable() {
  for (const auto& launch : launches_) {
    kept_bytes.fetch_sub(launch->kept_bytes(), std::memory_order_relaxed);
  }
}

std::unique_ptr<Launch> Executable::take_launch() {
  {
    std::lock_guard<std::mutex> lock(launches_mutex_);
    if (!launches_.empty()) {
      std::unique_ptr<Launch> launch = std::move(launches_.back());
      launches_.pop_back();
      kept_bytes.fetch_sub(launch->kept_bytes(), std::memory_order_relaxed);
      return launch;
    }
  }
  return std::make_unique<Launch>(*this);
}

void Executable::give_back(std::unique_ptr<Launch> launch) {
  const int64_t bytes = launch->kept_bytes();
  std::lock_guard<std::mutex> lock(launches_mutex_);
  if (launches_.size() >= kKeptLaunches) return;
  const int64_t kept = kept_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (kept > kKeptBytes) {
    kept_bytes.fetch_sub(bytes, std::memory_order_relaxed);
    return;
  }
  launches_.push_back(std::move(launch));
}

std::string Executable::report(const Failure& failure) const {
  if (spec.hooks != nullptr) {
    std::string text = spec.hooks->report(*this, failure);
    if (!text.empty()) return text;
  }
  std::string text = std::string(name_of(failure.kind)) + " in kernel '" + spec.name + "'";
  if (!failure.text.empty()) text += ": " + failure.text;
  return text;
}

void Executable::add_statistics(const ExecutableStatistics& of_launch) {
  std::lock_guard<std::mutex> lock(statistics_mutex_);
  statistics_.launches += of_launch.launches;
  statistics_.helped_launches += of_launch.helped_launches;
  statistics_.failures += of_launch.failures;
  statistics_.nanoseconds += of_launch.nanoseconds;
  for (size_t p = 0; p < programs.size(); ++p) {
    ProgramStatistics& sum = statistics_.programs[p];
    const ProgramStatistics& one = of_launch.programs[p];
    sum.launches += one.launches;
    sum.cores += one.cores;
    sum.dma_count += one.dma_count;
    sum.dma_bytes += one.dma_bytes;
    sum.waits += one.waits;
    sum.blocked += one.blocked;
    sum.signals += one.signals;
    sum.resumes += one.resumes;
  }
  last_ = of_launch;
}

ExecutableStatistics Executable::statistics() const {
  std::lock_guard<std::mutex> lock(statistics_mutex_);
  return statistics_;
}

ExecutableStatistics Executable::last_statistics() const {
  std::lock_guard<std::mutex> lock(statistics_mutex_);
  return last_;
}

void Executable::reset_statistics() {
  std::lock_guard<std::mutex> lock(statistics_mutex_);
  statistics_ = ExecutableStatistics();
  statistics_.programs.resize(programs.size());
}

}  // namespace cokernel
