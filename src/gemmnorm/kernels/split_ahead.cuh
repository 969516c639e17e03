// Splitting rows of x and the weight inside the fused GEMM, after those that split_rows has split. Of a weight that was split
// long before (`prepare`) every row is read, and compared with what was split.
#pragma once
#include "ahead.cuh"
#include "split.cuh"

namespace gemmnorm {

constexpr int kPieceColumns = 1024;  // of a row, that the copy engine brings at a time
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
  const float *x, *weight;           // [batch, in_features], [features, in_features]
  half *split_x, *split_weight;      // as split_rows leaves them
  int *x_exponents, *weight_exponents;
  float *weight_largest, *weight_total;
  u32* most;
  const u64* weight_checksums;       // null, or the weight is split already: what its rows were then
  // A lane's words of a piece, four elements each; how many of them it splits at once.
  static constexpr int kWords = kPieceColumns / 128, kAtOnce = 2;

  // The first row of the weight that is left, to be split or to be compared.
  __device__ __forceinline__ int first_of_weight() const { return weight_checksums ? 0 : weight_rows; }
  // The n-th of the rows that are left: x's, then the weight's.
  __device__ __forceinline__ const float* row_left(int n) const {
    const int left_of_x = batch - x_rows;
    return n < left_of_x ? x + static_cast<i64>(x_rows + n) * in_features
                         : weight + static_cast<i64>(first_of_weight() + n - left_of_x) * in_features;
  }

  // Where the next piece to ask for lies: which of the rows that are left, and the piece's first column.
  struct Cursor {
    int row, first;
  };
  // Asks the copy engine for a piece, as one thread, and goes on to the next.
  __device__ __forceinline__ void request(PieceRing& ring, int slot, Cursor& c, int left, int stride) const {
    if (c.row >= left) return;
    const u32 bytes = min(kPieceColumns, in_features - c.first) * 4;
    barrier_expect(&ring.arrived[slot], bytes);
    copy_bytes_to_shared(ring.pieces[slot], row_left(c.row) + c.first, bytes, &ring.arrived[slot]);
    c.first += kPieceColumns;
    if (c.first < in_features) return;
    c.first = 0;
    c.row += stride;
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
  __device__ __forceinline__ static void store_scaled(half* row, int column, const Vec<float, 4>& v, PowerOfTwo scale) {
    const float scaled[4] = {times(v.at[0], scale), times(v.at[1], scale), times(v.at[2], scale), times(v.at[3], scale)};
    store_split(row, column, scaled);
  }

  // The lane's words of a piece from the begin-th on, zeros beyond the row's end. Nothing waits for a condition.
  template <int WORDS>
  __device__ __forceinline__ void read_words(const float* piece, int first, int begin, Vec<float, 4> (&v)[WORDS]) const {
    const int column = begin * 128 + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) v[i] = load<float, 4>(piece + column + i * 128);
    if (first + kPieceColumns > in_features) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        if (first + column + i * 128 >= in_features) v[i] = {};
    }
  }

  // The warp's share of the rows that are left: every so many-th. The copy engine runs kPieces ahead, into the next row.
  template <int TM, int TN>
  __device__ __forceinline__ void split(PieceRing& ring, const Raster& raster, int worker) const {
    const int stride = kWorkers * gridDim.x, first_row = static_cast<int>(kWorkers * blockIdx.x) + worker;
    const int left_of_x = batch - x_rows, left = left_of_x + features - first_of_weight();
    Pieces pieces = {*this, ring, {first_row, 0}, left, stride};
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
      done<TM, TN>(raster, of_x, row);
    }
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
      barrier_wait(&ring.arrived[slot], parity);
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
        read_words(piece, first, begin, v);
#pragma unroll
        for (int i = 0; i < kWords / 2; ++i) code += checksum(first + ((begin + i) * 32 + lane) * 4, v[i]);
      }
      pieces.release();
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) code += __shfl_xor_sync(~0u, code, bit);
    if (lane == 0 && code != weight_checksums[row]) weight_largest[row] = __uint_as_float(0x7F800000u);
  }

  // A row is read once: its exponent is that of the first piece, and a row that does not fit, up to 65504, or begins with
  // zeros and is small, is split once more.
  __device__ __forceinline__ void split_row(Pieces& pieces, int n, int row, bool of_x) const {
    const int lane = threadIdx.x % 32, padded = (in_features + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
    half* target = (of_x ? split_x : split_weight) + static_cast<i64>(row) * 2 * padded;
    u32 bits = 0;
    float sum = 0.0f;
    int exponent = 0;
    PowerOfTwo scale = {};
#pragma unroll 1
    for (int first = 0; first < in_features; first += kPieceColumns) {
      const float* piece = pieces.wait();
      if (first == 0) {
        u32 begun = 0;
#pragma unroll 1
        for (int begin = 0; begin < kWords; begin += kAtOnce) {
          Vec<float, 4> v[kAtOnce];
          read_words(piece, first, begin, v);
          begun = max(begun, largest_of(v));
        }
        exponent = row_exponent(warp_max(begun));
        scale = power_of_two(-exponent);
      }
#pragma unroll 1
      for (int begin = 0; begin < kWords; begin += kAtOnce) {
        Vec<float, 4> v[kAtOnce];
        read_words(piece, first, begin, v);
        bits = max(bits, largest_of(v));
        const int column = first + begin * 128 + lane * 4;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          sum += (fabsf(v[i].at[0]) + fabsf(v[i].at[1])) + (fabsf(v[i].at[2]) + fabsf(v[i].at[3]));
          if (column + i * 128 < padded) store_scaled(target, column + i * 128, v[i], scale);
        }
      }
      pieces.release();
    }
    bits = warp_max(bits);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    const int wanted = row_exponent(bits);
    if (wanted < exponent || !(times(__uint_as_float(bits), scale) <= 65504.0f)) {
      exponent = wanted;
      scale = power_of_two(-exponent);
      const float* source = row_left(n);
#pragma unroll 1
      for (int c = lane * 4; c < padded; c += 128)
        store_scaled(target, c, c < in_features ? load<float, 4>(source + c) : Vec<float, 4>{}, scale);
    }
    if (lane == 0) {
      (of_x ? x_exponents : weight_exponents)[row] = exponent;
      if (!of_x) {
        weight_largest[row] = __uint_as_float(bits);
        weight_total[row] = sum;
      } else {
        atomicMax(&most[0], bits);
        atomicMax(&most[1], __float_as_uint(sum) & 0x7FFFFFFFu);
      }
    }
  }
};

}  // namespace gemmnorm
