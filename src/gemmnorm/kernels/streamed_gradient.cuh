// The backward with respect to the product in one launch and one reading (training; formulas in gradient.cuh), for batches
// that no cluster's shared memory holds. All blocks run at once. Each owns ROWS rows and walks along the panels (columns of
// 128 bytes of the product): the copy engine brings a tile of the product and of y's gradient into a ring, eight warps take
// its column sums, and LAG tiles later, when all blocks have and the sums are merged, the same warps turn it into the
// product's gradient in place. What lies between is a chain of latencies: each link has warps of its own, and as many as
// keep it in step, every so-manieth tile for each.
#pragma once
#include "column_sums.cuh"
#include "gradient.cuh"
#include "raster.cuh"

namespace gemmnorm {

// Warps that compute, and by what they do those that serve them; a warp each loads and stores.
constexpr int kStreamWarps = 8, kTablers = 2, kReducers = 2, kMergers = 4, kFetchers = 2;
constexpr int kLoader = kStreamWarps, kFirstTabler = kLoader + 1, kFirstReducer = kFirstTabler + kTablers;
constexpr int kFirstMerger = kFirstReducer + kReducers, kFirstFetcher = kFirstMerger + kMergers;
constexpr int kStorer = kFirstFetcher + kFetchers, kStreamThreads = 32 * (kStorer + 1);

template <class T, class Y, int ROWS, int SLOTS>
struct StreamShared {
  static constexpr int kColumns = kRowBytes / sizeof(T), kBoxes = sizeof(Y) / sizeof(T), kGroups = ROWS / kGroupRows;
  alignas(1024) unsigned char product[SLOTS][ROWS * kRowBytes];  // later its gradient
  alignas(1024) unsigned char grad_y[SLOTS][kBoxes][ROWS * kRowBytes];
  alignas(16) float sums[2][kStreamWarps][2][kColumns];  // Σg and Σ g·(a - mean) of each warp, of every other tile
  float slope[SLOTS][kColumns], shift[SLOTS][kColumns];  // of the forward, and what is to be added to a stored value
  float from_mean[SLOTS][kGroups][kColumns];
  float mean_grad[SLOTS][kColumns], slope_grad[SLOTS][kColumns];
  u64 full[SLOTS], ready[SLOTS], done[SLOTS], empty[SLOTS];  // loaded; sums merged; gradient computed; stored
  u64 summed[2], taken[2];                                   // a tile's sums are there; they have been read
  u32 last;
};

template <int N>
__device__ __forceinline__ void read_shared(const float* from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
  }
}

// Calls `visit(address of the product, a - mean, g)` for what the thread holds of a tile: N columns of every 32nd row.
template <class Activation, class T, class Y, class Shared, class Visit>
__device__ __forceinline__ void visit_tile(Shared& shared, int slot, int rows, const Visit& visit) {
  constexpr int N = 16 / sizeof(T), kChunks = kRowBytes / 16, kWords = sizeof(Y) / sizeof(T), kAtOnce = 32;
  const int lane = threadIdx.x % 32, chunk = lane % kChunks, first = threadIdx.x / 32 * 4 + lane / kChunks;
  float slope[N], shift[N];
  if (!Activation::identity) {
    read_shared<N>(&shared.slope[slot][chunk * N], slope);
    read_shared<N>(&shared.shift[slot][chunk * N], shift);
  }
#pragma unroll 1
  for (int g = 0; g < Shared::kGroups; ++g) {
    float from_mean[N];
    read_shared<N>(&shared.from_mean[slot][g][chunk * N], from_mean);
#pragma unroll
    for (int r = 0; r < kGroupRows; r += kAtOnce) {
      const int row = g * kGroupRows + r + first;
      if (row >= rows) break;
      unsigned char* at = shared.product[slot] + row * kRowBytes + ((chunk ^ row) % kChunks) * 16;
      const Vec<T, N> a = *reinterpret_cast<const Vec<T, N>*>(at);
      Vec<Y, N> dy;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int word = chunk * kWords + w;
        reinterpret_cast<uint4*>(&dy)[w] = *reinterpret_cast<const uint4*>(
            shared.grad_y[slot][word / kChunks] + row * kRowBytes + ((word ^ row) % kChunks) * 16);
      }
      float deviation[N], grad[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        deviation[i] = to_float(a.at[i]) + from_mean[i];
        grad[i] = to_float(dy.at[i]);
        if (!Activation::identity) grad[i] *= Activation::derivative(slope[i] * deviation[i] + shift[i]);
      }
      visit(at, deviation, grad);
    }
  }
}

template <class T, class Y, class L, class R, int ROWS, int SLOTS, int LAG, int SHARED_BYTES, class Activation>
__device__ __forceinline__ void streamed_gradient(const TensorMap& map_product /* [batch, features] */,
    const TensorMap& map_grad_y /* [batch, features] */, const TensorMap& map_grad_product /* [batch, features] */,
    const float* offset /* [groups, features] or null */, const L* scale /* [features] or [1] or null */, int scale_stride,
    float scale_value, const float* mean /* [features] */, const float* rstd /* [features] */,
    const R* bn_weight /* [features] or null */, const R* bn_bias /* [features] or null */, float eps,
    float* group_sum /* [tiles of rows, features] */, float* group_dot /* [tiles of rows, features] */,
    float* mean_grad /* [features] */, float* slope_grad /* [features] */, L* grad_bias /* [features] or null */,
    float* grad_scale /* [features] or null */, R* grad_bn_weight /* [features] or null */,
    R* grad_bn_bias /* [features] or null */, u32* counters /* zero, and left zero */, int batch, int features) {
  constexpr int N = 16 / sizeof(T);
  using Shared = StreamShared<T, Y, ROWS, SLOTS>;
  constexpr int kColumns = Shared::kColumns;
  static_assert(sizeof(Shared) <= SHARED_BYTES && LAG < SLOTS, "the plan and StreamShared disagree");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tiles_m = (batch + ROWS - 1) / ROWS, panels = (features + kColumns - 1) / kColumns;
  const int m = blockIdx.x % tiles_m, first_panel = blockIdx.x / tiles_m, stride = gridDim.x / tiles_m;
  const int tiles = (panels - first_panel + stride - 1) / stride, rows = min(ROWS, batch - m * ROWS);
  u32 *arrived = counters + 1, *merged = arrived + panels;  // blocks, and columns, of each panel

  if (threadIdx.x == 0) {
    prefetch_map(map_product);
    prefetch_map(map_grad_y);
    prefetch_map(map_grad_product);
    for (int s = 0; s < SLOTS; ++s) {
      barrier_init(&shared.full[s], 2);
      barrier_init(&shared.ready[s], 1);
      barrier_init(&shared.done[s], kStreamWarps);
      barrier_init(&shared.empty[s], 1);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.summed[i], kStreamWarps);
      barrier_init(&shared.taken[i], 1);
    }
    fence_barrier_init();
    fence_async_shared();
  }
  __syncthreads();
  wait_for_previous();
  allow_next();

  if (warp < kStreamWarps) {  // sums of one tile, then the gradient of an earlier one
    const int chunk = lane % (kRowBytes / 16);
#pragma unroll 1
    for (int t = 0; t < tiles + LAG; ++t) {
      if (t < tiles) {
        const int slot = t % SLOTS;
        float v[2 * N], half[N], quarter[N / 2];  // Σg of the thread's columns, then Σ g·(a - mean)
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) v[i] = 0.0f;
        barrier_wait(&shared.full[slot], t / SLOTS & 1);
        const auto add = [&](unsigned char*, const float (&deviation)[N], const float (&grad)[N]) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            v[i] += grad[i];
            v[N + i] += grad[i] * deviation[i];
          }
        };
        visit_tile<Activation, T, Y>(shared, slot, rows, add);
        exchange<N>(v, half, lane, 8);
        exchange<N / 2>(half, quarter, lane, 16);
        barrier_wait(&shared.taken[t % 2], (t / 2 & 1) ^ 1);
        float* to = &shared.sums[t % 2][warp][lane & 8 ? 1 : 0][chunk * N + (lane & 16 ? N / 2 : 0)];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) to[i] = quarter[i];
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.summed[t % 2]);
      }
      if (t >= LAG) {
        const int slot = (t - LAG) % SLOTS;
        float slope[N], constant[N], linear[N];
        barrier_wait(&shared.ready[slot], (t - LAG) / SLOTS & 1);
        read_shared<N>(&shared.slope[slot][chunk * N], slope);
        read_shared<N>(&shared.mean_grad[slot][chunk * N], constant);
        read_shared<N>(&shared.slope_grad[slot][chunk * N], linear);
        const auto replace = [&](unsigned char* at, const float (&deviation)[N], const float (&grad)[N]) {
          float out[N];
#pragma unroll
          for (int i = 0; i < N; ++i) out[i] = slope[i] * (grad[i] - constant[i] - deviation[i] * linear[i]);
          store<T, N>(reinterpret_cast<T*>(at), out);
        };
        visit_tile<Activation, T, Y>(shared, slot, rows, replace);
        fence_async_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.done[slot]);
      }
    }
  } else if (warp == kLoader) {
    for (int t = 0; lane == 0 && t < tiles; ++t) {
      const int slot = t % SLOTS, column = (first_panel + t * stride) * kColumns;
      barrier_wait(&shared.empty[slot], (t / SLOTS & 1) ^ 1);
      barrier_expect(&shared.full[slot], (1 + Shared::kBoxes) * ROWS * kRowBytes);
      copy_to_shared(shared.product[slot], map_product, &shared.full[slot], column, m * ROWS, kEvictFirst);
      for (int b = 0; b < Shared::kBoxes; ++b)
        copy_to_shared(shared.grad_y[slot][b], map_grad_y, &shared.full[slot], column + b * (kColumns / Shared::kBoxes),
                       m * ROWS, kEvictFirst);
    }
  } else if (warp < kFirstReducer) {  // what the forward knows of a tile's columns
#pragma unroll 1
    for (int t = warp - kFirstTabler; t < tiles; t += kTablers) {
      const int slot = t % SLOTS, column = (first_panel + t * stride) * kColumns;
      barrier_wait(&shared.empty[slot], (t / SLOTS & 1) ^ 1);
#pragma unroll
      for (int c = lane; c < kColumns; c += 32) {
        const int j = min(column + c, features - 1);
        const float centre = mean[j];
        shared.slope[slot][c] = value_or(bn_weight, j, 1.0f) * scale_of(scale, scale_stride, scale_value, j) * rstd[j];
        shared.shift[slot][c] = value_or(bn_bias, j, 0.0f);
#pragma unroll
        for (int g = 0; g < Shared::kGroups; ++g) {
          const i64 group = min(m * Shared::kGroups + g, (batch - 1) / kGroupRows);
          shared.from_mean[slot][g][c] = value_or(offset, group * features + j, 0.0f) - centre;
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.full[slot]);
    }
  } else if (warp < kFirstMerger) {  // adds up the warps' sums, and says that the block's are there
    const int which = lane * 4 / kColumns, c = lane * 4 % kColumns;
#pragma unroll 1
    for (int t = warp - kFirstReducer; t < tiles; t += kReducers) {
      const int panel = first_panel + t * stride;
      barrier_wait(&shared.summed[t % 2], t / 2 & 1);
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (which < 2) {
#pragma unroll
        for (int w = 0; w < kStreamWarps; ++w) {
          const float4 part = *reinterpret_cast<const float4*>(&shared.sums[t % 2][w][which][c]);
          total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.taken[t % 2]);
      const int j = panel * kColumns + c;
      if (which < 2 && j < features)
        *reinterpret_cast<float4*>((which ? group_dot : group_sum) + static_cast<i64>(m) * features + j) = total;
      __syncwarp();
      if (lane == 0) add_release(&arrived[panel], 1);
    }
  } else if (warp < kFirstFetcher) {  // merges the block's share of a panel's columns
    int lanes = 1;                    // to a column: as many as leave a column or more to each block
    while (lanes < 32 && tiles_m * (32 / lanes) > kColumns) lanes *= 2;
    const int columns = 32 / lanes;
#pragma unroll 1
    for (int t = warp - kFirstMerger; t < tiles; t += kMergers) {
      const int panel = first_panel + t * stride;
#pragma unroll 1
      for (int c = m * columns; c < kColumns; c += tiles_m * columns) {
        const int j = panel * kColumns + c + lane / lanes, existing = min(j, features - 1);
        const float s = scale_of(scale, scale_stride, scale_value, existing), r = rstd[existing];
        const float gamma = value_or(bn_weight, existing, 1.0f);
        if (lane == 0) wait_until(&arrived[panel], tiles_m);
        __syncwarp();
        float sum = 0.0f, dot = 0.0f;
#pragma unroll 4
        for (int block = lane % lanes; block < tiles_m; block += lanes) {
          sum += load_l2(group_sum + static_cast<i64>(block) * features + existing);
          dot += load_l2(group_dot + static_cast<i64>(block) * features + existing);
        }
        for (int bit = 1; bit < lanes; bit *= 2) {
          sum += __shfl_xor_sync(~0u, sum, bit);
          dot += __shfl_xor_sync(~0u, dot, bit);
        }
        if (lane % lanes == 0 && j < features) {
          mean_grad[j] = sum / batch;
          slope_grad[j] = s * s * r * r * dot / batch;
          store_gradients(j, sum, dot, s, r, gamma, eps, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias);
        }
        __syncwarp();
        if (lane == 0) add_release(&merged[panel], columns);
      }
    }
  } else if (warp < kStorer) {  // fetches what all blocks' merges have found
#pragma unroll 1
    for (int t = warp - kFirstFetcher; t < tiles; t += kFetchers) {
      const int slot = t % SLOTS, panel = first_panel + t * stride;
      if (lane == 0) wait_until(&merged[panel], kColumns);
      __syncwarp();
#pragma unroll
      for (int c = lane; c < kColumns; c += 32) {
        const int j = min(panel * kColumns + c, features - 1);
        shared.mean_grad[slot][c] = load_l2(mean_grad + j);
        shared.slope_grad[slot][c] = load_l2(slope_grad + j);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.ready[slot]);
    }
  } else {
    for (int t = 0; lane == 0 && t < tiles; ++t) {
      const int slot = t % SLOTS;
      barrier_wait(&shared.done[slot], t / SLOTS & 1);
      copy_to_global(map_grad_product, shared.product[slot], (first_panel + t * stride) * kColumns, m * ROWS);
      commit_copies();
      wait_copies_read();
      barrier_arrive(&shared.empty[slot]);
    }
  }

  __syncthreads();  // the last block to get here leaves the counters as it found them
  if (threadIdx.x == 0) {
    __threadfence();
    shared.last = atomicAdd(&counters[0], 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (shared.last)
    for (int i = threadIdx.x; i < 1 + 2 * panels; i += kStreamThreads) counters[i] = 0;
}

}  // namespace gemmnorm
