// Sums over lanes, and column sums of an accumulator tile (wgmma's layout of D: 64 rows over four warps), in a fixed order.
#pragma once
#include "ptx/hopper.cuh"

namespace gemmnorm {

// `combine` of a warp's values, or of a block's kThreads, handed to each of these LANES threads.
template <int LANES, class V, class Combine>
__device__ __forceinline__ V over_lanes(V value, V* shared /* [kWarps] */, const Combine& combine) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) value = combine(value, __shfl_xor_sync(~0u, value, bit));
  if constexpr (LANES == 32) return value;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) value = combine(value, shared[w]);
  return value;
}
template <int LANES>
__device__ __forceinline__ float sum_over(float value, float* shared /* [kWarps] */) {
  return over_lanes<LANES>(value, shared, [](float a, float b) { return a + b; });
}
template <int LANES>
__device__ __forceinline__ int largest_of(int value, int* shared /* [kWarps] */) {
  return over_lanes<LANES>(value, shared, [](int a, int b) { return max(a, b); });
}

// Halves the columns that a thread holds while adding up over the 8 lanes that share them.
template <int HALF>
__device__ __forceinline__ void exchange(const float (&v)[2 * HALF], float (&out)[HALF], int lane, int bit) {
  const bool upper = lane & bit;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float kept = upper ? v[HALF + i] : v[i], sent = upper ? v[i] : v[HALF + i];
    out[i] = kept + __shfl_xor_sync(~0u, sent, bit);
  }
}

// Sums of N numbers over the lanes that differ in BIT and above; each is written once.
template <int N, int BIT>
__device__ __forceinline__ void fold_lanes(const float (&v)[N], float* to, bool writes = true) {
  const int lane = threadIdx.x % 32;
  if constexpr (BIT == 32) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (writes) to[i] = v[i];
  } else if constexpr (N > 1) {
    float half[N / 2];
    exchange<N / 2>(v, half, lane, BIT);
    fold_lanes<N / 2, 2 * BIT>(half, to + (lane & BIT ? N / 2 : 0), writes);
  } else {
    const float sum[1] = {v[0] + __shfl_xor_sync(~0u, v[0], BIT)};
    fold_lanes<1, 2 * BIT>(sum, to, writes && !(lane & BIT));
  }
}

// Column sums of a consumer's 64 × BN values. `pair(i)` is the thread's sum over its two rows of its i-th column, which
// is column (i / 2)·8 + (lane % 4)·2 + i % 2. Shuffles over the lanes, at most 64 columns at a time so that registers
// suffice; shared memory over the warps; returned for columns 2·thread and 2·thread + 1.
template <int BN, class Pair>
__device__ __forceinline__ float2 column_sums(float (*sums)[BN], int consumer, const Pair& pair) {
  constexpr int kPart = BN < 64 ? BN : 64;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int first = ((lane & 4) ? kPart / 8 : 0) + ((lane & 8) ? kPart / 16 : 0) + ((lane & 16) ? kPart / 32 : 0);
#pragma unroll
  for (int part = 0; part < BN / kPart; ++part) {
    float v[kPart / 4], half[kPart / 8], quarter[kPart / 16], eighth[kPart / 32];
#pragma unroll
    for (int i = 0; i < kPart / 4; ++i) v[i] = pair(part * (kPart / 4) + i);
    exchange<kPart / 8>(v, half, lane, 4);
    exchange<kPart / 16>(half, quarter, lane, 8);
    exchange<kPart / 32>(quarter, eighth, lane, 16);
#pragma unroll
    for (int i = 0; i < kPart / 32; ++i) {
      const int k = first + i;
      sums[warp][part * kPart + (k / 2) * 8 + (lane % 4) * 2 + (k & 1)] = eighth[i];
    }
  }
  named_barrier_sync(1 + consumer, 128);
  float2 total = make_float2(0.0f, 0.0f);
  if (2 * thread < BN) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(&sums[w][2 * thread]);
      total.x += part.x;
      total.y += part.y;
    }
  }
  return total;
}

}  // namespace gemmnorm
