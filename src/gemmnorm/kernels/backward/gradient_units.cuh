// The backward with respect to the product in one launch, for batches that no cluster's shared memory holds (training;
// formulas in gradient.cuh). Blocks take turns in order, each for some rows of a panel of columns: column sums, and `lag`
// panels later the gradients, for which grad_y and the product are read again, out of the L2. The first blocks do nothing
// but merge the sums of whole panels. All blocks run at once; whoever waits, waits for earlier turns.
#pragma once
#include "common/column_sums.cuh"
#include "backward/gradient.cuh"

namespace gemmnorm {

constexpr int kMergers = 8, kMergedColumns = 8;  // blocks that merge, at most, and columns that a warp merges
constexpr int kTurn = 0, kLeft = 1, kTurnPanels = 2;  // counters: turns taken, blocks that have left, then two of every panel

// What a thread holds of a turn: every fourth of its warp's ROWS rows, 16 bytes of the product of each, 8 lanes side by side.
template <class T, class Y, int ROWS>
struct HeldRows {
  static constexpr int N = 16 / sizeof(T), kTX = 8, kColumns = kTX * N, kLanes = 32 / kTX, kSteps = ROWS / kLanes;
  static constexpr int kWarps = kThreads / 32, kRows = kWarps * ROWS, kWords = N * sizeof(Y) / 16;
  static_assert(kGroupRows % ROWS == 0, "a warp's rows lie in one group");

  Vec<T, N> product[kSteps];
  Vec<Y, N> grad_y[kSteps];
  int column, rows;  // the thread's first; of the warp
  i64 first_row;
  bool inside;

  __device__ __forceinline__ int row(int step) const { return step * kLanes + threadIdx.x % 32 / kTX; }
  __device__ __forceinline__ bool exists(int step) const { return inside && row(step) < rows; }
  // Where there is nothing, something else is loaded: loads without conditions are all in flight at once.
  __device__ __forceinline__ void place(int panel, int unit, int batch, int features) {
    column = panel * kColumns + threadIdx.x % kTX * N;
    inside = column < features;
    if (!inside) column = 0;
    first_row = static_cast<i64>(unit) * kRows + threadIdx.x / 32 * ROWS;
    rows = static_cast<int>(max(i64{0}, min(i64{ROWS}, batch - first_row)));
    if (rows == 0) first_row = 0;
  }
  __device__ __forceinline__ i64 origin(int step, int features) const {
    return (first_row + max(0, min(row(step), rows - 1))) * features + column;
  }
  __device__ __forceinline__ void read(const T* a, const Y* dy, int features) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      product[s] = load<T, N>(a + origin(s, features));
      grad_y[s] = load<Y, N>(dy + origin(s, features));
    }
  }
  __device__ __forceinline__ void read_again(const T* a, const Y* dy, int features) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const i64 at = origin(s, features);
      *reinterpret_cast<uint4*>(&product[s]) = load_evict_first(reinterpret_cast<const uint4*>(a + at));
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        reinterpret_cast<uint4*>(&grad_y[s])[w] = load_evict_first(reinterpret_cast<const uint4*>(dy + at) + w);
    }
  }
};

template <class Config, class Params>
__device__ __forceinline__ void gradient_units(const Params& p) {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using L = typename Config::L;
  using R = typename Config::R;
  using Activation = typename Config::Activation;
  constexpr int ROWS = Config::kRowsPerWarp, SHARED_BYTES = Config::kSharedBytes;
  using Held = HeldRows<T, Y, ROWS>;
  constexpr int N = Held::N, kColumns = Held::kColumns, kMerges = kColumns / kMergedColumns, kQuads = kColumns / 4;
  struct Shared {
    float4 sums[Held::kWarps][2][kQuads];  // Σg and Σ g·(a - mean) of each warp
    int most[kColumns];                    // of the columns' exponents
    int next_turn;
  };
  static_assert(sizeof(Shared) == SHARED_BYTES, "the plan and Shared disagree");
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int units = (p.batch + Held::kRows - 1) / Held::kRows, panels = (p.features + kColumns - 1) / kColumns;
  const int turns = units * (panels + p.lag);
  const int mergers = min(kMergers, static_cast<int>(gridDim.x) / 2);
  u32 *summed = p.counters + kTurnPanels, *merged = summed + panels;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  if (blockIdx.x < mergers) {  // a warp merges 8 columns: 2 lanes of four along the features, 16 along the units
#pragma unroll 1
    for (int panel = blockIdx.x; panel < panels && warp < kMerges; panel += mergers) {
      const int first = panel * kColumns + warp * kMergedColumns, quad = min(first + lane % 2 * 4, p.features - 4);
      const int j = first + lane % 2 * 4 + (lane & 4 ? 2 : 0) + (lane & 8 ? 1 : 0), existing = min(j, p.features - 1);
      const float s = scale_of(p.scale, p.scale_stride, p.scale_value, existing), r = p.rstd[existing];
      const float gamma = value_or(p.bn_weight, existing, 1.0f), beta = value_or(p.bn_bias, existing, 0.0f);
      if (lane == 0) wait_until(&summed[panel], 2 * units);
      __syncwarp();
      float v[8] = {};
#pragma unroll 8
      for (int unit = lane / 2; unit < units; unit += 16) {
        const float4 sum = load_l2(reinterpret_cast<const float4*>(p.group_sum + static_cast<i64>(unit) * p.features + quad));
        const float4 dot = load_l2(reinterpret_cast<const float4*>(p.group_dot + static_cast<i64>(unit) * p.features + quad));
        v[0] += sum.x, v[1] += sum.y, v[2] += sum.z, v[3] += sum.w;
        v[4] += dot.x, v[5] += dot.y, v[6] += dot.z, v[7] += dot.w;
      }
      float four[4], two[2], one[1];
      exchange<4>(v, four, lane, 2);
      exchange<2>(four, two, lane, 4);
      exchange<1>(two, one, lane, 8);
      const float sum = one[0] + __shfl_xor_sync(~0u, one[0], 16), dot = __shfl_xor_sync(~0u, sum, 2);
      if (!(lane & 2) && lane < 16 && j < p.features) {
        p.mean_grad[j] = sum / p.batch;
        p.slope_grad[j] = s * s * r * r * dot / p.batch;
        p.merged_slope[j] = gamma * s * r;
        p.merged_shift[j] = beta;
        if (p.column_exponents) p.column_exponents[j] = kLeastExponent;
        store_gradients(j, sum, dot, s, r, gamma, p.eps, p.grad_bias, p.grad_scale, p.grad_bn_weight, p.grad_bn_bias);
      }
      __syncwarp();
      if (lane == 0) signal(&merged[panel], 1);
    }
  } else {
    int turn = blockIdx.x - mergers;
    if (threadIdx.x < kColumns) shared.most[threadIdx.x] = kLeastExponent;
    Held held;
    float from_mean[N], slope[N], shift[N];
    const auto read_means = [&] {  // rows that the forward wrote, or the workspace's: whole words
      const Vec<float, N> centre = load<float, N>(p.mean + held.column);
      Vec<float, N> own = {};
      if (p.offset) own = load<float, N>(p.offset + held.first_row / kGroupRows * p.features + held.column);
#pragma unroll
      for (int i = 0; i < N; ++i) from_mean[i] = own.at[i] - centre.at[i];
    };
    const auto through = [&](float dy, float deviation, int i) {
      return Activation::identity ? dy : Activation::gradient(dy, slope[i] * deviation + shift[i]);
    };
    const auto read_merged = [&](const float* from, float (&to)[N]) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float4 v = load_l2(reinterpret_cast<const float4*>(from + held.column + i));
        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
      }
    };
    const auto begin_sums = [&] {
      if (turn >= units * panels) return;
      held.place(turn / units, turn % units, p.batch, p.features);
      held.read(p.product, p.grad_y, p.features);
      read_means();
      if constexpr (!Activation::identity) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int j = held.column + i;
          slope[i] = value_or(p.bn_weight, j, 1.0f) * scale_of(p.scale, p.scale_stride, p.scale_value, j) * p.rstd[j];
          shift[i] = value_or(p.bn_bias, j, 0.0f);
        }
      }
    };
    begin_sums();
#pragma unroll 1
    while (turn < turns) {
      const int round = turn / units, unit = turn % units;
      u32 ticket = 0;
      if (threadIdx.x == 0) ticket = atomicAdd(&p.counters[kTurn], 1u);
      if (round < panels) {
        float v[2 * N], half[N], quarter[N / 2];
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) v[i] = 0.0f;
#pragma unroll
        for (int s = 0; s < Held::kSteps; ++s) {
          if (!held.exists(s)) continue;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const float deviation = held.product[s].value(i) + from_mean[i];
            const float grad = through(held.grad_y[s].value(i), deviation, i);
            v[i] += grad;
            v[N + i] += grad * deviation;
          }
        }
        exchange<N>(v, half, lane, 8);
        exchange<N / 2>(half, quarter, lane, 16);
        float* part = reinterpret_cast<float*>(shared.sums[warp][lane & 8 ? 1 : 0]) + lane % 8 * N + (lane & 16 ? N / 2 : 0);
        store<float, N / 2>(part, quarter);
      }
      int row_exponent = 0;  // of the row that is the lane's
      const auto begin_gradients = [&] {
        if (round < p.lag) return;
        held.place(round - p.lag, unit, p.batch, p.features);
        held.read_again(p.product, p.grad_y, p.features);
        read_means();
        if (p.x_exponents) row_exponent = p.x_exponents[held.first_row + max(0, min(lane % ROWS, held.rows - 1))];
      };
      const auto wait_for_merged = [&] {
        if (round >= p.lag && lane == 0) wait_until(&merged[round - p.lag], kMerges);
      };
      // Two warps hand on the sums, which others wait for; in a long turn before they have anything else on the way.
      constexpr bool kSumsFirst = ROWS > 16;
      if (warp >= 2 || !kSumsFirst) begin_gradients();
      __syncthreads();
      if (warp >= 2) {
        if (warp == 2) wait_for_merged();
        __syncwarp();
        named_barrier_sync(1, kThreads - 64);
      } else {
        if (round < panels) {
          if (lane < kQuads) {
            float4 total = {};
#pragma unroll
            for (int w = 0; w < Held::kWarps; ++w) {
              const float4 v = shared.sums[w][warp][lane];
              total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
            }
            const int column = round * kColumns + lane * 4;
            float* to = (warp ? p.group_dot : p.group_sum) + static_cast<i64>(unit) * p.features + column;
            if (column < p.features) *reinterpret_cast<float4*>(to) = total;
          }
          __syncwarp();
          if (lane == 0) signal(&summed[round], 1);
        }
        if (kSumsFirst) begin_gradients();
        wait_for_merged();
        __syncwarp();
      }
      if (round >= p.lag) {
        float constant[N], linear[N];
        int most[N];
        read_merged(p.mean_grad, constant);
        read_merged(p.slope_grad, linear);
        read_merged(p.merged_slope, slope);
        if (!Activation::identity) read_merged(p.merged_shift, shift);
#pragma unroll
        for (int i = 0; i < N; ++i) most[i] = kLeastExponent;
#pragma unroll
        for (int s = 0; s < Held::kSteps; ++s) {
          const int exponent = p.column_exponents ? __shfl_sync(~0u, row_exponent, held.row(s) % 32) : 0;
          if (!held.exists(s)) continue;
          float out[N];
          Vec<T, N> rounded;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const float deviation = held.product[s].value(i) + from_mean[i];
            const float grad = through(held.grad_y[s].value(i), deviation, i);
            out[i] = slope[i] * (grad - constant[i] - deviation * linear[i]);
            from_float(out[i], rounded.at[i]);
            if (p.column_exponents) most[i] = max(most[i], scaled_exponent(out[i], exponent));
          }
          store_evict_first(reinterpret_cast<uint4*>(p.grad_product + held.origin(s, p.features)),
                           *reinterpret_cast<const uint4*>(&rounded));
        }
        if (p.column_exponents) {
#pragma unroll
          for (int i = 0; i < N; ++i) atomicMax(&shared.most[lane % 8 * N + i], most[i]);
        }
      }
      if (threadIdx.x == 0) shared.next_turn = static_cast<int>(gridDim.x - mergers + ticket);
      __syncthreads();
      if (p.column_exponents && round >= p.lag && threadIdx.x < kColumns) {
        const int j = (round - p.lag) * kColumns + threadIdx.x;
        if (j < p.features) atomicMax(&p.column_exponents[j], shared.most[threadIdx.x]);
        shared.most[threadIdx.x] = kLeastExponent;
      }
      turn = shared.next_turn;
      begin_sums();
    }
  }

  __syncthreads();  // the last block to get here leaves the counters as it found them
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&p.counters[kLeft], 1u) == gridDim.x - 1) {
      __threadfence();
      for (int i = 0; i < kTurnPanels + 2 * panels; ++i) p.counters[i] = 0;
    }
  }
}

}  // namespace gemmnorm
