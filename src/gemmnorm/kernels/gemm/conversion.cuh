// Operand conversion beside the main loop: rows of x and the weight that become operands inside the GEMM, ahead of the tiles
// that need them. The launch before converts what the first tiles read; warps 2 and 3 of every producer warpgroup convert the
// rest, and signal it to the producer thread, which waits before it asks TMA for a tile's rows.
#pragma once
#include "gemm/tile_scheduler.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

constexpr int kConversionWarps = 2;  // of a block
constexpr int kBands = 64;           // of rows of x; each has its counters

// All operands are as they are multiplied when the kernel begins.
template <class G, class Params>
struct NoConversion {
  struct Shared {
    __device__ __forceinline__ void init() {}
  };
  static constexpr bool kConverts = false;
  static constexpr int kProducerRegs = G::kSplit ? 40 : 104;

  __device__ __forceinline__ NoConversion(const Params&, const TileScheduler&, u32*) {}
  __device__ __forceinline__ void wait_for(Tile, int) const {}
  __device__ __forceinline__ void convert(Shared&, int) const {}
  __device__ __forceinline__ int counters() const { return 0; }
};

// Which rows are converted here, and their counters: of each panel of the weight and each band of x, by chunk of K.
template <class G, class Params>
struct ConvertedRows {
  static constexpr int TM = G::TM, TN = G::TN;

  const Params& p;
  const TileScheduler& scheduler;
  u32* ready;       // rows that are converted: [panels, chunks], then [kBands, chunks]
  int chunks;       // of K, converted one after the other
  int x_rows, weight_rows;            // of which the launch before has converted the first chunks
  int x_converted, weight_converted;  // how many of them

  __device__ __forceinline__ ConvertedRows(const Params& p_, const TileScheduler& scheduler_, u32* ready_, int chunks_,
                                           int x_converted_, int weight_converted_)
      : p(p_), scheduler(scheduler_), ready(ready_), chunks(chunks_), x_rows(min(p_.x_rows, p_.batch)),
        weight_rows(p_.weight_rows), x_converted(x_converted_), weight_converted(weight_converted_) {}

  __device__ __forceinline__ int counters() const { return (scheduler.tiles_n + kBands) * chunks; }
  __device__ __forceinline__ int band_rows() const { return (scheduler.tiles_m + kBands - 1) / kBands * TM; }

  // Waits until a chunk of a tile's rows is converted, as the thread that asks TMA for it.
  __device__ __forceinline__ void wait_for_chunk(Tile tile, int chunk) const {
    const int panel_end = min((tile.n + 1) * TN, p.features);
    const int panel = panel_end - max(tile.n * TN, chunk < weight_converted ? weight_rows : 0);
    if (panel > 0) wait_until(&ready[tile.n * chunks + chunk], panel);
    const bool waited = wait_for_band(tile.m * TM / band_rows(), chunk);
    if (panel > 0 || waited) fence_proxy_async_global();
  }
  // The same for a band of x; whether any of it is converted here.
  __device__ __forceinline__ bool wait_for_band(int band, int chunk) const {
    const int rows = band_rows();
    const int missing = min((band + 1) * rows, p.batch) - max(band * rows, chunk < x_converted ? x_rows : 0);
    if (missing > 0) wait_until(&ready[(scheduler.tiles_n + band) * chunks + chunk], missing);
    return missing > 0;
  }
  // Signals, as a warp, that a chunk of so many rows from `row` on is converted: TMA will read it.
  __device__ __forceinline__ void signal_chunk(bool of_x, int row, int chunk, int rows) const {
    fence_proxy_async_global();
    __syncwarp();
    const int place = of_x ? scheduler.tiles_n + row / band_rows() : row / TN;
    if (threadIdx.x % 32 == 0) signal(&ready[place * chunks + chunk], rows);
  }
};

}  // namespace gemmnorm
