// Ends launches that outlast their time limit, and all launches on Ctrl-C.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace cokernel {

struct Launch;

class Watchdog {
 public:
  // Its thread is started by the first launch and never ends.
  static Watchdog& get();

  void add(Launch* launch);
  // After this the watchdog does not touch the launch.
  void remove(Launch* launch);

 private:
  Watchdog() = default;
  static void thread_main(void* watchdog);
  void watch();
  // Returns whether a launch has lasted long.
  bool look_at_launches(int64_t now, bool interrupted);

  std::mutex mutex_;
  std::condition_variable launch_added_;
  Launch* first_ = nullptr;
  bool started_ = false;
  bool asleep_ = false;
};

}  // namespace cokernel
