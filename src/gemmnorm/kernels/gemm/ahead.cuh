// Rows of x and the weight that become operands inside the fused GEMM, ahead of the tiles that need them: the launch before
// it leaves rows of later waves of tiles, and of those that it casts the last columns, to two warps of every block, which
// work beside the tensor cores.
#pragma once
#include "memory_bound/cast.cuh"
#include "ptx/hopper.cuh"
#include "gemm/raster.cuh"

namespace gemmnorm {

constexpr int kWorkers = 2;  // warps of a block
constexpr int kBands = 64;   // of rows of x; each has counters

struct RowsAhead {
  u32* ready;               // rows made here: [panels, chunks], then [kBands, chunks]
  int x_rows, weight_rows;  // of which the launch before has made the first chunks
  int batch, in_features, features;
  int chunks;               // of K, that are made one after the other
  int x_begun, weight_begun;  // of these, that the launch before has made of its rows

  // Waits until a chunk of a tile's rows is there, as the thread that will ask TMA for it.
  template <int TM, int TN>
  __device__ __forceinline__ void wait_for(const Raster& raster, Tile tile, int chunk) const {
    const int panel_end = min((tile.n + 1) * TN, features);
    const int panel = panel_end - max(tile.n * TN, chunk < weight_begun ? weight_rows : 0);
    if (panel > 0) wait_until(&ready[tile.n * chunks + chunk], panel);
    const bool waited = wait_for_band<TM>(raster, tile.m * TM / band_rows<TM>(raster), chunk);
    if (panel > 0 || waited) fence_proxy_async_global();
  }
  // The same for a band of x; whether any of it was made here.
  template <int TM>
  __device__ __forceinline__ bool wait_for_band(const Raster& raster, int band, int chunk) const {
    const int rows = band_rows<TM>(raster);
    const int missing = min((band + 1) * rows, batch) - max(band * rows, chunk < x_begun ? x_rows : 0);
    if (missing > 0) wait_until(&ready[(raster.tiles_n + band) * chunks + chunk], missing);
    return missing > 0;
  }

  template <int TM>
  __device__ __forceinline__ static int band_rows(const Raster& raster) {
    return (raster.tiles_m + kBands - 1) / kBands * TM;
  }

  // Says, as a warp, that a chunk of so many rows is there: TMA will read it.
  template <int TM, int TN>
  __device__ __forceinline__ void done(const Raster& raster, bool of_x, int row, int chunk, int rows) const {
    fence_proxy_async_global();
    __syncwarp();
    const int place = of_x ? raster.tiles_n + row / band_rows<TM>(raster) : row / TN;
    if (threadIdx.x % 32 == 0) signal(&ready[place * chunks + chunk], rows);
  }
};

// Operands that are cast, in chunks of kCastColumns. One that is in half precision already has all its rows.
template <class T>
struct CastAhead : RowsAhead {
  using Element = T;
  static constexpr int kStepsOfChunk = kCastColumns * sizeof(T) / kRowBytes;
  const float *x, *weight;  // [batch, in_features], [features, in_features], or null
  T *cast_x, *cast_weight;

  // The warp's share of what is left, eight rows of a chunk at a time: first of the rows that the launch before has begun,
  // which the first tiles of all blocks need, then of as many of x's as those, again and again, then of the weight's.
  template <int TM, int TN>
  __device__ __forceinline__ void cast(const Raster& raster, int worker) const {
    constexpr int kRows = 8;  // of one panel: features are a multiple
    int item = kWorkers * blockIdx.x + worker, first = min(x_begun, weight_begun);
    int x_from = x ? 0 : batch, x_to = x ? x_rows : batch, from = weight ? 0 : features, to = weight ? weight_rows : features;
    for (;;) {
      const int groups_of_x = (x_to - x_from + kRows - 1) / kRows, groups = groups_of_x + (to - from + kRows - 1) / kRows;
      const int items = groups * (chunks - first);
#pragma unroll 1
      for (; item < items; item += kWorkers * gridDim.x) {
        const int chunk = first + item / groups, n = item % groups, column = chunk * kCastColumns;
        const bool of_x = n < groups_of_x;
        const int row = of_x ? x_from + n * kRows : from + (n - groups_of_x) * kRows;
        const int rows = min(kRows, (of_x ? x_to : to) - row), columns = min(kCastColumns, in_features - column);
        const i64 at = static_cast<i64>(row) * in_features + column;
        const float* source = (of_x ? x : weight) + at;
        T* target = (of_x ? cast_x : cast_weight) + at;
#pragma unroll 1
        for (int i = 0; i < rows; ++i, source += in_features, target += in_features)
          if (columns == kCastColumns) cast_chunk(source, target, threadIdx.x % 32);
          else cast_row<T, 32, 4>(source, target, columns, threadIdx.x % 32);
        done<TM, TN>(raster, of_x, row, chunk, rows);
      }
      item -= items;
      first = 0;
      x_from = x_to;
      from = to;
      if (x_to < batch) x_to = min(x_to + x_rows, batch);
      else if (to < features) to = min(to + weight_rows, features);
      else return;
    }
  }
};

}  // namespace gemmnorm
