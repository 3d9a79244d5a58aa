// What depends on the operating system. Implemented in one file for each family of systems.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cokernel {

// Nanoseconds of a clock that never goes back.
int64_t now_ns();

int hardware_threads();

// Starts a detached thread that receives no signals, so that they keep going to the threads of the
// program. Throws std::system_error if the system refuses.
void start_thread(const char* name, void (*body)(void*), void* argument);

// The processor that the calling thread runs on, or -1 where the system does not tell.
int current_processor();

// A thread that may be kept off a processor.
class ThreadHandle {
 public:
  static ThreadHandle of_caller();
  // Lets the thread run on the processors of the calling thread except one. Does nothing if the
  // calling thread has no other, or where threads cannot be bound.
  void keep_off(int processor) const;

 private:
  explicit ThreadHandle(uintptr_t native) : native_(native) {}
  uintptr_t native_;
};

// Registers what a child process must do after a fork: the threads of the parent do not exist
// there.
void after_fork_in_child(void (*function)());

// Memory aligned to 128 bytes whose pages are not touched. Throws std::bad_alloc.
char* allocate_block(std::size_t bytes);
void free_block(char* block);

// Asks the system to back memory that is about to be filled with large pages, where it offers them
// on request. Filling 64 MiB of new memory in pages of 4 KiB takes longer than copying it. Only a
// hint, and only for memory of several megabytes.
void prefer_large_pages(void* data, int64_t bytes);

// Ctrl-C. While it is watched, a SIGINT sets a flag and then runs the handler that was there
// before. Watching starts only if a handler is installed: where the signal is ignored or ends the
// process it keeps doing so. Called by one thread at a time.
void watch_interrupts();
void unwatch_interrupts();
// Returns whether a SIGINT came since the last call.
bool take_interrupt();

}  // namespace cokernel
