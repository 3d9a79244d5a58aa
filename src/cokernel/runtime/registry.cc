#include "registry.h"

#include <cinttypes>
#include <cstdio>
#include <utility>

namespace cokernel {

Registry& Registry::get() {
  static Registry* registry = new Registry;
  return *registry;
}

void Registry::add(std::shared_ptr<Executable> executable) {
  // The old one is destroyed outside the lock: that may run Python.
  std::shared_ptr<Executable> old;
  {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    old = std::exchange(executables_[executable->key], executable);
  }
}

void Registry::remove(uint64_t key) {
  std::shared_ptr<Executable> old;
  {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    const auto found = executables_.find(key);
    if (found == executables_.end()) return;
    old = std::move(found->second);
    executables_.erase(found);
  }
}

std::shared_ptr<Executable> Registry::find(uint64_t key) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto found = executables_.find(key);
  return found == executables_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Executable>> Registry::all() const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  std::vector<std::shared_ptr<Executable>> result;
  for (const auto& entry : executables_) result.push_back(entry.second);
  return result;
}

std::shared_ptr<Loader> Registry::set_loader(std::shared_ptr<Loader> loader) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  return std::exchange(loader_, std::move(loader));
}

std::shared_ptr<Executable> Registry::find_or_load(uint64_t key, std::string_view module,
                                                   std::string& problem) {
  if (std::shared_ptr<Executable> executable = find(key)) return executable;
  std::shared_ptr<Loader> loader;
  {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    loader = loader_;
  }
  char name[32];
  std::snprintf(name, sizeof(name), "%016" PRIx64, key);
  if (loader == nullptr) {
    problem = std::string("Cokernel has no kernel with key ") + name +
              ". Import cokernel before you run a program that contains one.";
    return nullptr;
  }
  problem = loader->load(key, module);
  if (!problem.empty()) return nullptr;
  std::shared_ptr<Executable> executable = find(key);
  if (executable == nullptr) {
    problem = std::string("Cokernel's loader did not register the kernel with key ") + name;
  }
  return executable;
}

void Registry::set_last(const std::shared_ptr<Executable>& executable) {
  last_key_.store(executable->key, std::memory_order_relaxed);
}

std::shared_ptr<Executable> Registry::last() const {
  return find(last_key_.load(std::memory_order_relaxed));
}

}  // namespace cokernel
