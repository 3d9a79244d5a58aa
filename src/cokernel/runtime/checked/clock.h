// Vector clocks. An agent is a core or a DMA; what it does between two of its releases is one
// epoch, and a clock says for each agent which of its epochs came before.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace cokernel::checked {

// The epochs known of every agent, 0 where there is none. Copies share their memory until one of
// them is changed, so that a signal costs nothing but a pointer. For one thread.
class Clock {
 public:
  Clock() = default;
  Clock(const Clock& other) : node_(other.node_) {
    if (node_ != nullptr) ++node_->references;
  }
  Clock(Clock&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  Clock& operator=(Clock other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~Clock() { drop(); }

  uint32_t operator[](uint32_t agent) const {
    return node_ != nullptr && agent < node_->size ? node_->epochs[agent] : 0;
  }

  // Notes that this epoch of the agent, and so all before it, came before.
  void include(uint32_t agent, uint32_t epoch) {
    if ((*this)[agent] >= epoch) return;
    own(agent + 1);
    node_->epochs[agent] = epoch;
  }

  void join(const Clock& other) {
    if (other.node_ == nullptr || other.node_ == node_) return;
    if (node_ == nullptr) {
      *this = other;
      return;
    }
    const uint32_t size = other.node_->size;
    uint32_t agent = 0;
    while (agent < size && other.node_->epochs[agent] <= (*this)[agent]) ++agent;
    if (agent == size) return;
    own(size);
    for (; agent < size; ++agent) {
      if (other.node_->epochs[agent] > node_->epochs[agent]) {
        node_->epochs[agent] = other.node_->epochs[agent];
      }
    }
  }

 private:
  struct Node {
    uint32_t references;
    uint32_t size;
    uint32_t capacity;
    uint32_t epochs[1];
  };

  // Makes the memory this clock's own, and large enough for `size` agents.
  void own(uint32_t size) {
    const uint32_t old_size = node_ != nullptr ? node_->size : 0;
    if (size < old_size) size = old_size;
    if (node_ == nullptr || node_->references > 1 || node_->capacity < size) {
      const uint32_t capacity = size + size / 4 + 4;
      auto* node = static_cast<Node*>(std::malloc(sizeof(Node) + capacity * sizeof(uint32_t)));
      if (node == nullptr) throw std::bad_alloc();
      node->references = 1;
      node->capacity = capacity;
      if (old_size > 0) std::memcpy(node->epochs, node_->epochs, old_size * sizeof(uint32_t));
      drop();
      node_ = node;
    }
    std::memset(node_->epochs + old_size, 0, (size - old_size) * sizeof(uint32_t));
    node_->size = size;
  }

  void drop() {
    if (node_ != nullptr && --node_->references == 0) std::free(node_);
    node_ = nullptr;
  }

  Node* node_ = nullptr;
};

// What a release hands over: the clock of the agent at that moment.
struct Release {
  Clock clock;
  uint32_t agent = 0;
  uint32_t epoch = 0;
};

// A core, or a DMA while it takes effect.
struct Agent {
  uint32_t id = 0;
  uint32_t read_epoch = 1;   // Of what it reads,
  uint32_t write_epoch = 1;  // and of what it writes: later only for a DMA.
  uint32_t core = 0;         // The core itself, or the one that started the DMA.
  bool is_dma = false;
  int32_t dma_site = -1;
  Clock seen;

  // Whether that epoch of the other agent came before what this one does now.
  bool is_after(uint32_t other, uint32_t epoch) const {
    return other == id || seen[other] >= epoch;
  }
  void acquire(const Release& release) {
    if (seen[release.agent] >= release.epoch) return;
    seen.join(release.clock);
    seen.include(release.agent, release.epoch);
  }
  // Of all that a core has done so far.
  Release release() {
    Release result{seen, id, write_epoch};
    read_epoch = ++write_epoch;
    return result;
  }
};

}  // namespace cokernel::checked
