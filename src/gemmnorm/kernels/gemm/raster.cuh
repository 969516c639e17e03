// The tiles of a product: in which order they are worked on, and what happens to them then.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

// What happens to a tile once it is multiplied.
enum class Finish {
  kEvaluate,     // y = φ(slope·a + shift) with the running statistics, at once
  kStatistics,   // product and group statistics only; other kernels do the rest
  kOneBlock,     // training, the batch fits one tile: all of it within the block
  kWholePanels,  // training, the tiles of a panel are worked on at once: each waits for the others in shared memory, while
                 // the next is multiplied, or in registers (the last of every block; all, where that is better)
  kPersistent,   // training, any size: tiles are stored and normalised later, but for the last of every block
};

constexpr int kRowBytes = 128;     // of K in one stage: one swizzle row
constexpr int kGemmThreads = 384;  // a warpgroup that feeds and two that multiply

struct Tile {
  int m, n;
};

// A tile of TM × TN. Two consumers share out its rows, or, of a wide one, its columns (tile_by_features.cuh).
template <int TM, int TN>
struct TileShape {
  static constexpr bool kByFeatures = TN == 128;
  static constexpr int kWidth = kByFeatures ? TM : TN;  // of a consumer's 64 rows or columns
  static constexpr int kMeanRows = kByFeatures ? TM : kGroupRows;  // whose mean is taken off, and whose M2 is taken
  static constexpr int kParts = kWidth / 64;  // of what a consumer holds, 64 × 64 each
  static constexpr int kStagingBytes = (TM < 128 ? 128 : TM) * TN;  // of a consumer, on their way to memory
  // What it holds leaves as V in so many trips, each of some of its parts.
  template <class V>
  static constexpr int kTrips = kWidth * 64 * sizeof(V) > kStagingBytes ? kWidth * 64 * sizeof(V) / kStagingBytes : 1;

  // Where a consumer's part begins.
  __device__ __forceinline__ static int row(Tile tile, int consumer, int part) {
    return tile.m * TM + (kByFeatures ? part : consumer) * 64;
  }
  __device__ __forceinline__ static int column(Tile tile, int consumer, int part) {
    return tile.n * TN + (kByFeatures ? consumer : part) * 64;
  }
};

// Tiles in the order of their number: `group_panels` panels at a time, along them first, so that panels are complete
// early while their weights and a band of x stay in the L2.
struct Raster {
  int tiles_m, tiles_n, group_panels;

  __device__ __forceinline__ int tiles() const { return tiles_m * tiles_n; }
  // Whether any tile of panel n has a number below `stored`: its first has the lowest.
  __device__ __forceinline__ bool has_stored(int n, int stored) const {
    const int first = n / group_panels * group_panels;
    return first * tiles_m + (n - first) < stored;
  }
  __device__ __forceinline__ Tile at(int t) const {
    const int group = t / (group_panels * tiles_m), first = group * group_panels;
    const int panels = min(group_panels, tiles_n - first), rest = t - first * tiles_m;
    return {rest / panels, first + rest % panels};
  }
};

}  // namespace gemmnorm
