// What a consumer holds of a narrow tile: 64 rows and all TN columns, multiplied as x·Wᵀ. A thread has rows own and own + 8,
// and of every eight columns two.
#pragma once
#include "common/column_sums.cuh"
#include "gemm/staging.cuh"

namespace gemmnorm {

// acc[4i] and acc[4i + 1] are of row own and columns 8i + 2·(lane % 4) and the next; then come those of row own + 8.
template <class T, class Y, int TM, int TN>
struct TileByRows {
  static_assert(TM == 2 * kGroupRows, "a group for each consumer");
  static constexpr int kMeeting = 256;  // threads that finish features together
  using Accumulators = float[TN / 2];

  int consumer, lane, thread, own;
  float2 mean;  // of the group, of columns 2·thread and the next

  __device__ __forceinline__ explicit TileByRows(int consumer_)
      : consumer(consumer_),
        lane(threadIdx.x % 32),
        thread(threadIdx.x % 128),
        own(threadIdx.x % 128 / 32 * 16 + lane / 4) {}

  template <class L, class R>
  __device__ __forceinline__ void store_of_group(const Features<L, R>& f, Tile tile, float2 v, float* to) const {
    const int j = tile.n * TN + 2 * thread, group = 2 * tile.m + consumer;
    if (2 * thread < TN && j < f.features && f.rows(group))
      *reinterpret_cast<float2*>(to + static_cast<i64>(group) * f.features + j) = v;
  }

  // The mean of the group. Rows beyond the batch are zero in the accumulators.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_means(const Features<L, R>& f, Shared& shared, Tile tile, const Accumulators& acc) {
    const int rows = max(f.rows(2 * tile.m + consumer), 1);
    mean = column_sums<TN>(shared.sums[consumer], consumer,
                           [&](int i) { return acc[i / 2 * 4 + i % 2] + acc[i / 2 * 4 + 2 + i % 2]; });
    mean.x /= rows;
    mean.y /= rows;
    if (2 * thread < TN) *reinterpret_cast<float2*>(&shared.slope[consumer][2 * thread]) = mean;
    named_barrier_sync(1 + consumer, 128);
    store_of_group(f, tile, mean, f.group_mean);
  }

  // Takes it off, rounds to T, and sums up the squares of what is left: M2. To `staging`, where that is not null.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_squares(const Features<L, R>& f, Shared& shared, Tile tile, Accumulators& acc,
                                               unsigned char* staging) const {
    const int rows = f.batch - (2 * tile.m + consumer) * kGroupRows;  // or more than the group has, or none
#pragma unroll
    for (int i = 0; i < TN / 8; ++i) {
      const float2 m = *reinterpret_cast<const float2*>(&shared.slope[consumer][i * 8 + (lane % 4) * 2]);
      rounded_pair(acc[4 * i], acc[4 * i + 1], m, T{});
      rounded_pair(acc[4 * i + 2], acc[4 * i + 3], m, T{});
      if (i % 8 == 7) compiler_barrier();
    }
    if (rows < kGroupRows) {  // rows beyond the batch count for nothing
#pragma unroll
      for (int i = 0; i < TN / 8; ++i) {
        if (own >= rows) acc[4 * i] = acc[4 * i + 1] = 0.0f;
        if (own + 8 >= rows) acc[4 * i + 2] = acc[4 * i + 3] = 0.0f;
      }
    }
    const float2 m2 = column_sums<TN>(shared.sums[consumer], consumer, [&](int i) {
      const float a = acc[i / 2 * 4 + i % 2], b = acc[i / 2 * 4 + 2 + i % 2];
      return a * a + b * b;
    });
    named_barrier_sync(1 + consumer, 128);  // the sums are read before the next tile's are written
    store_of_group(f, tile, m2, f.group_m2);
    if (ONE_BLOCK && 2 * thread < TN) *reinterpret_cast<float2*>(&shared.shift[consumer][2 * thread]) = m2;
    if (!staging) return;
#pragma unroll
    for (int i = 0; i < TN / 8; ++i)
      stage_pairs<T>(staging, own, i, make_float2(acc[4 * i], acc[4 * i + 1]), make_float2(acc[4 * i + 2], acc[4 * i + 3]));
  }

  // The i-th pairs of columns straight to memory.
  template <class V>
  __device__ __forceinline__ void store_pairs(float2 low, float2 high, int i, V* to, Tile tile, int batch,
                                              int features) const {
    const int column = tile.n * TN + i * 8 + lane % 4 * 2;
    const i64 row = static_cast<i64>(2 * tile.m + consumer) * kGroupRows + own;
    if (column >= features) return;
    if (row < batch) store_pair(to + row * features + column, low);
    if (row + 8 < batch) store_pair(to + (row + 8) * features + column, high);
  }
  template <bool STAGED>
  __device__ __forceinline__ void store_product(const Accumulators& acc, int, unsigned char*, T* product, Tile tile,
                                                int batch, int features) const {
#pragma unroll
    for (int i = 0; i < TN / 8; ++i)
      store_pairs(make_float2(acc[4 * i], acc[4 * i + 1]), make_float2(acc[4 * i + 2], acc[4 * i + 3]), i, product, tile,
                  batch, features);
  }

  // Coefficients for values that are stored minus their group's mean.
  template <class Shared>
  __device__ __forceinline__ void take_coefficients(Shared& shared) const {
    if (2 * thread >= TN) return;
    const float2 m = *reinterpret_cast<const float2*>(&shared.mean[2 * thread]);
    const float2 slope = *reinterpret_cast<const float2*>(&shared.finished_slope[2 * thread]);
    const float2 shift = *reinterpret_cast<const float2*>(&shared.finished_shift[2 * thread]);
    *reinterpret_cast<float2*>(&shared.slope[consumer][2 * thread]) = slope;
    *reinterpret_cast<float2*>(&shared.shift[consumer][2 * thread]) =
        make_float2(slope.x * (mean.x - m.x) + shift.x, slope.y * (mean.y - m.y) + shift.y);
  }

  // y, to be staged or straight to memory, with coefficients in shared memory: the consumer's, in evaluation the tile's.
  template <class Activation, bool EVALUATE, bool STAGED, class Shared>
  __device__ __forceinline__ void store_results(const Accumulators& acc, int, Shared& shared, int buffer, Y* y, Tile tile,
                                                int batch, int features) const {
    constexpr int kPairs = 4;
    const int at = EVALUATE ? buffer : consumer;
#pragma unroll
    for (int i0 = 0; i0 < TN / 8; i0 += kPairs) {
      float2 slope[kPairs], shift[kPairs];
      load_pairs(&shared.slope[at][i0 * 8], slope);
      load_pairs(&shared.shift[at][i0 * 8], shift);
#pragma unroll
      for (int q = 0; q < kPairs; ++q) {
        const int i = i0 + q;
        const float2 a = make_float2(Activation::value(slope[q].x * acc[4 * i] + shift[q].x),
                                     Activation::value(slope[q].y * acc[4 * i + 1] + shift[q].y));
        const float2 b = make_float2(Activation::value(slope[q].x * acc[4 * i + 2] + shift[q].x),
                                     Activation::value(slope[q].y * acc[4 * i + 3] + shift[q].y));
        if constexpr (STAGED) {
          stage_pairs<Y>(shared.staging[consumer], own, i, a, b);
        } else {
          store_pairs(a, b, i, y, tile, batch, features);
        }
      }
      compiler_barrier();
    }
  }
};

}  // namespace gemmnorm
