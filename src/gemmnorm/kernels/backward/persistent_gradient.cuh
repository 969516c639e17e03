// The backward with respect to the product in one launch, for batches that no cluster's shared memory holds (training;
// formulas in formulas.cuh). grad_y and the product are read twice, the second time out of the L2; da is written once.
//
// Blocks take work items in order from an atomic tile scheduler: a row block (what a block's registers hold) of a panel of
// columns. An item adds up the columns of its rows, and computes da of the same rows of the panel `lag` panels earlier,
// whose sums are merged by then. The first blocks only reduce the sums of whole panels. All blocks run at once, and an item
// waits only for earlier ones. The planner takes it on Hopper where the L2 keeps the panels in between.
#pragma once
#include "backward/formulas.cuh"
#include "common/column_sums.cuh"
#include "ptx/hopper.cuh"

namespace gemmnorm {

constexpr int kMaxReducingBlocks = 8, kReducedColumns = 8;  // of a warp of such a block

// Self-resetting counters in global memory: the next work item, blocks that are done, then two numbers per panel.
struct GradientCounters {
  u32* base;
  int panels;

  __device__ __forceinline__ u32* next_item() const { return base; }
  __device__ __forceinline__ u32* done() const { return base + 1; }
  __device__ __forceinline__ u32* summed(int panel) const { return base + 2 + panel; }            // warps that stored sums
  __device__ __forceinline__ u32* reduced(int panel) const { return base + 2 + panels + panel; }  // warps that reduced them
  __device__ __forceinline__ u32* end() const { return base + 2 + 2 * panels; }
};

// A block's rows of an item in registers. A warp has ROWS rows, 8 lanes of 16 bytes of the product side by side; a thread
// every fourth of them.
template <class T, class Y, int ROWS>
struct RegisterTile {
  static constexpr int N = 16 / sizeof(T), kLanesX = 8, kColumns = kLanesX * N, kLanes = 32 / kLanesX, kSteps = ROWS / kLanes;
  static constexpr int kWarps = kThreads / 32, kRows = kWarps * ROWS, kWords = N * sizeof(Y) / 16;
  static_assert(kGroupRows % ROWS == 0, "a warp's rows lie in one group");

  GradientWords<T, Y, N> words[kSteps];
  int column, rows, first_row;  // the thread's first column; the warp's rows, and the first of them
  bool inside;

  __device__ __forceinline__ int row(int step) const { return step * kLanes + threadIdx.x % 32 / kLanesX; }
  __device__ __forceinline__ bool exists(int step) const { return inside && row(step) < rows; }
  // Where nothing exists, something else is loaded: loads under a condition would wait for each other.
  __device__ __forceinline__ void place(int panel, int row_block, int batch, int features) {
    column = panel * kColumns + threadIdx.x % kLanesX * N;
    inside = column < features;
    if (!inside) column = 0;
    first_row = row_block * kRows + static_cast<int>(threadIdx.x) / 32 * ROWS;
    rows = max(0, min(ROWS, batch - first_row));
    if (rows == 0) first_row = 0;
  }
  __device__ __forceinline__ i64 at(int step, int features) const {
    return static_cast<i64>(first_row + max(0, min(row(step), rows - 1))) * features + column;
  }
  template <class Params>
  __device__ __forceinline__ void read(const Params& p) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      words[s].product = load<T, N>(p.product + at(s, p.features));
      words[s].grad_y = load<Y, N>(p.grad_y + at(s, p.features));
    }
  }
  template <class Params>
  __device__ __forceinline__ void read_last_time(const Params& p) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const i64 place = at(s, p.features);
      *reinterpret_cast<uint4*>(&words[s].product) = load_evict_first(reinterpret_cast<const uint4*>(p.product + place));
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        reinterpret_cast<uint4*>(&words[s].grad_y)[w] =
            load_evict_first(reinterpret_cast<const uint4*>(p.grad_y + place) + w);
    }
  }
};

template <class Config, class Params>
struct PersistentGradient {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using Activation = typename Config::Activation;
  static constexpr int ROWS = Config::kRowsPerWarp;
  using Tile = RegisterTile<T, Y, ROWS>;
  static constexpr int N = Tile::N, kColumns = Tile::kColumns, kQuads = kColumns / 4;
  static constexpr int kReducingWarps = kColumns / kReducedColumns;  // of a reducing block
  static constexpr bool kExponents = kHasField<decltype(&Params::column_exponents)>;

  struct Shared {
    float4 sums[Tile::kWarps][2][kQuads];  // Σg and h of each warp
    int largest_exponents[kColumns];
    int next_item;
  };
  static_assert(sizeof(Shared) == Config::kSharedBytes, "the plan and Shared disagree");

  const Params& p;
  Shared& shared;
  int warp, lane;
  int row_blocks, panels, reducing_blocks;
  GradientCounters counters;
  Tile tile;
  FeatureGradient<Form::kFolded> feature[N];
  int x_exponent;  // of the warp's row of that number (lane)

  __device__ __forceinline__ PersistentGradient(const Params& p_, Shared& shared_) : p(p_), shared(shared_) {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row_blocks = (p.batch + Tile::kRows - 1) / Tile::kRows;
    panels = (p.features + kColumns - 1) / kColumns;
    reducing_blocks = min(kMaxReducingBlocks, static_cast<int>(gridDim.x) / 2);
    counters = {p.counters, panels};
  }

  // A reducing block's share of the panels. A warp reduces 8 columns: 2 lanes of four along the features, 16 along the row
  // blocks.
  __device__ __forceinline__ void reduce_panels() const {
#pragma unroll 1
    for (int panel = blockIdx.x; panel < panels && warp < kReducingWarps; panel += reducing_blocks) {
      const int first = panel * kColumns + warp * kReducedColumns;
      const int j = first + lane % 2 * 4 + (lane & 4 ? 2 : 0) + (lane & 8 ? 1 : 0), existing = min(j, p.features - 1);
      FeatureSums f = {0.0f, 0.0f, scale_of(p.scale, p.scale_stride, p.scale_value, existing), p.rstd[existing],
                       value_or(p.bn_weight, existing, 1.0f)};
      const float beta = value_or(p.bn_bias, existing, 0.0f);
      if (lane == 0) wait_until(counters.summed(panel), 2 * row_blocks);
      __syncwarp();
      add_up(min(first + lane % 2 * 4, p.features - 4), f.sum, f.dot);
      if (!(lane & 2) && lane < 16 && j < p.features) {
        p.mean_grad[j] = f.mean_grad(p.batch);
        p.slope_grad[j] = f.slope_grad(p.batch);
        p.merged_slope[j] = f.gamma * f.scale * f.rstd;
        p.merged_shift[j] = beta;
        if constexpr (kExponents) p.column_exponents[j] = kLeastExponent;
        store_gradients(p, j, f);
      }
      __syncwarp();
      if (lane == 0) signal(counters.reduced(panel), 1);
    }
  }
  // Sums of four columns over all row blocks, in a fixed order; a lane without bit 2 gets those of its column.
  __device__ __forceinline__ void add_up(int column, float& sum, float& dot) const {
    float v[8] = {}, four[4], two[2], one[1];
    constexpr int kAhead = 8;  // row blocks whose sums are in flight
    for (int first = lane / 2; first < row_blocks; first += 16 * kAhead) {
      float4 sums[kAhead], dots[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const i64 at = static_cast<i64>(min(first + 16 * i, row_blocks - 1)) * p.features + column;
        sums[i] = load_l2(reinterpret_cast<const float4*>(p.group_sum + at));
        dots[i] = load_l2(reinterpret_cast<const float4*>(p.group_dot + at));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + 16 * i >= row_blocks) continue;
        v[0] += sums[i].x, v[1] += sums[i].y, v[2] += sums[i].z, v[3] += sums[i].w;
        v[4] += dots[i].x, v[5] += dots[i].y, v[6] += dots[i].z, v[7] += dots[i].w;
      }
    }
    exchange<4>(v, four, lane, 2);
    exchange<2>(four, two, lane, 4);
    exchange<1>(two, one, lane, 8);
    sum = one[0] + __shfl_xor_sync(~0u, one[0], 16);
    dot = __shfl_xor_sync(~0u, sum, 2);
  }

  // Reads the rows of an item for its column sums.
  __device__ __forceinline__ void begin_sums(int item) {
    if (item >= row_blocks * panels) return;
    tile.place(item / row_blocks, item % row_blocks, p.batch, p.features);
    tile.read(p);
    read_means();
    if constexpr (!Activation::identity) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int j = tile.column + i;
        feature[i].slope = value_or(p.bn_weight, j, 1.0f) * scale_of(p.scale, p.scale_stride, p.scale_value, j) * p.rstd[j];
        feature[i].shift = value_or(p.bn_bias, j, 0.0f);
      }
    }
  }
  __device__ __forceinline__ void read_means() {  // which the forward wrote, in whole words
    const Vec<float, N> mean = load<float, N>(p.mean + tile.column);
    Vec<float, N> offset = {};
    if (p.offset) offset = load<float, N>(p.offset + static_cast<i64>(tile.first_row / kGroupRows) * p.features + tile.column);
#pragma unroll
    for (int i = 0; i < N; ++i) feature[i].centre = mean.at[i] - offset.at[i];
  }

  // Column sums of the warp's rows, into shared memory.
  __device__ __forceinline__ void sum_rows() {
    float v[2 * N], half[N], quarter[N / 2];
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) v[i] = 0.0f;
#pragma unroll
    for (int s = 0; s < Tile::kSteps; ++s) {
      if (!tile.exists(s)) continue;
      visit_gradients<Activation>(tile.words[s], feature, [&](int i, float g, float deviation) {
        v[i] += g;
        v[N + i] += g * deviation;
      });
    }
    exchange<N>(v, half, lane, 8);
    exchange<N / 2>(half, quarter, lane, 16);
    float* part = reinterpret_cast<float*>(shared.sums[warp][lane & 8 ? 1 : 0]) + lane % 8 * N + (lane & 16 ? N / 2 : 0);
    *reinterpret_cast<Vec<float, N / 2>*>(part) = rounded<float>(quarter);
  }
  // One of two warps adds up the block's sums and signals them.
  __device__ __forceinline__ void store_sums(int panel, int row_block) const {
    if (lane < kQuads) {
      float4 total = {};
#pragma unroll
      for (int w = 0; w < Tile::kWarps; ++w) {
        const float4 v = shared.sums[w][warp][lane];
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      const int column = panel * kColumns + lane * 4;
      float* to = (warp ? p.group_dot : p.group_sum) + static_cast<i64>(row_block) * p.features + column;
      if (column < p.features) *reinterpret_cast<float4*>(to) = total;
    }
    __syncwarp();
    if (lane == 0) signal(counters.summed(panel), 1);
  }

  // Reads the rows of an item for da; `panel` is negative where there is none yet.
  __device__ __forceinline__ void begin_gradients(int panel, int row_block) {
    if (panel < 0) return;
    tile.place(panel, row_block, p.batch, p.features);
    tile.read_last_time(p);
    read_means();
    if constexpr (kExponents) x_exponent = p.x_exponents[tile.first_row + max(0, min(lane % ROWS, tile.rows - 1))];
  }
  __device__ __forceinline__ void wait_reduced(int panel) const {
    if (panel >= 0 && lane == 0) wait_until(counters.reduced(panel), kReducingWarps);
  }
  template <class Take>
  __device__ __forceinline__ void read_reduced(const float* from, const Take& take) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = load_l2(reinterpret_cast<const float4*>(from + tile.column + i));
      take(i, v.x), take(i + 1, v.y), take(i + 2, v.z), take(i + 3, v.w);
    }
  }
  __device__ __forceinline__ void store_product_gradient() {
    read_reduced(p.mean_grad, [&](int i, float v) { feature[i].mean_grad = v; });
    read_reduced(p.slope_grad, [&](int i, float v) { feature[i].slope_grad = v; });
    read_reduced(p.merged_slope, [&](int i, float v) { feature[i].slope = v; });
    if (!Activation::identity) read_reduced(p.merged_shift, [&](int i, float v) { feature[i].shift = v; });
    ColumnExponents<N> exponents;
#pragma unroll
    for (int s = 0; s < Tile::kSteps; ++s) {
      const int exponent = kExponents ? __shfl_sync(~0u, x_exponent, tile.row(s) % 32) : 0;
      if (!tile.exists(s)) continue;
      float out[N];
      Vec<T, N> rounded;
      visit_gradients<Activation>(tile.words[s], feature, [&](int i, float g, float deviation) {
        out[i] = feature[i].of_product(g, deviation);
        from_float(out[i], rounded.at[i]);
      });
      if constexpr (kExponents) exponents.add(out, exponent);
      store_evict_first(reinterpret_cast<uint4*>(p.grad_product + tile.at(s, p.features)),
                        *reinterpret_cast<const uint4*>(&rounded));
    }
    if constexpr (kExponents) exponents.merge_into(shared.largest_exponents + lane % 8 * N);
  }
  // The block's exponents to global memory, and none for the next item.
  __device__ __forceinline__ void merge_exponents(int panel) const {
    if (panel < 0 || threadIdx.x >= kColumns) return;
    const int j = panel * kColumns + threadIdx.x;
    if (j < p.features) atomicMax(&p.column_exponents[j], shared.largest_exponents[threadIdx.x]);
    shared.largest_exponents[threadIdx.x] = kLeastExponent;
  }

  __device__ __forceinline__ void work() {
    const int items = row_blocks * (panels + p.lag);
    int item = blockIdx.x - reducing_blocks;
    if (threadIdx.x < kColumns) shared.largest_exponents[threadIdx.x] = kLeastExponent;
    begin_sums(item);
#pragma unroll 1
    while (item < items) {
      const int panel = item / row_blocks, row_block = item % row_blocks, earlier = panel - p.lag;
      u32 taken = 0;
      if (threadIdx.x == 0) taken = atomicAdd(counters.next_item(), 1u);
      if (panel < panels) sum_rows();
      // Others wait for the block's sums, which two warps store: where an item has many rows, before they request those for
      // da. A third warp waits for the reduced sums on behalf of the rest.
      constexpr bool kSumsFirst = ROWS > 16;
      if (warp >= 2 || !kSumsFirst) begin_gradients(earlier, row_block);
      __syncthreads();
      if (warp >= 2) {
        if (warp == 2) wait_reduced(earlier);
        __syncwarp();
        named_barrier_sync(1, kThreads - 64);
      } else {
        if (panel < panels) store_sums(panel, row_block);
        if (kSumsFirst) begin_gradients(earlier, row_block);
        wait_reduced(earlier);
        __syncwarp();
      }
      if (earlier >= 0) store_product_gradient();
      if (threadIdx.x == 0) shared.next_item = static_cast<int>(gridDim.x - reducing_blocks + taken);
      __syncthreads();
      if constexpr (kExponents) merge_exponents(earlier);
      item = shared.next_item;
      begin_sums(item);
    }
  }

  // The last block to get here resets the counters.
  __device__ __forceinline__ void reset_counters() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(counters.done(), 1u) != gridDim.x - 1) return;
    __threadfence();
    for (u32* counter = p.counters; counter < counters.end(); ++counter) *counter = 0;
  }
};

template <class Config, class Params>
__device__ __forceinline__ void persistent_gradient(const Params& p) {
  using Block = PersistentGradient<Config, Params>;
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  Block block(p, *reinterpret_cast<typename Block::Shared*>(dynamic_shared));
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (blockIdx.x < block.reducing_blocks) block.reduce_panels();
  else block.work();
  block.reset_counters();
}

}  // namespace gemmnorm
