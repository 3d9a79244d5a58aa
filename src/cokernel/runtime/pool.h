// The helper threads, which all launches of the process share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "platform.h"

namespace cokernel {

struct Launch;
struct Worker;

class Pool {
 public:
  // Created at first use and never destroyed: its threads end with the process.
  static Pool& get();

  // Lets up to `helpers` more threads into the launch.
  void request(Launch* launch, int32_t helpers);
  // Lets no more threads in and waits until those inside have left.
  void close(Launch* launch);

 private:
  struct Helper {
    ThreadHandle thread;
    int avoided = -1;     // The processor it is kept off.
    bool inside = false;  // Of a launch.
  };

  Pool() = default;
  static void helper_main(void* pool);
  void serve();
  Launch* admit(Worker** worker);
  void start_threads(int32_t wanted);
  void make_way(int processor);

  std::mutex mutex_;
  std::condition_variable wanted_changed_;
  std::condition_variable helper_left_;
  std::vector<Launch*> launches_;     // Those that want helpers.
  std::atomic<int32_t> wanted_{0};    // The sum of their wishes.
  std::atomic<int32_t> spinning_{0};  // Helpers that look at `wanted_` and do not sleep.
  std::deque<Helper> helpers_;        // A new one does not move the others.
  int32_t sleeping_ = 0;
  int32_t threads_ = 0;
};

}  // namespace cokernel
