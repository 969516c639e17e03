// The emulator's side of ptx/hopper.cuh: barriers in shared memory, TMA, counters in global memory.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

inline void mbarrier_init(u64* b, u32 count) { emulator::init_mbarrier(b, count); }
inline void mbarrier_arrive(u64* b) { emulator::arrive_at_mbarrier(b, 0); }
inline void mbarrier_expect_tx(u64* b, u32 bytes) { emulator::arrive_at_mbarrier(b, static_cast<int>(bytes)); }
inline void mbarrier_wait(u64* b, u32 parity) { emulator::wait_for_mbarrier(b, parity); }
inline void mbarrier_wait_cluster(u64* b, u32 parity) { mbarrier_wait(b, parity); }
inline void fence_mbarrier_init() {}
inline void fence_proxy_async_shared() {}
inline void fence_proxy_async_global() {}
inline void named_barrier_sync(int barrier, int threads) { emulator::pass_barrier(barrier, threads); }
inline void named_barrier_arrive(int barrier, int threads) { emulator::arrive_at_barrier(barrier, threads); }
inline void prefetch_tensormap(const TensorMap&) {}
inline void tma_prefetch(const TensorMap&, int, int) {}
inline void stmatrix_trans(void* row, const u32 (&pairs)[4]) { emulator::store_transposed(row, pairs); }

inline u32 pack_finite(float low, float high) {
  const float most = element_of(0x7F7Fu, 0, bfloat16{});
  const auto limited = [=](float f) { return std::isnan(f) ? f : min(max(f, -most), most); };
  return pack(limited(low), limited(high), bfloat16{});
}

constexpr u64 kEvictNormal = 0, kEvictFirst = 1, kEvictLast = 2;

inline void tma_load(void* to, const TensorMap& map, u64* barrier, int x, int y, u64) {
  emulator::load_box(to, &map, barrier, x, y);
}
inline void tma_load_multicast(void* to, const TensorMap& map, u64* barrier, int x, int y, u16 mask, u64) {
  for (int rank = 0; mask >> rank; ++rank)
    if (mask >> rank & 1) emulator::load_box_remote(to, &map, barrier, x, y, rank);
}
inline void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  emulator::load_bulk(to, from, bytes, barrier);
}
inline void tma_store(const TensorMap& map, const void* from, int x, int y, u64 = kEvictNormal) {
  emulator::store_box(&map, from, x, y);
}
inline void tma_store_commit() {}
inline void tma_store_wait() { emulator::wait_for_stores(); }
inline void tma_store_wait_read() { tma_store_wait(); }

template <int COUNT>
void setmaxnreg_dec() {}
template <int COUNT>
void setmaxnreg_inc() {}

inline int cluster_rank() { return static_cast<int>(blockIdx.x % emulator::here.cluster); }
inline void cluster_arrive_relaxed() { emulator::arrive_at_cluster(); }
inline void cluster_wait() { emulator::wait_for_cluster(); }
inline void mbarrier_arrive_remote(u64* own, int rank) { emulator::arrive_remote(own, rank); }
inline void st_async_remote(float4* own, float4 v, u64* barrier, int rank) {
  emulator::store_remote(own, v, barrier, rank);
}

inline void signal(u32* counter, u32 value) { *counter += value; }
inline u32 signal_and_count(u32* counter) { return (*counter)++; }
inline u32 load_acquire(const u32* counter) { return *counter; }
inline void wait_until(const u32* counter, u32 value) {
  emulator::wait("a counter in global memory", [=] { return *counter >= value; });
}

template <class T>
T load_aligned(const T* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T)) emulator::fail("a misaligned load");
  return *p;
}
// The types that the PTX has: a template here would take a half that NVRTC refuses.
inline float load_l2(const float* p) { return load_aligned(p); }
inline int load_l2(const int* p) { return load_aligned(p); }
inline float2 load_l2(const float2* p) { return load_aligned(p); }
inline float4 load_l2(const float4* p) { return load_aligned(p); }
inline uint4 load_evict_first(const uint4* p) { return load_aligned(p); }
inline void store_evict_first(uint4* p, uint4 v) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(v)) emulator::fail("a misaligned store");
  *p = v;
}

inline void ldmatrix_trans(const void* row, u32 (&pairs)[4]) { emulator::load_transposed(row, pairs); }

template <class T>
u32 subtract_pairs(u32 a, u32 b, T) {
  return pack(element_of(a, 0, T{}) - element_of(b, 0, T{}), element_of(a, 1, T{}) - element_of(b, 1, T{}), T{});
}

}  // namespace gemmnorm
