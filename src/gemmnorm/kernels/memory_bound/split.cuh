// fp16x2 split of float32 operands ahead of the GEMM (arithmetic in common/fp16x2.cuh): a block splits one row, of the
// weight or of x, or a warp does where rows are short. Reads x and W once, writes both split, and of every row its exponent.
//
// For the guard (split_loses) it also gives amax and abs_sum of the weight's rows, and the maxima of x's over all rows. The
// weight's rows come in descending order and x's last: what the GEMM reads first is then still in the L2. The planner takes
// it before every GEMM of split operands, for the first rows or for all, to prepare a weight, and in the backward, where of x
// it gives the exponents alone, and leaves the weight out where nobody wants it split.
#pragma once
#include "common/fp16x2.cuh"
#include "memory_bound/row_tile.cuh"

namespace gemmnorm {

// A maximum over all rows. What the L2 has grows only: few rows need the atomic.
__device__ __forceinline__ void raise(u32& largest, u32 value) {
  if (static_cast<u32>(load_l2(reinterpret_cast<const int*>(&largest))) < value) atomicMax(&largest, value);
}

// Sizes of a row, as bits of floats that are not negative.
struct RowSizes {
  u32 amax, abs_sum;
};

template <class Config, class Params>
__device__ __forceinline__ RowSizes split_row(const Params& p, bool of_weight, int row, int* maxima, float* sums) {
  using Row = RowTile<Config::kRowThreads>;
  const int padded = padded_columns(p.in_features);
  const Row tile((of_weight ? p.weight : p.x) + static_cast<i64>(row) * p.in_features, p.in_features);
  half* target = (of_weight ? p.split_weight : p.split_x) + static_cast<i64>(row) * 2 * padded;

  u32 amax_bits = 0;
  float abs_sum = 0.0f;
  tile.visit(p.in_features, [&](int, const Vec<float, 4>& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      amax_bits = max(amax_bits, magnitude_bits(v.at[i]));
      abs_sum += fabsf(v.at[i]);
    }
  });
  abs_sum = sum_over<Config::kRowThreads>(abs_sum, sums);
  amax_bits = static_cast<u32>(largest_of<Config::kRowThreads>(static_cast<int>(amax_bits), maxima));
  const int exponent = row_exponent(amax_bits);
  if (tile.lane == 0) {
    (of_weight ? p.weight_exponents : p.x_exponents)[row] = exponent;
    if (of_weight && p.weight_amax) {
      p.weight_amax[row] = __uint_as_float(amax_bits);
      p.weight_abs_sum[row] = abs_sum;
    }
  }
  if (of_weight && p.weight_checksums) {
    u64 code = 0;
    tile.visit(p.in_features, [&](int c, const Vec<float, 4>& v) { code += checksum(c, v); });
    atomicAdd(&p.weight_checksums[row], code);
  }
  if (!of_weight && !p.split_x) return {amax_bits, magnitude_bits(abs_sum)};
  const PowerOfTwo scale = power_of_two(-exponent);
  tile.visit(padded, [&](int c, const Vec<float, 4>& v) {
    const float scaled[4] = {times(v.at[0], scale), times(v.at[1], scale), times(v.at[2], scale), times(v.at[3], scale)};
    store_split(target, c, scaled);
  });
  return {amax_bits, magnitude_bits(abs_sum)};
}

template <class Config, class Params>
__device__ __forceinline__ void split_rows(const Params& p) {
  using Row = RowTile<Config::kRowThreads>;
  __shared__ int maxima[kWarps];
  __shared__ float sums[kWarps];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int block = blockIdx.x, of_weights = (p.weight_rows + Row::kRows - 1) / Row::kRows;
  const bool of_weight = block < of_weights;
  const int row = of_weight ? p.weight_rows - 1 - Row::row_of(block) : Row::row_of(block - of_weights);
  RowSizes sizes = {};
  if (of_weight ? p.split_weight && row >= 0 : row < p.batch) sizes = split_row<Config>(p, of_weight, row, maxima, sums);
  if (of_weight || !p.amax_state) return;
  // One atomic for the rows of all warps: the first blocks all find zero, and the L2 takes atomics of one place in turn.
  if constexpr (Row::kRows > 1) {
    sizes.amax = static_cast<u32>(largest_of<kThreads>(static_cast<int>(sizes.amax), maxima));
    sizes.abs_sum = static_cast<u32>(largest_of<kThreads>(static_cast<int>(sizes.abs_sum), maxima));
  }
  if (threadIdx.x == 0) {
    raise(p.amax_state[0], sizes.amax);
    raise(p.amax_state[1], sizes.abs_sum);
  }
}

}  // namespace gemmnorm
