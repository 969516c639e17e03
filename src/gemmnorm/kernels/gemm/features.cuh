// Everything per feature: the vectors of Params, and what a feature's statistics become.
#pragma once
#include "common/feature.cuh"
#include "gemm/tile_scheduler.cuh"
#include "memory_bound/split.cuh"
#include "memory_bound/statistics.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

// Self-resetting counters in global memory: blocks that are done, the next work item, then two numbers per panel.
struct Counters {
  u32* base;
  int panels;

  __device__ __forceinline__ u32* done() const { return base; }
  __device__ __forceinline__ u32* next_item() const { return base + 1; }
  __device__ __forceinline__ u32* complete(int panel) const { return base + 2 + panel; }         // consumers' tiles
  __device__ __forceinline__ u32* merged(int panel) const { return base + 2 + panels + panel; }  // features
  __device__ __forceinline__ u32* end() const { return base + 2 + 2 * panels; }
};

// A warp has done all it does with the counters, the number of batches included.
__device__ __forceinline__ void signal_warp_done(u64& warps_done) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&warps_done);
}

// Places in Params::amax_state behind the two maxima of x: blocks that have read them, and the length of the fallback list.
constexpr int kReaders = 2, kFlagged = 3;

// Partial statistics are of `group_rows` rows each; group_mean and group_m2 have a row for every kGroupRows rows.
template <class Params>
struct Features {
  const Params& p;
  int groups, group_rows;

  __device__ __forceinline__ Features(const Params& p_, int group_rows_)
      : p(p_), groups((p_.batch + group_rows_ - 1) / group_rows_), group_rows(group_rows_) {}

  __device__ __forceinline__ FeatureValues values(int j) const { return RawFeature<Params>::load(p, j).values(p); }

  __device__ __forceinline__ int rows(int group) const {
    const int left = p.batch - group * group_rows;
    return left < 0 ? 0 : left < group_rows ? left : group_rows;
  }
  // Where a group's number for feature j lies.
  __device__ __forceinline__ i64 at(int group, int j) const {
    return static_cast<i64>(group * (group_rows / kGroupRows)) * p.features + j;
  }

  // Standard deviation of the product's column j, by the running statistics.
  __device__ __forceinline__ float running_deviation(int j) const {
    const FeatureValues v = values(j);
    return v.s == 0.0f ? 3e38f : sqrtf(v.running_var + p.eps) / fabsf(v.s);
  }
  // Whether split operands were not enough for feature j, whose deviation is given; then it joins the fallback list.
  __device__ __forceinline__ bool add_to_fallback(int j, float deviation) const {
    if (!p.fallback_features) return false;
    const bool lost = split_loses(__uint_as_float(load_acquire(&p.amax_state[0])), __uint_as_float(load_acquire(&p.amax_state[1])),
                                  p.weight_amax[j], p.weight_abs_sum[j], deviation);
    if (lost) p.fallback_features[atomicAdd(&p.amax_state[kFlagged], 1u)] = j;
    return lost;
  }

  // Training: mean and M2 of all rows → what the backward reads, the running statistics, and y = φ(slope·(a - mean) + shift).
  __device__ __forceinline__ void finish(int j, const FeatureValues& v, float mean, float m2) const {
    const float batches = p.num_batches_tracked && p.momentum < 0.0f ? static_cast<float>(*p.num_batches_tracked + 1) : 0.0f;
    const float variance = v.s * v.s * m2 / p.batch;
    const bool later = add_to_fallback(j, sqrtf(m2 / p.batch));  // the fallback updates the running statistics
    if (p.merged_slope) {
      p.merged_slope[j] = v.slope() * (1.0f / sqrtf(variance + p.eps));  // as a tile that merges itself has it
      p.merged_shift[j] = v.shift;
    }
    finish_feature(p, j, {mean, variance, v.s, v.b, v.running_mean, v.running_var, batches, later});
  }
};

// A warp's share of a tile's features: a lane has every 32nd of COLUMNS. It reads the vectors of all before it uses one, so
// that they are in flight together. Beyond the last feature: the last one; before the first, the first.
template <int COLUMNS>
struct LaneFeatures {
  static constexpr int kOwn = COLUMNS / 32;
  int first, last;

  __device__ __forceinline__ LaneFeatures(int first_feature, int features)
      : first(first_feature + threadIdx.x % 32), last(features - 1) {}
  __device__ __forceinline__ int column(int i) const { return threadIdx.x % 32 + 32 * i; }  // of the tile
  __device__ __forceinline__ int feature(int i) const { return max(min(first + 32 * i, last), 0); }
};

// Mean and M2 of a column, merged from those of its groups by `lanes` neighbouring lanes, each with AHEAD groups in flight.
// `load(of_m2, g)` gives a number of group g. All is relative to the mean of a few groups, spread over the batch and full if
// any is: M2 = Σ M2_g + n_g·d² - (Σ n_g·d)²/B with d = mean_g - near.
struct ColumnStatistics {
  float mean, m2;
};
template <int AHEAD, class Params, class Load>
__device__ __forceinline__ ColumnStatistics merge_column(const Features<Params>& f, int lane, int lanes, const Load& load) {
  constexpr int kSpread = 4;
  const int full = max(f.p.batch / f.group_rows, 1);
  float near = 0.0f, sum = 0.0f, squares = 0.0f, spread[kSpread];
#pragma unroll
  for (int q = 0; q < kSpread; ++q) spread[q] = load(false, q * full / kSpread);
  for (int g0 = lane; g0 < f.groups; g0 += lanes * AHEAD) {
    float means[AHEAD], squared[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int g = min(g0 + i * lanes, f.groups - 1);
      means[i] = load(false, g);
      squared[i] = load(true, g);
    }
    if (g0 < lanes) near = ((spread[0] + spread[1]) + (spread[2] + spread[3])) / kSpread;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const float n = g0 + i * lanes < f.groups ? f.rows(g0 + i * lanes) : 0, d = means[i] - near;
      sum += n * d;
      squares += (n > 0.0f ? squared[i] : 0.0f) + n * d * d;
    }
  }
  near = ((spread[0] + spread[1]) + (spread[2] + spread[3])) / kSpread;  // of lanes without groups too
#pragma unroll
  for (int bit = 1; bit < lanes; bit *= 2) {
    sum += __shfl_xor_sync(~0u, sum, bit);
    squares += __shfl_xor_sync(~0u, squares, bit);
  }
  return {near + sum / f.p.batch, squares - sum * sum / f.p.batch};
}
// The same out of global memory, where other blocks wrote the groups' numbers.
template <int AHEAD, class Params>
__device__ __forceinline__ ColumnStatistics merge_column(const Features<Params>& f, int lane, int lanes, int j) {
  return merge_column<AHEAD>(f, lane, lanes, [&](bool of_m2, int g) {
    return load_l2((of_m2 ? f.p.group_m2 : f.p.group_mean) + f.at(g, j));
  });
}

}  // namespace gemmnorm
