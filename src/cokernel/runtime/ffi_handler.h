#pragma once

namespace cokernel {

// The XLA_FFI_Handler that launches the executable named by the attribute `key`.
void* ffi_handler_address();

}  // namespace cokernel
