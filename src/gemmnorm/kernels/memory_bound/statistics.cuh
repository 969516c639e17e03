// Column statistics of the product: a mean and an M2 (sum of squared deviations) for every group of 64 rows, then
// their merge, which also updates the running statistics. Mean first, then M2 about that mean, at both levels: safe for
// |mean| >> std, and the order of every sum is fixed, so the same bits come out of every run.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

// FOLD: M2 of the product a; the merge multiplies by s². Otherwise M2 of the scaled tensor (a + b)·s, whose
// elements exist only in registers. The mean is that of a in both.
template <class Config, class Params>
__device__ __forceinline__ void column_statistics(const Params& p) {
  using T = typename Config::T;
  using L = typename Config::L;
  constexpr int N = Config::kVector, TX = Config::kThreadsX;
  constexpr bool FOLD = Config::kFold;
  using P = Panel<N, TX, 1, true>;
  __shared__ float shared[kThreads * N];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const P panel(p.batch, p.features);
  if (p.num_batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *p.num_batches_tracked += 1;

  const bool inside = panel.column < p.features;
  const T* first = p.product + panel.first_row * p.features + (inside ? panel.column : 0);
  Vec<T, N> a[P::kRows];
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
    a[r] = load<T, N>(first + panel.existing(r * P::kLanes + panel.lane) * p.features);
  }
  float mean[N];
#pragma unroll
  for (int i = 0; i < N; ++i) mean[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
    if (r * P::kLanes + panel.lane < panel.rows) {
#pragma unroll
      for (int i = 0; i < N; ++i) mean[i] += a[r].value(i);
    }
  }
  sum_over_lanes<N, TX>(mean, shared);
  float m2[N], s[N], b[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    mean[i] /= panel.rows;  // exactly, so that nothing is left of a constant column
    m2[i] = 0.0f;
    s[i] = FOLD || !inside ? 1.0f : scale_of(p.scale, p.scale_stride, p.scale_value, panel.column + i);
    b[i] = FOLD || !inside ? 0.0f : value_or(p.bias, panel.column + i, 0.0f);
  }
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
    if (r * P::kLanes + panel.lane < panel.rows) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float deviation = FOLD ? a[r].value(i) - mean[i]
                                     : (a[r].value(i) + b[i]) * s[i] - (mean[i] + b[i]) * s[i];
        m2[i] += deviation * deviation;
      }
    }
  }
  sum_over_lanes<N, TX>(m2, shared);
  if (inside && panel.lane == 0) {
    const i64 out = static_cast<i64>(panel.group) * p.features + panel.column;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      p.group_mean[out + i] = mean[i];
      p.group_m2[out + i] = m2[i];
    }
  }
}

// Threads of a merging block: kMergeColumns features by kMergeLanes lanes that share out the groups.
constexpr int kMergeColumns = 16;
constexpr int kMergeLanes = kThreads / kMergeColumns;

// Sum over the lanes of a merging block, in a fixed order.
__device__ __forceinline__ float sum_over_merge_lanes(float value, float* shared /* [kThreads] */) {
  __syncthreads();
  shared[threadIdx.x] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int l = 0; l < kMergeLanes; ++l) sum += shared[l * kMergeColumns + threadIdx.x % kMergeColumns];
  return sum;
}

// What the statistics of feature j become: rstd = 1/sqrt(var(z) + eps) and the running statistics,
//   running_mean <- (1-m)·running_mean + m·s·(mean + b)       running_var <- (1-m)·running_var + m·var(z)·B/(B-1)
// A negative momentum stands for the cumulative average: m = 1 / batches, the count with this batch in it.
template <class R>
__device__ __forceinline__ void finish_feature(int j, float mean_a, float variance, float s, float b, float batches,
                                               R* running_mean, R* running_var, float old_mean, float old_var,
                                               float momentum, float eps, float* mean, float* rstd, int batch) {
  mean[j] = mean_a;
  rstd[j] = 1.0f / sqrtf(variance + eps);
  if (!running_mean) return;
  const float m = momentum >= 0.0f ? momentum : 1.0f / batches;
  from_float((1.0f - m) * old_mean + m * (s * (mean_a + b)), running_mean[j]);
  const float unbiased = variance * (static_cast<float>(batch) / (opaque(batch) - 1));  // the factor needs no register
  from_float((1.0f - m) * old_var + m * unbiased, running_var[j]);
}

// Merges the groups of each feature. `batches_tracked` has been incremented.
template <class Config, class Params>
__device__ __forceinline__ void merge_statistics(const Params& p) {
  using L = typename Config::L;
  using R = typename Config::R;
  constexpr bool FOLD = Config::kFold;
  __shared__ float shared[kThreads];
  const int j = blockIdx.x * kMergeColumns + threadIdx.x % kMergeColumns;
  const int lane = threadIdx.x / kMergeColumns;
  const int groups = (p.batch + kGroupRows - 1) / kGroupRows;
  const bool inside = j < p.features;
  const float s = inside ? scale_of(p.scale, p.scale_stride, p.scale_value, j) : 1.0f;
  const float b = inside ? value_or(p.bias, j, 0.0f) : 0.0f;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  float sum = 0.0f;
  if (inside) {
#pragma unroll 4
    for (int g = lane; g < groups; g += kMergeLanes) {
      const int rows = min(kGroupRows, p.batch - g * kGroupRows);
      sum += p.group_mean[static_cast<i64>(g) * p.features + j] * rows;
    }
  }
  const float mu = sum_over_merge_lanes(sum, shared) / p.batch;
  sum = 0.0f;
  if (inside) {
#pragma unroll 4
    for (int g = lane; g < groups; g += kMergeLanes) {
      const int rows = min(kGroupRows, p.batch - g * kGroupRows);
      const i64 at = static_cast<i64>(g) * p.features + j;
      const float deviation = FOLD ? p.group_mean[at] - mu : (p.group_mean[at] + b) * s - (mu + b) * s;
      sum += p.group_m2[at] + deviation * deviation * rows;
    }
  }
  const float m2 = sum_over_merge_lanes(sum, shared);
  if (!inside || lane != 0) return;
  const float variance = (FOLD ? s * s * m2 : m2) / p.batch;
  const float batches = p.num_batches_tracked ? static_cast<float>(*p.num_batches_tracked) : 0.0f;
  finish_feature(j, mu, variance, s, b, batches, p.running_mean, p.running_var, value_or(p.running_mean, j, 0.0f),
                 value_or(p.running_var, j, 0.0f), p.momentum, p.eps, p.mean, p.rstd, p.batch);
}

}  // namespace gemmnorm
