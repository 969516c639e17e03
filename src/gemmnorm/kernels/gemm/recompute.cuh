// Features whose split operands were not enough, once more in float32 arithmetic; nothing where there are none. In
// training whoever merges a feature's statistics puts it on the list (Guard), in evaluation who splits the weight does
// (split_ahead.cuh).
#pragma once
#include "gemm/features.cuh"

namespace gemmnorm {

// A tile of their product: 128 rows of x by 64 features of the list, K in steps of 16, from float4 to float4.
constexpr int kAgainRows = 128, kAgainColumns = 64, kAgainStep = 16;
constexpr int kAgainPart = 128;  // of K that is added up by itself: less error than one long sum

struct AgainShared {
  alignas(16) float x[kAgainStep][kAgainRows + 4];  // a word of K to a row: what is read together lies together
  alignas(16) float weight[kAgainStep][kAgainColumns + 4];
};

// This thread's 8 × 4 of the tile's sums, rows 8·(thread / 16) and columns 4·(thread % 16) on. `list` has `count` features.
__device__ __forceinline__ void multiply_tile(const float* x, const float* weight, const int* list, int count,
                                              int first_row, AgainShared& shared, float (&sum)[8][4], int batch,
                                              int in_features) {
  constexpr int kWords = kAgainStep / 4, kPerX = kAgainRows * kWords / kThreads;
  static_assert(kAgainColumns * kWords == kThreads, "a thread loads one word of the weight");
  const int thread = threadIdx.x, word = thread % kWords * 4, row = thread / kWords;
  const float* of_weight = weight + static_cast<i64>(list[min(row, count - 1)]) * in_features;
  const float* of_x[kPerX];
#pragma unroll
  for (int i = 0; i < kPerX; ++i)
    of_x[i] = x + static_cast<i64>(min(first_row + row + i * (kAgainRows / kPerX), batch - 1)) * in_features;
  float part[8][4] = {};
#pragma unroll
  for (int r = 0; r < 8; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[r][c] = 0.0f;
  for (int k0 = 0; k0 < in_features; k0 += kAgainStep) {
    const bool inside = k0 + word < in_features;
    const Vec<float, 4> w = inside ? load<float, 4>(of_weight + k0 + word) : Vec<float, 4>{};
    Vec<float, 4> a[kPerX];
#pragma unroll
    for (int i = 0; i < kPerX; ++i) a[i] = inside ? load<float, 4>(of_x[i] + k0 + word) : Vec<float, 4>{};
    __syncthreads();  // the step before is read
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      shared.weight[word + q][row] = w.at[q];
#pragma unroll
      for (int i = 0; i < kPerX; ++i) shared.x[word + q][row + i * (kAgainRows / kPerX)] = a[i].at[q];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kAgainStep; ++k) {
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
    if ((k0 + kAgainStep) % kAgainPart && k0 + kAgainStep < in_features) continue;
#pragma unroll
    for (int r = 0; r < 8; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[r][c] += part[r][c];
        part[r][c] = 0.0f;
      }
  }
}

// Sum over a block, in a fixed order, handed to every thread.
__device__ __forceinline__ float sum_over_block(float value, float* shared /* [kThreads / 32] */) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) value += __shfl_xor_sync(~0u, value, bit);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) sum += shared[w];
  return sum;
}

// The product's column j, in y → its statistics, where they are the batch's, and y itself. Other blocks wrote it.
template <bool TRAINING, class Activation, class Params>
__device__ __forceinline__ void normalize_column(const Features<Params>& f, int j, float* product, float* y,
                                                 float* shared /* [kThreads / 32] */) {
  const float s = f.s(j), b = f.b(j);
  float centre, r;
  if (TRAINING) {
    float sum = 0.0f;
    for (int row = threadIdx.x; row < f.p.batch; row += kThreads) sum += load_l2(y + static_cast<i64>(row) * f.p.features + j);
    centre = sum_over_block(sum, shared) / f.p.batch;
    sum = 0.0f;
    for (int row = threadIdx.x; row < f.p.batch; row += kThreads) {
      const float deviation = load_l2(y + static_cast<i64>(row) * f.p.features + j) - centre;
      sum += deviation * deviation;
    }
    const float variance = s * s * sum_over_block(sum, shared) / f.p.batch;
    r = 1.0f / sqrtf(variance + f.p.eps);
    if (threadIdx.x == 0) {  // the counter counts this batch already
      const float batches = f.p.num_batches_tracked ? static_cast<float>(*f.p.num_batches_tracked) : 0.0f;
      finish_feature(j, centre, variance, s, b, batches, f.p.running_mean, f.p.running_var, value_or(f.p.running_mean, j, 0.0f),
                     value_or(f.p.running_var, j, 0.0f), f.p.momentum, f.p.eps, f.p.mean, f.p.rstd, f.p.batch);
    }
    for (int g = threadIdx.x; g < f.groups; g += kThreads) f.p.group_mean[static_cast<i64>(g) * f.p.features + j] = 0.0f;
  } else {
    centre = to_float(f.p.running_mean[j]);
    r = 1.0f / sqrtf(to_float(f.p.running_var[j]) + f.p.eps);
  }
  const float slope = f.gamma(j) * f.s(j) * r, origin = TRAINING ? centre : 0.0f;
  const float shift = f.shift(j) + (TRAINING ? 0.0f : value_or(f.p.bn_weight, j, 1.0f) * r * (s * b - centre));
  for (int row = threadIdx.x; row < f.p.batch; row += kThreads) {
    const i64 at = static_cast<i64>(row) * f.p.features + j;
    const float a = load_l2(y + at);
    if (product) product[at] = a;
    y[at] = Activation::value(slope * (a - origin) + shift);
  }
}

// The blocks share out the tiles; who finishes the last one of 64 features normalises them. y serves as memory for the
// product's columns until then.
template <class Config, class Params>
__device__ __forceinline__ void recompute_features(const Params& p) {
  using Activation = typename Config::Activation;
  constexpr bool TRAINING = Config::kTraining;
  __shared__ AgainShared shared;
  __shared__ float sums[kThreads / 32];
  __shared__ int list[kAgainColumns];
  __shared__ u32 arrived;
  const Features<Params> f(p, kGroupRows);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) p.most[0] = p.most[1] = 0;  // nobody reads them here
  const u32 found = p.most[kFlagged];
  if (found == 0) return;
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&p.most[kReaders], 1u) == gridDim.x - 1) p.most[kReaders] = p.most[kFlagged] = 0;
  const int count = static_cast<int>(found), row_tiles = (p.batch + kAgainRows - 1) / kAgainRows;
  const int chunks = (count + kAgainColumns - 1) / kAgainColumns;
  u32* const done = p.most - (p.features + kAgainColumns - 1) / kAgainColumns;
  for (int item = blockIdx.x; item < chunks * row_tiles; item += gridDim.x) {
    const int chunk = item % chunks, first_row = item / chunks * kAgainRows;
    const int columns = min(count - chunk * kAgainColumns, kAgainColumns);
    if (threadIdx.x < columns) list[threadIdx.x] = p.flagged[chunk * kAgainColumns + threadIdx.x];
    __syncthreads();
    float sum[8][4];
    multiply_tile(p.x, p.weight, list, columns, first_row, shared, sum, p.batch, p.in_features);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int row = first_row + threadIdx.x / 16 * 8 + r;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int column = threadIdx.x % 16 * 4 + c;
        if (row < p.batch && column < columns) p.y[static_cast<i64>(row) * p.features + list[column]] = sum[r][c];
      }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      arrived = atomicAdd(&done[chunk], 1u);
      __threadfence();
    }
    __syncthreads();
    if (arrived == row_tiles - 1) {
      if (threadIdx.x == 0) done[chunk] = 0;
      for (int n = 0; n < columns; ++n)
        normalize_column<TRAINING, Activation>(f, list[n], p.keep_product ? p.stored_product : nullptr, p.y, sums);
    }
    __syncthreads();
  }
}

}  // namespace gemmnorm
