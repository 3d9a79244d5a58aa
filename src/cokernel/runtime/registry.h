// The executables of the process by key.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "executable.h"

namespace cokernel {

// Makes the executable of a key that is not registered, from the text that came with the custom
// call.
class Loader {
 public:
  virtual ~Loader() = default;
  // Registers the key. Returns the reason if that cannot be done, else an empty string. Must not
  // throw.
  virtual std::string load(uint64_t key, std::string_view module) = 0;
};

class Registry {
 public:
  static Registry& get();

  void add(std::shared_ptr<Executable> executable);
  void remove(uint64_t key);
  std::shared_ptr<Executable> find(uint64_t key) const;
  std::vector<std::shared_ptr<Executable>> all() const;
  // Returns the one before.
  std::shared_ptr<Loader> set_loader(std::shared_ptr<Loader> loader);
  // As find(), but calls the loader for an unknown key. Null with the reason in `problem` if there
  // is none.
  std::shared_ptr<Executable> find_or_load(uint64_t key, std::string_view module,
                                           std::string& problem);

  void set_last(const std::shared_ptr<Executable>& executable);
  std::shared_ptr<Executable> last() const;

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Executable>> executables_;
  std::shared_ptr<Loader> loader_;
  std::atomic<uint64_t> last_key_{0};
};

}  // namespace cokernel
