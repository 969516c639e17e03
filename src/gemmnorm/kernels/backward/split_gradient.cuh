// The operands of the backward's two products, split (arithmetic in common/fp16x2.cuh). For dx = da·W: the gradient of the
// product, da, with an exponent per row, its columns multiplied by the weight's powers of two. For dW = daᵀ·x: x as in the
// forward, and da with an exponent per column, its rows multiplied by x's powers of two. W and x lack just those powers.
//
// A block, or where rows are short a warp, splits one row. That of da for dx finds the row's exponent itself; those of its
// columns come from the kernel that made da, those of x from split_rows. The planner takes both in training with split
// operands, each before its product by split_gemm.cuh.
#pragma once
#include "common/fp16x2.cuh"
#include "memory_bound/row_tile.cuh"

namespace gemmnorm {

template <class Config, class Params>
__device__ __forceinline__ void split_for_grad_x(const Params& p) {
  __shared__ int maxima[kWarps];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  using Row = RowTile<Config::kRowThreads>;
  const int row = Row::row_of(blockIdx.x), padded = padded_columns(p.features);
  if (row >= p.batch) return;
  const Row tile(p.grad_product + static_cast<i64>(row) * p.features, p.features);
  int exponent = kLeastExponent;
  tile.visit(p.features, [&](int c, const Vec<float, 4>& v) {
    const Vec<int, 4> e = load_four(p.weight_exponents, c, p.features);
#pragma unroll
    for (int i = 0; i < 4; ++i) exponent = max(exponent, scaled_exponent(v.at[i], e.at[i]));
  });
  exponent = largest_of<Config::kRowThreads>(exponent, maxima);
  if (tile.lane == 0) p.row_exponents[row] = exponent;

  half* target = p.split_by_rows + static_cast<i64>(row) * 2 * padded;
  tile.visit(padded, [&](int c, const Vec<float, 4>& v) {
    const Vec<int, 4> e = load_four(p.weight_exponents, c, p.features);
    float scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[i] = times(v.at[i], power_of_two(in_range(e.at[i] - exponent)));
    store_split(target, c, scaled);
  });
}

// `split_by_columns` may be da's own memory: 64 columns take as many bytes split as they are, and belong to one warp.
template <class Config, class Params>
__device__ __forceinline__ void split_for_grad_weight(const Params& p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  using Row = RowTile<Config::kRowThreads>;
  constexpr int kWarpColumns = 128;
  static_assert(kWarpColumns % kSplitColumns == 0, "what 64 columns take belongs to one warp");
  const int row = Row::row_of(blockIdx.x);
  if (row >= p.batch) return;
  const Row x(p.x + static_cast<i64>(row) * p.in_features, p.in_features);
  const Row gradient(p.grad_product + static_cast<i64>(row) * p.features, p.features);
  const int exponent = p.x_exponents[row], padded_x = padded_columns(p.in_features), padded = padded_columns(p.features);

  half* to_x = p.split_x + static_cast<i64>(row) * 2 * padded_x;
  const PowerOfTwo scale = power_of_two(-exponent);
  x.visit(padded_x, [&](int c, const Vec<float, 4>& v) {
    const float scaled[4] = {times(v.at[0], scale), times(v.at[1], scale), times(v.at[2], scale), times(v.at[3], scale)};
    store_split(to_x, c, scaled);
  });

  half* target = p.split_by_columns + static_cast<i64>(row) * 2 * padded;
  const int whole_warps = (padded + kWarpColumns - 1) / kWarpColumns * kWarpColumns;
  gradient.visit(whole_warps, [&](int c, const Vec<float, 4>& v) {
    const Vec<int, 4> e = load_four(p.column_exponents, c, p.features);
    float scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[i] = times(v.at[i], power_of_two(in_range(exponent - e.at[i])));
    __syncwarp();  // all of the warp have read what they overwrite
    if (c < padded) store_split(target, c, scaled);
  });
}

}  // namespace gemmnorm
