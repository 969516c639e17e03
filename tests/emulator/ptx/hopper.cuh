// The emulator's side of ptx/hopper.cuh: barriers in shared memory, TMA, counters in global memory.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

struct MapFields {  // what tests/emulator writes into a map
  unsigned char* base;
  i64 rows, columns, pitch /* bytes from row to row */;
  int box_rows, box_columns, size, round_to_tf32;
};

// The eight bytes of an mbarrier.
struct Arrivals {
  int bytes;
  u16 missing;
  u16 count_and_phase;

  int phase() const { return count_and_phase >> 15; }
  void check() {
    if (missing || bytes) return;
    count_and_phase ^= 0x8000;
    missing = count_and_phase & 0x7FFF;
  }
};
static_assert(sizeof(Arrivals) == sizeof(u64));

inline Arrivals& arrivals(u64* b) { return *reinterpret_cast<Arrivals*>(b); }
inline void mbarrier_init(u64* b, u32 count) { arrivals(b) = {0, static_cast<u16>(count), static_cast<u16>(count)}; }
inline void mbarrier_arrive(u64* b) {
  if (!arrivals(b).missing) emulator::fail("more arrivals at an mbarrier than it expects");
  --arrivals(b).missing;
  arrivals(b).check();
}
inline void mbarrier_expect_tx(u64* b, u32 bytes) {
  arrivals(b).bytes += bytes;
  mbarrier_arrive(b);
}
inline void mbarrier_wait(u64* b, u32 parity) {
  emulator::wait("an mbarrier", [=] { return arrivals(b).phase() != static_cast<int>(parity); });
}
inline void mbarrier_wait_cluster(u64* b, u32 parity) { mbarrier_wait(b, parity); }
inline void fence_mbarrier_init() {}
inline void fence_proxy_async_shared() {}
inline void fence_proxy_async_global() {}
inline void named_barrier_sync(int barrier, int threads) {
  emulator::pass_gate(emulator::current->block->gates[barrier], threads, "bar.sync");
}
inline void named_barrier_arrive(int barrier, int threads) {
  emulator::arrive_at_gate(emulator::current->block->gates[barrier], threads);
}
inline void prefetch_tensormap(const TensorMap&) {}
inline void stmatrix_trans(void* row, const u32 (&pairs)[4]) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i)
    for (int r = 0; r < 8; ++r) {
      auto* to = reinterpret_cast<u16*>(__shfl_sync(~0u, reinterpret_cast<std::uintptr_t>(row), 8 * i + r));
      if (reinterpret_cast<std::uintptr_t>(to) % 16) emulator::fail("a row of a matrix that is not aligned to 16 bytes");
      if (lane % 4 == r / 2) to[lane / 4] = static_cast<u16>(pairs[i] >> (r % 2 * 16));
    }
}

inline u32 pack_finite(float low, float high) {
  const float most = element_of(0x7F7Fu, 0, bfloat16{});
  const auto limited = [=](float f) { return std::isnan(f) ? f : std::min(std::max(f, -most), most); };
  return pack(limited(low), limited(high), bfloat16{});
}

constexpr u64 kEvictNormal = 0, kEvictFirst = 1, kEvictLast = 2;

inline float rounded_to_tf32(float f) {
  return std::isfinite(f) ? __uint_as_float((__float_as_uint(f) + 0x1000) & 0xFFFFE000u) : f;
}
// Box element (row, byte) ↔ shared memory, swizzled: bits 4-6 of the address are xor-ed with bits 7-9.
inline unsigned char* swizzled(unsigned char* box, int row, int byte) {
  const auto address = reinterpret_cast<std::uintptr_t>(box) + row * 128 + byte;
  return reinterpret_cast<unsigned char*>(address ^ (address >> 3 & 0x70));
}
inline MapFields fields(const TensorMap& map) {
  MapFields m;
  std::memcpy(&m, map.opaque, sizeof m);
  if (m.box_columns * m.size != 128) emulator::fail("a box whose rows are not 128 bytes");
  return m;
}
inline void tma_load(void* to, const TensorMap& map, u64* barrier, int x, int y, u64) {
  const MapFields m = fields(map);
  if (reinterpret_cast<std::uintptr_t>(to) % 1024) emulator::fail("a swizzled box that is not aligned to 1024 bytes");
  emulator::machine.pending.push_back([=] {
    for (int r = 0; r < m.box_rows; ++r)
      for (int c = 0; c < m.box_columns; ++c) {
        unsigned char* target = swizzled(static_cast<unsigned char*>(to), r, c * m.size);
        const bool inside = y + r >= 0 && y + r < m.rows && x + c >= 0 && x + c < m.columns;
        if (!inside) {
          std::memset(target, 0, m.size);
          continue;
        }
        std::memcpy(target, m.base + (y + r) * m.pitch + (x + c) * m.size, m.size);
        if (m.round_to_tf32) {
          float f;
          std::memcpy(&f, target, 4);
          f = rounded_to_tf32(f);
          std::memcpy(target, &f, 4);
        }
      }
    arrivals(barrier).bytes -= m.box_rows * 128;
    arrivals(barrier).check();
  });
}
inline void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16)
    emulator::fail("a bulk copy that is not aligned to 16 bytes");
  emulator::machine.pending.push_back([=] {
    std::memcpy(to, from, bytes);
    arrivals(barrier).bytes -= static_cast<int>(bytes);
    arrivals(barrier).check();
  });
}
inline void tma_store(const TensorMap& map, const void* from, int x, int y, u64 = kEvictNormal) {
  const MapFields m = fields(map);
  emulator::Fiber* owner = emulator::current;
  ++owner->copies;
  emulator::machine.pending.push_back([=] {
    for (int r = 0; r < m.box_rows; ++r)
      for (int c = 0; c < m.box_columns; ++c)
        if (y + r < m.rows && x + c < m.columns)
          std::memcpy(m.base + (y + r) * m.pitch + (x + c) * m.size,
                      swizzled(const_cast<unsigned char*>(static_cast<const unsigned char*>(from)), r, c * m.size), m.size);
    --owner->copies;
  });
}
inline void tma_store_commit() {}
inline void tma_store_wait() {
  emulator::Fiber* owner = emulator::current;
  emulator::wait("its bulk copies", [=] { return owner->copies == 0; });
}
inline void tma_store_wait_read() { tma_store_wait(); }

template <int COUNT>
void setmaxnreg_dec() {}
template <int COUNT>
void setmaxnreg_inc() {}

inline int cluster_rank() { return static_cast<int>(blockIdx.x % emulator::machine.cluster); }
inline void cluster_arrive_relaxed() { emulator::arrive_at_cluster(); }
inline void cluster_wait() { emulator::wait_for_cluster(); }
inline void st_async_remote(float4* own, float4 v, u64* barrier, int rank) {
  if (reinterpret_cast<std::uintptr_t>(own) % 16) emulator::fail("a misaligned store to another block");
  const auto to = const_cast<unsigned char*>(emulator::in_cluster(own, rank));
  const auto counts = const_cast<unsigned char*>(emulator::in_cluster(barrier, rank));
  emulator::Cluster* cluster = emulator::current->block->cluster.get();
  ++cluster->stores;
  emulator::machine.pending.push_back([=] {
    --cluster->stores;
    if (!cluster->blocks[rank]->alive) emulator::machine.fault = "a store to a block that has left";
    std::memcpy(to, &v, sizeof v);
    Arrivals& there = arrivals(reinterpret_cast<u64*>(counts));
    there.bytes -= static_cast<int>(sizeof v);
    there.check();
  });
}

inline void signal(u32* counter, u32 value) { *counter += value; }
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

inline void ldmatrix_trans(const void* row, u32 (&pairs)[4]) {
  const int lane = threadIdx.x % 32;
  const u16* rows[32];
  emulator::from_all_lanes(static_cast<const u16*>(row), rows);
  for (int i = 0; i < 4; ++i) {
    pairs[i] = 0;
    for (int half = 0; half < 2; ++half) {
      const u16* from = rows[8 * i + lane % 4 * 2 + half];
      if (reinterpret_cast<std::uintptr_t>(from) % 16) emulator::fail("a row of a matrix that is not aligned to 16 bytes");
      pairs[i] |= static_cast<u32>(from[lane / 4]) << (half * 16);
    }
  }
}

template <class T>
u32 subtract_pairs(u32 a, u32 b, T) {
  return pack(element_of(a, 0, T{}) - element_of(b, 0, T{}), element_of(a, 1, T{}) - element_of(b, 1, T{}), T{});
}

}  // namespace gemmnorm
