// A GPU on the CPU, for tests: every CUDA thread is a fiber, blocks share nothing but global memory, and whatever the
// hardware leaves open is decided at random from a seed: which warp runs next, when a copy or a multiplication that runs
// on its own takes place. A kernel that waits for what never comes is reported, not endured.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static
#define __CUDA_ARCH__ 900

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;

namespace emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct Gate {  // a barrier: who is here, and how often it has opened
  unsigned arrived = 0, opened = 0;
};
struct Warp : Gate {
  std::uint64_t slots[2][32];
};

struct Block;
struct Fiber {
  ucontext_t context;
  Index thread;
  Block* block = nullptr;
  bool done = false;
  const std::function<bool()>* ready = nullptr;  // what it waits for
  const char* what = "";
  int copies = 0;  // own bulk copies that have not taken place
  std::vector<std::pair<unsigned, std::function<void()>>> products;  // own multiplications: their group, what to do
  unsigned groups = 0;                                               // of multiplications, committed
  std::vector<std::pair<unsigned, std::function<void()>>> small_copies;  // own copies of 16 bytes, likewise
  unsigned small_groups = 0;
  unsigned cluster_turn = 0;                                         // of the cluster's barrier, when it arrived
};

struct Block {
  Index index;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* shared;
  std::unique_ptr<char[]> stacks;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Gate gates[17];  // bar.sync 0 to 15, and one spare
  unsigned alive;
  std::shared_ptr<struct Cluster> cluster;
};

struct Cluster : Gate {
  std::vector<Block*> blocks;
  unsigned stores = 0;  // on their way from block to block
};

struct Machine {
  std::mt19937 random;
  Index grid, block;
  unsigned cluster = 1;  // blocks in one
  bool lazy;  // multiplications take place when they are waited for, else at once
  ucontext_t scheduler;
  std::function<void()> kernel;
  std::vector<std::function<void()>> pending;  // copies on their way
  std::string fault;

  bool chance(unsigned one_in) { return random() % one_in == 0; }
  void do_one_pending() {
    const size_t i = random() % pending.size();
    const auto action = pending[i];
    pending.erase(pending.begin() + i);
    action();
  }
};

inline Machine machine;
inline Fiber* current = nullptr;

inline void pause(const char* what, const std::function<bool()>& ready) {
  current->ready = &ready;
  current->what = what;
  swapcontext(&current->context, &machine.scheduler);
}
template <class Ready>
void wait(const char* what, const Ready& ready) {
  if (ready() && !machine.chance(4)) return;
  pause(what, std::function<bool()>(ready));
}
[[noreturn]] inline void fail(const std::string& why) {
  machine.fault = why;
  pause("nothing", [] { return false; });
  std::abort();
}

inline void pass_gate(Gate& gate, unsigned threads, const char* what) {
  const unsigned opened = gate.opened;
  if (++gate.arrived == threads) {
    gate.arrived = 0;
    ++gate.opened;
    return;
  }
  pause(what, [&gate, opened] { return gate.opened != opened; });
}

inline unsigned lane() { return current->thread.x % 32; }
template <class T>
T from_lane(T value, unsigned source) {
  static_assert(sizeof(T) <= 8);
  Warp& warp = current->block->warps[current->thread.x / 32];
  const unsigned turn = warp.opened % 2;
  std::memcpy(&warp.slots[turn][lane()], &value, sizeof(T));
  pass_gate(warp, 32, "a warp's shuffle");
  if (source < 32) std::memcpy(&value, &warp.slots[turn][source], sizeof(T));
  return value;
}

// Clusters: one barrier for all their threads, and each other's shared memory.
inline void arrive_at_cluster() {
  Cluster& cluster = *current->block->cluster;
  current->cluster_turn = cluster.opened;
  if (++cluster.arrived == machine.cluster * machine.block.x) {
    cluster.arrived = 0;
    ++cluster.opened;
  }
}
inline void wait_for_cluster() {
  const Cluster* cluster = current->block->cluster.get();
  const unsigned turn = current->cluster_turn;
  wait("the cluster's barrier", [=] { return cluster->opened != turn; });
}
inline const unsigned char* in_cluster(const void* own, unsigned rank) {
  const Block* peer = current->block->cluster->blocks.at(rank);
  if (!peer->alive) fail("the shared memory of a block that has left");
  return peer->shared + (static_cast<const unsigned char*>(own) - current->block->shared);
}

inline void enter() {
  machine.kernel();
  current->done = true;
  --current->block->alive;
  swapcontext(&current->context, &machine.scheduler);
}

constexpr size_t kStack = 96 * 1024;
constexpr std::uint64_t kMostTurns = 30'000'000;  // of fibers in one launch: half a minute

inline std::unique_ptr<Block> start_block(unsigned index, unsigned threads, unsigned shared) {
  auto block = std::make_unique<Block>();
  block->index.x = index;
  block->memory = std::make_unique<unsigned char[]>(shared + 1024);
  std::memset(block->memory.get(), 0xFF, shared + 1024);  // NaN in every format
  block->shared = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(block->memory.get()) + 1023) & ~1023ull);
  block->stacks.reset(new char[threads * kStack]);
  block->fibers.resize(threads);
  block->warps.resize((threads + 31) / 32);
  block->alive = threads;
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = block->fibers[t];
    fiber.thread.x = t;
    fiber.block = block.get();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = block->stacks.get() + t * kStack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  return block;
}

// Runs a grid, `resident` blocks at a time; null, or what went wrong.
inline const char* run(unsigned grid, unsigned cluster, unsigned threads, unsigned shared, unsigned resident,
                       unsigned seed, const std::function<void()>& kernel) {
  static std::string fault;
  machine.random.seed(seed);
  machine.grid.x = grid;
  machine.block.x = threads;
  machine.cluster = cluster;
  machine.lazy = seed % 2;
  machine.kernel = kernel;
  machine.pending.clear();
  machine.fault.clear();
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned next = 0;
  std::uint64_t turns = 0;
  std::vector<std::pair<Block*, unsigned>> order;  // warps, in the order in which they get their turn
  while (next < grid || !blocks.empty()) {
    if (blocks.size() + cluster <= std::max(resident, cluster) && next < grid) {
      while (blocks.size() + cluster <= std::max(resident, cluster) && next < grid) {
        const auto together = std::make_shared<Cluster>();
        for (unsigned i = 0; i < cluster; ++i) {
          blocks.push_back(start_block(next++, threads, shared));
          blocks.back()->cluster = together;
          together->blocks.push_back(blocks.back().get());
        }
      }
      order.clear();
      for (auto& block : blocks)
        for (unsigned w = 0; w < block->warps.size(); ++w) order.emplace_back(block.get(), w);
    }
    std::shuffle(order.begin(), order.end(), machine.random);
    bool progress = false;
    for (auto& [block, warp] : order) {
      for (unsigned t = warp * 32; t < std::min(threads, warp * 32 + 32); ++t) {
        Fiber& fiber = block->fibers[t];
        if (fiber.done || (fiber.ready && !(*fiber.ready)())) continue;
        fiber.ready = nullptr;
        current = &fiber;
        if (++turns > kMostTurns) machine.fault = "it goes on and on";
        swapcontext(&machine.scheduler, &fiber.context);
        progress = true;
        if (!machine.fault.empty()) break;
      }
      if (!machine.fault.empty()) break;
      if (!machine.pending.empty() && machine.chance(8)) {
        machine.do_one_pending();
        progress = true;
      }
    }
    if (!progress && machine.fault.empty()) {
      if (machine.pending.empty()) {
        machine.fault = "deadlock:";
        for (auto& [block, warp] : order)
          for (unsigned t = warp * 32; t < std::min(threads, warp * 32 + 32); ++t)
            if (!block->fibers[t].done && (t % 32 == 0 || block->fibers[t - 1].done || block->fibers[t - 1].what != block->fibers[t].what))
              machine.fault += "\n  block " + std::to_string(block->index.x) + " thread " + std::to_string(t) +
                               " waits for " + block->fibers[t].what;
      } else {
        machine.do_one_pending();
      }
    }
    if (!machine.fault.empty()) {
      fault = machine.fault;
      for (auto& block : blocks) block.release();  // their fibers cannot be unwound
      return fault.c_str();
    }
    const size_t before = blocks.size();
    const auto left = [](const std::unique_ptr<Block>& b) {  // all of a cluster, for its blocks may look at each other
      const auto& all = b->cluster->blocks;
      return !b->cluster->stores && std::all_of(all.begin(), all.end(), [](const Block* other) { return !other->alive; });
    };
    std::vector<std::unique_ptr<Block>> staying, leaving;
    for (auto& block : blocks) (left(block) ? leaving : staying).push_back(std::move(block));
    blocks = std::move(staying);
    if (blocks.size() != before) {
      order.clear();
      for (auto& block : blocks)
        for (unsigned w = 0; w < block->warps.size(); ++w) order.emplace_back(block.get(), w);
    }
  }
  while (!machine.pending.empty()) machine.do_one_pending();
  return nullptr;
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block->index)
#define gridDim (emulator::machine.grid)
#define blockDim (emulator::machine.block)

inline void __syncthreads() {
  emulator::pass_gate(emulator::current->block->gates[0], emulator::current->block->alive, "__syncthreads");
}
inline void __syncwarp() { emulator::from_lane(0, 32); }
template <class T>
T __shfl_sync(unsigned, T v, int source) {
  return emulator::from_lane(v, source);
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int bit) {
  return emulator::from_lane(v, emulator::lane() ^ bit);
}
template <class T>
T __shfl_down_sync(unsigned, T v, int distance) {
  return emulator::from_lane(v, emulator::lane() + distance);
}
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __uint_as_float(unsigned bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  *at = max(before, value);
  return before;
}
inline void __threadfence() {}
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
