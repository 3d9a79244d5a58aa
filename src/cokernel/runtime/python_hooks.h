// What the runtime asks of Python: texts of errors, callbacks, and the loader of kernels.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "executable.h"
#include "registry.h"

namespace cokernel {

// A Python object that may be released on any thread, at any time.
class PythonObject {
 public:
  PythonObject() = default;
  explicit PythonObject(nanobind::object object) : object_(std::move(object)) {}
  PythonObject(PythonObject&&) = default;
  PythonObject& operator=(PythonObject&&) = delete;
  ~PythonObject();

  // Needs the GIL.
  const nanobind::object& get() const { return object_; }
  bool is_none() const { return !object_.is_valid() || object_.is_none(); }

 private:
  nanobind::object object_;
};

struct PythonCallback {
  PythonObject function;
  int64_t operands = 0;
  int64_t results = 0;
};

class PythonHooks : public Hooks {
 public:
  PythonHooks(nanobind::object report, nanobind::object checked_report, nanobind::object keep_alive,
              std::vector<PythonCallback> callbacks, const std::vector<ProgramSpec>& programs);
  std::string report(const Executable& executable, const Failure& failure) override;
  std::string checked_report(const Executable& executable,
                             const checked::CheckedRecord& record) override;
  bool call(const Core& core, int32_t callback, void** operands, void** results,
            Failure& failure) override;

 private:
  PythonObject report_;
  PythonObject checked_report_;
  PythonObject keep_alive_;
  std::vector<PythonCallback> callbacks_;
  std::vector<std::string> program_names_;
  std::vector<size_t> program_ranks_;
};

class PythonLoader : public Loader {
 public:
  explicit PythonLoader(nanobind::object function) : function_(std::move(function)) {}
  std::string load(uint64_t key, std::string_view module) override;
  const nanobind::object& function() const { return function_.get(); }

 private:
  PythonObject function_;
};

}  // namespace cokernel
