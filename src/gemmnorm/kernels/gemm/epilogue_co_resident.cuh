// Epilogue, training, the tiles of some panels are resident at once: of the tiles nothing but y, and the product where it is
// kept, goes to memory.
//
// Serves where a panel's tiles fit the multiprocessors; further panels follow in waves. Taken where predicted cheapest. A tile
// waits for the statistics of its panel: the last of a block in the accumulators; the others in the staging buffer, where the
// tile fits it, while the next is multiplied. Blocks wait for each other: the launch is cooperative, or a cluster has all tiles
// of a panel.
// Warp 1 merges its block's share of a panel's statistics, for staged tiles. Warps 2 and 3 serve a consumer each: of what it
// has staged they store the product, where it is kept, signal the partial statistics, and normalise it.
#pragma once
#include "gemm/epilogue.cuh"
#include "gemm/normalize_tile.cuh"

namespace gemmnorm {

// One warp merges the share of a tile's panel that falls to the tile: each feature to one of the panel's tiles.
template <class G, class Params>
__device__ __forceinline__ void merge_share(const Features<Params>& f, const TileScheduler& scheduler, const Counters& counters,
                                            Tile tile) {
  int lanes = 1;  // to a feature: as many as leave a feature or more to each tile
  while (lanes < 32 && scheduler.tiles_m * (32 / lanes) > G::TN) lanes *= 2;
  const int lane = threadIdx.x % 32, columns = 32 / lanes;
#pragma unroll 1
  for (int c = tile.m * columns; c < G::TN; c += scheduler.tiles_m * columns) {
    const int j = tile.n * G::TN + c + lane / lanes, existing = min(j, f.p.features - 1);
    const FeatureValues values = f.values(existing);
    if (lane == 0) wait_until(counters.complete(tile.n), 2 * scheduler.tiles_m);
    __syncwarp();
    const ColumnStatistics merged = merge_column<8>(f, lane % lanes, lanes, existing);
    if (lane % lanes == 0 && j < f.p.features) f.finish(j, values, merged.mean, merged.m2);
    __syncwarp();
    if (lane == 0) signal(counters.merged(tile.n), columns);
  }
}

template <class G, class Params>
struct CoResidentEpilogue : EpilogueDefaults {
  using Shared = TrainingShared<G>;
  using Shape = typename G::Shape;
  static constexpr bool kMergesHere = true;
  // Where nobody reads the number of batches at the end.
  __device__ __forceinline__ static bool done_early(const Params& p) { return p.momentum >= 0.0f; }

  // Tiles of a number below wait in the staging buffer; the rest, the last of each block, in the accumulators.
  __device__ __forceinline__ static int tiles_in_staging(const Params& p, const TileScheduler& scheduler) {
    return G::kFitsStaging && !p.in_registers ? max(scheduler.tiles() - static_cast<int>(gridDim.x), 0) : 0;
  }

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>& f, const TileScheduler& scheduler,
                                               const Counters& counters, Smem& shared, int warp) {
      const int in_staging = tiles_in_staging(f.p, scheduler);
      if (warp >= 2) serve(f, scheduler, counters, shared, in_staging, warp - 2);
      else if (G::kFitsStaging) merge_panels(f, scheduler, counters, in_staging);
    }

    // One warp of each block merges its share of a panel's features, for tiles that left the accumulators before.
    __device__ __forceinline__ static void merge_panels(const Features<Params>& f, const TileScheduler& scheduler,
                                                        const Counters& counters, int in_staging) {
#pragma unroll 1
      for (int t = blockIdx.x; t < scheduler.tiles(); t += gridDim.x) {
        const Tile tile = scheduler.at(t);
        if (scheduler.begins_before(tile.n, in_staging)) merge_share<G>(f, scheduler, counters, tile);
      }
    }

    template <class Smem>
    __device__ __forceinline__ static void serve(const Features<Params>& f, const TileScheduler& scheduler,
                                                 const Counters& counters, Smem& shared, int in_staging, int consumer) {
      const int lane = threadIdx.x % 32;
      unsigned char* staging = shared.staging[consumer];
      u64* unstaged = &shared.epilogue.unstaged[consumer];
      u32 phase = 0;
#pragma unroll 1
      for (int t = blockIdx.x; t < (f.p.keep_product ? scheduler.tiles() : in_staging); t += gridDim.x) {
        const Tile tile = scheduler.at(t);
        const bool waits = G::kFitsStaging && t < in_staging;
        const int passes = G::kStaged && f.p.keep_product ? G::kStorePasses : 1;
#pragma unroll 1
        for (int i = 0; i < passes; ++i, phase ^= 1) {
          mbarrier_wait(&shared.epilogue.staged[consumer], phase);
          __syncwarp();  // nobody waits for this phase any more
          if (lane > 0) continue;
          if constexpr (G::kStaged) {
            if (f.p.keep_product) store_staged<Shape, typename G::T>(f.p.map_product, staging, tile, consumer, i, f.p.batch);
          }
          if (i == 0) signal(counters.complete(tile.n), 1);
          if (G::kStaged) tma_store_wait_read();
          if (!waits) mbarrier_arrive(unstaged);
        }
        if constexpr (G::kFitsStaging) {
          if (waits) {
            if (lane == 0) wait_until(counters.merged(tile.n), G::TN);
            __syncwarp();
            normalize_staged<G>(f, staging, tile, consumer);
            __syncwarp();  // all have read what is staged
            if (lane == 0) {
              tma_store_wait_read();
              mbarrier_arrive(unstaged);
            }
            __syncwarp();
          }
        }
      }
    }
  };

  template <class Smem>
  struct Consumer : TrainingConsumer<G, Params, Smem, true, false> {
    using Base = TrainingConsumer<G, Params, Smem, true, false>;
    using Base::f, Base::scheduler, Base::thread;
    static constexpr bool kEarly = G::TN <= 64;  // registers are left for the feature's values before the main loop
    const Counters& counters;
    int in_staging;
    FeatureValues early = {};

    __device__ __forceinline__ Consumer(const Features<Params>& f, const TileScheduler& scheduler, const Counters& counters_,
                                        Smem& shared, int consumer)
        : Base(f, scheduler, shared, consumer), counters(counters_), in_staging(tiles_in_staging(f.p, scheduler)) {}

    __device__ __forceinline__ void begin(Tile tile) {
      if (kEarly) early = this->values(tile);
    }
    __device__ __forceinline__ void store(int t, Tile tile, typename G::Accumulators& acc) {
      const bool finishes = t >= in_staging, stores = !finishes || f.p.keep_product;
      this->take_statistics(tile, acc, stores);
      if (!stores) this->signal_statistics(counters, tile);
      if (!finishes) return;
      const FeatureValues v = kEarly ? early : this->values(tile);
      this->wait_for_panel(counters, tile);
      if (done_early(f.p) && t + static_cast<int>(gridDim.x) >= scheduler.tiles()) signal_warp_done(this->shared.warps_done);
      this->template finish_panel_tile<G::kFitsStaging>(tile, acc, v, in_staging);
    }
  };
};

}  // namespace gemmnorm
