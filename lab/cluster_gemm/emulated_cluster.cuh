// The emulator's side of cluster.cuh.
#pragma once
#include "ptx/hopper.cuh"

namespace gemmnorm {

inline u32 cluster_rank() { return blockIdx.x % emulator::machine.cluster; }
inline void cluster_arrive() { emulator::arrive_at_cluster(); }
inline void cluster_wait() { emulator::wait_for_cluster(); }
template <class T>
T load_remote(const T* own, u32 rank) {
  return *reinterpret_cast<const T*>(emulator::in_cluster(own, rank));
}

}  // namespace gemmnorm
