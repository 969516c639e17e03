// The gradient of the product, da, split twice for the products of the backward (arithmetic in common/fp16x2.cuh): with an
// exponent per row, its columns multiplied by the weight's powers of two, for dx = da·W; and with an exponent per column,
// its rows multiplied by x's, for dW = daᵀ·x. W and x are split as in the forward, and lack just those powers.
//
// A block, or where rows are short a warp, splits one row: reads da once, writes it split twice, or once where dx or dW is not
// wanted. It finds the row's exponent itself; those of the columns come from the kernel that made da. The planner takes it in
// training with split operands, before split_gemm.cuh.
#pragma once
#include "common/fp16x2.cuh"
#include "memory_bound/row_tile.cuh"

namespace gemmnorm {

template <class Config, class Params>
__device__ __forceinline__ void split_gradient(const Params& p) {
  __shared__ int maxima[kWarps];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  using Row = RowTile<Config::kRowThreads>;
  const int row = Row::row_of(blockIdx.x), padded = padded_columns(p.features);
  if (row >= p.batch) return;
  const int x_exponent = p.x_exponents[row];
  const Row tile(p.grad_product + static_cast<i64>(row) * p.features, p.features);
  // Without dx the weight has none; something is read in any case, so that loads stand under no condition.
  const int* weight_exponents = p.split_by_rows ? p.weight_exponents : p.column_exponents;
  int exponent = kLeastExponent;
  if (p.split_by_rows) {
    tile.visit(p.features, [&](int c, const Vec<float, 4>& v) {
      const Vec<int, 4> e = load_four(weight_exponents, c, p.features);
#pragma unroll
      for (int i = 0; i < 4; ++i) exponent = max(exponent, scaled_exponent(v.at[i], e.at[i]));
    });
    exponent = largest_of<Config::kRowThreads>(exponent, maxima);
    if (tile.lane == 0) p.row_exponents[row] = exponent;
  }

  const i64 start = static_cast<i64>(row) * 2 * padded;
  tile.visit(padded, [&](int c, const Vec<float, 4>& v) {
    float to_rows[4] = {}, to_columns[4] = {};
    if (c < p.features) {
      const Vec<int, 4> of_weight = load_four(weight_exponents, c, p.features);
      const Vec<int, 4> of_column = load_four(p.column_exponents, c, p.features);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to_rows[i] = times(v.at[i], power_of_two(in_range(of_weight.at[i] - exponent)));
        to_columns[i] = times(v.at[i], power_of_two(in_range(x_exponent - of_column.at[i])));
      }
    }
    if (p.split_by_rows) store_split(p.split_by_rows + start, c, to_rows);
    if (p.split_by_columns) store_split(p.split_by_columns + start, c, to_columns);
  });
}

}  // namespace gemmnorm
