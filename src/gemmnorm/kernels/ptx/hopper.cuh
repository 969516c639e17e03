// Hopper's instructions (sm_90a), one named function each. wgmma has a file of its own.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

// The 128-byte descriptor that TMA reads; made on the host (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// pack (ampere.cuh) of what is at most the largest bfloat16: PTX ISA 8.1 and later.
__device__ __forceinline__ u32 pack_finite(float low, float high) {
  u32 r;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// a - b for two pairs, each result rounded to its type.
__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b, half) {
  u32 r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b, bfloat16) {
  u32 r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// mbarrier: #parallel-synchronization-and-communication-instructions-mbarrier
__device__ __forceinline__ void mbarrier_init(u64* b, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_expect_tx(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u64* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(u64* b, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(b)), "r"(parity)
        : "memory");
  } while (!done);
}
// The same where other blocks of the cluster write what is waited for.
__device__ __forceinline__ void mbarrier_wait_cluster(u64* b, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(b)), "r"(parity)
        : "memory");
  } while (!done);
}
// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders ordinary accesses to shared memory before those of TMA and the tensor cores.
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Four matrices of 8 × 8 elements of 16 bits, transposed on the way from registers to shared memory: lanes 8i to 8i + 7
// give where the rows of the i-th go: #warp-level-matrix-instructions-stmatrix
__device__ __forceinline__ void stmatrix_trans(void* row, const u32 (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// Four matrices of 8 × 8 elements of 16 bits, the other way: #warp-level-matrix-instructions-ldmatrix
__device__ __forceinline__ void ldmatrix_trans(const void* row, u32 (&pairs)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(shared_address(row))
               : "memory");
}

// bar.sync on a numbered barrier: the `threads` threads that name it wait for each other.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The same without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// TMA: #data-movement-and-conversion-instructions-cp-async-bulk-tensor. x counts along a row, y the rows.
// A policy says what the L2 should rather keep: #createpolicy; these are its encodings of whole-access policies.
constexpr u64 kEvictNormal = 0x1000000000000000ull, kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull;
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, u64* barrier, int x, int y, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
// The same into the blocks of the cluster that `mask` names, at this place in the shared memory of each, whose own barrier
// counts the bytes.
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, u64* barrier, int x, int y, u16 mask,
                                                   u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(mask), "l"(policy)
      : "memory");
}
// The same into the L2 alone: #data-movement-and-conversion-instructions-cp-async-bulk-prefetch-tensor
__device__ __forceinline__ void tma_prefetch(const TensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y) : "memory");
}
// A run of bytes, a multiple of 16, without a map, for the last time: #data-movement-and-conversion-instructions-cp-async-bulk
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int x, int y,
                                               u64 policy = kEvictNormal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(&map),
      "r"(shared_address(from)), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All of this thread's copies have read their source.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// All of this thread's copies are complete and visible to it.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Brings a map closer: #data-movement-and-conversion-instructions-prefetch-prefetchu
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Clusters of blocks: #parallel-synchronization-and-communication-instructions-barrier-cluster, and mapa for the shared
// memory of another block.
__device__ __forceinline__ int cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Orders nothing but what fence_mbarrier_init covers.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Arrives at the barrier that lies where `own` does in the shared memory of the cluster's block `rank`. Orders no ordinary
// memory access between blocks: release.cluster would be a fence of the whole GPU, a microsecond.
__device__ __forceinline__ void mbarrier_arrive_remote(u64* own, int rank) {
  asm volatile(
      "{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [a];\n}" ::"r"(shared_address(own)),
      "r"(rank)
      : "memory");
}
// Writes v to where `own` lies in the shared memory of the cluster's block `rank`, whose barrier counts the 16 bytes when
// they are there; nobody waits here: #data-movement-and-conversion-instructions-st-async
__device__ __forceinline__ void st_async_remote(float4* own, float4 v, u64* barrier, int rank) {
  asm volatile(
      "{\n.reg .u32 a, b;\nmapa.shared::cluster.u32 a, %0, %6;\nmapa.shared::cluster.u32 b, %5, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [a], {%1, %2, %3, %4}, [b];\n}" ::"r"(
          shared_address(own)),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

// Moves registers between the warpgroups of a block: #miscellaneous-instructions-setmaxnreg
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Counters in global memory that order what other blocks wrote: #memory-consistency-model
__device__ __forceinline__ void signal(u32* counter, u32 value) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
// Counts one more, and returns the number before. What the block has written is there for those who count later; what others
// wrote before they counted may be read.
__device__ __forceinline__ u32 signal_and_count(u32* counter) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
__device__ __forceinline__ u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void wait_until(const u32* counter, u32 value) {
  while (load_acquire(counter) < value) __nanosleep(32);
}

// Loads that go to the L2, for what other blocks wrote during this kernel.
__device__ __forceinline__ float load_l2(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int load_l2(const int* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_l2(const float2* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_l2(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
// What is read for the last time, and what is written for somebody after this kernel: the L2 lets go of it first.
__device__ __forceinline__ uint4 load_evict_first(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(kEvictFirst)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_evict_first(uint4* p, uint4 v) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
               "l"(kEvictFirst)
               : "memory");
}

}  // namespace gemmnorm
