// float32 operands as two float16 each, for the tensor cores: v·2^-e = high + low·2^-11, with one exponent e per row.
#pragma once
#include "common.cuh"

namespace gemmnorm {

constexpr int kSplitColumns = 64;    // of K: `high` of so many, then `low` of the same
constexpr float kLowUnit = 1.0f / 2048.0f;  // what one unit of `low` is worth

// 2^n for n in [-252, 254], as two factors that are exact and in range.
struct PowerOfTwo {
  float first, second;
};
__device__ __forceinline__ PowerOfTwo power_of_two(int n) {
  const int half = n / 2;
  return {__uint_as_float(static_cast<u32>(half + 127) << 23), __uint_as_float(static_cast<u32>(n - half + 127) << 23)};
}
__device__ __forceinline__ float times(float v, const PowerOfTwo& p) { return v * p.first * p.second; }

// The exponent that brings a row whose largest magnitude has these bits to [2^14, 2^15).
__device__ __forceinline__ int row_exponent(u32 bits) {
  if (bits == 0) return 0;
  const int exponent = bits >> 23;
  return (exponent ? exponent - 127 : 31 - __clz(bits) - 149) - 14;
}

// One warp splits one row. Also gives each row's largest magnitude and sum of magnitudes, which bound what is lost to
// float16's exponent, and their maxima over all rows as bits (of floats that are not negative, so they compare as such;
// NaN above all).
__device__ __forceinline__ void split_rows(const float* from /* [rows, columns] */,
                                           half* to /* [rows, ⌈columns/64⌉, 2, 64]: high and low */,
                                           int* exponents /* [rows] */, float* largest /* [rows] or null */,
                                           float* total /* [rows] or null */, u32* most /* [2] or null */, int rows,
                                           int columns) {
  constexpr int kAhead = 4;
  allow_next();
  wait_for_previous();
  const int lane = threadIdx.x % 32, row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const float* source = from + static_cast<i64>(row) * columns;
  const int padded = (columns + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
  half* target = to + static_cast<i64>(row) * 2 * padded;

  u32 bits = 0;
  float sum = 0.0f;
#pragma unroll kAhead
  for (int c = lane * 4; c < columns; c += 128) {
    const Vec<float, 4> v = load<float, 4>(source + c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits = max(bits, __float_as_uint(v.at[i]) & 0x7FFFFFFFu);
      sum += fabsf(v.at[i]);
    }
  }
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    bits = max(bits, __shfl_xor_sync(~0u, bits, bit));
    sum += __shfl_xor_sync(~0u, sum, bit);
  }
  const int exponent = row_exponent(bits);
  if (lane == 0) {
    exponents[row] = exponent;
    if (largest) {
      largest[row] = __uint_as_float(bits);
      total[row] = sum;
    }
    if (most) {
      atomicMax(&most[0], bits);
      atomicMax(&most[1], __float_as_uint(sum) & 0x7FFFFFFFu);
    }
  }
  const PowerOfTwo scale = power_of_two(-exponent);
#pragma unroll kAhead
  for (int c = lane * 4; c < padded; c += 128) {
    float high[4] = {}, low[4] = {};
    if (c < columns) {
      const Vec<float, 4> v = load<float, 4>(source + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scaled = times(v.at[i], scale);
        half rounded;
        from_float(scaled, rounded);
        high[i] = to_float(rounded);
        low[i] = (scaled - high[i]) / kLowUnit;
      }
    }
    half* at = target + c / kSplitColumns * 2 * kSplitColumns + c % kSplitColumns;
    store<half, 4>(at, high);
    store<half, 4>(at + kSplitColumns, low);
  }
}

// Where float16's exponent loses more than float32 itself would: what the elements that `low` cannot hold may add up to,
// against the deviation of the column. Written so that NaN and infinity count as lost.
__device__ __forceinline__ bool split_loses(float x_largest, float x_total, float weight_largest, float weight_total,
                                            float deviation) {
  const float unit = 1.862645149230957e-09f;  // 2^-51 / 2^-22
  return !(unit * x_largest * weight_total + unit * x_total * weight_largest <= deviation);
}

}  // namespace gemmnorm
