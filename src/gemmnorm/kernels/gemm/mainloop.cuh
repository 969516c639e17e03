// The main loop: D[64 · BLOCKS, WIDTH] = A · Bᵀ over K, by one consumer warpgroup, out of the ring.
#pragma once
#include "gemm/pipeline.cuh"
#include "gemm/tile_scheduler.cuh"
#include "ptx/wgmma.cuh"

namespace gemmnorm {

// Both operands K-major, one plane each. `a(stage)` and `b(stage)` are where a consumer's operands of a stage lie.
template <class Element, int WIDTH, int BLOCKS = 1>
struct Mainloop {
  using Accumulators = float[BLOCKS * WIDTH / 2];
  static constexpr int kBlockBytes = 64 * kRowBytes;  // of A in a stage

  template <class Ring, class A, class B>
  __device__ __forceinline__ static void run(Ring& ring, PipelineState<Ring::kStages>& state, int steps, const A& a,
                                             const B& b, Accumulators& acc) {
    const bool releases = threadIdx.x % 128 == 0;
    for (int k = 0; k < steps; ++k) {
      mbarrier_wait(&ring.full[state.stage], state.phase);
      wgmma_fence();
      const u64 a_descriptor = k_major_descriptor(a(state.stage)), b_descriptor = k_major_descriptor(b(state.stage));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
          Wgmma<Element, WIDTH>::run(reinterpret_cast<float(&)[WIDTH / 2]>(acc[block * WIDTH / 2]),
                                     a_descriptor + block * kBlockBytes / 16 + i * kKMajorStep, b_descriptor + i * kKMajorStep,
                                     (k | i) ? 1 : 0);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        if (releases) ring.release_before(state.stage);
      }
      state.advance();
    }
    wgmma_wait<0>();
    if (releases) ring.release_before(state.stage);
  }
};

}  // namespace gemmnorm
