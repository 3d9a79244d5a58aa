// Storage of operands that live in the memory of the cores of a mesh (`SEMAPHORE @ mesh` and the
// like) and are handed from one kernel to the next. The XLA buffer of such an operand holds only a
// handle, a 32-bit number in its first four bytes.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "executable.h"

namespace cokernel {

// What the table keeps at most. When either is passed the storage used longest ago goes, unless a
// running launch still holds it; a kernel that asks for it later fails.
inline constexpr int64_t kInstanceBytes = int64_t{512} << 20;
inline constexpr int64_t kInstanceHandles = 65536;

struct InstanceStorage {
  explicit InstanceStorage(int64_t bytes);
  ~InstanceStorage();
  InstanceStorage(const InstanceStorage&) = delete;
  InstanceStorage& operator=(const InstanceStorage&) = delete;

  char* data;
  const int64_t bytes;
  // Held by the launch that uses it: the waiters of its semaphores are cores of one launch.
  std::mutex in_use;

 private:
  void* allocation_;
};

class InstanceTable {
 public:
  static InstanceTable& get();

  uint32_t add(std::shared_ptr<InstanceStorage> storage);
  // Null if the handle is not known (any more).
  std::shared_ptr<InstanceStorage> find(uint32_t handle);
  int64_t handles();
  int64_t bytes();

 private:
  InstanceTable();
  void shrink();

  struct Entry {
    std::shared_ptr<InstanceStorage> storage;
    std::list<uint32_t>::iterator age;
  };
  std::mutex mutex_;
  std::unordered_map<uint32_t, Entry> entries_;
  std::list<uint32_t> by_use_;  // The newest at the front.
  int64_t bytes_ = 0;
  uint32_t next_;
};

// The storages one launch uses.
class InstanceUse {
 public:
  InstanceUse() = default;
  ~InstanceUse() { leave(); }
  InstanceUse(const InstanceUse&) = delete;
  InstanceUse& operator=(const InstanceUse&) = delete;

  // Replaces the pointers of the operands in `buffers` by pointers to their storage, and `bytes` by
  // its size. Writes the handles of outputs. Returns the reason if that cannot be done, else an
  // empty string.
  std::string enter(const std::vector<InstanceOperand>& operands, std::vector<void*>& buffers,
                    std::vector<int64_t>& bytes);
  void leave();

 private:
  std::vector<std::shared_ptr<InstanceStorage>> storages_;
};

}  // namespace cokernel
