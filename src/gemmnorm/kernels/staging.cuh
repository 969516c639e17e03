// A tile on its way out of the accumulators: pairs of neighbouring columns, of rows that are eight apart.
#pragma once
#include "panel_units.cuh"

namespace gemmnorm {

// Two neighbouring values less the mean, as T holds them: statistics and results agree with what is stored, so that the
// rounding of a value that stands out is normalised away as PyTorch's is. Without computed_anew ptxas finds that these
// writes reach the next wgmma and puts all of them in series (C7520).
template <class T>
__device__ __forceinline__ void rounded_pair(float& a, float& b, float2 mean, T) {
  const u32 both = pack(a - mean.x, b - mean.y, T{});
  a = computed_anew(element_of(both, 0, T{}));
  b = computed_anew(element_of(both, 1, T{}));
}
__device__ __forceinline__ void rounded_pair(float& a, float& b, float2 mean, float) {
  a -= mean.x;
  b -= mean.y;
}

// Per-column numbers of a thread's next N pairs of columns, all in flight at once.
template <int N>
__device__ __forceinline__ void load_pairs(const float* columns, float2 (&out)[N]) {
#pragma unroll
  for (int q = 0; q < N; ++q) out[q] = *reinterpret_cast<const float2*>(columns + q * 8 + (threadIdx.x % 4) * 2);
}

// A thread's two neighbouring results (the i-th such pair) of row own_row, and of own_row + 8, to where the copy engine
// will fetch them as T.
template <class T>
__device__ __forceinline__ void stage_pairs(unsigned char* staging, int own_row, int i, float2 low, float2 high) {
  if constexpr (sizeof(T) == 2) {
    unsigned char* to = staging + (i / 8) * kGroupRows * kRowBytes + own_row * kRowBytes +
                        (((i % 8) * 16 + (threadIdx.x % 4) * 4) ^ ((own_row % 8) << 4));
    *reinterpret_cast<u32*>(to) = pack(low.x, low.y, T{});
    *reinterpret_cast<u32*>(to + 8 * kRowBytes) = pack(high.x, high.y, T{});
  }
}

// The same of a tile whose rows are features: the lane's 16 bytes of the first 16 rows of the batch, and a thread's values
// of two features in two octets of such rows, which it stores as T, turned around.
__device__ __forceinline__ unsigned char* staged_row(unsigned char* staging, int warp, int lane) {
  const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
  return staging + row * kRowBytes + (chunk ^ row % 8) * 16;
}
template <class T>
__device__ __forceinline__ void stage_across(unsigned char* to, const float (&v)[8]) {
  const u32 pairs[4] = {pack(v[0], v[1], T{}), pack(v[2], v[3], T{}), pack(v[4], v[5], T{}), pack(v[6], v[7], T{})};
  store_transposed(to, pairs);
}

// One warp sums up the squares of a staged group, column by column: M2, because its mean is taken off.
template <class T, int BN, class L, class R>
__device__ __forceinline__ void store_squares(const Features<L, R>& f, const unsigned char* staging, int group,
                                              int first_column) {
  constexpr int kLanes = BN / 8, kAtOnce = 32 / kLanes;  // lanes to a row, of eight columns each; rows at once
  const int lane = threadIdx.x % 32, column = lane % kLanes, rows = f.rows(group);
  const unsigned char* of_lane = staging + column / 8 * kGroupRows * kRowBytes;
  float sum[8] = {};
#pragma unroll 4
  for (int row = lane / kLanes; row < rows; row += kAtOnce) {
    const Vec<T, 8> v = *reinterpret_cast<const Vec<T, 8>*>(of_lane + row * kRowBytes + ((column ^ row) % 8) * 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += v.value(i) * v.value(i);
  }
#pragma unroll
  for (int bit = kLanes; bit < 32; bit *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], bit);
  const int j = first_column + 8 * column;
  if (lane < kLanes && j < f.features && rows) {
    float4* to = reinterpret_cast<float4*>(f.group_m2 + static_cast<i64>(group) * f.features + j);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
}

// Two neighbouring results of one row, straight to global memory.
template <class Y>
__device__ __forceinline__ void store_pair(Y* to, float2 v) {
  const float pair[2] = {v.x, v.y};
  store<Y, 2>(to, pair);
}

}  // namespace gemmnorm
