// Small problems in one launch without a counter in memory: a cluster of blocks owns a panel of columns. Its blocks share
// out the rows (ROWS tiles of 128) and K (SPLITS parts); partial products are added and statistics merged through
// distributed shared memory. sm_90a.
#pragma once
#include "ptx/hopper.cuh"
#include "panel_units.cuh"
#include "ptx/wgmma.cuh"

namespace gemmnorm {

constexpr int kClusterThreads = 288;  // two warpgroups that multiply, one warp that feeds
constexpr int kClusterRowBytes = 128;

template <class T>
struct ClusterOperand {
  static constexpr int kSize = 2;
};
template <>
struct ClusterOperand<tf32> {
  static constexpr int kSize = 4;
};

template <int BN, int STAGES, int COLUMNS>
struct ClusterShared {
  alignas(1024) unsigned char x[STAGES][kTileRows * kClusterRowBytes];
  alignas(1024) unsigned char weight[STAGES][BN * kClusterRowBytes];
  alignas(16) float partial[kTileRows][BN + 4];  // of this block's part of K
  float sums[8][COLUMNS / 2];                    // per warp
  float2 group[2][COLUMNS];                      // mean and M2 of each group of rows
  float slope[COLUMNS], shift[COLUMNS], centre[COLUMNS];
  u64 full[STAGES], empty[STAGES];
  u32 last;
};

template <class OP, class T, class Y, class L, class R, int BN, int STAGES, int SHARED_BYTES, int ROWS, int SPLITS,
          class Activation>
__device__ __forceinline__ void cluster_gemm(const TensorMap& map_x, const TensorMap& map_weight, T* product, Y* y,
                                             const L* bias, const L* scale, int scale_stride, float scale_value,
                                             R* running_mean, R* running_var, i64* batches_tracked, const R* bn_weight,
                                             const R* bn_bias, float momentum, float eps, float* group_mean, float* mean,
                                             float* rstd, u32* counters, int keep_product, int batch, int in_features,
                                             int features) {
  constexpr int kTileK = kClusterRowBytes / ClusterOperand<OP>::kSize;
  constexpr int kColumns = BN / SPLITS;  // that this block reduces and normalises, of the panel's
  constexpr int V = kColumns / 2;        // of them in a thread, all of one row
  static_assert(V >= 2 && V % 2 == 0, "a thread reads pairs");
  using Shared = ClusterShared<BN, STAGES, kColumns>;
  static_assert(sizeof(Shared) <= SHARED_BYTES, "the plan asks for too little shared memory");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const Features<L, R> f = {bias,    scale,   scale_stride, scale_value, running_mean, running_var, bn_weight, bn_bias,
                            batches_tracked, momentum, eps, group_mean, nullptr, mean, rstd, nullptr, nullptr, {},
                            batch, features, (batch + kGroupRows - 1) / kGroupRows};
  const int rank = cluster_rank(), row_tile = rank / SPLITS, split = rank % SPLITS;
  const int panel = blockIdx.x / (ROWS * SPLITS);
  const int steps_total = (in_features + kTileK - 1) / kTileK, per_split = (steps_total + SPLITS - 1) / SPLITS;
  const int from = min(split * per_split, steps_total), until = min(from + per_split, steps_total);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 2);
    }
    fence_barrier_init();
    fence_async_shared();
  }
  __syncthreads();
  wait_for_previous();
  allow_next();

  if (warp == 8) {
    if (lane == 0) {
      int stage = 0;
      u32 parity = 1;
      for (int k = from; k < until; ++k) {
        barrier_wait(&shared.empty[stage], parity);
        barrier_expect(&shared.full[stage], (kTileRows + BN) * kClusterRowBytes);
        copy_to_shared(shared.x[stage], map_x, &shared.full[stage], k * kTileK, row_tile * kTileRows, kEvictNormal);
        copy_to_shared(shared.weight[stage], map_weight, &shared.full[stage], k * kTileK, panel * BN, kEvictNormal);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
    const int consumer = warp / 4;
    float acc[BN / 2];
    if (from == until) {
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) acc[i] = 0.0f;
    }
    int stage = 0;
    u32 parity = 0;
    for (int k = from; k < until; ++k) {
      barrier_wait(&shared.full[stage], parity);
      wgmma_fence();
      const u64 a = matrix_descriptor(shared.x[stage] + consumer * kGroupRows * kClusterRowBytes);
      const u64 b = matrix_descriptor(shared.weight[stage]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Wgmma<OP, BN>::run(acc, a + i * kDescriptorStep, b + i * kDescriptorStep, (k > from || i) ? 1 : 0);
      wgmma_commit();
      if (k > from) {
        wgmma_wait<1>();
        if (thread % 128 == 0) barrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);
      }
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    wgmma_wait<0>();
    const int row = consumer * kGroupRows + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) {
      const int c = i * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(&shared.partial[row][c]) = make_float2(acc[4 * i], acc[4 * i + 1]);
      *reinterpret_cast<float2*>(&shared.partial[row + 8][c]) = make_float2(acc[4 * i + 2], acc[4 * i + 3]);
    }
  }
  cluster_arrive();
  cluster_wait();

  // Each thread adds up V columns of one row, in the order of the parts of K.
  const int row = thread % kTileRows, half_of = thread / kTileRows % 2, first = half_of * V;
  const int group_of = row / kGroupRows, group = row_tile * 2 + group_of;
  const int rows = f.rows(group);
  const bool inside = warp < 8 && row % kGroupRows < rows;
  float v[V];
#pragma unroll
  for (int i = 0; i < V; ++i) v[i] = 0.0f;
  if (warp < 8) {
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) {
#pragma unroll
      for (int i = 0; i < V; i += 2) {
        const float2 part = load_remote(
            reinterpret_cast<const float2*>(&shared.partial[row][split * kColumns + first + i]), row_tile * SPLITS + s);
        v[i] += part.x;
        v[i + 1] += part.y;
      }
    }
    // Mean, then M2 about it, over the two warps that hold a group.
    float sum[V];
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = v[i];  // rows beyond the batch are zero
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], bit);
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < V; ++i) shared.sums[warp][i] = sum[i];
    sync_threads(1, 256);
    const int pair = warp & ~1;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float mu = rows ? (shared.sums[pair][i] + shared.sums[pair + 1][i]) / rows : 0.0f;
      v[i] = inside ? v[i] - mu : 0.0f;
      sum[i] = v[i] * v[i];
      if (row % kGroupRows == 0) shared.group[group_of][first + i].x = mu;
    }
    sync_threads(1, 256);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], bit);
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < V; ++i) shared.sums[warp][i] = sum[i];
    sync_threads(1, 256);
    if (row % kGroupRows == 0)
#pragma unroll
      for (int i = 0; i < V; ++i) shared.group[group_of][first + i].y = shared.sums[pair][i] + shared.sums[pair + 1][i];
  }
  if (ROWS > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  // One thread to a column merges the groups of all row tiles, about the mean of the first, which is never empty.
  if (thread < kColumns) {
    const int j = panel * BN + split * kColumns + thread;
    float own = 0.0f, total = 0.0f, squares = 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const float2 part = load_remote(&shared.group[g][thread], r * SPLITS + split);
        if (r == 0 && g == 0) own = part.x;
        const float n = f.rows(2 * r + g), d = part.x - own;
        total += n * d;
        squares += part.y + n * d * d;
      }
    squares -= total * total / batch;
    const float centre = own + total / batch;
    shared.centre[thread] = centre;
    if (j < features) {
      const float s = f.s(j);
      shared.slope[thread] = f.slope(j, 1.0f / sqrtf(s * s * squares / batch + eps));
      shared.shift[thread] = f.shift(j);
      if (row_tile == 0) f.finish(j, f.own(j), centre, squares);
      if (keep_product)
        for (int g = 0; g < 2; ++g)
          if (f.rows(2 * row_tile + g))
            group_mean[static_cast<i64>(2 * row_tile + g) * features + j] = shared.group[g][thread].x;
    }
  }
  cluster_arrive();  // nobody leaves while others read its memory
  __syncthreads();
  if (inside) {
    const i64 at_row = static_cast<i64>(row_tile * kTileRows + row) * features;
    const int j = panel * BN + split * kColumns + first;
    if (j < features) {  // features are a multiple of 8 bytes' worth of columns, V at most that
      float out[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float mu = shared.group[group_of][first + i].x;
        out[i] = Activation::value(shared.slope[first + i] * (v[i] + (mu - shared.centre[first + i])) + shared.shift[first + i]);
      }
      constexpr int kWidth = V < 16 / static_cast<int>(sizeof(float)) ? V : 16 / static_cast<int>(sizeof(float));
#pragma unroll
      for (int i = 0; i < V; i += kWidth) {
        float part[kWidth], kept[kWidth];
#pragma unroll
        for (int q = 0; q < kWidth; ++q) {
          part[q] = out[i + q];
          kept[q] = v[i + q];
        }
        if (j + i < features) {
          store<Y, kWidth>(y + at_row + j + i, part);
          if (keep_product) store<T, kWidth>(product + at_row + j + i, kept);
        }
      }
    }
  }
  // The counter: at once where nobody reads it, else by the last block to get here.
  if (batches_tracked && momentum >= 0.0f) {
    if (blockIdx.x == 0 && thread == 0) *batches_tracked += 1;
  } else if (batches_tracked) {
    __syncthreads();
    if (thread == 0) {
      __threadfence();
      if (atomicAdd(&counters[0], 1u) == gridDim.x - 1) {
        counters[0] = 0;
        *batches_tracked += 1;
      }
    }
  }
  cluster_wait();
}

}  // namespace gemmnorm
