// The Python module `cokernel._runtime`. Its interface is described in `_runtime.pyi`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "checked/checked_abi.h"
#include "checked/python_record.h"
#include "ffi_handler.h"
#include "instances.h"
#include "launch.h"
#include "python_fields.h"
#include "python_hooks.h"
#include "registry.h"

namespace nb = nanobind;

namespace cokernel {
namespace {

ProgramSpec program_from(nb::handle object, size_t number) {
  Fields fields(object, "program " + std::to_string(number));
  ProgramSpec spec;
  spec.name = fields.get<std::string>("name");
  spec.entry = reinterpret_cast<void*>(fields.get<uintptr_t>("entry"));
  spec.is_coroutine = fields.get<bool>("is_coroutine");
  for (nb::handle size : fields.required("shape")) spec.shape.push_back(nb::cast<int32_t>(size));
  spec.group_axis = fields.get<int32_t>("group_axis");
  spec.private_bytes = fields.get<int64_t>("private_bytes");
  spec.semaphore_bytes = fields.get<int64_t>("semaphore_bytes");
  spec.uses_barrier = fields.get<bool>("uses_barrier");
  fields.finish();
  return spec;
}

InstanceOperand instance_operand_from(nb::handle object, size_t number) {
  Fields fields(object, "instance operand " + std::to_string(number));
  InstanceOperand operand;
  operand.buffer = fields.get<int32_t>("buffer");
  operand.is_output = fields.get<bool>("is_output");
  operand.bytes = fields.get<int64_t>("bytes");
  operand.count = fields.get<int64_t>("count");
  fields.finish();
  return operand;
}

PythonCallback callback_from(nb::handle object, size_t number) {
  Fields fields(object, "callback " + std::to_string(number));
  PythonCallback callback{PythonObject(fields.required("function")),
                          fields.get<int64_t>("operands"), fields.get<int64_t>("results")};
  fields.finish();
  return callback;
}

template <typename T>
std::vector<T> list_from(const nb::object& objects, T (*convert)(nb::handle, size_t)) {
  std::vector<T> result;
  if (objects.is_none()) return result;
  for (nb::handle object : objects) result.push_back(convert(object, result.size()));
  return result;
}

Help help_from(const std::string& name) {
  if (name == "auto") return Help::kAuto;
  if (name == "always") return Help::kAlways;
  if (name == "never") return Help::kNever;
  throw nb::value_error("help must be 'auto', 'always' or 'never'");
}

void register_executable(uint64_t key, nb::dict dict) {
  Fields fields(dict, "the executable");
  ExecutableSpec spec;
  spec.name = fields.get<std::string>("name", "kernel");
  spec.programs = list_from(fields.required("programs"), program_from);
  spec.group_count = fields.get<int32_t>("group_count", 0);
  spec.shared_bytes = fields.get<int64_t>("shared_bytes", 0);
  spec.shared_semaphore_bytes = fields.get<int64_t>("shared_semaphore_bytes", 0);
  spec.device_bytes = fields.get<int64_t>("device_bytes", 0);
  spec.device_semaphore_bytes = fields.get<int64_t>("device_semaphore_bytes", 0);
  spec.instance_operands = list_from(fields.optional("instance_operands"), instance_operand_from);
  spec.num_workers = fields.get<int32_t>("num_workers", 0);
  spec.time_limit_s = fields.get<double>("time_limit_s", 0.0);
  spec.help = help_from(fields.get<std::string>("help", "auto"));
  spec.checked = checked::options_from(fields.optional("checked"));
  spec.hooks = std::make_shared<PythonHooks>(
      fields.optional("report"), fields.optional("checked_report"), fields.optional("keep_alive"),
      list_from(fields.optional("callbacks"), callback_from), spec.programs);
  fields.finish();
  Registry::get().add(std::make_shared<Executable>(key, std::move(spec)));
}

nb::object set_loader(nb::object function) {
  std::shared_ptr<Loader> loader;
  if (!function.is_none()) loader = std::make_shared<PythonLoader>(std::move(function));
  const std::shared_ptr<Loader> before = Registry::get().set_loader(std::move(loader));
  if (before == nullptr) return nb::none();
  return static_cast<const PythonLoader&>(*before).function();
}

void launch(uint64_t key, nb::sequence given) {
  std::vector<Buffer> buffers;
  for (nb::handle item : given) {
    Buffer buffer;
    if (nb::isinstance<nb::tuple>(item)) {
      nb::tuple pair = nb::borrow<nb::tuple>(item);
      if (pair.size() != 2) throw nb::value_error("a buffer is an address or (address, bytes)");
      buffer.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(pair[0]));
      buffer.bytes = nb::cast<int64_t>(pair[1]);
    } else {
      buffer.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(item));
    }
    buffers.push_back(buffer);
  }
  std::string error;
  {
    nb::gil_scoped_release no_gil;
    std::string problem;
    const std::shared_ptr<Executable> executable =
        Registry::get().find_or_load(key, std::string_view(), problem);
    if (executable == nullptr) {
      error = problem;
    } else {
      error = launch_executable(executable, buffers.data(), static_cast<int32_t>(buffers.size()));
      Registry::get().set_last(executable);
    }
  }
  if (!error.empty()) throw std::runtime_error(error);
}

nb::dict statistics_dict(const Executable& executable, const ExecutableStatistics& statistics) {
  nb::dict result;
  result["key"] = executable.key;
  result["name"] = executable.spec.name;
  result["launches"] = statistics.launches;
  result["helped_launches"] = statistics.helped_launches;
  result["failures"] = statistics.failures;
  result["nanoseconds"] = statistics.nanoseconds;
  nb::list programs;
  for (size_t p = 0; p < statistics.programs.size(); ++p) {
    const ProgramStatistics& sum = statistics.programs[p];
    nb::dict program;
    program["name"] = executable.spec.programs[p].name;
    program["launches"] = sum.launches;
    program["cores"] = sum.cores;
    program["dma_count"] = sum.dma_count;
    program["dma_bytes"] = sum.dma_bytes;
    program["waits"] = sum.waits;
    program["blocked"] = sum.blocked;
    program["signals"] = sum.signals;
    program["resumes"] = sum.resumes;
    programs.append(program);
  }
  result["programs"] = programs;
  return result;
}

nb::list statistics(nb::object key) {
  nb::list result;
  if (key.is_none()) {
    for (const auto& executable : Registry::get().all()) {
      result.append(statistics_dict(*executable, executable->statistics()));
    }
    return result;
  }
  const auto executable = Registry::get().find(nb::cast<uint64_t>(key));
  if (executable != nullptr) result.append(statistics_dict(*executable, executable->statistics()));
  return result;
}

nb::object last_statistics() {
  const auto executable = Registry::get().last();
  if (executable == nullptr) return nb::none();
  return statistics_dict(*executable, executable->last_statistics());
}

void reset_statistics() {
  for (const auto& executable : Registry::get().all()) executable->reset_statistics();
}

nb::dict abi_offsets() {
  nb::dict offsets;
  offsets["Core.launch"] = offsetof(Core, launch);
  offsets["Core.memory"] = offsetof(Core, memory);
  offsets["Core.shared"] = offsetof(Core, shared);
  offsets["Core.device"] = offsetof(Core, device);
  offsets["Core.buffers"] = offsetof(Core, buffers);
  offsets["Core.coordinates"] = offsetof(Core, coordinates);
  offsets["Core.index"] = offsetof(Core, index);
  offsets["Core.group"] = offsetof(Core, group);
  offsets["Core.program"] = offsetof(Core, program);
  offsets["Core.handle"] = offsetof(Core, handle);
  offsets["Core.site"] = offsetof(Core, site);
  offsets["Core.dma_count"] = offsetof(Core, dma_count);
  offsets["Core.dma_bytes"] = offsetof(Core, dma_bytes);
  offsets["sizeof.pointer"] = sizeof(void*);
  offsets["sizeof.Core"] = sizeof(Core);
  offsets["sizeof.Semaphore"] = sizeof(Semaphore);
  offsets["Launch.stop"] = offsetof(LaunchHeader, stop);
  offsets["Launch.cores"] = offsetof(LaunchHeader, cores);
  offsets["Launch.shared_memory"] = offsetof(LaunchHeader, shared_memory);
  return offsets;
}

template <typename Function>
void add_function(nb::dict& functions, const char* name, Function* function) {
  functions[name] = reinterpret_cast<uintptr_t>(function);
}

nb::dict function_addresses() {
  nb::dict functions;
  add_function(functions, "cokernel_semaphore_wait", cokernel_semaphore_wait);
  add_function(functions, "cokernel_semaphore_signal", cokernel_semaphore_signal);
  add_function(functions, "cokernel_semaphore_read", cokernel_semaphore_read);
  add_function(functions, "cokernel_barrier_wait", cokernel_barrier_wait);
  add_function(functions, "cokernel_yield", cokernel_yield);
  add_function(functions, "cokernel_frame", cokernel_frame);
  add_function(functions, "cokernel_finish", cokernel_finish);
  add_function(functions, "cokernel_fail_index", cokernel_fail_index);
  add_function(functions, "cokernel_fail_picked", cokernel_fail_picked);
  add_function(functions, "cokernel_fail", cokernel_fail);
  add_function(functions, "cokernel_callback", cokernel_callback);
  add_function(functions, "cokernel_delay", cokernel_delay);
  add_function(functions, "cokernel_copy", cokernel_copy);
  add_function(functions, "cokernel_checked_step", cokernel_checked_step);
  add_function(functions, "cokernel_checked_yield", cokernel_checked_yield);
  add_function(functions, "cokernel_checked_wait", cokernel_checked_wait);
  add_function(functions, "cokernel_checked_barrier", cokernel_checked_barrier);
  add_function(functions, "cokernel_checked_signal", cokernel_checked_signal);
  add_function(functions, "cokernel_checked_read", cokernel_checked_read);
  add_function(functions, "cokernel_checked_access", cokernel_checked_access);
  add_function(functions, "cokernel_checked_access_strided", cokernel_checked_access_strided);
  add_function(functions, "cokernel_checked_access_picked", cokernel_checked_access_picked);
  add_function(functions, "cokernel_checked_claim", cokernel_checked_claim);
  add_function(functions, "cokernel_checked_claimed", cokernel_checked_claimed);
  add_function(functions, "cokernel_checked_group", cokernel_checked_group);
  add_function(functions, "cokernel_checked_dma", cokernel_checked_dma);
  add_function(functions, "cokernel_checked_move", cokernel_checked_move);
  add_function(functions, "cokernel_checked_copy_undefined", cokernel_checked_copy_undefined);
  add_function(functions, "cokernel_checked_merge_undefined", cokernel_checked_merge_undefined);
  add_function(functions, "cokernel_checked_allocate", cokernel_checked_allocate);
  add_function(functions, "cokernel_checked_release", cokernel_checked_release);
  add_function(functions, "cokernel_checked_undefined", cokernel_checked_undefined);
  add_function(functions, "cokernel_checked_forget", cokernel_checked_forget);
  add_function(functions, "cokernel_checked_read_padding", cokernel_checked_read_padding);
  add_function(functions, "cokernel_checked_pick_padding", cokernel_checked_pick_padding);
  add_function(functions, "cokernel_checked_mark_undefined", cokernel_checked_mark_undefined);
  add_function(functions, "cokernel_checked_report_undefined", cokernel_checked_report_undefined);
  return functions;
}

}  // namespace
}  // namespace cokernel

NB_MODULE(_runtime, module) {
  using namespace cokernel;
  // Executables live until the process ends, so that nanobind would complain about every one.
  nb::set_leak_warnings(false);
  module.def("register_executable", &register_executable, nb::arg("key"), nb::arg("spec"));
  module.def(
      "unregister_executable", [](uint64_t key) { Registry::get().remove(key); }, nb::arg("key"));
  module.def(
      "executable_is_registered", [](uint64_t key) { return Registry::get().find(key) != nullptr; },
      nb::arg("key"));
  module.def("set_loader", &set_loader, nb::arg("loader").none());
  module.def("set_schedule", &checked::set_python_schedule, nb::arg("schedule").none());
  module.def("set_claims", &checked::set_claims, nb::arg("are_taken"));
  module.def("launch", &launch, nb::arg("key"), nb::arg("buffers"));
  module.def("ffi_handler", [] { return nb::capsule(ffi_handler_address()); });
  module.def("abi_offsets", &abi_offsets);
  module.def("function_addresses", &function_addresses);
  module.def("statistics", &statistics, nb::arg("key") = nb::none());
  module.def("last_statistics", &last_statistics);
  module.def("reset_statistics", &reset_statistics);
  module.def("instance_table", [] {
    nb::dict result;
    result["handles"] = InstanceTable::get().handles();
    result["bytes"] = InstanceTable::get().bytes();
    return result;
  });
}
