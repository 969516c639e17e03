// The epilogue's staging buffers: a consumer's accumulator tile on its way through shared memory to global memory.
#pragma once
#include "gemm/tile_scheduler.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

// Two neighbouring values less the mean; if ROUNDS as T holds them: statistics and results agree with what is stored, so that
// the rounding of a value that stands out is normalised away as PyTorch's is. Without opaque ptxas finds that these
// writes reach the next wgmma, and serialises all of them (C7520).
template <bool ROUNDS, class T>
__device__ __forceinline__ void rounded_pair(float& a, float& b, float2 mean, T) {
  a -= mean.x;
  b -= mean.y;
  if constexpr (ROUNDS && sizeof(T) == 2) {
    const u32 both = pack(a, b, T{});
    a = opaque(element_of(both, 0, T{}));
    b = opaque(element_of(both, 1, T{}));
  }
}

// Per-column numbers of a thread's next N pairs of columns, all in flight at once.
template <int N>
__device__ __forceinline__ void load_pairs(const float* columns, float2 (&out)[N]) {
#pragma unroll
  for (int q = 0; q < N; ++q) out[q] = *reinterpret_cast<const float2*>(columns + q * 8 + (threadIdx.x % 4) * 2);
}

// Where a thread stages its i-th two neighbouring results of row own_row, of 16 bits each.
__device__ __forceinline__ int staged_pair(int own_row, int i) {
  return (i / 8) * kGroupRows * kRowBytes + own_row * kRowBytes +
         (((i % 8) * 16 + (threadIdx.x % 4) * 4) ^ ((own_row % 8) << 4));
}
// These, and those of own_row + 8, to where TMA reads them as T.
template <class T>
__device__ __forceinline__ void stage_pairs(unsigned char* staging, int own_row, int i, float2 low, float2 high) {
  if constexpr (sizeof(T) == 2) {
    unsigned char* to = staging + staged_pair(own_row, i);
    *reinterpret_cast<u32*>(to) = pack(low.x, low.y, T{});
    *reinterpret_cast<u32*>(to + 8 * kRowBytes) = pack(high.x, high.y, T{});
  }
}

constexpr int kPartBytes = 64 * kRowBytes;  // of a box that TMA stores

// How a consumer stages a tile of a shape with an overlap: even rows apart from odd ones. Of even rows, which begin with a
// sector, it leaves out the tile's first eight columns, of odd ones the last; in the first tile of a row, before whose columns
// there are none, the first of both. What two tiles then both store is the same.
template <class Shape>
struct RowsApart {
  static constexpr int kBoxBytes = Shape::kRows / 2 * kRowBytes;  // half of the rows, 64 columns
  static constexpr int kHalf = Shape::kStagingBytes / 2;          // the odd rows' part of the buffer begins there

  const int first, swizzle;
  const bool leaves_first;  // and all columns move eight places to the left

  __device__ __forceinline__ RowsApart(int own_row, Tile tile)
      : first(own_row % 2 * kHalf + own_row / 2 * kRowBytes + threadIdx.x % 4 * 4), swizzle(own_row / 2 % 8 * 16),
        leaves_first(own_row % 2 == 0 || tile.n == 0) {}
  __device__ __forceinline__ int place(int octet) const { return octet / 8 * kBoxBytes + (octet % 8 * 16 ^ swizzle); }
  // A thread's i-th two neighbouring results of row own_row of a block of 64, and those of own_row + 8.
  template <class V>
  __device__ __forceinline__ void stage(unsigned char* staging, int block, int i, float2 low, float2 high) const {
    if (leaves_first ? i == 0 : i == Shape::kStep / 8) return;
    const int at = leaves_first ? place(i - 1) : place(i);
    unsigned char* to = staging + first + block * 32 * kRowBytes;
    *reinterpret_cast<u32*>(to + at) = pack(low.x, low.y, V{});
    *reinterpret_cast<u32*>(to + 4 * kRowBytes + (at ^ 64)) = pack(high.x, high.y, V{});  // four rows on, of each kind
  }
};
// Asks TMA, as one thread of each warp of a consumer, to store what is staged so. A box that began before the first column would
// be an illegal instruction.
template <class Shape>
__device__ __forceinline__ void store_rows_apart(const TensorMap& even, const TensorMap& odd, const unsigned char* staging,
                                                 Tile tile, int consumer, int batch) {
  using Rows = RowsApart<Shape>;
  static_assert(Shape::kStep == 128, "a box for each warp: of even and of odd rows, 64 columns each");
  const int warp = threadIdx.x % 128 / 32, part = warp / 2, is_odd = warp % 2, row = Shape::first_row(tile, consumer) + is_odd;
  if (threadIdx.x % 32 > 0 || row >= batch) return;
  const int column = tile.n * Shape::kStep + part * 64 - (is_odd && tile.n > 0 ? Shape::kOverlap : 0);
  tma_store(is_odd ? odd : even, staging + is_odd * Rows::kHalf + part * Rows::kBoxBytes, column, row / 2);
  tma_store_commit();
}

// Asks TMA, as one thread, to store what a consumer has staged in one store pass: every WARPS-th part, from `first` on.
template <class Shape, class V, int WARPS = 1>
__device__ __forceinline__ void store_staged(const TensorMap& map, const unsigned char* staging, Tile tile, int consumer,
                                             int store_pass, int batch, u64 policy = kEvictNormal, int first = 0) {
  constexpr int kParts = Shape::kParts / Shape::template kStorePasses<V>, kBoxColumns = kRowBytes / sizeof(V);
  for (int i = first; i < kParts; i += WARPS) {
    const int part = store_pass * kParts + i, row = Shape::row(tile, consumer, part);
    if (row >= batch) continue;
    for (int c = 0; c < 64; c += kBoxColumns)
      tma_store(map, staging + (c / kBoxColumns * kParts + i) * kPartBytes, Shape::column(tile, consumer, part) + c, row,
                policy);
  }
  tma_store_commit();
}
// The same by the four warps of the consumer, as one thread of each: to ask for a box takes as long as some 60 instructions.
template <class Shape, class V>
__device__ __forceinline__ void store_staged_together(const TensorMap& map, const unsigned char* staging, Tile tile,
                                                      int consumer, int store_pass, int batch) {
  if (threadIdx.x % 32 == 0)
    store_staged<Shape, V, 4>(map, staging, tile, consumer, store_pass, batch, kEvictNormal, threadIdx.x % 128 / 32);
}
// The threads that ask wait here, before others write to the staging buffer.
__device__ __forceinline__ void wait_for_staged_together() {
  if (threadIdx.x % 32 == 0) tma_store_wait_read();
}

// Results of one row for `column` and the next, straight to global memory. ANY: there may be an odd number of columns, and a
// row begins in the middle of a pair.
template <bool ANY, class Y>
__device__ __forceinline__ void store_pair(Y* to, float2 v, int column, int columns) {
  if (ANY && columns % 2) {
    from_float(v.x, to[0]);
    if (column + 1 < columns) from_float(v.y, to[1]);
  } else {
    const float pair[2] = {v.x, v.y};
    store<Y, 2>(to, pair);
  }
}

}  // namespace gemmnorm
