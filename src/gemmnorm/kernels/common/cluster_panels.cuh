// Panels of columns in shared memory: a cluster of blocks owns a panel at a time, the whole batch of it, and adds up over its
// rows: over a warp's in registers, over a block's in shared memory, over the cluster's over DSMEM.
//
// A warp has kRowsPerWarp rows of a panel, kThreadsX lanes of 16 bytes side by side; a thread reads back only what it has
// copied, so copies need no barrier.
#pragma once
#include "common/column_sums.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

// Partial sums of NUMBERS per column. While buffer i receives the sums of the cluster's blocks, buffer 1 - i holds those of
// this block's warps; the next exchange swaps them. Nothing arrives in 1 - i before this block has sent its sums.
template <int NUMBERS, int COLUMNS>
struct PanelSums {
  alignas(16) float of[2][kWarps][NUMBERS][COLUMNS];
  u64 arrived[2];
};

// Calls `take(i, from[i])` for N numbers of shared memory.
template <int N, class Take>
__device__ __forceinline__ void read_columns(const float* from, const Take& take) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    take(i, v.x), take(i + 1, v.y), take(i + 2, v.z), take(i + 3, v.w);
  }
}

// Where a thread is in the batch and in the panels; T is what the panel's 16 bytes are made of.
template <class Config, class T, int NUMBERS>
struct ClusterPanels {
  static constexpr int TX = Config::kThreadsX, ROWS = Config::kRowsPerWarp, CLUSTER = Config::kCluster;
  static constexpr int N = 16 / sizeof(T), kColumns = TX * N, kLanes = 32 / TX;
  static constexpr int kSteps = ROWS * TX / 32;            // of a warp through its rows
  static constexpr int kPieces = NUMBERS * kColumns / 4;  // of 16 bytes, of a block's sums
  static constexpr u32 kArriving = CLUSTER * kPieces * sizeof(float4);
  using Sums = PanelSums<NUMBERS, kColumns>;
  static_assert(CLUSTER <= kWarps, "blocks and warps share PanelSums");

  int batch, features;
  int thread, warp, tx, lane;        // tx: along the features; lane: along the rows of a step
  int rank;                          // of the block in its cluster
  int first_row, rows;               // of the warp
  int first_column, column, stride;  // of the panel; the thread's first; from a panel to the cluster's next

  __device__ __forceinline__ ClusterPanels(int batch_, int features_) : batch(batch_), features(features_) {
    thread = threadIdx.x, warp = thread / 32, tx = thread % TX, lane = thread % 32 / TX;
    rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warps = (batch + ROWS - 1) / ROWS, share = (warps + CLUSTER - 1) / CLUSTER;  // that have rows, of a block
    first_row = (rank * share + warp) * ROWS;
    rows = warp < share ? max(0, min(ROWS, batch - first_row)) : 0;
    stride = static_cast<int>(gridDim.x) / CLUSTER * kColumns;
    move_to(static_cast<int>(blockIdx.x) / CLUSTER * kColumns);
  }
  __device__ __forceinline__ void move_to(int first_column_) {
    first_column = first_column_;
    column = first_column + tx * N;
  }
  __device__ __forceinline__ bool owns_column() const { return thread < kColumns && first_column + thread < features; }
  // The warp's rows of a panel where the thread has columns.
  __device__ __forceinline__ int rows_of_thread() const { return column < features ? rows : 0; }

  __device__ __forceinline__ void init_barriers(Sums& sums) const {
    if (CLUSTER == 1) return;
    if (thread == 0) {
#pragma unroll
      for (int buffer = 0; buffer < 2; ++buffer) {
        mbarrier_init(&sums.arrived[buffer], 1);
        mbarrier_expect_tx(&sums.arrived[buffer], kArriving);
      }
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
  }

  // Calls `copy(step, row)` for every step of the thread; a row it does not have is another's.
  template <class Copy>
  __device__ __forceinline__ void copy_first_panel(const Copy& copy) const {
    const int existing = rows_of_thread();
    if (existing == 0) return;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) copy(step, first_row + min(step * kLanes + lane, existing - 1));
  }

  // Calls `visit(row, step)` for every row of the panel that the thread has, counted from the warp's first.
  template <class Visit>
  __device__ __forceinline__ void visit_rows(const Visit& visit) const {
    const int steps = (rows_of_thread() - lane + kLanes - 1) / kLanes;
#pragma unroll 2
    for (int step = 0; step < steps; ++step) visit(step * kLanes + lane, step);
  }

  // The warps' partial sums, of number `count` of the launch.
  __device__ __forceinline__ void store_sums(Sums& sums, int count, int number, const float (&v)[N]) const {
    fold_lanes<N, TX>(v, &sums.of[1 - count % 2][warp][number][tx * N]);
  }
  // Adds them up and sends them to every block of the cluster; waits for those of all. Column owners may read the result.
  __device__ __forceinline__ void exchange_sums(Sums& sums, int count) const {
    const int buffer = count % 2, piece = thread % kPieces;
    __syncthreads();
    float4 total = {};
    if (thread < kPieces * CLUSTER) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 v = reinterpret_cast<const float4*>(sums.of[1 - buffer][w])[piece];
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
    }
    if (CLUSTER > 1) __syncthreads();  // a block that has our sums may send the next ones to where the warps' were
    if (thread < kPieces * CLUSTER) {
      float4* to = reinterpret_cast<float4*>(sums.of[buffer][rank]) + piece;
      if (CLUSTER > 1) st_async_remote(to, total, &sums.arrived[buffer], thread / kPieces);
      else *to = total;
    }
    if (CLUSTER == 1) __syncthreads();
    else if (thread < kColumns) mbarrier_wait_cluster(&sums.arrived[buffer], count / 2 % 2);
    if (CLUSTER > 1 && thread == 0) mbarrier_expect_tx(&sums.arrived[buffer], kArriving);
  }
  // An owner's column, of the whole batch.
  __device__ __forceinline__ float sum_of(const Sums& sums, int count, int number) const {
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) sum += sums.of[count % 2][block][number][thread];
    return sum;
  }
};

}  // namespace gemmnorm
