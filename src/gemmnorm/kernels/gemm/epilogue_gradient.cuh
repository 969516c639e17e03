// Epilogues of the backward where the forward has kept no product: a = x · Wᵀ is multiplied again, and meets y's gradient in
// the accumulators (formulas in backward/formulas.cuh). Nothing of y's size but da goes to memory.
//
//   GradientSumsEpilogue   Σg and h = Σ g·(a - mean) of a tile's rows, to group_sum and group_dot; merge_gradients merges them
//   GradientEpilogue       da, to grad_product
//
// Taken in training without a kept product; the planner weighs that where `keep_product` is "auto". Warps 1 and 2 serve a
// consumer each: they bring y's gradient to its staging buffer in parts of 64 × 64, as many ahead as fit it, and store da,
// which takes a part's place. Warp 3 computes the next tile's coefficients while the current one is multiplied.
#pragma once
#include "backward/formulas.cuh"
#include "gemm/epilogue_defaults.cuh"
#include "gemm/features.cuh"
#include "gemm/pipeline.cuh"
#include "gemm/staging.cuh"

namespace gemmnorm {

template <class G, class Params, bool SUMS>
struct RecomputedGradient : EpilogueDefaults {
  using T = typename G::T;
  using Y = typename G::Y;
  static_assert(G::kStagedY, "y's gradient passes through the staging buffers");
  static constexpr int kNumbers = SUMS ? 3 : 5;  // of a feature: mean, slope, shift, Σg/B, s²·rstd²·h/B
  static constexpr int kParts = G::Shape::kParts, kGroups = 4;   // of a part: eight accumulators each
  static constexpr int kSlotBytes = 64 * 64 * sizeof(Y);
  static constexpr int kSlots = G::Shape::kStagingBytes / kSlotBytes;  // parts that a staging buffer holds

  struct Shared {
    float numbers[2][kNumbers][G::TN];  // of two tiles' features
    float sums[G::Shape::kSwapAB ? 1 : 2][4][G::Shape::kSwapAB ? 1 : G::TN];  // per consumer and warp
    Pipeline<kSlots> parts[2];  // per consumer: `full` with y's gradient; `empty` when that is read, or da in its place
    u64 known[2], used[2];      // a tile's numbers are there; they may be overwritten

    __device__ __forceinline__ void init() {
      for (int c = 0; c < 2; ++c) {
        parts[c].init(128);
        mbarrier_init(&known[c], 32);
        mbarrier_init(&used[c], 256);
      }
    }
  };
  static constexpr bool kWaitsItself = !SUMS;

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>& f, const TileScheduler& scheduler, const Counters&,
                                               Smem& shared, int warp) {
      if (warp == 3) compute_numbers(f, scheduler, shared);
      else if (threadIdx.x % 32 == 0) transfer(f, scheduler, shared, warp - 1);
    }

    // One warp: what the formulas need of each feature.
    template <class Smem>
    __device__ __forceinline__ static void compute_numbers(const Features<Params>& f, const TileScheduler& scheduler,
                                                           Smem& shared) {
      if (!SUMS) {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
      }
      auto& s = shared.epilogue;
      PipelineState<2> state(1);
      for (TileWalk walk(shared.tiles); walk.t < scheduler.tiles(); walk.advance()) {
        mbarrier_wait(&s.used[state.stage], state.phase);
        float(&numbers)[kNumbers][G::TN] = s.numbers[state.stage];
        const LaneFeatures<G::TN> own(G::Shape::first_feature(walk.tile(), 0), f.p.features);
        constexpr int kTogether = own.kOwn < 2 ? own.kOwn : 2;  // what the registers hold
#pragma unroll 1
        for (int first = 0; first < own.kOwn; first += kTogether) {
          FeatureGradient<Form::kFolded> feature[kTogether];
#pragma unroll
          for (int i = 0; i < kTogether; ++i) feature[i] = feature_gradient<Form::kFolded, !SUMS>(f.p, own.feature(first + i));
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const int c = own.column(first + i);
            numbers[0][c] = feature[i].centre;
            numbers[1][c] = feature[i].slope;
            numbers[2][c] = feature[i].shift;
            if constexpr (!SUMS) {
              numbers[3][c] = feature[i].mean_grad;
              numbers[4][c] = feature[i].slope_grad;
            }
          }
        }
        mbarrier_arrive(&s.known[state.stage]);
        state.advance();
      }
    }

    // One thread: parts of y's gradient to a consumer's staging buffer, and of da from there to memory, tile by tile.
    template <class Smem>
    __device__ __forceinline__ static void transfer(const Features<Params>& f, const TileScheduler& scheduler, Smem& shared,
                                                    int consumer) {
      auto& ring = shared.epilogue.parts[consumer];
      TileWalk loads(shared.tiles), stores(shared.tiles);
      PipelineState<kSlots> state(1);
      int left = SUMS ? 0 : kSlots;  // parts to be stored when all are loaded
      for (int part = 0; loads.t < scheduler.tiles() || left-- > 0; ++part) {
        unsigned char* slot = shared.staging[consumer] + state.stage * kSlotBytes;
        mbarrier_wait(&ring.empty[state.stage], state.phase);
        if constexpr (!SUMS) {
          if (part >= kSlots) {
            const int stored = (part - kSlots) % kParts;
            store_part(f.p, slot, stores.tile(), consumer, stored);
            if (stored == kParts - 1) stores.advance();
          }
        }
        if (loads.t < scheduler.tiles()) {
          load_part(f.p, slot, loads.tile(), consumer, part % kParts, &ring.full[state.stage]);
          if (part % kParts == kParts - 1) loads.advance();
        }
        state.advance();
      }
    }
    __device__ __forceinline__ static void load_part(const Params& p, unsigned char* slot, Tile tile, int consumer, int part,
                                                     u64* full) {
      const int row = G::Shape::row(tile, consumer, part), column = G::Shape::column(tile, consumer, part);
      mbarrier_expect_tx(full, kSlotBytes);
#pragma unroll
      for (int c = 0; c < 64; c += kRowBytes / sizeof(Y))
        tma_load(slot + c * 64 * sizeof(Y), p.map_grad_y, full, column + c, row, SUMS ? kEvictNormal : kEvictFirst);
    }
    __device__ __forceinline__ static void store_part(const Params& p, const unsigned char* slot, Tile tile, int consumer,
                                                      int part) {
      const int row = G::Shape::row(tile, consumer, part), column = G::Shape::column(tile, consumer, part);
      if (row >= p.batch) return;
#pragma unroll
      for (int c = 0; c < 64; c += kRowBytes / sizeof(T))
        tma_store(p.map_grad_product, slot + c * 64 * sizeof(T), column + c, row);
      tma_store_commit();
      tma_store_wait_read();
    }
  };

  template <class Smem>
  struct Consumer {
    using Accumulators = typename G::Accumulators;
    using Columns = typename G::AccumulatorTile::template Columns<kNumbers>;

    const Features<Params>& f;
    Smem& shared;
    int consumer;
    typename G::AccumulatorTile tile_of_accumulators;
    PipelineState<2> numbers{0};
    PipelineState<kSlots> state{0};

    __device__ __forceinline__ Consumer(const Features<Params>& f_, const TileScheduler&, const Counters&, Smem& shared_,
                                        int consumer_)
        : f(f_), shared(shared_), consumer(consumer_), tile_of_accumulators(consumer_) {}

    __device__ __forceinline__ void begin(Tile) {}
    __device__ __forceinline__ void store(int, Tile tile, Accumulators& acc) {
      auto& s = shared.epilogue;
      mbarrier_wait(&s.known[numbers.stage], numbers.phase);
      Columns columns(tile_of_accumulators, s.numbers[numbers.stage]);
      if (SUMS) tile_of_accumulators.copy_beyond(f.p.batch, tile, s.numbers[numbers.stage][0], acc);
      typename G::AccumulatorTile::ColumnSums sums;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        unsigned char* slot = shared.staging[consumer] + state.stage * kSlotBytes;
        mbarrier_wait(&s.parts[consumer].full[state.stage], state.phase);
#pragma unroll
        for (int k = 0; k < kGroups; ++k) visit_group(part * kGroups + k, slot, columns, sums, acc);
        if constexpr (!SUMS) put_in_place(part, slot, acc);
        mbarrier_arrive(&s.parts[consumer].empty[state.stage]);
        state.advance();
      }
      mbarrier_arrive(&s.used[numbers.stage]);
      numbers.advance();
      if constexpr (SUMS) tile_of_accumulators.store_sums(f, s.sums[G::Shape::kSwapAB ? 0 : consumer], tile, sums, acc);
    }
    __device__ __forceinline__ void end() const {}

    // Eight accumulators: their share of the sums, or da in their place.
    __device__ __forceinline__ void visit_group(int group, const unsigned char* slot, Columns& columns,
                                                typename G::AccumulatorTile::ColumnSums& sums, Accumulators& acc) const {
      float g[8], dot[8];
      tile_of_accumulators.template load_group<Y>(slot, group % kGroups, g);
      columns.move_to(group);
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        FeatureGradient<Form::kFolded> feature;
        feature.centre = columns.at(0, q);
        feature.slope = columns.at(1, q);
        feature.shift = columns.at(2, q);
        const float deviation = feature.deviation(acc[8 * group + q]);
        g[q] = feature.template through_activation<typename G::Activation>(g[q], deviation);
        dot[q] = g[q] * deviation;
        if constexpr (!SUMS) {
          feature.mean_grad = columns.at(3, q);
          feature.slope_grad = columns.at(4, q);
          acc[8 * group + q] = feature.of_product(g[q], deviation);
        }
      }
      if constexpr (SUMS) sums.add(acc, group, g, dot);
    }

    // A part of da to where y's gradient was. Of the same size a warp writes where it has read itself.
    __device__ __forceinline__ void put_in_place(int part, unsigned char* slot, const Accumulators& acc) const {
      if (sizeof(Y) != sizeof(T)) named_barrier_sync(1 + consumer, 128);
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        float v[8];
#pragma unroll
        for (int q = 0; q < 8; ++q) v[q] = acc[8 * (part * kGroups + k) + q];
        tile_of_accumulators.template store_group<T>(slot, k, v);
      }
      fence_proxy_async_shared();
    }
  };
};

template <class G, class Params>
struct GradientSumsEpilogue : RecomputedGradient<G, Params, true> {};
template <class G, class Params>
struct GradientEpilogue : RecomputedGradient<G, Params, false> {};

}  // namespace gemmnorm
