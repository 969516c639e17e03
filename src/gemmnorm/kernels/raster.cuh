// The tiles of a product: in which order they are worked on, and what happens to them then.
#pragma once
#include "common.cuh"

namespace gemmnorm {

constexpr int kTileRows = 2 * kGroupRows;  // a statistics group for each of two consumer warpgroups

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
