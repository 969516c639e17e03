// Operands into padded rows: of float32 that autocast wants in half precision, rounded to nearest, or as they are.
//
// A block converts neighbouring rows of x or of the weight, or their beginnings: as many as leave each thread up to eight
// words of four elements. The weight's rows come in descending order and x's last: what the GEMM reads first is then still in
// the L2. The planner takes it before every GEMM under autocast, and where TMA cannot read rows as they are: for all of the
// operands or for what the GEMM does not convert itself while it runs.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

constexpr int kCastColumns = 2048;  // a chunk of a row

// Elements from one cast row to the next: whole lines of 128 bytes, which TMA loads faster than others.
template <class T>
__device__ __forceinline__ int cast_pitch(int columns) {
  constexpr int kLine = 128 / sizeof(T);
  return (columns + kLine - 1) / kLine * kLine;
}

// Four elements as T, of T or of float32.
template <class T, class S>
__device__ __forceinline__ Vec<T, 4> converted(const Vec<S, 4>& v) {
  Vec<T, 4> found;
  if constexpr (sizeof(S) == sizeof(T)) found = *reinterpret_cast<const Vec<T, 4>*>(&v);
  else *reinterpret_cast<uint2*>(&found) = make_uint2(pack(v.at[0], v.at[1], T{}), pack(v.at[2], v.at[3], T{}));
  return found;
}

// Four elements of a row from c on; beyond its end any of its elements. ALIGNED: `columns` is a multiple of 4, and the row
// begins at a whole word; else elements are loaded one by one.
template <bool ALIGNED, class S>
__device__ __forceinline__ Vec<S, 4> load_word(const S* row, int c, int columns) {
  if constexpr (ALIGNED) return load<S, 4>(row + min(c, columns - 4));
  Vec<S, 4> v;
#pragma unroll
  for (int q = 0; q < 4; ++q) v.at[q] = row[min(c + q, columns - 1)];
  return v;
}
// The same as T into a padded row, up to its end.
template <bool ALIGNED, class T, class S>
__device__ __forceinline__ void store_word(T* row, int c, int columns, const Vec<S, 4>& v) {
  const Vec<T, 4> found = converted<T>(v);
  if (ALIGNED ? c < columns : c + 4 <= columns) {
    *reinterpret_cast<Vec<T, 4>*>(row + c) = found;
  } else if (!ALIGNED) {
#pragma unroll
    for (int q = 0; q < 3; ++q)
      if (c + q < columns) row[c + q] = found.at[q];
  }
}

// Some columns of a row, by so many lanes; a lane loads WORDS words before it stores them.
template <bool ALIGNED, int WORDS, class T, class S>
__device__ __forceinline__ void cast_row(const S* from, T* to, int columns, int lane, int lanes) {
#pragma unroll 1
  for (int first = 0; first < columns; first += lanes * 4 * WORDS) {
    Vec<S, 4> v[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) v[i] = load_word<ALIGNED>(from, first + lane * 4 + i * (lanes * 4), columns);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) store_word<ALIGNED>(to, first + lane * 4 + i * (lanes * 4), columns, v[i]);
  }
}

// The thread's share of the first columns of a row of an operand.
template <class Params, class T, class S>
__device__ __forceinline__ void cast_row_of(const Params& p, const S* given, T* to, int row, int lanes) {
  const int columns = min(p.chunks_converted * kCastColumns, p.in_features), lane = threadIdx.x % lanes;
  given += static_cast<i64>(row) * p.in_features;
  to += static_cast<i64>(row) * cast_pitch<T>(p.in_features);
  if (p.in_features % 4 == 0) cast_row<true, 8>(given, to, columns, lane, lanes);
  else cast_row<false, 4>(given, to, columns, lane, lanes);
}

template <class Config, class Params>
__device__ __forceinline__ void cast_rows(const Params& p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int rows = p.rows_of_block, lanes = kThreads / rows, own = threadIdx.x / lanes, block = blockIdx.x;
  const int of_weight = (p.weight_rows + rows - 1) / rows, last = gridDim.x - 1;
  if (block < of_weight) {
    const int row = (of_weight - 1 - block) * rows + own;
    if (row < p.weight_rows) cast_row_of(p, p.given_weight, p.cast_weight, row, lanes);
  } else {
    const int row = (last - block) * rows + own;
    if (row < p.batch) cast_row_of(p, p.given_x, p.cast_x, row, lanes);
  }
}

}  // namespace gemmnorm
