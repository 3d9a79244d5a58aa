// A checked launch: the cores and the copies in flight, who goes on, and what has been found.
//
// Everything runs on the thread that launches, so nothing here is locked. state.cc decides who goes
// on, synchronisation.cc is semaphores, barriers and DMAs, memory.cc accesses to memory,
// undefined.cc what is undefined, and ends.cc what is looked at when a scope or the launch ends.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi.h"
#include "checked/accesses.h"
#include "checked/chooser.h"
#include "checked/claims.h"
#include "checked/clock.h"
#include "checked/findings.h"
#include "checked/options.h"
#include "checked/origins.h"
#include "checked/semaphores.h"
#include "checked/shadow.h"

namespace cokernel::checked {

// The same in every process, unlike the address.
uint64_t hash_of(const Place& place);

// A copy that has been started and has not taken effect.
struct Dma {
  int64_t number = 0;   // In the order of start,
  int64_t of_core = 0;  // and among those of its core.
  Agent agent;
  int32_t site = -1;
  void (*run)(Core*, void*) = nullptr;
  std::vector<char> block;
  void* arguments = nullptr;
  SemaphoreState* arrival = nullptr;
  int64_t arrival_amount = 0;
  SemaphoreState* departure = nullptr;
  int64_t departure_amount = 0;
};

// What a core does next.
inline constexpr const char* kStart = "start";
inline constexpr const char* kStep = "step";
inline constexpr const char* kWait = "wait";
inline constexpr const char* kPoll = "poll";
inline constexpr const char* kBarrier = "barrier";

class State final : public Conflicts {
 public:
  State(Launch& launch, const CheckedOptions& options, const Schedule& schedule);
  ~State() override;

  // Runs the cores to the end and looks at what they leave.
  void run();

  CheckedRecord record;

  // --- What compiled code calls; see checked_abi.h. ---

  bool step(Core* core, int32_t site, const void* object);
  void yield(Core* core, int32_t site, const void* object);
  bool wait(Core* core, Semaphore* semaphore, int64_t value, bool decrement, bool is_dma,
            int32_t site);
  bool barrier(Core* core, int32_t site);
  void signal(Core* core, Semaphore* semaphore, int64_t increment, int32_t site);
  int64_t read(Core* core, Semaphore* semaphore, int32_t site);
  void start_dma(Core* core, int32_t site, void (*run)(Core*, void*), const void* arguments,
                 int64_t argument_bytes, Semaphore* arrival, int64_t arrival_amount,
                 Semaphore* departure, int64_t departure_amount);

  // Returns whether something there was undefined before.
  bool access(Core* core, int32_t site, AccessKind kind, uintptr_t begin, int64_t bytes,
              int64_t element_bytes);
  // What is probed from here on is another access than what was probed before, but for what a DMA
  // or a group does.
  void begin_event() {
    if (dma_ == nullptr && !is_grouped_) ++event_;
  }
  void begin_group(bool is_scatter) {
    begin_event();
    is_grouped_ = true;
    is_scatter_ = is_scatter && options_.races;
    scattered_.clear();
  }
  void end_group() { is_grouped_ = is_scatter_ = false; }
  // See claims.cc.
  bool claim(Core* core, const int64_t* words, int64_t claims, int64_t others, int64_t limits,
             int64_t trips);
  void claimed(Core* core, int32_t site, AccessKind kind) {
    last_probe_ = record_number(cache_of(site), agent_of(core), site, kind);
  }
  void copy_undefined(Core* core, void* target, const void* source, int64_t element_bytes,
                      int64_t rank, const int64_t* extents, const int64_t* target_strides,
                      const int64_t* source_strides);
  void move(char* target, const char* source, int64_t bytes);
  void allocate(Core* core, int32_t site, void* address, int64_t bytes, int64_t element_bytes,
                int32_t is_semaphore);
  void release(Core* core, int32_t site, void* address, int64_t bytes, int32_t is_semaphore);
  void forget(void* address, int64_t element_bytes, int64_t rank, const int64_t* extents,
              const int64_t* strides);
  bool undefined(Core* core, void* address, int64_t element_bytes, int64_t rank,
                 const int64_t* extents, const int64_t* strides, uint8_t* mask, int32_t number,
                 int64_t position);
  void read_padding(Core* core, int32_t site, int32_t number, int64_t rank, const int64_t* window);
  void pick_padding(Core* core, int32_t site, int32_t number, int64_t element, int64_t rank,
                    const int64_t* shape);
  void mark_undefined(Core* core, void* address, int64_t element_bytes, int64_t rank,
                      const int64_t* extents, const int64_t* strides, const uint8_t* mask,
                      int64_t position, const int64_t* sources);
  void report_undefined(Core* core, int32_t site, int32_t use, const uint8_t* mask, int64_t count,
                        const int64_t* sources, bool is_again);

  void conflict(uint32_t earlier, uint32_t later, uintptr_t begin, uintptr_t end,
                int64_t element_bytes) override;

 private:
  // What a core waits for, or does next.
  struct Wait {
    SemaphoreState* semaphore = nullptr;
    int64_t value = 0;
    bool decrement = false;
    bool is_dma = false;
    int32_t site = -1;
  };
  // What a core that polls has looked at: a semaphore, or memory.
  struct Look {
    int32_t site = -1;
    const SemaphoreState* semaphore = nullptr;
    uintptr_t begin = 0;
    uintptr_t end = 0;
    int64_t element_bytes = 1;
  };
  struct CoreInfo {
    Agent agent;
    Wait wait;
    const char* operation = kStart;  // What it does next,
    int64_t object = -1;             // and what that touches.
    // Polling: how often since anything changed, and what its memory was like when it did.
    int64_t polls = 0;
    int64_t polls_at_change = 0;
    uint64_t digest = 0;
    int64_t digest_at = 0;  // After how many polls.
    bool is_stuck = false;
    std::vector<Look> looks;  // Since then, or since anything changed.
    int64_t dmas = 0;         // Started so far.
    std::vector<uint32_t> dma_agents;
    // By the number of the read in its program.
    std::unordered_map<int32_t, UndefinedRead> undefined_reads;
    uint64_t last_undefined_read = 0;
    // Where it has used an undefined value last, and the access that was probed before.
    struct {
      int32_t site = -1;
      uint64_t event = 0;
    } last_use;
  };
  struct Element {
    Clock clock;
    uint64_t behaviour = 0;
  };
  // How often a core has met undefined values at a site.
  struct Meetings {
    int64_t count = 0;
    uint64_t event = 0;  // The last one.
  };
  // The records of the accesses from one site.
  struct SiteCache {
    uint32_t agent = ~uint32_t{0};
    uint32_t epoch = 0;
    uint64_t collections = 0;
    uint32_t numbers[8] = {};
    Region* region = nullptr;
    Transition last;
  };

  // state.cc
  CoreInfo& info(const Core* core) { return cores_[number_of(core)]; }
  int32_t number_of(const Core* core) const;
  const Agent& agent_of(const Core* core) {
    return dma_ != nullptr ? dma_->agent : info(core).agent;
  }
  void prepare_memory();
  void fill(char* begin, int64_t bytes);
  // Outputs that have not been filled: what of a range nobody has written is filled now.
  void fill_unwritten(uintptr_t begin, uintptr_t end);
  bool may_be_unfilled(uintptr_t begin, uintptr_t end) const {
    return begin < unfilled_end_ && end > unfilled_begin_;
  }
  bool is_stopped() const;
  // Lets DMAs take effect until it is the turn of a core, which it returns; -1 if there is none.
  int32_t decide(int32_t current, bool has_polled);
  bool is_stutter(int32_t core) const;
  void record_decision(const Choice& choice, const Situation& situation);
  void record_effects();
  std::vector<int64_t> objects_of(int32_t core) const;
  int64_t object_at(const void* address) const;
  bool go_on_or_queue(Core* core, const char* operation);
  void run_core(int32_t number);
  void take_effect(std::size_t position);
  void changed() { ++changes_; }
  // What others see has been written.
  void changed_at(uintptr_t begin, uintptr_t end) {
    changed();
    if (schedule_.record) step_written_.add(begin, end);
  }
  bool only_polling() const;
  uint64_t digest_of(const Core* core) const;
  void fail_livelocked(int32_t core);
  void finish_dmas();

  // synchronisation.cc
  void add_signal(SemaphoreState& semaphore, Signal signal, int64_t agent_key);
  void wake(SemaphoreState& semaphore);
  void complete_wait(Core* core);
  void note_operation(SemaphoreState& semaphore, int64_t agent_key, int32_t operation);
  uint32_t dma_agent_for(CoreInfo& info);

  // claims.cc
  bool is_quiet(const Claim& claim, const Access& access);
  void take(const Claim& claim, const Access& access);
  void note_written(const Claim& claim);

  // memory.cc
  // One core runs at a time, and seldom changes: a site keeps only the records of the last agent.
  uint32_t record_number(SiteCache& cache, const Agent& agent, int32_t site, AccessKind kind) {
    const uint32_t number = cache.numbers[static_cast<int>(kind)];
    const bool is_known = number != 0 && cache.agent == agent.id &&
                          cache.epoch == agent.write_epoch &&
                          cache.collections == shadow_.collections();
    return is_known ? number : add_record(cache, agent, site, kind);
  }
  uint32_t add_record(SiteCache& cache, const Agent& agent, int32_t site, AccessKind kind);
  SiteCache& cache_of(int32_t site) {
    const auto index = static_cast<std::size_t>(site + 1);
    if (index >= sites_.size()) sites_.resize(2 * index + 1);
    return sites_[index];
  }
  void acquire_polled(Core* core, Region& region, uintptr_t begin, uintptr_t end);
  void watch(uintptr_t begin, uintptr_t end);
  bool is_watched(uintptr_t begin, uintptr_t end) const;
  void acquire_from(Core* core, uint32_t number);
  void release_to_element(Core* core, uintptr_t begin);
  void note_look(Core* core, const Look& look);
  Allocation allocation_at(uintptr_t address) const;
  // Numbers the accesses of a core at a site that meet undefined values: neighbours, and with them
  // a loop, are one piece. The access is the present one.
  int64_t meeting(int32_t core, int32_t site);
  static int64_t first_meeting(int32_t core) { return (int64_t{core} + 1) << 40; }
  // A copy has written there: it may have done so before, to another part of what it moves.
  void note_scattered(uint32_t number, uintptr_t begin, uintptr_t end, int64_t element_bytes);
  uint64_t origin_key(uint32_t number) const;
  static uint64_t origin_key(const AccessRecord& access);

  // undefined.cc
  template <typename Visit>
  void follow(uintptr_t begin, uintptr_t end, uint32_t write, uint32_t read, Visit visit);
  // The access probed last, as one that reads what nobody has written.
  int32_t present_reading(const Core* core, int64_t element_bytes, uintptr_t address);
  Trail as_read(Core* core, const Trail& trail, uintptr_t begin, int64_t first,
                int64_t element_bytes);
  // The read of this number, which is the present access.
  UndefinedRead& begin_read(Core* core, int32_t number, bool is_new = false);
  void add_origin(uint64_t writer, const Trail& trail);
  void set_undefined_read(Finding& finding, const Origin& origin, int32_t core, int32_t site) const;
  void look_at_outputs();
  void look_at_output(int32_t buffer, Region& region, uintptr_t begin, uintptr_t end,
                      int64_t element_bytes);
  void add_sum_of_undefined(uint32_t writer, uintptr_t begin, uintptr_t end, int64_t element_bytes);

  // ends.cc
  // `ends`: the launch, whatever the options say.
  void add(Finding finding, bool ends = false);
  Party party_of_core(int32_t core, int32_t site, const char* access) const;
  Party party_of(uint32_t number) const;
  Party party_of(const AccessRecord& access) const;
  MemoryRange range_of(uintptr_t begin, uintptr_t end, int64_t element_bytes) const;
  void set_semaphore(Finding& finding, const SemaphoreState& semaphore) const;
  void report_left(SemaphoreState& semaphore);
  void report_misfit(SemaphoreState& semaphore);
  void release_semaphores(Core* core, int32_t site, char* begin, int64_t bytes,
                          int32_t is_semaphore);
  void look_at_end();
  void report_blocked_waits();
  void note_use_that_failed();
  void add_wait_too_large(int32_t core, const Wait& wait, const Signal& signal,
                          std::vector<std::pair<const char*, int64_t>> numbers);
  std::vector<Starved::Untaken> untaken_beside(const SemaphoreState& waited) const;
  // From where else came what a semaphore counts: each line of each core once.
  std::vector<Party> others_counted(const SemaphoreState& semaphore, int32_t core,
                                    int32_t site) const;
  Party party_of_signal(int32_t core, int32_t site, bool is_dma) const;

  // causes.cc
  // Who has read: the core, the site, and whether it is a DMA that was started there.
  using Reader = std::tuple<int32_t, int32_t, bool>;
  static Reader reader_of(int32_t core, int32_t site, bool is_dma, int32_t dma_site);
  // A write that races with a read which came before it, by what `origin_key` calls it.
  struct LateWrite {
    uint64_t writer = 0;
    Parts<uintptr_t> parts;
  };
  // A finding that must wait for the end of the launch, and all that was read.
  struct EarlyRead {
    Finding finding;
    Reader reader;
    Parts<uintptr_t> parts;
  };
  // What was touched in a scope that has ended.
  struct Ended {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    AccessRecord access;
  };
  void add_race(const AccessRecord& before, const AccessRecord& after, uintptr_t begin,
                uintptr_t end, int64_t element_bytes);
  void remember_scope(Region& region, uintptr_t begin, uintptr_t end);
  void race_in_ended_scope(const AccessRecord& copy, uintptr_t begin, uintptr_t end,
                           int64_t element_bytes);
  void add_undefined_read(Finding finding, const Parts<uintptr_t>& parts);
  // What is left of what was read once that is left out which some writes bring.
  Parts<uintptr_t> without_late_writes(const Reader& reader, const Parts<uintptr_t>& parts,
                                       const std::set<uint64_t>& writers) const;
  std::set<uint64_t> writers_of_values() const;
  void settle();

  Launch& launch_;
  const CheckedOptions& options_;
  const Schedule schedule_;
  std::vector<CoreInfo> cores_;
  std::vector<uint32_t> dma_last_epochs_;  // By agent - cores; ~0 while in flight.
  ReadySet ready_;
  ReadySet candidates_;  // Those of them that a list of choices is about.
  Chooser chooser_;
  std::vector<int64_t> in_flight_numbers_;
  std::vector<std::unique_ptr<Dma>> in_flight_;
  std::vector<std::unique_ptr<Dma>> spare_dmas_;
  int64_t dmas_started_ = 0;
  int32_t next_core_ = -1;
  int32_t last_core_ = -1;
  bool last_polled_ = false;
  int64_t changes_ = 0;
  SemaphoreTable semaphores_;
  std::unordered_map<const Barrier*, Clock> barrier_clocks_;
  std::unordered_map<const Barrier*, std::vector<int32_t>> barrier_cores_;
  Dma* dma_ = nullptr;               // The one that takes effect at the moment,
  bool has_read_undefined_ = false;  // and whether it has read anything undefined.

  Accesses accesses_;
  Shadow shadow_;
  std::vector<SiteCache> sites_;
  std::map<uintptr_t, Allocation> allocations_;      // The scopes there are, by where they begin.
  std::unordered_map<uintptr_t, Element> elements_;  // Those that fetch_and_add has touched.
  uint64_t element_behaviour_ = 0;
  std::vector<uint32_t> polled_;
  // Where cores have polled, as pairs of begin and end, and all of it together.
  std::vector<std::pair<uintptr_t, uintptr_t>> watched_;
  uintptr_t watched_begin_ = ~uintptr_t{0};
  uintptr_t watched_end_ = 0;
  // The accesses of copies that are known to outlive their scope: agent, epoch, site and kind.
  std::set<std::tuple<uint32_t, uint32_t, int32_t, AccessKind>> in_flight_at_end_;
  // The accesses of copies that nobody has waited for, or not in time: agent and epoch.
  std::set<std::pair<uint32_t, uint32_t>> unwaited_;
  std::vector<Ended> ended_;  // While copies are in flight.
  std::map<Reader, std::vector<LateWrite>> late_writes_;
  std::vector<EarlyRead> early_reads_;
  std::map<std::tuple<Reader, int32_t, int32_t, int32_t, int32_t, const char*, uintptr_t>,
           std::size_t>
      early_read_numbers_;
  // Since the last decision: the memory that was polled, and what others see that was written.
  Parts<uintptr_t> step_polled_;
  Parts<uintptr_t> step_written_;
  uint32_t last_probe_ = 0;  // The record of the access probed last.
  uint64_t event_ = 0;       // The number of the access, or the DMA, that is probed.
  // Outputs that are filled only where nobody writes them, and all of it together.
  std::vector<std::pair<uintptr_t, uintptr_t>> unfilled_;
  uintptr_t unfilled_begin_ = ~uintptr_t{0};
  uintptr_t unfilled_end_ = 0;
  // The operands and results too large for the caches, as pairs of begin and end.
  std::vector<std::pair<const char*, const char*>> large_buffers_;
  std::vector<Claim> claims_;  // Those of the loop at hand.
  const bool takes_claims_ = claims_are_taken();
  bool is_grouped_ = false;                   // What is probed is of one access.
  bool is_scatter_ = false;                   // It is a copy to places that indices pick:
  std::map<uintptr_t, uintptr_t> scattered_;  // where it has written.
  std::map<std::pair<int32_t, int32_t>, Meetings> meetings_;  // Reads, by core and site,
  std::map<std::pair<int32_t, int32_t>, Meetings> updates_;   // and sums and updates.
  // Of what all executions of a write have stored, by what `origin_key` calls it.
  std::unordered_map<uint64_t, Origin> origins_;
  Origins trails_;             // Of each element that is undefined.
  std::vector<Trail> copied_;  // Those of the copy at hand.
};

}  // namespace cokernel::checked
