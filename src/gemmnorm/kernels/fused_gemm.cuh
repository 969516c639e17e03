// The whole chain in one Hopper kernel: GEMM → scale → BatchNorm → activation (sm_90a).
//
// A persistent block is one warpgroup that feeds and two that multiply. Warp 0 copies tiles of x and W into a ring of
// shared-memory stages; each consumer warpgroup multiplies 64 of the tile's 128 rows by all of its BN columns, takes the
// statistics of its rows from the accumulators (one statistics group: a column mean, then M2 about it) and stores the
// product minus that mean; warp 1 stores staged tiles and counts, panel by panel (a panel is one column of tiles), what
// is complete. Warps 2 and 3 normalise complete panels out of the L2 while the tensor cores work on later ones. The last tile
// of every block never leaves the registers before it is normalised. float32 operands: split_fused_gemm.cuh.
#pragma once
#include "column_sums.cuh"
#include "panel_units.cuh"
#include "ptx/wgmma.cuh"

namespace gemmnorm {

template <int BN, int STAGES, bool STAGED>
struct GemmShared {
  alignas(1024) unsigned char x[STAGES][kTileRows * kRowBytes];
  alignas(1024) unsigned char weight[STAGES][BN * kRowBytes];
  alignas(1024) unsigned char staging[2][STAGED ? kGroupRows * BN * 2 : 1024];
  float sums[2][4][BN];   // per consumer and warp
  float slope[2][BN];     // column coefficients, or the group's mean in `slope`: per consumer; in evaluation per tile
  float shift[2][BN];
  float mean[BN], rstd[BN];  // of the tile's columns, for both consumers
  u64 full[STAGES], empty[STAGES];
  u64 staged[2], unstaged[2];  // a consumer's tile is ready to be stored; its staging memory is free again
  u64 known[2], used[2];       // in evaluation: a tile's coefficients are there; they may be overwritten
  u32 last;
};

// Two neighbouring values less the mean, as T holds them: statistics and results agree with what is stored, so that the
// rounding of a value that stands out is normalised away as PyTorch's is. Without computed_anew ptxas finds that these
// writes reach the next wgmma and puts all of them in series (C7520).
template <class T>
__device__ __forceinline__ void rounded_pair(float& a, float& b, float2 mean, T) {
  const u32 both = pack(a - mean.x, b - mean.y, T{});
  a = computed_anew(to_float(T{static_cast<u16>(both)}));
  b = computed_anew(to_float(T{static_cast<u16>(both >> 16)}));
}
__device__ __forceinline__ void rounded_pair(float& a, float& b, float2 mean, float) {
  a -= mean.x;
  b -= mean.y;
}

// Per-column numbers of a thread's next N pairs of columns, all in flight at once.
template <int N>
__device__ __forceinline__ void load_pairs(const float* columns, float2 (&out)[N]) {
#pragma unroll
  for (int q = 0; q < N; ++q) out[q] = *reinterpret_cast<const float2*>(columns + q * 8 + (threadIdx.x % 4) * 2);
}

// A thread's two neighbouring results (the i-th such pair) of row own_row, and of own_row + 8, to where the copy engine
// will fetch them as T.
template <class T>
__device__ __forceinline__ void stage_pairs(unsigned char* staging, int own_row, int i, float2 low, float2 high) {
  if constexpr (sizeof(T) == 2) {
    unsigned char* to = staging + (i / 8) * kGroupRows * kRowBytes + own_row * kRowBytes +
                        (((i % 8) * 16 + (threadIdx.x % 4) * 4) ^ ((own_row % 8) << 4));
    *reinterpret_cast<u32*>(to) = pack(low.x, low.y, T{});
    *reinterpret_cast<u32*>(to + 8 * kRowBytes) = pack(high.x, high.y, T{});
  }
}

// One warp sums up the squares of a staged group, column by column: M2, because its mean is taken off.
template <class T, int BN, class L, class R>
__device__ __forceinline__ void store_squares(const Features<L, R>& f, const unsigned char* staging, int group,
                                              int first_column) {
  constexpr int kLanes = BN / 8, kAtOnce = 32 / kLanes;  // lanes to a row, of eight columns each; rows at once
  const int lane = threadIdx.x % 32, column = lane % kLanes, rows = f.rows(group);
  const unsigned char* of_lane = staging + column / 8 * kGroupRows * kRowBytes;
  float sum[8] = {};
#pragma unroll 4
  for (int row = lane / kLanes; row < rows; row += kAtOnce) {
    const Vec<T, 8> v = *reinterpret_cast<const Vec<T, 8>*>(of_lane + row * kRowBytes + ((column ^ row) % 8) * 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += to_float(v.at[i]) * to_float(v.at[i]);
  }
#pragma unroll
  for (int bit = kLanes; bit < 32; bit *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], bit);
  const int j = first_column + 8 * column;
  if (lane < kLanes && j < f.features && rows) {
    float4* to = reinterpret_cast<float4*>(f.group_m2 + static_cast<i64>(group) * f.features + j);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
}

// Two neighbouring results of one row, straight to global memory.
template <class Y>
__device__ __forceinline__ void store_pair(Y* to, float2 v) {
  const float pair[2] = {v.x, v.y};
  store<Y, 2>(to, pair);
}

template <class OP, class T, class Y, class L, class R, int BN, int STAGES, int SHARED_BYTES, Finish FINISH,
          class Activation>
__device__ __forceinline__ void fused_gemm(const TensorMap& map_x /* [batch, in_features] */,
    const TensorMap& map_weight /* [features, in_features] */, const TensorMap& map_product /* [batch, features] */,
    const TensorMap& map_y /* [batch, features] */, T* product /* [batch, features]: minus its group's mean */,
    Y* y /* [batch, features]; the product's memory where that is not kept */, const L* bias /* [features] or null */,
    const L* scale /* [features] or [1] or null */, int scale_stride, float scale_value,
    R* running_mean /* [features] or null */, R* running_var /* [features] or null */,
    i64* batches_tracked /* [1] or null */, const R* bn_weight /* [features] or null */,
    const R* bn_bias /* [features] or null */, float momentum, float eps, float* group_mean /* [groups, features] */,
    float* group_m2 /* [groups, features] */, float* mean /* [features] */, float* rstd /* [features] */,
    float* merged_slope /* [features] */, float* merged_shift /* [features] */,
    u32* counters /* zero, and left zero */, int group_panels, int stream_x, int keep_product, int batch, int in_features,
    int features) {
  constexpr int kTileK = kRowBytes / sizeof(T), kAccumulators = BN / 2;
  constexpr int kAhead = 16, kPairs = FINISH == Finish::kPersistent ? 2 : 4;  // partial results in flight, pairs of columns
  constexpr int kUnitAhead = 4;  // loads in flight while a warp merges or normalises
  // Each of the 384 threads starts with 168 registers; the widest tiles need more in the consumers.
  constexpr bool kMoveRegisters = BN == 256;
  constexpr int kFeeder = 104, kConsumer = (3 * 168 - kFeeder) / 16 * 8;
  constexpr bool kStaged = sizeof(T) == 2 && BN >= 64;
  constexpr bool kStagedY = kStaged && sizeof(Y) == 2;
  using Shared = GemmShared<BN, STAGES, kStaged>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "plan.py and GemmShared disagree");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  const Features<L, R> f = {bias,      scale,   scale_stride, scale_value,     running_mean, running_var,
                            bn_weight, bn_bias, batches_tracked, momentum,     eps,          group_mean,
                            group_m2,  mean,    rstd,         merged_slope,    merged_shift,
                            {},        batch,   features,     (batch + kGroupRows - 1) / kGroupRows};
  const Raster raster = {(batch + kTileRows - 1) / kTileRows, (features + BN - 1) / BN, group_panels};
  const int tiles = raster.tiles(), steps = (in_features + kTileK - 1) / kTileK;
  // Tiles that are stored and normalised later; the rest, the last of each block, stay in registers.
  const int stored = FINISH == Finish::kPersistent ? max(tiles - static_cast<int>(gridDim.x), 0) : 0;
  const int warpgroup = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    prefetch_map(map_x);
    prefetch_map(map_weight);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 2);
    }
    for (int c = 0; c < 2; ++c) {
      barrier_init(&shared.staged[c], 128);
      barrier_init(&shared.unstaged[c], 1);
      barrier_init(&shared.known[c], 32);
      barrier_init(&shared.used[c], 2);
    }
    fence_barrier_init();
    fence_async_shared();
  }
  __syncthreads();
  wait_for_previous();
  allow_next();
  if (FINISH == Finish::kStatistics && batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *batches_tracked += 1;

  if (warpgroup == 0) {
    if (kMoveRegisters) release_registers<kFeeder>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0 && lane == 0) {  // feeds the ring
      const u64 x_policy = stream_x ? kEvictFirst : kEvictNormal;
      int stage = 0;
      u32 parity = 1;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = raster.at(t);
        for (int k = 0; k < steps; ++k) {
          barrier_wait(&shared.empty[stage], parity);
          barrier_expect(&shared.full[stage], (kTileRows + BN) * kRowBytes);
          copy_to_shared(shared.x[stage], map_x, &shared.full[stage], k * kTileK, tile.m * kTileRows, x_policy);
          copy_to_shared(shared.weight[stage], map_weight, &shared.full[stage], k * kTileK, tile.n * BN, kEvictNormal);
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    } else if (warp == 1 && FINISH == Finish::kEvaluate) {  // computes coefficients, a tile ahead of the multiplications
      int buffer = 0;
      u32 parity = 1;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = raster.at(t);
        barrier_wait(&shared.used[buffer], parity);
#pragma unroll 2
        for (int c = lane; c < BN; c += 32) {
          const int j = min(tile.n * BN + c, features - 1);
          const float r = 1.0f / sqrtf(to_float(running_var[j]) + eps), centre = to_float(running_mean[j]);
          const float slope = f.slope(j, r), q = value_or(bn_weight, j, 1.0f) * r;
          shared.slope[buffer][c] = slope;
          shared.shift[buffer][c] = f.shift(j) + q * (f.s(j) * f.b(j) - centre);
          if (mean && tile.m == 0) {
            mean[j] = centre;
            rstd[j] = r;
          }
        }
        barrier_arrive(&shared.known[buffer]);
        buffer ^= 1;
        if (buffer == 0) parity ^= 1;
      }
    } else if (warp == 1) {  // stores staged tiles, sums up the squares of most, counts complete groups
      u32 parity = 0;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x, parity ^= 1) {
        const Tile tile = raster.at(t);
        const bool later = FINISH == Finish::kStatistics || t < stored;
        for (int c = 0; c < 2; ++c) {
          barrier_wait(&shared.staged[c], parity);
          if (kStaged && (later || keep_product) && lane == 0) {
            for (int part = 0; part < BN / 64; ++part)
              copy_to_global(map_product, shared.staging[c] + part * kGroupRows * kRowBytes, tile.n * BN + part * 64,
                             tile.m * kTileRows + c * kGroupRows);
            commit_copies();
          }
          if constexpr (kStaged) {
            if (later) store_squares<T, BN>(f, shared.staging[c], 2 * tile.m + c, tile.n * BN);
          }
          __syncwarp();
          if (lane == 0) {
            if (kStaged) wait_copies_read();
            barrier_arrive(&shared.unstaged[c]);
            if (kStaged) {
              wait_copies();
              fence_async_global();
            }
            if (FINISH == Finish::kOneWave || FINISH == Finish::kPersistent) add_release(&counters[kPanels + tile.n], 1);
          }
        }
      }
    } else if (warp >= 2 && FINISH != Finish::kEvaluate) {
      const int last = (tiles - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x) * gridDim.x + blockIdx.x;
      if (FINISH != Finish::kStatistics && warp == 2) f.prefetch(raster.at(last).n * BN, BN);
      if (FINISH == Finish::kPersistent)
        take_units<T, Y, BN, Activation, kUnitAhead>(f, raster, product, y, counters, stored);
    }
  } else {
    if (kMoveRegisters) claim_registers<kConsumer>();
    const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const int own_row = warp * 16 + lane / 4;  // of the group; the thread also holds own_row + 8
    int stage = 0;
    u32 parity = 0, staging_parity = 1;
    int buffer = 0;
    u32 known_parity = 0;
    float acc[kAccumulators];

    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      for (int k = 0; k < steps; ++k) {
        barrier_wait(&shared.full[stage], parity);
        wgmma_fence();
        const u64 a = matrix_descriptor(shared.x[stage] + consumer * kGroupRows * kRowBytes);
        const u64 b = matrix_descriptor(shared.weight[stage]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          Wgmma<OP, BN>::run(acc, a + i * kDescriptorStep, b + i * kDescriptorStep, (k | i) ? 1 : 0);
        wgmma_commit();
        if (k > 0) {
          wgmma_wait<1>();
          if (thread == 0) barrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);
        }
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      wgmma_wait<0>();
      if (thread == 0) barrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);

      const Tile tile = raster.at(t);
      const int group = 2 * tile.m + consumer, rows = f.rows(group);
      const i64 row = static_cast<i64>(group) * kGroupRows + own_row;
      const int first_column = tile.n * BN;

      bool finish_here = FINISH == Finish::kEvaluate, finish_feature_here = false;
      float centre = 0.0f, squares = 0.0f;
      int at_column = 0;
      if (FINISH != Finish::kEvaluate) {
        // Column means of the group, then M2 about them. Rows beyond the batch are zero in the accumulators.
        float2 mu = column_sums<BN>(shared.sums[consumer], consumer, [&](int i) {
          return acc[(i / 2) * 4 + i % 2] + acc[(i / 2) * 4 + 2 + i % 2];
        });
        mu.x = rows ? mu.x / rows : 0.0f;
        mu.y = rows ? mu.y / rows : 0.0f;
        if (2 * thread < BN) *reinterpret_cast<float2*>(&shared.slope[consumer][2 * thread]) = mu;
        sync_threads(1 + consumer, 128);
        const bool low = own_row < rows, high = own_row + 8 < rows;
        const int j = first_column + 2 * thread;
        const bool owner = 2 * thread < BN && j < features;
        const i64 at_group = static_cast<i64>(group) * features + j;
        if (owner && rows) *reinterpret_cast<float2*>(group_mean + at_group) = mu;
        finish_here = FINISH == Finish::kOneBlock || FINISH == Finish::kOneWave || (FINISH == Finish::kPersistent && t >= stored);
        float2 m2 = mu;
        if (kStaged && !finish_here) {  // out of the registers at once: another warp sums up the squares
          barrier_wait(&shared.unstaged[consumer], staging_parity);
          staging_parity ^= 1;
#pragma unroll
          for (int i0 = 0; i0 < BN / 8; i0 += kPairs) {
            float2 m[kPairs];
            load_pairs(&shared.slope[consumer][i0 * 8], m);
#pragma unroll
            for (int q = 0; q < kPairs; ++q) {
              const int i = i0 + q;
              stage_pairs<T>(shared.staging[consumer], own_row, i,
                             make_float2(acc[4 * i] - m[q].x, acc[4 * i + 1] - m[q].y),
                             make_float2(acc[4 * i + 2] - m[q].x, acc[4 * i + 3] - m[q].y));
            }
            keep_order();
          }
        } else {
#pragma unroll
          for (int i = 0; i < BN / 8; ++i) {
            const float2 m = *reinterpret_cast<const float2*>(&shared.slope[consumer][i * 8 + (lane % 4) * 2]);
            rounded_pair(acc[4 * i], acc[4 * i + 1], m, T{});
            rounded_pair(acc[4 * i + 2], acc[4 * i + 3], m, T{});
            if (i % 8 == 7) keep_order();
          }
          if (rows < kGroupRows) {  // rows beyond the batch count for nothing
#pragma unroll
            for (int i = 0; i < BN / 8; ++i) {
              if (!low) acc[4 * i] = acc[4 * i + 1] = 0.0f;
              if (!high) acc[4 * i + 2] = acc[4 * i + 3] = 0.0f;
            }
          }
          m2 = column_sums<BN>(shared.sums[consumer], consumer, [&](int i) {
            const float a = acc[(i / 2) * 4 + i % 2], b = acc[(i / 2) * 4 + 2 + i % 2];
            return a * a + b * b;
          });
          sync_threads(1 + consumer, 128);  // the sums are read before the next tile's are written
          if (owner && rows) *reinterpret_cast<float2*>(group_m2 + at_group) = m2;
          barrier_wait(&shared.unstaged[consumer], staging_parity);  // no consumer gets two tiles ahead of warp 1
          staging_parity ^= 1;
          if (!finish_here || keep_product) {
#pragma unroll
            for (int i = 0; i < BN / 8; ++i) {
              if (kStaged) {
                stage_pairs<T>(shared.staging[consumer], own_row, i, make_float2(acc[4 * i], acc[4 * i + 1]),
                               make_float2(acc[4 * i + 2], acc[4 * i + 3]));
              } else {
                const int column = first_column + i * 8 + (lane % 4) * 2;
                if (column < features) {
                  if (low) store_pair(product + row * features + column, make_float2(acc[4 * i], acc[4 * i + 1]));
                  if (high) store_pair(product + (row + 8) * features + column, make_float2(acc[4 * i + 2], acc[4 * i + 3]));
                }
              }
            }
          }
        }
        if (kStaged) fence_async_shared();
        barrier_arrive(&shared.staged[consumer]);

        if (finish_here) {
          // Mean and rstd of the tile's columns: each consumer merges half of them, kLanes threads to a column.
          constexpr int kLanes = 256 / BN;
          const int column = consumer * (BN / 2) + thread / kLanes;
          at_column = first_column + column;
          const bool mine = at_column < features, direct = FINISH != Finish::kPersistent || f.groups <= kDirectGroups;
          float2 unit_slope = make_float2(0.0f, 0.0f), unit_shift = unit_slope;
          if (owner) {
            unit_slope = make_float2(f.slope(j, 1.0f), f.slope(j + 1, 1.0f));
            unit_shift = make_float2(f.shift(j), f.shift(j + 1));
          }
          const float s_column = mine ? f.s(at_column) : 0.0f;
          if (FINISH == Finish::kOneBlock) {
            if (2 * thread < BN) *reinterpret_cast<float2*>(&shared.shift[consumer][2 * thread]) = m2;
            sync_threads(3, 256);
          } else {
            if (thread == 0) {
              if (direct) wait_until(&counters[kPanels + tile.n], 2 * raster.tiles_m);
              else wait_until(&counters[kPanels + raster.tiles_n + tile.n], BN / kMergeWidth);
            }
            sync_threads(1 + consumer, 128);
          }
          float r = 0.0f;
          if (direct) {
            // Relative to the mean of a few groups, spread over the batch and full if any is:
            // M2 = Σ M2_g + n_g·d² - (Σ n_g·d)²/B with d = mean_g - near.
            constexpr int kSpread = 4;
            const int full = max(batch / kGroupRows, 1);
            float near = 0.0f, sum = 0.0f, spread[kSpread];
            const auto load_group = [&](const float (*here)[BN], const float* vector, int g) {
              return FINISH == Finish::kOneBlock ? here[g][column]
                                                 : load_l2(vector + static_cast<i64>(g) * features + (mine ? at_column : 0));
            };
#pragma unroll
            for (int q = 0; q < kSpread; ++q) spread[q] = load_group(shared.slope, group_mean, q * full / kSpread);
            for (int g0 = thread % kLanes; g0 < f.groups; g0 += kLanes * kAhead) {
              float means[kAhead], squared[kAhead];
#pragma unroll
              for (int i = 0; i < kAhead; ++i) {
                const int g = min(g0 + i * kLanes, f.groups - 1);
                means[i] = load_group(shared.slope, group_mean, g);
                squared[i] = load_group(shared.shift, group_m2, g);
              }
              if (g0 < kLanes) near = ((spread[0] + spread[1]) + (spread[2] + spread[3])) / kSpread;
#pragma unroll
              for (int i = 0; i < kAhead; ++i) {
                const float n = g0 + i * kLanes < f.groups ? f.rows(g0 + i * kLanes) : 0, d = means[i] - near;
                sum += n * d;
                squares += (n > 0.0f ? squared[i] : 0.0f) + n * d * d;
              }
            }
            near = ((spread[0] + spread[1]) + (spread[2] + spread[3])) / kSpread;  // of lanes without groups too
#pragma unroll
            for (int lane_bit = 1; lane_bit < kLanes; lane_bit *= 2) {
              sum += __shfl_xor_sync(~0u, sum, lane_bit);
              squares += __shfl_xor_sync(~0u, squares, lane_bit);
            }
            squares -= sum * sum / batch;
            centre = near + sum / batch;
            if (mine) r = 1.0f / sqrtf(s_column * s_column * squares / batch + eps);
            const bool mine_to_finish = FINISH != Finish::kPersistent || !raster.has_stored(tile.n, stored);
            finish_feature_here = mine && thread % kLanes == 0 && tile.m == 0 && mine_to_finish;
          } else if (mine) {
            centre = load_l2(mean + at_column);
            r = load_l2(rstd + at_column);
          }
          if (thread % kLanes == 0) {
            shared.mean[column] = centre;
            shared.rstd[column] = r;
          }
          sync_threads(3, 256);
          // Coefficients for values that are stored minus their group's mean.
          if (owner) {
            const float2 m = *reinterpret_cast<const float2*>(&shared.mean[2 * thread]);
            const float2 rr = *reinterpret_cast<const float2*>(&shared.rstd[2 * thread]);
            const float2 slope = make_float2(unit_slope.x * rr.x, unit_slope.y * rr.y);
            *reinterpret_cast<float2*>(&shared.slope[consumer][2 * thread]) = slope;
            *reinterpret_cast<float2*>(&shared.shift[consumer][2 * thread]) =
                make_float2(slope.x * (mu.x - m.x) + unit_shift.x, slope.y * (mu.y - m.y) + unit_shift.y);
          }
          if (kStagedY) {  // the product has left the staging memory
            barrier_wait(&shared.unstaged[consumer], staging_parity);
            staging_parity ^= 1;
          }
        }
      }
      if (finish_here) {
        const int at = FINISH == Finish::kEvaluate ? buffer : consumer;
        if (FINISH == Finish::kEvaluate) {
          barrier_wait(&shared.known[buffer], known_parity);
          buffer ^= 1;
          if (buffer == 0) known_parity ^= 1;
          if (kStagedY && thread == 0) wait_copies_read();
        }
        sync_threads(1 + consumer, 128);  // the coefficients are there, the staging memory is free
        const bool low = own_row < rows, high = own_row + 8 < rows;
#pragma unroll
        for (int i0 = 0; i0 < BN / 8; i0 += kPairs) {
          float2 slope[kPairs], shift[kPairs];
          load_pairs(&shared.slope[at][i0 * 8], slope);
          load_pairs(&shared.shift[at][i0 * 8], shift);
#pragma unroll
          for (int q = 0; q < kPairs; ++q) {
            const int i = i0 + q, column = first_column + i * 8 + (lane % 4) * 2;
            const float2 a = make_float2(Activation::value(slope[q].x * acc[4 * i] + shift[q].x),
                                         Activation::value(slope[q].y * acc[4 * i + 1] + shift[q].y));
            const float2 b = make_float2(Activation::value(slope[q].x * acc[4 * i + 2] + shift[q].x),
                                         Activation::value(slope[q].y * acc[4 * i + 3] + shift[q].y));
            if (kStagedY) {
              stage_pairs<Y>(shared.staging[consumer], own_row, i, a, b);
            } else if (column < features) {
              if (low) store_pair(y + row * features + column, a);
              if (high) store_pair(y + (row + 8) * features + column, b);
            }
          }
          keep_order();
        }
        if (kStagedY) fence_async_shared();
        sync_threads(1 + consumer, 128);
        if (FINISH == Finish::kEvaluate && thread == 0) barrier_arrive(&shared.used[at]);
        if (kStagedY && thread == 0) {
          for (int part = 0; part < BN / 64; ++part)
            copy_to_global(map_y, shared.staging[consumer] + part * kGroupRows * kRowBytes, first_column + part * 64,
                           group * kGroupRows);
          commit_copies();
        }
        if (finish_feature_here) f.finish(at_column, centre, squares);  // nobody waits for it
      }
    }
    if (kStagedY && thread == 0) wait_copies();
    if (FINISH == Finish::kPersistent) take_units<T, Y, BN, Activation, kUnitAhead>(f, raster, product, y, counters, stored);
  }

  if (FINISH != Finish::kEvaluate && FINISH != Finish::kStatistics) {
    // The last block to get here leaves the counters as it found them, and counts the batch.
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      shared.last = atomicAdd(&counters[kDone], 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (shared.last) {
      for (int i = threadIdx.x; i < kPanels + 2 * raster.tiles_n; i += kGemmThreads) counters[i] = 0;
      if (threadIdx.x == 0 && batches_tracked) *batches_tracked += 1;
    }
  }
}

}  // namespace gemmnorm
