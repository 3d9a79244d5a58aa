// The door through which XLA launches kernels.
#include "ffi_handler.h"

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "launch.h"
#include "platform.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace cokernel {
namespace {

namespace ffi = xla::ffi;

// Kernels rarely have more operands and results than this; then no memory is allocated for them.
constexpr size_t kUsualBuffers = 32;

Buffer make_buffer(const ffi::AnyBuffer& buffer) {
  return Buffer{buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes())};
}

ffi::Error run(int64_t key, std::string_view module, const ffi::RemainingArgs& operands,
               const ffi::RemainingRets& results) {
  std::string problem;
  const std::shared_ptr<Executable> executable =
      Registry::get().find_or_load(static_cast<uint64_t>(key), module, problem);
  if (executable == nullptr) return ffi::Error(ffi::ErrorCode::kInternal, problem);
  const size_t count = operands.size() + results.size();
  Buffer usual[kUsualBuffers];
  std::vector<Buffer> many;
  Buffer* buffers = usual;
  if (count > kUsualBuffers) {
    many.resize(count);
    buffers = many.data();
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    const ffi::ErrorOr<ffi::AnyBuffer> operand = operands.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) return operand.error();
    buffers[i] = make_buffer(operand.value());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    ffi::Result<ffi::AnyBuffer> value = result.value();
    const Buffer buffer = make_buffer(*value);
    prefer_large_pages(buffer.data, buffer.bytes);
    buffers[operands.size() + i] = buffer;
  }
  const std::string error = launch_executable(executable, buffers, static_cast<int32_t>(count));
  Registry::get().set_last(executable);
  if (error.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, error);
}

ffi::Error run_safely(int64_t key, std::string_view module, ffi::RemainingArgs operands,
                      ffi::RemainingRets results) {
  // XLA's own frames do not expect exceptions.
  try {
    return run(key, module, operands, results);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal,
                      std::string("Cokernel cannot launch the kernel: ") + error.what());
  }
}

XLA_FFI_DEFINE_HANDLER(handler, run_safely,
                       ffi::Ffi::Bind()
                           .Attr<int64_t>("key")
                           .Attr<std::string_view>("module")
                           .RemainingArgs()
                           .RemainingRets());

}  // namespace

void* ffi_handler_address() { return reinterpret_cast<void*>(handler); }

}  // namespace cokernel
