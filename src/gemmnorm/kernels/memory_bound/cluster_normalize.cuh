// Statistics and normalisation of a product in one launch and one reading (training): a cluster of blocks owns a panel of
// columns at a time, the whole batch of it in its shared memory (common/cluster_panels.cuh).
//
// For every panel of the cluster: the mean, by sums of the deviations from the first row; M2 about the mean, and of float32
// the sum of the deviations, which corrects what rounding has cost the mean where the first row stands far out; then
// y = φ(slope·(a - mean) + shift) of the same rows, and copies of the next panel in their place. Reads the product once, writes
// y once, which may share the product's memory. Serves on Hopper, after cuBLAS, batches that a cluster of 8 holds.
#pragma once
#include "common/cluster_panels.cuh"
#include "common/feature.cuh"
#include "memory_bound/statistics.cuh"

namespace gemmnorm {

template <class Panels>
struct ClusterNormalizeShared {
  uint4 product[Panels::kSteps][kThreads];
  alignas(16) float mean[Panels::kColumns], slope[Panels::kColumns], shift[Panels::kColumns];  // per column
  typename Panels::Sums sums;
};

// Numbers that are summed for each column.
template <class T>
constexpr int kNormalizeSums = sizeof(T) == 4 ? 2 : 1;

template <class Config, class Params>
struct ClusterNormalize : ClusterPanels<Config, typename Config::T, kNormalizeSums<typename Config::T>> {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using Activation = typename Config::Activation;
  static constexpr bool kCorrects = kNormalizeSums<T> == 2;
  using Panels = ClusterPanels<Config, T, kNormalizeSums<T>>;
  using Panels::thread, Panels::rank, Panels::first_row, Panels::first_column, Panels::column, Panels::stride, Panels::tx;
  using Panels::N, Panels::kColumns;
  using Shared = ClusterNormalizeShared<Panels>;
  static_assert(sizeof(Shared) == Config::kSharedBytes, "the plan and ClusterNormalizeShared disagree");

  const Params& p;
  Shared& shared;
  float centre[N];     // of the thread's columns: the first row's values, then the means
  float own_centre;    // of the column that the thread owns
  RawFeature<Params> own = {};  // and what else is read for it
  i64 batches = 0;     // with this one

  __device__ __forceinline__ ClusterNormalize(const Params& p_, Shared& shared_)
      : Panels(p_.batch, p_.features), p(p_), shared(shared_) {}

  __device__ __forceinline__ void copy_row(int step, int row, int from_column) {
    cp_async_16(&shared.product[step][thread], p.product + static_cast<i64>(row) * p.features + from_column);
  }

  // Requests the vectors of column j, a panel ahead: nothing before this launch in its call writes them.
  __device__ __forceinline__ void read_own(int j) {
    if (thread >= kColumns || j >= p.features) return;
    own = RawFeature<Params>::load(p, j);
  }
  // The first row of the panel.
  __device__ __forceinline__ void read_first_row() {
    if (column < p.features) {
      const Vec<T, N> first = load<T, N>(p.product + column);
#pragma unroll
      for (int i = 0; i < N; ++i) centre[i] = first.value(i);
    }
    if (this->owns_column()) own_centre = to_float(p.product[first_column + thread]);
  }

  // Calls `visit(row, step, words)` for every row of the panel that the thread has in shared memory.
  template <class Visit>
  __device__ __forceinline__ void visit_words(const Visit& visit) const {
    this->visit_rows([&](int row, int step) {
      Vec<T, N> words;
      *reinterpret_cast<uint4*>(&words) = shared.product[step][thread];
      visit(row, step, words);
    });
  }
  // Sums of the deviations from `centre`; or of their squares, and where kCorrects of them too.
  template <bool SQUARES>
  __device__ __forceinline__ void sum_deviations(int count) const {
    float sum[N] = {}, rest[N] = {};
    visit_words([&](int, int, const Vec<T, N>& words) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float deviation = words.value(i) - centre[i];
        sum[i] += SQUARES ? deviation * deviation : deviation;
        if (SQUARES && kCorrects) rest[i] += deviation;
      }
    });
    this->store_sums(shared.sums, count, 0, sum);
    if constexpr (kCorrects) this->store_sums(shared.sums, count, 1, rest);
    this->exchange_sums(shared.sums, count);
  }

  // Owners of columns hand the mean to all threads.
  __device__ __forceinline__ void share_means(int count) {
    if (this->owns_column()) {
      own_centre += this->sum_of(shared.sums, count, 0) / p.batch;
      shared.mean[thread] = own_centre;
    }
    __syncthreads();
    read_columns<N>(&shared.mean[tx * N], [&](int i, float v) { centre[i] = v; });
  }
  // Likewise the coefficients; and one block of the cluster keeps what is kept of a feature.
  __device__ __forceinline__ void finish_features(int count) {
    if (this->owns_column()) {
      float correction = 0.0f;  // of the mean
      if constexpr (kCorrects) correction = this->sum_of(shared.sums, count, 1) / p.batch;
      const float squared = this->sum_of(shared.sums, count, 0) / p.batch - correction * correction;
      const FeatureValues v = own.values(p);
      const float variance = v.s * v.s * squared, slope = v.slope() * (1.0f / sqrtf(variance + p.eps));
      own_centre += correction;
      shared.slope[thread] = slope;
      shared.shift[thread] = v.shift - slope * correction;
      if (rank == 0) {
        finish_feature(p, first_column + thread,
                       {own_centre, variance, v.s, v.b, v.running_mean, v.running_var, static_cast<float>(batches)});
      }
    }
    __syncthreads();
  }

  // y of the panel, and copies of the next one in its place.
  __device__ __forceinline__ void store_results() {
    const int next_column = column + stride;
    float slope[N], shift[N];
    read_columns<N>(&shared.slope[tx * N], [&](int i, float v) { slope[i] = v; });
    read_columns<N>(&shared.shift[tx * N], [&](int i, float v) { shift[i] = v; });
    visit_words([&](int row, int step, const Vec<T, N>& words) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = Activation::value(slope[i] * (words.value(i) - centre[i]) + shift[i]);
      store<Y, N>(p.y + static_cast<i64>(first_row + row) * p.features + column, out);
      if (next_column < p.features) copy_row(step, first_row + row, next_column);
    });
  }

  // The last block to get here counts the batch, and resets the counter.
  __device__ __forceinline__ void count_batch() const {
    if (!p.num_batches_tracked) return;
    __syncthreads();
    if (thread != 0 || atomicAdd(p.counters, 1u) != gridDim.x - 1) return;
    *p.counters = 0;
    *p.num_batches_tracked += 1;
  }
};

template <class Config, class Params>
__device__ __forceinline__ void cluster_normalize(const Params& p) {
  using Block = ClusterNormalize<Config, Params>;
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  typename Block::Shared& shared = *reinterpret_cast<typename Block::Shared*>(dynamic_shared);
  Block block(p, shared);
  block.init_barriers(shared.sums);
  griddepcontrol_launch_dependents();
  block.read_own(block.first_column + block.thread);
  if (p.num_batches_tracked) block.batches = *p.num_batches_tracked + 1;
  griddepcontrol_wait();
  block.copy_first_panel([&](int step, int row) { block.copy_row(step, row, block.column); });
  if (Block::CLUSTER > 1) cluster_wait();

#pragma unroll 1
  for (int count = 0; block.first_column < p.features; block.move_to(block.first_column + block.stride), count += 2) {
    block.read_first_row();
    cp_async_wait_all();
    block.template sum_deviations<false>(count);
    block.share_means(count);
    block.template sum_deviations<true>(count + 1);
    block.finish_features(count + 1);
    block.read_own(block.first_column + block.stride + block.thread);
    block.store_results();
  }
  block.count_batch();
}

}  // namespace gemmnorm
