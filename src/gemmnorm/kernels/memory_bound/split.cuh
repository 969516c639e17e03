// fp16x2 split of float32 operands ahead of the GEMM (arithmetic in common/fp16x2.cuh): a block splits one row, of the
// weight or of x. Reads x and W once, writes both split, and of every row its exponent.
//
// For the guard (split_loses) it also gives amax and abs_sum of the weight's rows, and the maxima of x's over all rows. The
// weight's rows come in descending order and x's last: what the GEMM reads first is then still in the L2. The planner takes
// it before every GEMM of split operands, for the first rows or for all, to prepare a weight, and in the backward.
#pragma once
#include "common/fp16x2.cuh"
#include "memory_bound/row_tile.cuh"

namespace gemmnorm {

template <class Config, class Params>
__device__ __forceinline__ void split_rows(const Params& p) {
  __shared__ int maxima[kThreads / 32];
  __shared__ float sums[kThreads / 32];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int block = blockIdx.x, padded = padded_columns(p.in_features);
  const bool of_weight = block < p.weight_rows;
  const int row = of_weight ? p.weight_rows - 1 - block : block - p.weight_rows;
  const RowTile tile((of_weight ? p.weight : p.x) + static_cast<i64>(row) * p.in_features, p.in_features);
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
#pragma unroll
  for (int bit = 16; bit; bit /= 2) abs_sum += __shfl_xor_sync(~0u, abs_sum, bit);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = abs_sum;
  amax_bits = static_cast<u32>(block_max(static_cast<int>(amax_bits), maxima));  // a barrier for `sums` too
  const int exponent = row_exponent(amax_bits);
  if (threadIdx.x == 0) {
    abs_sum = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) abs_sum += sums[w];
    (of_weight ? p.weight_exponents : p.x_exponents)[row] = exponent;
    if (of_weight && p.weight_amax) {
      p.weight_amax[row] = __uint_as_float(amax_bits);
      p.weight_abs_sum[row] = abs_sum;
    }
    if (!of_weight && p.amax_state) {
      atomicMax(&p.amax_state[0], amax_bits);
      atomicMax(&p.amax_state[1], magnitude_bits(abs_sum));
    }
  }
  if (of_weight && p.weight_checksums) {
    u64 code = 0;
    tile.visit(p.in_features, [&](int c, const Vec<float, 4>& v) { code += checksum(c, v); });
    atomicAdd(&p.weight_checksums[row], code);
  }
  const PowerOfTwo scale = power_of_two(-exponent);
  tile.visit(padded, [&](int c, const Vec<float, 4>& v) {
    const float scaled[4] = {times(v.at[0], scale), times(v.at[1], scale), times(v.at[2], scale), times(v.at[3], scale)};
    store_split(target, c, scaled);
  });
}

}  // namespace gemmnorm
