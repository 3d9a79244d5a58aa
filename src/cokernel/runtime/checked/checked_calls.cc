// The functions of checked_abi.h.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "checked/blocks.h"
#include "checked/checked_abi.h"
#include "checked/state.h"
#include "launch.h"

using cokernel::Core;
using cokernel::Semaphore;
using cokernel::checked::AccessKind;
using cokernel::checked::State;

namespace {

State& state_of(const Core* core) { return *core->launch->checked; }

uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

int32_t cokernel_checked_step(Core* core, int32_t site, const void* object) {
  return state_of(core).step(core, site, object) ? 1 : 0;
}

void cokernel_checked_yield(Core* core, int32_t site, const void* object) {
  state_of(core).yield(core, site, object);
}

int32_t cokernel_checked_wait(Core* core, Semaphore* semaphore, int64_t value, int32_t decrement,
                              int32_t is_dma, int32_t site) {
  return state_of(core).wait(core, semaphore, value, decrement != 0, is_dma != 0, site) ? 1 : 0;
}

int32_t cokernel_checked_barrier(Core* core, int32_t site) {
  return state_of(core).barrier(core, site) ? 1 : 0;
}

void cokernel_checked_signal(Core* core, Semaphore* semaphore, int64_t increment, int32_t site) {
  state_of(core).signal(core, semaphore, increment, site);
}

int32_t cokernel_checked_read(Core* core, Semaphore* semaphore, int32_t site) {
  const int64_t count = state_of(core).read(core, semaphore, site);
  return static_cast<int32_t>(std::clamp<int64_t>(count, std::numeric_limits<int32_t>::min(),
                                                  std::numeric_limits<int32_t>::max()));
}

int32_t cokernel_checked_access(Core* core, int32_t site, int32_t kind, void* address,
                                int64_t bytes, int64_t element_bytes) {
  State& state = state_of(core);
  state.begin_event();
  return state.access(core, site, static_cast<AccessKind>(kind), address_of(address), bytes,
                      element_bytes)
             ? 1
             : 0;
}

int32_t cokernel_checked_access_strided(Core* core, int32_t site, int32_t kind, void* address,
                                        int64_t element_bytes, int64_t rank, const int64_t* extents,
                                        const int64_t* strides) {
  State& state = state_of(core);
  state.begin_event();
  bool was_undefined = false;
  cokernel::checked::for_each_piece(element_bytes, rank, extents, strides, strides,
                                    [&](int64_t offset, int64_t, int64_t, int64_t bytes) {
                                      was_undefined |= state.access(
                                          core, site, static_cast<AccessKind>(kind),
                                          address_of(address) + static_cast<uintptr_t>(offset),
                                          bytes, element_bytes);
                                    });
  return was_undefined ? 1 : 0;
}

void cokernel_checked_access_picked(Core* core, int32_t site, int32_t kind, void* const* addresses,
                                    int64_t count, int64_t bytes_each, int64_t element_bytes,
                                    const uint8_t* mask) {
  State& state = state_of(core);
  state.begin_event();
  for (int64_t i = 0; i < count;) {
    if (mask != nullptr && mask[i] == 0) {
      ++i;
      continue;
    }
    // Neighbours are often picked one after the other.
    const uintptr_t begin = address_of(addresses[i]);
    int64_t bytes = bytes_each;
    for (++i; i < count && (mask == nullptr || mask[i] != 0) &&
              address_of(addresses[i]) == begin + static_cast<uintptr_t>(bytes);
         ++i) {
      bytes += bytes_each;
    }
    state.access(core, site, static_cast<AccessKind>(kind), begin, bytes, element_bytes);
  }
}

int32_t cokernel_checked_claim(Core* core, const int64_t* words, int64_t claims, int64_t others,
                               int64_t limits, int64_t trips) {
  return state_of(core).claim(core, words, claims, others, limits, trips) ? 1 : 0;
}

void cokernel_checked_claimed(Core* core, int32_t site, int32_t kind) {
  state_of(core).claimed(core, site, static_cast<AccessKind>(kind));
}

void cokernel_checked_group(Core* core, int32_t begins) {
  State& state = state_of(core);
  if (begins != 0) {
    state.begin_group(begins == 2);
  } else {
    state.end_group();
  }
}

void cokernel_checked_dma(Core* core, int32_t site, void (*run)(Core* core, void* arguments),
                          const void* arguments, int64_t argument_bytes, Semaphore* arrival,
                          int64_t arrival_amount, Semaphore* departure, int64_t departure_amount) {
  state_of(core).start_dma(core, site, run, arguments, argument_bytes, arrival, arrival_amount,
                           departure, departure_amount);
}

void cokernel_checked_move(Core* core, void* target, const void* source, int64_t bytes) {
  state_of(core).move(static_cast<char*>(target), static_cast<const char*>(source), bytes);
}

void cokernel_checked_copy_undefined(Core* core, void* target, const void* source,
                                     int64_t element_bytes, int64_t rank, const int64_t* extents,
                                     const int64_t* target_strides, const int64_t* source_strides) {
  // The access that wrote the target has made it defined.
  state_of(core).copy_undefined(core, target, source, element_bytes, rank, extents, target_strides,
                                source_strides);
}

void cokernel_checked_merge_undefined(Core* core, void* target, const void* source,
                                      int64_t element_bytes, int64_t rank, const int64_t* extents,
                                      const int64_t* target_strides,
                                      const int64_t* source_strides) {
  state_of(core).copy_undefined(core, target, source, element_bytes, rank, extents, target_strides,
                                source_strides);
}

void cokernel_checked_allocate(Core* core, int32_t site, void* address, int64_t bytes,
                               int64_t element_bytes, int32_t is_semaphore) {
  state_of(core).allocate(core, site, address, bytes, element_bytes, is_semaphore);
}

void cokernel_checked_release(Core* core, int32_t site, void* address, int64_t bytes,
                              int32_t is_semaphore) {
  state_of(core).release(core, site, address, bytes, is_semaphore);
}

void cokernel_checked_forget(Core* core, void* address, int64_t element_bytes, int64_t rank,
                             const int64_t* extents, const int64_t* strides) {
  state_of(core).forget(address, element_bytes, rank, extents, strides);
}

int32_t cokernel_checked_undefined(Core* core, void* address, int64_t element_bytes, int64_t rank,
                                   const int64_t* extents, const int64_t* strides, uint8_t* mask,
                                   int32_t read, int64_t position) {
  State& state = state_of(core);
  const bool found =
      state.undefined(core, address, element_bytes, rank, extents, strides, mask, read, position);
  return found ? 1 : 0;
}

void cokernel_checked_read_padding(Core* core, int32_t site, int32_t read, int64_t rank,
                                   const int64_t* window) {
  state_of(core).read_padding(core, site, read, rank, window);
}

void cokernel_checked_pick_padding(Core* core, int32_t site, int32_t read, int64_t element,
                                   int64_t rank, const int64_t* shape) {
  state_of(core).pick_padding(core, site, read, element, rank, shape);
}

void cokernel_checked_mark_undefined(Core* core, void* address, int64_t element_bytes, int64_t rank,
                                     const int64_t* extents, const int64_t* strides,
                                     const uint8_t* mask, int64_t position,
                                     const int64_t* sources) {
  state_of(core).mark_undefined(core, address, element_bytes, rank, extents, strides, mask,
                                position, sources);
}

void cokernel_checked_report_undefined(Core* core, int32_t site, int32_t use, const uint8_t* mask,
                                       int64_t count, const int64_t* sources, int32_t is_again) {
  state_of(core).report_undefined(core, site, use, mask, count, sources, is_again != 0);
}
