// What the phases of the Gram kernel share: the parts of the matrix, a block's shared memory, and where the block stands.
#pragma once
#include "gemm/pipeline.cuh"
#include "gemm/tile_scheduler.cuh"
#include "memory_bound/statistics.cuh"

namespace gemmnorm {

constexpr int kGramTile = 128;  // rows and columns of a block's part of G; features in a tile of W·G
constexpr int kGramStep = 64;   // rows of x, or columns of W, in a stage; columns of G in a tile of W·G
constexpr int kGramWarps = 8;   // two warpgroups that multiply 64 rows each; a ninth warp asks TMA for operands
constexpr int kGramAhead = 17;  // slices in flight in a warp: all, where eight warps share out those of 132 blocks

// Parts of G, each with its mirror image: (i, j) for i <= j.
struct GramPart {
  int i, j;

  // Whether some 16 rows by 8 columns of the part are needed: numbers count these. Of the four quarters of a part on the
  // diagonal the lower left one is the mirror image of the upper right one.
  __device__ __forceinline__ bool needs(int rows, int columns) const { return i < j || rows < 4 || columns >= 8; }
  // Whether they are of columns of x: all others are zero.
  __device__ __forceinline__ bool has(int rows, int columns, int in_features) const {
    return i * kGramTile + rows * 16 < in_features && j * kGramTile + columns * 8 < in_features;
  }
};
__device__ __forceinline__ GramPart gram_part(int number, int parts_of_row) {
  int i = 0;
  while (number >= parts_of_row - i) {
    number -= parts_of_row - i;
    ++i;
  }
  return {i, i + number};
}

// 64 columns of 64 rows of x each: columns i are multiplied by columns j. Where x has no more than 64 columns: of twice the rows,
// a warpgroup multiplies one half by itself.
struct GramRows {
  unsigned char i[2][kGramStep * kRowBytes], j[2][kGramStep * kRowBytes];
};
// 64 columns each: of 128 features of W, and of 64 columns of G, which are its rows.
struct GramColumns {
  unsigned char weight[kGramTile * kRowBytes], high[kGramStep * kRowBytes], low[kGramStep * kRowBytes];
};

template <class T, int ROW_STAGES, int COLUMN_STAGES> struct GramShared {
  union {
    alignas(1024) GramRows rows[ROW_STAGES];
    GramColumns columns[COLUMN_STAGES];
  };
  T pivot[2][kGramTile];
  alignas(16) float4 merged[kGramWarps][32];
  float of_column[2][3][kGramStep];  // of x: pivot, sum, and the diagonal of G; of this tile and of the next
  bool last;                         // of all tiles of these features
  Pipeline<ROW_STAGES> row_ring;
  Pipeline<COLUMN_STAGES> column_ring;
};

// All blocks of the grid wait for each other, the turn-th time. What they wrote may then be read by TMA too.
__device__ __forceinline__ void grid_sync(u32* arrived, u32 turn) {
  fence_proxy_async_global();
  __syncthreads();
  if (threadIdx.x == 0) { signal(arrived, 1); wait_until(arrived, turn * gridDim.x); }
  __syncthreads();
  fence_proxy_async_global();
}

template <class Config, class Params> struct GramBlock {
  using T = typename Config::T;
  static constexpr int kRowStages = Config::kRowStages, kColumnStages = Config::kColumnStages;
  static constexpr bool kNarrow = Config::kNarrow;  // x has no more than 64 columns: the warpgroups share out rows of a stage
  static constexpr int kRows = kNarrow ? 2 * kGramStep : kGramStep;      // of x in a stage
  static constexpr int kColumns = kNarrow ? kGramStep : kGramTile;      // of a part that are multiplied
  using Shared = GramShared<T, kRowStages, kColumnStages>;
  const Params& p;
  Shared& shared;
  int warp, lane, warpgroup, row, quarter;  // row: of the warpgroup's 64, and 8 rows on; quarter: pair of columns of 8
  int parts_of_row, parts, slices, row_steps, pitch;  // row_steps: stages of x; pitch: columns of G in memory
  int row_tiles, column_tiles;                        // of W·G

  __device__ __forceinline__ GramBlock(const Params& p_, Shared& shared_)
      : p(p_), shared(shared_), warp(threadIdx.x / 32), lane(threadIdx.x % 32), warpgroup(warp / 4) {
    row = warp % 4 * 16 + lane / 4; quarter = lane % 4;
    parts_of_row = (p.in_features + kGramTile - 1) / kGramTile;
    parts = parts_of_row * (parts_of_row + 1) / 2;
    row_steps = (p.batch + kRows - 1) / kRows;
    const int most = static_cast<int>(gridDim.x) / parts, steps_of_slice = (row_steps + most - 1) / most;
    slices = (row_steps + steps_of_slice - 1) / steps_of_slice;  // no more partial matrices than that takes
    pitch = parts_of_row * kGramTile;
    row_tiles = (p.features + kGramTile - 1) / kGramTile;
    column_tiles = (p.in_features + kGramStep - 1) / kGramStep;
  }

  static constexpr int kVectors = kGramTile * kGramTile / 4;  // of four elements, in a part
  static constexpr int kItemColumns = kGramTile / 8, kItems = kVectors / 32;  // of 16 rows by 8 columns
  __device__ __forceinline__ static float4 sum_of(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }
  // Of the four lanes that have the same rows.
  __device__ __forceinline__ static float sum_of_quarters(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }
};

}  // namespace gemmnorm
