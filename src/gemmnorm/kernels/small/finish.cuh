// After the exchange: every thread of the finishing warps has whole sums of its rows and columns. Statistics, y and the
// product.
#pragma once
#include "gemm/staging.cuh"
#include "small/mainloop_bf16x3.cuh"
#include "small/panel.cuh"

namespace gemmnorm {

// A thread's columns, two to a unit, from `column` on, and its rows: `row` and the one 8 below.
template <class G, class Params, class Shared>
struct Finisher {
  using S = typename G::S;
  using T = typename G::T;
  using Activation = typename G::Activation;
  static constexpr bool kRounds = sizeof(T) < sizeof(float);  // the product, on its way to memory
  // Evaluation in float32: coefficients are fewer registers than features, and take long to compute.
  static constexpr bool kEarly = !G::kTraining && G::kSplit;

  const Params& p;
  Shared& shared;
  int tile, thread, pair, column, row;
  RawFeature<Params> raw[S::kUnits][2] = {};
  Coefficients early[kEarly ? S::kUnits : 1][2] = {};

  __device__ __forceinline__ Finisher(const Params& p_, Shared& shared_, int tile_, int first_column)
      : p(p_), shared(shared_), tile(tile_), thread(threadIdx.x), pair(thread % S::kAcross), column(first_column + pair * 2),
        row(tile * kTileRows + thread / S::kAcross / 8 * 16 + thread / S::kAcross % 8) {}

  // The features' vectors are in registers before the first operand has arrived.
  __device__ __forceinline__ void load_features() {
#pragma unroll
    for (int q = 0; q < S::kUnits; ++q)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        raw[q][c] = RawFeature<Params>::load(p, min(column + q * 8 + c, p.features - 1));
        if (kEarly) early[q][c] = raw[q][c].values(p).template coefficients<true>(p.eps);
      }
  }

  __device__ __forceinline__ bool inside(int q, int c = 0) const { return column + q * 8 + c < p.features; }
  __device__ __forceinline__ i64 at(int q) const { return static_cast<i64>(row) * p.features + column + q * 8; }
  // The sum over the cluster's blocks of what a finisher's unit holds.
  __device__ __forceinline__ float4 total(int q, int finisher) const {
    float4 sum = shared.parts[0][q][finisher];
#pragma unroll
    for (int block = 1; block < G::kShares; ++block) {
      const float4 part = shared.parts[block][q][finisher];
      sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    return sum;
  }
  template <class V>
  __device__ __forceinline__ void store_rows(V* to, int q, float2 low, float2 high) const {
    const int first = column + q * 8;
    if (inside(q) && row < p.batch) store_pair<G::kSplit>(to + at(q), low, first, p.features);
    if (inside(q) && row + 8 < p.batch)
      store_pair<G::kSplit>(to + at(q) + static_cast<i64>(8) * p.features, high, first, p.features);
  }

  __device__ __forceinline__ Coefficients coefficients(int q, int c) const {
    if constexpr (kEarly) return early[q][c];
    else return raw[q][c].values(p).template coefficients<false>(p.eps);
  }
  __device__ __forceinline__ void evaluate() const {
#pragma unroll
    for (int q = 0; q < S::kUnits; ++q) {
      float4 v = total(q, thread);
      if constexpr (G::kSplit) {
        const float* rows = p.x + static_cast<i64>(row) * p.in_features;
        const float* columns = p.weight + static_cast<i64>(column + q * 8) * p.in_features;
        const auto of = [&](float sum, i64 r, i64 c) {
          if (sum == sum || !inside(q, c)) return sum;
          return dot_product(rows + r * p.in_features, columns + c * p.in_features, p.in_features);
        };
        if (inside(q) && row < p.batch) v.x = of(v.x, 0, 0), v.y = of(v.y, 0, 1);
        if (inside(q) && row + 8 < p.batch) v.z = of(v.z, 8, 0), v.w = of(v.w, 8, 1);
      }
      const Coefficients left = coefficients(q, 0), right = coefficients(q, 1);
      const auto value = [&](float a, float b) {
        return make_float2(Activation::value(left.value<kEarly>(a)), Activation::value(right.value<kEarly>(b)));
      };
      store_rows(p.y, q, value(v.x, v.y), value(v.z, v.w));
    }
  }

  // Deviations from `by`; out-of-bounds rows count for nothing.
  __device__ __forceinline__ float4 minus(const float4& v, float2 by) const {
    const bool low = row < p.batch, high = row + 8 < p.batch;
    return make_float4(low ? v.x - by.x : 0.0f, low ? v.y - by.y : 0.0f, high ? v.z - by.x : 0.0f, high ? v.w - by.y : 0.0f);
  }
  template <bool ALL_TILES>
  __device__ __forceinline__ void sum_rows(const float4 (&d)[S::kUnits], int sums) const {
    sum_units<S>(d, shared.sums[sums]);
    named_barrier_sync(1, S::kFinishers + 32);
    if (ALL_TILES && G::kTiles > 1) named_barrier_sync(1, S::kFinishers + 32);  // theirs are there
  }
  template <bool ALL_TILES>
  __device__ __forceinline__ void take_sums(int sums, int q, ColumnSums& left, ColumnSums& right) const {
    sums_of_unit<S>(shared.sums[sums], pair, q, left, right);
    if constexpr (ALL_TILES && G::kTiles > 1) {
      left.take_all(shared.tiles.all[sums][pair * 2 + q * 8]);
      right.take_all(shared.tiles.all[sums][pair * 2 + q * 8 + 1]);
    }
  }

  __device__ __forceinline__ void train() {
    const float share = 1.0f / p.batch;
    float4 d[S::kUnits];  // deviations from the values of the tile's first row
    float2 centre[S::kUnits];
#pragma unroll
    for (int q = 0; q < S::kUnits; ++q) {
      const float4 first = total(q, pair);
      centre[q] = make_float2(first.x, first.y);
      d[q] = minus(total(q, thread), centre[q]);
    }
    sum_rows<!G::kSplit>(d, 0);
    if (G::kSplit) {  // once more, from the tile's mean: the squares' cancellation shows in float32
      const float share_of_tile = 1.0f / min(p.batch - tile * kTileRows, kTileRows);
#pragma unroll
      for (int q = 0; q < S::kUnits; ++q) {
        ColumnSums left, right;
        take_sums<false>(0, q, left, right);
        const float2 mu = make_float2(left.mean(share_of_tile), right.mean(share_of_tile));
        centre[q] = make_float2(centre[q].x + mu.x, centre[q].y + mu.y);
        d[q] = minus(d[q], mu);
      }
      sum_rows<true>(d, G::kSums);
    }
#pragma unroll
    for (int q = 0; q < S::kUnits; ++q) normalize_unit(q, share, centre[q], d[q]);
    if (kRounds && p.keep_product) sum_rows<true>(d, 1);
  }

  // y of one unit, and the product without its group's mean; `d` becomes the deviations of what is stored.
  __device__ __forceinline__ void normalize_unit(int q, float share, float2 centre, float4& d) const {
    ColumnSums left, right;
    take_sums<true>(G::kSums, q, left, right);
    const FeatureValues of_left = raw[q][0].values(p), of_right = raw[q][1].values(p);
    const float2 mu = make_float2(left.mean(share), right.mean(share));
    const auto root = [&](float v) { return G::kSplit ? 1.0f / sqrtf(v) : rsqrtf(v); };
    const float a = of_left.slope() * root(of_left.s * of_left.s * left.m2(share) * share + p.eps);
    const float b = of_right.slope() * root(of_right.s * of_right.s * right.m2(share) * share + p.eps);
    const auto value = [&](float v, float w) {
      return make_float2(Activation::value(a * (v - mu.x) + of_left.shift), Activation::value(b * (w - mu.y) + of_right.shift));
    };
    store_rows(p.y, q, value(d.x, d.y), value(d.z, d.w));
    if (!p.keep_product) return;
    // Both means as they are stored: what the backward adds up again is what was subtracted.
    const bool upper = row % kTileRows >= kGroupRows;
    const float share_of_group = 1.0f / max(min(p.batch - row / kGroupRows * kGroupRows, kGroupRows), 1);
    const float2 group = make_float2(fmaf(upper ? left.second : left.first, share_of_group, centre.x),
                                     fmaf(upper ? right.second : right.first, share_of_group, centre.y));
    const float2 off = make_float2(group.x - centre.x, group.y - centre.y);
    rounded_pair<true>(d.x, d.y, off, T{});
    rounded_pair<true>(d.z, d.w, off, T{});
    store_rows(p.stored_product, q, make_float2(d.x, d.y), make_float2(d.z, d.w));
    if (kRounds) d = minus(d, make_float2(left.mean(share, centre.x) - group.x, right.mean(share, centre.y) - group.y));
  }
};

// As one warp of each block, after the block has read the count for the last time.
template <class Params>
__device__ __forceinline__ void count_batch(const Params& p) {
  if (!p.num_batches_tracked) return;
  const int lane = threadIdx.x % 32;
  if (p.momentum >= 0.0f) {  // nobody reads it
    if (blockIdx.x == 0 && lane == 0) *p.num_batches_tracked += 1;
    return;
  }
  __syncwarp();
  if (lane == 0) {
    __threadfence();
    if (atomicAdd(p.counters, 1u) == gridDim.x - 1) {  // the last block counts the batch, and resets the counter
      __threadfence();
      *p.counters = 0;
      *p.num_batches_tracked += 1;
    }
  }
}

// What the producer warp does after its loads, in training: a lane finishes a feature, the left or the right one of a unit.
// Sums of the tile go to all blocks that finish the feature in another; what is kept of it comes from the first tile's block.
template <class G, class Params, class Shared>
__device__ __forceinline__ void finish_statistics(const Params& p, Shared& shared, int tile, int share_of_k, int first_column) {
  using S = typename G::S;
  constexpr bool kRounds = sizeof(typename G::T) < sizeof(float);
  const Features<Params> f(p, kGroupRows);
  const int lane = threadIdx.x % 32, pair = lane % S::kAcross, unit = lane / S::kAcross / 2 % S::kUnits;
  const bool odd = lane / S::kAcross % 2;
  const int j = first_column + unit * 8 + pair * 2 + odd;
  const bool mine = lane < S::kColumns && j < p.features, keeps = mine && tile == 0;
  const auto raw = RawFeature<Params>::load(p, min(j, p.features - 1));
  const float share = 1.0f / p.batch;
  if (G::kCluster > 1) cluster_wait();
  mbarrier_wait_cluster(&shared.arrived, 0);
  float centre = 0.0f;
#pragma unroll
  for (int s = 0; s < G::kShares; ++s) {
    const float4 part = shared.parts[s][unit][pair];
    centre += odd ? part.y : part.x;
  }
  const FeatureValues values = raw.values(p);
  const auto sums_of_column = [&](int sums, float about, bool all_tiles) {
    ColumnSums left, right;
    named_barrier_sync(1, S::kFinishers + 32);
    sums_of_unit<S>(shared.sums[sums], pair, unit, left, right);
    ColumnSums column = odd ? right : left;
    if (G::kTiles == 1 || !all_tiles) return column;
    if constexpr (G::kTiles > 1) {
      auto& tiles = shared.tiles;
      const int c = j - first_column;
      if (lane < S::kColumns) {
#pragma unroll
        for (int t = 0; t < G::kTiles; ++t)
          st_async_remote(&tiles.of[sums][tile][c], make_float4(about, column.sum, column.squares, 0.0f), &tiles.arrived[sums],
                          t * G::kShares + share_of_k);
      }
      mbarrier_wait_cluster(&tiles.arrived[sums], 0);
      column.take_all(tiles.all[sums][c] = tiles.add_up(sums, c, tile, p.batch));
      named_barrier_sync(1, S::kFinishers + 32);
    }
    return column;
  };
  ColumnSums column = sums_of_column(0, centre, !G::kSplit);
  if (G::kSplit) {
    centre = column.mean(1.0f / min(p.batch - tile * kTileRows, kTileRows), centre);
    column = sums_of_column(G::kSums, centre, true);
  }
  const float mu = column.mean(share, centre);
  if (keeps) f.finish(j, values, mu, column.m2(share));
  if (mine && p.keep_product) {
    float* group_mean = p.group_mean + static_cast<i64>(2 * tile) * p.features + j;
    group_mean[0] = fmaf(column.first, 1.0f / f.rows(2 * tile), centre);
    if (f.groups > 2 * tile + 1) group_mean[p.features] = fmaf(column.second, 1.0f / f.rows(2 * tile + 1), centre);
  }
  if (kRounds && p.keep_product) {  // what is stored, and what the backward takes it for, agree
    const ColumnSums stored = sums_of_column(1, mu, true);
    if (keeps) {
      p.mean[j] = stored.mean(share, mu);
      p.rstd[j] = 1.0f / sqrtf(values.s * values.s * stored.m2(share) / p.batch + p.eps);
    }
  }
  count_batch(p);
}

}  // namespace gemmnorm
