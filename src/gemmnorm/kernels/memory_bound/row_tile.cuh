// A float32 row that a block, or for short rows a warp, reads more than once: 32 columns of a thread stay in registers.
#pragma once
#include "common/column_sums.cuh"

namespace gemmnorm {

// Four elements of a row from c on, zeros beyond its end. Rows of which not all begin at a whole word are read one by one.
template <class T>
__device__ __forceinline__ Vec<T, 4> load_four(const T* row, int c, int columns) {
  Vec<T, 4> v = {};
  if (columns % 4 == 0) {
    if (c < columns) v = load<T, 4>(row + c);
  } else {
#pragma unroll
    for (int q = 0; q < 4; ++q)
      if (c + q < columns) v.at[q] = row[c + q];
  }
  return v;
}

// LANES: kThreads, or 32 for a row of each warp.
template <int LANES>
struct RowTile {
  static constexpr int kWords = 8;                     // of a thread, four columns each
  static constexpr int kColumns = kWords * 4 * LANES;  // in registers
  static constexpr int kRows = kThreads / LANES;       // of a block

  const float* row;
  int columns, lane;
  Vec<float, 4> words[kWords];

  __device__ __forceinline__ RowTile(const float* row_, int columns_)
      : row(row_), columns(columns_), lane(threadIdx.x % LANES) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = load_four(row, (i * LANES + lane) * 4, columns);
  }
  // The row of the thread in block `block`.
  __device__ __forceinline__ static int row_of(int block) { return block * kRows + static_cast<int>(threadIdx.x) / LANES; }

  // Calls `visit(column, four elements)` for the thread's words; zeros from the last column up to `end`.
  template <class Visit>
  __device__ __forceinline__ void visit(int end, const Visit& visit_word) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int c = (i * LANES + lane) * 4;
      if (c < end) visit_word(c, words[i]);
    }
#pragma unroll 1
    for (int c = kColumns + lane * 4; c < end; c += 4 * LANES) visit_word(c, load_four(row, c, columns));
  }
};

}  // namespace gemmnorm
