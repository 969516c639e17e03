// How the memory-bound kernels share out a [batch, features] tensor: a block has statistics groups of 64 rows by TX·N
// features, a thread N neighbouring features (16 bytes, where the feature count allows it) of every kLanes-th row.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

// Consecutive blocks walk along a row. REVERSED blocks begin with the last rows, which the kernel before touched last: those
// are still in the L2.
template <int N, int TX, bool REVERSED = false>
struct GroupTile {
  static constexpr int kColumns = TX * N;
  static constexpr int kLanes = kThreads / TX;        // rows that the block reads at once
  static constexpr int kSteps = kGroupRows / kLanes;  // rows of a group that one thread reads

  int features, lane;
  int first_column;  // of the block
  int column;        // the thread's first; 0 beyond the last feature, where it reads but must not write
  bool inside;       // the thread's features exist
  int group, rows;
  i64 origin;        // of the thread's features in the group's first row

  __device__ __forceinline__ GroupTile(int batch, int features_) : features(features_) {
    const int tiles = (features + kColumns - 1) / kColumns;  // along a row
    const int block = REVERSED ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    lane = threadIdx.x / TX;
    group = block / tiles;
    first_column = block % tiles * kColumns;
    column = first_column + threadIdx.x % TX * N;
    inside = column < features;
    if (!inside) column = 0;
    const i64 first_row = static_cast<i64>(group) * kGroupRows, left = batch - first_row;
    rows = left < kGroupRows ? static_cast<int>(left) : kGroupRows;
    origin = first_row * features + column;
  }
  // Place of the thread's features among numbers of which every group has one row.
  __device__ __forceinline__ i64 group_row() const { return mul_wide(group, features) + column; }
  // Place in the tensor of the thread's features in a row of the group.
  __device__ __forceinline__ i64 at(int row) const { return origin + mul_wide(row, features); }

  // One of the block's columns is the thread's own to compute for all; it exists.
  __device__ __forceinline__ bool owns_column() const {
    return threadIdx.x < kColumns && first_column + static_cast<int>(threadIdx.x) < features;
  }
  // What threads that share columns need of each feature, a struct of floats: computed once, by the column's owner, as
  // `make(feature)`, and handed on through shared memory. All threads of the block call it, once in a kernel.
  template <class S, class Make>
  __device__ __forceinline__ void share_features(S (&own)[N], const Make& make) const {
    constexpr int kFloats = sizeof(S) / sizeof(float);
    alignas(32) __shared__ float shared[kFloats][kColumns];
    if (owns_column()) {
      const S made = make(first_column + static_cast<int>(threadIdx.x));
#pragma unroll
      for (int k = 0; k < kFloats; ++k) shared[k][threadIdx.x] = reinterpret_cast<const float*>(&made)[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kFloats; ++k) {
      const Vec<float, N> v = load<float, N>(&shared[k][threadIdx.x % TX * N]);
#pragma unroll
      for (int i = 0; i < N; ++i) reinterpret_cast<float*>(&own[i])[k] = v.at[i];
    }
  }

  // loaded[r] = load_at(place) for AT_ONCE of the thread's rows from `step` on, all in flight. Of a row beyond the group the
  // last row is loaded: loads under a condition would wait for each other.
  template <int AT_ONCE, class Loaded, class Load>
  __device__ __forceinline__ void load_rows(Loaded (&loaded)[AT_ONCE], int step, const Load& load_at) const {
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) loaded[r] = load_at(at(min((step + r) * kLanes + lane, rows - 1)));
  }
  // Calls `visit(row, loaded)` for those rows that the group has.
  template <int AT_ONCE, class Loaded, class Visit>
  __device__ __forceinline__ void visit_loaded(const Loaded (&loaded)[AT_ONCE], int step, const Visit& visit) const {
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) {
      const int row = (step + r) * kLanes + lane;
      if (row < rows) visit(row, loaded[r]);
    }
  }
  // Both for all rows of the thread, MOST of them in flight. `prepare()` runs once, while the first are loaded: without the
  // `__syncwarp` the compiler moves the loads behind what `prepare` waits for.
  template <int MOST, class Load, class Prepare, class Visit>
  __device__ __forceinline__ void visit_rows(const Load& load_at, const Prepare& prepare, const Visit& visit) const {
    constexpr int kAtOnce = kSteps < MOST ? kSteps : MOST;
    decltype(load_at(i64{})) loaded[kAtOnce];
    load_rows(loaded, 0, load_at);
    __syncwarp();
    prepare();
    visit_loaded(loaded, 0, visit);
#pragma unroll 1
    for (int step = kAtOnce; step < kSteps; step += kAtOnce) {
      load_rows(loaded, step, load_at);
      visit_loaded(loaded, step, visit);
    }
  }
};

// Sums `value[i]` over the threads that share a column, in a fixed order, and hands the sum to all of them.
template <int N, int TX>
__device__ __forceinline__ void sum_over_lanes(float (&value)[N], float* shared /* [warps][N][TX] */) {
  const int tx = threadIdx.x % TX, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int bit = 16; bit >= TX; bit /= 2) value[i] += __shfl_xor_sync(~0u, value[i], bit);
    if (threadIdx.x % 32 < TX) shared[(warp * N + i) * TX + tx] = value[i];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < N * TX; c += kThreads) {
    float sum = shared[c];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += shared[w * N * TX + c];
    shared[c] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = shared[i * TX + tx];
}

// A block that merges the groups of COLUMNS ≤ 16 features: its other threads, called lanes, share out the groups of a feature.
// A group is of ROWS rows; there is a row of numbers for every kGroupRows, of which the first of a group counts.
template <int COLUMNS, int ROWS>
struct GroupMerge {
  static constexpr int kColumns = COLUMNS, kLanes = kThreads / kColumns, kAhead = 8;

  int batch, features, groups;
  int j, lane;  // the thread's feature, which may lie beyond the last

  __device__ __forceinline__ GroupMerge(int batch_, int features_) : batch(batch_), features(features_) {
    groups = (batch + ROWS - 1) / ROWS;
    j = blockIdx.x * kColumns + threadIdx.x % kColumns;
    lane = threadIdx.x / kColumns;
  }
  __device__ __forceinline__ bool inside() const { return j < features; }

  // Calls `add(sum, load(place), rows)` for every group, kAhead of whose numbers are in flight, then adds up over the lanes,
  // in a fixed order, and hands the sums to all. A thread without a feature reads the last one's.
  template <int N, class Load, class Add>
  __device__ __forceinline__ void add_up(float (&sum)[N], float* shared /* [kWarps · kColumns] */, const Load& load,
                                         const Add& add) const {
    visit_ahead<kAhead>(
        lane, groups, kLanes,
        [&](int group) { return load(mul_wide(group * (ROWS / kGroupRows), features) + min(j, features - 1)); },
        [&](int group, decltype(load(i64{})) of_group) { add(sum, of_group, min(ROWS, batch - group * ROWS)); });
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int bit = 16; bit >= kColumns; bit /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], bit);
      __syncthreads();
      if (threadIdx.x % 32 < kColumns) shared[threadIdx.x / 32 * kColumns + threadIdx.x % 32] = sum[i];
      __syncthreads();
      sum[i] = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum[i] += shared[w * kColumns + threadIdx.x % kColumns];
    }
  }
};

}  // namespace gemmnorm
