// Operand conversion beside the main loop: rows of float32 are cast for autocast, in chunks of kCastColumns of K, which is a
// multiple of that: the launch before casts all other rows, and makes all copies. An operand that is given in T is left alone.
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

  __device__ __forceinline__ static int chunks_of(const Params& p) { return p.in_features / kCastColumns; }
  __device__ __forceinline__ CastConversion(const Params& p, const TileScheduler& scheduler, u32* ready)
      : Base(p, scheduler, ready, chunks_of(p), p.source_x ? p.chunks_converted : chunks_of(p),
             p.source_weight ? p.chunks_converted : chunks_of(p)) {}

  __device__ __forceinline__ void wait_for(Tile tile, int k) const {
    if (k % kStepsOfChunk == 0) this->wait_for_chunk(tile, k / kStepsOfChunk);
  }

  // A chunk of neighbouring rows, as a warp. A lane loads all its words of a row before it stores them.
  __device__ __forceinline__ void convert_rows(bool of_x, int row, int rows, int chunk) const {
    constexpr int kWords = kCastColumns / 128;
    const i64 first = static_cast<i64>(row) * p.in_features + chunk * kCastColumns + threadIdx.x % 32 * 4;
    const float* source = (of_x ? p.source_x : p.source_weight) + first;
    T* target = (of_x ? p.converted_x : p.converted_weight) + first;
#pragma unroll 1
    for (int i = 0; i < rows; ++i, source += p.in_features, target += p.in_features) {
      Vec<float, 4> v[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) v[w] = load<float, 4>(source + w * 128);
      __syncwarp();  // else the compiler lets later loads wait for registers of earlier ones
#pragma unroll
      for (int w = 0; w < kWords; ++w) *reinterpret_cast<Vec<T, 4>*>(target + w * 128) = converted<T>(v[w]);
    }
  }

  // A warp's share, eight rows of a chunk at a time: first the other chunks of the rows that the launch before has begun,
  // which the first tiles of all blocks need, then as many rows of x as those, again and again, then of the weight.
  __device__ __forceinline__ void convert(Shared&, int worker) const {
    constexpr int kRows = 8;  // of one panel: features are a multiple
    const int batch = p.batch, features = p.features;
    int item = kConversionWarps * blockIdx.x + worker, first = min(x_converted, weight_converted);
    int x_from = p.source_x ? 0 : batch, x_to = p.source_x ? x_rows : batch;
    int from = p.source_weight ? 0 : features, to = p.source_weight ? weight_rows : features;
    for (;;) {
      const int groups_of_x = (x_to - x_from + kRows - 1) / kRows, groups = groups_of_x + (to - from + kRows - 1) / kRows;
      const int items = groups * (chunks - first);
#pragma unroll 1
      for (; item < items; item += kConversionWarps * gridDim.x) {
        const int chunk = first + item / groups, n = item % groups;
        const bool of_x = n < groups_of_x;
        const int row = of_x ? x_from + n * kRows : from + (n - groups_of_x) * kRows;
        const int rows = min(kRows, (of_x ? x_to : to) - row);
        convert_rows(of_x, row, rows, chunk);
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
