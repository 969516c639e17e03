// The whole chain in one Hopper kernel, as fused_gemm.cuh, for float32 by split operands: Cᵀ = W·xᵀ with W in registers.
//
// A tile is 128 features by 128 rows of the batch. The copy engine brings W as it is, float32, and x as the two float16
// planes that it was split into before (split.cuh). Each of two consumer warpgroups takes 64 features: its threads load
// their fragments of W from shared memory, split them on the way, and multiply by both planes of x. So W is read once and
// written nowhere. The next fragments are converted while products are under way.
//
// Features are the accumulator's rows, so that what belongs to a feature is a number in a thread's registers, and its
// sums over the batch are shuffles between four lanes. Everything else is as in fused_gemm.cuh: two statistics groups to
// a tile, panels counted as they are completed, warps 2 and 3 splitting rows of x for later tiles (split_ahead.cuh) and
// then normalising complete panels, the last tile of every block normalised before it leaves the registers.
#pragma once
#include "panel_units.cuh"
#include "ptx/wgmma.cuh"
#include "split_ahead.cuh"

namespace gemmnorm {

constexpr int kTileFeatures = 128, kConsumerFeatures = 64;

template <int STAGES, bool AHEAD>
struct SplitFusedShared : PieceRings<AHEAD> {
  alignas(1024) unsigned char x[STAGES][2][kTileRows * kRowBytes];           // 64 of K: high, low
  alignas(1024) unsigned char weight[STAGES][2][kTileFeatures * kRowBytes];  // 64 of K: 32 in float32, then 32 more
  alignas(16) float2 x_scale[2][kTileRows];  // per tile, in turns: the power of two of each row of x, as two factors
  float slope[2][kTileFeatures], shift[2][kTileFeatures];  // likewise, in evaluation
  u64 full[STAGES], empty[STAGES];
  u64 known[2], used[2];  // a tile's numbers are there; they may be overwritten
  u32 last;
};

// Two neighbouring elements, scaled, as float16: high and, in units of 2^-11, low.
__device__ __forceinline__ void split_pair(float a, float b, u32& high, u32& low) {
  const u32 rounded = pack(a, b, half{});
  const half rounded_a = {static_cast<u16>(rounded)}, rounded_b = {static_cast<u16>(rounded >> 16)};
  high = computed_anew(rounded);
  low = computed_anew(pack((a - to_float(rounded_a)) / kLowUnit, (b - to_float(rounded_b)) / kLowUnit, half{}));
}

// A thread's fragments of 16 of K of two rows of the weight, 8 apart, and the sum of their magnitudes. K is taken in the
// order that makes a fragment's elements neighbours in memory, see store_split.
__device__ __forceinline__ void load_fragments(const unsigned char* from, const float (&scale)[2], u32 (&high)[4],
                                               u32 (&low)[4], float (&total)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float4 v = *reinterpret_cast<const float4*>(from + r * 8 * kRowBytes);
    total[r] += (fabsf(v.x) + fabsf(v.y)) + (fabsf(v.z) + fabsf(v.w));
    split_pair(v.x * scale[r], v.y * scale[r], high[r], low[r]);
    split_pair(v.z * scale[r], v.w * scale[r], high[2 + r], low[2 + r]);
  }
}

// Of a tile's 128 features a consumer thread has this one and the one 8 further on; of its rows 8·i + 2·(lane % 4) and the
// next, for i in 0 … 15. Row g = lane / 4 of a fragment is g / 2 + g % 2 · 4 of eight in memory: the eight lanes whose 16
// bytes are read at once then have rows 4 apart, which the swizzle puts at the two halves of the 128 bytes
// (tests/test_split_fused.py).
__device__ __forceinline__ int own_feature(int thread /* of both consumers */) {
  const int lane = thread % 32;
  return thread / 32 * 16 + lane / 8 + lane / 4 % 2 * 4;
}

// Over the four lanes that hold a feature, the same bits in all of them.
__device__ __forceinline__ float sum_of_four(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// A thread's elements of a tile, as `value(element, which of its features, which group)` makes them, to where the first
// row of the tile and the thread's first feature are. A warp writes eight neighbouring features of four rows at once.
template <class Out, class Value>
__device__ __forceinline__ void store_tile(Out* at, const float (&acc)[64], int rows, int columns /* to the tensor's end */,
                                           int features, const Value& value) {
  const int first = threadIdx.x % 4 * 2;
  at += static_cast<i64>(first) * features;
#pragma unroll
  for (int i = 0; i < 16; ++i, at += 8 * static_cast<i64>(features))
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * i + first + e >= rows) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (8 * r < columns) from_float(value(acc[4 * i + 2 * r + e], r, i / 8), at[e * features + 8 * r]);
    }
}

template <class Y, class L, class R, int STAGES, int SHARED_BYTES, Finish FINISH, class Activation>
__device__ __forceinline__ void split_fused_gemm(const TensorMap& map_x /* split, [batch, 2·64·⌈in_features/64⌉] */,
    const TensorMap& map_weight /* [features, in_features], exact */, float* product /* [batch, features]: minus its group's mean */,
    Y* y /* [batch, features]; the product's memory where that is not kept */, const L* bias /* [features] or null */,
    const L* scale /* [features] or [1] or null */, int scale_stride, float scale_value,
    R* running_mean /* [features] or null */, R* running_var /* [features] or null */,
    i64* batches_tracked /* [1] or null */, const R* bn_weight /* [features] or null */,
    const R* bn_bias /* [features] or null */, float momentum, float eps, float* group_mean /* [groups, features] */,
    float* group_m2 /* [groups, features] */, float* mean /* [features] */, float* rstd /* [features] */,
    float* merged_slope /* [features] */, float* merged_shift /* [features] */,
    u32* counters /* zero, and left zero */, const float* x /* [batch, in_features] */, half* split_x /* see split_x */,
    int* x_exponents /* [batch] */, const int* weight_exponents /* [features] */,
    const float* weight_largest /* [features] */, float* weight_total /* [features]: Σ|w|, ∞ where w did not fit */,
    u32* most /* [2], of x */, int* flags /* [features] */, int x_rows /* split already */, int group_panels,
    int stream_x, int keep_product, int batch, int in_features, int features) {
  static_assert(FINISH != Finish::kStatistics);
  constexpr int BN = kTileFeatures, kAhead = 4;  // partial results in flight
  // Each of the 384 threads starts with 168 registers; the consumers need more.
  constexpr bool kAheadToo = FINISH == Finish::kPersistent || FINISH == Finish::kEvaluate;
  constexpr int kFeeder = FINISH == Finish::kEvaluate ? 64 : 56, kConsumer = (3 * 168 - kFeeder) / 16 * 8;
  using Shared = SplitFusedShared<STAGES, kAheadToo>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "plan.py and SplitFusedShared disagree");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  const Features<L, R> f = {bias,      scale,   scale_stride, scale_value,     running_mean, running_var,
                            bn_weight, bn_bias, batches_tracked, momentum,     eps,          group_mean,
                            group_m2,  mean,    rstd,         merged_slope,    merged_shift,
                            {most, weight_largest, weight_total, flags}, batch, features,
                            (batch + kGroupRows - 1) / kGroupRows};
  const Raster raster = {(batch + kTileRows - 1) / kTileRows, (features + BN - 1) / BN, group_panels};
  const Ahead ahead = {x, split_x, x_exponents, most, counters + kPanels + 2 * raster.tiles_n, min(x_rows, batch), batch,
                        in_features};
  const int tiles = raster.tiles(), steps = (in_features + kSplitColumns - 1) / kSplitColumns;
  // Tiles that are stored and normalised later; the rest, the last of each block, stay in registers.
  const auto stored = [&] {
    return FINISH == Finish::kPersistent ? max(tiles - computed_anew(static_cast<int>(gridDim.x)), 0) : 0;
  };
  const int warpgroup = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    prefetch_map(map_x);
    prefetch_map(map_weight);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 8);  // every consumer warp: each reads shared memory for itself
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.known[i], 32);
      barrier_init(&shared.used[i], 8);
    }
    if constexpr (kAheadToo)
      for (int p = 0; p < kSplitters * kPieces; ++p) barrier_init(&shared.rings[p / kPieces].arrived[p % kPieces], 1);
    fence_barrier_init();
    fence_async_shared();
  }
  __syncthreads();
  wait_for_previous();
  allow_next();

  if (warpgroup == 0) {
    release_registers<kFeeder>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0 && lane == 0) {  // feeds the ring
      const u64 x_policy = stream_x ? kEvictFirst : kEvictNormal;
      int stage = 0;
      u32 parity = 1;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = raster.at(t);
        if (kAheadToo) ahead.wait_for(raster, tile);
        for (int k = 0; k < steps; ++k) {
          barrier_wait(&shared.empty[stage], parity);
          barrier_expect(&shared.full[stage], 2 * (kTileRows + BN) * kRowBytes);
#pragma unroll
          for (int p = 0; p < 2; ++p) {
            copy_to_shared(shared.weight[stage][p], map_weight, &shared.full[stage], k * kSplitColumns + p * 32,
                           tile.n * BN, kEvictNormal);
            copy_to_shared(shared.x[stage][p], map_x, &shared.full[stage], (2 * k + p) * kSplitColumns,
                           tile.m * kTileRows, x_policy);
          }
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    } else if (warp == 1) {  // what the results will be multiplied by, a tile ahead of the multiplications
      int buffer = 0;
      u32 parity = 1;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = raster.at(t);
        barrier_wait(&shared.used[buffer], parity);
        if (kAheadToo && lane == 0) ahead.wait_for(raster, tile);
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < kTileRows; i += 32) {
          const int row = tile.m * kTileRows + i;
          const PowerOfTwo p = power_of_two(row < batch ? load_l2(x_exponents + row) : 0);
          shared.x_scale[buffer][i] = make_float2(p.first, p.second);
        }
        if (FINISH == Finish::kEvaluate) {
#pragma unroll 1
          for (int i = lane; i < BN; i += 32) {
            const int j = min(tile.n * BN + i, features - 1);
            const float r = 1.0f / sqrtf(to_float(running_var[j]) + eps), centre = to_float(running_mean[j]);
            shared.slope[buffer][i] = f.slope(j, r);
            shared.shift[buffer][i] = f.shift(j) + value_or(bn_weight, j, 1.0f) * r * (f.s(j) * f.b(j) - centre);
            if (mean && tile.m == 0) {
              mean[j] = centre;
              rstd[j] = r;
            }
          }
        }
        barrier_arrive(&shared.known[buffer]);
        buffer ^= 1;
        if (buffer == 0) parity ^= 1;
      }
    } else if (warp >= 2 && kAheadToo) {
      if constexpr (kAheadToo) ahead.split(shared.rings[warp - 2], raster, warp - 2);
      if (FINISH == Finish::kPersistent)
        take_units<float, Y, BN, Activation, 1>(f, raster, product, y, counters, stored());
    }
  } else {
    claim_registers<kConsumer>();
    const int consumer = warpgroup - 1;
    int from, stage = 0;
    {
      const int own = own_feature(threadIdx.x - 128);
      from = own * kRowBytes + ((threadIdx.x % 4 * 16) ^ (own % 8 * 16));
    }
    u32 parity = 0;
    // `part`: of one stage, first both products with a low part, in units of 2^-11, then high·high. `acc` adds them up
    // because the tensor cores truncate.
    float acc[64], part[64];
    int buffer = 0;
    u32 known_parity = 0;

    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      float w_scale[2], w_total[2] = {0.0f, 0.0f};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int j = raster.at(t).n * BN + own_feature(computed_anew(static_cast<int>(threadIdx.x)) - 128) + 8 * r;
        w_scale[r] = __uint_as_float(static_cast<u32>(127 - (j < features ? weight_exponents[j] : 0)) << 23);
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] = 0.0f;
      u32 high[2][4][4], low[2][4][4];  // fragments of a stage, and of the next
      const auto convert = [&](int which, u32 (&to_high)[4][4], u32 (&to_low)[4][4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // the swizzle puts every second 16 of K at the other half of the 128 bytes
          load_fragments(shared.weight[which][i / 2] + (from ^ (i % 2 * 64)), w_scale, to_high[i], to_low[i], w_total);
      };
      barrier_wait(&shared.full[stage], parity);
      convert(stage, high[0], low[0]);
#pragma unroll 1
      for (int k0 = 0; k0 < steps; k0 += 2) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (k0 + h == steps) break;
          const u64 x_high = matrix_descriptor(shared.x[stage][0]), x_low = matrix_descriptor(shared.x[stage][1]);
          const int now = stage;
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i)
            WgmmaOfRegisters<128>::run(part, low[h][i], x_high + i * kDescriptorStep, i ? 1 : 0);
#pragma unroll
          for (int i = 0; i < 4; ++i) WgmmaOfRegisters<128>::run(part, high[h][i], x_low + i * kDescriptorStep, 1);
          wgmma_commit();
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
          if (k0 + h + 1 < steps) {
            barrier_wait(&shared.full[stage], parity);
            convert(stage, high[1 - h], low[1 - h]);
          }
          wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < 64; ++i) acc[i] += kLowUnit * computed_anew(part[i]);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i)
            WgmmaOfRegisters<128>::run(part, high[h][i], x_high + i * kDescriptorStep, i ? 1 : 0);
          wgmma_commit();
          wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < 64; ++i) acc[i] += computed_anew(part[i]);
          __syncwarp();
          if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[now]);
        }
      }

      const Tile tile = raster.at(computed_anew(t));
      const int thread = computed_anew(static_cast<int>(threadIdx.x)) - 128, q = thread % 4, own = own_feature(thread);
      const int j0 = tile.n * BN + own, rows_left = batch - tile.m * kTileRows;
      const i64 origin = static_cast<i64>(tile.m) * kTileRows * features + j0;
      if (tile.m == 0) {  // a weight that did not fit is infinite, and so are all results of its feature, or NaN
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float total = sum_of_four(w_total[r]), any = fabsf(acc[2 * r]);
          if (q == r && j0 + 8 * r < features) weight_total[j0 + 8 * r] = any <= 3.4e38f ? total : __uint_as_float(0x7F800000u);
        }
      }
      // Back to the scale of x and W.
      float slope[2], shift[2][2];  // of each feature; in each group, of values that are stored minus its mean
      {
        const PowerOfTwo w[2] = {power_of_two(127 - static_cast<int>(__float_as_uint(w_scale[0]) >> 23)),
                                 power_of_two(127 - static_cast<int>(__float_as_uint(w_scale[1]) >> 23))};
        barrier_wait(&shared.known[buffer], known_parity);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float4 p = *reinterpret_cast<const float4*>(&shared.x_scale[buffer][8 * i + 2 * q]);
          const PowerOfTwo rows[2] = {{p.x, p.y}, {p.z, p.w}};
#pragma unroll
          for (int e = 0; e < 4; ++e)
            acc[4 * i + e] = times(times(acc[4 * i + e], rows[e % 2]), w[e / 2]);
          if (i % 4 == 3) keep_order();
        }
        if (FINISH == Finish::kEvaluate) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            slope[r] = shared.slope[buffer][own + 8 * r];
            shift[r][0] = shift[r][1] = shared.shift[buffer][own + 8 * r];
          }
        }
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(&shared.used[buffer]);
        buffer ^= 1;
        if (buffer == 0) known_parity ^= 1;
      }

      bool finish_here = FINISH == Finish::kEvaluate;
      if (FINISH != Finish::kEvaluate) {
        // Means of both groups, then M2 about them. Rows beyond the batch are zero in the accumulators.
        float mu[2][2], m2[2][2];  // of each feature and group
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int rows = f.rows(2 * tile.m + h);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float sum = 0.0f, squares = 0.0f;
#pragma unroll
            for (int i = 8 * h; i < 8 * h + 8; ++i) sum += acc[4 * i + 2 * r] + acc[4 * i + 2 * r + 1];
            mu[r][h] = rows ? sum_of_four(sum) / rows : 0.0f;
#pragma unroll
            for (int i = 8 * h; i < 8 * h + 8; ++i)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float& a = acc[4 * i + 2 * r + e];
                a = (i - 8 * h) * 8 + 2 * q + e < rows ? a - mu[r][h] : 0.0f;
                squares += a * a;
              }
            m2[r][h] = sum_of_four(squares);
          }
        }
        {  // each of the four lanes writes one
          const int j = j0 + q % 2 * 8, group = 2 * tile.m + q / 2;
          if (j < features && f.rows(group)) {
            const i64 at = static_cast<i64>(group) * features + j;
            group_mean[at] = q / 2 ? (q % 2 ? mu[1][1] : mu[0][1]) : (q % 2 ? mu[1][0] : mu[0][0]);
            group_m2[at] = q / 2 ? (q % 2 ? m2[1][1] : m2[0][1]) : (q % 2 ? m2[1][0] : m2[0][0]);
          }
        }
        finish_here = FINISH != Finish::kPersistent || t >= stored();
        if (!finish_here || keep_product)
          store_tile(product + origin, acc, rows_left, features - j0, features, [](float a, int, int) { return a; });
        if (FINISH != Finish::kOneBlock) {  // everybody's writes, of `weight_total` too, are released with the panel
          sync_threads(1 + consumer, 128);
          if (thread % 128 == 0) add_release(&counters[kPanels + tile.n], 1);
        }

        if (finish_here) {
          const bool direct = FINISH != Finish::kPersistent || f.groups <= kDirectGroups;
          float unit_slope[2], unit_shift[2], s_feature[2], centre[2], squares[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int j = min(j0 + 8 * r, features - 1);
            unit_slope[r] = f.slope(j, 1.0f);
            unit_shift[r] = f.shift(j);
            s_feature[r] = f.s(j);
          }
          if (FINISH != Finish::kOneBlock) {
            if (thread % 128 == 0) {
              if (direct) wait_until(&counters[kPanels + tile.n], 2 * raster.tiles_m);
              else wait_until(&counters[kPanels + raster.tiles_n + tile.n], BN / kMergeWidth);
            }
            sync_threads(1 + consumer, 128);
          }
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int j = min(j0 + 8 * r, features - 1);
            float reciprocal;
            if (direct) {
              // Relative to the mean of a few groups, spread over the batch and full if any is:
              // M2 = Σ M2_g + n_g·d² - (Σ n_g·d)²/B with d = mean_g - near.
              constexpr int kSpread = 4;
              const int full = max(batch / kGroupRows, 1);
              const auto mean_of = [&](int g) {
                return FINISH == Finish::kOneBlock ? (g ? mu[r][1] : mu[r][0])
                                                   : load_l2(group_mean + static_cast<i64>(g) * features + j);
              };
              float near = 0.0f, sum = 0.0f;
              squares[r] = 0.0f;
#pragma unroll
              for (int n = 0; n < kSpread; ++n) near += mean_of(n * full / kSpread) / kSpread;
#pragma unroll kAhead
              for (int g = q; g < f.groups; g += 4) {
                const float d = mean_of(g) - near, n = f.rows(g);
                const float m2_g = FINISH == Finish::kOneBlock ? (g ? m2[r][1] : m2[r][0])
                                                               : load_l2(group_m2 + static_cast<i64>(g) * features + j);
                sum += n * d;
                squares[r] += m2_g + n * d * d;
              }
              sum = sum_of_four(sum);
              squares[r] = sum_of_four(squares[r]) - sum * sum / batch;
              centre[r] = near + sum / batch;
              reciprocal = 1.0f / sqrtf(s_feature[r] * s_feature[r] * squares[r] / batch + eps);
            } else {
              centre[r] = load_l2(mean + j);
              reciprocal = load_l2(rstd + j);
            }
            slope[r] = unit_slope[r] * reciprocal;
            shift[r][0] = slope[r] * (mu[r][0] - centre[r]) + unit_shift[r];
            shift[r][1] = slope[r] * (mu[r][1] - centre[r]) + unit_shift[r];
          }
          const bool mine_to_finish = FINISH != Finish::kPersistent || !raster.has_stored(tile.n, stored());
          if (direct && q < 2 && j0 + 8 * q < features && tile.m == 0 && mine_to_finish)  // who wrote its weight_total
            f.finish(j0 + 8 * q, q ? centre[1] : centre[0], q ? squares[1] : squares[0]);
        }
      }
      if (finish_here)
        store_tile(y + origin, acc, rows_left, features - j0, features,
                   [&](float a, int r, int h) { return Activation::value(slope[r] * a + shift[r][h]); });
    }
    if (FINISH == Finish::kPersistent)
      take_units<float, Y, BN, Activation, 1>(f, raster, product, y, counters, stored());
  }

  // The last block to get here leaves the counters as it found them, and counts the batch.
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared.last = atomicAdd(&counters[kDone], 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (shared.last) {
    const int used = kPanels + 2 * raster.tiles_n + (kAheadToo ? kBands : 0);
    for (int i = threadIdx.x; i < used; i += kGemmThreads) counters[i] = 0;
    if (FINISH != Finish::kEvaluate && threadIdx.x == 0 && batches_tracked) *batches_tracked += 1;
  }
}

}  // namespace gemmnorm
