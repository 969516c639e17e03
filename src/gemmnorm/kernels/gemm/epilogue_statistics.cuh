// Epilogues, training in three launches: partial statistics, and the product where it is kept; another kernel merges them.
//
// Taken by the strategy gemm_stats_apply. Warp 1 stores what the consumers stage.
//   StatisticsEpilogue        the third launch reads the product and normalises it: statistics of its values as T holds them
//   ExactStatisticsEpilogue   the third launch multiplies again (NormalizeEpilogue): statistics of the unrounded product
#pragma once
#include "gemm/epilogue.cuh"

namespace gemmnorm {

template <class G, class Params, bool ROUNDS>
struct StatisticsPass {
  using Shared = TrainingShared<G>;
  static constexpr bool kEvaluates = false;
  static constexpr bool kTrains = false;  // in this launch: later ones do
  __device__ __forceinline__ static bool counts_alone(const Params&) { return true; }

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>& f, const TileScheduler& scheduler, const Counters&,
                                               Smem& shared, int warp) {
      if (warp != 1) return;
      const bool keeps = f.p.keep_product;
      const auto describe = [&](int) { return StoreDescription{keeps, kEvictNormal}; };
      const auto nothing = [](int, Tile) {};
      store_staged_tiles<G>(f, scheduler, shared, describe, nothing, nothing);
    }
  };

  template <class Smem>
  struct Consumer : TrainingConsumer<G, Params, Smem, false, false, ROUNDS> {
    using Base = TrainingConsumer<G, Params, Smem, false, false, ROUNDS>;
    __device__ __forceinline__ Consumer(const Features<Params>& f, const TileScheduler& scheduler, const Counters&,
                                        Smem& shared, int consumer)
        : Base(f, scheduler, shared, consumer) {}
    __device__ __forceinline__ void begin(int) {}
    __device__ __forceinline__ void store(int, Tile tile, typename G::Accumulators& acc) {
      this->take_statistics(tile, acc, this->f.p.keep_product);
    }
    __device__ __forceinline__ void end() const {}
  };
};

template <class G, class Params>
struct StatisticsEpilogue : StatisticsPass<G, Params, true> {};
template <class G, class Params>
struct ExactStatisticsEpilogue : StatisticsPass<G, Params, false> {};

}  // namespace gemmnorm
