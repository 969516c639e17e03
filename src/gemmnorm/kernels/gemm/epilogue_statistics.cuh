// Epilogues, training in three launches: partial statistics; another kernel merges them.
//
// Taken by the strategy gemm_stats_apply.
//   StatisticsEpilogue        the third launch reads the product, which this one stores, and normalises it: statistics of its
//                             values as T holds them. Warp 1 stores what the consumers stage
//   ExactStatisticsEpilogue   the third launch multiplies again (NormalizeEpilogue): statistics of the unrounded product, of
//                             which nothing is stored. The ring has the memory of the staging buffers
//   MissingStatisticsEpilogue the same behind the Gram matrix of x, for the features that it left with a negative rstd. The
//                             consumer that is the last of a panel merges them: no launch follows that would mostly have nothing
//                             to do
#pragma once
#include "gemm/epilogue.cuh"

namespace gemmnorm {

template <class G, class Params>
struct StatisticsEpilogue : EpilogueDefaults {
  using Shared = TrainingShared<G>;
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
    __device__ __forceinline__ void begin(Tile) {}
    __device__ __forceinline__ void store(int, Tile tile, typename G::Accumulators& acc) {
      this->take_statistics(tile, acc, true);
    }
    __device__ __forceinline__ void end() const {}
  };
};

template <class G, class Params, bool OF_MISSING>
struct UnroundedStatisticsEpilogue : EpilogueDefaults {
  struct Shared : PartialStatistics<G> {
    bool last[2];  // of a panel: per consumer

    __device__ __forceinline__ void init() {}
  };
  static constexpr bool kStores = false;
  __device__ __forceinline__ static bool counts_alone(const Params&) { return !OF_MISSING; }

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>&, const TileScheduler&, const Counters&, Smem&, int) {}
  };

  template <class Smem>
  struct Consumer {
    const Features<Params>& f;
    const TileScheduler& scheduler;
    const Counters& counters;
    Smem& shared;
    int consumer;
    typename G::AccumulatorTile tile_of_accumulators;

    __device__ __forceinline__ Consumer(const Features<Params>& f_, const TileScheduler& scheduler_, const Counters& counters_,
                                        Smem& shared_, int consumer_)
        : f(f_), scheduler(scheduler_), counters(counters_), shared(shared_), consumer(consumer_),
          tile_of_accumulators(consumer_) {}
    __device__ __forceinline__ void begin(Tile) {}
    __device__ __forceinline__ void store(int, Tile tile, typename G::Accumulators& acc) {
      tile_of_accumulators.template take_means<false, false>(f, shared.epilogue, tile, acc);
      tile_of_accumulators.template take_squares<false, false>(f, shared.epilogue, tile, acc, nullptr);
      if (OF_MISSING && is_last(tile.n)) merge_missing(tile.n);
    }
    // Whether all partial statistics of a panel are there with this consumer's.
    __device__ __forceinline__ bool is_last(int panel) const {
      named_barrier_sync(1 + consumer, 128);
      if (threadIdx.x % 128 == 0) {
        u32* complete = counters.complete(panel);
        const bool last = signal_and_count(complete) == static_cast<u32>(2 * scheduler.tiles_m - 1);
        if (last) *complete = 0;
        shared.epilogue.last[consumer] = last;
      }
      named_barrier_sync(1 + consumer, 128);
      return shared.epilogue.last[consumer];
    }
    __device__ __forceinline__ void merge_missing(int panel) const {
      constexpr int kLanes = 128 / G::TN;
      const int lane = threadIdx.x % kLanes, j = panel * G::TN + threadIdx.x % 128 / kLanes;
      const ColumnStatistics merged = merge_column<8>(f, lane, kLanes, min(j, f.p.features - 1));
      if (lane > 0 || j >= f.p.features || !(f.p.rstd[j] < 0.0f)) return;
      FeatureStatistics found = read_feature(f.p, j);
      found.batches = counted_batches(f.p);
      found.mean = merged.mean;
      found.variance = found.scale * found.scale * merged.m2 / f.p.batch;
      finish_feature(f.p, j, found);
    }
    __device__ __forceinline__ void end() const {}
  };
};

template <class G, class Params>
struct ExactStatisticsEpilogue : UnroundedStatisticsEpilogue<G, Params, false> {};
template <class G, class Params>
struct MissingStatisticsEpilogue : UnroundedStatisticsEpilogue<G, Params, true> {};

}  // namespace gemmnorm
