// The backward with respect to the product in one launch and one reading (training; formulas in gradient.cuh): a cluster
// of blocks owns a panel of columns. Each block copies its rows of grad_y and the product into shared memory, takes the
// column sums, adds up those of the whole cluster, and computes the gradients from what it holds. Clusters: sm_90.
#pragma once
#include "gradient.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

constexpr int kWarps = kThreads / 32;

// A warp takes a group of 64 rows at a time, TX lanes along the features; a thread reads back only what it has copied.
template <class Y, int N, int TX, int GROUPS>
struct PanelShared {
  static constexpr int kSteps = kGroupRows * TX / 32;        // of a warp through a group
  static constexpr int kWords = N * sizeof(Y) / 16;          // of grad_y in a step
  uint4 product[GROUPS][kSteps][kThreads];
  uint4 grad_y[GROUPS][kSteps][kWords][kThreads];
  alignas(16) float mean[TX * N], slope[TX * N], shift[TX * N];  // per column: of the forward
  alignas(16) float mean_grad[TX * N], slope_grad[TX * N];       // and of the backward
  float2 sums[kWarps][TX * N];                                   // Σg and Σ g·(a - mean) of each warp
  float2 block_sums[TX * N];
};

// Calls `visit(row, a - mean, g)` for every row of a group that the thread holds, N columns at a time.
template <class Activation, class T, class Y, int N, int TX, int GROUPS, class Visit>
__device__ __forceinline__ void visit_rows(const PanelShared<Y, N, TX, GROUPS>& shared, int g, int rows,
                                           const float (&from_mean)[N], const float (&slope)[N], const float (&shift)[N],
                                           const Visit& visit) {
#pragma unroll 2
  for (int row = threadIdx.x % 32 / TX, step = 0; row < rows; row += 32 / TX, ++step) {
    Vec<T, N> a;
    Vec<Y, N> dy;
    *reinterpret_cast<uint4*>(&a) = shared.product[g][step][threadIdx.x];
#pragma unroll
    for (int w = 0; w < shared.kWords; ++w) reinterpret_cast<uint4*>(&dy)[w] = shared.grad_y[g][step][w][threadIdx.x];
    float deviation[N], grad[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      deviation[i] = to_float(a.at[i]) + from_mean[i];
      grad[i] = to_float(dy.at[i]);
      if (!Activation::identity) grad[i] = Activation::gradient(grad[i], slope[i] * deviation[i] + shift[i]);
    }
    visit(row, deviation, grad);
  }
}

template <int N>
__device__ __forceinline__ void read_columns(const float* from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
  }
}

template <class T, class Y, class L, class R, int TX, int GROUPS /* of a warp, at most */, int CLUSTER,
          int SHARED_BYTES, class Activation>
__device__ __forceinline__ void panel_gradient(const Y* grad_y /* [batch, features] */,
                                               const T* product /* [batch, features] */,
                                               const float* offset /* [groups, features] or null */,
                                               const L* scale /* [features] or [1] or null */, int scale_stride,
                                               float scale_value, const float* mean /* [features] */,
                                               const float* rstd /* [features] */,
                                               const R* bn_weight /* [features] or null */,
                                               const R* bn_bias /* [features] or null */, float eps,
                                               const int* x_exponents /* [batch] or null */,
                                               int* column_exponents /* [features] or null */,
                                               L* grad_bias /* [features] or null */,
                                               float* grad_scale /* [features] or null */,
                                               R* grad_bn_weight /* [features] or null */,
                                               R* grad_bn_bias /* [features] or null */,
                                               T* grad_product /* [batch, features] */, int batch, int features) {
  constexpr int N = 16 / sizeof(T), kColumns = TX * N, kLanes = 32 / TX;
  using Shared = PanelShared<Y, N, TX, GROUPS>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "the plan and PanelShared disagree");
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = threadIdx.x, warp = thread / 32, tx = thread % TX, lane = thread % 32 / TX;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int first_column = static_cast<int>(blockIdx.x) / CLUSTER * kColumns, column = first_column + tx * N;
  const int groups = (batch + kGroupRows - 1) / kGroupRows, share = (groups + CLUSTER - 1) / CLUSTER;
  const int first_group = rank * share + warp, end_group = column < features ? min((rank + 1) * share, groups) : 0;
  // Rows of the warp's g-th group, none beyond the block's share.
  const auto rows_of = [&](int g) {
    const int group = first_group + g * kWarps;
    return group < end_group ? min(kGroupRows, batch - group * kGroupRows) : 0;
  };
  allow_next();
  wait_for_previous();

#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    if (const int rows = rows_of(g)) {
#pragma unroll
      for (int s = 0; s < Shared::kSteps; ++s) {
        const int row = (first_group + g * kWarps) * kGroupRows + min(s * kLanes + lane, rows - 1);
        const i64 at = static_cast<i64>(row) * features + column;
        copy_16_bytes(&shared.product[g][s][thread], product + at);
#pragma unroll
        for (int w = 0; w < Shared::kWords; ++w)
          copy_16_bytes(&shared.grad_y[g][s][w][thread], grad_y + at + w * (16 / sizeof(Y)));
      }
    }
    commit_small_copies();
  }

  const int j = first_column + thread;
  const bool owner = thread < kColumns && j < features;  // of a column
  float s = 1.0f, r = 1.0f, gamma = 1.0f;
  if (owner) {
    s = scale_of(scale, scale_stride, scale_value, j);
    r = rstd[j];
    gamma = value_or(bn_weight, j, 1.0f);
    shared.mean[thread] = mean[j];
    shared.slope[thread] = gamma * s * r;
    shared.shift[thread] = value_or(bn_bias, j, 0.0f);
    if (column_exponents && rank == 0) column_exponents[j] = kLeastExponent;
  }
  __syncthreads();
  float slope[N], shift[N], sum[N], dot[N], from_mean[GROUPS][N];  // the last is what is to be added to a stored value
  read_columns<N>(&shared.slope[tx * N], slope);
  read_columns<N>(&shared.shift[tx * N], shift);
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = dot[i] = 0.0f;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    float own[N] = {}, centre[N];
    if (offset && rows_of(g)) read_columns<N>(offset + static_cast<i64>(first_group + g * kWarps) * features + column, own);
    read_columns<N>(&shared.mean[tx * N], centre);
#pragma unroll
    for (int i = 0; i < N; ++i) from_mean[g][i] = own[i] - centre[i];
  }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    if (GROUPS - 1 - g >= 2) wait_small_copies<2>();
    else if (GROUPS - 1 - g == 1) wait_small_copies<1>();
    else wait_small_copies<0>();
    const auto add_row = [&](int, const float (&deviation)[N], const float (&grad)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sum[i] += grad[i];
        dot[i] += grad[i] * deviation[i];
      }
    };
    visit_rows<Activation, T>(shared, g, rows_of(g), from_mean[g], slope, shift, add_row);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int bit = TX; bit < 32; bit *= 2) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], bit);
      dot[i] += __shfl_xor_sync(~0u, dot[i], bit);
    }
    if (lane == 0) shared.sums[warp][tx * N + i] = make_float2(sum[i], dot[i]);
  }
  __syncthreads();
  const auto add = [](float2& to, float2 v) {
    to.x += v.x;
    to.y += v.y;
  };
  float2 total = make_float2(0.0f, 0.0f);
  if (thread < kColumns) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) add(total, shared.sums[w][thread]);
    shared.block_sums[thread] = total;
  }
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
    total = make_float2(0.0f, 0.0f);
    if (thread < kColumns) {
#pragma unroll
      for (int block = 0; block < CLUSTER; ++block) add(total, load_remote(&shared.block_sums[thread], block));
    }
    cluster_arrive();  // no block leaves before all have read its sums
  }
  if (owner) {
    shared.mean_grad[thread] = total.x / batch;
    shared.slope_grad[thread] = s * s * r * r * total.y / batch;
    if (rank == 0)
      store_gradients(j, total.x, total.y, s, r, gamma, eps, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias);
  }
  __syncthreads();

  float constant[N], linear[N];
  int most[N];
  read_columns<N>(&shared.mean_grad[tx * N], constant);
  read_columns<N>(&shared.slope_grad[tx * N], linear);
#pragma unroll
  for (int i = 0; i < N; ++i) most[i] = kLeastExponent;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const i64 first_row = static_cast<i64>(first_group + g * kWarps) * kGroupRows;
    const auto store_row = [&](int row, const float (&deviation)[N], const float (&grad)[N]) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = slope[i] * (grad[i] - constant[i] - deviation[i] * linear[i]);
      store<T, N>(grad_product + (first_row + row) * features + column, out);
      if (column_exponents) {
        const int exponent = x_exponents[first_row + row];
#pragma unroll
        for (int i = 0; i < N; ++i) most[i] = max(most[i], scaled_exponent(out[i], exponent));
      }
    };
    visit_rows<Activation, T>(shared, g, rows_of(g), from_mean[g], slope, shift, store_row);
  }
  if (column_exponents && column < features) {
#pragma unroll
    for (int i = 0; i < N; ++i) atomicMax(&column_exponents[column + i], most[i]);
  }
  if (CLUSTER > 1) cluster_wait();
}

}  // namespace gemmnorm
