#include "checked/checked_launch.h"

#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "checked/options.h"
#include "checked/state.h"
#include "instances.h"

namespace cokernel {

std::string Hooks::checked_report(const Executable& executable,
                                  const checked::CheckedRecord& record) {
  if (record.failed) return executable.report(record.failure);
  if (record.findings.empty()) return std::string();
  return std::to_string(static_cast<int64_t>(record.findings.all().size()) +
                        record.findings.dropped()) +
         " findings in kernel '" + executable.spec.name + "'";
}

namespace checked {

namespace {

// What a launch changes although it starts from it, so that it can start once more.
class Saved {
 public:
  Saved(const Executable& executable, const Buffer* buffers, int32_t count) {
    for (const InstanceOperand& operand : executable.spec.instance_operands) {
      uint32_t handle = 0;
      if (operand.is_output || operand.buffer < 0 || operand.buffer >= count) continue;
      std::memcpy(&handle, buffers[operand.buffer].data, sizeof(handle));
      const std::shared_ptr<InstanceStorage> storage =
          handle == 0 ? nullptr : InstanceTable::get().find(handle);
      if (storage == nullptr) continue;
      storages_.push_back(storage);
      keep(storage->data, storage->bytes);
    }
    for (int32_t b = 0; b < count; ++b) {
      for (int32_t other = 0; other < b; ++other) {
        if (buffers[other].data != buffers[b].data) continue;
        keep(static_cast<char*>(buffers[b].data), buffers[b].bytes);
        break;
      }
    }
  }

  void restore() const {
    for (const auto& [data, bytes] : blocks_) std::memcpy(data, bytes.data(), bytes.size());
  }

 private:
  void keep(char* data, int64_t bytes) {
    blocks_.emplace_back(data, std::vector<char>(data, data + bytes));
  }

  std::vector<std::shared_ptr<InstanceStorage>> storages_;
  std::vector<std::pair<char*, std::vector<char>>> blocks_;
};

void join(CheckedRecord& sum, CheckedRecord&& one) {
  sum.findings.join(one.findings);
  sum.schedule = one.schedule;
  sum.decisions += one.decisions;
  sum.choices = std::move(one.choices);
  sum.candidates = std::move(one.candidates);
  sum.continuing = std::move(one.continuing);
  sum.effects = std::move(one.effects);
  sum.behaviour = one.behaviour;
  sum.failed_use_site = one.failed_use_site;
  sum.starved = std::move(one.starved);
  sum.fits = sum.fits && one.fits;
  sum.claimed += one.claimed;
  sum.counts.accesses += one.counts.accesses;
  sum.counts.signals += one.counts.signals;
  sum.counts.waits += one.counts.waits;
  sum.counts.barriers += one.counts.barriers;
  sum.counts.dmas += one.counts.dmas;
  sum.counts.cores = one.counts.cores;
}

}  // namespace

std::string run_checked(Executable& executable, Launch& launch, const Buffer* buffers,
                        int32_t count) {
  const CheckedOptions& options = *executable.spec.checked;
  Schedule schedule = next_schedule(options, executable.checked_launches);
  CheckedRecord sum(options.max_findings);
  for (const int32_t buffer : options.batch) {
    int32_t element = -1;
    if (buffer < count) std::memcpy(&element, buffers[buffer].data, sizeof(element));
    sum.batch.push_back(element);
  }
  std::set<uint64_t> behaviours;
  std::optional<Saved> saved;
  if (options.schedules > 1) saved.emplace(executable, buffers, count);
  for (int32_t i = 0; i < options.schedules; ++i, ++schedule.seed) {
    if (i > 0) saved->restore();
    State state(launch, options, schedule);
    launch.checked = &state;
    const bool succeeded = launch.run(buffers, count);
    launch.checked = nullptr;
    join(sum, std::move(state.record));
    ++sum.schedules;
    behaviours.insert(sum.behaviour);
    if (succeeded) continue;
    sum.is_complete = false;
    // A launch that a finding has stopped has no failure of its own.
    sum.failed = launch.failure.kind != FailureKind::kNone;
    sum.failure = std::move(launch.failure);
    break;
  }
  sum.behaviours = static_cast<int32_t>(behaviours.size());
  std::string text;
  if (executable.spec.hooks != nullptr) {
    text = executable.spec.hooks->checked_report(executable, sum);
  }
  if (sum.is_complete || !text.empty()) return text;
  // Whatever the report thinks of its findings, there are no results.
  if (sum.failed) return executable.report(sum.failure);
  return "a finding of checked mode has ended kernel '" + executable.spec.name + "'";
}

}  // namespace checked
}  // namespace cokernel
