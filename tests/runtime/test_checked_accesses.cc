// Shadow memory of checked mode: pages in parts, in cells and whole again, and its collection.
#include <cstdint>
#include <utility>
#include <vector>

#include "checked/accesses.h"
#include "checked/clock.h"
#include "checked/shadow.h"
#include "support.h"

namespace cokernel::testing {
namespace {

using checked::Access;
using checked::Accesses;
using checked::AccessKind;
using checked::AccessRecord;
using checked::Agent;
using checked::Region;
using checked::Shadow;

struct Recorded : checked::Conflicts {
  void conflict(uint32_t earlier, uint32_t later, uintptr_t begin, uintptr_t end,
                int64_t) override {
    all.push_back({earlier, later, begin, end});
  }
  struct Conflict {
    uint32_t earlier, later;
    uintptr_t begin, end;
  };
  std::vector<Conflict> all;
};

struct World {
  Accesses accesses;
  Recorded conflicts;
  Shadow shadow{accesses, conflicts, true};
  std::vector<Agent> agents{4};
  Region* region;
  static constexpr uintptr_t kBase = 0x10000;

  explicit World(uintptr_t bytes = 8192, uintptr_t base = kBase) {
    for (uint32_t i = 0; i < agents.size(); ++i) agents[i].id = agents[i].core = i;
    shadow.set_ranges({{base, base + bytes}});
    region = shadow.find(base);
  }
  uint32_t number(uint32_t agent, AccessKind kind) {
    AccessRecord record;
    record.agent = record.core = agent;
    record.epoch = agents[agent].write_epoch;
    record.kind = kind;
    return accesses.add(record);
  }
  uint32_t access(uint32_t agent, AccessKind kind, uintptr_t begin, uintptr_t bytes) {
    const uint32_t record = number(agent, kind);
    again(record, begin, bytes);
    return record;
  }
  void again(uint32_t record, uintptr_t begin, uintptr_t bytes) {
    const AccessRecord& access = accesses[record];
    shadow.access(*region, {access.kind, record, &agents[access.agent], 4}, region->begin + begin,
                  region->begin + begin + bytes);
  }
};

void a_clock_knows_what_it_has_joined() {
  checked::Clock one, other;
  one.include(3, 5);
  other.include(1, 2);
  checked::Clock copy = one;
  one.join(other);
  CHECK_EQUAL(one[3], 5);
  CHECK_EQUAL(one[1], 2);
  CHECK_EQUAL(one[100], 0);
  // A copy made before is not changed.
  CHECK_EQUAL(copy[1], 0);
  copy = one;
  copy.include(70, 1);
  CHECK_EQUAL(one[70], 0);
  CHECK_EQUAL(copy[3], 5);
  copy.join(copy);
  one = checked::Clock();
  CHECK_EQUAL(one[3], 0);
  CHECK_EQUAL(copy[3], 5);
}

void a_walk_leaves_a_page_whole() {
  World world;
  world.access(0, AccessKind::kWrite, 0, 2048);
  const uint32_t read = world.number(0, AccessKind::kRead);
  for (uintptr_t at = 0; at < 2048; at += 64) world.again(read, at, 64);
  // No page needed cells.
  CHECK(world.region->pages[0].cells == nullptr);
  CHECK_EQUAL(world.region->pages[0].split, 0);
  CHECK_EQUAL(world.region->pages[1].read, read);
  // In the middle of a walk both parts are told apart.
  const uint32_t write = world.number(0, AccessKind::kWrite);
  world.again(write, 0, 512);
  CHECK_EQUAL(world.region->pages[0].split, 512);
  world.access(1, AccessKind::kRead, 508, 8);
  CHECK_EQUAL(world.conflicts.all.size(), 2);
  CHECK_EQUAL(world.conflicts.all[0].earlier, write);
  CHECK_EQUAL(world.conflicts.all[0].end - world.conflicts.all[0].begin, 4);
  CHECK(world.conflicts.all[1].earlier != write);
}

void single_bytes_are_told_apart_and_a_tile_makes_a_page_whole_again() {
  World world;
  for (uintptr_t at = 0; at < 1024; at += 2) world.access(0, AccessKind::kWrite, at, 1);
  for (uintptr_t at = 1; at < 1024; at += 2) world.access(1, AccessKind::kWrite, at, 1);
  CHECK(world.conflicts.all.empty());
  CHECK(world.region->pages[0].cells != nullptr);
  CHECK_EQUAL(world.region->pages[0].cells->shift, 0);
  world.access(2, AccessKind::kWrite, 0, 1024);
  CHECK_EQUAL(world.conflicts.all.size(), 1024);
  CHECK(world.region->pages[0].cells == nullptr);
}

void regions_may_begin_and_end_within_a_page() {
  World world(1500, World::kBase + 100);
  world.access(0, AccessKind::kWrite, 0, 1500);
  world.access(1, AccessKind::kRead, 0, 1500);
  CHECK_EQUAL(world.conflicts.all.size(), 2);
  CHECK_EQUAL(world.conflicts.all[0].begin, World::kBase + 100);
  CHECK_EQUAL(world.conflicts.all[1].end, World::kBase + 1600);
  const uint32_t read = world.number(1, AccessKind::kRead);
  for (uintptr_t at = 0; at < 1500; at += 4) world.again(read, at, 4);
  // Beyond the end there is nothing.
  world.access(2, AccessKind::kRead, 1400, 1000);
  CHECK(world.shadow.find(World::kBase + 1600) == nullptr);
  CHECK(world.shadow.find(World::kBase + 99) == nullptr);
}

void what_came_before_is_no_conflict() {
  World world;
  world.access(0, AccessKind::kWrite, 0, 64);
  const checked::Release release = world.agents[0].release();
  world.access(0, AccessKind::kWrite, 64, 64);
  world.agents[1].acquire(release);
  world.access(1, AccessKind::kWrite, 0, 64);
  CHECK(world.conflicts.all.empty());
  world.access(1, AccessKind::kRead, 64, 4);
  CHECK_EQUAL(world.conflicts.all.size(), 1);
}

void undefined_bytes_are_followed_through_pages_of_all_forms() {
  World world;
  Region& region = *world.region;
  const uintptr_t base = region.begin;
  world.shadow.make_undefined(region, base, base + 4096);
  CHECK(world.shadow.any_undefined(region, base, base + 4));
  CHECK(!world.shadow.any_undefined(region, base + 4096, base + 8192));
  const uint32_t write = world.number(0, AccessKind::kWrite);
  for (uintptr_t at = 0; at < 512; at += 16) world.again(write, at, 16);
  CHECK(!world.shadow.any_undefined(region, base, base + 512));
  CHECK(world.shadow.any_undefined(region, base + 508, base + 516));
  world.again(write, 601, 1);
  CHECK(!world.shadow.any_undefined(region, base + 601, base + 602));
  uintptr_t undefined = 0;
  world.shadow.for_each_undefined(
      region, base, base + 8192,
      [&](uintptr_t from, uintptr_t to, uint32_t, uint32_t) { undefined += to - from; });
  CHECK_EQUAL(undefined, 4096 - 512 - 1);
  // An update reads as well, so that nothing becomes defined by it.
  world.access(0, AccessKind::kUpdate, 600, 8);
  CHECK(world.shadow.any_undefined(region, base + 600, base + 601));
}

// So many epochs that the records of most are forgotten; what is still remembered must not change.
void records_that_nothing_refers_to_are_forgotten() {
  World world;
  const uint32_t early = world.access(0, AccessKind::kRead, 4096, 4);
  world.access(1, AccessKind::kRead, 4096, 8);
  CHECK(early != 0);
  for (int i = 0; i < 3'000'000; ++i) {
    world.agents[2].release();
    world.access(2, i % 2 == 0 ? AccessKind::kWrite : AccessKind::kRead, i % 64 * 16, 16);
  }
  CHECK(world.shadow.collections() > 0);
  CHECK(world.accesses.size() < 2'000'000);
  CHECK(world.conflicts.all.empty());
  world.access(3, AccessKind::kWrite, 4096, 4);
  CHECK_EQUAL(world.conflicts.all.size(), 2);
  CHECK_EQUAL(world.accesses[world.conflicts.all[0].earlier].core +
                  world.accesses[world.conflicts.all[1].earlier].core,
              1);
}

}  // namespace
}  // namespace cokernel::testing

int main() {
  using namespace cokernel::testing;
  a_clock_knows_what_it_has_joined();
  a_walk_leaves_a_page_whole();
  single_bytes_are_told_apart_and_a_tile_makes_a_page_whole_again();
  regions_may_begin_and_end_within_a_page();
  what_came_before_is_no_conflict();
  undefined_bytes_are_followed_through_pages_of_all_forms();
  records_that_nothing_refers_to_are_forgotten();
}
