// How a cluster shares out a panel of features, and sums over the rows of a block.
#pragma once
#include "common/column_sums.cuh"
#include "gemm/features.cuh"

namespace gemmnorm {

constexpr int kTileRows = 2 * kGroupRows;

// How the blocks of a cluster share out a panel of BN columns. The unit is what wgmma leaves in a thread of 8 columns, a
// float4: columns c and c + 1 of rows r and r + 8.
template <int BN, int SPLITS>
struct PanelShare {
  static constexpr int kColumns = BN / SPLITS;                     // that a block finishes
  static constexpr int kAcross = kColumns < 8 ? kColumns / 2 : 4;  // lanes along them
  static constexpr int kUnits = kColumns < 8 ? 1 : kColumns / 8;   // of a thread
  static constexpr int kFinishers = kTileRows / 2 * kAcross;       // threads
  static constexpr int kWarps = kFinishers / 32;
  static_assert(kColumns >= 4 && kColumns <= 32, "a lane of the copying warp finishes a column");
};

template <class S>
using UnitSums = float4[S::kWarps][S::kAcross][S::kUnits];  // of a warp's rows: Σ of both columns, Σ of their squares

// Sums of a thread's deviations and their squares over the warp's rows.
template <class S>
__device__ __forceinline__ void sum_units(const float4 (&d)[S::kUnits], UnitSums<S>& sums) {
  float v[4 * S::kUnits];
#pragma unroll
  for (int q = 0; q < S::kUnits; ++q) {
    v[4 * q] = d[q].x + d[q].z;
    v[4 * q + 1] = d[q].y + d[q].w;
    v[4 * q + 2] = d[q].x * d[q].x + d[q].z * d[q].z;
    v[4 * q + 3] = d[q].y * d[q].y + d[q].w * d[q].w;
  }
  fold_lanes<4 * S::kUnits, S::kAcross>(v, &sums[threadIdx.x / 32][threadIdx.x % S::kAcross][0].x);
}

// What the sums say of one column.
struct ColumnSums {
  float first, second;  // of the tile's deviations from its centre, a value of its own, in both statistics groups
  float offset;         // of the first tile's centre from this tile's
  float sum, squares;   // of all rows' deviations from the first tile's centre

  // The mean of the deviations from the tile's centre, or what it makes of that centre.
  __device__ __forceinline__ float mean(float share, float centre = 0.0f) const { return fmaf(sum, share, centre + offset); }
  __device__ __forceinline__ float m2(float share) const { return fmaf(-sum, sum * share, squares); }
  __device__ __forceinline__ void take_all(float4 v) { offset = v.x, sum = v.y, squares = v.z; }
};

// Where the batch has several tiles: what each says of its rows, (centre, Σ of deviations from it, Σ of their squares), and
// what follows for all rows, ColumnSums' (offset, sum, squares); of both sums that are taken.
template <int TILES, int COLUMNS>
struct TileSums {
  float4 of[2][TILES][COLUMNS], all[2][COLUMNS];
  u64 arrived[2];

  __device__ __forceinline__ void init() {
#pragma unroll
    for (u64& barrier : arrived) {
      mbarrier_init(&barrier, 1);
      mbarrier_expect_tx(&barrier, sizeof(of[0]));
    }
  }
  __device__ __forceinline__ float4 add_up(int sums, int column, int tile, int batch) const {
    const float centre = of[sums][0][column].x;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const float4 v = of[sums][t][column];
      const float by = v.x - centre, added = min(batch - t * kTileRows, kTileRows) * by;
      sum += v.y + added;
      squares += v.z + by * (v.y + v.y + added);
    }
    return make_float4(centre - of[sums][tile][column].x, sum, squares, 0.0f);
  }
};
template <int COLUMNS>
struct TileSums<1, COLUMNS> {
  __device__ __forceinline__ void init() {}
};

// Both columns of a unit, in this tile.
template <class S>
__device__ __forceinline__ void sums_of_unit(const UnitSums<S>& sums, int pair, int unit, ColumnSums& left,
                                             ColumnSums& right) {
  float4 group[2];
#pragma unroll
  for (int w = 0; w < S::kWarps; ++w) {
    const float4 part = sums[w][pair][unit];
    float4& to = group[2 * w / S::kWarps];
    to = w % (S::kWarps / 2) ? make_float4(to.x + part.x, to.y + part.y, to.z + part.z, to.w + part.w) : part;
  }
  left = {group[0].x, group[1].x, 0.0f, group[0].x + group[1].x, group[0].z + group[1].z};
  right = {group[0].y, group[1].y, 0.0f, group[0].y + group[1].y, group[0].w + group[1].w};
}

}  // namespace gemmnorm
