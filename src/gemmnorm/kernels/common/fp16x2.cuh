// fp16x2 split: a float32 operand as two float16 for the tensor cores, v·2^-e = hi + lo·2^-11 with one exponent e per row.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

constexpr int kSplitColumns = 64;           // of K: hi of so many, then lo of the same
constexpr float kLowUnit = 1.0f / 2048.0f;  // what one unit of lo is worth

// Columns of an operand whose K is filled up with zeros to whole runs of kSplitColumns; a split row has twice as many numbers.
__device__ __forceinline__ int padded_columns(int columns) {
  return (columns + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
}

// 2^n for n in [-252, 254], as two factors that are exact and in float32's range.
struct PowerOfTwo {
  float first, second;
};
__device__ __forceinline__ PowerOfTwo power_of_two(int n) {
  const int half = n / 2;
  return {__uint_as_float(static_cast<u32>(half + 127) << 23), __uint_as_float(static_cast<u32>(n - half + 127) << 23)};
}
__device__ __forceinline__ float times(float v, const PowerOfTwo& p) { return v * p.first * p.second; }

// The bits of |v|. Those of numbers that are not negative compare as the numbers do, with NaN above all.
__device__ __forceinline__ u32 magnitude_bits(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }

// The exponent that brings a row whose largest magnitude has these bits to [2^14, 2^15).
__device__ __forceinline__ int row_exponent(u32 bits) {
  if (bits == 0) return 0;
  const int exponent = bits >> 23;
  return (exponent ? exponent - 127 : 31 - __clz(bits) - 149) - 14;
}

// Clamps a sum of two exponents to the range of power_of_two. Only zeros, and what is as good as zero, lie outside.
constexpr int kLeastExponent = -252;
__device__ __forceinline__ int in_range(int n) { return min(max(n, kLeastExponent), 254); }

// The exponent that brings v·2^e to [2^14, 2^15); kLeastExponent for zero.
__device__ __forceinline__ int scaled_exponent(float v, int e) {
  const u32 bits = magnitude_bits(v);
  return bits ? max(row_exponent(bits) + e, kLeastExponent) : kLeastExponent;
}

// Stores four neighbouring elements of a row, already times 2^-e, as hi and lo.
__device__ __forceinline__ void store_split(half* row /* of ⌈columns/64⌉ × 2 × 64 */, int column, const float (&scaled)[4]) {
  u32 high[2], low[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = scaled[2 * i], b = scaled[2 * i + 1];
    high[i] = pack(a, b, half{});
    const half rounded_a = {static_cast<u16>(high[i])}, rounded_b = {static_cast<u16>(high[i] >> 16)};
    low[i] = pack((a - to_float(rounded_a)) / kLowUnit, (b - to_float(rounded_b)) / kLowUnit, half{});
  }
  half* at = row + column / kSplitColumns * 2 * kSplitColumns + column % kSplitColumns;
  *reinterpret_cast<uint2*>(at) = make_uint2(high[0], high[1]);
  *reinterpret_cast<uint2*>(at + kSplitColumns) = make_uint2(low[0], low[1]);
}

// Checksum of a row: the sum of these over its words, in any order; that of zeros is zero. The bits of four elements, rotated
// by as many bytes, are added up and multiplied by a number for their place in 64 bits, so that sign flips, powers of two and
// exchanges do not cancel. 10 instructions: it runs beside the tensor cores' warps.
__device__ __forceinline__ u64 checksum(int column, const Vec<float, 4>& v) {
  u32 bits = 0, place = static_cast<u32>(column) * 0x9E3779B1u;
  place = (place ^ place >> 15) | 1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 own = __float_as_uint(v.at[i]);
    bits += i ? own << 8 * i | own >> (32 - 8 * i) : own;
  }
  return static_cast<u64>(bits) * place;
}

// The guard: whether a feature loses more to float16's exponent than float32 itself would. `deviation` is that of its
// column; amax and abs_sum (largest magnitude, sum of magnitudes) of x are the maxima over its rows, those of the weight of
// the feature's row. What elements that lo cannot hold may add up to is at most 2^-51·(amax_x·abs_sum_w + abs_sum_x·amax_w),
// and may be 2^-22 of the deviation. Written so that NaN and infinity count as lost.
__device__ __forceinline__ bool split_loses(float x_amax, float x_abs_sum, float weight_amax, float weight_abs_sum,
                                            float deviation) {
  const float unit = 1.862645149230957e-09f;  // 2^-51 / 2^-22
  return !(unit * x_amax * weight_abs_sum + unit * x_abs_sum * weight_amax <= deviation);
}

}  // namespace gemmnorm
