// Operand conversion beside the main loop for float32: rows are split into two float16 (arithmetic in
// common/fp16x2.cuh). A warp brings rows into shared memory by bulk copies of whole words, kPieces ahead. Of a weight that was
// split long before (`prepare`) every row is read all the same, and compared with what was split.
#pragma once
#include "gemm/conversion.cuh"
#include "gemm/features.cuh"
#include "memory_bound/split.cuh"

namespace gemmnorm {

constexpr int kPieceColumns = 1024;  // of a row, in one bulk copy
constexpr int kPieces = 3;           // in flight, for each warp

struct PieceRing {
  alignas(128) float pieces[kPieces][kPieceColumns + 4];
  u64 arrived[kPieces];
};

template <class G, class Params>
struct SplitConversion : ConvertedRows<G, Params> {
  using Base = ConvertedRows<G, Params>;
  using Base::p, Base::scheduler, Base::x_rows, Base::weight_rows;
  struct Shared {
    PieceRing rings[kConversionWarps];

    __device__ __forceinline__ void init() {
      for (int i = 0; i < kConversionWarps * kPieces; ++i) mbarrier_init(&rings[i / kPieces].arrived[i % kPieces], 1);
    }
  };
  static constexpr bool kConverts = true;
  static constexpr int kProducerRegs = 72;

  // A row has one exponent: all of it is one chunk.
  __device__ __forceinline__ SplitConversion(const Params& p, const TileScheduler& scheduler, u32* ready)
      : Base(p, scheduler, ready, 1, 1, 1) {}

  __device__ __forceinline__ void wait_for(Tile tile, int k) const {
    if (k == 0) this->wait_for_chunk(tile, 0);
  }
  __device__ __forceinline__ void convert(Shared& shared, int worker) const {
    split(shared.rings[worker], worker);
    if constexpr (G::kStatisticsKnown) list_fallbacks(worker);
  }

  // A lane's words of a piece, four elements each; how many of them it has in flight.
  static constexpr int kWords = kPieceColumns / 128, kAtOnce = 4;

  // The first row of the weight that is left, to be split or to be compared.
  __device__ __forceinline__ int first_of_weight() const { return p.weight_checksums ? 0 : weight_rows; }
  // The n-th of the rows that are left: x's, then the weight's.
  __device__ __forceinline__ const float* row_left(int n) const {
    const int left_of_x = p.batch - x_rows;
    return n < left_of_x ? p.source_x + static_cast<i64>(x_rows + n) * p.in_features
                         : p.source_weight + static_cast<i64>(first_of_weight() + n - left_of_x) * p.in_features;
  }

  // Where a row of an operand goes, split.
  __device__ __forceinline__ half* target_row(bool of_x, int row) const {
    return (of_x ? p.converted_x : p.converted_weight) + static_cast<i64>(row) * 2 * padded_columns(p.in_features);
  }

  // Elements of a row's first word, of 16 bytes, that belong to the row before.
  __device__ __forceinline__ static int elements_before(const float* row) {
    return static_cast<int>(reinterpret_cast<u64>(row) / sizeof(float) % 4);
  }

  // Where the next piece to ask for lies: which of the rows that are left, that row, and the piece's first column.
  struct Cursor {
    int row;
    const float* source;
    int first;
  };
  // Asks for a piece, as one thread, and moves on to the next.
  __device__ __forceinline__ void request(PieceRing& ring, int slot, Cursor& c, int left, int stride) const {
    if (c.row >= left) return;
    const int before = elements_before(c.source);
    const u32 bytes = (before + min(kPieceColumns, p.in_features - c.first) + 3) / 4 * 16;
    mbarrier_expect_tx(&ring.arrived[slot], bytes);
    bulk_load(ring.pieces[slot], c.source + c.first - before, bytes, &ring.arrived[slot]);
    c.first += kPieceColumns;
    if (c.first < p.in_features) return;
    c.first = 0;
    c.row += stride;
    c.source = row_left(c.row);
  }

  template <int WORDS>
  __device__ __forceinline__ static u32 amax_of(const Vec<float, 4> (&v)[WORDS]) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) bits = max(bits, magnitude_bits(v[i].at[q]));
    return bits;
  }
  __device__ __forceinline__ static u32 warp_max(u32 bits) {
    return static_cast<u32>(largest_of<32>(static_cast<int>(bits), nullptr));
  }
  // Four of the eight elements of two words, behind so many.
  __device__ __forceinline__ static Vec<float, 4> shifted(const Vec<float, 4>& a, const Vec<float, 4>& b, int before) {
    const bool one = before & 1, two = before & 2;
    const float all[7] = {a.at[0], a.at[1], a.at[2], a.at[3], b.at[0], b.at[1], b.at[2]};
    float by_one[6];
    Vec<float, 4> v;
#pragma unroll
    for (int q = 0; q < 6; ++q) by_one[q] = one ? all[q + 1] : all[q];
#pragma unroll
    for (int q = 0; q < 4; ++q) v.at[q] = two ? by_one[q + 2] : by_one[q];
    return v;
  }
  // The lane's words of a piece from the begin-th on, zeros beyond the row's end. Nothing waits for a condition.
  template <int WORDS>
  __device__ __forceinline__ static void read_words(const float* piece, int before, int left /* columns of the row */,
                                                    int begin, Vec<float, 4> (&v)[WORDS]) {
    const int column = begin * 128 + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) v[i] = load<float, 4>(piece + column + i * 128);
    if (before) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) v[i] = shifted(v[i], load<float, 4>(piece + column + i * 128 + 4), before);
    }
    if (left < kPieceColumns) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q)
          if (column + i * 128 + q >= left) v[i].at[q] = 0.0f;
    }
  }

  // The warp's share of the rows that are left: every so many-th. The copies run kPieces ahead, into the next row.
  __device__ __forceinline__ void split(PieceRing& ring, int worker) const {
    const int stride = kConversionWarps * gridDim.x, first_row = static_cast<int>(kConversionWarps * blockIdx.x) + worker;
    const int left_of_x = p.batch - x_rows, left = left_of_x + p.features - first_of_weight();
    Pieces pieces = {*this, ring, {first_row, row_left(first_row), 0}, left, stride};
    pieces.begin();
#pragma unroll 1
    for (int n = first_row; n < left; n += stride) {
      const bool of_x = n < left_of_x;
      const int row = of_x ? x_rows + n : first_of_weight() + n - left_of_x;
      if (!of_x && p.weight_checksums) {
        compare_row(pieces, row);
        continue;
      }
      split_row(pieces, n, row, of_x);
      this->signal_chunk(of_x, row, 0, 1);
    }
  }

  // Evaluation: puts the features for which split operands are not enough, by the running deviation, on the fallback list: of
  // the rows of the weight that the warp has split or compared, and its share of those that were split before.
  __device__ __forceinline__ void list_fallbacks(int worker) const {
    const Features<Params> f(p, kGroupRows);
    const int lane = threadIdx.x % 32, stride = kConversionWarps * gridDim.x, warp = kConversionWarps * blockIdx.x + worker;
    for (int band = lane; band < kBands && band * this->band_rows() < p.batch; band += 32) this->wait_for_band(band, 0);
    __syncwarp();  // the maxima of x are known, and what lane 0 has written of the warp's rows
    for (int j = warp * 32 + lane; j < first_of_weight(); j += stride * 32) f.add_to_fallback(j, f.running_deviation(j));
    const int before = first_of_weight() - (p.batch - x_rows);  // from where the warp's rows are counted to features
    for (int j = before + warp + lane * stride; j < p.features; j += stride * 32)
      if (j >= first_of_weight()) f.add_to_fallback(j, f.running_deviation(j));
  }

  // The pieces of the warp's rows, one after the other.
  struct Pieces {
    const SplitConversion& conversion;
    PieceRing& ring;
    Cursor cursor;
    int left, stride;
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void begin() {
      if (threadIdx.x % 32 == 0)
        for (int s = 0; s < kPieces; ++s) conversion.request(ring, s, cursor, left, stride);
    }
    __device__ __forceinline__ const float* wait() const {
      mbarrier_wait(&ring.arrived[slot], parity);
      return ring.pieces[slot];
    }
    __device__ __forceinline__ void release() {
      __syncwarp();  // everybody has read the piece
      if (threadIdx.x % 32 == 0) conversion.request(ring, slot, cursor, left, stride);
      if (++slot == kPieces) {
        slot = 0;
        parity ^= 1;
      }
    }
  };

  // A row that has changed since it was split goes to the fallback, by the weight itself: nothing is small beside infinity.
  __device__ __forceinline__ void compare_row(Pieces& pieces, int row) const {
    const int lane = threadIdx.x % 32, before = elements_before(p.source_weight + static_cast<i64>(row) * p.in_features);
    u64 code = 0;
#pragma unroll 1
    for (int first = 0; first < p.in_features; first += kPieceColumns) {
      const float* piece = pieces.wait();
#pragma unroll 1
      for (int begin = 0; begin < kWords; begin += kWords / 2) {
        Vec<float, 4> v[kWords / 2];
        read_words(piece, before, p.in_features - first, begin, v);
#pragma unroll
        for (int i = 0; i < kWords / 2; ++i) code += checksum(first + ((begin + i) * 32 + lane) * 4, v[i]);
      }
      pieces.release();
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) code += __shfl_xor_sync(~0u, code, bit);
    if (lane == 0 && code != p.weight_checksums[row]) p.weight_amax[row] = __uint_as_float(0x7F800000u);
  }

  // What is known of a row once all of it has been read.
  struct Sizes {
    u32 amax;  // bits
    float abs_sum;
  };
  // The lane's words of a piece of which `left` columns belong to the row, and `padded` are written; WHOLE: all of them.
  template <bool WHOLE>
  __device__ __forceinline__ static void split_piece(const float* piece, half* target /* the lane's first */, int before,
                                                     int left, int padded, float scale, Sizes& sizes) {
    constexpr int kTogether = WHOLE ? kAtOnce : 1;
#pragma unroll 1
    for (int begin = 0; begin < kWords; begin += kTogether) {
      Vec<float, 4> v[kTogether];
      read_words(piece, before, WHOLE ? kPieceColumns : left, begin, v);
      sizes.amax = max(sizes.amax, amax_of(v));
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        sizes.abs_sum += (fabsf(v[i].at[0]) + fabsf(v[i].at[1])) + (fabsf(v[i].at[2]) + fabsf(v[i].at[3]));
        const float scaled[4] = {v[i].at[0] * scale, v[i].at[1] * scale, v[i].at[2] * scale, v[i].at[3] * scale};
        if (WHOLE || (begin + i) * 128 + threadIdx.x % 32 * 4 < padded) store_split(target + (begin + i) * 256, 0, scaled);
      }
    }
  }

  // A row is read once: its exponent is that of its first piece, and a row that does not fit, up to 65504, or begins with
  // zeros and is small, or whose exponent takes two factors, is split once more.
  __device__ __forceinline__ void split_row(Pieces& pieces, int n, int row, bool of_x) const {
    constexpr int kLeastOfOneFactor = -127;
    const int lane = threadIdx.x % 32, padded = padded_columns(p.in_features);
    const int before = elements_before(row_left(n));
    half* at = target_row(of_x, row) + lane / 16 * 2 * kSplitColumns + lane % 16 * 4;
    Sizes sizes = {};
    int exponent = 0;
    float scale = 0.0f;
#pragma unroll 1
    for (int first = 0; first < p.in_features; first += kPieceColumns) {
      const float* piece = pieces.wait();
      if (first == 0) {
        u32 begun = 0;
#pragma unroll 1
        for (int begin = 0; begin < kWords; begin += kAtOnce) {
          Vec<float, 4> v[kAtOnce];
          read_words(piece, before, p.in_features, begin, v);
          begun = max(begun, amax_of(v));
        }
        exponent = max(row_exponent(warp_max(begun)), kLeastOfOneFactor);
        scale = __uint_as_float(static_cast<u32>(127 - exponent) << 23);
      }
      const int left = p.in_features - first;
      if (left >= kPieceColumns) split_piece<true>(piece, at, before, left, left, scale, sizes);
      else split_piece<false>(piece, at, before, left, padded - first, scale, sizes);
      at += 2 * kPieceColumns;
      pieces.release();
    }
    sizes.amax = warp_max(sizes.amax);
    sizes.abs_sum = sum_over<32>(sizes.abs_sum, nullptr);
    const int wanted = row_exponent(sizes.amax);
    if (wanted < exponent || !(__uint_as_float(sizes.amax) * scale <= 65504.0f)) {
      exponent = wanted;
      const PowerOfTwo factors = power_of_two(-exponent);
      const float* source = row_left(opaque(n));
      half* target = target_row(of_x, opaque(row));
#pragma unroll 1
      for (int c = lane * 4; c < padded; c += 128) {
        const Vec<float, 4> v = load_four(source, c, p.in_features);
        const float scaled[4] = {times(v.at[0], factors), times(v.at[1], factors), times(v.at[2], factors), times(v.at[3], factors)};
        store_split(target, c, scaled);
      }
    }
    if (lane == 0) {
      (of_x ? p.x_exponents : p.weight_exponents)[row] = exponent;
      if (!of_x) {
        p.weight_amax[row] = __uint_as_float(sizes.amax);
        p.weight_abs_sum[row] = sizes.abs_sum;
      } else {
        atomicMax(&p.amax_state[0], sizes.amax);
        atomicMax(&p.amax_state[1], magnitude_bits(sizes.abs_sum));
      }
    }
  }
};

}  // namespace gemmnorm
