// Splitting rows of x and the weight inside the fused GEMM, ahead of the tiles that need them: the pass before it splits
// only what the first wave of tiles reads, and one warp of every block does the rest while the tensor cores work.
#pragma once
#include "ptx/hopper.cuh"
#include "raster.cuh"
#include "split.cuh"

namespace gemmnorm {

constexpr int kPieceColumns = 512;  // of a row, that the copy engine brings at a time
constexpr int kPieces = 8;          // in flight
constexpr int kBands = 64;          // of rows of x; each has a counter

struct PieceRing {
  alignas(128) float pieces[kPieces][kPieceColumns];
  u64 arrived[kPieces];
};
struct NoRing {};
template <bool AHEAD>
struct RingOf : NoRing {};
template <>
struct RingOf<true> : PieceRing {};

// The operands, and how far they are split already.
struct Ahead {
  const float *x, *weight;           // [batch, in_features], [features, in_features]
  half *split_x, *split_weight;      // as split_rows leaves them
  int *x_exponents, *weight_exponents;
  float *weight_largest, *weight_total;
  u32* most;
  u32* ready;                        // rows split here: [panels], then [kBands]
  int x_rows, weight_rows;           // split by the pass before
  int batch, in_features, features;

  // Waits until the rows of a tile are split, as the thread that will ask the copy engine for them.
  template <int BN>
  __device__ __forceinline__ void wait_for(const Raster& raster, Tile tile) const {
    const int panel_end = min((tile.n + 1) * BN, features), panel = panel_end - max(tile.n * BN, weight_rows);
    const int rows = band_rows(raster), band = tile.m * kTileRows / rows;
    const int missing = min((band + 1) * rows, batch) - max(band * rows, x_rows);
    if (panel > 0) wait_until(&ready[tile.n], panel);
    if (missing > 0) wait_until(&ready[raster.tiles_n + band], missing);
    if (panel > 0 || missing > 0) fence_async_global();
  }

  __device__ __forceinline__ static int band_rows(const Raster& raster) {
    return (raster.tiles_m + kBands - 1) / kBands * kTileRows;
  }

  // The n-th row that this block splits, counted from the first that is left: x's, then the weight's.
  __device__ __forceinline__ static int row_at(int n) { return static_cast<int>(blockIdx.x + n * gridDim.x); }

  // Asks the copy engine for a piece. A row is visited twice, for its exponent and to be split.
  __device__ __forceinline__ void request(PieceRing& ring, int visit, int of_row) const {
    const int row = row_at(visit / (2 * of_row)), first = visit % of_row * kPieceColumns, left_of_x = batch - x_rows;
    const float* source = row < left_of_x ? x + static_cast<i64>(x_rows + row) * in_features
                                          : weight + static_cast<i64>(weight_rows + row - left_of_x) * in_features;
    const u32 bytes = min(kPieceColumns, in_features - first) * 4;
    u64* arrived = &ring.arrived[visit % kPieces];
    barrier_expect(arrived, bytes);
    copy_bytes_to_shared(ring.pieces[visit % kPieces], source + first, bytes, arrived);
  }

  // Calls `use(column, four elements)` for the lane's share of the next of `visits` pieces, asks for the one kPieces later.
  template <class Use>
  __device__ __forceinline__ void next_piece(PieceRing& ring, int& visit, int visits, int of_row, const Use& use) const {
    const int lane = threadIdx.x % 32, first = visit % of_row * kPieceColumns;
    const float* piece = ring.pieces[visit % kPieces];
    barrier_wait(&ring.arrived[visit % kPieces], visit / kPieces % 2);
#pragma unroll
    for (int i = 0; i < kPieceColumns / 128; ++i) {
      const int c = (i * 32 + lane) * 4;
      use(first + c, first + c < in_features ? load<float, 4>(piece + c) : Vec<float, 4>{});
    }
    __syncwarp();
    if (lane == 0 && visit + kPieces < visits) request(ring, visit + kPieces, of_row);
    ++visit;
  }

  // One warp's share of the rows that are left: every gridDim-th. The copy engine runs kPieces ahead, into the next row.
  template <int BN>
  __device__ __forceinline__ void split(PieceRing& ring, const Raster& raster) const {
    const int lane = threadIdx.x % 32, block = blockIdx.x, blocks = gridDim.x;
    const int left_of_x = batch - x_rows, left = left_of_x + features - weight_rows;
    const int of_row = (in_features + kPieceColumns - 1) / kPieceColumns;
    const int count = block < left ? (left - 1 - block) / blocks + 1 : 0, visits = count * 2 * of_row;
    if (lane == 0)
      for (int v = 0; v < min(kPieces, visits); ++v) request(ring, v, of_row);
    int visit = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const bool of_x = row_at(n) < left_of_x;
      const int row = of_x ? x_rows + row_at(n) : weight_rows + row_at(n) - left_of_x;
      u32 bits = 0;
      float sum = 0.0f;
#pragma unroll 1
      for (int p = 0; p < of_row; ++p)
        next_piece(ring, visit, visits, of_row, [&](int, const Vec<float, 4>& v) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            bits = max(bits, __float_as_uint(v.at[i]) & 0x7FFFFFFFu);
            sum += fabsf(v.at[i]);
          }
        });
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) {
        bits = max(bits, __shfl_xor_sync(~0u, bits, bit));
        sum += __shfl_xor_sync(~0u, sum, bit);
      }
      const int exponent = row_exponent(bits);
      if (lane == 0) {
        (of_x ? x_exponents : weight_exponents)[row] = exponent;
        if (!of_x) {
          weight_largest[row] = __uint_as_float(bits);
          weight_total[row] = sum;
        } else {
          atomicMax(&most[0], bits);
          atomicMax(&most[1], __float_as_uint(sum) & 0x7FFFFFFFu);
        }
      }
      const int padded = (in_features + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
      half* target = (of_x ? split_x : split_weight) + static_cast<i64>(row) * 2 * padded;
      const PowerOfTwo scale = power_of_two(-exponent);
#pragma unroll 1
      for (int p = 0; p < of_row; ++p)
        next_piece(ring, visit, visits, of_row, [&](int c, const Vec<float, 4>& v) {
          const float scaled[4] = {times(v.at[0], scale), times(v.at[1], scale), times(v.at[2], scale),
                                   times(v.at[3], scale)};
          if (c < padded) store_split(target, c, scaled);
        });
      fence_async_global();  // the copy engine will read what is written here
      __syncwarp();
      if (lane == 0) add_release(&ready[of_x ? raster.tiles_n + row / band_rows(raster) : row / BN], 1);
    }
  }
};

}  // namespace gemmnorm
