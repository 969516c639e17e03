// Epilogue, training, any number of rows: tiles are stored, and normalised later out of the L2; only the last tile of every
// block waits for its panel's statistics in the accumulators.
//
// Serves any batch of several tiles; taken where that is predicted cheaper than to wait on the chip. Warp 1 stores what the
// consumers stage and signals complete tiles. Warps 2 and 3, and the consumers after their last tile, take work items in order
// from an atomic counter: first the merges of a group of panels, then the rows of its stored tiles. An item waits only for
// tiles that come before it, and all blocks run at once: the launch is cooperative.
#pragma once
#include "gemm/epilogue.cuh"
#include "gemm/normalize_tile.cuh"

namespace gemmnorm {

template <class G, class Params>
struct DeferredEpilogue : EpilogueDefaults {
  using Shared = TrainingShared<G>;
  static constexpr bool kMergesHere = true;
  static constexpr int kMergeWidth = 8, kMergeLanes = 32 / kMergeWidth;  // features that a warp merges at a time, lanes of each
  static constexpr int kAhead = G::kSplit ? 1 : 4;                       // loads in flight: what registers are left for
  static constexpr int kRowBytesOfTile = G::TN * sizeof(typename G::T);
  // That a warp normalises at a time: of one mean, and no more than what others can wait for.
  static constexpr int kItemRows = greatest_common_divisor(G::Shape::kMeanRows, 32768 / kRowBytesOfTile);

  // Tiles of a number below are stored; the rest, the last of each block, wait in the accumulators.
  __device__ __forceinline__ static int stored_tiles(const TileScheduler& scheduler) {
    return max(scheduler.tiles() - static_cast<int>(gridDim.x), 0);
  }

  __device__ __forceinline__ static void merge(const Features<Params>& f, const Counters& counters, int tiles_m, int panel,
                                               int first_feature) {
    const int lane = threadIdx.x % 32, j = first_feature + lane / kMergeLanes, existing = min(j, f.p.features - 1);
    if (lane == 0) wait_until(counters.complete(panel), 2 * tiles_m);
    __syncwarp();
    const ColumnStatistics merged = merge_column<2 * kAhead>(f, lane % kMergeLanes, kMergeLanes, existing);
    if (lane % kMergeLanes == 0 && j < f.p.features) f.finish(j, f.values(j), merged.mean, merged.m2);
    __syncwarp();
    if (lane == 0) signal(counters.merged(panel), kMergeWidth);
  }

  // A warp takes work items until none is left.
  __device__ __forceinline__ static void take_items(const Features<Params>& f, const TileScheduler& scheduler,
                                                    const Counters& counters) {
    constexpr int kMerges = G::TN / kMergeWidth, kItemsOfTile = G::TM / kItemRows;
    const int lane = threadIdx.x % 32, stored = stored_tiles(scheduler);
    const int per_panel = kMerges + kItemsOfTile * scheduler.tiles_m;
    // Tiles that merge for themselves need no items: the last one is in the last group with stored tiles.
    const int group_tiles = scheduler.group_panels * scheduler.tiles_m;
    const int last_panel = min((stored + group_tiles - 1) / group_tiles * scheduler.group_panels, scheduler.tiles_n);
#pragma unroll 1
    for (;;) {
      int item = 0;
      if (lane == 0) item = static_cast<int>(atomicAdd(counters.next_item(), 1u));
      item = __shfl_sync(~0u, item, 0);
      if (item >= per_panel * last_panel) return;
      const int group = item / (per_panel * scheduler.group_panels), first = group * scheduler.group_panels;
      const int panels = min(scheduler.group_panels, scheduler.tiles_n - first);
      const int rest = item - first * per_panel;
      if (rest < kMerges * panels) {
        const int n = first + rest / kMerges;
        if (!scheduler.begins_before(n, stored)) continue;
        merge(f, counters, scheduler.tiles_m, n, n * G::TN + (rest % kMerges) * kMergeWidth);
      } else {
        const int t = first * scheduler.tiles_m + (rest - kMerges * panels) / kItemsOfTile;
        if (t >= stored) continue;
        const Tile tile = scheduler.at(t);
        const int row = tile.m * G::TM + (rest - kMerges * panels) % kItemsOfTile * kItemRows;
        if (row >= f.p.batch) continue;
        if (lane == 0) wait_until(counters.merged(tile.n), G::TN);
        __syncwarp();
        if constexpr (G::kSplit) {  // the other types have features that fill whole vectors
          if (f.p.features % 4) {
            normalize_stored_singly<G, kItemRows, 2 * kAhead>(f, row, tile.n * G::TN);
            continue;
          }
        }
        normalize_stored<G, kItemRows, 2 * kAhead>(f, row, tile.n * G::TN);
      }
    }
  }

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>& f, const TileScheduler& scheduler,
                                               const Counters& counters, Smem& shared, int warp) {
      if (warp != 1) return take_items(f, scheduler, counters);
      const int stored = stored_tiles(scheduler);
      // A stored product stays in the L2 until it is normalised. Of a tile that waits in the accumulators others need only the
      // statistics.
      const auto describe = [&](int t) {
        return StoreDescription{t < stored || f.p.keep_product, t < stored ? kEvictLast : kEvictNormal};
      };
      const auto on_staged = [&](int t, Tile tile) {
        if (t >= stored) signal(counters.complete(tile.n), 1);
      };
      const auto on_stored = [&](int t, Tile tile) {
        if (t >= stored) return;
        if (G::kStaged) {
          tma_store_wait();
          fence_proxy_async_global();
        }
        signal(counters.complete(tile.n), 1);
      };
      store_staged_tiles<G>(f, scheduler, shared, describe, on_staged, on_stored);
    }
  };

  template <class Smem>
  struct Consumer : TrainingConsumer<G, Params, Smem, false, false> {
    using Base = TrainingConsumer<G, Params, Smem, false, false>;
    using Base::f, Base::scheduler;
    const Counters& counters;

    __device__ __forceinline__ Consumer(const Features<Params>& f, const TileScheduler& scheduler, const Counters& counters_,
                                        Smem& shared, int consumer)
        : Base(f, scheduler, shared, consumer), counters(counters_) {}

    __device__ __forceinline__ void begin(Tile) {}
    __device__ __forceinline__ void store(int t, Tile tile, typename G::Accumulators& acc) {
      const int stored = stored_tiles(scheduler);
      const bool finishes = t >= stored, stores = !finishes || f.p.keep_product;
      this->take_statistics(tile, acc, stores);
      if (!stores) this->signal_statistics(counters, tile);
      if (!finishes) return;
      const FeatureValues v = this->values(tile);
      this->wait_for_panel(counters, tile);
      this->template finish_panel_tile<true>(tile, acc, v, stored);
    }
    __device__ __forceinline__ void end() const {
      take_items(f, scheduler, counters);
      Base::end();
    }
  };
};

}  // namespace gemmnorm
