// What the runtime's tests share: checks, and coroutines written by hand.
//
// A coroutine is a class derived from Coroutine whose body() is a switch over the line it stopped
// at, hidden in the macros below. Locals do not survive a suspension, so its state lives in fields.
// Its first field is the function that resumes it, as in a coroutine that LLVM has split.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "executable.h"
#include "failure.h"
#include "launch.h"

namespace cokernel::testing {

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (0)

#define CHECK_EQUAL(left, right)                                                         \
  do {                                                                                   \
    const long long left_value = static_cast<long long>(left);                           \
    const long long right_value = static_cast<long long>(right);                         \
    if (left_value != right_value) {                                                     \
      std::fprintf(stderr, "%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #left, \
                   left_value, #right, right_value);                                     \
      std::abort();                                                                      \
    }                                                                                    \
  } while (0)

struct Coroutine {
  void (*resume)(void*);
  Core* core;
  int line;
};

template <typename Body>
void resume(void* frame) {
  static_cast<Body*>(static_cast<Coroutine*>(frame))->body();
}

template <typename Body>
void* ramp(Core* core) {
  void* memory = cokernel_frame(core, sizeof(Body));
  Body* coroutine = new (memory) Body();
  coroutine->resume = resume<Body>;
  coroutine->core = core;
  coroutine->line = 0;
  coroutine->body();
  return memory;
}

#define COROUTINE_BEGIN \
  switch (this->line) { \
    case 0:

#define COROUTINE_END          \
  cokernel_finish(this->core); \
  }

// The line is stored first: once the call has published the core another thread may resume it.
#define SUSPEND_UNLESS(call) \
  do {                       \
    this->line = __LINE__;   \
    if (!(call)) return;     \
    [[fallthrough]];         \
    case __LINE__:;          \
  } while (0)

#define WAIT(semaphore, value) \
  SUSPEND_UNLESS(cokernel_semaphore_wait(this->core, (semaphore), (value), 1, __LINE__))
#define LOOK(semaphore, value) \
  SUSPEND_UNLESS(cokernel_semaphore_wait(this->core, (semaphore), (value), 0, __LINE__))
#define BARRIER() SUSPEND_UNLESS(cokernel_barrier_wait(this->core, __LINE__))
#define YIELD() SUSPEND_UNLESS((cokernel_yield(this->core, __LINE__), false))
#define SIGNAL(semaphore, value) \
  cokernel_semaphore_signal(this->core, (semaphore), (value), __LINE__)

inline Core* other_core(Core* core, int32_t number) { return &core->launch->cores[number]; }

inline Semaphore* semaphore_of(Core* core, int32_t number = 0) {
  return reinterpret_cast<Semaphore*>(core->memory) + number;
}

inline Semaphore* device_semaphore(Core* core, int32_t number = 0) {
  return reinterpret_cast<Semaphore*>(core->device) + number;
}

// Keeps the failures it is asked to report.
class RecordingHooks : public Hooks {
 public:
  std::string report(const Executable&, const Failure& given) override {
    std::lock_guard<std::mutex> lock(mutex_);
    failure = given;
    ++reports;
    return name_of(given.kind);
  }
  bool call(const Core&, int32_t callback, void**, void**, Failure& given) override {
    if (callback == 0) return true;
    given.exception_type = "ValueError";
    given.text = "raised";
    return false;
  }

  Failure failure;
  int reports = 0;

 private:
  std::mutex mutex_;
};

template <typename Body>
ProgramSpec coroutine_program(std::vector<int32_t> shape, int32_t semaphores = 1) {
  ProgramSpec program;
  program.name = "program";
  program.entry = reinterpret_cast<void*>(&ramp<Body>);
  program.is_coroutine = true;
  program.shape = std::move(shape);
  program.semaphore_bytes = semaphores * static_cast<int64_t>(sizeof(Semaphore));
  program.private_bytes = program.semaphore_bytes;
  return program;
}

inline ProgramSpec function_program(std::vector<int32_t> shape, void (*function)(Core*)) {
  ProgramSpec program;
  program.name = "function";
  program.entry = reinterpret_cast<void*>(function);
  program.shape = std::move(shape);
  return program;
}

struct Kernel {
  explicit Kernel(ExecutableSpec spec) {
    hooks = std::make_shared<RecordingHooks>();
    spec.name = "test";
    spec.hooks = hooks;
    executable = std::make_shared<Executable>(1, std::move(spec));
  }

  // The text of the error, empty if there was none.
  std::string launch(const std::vector<Buffer>& buffers = {}) {
    return launch_executable(executable, buffers.data(), static_cast<int32_t>(buffers.size()));
  }

  std::shared_ptr<RecordingHooks> hooks;
  std::shared_ptr<Executable> executable;
};

// Every way of running a kernel that the tests go through.
struct Mode {
  int32_t workers;
  Help help;
};

inline const std::vector<Mode>& modes() {
  static const std::vector<Mode> all = {
      {1, Help::kAuto}, {2, Help::kAuto}, {4, Help::kAuto}, {2, Help::kAlways}, {4, Help::kAlways}};
  return all;
}

inline ExecutableSpec spec_for(const Mode& mode) {
  ExecutableSpec spec;
  spec.num_workers = mode.workers;
  spec.help = mode.help;
  return spec;
}

}  // namespace cokernel::testing
