// Operands in the memory of the cores of a mesh, handed from one kernel to the next.
#include <cstring>
#include <thread>

#include "support.h"

namespace cokernel::testing {
namespace {

// Adds one to the first number of each core's instance in buffer 0, and to buffer 1 if there is
// one.
void count_up(Core* core) {
  auto* counts = static_cast<int64_t*>(core->buffers[0]);
  ++counts[2 * core->index];
  cokernel_finish(core);
}

void do_nothing(Core* core) { cokernel_finish(core); }

ExecutableSpec spec_with(std::vector<InstanceOperand> operands) {
  ExecutableSpec spec;
  spec.programs = {function_program({4}, count_up)};
  spec.instance_operands = std::move(operands);
  return spec;
}

const InstanceOperand kInput{0, false, 16, 4};
const InstanceOperand kOutput{1, true, 16, 4};

std::shared_ptr<InstanceStorage> storage_of(const int32_t* buffer) {
  uint32_t handle;
  std::memcpy(&handle, buffer, sizeof(handle));
  return InstanceTable::get().find(handle);
}

void an_output_is_read_by_a_later_kernel() {
  Kernel producer(spec_with({{0, true, 16, 4}}));
  Kernel consumer(spec_with({kInput}));
  int32_t buffer[4] = {};
  CHECK(producer.launch({{buffer, sizeof(buffer)}}).empty());
  CHECK(storage_of(buffer) != nullptr);
  for (int launch = 0; launch < 3; ++launch) {
    CHECK(consumer.launch({{buffer, sizeof(buffer)}}).empty());
  }
  const auto* counts = reinterpret_cast<const int64_t*>(storage_of(buffer)->data);
  for (int core = 0; core < 4; ++core) {
    CHECK_EQUAL(counts[2 * core], 4);
    CHECK_EQUAL(counts[2 * core + 1], 0);
  }
}

void every_launch_has_outputs_of_its_own() {
  Kernel producer(spec_with({{0, true, 16, 4}}));
  int32_t first[1] = {}, second[1] = {};
  CHECK(producer.launch({{first, sizeof(first)}}).empty());
  CHECK(producer.launch({{second, sizeof(second)}}).empty());
  CHECK(first[0] != second[0]);
  CHECK(storage_of(first) != storage_of(second));
}

void zero_is_fresh_memory() {
  Kernel consumer(spec_with({kInput}));
  int32_t buffer[1] = {0};
  const int64_t before = InstanceTable::get().handles();
  CHECK(consumer.launch({{buffer, sizeof(buffer)}}).empty());
  CHECK_EQUAL(buffer[0], 0);
  CHECK_EQUAL(InstanceTable::get().handles(), before);
}

void an_output_in_the_buffer_of_an_input_keeps_its_storage() {
  Kernel producer(spec_with({{0, true, 16, 4}}));
  Kernel both(spec_with({kInput, kOutput}));
  int32_t buffer[1] = {};
  CHECK(producer.launch({{buffer, sizeof(buffer)}}).empty());
  const int32_t handle = buffer[0];
  CHECK(both.launch({{buffer, sizeof(buffer)}, {buffer, sizeof(buffer)}}).empty());
  CHECK_EQUAL(buffer[0], handle);
  CHECK_EQUAL(*reinterpret_cast<const int64_t*>(storage_of(buffer)->data), 2);
  // Without a storage yet, the input's fresh one gets a handle.
  int32_t fresh[1] = {0};
  CHECK(both.launch({{fresh, sizeof(fresh)}, {fresh, sizeof(fresh)}}).empty());
  CHECK(fresh[0] != 0);
  CHECK_EQUAL(*reinterpret_cast<const int64_t*>(storage_of(fresh)->data), 1);
}

void what_does_not_fit_fails() {
  Kernel consumer(spec_with({kInput}));
  ExecutableSpec half = spec_with({{0, true, 8, 4}});
  half.programs = {function_program({4}, do_nothing)};
  Kernel small(half);
  int32_t buffer[1] = {};
  CHECK(small.launch({{buffer, sizeof(buffer)}}).empty());
  CHECK(consumer.launch({{buffer, sizeof(buffer)}}) == "Internal");
  CHECK(consumer.hooks->failure.text.find("32 bytes of per-core memory") != std::string::npos);
  int32_t unknown[1];
  std::memcpy(unknown, buffer, sizeof(buffer));
  unknown[0] += 1'000'000;
  CHECK(consumer.launch({{unknown, sizeof(unknown)}}) == "Internal");
  CHECK(consumer.hooks->failure.text.find("whose results are gone") != std::string::npos);
  CHECK(consumer.launch({{buffer, 2}}) == "Internal");
  CHECK(consumer.launch() == "Internal");
}

void the_oldest_storage_goes_first() {
  ExecutableSpec spec = spec_with({{0, true, int64_t{1} << 26, 2}});
  Kernel producer(spec);
  std::vector<int32_t> buffers(12);
  for (int i = 0; i < 12; ++i) {
    CHECK(producer.launch({{&buffers[i], sizeof(int32_t)}}).empty());
    // The first one stays in use.
    CHECK(storage_of(&buffers[0]) != nullptr);
    CHECK(InstanceTable::get().bytes() <= kInstanceBytes);
  }
  CHECK(storage_of(&buffers[1]) == nullptr);
  CHECK(storage_of(&buffers[11]) != nullptr);
}

// Core 0 waits for an instance semaphore nobody signals.
struct Waits : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    WAIT(static_cast<Semaphore*>(core->buffers[0]) + core->index, 1);
    COROUTINE_END;
  }
};

void signal_all(Core* core) {
  cokernel_semaphore_signal(core, static_cast<Semaphore*>(core->buffers[0]) + core->index, 1, 0);
  cokernel_finish(core);
}

void semaphores_survive_a_kernel_that_failed() {
  Kernel producer(spec_with({{0, true, 16, 4}}));
  ExecutableSpec waiting = spec_with({kInput});
  waiting.programs = {coroutine_program<Waits>({4})};
  Kernel waiter(waiting);
  ExecutableSpec signalling = spec_with({kInput});
  signalling.programs = {function_program({4}, signal_all)};
  Kernel signaller(signalling);
  ExecutableSpec fresh = spec_with({{0, true, 16, 4}});
  fresh.programs = {function_program({4}, do_nothing)};
  Kernel maker(fresh);
  int32_t buffer[1] = {};
  CHECK(maker.launch({{buffer, sizeof(buffer)}}).empty());
  CHECK(waiter.launch({{buffer, sizeof(buffer)}}) == "Deadlock");
  CHECK(waiter.hooks->failure.cores[2].place.owner == MemoryOwner::kBuffer);
  CHECK_EQUAL(waiter.hooks->failure.cores[2].place.offset, 32);
  CHECK(signaller.launch({{buffer, sizeof(buffer)}}).empty());
  CHECK(waiter.launch({{buffer, sizeof(buffer)}}).empty());
}

void launches_that_share_semaphores_take_turns() {
  ExecutableSpec fresh = spec_with({{0, true, 16, 4}});
  fresh.programs = {function_program({4}, do_nothing)};
  Kernel maker(fresh);
  int32_t buffer[1] = {};
  CHECK(maker.launch({{buffer, sizeof(buffer)}}).empty());
  ExecutableSpec signalling = spec_with({kInput});
  signalling.programs = {function_program({4}, signal_all)};
  Kernel signaller(signalling);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int launch = 0; launch < 100; ++launch) {
        CHECK(signaller.launch({{buffer, sizeof(buffer)}}).empty());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto* semaphores = reinterpret_cast<const Semaphore*>(storage_of(buffer)->data);
  for (int core = 0; core < 4; ++core) CHECK_EQUAL(semaphores[core].count.load(), 400);
}

}  // namespace
}  // namespace cokernel::testing

int main() {
  using namespace cokernel::testing;
  an_output_is_read_by_a_later_kernel();
  every_launch_has_outputs_of_its_own();
  zero_is_fresh_memory();
  an_output_in_the_buffer_of_an_input_keeps_its_storage();
  what_does_not_fit_fails();
  the_oldest_storage_goes_first();
  semaphores_survive_a_kernel_that_failed();
  launches_that_share_semaphores_take_turns();
}
