// Tiles that wait for the rest of their panel in shared memory: all rows of a panel are worked on by one wave of blocks, so
// the wait is short, and nothing but the result (and the product where it is kept) goes to memory.
#pragma once
#include "gemm/staging.cuh"

namespace gemmnorm {

// One warp normalises 64 × 64 staged values. A y of the product's size takes their place and leaves by TMA.
template <class T, class Y, class Activation, class L, class R>
__device__ __forceinline__ void normalize_staged(const Features<L, R>& f, unsigned char* staged, const TensorMap& map_y,
                                                 Y* y, int first_row, int first_column) {
  constexpr int N = 16 / sizeof(T), kChunks = kRowBytes / 16;
  const int lane = threadIdx.x % 32, chunk = lane % kChunks, group = first_row / kGroupRows;
  const int rows = min(f.batch - first_row, kGroupRows);
  const int column = first_column + chunk * N;
  if (column < f.features) {
    float slope[N], shift[N];
    group_coefficients(f, group, column, slope, shift);
#pragma unroll 4
    for (int row = lane / kChunks; row < rows; row += 32 / kChunks) {
      unsigned char* at = staged + row * kRowBytes + ((chunk ^ row) % 8) * 16;
      const Vec<T, N> a = *reinterpret_cast<const Vec<T, N>*>(at);
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = Activation::value(slope[i] * a.value(i) + shift[i]);
      if constexpr (sizeof(Y) == sizeof(T)) {
        store<Y, N>(reinterpret_cast<Y*>(at), out);
      } else {
        store<Y, N>(y + static_cast<i64>(first_row + row) * f.features + column, out);
      }
    }
  }
  if constexpr (sizeof(Y) == sizeof(T)) {
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
      tma_store(map_y, staged, first_column, first_row);
      tma_store_commit();
    }
  }
}

// One warp of each block merges its share of a panel's columns, for tiles that have left the registers by then.
template <int TN, class L, class R>
__device__ __forceinline__ void merge_panels(const Features<L, R>& f, const Raster& raster, u32* counters, int stored) {
  int lanes = 1;  // to a column: as many as leave a column or more to each block of the panel
  while (lanes < 32 && raster.tiles_m * (32 / lanes) > TN) lanes *= 2;
  const int lane = threadIdx.x % 32, columns = 32 / lanes;
#pragma unroll 1
  for (int t = blockIdx.x; t < raster.tiles(); t += gridDim.x) {
    const Tile tile = raster.at(t);
    if (!raster.has_stored(tile.n, stored) && f.batch <= kDirectRows) continue;
#pragma unroll 1
    for (int c = tile.m * columns; c < TN; c += raster.tiles_m * columns) {
      const int j = tile.n * TN + c + lane / lanes, existing = min(j, f.features - 1);
      const auto own = f.own(existing);
      if (lane == 0) wait_until(&counters[kPanels + tile.n], 2 * raster.tiles_m);
      __syncwarp();
      const auto load = [&](bool of_m2, int g) {
        return load_l2((of_m2 ? f.group_m2 : f.group_mean) + f.at(g, existing));
      };
      const Column merged = merge_column<8>(f, lane % lanes, lanes, load);
      if (lane % lanes == 0 && j < f.features) f.finish(j, own, merged.mean, merged.m2);
      __syncwarp();
      if (lane == 0) signal(&counters[kPanels + raster.tiles_n + tile.n], columns);
    }
  }
}

// What a warp does for a consumer: it stores the product where that is kept, says that the statistics of what is staged are
// there, and normalises it when the panel is merged. Of a tile that stays in registers, as the
// block's last does, the consumer does most of that itself.
template <class T, class Y, int TN, class Activation, bool STAGED, bool WAITS, class Shared, class L, class R>
__device__ __forceinline__ void serve_consumer(const Features<L, R>& f, const Raster& raster, Shared& shared, int consumer,
                                               const TensorMap& map_product, const TensorMap& map_y, Y* y, u32* counters,
                                               int stored, int keep_product) {
  using Shape = typename Shared::Shape;
  const int lane = threadIdx.x % 32;
  unsigned char* staging = shared.staging[consumer];
  u32 parity = 0;
#pragma unroll 1
  for (int t = blockIdx.x; t < raster.tiles(); t += gridDim.x) {
    const Tile tile = raster.at(t);
    const bool later = WAITS && t < stored;
    u32* complete = &counters[kPanels + tile.n];
    const int trips = STAGED && keep_product ? Shape::template kTrips<T> : 1;
#pragma unroll 1
    for (int trip = 0; trip < trips; ++trip, parity ^= 1) {
      mbarrier_wait(&shared.staged[consumer], parity);
      __syncwarp();  // nobody waits for this phase any more
      if (lane > 0) continue;
      if (STAGED && keep_product) store_staged<Shape, T>(map_product, staging, tile, consumer, trip, f.batch);
      if (trip == 0) signal(complete, 1);
      if (STAGED) tma_store_wait_read();
      if (!later) mbarrier_arrive(&shared.unstaged[consumer]);
    }
    if constexpr (WAITS) {
      if (later) {
        if (lane == 0) wait_until(complete + raster.tiles_n, TN);
        __syncwarp();
#pragma unroll 1
        for (int part = 0; part < Shape::kParts && Shape::row(tile, consumer, part) < f.batch; ++part)
          normalize_staged<T, Y, Activation>(f, staging + part * kPartBytes, map_y, y, Shape::row(tile, consumer, part),
                                             Shape::column(tile, consumer, part));
        __syncwarp();  // all have read what is staged
        if (lane == 0) {
          tma_store_wait_read();
          mbarrier_arrive(&shared.unstaged[consumer]);
        }
        __syncwarp();
      }
    }
  }
}

}  // namespace gemmnorm
