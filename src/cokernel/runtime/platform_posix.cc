// Linux and macOS.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>

#include "platform.h"

namespace cokernel {

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

int hardware_threads() {
  const unsigned threads = std::thread::hardware_concurrency();
  return threads == 0 ? 1 : static_cast<int>(threads);
}

namespace {

struct ThreadStart {
  const char* name;
  void (*body)(void*);
  void* argument;
};

void* thread_main(void* opaque) {
  ThreadStart* start = static_cast<ThreadStart*>(opaque);
  const ThreadStart copy = *start;
  delete start;
#if defined(__APPLE__)
  pthread_setname_np(copy.name);
#else
  pthread_setname_np(pthread_self(), copy.name);
#endif
  copy.body(copy.argument);
  return nullptr;
}

}  // namespace

void start_thread(const char* name, void (*body)(void*), void* argument) {
  // A new thread inherits the mask, so that there is no moment at which it could receive a signal.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  // Callbacks run Python and compiled code runs BLAS on these threads: the default on macOS is too
  // small for both.
  pthread_attr_setstacksize(&attributes, 8 << 20);
  ThreadStart* start = new ThreadStart{name, body, argument};
  pthread_t thread;
  const int error = pthread_create(&thread, &attributes, thread_main, start);
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    delete start;
    throw std::system_error(error, std::generic_category(), "Cokernel cannot start a thread");
  }
}

int current_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

ThreadHandle ThreadHandle::of_caller() {
  // It is a number on Linux and a pointer on macOS.
  return ThreadHandle((uintptr_t)pthread_self());
}

void ThreadHandle::keep_off(int processor) const {
#if defined(__linux__)
  cpu_set_t allowed;
  if (processor < 0 || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  if (!CPU_ISSET(processor, &allowed) || CPU_COUNT(&allowed) < 2) return;
  CPU_CLR(processor, &allowed);
  // The system may refuse; the thread then runs where it did before.
  (void)pthread_setaffinity_np(static_cast<pthread_t>(native_), sizeof(allowed), &allowed);
#else
  (void)processor;
#endif
}

void after_fork_in_child(void (*function)()) { pthread_atfork(nullptr, nullptr, function); }

char* allocate_block(std::size_t bytes) {
  void* block = nullptr;
  if (posix_memalign(&block, 128, bytes == 0 ? 128 : bytes) != 0) throw std::bad_alloc();
  return static_cast<char*>(block);
}

void free_block(char* block) { free(block); }

void prefer_large_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLargePage = uintptr_t{2} << 20;
  if (bytes < static_cast<int64_t>(2 * kLargePage)) return;
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(data) + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kLargePage * kLargePage;
  if (begin >= end) return;
  // The system may refuse; the memory is as good as before then. Callers of the handler look at
  // errno no more than this does.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

namespace {

std::atomic<int> interrupted{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler writes it");

struct sigaction previous_action;
bool watching = false;

void on_interrupt(int signal, siginfo_t* info, void* context) {
  interrupted.store(1);
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal, info, context);
  } else {
    previous_action.sa_handler(signal);
  }
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_interrupt;
}

}  // namespace

void watch_interrupts() {
  if (watching) return;
  struct sigaction current;
  if (sigaction(SIGINT, nullptr, &current) != 0) return;
  if (is_ours(current)) {
    // Someone who saved our handler while it was installed has put it back.
    watching = true;
    return;
  }
  const bool has_handler = (current.sa_flags & SA_SIGINFO) != 0 ||
                           (current.sa_handler != SIG_DFL && current.sa_handler != SIG_IGN);
  if (!has_handler) return;
  // The handler reads this, so it is written before the handler can run.
  previous_action = current;
  interrupted.store(0);
  struct sigaction ours = current;
  ours.sa_flags |= SA_SIGINFO;
  ours.sa_sigaction = on_interrupt;
  watching = sigaction(SIGINT, &ours, nullptr) == 0;
}

void unwatch_interrupts() {
  if (!watching) return;
  watching = false;
  struct sigaction current;
  // Someone may have installed another handler meanwhile; that one stays.
  if (sigaction(SIGINT, nullptr, &current) != 0 || !is_ours(current)) return;
  sigaction(SIGINT, &previous_action, nullptr);
}

bool take_interrupt() { return interrupted.exchange(0) != 0; }

}  // namespace cokernel
