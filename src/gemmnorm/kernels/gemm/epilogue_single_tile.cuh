// Epilogue, training, the batch fits one tile: all rows of a feature are in one block, which needs no other.
//
// Taken for batches of one tile of rows. Each consumer merges the statistics of its half of the features and stores y itself.
// Warp 1 stores the product, where it is kept.
#pragma once
#include "gemm/epilogue.cuh"

namespace gemmnorm {

template <class G, class Params>
struct SingleTileEpilogue : EpilogueDefaults {
  using Shared = TrainingShared<G>;
  static constexpr bool kMergesHere = true;

  // Nobody reads the count of batches, so that any block may increment it when it likes, and there are no counters to reset.
  __device__ __forceinline__ static bool counts_alone(const Params& p) { return p.momentum >= 0.0f; }

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
  struct Consumer : TrainingConsumer<G, Params, Smem, true, true> {
    using Base = TrainingConsumer<G, Params, Smem, true, true>;
    using Base::f, Base::shared, Base::thread;
    static constexpr bool kEarly = G::TN <= 64;  // registers are left for the feature's values before the main loop
    FeatureValues early = {};

    __device__ __forceinline__ Consumer(const Features<Params>& f, const TileScheduler& scheduler, const Counters&,
                                        Smem& shared, int consumer)
        : Base(f, scheduler, shared, consumer) {}

    __device__ __forceinline__ void begin(Tile tile) {
      if (kEarly) early = this->values(tile);
    }
    __device__ __forceinline__ void store(int, Tile tile, typename G::Accumulators& acc) {
      this->take_statistics(tile, acc, f.p.keep_product);
      const FeatureValues v = kEarly ? early : this->values(tile);
      this->sync_finishers();
      const auto& s = shared.epilogue;
      const int c = this->finished();
      ColumnStatistics merged;
      if constexpr (G::Shape::kSwapAB) {
        merged = {s.slope[0][c], s.shift[0][c]};
      } else {
        merged = merge_column<4>(f, opaque(thread % Base::kLanes), Base::kLanes,
                                 [&](bool of_m2, int g) { return (of_m2 ? s.shift : s.slope)[g][c]; });
      }
      const float rstd = 1.0f / sqrtf(v.s * v.s * merged.m2 / f.p.batch + f.p.eps);
      const bool finishes = tile.n * G::TN + c < f.p.features && thread % Base::kLanes == 0;
      this->finish_tile(tile, acc, {merged.mean, rstd, merged.m2}, v, finishes);
    }
  };
};

}  // namespace gemmnorm
