// The tiles of a product: how a tile is shared out among the consumer warpgroups, and in which order tiles are worked on.
#pragma once
#include "common/common.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

constexpr int kRowBytes = 128;     // of K in one stage: one row of the 128-byte swizzle
constexpr int kGemmThreads = 384;  // one producer warpgroup, two consumer warpgroups

// Where 16 bytes of a swizzled row lie.
__device__ __forceinline__ int swizzled_word(int row, int word) { return row * kRowBytes + ((word ^ row % 8) * 16); }

struct Tile {
  int m, n;
};

// A tile of TM rows × TN features. The two consumers share out its rows, 64 each (x · Wᵀ); or it is multiplied as W · xᵀ
// (swap-AB), and they share out 128 features, 64 each, or, of 64 features, the rows.
//
// Where a row of y is half a sector more than whole sectors, every other row begins in the middle of one, and tiles side by side
// would write a half each of the sectors at their border, which memory takes at half its speed. A tile of 136 columns has the
// last eight of the tile before too: of rows that begin with a sector it stores all but the first eight, of the others all
// but the last (staging.cuh).
template <int TM, int TN>
struct TileShape {
  static constexpr int kOverlap = TN % 16, kStep = TN - kOverlap;  // columns of two tiles; from one tile to the next
  static constexpr bool kSharesFeatures = TN == 128, kSwapAB = kSharesFeatures || (TM == 256 && kOverlap == 0);
  static constexpr int kRows = kSharesFeatures ? TM : TM / 2;     // of a consumer
  static constexpr int kWidth = kSwapAB ? kRows : TN;             // N of the wgmma instruction; its M is 64
  static constexpr int kBlocks = kSwapAB ? 1 : kRows / 64;        // of 64 rows, an instruction each
  static constexpr int kMeanRows = kSwapAB ? kRows : kGroupRows;  // rows of one partial mean and M2
  static constexpr int kParts = kWidth / 64;                   // 64 × 64 parts of a consumer's accumulator tile
  static constexpr int kStagingBytes = (TM < 128 ? 128 : TM) * kStep;  // of a consumer
  // A consumer's accumulator tile as V passes through its staging buffer in so many store passes, of whole parts each.
  __device__ static constexpr int store_passes(int bytes) {
    int passes = 1;
    while (passes < kParts && (kParts % passes || kBlocks * (kWidth - kOverlap) * 64 * bytes > passes * kStagingBytes)) ++passes;
    return passes;
  }
  template <class V>
  static constexpr int kStorePasses = store_passes(sizeof(V));

  // The first row and the first feature of a consumer's accumulator tile, and of a part of it.
  __device__ __forceinline__ static int first_row(Tile tile, int consumer) {
    return tile.m * TM + (kSharesFeatures ? 0 : consumer * kRows);
  }
  __device__ __forceinline__ static int own_feature(int consumer) { return kSharesFeatures ? consumer * 64 : 0; }  // in the tile
  __device__ __forceinline__ static int first_feature(Tile tile, int consumer) {
    return tile.n * kStep - kOverlap + own_feature(consumer);
  }
  __device__ __forceinline__ static int row(Tile tile, int consumer, int part) {
    return first_row(tile, consumer) + (kSwapAB ? part * 64 : 0);
  }
  __device__ __forceinline__ static int column(Tile tile, int consumer, int part) {
    return first_feature(tile, consumer) + (kSwapAB ? 0 : part * 64);
  }
};

// The order of a product's tiles: `group_panels` panels (columns of tiles) at a time, along them first. Panels are then
// complete early, while their weights and a band of x stay in the L2. Neighbouring blocks that share tiles of x have panels
// side by side: their number divides both numbers of panels, of which the last may have no feature.
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

template <int TM, int TN, int SHARING, class Params>
__device__ __forceinline__ TileScheduler tile_scheduler(const Params& p) {
  constexpr int kFeatures = TileShape<TM, TN>::kStep * SHARING;
  return {(p.batch + TM - 1) / TM, (p.features + kFeatures - 1) / kFeatures * SHARING, p.group_panels};
}

// The tiles of a persistent block, for all its roles: the producer says which is next, since to find a tile's place by its
// number takes three divisions. Past the last there is a number beyond all tiles. A slot is written again when kSlots more are
// there: no role is behind by so many, since the producer is ahead of it by the ring's stages and four tiles at most.
struct BlockTiles {
  static constexpr int kSlots = 16;
  int number[kSlots];
  Tile tile[kSlots];
  u64 known[kSlots];

  __device__ __forceinline__ void init() {
    for (int s = 0; s < kSlots; ++s) mbarrier_init(&known[s], 1);
  }
  __device__ __forceinline__ void put(int i, int t, Tile found) {
    number[i % kSlots] = t;
    tile[i % kSlots] = found;
    mbarrier_arrive(&known[i % kSlots]);
  }
};
// How a role goes through them.
struct TileWalk {
  BlockTiles& tiles;
  int t, i = 0;

  __device__ __forceinline__ explicit TileWalk(BlockTiles& tiles_) : tiles(tiles_) { wait(); }
  __device__ __forceinline__ void advance() {
    ++i;
    wait();
  }
  __device__ __forceinline__ Tile tile() const { return tiles.tile[i % BlockTiles::kSlots]; }
  __device__ __forceinline__ void wait() {
    mbarrier_wait(&tiles.known[i % BlockTiles::kSlots], i / BlockTiles::kSlots % 2);
    t = tiles.number[i % BlockTiles::kSlots];
  }
};

// Tiles are blockIdx.x, blockIdx.x + gridDim.x and so on; or blockIdx.x and those that the block takes as it becomes free. All
// blocks then work on neighbouring tiles at any time, however unevenly memory serves them, and what neighbours write to the same
// lines of y meets in the L2.
//
// One thread takes the block's next tile: it draws a number, asks for the loads of the tile at hand while the number is on its
// way, and has the tile by it. Each of `tiles` tiles is followed by one number; the last of these leaves the counter zero.
__device__ __forceinline__ u32 draw_number(u32* counter) { return atomicAdd(counter, 1u); }
__device__ __forceinline__ int drawn_tile(u32* counter, u32 number, int tiles) {
  if (number == static_cast<u32>(tiles - 1)) *counter = 0;
  return static_cast<int>(gridDim.x + number);
}

}  // namespace gemmnorm
