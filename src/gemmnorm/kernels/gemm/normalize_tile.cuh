// Normalising tiles that left the accumulators before their panel's statistics were merged.
#pragma once
#include "gemm/features.cuh"
#include "gemm/staging.cuh"

namespace gemmnorm {

// N numbers of a per-feature vector, from the L2.
template <int N>
__device__ __forceinline__ void load_features(const float* vector, float (&out)[N]) {
  if constexpr (N == 1) {
    out[0] = load_l2(vector);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = load_l2(reinterpret_cast<const float4*>(vector + i));
    out[i] = v.x;
    out[i + 1] = v.y;
    out[i + 2] = v.z;
    out[i + 3] = v.w;
  }
}

// For N features of a merged panel: y = φ(slope·a' + shift), a' being the stored value, which lacks the mean in group_mean.
template <int N, class Params>
__device__ __forceinline__ void group_coefficients(const Features<Params>& f, int group, int column, float (&slope)[N],
                                                   float (&shift)[N]) {
  float mean[N], own[N];
  load_features(f.p.merged_slope + column, slope);
  load_features(f.p.merged_shift + column, shift);
  load_features(f.p.mean + column, mean);
  load_features(f.p.group_mean + static_cast<i64>(group) * f.p.features + column, own);
#pragma unroll
  for (int i = 0; i < N; ++i) shift[i] += slope[i] * (own[i] - mean[i]);
}

// One warp normalises a consumer's tile in its staging buffer: parts of 64 × 64, one below the other, whose rows lack one mean.
// A y of the product's size takes a part's place and is stored by TMA.
template <class G, class Params>
__device__ __forceinline__ void normalize_staged(const Features<Params>& f, unsigned char* staged, Tile tile, int consumer) {
  using Shape = typename G::Shape;
  using T = typename G::T;
  using Y = typename G::Y;
  constexpr int N = 16 / sizeof(T), kChunks = kRowBytes / 16;
  static_assert(Shape::kParts == 1 || Shape::kSwapAB);
  const int lane = threadIdx.x % 32, chunk = lane % kChunks;
  const int first_row = Shape::first_row(tile, consumer), first_column = Shape::first_feature(tile, consumer);
  const int column = first_column + chunk * N;
  float slope[N], shift[N];
  if (column < f.p.features && first_row < f.p.batch)
    group_coefficients(f, first_row / kGroupRows, column, slope, shift);
#pragma unroll 1
  for (int row = first_row; row < min(first_row + Shape::kRows, f.p.batch); row += kGroupRows, staged += kPartBytes) {
    const int rows = column < f.p.features ? min(f.p.batch - row, kGroupRows) : 0;
#pragma unroll 4
    for (int r = lane / kChunks; r < rows; r += 32 / kChunks) {
      unsigned char* at = staged + r * kRowBytes + ((chunk ^ r) % 8) * 16;
      const Vec<T, N> a = *reinterpret_cast<const Vec<T, N>*>(at);
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = G::Activation::value(slope[i] * a.value(i) + shift[i]);
      if constexpr (sizeof(Y) == sizeof(T)) {
        *reinterpret_cast<Vec<Y, N>*>(at) = rounded<Y>(out);
      } else {
        store<Y, N>(f.p.y + static_cast<i64>(row + r) * f.p.features + column, out);
      }
    }
    if constexpr (sizeof(Y) == sizeof(T)) {
      fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) {
        tma_store(f.p.map_y, staged, first_column, row);
        tma_store_commit();
      }
    }
  }
}

// One warp normalises ROWS rows of a tile that was stored to memory, out of the L2; AHEAD loads are in flight.
template <class G, int ROWS, int AHEAD, class Params>
__device__ __forceinline__ void normalize_stored(const Features<Params>& f, int first_row, int first_column) {
  using T = typename G::T;
  using Y = typename G::Y;
  constexpr int N = 16 / sizeof(T);
  constexpr int kColumns = G::TN < 32 * N ? G::TN : 32 * N;  // that the warp covers at once
  constexpr int kLanes = 32 * N / kColumns;                  // rows that it covers at once
  constexpr int kAtOnce = ROWS / kLanes < AHEAD ? ROWS / kLanes : AHEAD;
  const int lane = threadIdx.x % 32, group = first_row / kGroupRows;
  const int rows = min(ROWS, f.p.batch - first_row);
#pragma unroll 1
  for (int c = 0; c < G::TN; c += kColumns) {
    const int column = first_column + c + (lane % (kColumns / N)) * N;
    if (column >= f.p.features) continue;
    float slope[N], shift[N];
    group_coefficients(f, group, column, slope, shift);
    const i64 origin = static_cast<i64>(first_row) * f.p.features + column;
#pragma unroll 1
    for (int r0 = lane / (kColumns / N); r0 < rows; r0 += kLanes * kAtOnce) {
      Vec<T, N> a[kAtOnce];  // loads without conditions are all in flight at once
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        *reinterpret_cast<uint4*>(&a[r]) = load_evict_first(reinterpret_cast<const uint4*>(
            f.p.stored_product + origin + static_cast<i64>(min(r0 + r * kLanes, rows - 1)) * f.p.features));
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = G::Activation::value(slope[i] * a[r].value(i) + shift[i]);
        if (r0 + r * kLanes >= rows) continue;
        Vec<Y, N> rounded;
#pragma unroll
        for (int i = 0; i < N; ++i) from_float(out[i], rounded.at[i]);
        uint4* to = reinterpret_cast<uint4*>(f.p.y + origin + static_cast<i64>(r0 + r * kLanes) * f.p.features);
#pragma unroll
        for (int w = 0; w < N * sizeof(Y) / 16; ++w) store_evict_first(to + w, reinterpret_cast<const uint4*>(&rounded)[w]);
      }
    }
  }
}

// The same for rows that do not all begin at a whole word: a lane has one feature at a time.
template <class G, int ROWS, int AHEAD, class Params>
__device__ __forceinline__ void normalize_stored_singly(const Features<Params>& f, int first_row, int first_column) {
  const int group = first_row / kGroupRows, rows = min(ROWS, f.p.batch - first_row);
#pragma unroll 1
  for (int c = threadIdx.x % 32; c < G::TN; c += 32) {
    const int column = first_column + c;
    if (column >= f.p.features) return;
    float slope[1], shift[1];
    group_coefficients(f, group, column, slope, shift);
    const i64 origin = static_cast<i64>(first_row) * f.p.features + column;
#pragma unroll 1
    for (int r0 = 0; r0 < rows; r0 += AHEAD) {
      float a[AHEAD];
#pragma unroll
      for (int r = 0; r < AHEAD; ++r)
        a[r] = to_float(load_l2(f.p.stored_product + origin + static_cast<i64>(min(r0 + r, rows - 1)) * f.p.features));
#pragma unroll
      for (int r = 0; r < AHEAD; ++r)
        if (r0 + r < rows)
          from_float(G::Activation::value(slope[0] * a[r] + shift[0]), f.p.y[origin + static_cast<i64>(r0 + r) * f.p.features]);
    }
  }
}

}  // namespace gemmnorm
