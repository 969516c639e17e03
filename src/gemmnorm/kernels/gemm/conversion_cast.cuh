// Operand conversion beside the main loop: rows are cast for autocast, or copied into padded rows, in chunks of kCastColumns of
// K. An operand that TMA reads as it is has nothing to convert.
#pragma once
#include "gemm/conversion.cuh"
#include "memory_bound/cast.cuh"

namespace gemmnorm {

template <class G, class Params>
struct CastConversion : ConvertedRows<G, Params> {
  using Base = ConvertedRows<G, Params>;
  using T = typename G::T;
  using Base::p, Base::scheduler, Base::chunks, Base::x_rows, Base::weight_rows, Base::x_converted, Base::weight_converted;
  struct Shared {
    __device__ __forceinline__ void init() {}
  };
  static constexpr bool kConverts = true;
  static constexpr int kProducerRegs = 104, kStepsOfChunk = kCastColumns * sizeof(T) / kRowBytes;

  __device__ __forceinline__ static int chunks_of(const Params& p) { return (p.in_features + kCastColumns - 1) / kCastColumns; }
  __device__ __forceinline__ CastConversion(const Params& p, const TileScheduler& scheduler, u32* ready)
      : Base(p, scheduler, ready, chunks_of(p), p.source_x ? p.chunks_converted : chunks_of(p), p.source_weight ? p.chunks_converted : chunks_of(p)) {}

  __device__ __forceinline__ void wait_for(Tile tile, int k) const {
    if (k % kStepsOfChunk == 0) this->wait_for_chunk(tile, k / kStepsOfChunk);
  }

  // Some columns of neighbouring rows, as a warp.
  template <class S>
  __device__ __forceinline__ void convert_rows(const S* source, T* target, int row, int rows, int column, int columns) const {
    const int in_features = p.in_features, pitch = cast_pitch<T>(in_features), lane = threadIdx.x % 32;
    source += static_cast<i64>(row) * in_features + column;
    target += static_cast<i64>(row) * pitch + column;
#pragma unroll 1
    for (int i = 0; i < rows; ++i, source += in_features, target += pitch)
      if (in_features % 4) cast_row<false, 4>(source, target, columns, lane, 32);
      else if (columns == kCastColumns) cast_chunk(source, target, lane);
      else cast_row<true, 8>(source, target, columns, lane, 32);
  }

  // A warp's share, eight rows of a chunk at a time: first the other chunks of the rows that the launch before has begun,
  // which the first tiles of all blocks need, then as many rows of x as those, again and again, then of the weight.
  __device__ __forceinline__ void convert(Shared&, int worker) const {
    constexpr int kRows = 8;  // of one panel: features are a multiple
    const auto *x = p.source_x;
    const auto *weight = p.source_weight;
    T *cast_x = p.converted_x, *cast_weight = p.converted_weight;
    const int batch = p.batch, features = p.features, in_features = p.in_features;
    int item = kConversionWarps * blockIdx.x + worker, first = min(x_converted, weight_converted);
    int x_from = x ? 0 : batch, x_to = x ? x_rows : batch, from = weight ? 0 : features, to = weight ? weight_rows : features;
    for (;;) {
      const int groups_of_x = (x_to - x_from + kRows - 1) / kRows, groups = groups_of_x + (to - from + kRows - 1) / kRows;
      const int items = groups * (chunks - first);
#pragma unroll 1
      for (; item < items; item += kConversionWarps * gridDim.x) {
        const int chunk = first + item / groups, n = item % groups, column = chunk * kCastColumns;
        const bool of_x = n < groups_of_x;
        const int row = of_x ? x_from + n * kRows : from + (n - groups_of_x) * kRows;
        const int rows = min(kRows, (of_x ? x_to : to) - row), columns = min(kCastColumns, in_features - column);
        if (of_x) convert_rows(x, cast_x, row, rows, column, columns);
        else convert_rows(weight, cast_weight, row, rows, column, columns);
        this->signal_chunk(of_x, row, chunk, rows);
      }
      item -= items;
      first = 0;
      x_from = x_to;
      from = to;
      if (x_to < batch) x_to = min(x_to + x_rows, batch);
      else if (to < features) to = min(to + weight_rows, features);
      else return;
    }
  }
};

}  // namespace gemmnorm
