// A compiled kernel: its programs, what memory a launch of it needs, the launches kept for reuse,
// and its statistics.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "failure.h"

namespace cokernel {

class Executable;
struct Launch;

namespace checked {
struct CheckedOptions;
struct CheckedRecord;
}  // namespace checked

struct ProgramSpec {
  std::string name;
  void* entry = nullptr;
  bool is_coroutine = false;
  std::vector<int32_t> shape;
  int32_t group_axis = -1;
  int64_t private_bytes = 0;
  int64_t semaphore_bytes = 0;
  bool uses_barrier = false;
};

// An operand whose memory space is tied to the cores of a mesh.
struct InstanceOperand {
  int32_t buffer = 0;
  bool is_output = false;
  int64_t bytes = 0;
  int64_t count = 0;
};

// What the embedding language does for the runtime. Called on any thread.
class Hooks {
 public:
  virtual ~Hooks() = default;
  // The text of the error. Must not throw.
  virtual std::string report(const Executable& executable, const Failure& failure) = 0;
  // What there is to say of a checked launch; a text that is not empty fails it. Must not throw.
  virtual std::string checked_report(const Executable& executable,
                                     const checked::CheckedRecord& record);
  // Runs callback number `callback`; false if it raised, with the exception described in `failure`.
  virtual bool call(const Core& core, int32_t callback, void** operands, void** results,
                    Failure& failure) = 0;
};

enum class Help { kAuto, kAlways, kNever };

struct ExecutableSpec {
  std::string name;
  std::vector<ProgramSpec> programs;
  int32_t group_count = 0;
  int64_t shared_bytes = 0;
  int64_t shared_semaphore_bytes = 0;
  int64_t device_bytes = 0;
  int64_t device_semaphore_bytes = 0;
  std::vector<InstanceOperand> instance_operands;
  int32_t num_workers = 0;
  double time_limit_s = 0;
  Help help = Help::kAuto;
  std::shared_ptr<Hooks> hooks;
  // Null in native mode.
  std::shared_ptr<const checked::CheckedOptions> checked;
};

struct ProgramStatistics {
  int64_t launches = 0;
  int64_t cores = 0;
  int64_t dma_count = 0;
  int64_t dma_bytes = 0;
  int64_t waits = 0;
  int64_t blocked = 0;
  int64_t signals = 0;
  int64_t resumes = 0;
};

struct ExecutableStatistics {
  int64_t launches = 0;
  int64_t helped_launches = 0;
  int64_t failures = 0;
  int64_t nanoseconds = 0;
  std::vector<ProgramStatistics> programs;
};

// Decides from earlier launches whether helper threads are worth their wake-up.
class HelpPlan {
 public:
  struct Choice {
    bool from_start;   // Ask for helpers at once.
    int64_t after_ns;  // Or when the launch has lasted this long and has work for them.
  };
  Choice choose();
  void record(bool from_start, int64_t nanoseconds);

 private:
  // Concurrent launches may overwrite each other's measurement; both are true ones.
  std::atomic<int64_t> launches_{0};
  std::atomic<int64_t> alone_ns_{0};  // What a launch usually takes; 0: not measured yet.
  std::atomic<int64_t> helped_ns_{0};
};

class Executable : public std::enable_shared_from_this<Executable> {
 public:
  struct Program {
    ProgramSpec spec;
    int32_t first_core = 0;
    int32_t core_count = 0;
    int32_t group_count = 1;
    int32_t first_barrier = 0;
    int64_t private_stride = 0;
    int64_t first_private = 0;  // Offset of the first core's private block.
  };

  // Throws std::invalid_argument if the numbers do not make sense.
  Executable(uint64_t key, ExecutableSpec spec);
  ~Executable();
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  // A launch to use, new or used before. Throws std::bad_alloc.
  std::unique_ptr<Launch> take_launch();
  void give_back(std::unique_ptr<Launch> launch);

  // The text of the error that `failure` is.
  std::string report(const Failure& failure) const;

  void add_statistics(const ExecutableStatistics& of_launch);
  ExecutableStatistics statistics() const;
  ExecutableStatistics last_statistics() const;
  void reset_statistics();

  const uint64_t key;
  const ExecutableSpec spec;
  std::vector<Program> programs;
  int32_t core_count = 0;
  int32_t barrier_count = 0;
  int32_t worker_limit = 1;
  int64_t shared_stride = 0;
  int64_t shared_offset = 0;  // In the block of a launch,
  int64_t device_offset = 0;  // as this,
  int64_t block_bytes = 0;    // and its size.
  HelpPlan help_plan;
  std::atomic<int64_t> checked_launches{0};

 private:
  std::mutex launches_mutex_;
  std::vector<std::unique_ptr<Launch>> launches_;
  mutable std::mutex statistics_mutex_;
  ExecutableStatistics statistics_;
  ExecutableStatistics last_;
};

}  // namespace cokernel
