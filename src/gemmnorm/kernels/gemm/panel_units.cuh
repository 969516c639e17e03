// What follows the tiles of the fused GEMM: a panel (one column of tiles) whose rows are all multiplied is merged and
// normalised by single warps, out of the L2, while the tensor cores work on later panels.
#pragma once
#include "memory_bound/normalize.cuh"
#include "ptx/hopper.cuh"
#include "gemm/raster.cuh"
#include "memory_bound/split.cuh"
#include "memory_bound/statistics.cuh"

namespace gemmnorm {

constexpr int kMergeWidth = 8;    // features whose groups a warp merges at a time
constexpr int kDirectRows = 8192;  // of a batch whose tiles merge by themselves rather than wait for somebody's merge
constexpr int kDone = 0, kTicket = 1, kPanels = 2;  // counters: blocks done, next unit, then two numbers per panel

// Numbers of `most` behind the two of x: blocks that have read them, and features on the list.
constexpr int kReaders = 2, kFlagged = 3;

// What decides whether split operands were enough; `flagged` is null where the operands are not split.
struct Guard {
  u32* most;                                     // over the rows of x: largest magnitude, sum of magnitudes (bits)
  const float *weight_largest, *weight_total;    // of each row of the weight
  int* flagged;                                  // the features to be computed again in float32, in any order

  // Whether feature j, whose deviation is given, has to be; then it is put on the list.
  __device__ __forceinline__ bool raises(int j, float deviation) const {
    if (!flagged) return false;
    const bool lost = split_loses(__uint_as_float(load_acquire(&most[0])), __uint_as_float(load_acquire(&most[1])),
                                  weight_largest[j], weight_total[j], deviation);
    if (lost) flagged[atomicAdd(&most[kFlagged], 1u)] = j;
    return lost;
  }
};

// Everything per feature, and the sizes.
template <class L, class R>
struct Features {
  const L *bias, *scale;
  int scale_stride;
  float scale_value;
  R *running_mean, *running_var;
  const R *bn_weight, *bn_bias;
  const i64* batches_tracked;
  float momentum, eps;
  float *group_mean, *group_m2, *mean, *rstd, *merged_slope, *merged_shift;
  Guard guard;
  int batch, features, groups, group_rows;  // as they are merged

  __device__ __forceinline__ float s(int j) const { return scale_of(scale, scale_stride, scale_value, j); }
  __device__ __forceinline__ float b(int j) const { return value_or(bias, j, 0.0f); }
  // y = φ(slope·(a - mean) + shift)
  __device__ __forceinline__ float slope(int j, float rstd_j) const {
    return value_or(bn_weight, j, 1.0f) * s(j) * rstd_j;
  }
  // Of the product's column j, by the running statistics.
  __device__ __forceinline__ float running_deviation(int j) const {
    return s(j) == 0.0f ? 3e38f : sqrtf(to_float(running_var[j]) + eps) / fabsf(s(j));
  }
  __device__ __forceinline__ float shift(int j) const { return value_or(bn_bias, j, 0.0f); }
  __device__ __forceinline__ int rows(int group) const {
    const int left = batch - group * group_rows;
    return left < 0 ? 0 : left < group_rows ? left : group_rows;
  }
  // Where a group's number for feature j is in group_mean and group_m2, which have a row for every kGroupRows rows.
  __device__ __forceinline__ i64 at(int group, int j) const {
    return static_cast<i64>(group * (group_rows / kGroupRows)) * features + j;
  }
  // What the last step for feature j reads, all of it in flight at once.
  struct Own {
    float s, b, slope /* with rstd = 1 */, shift, running_mean, running_var;
  };
  __device__ __forceinline__ Own own(int j) const {
    return {s(j), b(j), slope(j, 1.0f), shift(j), value_or(running_mean, j, 0.0f), value_or(running_var, j, 0.0f)};
  }
  __device__ __forceinline__ void finish(int j, const Own& of, float mu, float m2) const {
    const float batches = batches_tracked && momentum < 0.0f ? static_cast<float>(*batches_tracked + 1) : 0.0f;
    const float variance = of.s * of.s * m2 / batch;
    const bool again = guard.raises(j, sqrtf(m2 / batch));  // then the running statistics wait for it
    if (merged_slope) {
      merged_slope[j] = of.slope / sqrtf(variance + eps);
      merged_shift[j] = of.shift;
    }
    finish_feature(j, mu, variance, of.s, of.b, batches, again ? nullptr : running_mean, running_var, of.running_mean,
                   of.running_var, momentum, eps, mean, rstd, batch);
  }
};

// Mean and M2 of a column, merged from those of its groups by `lanes` neighbouring lanes, each with AHEAD groups in flight.
// `load(of_m2, g)` gives a number of group g. All is relative to the mean of a few groups, spread over the batch and full if
// any is: M2 = Σ M2_g + n_g·d² - (Σ n_g·d)²/B with d = mean_g - near.
struct Column {
  float mean, m2;
};
template <int AHEAD, class L, class R, class Load>
__device__ __forceinline__ Column merge_column(const Features<L, R>& f, int lane, int lanes, const Load& load) {
  constexpr int kSpread = 4;
  const int full = max(f.batch / f.group_rows, 1);
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
  return {near + sum / f.batch, squares - sum * sum / f.batch};
}

// Mean and M2 of n rows, for four neighbouring features, and their merge (Chan): exact in n, safe for |mean| >> std.
struct Moments {
  float n, mean[4], m2[4];

  __device__ __forceinline__ void add(float other_n, const float (&other_mean)[4], const float (&other_m2)[4]) {
    const float total = n + other_n, share = total > 0.0f ? other_n / total : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float delta = other_mean[i] - mean[i];
      mean[i] += delta * share;
      m2[i] += other_m2[i] + delta * delta * (n * share);
    }
    n = total;
  }
};

// One warp merges the groups of kMergeWidth features: two lanes along the features, sixteen along the groups, of which a
// lane has AHEAD in flight.
template <int AHEAD, class L, class R>
__device__ __forceinline__ void merge_groups(const Features<L, R>& f, int first_feature) {
  const int lane = threadIdx.x % 32, j = first_feature + (lane % 2) * 4;
  const bool inside = j < f.features;
  Moments sum = {};
#pragma unroll 1
  for (int g0 = lane / 2; g0 < f.groups; g0 += 16 * AHEAD) {
    float4 mean[AHEAD], m2[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int g = g0 + 16 * i;
      const i64 at = f.at(g < f.groups ? g : 0, inside ? j : 0);
      mean[i] = load_l2(reinterpret_cast<const float4*>(f.group_mean + at));
      m2[i] = load_l2(reinterpret_cast<const float4*>(f.group_m2 + at));
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const float group_mean[4] = {mean[i].x, mean[i].y, mean[i].z, mean[i].w};
      const float group_m2[4] = {m2[i].x, m2[i].y, m2[i].z, m2[i].w};
      if (g0 + 16 * i < f.groups) sum.add(f.rows(g0 + 16 * i), group_mean, group_m2);
    }
  }
#pragma unroll
  for (int bit = 2; bit < 32; bit *= 2) {  // the lower lane's part is always the left operand: one order, same bits
    float other_mean[4], other_m2[4];
    const float other_n = __shfl_down_sync(~0u, sum.n, bit);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      other_mean[i] = __shfl_down_sync(~0u, sum.mean[i], bit);
      other_m2[i] = __shfl_down_sync(~0u, sum.m2[i], bit);
    }
    sum.add(other_n, other_mean, other_m2);
  }
  // The two lanes that hold a sum hand it out, so that a lane finishes one feature.
  float mean = 0.0f, m2 = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float mean_i = __shfl_sync(~0u, sum.mean[i], lane / 4 % 2), m2_i = __shfl_sync(~0u, sum.m2[i], lane / 4 % 2);
    if (lane % 4 == i) mean = mean_i, m2 = m2_i;
  }
  const int mine = first_feature + lane;
  if (lane < kMergeWidth && mine < f.features) f.finish(mine, f.own(mine), mean, m2);
}

// One warp computes y = φ(slope·a + shift) of COLUMNS features with the running statistics; `keep`: mean and rstd too.
template <int COLUMNS, class L, class R>
__device__ __forceinline__ void evaluation_coefficients(const Features<L, R>& f, int first, bool keep, float* slope,
                                                        float* shift) {
#pragma unroll 2
  for (int c = threadIdx.x % 32; c < COLUMNS; c += 32) {
    const int j = min(first + c, f.features - 1);
    const float r = 1.0f / sqrtf(to_float(f.running_var[j]) + f.eps), centre = to_float(f.running_mean[j]);
    slope[c] = f.slope(j, r);
    shift[c] = f.shift(j) + value_or(f.bn_weight, j, 1.0f) * r * (f.s(j) * f.b(j) - centre);
    if (f.mean && keep) {
      f.mean[j] = centre;
      f.rstd[j] = r;
    }
  }
}

// N numbers of a per-feature vector, from the L2.
template <int N>
__device__ __forceinline__ void load_features(const float* vector, float (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = load_l2(reinterpret_cast<const float4*>(vector + i));
    out[i] = v.x;
    out[i + 1] = v.y;
    out[i + 2] = v.z;
    out[i + 3] = v.w;
  }
}

// For N features of a merged panel: y = φ(slope·a' + shift), a' as it is stored, minus the mean that group_mean has.
template <int N, class L, class R>
__device__ __forceinline__ void group_coefficients(const Features<L, R>& f, int group, int column, float (&slope)[N],
                                                   float (&shift)[N]) {
  float mean[N], own[N];
  load_features(f.merged_slope + column, slope);
  load_features(f.merged_shift + column, shift);
  load_features(f.mean + column, mean);
  load_features(f.group_mean + static_cast<i64>(group) * f.features + column, own);
#pragma unroll
  for (int i = 0; i < N; ++i) shift[i] += slope[i] * (own[i] - mean[i]);
}

// One warp normalises UNIT rows of a stored tile, ROWS in flight.
template <class T, class Y, int TN, class Activation, int UNIT, int ROWS, class L, class R>
__device__ __forceinline__ void normalize_unit(const Features<L, R>& f, const T* product, Y* y, int first_row,
                                               int first_column) {
  constexpr int N = 16 / sizeof(T);
  constexpr int kColumns = TN < 32 * N ? TN : 32 * N;  // that the warp covers at once
  constexpr int kLanes = 32 * N / kColumns;            // rows that it covers at once
  constexpr int kAtOnce = UNIT / kLanes < ROWS ? UNIT / kLanes : ROWS;
  const int lane = threadIdx.x % 32, group = first_row / kGroupRows;
  const int rows = min(UNIT, f.batch - first_row);
#pragma unroll 1
  for (int c = 0; c < TN; c += kColumns) {
    const int column = first_column + c + (lane % (kColumns / N)) * N;
    if (column >= f.features) continue;
    float slope[N], shift[N];
    group_coefficients(f, group, column, slope, shift);
    const i64 origin = static_cast<i64>(first_row) * f.features + column;
#pragma unroll 1
    for (int r0 = lane / (kColumns / N); r0 < rows; r0 += kLanes * kAtOnce) {
      Vec<T, N> a[kAtOnce];  // loads without conditions are all in flight at once
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        *reinterpret_cast<uint4*>(&a[r]) = load_evict_first(
            reinterpret_cast<const uint4*>(product + origin + static_cast<i64>(min(r0 + r * kLanes, rows - 1)) * f.features));
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = Activation::value(slope[i] * a[r].value(i) + shift[i]);
        if (r0 + r * kLanes >= rows) continue;
        Vec<Y, N> rounded;
#pragma unroll
        for (int i = 0; i < N; ++i) from_float(out[i], rounded.at[i]);
        uint4* to = reinterpret_cast<uint4*>(y + origin + static_cast<i64>(r0 + r * kLanes) * f.features);
#pragma unroll
        for (int w = 0; w < N * sizeof(Y) / 16; ++w) store_evict_first(to + w, reinterpret_cast<const uint4*>(&rounded)[w]);
      }
    }
  }
}

// A warp takes units in order, one at a time, until none is left: first the merges of a group of panels, then the rows
// of its stored tiles. A unit waits only for tiles that come before it.
template <class T, class Y, int TM, int TN, class Activation, int AHEAD, class L, class R>
__device__ __forceinline__ void take_units(const Features<L, R>& f, const Raster& raster, const T* product, Y* y,
                                           u32* counters, int stored) {
  constexpr int kUnitRows = 16384 / (TN * sizeof(T)) < 64 ? 16384 / (TN * sizeof(T)) : 64;  // that a warp normalises at a time
  constexpr int kMerges = TN / kMergeWidth, kUnits = TM / kUnitRows;
  const int lane = threadIdx.x % 32;
  const int complete = kPanels, merged = kPanels + raster.tiles_n;  // of the counters
  const int per_panel = kMerges + kUnits * raster.tiles_m;
  // Tiles that merge for themselves need no units of their own: the last unit is then in the last group with stored tiles.
  const bool direct = f.batch <= kDirectRows;
  const int group_tiles = raster.group_panels * raster.tiles_m;
  const int last_panel = direct ? min((stored + group_tiles - 1) / group_tiles * raster.group_panels, raster.tiles_n)
                                : raster.tiles_n;
#pragma unroll 1
  for (;;) {
    int unit = 0;
    if (lane == 0) unit = static_cast<int>(atomicAdd(&counters[kTicket], 1u));
    unit = __shfl_sync(~0u, unit, 0);
    if (unit >= per_panel * last_panel) return;
    const int group = unit / (per_panel * raster.group_panels), first = group * raster.group_panels;
    const int panels = min(raster.group_panels, raster.tiles_n - first);
    const int rest = unit - first * per_panel;
    if (rest < kMerges * panels) {
      const int n = first + rest / kMerges;
      if (direct && !raster.has_stored(n, stored)) continue;
      if (lane == 0) wait_until(&counters[complete + n], 2 * raster.tiles_m);
      __syncwarp();
      merge_groups<AHEAD>(f, n * TN + (rest % kMerges) * kMergeWidth);
      __syncwarp();
      if (lane == 0) signal(&counters[merged + n], kMergeWidth);
    } else {
      const int t = first * raster.tiles_m + (rest - kMerges * panels) / kUnits;
      if (t >= stored) continue;
      const Tile tile = raster.at(t);
      const int row = tile.m * TM + (rest - kMerges * panels) % kUnits * kUnitRows;
      if (row >= f.batch) continue;
      if (lane == 0) wait_until(&counters[merged + tile.n], TN);
      __syncwarp();
      normalize_unit<T, Y, TN, Activation, kUnitRows, 2 * AHEAD>(f, product, y, row, tile.n * TN);
    }
  }
}

}  // namespace gemmnorm
