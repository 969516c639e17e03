// The backward with respect to the product in one launch and one reading (training; formulas in gradient.cuh): a cluster
// of blocks owns a panel of columns at a time. Each block copies its rows of grad_y and the product into shared memory,
// takes the column sums, adds up those of the whole cluster, and computes the gradients from what it holds; what it has
// used of a panel it replaces by the next one's at once. Clusters: sm_90.
#pragma once
#include "common/column_sums.cuh"
#include "backward/gradient.cuh"

namespace gemmnorm {

constexpr int kWarps = kThreads / 32;

// A warp has ROWS rows of a panel, TX lanes along the features; a thread reads back only what it has copied.
template <class Y, int N, int TX, int ROWS>
struct PanelShared {
  static constexpr int kSteps = ROWS * TX / 32;      // of a warp through its rows
  static constexpr int kWords = N * sizeof(Y) / 16;  // of grad_y in a step
  uint4 product[kSteps][kThreads];
  uint4 grad_y[kSteps][kWords][kThreads];
  alignas(16) float mean[TX * N], slope[TX * N], shift[TX * N];  // per column: of the forward
  alignas(16) float mean_grad[TX * N], slope_grad[TX * N];       // and of the backward
  // Σg and Σ g·(a - mean) of the cluster's blocks, and before that of the warps, for which the next panel's place serves:
  // nothing arrives there until all of this block's are sent.
  alignas(16) float sums[2][kWarps][2][TX * N];
  u64 all_arrived[2];
};

// Calls `visit(row, step, a - mean, g)` for every row that the thread holds, N columns at a time.
template <class Activation, class T, class Y, int N, int TX, int ROWS, class Visit>
__device__ __forceinline__ void visit_rows(const PanelShared<Y, N, TX, ROWS>& shared, int rows,
                                           const float (&from_mean)[N], const float (&slope)[N], const float (&shift)[N],
                                           const Visit& visit) {
#pragma unroll 2
  for (int row = threadIdx.x % 32 / TX, step = 0; row < rows; row += 32 / TX, ++step) {
    Vec<T, N> a;
    Vec<Y, N> dy;
    *reinterpret_cast<uint4*>(&a) = shared.product[step][threadIdx.x];
#pragma unroll
    for (int w = 0; w < shared.kWords; ++w) reinterpret_cast<uint4*>(&dy)[w] = shared.grad_y[step][w][threadIdx.x];
    float deviation[N], grad[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      deviation[i] = a.value(i) + from_mean[i];
      grad[i] = dy.value(i);
      if (!Activation::identity) grad[i] = Activation::gradient(grad[i], slope[i] * deviation[i] + shift[i]);
    }
    visit(row, step, deviation, grad);
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

template <class Config, class Params>
__device__ __forceinline__ void panel_gradient(const Params& p) {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using L = typename Config::L;
  using R = typename Config::R;
  using Activation = typename Config::Activation;
  constexpr int TX = Config::kThreadsX, ROWS = Config::kRowsPerWarp, CLUSTER = Config::kCluster, SHARED_BYTES = Config::kSharedBytes;
  constexpr int N = 16 / sizeof(T), kColumns = TX * N, kLanes = 32 / TX, kPieces = 2 * kColumns / 4;
  constexpr u32 kArriving = CLUSTER * kPieces * sizeof(float4);
  using Shared = PanelShared<Y, N, TX, ROWS>;
  static_assert(CLUSTER <= kWarps, "blocks and warps take turns in PanelShared::sums");
  static_assert(kGroupRows % ROWS == 0, "a warp's rows lie in one group");
  static_assert(sizeof(Shared) == SHARED_BYTES, "the plan and PanelShared disagree");
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = threadIdx.x, warp = thread / 32, tx = thread % TX, lane = thread % 32 / TX;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int stride = static_cast<int>(gridDim.x) / CLUSTER * kColumns;  // from a cluster's panel to its next
  const int share = ((p.batch + ROWS - 1) / ROWS + CLUSTER - 1) / CLUSTER;  // warps of a block that have rows
  const int first_row = (rank * share + warp) * ROWS, existing = warp < share ? max(0, min(ROWS, p.batch - first_row)) : 0;
  // The warp's rows in a panel where the thread has columns from `column` on.
  const auto rows_of = [&](int column) { return column < p.features ? existing : 0; };
  const auto copy_row = [&](int step, int row, int column) {
    const i64 at = static_cast<i64>(row) * p.features + column;
    cp_async_16(&shared.product[step][thread], p.product + at);
#pragma unroll
    for (int w = 0; w < Shared::kWords; ++w)
      cp_async_16(&shared.grad_y[step][w][thread], p.grad_y + at + w * (16 / sizeof(Y)));
  };
  if (CLUSTER > 1) {
    if (thread == 0) {
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        mbarrier_init(&shared.all_arrived[turn], 1);
        mbarrier_expect_tx(&shared.all_arrived[turn], kArriving);
      }
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
  }
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  int first_column = static_cast<int>(blockIdx.x) / CLUSTER * kColumns;
  if (const int rows = rows_of(first_column + tx * N)) {
#pragma unroll
    for (int step = 0; step < Shared::kSteps; ++step)
      copy_row(step, first_row + min(step * kLanes + lane, rows - 1), first_column + tx * N);
  }
  struct {  // of the column that the thread owns, as they come: read a panel ahead
    L scale;
    R gamma, beta;
    float mean, rstd;
  } own = {};
  const auto read_own = [&](int j) {
    if (thread >= kColumns || j >= p.features) return;
    if (p.scale) own.scale = p.scale[static_cast<i64>(j) * p.scale_stride];
    if (p.bn_weight) own.gamma = p.bn_weight[j];
    if (p.bn_bias) own.beta = p.bn_bias[j];
    own.mean = p.mean[j];
    own.rstd = p.rstd[j];
  };
  read_own(first_column + thread);
  if (CLUSTER > 1) cluster_wait();

#pragma unroll 1
  for (int count = 0; first_column < p.features; first_column += stride, ++count) {
    const int column = first_column + tx * N, next_column = column + stride, j = first_column + thread;
    const int turn = count % 2;
    const bool owner = thread < kColumns && j < p.features;  // of a column
    const float s = p.scale ? to_float(own.scale) : p.scale_value, r = own.rstd;
    const float gamma = p.bn_weight ? to_float(own.gamma) : 1.0f;
    if (owner) {
      shared.mean[thread] = own.mean;
      shared.slope[thread] = gamma * s * r;
      shared.shift[thread] = p.bn_bias ? to_float(own.beta) : 0.0f;
      if (p.column_exponents && rank == 0) p.column_exponents[j] = kLeastExponent;
    }
    float from_mean[N] = {};  // what is to be added to a stored value
    if (p.offset && rows_of(column)) read_columns<N>(p.offset + static_cast<i64>(first_row / kGroupRows) * p.features + column, from_mean);
    __syncthreads();
    float slope[N], shift[N], centre[N], sum[N], dot[N];
    read_columns<N>(&shared.slope[tx * N], slope);
    read_columns<N>(&shared.shift[tx * N], shift);
    read_columns<N>(&shared.mean[tx * N], centre);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      from_mean[i] -= centre[i];
      sum[i] = dot[i] = 0.0f;
    }
    const auto add_row = [&](int, int, const float (&deviation)[N], const float (&grad)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sum[i] += grad[i];
        dot[i] += grad[i] * deviation[i];
      }
    };
    cp_async_wait_all();
    visit_rows<Activation, T>(shared, rows_of(column), from_mean, slope, shift, add_row);
    fold_lanes<N, TX>(sum, &shared.sums[1 - turn][warp][0][tx * N]);
    fold_lanes<N, TX>(dot, &shared.sums[1 - turn][warp][1][tx * N]);
    __syncthreads();

    const int piece = thread % kPieces;
    float4 total = {};
    if (thread < kPieces * CLUSTER) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 v = reinterpret_cast<const float4*>(shared.sums[1 - turn][w])[piece];
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
    }
    if (CLUSTER > 1) __syncthreads();  // a block that has got its sums may send the next panel's to where the warps' were
    if (thread < kPieces * CLUSTER) {
      float4* to = reinterpret_cast<float4*>(shared.sums[turn][rank]) + piece;
      if (CLUSTER > 1) st_async_remote(to, total, &shared.all_arrived[turn], thread / kPieces);
      else *to = total;
    }
    if (CLUSTER == 1) __syncthreads();
    else if (thread < kColumns) mbarrier_wait_cluster(&shared.all_arrived[turn], count / 2 % 2);
    if (CLUSTER > 1 && thread == 0) mbarrier_expect_tx(&shared.all_arrived[turn], kArriving);
    if (owner) {
      float all = 0.0f, h = 0.0f;
#pragma unroll
      for (int block = 0; block < CLUSTER; ++block) {
        all += shared.sums[turn][block][0][thread];
        h += shared.sums[turn][block][1][thread];
      }
      shared.mean_grad[thread] = all / p.batch;
      shared.slope_grad[thread] = s * s * r * r * h / p.batch;
      if (rank == 0) store_gradients(j, all, h, s, r, gamma, p.eps, p.grad_bias, p.grad_scale, p.grad_bn_weight, p.grad_bn_bias);
    }
    __syncthreads();

    read_own(j + stride);
    float constant[N], linear[N];
    int most[N];
    read_columns<N>(&shared.mean_grad[tx * N], constant);
    read_columns<N>(&shared.slope_grad[tx * N], linear);
#pragma unroll
    for (int i = 0; i < N; ++i) most[i] = kLeastExponent;
    const auto store_row = [&](int row, int step, const float (&deviation)[N], const float (&grad)[N]) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = slope[i] * (grad[i] - constant[i] - deviation[i] * linear[i]);
      store<T, N>(p.grad_product + static_cast<i64>(first_row + row) * p.features + column, out);
      if (next_column < p.features) copy_row(step, first_row + row, next_column);
      if (p.column_exponents) {
        const int exponent = p.x_exponents[first_row + row];
#pragma unroll
        for (int i = 0; i < N; ++i) most[i] = max(most[i], scaled_exponent(out[i], exponent));
      }
    };
    visit_rows<Activation, T>(shared, rows_of(column), from_mean, slope, shift, store_row);
    if (p.column_exponents && column < p.features) {
#pragma unroll
      for (int i = 0; i < N; ++i) atomicMax(&p.column_exponents[column + i], most[i]);
    }
  }
}

}  // namespace gemmnorm
