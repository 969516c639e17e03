// y = φ(slope·d + shift): scale, shift, normalisation and activation in one sweep over the product (common/affine.cuh).
//
// Reads the product once and writes y once, which may be the product's own memory where both have one type. The planner takes
// it after the product of cuBLAS, and after a GEMM of this package that only took statistics (gemm_stats_apply). It begins with
// rows that the L2 still has, kReversed with the last ones: the launch before ended there. column_statistics ends with the first.
#pragma once
#include "common/affine.cuh"
#include "memory_bound/group_tile.cuh"

namespace gemmnorm {

template <class Config, class Params>
__device__ __forceinline__ void normalize(const Params& p) {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using Activation = typename Config::Activation;
  constexpr int N = Config::kVector;
  constexpr Form FORM = Config::kForm;
  using Tile = GroupTile<N, Config::kThreadsX, Config::kReversed>;
  const Tile tile(p.batch, p.features);
  griddepcontrol_launch_dependents();
  Affine<FORM> affine[N];
  const auto prepare = [&] { tile.share_features(affine, [&](int j) { return forward_affine<FORM>(p, j); }); };
  // In evaluation the coefficients depend on no launch of this call: they are computed while the product is finished. Nobody
  // writes them meanwhile, because the product's own launch, cuBLAS', waits for all that the stream had before it.
  constexpr bool kKnown = FORM == Form::kRunning;
  if (kKnown) prepare();
  griddepcontrol_wait();
  if (kKnown && p.mean && tile.group == 0 && tile.owns_column()) {  // kept for the backward
    const int j = tile.first_column + static_cast<int>(threadIdx.x);
    p.mean[j] = to_float(p.running_mean[j]);
    p.rstd[j] = 1.0f / sqrtf(to_float(p.running_var[j]) + p.eps);
  }
  tile.template visit_rows<8>(
      [&](i64 at) { return load<T, N>(p.product + at); },
      [&] {
        if (!kKnown) prepare();
#pragma unroll
        for (int i = 0; i < N; ++i) affine[i] = affine[i].stored_minus(value_or(p.offset, tile.group_row() + i, 0.0f));
      },
      [&](int row, const Vec<T, N>& a) {
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = Activation::value(affine[i](a.value(i)));
        if (tile.inside) store<Y, N>(p.y + tile.at(row), out);
      });
}

}  // namespace gemmnorm
