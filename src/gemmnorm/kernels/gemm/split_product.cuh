// One stage of K of a product of split operands: three products of float16 for one of float32.
#pragma once
#include "ptx/wgmma.cuh"
#include "memory_bound/split.cuh"

namespace gemmnorm {

// high·high into `part`, which starts from zero, and both products with a low part into `cross`, in units of 2^-11. Two
// groups of multiplications: the first is for the caller to add up, because the tensor cores truncate, while the second
// still runs. Operands as descriptors, 64 of K each; `first` where `cross` starts from zero too.
template <int BN, int A_ACROSS = 0, int B_ACROSS = 0>
__device__ __forceinline__ void multiply_stage(float (&part)[BN / 2], float (&cross)[BN / 2], u64 a, u64 a_low, u64 b,
                                               u64 b_low, bool first) {
  constexpr int kStepA = A_ACROSS ? kMnMajorStep : kKMajorStep, kStepB = B_ACROSS ? kMnMajorStep : kKMajorStep;
  using Multiply = Wgmma<half, BN>;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    Multiply::template run<A_ACROSS, B_ACROSS>(part, a + i * kStepA, b + i * kStepB, i ? 1 : 0);
  wgmma_commit();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Multiply::template run<A_ACROSS, B_ACROSS>(cross, a_low + i * kStepA, b + i * kStepB, first && !i ? 0 : 1);
    Multiply::template run<A_ACROSS, B_ACROSS>(cross, a + i * kStepA, b_low + i * kStepB, 1);
  }
  wgmma_commit();
}

}  // namespace gemmnorm
