// Clusters of blocks (sm_90): #cluster-barrier, distributed shared memory (mapa, ld.shared::cluster).
#pragma once
#include "ptx/hopper.cuh"

namespace gemmnorm {

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks of the cluster: what each wrote before it arrived is visible after the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The same place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ u32 remote_address(const void* own, u32 rank) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}
__device__ __forceinline__ float2 load_remote(const float2* own, u32 rank) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(remote_address(own, rank)) : "memory");
  return v;
}

}  // namespace gemmnorm
