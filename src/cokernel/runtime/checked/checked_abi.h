// What code compiled for checked mode calls besides, and instead of, the functions of abi.h. All of
// it runs on one thread, the one that launches.
#pragma once

#include <cstdint>

#include "abi.h"

extern "C" {

// How an access touches its elements. Every kind but kCheckedWrite leaves alone which of them are
// undefined; kCheckedWrite makes them defined.
enum CheckedAccess : int32_t {
  kCheckedRead = 0,
  kCheckedWrite = 1,
  kCheckedAtomic = 2,       // An atomic sum: no race with another one.
  kCheckedUpdate = 3,       // Reads and writes, not atomically.
  kCheckedFetchAndAdd = 4,  // As kCheckedAtomic; it also acquires from and releases to the element.
  // A read of a flag, again and again, until another core has written it: acquires from that write,
  // and is no race with any.
  kCheckedPoll = 5,
};

// --- Where a core may have to suspend: to be called through the same sequence as
// cokernel_semaphore_wait (save, call, suspend if it returned 0). ---

// In front of a signal, the start of a DMA and an atomic: lets the schedule decide who goes on.
// `object` is the semaphore or memory that the step is about; null: nothing that others touch.
int32_t cokernel_checked_step(cokernel::Core* core, int32_t site, const void* object);
// Always followed by a suspension: the core polls. `object` is the semaphore that it goes on to
// look at; null: memory, which it reads as kCheckedPoll.
void cokernel_checked_yield(cokernel::Core* core, int32_t site, const void* object);
// As cokernel_semaphore_wait. `is_dma`: the wait is for a DMA, and `value` what its descriptor
// moves.
int32_t cokernel_checked_wait(cokernel::Core* core, cokernel::Semaphore* semaphore, int64_t value,
                              int32_t decrement, int32_t is_dma, int32_t site);
int32_t cokernel_checked_barrier(cokernel::Core* core, int32_t site);

// --- What never suspends. ---

void cokernel_checked_signal(cokernel::Core* core, cokernel::Semaphore* semaphore,
                             int64_t increment, int32_t site);
int32_t cokernel_checked_read(cokernel::Core* core, cokernel::Semaphore* semaphore, int32_t site);

// Accesses to memory: `bytes` contiguous ones; a strided block, strides in bytes; or `count`
// pieces of `bytes_each`, of which those count whose `mask` is not zero (all, if it is null).
// The first two return 1 if something there may have been undefined before, else 0.
int32_t cokernel_checked_access(cokernel::Core* core, int32_t site, int32_t kind, void* address,
                                int64_t bytes, int64_t element_bytes);
int32_t cokernel_checked_access_strided(cokernel::Core* core, int32_t site, int32_t kind,
                                        void* address, int64_t element_bytes, int64_t rank,
                                        const int64_t* extents, const int64_t* strides);
void cokernel_checked_access_picked(cokernel::Core* core, int32_t site, int32_t kind,
                                    void* const* addresses, int64_t count, int64_t bytes_each,
                                    int64_t element_bytes, const uint8_t* mask);

// In front of a loop that runs `trips` times: claims accesses of all its iterations, which are told
// at once if nothing is to be found by them. Returns 1 if they have been; the probes of the loop
// are then left out. Else nothing has happened. `words` holds, one behind the other, the numbers of
// each claim, of each range that the loop accesses besides, and of each limit that must be kept for
// the claims to be what the loop does: see claims.cc.
int32_t cokernel_checked_claim(cokernel::Core* core, const int64_t* words, int64_t claims,
                               int64_t others, int64_t limits, int64_t trips);
// What has just been accessed from the site may have been claimed before.
void cokernel_checked_claimed(cokernel::Core* core, int32_t site, int32_t kind);

// The begin and the end (0) of probes that together tell of one access: 1 of any, 2 of a copy to
// places that indices pick, which may write each of them once. What a DMA does is one access as it
// is.
void cokernel_checked_group(cokernel::Core* core, int32_t begins);

// Starts a DMA. The argument block is copied. At a moment of the schedule's choice `run` is called
// with the core and the copy, which is aligned to 64 bytes; whatever is probed in it is done by the
// DMA. Reads belong to its first half, after which `departure` is signalled, everything else to its
// second, after which `arrival` is. Either may be null.
void cokernel_checked_dma(cokernel::Core* core, int32_t site,
                          void (*run)(cokernel::Core* core, void* arguments), const void* arguments,
                          int64_t argument_bytes, cokernel::Semaphore* arrival,
                          int64_t arrival_amount, cokernel::Semaphore* departure,
                          int64_t departure_amount);

// As memmove.
void cokernel_checked_move(cokernel::Core* core, void* target, const void* source, int64_t bytes);

// Makes elements of the target undefined exactly where those of the source are (to be called after
// the accesses are probed), or, for a target that is added to, also where they are.
void cokernel_checked_copy_undefined(cokernel::Core* core, void* target, const void* source,
                                     int64_t element_bytes, int64_t rank, const int64_t* extents,
                                     const int64_t* target_strides, const int64_t* source_strides);
void cokernel_checked_merge_undefined(cokernel::Core* core, void* target, const void* source,
                                      int64_t element_bytes, int64_t rank, const int64_t* extents,
                                      const int64_t* target_strides, const int64_t* source_strides);

// The begin and the end of a scope that allocates memory (`is_semaphore` 0), semaphores that
// compiled code has just zeroed (1), or semaphores that may have been signalled before (2). Memory
// outside the private block of the core is shared by cores that enter the scope each at its own
// time, so for it nothing happens.
void cokernel_checked_allocate(cokernel::Core* core, int32_t site, void* address, int64_t bytes,
                               int64_t element_bytes, int32_t is_semaphore);
void cokernel_checked_release(cokernel::Core* core, int32_t site, void* address, int64_t bytes,
                              int32_t is_semaphore);

// Makes all of a strided block undefined.
void cokernel_checked_forget(cokernel::Core* core, void* address, int64_t element_bytes,
                             int64_t rank, const int64_t* extents, const int64_t* strides);

// Whether some element of a strided block is undefined. If so, `mask` gets a byte for each, in
// row-major order; it may be null. It belongs to the read that the core probed last, which a report
// names; the program calls it by the number `read`, and its first element is at `position` of what
// is read.
int32_t cokernel_checked_undefined(cokernel::Core* core, void* address, int64_t element_bytes,
                                   int64_t rank, const int64_t* extents, const int64_t* strides,
                                   uint8_t* mask, int32_t read, int64_t position);
// The core has read from the padding of tiles, where nobody writes; the program calls the read by
// the number `read`. `window`: of each dimension of the Ref the first element, then those behind
// the last ones, then the extents of the Ref.
void cokernel_checked_read_padding(cokernel::Core* core, int32_t site, int32_t read, int64_t rank,
                                   const int64_t* window);
// The same of one element, by its row-major number in the Ref's padded shape.
void cokernel_checked_pick_padding(cokernel::Core* core, int32_t site, int32_t read,
                                   int64_t element, int64_t rank, const int64_t* shape);
// Makes the elements undefined whose mask is not zero; the others stay as they are. The values may
// come from the reads that `sources` tell of (see `Source`); null if they are not known. `position`
// is that of the first element in the mask they are about.
void cokernel_checked_mark_undefined(cokernel::Core* core, void* address, int64_t element_bytes,
                                     int64_t rank, const int64_t* extents, const int64_t* strides,
                                     const uint8_t* mask, int64_t position, const int64_t* sources);
// Undefined values have come to matter, those of a mask with so many elements, or, if it is null,
// all of some reads. `use`: 0 a branch, 1 an index, 2 an output, 3 an amount, 4 a callback, 5 a
// loop. `is_again`: this use has told of others before.
void cokernel_checked_report_undefined(cokernel::Core* core, int32_t site, int32_t use,
                                       const uint8_t* mask, int64_t count, const int64_t* sources,
                                       int32_t is_again);
}
