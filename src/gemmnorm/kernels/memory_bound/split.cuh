// float32 operands as two float16 each, for the tensor cores: v·2^-e = high + low·2^-11, with one exponent e per row.
#pragma once
#include "common/common.cuh"

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

// Sums of two exponents, in the range of power_of_two. Only zeros, and what is as good as zero, lie outside.
constexpr int kLeastExponent = -252;
__device__ __forceinline__ int in_range(int n) { return min(max(n, kLeastExponent), 254); }

// The exponent that brings v·2^e to [2^14, 2^15); kLeastExponent for zero.
__device__ __forceinline__ int scaled_exponent(float v, int e) {
  const u32 bits = __float_as_uint(v) & 0x7FFFFFFFu;
  return bits ? max(row_exponent(bits) + e, kLeastExponent) : kLeastExponent;
}

// v·2^-exponent as high + low·2^-11, four neighbouring elements of a row at a time.
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

constexpr int kHeldColumns = 8 * 4 * kThreads;  // of a row, that a block holds in registers between its two passes

// Calls `visit(column, four elements)` for a row: what is held, then the rest from memory. Zeros up to `end`.
template <class Visit>
__device__ __forceinline__ void visit_row(const float* row, const Vec<float, 4> (&held)[8], int columns, int end,
                                          const Visit& visit) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int c = (i * kThreads + threadIdx.x) * 4;
    if (c < end) visit(c, held[i]);
  }
#pragma unroll 1
  for (int c = kHeldColumns + threadIdx.x * 4; c < end; c += 4 * kThreads)
    visit(c, c < columns ? load<float, 4>(row + c) : Vec<float, 4>{});
}

__device__ __forceinline__ void hold_row(const float* row, Vec<float, 4> (&held)[8], int columns) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int c = (i * kThreads + threadIdx.x) * 4;
    held[i] = c < columns ? load<float, 4>(row + c) : Vec<float, 4>{};
  }
}

// What stands for the contents of a row, added up over its words in any order. The bits of four elements come together
// turned by as many bytes, and times a number for their place in 64 bits, so that sign flips, powers of two and exchanges do
// not cancel. That of zeros is zero. It costs the tensor cores' warps time: 10 instructions.
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

// The largest of a block's values, for every thread.
__device__ __forceinline__ int block_max(int value, int* shared /* [kThreads / 32] */) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) value = max(value, __shfl_xor_sync(~0u, value, bit));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) value = max(value, shared[w]);
  return value;
}

// A block splits one row, of the weight or of x. Also gives each row's largest magnitude and sum
// of magnitudes, which bound what is lost to float16's exponent, and the maxima of x's over all rows as bits (of floats
// that are not negative, so they compare as such; NaN above all). The weight's rows come in descending order and x's
// last: what the product reads first is then still in the L2.
template <class Config, class Params>
__device__ __forceinline__ void split_rows(const Params& p) {
  __shared__ int shared[kThreads / 32];
  __shared__ float sums[kThreads / 32];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int block = blockIdx.x;
  const bool of_weight = block < p.weight_rows;
  const int row = of_weight ? p.weight_rows - 1 - block : block - p.weight_rows;
  const int padded = (p.in_features + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
  const float* source = (of_weight ? p.weight : p.x) + static_cast<i64>(row) * p.in_features;
  half* target = (of_weight ? p.split_weight : p.split_x) + static_cast<i64>(row) * 2 * padded;

  Vec<float, 4> held[8];
  hold_row(source, held, p.in_features);
  u32 bits = 0;
  float sum = 0.0f;
  visit_row(source, held, p.in_features, p.in_features, [&](int, const Vec<float, 4>& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits = max(bits, __float_as_uint(v.at[i]) & 0x7FFFFFFFu);
      sum += fabsf(v.at[i]);
    }
  });
#pragma unroll
  for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  bits = static_cast<u32>(block_max(static_cast<int>(bits), shared));
  const int exponent = row_exponent(bits);
  if (threadIdx.x == 0) {
    sum = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) sum += sums[w];
    (of_weight ? p.weight_exponents : p.x_exponents)[row] = exponent;
    if (of_weight && p.weight_largest) {
      p.weight_largest[row] = __uint_as_float(bits);
      p.weight_total[row] = sum;
    }
    if (!of_weight && p.most) {
      atomicMax(&p.most[0], bits);
      atomicMax(&p.most[1], __float_as_uint(sum) & 0x7FFFFFFFu);
    }
  }
  if (of_weight && p.weight_checksums) {
    u64 code = 0;
    visit_row(source, held, p.in_features, p.in_features, [&](int c, const Vec<float, 4>& v) { code += checksum(c, v); });
    atomicAdd(&p.weight_checksums[row], code);
  }
  const PowerOfTwo scale = power_of_two(-exponent);
  visit_row(source, held, p.in_features, padded, [&](int c, const Vec<float, 4>& v) {
    const float scaled[4] = {times(v.at[0], scale), times(v.at[1], scale), times(v.at[2], scale), times(v.at[3], scale)};
    store_split(target, c, scaled);
  });
}

// The gradient of the product, split twice: with an exponent per row, its columns multiplied by the weight's powers of
// two, for dx = da·W; and with an exponent per column, its rows multiplied by x's, for dW = daᵀ·x. Split W and x lack
// just those powers. A row's exponent is found here, a column's came with the gradient: panel_gradient.cuh,
// gradient_units.cuh or gradient.cuh.
template <class Config, class Params>
__device__ __forceinline__ void split_gradient(const Params& p) {
  __shared__ int shared[kThreads / 32];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int row = blockIdx.x, own = p.x_exponents[row];
  const int padded = (p.features + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
  const float* source = p.grad_product + static_cast<i64>(row) * p.features;
  Vec<float, 4> held[8];
  hold_row(source, held, p.features);
  int most = kLeastExponent;
  visit_row(source, held, p.features, p.features, [&](int c, const Vec<float, 4>& v) {
    const Vec<int, 4> e = load<int, 4>(p.weight_exponents + c);
#pragma unroll
    for (int i = 0; i < 4; ++i) most = max(most, scaled_exponent(v.at[i], e.at[i]));
  });
  most = block_max(most, shared);
  if (threadIdx.x == 0) p.row_exponents[row] = most;
  half* by_rows = p.split_by_rows + static_cast<i64>(row) * 2 * padded;
  half* by_columns = p.split_by_columns + static_cast<i64>(row) * 2 * padded;
  visit_row(source, held, p.features, padded, [&](int c, const Vec<float, 4>& v) {
    float to_rows[4] = {}, to_columns[4] = {};
    if (c < p.features) {
      const Vec<int, 4> of_weight = load<int, 4>(p.weight_exponents + c), of_column = load<int, 4>(p.column_exponents + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to_rows[i] = times(v.at[i], power_of_two(in_range(of_weight.at[i] - most)));
        to_columns[i] = times(v.at[i], power_of_two(in_range(own - of_column.at[i])));
      }
    }
    store_split(by_rows, c, to_rows);
    store_split(by_columns, c, to_columns);
  });
}

// Where float16's exponent loses more than float32 itself would: what the elements that `low` cannot hold may add up to,
// against the deviation of the column. Written so that NaN and infinity count as lost.
__device__ __forceinline__ bool split_loses(float x_largest, float x_total, float weight_largest, float weight_total,
                                            float deviation) {
  const float unit = 1.862645149230957e-09f;  // 2^-51 / 2^-22
  return !(unit * x_largest * weight_total + unit * x_total * weight_largest <= deviation);
}

}  // namespace gemmnorm
