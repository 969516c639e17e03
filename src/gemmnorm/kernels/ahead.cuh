// Rows of x and the weight that become operands inside the fused GEMM, ahead of the tiles that need them: the launch before
// it leaves rows of later waves of tiles to two warps of every block, which work beside the tensor cores.
#pragma once
#include "cast.cuh"
#include "ptx/hopper.cuh"
#include "raster.cuh"

namespace gemmnorm {

constexpr int kWorkers = 2;  // warps of a block
constexpr int kBands = 64;   // of rows of x; each has a counter

struct RowsAhead {
  u32* ready;               // rows made here: [panels], then [kBands]
  int x_rows, weight_rows;  // made by the launch before
  int batch, in_features, features;

  // Waits until the rows of a tile are there, as the thread that will ask the copy engine for them.
  template <int TM, int TN>
  __device__ __forceinline__ void wait_for(const Raster& raster, Tile tile) const {
    const int panel_end = min((tile.n + 1) * TN, features), panel = panel_end - max(tile.n * TN, weight_rows);
    if (panel > 0) wait_until(&ready[tile.n], panel);
    const bool waited = wait_for_band<TM>(raster, tile.m * TM / band_rows<TM>(raster));
    if (panel > 0 || waited) fence_async_global();
  }
  // The same for a band of x; whether any of it was made here.
  template <int TM>
  __device__ __forceinline__ bool wait_for_band(const Raster& raster, int band) const {
    const int rows = band_rows<TM>(raster), missing = min((band + 1) * rows, batch) - max(band * rows, x_rows);
    if (missing > 0) wait_until(&ready[raster.tiles_n + band], missing);
    return missing > 0;
  }

  template <int TM>
  __device__ __forceinline__ static int band_rows(const Raster& raster) {
    return (raster.tiles_m + kBands - 1) / kBands * TM;
  }

  // Says, as a warp, that a row is there: the copy engine will read it.
  template <int TM, int TN>
  __device__ __forceinline__ void done(const Raster& raster, bool of_x, int row) const {
    fence_async_global();
    __syncwarp();
    if (threadIdx.x % 32 == 0) add_release(&ready[of_x ? raster.tiles_n + row / band_rows<TM>(raster) : row / TN], 1);
  }
};

// Operands that are cast. One that is in half precision already has all its rows.
template <class T>
struct CastAhead : RowsAhead {
  using Element = T;
  const float *x, *weight;  // [batch, in_features], [features, in_features], or null
  T *cast_x, *cast_weight;

  // The warp's share of the rows that are left, x's before the weight's: every so many-th.
  template <int TM, int TN>
  __device__ __forceinline__ void cast(const Raster& raster, int worker) const {
    const int left_of_x = batch - x_rows, left = left_of_x + features - weight_rows;
#pragma unroll 1
    for (int n = kWorkers * blockIdx.x + worker; n < left; n += kWorkers * gridDim.x) {
      const bool of_x = n < left_of_x;
      const int row = of_x ? x_rows + n : weight_rows + n - left_of_x;
      const i64 first = static_cast<i64>(row) * in_features;
      cast_row<T, 32, 16>((of_x ? x : weight) + first, (of_x ? cast_x : cast_weight) + first, in_features,
                          threadIdx.x % 32);
      done<TM, TN>(raster, of_x, row);
    }
  }
};

}  // namespace gemmnorm
