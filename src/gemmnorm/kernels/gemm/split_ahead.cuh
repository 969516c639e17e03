// Splitting rows of x and the weight inside the fused GEMM, after those that split_rows has split. Of a weight that was split
// long before (`prepare`) every row is read, and compared with what was split.
#pragma once
#include "gemm/ahead.cuh"
#include "memory_bound/split.cuh"

namespace gemmnorm {

constexpr int kPieceColumns = 1024;  // of a row, that TMA brings at a time
constexpr int kPieces = 3;           // in flight, for each warp

struct PieceRing {
  alignas(128) float pieces[kPieces][kPieceColumns];
  u64 arrived[kPieces];
};
template <bool AHEAD>
struct PieceRings {};
template <>
struct PieceRings<true> {
  PieceRing rings[kWorkers];
};

// The operands, and what is known of them.
struct SplitAhead : RowsAhead {
  using Element = half;
  static constexpr int kStepsOfChunk = 1 << 30;  // a row has one exponent: all of it is one chunk
  const float *x, *weight;           // [batch, in_features], [features, in_features]
  half *split_x, *split_weight;      // as split_rows leaves them
  int *x_exponents, *weight_exponents;
  float *weight_largest, *weight_total;
  u32* most;
  const u64* weight_checksums;       // null, or the weight is split already: what its rows were then
  // A lane's words of a piece, four elements each; how many of them it has in flight.
  static constexpr int kWords = kPieceColumns / 128, kAtOnce = 4;

  // The first row of the weight that is left, to be split or to be compared.
  __device__ __forceinline__ int first_of_weight() const { return weight_checksums ? 0 : weight_rows; }
  // The n-th of the rows that are left: x's, then the weight's.
  __device__ __forceinline__ const float* row_left(int n) const {
    const int left_of_x = batch - x_rows;
    return n < left_of_x ? x + static_cast<i64>(x_rows + n) * in_features
                         : weight + static_cast<i64>(first_of_weight() + n - left_of_x) * in_features;
  }

  // A row of an operand, split.
  __device__ __forceinline__ half* row_of(bool of_x, int row) const {
    return (of_x ? split_x : split_weight) + static_cast<i64>(row) * ((in_features + kSplitColumns - 1) / kSplitColumns) * 2 * kSplitColumns;
  }

  // Where the next piece to ask for lies: which of the rows that are left, that row, and the piece's first column.
  struct Cursor {
    int row;
    const float* source;
    int first;
  };
  // Asks TMA for a piece, as one thread, and goes on to the next.
  __device__ __forceinline__ void request(PieceRing& ring, int slot, Cursor& c, int left, int stride) const {
    if (c.row >= left) return;
    const u32 bytes = min(kPieceColumns, in_features - c.first) * 4;
    mbarrier_expect_tx(&ring.arrived[slot], bytes);
    bulk_load(ring.pieces[slot], c.source + c.first, bytes, &ring.arrived[slot]);
    c.first += kPieceColumns;
    if (c.first < in_features) return;
    c.first = 0;
    c.row += stride;
    c.source = row_left(c.row);
  }

  template <int WORDS>
  __device__ __forceinline__ static u32 largest_of(const Vec<float, 4> (&v)[WORDS]) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) bits = max(bits, __float_as_uint(v[i].at[q]) & 0x7FFFFFFFu);
    return bits;
  }
  __device__ __forceinline__ static u32 warp_max(u32 bits) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, bit));
    return bits;
  }
  // The lane's words of a piece from the begin-th on, zeros beyond the row's end. Nothing waits for a condition.
  template <int WORDS>
  __device__ __forceinline__ static void read_words(const float* piece, int left /* columns of the row */, int begin,
                                                    Vec<float, 4> (&v)[WORDS]) {
    const int column = begin * 128 + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) v[i] = load<float, 4>(piece + column + i * 128);
    if (left < kPieceColumns) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        if (column + i * 128 >= left) v[i] = {};
    }
  }

  // The warp's share of the rows that are left: every so many-th. TMA runs kPieces ahead, into the next row.
  template <int TM, int TN>
  __device__ __forceinline__ void split(PieceRing& ring, const Raster& raster, int worker) const {
    const int stride = kWorkers * gridDim.x, first_row = static_cast<int>(kWorkers * blockIdx.x) + worker;
    const int left_of_x = batch - x_rows, left = left_of_x + features - first_of_weight();
    Pieces pieces = {*this, ring, {first_row, row_left(first_row), 0}, left, stride};
    pieces.begin();
#pragma unroll 1
    for (int n = first_row; n < left; n += stride) {
      const bool of_x = n < left_of_x;
      const int row = of_x ? x_rows + n : first_of_weight() + n - left_of_x;
      if (!of_x && weight_checksums) {
        compare_row(pieces, row);
        continue;
      }
      split_row(pieces, n, row, of_x);
      done<TM, TN>(raster, of_x, row, 0, 1);
    }
  }

  // In evaluation: puts the features that the running deviation says are lost on the list, as a warp: of the rows of the weight
  // those that it has split or compared, and its share of those that were split before.
  template <int TM, class Features>
  __device__ __forceinline__ void find_features(const Features& f, const Raster& raster, int worker) const {
    const int lane = threadIdx.x % 32, stride = kWorkers * gridDim.x, warp = kWorkers * blockIdx.x + worker;
    for (int band = lane; band < kBands && band * band_rows<TM>(raster) < batch; band += 32) wait_for_band<TM>(raster, band, 0);
    __syncwarp();  // `most` is known, and what lane 0 has written of the warp's rows
    for (int j = warp * 32 + lane; j < first_of_weight(); j += stride * 32) f.guard.raises(j, f.running_deviation(j));
    const int before = first_of_weight() - (batch - x_rows);  // from where the warp's rows are counted to features
    for (int j = before + warp + lane * stride; j < features; j += stride * 32)
      if (j >= first_of_weight()) f.guard.raises(j, f.running_deviation(j));
  }

  // The pieces of the warp's rows, one after the other.
  struct Pieces {
    const SplitAhead& ahead;
    PieceRing& ring;
    Cursor cursor;
    int left, stride;
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void begin() {
      if (threadIdx.x % 32 == 0)
        for (int s = 0; s < kPieces; ++s) ahead.request(ring, s, cursor, left, stride);
    }
    __device__ __forceinline__ const float* wait() const {
      mbarrier_wait(&ring.arrived[slot], parity);
      return ring.pieces[slot];
    }
    __device__ __forceinline__ void release() {
      __syncwarp();  // everybody has read the piece
      if (threadIdx.x % 32 == 0) ahead.request(ring, slot, cursor, left, stride);
      if (++slot == kPieces) {
        slot = 0;
        parity ^= 1;
      }
    }
  };

  // A row that has changed is computed again, from the weight itself: nothing is small beside infinity.
  __device__ __forceinline__ void compare_row(Pieces& pieces, int row) const {
    const int lane = threadIdx.x % 32;
    u64 code = 0;
#pragma unroll 1
    for (int first = 0; first < in_features; first += kPieceColumns) {
      const float* piece = pieces.wait();
#pragma unroll 1
      for (int begin = 0; begin < kWords; begin += kWords / 2) {
        Vec<float, 4> v[kWords / 2];
        read_words(piece, in_features - first, begin, v);
#pragma unroll
        for (int i = 0; i < kWords / 2; ++i) code += checksum(first + ((begin + i) * 32 + lane) * 4, v[i]);
      }
      pieces.release();
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) code += __shfl_xor_sync(~0u, code, bit);
    if (lane == 0 && code != weight_checksums[row]) weight_largest[row] = __uint_as_float(0x7F800000u);
  }

  // What is known of a row once all of it has been read.
  struct Sizes {
    u32 largest;  // bits
    float total;
  };
  // The lane's words of a piece of which `left` columns belong to the row, and `padded` are written; WHOLE: all of them.
  template <bool WHOLE>
  __device__ __forceinline__ static void split_piece(const float* piece, half* target /* the lane's first */, int left,
                                                     int padded, float scale, Sizes& sizes) {
    constexpr int kTogether = WHOLE ? kAtOnce : 1;
#pragma unroll 1
    for (int begin = 0; begin < kWords; begin += kTogether) {
      Vec<float, 4> v[kTogether];
      read_words(piece, WHOLE ? kPieceColumns : left, begin, v);
      sizes.largest = max(sizes.largest, largest_of(v));
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        sizes.total += (fabsf(v[i].at[0]) + fabsf(v[i].at[1])) + (fabsf(v[i].at[2]) + fabsf(v[i].at[3]));
        const float scaled[4] = {v[i].at[0] * scale, v[i].at[1] * scale, v[i].at[2] * scale, v[i].at[3] * scale};
        if (WHOLE || (begin + i) * 128 + threadIdx.x % 32 * 4 < padded) store_split(target + (begin + i) * 256, 0, scaled);
      }
    }
  }

  // A row is read once: its exponent is that of its first piece, and a row that does not fit, up to 65504, or begins with
  // zeros and is small, or whose exponent takes two factors, is split once more.
  __device__ __forceinline__ void split_row(Pieces& pieces, int n, int row, bool of_x) const {
    constexpr int kLeastOfOneFactor = -127;
    const int lane = threadIdx.x % 32, padded = (in_features + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
    half* at = row_of(of_x, row) + lane / 16 * 2 * kSplitColumns + lane % 16 * 4;
    Sizes sizes = {};
    int exponent = 0;
    float scale = 0.0f;
#pragma unroll 1
    for (int first = 0; first < in_features; first += kPieceColumns) {
      const float* piece = pieces.wait();
      if (first == 0) {
        u32 begun = 0;
#pragma unroll 1
        for (int begin = 0; begin < kWords; begin += kAtOnce) {
          Vec<float, 4> v[kAtOnce];
          read_words(piece, in_features, begin, v);
          begun = max(begun, largest_of(v));
        }
        exponent = max(row_exponent(warp_max(begun)), kLeastOfOneFactor);
        scale = __uint_as_float(static_cast<u32>(127 - exponent) << 23);
      }
      const int left = in_features - first;
      if (left >= kPieceColumns) split_piece<true>(piece, at, left, left, scale, sizes);
      else split_piece<false>(piece, at, left, padded - first, scale, sizes);
      at += 2 * kPieceColumns;
      pieces.release();
    }
    sizes.largest = warp_max(sizes.largest);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sizes.total += __shfl_xor_sync(~0u, sizes.total, bit);
    const int wanted = row_exponent(sizes.largest);
    if (wanted < exponent || !(__uint_as_float(sizes.largest) * scale <= 65504.0f)) {
      exponent = wanted;
      const PowerOfTwo factors = power_of_two(-exponent);
      const float* source = row_left(opaque(n));
      half* target = row_of(of_x, opaque(row));
#pragma unroll 1
      for (int c = lane * 4; c < padded; c += 128) {
        const Vec<float, 4> v = c < in_features ? load<float, 4>(source + c) : Vec<float, 4>{};
        const float scaled[4] = {times(v.at[0], factors), times(v.at[1], factors), times(v.at[2], factors), times(v.at[3], factors)};
        store_split(target, c, scaled);
      }
    }
    if (lane == 0) {
      (of_x ? x_exponents : weight_exponents)[row] = exponent;
      if (!of_x) {
        weight_largest[row] = __uint_as_float(sizes.largest);
        weight_total[row] = sizes.total;
      } else {
        atomicMax(&most[0], sizes.largest);
        atomicMax(&most[1], __float_as_uint(sizes.total) & 0x7FFFFFFFu);
      }
    }
  }
};

}  // namespace gemmnorm
