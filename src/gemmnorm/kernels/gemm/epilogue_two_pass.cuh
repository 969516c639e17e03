// Epilogue, training, any number of rows: the block multiplies its tiles twice. The first time nothing is kept but statistics
// of the unrounded product; the second time, when those of a tile's panel are merged, it is normalised in the accumulators.
//
// Serves what is predicted cheaper to multiply again than to store and read again; x comes out of the L2 the second time, where
// it fits. In place of the three launches of "two-pass". Blocks wait for each other: the launch is cooperative. Warp 1 computes
// the coefficients of the second pass, warps 2 and 3 merge the block's share of the panels' statistics.
#pragma once
#include "gemm/epilogue.cuh"
#include "gemm/epilogue_evaluate.cuh"

namespace gemmnorm {

template <class G, class Params>
struct TwoPassEpilogue {
  using Normalize = NormalizeEpilogue<G, Params>;
  struct Shared : Normalize::Shared {
    struct {
      float sums[2][G::Shape::kSwapAB ? 1 : 4][G::Shape::kSwapAB ? 4 : G::TN];  // per consumer and warp
      float slope[2][G::TN], shift[2][G::TN];                                  // per consumer: partial means and M2
    } statistics;
  };
  static constexpr bool kStores = true;
  static constexpr bool kEvaluates = false;
  static constexpr bool kTrains = true;
  static constexpr int kPasses = 2;
  __device__ __forceinline__ static bool counts_alone(const Params&) { return false; }

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>& f, const TileScheduler& scheduler,
                                               const Counters& counters, Smem& shared, int warp) {
      if (warp == 1) {
        Normalize::Auxiliary::compute_coefficients(f, scheduler, shared, [&](Tile tile) {
          if (threadIdx.x % 32 == 0) wait_until(counters.merged(tile.n), G::TN);
          __syncwarp();
        });
      } else {
#pragma unroll 1
        for (int t = blockIdx.x + (warp - 2) * gridDim.x; t < scheduler.tiles(); t += 2 * gridDim.x)
          merge_share<G>(f, scheduler, counters, scheduler.at(t));
      }
    }
  };

  template <class Smem>
  struct Consumer : Normalize::template Consumer<Smem> {
    using Base = typename Normalize::template Consumer<Smem>;
    using Base::f, Base::shared, Base::consumer, Base::thread, Base::tile_of_accumulators;
    const TileScheduler& scheduler;
    const Counters& counters;
    bool known = false;  // the first pass is over

    __device__ __forceinline__ Consumer(const Features<Params>& f, const TileScheduler& scheduler_, const Counters& counters_,
                                        Smem& shared, int consumer)
        : Base(f, scheduler_, counters_, shared, consumer), scheduler(scheduler_), counters(counters_) {}

    __device__ __forceinline__ void store(int t, Tile tile, typename G::Accumulators& acc) {
      if (known) return Base::store(t, tile, acc);
      tile_of_accumulators.template take_means<false, false>(f, shared.epilogue.statistics, tile, acc);
      tile_of_accumulators.template take_squares<false, false>(f, shared.epilogue.statistics, tile, acc, nullptr);
      named_barrier_sync(1 + consumer, 128);
      if (thread == 0) signal(counters.complete(tile.n), 1);
      known = t + static_cast<int>(gridDim.x) >= scheduler.tiles();
    }
  };
};

}  // namespace gemmnorm
