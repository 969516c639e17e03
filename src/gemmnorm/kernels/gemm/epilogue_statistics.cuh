// Epilogue, training in three launches: the product and its partial statistics; other kernels merge and normalise.
//
// Taken by the strategy gemm_stats_apply. Warp 1 stores what the consumers stage.
#pragma once
#include "gemm/epilogue.cuh"

namespace gemmnorm {

template <class G, class Params>
struct StatisticsEpilogue {
  using Shared = TrainingShared<G>;
  static constexpr bool kEvaluates = false;
  static constexpr bool kTrains = false;  // in this launch: later ones do
  __device__ __forceinline__ static bool counts_alone(const Params&) { return true; }

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

}  // namespace gemmnorm
