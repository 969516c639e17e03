// The weight's gradient where a small batch makes many short sums (sm_90a): daᵀ·x of operands in half precision, in their
// type or in float32. Both lie across K in memory; nothing is transposed.
//
// A persistent block is one warpgroup that feeds a ring of shared-memory stages and two that multiply, 64 of the tile's
// 128 features each. A tile leaves by the copy engine while the next one is multiplied.
#pragma once
#include "ptx/wgmma.cuh"
#include "raster.cuh"

namespace gemmnorm {

constexpr int kGradientColumns = 256;  // of a tile

template <int STAGES>
struct WeightGradientShared {
  alignas(1024) unsigned char a[STAGES][2][kAcrossBytes];  // of each stage 64 samples of 64 features, or of 64 columns of x
  alignas(1024) unsigned char x[STAGES][kGradientColumns / 64][kAcrossBytes];
  unsigned char staging[2][4][kAcrossBytes];  // of each consumer: 64 rows, 128 bytes of each at a time
  u64 full[STAGES], empty[STAGES];
};

// A thread's two neighbouring results (the i-th such pair) of row `row` of a consumer's 64, to where the copy engine fetches
// them: blocks of 128 bytes a row.
template <class G>
__device__ __forceinline__ void stage_pair(unsigned char* staging, int row, int i, float a, float b) {
  constexpr int kBytes = 2 * sizeof(G), kInRow = kRowBytes / (4 * kBytes);  // pairs of a thread in 128 bytes
  unsigned char* to = staging + i / kInRow * kAcrossBytes + row * kRowBytes +
                      ((i % kInRow * 4 * kBytes + threadIdx.x % 4 * kBytes) ^ (row % 8 * 16));
  const float pair[2] = {a, b};
  store<G, 2>(reinterpret_cast<G*>(to), pair);
}

template <class T, class G, int STAGES, int SHARED_BYTES>
__device__ __forceinline__ void weight_gradient(const TensorMap& map_a /* [batch, features] */,
                                                const TensorMap& map_b /* [batch, in_features] */,
                                                const TensorMap& map_out /* [features, in_features], of G */,
                                                int group_panels, int batch, int features, int in_features) {
  using Shared = WeightGradientShared<STAGES>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "the planner and WeightGradientShared disagree");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const Raster raster = {(features + kTileRows - 1) / kTileRows, (in_features + kGradientColumns - 1) / kGradientColumns,
                         group_panels};
  const int tiles = raster.tiles(), steps = (batch + 63) / 64, warpgroup = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    prefetch_map(map_a);
    prefetch_map(map_b);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 2);
    }
    fence_barrier_init();
    fence_async_shared();
  }
  __syncthreads();
  wait_for_previous();
  allow_next();

  int stage = 0;
  const auto next_stage = [&](u32& parity) {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  };
  if (warpgroup == 0) {
    release_registers<40>();
    if (threadIdx.x != 0) return;
    u32 parity = 1;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      const Tile tile = raster.at(t);
      for (int k = 0; k < steps; ++k) {
        u64* full = &shared.full[stage];
        barrier_wait(&shared.empty[stage], parity);
        barrier_expect(full, sizeof(shared.a[0]) + sizeof(shared.x[0]));
#pragma unroll
        for (int i = 0; i < 2; ++i)
          copy_to_shared(shared.a[stage][i], map_a, full, tile.m * kTileRows + i * 64, k * 64, kEvictNormal);
#pragma unroll
        for (int i = 0; i < kGradientColumns / 64; ++i)
          copy_to_shared(shared.x[stage][i], map_b, full, tile.n * kGradientColumns + i * 64, k * 64, kEvictNormal);
        next_stage(parity);
      }
    }
  } else {
    claim_registers<232>();
    const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    u32 parity = 0;
    float acc[kGradientColumns / 2];
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      for (int k = 0; k < steps; ++k) {
        barrier_wait(&shared.full[stage], parity);
        wgmma_fence();
        const u64 a = across_descriptor(shared.a[stage][consumer]), b = across_descriptor(shared.x[stage]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          Wgmma<T, kGradientColumns>::template run<1, 1>(acc, a + i * kAcrossStep, b + i * kAcrossStep, (k | i) ? 1 : 0);
        wgmma_commit();
        if (k > 0) {
          wgmma_wait<1>();
          if (thread == 0) barrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);
        }
        next_stage(parity);
      }
      wgmma_wait<0>();
      if (thread == 0) barrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);

      // As many columns at a time as there is room for; they leave while the next are on their way, or multiplied.
      constexpr int kBlock = kRowBytes / sizeof(G), kColumns = 4 * kBlock;
      const Tile tile = raster.at(t);
      const int row = warp * 16 + lane / 4;
#pragma unroll
      for (int first = 0; first < kGradientColumns; first += kColumns) {
        if (thread == 0) wait_copies_read();
        sync_threads(1 + consumer, 128);
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
          const float* pairs = &acc[first / 2 + 4 * i];
          stage_pair<G>(shared.staging[consumer][0], row, i, pairs[0], pairs[1]);
          stage_pair<G>(shared.staging[consumer][0], row + 8, i, pairs[2], pairs[3]);
        }
        fence_async_shared();
        sync_threads(1 + consumer, 128);
        if (thread == 0) {
          for (int block = 0; block < 4; ++block)
            copy_to_global(map_out, shared.staging[consumer][block], tile.n * kGradientColumns + first + block * kBlock,
                           tile.m * kTileRows + consumer * 64);
          commit_copies();
        }
      }
    }
    if (thread == 0) wait_copies();
  }
}

}  // namespace gemmnorm
