// Splitting rows of x and the weight inside the fused GEMM, ahead of the tiles that need them: the pass before it splits
// only what the first wave of tiles reads, and two warps of every block do the rest while the tensor cores work.
#pragma once
#include "ptx/hopper.cuh"
#include "raster.cuh"
#include "split.cuh"

namespace gemmnorm {

constexpr int kPieceColumns = 512;  // of a row, that the copy engine brings at a time
constexpr int kPieces = 6;          // in flight, for each warp
constexpr int kSplitters = 2;       // warps of a block
constexpr int kBands = 64;          // of rows of x; each has a counter

struct PieceRing {
  alignas(128) float pieces[kPieces][kPieceColumns];
  u64 arrived[kPieces];
};
template <bool AHEAD>
struct PieceRings {};
template <>
struct PieceRings<true> {
  PieceRing rings[kSplitters];
};

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
  static constexpr int kAtOnce = 2, kParts = kPieceColumns / 128 / kAtOnce;

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

  // Where the next piece to ask for lies. A row is visited twice, for its exponent and to be split.
  struct Cursor {
    int row, first;  // of the rows that are left: x's, then the weight's; and the piece's first column
    bool again;
    const float* source;
  };
  __device__ __forceinline__ void begin_row(Cursor& c) const {
    const int left_of_x = batch - x_rows;
    c.source = c.row < left_of_x ? x + static_cast<i64>(x_rows + c.row) * in_features
                                 : weight + static_cast<i64>(weight_rows + c.row - left_of_x) * in_features;
  }
  // Asks the copy engine for a piece, as one thread, and goes on to the next.
  __device__ __forceinline__ void request(PieceRing& ring, int slot, Cursor& c, int left, int stride) const {
    if (c.row >= left) return;
    const u32 bytes = min(kPieceColumns, in_features - c.first) * 4;
    barrier_expect(&ring.arrived[slot], bytes);
    copy_bytes_to_shared(ring.pieces[slot], c.source + c.first, bytes, &ring.arrived[slot]);
    c.first += kPieceColumns;
    if (c.first < in_features) return;
    c.first = 0;
    c.again = !c.again;
    if (c.again) return;
    c.row += stride;
    begin_row(c);
  }

  // Part of the lane's share of a piece, zeros beyond the row's end. No load waits for a condition.
  __device__ __forceinline__ void read_piece(const float* piece, int first, int part, Vec<float, 4> (&v)[kAtOnce]) const {
    const int column = (part * kAtOnce * 32 + threadIdx.x % 32) * 4;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) v[i] = load<float, 4>(piece + column + i * 128);
    if (first + kPieceColumns > in_features) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + column + i * 128 >= in_features) v[i] = {};
    }
  }

  // The warp's share of the rows that are left: every so many-th. The copy engine runs kPieces ahead, into the next row.
  template <int BN>
  __device__ __forceinline__ void split(PieceRing& ring, const Raster& raster, int splitter) const {
    const int lane = threadIdx.x % 32, stride = kSplitters * gridDim.x;
    const int left_of_x = batch - x_rows, left = left_of_x + features - weight_rows;
    Cursor cursor = {static_cast<int>(kSplitters * blockIdx.x) + splitter, 0, false, nullptr};
    int slot = 0;
    u32 parity = 0;
    if (lane == 0) {
      begin_row(cursor);
      for (int s = 0; s < kPieces; ++s) request(ring, s, cursor, left, stride);
    }
    const auto next_slot = [&] {
      __syncwarp();  // everybody has read the piece
      if (lane == 0) request(ring, slot, cursor, left, stride);
      if (++slot == kPieces) {
        slot = 0;
        parity ^= 1;
      }
    };
#pragma unroll 1
    for (int n = kSplitters * blockIdx.x + splitter; n < left; n += stride) {
      const bool of_x = n < left_of_x;
      const int row = of_x ? x_rows + n : weight_rows + n - left_of_x;
      u32 largest[4] = {};
      float total[4] = {};
#pragma unroll 1
      for (int first = 0; first < in_features; first += kPieceColumns) {
        barrier_wait(&ring.arrived[slot], parity);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          Vec<float, 4> v[kAtOnce];
          read_piece(ring.pieces[slot], first, part, v);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
            for (int q = 0; q < 4; ++q) {
              largest[q] = max(largest[q], __float_as_uint(v[i].at[q]) & 0x7FFFFFFFu);
              total[q] += fabsf(v[i].at[q]);
            }
        }
        next_slot();
      }
      u32 bits = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
      float sum = (total[0] + total[1]) + (total[2] + total[3]);
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
      for (int first = 0; first < in_features; first += kPieceColumns) {
        barrier_wait(&ring.arrived[slot], parity);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          Vec<float, 4> v[kAtOnce];
          read_piece(ring.pieces[slot], first, part, v);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const int c = first + ((part * kAtOnce + i) * 32 + lane) * 4;
            const float scaled[4] = {times(v[i].at[0], scale), times(v[i].at[1], scale), times(v[i].at[2], scale),
                                     times(v[i].at[3], scale)};
            if (c < padded) store_split(target, c, scaled);
          }
        }
        next_slot();
      }
      fence_async_global();  // the copy engine will read what is written here
      __syncwarp();
      if (lane == 0) add_release(&ready[of_x ? raster.tiles_n + row / band_rows(raster) : row / BN], 1);
    }
  }
};

}  // namespace gemmnorm
