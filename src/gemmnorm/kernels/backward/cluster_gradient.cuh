// The backward with respect to the product in one launch and one reading (training; formulas in formulas.cuh): a cluster of
// blocks owns a panel of columns at a time, the whole batch of it in its shared memory (common/cluster_panels.cuh).
//
// For every panel of the cluster: column sums of the rows in shared memory; the parameters' gradients; then da of the same
// rows. What da has used of a panel is replaced by the next panel's rows at once (cp.async), so that memory is busy throughout.
// Reads grad_y and the product once, writes da once. Serves on Hopper batches that a cluster of 8 holds.
#pragma once
#include "backward/formulas.cuh"
#include "common/cluster_panels.cuh"

namespace gemmnorm {

template <class Y, class Panels>
struct ClusterGradientShared {
  static constexpr int kWords = Panels::N * sizeof(Y) / 16;  // of grad_y in a step
  uint4 product[Panels::kSteps][kThreads];
  uint4 grad_y[Panels::kSteps][kWords][kThreads];
  alignas(16) float mean[Panels::kColumns], slope[Panels::kColumns], shift[Panels::kColumns];  // per column: of the forward
  alignas(16) float mean_grad[Panels::kColumns], slope_grad[Panels::kColumns];                 // and of the backward
  typename Panels::Sums sums;                                                                  // Σg and h
};

template <class Config, class Params>
struct ClusterGradient : ClusterPanels<Config, typename Config::T, 2> {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using L = typename Config::L;
  using R = typename Config::R;
  using Activation = typename Config::Activation;
  using Panels = ClusterPanels<Config, T, 2>;
  using Panels::thread, Panels::rank, Panels::first_row, Panels::first_column, Panels::column, Panels::stride, Panels::tx;
  using Panels::N, Panels::kColumns, Panels::ROWS;
  static constexpr bool kExponents = kHasField<decltype(&Params::column_exponents)>;
  using Shared = ClusterGradientShared<Y, Panels>;
  static_assert(kGroupRows % ROWS == 0, "a warp's rows lie in one group");
  static_assert(sizeof(Shared) == Config::kSharedBytes, "the plan and ClusterGradientShared disagree");

  const Params& p;
  Shared& shared;
  FeatureGradient<Form::kFolded> feature[N];
  struct {  // per-feature vectors of the column that the thread owns, as they are stored: read a panel ahead
    L scale;
    R gamma, beta;
    float mean, rstd;
  } own = {};

  __device__ __forceinline__ ClusterGradient(const Params& p_, Shared& shared_)
      : Panels(p_.batch, p_.features), p(p_), shared(shared_) {}

  __device__ __forceinline__ void copy_row(int step, int row, int from_column) {
    const i64 at = static_cast<i64>(row) * p.features + from_column;
    cp_async_16(&shared.product[step][thread], p.product + at);
#pragma unroll
    for (int w = 0; w < Shared::kWords; ++w)
      cp_async_16(&shared.grad_y[step][w][thread], p.grad_y + at + w * (16 / sizeof(Y)));
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
    if (this->owns_column()) {
      shared.mean[thread] = own.mean;
      shared.slope[thread] = own_gamma() * own_scale() * own.rstd;
      shared.shift[thread] = p.bn_bias ? to_float(own.beta) : 0.0f;
      if constexpr (kExponents)
        if (rank == 0) p.column_exponents[first_column + thread] = kLeastExponent;
    }
    float offset[N] = {};  // what the forward subtracted before it stored the product
    if (p.offset && this->rows_of_thread())
      read_columns<N>(p.offset + static_cast<i64>(first_row / kGroupRows) * p.features + column,
                      [&](int i, float v) { offset[i] = v; });
    __syncthreads();
    read_columns<N>(&shared.slope[tx * N], [&](int i, float v) { feature[i].slope = v; });
    read_columns<N>(&shared.shift[tx * N], [&](int i, float v) { feature[i].shift = v; });
    read_columns<N>(&shared.mean[tx * N], [&](int i, float v) { feature[i].centre = v - offset[i]; });
  }

  // Calls `visit(row, step, words)` for every row of the panel that the thread has in shared memory.
  template <class Visit>
  __device__ __forceinline__ void visit_words(const Visit& visit) const {
    this->visit_rows([&](int row, int step) {
      GradientWords<T, Y, N> words;
      *reinterpret_cast<uint4*>(&words.product) = shared.product[step][thread];
#pragma unroll
      for (int w = 0; w < Shared::kWords; ++w) reinterpret_cast<uint4*>(&words.grad_y)[w] = shared.grad_y[step][w][thread];
      visit(row, step, words);
    });
  }

  // Partial sums of every warp.
  __device__ __forceinline__ void sum_rows(int count) const {
    float sum[N] = {}, dot[N] = {};
    cp_async_wait_all();
    visit_words([&](int, int, const GradientWords<T, Y, N>& words) {
      visit_gradients<Activation>(words, feature, [&](int i, float g, float deviation) {
        sum[i] += g;
        dot[i] += g * deviation;
      });
    });
    this->store_sums(shared.sums, count, 0, sum);
    this->store_sums(shared.sums, count, 1, dot);
  }

  // Owners of columns: the parameters' gradients, and the backward's coefficients for all threads.
  __device__ __forceinline__ void finish_features(int count) {
    if (this->owns_column()) {
      const FeatureSums f = {this->sum_of(shared.sums, count, 0), this->sum_of(shared.sums, count, 1), own_scale(), own.rstd,
                             own_gamma()};
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
    visit_words([&](int row, int step, const GradientWords<T, Y, N>& words) {
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
  block.init_barriers(shared.sums);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  block.copy_first_panel([&](int step, int row) { block.copy_row(step, row, block.column); });
  block.read_own(block.first_column + block.thread);
  if (Block::CLUSTER > 1) cluster_wait();

#pragma unroll 1
  for (int count = 0; block.first_column < p.features; block.move_to(block.first_column + block.stride), ++count) {
    block.share_coefficients();
    block.sum_rows(count);
    block.exchange_sums(shared.sums, count);
    block.finish_features(count);
    block.read_own(block.first_column + block.stride + block.thread);
    block.store_product_gradient();
  }
}

}  // namespace gemmnorm
