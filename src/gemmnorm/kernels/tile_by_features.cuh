// What a consumer holds of a wide tile: 64 features and all TM rows, multiplied as W·xᵀ. A thread has two features, eight
// apart, and a quarter of the rows, so that what belongs to a feature is in its registers, and a sum over rows takes two
// shuffles. (Of a tile by rows a thread has two rows, and every number of a feature comes from shared memory.)
#pragma once
#include "staging.cuh"

namespace gemmnorm {

// acc[4i] and acc[4i + 1] are the first feature's, of rows 8i + 2·(lane % 4) and the next; then come the second's.
template <class T, class Y, int TM, int TN>
struct TileByFeatures {
  static constexpr int kGroups = TM / kGroupRows, kOctets = kGroupRows / 8;
  static constexpr int kMeeting = 128;  // threads that finish features together
  using Accumulators = float[TM / 2];

  int consumer, lane, feature;  // the first of the two, in the tile
  float mean[kGroups][2], slope[2], shift[kGroups][2];

  __device__ __forceinline__ explicit TileByFeatures(int consumer_)
      : consumer(consumer_), lane(threadIdx.x % 32), feature(consumer_ * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4) {}

  // Over the four lanes that share two features.
  __device__ __forceinline__ static float over_lanes(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }

  // A number for each group and feature to [groups, features], and, where the block needs them, to `own`: a group a lane.
  template <class L, class R>
  __device__ __forceinline__ void store_of_groups(const Features<L, R>& f, Tile tile, const float (&v)[kGroups][2],
                                                  float* to, float (*own)[TN]) const {
    const int g = lane % 4, group = tile.m * kGroups + g;
    if (g >= kGroups) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = feature + 8 * c, j = tile.n * TN + column;
      float mine = v[0][c];
#pragma unroll
      for (int i = 1; i < kGroups; ++i) mine = g == i ? v[i][c] : mine;
      if (j < f.features && f.rows(group)) to[static_cast<i64>(group) * f.features + j] = mine;
      if (own) own[g][column] = mine;
    }
  }

  // The means of the groups. Rows beyond the batch are zero in the accumulators.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_means(const Features<L, R>& f, Shared& shared, Tile tile, const Accumulators& acc) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int rows = max(f.rows(tile.m * kGroups + g), 1);
      float sum[2] = {};
#pragma unroll
      for (int i = g * kOctets; i < (g + 1) * kOctets; ++i) {
        sum[0] += acc[4 * i] + acc[4 * i + 1];
        sum[1] += acc[4 * i + 2] + acc[4 * i + 3];
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) mean[g][c] = over_lanes(sum[c]) / rows;
    }
    store_of_groups(f, tile, mean, f.group_mean, ONE_BLOCK ? shared.slope : nullptr);
  }

  // Takes them off, rounds to T, and sums up the squares of what is left: M2. To `staging`, where that is not null.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_squares(const Features<L, R>& f, Shared& shared, Tile tile, Accumulators& acc,
                                               unsigned char* staging) const {
    unsigned char* to = staged_row(staging, feature / 16 % 4, lane);
    float m2[kGroups][2];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int rows = f.rows(tile.m * kGroups + g);
      if (rows < kGroupRows) {  // rows beyond the batch count for nothing
#pragma unroll
        for (int i = 0; i < 4 * kOctets; ++i)
          if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= rows) acc[4 * g * kOctets + i] = mean[g][i / 2 % 2];
      }
      float sum[2] = {};
#pragma unroll
      for (int i = g * kOctets; i < (g + 1) * kOctets; i += 2) {
        if constexpr (sizeof(T) == 2) {
          u32 pairs[4];
#pragma unroll
          for (int p = 0; p < 4; ++p)
            pairs[p] = pack(acc[4 * i + 2 * p] - mean[g][p % 2], acc[4 * i + 2 * p + 1] - mean[g][p % 2], T{});
          if (staging) store_transposed(to + i * 8 * kRowBytes, pairs);
#pragma unroll
          for (int q = 0; q < 8; ++q) acc[4 * i + q] = computed_anew(element_of(pairs[q / 2], q % 2, T{}));
        } else {
#pragma unroll
          for (int q = 0; q < 8; ++q) acc[4 * i + q] -= mean[g][q / 2 % 2];
        }
#pragma unroll
        for (int q = 0; q < 8; ++q) sum[q / 2 % 2] += acc[4 * i + q] * acc[4 * i + q];
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) m2[g][c] = over_lanes(sum[c]);
    }
    store_of_groups(f, tile, m2, f.group_m2, ONE_BLOCK ? shared.shift : nullptr);
  }

  // Two octets of rows straight to memory.
  template <class V>
  __device__ __forceinline__ void store_octets(const float (&v)[8], int i, V* to, Tile tile, int batch, int features) const {
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const int row = tile.m * TM + (i + q / 4) * 8 + lane % 4 * 2 + q % 2, j = tile.n * TN + feature + q / 2 % 2 * 8;
      if (row < batch && j < features) from_float(v[q], to[static_cast<i64>(row) * features + j]);
    }
  }
  __device__ __forceinline__ void store_product(const Accumulators& acc, T* product, Tile tile, int batch,
                                                int features) const {
#pragma unroll
    for (int i = 0; i < TM / 8; i += 2) {
      float v[8];
#pragma unroll
      for (int q = 0; q < 8; ++q) v[q] = acc[4 * i + q];
      store_octets(v, i, product, tile, batch, features);
    }
  }

  // Coefficients for values that are stored minus their group's mean.
  template <class Shared>
  __device__ __forceinline__ void take_coefficients(Shared& shared) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int j = feature + 8 * c;
      slope[c] = shared.finished_slope[j];
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        shift[g][c] = slope[c] * (mean[g][c] - shared.mean[j]) + shared.finished_shift[j];
    }
  }

  // y, to be staged or straight to memory; in evaluation with the coefficients that lie in shared memory.
  template <class Activation, bool EVALUATE, bool STAGED, class Shared>
  __device__ __forceinline__ void store_results(const Accumulators& acc, Shared& shared, int buffer, Y* y, Tile tile,
                                                int batch, int features) {
    if constexpr (EVALUATE) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        slope[c] = shared.slope[buffer][feature + 8 * c];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) shift[g][c] = shared.shift[buffer][feature + 8 * c];
      }
    }
    unsigned char* staged = staged_row(shared.staging[consumer], feature / 16 % 4, lane);
#pragma unroll
    for (int i = 0; i < TM / 8; i += 2) {
      float v[8];
#pragma unroll
      for (int q = 0; q < 8; ++q)
        v[q] = Activation::value(slope[q / 2 % 2] * acc[4 * i + q] + shift[i / kOctets][q / 2 % 2]);
      if constexpr (STAGED) {
        const u32 pairs[4] = {pack(v[0], v[1], Y{}), pack(v[2], v[3], Y{}), pack(v[4], v[5], Y{}), pack(v[6], v[7], Y{})};
        store_transposed(staged + i * 8 * kRowBytes, pairs);
      } else {
        store_octets(v, i, y, tile, batch, features);
      }
    }
  }
};

}  // namespace gemmnorm
