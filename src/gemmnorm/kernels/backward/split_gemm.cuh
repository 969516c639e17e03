// A product of split operands by itself, for the gradients of a float32 chain (sm_90a): out = A·B, scaled back by A's
// exponents. B lies across K in memory, and so may A; nothing is transposed beforehand.
//
// A persistent block is one warpgroup that feeds a ring of shared-memory stages and two that multiply, 64 of the tile's
// 128 rows each.
#pragma once
#include "ptx/hopper.cuh"
#include "gemm/raster.cuh"
#include "gemm/split_product.cuh"

namespace gemmnorm {

constexpr int kSplitTile = 128;  // rows and columns of the tile

template <int STAGES>
struct SplitShared {
  alignas(1024) unsigned char a[STAGES][2][kSplitTile * 128];  // of each stage high, then low
  alignas(1024) unsigned char b[STAGES][2][kSplitTile * 128];
  u64 full[STAGES], empty[STAGES];
};

template <class Config, class Params>
__device__ __forceinline__ void split_gemm(const Params& p) {
  constexpr int STAGES = Config::kStages, SHARED_BYTES = Config::kSharedBytes;
  constexpr bool A_ACROSS = Config::kTransposeA;
  using Shared = SplitShared<STAGES>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "the planner and SplitShared disagree");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const Raster raster = {(p.rows + kSplitTile - 1) / kSplitTile, (p.columns + kSplitTile - 1) / kSplitTile, p.group_panels};
  const int tiles = raster.tiles(), steps = (p.inner + kSplitColumns - 1) / kSplitColumns;
  const int warpgroup = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(&shared.full[s], 1);
      mbarrier_init(&shared.empty[s], 2);
    }
    fence_mbarrier_init();
    fence_proxy_async_shared();
  }
  __syncthreads();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  int stage = 0;
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    if (threadIdx.x != 0) return;
    u32 parity = 1;
    // Copies the 128 columns from `column` on, of 64 rows of a split matrix: 64 columns at a time, high and low.
    const auto copy_across = [&](unsigned char (&to)[2][kSplitTile * 128], const TensorMap& map, int column, int row) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        tma_load(to[i % 2] + i / 2 * kMnMajorBytes, map, &shared.full[stage], column * 2 + i * 64, row,
                       kEvictNormal);
    };
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      const Tile tile = raster.at(t);
      for (int k = 0; k < steps; ++k) {
        mbarrier_wait(&shared.empty[stage], parity);
        mbarrier_expect_tx(&shared.full[stage], 4 * kSplitTile * 128);
        if (A_ACROSS) {
          copy_across(shared.a[stage], p.map_a, tile.m * kSplitTile, k * 64);
        } else {
#pragma unroll
          for (int plane = 0; plane < 2; ++plane)
            tma_load(shared.a[stage][plane], p.map_a, &shared.full[stage], (2 * k + plane) * 64, tile.m * kSplitTile,
                           kEvictNormal);
        }
        copy_across(shared.b[stage], p.map_b, tile.n * kSplitTile, k * 64);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  } else {
    setmaxnreg_inc<232>();
    const int consumer = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    u32 parity = 0;
    float acc[kSplitTile / 2], part[kSplitTile / 2], cross[kSplitTile / 2];
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
#pragma unroll
      for (int i = 0; i < kSplitTile / 2; ++i) acc[i] = 0.0f;
      for (int k = 0; k < steps; ++k) {
        const auto descriptor_a = [&](int plane) {
          const unsigned char* tile = shared.a[stage][plane] + consumer * 64 * 128;
          return A_ACROSS ? mn_major_descriptor(tile) : k_major_descriptor(tile);
        };
        mbarrier_wait(&shared.full[stage], parity);
        wgmma_fence();
        multiply_stage<kSplitTile, A_ACROSS, 1>(part, cross, descriptor_a(0), descriptor_a(1),
                                                mn_major_descriptor(shared.b[stage][0]),
                                                mn_major_descriptor(shared.b[stage][1]), k == 0);
        wgmma_wait<1>();
#pragma unroll
        for (int i = 0; i < kSplitTile / 2; ++i) acc[i] += part[i];
        if (k > 0 && threadIdx.x % 128 == 0) mbarrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      wgmma_wait<0>();
      if (threadIdx.x % 128 == 0) mbarrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);

      const Tile tile = raster.at(t);
      const int row = tile.m * kSplitTile + consumer * 64 + warp * 16 + lane / 4;
      const int first_column = tile.n * kSplitTile + lane % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (row + 8 * h >= p.rows) continue;
        const PowerOfTwo scale = power_of_two(p.exponents[row + 8 * h]);
        float* to = p.out + static_cast<i64>(row + 8 * h) * p.columns;
#pragma unroll
        for (int i = 0; i < kSplitTile / 8; ++i) {
          const int column = first_column + i * 8;
          const float pair[2] = {times(acc[4 * i + 2 * h] + kLowUnit * cross[4 * i + 2 * h], scale),
                                 times(acc[4 * i + 2 * h + 1] + kLowUnit * cross[4 * i + 2 * h + 1], scale)};
          if (column < p.columns) store<float, 2>(to + column, pair);
        }
      }
    }
  }
}

}  // namespace gemmnorm
