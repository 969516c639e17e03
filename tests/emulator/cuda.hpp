// CUDA for a kernel that runs on the CPU: what each of them compiles anew, so as little as may be. Whatever needs no
// template is in machine.hpp, runtime.cpp and hopper.cpp, compiled once for all kernels.
#pragma once
#include <sched.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <type_traits>

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
struct float3 {
  float x, y, z;
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
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T>
constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}
template <class T>
constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}

namespace emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
// Where the thread is whose turn it is.
struct Here {
  Index thread, block, grid, threads;
  unsigned cluster;  // blocks in one
  unsigned char* shared;
};
extern Here here;

bool chance(unsigned one_in);
[[noreturn]] void fail(const char* why);

// A closure without the closure's type: `std::function` would be compiled anew for each.
struct Closure {
  bool (*call)(const void*);
  const void* at;
};
// Lets the others run until `ready`.
void pause(const char* what, Closure ready);
template <class Ready>
void wait(const char* what, const Ready& ready) {
  if (ready() && !chance(4)) return;
  pause(what, {[](const void* at) -> bool { return (*static_cast<const Ready*>(at))(); }, &ready});
}

void pass_all_threads();                           // __syncthreads
void pass_barrier(int barrier, int threads);       // bar.sync
void arrive_at_barrier(int barrier, int threads);  // bar.arrive
void arrive_at_cluster();
void wait_for_cluster();

// Of the warp's lanes: `source`'s value, or all.
std::uint64_t exchange(std::uint64_t value, unsigned source);
void exchange_all(std::uint64_t value, std::uint64_t (&all)[32]);

inline unsigned lane() { return here.thread.x % 32; }
template <class T>
T from_lane(T value, unsigned source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// A thread's own copies: each takes place when it is waited for, at the latest.
void copy_16(void* to, const void* from);
void do_own_copies();

// Barriers in shared memory, TMA, other blocks' shared memory: see ptx/hopper.cuh.
using u64 = unsigned long long;
void init_mbarrier(u64* b, unsigned count);
void arrive_at_mbarrier(u64* b, int expected_bytes);
void wait_for_mbarrier(u64* b, unsigned parity);
void load_box(void* to, const void* map, u64* barrier, int x, int y);
void load_box_remote(void* own, const void* map, u64* barrier, int x, int y, int rank);
void arrive_remote(u64* barrier, int rank);
void store_box(const void* map, const void* from, int x, int y);
void load_bulk(void* to, const void* from, unsigned bytes, u64* barrier);
void wait_for_stores();
void store_remote(void* own, float4 v, u64* barrier, int rank);
void load_transposed(const void* row, unsigned (&pairs)[4]);
void store_transposed(void* row, const unsigned (&pairs)[4]);

// The tensor cores: see ptx/wgmma.cuh.
enum Format { kHalf, kBfloat16, kTf32 };
void commit_products();
void wait_for_products(unsigned pending);
void multiply(Format format, int n, bool a_across, bool b_across, float* d, u64 a, u64 b, bool accumulate);
void multiply_registers(Format format, int n, bool b_across, float* d, const unsigned (&a)[4], u64 b, bool accumulate);

// Runs a grid, `resident` blocks at a time; null, or what went wrong.
const char* run(unsigned grid, unsigned cluster, unsigned threads, unsigned shared, unsigned resident, unsigned seed,
                void (*kernel)(const void*), const void* params);

}  // namespace emulator

#define threadIdx (emulator::here.thread)
#define blockIdx (emulator::here.block)
#define gridDim (emulator::here.grid)
#define blockDim (emulator::here.threads)

inline void __syncthreads() { emulator::pass_all_threads(); }
inline void __syncwarp() { emulator::exchange(0, 32); }
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
