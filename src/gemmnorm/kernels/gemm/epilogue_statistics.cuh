// Epilogues, training in three launches: partial statistics; another kernel merges them.
//
// Taken by the strategy gemm_stats_apply.
//   StatisticsEpilogue        the third launch reads the product, which this one stores, and normalises it: statistics of its
//                             values as T holds them. Warp 1 stores what the consumers stage
//   ExactStatisticsEpilogue   the third launch multiplies again (NormalizeEpilogue): statistics of the unrounded product, of
//                             which nothing is stored. The ring has the memory of the staging buffers
#pragma once
#include "gemm/epilogue.cuh"

namespace gemmnorm {

template <class G, class Params>
struct StatisticsEpilogue {
  using Shared = TrainingShared<G>;
  static constexpr bool kStores = true;
  static constexpr bool kStatisticsKnown = false;
  static constexpr bool kWaitsItself = false;
  static constexpr bool kMergesHere = false;  // later launches do
  __device__ __forceinline__ static bool counts_alone(const Params&) { return true; }
  __device__ __forceinline__ static bool done_early(const Params&) { return false; }

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>& f, const TileScheduler& scheduler, const Counters&,
                                               Smem& shared, int warp) {
      if (warp != 1) return;
      const auto describe = [](int) { return StoreDescription{true, kEvictNormal}; };
      const auto nothing = [](int, Tile) {};
      store_staged_tiles<G>(f, scheduler, shared, describe, nothing, nothing);
    }
  };

  template <class Smem>
  struct Consumer : TrainingConsumer<G, Params, Smem, false, false> {
    using Base = TrainingConsumer<G, Params, Smem, false, false>;
    __device__ __forceinline__ Consumer(const Features<Params>& f, const TileScheduler& scheduler, const Counters&,
                                        Smem& shared, int consumer)
        : Base(f, scheduler, shared, consumer) {}
    __device__ __forceinline__ void begin(int) {}
    __device__ __forceinline__ void store(int, Tile tile, typename G::Accumulators& acc) {
      this->take_statistics(tile, acc, true);
    }
    __device__ __forceinline__ void end() const {}
  };
};

template <class G, class Params>
struct ExactStatisticsEpilogue {
  using Shared = TrainingShared<G>;
  static constexpr bool kStores = false;
  static constexpr bool kStatisticsKnown = false;
  static constexpr bool kWaitsItself = false;
  static constexpr bool kMergesHere = false;  // later launches do
  __device__ __forceinline__ static bool counts_alone(const Params&) { return true; }
  __device__ __forceinline__ static bool done_early(const Params&) { return false; }

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>&, const TileScheduler&, const Counters&, Smem&, int) {}
  };

  template <class Smem>
  struct Consumer {
    const Features<Params>& f;
    Smem& shared;
    typename G::AccumulatorTile tile_of_accumulators;

    __device__ __forceinline__ Consumer(const Features<Params>& f_, const TileScheduler&, const Counters&, Smem& shared_,
                                        int consumer)
        : f(f_), shared(shared_), tile_of_accumulators(consumer) {}
    __device__ __forceinline__ void begin(int) {}
    __device__ __forceinline__ void store(int, Tile tile, typename G::Accumulators& acc) {
      tile_of_accumulators.template take_means<false, false>(f, shared.epilogue, tile, acc);
      tile_of_accumulators.template take_squares<false, false>(f, shared.epilogue, tile, acc, nullptr);
    }
    __device__ __forceinline__ void end() const {}
  };
};

}  // namespace gemmnorm
