// Epilogues where the statistics are known: y = φ(slope·a + shift), straight from the accumulators.
//
//   EvaluateEpilogue    the running statistics; serves every evaluation that keeps nothing for gradients
//   NormalizeEpilogue   y = φ(slope·(a - mean) + shift) by those of the batch, which launches before have taken and merged
//                       (epilogue_statistics.cuh, or the Gram matrix of x); taken in training where the product is cheaper to
//                       multiply again than to read again. Where gradients are wanted it also stores a - mean
//
// Warp 1 computes the next tile's coefficients while the current one is multiplied, into one of two buffers.
#pragma once
#include "gemm/epilogue_defaults.cuh"
#include "gemm/features.cuh"
#include "gemm/staging.cuh"

namespace gemmnorm {

// One warp: a tile's coefficients, by the batch's statistics. The mean stays apart, so that nothing is left of a constant
// column. Where the product is kept, it lacks the mean in all groups of the tile's rows.
template <class G, class Params>
__device__ __forceinline__ void batch_coefficients(const Features<Params>& f, Tile tile, float* slope, float* shift,
                                                   float* mean) {
  const LaneFeatures<G::kLaneColumns> own(G::Shape::first_feature(tile, 0), f.p.features);
  RawFeature<Params> raw[own.kOwn];
  float of_batch[own.kOwn], rstd[own.kOwn];
#pragma unroll
  for (int i = 0; i < own.kOwn; ++i) {
    raw[i] = RawFeature<Params>::load(f.p, own.feature(i));
    of_batch[i] = load_l2(f.p.mean + own.feature(i));
    rstd[i] = load_l2(f.p.rstd + own.feature(i));
  }
#pragma unroll
  for (int i = 0; i < own.kOwn; ++i) {
    const FeatureValues v = raw[i].values(f.p);
    slope[own.column(i)] = v.slope() * rstd[i];
    shift[own.column(i)] = v.shift;
    mean[own.column(i)] = of_batch[i];
    if (!f.p.keep_product) continue;
    for (int row = tile.m * G::TM; row < min((tile.m + 1) * G::TM, f.p.batch); row += kGroupRows)
      f.p.group_mean[static_cast<i64>(row / kGroupRows) * f.p.features + own.feature(i)] = of_batch[i];
  }
}

// Likewise, by the running ones. `keeps`: also what the backward reads, mean and 1/σ.
template <class G, class Params>
__device__ __forceinline__ void evaluation_coefficients(const Features<Params>& f, Tile tile, bool keeps, float* slope,
                                                        float* shift, float* rest) {
  const LaneFeatures<G::kLaneColumns> own(G::Shape::first_feature(tile, 0), f.p.features);
  RawFeature<Params> raw[own.kOwn];
#pragma unroll
  for (int i = 0; i < own.kOwn; ++i) raw[i] = RawFeature<Params>::load(f.p, own.feature(i));
#pragma unroll
  for (int i = 0; i < own.kOwn; ++i) {
    const FeatureValues v = raw[i].values(f.p);
    const Coefficients of = v.template coefficients<G::kHasRest>(f.p.eps);
    slope[own.column(i)] = of.slope;
    shift[own.column(i)] = of.shift;
    if (G::kHasRest) rest[own.column(i)] = of.rest;
    if (f.p.mean && keeps) {
      f.p.mean[own.feature(i)] = v.running_mean;
      f.p.rstd[own.feature(i)] = 1.0f / sqrtf(v.running_var + f.p.eps);
    }
  }
}

template <class G, class Params, bool OF_BATCH>
struct KnownStatisticsEpilogue : EpilogueDefaults {
  static_assert(!(OF_BATCH && G::kSplit), "batch_coefficients leaves no rest");
  struct Shared {
    float slope[2][G::kLaneColumns], shift[2][G::kLaneColumns];  // of two tiles
    float mean[2][OF_BATCH ? G::kLaneColumns : 2];
    float rest[2][G::kSplit ? G::kLaneColumns : 2];  // G::kHasRest asks this type, which is not complete yet
    u64 known[2], used[2];  // a tile's coefficients are there; they may be overwritten

    __device__ __forceinline__ void init() {
      for (int c = 0; c < 2; ++c) {
        mbarrier_init(&known[c], 32);
        mbarrier_init(&used[c], 256);
      }
    }
  };
  static constexpr bool kStatisticsKnown = true;
  static constexpr bool kWaitsItself = OF_BATCH;

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>& f, const TileScheduler& scheduler, const Counters&,
                                               Smem& shared, int warp) {
      if (warp > 1) return;
      if (OF_BATCH) {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
      }
      PipelineState<2> state(1);
      for (TileWalk walk(shared.tiles); walk.t < scheduler.tiles(); walk.advance()) {
        const Tile tile = walk.tile();
        auto& s = shared.epilogue;
        mbarrier_wait(&s.used[state.stage], state.phase);
        float *slope = s.slope[state.stage], *shift = s.shift[state.stage];
        if constexpr (OF_BATCH) batch_coefficients<G>(f, tile, slope, shift, s.mean[state.stage]);
        else evaluation_coefficients<G>(f, tile, tile.m == 0, slope, shift, s.rest[state.stage]);
        mbarrier_arrive(&s.known[state.stage]);
        state.advance();
      }
    }
  };

  template <class Smem>
  struct Consumer {
    const Features<Params>& f;
    Smem& shared;
    int consumer;
    typename G::AccumulatorTile tile_of_accumulators;
    PipelineState<2> state{0};

    __device__ __forceinline__ Consumer(const Features<Params>& f_, const TileScheduler&, const Counters&, Smem& shared_,
                                        int consumer_)
        : f(f_), shared(shared_), consumer(consumer_), tile_of_accumulators(consumer_) {}

    __device__ __forceinline__ void begin(Tile) {}
    __device__ __forceinline__ void store(int, Tile tile, typename G::Accumulators& acc) {
      const int buffer = state.stage;
      mbarrier_wait(&shared.epilogue.known[buffer], state.phase);
      state.advance();
      unsigned char* staging = shared.staging[consumer];
      if constexpr (OF_BATCH) {
        tile_of_accumulators.subtract(shared.epilogue.mean[buffer], acc);
        if (f.p.keep_product)
          store_passes<true, typename G::T, G::kStaged, G::kStorePasses>(tile, [&](int i) {
            tile_of_accumulators.template store_product<G::kStaged>(acc, i, staging, f.p.stored_product, tile, f.p.batch,
                                                                    f.p.features);
          });
      }
      tile_of_accumulators.load_coefficients(shared.epilogue, buffer);
      store_passes<false, typename G::Y, G::kStagedY, G::kStorePassesY>(tile, [&](int i) {
        tile_of_accumulators.template store_results<typename G::Activation, G::kStagedY>(
            acc, i, shared.epilogue, staging, f.p.y, tile, f.p.batch, f.p.features);
        if (i == G::kStorePassesY - 1) mbarrier_arrive(&shared.epilogue.used[buffer]);
      });
    }
    // A tile of the product or of y to memory, as V: `write` puts a store pass of it into the staging buffer, or straight to
    // memory.
    template <bool OF_PRODUCT, class V, bool STAGED, int PASSES, class Write>
    __device__ __forceinline__ void store_passes(Tile tile, const Write& write) const {
#pragma unroll
      for (int i = 0; i < PASSES; ++i) {
        if (G::kStaged) wait_for_staged_together();
        named_barrier_sync(1 + consumer, 128);  // the staging buffer is free
        write(i);
        if (STAGED) fence_proxy_async_shared();
        named_barrier_sync(1 + consumer, 128);
        if constexpr (STAGED) {
          const TensorMap& map = OF_PRODUCT ? f.p.map_product : f.p.map_y;
          if constexpr (G::kOverlaps) {
            const TensorMap& odd = OF_PRODUCT ? f.p.map_odd_product : f.p.map_odd_y;
            store_rows_apart<typename G::Shape>(map, odd, shared.staging[consumer], tile, consumer, f.p.batch);
          } else {
            store_staged_together<typename G::Shape, V>(map, shared.staging[consumer], tile, consumer, i, f.p.batch);
          }
        }
      }
    }
    __device__ __forceinline__ void end() const {
      if (G::kStaged) wait_for_staged_together();
    }
  };
};

template <class G, class Params>
struct EvaluateEpilogue : KnownStatisticsEpilogue<G, Params, false> {};
template <class G, class Params>
struct NormalizeEpilogue : KnownStatisticsEpilogue<G, Params, true> {};

}  // namespace gemmnorm
