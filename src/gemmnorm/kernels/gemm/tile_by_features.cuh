// What a consumer holds of a wide tile: 64 features and all TM rows, multiplied as W·xᵀ. A thread has two features, eight
// apart, and a quarter of the rows, so that what belongs to a feature is in its registers, and a sum over rows takes two
// shuffles. (Of a tile by rows a thread has two rows, and every number of a feature comes from shared memory.)
#pragma once
#include "gemm/staging.cuh"

namespace gemmnorm {

// acc[4i] and acc[4i + 1] are the first feature's, of rows 8i + 2·(lane % 4) and the next; then come the second's.
template <class T, class Y, int TM, int TN>
struct TileByFeatures {
  static constexpr int kMeeting = 128;  // threads that finish features together
  static constexpr int kOctets = 8;     // of rows, whose sums are taken together
  using Shape = TileShape<TM, TN>;
  using Accumulators = float[TM / 2];

  int consumer, lane, feature;  // the first of the two, in the tile
  float mean[2], slope[2], shift[2];

  __device__ __forceinline__ explicit TileByFeatures(int consumer_)
      : consumer(consumer_), lane(threadIdx.x % 32), feature(consumer_ * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4) {}

  // Where the lane begins to stage: the 16 bytes of one of 16 rows that it names for its warp, or a float of its own. Warps 0
  // and 1 have the first 32 features, which is a box of float32, the others the second.
  template <class V>
  __device__ __forceinline__ int staged_at() const {
    const int warp = feature / 16 % 4;
    if constexpr (sizeof(V) == 2) {
      const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
      return row * kRowBytes + (chunk ^ row % 8) * 16;
    } else {
      const int row = lane % 4 * 2, chunk = warp % 2 * 4 + lane / 16;
      const int box = warp / 2 * (Shape::kParts / Shape::template kTrips<V>)*kPartBytes;
      return opaque(box + row * kRowBytes + (chunk ^ row) * 16 + lane / 4 % 4 * 4);
    }
  }

  // Over the four lanes that share two features.
  __device__ __forceinline__ static float over_lanes(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }

  // The tile's number for each feature to `own`, where the block needs it, and to [groups, features]: to the row of the first
  // kGroupRows rows, and zero or, of a mean, the number again to those of the others.
  template <bool MEAN, class L, class R>
  __device__ __forceinline__ void store_of_tile(const Features<L, R>& f, Tile tile, const float (&v)[2], float* to,
                                                float* own) const {
    const int part = lane % 4, row = tile.m * TM + part * kGroupRows;
    if (part * kGroupRows >= TM) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = feature + 8 * c, j = tile.n * TN + column;
      if (j < f.features && row < f.batch)
        to[static_cast<i64>(row / kGroupRows) * f.features + j] = MEAN || part == 0 ? v[c] : 0.0f;
      if (own && part == 0) own[column] = v[c];
    }
  }

  // The means of the tile's rows. Rows beyond the batch are zero in the accumulators.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_means(const Features<L, R>& f, Shared& shared, Tile tile, const Accumulators& acc) {
    const int rows = f.batch - tile.m * TM;  // or more than the tile has
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < TM / 8; i += kOctets) {  // short sums round less
      float part[2] = {};
#pragma unroll
      for (int o = i; o < i + kOctets; ++o) {
        part[0] += acc[4 * o] + acc[4 * o + 1];
        part[1] += acc[4 * o + 2] + acc[4 * o + 3];
      }
      sum[0] += part[0];
      sum[1] += part[1];
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) mean[c] = over_lanes(sum[c]) * (1.0f / TM);
    if (rows < TM) {  // exactly, so that nothing is left of a constant column
      mean[0] = mean[0] * TM / rows;
      mean[1] = mean[1] * TM / rows;
    }
    store_of_tile<true>(f, tile, mean, f.group_mean, ONE_BLOCK ? shared.slope[0] : nullptr);
  }

  // Takes them off, rounds to T, and sums up the squares of what is left: M2. To `staging`, where that is not null.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_squares(const Features<L, R>& f, Shared& shared, Tile tile, Accumulators& acc,
                                               unsigned char* staging) const {
    const int rows = f.batch - tile.m * TM, at = staged_at<T>();
    if (rows < TM) {  // rows beyond the batch count for nothing
#pragma unroll
      for (int i = 0; i < TM / 2; ++i)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= rows) acc[i] = mean[i / 2 % 2];
    }
    float m2[2] = {};
#pragma unroll
    for (int i = 0; i < TM / 8; i += kOctets) {
      float sum[2] = {};
#pragma unroll
      for (int o = i; o < i + kOctets; o += 2) {
        if constexpr (sizeof(T) == 2) {
          u32 pairs[4];
#pragma unroll
          for (int p = 0; p < 4; ++p)
            pairs[p] = pack(acc[4 * o + 2 * p] - mean[p % 2], acc[4 * o + 2 * p + 1] - mean[p % 2], T{});
          if (staging) stmatrix_trans(staging + o * 8 * kRowBytes + at, pairs);
#pragma unroll
          for (int q = 0; q < 8; ++q) acc[4 * o + q] = opaque(element_of(pairs[q / 2], q % 2, T{}));
        } else {
#pragma unroll
          for (int q = 0; q < 8; ++q) acc[4 * o + q] -= mean[q / 2 % 2];
        }
#pragma unroll
        for (int q = 0; q < 8; ++q) sum[q / 2 % 2] += acc[4 * o + q] * acc[4 * o + q];
      }
      m2[0] += sum[0];
      m2[1] += sum[1];
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) m2[c] = over_lanes(m2[c]);
    store_of_tile<false>(f, tile, m2, f.group_m2, ONE_BLOCK ? shared.shift[0] : nullptr);
  }

  // Two octets of rows, straight to memory. Of a whole tile nothing is compared.
  template <class V>
  __device__ __forceinline__ void store_octets(const float (&v)[8], int i, V* to, Tile tile, int batch, int features) const {
    const int row = tile.m * TM + lane % 4 * 2, j = tile.n * TN + feature;
    const bool whole = (tile.m + 1) * TM <= batch && (tile.n + 1) * TN <= features;
    V* at = to + static_cast<i64>(row) * features + j;
    const auto down = [&](int q) { return (i + q / 4) * 8 + q % 2; };
    const auto right = [](int q) { return q / 2 % 2 * 8; };
    if (whole) {
#pragma unroll
      for (int q = 0; q < 8; ++q) from_float(v[q], at[down(q) * features + right(q)]);
    } else {
#pragma unroll
      for (int q = 0; q < 8; ++q)
        if (row + down(q) < batch && j + right(q) < features) from_float(v[q], at[down(q) * features + right(q)]);
    }
  }
  // The same to where TMA will fetch them as V: `at` is the lane's place in the first octets of the trip.
  template <class V>
  __device__ __forceinline__ static void stage_octets(const float (&v)[8], unsigned char* octets, int at) {
    if constexpr (sizeof(V) == 2) {
      const u32 pairs[4] = {pack(v[0], v[1], V{}), pack(v[2], v[3], V{}), pack(v[4], v[5], V{}), pack(v[6], v[7], V{})};
      stmatrix_trans(octets + at, pairs);
    } else {
#pragma unroll
      for (int q = 0; q < 8; ++q)
        *reinterpret_cast<float*>(octets + (at ^ q / 2 % 2 * 32 ^ q % 2 * 16) + (q / 4 * 8 + q % 2) * kRowBytes) = v[q];
    }
  }
  template <bool STAGED>
  __device__ __forceinline__ void store_product(const Accumulators& acc, int trip, unsigned char* staging, T* product,
                                                Tile tile, int batch, int features) const {
    constexpr int kOfTrip = TM / 8 / (STAGED ? Shape::template kTrips<T> : 1);
    const int at = staged_at<T>();
#pragma unroll
    for (int i = 0; i < kOfTrip; i += 2) {
      float v[8];
#pragma unroll
      for (int q = 0; q < 8; ++q) v[q] = acc[4 * (trip * kOfTrip + i) + q];
      if constexpr (STAGED) stage_octets<T>(v, staging + i * 8 * kRowBytes, at);
      else store_octets(v, i, product, tile, batch, features);
    }
  }

  // Coefficients for values that are stored minus the mean of the tile's rows.
  template <class Shared>
  __device__ __forceinline__ void take_coefficients(Shared& shared) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int j = feature + 8 * c;
      slope[c] = shared.finished_slope[j];
      shift[c] = slope[c] * (mean[c] - shared.mean[j]) + shared.finished_shift[j];
    }
  }

  // y, to be staged, in trips, or straight to memory; in evaluation with the coefficients that lie in shared memory.
  template <class Activation, bool EVALUATE, bool STAGED, class Shared>
  __device__ __forceinline__ void store_results(const Accumulators& acc, int trip, Shared& shared, int buffer, Y* y,
                                                Tile tile, int batch, int features) {
    if constexpr (EVALUATE) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        slope[c] = shared.slope[buffer][feature + 8 * c];
        shift[c] = shared.shift[buffer][feature + 8 * c];
      }
    }
    constexpr int kOfTrip = TM / 8 / (STAGED ? Shape::template kTrips<Y> : 1);
    const int at = staged_at<Y>();
#pragma unroll
    for (int i = 0; i < kOfTrip; i += 2) {
      float v[8];
#pragma unroll
      for (int q = 0; q < 8; ++q)
        v[q] = Activation::value(slope[q / 2 % 2] * acc[4 * (trip * kOfTrip + i) + q] + shift[q / 2 % 2]);
      if constexpr (STAGED) stage_octets<Y>(v, shared.staging[consumer] + i * 8 * kRowBytes, at);
      else store_octets(v, i, y, tile, batch, features);
    }
  }
};

}  // namespace gemmnorm
