#include "python_hooks.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <utility>

#include "checked/python_record.h"

namespace nb = nanobind;

namespace cokernel {

namespace {

nb::tuple coordinates_of(const int32_t* coordinates, size_t rank) {
  nb::list list;
  for (size_t axis = 0; axis < rank; ++axis) list.append(coordinates[axis]);
  return nb::tuple(list);
}

nb::dict describe_core(const Executable& executable, const CoreSnapshot& core) {
  const ProgramSpec& program = executable.spec.programs[core.program];
  nb::dict result;
  result["program"] = core.program;
  result["program_name"] = program.name;
  result["coordinates"] = coordinates_of(core.coordinates, program.shape.size());
  result["index"] = core.index;
  result["group"] = core.group;
  result["state"] = name_of(core.state);
  result["site"] = core.site;
  if (core.state == CoreState::kSemaphore) {
    nb::dict semaphore;
    semaphore["owner"] = name_of(core.place.owner);
    semaphore["index"] = core.place.index;
    semaphore["program"] = core.place.program;
    semaphore["offset"] = core.place.offset;
    semaphore["count"] = core.count;
    result["semaphore"] = semaphore;
    result["value"] = core.value;
    result["decrement"] = core.decrement;
  } else if (core.state == CoreState::kBarrier) {
    nb::dict barrier;
    barrier["group"] = core.group;
    barrier["arrived"] = core.arrived;
    barrier["expected"] = core.expected;
    result["barrier"] = barrier;
  }
  return result;
}

nb::dict describe_failure(const Executable& executable, const Failure& failure) {
  nb::dict result;
  result["kind"] = name_of(failure.kind);
  result["executable"] = executable.spec.name;
  if (failure.program >= 0) {
    const ProgramSpec& program = executable.spec.programs[failure.program];
    result["program"] = failure.program;
    result["program_name"] = program.name;
    result["coordinates"] = coordinates_of(failure.coordinates, program.shape.size());
    result["index"] = failure.index;
    result["site"] = failure.site;
  }
  switch (failure.kind) {
    case FailureKind::kOutOfBounds:
      result["dimension"] = failure.dimension;
      result["start"] = failure.start;
      result["size"] = failure.size;
      result["extent"] = failure.extent;
      if (failure.position >= 0) result["position"] = failure.position;
      break;
    case FailureKind::kCheck:
      result["code"] = failure.code;
      result["value"] = failure.value;
      break;
    case FailureKind::kCallback:
      result["callback"] = failure.callback;
      result["exception_type"] = failure.exception_type;
      result["text"] = failure.text;
      break;
    case FailureKind::kInternal:
      result["text"] = failure.text;
      break;
    case FailureKind::kTimeLimit:
      result["limit_s"] = failure.limit_s;
      [[fallthrough]];
    case FailureKind::kInterrupted:
      result["elapsed_s"] = failure.elapsed_s;
      [[fallthrough]];
    case FailureKind::kDeadlock: {
      nb::list cores;
      for (const CoreSnapshot& core : failure.cores) cores.append(describe_core(executable, core));
      result["cores"] = cores;
      break;
    }
    case FailureKind::kNone:
      break;
  }
  return result;
}

// The text Python would print for the exception. Needs the GIL.
std::string format_exception(const nb::python_error& error) {
  try {
    nb::object lines = nb::module_::import_("traceback").attr("format_exception")(error.value());
    return nb::cast<std::string>(nb::str("").attr("join")(lines));
  } catch (const std::exception&) {
    // The traceback cannot be formatted, so the short form has to do.
    return error.what();
  }
}

std::string type_name(const nb::python_error& error) {
  return nb::cast<std::string>(nb::str(error.type().attr("__name__")));
}

// The text that `report` makes, or one that says why it could not.
template <typename Report>
std::string text_of(const Executable& executable, const char* what, Report report) {
  nb::gil_scoped_acquire gil;
  const auto make_report = [&] { return nb::cast<std::string>(report()); };
  try {
    try {
      return make_report();
    } catch (nb::python_error& error) {
      // The report may be the first Python code that the main thread runs after Ctrl-C, which then
      // raises KeyboardInterrupt in it.
      if (!error.matches(PyExc_KeyboardInterrupt)) throw;
    }
    const std::string text = make_report();
    PyErr_SetInterrupt();
    return text;
  } catch (nb::python_error& error) {
    return std::string(what) + " in kernel '" + executable.spec.name +
           "'. The report of it failed as well:\n" + format_exception(error);
  } catch (const std::exception& error) {
    return std::string(what) + " in kernel '" + executable.spec.name +
           "'. The report of it failed as well: " + error.what();
  }
}

}  // namespace

PythonObject::~PythonObject() {
  if (!object_.is_valid()) return;
  if (!nb::is_alive() || Py_IsInitialized() == 0) {
    // The interpreter ends or has ended and takes its objects with it.
    object_.release();
    return;
  }
  nb::gil_scoped_acquire gil;
  object_.reset();
}

PythonHooks::PythonHooks(nb::object report, nb::object checked_report, nb::object keep_alive,
                         std::vector<PythonCallback> callbacks,
                         const std::vector<ProgramSpec>& programs)
    : report_(std::move(report)),
      checked_report_(std::move(checked_report)),
      keep_alive_(std::move(keep_alive)),
      callbacks_(std::move(callbacks)) {
  for (const ProgramSpec& program : programs) {
    program_names_.push_back(program.name);
    program_ranks_.push_back(program.shape.size());
  }
}

std::string PythonHooks::report(const Executable& executable, const Failure& failure) {
  if (report_.is_none()) return std::string();
  return text_of(executable, name_of(failure.kind),
                 [&] { return report_.get()(describe_failure(executable, failure)); });
}

std::string PythonHooks::checked_report(const Executable& executable,
                                        const checked::CheckedRecord& record) {
  if (checked_report_.is_none()) return Hooks::checked_report(executable, record);
  return text_of(executable, record.failed ? name_of(record.failure.kind) : "Findings", [&] {
    nb::object failure = nb::none();
    if (record.failed) failure = describe_failure(executable, record.failure);
    return checked_report_.get()(checked::describe_record(executable, record, failure));
  });
}

bool PythonHooks::call(const Core& core, int32_t callback, void** operands, void** results,
                       Failure& failure) {
  if (callback < 0 || static_cast<size_t>(callback) >= callbacks_.size()) {
    failure.exception_type = "IndexError";
    failure.text = "the executable has no callback " + std::to_string(callback);
    return false;
  }
  nb::gil_scoped_acquire gil;
  try {
    const PythonCallback& known = callbacks_[callback];
    nb::dict info;
    info["program"] = core.program;
    info["program_name"] = program_names_[core.program];
    info["coordinates"] = coordinates_of(core.coordinates, program_ranks_[core.program]);
    info["index"] = core.index;
    info["group"] = core.group;
    info["site"] = core.site.load(std::memory_order_relaxed);
    nb::list operand_addresses;
    for (int64_t i = 0; i < known.operands; ++i) {
      operand_addresses.append(reinterpret_cast<uintptr_t>(operands[i]));
    }
    nb::list result_addresses;
    for (int64_t i = 0; i < known.results; ++i) {
      result_addresses.append(reinterpret_cast<uintptr_t>(results[i]));
    }
    known.function.get()(info, operand_addresses, result_addresses);
    return true;
  } catch (nb::python_error& error) {
    failure.exception_type = type_name(error);
    failure.text = format_exception(error);
    // The error of the launch tells of the interrupt, but does not end the program; this does.
    if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
  } catch (const std::exception& error) {
    failure.exception_type = "RuntimeError";
    failure.text = error.what();
  }
  return false;
}

std::string PythonLoader::load(uint64_t key, std::string_view module) {
  nb::gil_scoped_acquire gil;
  // Another thread may have loaded it while this one waited for the GIL.
  if (Registry::get().find(key) != nullptr) return std::string();
  try {
    function_.get()(key, nb::str(module.data(), module.size()));
    return std::string();
  } catch (nb::python_error& error) {
    return "Cokernel cannot load the kernel of this program:\n" + format_exception(error);
  } catch (const std::exception& error) {
    return std::string("Cokernel cannot load the kernel of this program: ") + error.what();
  }
}

}  // namespace cokernel
