// Column statistics of the product a: mean and M2 (sum of squared deviations) of every group of 64 rows, then their merge,
// which also updates the running statistics. At both levels M2 is taken about the mean, which is safe for |mean| >> std,
// and every sum has a fixed order: the same bits come out of every run.
//
// `kFold`: M2 of a; the merge multiplies by s². Otherwise M2 of the scaled tensor (a + b)·s, whose elements exist only in
// registers. The mean is that of a in both. These kernels serve in training, after cuBLAS; the
// merge also after a GEMM of this package that took the groups' statistics itself (gemm_stats_apply).
#pragma once
#include "memory_bound/group_tile.cuh"

namespace gemmnorm {

// Deviation from a mean: of a, or of (a + b)·s.
template <bool FOLD>
__device__ __forceinline__ float deviation_from(float mean, float a, float s, float b) {
  return FOLD ? a - mean : (a + b) * s - (mean + b) * s;
}

// group_mean and group_m2 of one group and TX·N features a block. Reads the product once, into registers.
template <class Config, class Params>
__device__ __forceinline__ void column_statistics(const Params& p) {
  using T = typename Config::T;
  constexpr int N = Config::kVector, TX = Config::kThreadsX;
  constexpr bool FOLD = Config::kFold;
  using Tile = GroupTile<N, TX, true>;
  __shared__ float shared[kThreads * N];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const Tile tile(p.batch, p.features);
  if (p.num_batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *p.num_batches_tracked += 1;

  Vec<T, N> a[Tile::kSteps];
  tile.load_rows(a, 0, [&](i64 at) { return load<T, N>(p.product + at); });
  float mean[N] = {}, m2[N] = {}, s[N], b[N];
  tile.visit_loaded(a, 0, [&](int, const Vec<T, N>& of_row) {
#pragma unroll
    for (int i = 0; i < N; ++i) mean[i] += of_row.value(i);
  });
  sum_over_lanes<N, TX>(mean, shared);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    mean[i] /= tile.rows;  // an exact division: the deviations of a constant column are zero
    s[i] = FOLD ? 1.0f : scale_of(p.scale, p.scale_stride, p.scale_value, tile.column + i);
    b[i] = FOLD ? 0.0f : value_or(p.bias, tile.column + i, 0.0f);
  }
  tile.visit_loaded(a, 0, [&](int, const Vec<T, N>& of_row) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float deviation = deviation_from<FOLD>(mean[i], of_row.value(i), s[i], b[i]);
      m2[i] += deviation * deviation;
    }
  });
  sum_over_lanes<N, TX>(m2, shared);
  if (tile.inside && tile.lane == 0) {
    store<float, N>(p.group_mean + tile.group_row(), mean);
    store<float, N>(p.group_m2 + tile.group_row(), m2);
  }
}

// The batch's statistics of one feature, with what the update of its running statistics needs.
struct FeatureStatistics {
  float mean, variance;  // of the product a; of z = (a + b)·s, biased
  float scale, bias;
  float running_mean, running_var;  // as they were; read early, with everything else of the feature
  float batches;                    // the count with this batch in it, for the cumulative average
  bool keep_running = false;        // somebody else updates the running statistics
};

// Stores mean and rstd = 1/sqrt(var(z) + eps), and updates the running statistics:
//   running_mean <- (1-m)·running_mean + m·s·(mean + b)       running_var <- (1-m)·running_var + m·var(z)·B/(B-1)
// with m = momentum, or 1 / batches where momentum is negative.
template <class Params>
__device__ __forceinline__ void finish_feature(const Params& p, int j, const FeatureStatistics& f) {
  p.mean[j] = f.mean;
  p.rstd[j] = 1.0f / sqrtf(f.variance + p.eps);
  if (!p.running_mean || f.keep_running) return;
  const float m = p.momentum >= 0.0f ? p.momentum : 1.0f / f.batches;
  from_float((1.0f - m) * f.running_mean + m * (f.scale * (f.mean + f.bias)), p.running_mean[j]);
  const float unbiased = f.variance * (static_cast<float>(p.batch) / (opaque(p.batch) - 1));  // no register for the factor
  from_float((1.0f - m) * f.running_var + m * unbiased, p.running_var[j]);
}

// What of it no launch of this call writes before its last: read early, it is there when the sums are.
template <class Params>
__device__ __forceinline__ FeatureStatistics read_feature(const Params& p, int j) {
  FeatureStatistics f = {};
  f.scale = scale_of(p.scale, p.scale_stride, p.scale_value, j);
  f.bias = value_or(p.bias, j, 0.0f);
  f.running_mean = value_or(p.running_mean, j, 0.0f);
  f.running_var = value_or(p.running_var, j, 0.0f);
  return f;
}
// The number of batches, where a launch before has counted this one.
template <class Params>
__device__ __forceinline__ float counted_batches(const Params& p) {
  return p.num_batches_tracked ? static_cast<float>(*p.num_batches_tracked) : 0.0f;
}

// Mean and M2 over all groups of the thread's feature, with whose scale and bias the deviations of z are taken.
struct MergedGroups {
  float mean, m2;
};

template <bool FOLD, class Params, class Merge>
__device__ __forceinline__ MergedGroups merge_groups(const Params& p, const Merge& merge, float s, float b, float* shared) {
  float within[2] = {}, between[1] = {};  // Σ rows·mean and ΣM2; Σ rows·deviation²
  merge.add_up(within, shared, [&](i64 at) { return make_float2(p.group_mean[at], p.group_m2[at]); },
               [](float (&sum)[2], float2 of_group, int rows) {
                 sum[0] += of_group.x * rows;
                 sum[1] += of_group.y;
               });
  const float mean = within[0] / p.batch;
  merge.add_up(between, shared, [&](i64 at) { return p.group_mean[at]; },  // out of the L1
               [&](float (&sum)[1], float of_group, int rows) {
                 const float deviation = deviation_from<FOLD>(mean, of_group, s, b);
                 sum[0] += deviation * deviation * rows;
               });
  return {mean, within[1] + between[0]};
}

// mean, rstd and running statistics of kColumns features a block, from group_mean and group_m2.
template <class Config, class Params>
__device__ __forceinline__ void merge_statistics(const Params& p) {
  constexpr bool FOLD = Config::kFold;
  __shared__ float shared[kThreads];
  GroupMerge<Config::kColumns, Config::kRows> merge(p.batch, p.features);
  const int j = merge.j;
  FeatureStatistics f = read_feature(p, min(j, p.features - 1));
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  f.batches = counted_batches(p);
  const MergedGroups of = merge_groups<FOLD>(p, merge, f.scale, f.bias, shared);
  if (!merge.inside() || merge.lane != 0) return;
  f.mean = of.mean;
  f.variance = (FOLD ? f.scale * f.scale * of.m2 : of.m2) / p.batch;
  finish_feature(p, j, f);
}

}  // namespace gemmnorm
