// What training epilogues share (what an epilogue is: epilogue_defaults.cuh).
//
// Barriers between the consumers and the warp that stores what they stage: `staged` completes when a consumer's staging buffer
// is written, `unstaged` when it may be written again.
#pragma once
#include "gemm/epilogue_defaults.cuh"
#include "gemm/features.cuh"
#include "gemm/staging.cuh"

namespace gemmnorm {

struct StagingBarriers {
  u64 staged[2], unstaged[2];

  __device__ __forceinline__ void init() {
    for (int c = 0; c < 2; ++c) {
      mbarrier_init(&staged[c], 128);
      mbarrier_init(&unstaged[c], 1);
    }
  }
};

// What a tile's partial statistics take, in either accumulator tile.
template <class G>
struct PartialStatistics {
  float sums[2][G::Shape::kSwapAB ? 1 : 4][G::Shape::kSwapAB ? 4 : G::TN];  // per consumer and warp
  // Per consumer: means in `slope` and M2 in `shift`; then coefficients of the tile.
  float slope[2][G::TN], shift[2][G::TN];
};

// The shared memory of a training epilogue.
template <class G>
struct TrainingShared : StagingBarriers, PartialStatistics<G> {
  float mean[G::TN], squares[G::TN], finished_slope[G::TN], finished_shift[G::TN];  // of all rows, for both consumers
};

// One warp stores what the consumers stage, tile by tile. `describe(t)` says of a tile whether its product is stored, and how
// the L2 should treat it. Of a stored one `on_staged(t, tile)` runs when the statistics of a consumer's half are in memory,
// `on_stored(t, tile)` when its product is: each once per consumer, so that a panel is complete at two signals a tile.
struct StoreDescription {
  bool stores;
  u64 policy;
};
template <class G, class Params, class Smem, class Describe, class OnStaged, class OnStored>
__device__ __forceinline__ void store_staged_tiles(const Features<Params>& f, const TileScheduler& scheduler, Smem& shared,
                                                   const Describe& describe, const OnStaged& on_staged,
                                                   const OnStored& on_stored) {
  u32 phase = 0;
  for (TileWalk walk(shared.tiles); walk.t < scheduler.tiles(); walk.advance()) {
    const int t = walk.t;
    const Tile tile = walk.tile();
    const StoreDescription d = describe(t);
    if (!d.stores) continue;
    for (int i = 0; i < G::kStorePasses; ++i, phase ^= 1) {
      for (int c = 0; c < 2; ++c) {
        mbarrier_wait(&shared.epilogue.staged[c], phase);
        __syncwarp();  // nobody waits for this phase any more
        if (threadIdx.x % 32 > 0) continue;
        if constexpr (G::kStaged)
          store_staged<typename G::Shape, typename G::T>(f.p.map_product, shared.staging[c], tile, c, i, f.p.batch, d.policy);
        if (i == 0) on_staged(t, tile);
        if (G::kStaged) tma_store_wait_read();
        mbarrier_arrive(&shared.epilogue.unstaged[c]);
        if (i == G::kStorePasses - 1) on_stored(t, tile);
      }
    }
  }
}

// A consumer warpgroup of a training epilogue. STORES_Y: it stores y itself through its staging buffer, also between tiles.
// KEEPS_PARTIALS: the partial statistics, which are those of the product as T holds it, stay in shared memory too.
template <class G, class Params, class Smem, bool STORES_Y, bool KEEPS_PARTIALS>
struct TrainingConsumer {
  using Y = typename G::Y;
  using Accumulators = typename G::Accumulators;
  static constexpr int kLanes = 256 / G::TN;  // threads that finish a feature; each consumer finishes half of a tile's

  const Features<Params>& f;
  const TileScheduler& scheduler;
  Smem& shared;
  int consumer, thread;
  typename G::AccumulatorTile tile_of_accumulators;
  u32 staging_phase = 1;

  __device__ __forceinline__ TrainingConsumer(const Features<Params>& f_, const TileScheduler& scheduler_, Smem& shared_,
                                              int consumer_)
      : f(f_), scheduler(scheduler_), shared(shared_), consumer(consumer_), thread(threadIdx.x % 128),
        tile_of_accumulators(consumer_) {}

  __device__ __forceinline__ unsigned char* staging() const { return shared.staging[consumer]; }
  // The feature of the tile that the thread finishes.
  __device__ __forceinline__ int finished() const { return consumer * (G::TN / 2) + thread / kLanes; }
  __device__ __forceinline__ void sync() const { named_barrier_sync(1 + consumer, 128); }
  __device__ __forceinline__ void sync_finishers() const {
    constexpr int kBarrier = G::AccumulatorTile::kFinishBarrier;
    named_barrier_sync(G::Shape::kSharesFeatures ? kBarrier + consumer : kBarrier, G::AccumulatorTile::kFinishThreads);
  }

  // Partial statistics of the tile's rows; where `stores`, the product without their mean goes to the staging buffer, or
  // straight to memory. No consumer gets two stored tiles ahead of the warp that empties its staging buffer.
  __device__ __forceinline__ void take_statistics(Tile tile, Accumulators& acc, bool stores) {
    constexpr bool kSharesStaging = STORES_Y && G::kStagedY;
    if (kSharesStaging) wait_for_staged_together();  // y of the tile before
    tile_of_accumulators.template take_means<KEEPS_PARTIALS, true>(f, shared.epilogue, tile, acc);
    const bool stages = G::kStaged && stores;
    const auto wait_for_staging = [&] {
      mbarrier_wait(&shared.epilogue.unstaged[consumer], staging_phase);
      if (stages && kSharesStaging) sync();
    };
    if (G::kFitsStaging && stages) wait_for_staging();
    tile_of_accumulators.template take_squares<KEEPS_PARTIALS, true>(f, shared.epilogue, tile, acc,
                                                                       G::kFitsStaging && stages ? staging() : nullptr);
    if (!stores) return;
    if (!(G::kFitsStaging && stages)) wait_for_staging();
#pragma unroll
    for (int i = 0; i < G::kStorePasses; ++i) {
      if (i > 0) mbarrier_wait(&shared.epilogue.unstaged[consumer], staging_phase);
      staging_phase ^= 1;
      if (!G::kFitsStaging && stores)
        tile_of_accumulators.template store_product<G::kStaged>(acc, i, staging(), f.p.stored_product, tile, f.p.batch,
                                                                f.p.features);
      if (G::kStaged) fence_proxy_async_shared();
      mbarrier_arrive(&shared.epilogue.staged[consumer]);
    }
  }

  // Waits until all tiles of a panel have signalled.
  __device__ __forceinline__ void wait_for_panel(const Counters& counters, Tile tile) const {
    if (thread == 0) wait_until(counters.complete(tile.n), 2 * scheduler.tiles_m);
    sync();
  }

  // Of a tile of which nothing is stored, the statistics are there: nobody else would signal it.
  __device__ __forceinline__ void signal_statistics(const Counters& counters, Tile tile) const {
    sync();
    if (thread == 0) signal(counters.complete(tile.n), 1);
  }

  __device__ __forceinline__ FeatureValues values(Tile tile) const {
    return f.values(min(tile.n * G::TN + finished(), f.p.features - 1));
  }

  // y of a tile that waited in the accumulators for its panel. It merges the panel's partial statistics itself: a merge by
  // others would come behind all that they have to do before. `stored`: tiles numbered below it leave the accumulators before
  // their panel is merged; with OTHERS_MERGE others merge for them.
  template <bool OTHERS_MERGE>
  __device__ __forceinline__ void finish_panel_tile(Tile tile, const Accumulators& acc, const FeatureValues& v, int stored) {
    const int j = tile.n * G::TN + finished(), existing = min(j, f.p.features - 1);
    const ColumnStatistics merged = merge_column<8>(f, opaque(thread % kLanes), kLanes, existing);
    const Known known = {merged.mean, 1.0f / sqrtf(v.s * v.s * merged.m2 / f.p.batch + f.p.eps), merged.m2};
    const bool merged_here = !OTHERS_MERGE || !scheduler.begins_before(tile.n, stored);
    finish_tile(tile, acc, known, v, j < f.p.features && thread % kLanes == 0 && tile.m == 0 && merged_here);
  }

  // y of a tile whose panel's statistics are known: the thread brings mean, 1/σ and values of its feature. `finishes`: it also
  // updates what is kept of the feature (m2 is then that of all rows).
  struct Known {
    float mean, rstd, m2;
  };
  __device__ __forceinline__ void finish_tile(Tile tile, const Accumulators& acc, const Known& known,
                                              const FeatureValues& values, bool finishes) {
    auto& s = shared.epilogue;
    const int c = finished();
    // Both consumers may read these arrays. Neither overwrites them for its next tile before the other has read them: it waits
    // for the panel to be complete, the other's half included, or in a single tile for sync_finishers.
    s.squares[c] = known.m2;
    if (thread % kLanes == 0) {
      s.mean[c] = known.mean;
      s.finished_slope[c] = values.slope() * known.rstd;
      s.finished_shift[c] = values.shift;
    }
    sync_finishers();
    tile_of_accumulators.take_coefficients(s);
    if (G::kStagedY) mbarrier_wait(&s.unstaged[consumer], staging_phase);  // the product has left the staging buffer
    store_results(tile, acc);
    if (finishes) {  // nobody waits for it
      const int j = tile.n * G::TN + c;
      f.finish(j, f.values(j), s.mean[c], s.squares[c]);
    }
  }

  __device__ __forceinline__ void store_results(Tile tile, const Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < G::kStorePassesY; ++i) {
      if (G::kStagedY && i > 0) wait_for_staged_together();
      sync();  // the coefficients are there, the staging buffer is free
      tile_of_accumulators.template store_results<typename G::Activation, G::kStagedY>(
          acc, i, shared.epilogue, staging(), f.p.y, tile, f.p.batch, f.p.features);
      if (G::kStagedY) fence_proxy_async_shared();
      sync();
      if constexpr (G::kStagedY)
        store_staged_together<typename G::Shape, Y>(f.p.map_y, staging(), tile, consumer, i, f.p.batch);
    }
  }

  __device__ __forceinline__ void end() const {
    if (G::kStagedY) wait_for_staged_together();
  }
};

}  // namespace gemmnorm
