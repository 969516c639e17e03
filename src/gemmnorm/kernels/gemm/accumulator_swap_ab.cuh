// A consumer's accumulator tile with A and B swapped (W · xᵀ): 64 features and kRows rows. A thread has two features, eight
// apart, and a quarter of the rows, so that what belongs to a feature is in its registers, and a sum over rows takes two
// shuffles.
#pragma once
#include "gemm/features.cuh"
#include "gemm/staging.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

// acc[4i] and acc[4i + 1] are the first feature's, of rows 8i + 2·(lane % 4) and the next; then come the second's.
template <class G>
struct AccumulatorSwapAB {
  using T = typename G::T;
  using Y = typename G::Y;
  using Shape = typename G::Shape;
  using Accumulators = typename G::Accumulators;
  static constexpr int kRows = Shape::kRows, TN = G::TN;
  static constexpr int kOctets = 8;  // of rows, whose sums are taken together
  // The named barrier of the threads that finish features together; + consumer, where each has its own.
  static constexpr int kFinishBarrier = Shape::kSharesFeatures ? 1 : 3;
  static constexpr int kFinishThreads = Shape::kSharesFeatures ? 128 : 256;

  int consumer, lane, feature;  // the first of the two, in the tile
  float mean[2];
  Coefficients of[2];

  __device__ __forceinline__ explicit AccumulatorSwapAB(int consumer_)
      : consumer(consumer_), lane(threadIdx.x % 32),
        feature(Shape::own_feature(consumer_) + threadIdx.x % 128 / 32 * 16 + lane / 4) {}

  __device__ __forceinline__ int first_row(Tile tile) const { return Shape::first_row(tile, consumer); }
  // Where the lane begins to stage: the 16 bytes of one of 16 rows that it names for its warp, or a float of its own. Warps 0
  // and 1 have the first 32 features, which is a box of float32, the others the second, after those of all PARTS.
  template <class V, int PARTS = Shape::kParts / Shape::template kStorePasses<V>>
  __device__ __forceinline__ int staged_at() const {
    const int warp = feature / 16 % 4;
    if constexpr (sizeof(V) == 2) {
      const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
      return row * kRowBytes + (chunk ^ row % 8) * 16;
    } else {
      const int row = lane % 4 * 2, chunk = warp % 2 * 4 + lane / 16;
      const int box = warp / 2 * PARTS * kPartBytes;
      return opaque(box + row * kRowBytes + (chunk ^ row) * 16 + lane / 4 % 4 * 4);
    }
  }

  // Over the four lanes that share two features.
  __device__ __forceinline__ static float over_lanes(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }

  // A partial statistic of each feature to `own`, where the block needs it, and to [groups, features]: to the row of the
  // first kGroupRows rows; to those of the others zero or, of a mean, the same number. ALWAYS: else only where the
  // product is kept.
  template <bool MEAN, bool ALWAYS, class Params>
  __device__ __forceinline__ void store_partial(const Features<Params>& f, Tile tile, const float (&v)[2], float* to,
                                                float* own) const {
    const int part = lane % 4, row = first_row(tile) + part * kGroupRows;
    if (part * kGroupRows >= (ALWAYS || f.p.keep_product ? kRows : kGroupRows)) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = feature + 8 * c, j = tile.n * TN + column;
      if (j < f.p.features && row < f.p.batch)
        to[static_cast<i64>(row / kGroupRows) * f.p.features + j] = MEAN || part == 0 ? v[c] : 0.0f;
      if (own && part == 0) own[column] = v[c];
    }
  }

  // The means of the tile's rows. KEEP: in shared memory too.
  template <bool KEEP, bool ROUNDS, class Shared, class Params>
  __device__ __forceinline__ void take_means(const Features<Params>& f, Shared& shared, Tile tile, Accumulators& acc) {
    fill_beyond(f.p.batch, tile, [](int) { return 0.0f; }, acc);
    const int rows = max(f.p.batch - first_row(tile), 1);  // or more than there are
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < kRows / 8; i += kOctets) {  // short sums round less
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
    for (int c = 0; c < 2; ++c) mean[c] = over_lanes(sum[c]) / kRows;
    if (rows < kRows) {  // exactly, so that nothing is left of a constant column
      mean[0] = mean[0] * kRows / rows;
      mean[1] = mean[1] * kRows / rows;
    }
    store_partial<true, ROUNDS>(f, tile, mean, f.p.group_mean, KEEP ? shared.slope[0] : nullptr);
  }

  // Subtracts them, rounds to T if ROUNDS, and sums up the squares of what is left: M2. Also writes it to `staging`, if not
  // null.
  template <bool KEEP, bool ROUNDS, class Shared, class Params>
  __device__ __forceinline__ void take_squares(const Features<Params>& f, Shared& shared, Tile tile, Accumulators& acc,
                                               unsigned char* staging) const {
    const int at = staged_at<T>();
    fill_beyond(f.p.batch, tile, [&](int c) { return mean[c]; }, acc);  // they count for nothing
    float m2[2] = {};
#pragma unroll
    for (int i = 0; i < kRows / 8; i += kOctets) {
      float sum[2] = {};
#pragma unroll
      for (int o = i; o < i + kOctets; o += 2) {
#pragma unroll
        for (int q = 0; q < 8; ++q) acc[4 * o + q] -= mean[q / 2 % 2];
        if constexpr (sizeof(T) == 2) {
          u32 pairs[4];
#pragma unroll
          for (int p = 0; p < 4; ++p) pairs[p] = pack(acc[4 * o + 2 * p], acc[4 * o + 2 * p + 1], T{});
          if (staging) stmatrix_trans(staging + o * 8 * kRowBytes + at, pairs);
          if constexpr (ROUNDS) {
#pragma unroll
            for (int q = 0; q < 8; ++q) acc[4 * o + q] = opaque(element_of(pairs[q / 2], q % 2, T{}));
          }
        }
#pragma unroll
        for (int q = 0; q < 8; ++q) sum[q / 2 % 2] += acc[4 * o + q] * acc[4 * o + q];
      }
      m2[0] += sum[0];
      m2[1] += sum[1];
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) m2[c] = over_lanes(m2[c]);
    store_partial<false, ROUNDS>(f, tile, m2, f.p.group_m2, KEEP ? shared.shift[0] : nullptr);
  }

  // Two octets of rows, straight to memory. Of a whole tile nothing is compared.
  template <class V>
  __device__ __forceinline__ void store_octets(const float (&v)[8], int i, V* to, Tile tile, int batch, int features) const {
    const int row = first_row(tile) + lane % 4 * 2, j = tile.n * TN + feature;
    const bool whole = first_row(tile) + kRows <= batch && (tile.n + 1) * TN <= features;
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
  // The same to where TMA reads them as V: `at` is the lane's place in the first octets of the store pass.
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
  __device__ __forceinline__ void store_product(const Accumulators& acc, int store_pass, unsigned char* staging, T* product,
                                                Tile tile, int batch, int features) const {
    constexpr int kOctetsOfPass = kRows / 8 / (STAGED ? Shape::template kStorePasses<T> : 1);
    const int at = staged_at<T>();
#pragma unroll
    for (int i = 0; i < kOctetsOfPass; i += 2) {
      float v[8];
#pragma unroll
      for (int q = 0; q < 8; ++q) v[q] = acc[4 * (store_pass * kOctetsOfPass + i) + q];
      if constexpr (STAGED) stage_octets<T>(v, staging + i * 8 * kRowBytes, at);
      else store_octets(v, i, product, tile, batch, features);
    }
  }

  // Training: coefficients for values that lack the mean of the tile's rows.
  template <class Shared>
  __device__ __forceinline__ void take_coefficients(Shared& shared) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int j = feature + 8 * c;
      of[c].slope = shared.finished_slope[j];
      of[c].shift = of[c].slope * (mean[c] - shared.mean[j]) + shared.finished_shift[j];
    }
  }

  // A number for each of the tile's features from the accumulators.
  __device__ __forceinline__ void subtract(const float* columns, Accumulators& acc) const {
    const float v[2] = {columns[feature], columns[feature + 8]};
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) acc[i] -= v[i / 2 % 2];
  }

  // Evaluation: the tile's coefficients out of shared memory.
  template <class Shared>
  __device__ __forceinline__ void load_coefficients(const Shared& shared, int buffer) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      of[c].slope = shared.slope[buffer][feature + 8 * c];
      of[c].shift = shared.shift[buffer][feature + 8 * c];
      if constexpr (G::kHasRest) of[c].rest = shared.rest[buffer][feature + 8 * c];
    }
  }

  // y, to the staging buffer, in store passes, or straight to memory.
  template <class Activation, bool STAGED, class Shared>
  __device__ __forceinline__ void store_results(const Accumulators& acc, int store_pass, const Shared&, unsigned char* staging,
                                                Y* y, Tile tile, int batch, int features) const {
    constexpr int kOctetsOfPass = kRows / 8 / (STAGED ? Shape::template kStorePasses<Y> : 1);
    const int at = staged_at<Y>();
#pragma unroll
    for (int i = 0; i < kOctetsOfPass; i += 2) {
      float v[8];
#pragma unroll
      for (int q = 0; q < 8; ++q)
        v[q] = Activation::value(of[q / 2 % 2].template value<G::kHasRest>(acc[4 * (store_pass * kOctetsOfPass + i) + q]));
      if constexpr (STAGED) stage_octets<Y>(v, staging + i * 8 * kRowBytes, at);
      else store_octets(v, i, y, tile, batch, features);
    }
  }

  // Groups of eight accumulators, two octets of rows, of which a part of 64 × 64 has four: N numbers of their features.
  template <int N>
  struct Columns {
    float v[N][2];

    __device__ __forceinline__ Columns(const AccumulatorSwapAB& of, const float (&columns)[N][TN]) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        v[n][0] = columns[n][of.feature];
        v[n][1] = columns[n][of.feature + 8];
      }
    }
    __device__ __forceinline__ void move_to(int) {}
    __device__ __forceinline__ float at(int n, int q) const { return v[n][q / 2 % 2]; }
  };
  // Group k of a part that lies in shared memory as V.
  template <class V>
  __device__ __forceinline__ void load_group(const unsigned char* part, int k, float (&v)[8]) const {
    const unsigned char* octets = part + k * 16 * kRowBytes;
    const int at = staged_at<V, 1>();
    if constexpr (sizeof(V) == 2) {
      u32 pairs[4];
      ldmatrix_trans(octets + at, pairs);
#pragma unroll
      for (int q = 0; q < 8; ++q) v[q] = element_of(pairs[q / 2], q % 2, V{});
    } else {
#pragma unroll
      for (int q = 0; q < 8; ++q)
        v[q] = *reinterpret_cast<const float*>(octets + (at ^ q / 2 % 2 * 32 ^ q % 2 * 16) + (q / 4 * 8 + q % 2) * kRowBytes);
    }
  }
  template <class V>
  __device__ __forceinline__ void store_group(unsigned char* part, int k, const float (&v)[8]) const {
    stage_octets<V>(v, part + k * 16 * kRowBytes, staged_at<V, 1>());
  }

  // In place of rows beyond the batch, which hold anything: what `value` gives for the first or the second feature.
  template <class Value>
  __device__ __forceinline__ void fill_beyond(int batch, Tile tile, const Value& value, Accumulators& acc) const {
    const int rows = batch - first_row(tile);
    if (rows >= kRows) return;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i)
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= rows) acc[i] = value(i / 2 % 2);
  }
  // A feature's number there, of `columns`.
  __device__ __forceinline__ void copy_beyond(int batch, Tile tile, const float* columns, Accumulators& acc) const {
    fill_beyond(batch, tile, [&](int c) { return columns[feature + 8 * c]; }, acc);
  }

  // Sums over rows of two numbers for each accumulator.
  struct ColumnSums {
    float sum[2] = {}, dot[2] = {};

    __device__ __forceinline__ void add(const Accumulators&, int, const float (&v)[8], const float (&w)[8]) {
      float of_v[2] = {}, of_w[2] = {};  // short sums round less
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        of_v[q / 2 % 2] += v[q];
        of_w[q / 2 % 2] += w[q];
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        sum[c] += of_v[c];
        dot[c] += of_w[c];
      }
    }
  };
  // To group_sum and group_dot.
  template <class Shared, class Params>
  __device__ __forceinline__ void store_sums(const Features<Params>& f, Shared&, Tile tile, ColumnSums& sums,
                                             const Accumulators&) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      sums.sum[c] = over_lanes(sums.sum[c]);
      sums.dot[c] = over_lanes(sums.dot[c]);
    }
    store_partial<false, false>(f, tile, sums.sum, f.p.group_sum, nullptr);
    store_partial<false, false>(f, tile, sums.dot, f.p.group_dot, nullptr);
  }
};

}  // namespace gemmnorm
