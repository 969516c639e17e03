// Memory access shared by every kernel. No toolkit headers: NVRTC needs none.
#pragma once
#include "common/functions.cuh"

namespace gemmnorm {

// Rows of a statistics group: a row of group_mean and group_m2 stands for so many rows of the batch, in every strategy.
constexpr int kGroupRows = 64;
// Threads of a block of the memory-bound and backward kernels.
constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ constexpr int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }

// The machine word(s) that move BYTES bytes at once.
template <int BYTES>
struct Word;
template <>
struct Word<2> {
  using type = u16;
};
template <>
struct Word<4> {
  using type = u32;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};
struct TwoWords {
  uint4 low, high;
};
template <>
struct Word<32> {
  using type = TwoWords;
};

// N neighbouring elements of a row, moved as one or two aligned words.
template <class T, int N>
struct alignas(sizeof(typename Word<N * sizeof(T)>::type)) Vec {
  T at[N];

  // at[i] as a float, for an i that is known when it is compiled.
  __device__ __forceinline__ float value(int i) const {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) return element_of(reinterpret_cast<const u32*>(at)[i / 2], i % 2, T{});
    else return to_float(at[i]);
  }
};

template <class T, int N>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  using W = typename Word<N * sizeof(T)>::type;
  Vec<T, N> v;
  *reinterpret_cast<W*>(&v) = *reinterpret_cast<const W*>(p);
  return v;
}

template <class T, int N>
__device__ __forceinline__ Vec<T, N> rounded(const float (&f)[N]) {
  Vec<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) from_float(f[i], v.at[i]);
  return v;
}

__device__ __forceinline__ void store_word(void* to, const TwoWords& v) {
  store_word(to, v.low);
  store_word(static_cast<uint4*>(to) + 1, v.high);
}
// To global memory.
template <class T, int N>
__device__ __forceinline__ void store(T* p, const float (&f)[N]) {
  const Vec<T, N> v = rounded<T>(f);
  store_word(p, *reinterpret_cast<const typename Word<N * sizeof(T)>::type*>(&v));
}

// Whether a launch has a field of Params in memory, asked as kHasField<decltype(&Params::field)>. One that it has not is a
// static null constant.
template <class Pointer>
constexpr bool kHasField = false;
template <class Params, class Field>
constexpr bool kHasField<Field Params::*> = true;

// `visit(at, load(at))` for at = first, first + step, … below end, AHEAD of which are in flight: all are loaded, the last ones
// again and for nothing, before one is visited. With a branch between the loads each would wait for the one before.
template <int AHEAD, class Load, class Visit>
__device__ __forceinline__ void visit_ahead(int first, int end, int step, const Load& load, const Visit& visit) {
  for (int begin = first; begin < end; begin += step * AHEAD) {
    decltype(load(0)) loaded[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) loaded[i] = load(min(begin + i * step, end - 1));
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (begin + i * step < end) visit(begin + i * step, loaded[i]);
  }
}

// A per-feature vector that may be absent.
template <class T>
__device__ __forceinline__ float value_or(const T* vector, i64 index, float absent) {
  return vector ? to_float(vector[index]) : absent;
}

// The scale of feature j: a vector (stride 1), one number in memory (stride 0), or a number given by value.
template <class T>
__device__ __forceinline__ float scale_of(const T* scale, int stride, float number, int j) {
  return scale ? to_float(scale[static_cast<i64>(j) * stride]) : number;
}

}  // namespace gemmnorm
