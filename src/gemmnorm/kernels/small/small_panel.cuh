// One tile of rows, the whole chain in one launch (sm_90a): a cluster of blocks owns a panel of columns.
//
// Each block multiplies its part of K for all rows and all columns of the panel, and hands every block of the cluster the
// part sums of the columns which that one finishes. Two warpgroups multiply and then normalise; one warp copies, and then
// finishes the statistics. Latency is everything here, so between the last copy and the last store there are but
//   1. the multiplications of one stage;
//   2. one trip from block to block: the accumulators go straight to where the reader wants them, and a barrier there
//      counts their bytes. No block asks, none waits for the cluster, and each may leave when it has what it needs;
//   3. one sum over the lanes and one barrier of the block, for the values and their squares at once, about row 0. A value
//      of the column lies within √(n - 1) deviations of its mean, so the squares lose 7 bits at most, also where
//      |mean| >> std;
//   4. one reciprocal root.
// float32 takes a second sum and barrier, about the mean, and a root that is rounded as it should be.
// Per-feature vectors are in registers before the first copy has arrived. In evaluation 1 and 2 are all.
#pragma once
#include "common/column_sums.cuh"
#include "gemm/gemm_shared.cuh"
#include "gemm/staging.cuh"
#include "small/thirds.cuh"

namespace gemmnorm {

constexpr int kTileRows = 2 * kGroupRows;

// How a panel is shared out. The unit is what wgmma leaves in a thread of 8 columns, a float4: columns c and c + 1 of rows
// r and r + 8.
template <int BN, int SPLITS>
struct PanelShare {
  static constexpr int kColumns = BN / SPLITS;                     // that a block finishes
  static constexpr int kAcross = kColumns < 8 ? kColumns / 2 : 4;  // lanes along them
  static constexpr int kUnits = kColumns < 8 ? 1 : kColumns / 8;   // of a thread
  static constexpr int kFinishers = kTileRows / 2 * kAcross;       // threads
  static constexpr int kWarps = kFinishers / 32;
  static_assert(kColumns >= 4 && kColumns <= 32, "a lane of the copying warp finishes a column");
};

template <class S>
using UnitSums = float4[S::kWarps][S::kAcross][S::kUnits];  // of a warp's rows: Σ of both columns, Σ of their squares

template <int BN, int STAGES, int SPLITS, int PLANES>
struct SmallPanelShared : WeightParts<BN, PLANES> {
  using S = PanelShare<BN, SPLITS>;
  static constexpr int kBoxes = PLANES == 3 ? 2 : 1;  // of a stage, side by side along K
  alignas(1024) unsigned char x[STAGES][kBoxes][kTileRows * kRowBytes];
  alignas(1024) unsigned char weight[STAGES][kBoxes][BN * kRowBytes];
  float4 parts[SPLITS][S::kUnits][S::kFinishers];  // by block of origin
  UnitSums<S> sums[2];  // about row 0, and about the mean: of the product as it is stored, or once more (float32)
  u64 full[STAGES], empty[STAGES];
  u64 arrived;  // the parts are there
};

// What a feature needs, as it is in memory: loads without branches are all in flight at once.
template <class L, class R>
struct RawFeature {
  L bias, scale;
  R bn_weight, bn_bias, running_mean, running_var;

  template <class V>
  static __device__ __forceinline__ V element(const V* vector, i64 j) {
    V v = {};
    if (vector) v = vector[j];
    return v;
  }
  static __device__ __forceinline__ RawFeature load(const Features<L, R>& f, int j) {
    return {element(f.bias, j),    element(f.scale, static_cast<i64>(j) * f.scale_stride), element(f.bn_weight, j),
            element(f.bn_bias, j), element(f.running_mean, j), element(f.running_var, j)};
  }
  __device__ __forceinline__ typename Features<L, R>::Own own(const Features<L, R>& f) const {
    const float s = f.scale ? to_float(scale) : f.scale_value;
    return {s, to_float(bias), (f.bn_weight ? to_float(bn_weight) : 1.0f) * s, to_float(bn_bias), to_float(running_mean),
            to_float(running_var)};
  }
  // In evaluation y = φ(slope·a + shift).
  __device__ __forceinline__ float2 coefficients(const Features<L, R>& f) const {
    const auto of = own(f);
    const float r = 1.0f / sqrtf(of.running_var + f.eps), gamma = f.bn_weight ? to_float(bn_weight) : 1.0f;
    return make_float2(of.slope * r, of.shift + gamma * r * (of.s * of.b - of.running_mean));
  }
};

// Sums of a thread's deviations and their squares over the warp's rows.
template <class S>
__device__ __forceinline__ void sum_units(const float4 (&d)[S::kUnits], UnitSums<S>& sums) {
  float v[4 * S::kUnits];
#pragma unroll
  for (int q = 0; q < S::kUnits; ++q) {
    v[4 * q] = d[q].x + d[q].z;
    v[4 * q + 1] = d[q].y + d[q].w;
    v[4 * q + 2] = d[q].x * d[q].x + d[q].z * d[q].z;
    v[4 * q + 3] = d[q].y * d[q].y + d[q].w * d[q].w;
  }
  fold_lanes<4 * S::kUnits, S::kAcross>(v, &sums[threadIdx.x / 32][threadIdx.x % S::kAcross][0].x);
}

// What the sums say of one column: of the deviations in both statistics groups, and of all squares.
struct ColumnSums {
  float first, second, squares;

  // The mean of the deviations, or what it makes of the value that they were taken from.
  __device__ __forceinline__ float mean(float share, float centre = 0.0f) const {
    return fmaf(first + second, share, centre);
  }
  __device__ __forceinline__ float m2(float share) const { return fmaf(-(first + second), mean(share), squares); }
};

// Both columns of a unit.
template <class S>
__device__ __forceinline__ void sums_of_unit(const UnitSums<S>& sums, int pair, int unit, ColumnSums& left,
                                             ColumnSums& right) {
  float4 group[2];
#pragma unroll
  for (int w = 0; w < S::kWarps; ++w) {
    const float4 part = sums[w][pair][unit];
    float4& to = group[2 * w / S::kWarps];
    to = w % (S::kWarps / 2) ? make_float4(to.x + part.x, to.y + part.y, to.z + part.z, to.w + part.w) : part;
  }
  left = {group[0].x, group[1].x, group[0].z + group[1].z};
  right = {group[0].y, group[1].y, group[0].w + group[1].w};
}

template <class Config, class Params>
__device__ __forceinline__ void small_panel(const Params& p) {
  using OP = typename Config::Operand;
  using T = typename Config::T;
  using Y = typename Config::Y;
  using L = typename Config::L;
  using R = typename Config::R;
  using Activation = typename Config::Activation;
  constexpr int BN = Config::kColumns, STAGES = Config::kStages, SHARED_BYTES = Config::kSharedBytes, SPLITS = Config::kCluster;
  constexpr bool TRAINING = Config::kTraining;
  constexpr bool kRounds = sizeof(T) < sizeof(float);  // the product, on its way to memory
  using S = PanelShare<BN, SPLITS>;
  constexpr bool kSplit = Operand<OP>::kPlanes == 3;
  constexpr int kTwice = kSplit ? 1 : 0;  // which of the sums count
  using Shared = SmallPanelShared<BN, STAGES, SPLITS, Operand<OP>::kPlanes>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "the plan and SmallPanelShared disagree");
  constexpr int kBoxK = kRowBytes / Operand<OP>::kSize, kTileK = kBoxK * Shared::kBoxes;
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  const Features<L, R> f = {p.bias,      p.scale,   p.scale_stride,    p.scale_value, p.running_mean, p.running_var,
                            p.bn_weight, p.bn_bias, p.num_batches_tracked, p.momentum,    p.eps,          p.group_mean,
                            nullptr,   p.mean,    p.rstd,            nullptr,     nullptr,      {},
                            p.batch, p.features, (p.batch + kGroupRows - 1) / kGroupRows, kGroupRows};
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int rank = SPLITS > 1 ? cluster_rank() : 0, panel = static_cast<int>(blockIdx.x) / SPLITS;
  const int steps = (p.in_features + kTileK - 1) / kTileK, from = rank * steps / SPLITS, until = (rank + 1) * steps / SPLITS;
  const int first_column = panel * BN + rank * S::kColumns;

  if (warp == kConsumerWarps && lane == 0) {
    prefetch_tensormap(p.map_x);
    prefetch_tensormap(p.map_weight);
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(&shared.full[s], 1);
      mbarrier_init(&shared.empty[s], kSplit ? kConsumerWarps : 2);  // for which it waits before it waits for the cluster
    }
    fence_mbarrier_init();
    fence_proxy_async_shared();
  } else if (thread == 0) {
    mbarrier_init(&shared.arrived, 1 + kConsumerWarps);
    fence_mbarrier_init();
    mbarrier_expect_tx(&shared.arrived, (SPLITS - 1) * sizeof(shared.parts[0]));
  }
  __syncwarp();
  if (SPLITS > 1) cluster_arrive_relaxed();
  else __syncthreads();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  if (warp == kConsumerWarps) {
    if (lane == 0) {
      const int x_rows = min(kTileRows, (p.batch + 7) / 8 * 8);  // of a box; what lies behind is not looked at
      int stage = 0;
      u32 parity = 1;
      for (int k = from; k < until; ++k) {
        if (k - from >= STAGES) mbarrier_wait(&shared.empty[stage], parity);
        mbarrier_expect_tx(&shared.full[stage], Shared::kBoxes * (x_rows + BN) * kRowBytes);
#pragma unroll
        for (int box = 0; box < Shared::kBoxes; ++box) {
          const int column = k * kTileK + box * kBoxK;
          tma_load(shared.x[stage][box], p.map_x, &shared.full[stage], column, 0, kEvictNormal);
          tma_load(shared.weight[stage][box], p.map_weight, &shared.full[stage], column, panel * BN, kEvictNormal);
        }
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    __syncwarp();
    if (!TRAINING) return;
    // A lane finishes a column, the left or the right one of a unit.
    const int pair = lane % S::kAcross, unit = lane / S::kAcross / 2 % S::kUnits;
    const bool odd = lane / S::kAcross % 2;
    const int j = first_column + unit * 8 + pair * 2 + odd;
    const bool mine = lane < S::kColumns && j < p.features;
    const auto raw = RawFeature<L, R>::load(f, min(j, p.features - 1));
    const float share = 1.0f / p.batch;
    if (SPLITS > 1) cluster_wait();
    mbarrier_wait_cluster(&shared.arrived, 0);
    float centre = 0.0f;
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) {
      const float4 part = shared.parts[s][unit][pair];
      centre += odd ? part.y : part.x;
    }
    const auto own = raw.own(f);
    ColumnSums left, right;
    named_barrier_sync(1, S::kFinishers + 32);
    sums_of_unit<S>(shared.sums[0], pair, unit, left, right);
    if (kSplit) {
      centre = (odd ? right : left).mean(share, centre);
      named_barrier_sync(1, S::kFinishers + 32);
      sums_of_unit<S>(shared.sums[kTwice], pair, unit, left, right);
    }
    const ColumnSums column = odd ? right : left;
    const float mu = column.mean(share, centre);
    if (mine) {
      f.finish(j, own, mu, column.m2(share));
      if (p.keep_product) {
        p.group_mean[j] = fmaf(column.first, 1.0f / f.rows(0), centre);
        if (f.groups > 1) p.group_mean[p.features + j] = fmaf(column.second, 1.0f / f.rows(1), centre);
      }
    }
    if (kRounds && p.keep_product) {  // what is stored, and what the backward takes it for, agree
      named_barrier_sync(1, S::kFinishers + 32);
      sums_of_unit<S>(shared.sums[1], pair, unit, left, right);
      const ColumnSums stored = odd ? right : left;
      if (mine) {
        p.mean[j] = stored.mean(share, mu);
        p.rstd[j] = 1.0f / sqrtf(own.s * own.s * stored.m2(share) / p.batch + p.eps);
      }
    }
    if (p.num_batches_tracked && p.momentum >= 0.0f) {  // nobody reads it
      if (blockIdx.x == 0 && lane == 0) *p.num_batches_tracked += 1;
    } else if (p.num_batches_tracked) {  // the last block to get here counts the batch, and leaves the counter as it found it
      __syncwarp();
      if (lane == 0) {
        __threadfence();
        if (atomicAdd(&p.counters[kDone], 1u) == gridDim.x - 1) {
          __threadfence();
          p.counters[kDone] = 0;
          *p.num_batches_tracked += 1;
        }
      }
    }
    return;
  }

  // Of a finisher: its columns, two to a unit, and its rows.
  const bool finishes = warp < S::kWarps;
  const int pair = thread % S::kAcross, column = first_column + pair * 2;
  const int row = thread / S::kAcross / 8 * 16 + thread / S::kAcross % 8;  // and the one 8 below
  RawFeature<L, R> raw[S::kUnits][2] = {};
  if (finishes) {
#pragma unroll
    for (int q = 0; q < S::kUnits; ++q)
#pragma unroll
      for (int c = 0; c < 2; ++c) raw[q][c] = RawFeature<L, R>::load(f, min(column + q * 8 + c, p.features - 1));
  }
  // Four units' features are too many registers beside the parts of float32; in evaluation coefficients will do.
  constexpr bool kEarly = !TRAINING && kSplit && S::kUnits == 4;
  float2 early[kEarly ? S::kUnits : 1][2] = {};
  if (kEarly) {
#pragma unroll
    for (int q = 0; q < S::kUnits; ++q)
#pragma unroll
      for (int c = 0; c < 2; ++c) early[q][c] = raw[q][c].coefficients(f);
  }
  // Where its units go in the memory of those who finish them. A block begins with the one after it and ends with itself,
  // so that not all send to one.
  constexpr int kAll = BN / 8, kStarts = kAll / S::kUnits;
  const int own_start = rank * S::kColumns / 8 / S::kUnits;
  float4* slots = &shared.parts[rank][0][(warp * 8 + lane / 4) * S::kAcross + lane % S::kAcross];
  const float share = 1.0f / p.batch;
  const bool upper = row >= kGroupRows;
  const float share_of_group = 1.0f / max(f.rows(upper), 1);
  if (SPLITS > 1) cluster_wait();  // all barriers of the cluster are there

  float acc[BN / 2];
  if (from == until) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) acc[i] = 0.0f;
  }
  const int consumer = __shfl_sync(~0u, warp / 4, 0);  // the same for the whole warp, and the compiler knows
  int stage = 0;
  u32 parity = 0;
  if constexpr (kSplit) {
    // The weight's next stage is split while this one is multiplied. The tensor cores truncate, so what they add up of the
    // high parts is taken out after every stage; the other products are 2^-8 of it and less, and those left out 2^-24.
    using MultiplyThirds = WgmmaRegisters<bfloat16, BN>;
    const int own_row = warp % 4 * 16 + lane / 4 + consumer * kGroupRows;
    float part[BN / 2], cross[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) acc[i] = cross[i] = 0.0f;
    for (int k = from;; ++k) {
      auto& parts = shared.weight_parts[(k - from) % 2];
      if (k < until) {
        mbarrier_wait(&shared.full[stage], parity);
        split_weight_in_three<BN>(shared.weight[stage], parts);
        fence_proxy_async_shared();
      }
      if (k > from) {
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) acc[i] += part[i];
      }
      if (k >= until) break;
      named_barrier_sync(2, kConsumerWarps * 32);  // all parts are there, and nobody reads those that come next
      u32 a[4][3][4];                        // steps of 16 along K, parts, registers of a fragment
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int word = step % 2 * 4 + r / 2 * 2 + lane % 4 / 2;
          const unsigned char* at = &shared.x[stage][step / 2][swizzled_word(own_row + r % 2 * 8, word) + lane % 2 * 8];
          split_in_three(*reinterpret_cast<const float2*>(at), a[step][0][r], a[step][1][r], a[step][2][r]);
        }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.empty[stage]);
      wgmma_fence();
      u64 b[3];
#pragma unroll
      for (int third = 0; third < 3; ++third) b[third] = k_major_descriptor(parts[third]);
#pragma unroll
      for (int step = 0; step < 4; ++step) MultiplyThirds::run(part, a[step][0], b[0] + step * kKMajorStep, step ? 1 : 0);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int at = step * kKMajorStep;
        MultiplyThirds::run(cross, a[step][2], b[0] + at, 1);
        MultiplyThirds::run(cross, a[step][1], b[1] + at, 1);
        MultiplyThirds::run(cross, a[step][0], b[2] + at, 1);
        MultiplyThirds::run(cross, a[step][1], b[0] + at, 1);
        MultiplyThirds::run(cross, a[step][0], b[1] + at, 1);
      }
      wgmma_commit();
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) acc[i] += cross[i];
  } else {
    for (int k = from; k < until; ++k) {
      mbarrier_wait(&shared.full[stage], parity);
      wgmma_fence();
      const u64 a = k_major_descriptor(shared.x[stage][0] + consumer * kGroupRows * kRowBytes);
      const u64 b = k_major_descriptor(shared.weight[stage][0]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Wgmma<OP, BN>::run(acc, a + i * kKMajorStep, b + i * kKMajorStep, (k > from || i) ? 1 : 0);
      wgmma_commit();
      if (k > from) {
        wgmma_wait<1>();
        if (thread % 128 == 0) mbarrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);
      }
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    wgmma_wait<0>();
  }
#pragma unroll
  for (int start = 0; start < kStarts; ++start) {
    if (start != own_start) continue;
#pragma unroll
    for (int n = 0; n < kAll; ++n) {
      const int i = ((start + 1) * S::kUnits + n) % kAll;
      const int owner = i * 8 / S::kColumns + (S::kColumns < 8 ? lane % 4 / 2 : 0);
      const float4 v = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
      float4* to = slots + i % S::kUnits * S::kFinishers;
      if (SPLITS == 1 || owner == rank) *to = v;
      else st_async_remote(to, v, &shared.arrived, owner);
    }
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(&shared.arrived);
  if (!finishes) return;
  mbarrier_wait_cluster(&shared.arrived, 0);

  const bool low = row < p.batch, high = row + 8 < p.batch;
  const i64 at = static_cast<i64>(row) * p.features + column, below = at + static_cast<i64>(8) * p.features;
  const auto total = [&](int q, int finisher) {
    float4 sum = shared.parts[0][q][finisher];
#pragma unroll
    for (int block = 1; block < SPLITS; ++block) {
      const float4 part = shared.parts[block][q][finisher];
      sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    return sum;
  };
  if (!TRAINING) {
#pragma unroll
    for (int q = 0; q < S::kUnits; ++q) {
      float4 v = total(q, thread);
      const bool inside = column + q * 8 < p.features;  // of pairs no half is
      if constexpr (kSplit) {
        const float* rows = p.x + static_cast<i64>(row) * p.in_features;
        const float* columns = p.weight + static_cast<i64>(column + q * 8) * p.in_features;
        const auto of = [&](float sum, i64 row, i64 column) {
          return sum != sum ? product_of(rows + row * p.in_features, columns + column * p.in_features, p.in_features) : sum;
        };
        if (inside && low) v.x = of(v.x, 0, 0), v.y = of(v.y, 0, 1);
        if (inside && high) v.z = of(v.z, 8, 0), v.w = of(v.w, 8, 1);
      }
      const float2 left = kEarly ? early[kEarly ? q : 0][0] : raw[q][0].coefficients(f);
      const float2 right = kEarly ? early[kEarly ? q : 0][1] : raw[q][1].coefficients(f);
      const auto value = [&](float v, float w) {
        return make_float2(Activation::value(left.x * v + left.y), Activation::value(right.x * w + right.y));
      };
      if (inside && low) store_pair(p.y + at + q * 8, value(v.x, v.y));
      if (inside && high) store_pair(p.y + below + q * 8, value(v.z, v.w));
    }
    return;
  }
  float4 d[S::kUnits];  // from row 0's values; rows beyond the batch count for nothing
  float2 centre[S::kUnits];
#pragma unroll
  for (int q = 0; q < S::kUnits; ++q) {
    const float4 v = total(q, thread), first = total(q, pair);
    centre[q] = make_float2(first.x, first.y);
    d[q] = make_float4(low ? v.x - first.x : 0.0f, low ? v.y - first.y : 0.0f, high ? v.z - first.x : 0.0f,
                       high ? v.w - first.y : 0.0f);
  }
  sum_units<S>(d, shared.sums[0]);
  named_barrier_sync(1, S::kFinishers + 32);
  if (kSplit) {  // once more, from the mean: the squares' cancellation shows in float32
#pragma unroll
    for (int q = 0; q < S::kUnits; ++q) {
      ColumnSums left, right;
      sums_of_unit<S>(shared.sums[0], pair, q, left, right);
      const float2 mu = make_float2(left.mean(share), right.mean(share));
      centre[q] = make_float2(centre[q].x + mu.x, centre[q].y + mu.y);
      d[q] = make_float4(low ? d[q].x - mu.x : 0.0f, low ? d[q].y - mu.y : 0.0f, high ? d[q].z - mu.x : 0.0f,
                         high ? d[q].w - mu.y : 0.0f);
    }
    sum_units<S>(d, shared.sums[kTwice]);
    named_barrier_sync(1, S::kFinishers + 32);
  }

#pragma unroll
  for (int q = 0; q < S::kUnits; ++q) {
    ColumnSums left, right;
    sums_of_unit<S>(shared.sums[kTwice], pair, q, left, right);
    const auto of_left = raw[q][0].own(f), of_right = raw[q][1].own(f);
    const float2 mu = make_float2(left.mean(share), right.mean(share));
    const auto root = [&](float v) { return kSplit ? 1.0f / sqrtf(v) : rsqrtf(v); };
    const float a = of_left.slope * root(of_left.s * of_left.s * left.m2(share) * share + p.eps);
    const float b = of_right.slope * root(of_right.s * of_right.s * right.m2(share) * share + p.eps);
    const auto value = [&](float v, float w) {
      return make_float2(Activation::value(a * (v - mu.x) + of_left.shift),
                         Activation::value(b * (w - mu.y) + of_right.shift));
    };
    const bool inside = column + q * 8 < p.features;  // of pairs no half is
    if (inside && low) store_pair(p.y + at + q * 8, value(d[q].x, d[q].y));
    if (inside && high) store_pair(p.y + below + q * 8, value(d[q].z, d[q].w));
    if (p.keep_product) {
      // Both means as they are stored: what the backward adds up again is what was taken off.
      const float2 of_group = make_float2(fmaf(upper ? left.second : left.first, share_of_group, centre[q].x),
                                          fmaf(upper ? right.second : right.first, share_of_group, centre[q].y));
      const float2 off = make_float2(of_group.x - centre[q].x, of_group.y - centre[q].y);
      rounded_pair(d[q].x, d[q].y, off, T{});
      rounded_pair(d[q].z, d[q].w, off, T{});
      if (inside && low) store_pair(p.stored_product + at + q * 8, make_float2(d[q].x, d[q].y));
      if (inside && high) store_pair(p.stored_product + below + q * 8, make_float2(d[q].z, d[q].w));
      if (kRounds) {
        const float2 back = make_float2(of_group.x - left.mean(share, centre[q].x),
                                        of_group.y - right.mean(share, centre[q].y));
        d[q] = make_float4(low ? d[q].x + back.x : 0.0f, low ? d[q].y + back.y : 0.0f, high ? d[q].z + back.x : 0.0f,
                           high ? d[q].w + back.y : 0.0f);
      }
    }
  }
  if (kRounds && p.keep_product) {
    sum_units<S>(d, shared.sums[1]);
    named_barrier_sync(1, S::kFinishers + 32);
  }
}

}  // namespace gemmnorm
