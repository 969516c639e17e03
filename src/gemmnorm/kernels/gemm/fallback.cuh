// The float32 fallback: features whose fp16x2 operands were not enough, once more in float32 arithmetic. Returns at once
// where the list is empty.
//
// A feature is listed where its statistics are finished, or in evaluation where its row of the weight is split
// (Features::add_to_fallback). Blocks share out tiles of 128 rows by 64 listed features; y holds the product until the last
// tile of 64 features is there, whose block then normalises them (last-arriver reduction). The planner takes it behind every
// fused GEMM of split operands.
#pragma once
#include "gemm/features.cuh"

namespace gemmnorm {

// A tile of the product; K in steps of 16, one word of 16 bytes to a thread.
constexpr int kFallbackRows = 128, kFallbackColumns = 64, kFallbackStep = 16;
constexpr int kFallbackPartial = 128;  // of K, that is added up by itself: less error than one long sum

struct FallbackShared {
  alignas(16) float x[kFallbackStep][kFallbackRows + 4];  // transposed: what a thread reads together lies together
  alignas(16) float weight[kFallbackStep][kFallbackColumns + 4];
  int list[kFallbackColumns];  // features of the tile
  float sums[kWarps];
  u32 arrived;
};

// This thread's 8 × 4 of the tile's sums, rows 8·(thread / 16) and columns 4·(thread % 16) on, of `count` features.
template <class Params>
__device__ __forceinline__ void multiply_tile(const Params& p, FallbackShared& shared, int count, int first_row,
                                              float (&sum)[8][4]) {
  constexpr int kWords = kFallbackStep / 4, kPerX = kFallbackRows * kWords / kThreads;
  static_assert(kFallbackColumns * kWords == kThreads, "a thread loads one word of the weight");
  const int thread = threadIdx.x, word = thread % kWords * 4, row = thread / kWords;
  const float* of_weight = p.weight + static_cast<i64>(shared.list[min(row, count - 1)]) * p.in_features;
  const float* of_x[kPerX];
#pragma unroll
  for (int i = 0; i < kPerX; ++i)
    of_x[i] = p.x + static_cast<i64>(min(first_row + row + i * (kFallbackRows / kPerX), p.batch - 1)) * p.in_features;
  float part[8][4] = {};
#pragma unroll
  for (int r = 0; r < 8; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[r][c] = 0.0f;
  for (int k0 = 0; k0 < p.in_features; k0 += kFallbackStep) {
    const Vec<float, 4> w = load_four(of_weight, k0 + word, p.in_features);
    Vec<float, 4> a[kPerX];
#pragma unroll
    for (int i = 0; i < kPerX; ++i) a[i] = load_four(of_x[i], k0 + word, p.in_features);
    __syncthreads();  // everybody has read the step before
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      shared.weight[word + q][row] = w.at[q];
#pragma unroll
      for (int i = 0; i < kPerX; ++i) shared.x[word + q][row + i * (kFallbackRows / kPerX)] = a[i].at[q];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kFallbackStep; ++k) {
      const Vec<float, 4> low = load<float, 4>(&shared.x[k][thread / 16 * 8]);
      const Vec<float, 4> high = load<float, 4>(&shared.x[k][thread / 16 * 8 + 4]);
      const Vec<float, 4> b = load<float, 4>(&shared.weight[k][thread % 16 * 4]);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          part[r][c] += low.at[r] * b.at[c];
          part[r + 4][c] += high.at[r] * b.at[c];
        }
    }
    if ((k0 + kFallbackStep) % kFallbackPartial && k0 + kFallbackStep < p.in_features) continue;
#pragma unroll
    for (int r = 0; r < 8; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[r][c] += part[r][c];
        part[r][c] = 0.0f;
      }
  }
}

// Column j of the product, which other blocks wrote to y → in training its statistics, and y itself.
template <class Config, class Params>
__device__ __forceinline__ void normalize_column(const Params& p, int j, float* shared /* [kWarps] */) {
  using Activation = typename Config::Activation;
  const Features<Params> f(p, kGroupRows);
  const FeatureValues v = f.values(j);
  float centre = 0.0f;
  Coefficients of = {0.0f, v.shift, 0.0f};
  if (Config::kTraining) {
    float sum = 0.0f;
    for (int row = threadIdx.x; row < p.batch; row += kThreads) sum += load_l2(p.y + static_cast<i64>(row) * p.features + j);
    centre = sum_over<kThreads>(sum, shared) / p.batch;
    sum = 0.0f;
    for (int row = threadIdx.x; row < p.batch; row += kThreads) {
      const float deviation = load_l2(p.y + static_cast<i64>(row) * p.features + j) - centre;
      sum += deviation * deviation;
    }
    const float variance = v.s * v.s * sum_over<kThreads>(sum, shared) / p.batch;
    of.slope = v.slope() * (1.0f / sqrtf(variance + p.eps));
    if (threadIdx.x == 0) {
      FeatureStatistics statistics = read_feature(p, j);
      statistics.mean = centre;
      statistics.variance = variance;
      statistics.batches = counted_batches(p);
      finish_feature(p, j, statistics);
    }
    for (int g = threadIdx.x; g < f.groups; g += kThreads) p.group_mean[static_cast<i64>(g) * p.features + j] = 0.0f;
  } else {
    of = v.template coefficients<true>(p.eps);
  }
  for (int row = threadIdx.x; row < p.batch; row += kThreads) {
    const i64 at = static_cast<i64>(row) * p.features + j;
    const float a = load_l2(p.y + at);
    if (p.keep_product) p.stored_product[at] = a;
    p.y[at] = Activation::value(of.value<!Config::kTraining>(a - centre));
  }
}

template <class Config, class Params>
__device__ __forceinline__ void compute_fallback_features(const Params& p) {
  __shared__ FallbackShared shared;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) p.amax_state[0] = p.amax_state[1] = 0;  // self-resetting; not read here
  const int found = static_cast<int>(p.amax_state[kFlagged]);
  if (found == 0) return;
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&p.amax_state[kReaders], 1u) == gridDim.x - 1) p.amax_state[kReaders] = p.amax_state[kFlagged] = 0;
  const int row_tiles = (p.batch + kFallbackRows - 1) / kFallbackRows;
  const int chunks = (found + kFallbackColumns - 1) / kFallbackColumns;
  u32* const done = p.amax_state - (p.features + kFallbackColumns - 1) / kFallbackColumns;  // tiles of every chunk; self-resetting
  for (int item = blockIdx.x; item < chunks * row_tiles; item += gridDim.x) {
    const int chunk = item % chunks, first_row = item / chunks * kFallbackRows;
    const int columns = min(found - chunk * kFallbackColumns, kFallbackColumns);
    if (threadIdx.x < columns) shared.list[threadIdx.x] = p.fallback_features[chunk * kFallbackColumns + threadIdx.x];
    __syncthreads();
    float sum[8][4];
    multiply_tile(p, shared, columns, first_row, sum);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int row = first_row + threadIdx.x / 16 * 8 + r;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int column = threadIdx.x % 16 * 4 + c;
        if (row < p.batch && column < columns) p.y[static_cast<i64>(row) * p.features + shared.list[column]] = sum[r][c];
      }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.arrived = atomicAdd(&done[chunk], 1u);
      __threadfence();
    }
    __syncthreads();
    if (shared.arrived == row_tiles - 1) {
      if (threadIdx.x == 0) done[chunk] = 0;
      for (int n = 0; n < columns; ++n) normalize_column<Config>(p, shared.list[n], shared.sums);
    }
    __syncthreads();
  }
}

}  // namespace gemmnorm
