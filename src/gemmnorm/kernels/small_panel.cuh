// One tile of rows in training, the whole chain in one launch (sm_90a): a cluster of SPLITS blocks owns a panel of columns.
//
// Each block multiplies its part of K for all rows and all columns of the panel, and hands every block of the cluster the
// part sums of the columns which that one finishes. Two warpgroups multiply and then normalise; one warp copies, and then
// finishes the statistics. Latency is everything here, so the way from the last copy to the last store passes
//   1. the multiplications of one stage;
//   2. one trip from block to block: the accumulators go straight to where the reader wants them, and a barrier there
//      counts their bytes. No block asks, none waits for the cluster, and each may leave when it has what it needs;
//   3. one sum over the lanes and one barrier of the block, for the values and their squares at once, about row 0. A value
//      of the column lies within √(n - 1) deviations of its mean, so the squares lose 7 bits at most, also where
//      |mean| >> std;
//   4. one reciprocal root, and the stores of y.
// Per-feature vectors are in registers before the first copy has arrived.
#pragma once
#include "column_sums.cuh"
#include "gemm_shared.cuh"
#include "staging.cuh"

namespace gemmnorm {

// How a panel is shared out. The unit is what wgmma leaves in a thread of 8 columns, a float4: columns c and c + 1 of rows
// r and r + 8.
template <int BN, int SPLITS>
struct Share {
  static constexpr int kColumns = BN / SPLITS;                    // that a block finishes
  static constexpr int kAcross = kColumns < 8 ? kColumns / 2 : 4;  // lanes along them
  static constexpr int kUnits = kColumns < 8 ? 1 : kColumns / 8;   // of a thread
  static constexpr int kFinishers = kTileRows / 2 * kAcross;       // threads
  static constexpr int kWarps = kFinishers / 32;
  static_assert(kColumns >= 4 && kColumns <= 32, "a lane of the copying warp finishes a column");
};

template <int BN, int STAGES, int SPLITS>
struct SmallPanelShared {
  using S = Share<BN, SPLITS>;
  alignas(1024) unsigned char x[STAGES][kTileRows * kRowBytes];
  alignas(1024) unsigned char weight[STAGES][BN * kRowBytes];
  float4 parts[SPLITS][S::kUnits][S::kFinishers];             // by block of origin
  float sums[2][S::kWarps][S::kAcross][4 * S::kUnits];  // of a warp's rows; of a unit: Σ of both columns, Σ of their squares
  u64 full[STAGES], empty[STAGES];
  u64 arrived;  // the parts are there
};

// Sums of N numbers over the lanes that differ in BIT and above; each is written once.
template <int N, int BIT>
__device__ __forceinline__ void fold_lanes(const float (&v)[N], float* to, bool writes = true) {
  const int lane = threadIdx.x % 32;
  if constexpr (BIT == 32) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (writes) to[i] = v[i];
  } else if constexpr (N > 1) {
    float half[N / 2];
    exchange<N / 2>(v, half, lane, BIT);
    fold_lanes<N / 2, 2 * BIT>(half, to + (lane & BIT ? N / 2 : 0), writes);
  } else {
    const float sum[1] = {v[0] + __shfl_xor_sync(~0u, v[0], BIT)};
    fold_lanes<1, 2 * BIT>(sum, to, writes && !(lane & BIT));
  }
}

// The same for a thread's deviations and their squares.
template <class S, int N>
__device__ __forceinline__ void sum_units(const float4 (&d)[N], float (&sums)[S::kWarps][S::kAcross][4 * N]) {
  float v[4 * N];
#pragma unroll
  for (int q = 0; q < N; ++q) {
    v[4 * q] = d[q].x + d[q].z;
    v[4 * q + 1] = d[q].y + d[q].w;
    v[4 * q + 2] = d[q].x * d[q].x + d[q].z * d[q].z;
    v[4 * q + 3] = d[q].y * d[q].y + d[q].w * d[q].w;
  }
  fold_lanes<4 * N, S::kAcross>(v, sums[threadIdx.x / 32][threadIdx.x % S::kAcross]);
}

// What the sums say of one column. `first` and `second`: the statistics groups.
struct ColumnSums {
  float first, second, squares;

  // The mean of the deviations, or what it makes of the value that they were taken from.
  __device__ __forceinline__ float mean(float share, float centre = 0.0f) const {
    return fmaf(first + second, share, centre);
  }
  __device__ __forceinline__ float m2(float share) const { return fmaf(-(first + second), mean(share), squares); }
};

template <class S, int N>
__device__ __forceinline__ ColumnSums column_of(const float (&sums)[S::kWarps][S::kAcross][4 * N], int pair, int unit, int odd) {
  float group[2] = {0.0f, 0.0f}, squares[2] = {0.0f, 0.0f};
#pragma unroll
  for (int w = 0; w < S::kWarps; ++w) {
    group[2 * w / S::kWarps] += sums[w][pair][4 * unit + odd];
    squares[2 * w / S::kWarps] += sums[w][pair][4 * unit + 2 + odd];
  }
  return {group[0], group[1], squares[0] + squares[1]};
}

template <class OP, class T, class Y, class L, class R, int BN, int STAGES, int SHARED_BYTES, int SPLITS, class Activation>
__device__ __forceinline__ void small_panel(const TensorMap& map_x /* [batch, in_features] */,
    const TensorMap& map_weight /* [features, in_features] */,
    T* product /* [batch, features] or null: minus its group's mean */, Y* y /* [batch, features] */,
    const L* bias /* [features] or null */, const L* scale /* [features] or [1] or null */, int scale_stride,
    float scale_value, R* running_mean /* [features] or null */, R* running_var /* [features] or null */,
    i64* batches_tracked /* [1] or null */, const R* bn_weight /* [features] or null */,
    const R* bn_bias /* [features] or null */, float momentum, float eps, float* group_mean /* [groups, features] or null */,
    float* mean /* [features] */, float* rstd /* [features] */, u32* counters /* zero, and left zero */, int keep_product,
    int batch, int in_features, int features) {
  constexpr int kTileK = kRowBytes / Operand<OP>::kSize, kConsumers = 8;  // warps; the next one copies
  constexpr bool kRounds = sizeof(T) < sizeof(float);  // the product, on its way to memory
  using S = Share<BN, SPLITS>;
  using Shared = SmallPanelShared<BN, STAGES, SPLITS>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "the plan and SmallPanelShared disagree");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  const Features<L, R> f = {bias,      scale,   scale_stride,    scale_value, running_mean, running_var,
                            bn_weight, bn_bias, batches_tracked, momentum,    eps,          group_mean,
                            nullptr,   mean,    rstd,            nullptr,     nullptr,      {},
                            batch, features, (batch + kGroupRows - 1) / kGroupRows};
  const int rank = SPLITS > 1 ? cluster_rank() : 0, panel = static_cast<int>(blockIdx.x) / SPLITS;
  const int steps = (in_features + kTileK - 1) / kTileK, from = rank * steps / SPLITS, until = (rank + 1) * steps / SPLITS;
  const int first_column = panel * BN + rank * S::kColumns;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const float share = 1.0f / batch;
  const float share_of_first = 1.0f / f.rows(0), share_of_second = f.groups > 1 ? 1.0f / f.rows(1) : 0.0f;

  if (warp == kConsumers) {
    if (lane == 0) {
      prefetch_map(map_x);
      prefetch_map(map_weight);
      for (int s = 0; s < STAGES; ++s) {
        barrier_init(&shared.full[s], 1);
        barrier_init(&shared.empty[s], 2);
      }
      barrier_init(&shared.arrived, 1 + kConsumers);
      fence_barrier_init();
      fence_async_shared();
      barrier_expect(&shared.arrived, (SPLITS - 1) * sizeof(shared.parts[0]));
    }
    __syncwarp();
  }
  if (SPLITS > 1) cluster_arrive_relaxed();
  else __syncthreads();
  wait_for_previous();
  allow_next();

  if (warp == kConsumers) {
    if (lane == 0) {
      int stage = 0;
      u32 parity = 1;
      for (int k = from; k < until; ++k) {
        if (k - from >= STAGES) barrier_wait(&shared.empty[stage], parity);
        barrier_expect(&shared.full[stage], (kTileRows + BN) * kRowBytes);
        copy_to_shared(shared.x[stage], map_x, &shared.full[stage], k * kTileK, 0, kEvictNormal);
        copy_to_shared(shared.weight[stage], map_weight, &shared.full[stage], k * kTileK, panel * BN, kEvictNormal);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    __syncwarp();
    // A lane finishes a column: the odd-th of a pair of lanes' unit.
    const int pair = lane % S::kAcross, unit = lane / S::kAcross / 2 % S::kUnits, odd = lane / S::kAcross % 2;
    const int j = first_column + unit * 8 + pair * 2 + odd;
    const bool mine = lane < S::kColumns && j < features;
    const auto own = f.own(min(j, features - 1));
    if (SPLITS > 1) cluster_wait();
    barrier_wait_cluster(&shared.arrived, 0);
    float centre = 0.0f;
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) {
      const float4 part = shared.parts[s][unit][pair];
      centre += odd ? part.y : part.x;
    }
    sync_threads(1, S::kFinishers + 32);
    const ColumnSums column = column_of<S, S::kUnits>(shared.sums[0], pair, unit, odd);
    const float mu = column.mean(share, centre);
    if (mine) {
      f.finish(j, own, mu, column.m2(share));
      if (keep_product) {
        group_mean[j] = fmaf(column.first, share_of_first, centre);
        if (f.groups > 1) group_mean[features + j] = fmaf(column.second, share_of_second, centre);
      }
    }
    if (kRounds && keep_product) {  // what is stored, and what the backward takes it for, agree
      sync_threads(1, S::kFinishers + 32);
      const ColumnSums stored = column_of<S, S::kUnits>(shared.sums[1], pair, unit, odd);
      if (mine) {
        mean[j] = mu + stored.mean(share);
        rstd[j] = 1.0f / sqrtf(own.s * own.s * stored.m2(share) / batch + eps);
      }
    }
    if (batches_tracked && momentum >= 0.0f) {  // nobody reads it
      if (blockIdx.x == 0 && lane == 0) *batches_tracked += 1;
    } else if (batches_tracked) {  // the last block to get here counts the batch, and leaves the counter as it found it
      __syncwarp();
      if (lane == 0) {
        __threadfence();
        if (atomicAdd(&counters[kDone], 1u) == gridDim.x - 1) {
          counters[kDone] = 0;
          *batches_tracked += 1;
        }
      }
    }
    return;
  }

  // Of a finisher's own columns, two to a unit.
  const bool finishes = warp < S::kWarps;
  const int column = first_column + thread % S::kAcross * 2;
  float s[S::kUnits][2], slope[S::kUnits][2], shift[S::kUnits][2];
  if (finishes) {
#pragma unroll
    for (int q = 0; q < S::kUnits; ++q)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = min(column + q * 8 + c, features - 1);
        s[q][c] = f.s(j);
        slope[q][c] = f.slope(j, 1.0f);
        shift[q][c] = f.shift(j);
      }
  }
  if (SPLITS > 1) cluster_wait();  // all barriers of the cluster are there

  float acc[BN / 2];
  if (from == until) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) acc[i] = 0.0f;
  }
  {
    const int consumer = warp / 4;
    int stage = 0;
    u32 parity = 0;
    for (int k = from; k < until; ++k) {
      barrier_wait(&shared.full[stage], parity);
      wgmma_fence();
      const u64 a = matrix_descriptor(shared.x[stage] + consumer * kGroupRows * kRowBytes);
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
  }

  // To whom a unit belongs. A block begins with the one after it and ends with itself, so that not all send to one.
  constexpr int kAll = BN / 8, kStarts = kAll / S::kUnits;
  const int slot = (warp * 8 + lane / 4) * S::kAcross + lane % S::kAcross, own_start = rank * S::kColumns / 8 / S::kUnits;
#pragma unroll
  for (int start = 0; start < kStarts; ++start) {
    if (start != own_start) continue;
#pragma unroll
    for (int n = 0; n < kAll; ++n) {
      const int i = ((start + 1) * S::kUnits + n) % kAll, owner = i * 8 / S::kColumns + (S::kColumns < 8 ? lane % 4 / 2 : 0);
      const float4 v = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
      float4* to = &shared.parts[rank][i % S::kUnits][slot];
      if (SPLITS == 1 || owner == rank) *to = v;
      else store_remote(to, v, &shared.arrived, owner);
    }
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(&shared.arrived);
  if (!finishes) return;
  barrier_wait_cluster(&shared.arrived, 0);

  const int in_tile = thread / S::kAcross / 8 * 16 + thread / S::kAcross % 8;  // the row; the other is 8 below
  const bool low = in_tile < batch, high = in_tile + 8 < batch;
  float4 d[S::kUnits];  // from row 0's values; rows beyond the batch count for nothing
  float2 centre[S::kUnits];
#pragma unroll
  for (int q = 0; q < S::kUnits; ++q) {
    float4 v = shared.parts[0][q][thread], first = shared.parts[0][q][thread % S::kAcross];
#pragma unroll
    for (int p = 1; p < SPLITS; ++p) {
      const float4 part = shared.parts[p][q][thread], of_first = shared.parts[p][q][thread % S::kAcross];
      v = make_float4(v.x + part.x, v.y + part.y, v.z + part.z, v.w + part.w);
      first.x += of_first.x;
      first.y += of_first.y;
    }
    centre[q] = make_float2(first.x, first.y);
    d[q].x = low ? v.x - first.x : 0.0f;
    d[q].y = low ? v.y - first.y : 0.0f;
    d[q].z = high ? v.z - first.x : 0.0f;
    d[q].w = high ? v.w - first.y : 0.0f;
  }
  sum_units<S>(d, shared.sums[0]);
  sync_threads(1, S::kFinishers + 32);

  const bool upper = in_tile >= kGroupRows;
  const float share_of_group = upper ? share_of_second : share_of_first;
  const i64 at = static_cast<i64>(in_tile) * features + column, below = at + static_cast<i64>(8) * features;
#pragma unroll
  for (int q = 0; q < S::kUnits; ++q) {
    const ColumnSums left = column_of<S, S::kUnits>(shared.sums[0], thread % S::kAcross, q, 0);
    const ColumnSums right = column_of<S, S::kUnits>(shared.sums[0], thread % S::kAcross, q, 1);
    const float2 mu = make_float2(left.mean(share), right.mean(share));
    const float a = slope[q][0] * rsqrtf(s[q][0] * s[q][0] * left.m2(share) * share + eps);
    const float b = slope[q][1] * rsqrtf(s[q][1] * s[q][1] * right.m2(share) * share + eps);
    const bool inside = column + q * 8 < features;  // of pairs no half is
    const auto value = [&](float x, float y) {
      return make_float2(Activation::value(a * (x - mu.x) + shift[q][0]), Activation::value(b * (y - mu.y) + shift[q][1]));
    };
    if (inside && low) store_pair(y + at + q * 8, value(d[q].x, d[q].y));
    if (inside && high) store_pair(y + below + q * 8, value(d[q].z, d[q].w));
    if (keep_product) {
      // Both means as they are stored: what the backward adds up again is what was taken off.
      const float2 of_group = make_float2(fmaf(upper ? left.second : left.first, share_of_group, centre[q].x),
                                          fmaf(upper ? right.second : right.first, share_of_group, centre[q].y));
      const float2 off = make_float2(of_group.x - centre[q].x, of_group.y - centre[q].y);
      rounded_pair(d[q].x, d[q].y, off, T{});
      rounded_pair(d[q].z, d[q].w, off, T{});
      if (inside && low) store_pair(product + at + q * 8, make_float2(d[q].x, d[q].y));
      if (inside && high) store_pair(product + below + q * 8, make_float2(d[q].z, d[q].w));
      if (kRounds) {
        const float2 back = make_float2(of_group.x - left.mean(share, centre[q].x),
                                        of_group.y - right.mean(share, centre[q].y));
        d[q] = make_float4(low ? d[q].x + back.x : 0.0f, low ? d[q].y + back.y : 0.0f, high ? d[q].z + back.x : 0.0f,
                           high ? d[q].w + back.y : 0.0f);
      }
    }
  }
  if (kRounds && keep_product) {
    sum_units<S>(d, shared.sums[1]);
    sync_threads(1, S::kFinishers + 32);
  }
}

}  // namespace gemmnorm
