// Tiles that wait for the rest of their panel in shared memory: all rows of a panel are worked on by one wave of blocks, so
// the wait is short, and nothing but the result (and the product where it is kept) goes to memory.
#pragma once
#include "staging.cuh"

namespace gemmnorm {

// One warp normalises a staged group: y = φ(slope·(a' + (group mean - mean)) + shift), a' as staged. A y of the product's
// size takes its place and leaves by the copy engine.
template <class T, class Y, int BN, class Activation, class L, class R>
__device__ __forceinline__ void normalize_staged(const Features<L, R>& f, unsigned char* staging, const TensorMap& map_y,
                                                 Y* y, int group, int first_column) {
  constexpr int N = 16 / sizeof(T), kChunks = kRowBytes / 16;
  const int lane = threadIdx.x % 32, chunk = lane % kChunks, rows = f.rows(group);
#pragma unroll 1
  for (int part = 0; part < BN / 64; ++part) {
    unsigned char* of_part = staging + part * kGroupRows * kRowBytes;
    const int column = first_column + part * 64 + chunk * N;
    if (column < f.features) {
      float slope[N], shift[N];
      {
        float mean[N], own[N];
        load_features(f.merged_slope + column, slope);
        load_features(f.merged_shift + column, shift);
        load_features(f.mean + column, mean);
        load_features(f.group_mean + static_cast<i64>(group) * f.features + column, own);
#pragma unroll
        for (int i = 0; i < N; ++i) shift[i] += slope[i] * (own[i] - mean[i]);
      }
#pragma unroll 4
      for (int row = lane / kChunks; row < rows; row += 32 / kChunks) {
        unsigned char* at = of_part + row * kRowBytes + ((chunk ^ row) % 8) * 16;
        const Vec<T, N> a = *reinterpret_cast<const Vec<T, N>*>(at);
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = Activation::value(slope[i] * to_float(a.at[i]) + shift[i]);
        if constexpr (sizeof(Y) == sizeof(T)) {
          store<Y, N>(reinterpret_cast<Y*>(at), out);
        } else {
          store<Y, N>(y + (static_cast<i64>(group) * kGroupRows + row) * f.features + column, out);
        }
      }
    }
    if constexpr (sizeof(Y) == sizeof(T)) {
      fence_async_shared();
      __syncwarp();
      if (lane == 0) {
        copy_to_global(map_y, of_part, first_column + part * 64, group * kGroupRows);
        commit_copies();
      }
    }
  }
}

// What a warp does for a consumer: it sums up the squares of its staged groups, says that their statistics are there,
// stores the product where that is kept, takes its share of the panel's merges and normalises the group. The consumer has
// done most of that itself for the last tile of the block.
template <class T, class Y, int BN, class Activation, bool STAGED, int AHEAD, class Shared, class L, class R>
__device__ __forceinline__ void serve_consumer(const Features<L, R>& f, const Raster& raster, Shared& shared, int consumer,
                                               const TensorMap& map_product, const TensorMap& map_y, Y* y, u32* counters,
                                               int stored, int keep_product) {
  constexpr int kMerges = BN / kMergeWidth;
  const int lane = threadIdx.x % 32;
  unsigned char* staging = shared.staging[consumer];
  u32* complete = counters + kPanels;
  u32* merged = complete + raster.tiles_n;
  u32 parity = 0;
#pragma unroll 1
  for (int t = blockIdx.x; t < raster.tiles(); t += gridDim.x, parity ^= 1) {
    const Tile tile = raster.at(t);
    const int group = 2 * tile.m + consumer, column = tile.n * BN;
    const bool later = STAGED && t < stored;
    barrier_wait(&shared.staged[consumer], parity);
    if constexpr (STAGED) {
      if (keep_product && lane == 0) {
        for (int part = 0; part < BN / 64; ++part)
          copy_to_global(map_product, staging + part * kGroupRows * kRowBytes, column + part * 64, group * kGroupRows);
        commit_copies();
      }
      if (later) store_squares<T, BN>(f, staging, group, column);
      __syncwarp();
    }
    if (lane == 0) {
      add_release(&complete[tile.n], 1);
      if (STAGED) wait_copies_read();
      if (!later) barrier_arrive(&shared.unstaged[consumer]);
    }
    if constexpr (STAGED) {
      if (raster.has_stored(tile.n, stored) || f.groups > kDirectGroups) {
        if (lane == 0) wait_until(&complete[tile.n], 2 * raster.tiles_m);
        __syncwarp();
        int merges = 0;
        for (int i = group; i < kMerges; i += 2 * raster.tiles_m, ++merges)
          merge_groups<AHEAD>(f, column + i * kMergeWidth);
        __syncwarp();
        if (lane == 0 && merges) add_release(&merged[tile.n], merges);
      }
      if (later) {
        if (lane == 0) wait_until(&merged[tile.n], kMerges);
        __syncwarp();
        normalize_staged<T, Y, BN, Activation>(f, staging, map_y, y, group, column);
        if (lane == 0) {
          wait_copies_read();
          barrier_arrive(&shared.unstaged[consumer]);
        }
        __syncwarp();
      }
    }
  }
}

}  // namespace gemmnorm
