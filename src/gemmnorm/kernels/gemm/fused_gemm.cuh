// The whole chain in one Hopper kernel: GEMM → scale → BatchNorm → activation (sm_90a).
//
// A persistent block is one warpgroup that feeds and two that multiply. Warp 0 copies tiles of x and W into a ring of
// shared-memory stages; each consumer warpgroup multiplies its half of a tile: 64 features by all rows (tile_by_features.cuh),
// or of a narrow tile 64 rows by all features (tile_by_rows.cuh). It takes mean and M2 of its rows from the
// accumulators, and stores the product minus the mean. The other warps, by Finish:
// - whole panels (a panel is a column of tiles): warps 2 and 3 serve a consumer each, while it multiplies the next tile,
//   and warp 1 merges statistics (whole_panels.cuh);
// - persistent: warp 1 stores staged tiles and counts what is complete; warps 2 and 3 normalise complete panels out of the
//   L2 (panel_units.cuh);
// - evaluation: warp 1 computes the next tile's coefficients.
// Before that warps 2 and 3 cast or split the rows that later tiles need, or the last columns of them that the first tiles
// need, where that was left to them (ahead.cuh).
// The last tile of every block never leaves the registers before it is normalised.
#pragma once
#include "gemm/gemm_shared.cuh"
#include "gemm/split_product.cuh"
#include "gemm/tile_by_features.cuh"
#include "gemm/tile_by_rows.cuh"
#include "gemm/whole_panels.cuh"

namespace gemmnorm {

// What a consumer holds of a tile.
template <bool BY_FEATURES>
struct Held {
  template <class T, class Y, int TM, int TN>
  using Tile = TileByFeatures<T, Y, TM, TN>;
};
template <>
struct Held<false> {
  template <class T, class Y, int TM, int TN>
  using Tile = TileByRows<T, Y, TM, TN>;
};

template <class Config, class Params>
__device__ __forceinline__ void fused_gemm(const Params& p) {
  using OP = typename Config::Operand;
  using T = typename Config::T;
  using Y = typename Config::Y;
  using L = typename Config::L;
  using R = typename Config::R;
  using Activation = typename Config::Activation;
  constexpr int TM = Config::kTileRows, TN = Config::kTileColumns, STAGES = Config::kStages, SHARED_BYTES = Config::kSharedBytes;
  constexpr Finish FINISH = Config::kFinish;
  constexpr int kTileK = kRowBytes / Operand<OP>::kSize;
  using Shape = TileShape<TM, TN>;
  constexpr int kWidth = Shape::kWidth, kAccumulators = kWidth / 2;
  constexpr int kPlanes = Operand<OP>::kPlanes;
  constexpr bool kSplit = kPlanes == 2, kMoveRegisters = kWidth * kPlanes == 256;
  // Each of the 384 threads starts with 168 registers; the widest tiles need more in the consumers.
  constexpr bool kSplitsToo = kSplit && (FINISH == Finish::kPersistent || FINISH == Finish::kEvaluate);
  constexpr int kFeeder = kSplit && !kSplitsToo ? 40 : kSplit && FINISH == Finish::kEvaluate ? 72 : Operand<OP>::kFeeder;
  constexpr int kConsumer = (3 * 168 - kFeeder) / 16 * 8;
  using Element = typename Operand<OP>::Element;
  constexpr bool kStaged = !kSplit && (Shape::kByFeatures || (sizeof(T) == 2 && TN >= 64));  // on the way out
  constexpr bool kStagedY = kStaged && (Shape::kByFeatures || sizeof(Y) == 2);
  constexpr int kTrips = kStaged ? Shape::template kTrips<T> : 1, kTripsY = kStagedY ? Shape::template kTrips<Y> : 1;
  constexpr bool kWaits = kStaged && sizeof(T) == 2;  // a tile has room to wait in shared memory
  constexpr bool kWhole = FINISH == Finish::kWholePanels, kLater = FINISH == Finish::kPersistent || (kWhole && kWaits);
  constexpr int kAhead = 4;  // partial results in flight
  constexpr int kMergeAhead = kSplit ? 1 : 4;  // loads in flight while a warp merges or normalises
  using Shared = GemmShared<TM, TN, STAGES, kPlanes, kStaged, kSplitsToo>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "plan.py and GemmShared disagree");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  const Features<L, R> f = {p.bias,      p.scale,   p.scale_stride, p.scale_value,     p.running_mean, p.running_var,
                            p.bn_weight, p.bn_bias, p.num_batches_tracked, p.momentum,     p.eps,          p.group_mean,
                            p.group_m2,  p.mean,    p.rstd,         p.merged_slope,    p.merged_shift,
                            {p.most, p.weight_largest, p.weight_total, p.flagged}, p.batch, p.features,
                            (p.batch + Shape::kMeanRows - 1) / Shape::kMeanRows, Shape::kMeanRows};
  const Raster raster = {(p.batch + TM - 1) / TM, (p.features + TN - 1) / TN, p.group_panels};
  const int chunks = kSplit ? 1 : (p.in_features + kCastColumns - 1) / kCastColumns;  // of rows that are made here
  const RowsAhead rows_ahead = {p.counters + kPanels + 2 * raster.tiles_n, min(p.x_rows, p.batch), p.weight_rows, p.batch, p.in_features,
                                p.features, chunks, kSplit || !p.source_x ? chunks : p.begun, kSplit || !p.source_weight ? chunks : p.begun};
  typename Operand<OP>::Ahead ahead = {rows_ahead, p.source_x, p.source_weight, p.converted_x, p.converted_weight};
  if constexpr (kSplit) {
    ahead.x_exponents = p.x_exponents, ahead.weight_exponents = p.weight_exponents;
    ahead.weight_largest = p.weight_largest, ahead.weight_total = p.weight_total;
    ahead.most = p.most, ahead.weight_checksums = p.weight_checksums;
  }
  const bool makes_rows = kSplitsToo || (sizeof(T) == 2 && FINISH != Finish::kOneBlock && (p.source_x || p.source_weight));
  constexpr bool kTrains = FINISH != Finish::kEvaluate && FINISH != Finish::kStatistics;
  const bool resets = kTrains || makes_rows;  // the counters
  const int tiles = raster.tiles(), steps = (p.in_features + kTileK - 1) / kTileK;
  // Tiles that leave the registers and are normalised later; the rest, the last of each block, stay in registers.
  const int stored = kLater && !p.in_registers ? max(tiles - static_cast<int>(gridDim.x), 0) : 0;
  const int warpgroup = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    prefetch_tensormap(p.map_x);
    prefetch_tensormap(p.map_weight);
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(&shared.full[s], 1);
      mbarrier_init(&shared.empty[s], 2);
    }
    for (int c = 0; c < 2; ++c) {
      mbarrier_init(&shared.staged[c], 128);
      mbarrier_init(&shared.unstaged[c], 1);
      mbarrier_init(&shared.known[c], 32);
      mbarrier_init(&shared.used[c], 256);
    }
    mbarrier_init(&shared.left, kGemmThreads / 32 - 1);
    if constexpr (kSplitsToo)
      for (int i = 0; i < kWorkers * kPieces; ++i) mbarrier_init(&shared.rings[i / kPieces].arrived[i % kPieces], 1);
    fence_mbarrier_init();
    fence_proxy_async_shared();
  }
  __syncthreads();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (FINISH == Finish::kStatistics && p.num_batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *p.num_batches_tracked += 1;

  if (warpgroup == 0) {
    if (kMoveRegisters) setmaxnreg_dec<kFeeder>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0 && lane == 0) {  // feeds the ring
      // Of a box of x. In training rows beyond the batch have to be zero; else nobody looks at them.
      const int rows = FINISH == Finish::kEvaluate ? min(TM, (p.batch + 7) / 8 * 8) : TM;
      const u64 x_policy = p.stream_x ? kEvictFirst : kEvictNormal;
      int stage = 0;
      u32 parity = 1;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = raster.at(t);
        for (int k = 0; k < steps; ++k) {
          constexpr int kStepsOfChunk = Operand<OP>::Ahead::kStepsOfChunk;
          if (makes_rows && k % kStepsOfChunk == 0) ahead.template wait_for<TM, TN>(raster, tile, k / kStepsOfChunk);
          mbarrier_wait(&shared.empty[stage], parity);
          mbarrier_expect_tx(&shared.full[stage], kPlanes * (rows + TN) * kRowBytes);
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            const int column = (k * kPlanes + plane) * kTileK;
            tma_load(shared.x[stage][plane], p.map_x, &shared.full[stage], column, tile.m * TM, x_policy);
            tma_load(shared.weight[stage][plane], p.map_weight, &shared.full[stage], column, tile.n * TN, kEvictNormal);
          }
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
        mbarrier_wait(&shared.used[buffer], parity);
        evaluation_coefficients<TN>(f, tile.n * TN, tile.m == 0, shared.slope[buffer], shared.shift[buffer]);
        mbarrier_arrive(&shared.known[buffer]);
        buffer ^= 1;
        if (buffer == 0) parity ^= 1;
      }
    } else if (warp == 1 && !kWhole) {  // stores staged tiles, counts what is complete
      u32 parity = 0;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = raster.at(t);
        const bool later = FINISH == Finish::kStatistics || t < stored, leaves = later || p.keep_product;
        const u64 kept = FINISH == Finish::kPersistent && later ? kEvictLast : kEvictNormal;  // until it is normalised
        for (int trip = 0; trip < (leaves ? kTrips : 1); ++trip, parity ^= 1) {
          for (int c = 0; c < 2; ++c) {
            mbarrier_wait(&shared.staged[c], parity);
            __syncwarp();  // nobody waits for this phase any more
            if (lane > 0) continue;
            if (kStaged && leaves) store_staged<Shape, T>(p.map_product, shared.staging[c], tile, c, trip, p.batch, kept);
            // Of a tile that stays in registers nobody reads the product: its statistics are all that others wait for.
            if (FINISH == Finish::kPersistent && !later && trip == 0) signal(&p.counters[kPanels + tile.n], 1);
            if (kStaged) tma_store_wait_read();
            mbarrier_arrive(&shared.unstaged[c]);
            if (FINISH == Finish::kPersistent && later && trip == kTrips - 1) {
              if (kStaged) {
                tma_store_wait();
                fence_proxy_async_global();
              }
              signal(&p.counters[kPanels + tile.n], 1);
            }
          }
        }
      }
    } else if (warp == 1 && kWaits) {  // of whole panels
      merge_panels<TN>(f, raster, p.counters, stored);
    } else if (warp >= 2) {
      if constexpr (kSplitsToo) ahead.template split<TM, TN>(shared.rings[warp - 2], raster, warp - 2);
      if constexpr (kSplitsToo && FINISH == Finish::kEvaluate) ahead.template find_features<TM>(f, raster, warp - 2);
      if constexpr (sizeof(T) == 2) {
        if (makes_rows) ahead.template cast<TM, TN>(raster, warp - 2);
      }
      if constexpr (kWhole) {
        serve_consumer<T, Y, TN, Activation, kStaged, kWaits>(f, raster, shared, warp - 2, p.map_product, p.map_y, p.y, p.counters,
                                                              stored, p.keep_product);
      } else if (FINISH == Finish::kPersistent) {
        take_units<T, Y, TM, TN, Activation, kMergeAhead>(f, raster, p.stored_product, p.y, p.counters, stored);
      }
    }
    if (resets && warp > 0) leave(shared.left);
  } else {
    if (kMoveRegisters) setmaxnreg_inc<kConsumer>();
    const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32;
    typename Held<Shape::kByFeatures>::template Tile<T, Y, TM, TN> held(consumer);
    int stage = 0;
    u32 parity = 0, staging_parity = 1;
    int buffer = 0;
    u32 known_parity = 0;
    float acc[kAccumulators];
    // Of split operands: high·high of one stage, which `acc` adds up because the tensor cores truncate; and both products
    // with a low part, in units of 2^-11, whose truncation is far below.
    float part[kSplit ? kAccumulators : 1], cross[kSplit ? kAccumulators : 1];

    // Each consumer finishes half of a tile's columns, kLanes threads to a column. Of a narrow tile, which leaves registers
    // for it, it reads what that takes before the multiplications.
    constexpr int kLanes = 256 / TN;
    constexpr bool kEarly = (FINISH == Finish::kOneBlock || kWhole) && TN <= 64;

    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      typename Features<L, R>::Own early = {};
      if (kEarly) early = f.own(min(raster.at(t).n * TN + consumer * (TN / 2) + thread / kLanes, p.features - 1));
      if (kSplit) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.0f;
      }
      for (int k = 0; k < steps; ++k) {
        mbarrier_wait(&shared.full[stage], parity);
        wgmma_fence();
        const auto shares = [&](int plane) { return Shape::kByFeatures ? shared.weight[stage][plane] : shared.x[stage][plane]; };
        const auto whole = [&](int plane) { return Shape::kByFeatures ? shared.x[stage][plane] : shared.weight[stage][plane]; };
        const u64 a = k_major_descriptor(shares(0) + consumer * 64 * kRowBytes), b = k_major_descriptor(whole(0));
        if constexpr (kSplit) {
          const u64 a_low = k_major_descriptor(shares(1) + consumer * 64 * kRowBytes), b_low = k_major_descriptor(whole(1));
          multiply_stage<kWidth>(part, cross, a, a_low, b, b_low, k == 0);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            Wgmma<Element, kWidth>::run(acc, a + i * kKMajorStep, b + i * kKMajorStep, (k | i) ? 1 : 0);
          wgmma_commit();
        }
        if (kSplit && k == 0) {  // exponents; `sums` is free until the statistics are taken
          const Tile tile = raster.at(t);
          const int n = (Shape::kByFeatures ? tile.m * TM : tile.n * TN) + thread;
          const int own = (Shape::kByFeatures ? tile.n * TN : tile.m * TM) + consumer * 64 + thread;
          const int* exponents = Shape::kByFeatures ? p.x_exponents : p.weight_exponents;
          const int* of_own = Shape::kByFeatures ? p.weight_exponents : p.x_exponents;
          if (thread < kWidth) {
            const PowerOfTwo power = power_of_two(n < (Shape::kByFeatures ? p.batch : p.features) ? load_l2(exponents + n) : 0);
            shared.sums[consumer][0][thread] = power.first;
            shared.sums[consumer][1][thread] = power.second;
          }
          if (thread < 64)
            shared.exponents[consumer][thread] = own < (Shape::kByFeatures ? p.features : p.batch) ? load_l2(of_own + own) : 0;
        }
        if (k > 0 || kSplit) wgmma_wait<1>();
        if constexpr (kSplit) {
#pragma unroll
          for (int i = 0; i < kAccumulators; ++i) acc[i] += part[i];
        }
        if (k > 0) {
          if (thread == 0) mbarrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);
        }
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      wgmma_wait<0>();
      if (thread == 0) mbarrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);

      const Tile tile = raster.at(kSplit ? opaque(t) : t);
      if constexpr (kSplit) {  // back to the scale of x and W
        named_barrier_sync(1 + consumer, 128);
        const int* own = &shared.exponents[consumer][thread / 32 * 16 + lane / 4];
        const PowerOfTwo low = power_of_two(own[0]), high = power_of_two(own[8]);
#pragma unroll
        for (int i = 0; i < kWidth / 8; ++i) {
          const int c = i * 8 + (lane % 4) * 2;
          const float2 first = *reinterpret_cast<const float2*>(&shared.sums[consumer][0][c]);
          const float2 second = *reinterpret_cast<const float2*>(&shared.sums[consumer][1][c]);
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const PowerOfTwo across = {q % 2 ? first.y : first.x, q % 2 ? second.y : second.x};
            acc[4 * i + q] = times(times(acc[4 * i + q] + kLowUnit * cross[4 * i + q], q < 2 ? low : high), across);
          }
          if (i % 4 == 3) compiler_barrier();
        }
        named_barrier_sync(1 + consumer, 128);
      }

      constexpr bool kOneBlock = FINISH == Finish::kOneBlock;
      bool finish_here = FINISH == Finish::kEvaluate, finish_feature_here = false;
      const int finished = consumer * (TN / 2) + thread / kLanes, at_column = tile.n * TN + finished;
      if constexpr (FINISH != Finish::kEvaluate) {
        if ((kOneBlock || kWhole) && kStagedY && thread == 0) tma_store_wait_read();  // of the tile before
        held.template take_means<kOneBlock>(f, shared, tile, acc);
        finish_here = kOneBlock || ((kWhole || FINISH == Finish::kPersistent) && t >= stored);
        const bool leaves = !finish_here || p.keep_product, stages = kStaged && leaves;  // the product
        unsigned char* staging = shared.staging[consumer];
        // The staging memory is free. No consumer gets two tiles ahead of the warp that serves it.
        const auto wait_for_staging = [&] {
          mbarrier_wait(&shared.unstaged[consumer], staging_parity);
          if (stages && (kOneBlock || kWhole) && kStagedY) named_barrier_sync(1 + consumer, 128);
        };
        if (kWaits && stages) wait_for_staging();
        held.template take_squares<kOneBlock>(f, shared, tile, acc, kWaits && stages ? staging : nullptr);
        if (!(kWaits && stages)) wait_for_staging();
#pragma unroll
        for (int trip = 0; trip < kTrips; ++trip) {
          if (trip > 0 && !leaves) break;
          if (trip > 0) mbarrier_wait(&shared.unstaged[consumer], staging_parity);
          staging_parity ^= 1;
          if (!kWaits && leaves) held.template store_product<kStaged>(acc, trip, staging, p.stored_product, tile, p.batch, p.features);
          if (kStaged) fence_proxy_async_shared();
          mbarrier_arrive(&shared.staged[consumer]);
        }

        if (finish_here) {
          const bool mine = at_column < p.features, direct = !kLater || f.batch <= kDirectRows;
          const auto own = kEarly ? early : f.own(mine ? at_column : 0);
          if (kOneBlock) {
            named_barrier_sync(Shape::kByFeatures ? 1 + consumer : 3, held.kMeeting);
          } else {
            if (thread == 0) {
              if (direct) wait_until(&p.counters[kPanels + tile.n], 2 * raster.tiles_m);
              else wait_until(&p.counters[kPanels + raster.tiles_n + tile.n], TN);
            }
            named_barrier_sync(1 + consumer, 128);
          }
          float centre = 0.0f, r = 0.0f;
          if (direct) {
            const auto load_group = [&](bool of_m2, int g) {
              if (kOneBlock) return (of_m2 ? shared.shift : shared.slope)[g][finished];
              return load_l2((of_m2 ? p.group_m2 : p.group_mean) + f.at(g, mine ? at_column : 0));
            };
            Column merged;
            if constexpr (kOneBlock && Shape::kByFeatures) merged = {load_group(false, 0), load_group(true, 0)};
            else merged = merge_column<kAhead>(f, opaque(thread % kLanes), kLanes, load_group);
            centre = merged.mean;
            r = 1.0f / sqrtf(own.s * own.s * merged.m2 / p.batch + p.eps);
            shared.squares[finished] = merged.m2;
            const bool mine_to_finish = !kLater || !raster.has_stored(tile.n, stored);
            finish_feature_here = mine && thread % kLanes == 0 && tile.m == 0 && mine_to_finish;
          } else if (mine) {
            centre = load_l2(p.mean + at_column);
            r = load_l2(p.rstd + at_column);
          }
          if (thread % kLanes == 0) {
            shared.mean[finished] = centre;
            shared.finished_slope[finished] = own.slope * r;
            shared.finished_shift[finished] = own.shift;
          }
          named_barrier_sync(Shape::kByFeatures ? 1 + consumer : 3, held.kMeeting);
          held.take_coefficients(shared);
          if (kStagedY) mbarrier_wait(&shared.unstaged[consumer], staging_parity);  // the product has left its memory
        }
      }
      if (finish_here) {
        constexpr bool kEvaluate = FINISH == Finish::kEvaluate;
        const int evaluated = buffer;
        if (kEvaluate) {
          mbarrier_wait(&shared.known[buffer], known_parity);
          buffer ^= 1;
          if (buffer == 0) known_parity ^= 1;
        }
#pragma unroll
        for (int trip = 0; trip < kTripsY; ++trip) {
          if (kStagedY && (kEvaluate || trip > 0) && thread == 0) tma_store_wait_read();
          named_barrier_sync(1 + consumer, 128);  // the coefficients are there, the staging memory is free
          held.template store_results<Activation, kEvaluate, kStagedY>(acc, trip, shared, evaluated, p.y, tile, p.batch, p.features);
          if (kEvaluate && trip == kTripsY - 1) mbarrier_arrive(&shared.used[evaluated]);
          if (kStagedY) fence_proxy_async_shared();
          named_barrier_sync(1 + consumer, 128);
          if (kStagedY && thread == 0)
            store_staged<Shape, Y>(p.map_y, shared.staging[consumer], tile, consumer, trip, p.batch);
        }
        if (finish_feature_here)  // nobody waits
          f.finish(at_column, kEarly ? early : f.own(at_column), shared.mean[finished], shared.squares[finished]);
      }
    }
    if (FINISH == Finish::kPersistent) take_units<T, Y, TM, TN, Activation, kMergeAhead>(f, raster, p.stored_product, p.y, p.counters, stored);
    if (resets) leave(shared.left);
    if (kStagedY && thread == 0) tma_store_wait_read();
  }

  if (FINISH == Finish::kOneBlock && p.momentum >= 0.0f) {  // no block waits for another, none reads the count of batches
    if (p.num_batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *p.num_batches_tracked += 1;
  } else if (resets && threadIdx.x == 0) {
    // When nobody in the block will look at the counters again, the last block leaves them as it found them, and counts the
    // batch. Meanwhile the results leave.
    mbarrier_wait(&shared.left, 0);
    __threadfence();
    if (atomicAdd(&p.counters[kDone], 1u) == gridDim.x - 1) {
      __threadfence();
      const int used = kPanels + 2 * raster.tiles_n + (makes_rows ? (raster.tiles_n + kBands) * chunks : 0);
      for (int i = 0; i < used; ++i) p.counters[i] = 0;
      if (kTrains && p.num_batches_tracked) *p.num_batches_tracked += 1;
    }
  }
}

}  // namespace gemmnorm
