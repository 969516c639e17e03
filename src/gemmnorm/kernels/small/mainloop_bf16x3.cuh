// float32 as three bfloat16 (bf16x3): 24 bits with their range, six products for one. The split happens between shared memory
// and the tensor cores: x's parts come from registers, the weight's go back to shared memory.
#pragma once
#include "gemm/pipeline.cuh"
#include "gemm/tile_scheduler.cuh"
#include "ptx/wgmma.cuh"

namespace gemmnorm {

constexpr int kConsumerWarps = 8;

// The weight's parts for 64 columns of K: of the stage that is multiplied, and of the next, which is split meanwhile.
template <int BN>
struct WeightParts {
  alignas(1024) unsigned char parts[2][3][BN * kRowBytes];
};

// Two float32 as three bfloat16 each, from the highest down: all 24 bits. What would round to infinity does not.
__device__ __forceinline__ void split_in_three(float2 v, u32& high, u32& middle, u32& low) {
  const auto without = [](float2 of, u32 both) {
    return make_float2(of.x - element_of(both, 0, bfloat16{}), of.y - element_of(both, 1, bfloat16{}));
  };
  high = pack_finite(v.x, v.y);
  v = without(v, high);
  middle = pack(v.x, v.y, bfloat16{});
  v = without(v, middle);
  low = pack(v.x, v.y, bfloat16{});
}

// The weight's rows of a stage, by all consumers: 8 elements of K at a time.
template <int BN>
__device__ __forceinline__ void split_weight_in_three(const unsigned char (&from)[2][BN * kRowBytes],
                                                      unsigned char (&to)[3][BN * kRowBytes]) {
  const int word = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < BN / kConsumerWarps / 4; ++i) {
    const int row = threadIdx.x / 8 + i * kConsumerWarps * 4;
    const float4 a = *reinterpret_cast<const float4*>(&from[word / 4][swizzled_word(row, word % 4 * 2)]);
    const float4 b = *reinterpret_cast<const float4*>(&from[word / 4][swizzled_word(row, word % 4 * 2 + 1)]);
    uint4 part[3];
    split_in_three({a.x, a.y}, part[0].x, part[1].x, part[2].x);
    split_in_three({a.z, a.w}, part[0].y, part[1].y, part[2].y);
    split_in_three({b.x, b.y}, part[0].z, part[1].z, part[2].z);
    split_in_three({b.z, b.w}, part[0].w, part[1].w, part[2].w);
#pragma unroll
    for (int p = 0; p < 3; ++p) *reinterpret_cast<uint4*>(&to[p][swizzled_word(row, word)]) = part[p];
  }
}

// The main loop of the small-batch kernel: 64 rows of a consumer warpgroup by BN columns. What the tensor cores add up of the
// high parts is promoted after every stage, because they truncate; the other products are 2^-8 of it and less, and those
// left out 2^-24.
template <int BN>
struct Bf16x3Mainloop {
  using Multiply = WgmmaRegisters<bfloat16, BN>;
  using Accumulators = float[BN / 2];

  // x's fragments of a stage: steps of 16 along K, parts, registers.
  __device__ __forceinline__ static void load_x(const unsigned char (&x)[2][2 * kGroupRows * kRowBytes], int own_row,
                                                u32 (&a)[4][3][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int word = step % 2 * 4 + r / 2 * 2 + lane % 4 / 2;
        const unsigned char* at = &x[step / 2][swizzled_word(own_row + r % 2 * 8, word) + lane % 2 * 8];
        split_in_three(*reinterpret_cast<const float2*>(at), a[step][0][r], a[step][1][r], a[step][2][r]);
      }
  }

  template <int STAGES, class Shared>
  __device__ __forceinline__ static void run(Pipeline<STAGES>& ring, PipelineState<STAGES>& state, int steps, Shared& shared,
                                             int consumer, Accumulators& acc) {
    const int lane = threadIdx.x % 32, own_row = threadIdx.x / 32 % 4 * 16 + lane / 4 + consumer * kGroupRows;
    float high[BN / 2], cross[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) acc[i] = 0.0f;
    if (steps == 0) return;
    const auto split_weight = [&](int k) {
      if (k >= steps) return;
      mbarrier_wait(&ring.full[state.stage], state.phase);
      split_weight_in_three<BN>(shared.weight[state.stage], shared.weight_parts.parts[k % 2]);
      fence_proxy_async_shared();
    };
    split_weight(0);
    for (int k = 0; k < steps; ++k) {
      named_barrier_sync(2, kConsumerWarps * 32);  // all parts are there, and nobody reads those that come next
      u32 a[4][3][4];
      load_x(shared.x[state.stage], own_row, a);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&ring.empty[state.stage]);
      wgmma_fence();
      u64 b[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) b[i] = k_major_descriptor(shared.weight_parts.parts[k % 2][i]);
#pragma unroll
      for (int step = 0; step < 4; ++step) Multiply::run(high, a[step][0], b[0] + step * kKMajorStep, step > 0);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int at = step * kKMajorStep;
        Multiply::run(cross, a[step][2], b[0] + at, k > 0 || step > 0);
        Multiply::run(cross, a[step][1], b[1] + at, 1);
        Multiply::run(cross, a[step][0], b[2] + at, 1);
        Multiply::run(cross, a[step][1], b[0] + at, 1);
        Multiply::run(cross, a[step][0], b[1] + at, 1);
      }
      wgmma_commit();
      state.advance();
      split_weight(k + 1);
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) acc[i] += high[i];
    }
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) acc[i] += cross[i];
  }
};

// A row of x times a row of the weight, where their parts made no number: those of infinity are zero times infinity.
__device__ __forceinline__ float dot_product(const float* x, const float* weight, int columns) {
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < columns; ++k) sum = fmaf(x[k], weight[k], sum);
  return sum;
}

}  // namespace gemmnorm
