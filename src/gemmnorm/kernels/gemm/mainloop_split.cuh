// The main loop of float32 operands that are split into two float16 (common/fp16x2.cuh): v·2^-e = high + low·2^-11.
//
//   a·b ≈ high·high + 2^-11 · (high·low + low·high)
//
// The tensor cores truncate what they add up, so high·high of each stage starts from zero and is promoted: added to an
// ordinary float32 accumulator. The cross products stay in one accumulator; their truncation is far below.
#pragma once
#include "gemm/pipeline.cuh"
#include "memory_bound/split.cuh"
#include "ptx/wgmma.cuh"

namespace gemmnorm {

// A and B each K-major or, with A_MN or B_MN, MN-major; `a(plane, stage)` and `b(plane, stage)` are where the planes lie.
template <int WIDTH, bool A_MN = false, bool B_MN = false>
struct SplitMainloop {
  using Accumulators = float[WIDTH / 2];
  using Multiply = Wgmma<half, WIDTH>;

  template <bool MN>
  __device__ __forceinline__ static u64 descriptor(const void* tile) {
    return MN ? mn_major_descriptor(tile) : k_major_descriptor(tile);
  }

  // `acc` receives the sum in units of the powers of two that the operands were multiplied by; `on_first` runs while the first
  // stage is multiplied.
  template <class Ring, class A, class B, class OnFirst>
  __device__ __forceinline__ static void run(Ring& ring, PipelineState<Ring::kStages>& state, int steps, const A& a,
                                             const B& b, Accumulators& acc, const OnFirst& on_first) {
    constexpr int kStepA = A_MN ? kMnMajorStep : kKMajorStep, kStepB = B_MN ? kMnMajorStep : kKMajorStep;
    const bool releases = threadIdx.x % 128 == 0;
    float high[WIDTH / 2], cross[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) acc[i] = 0.0f;
    for (int k = 0; k < steps; ++k) {
      mbarrier_wait(&ring.full[state.stage], state.phase);
      wgmma_fence();
      const u64 a_high = descriptor<A_MN>(a(0, state.stage)), a_low = descriptor<A_MN>(a(1, state.stage));
      const u64 b_high = descriptor<B_MN>(b(0, state.stage)), b_low = descriptor<B_MN>(b(1, state.stage));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Multiply::template run<A_MN, B_MN>(high, a_high + i * kStepA, b_high + i * kStepB, i ? 1 : 0);
      wgmma_commit();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Multiply::template run<A_MN, B_MN>(cross, a_low + i * kStepA, b_high + i * kStepB, k == 0 && i == 0 ? 0 : 1);
        Multiply::template run<A_MN, B_MN>(cross, a_high + i * kStepA, b_low + i * kStepB, 1);
      }
      wgmma_commit();
      if (k == 0) on_first();
      wgmma_wait<1>();  // high·high is there; the cross products still run
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) acc[i] += high[i];
      if (k > 0 && releases) ring.release_before(state.stage);
      state.advance();
    }
    wgmma_wait<0>();
    if (releases) ring.release_before(state.stage);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) acc[i] += kLowUnit * cross[i];
  }
};

}  // namespace gemmnorm
