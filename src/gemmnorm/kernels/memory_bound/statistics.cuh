// Column statistics of the product: a mean and an M2 (sum of squared deviations) for every group of 64 rows, then
// their merge, which also updates the running statistics. Mean first, then M2 about that mean, at both levels: safe for
// |mean| >> std, and the order of every sum is fixed, so the same bits come out of every run.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

// FOLD: M2 of the product a; the merge multiplies by s². Otherwise M2 of the scaled tensor (a + b)·s, whose
// elements exist only in registers. The mean is that of a in both.
template <class T, class L, int N, int TX, bool FOLD>
__device__ __forceinline__ void column_statistics(const T* product /* [batch, features] */,
                                                  const L* bias /* [features] or null */,
                                                  const L* scale /* [features] or [1] or null */, int scale_stride,
                                                  float scale_value, float* group_mean /* [groups, features] */,
                                                  float* group_m2 /* [groups, features] */,
                                                  i64* batches_tracked /* [1] or null: incremented */, int batch,
                                                  int features) {
  using P = Panel<N, TX, 1, true>;
  __shared__ float shared[kThreads * N];
  allow_next();
  wait_for_previous();
  const P panel(batch, features);
  if (batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *batches_tracked += 1;

  const bool inside = panel.column < features;
  const T* p = product + panel.first_row * features + (inside ? panel.column : 0);
  Vec<T, N> a[P::kRows];
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
    a[r] = load<T, N>(p + panel.existing(r * P::kLanes + panel.lane) * features);
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
    s[i] = FOLD || !inside ? 1.0f : scale_of(scale, scale_stride, scale_value, panel.column + i);
    b[i] = FOLD || !inside ? 0.0f : value_or(bias, panel.column + i, 0.0f);
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
    const i64 out = static_cast<i64>(panel.group) * features + panel.column;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      group_mean[out + i] = mean[i];
      group_m2[out + i] = m2[i];
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
  const float unbiased = variance * (static_cast<float>(batch) / (computed_anew(batch) - 1));  // the factor needs no register
  from_float((1.0f - m) * old_var + m * unbiased, running_var[j]);
}

// Merges the groups of each feature. `batches_tracked` has been incremented.
template <class L, class R, bool FOLD>
__device__ __forceinline__ void merge_statistics(const float* group_mean /* [groups, features] */,
                                                 const float* group_m2 /* [groups, features] */,
                                                 const L* bias /* [features] or null */,
                                                 const L* scale /* [features] or [1] or null */, int scale_stride,
                                                 float scale_value, R* running_mean /* [features] or null */,
                                                 R* running_var /* [features] or null */,
                                                 const i64* batches_tracked /* [1] or null */, float momentum,
                                                 float eps, float* mean /* [features] */, float* rstd /* [features] */,
                                                 int batch, int features) {
  __shared__ float shared[kThreads];
  const int j = blockIdx.x * kMergeColumns + threadIdx.x % kMergeColumns;
  const int lane = threadIdx.x / kMergeColumns;
  const int groups = (batch + kGroupRows - 1) / kGroupRows;
  const bool inside = j < features;
  const float s = inside ? scale_of(scale, scale_stride, scale_value, j) : 1.0f;
  const float b = inside ? value_or(bias, j, 0.0f) : 0.0f;
  allow_next();
  wait_for_previous();

  float sum = 0.0f;
  if (inside) {
#pragma unroll 4
    for (int g = lane; g < groups; g += kMergeLanes) {
      const int rows = min(kGroupRows, batch - g * kGroupRows);
      sum += group_mean[static_cast<i64>(g) * features + j] * rows;
    }
  }
  const float mu = sum_over_merge_lanes(sum, shared) / batch;
  sum = 0.0f;
  if (inside) {
#pragma unroll 4
    for (int g = lane; g < groups; g += kMergeLanes) {
      const int rows = min(kGroupRows, batch - g * kGroupRows);
      const i64 at = static_cast<i64>(g) * features + j;
      const float deviation = FOLD ? group_mean[at] - mu : (group_mean[at] + b) * s - (mu + b) * s;
      sum += group_m2[at] + deviation * deviation * rows;
    }
  }
  const float m2 = sum_over_merge_lanes(sum, shared);
  if (!inside || lane != 0) return;
  const float variance = (FOLD ? s * s * m2 : m2) / batch;
  const float batches = batches_tracked ? static_cast<float>(*batches_tracked) : 0.0f;
  finish_feature(j, mu, variance, s, b, batches, running_mean, running_var, value_or(running_mean, j, 0.0f),
                 value_or(running_var, j, 0.0f), momentum, eps, mean, rstd, batch);
}

}  // namespace gemmnorm
