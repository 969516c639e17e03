// float32 as three bfloat16: 24 bits with their range, six products for one.
#pragma once
#include "ptx/wgmma.cuh"
#include "gemm/raster.cuh"

namespace gemmnorm {

constexpr int kConsumerWarps = 8;

// Of the weight, for 64 columns of K: one stage's parts while it is multiplied, and the next one's while it is split. x's come
// from registers.
template <int BN, int PLANES>
struct WeightParts {};
template <int BN>
struct WeightParts<BN, 3> {
  alignas(1024) unsigned char weight_parts[2][3][BN * kRowBytes];
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

// Where 16 bytes of a swizzled row lie.
__device__ __forceinline__ int swizzled_word(int row, int word) { return row * kRowBytes + ((word ^ row % 8) * 16); }

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

// A row of x times a row of the weight, where their parts made no number: those of infinity are zero times infinity.
__device__ __forceinline__ float product_of(const float* x, const float* weight, int columns) {
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < columns; ++k) sum = fmaf(x[k], weight[k], sum);
  return sum;
}

}  // namespace gemmnorm
