// A GPU on the CPU, for tests: every CUDA thread is a fiber, blocks share nothing but global memory, and whatever the
// hardware leaves open is decided at random from a seed: which warp runs next, when a copy or a multiplication that runs
// on its own takes place. A kernel that waits for what never comes is reported, not endured.
#pragma once
#include <setjmp.h>
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
  ucontext_t start;
  jmp_buf context;  // where it goes on, once it has begun
  bool begun = false;
  Index thread;
  Block* block = nullptr;
  bool done = false;
  const std::function<bool()>* ready = nullptr;  // what it waits for
  const char* what = "";
  int copies = 0;  // own bulk copies that have not taken place
  std::vector<std::pair<unsigned, std::function<void()>>> products;  // own multiplications: their group, what to do
  unsigned groups = 0;                                               // of multiplications, committed
  std::vector<std::function<void()>> small_copies;  // own copies of 16 bytes, likewise
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
  jmp_buf scheduler;
  std::function<void()> kernel;
  std::vector<std::function<void()>> pending;  // copies on their way
  std::string fault;

  bool chance(unsigned one_in) { return random() % one_in == 0; }
  void do_one_pending();
};

extern Machine machine;
extern Fiber* current;

inline void pause(const char* what, const std::function<bool()>& ready) {
  current->ready = &ready;
  current->what = what;
  if (!_setjmp(current->context)) _longjmp(machine.scheduler, 1);
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

inline bool arrive_at_gate(Gate& gate, unsigned threads) {
  if (++gate.arrived < threads) return false;
  gate.arrived = 0;
  ++gate.opened;
  return true;
}
inline void pass_gate(Gate& gate, unsigned threads, const char* what) {
  const unsigned opened = gate.opened;
  if (arrive_at_gate(gate, threads)) return;
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

// What every lane of the warp has.
template <class T>
void from_all_lanes(T value, T (&all)[32]) {
  Warp& warp = current->block->warps[current->thread.x / 32];
  const unsigned turn = warp.opened % 2;
  from_lane(value, 32);
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], &warp.slots[turn][i], sizeof(T));
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

// Runs a grid, `resident` blocks at a time; null, or what went wrong. In runtime.cpp, compiled once for all kernels.
const char* run(unsigned grid, unsigned cluster, unsigned threads, unsigned shared, unsigned resident, unsigned seed,
                const std::function<void()>& kernel);

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
