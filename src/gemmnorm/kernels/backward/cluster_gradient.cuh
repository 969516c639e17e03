// The backward with respect to the product in one launch and one reading (training; formulas in formulas.cuh): a cluster of
// blocks owns a panel of columns at a time, the whole batch of it in its shared memory.
//
// For every panel of the cluster: column sums of the rows in shared memory, per warp, per block and over DSMEM per cluster;
// the parameters' gradients; then da of the same rows. What da has used of a panel is replaced by the next panel's rows at
// once (cp.async), so that memory is busy throughout. Reads grad_y and the product once, writes da once.
//
// A warp has kRowsPerWarp rows of a panel, kThreadsX lanes of 16 bytes of the product side by side; a thread reads back only
// what it has copied, so copies need no barrier. The planner takes it on Hopper for batches that a cluster of 8 holds.
#pragma once
#include "backward/formulas.cuh"
#include "common/column_sums.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

constexpr int kWarps = kThreads / 32;

template <class Y, int N, int TX, int ROWS>
struct ClusterGradientShared {
  static constexpr int kSteps = ROWS * TX / 32;      // of a warp through its rows
  static constexpr int kWords = N * sizeof(Y) / 16;  // of grad_y in a step
  uint4 product[kSteps][kThreads];
  uint4 grad_y[kSteps][kWords][kThreads];
  alignas(16) float mean[TX * N], slope[TX * N], shift[TX * N];  // per column: of the forward
  alignas(16) float mean_grad[TX * N], slope_grad[TX * N];       // and of the backward
  // Partial sums Σg and h: of the cluster's blocks, and before that of this block's warps. Two buffers for panel after panel:
  // the warps of one panel use the next panel's, where nothing arrives until all of this block's sums are sent.
  alignas(16) float sums[2][kWarps][2][TX * N];
  u64 sums_arrived[2];
};

// Calls `take(i, from[i])` for N numbers of shared memory.
template <int N, class Take>
__device__ __forceinline__ void read_columns(const float* from, const Take& take) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    take(i, v.x), take(i + 1, v.y), take(i + 2, v.z), take(i + 3, v.w);
  }
}

template <class Config, class Params>
struct ClusterGradient {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using L = typename Config::L;
  using R = typename Config::R;
  using Activation = typename Config::Activation;
  static constexpr int TX = Config::kThreadsX, ROWS = Config::kRowsPerWarp, CLUSTER = Config::kCluster;
  static constexpr int N = 16 / sizeof(T), kColumns = TX * N, kLanes = 32 / TX;
  static constexpr int kPieces = 2 * kColumns / 4;  // of 16 bytes, of a block's sums
  static constexpr u32 kArriving = CLUSTER * kPieces * sizeof(float4);
  static constexpr bool kExponents = kHasField<decltype(&Params::column_exponents)>;
  using Shared = ClusterGradientShared<Y, N, TX, ROWS>;
  static_assert(CLUSTER <= kWarps, "blocks and warps share ClusterGradientShared::sums");
  static_assert(kGroupRows % ROWS == 0, "a warp's rows lie in one group");
  static_assert(sizeof(Shared) == Config::kSharedBytes, "the plan and ClusterGradientShared disagree");

  const Params& p;
  Shared& shared;
  int thread, warp, tx, lane;        // tx: along the features; lane: along the rows of a step
  int rank;                          // of the block in its cluster
  int first_row, rows;               // of the warp
  int first_column, column, stride;  // of the panel; the thread's first; from a panel to the cluster's next
  FeatureGradient<Form::kFolded> feature[N];
  struct {  // per-feature vectors of the column that the thread owns, as they are stored: read a panel ahead
    L scale;
    R gamma, beta;
    float mean, rstd;
  } own = {};

  __device__ __forceinline__ ClusterGradient(const Params& p_, Shared& shared_) : p(p_), shared(shared_) {
    thread = threadIdx.x, warp = thread / 32, tx = thread % TX, lane = thread % 32 / TX;
    rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warps = (p.batch + ROWS - 1) / ROWS, share = (warps + CLUSTER - 1) / CLUSTER;  // that have rows, of a block
    first_row = (rank * share + warp) * ROWS;
    rows = warp < share ? max(0, min(ROWS, p.batch - first_row)) : 0;
    stride = static_cast<int>(gridDim.x) / CLUSTER * kColumns;
    move_to(static_cast<int>(blockIdx.x) / CLUSTER * kColumns);
  }
  __device__ __forceinline__ void move_to(int first_column_) {
    first_column = first_column_;
    column = first_column + tx * N;
  }
  __device__ __forceinline__ bool owns_column() const { return thread < kColumns && first_column + thread < p.features; }
  // The warp's rows of a panel where the thread has columns.
  __device__ __forceinline__ int rows_of_thread() const { return column < p.features ? rows : 0; }

  __device__ __forceinline__ void init_barriers() {
    if (CLUSTER == 1) return;
    if (thread == 0) {
#pragma unroll
      for (int buffer = 0; buffer < 2; ++buffer) {
        mbarrier_init(&shared.sums_arrived[buffer], 1);
        mbarrier_expect_tx(&shared.sums_arrived[buffer], kArriving);
      }
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
  }

  __device__ __forceinline__ void copy_row(int step, int row, int from_column) {
    const i64 at = static_cast<i64>(row) * p.features + from_column;
    cp_async_16(&shared.product[step][thread], p.product + at);
#pragma unroll
    for (int w = 0; w < Shared::kWords; ++w)
      cp_async_16(&shared.grad_y[step][w][thread], p.grad_y + at + w * (16 / sizeof(Y)));
  }
  __device__ __forceinline__ void copy_first_panel() {
    const int existing = rows_of_thread();
    if (existing == 0) return;
#pragma unroll
    for (int step = 0; step < Shared::kSteps; ++step)
      copy_row(step, first_row + min(step * kLanes + lane, existing - 1), column);
  }

  // Requests the vectors of column j.
  __device__ __forceinline__ void read_own(int j) {
    if (thread >= kColumns || j >= p.features) return;
    if (p.scale) own.scale = p.scale[static_cast<i64>(j) * p.scale_stride];
    if (p.bn_weight) own.gamma = p.bn_weight[j];
    if (p.bn_bias) own.beta = p.bn_bias[j];
    own.mean = p.mean[j];
    own.rstd = p.rstd[j];
  }
  __device__ __forceinline__ float own_scale() const { return p.scale ? to_float(own.scale) : p.scale_value; }
  __device__ __forceinline__ float own_gamma() const { return p.bn_weight ? to_float(own.gamma) : 1.0f; }

  // The forward's coefficients: owners of columns hand them to all threads.
  __device__ __forceinline__ void share_coefficients() {
    if (owns_column()) {
      shared.mean[thread] = own.mean;
      shared.slope[thread] = own_gamma() * own_scale() * own.rstd;
      shared.shift[thread] = p.bn_bias ? to_float(own.beta) : 0.0f;
      if constexpr (kExponents)
        if (rank == 0) p.column_exponents[first_column + thread] = kLeastExponent;
    }
    float offset[N] = {};  // what the forward subtracted before it stored the product
    if (p.offset && rows_of_thread())
      read_columns<N>(p.offset + static_cast<i64>(first_row / kGroupRows) * p.features + column,
                      [&](int i, float v) { offset[i] = v; });
    __syncthreads();
    read_columns<N>(&shared.slope[tx * N], [&](int i, float v) { feature[i].slope = v; });
    read_columns<N>(&shared.shift[tx * N], [&](int i, float v) { feature[i].shift = v; });
    read_columns<N>(&shared.mean[tx * N], [&](int i, float v) { feature[i].centre = v - offset[i]; });
  }

  // Calls `visit(row, step, words)` for every row of the panel that the thread has in shared memory.
  template <class Visit>
  __device__ __forceinline__ void visit_rows(const Visit& visit) const {
    const int existing = rows_of_thread();
#pragma unroll 2
    for (int row = lane, step = 0; row < existing; row += kLanes, ++step) {
      GradientWords<T, Y, N> words;
      *reinterpret_cast<uint4*>(&words.product) = shared.product[step][thread];
#pragma unroll
      for (int w = 0; w < Shared::kWords; ++w) reinterpret_cast<uint4*>(&words.grad_y)[w] = shared.grad_y[step][w][thread];
      visit(row, step, words);
    }
  }

  // Partial sums of every warp, into `sums`.
  __device__ __forceinline__ void sum_rows(float (&sums)[kWarps][2][kColumns]) const {
    float sum[N] = {}, dot[N] = {};
    cp_async_wait_all();
    visit_rows([&](int, int, const GradientWords<T, Y, N>& words) {
      visit_gradients<Activation>(words, feature, [&](int i, float g, float deviation) {
        sum[i] += g;
        dot[i] += g * deviation;
      });
    });
    fold_lanes<N, TX>(sum, &sums[warp][0][tx * N]);
    fold_lanes<N, TX>(dot, &sums[warp][1][tx * N]);
    __syncthreads();
  }

  // Adds up the warps' partial sums and sends them to every block of the cluster; waits for those of all.
  __device__ __forceinline__ void exchange_sums(int buffer, u32 parity) {
    const int piece = thread % kPieces;
    float4 total = {};
    if (thread < kPieces * CLUSTER) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 v = reinterpret_cast<const float4*>(shared.sums[1 - buffer][w])[piece];
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
    }
    if (CLUSTER > 1) __syncthreads();  // a block that has our sums may send the next panel's to where the warps' were
    if (thread < kPieces * CLUSTER) {
      float4* to = reinterpret_cast<float4*>(shared.sums[buffer][rank]) + piece;
      if (CLUSTER > 1) st_async_remote(to, total, &shared.sums_arrived[buffer], thread / kPieces);
      else *to = total;
    }
    if (CLUSTER == 1) __syncthreads();
    else if (thread < kColumns) mbarrier_wait_cluster(&shared.sums_arrived[buffer], parity);
    if (CLUSTER > 1 && thread == 0) mbarrier_expect_tx(&shared.sums_arrived[buffer], kArriving);
  }

  // Owners of columns: the parameters' gradients, and the backward's coefficients for all threads.
  __device__ __forceinline__ void finish_features(const float (&sums)[kWarps][2][kColumns]) {
    if (owns_column()) {
      FeatureSums f = {0.0f, 0.0f, own_scale(), own.rstd, own_gamma()};
#pragma unroll
      for (int block = 0; block < CLUSTER; ++block) {
        f.sum += sums[block][0][thread];
        f.dot += sums[block][1][thread];
      }
      shared.mean_grad[thread] = f.mean_grad(p.batch);
      shared.slope_grad[thread] = f.slope_grad(p.batch);
      if (rank == 0) store_gradients(p, first_column + thread, f);
    }
    __syncthreads();
    read_columns<N>(&shared.mean_grad[tx * N], [&](int i, float v) { feature[i].mean_grad = v; });
    read_columns<N>(&shared.slope_grad[tx * N], [&](int i, float v) { feature[i].slope_grad = v; });
  }

  // da of the panel, and copies of the next one in its place.
  __device__ __forceinline__ void store_product_gradient() {
    const int next_column = column + stride;
    ColumnExponents<N> exponents;
    visit_rows([&](int row, int step, const GradientWords<T, Y, N>& words) {
      float out[N];
      visit_gradients<Activation>(words, feature, [&](int i, float g, float d) { out[i] = feature[i].of_product(g, d); });
      store<T, N>(p.grad_product + static_cast<i64>(first_row + row) * p.features + column, out);
      if (next_column < p.features) copy_row(step, first_row + row, next_column);
      if constexpr (kExponents) exponents.add(out, p.x_exponents[first_row + row]);
    });
    if constexpr (kExponents)
      if (column < p.features) exponents.merge_into(p.column_exponents + column);
  }
};

template <class Config, class Params>
__device__ __forceinline__ void cluster_gradient(const Params& p) {
  using Block = ClusterGradient<Config, Params>;
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  typename Block::Shared& shared = *reinterpret_cast<typename Block::Shared*>(dynamic_shared);
  Block block(p, shared);
  block.init_barriers();
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  block.copy_first_panel();
  block.read_own(block.first_column + block.thread);
  if (Block::CLUSTER > 1) cluster_wait();

#pragma unroll 1
  for (int count = 0; block.first_column < p.features; block.move_to(block.first_column + block.stride), ++count) {
    const int buffer = count % 2;
    block.share_coefficients();
    block.sum_rows(shared.sums[1 - buffer]);
    block.exchange_sums(buffer, count / 2 % 2);
    block.finish_features(shared.sums[buffer]);
    block.read_own(block.first_column + block.stride + block.thread);
    block.store_product_gradient();
  }
}

}  // namespace gemmnorm
