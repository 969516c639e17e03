// Split operands: the product comes in units of a power of two for each row of x and of the weight; back to their own scale.
#pragma once
#include "gemm/tile_scheduler.cuh"
#include "memory_bound/split.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

template <class G, class Params, bool SPLIT>
struct SplitScaling {  // nothing to scale
  struct Shared {};
};

template <class G, class Params>
struct SplitScaling<G, Params, true> {
  struct Shared {
    float powers[2][2][G::kWidth];  // per consumer: both factors of the powers of two along the instruction's width
    int exponents[2][64];           // and the exponents of its 64 rows or features across
  };
  const Params& p;
  Shared& shared;
  int consumer, thread;

  __device__ __forceinline__ SplitScaling(const Params& p_, Shared& shared_, int consumer_)
      : p(p_), shared(shared_), consumer(consumer_), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ void load(Tile tile) const {
    constexpr bool kSwapAB = G::Shape::kSwapAB;
    const int along = (kSwapAB ? tile.m * G::TM : tile.n * G::TN) + thread;
    const int across = (kSwapAB ? tile.n * G::TN : tile.m * G::TM) + consumer * 64 + thread;
    const int* exponents_along = kSwapAB ? p.x_exponents : p.weight_exponents;
    const int* exponents_across = kSwapAB ? p.weight_exponents : p.x_exponents;
    if (thread < G::kWidth) {
      const PowerOfTwo power = power_of_two(along < (kSwapAB ? p.batch : p.features) ? load_l2(exponents_along + along) : 0);
      shared.powers[consumer][0][thread] = power.first;
      shared.powers[consumer][1][thread] = power.second;
    }
    if (thread < 64)
      shared.exponents[consumer][thread] = across < (kSwapAB ? p.features : p.batch) ? load_l2(exponents_across + across) : 0;
  }

  __device__ __forceinline__ void apply(typename G::Accumulators& acc) const {
    const int lane = thread % 32;
    named_barrier_sync(1 + consumer, 128);
    const int* across = &shared.exponents[consumer][thread / 32 * 16 + lane / 4];
    const PowerOfTwo low = power_of_two(across[0]), high = power_of_two(across[8]);
#pragma unroll
    for (int i = 0; i < G::kWidth / 8; ++i) {
      const int c = i * 8 + (lane % 4) * 2;
      const float2 first = *reinterpret_cast<const float2*>(&shared.powers[consumer][0][c]);
      const float2 second = *reinterpret_cast<const float2*>(&shared.powers[consumer][1][c]);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const PowerOfTwo along = {q % 2 ? first.y : first.x, q % 2 ? second.y : second.x};
        acc[4 * i + q] = times(times(acc[4 * i + q], q < 2 ? low : high), along);
      }
      if (i % 4 == 3) compiler_barrier();
    }
    named_barrier_sync(1 + consumer, 128);  // before the next tile's are written
  }
};

}  // namespace gemmnorm
