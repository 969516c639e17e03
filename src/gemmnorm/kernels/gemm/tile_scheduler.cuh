// The tiles of a product: how a tile is shared out among the consumer warpgroups, and in which order tiles are worked on.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

constexpr int kRowBytes = 128;     // of K in one stage: one row of the 128-byte swizzle
constexpr int kGemmThreads = 384;  // one producer warpgroup, two consumer warpgroups

struct Tile {
  int m, n;
};

// A tile of TM rows × TN features. The two consumers share out its rows (x · Wᵀ), or, of a tile of 128 features, the features
// (W · xᵀ, swap-AB), 64 each.
template <int TM, int TN>
struct TileShape {
  static constexpr bool kSwapAB = TN == 128;
  static constexpr int kWidth = kSwapAB ? TM : TN;             // N of the wgmma instruction; its M is 64
  static constexpr int kMeanRows = kSwapAB ? TM : kGroupRows;  // rows of one partial mean and M2
  static constexpr int kParts = kWidth / 64;                   // 64 × 64 parts of a consumer's accumulator tile
  static constexpr int kStagingBytes = (TM < 128 ? 128 : TM) * TN;  // of a consumer
  // A consumer's accumulator tile as V passes through its staging buffer in so many store passes, of whole parts each.
  __device__ static constexpr int store_passes(int bytes) {
    int passes = 1;
    while (passes < kParts && (kParts % passes || kWidth * 64 * bytes > passes * kStagingBytes)) ++passes;
    return passes;
  }
  template <class V>
  static constexpr int kStorePasses = store_passes(sizeof(V));

  // The first row and the first feature of a consumer's part.
  __device__ __forceinline__ static int row(Tile tile, int consumer, int part) {
    return tile.m * TM + (kSwapAB ? part : consumer) * 64;
  }
  __device__ __forceinline__ static int column(Tile tile, int consumer, int part) {
    return tile.n * TN + (kSwapAB ? consumer : part) * 64;
  }
};

// A persistent block takes tiles blockIdx.x, blockIdx.x + gridDim.x, … Their order: `group_panels` panels (columns of tiles)
// at a time, along them first. Panels are then complete early, while their weights and a band of x stay in the L2.
struct TileScheduler {
  int tiles_m, tiles_n, group_panels;

  __device__ __forceinline__ int tiles() const { return tiles_m * tiles_n; }
  __device__ __forceinline__ Tile at(int t) const {
    const int group = t / (group_panels * tiles_m), first = group * group_panels;
    const int panels = min(group_panels, tiles_n - first), rest = t - first * tiles_m;
    return {rest / panels, first + rest % panels};
  }
  // Whether any tile of panel n has a number below t: its first tile has the lowest.
  __device__ __forceinline__ bool begins_before(int n, int t) const {
    const int first = n / group_panels * group_panels;
    return first * tiles_m + (n - first) < t;
  }
};

template <int TM, int TN, class Params>
__device__ __forceinline__ TileScheduler tile_scheduler(const Params& p) {
  return {(p.batch + TM - 1) / TM, (p.features + TN - 1) / TN, p.group_panels};
}

}  // namespace gemmnorm
