// What the Gram matrix of x is taken about.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

constexpr int kPivotRows = 8;

// The pivot of a column of x: about the mean of rows that are spread over the batch. x - pivot is rounded to T, and with a
// pivot of five binary digits exact or unbiased; where the mean is small beside the deviations the pivot is zero.
template <class T>
__device__ __forceinline__ T pivot_of(const T* x, int column, int batch, int pitch) {
  float v[kPivotRows], sum = 0.0f, spread = 0.0f;
#pragma unroll
  for (int r = 0; r < kPivotRows; ++r)
    v[r] = to_float(x[static_cast<i64>(r) * batch / kPivotRows * pitch + column]);
#pragma unroll
  for (int r = 0; r < kPivotRows; ++r) sum += v[r];
  const float mean = sum / kPivotRows;
#pragma unroll
  for (int r = 0; r < kPivotRows; ++r) spread += fabsf(v[r] - mean) / kPivotRows;
  const float few_digits = __uint_as_float((__float_as_uint(mean) + 0x40000u) & 0xFFF80000u);
  T pivot;  // nothing is left of a constant column
  from_float(spread == 0.0f ? mean : fabsf(mean) > spread ? few_digits : 0.0f, pivot);
  return pivot;
}

}  // namespace gemmnorm
