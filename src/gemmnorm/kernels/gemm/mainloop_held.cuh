// The main loop where x is held: the stages of a row of tiles stay in a ring of their own until its last tile, and only the
// weight streams.
//
// Serves products whose K fits that ring; taken where that is predicted cheapest: with few inputs a tile's operands are larger
// than its multiplications are long, and what the L2 delivers is the limit.
#pragma once
#include "gemm/pipeline.cuh"
#include "ptx/wgmma.cuh"

namespace gemmnorm {

// Both operands K-major, one plane each. `a(x, weight)` and `b(x, weight)` are where operands lie, by their stages. `last`: x is
// released.
template <class Element, int WIDTH>
struct HeldMainloop {
  using Accumulators = float[WIDTH / 2];

  template <int HELD, int STAGES, class A, class B>
  __device__ __forceinline__ static void run(Pipeline<HELD>& held, PipelineState<HELD>& held_state, Pipeline<STAGES>& ring,
                                             PipelineState<STAGES>& state, int steps, bool last, const A& a, const B& b,
                                             Accumulators& acc) {
    const bool releases = threadIdx.x % 128 == 0;
    PipelineState<HELD> x = held_state;
    const auto release = [&] {
      ring.release_before(state.stage);
      if (last) held.release_before(x.stage);
    };
    for (int k = 0; k < steps; ++k) {
      mbarrier_wait(&held.full[x.stage], x.phase);
      mbarrier_wait(&ring.full[state.stage], state.phase);
      wgmma_fence();
      const u64 a_descriptor = k_major_descriptor(a(x.stage, state.stage)), b_descriptor = k_major_descriptor(b(x.stage, state.stage));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Wgmma<Element, WIDTH>::run(acc, a_descriptor + i * kKMajorStep, b_descriptor + i * kKMajorStep, (k | i) ? 1 : 0);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        if (releases) release();
      }
      state.advance();
      x.advance();
    }
    wgmma_wait<0>();
    if (releases) release();
    if (last) held_state = x;
  }
};

}  // namespace gemmnorm
