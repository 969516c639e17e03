// Memory access and tiling shared by every kernel. No toolkit headers: NVRTC needs none.
#pragma once
#include "common/functions.cuh"

namespace gemmnorm {

// A row of group_mean and group_m2 stands for so many of the batch, in every strategy (own wide tiles fill several alike).
constexpr int kGroupRows = 64;
// Threads of a block of the memory-bound kernels: TX along the features, kThreads / TX along the rows.
constexpr int kThreads = 256;

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
__device__ __forceinline__ void store(T* p, const float (&f)[N]) {
  using W = typename Word<N * sizeof(T)>::type;
  Vec<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) from_float(f[i], v.at[i]);
  *reinterpret_cast<W*>(p) = *reinterpret_cast<W*>(&v);
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

// The tile of one block: GROUPS statistics groups, one after the other, by TX·N features. Consecutive blocks walk along
// a row. REVERSED blocks start at the last rows: what the kernel before has touched last is still in the L2.
template <int N, int TX, int GROUPS = 1, bool REVERSED = false>
struct Panel {
  static constexpr int kColumns = TX * N;
  static constexpr int kLanes = kThreads / TX;       // rows that the block reads at once
  static constexpr int kRows = kGroupRows / kLanes;  // rows of a group that one thread reads

  int group, lane, tx, column, rows, batch;
  i64 first_row;

  __device__ __forceinline__ Panel(int batch_, int features) : batch(batch_) {
    const int panels = (features + kColumns - 1) / kColumns;
    const int block = REVERSED ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    tx = threadIdx.x % TX;
    lane = threadIdx.x / TX;
    column = (block % panels) * kColumns + tx * N;
    at(block / panels * GROUPS);
  }
  // A row to load in place of `row`, which may lie beyond the group: loads without conditions are all in flight at once.
  __device__ __forceinline__ i64 existing(int row) const { return min(row, rows - 1); }
  // Moves to another group; `rows` is 0 beyond the batch.
  __device__ __forceinline__ void at(int group_) {
    group = group_;
    first_row = static_cast<i64>(group) * kGroupRows;
    const i64 left = batch - first_row;
    rows = left <= 0 ? 0 : left < kGroupRows ? static_cast<int>(left) : kGroupRows;
  }
};

// Sums `value[i]` of the threads that share a column, in a fixed order, and hands the sum to all of them.
template <int N, int TX>
__device__ __forceinline__ void sum_over_lanes(float (&value)[N], float* shared /* [lanes][N][TX] */) {
  constexpr int kLanes = kThreads / TX;
  const int tx = threadIdx.x % TX, lane = threadIdx.x / TX;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) shared[(lane * N + i) * TX + tx] = value[i];
  __syncthreads();
  // Every thread adds up the columns of its own lane's share, then reads back all of its own.
  for (int c = threadIdx.x; c < N * TX; c += kThreads) {
    float sum = shared[c];
    for (int l = 1; l < kLanes; ++l) sum += shared[l * N * TX + c];
    shared[c] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = shared[i * TX + tx];
}

}  // namespace gemmnorm
