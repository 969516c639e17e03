// Epilogue, evaluation: y = φ(slope·a + shift) with the running statistics, straight from the accumulators.
//
// Taken for every evaluation. Warp 1 computes the next tile's coefficients while the current one is multiplied, into one of
// two buffers. Of the tiles nothing but y goes to memory.
#pragma once
#include "gemm/features.cuh"
#include "gemm/staging.cuh"

namespace gemmnorm {

// One warp: the coefficients of COLUMNS features from `first` on. `keeps`: also what the backward reads, mean and 1/σ.
template <int COLUMNS, class Params>
__device__ __forceinline__ void evaluation_coefficients(const Features<Params>& f, int first, bool keeps, float* slope,
                                                        float* shift) {
#pragma unroll 2
  for (int c = threadIdx.x % 32; c < COLUMNS; c += 32) {
    const int j = min(first + c, f.p.features - 1);
    const float r = 1.0f / sqrtf(to_float(f.p.running_var[j]) + f.p.eps), centre = to_float(f.p.running_mean[j]);
    slope[c] = f.gamma(j) * f.s(j) * r;
    shift[c] = f.shift(j) + f.gamma(j) * r * (f.s(j) * f.b(j) - centre);
    if (f.p.mean && keeps) {
      f.p.mean[j] = centre;
      f.p.rstd[j] = r;
    }
  }
}

template <class G, class Params>
struct EvaluateEpilogue {
  struct Shared {
    float slope[2][G::TN], shift[2][G::TN];  // of two tiles
    u64 known[2], used[2];                   // a tile's coefficients are there; they may be overwritten

    __device__ __forceinline__ void init() {
      for (int c = 0; c < 2; ++c) {
        mbarrier_init(&known[c], 32);
        mbarrier_init(&used[c], 256);
      }
    }
  };
  static constexpr bool kEvaluates = true;
  static constexpr bool kTrains = false;
  __device__ __forceinline__ static bool counts_alone(const Params&) { return false; }

  struct Auxiliary {
    template <class Smem>
    __device__ __forceinline__ static void run(const Features<Params>& f, const TileScheduler& scheduler, const Counters&,
                                               Smem& shared, int warp) {
      if (warp != 1) return;
      PipelineState<2> state(1);
      for (int t = blockIdx.x; t < scheduler.tiles(); t += gridDim.x) {
        const Tile tile = scheduler.at(t);
        auto& s = shared.epilogue;
        mbarrier_wait(&s.used[state.stage], state.phase);
        evaluation_coefficients<G::TN>(f, tile.n * G::TN, tile.m == 0, s.slope[state.stage], s.shift[state.stage]);
        mbarrier_arrive(&s.known[state.stage]);
        state.advance();
      }
    }
  };

  template <class Smem>
  struct Consumer {
    const Features<Params>& f;
    Smem& shared;
    int consumer, thread;
    typename G::AccumulatorTile tile_of_accumulators;
    PipelineState<2> state{0};

    __device__ __forceinline__ Consumer(const Features<Params>& f_, const TileScheduler&, const Counters&, Smem& shared_,
                                        int consumer_)
        : f(f_), shared(shared_), consumer(consumer_), thread(threadIdx.x % 128), tile_of_accumulators(consumer_) {}

    __device__ __forceinline__ void begin(int) {}
    __device__ __forceinline__ void store(int, Tile tile, typename G::Accumulators& acc) {
      const int buffer = state.stage;
      mbarrier_wait(&shared.epilogue.known[buffer], state.phase);
      state.advance();
      tile_of_accumulators.load_coefficients(shared.epilogue, buffer);
      unsigned char* staging = shared.staging[consumer];
#pragma unroll
      for (int i = 0; i < G::kStorePassesY; ++i) {
        if (G::kStagedY && thread == 0) tma_store_wait_read();
        named_barrier_sync(1 + consumer, 128);  // the staging buffer is free
        tile_of_accumulators.template store_results<typename G::Activation, G::kStagedY>(
            acc, i, shared.epilogue, staging, f.p.y, tile, f.p.batch, f.p.features);
        if (i == G::kStorePassesY - 1) mbarrier_arrive(&shared.epilogue.used[buffer]);
        if (G::kStagedY) fence_proxy_async_shared();
        named_barrier_sync(1 + consumer, 128);
        if (G::kStagedY && thread == 0)
          store_staged<typename G::Shape, typename G::Y>(f.p.map_y, staging, tile, consumer, i, f.p.batch);
      }
    }
    __device__ __forceinline__ void end() const {
      if (G::kStagedY && thread == 0) tma_store_wait_read();
    }
  };
};

}  // namespace gemmnorm
