// A consumer's accumulator tile (x · Wᵀ): blocks of 64 rows, and all TN columns. A thread has rows own and own + 8 of a block,
// and two of every eight columns; sums over rows go through shared memory.
#pragma once
#include "common/column_sums.cuh"
#include "gemm/features.cuh"
#include "gemm/staging.cuh"

namespace gemmnorm {

// acc[4i] and acc[4i + 1] are of row own and columns 8i + 2·(lane % 4) and the next; then come those of row own + 8.
template <class G>
struct AccumulatorNormal {
  using T = typename G::T;
  using Y = typename G::Y;
  using Shape = typename G::Shape;
  using Accumulators = typename G::Accumulators;
  static constexpr int TM = G::TM, TN = G::TN;
  static constexpr int kBlocks = Shape::kBlocks, kOfBlock = TN / 2;  // kOfBlock: accumulators
  static_assert(G::kStatisticsKnown || TM == 2 * kGroupRows, "a group for each consumer, where statistics are taken");
  static constexpr int kFinishBarrier = 3;  // of both consumers: they finish features together
  static constexpr int kFinishThreads = 256;

  int consumer, lane, thread, own;
  float2 mean;  // of the group, of columns 2·thread and the next
  int coefficients;  // which of the buffers in shared memory y takes its coefficients from

  __device__ __forceinline__ explicit AccumulatorNormal(int consumer_)
      : consumer(consumer_),
        lane(threadIdx.x % 32),
        thread(threadIdx.x % 128),
        own(threadIdx.x % 128 / 32 * 16 + lane / 4),
        coefficients(consumer_) {}

  template <class Params>
  __device__ __forceinline__ void store_partial(const Features<Params>& f, Tile tile, float2 v, float* to) const {
    const int j = tile.n * TN + 2 * thread, group = 2 * tile.m + consumer;
    if (2 * thread < TN && j < f.p.features && f.rows(group))
      store_pair<G::kSplit>(to + static_cast<i64>(group) * f.p.features + j, v, j, f.p.features);
  }

  // The mean of the group.
  template <bool KEEP, bool ROUNDS, class Shared, class Params>
  __device__ __forceinline__ void take_means(const Features<Params>& f, Shared& shared, Tile tile, Accumulators& acc) {
    fill_beyond(f.p.batch, tile, [](int) { return make_float2(0.0f, 0.0f); }, acc);
    const int rows = max(f.rows(2 * tile.m + consumer), 1);
    mean = column_sums<TN>(shared.sums[consumer], consumer,
                           [&](int i) { return acc[i / 2 * 4 + i % 2] + acc[i / 2 * 4 + 2 + i % 2]; });
    mean.x /= rows;
    mean.y /= rows;
    if (2 * thread < TN) *reinterpret_cast<float2*>(&shared.slope[consumer][2 * thread]) = mean;
    named_barrier_sync(1 + consumer, 128);
    store_partial(f, tile, mean, f.p.group_mean);
  }

  // Subtracts it, rounds to T if ROUNDS, and sums up the squares of what is left: M2. Also writes it to `staging`, if not null.
  // KEEP: M2 to shared memory too.
  template <bool KEEP, bool ROUNDS, class Shared, class Params>
  __device__ __forceinline__ void take_squares(const Features<Params>& f, Shared& shared, Tile tile, Accumulators& acc,
                                               unsigned char* staging) const {
#pragma unroll
    for (int i = 0; i < TN / 8; ++i) {
      const float2 m = *reinterpret_cast<const float2*>(&shared.slope[consumer][i * 8 + (lane % 4) * 2]);
      rounded_pair<ROUNDS>(acc[4 * i], acc[4 * i + 1], m, T{});
      rounded_pair<ROUNDS>(acc[4 * i + 2], acc[4 * i + 3], m, T{});
      if (i % 8 == 7) compiler_barrier();
    }
    fill_beyond(f.p.batch, tile, [](int) { return make_float2(0.0f, 0.0f); }, acc);
    const float2 m2 = column_sums<TN>(shared.sums[consumer], consumer, [&](int i) {
      const float a = acc[i / 2 * 4 + i % 2], b = acc[i / 2 * 4 + 2 + i % 2];
      return a * a + b * b;
    });
    named_barrier_sync(1 + consumer, 128);  // the sums are read before the next tile's are written
    store_partial(f, tile, m2, f.p.group_m2);
    if (KEEP && 2 * thread < TN) *reinterpret_cast<float2*>(&shared.shift[consumer][2 * thread]) = m2;
    if (!staging) return;
#pragma unroll
    for (int i = 0; i < TN / 8; ++i)
      stage_pairs<T>(staging, own, i, make_float2(acc[4 * i], acc[4 * i + 1]), make_float2(acc[4 * i + 2], acc[4 * i + 3]));
  }

  // The i-th pairs of columns of a block to where TMA reads them as V.
  template <class V>
  __device__ __forceinline__ void stage(unsigned char* staging, Tile tile, int block, int i, float2 low, float2 high) const {
    if constexpr (G::kOverlaps) RowsApart<Shape>(own, tile).template stage<V>(staging, block, i, low, high);
    else stage_pairs<V>(staging, own, i, low, high);
  }
  // Likewise straight to memory.
  template <class V>
  __device__ __forceinline__ void store_pairs(float2 low, float2 high, int i, V* to, Tile tile, int batch,
                                              int features) const {
    const int column = tile.n * TN + i * 8 + lane % 4 * 2;
    const i64 row = static_cast<i64>(2 * tile.m + consumer) * kGroupRows + own;
    if (column >= features) return;
    if (row < batch) store_pair<G::kSplit>(to + row * features + column, low, column, features);
    if (row + 8 < batch) store_pair<G::kSplit>(to + (row + 8) * features + column, high, column, features);
  }
  template <bool STAGED>
  __device__ __forceinline__ void store_product(const Accumulators& acc, int, unsigned char* staging, T* product, Tile tile,
                                                int batch, int features) const {
#pragma unroll
    for (int i = 0; i < TN / 8; ++i)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float* pairs = acc + block * kOfBlock + 4 * i;
        const float2 low = make_float2(pairs[0], pairs[1]), high = make_float2(pairs[2], pairs[3]);
        if constexpr (STAGED) stage<T>(staging, tile, block, i, low, high);
        else store_pairs(low, high, i, product, tile, batch, features);
      }
  }

  // Training: coefficients for values that lack their group's mean.
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

  // A number for each of the tile's features from the accumulators.
  __device__ __forceinline__ void subtract(const float* columns, Accumulators& acc) const {
#pragma unroll
    for (int i = 0; i < TN / 8; ++i) {
      const float2 v = *reinterpret_cast<const float2*>(columns + i * 8 + (lane % 4) * 2);
#pragma unroll
      for (int q = 0; q < 4 * kBlocks; ++q) acc[q / 4 * kOfBlock + 4 * i + q % 4] -= q % 2 ? v.y : v.x;
    }
  }

  // Evaluation: the tile's coefficients are in this buffer.
  template <class Shared>
  __device__ __forceinline__ void load_coefficients(const Shared&, int buffer) {
    coefficients = buffer;
  }

  // y, to the staging buffer or straight to memory.
  template <class Activation, bool STAGED, class Shared>
  __device__ __forceinline__ void store_results(const Accumulators& acc, int, const Shared& shared, unsigned char* staging,
                                                Y* y, Tile tile, int batch, int features) const {
    constexpr int kPairs = 4;
    const int at = coefficients;
#pragma unroll
    for (int i0 = 0; i0 < TN / 8; i0 += kPairs) {
      float2 slope[kPairs], shift[kPairs], rest[kPairs] = {};
      load_pairs(&shared.slope[at][i0 * 8], slope);
      load_pairs(&shared.shift[at][i0 * 8], shift);
      if constexpr (G::kHasRest) load_pairs(&shared.rest[at][i0 * 8], rest);
#pragma unroll
      for (int q = 0; q < kPairs && i0 + q < TN / 8; ++q) {
        const int i = i0 + q;
        const Coefficients left = {slope[q].x, shift[q].x, rest[q].x}, right = {slope[q].y, shift[q].y, rest[q].y};
        const auto value = [&](const float* pair) {
          return make_float2(Activation::value(left.template value<G::kHasRest>(pair[0])),
                             Activation::value(right.template value<G::kHasRest>(pair[1])));
        };
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const float* pairs = acc + block * kOfBlock + 4 * i;
          const float2 a = value(pairs), b = value(pairs + 2);
          if constexpr (STAGED) stage<Y>(staging, tile, block, i, a, b);
          else store_pairs(a, b, i, y, tile, batch, features);
        }
      }
      compiler_barrier();
    }
  }

  // Groups of eight accumulators, two rows by two pairs of columns, of which a part of 64 × 64 has four: N numbers of their
  // features.
  template <int N>
  struct Columns {
    const float (&columns)[N][TN];
    float2 v[N][2];

    __device__ __forceinline__ Columns(const AccumulatorNormal&, const float (&columns_)[N][TN]) : columns(columns_) {}
    __device__ __forceinline__ void move_to(int group) {
#pragma unroll
      for (int n = 0; n < N; ++n) load_pairs(&columns[n][group * 16], v[n]);
    }
    __device__ __forceinline__ float at(int n, int q) const { return q % 2 ? v[n][q / 4].y : v[n][q / 4].x; }
  };
  // Group k of a part that lies in shared memory as V.
  template <class V>
  __device__ __forceinline__ void load_group(const unsigned char* part, int k, float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned char* pairs = part + staged_pair(own, 2 * k + i);
#pragma unroll
      for (int q = 0; q < 4; ++q)
        v[4 * i + q] = element_of(*reinterpret_cast<const u32*>(pairs + q / 2 * 8 * kRowBytes), q % 2, V{});
    }
  }
  template <class V>
  __device__ __forceinline__ void store_group(unsigned char* part, int k, const float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      stage_pairs<V>(part, own, 2 * k + i, make_float2(v[4 * i], v[4 * i + 1]), make_float2(v[4 * i + 2], v[4 * i + 3]));
  }

  // In place of rows beyond the batch, which hold anything: for the i-th pair of columns what `value(i)` gives.
  template <class Value>
  __device__ __forceinline__ void fill_beyond(int batch, Tile tile, const Value& value, Accumulators& acc) const {
    const int rows = batch - (2 * tile.m + consumer) * kGroupRows;
    if (rows >= kGroupRows) return;
#pragma unroll
    for (int i = 0; i < TN / 8; ++i) {
      const float2 v = value(i);
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (own + q / 2 * 8 >= rows) acc[4 * i + q] = q % 2 ? v.y : v.x;
    }
  }

  // A feature's number there, of `columns`.
  __device__ __forceinline__ void copy_beyond(int batch, Tile tile, const float* columns, Accumulators& acc) const {
    const auto value = [&](int i) { return *reinterpret_cast<const float2*>(columns + i * 8 + (lane % 4) * 2); };
    fill_beyond(batch, tile, value, acc);
  }

  // Sums over rows of two numbers for each accumulator. A thread's two rows of both take the accumulators' place: of a pair of
  // columns four numbers.
  struct ColumnSums {
    __device__ __forceinline__ void add(Accumulators& acc, int group, const float (&v)[8], const float (&w)[8]) const {
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        const int of = q / 4 * 4 + q % 2;  // its first row
        acc[8 * group + q] = q % 4 < 2 ? v[of] + v[of + 2] : w[of] + w[of + 2];
      }
    }
  };
  // To group_sum and group_dot.
  template <class Params>
  __device__ __forceinline__ void store_sums(const Features<Params>& f, float (&shared)[4][TN], Tile tile, const ColumnSums&,
                                             const Accumulators& acc) const {
    const float2 sum = column_sums<TN>(shared, consumer, [&](int i) { return acc[i / 2 * 4 + i % 2]; });
    store_partial(f, tile, sum, f.p.group_sum);
    named_barrier_sync(1 + consumer, 128);  // the sums are read before others are written
    const float2 dot = column_sums<TN>(shared, consumer, [&](int i) { return acc[i / 2 * 4 + 2 + i % 2]; });
    store_partial(f, tile, dot, f.p.group_dot);
    named_barrier_sync(1 + consumer, 128);
  }
};

}  // namespace gemmnorm
