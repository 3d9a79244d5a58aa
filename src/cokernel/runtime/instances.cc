#include "instances.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>

namespace cokernel {

namespace {

constexpr size_t kAlignment = 64;

}  // namespace

// The system has zeroed pages at hand, so that what is not used of a large storage costs nothing.
InstanceStorage::InstanceStorage(int64_t bytes)
    : bytes(bytes), allocation_(std::calloc(static_cast<size_t>(bytes) + kAlignment, 1)) {
  if (allocation_ == nullptr) throw std::bad_alloc();
  const auto address = reinterpret_cast<uintptr_t>(allocation_);
  data = reinterpret_cast<char*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

InstanceStorage::~InstanceStorage() { std::free(allocation_); }

// Handles start anywhere, so that one of another process, out of a file say, is not taken for one
// of ours.
InstanceTable::InstanceTable() : next_(std::random_device()()) {}

InstanceTable& InstanceTable::get() {
  static InstanceTable* table = new InstanceTable;
  return *table;
}

uint32_t InstanceTable::add(std::shared_ptr<InstanceStorage> storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Zero means "no storage yet".
  while (next_ == 0 || entries_.count(next_) != 0) ++next_;
  const uint32_t handle = next_++;
  bytes_ += storage->bytes;
  by_use_.push_front(handle);
  entries_.emplace(handle, Entry{std::move(storage), by_use_.begin()});
  shrink();
  return handle;
}

void InstanceTable::shrink() {
  // The newest stays even if it is larger than what the table keeps.
  while (by_use_.size() > 1 &&
         (bytes_ > kInstanceBytes || static_cast<int64_t>(by_use_.size()) > kInstanceHandles)) {
    const auto oldest = entries_.find(by_use_.back());
    bytes_ -= oldest->second.storage->bytes;
    entries_.erase(oldest);
    by_use_.pop_back();
  }
}

std::shared_ptr<InstanceStorage> InstanceTable::find(uint32_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return nullptr;
  by_use_.splice(by_use_.begin(), by_use_, found->second.age);
  return found->second.storage;
}

int64_t InstanceTable::handles() {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(entries_.size());
}

int64_t InstanceTable::bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

std::string InstanceUse::enter(const std::vector<InstanceOperand>& operands,
                               std::vector<void*>& buffers, std::vector<int64_t>& bytes) {
  struct Known {
    void* buffer;
    std::shared_ptr<InstanceStorage> storage;
    uint32_t handle;
  };
  std::vector<Known> known;
  // Inputs first: an output that is the same buffer as an input keeps that input's storage.
  for (const bool outputs : {false, true}) {
    for (const InstanceOperand& operand : operands) {
      if (operand.is_output != outputs) continue;
      const std::string name = std::string(outputs ? "result" : "operand") + " in buffer " +
                               std::to_string(operand.buffer);
      if (operand.buffer < 0 || operand.buffer >= static_cast<int32_t>(buffers.size())) {
        return name + " does not exist";
      }
      void* buffer = buffers[operand.buffer];
      const int64_t buffer_bytes = bytes[operand.buffer];
      if (buffer_bytes > 0 && buffer_bytes < static_cast<int64_t>(sizeof(uint32_t))) {
        return name + " is too small for a handle of per-core memory";
      }
      const int64_t wanted = operand.bytes * operand.count;
      auto entry = std::find_if(known.begin(), known.end(),
                                [buffer](const Known& k) { return k.buffer == buffer; });
      if (entry == known.end()) {
        uint32_t handle = 0;
        if (!outputs) std::memcpy(&handle, buffer, sizeof(handle));
        std::shared_ptr<InstanceStorage> storage;
        if (handle == 0) {
          storage = std::make_shared<InstanceStorage>(wanted);
        } else {
          storage = InstanceTable::get().find(handle);
          if (storage == nullptr) {
            return name +
                   " belongs to a kernel whose results are gone: its per-core memory was "
                   "made in another process or dropped after many later kernels";
          }
        }
        known.push_back({buffer, storage, handle});
        entry = known.end() - 1;
      }
      if (entry->storage->bytes != wanted) {
        return name + " has " + std::to_string(entry->storage->bytes) +
               " bytes of per-core memory where the kernel expects " + std::to_string(wanted);
      }
      if (outputs) {
        if (entry->handle == 0) entry->handle = InstanceTable::get().add(entry->storage);
        std::memcpy(buffer, &entry->handle, sizeof(entry->handle));
      }
    }
  }
  for (const InstanceOperand& operand : operands) {
    void*& buffer = buffers[operand.buffer];
    const auto entry = std::find_if(known.begin(), known.end(),
                                    [&](const Known& k) { return k.buffer == buffer; });
    // A buffer listed twice has been replaced already.
    if (entry == known.end()) continue;
    buffer = entry->storage->data;
    bytes[operand.buffer] = entry->storage->bytes;
  }
  // Always in the order of addresses, so that two launches do not wait for each other.
  std::vector<std::shared_ptr<InstanceStorage>> storages;
  for (Known& entry : known) storages.push_back(std::move(entry.storage));
  std::sort(storages.begin(), storages.end());
  storages.erase(std::unique(storages.begin(), storages.end()), storages.end());
  for (std::shared_ptr<InstanceStorage>& storage : storages) {
    storage->in_use.lock();
    storages_.push_back(std::move(storage));
  }
  return std::string();
}

void InstanceUse::leave() {
  for (const std::shared_ptr<InstanceStorage>& storage : storages_) storage->in_use.unlock();
  storages_.clear();
}

}  // namespace cokernel
