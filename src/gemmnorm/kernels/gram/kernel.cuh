// Statistics of a product that nobody has multiplied yet: mean and M2 of every column of a = x·Wᵀ, from the Gram matrix of x.
//
//   mean(a_n) = w_n·mean(x)        M2(a_n) = w_nᵀ·G·w_n - (w_n·s)²/B
//   with G = Σ_b (x_b - p)(x_b - p)ᵀ  [in_features, in_features],  s = Σ_b (x_b - p),  p near the mean of x
//
// Costs, and what cancels: docs/site/mathematics.md. Taken by the schedule "gram". Features whose M2 is too small beside what
// cancels get a negative rstd, and `inexact` says so: the next launch takes their statistics from the product
// (MissingStatisticsEpilogue). All others are finished here, and where that is all of them the next launch ends at once.
//
// Three phases between barriers of the whole grid: partial Gram matrices of slices of the rows (slices.cuh); their sum, as two
// bfloat16 for each element; W·G, of which each element is multiplied by its own of W. The last block with sums of a tile's
// features finishes them.
#pragma once
#include "gram/slices.cuh"

namespace gemmnorm {

constexpr int kGramScalars = 5;  // sums over columns of G that a feature needs
// M2 is exact enough from kSafeSquares / sqrt(batch) of the squares that cancel in it on, since x - p is rounded to T
// (docs/site/mathematics.md); the mean where a deviation is kSafeMean of Σ |w_ni·p_i|.
constexpr float kSafeSquares = 3.0f, kSafeMean = 1e-4f;

// A word of two elements of T as words of bfloat16 whose sum it is.
template <class T> struct AsBfloat16;
template <> struct AsBfloat16<bfloat16> {
  static constexpr int kWords = 1;
  u32 word[kWords];
  __device__ __forceinline__ explicit AsBfloat16(u32 both) : word{both} {}
};
template <> struct AsBfloat16<half> {
  static constexpr int kWords = 2;
  u32 word[kWords];
  __device__ __forceinline__ explicit AsBfloat16(u32 both) {
    const float low = element_of(both, 0, half{}), high = element_of(both, 1, half{});
    word[0] = pack(low, high, bfloat16{});
    word[1] = pack(low - element_of(word[0], 0, bfloat16{}), high - element_of(word[0], 1, bfloat16{}), bfloat16{});
  }
};

template <class Config, class Params> struct Gram : GramSlices<Config, Params> {
  using Base = GramSlices<Config, Params>;
  using T = typename Base::T;
  using Words = AsBfloat16<T>;
  using Base::p, Base::shared, Base::warp, Base::lane, Base::warpgroup, Base::row, Base::quarter;
  using Base::parts_of_row, Base::parts, Base::slices, Base::pitch, Base::row_tiles, Base::column_tiles;
  using Base::kColumnStages, Base::kItemColumns, Base::kItems, Base::kVectors, Base::sum_of, Base::sum_of_quarters;
  using Base::Base;

  // Second phase: the sums over slices, in a fixed order. As many warps share them out as leave none idle.
  __device__ __forceinline__ void merge_slices() {
    const int items = parts * kItems;
    int warps = kGramWarps;  // of an item
    while (warps > 1 && items * warps > static_cast<int>(gridDim.x) * kGramWarps) warps /= 2;
    const int of_block = kGramWarps / warps;
    if (warp == kGramWarps) return merge_sums();
    for (int first = blockIdx.x * of_block; first < items; first += gridDim.x * of_block) {
      const int item = min(first + warp / warps, items - 1), rows = item % kItems / kItemColumns, columns = item % kItemColumns;
      const GramPart part = gram_part(item / kItems, parts_of_row);
      const bool needed = first + warp / warps < items && part.needs(rows, columns);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (needed && part.has(rows, columns, p.in_features)) {
        const float4* from = reinterpret_cast<const float4*>(p.gram_partial) + item * 32 + lane;
        visit_ahead<kGramAhead>(
            warp % warps, slices, warps, [&](int slice) { return load_l2(from + mul_wide(slice, parts * kVectors)); },
            [&](int, float4 partial) { sum = sum_of(sum, partial); });
      }
      if (warps > 1) {
        named_barrier_sync(1, 32 * kGramWarps);
        shared.merged[warp][lane] = sum;
        named_barrier_sync(1, 32 * kGramWarps);
        if (warp % warps == 0)
#pragma unroll 1
          for (int w = 1; w < warps; ++w) sum = sum_of(sum, shared.merged[warp + w][lane]);
      }
      if (needed && warp % warps == 0)
        store_merged(part.i * kGramTile + rows * 16 + lane / 4, part.j * kGramTile + columns * 8 + quarter * 2, sum);
    }
  }
  __device__ __forceinline__ void merge_sums() const {
    for (int c = blockIdx.x; c < column_tiles * kGramStep; c += gridDim.x) {
      float sum = 0.0f;
      visit_ahead<8>(lane, slices, 32, [&](int slice) { return load_l2(p.gram_sum + mul_wide(slice, pitch) + c); },
                     [&](int, float partial) { sum += partial; });
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
      if (lane == 0) p.gram_columns[pitch + c] = sum;
    }
  }

  // Four elements of G as a lane has them of wgmma, (i, j) the first: each as two bfloat16, along a column of G, which is what
  // the third phase reads as a row; twice, where the third phase does not read its mirror image.
  __device__ __forceinline__ void store_merged(int i, int j, float4 sum) const {
    const float times = i / kGramStep == j / kGramStep ? 1.0f : 2.0f;
    const float element[4] = {sum.x * times, sum.y * times, sum.z * times, sum.w * times};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      bfloat16* to = p.gram + static_cast<i64>(j + q % 2) * pitch + i + q / 2 * 8;
      bfloat16 high;
      from_float(element[q], high);
      from_float(element[q] - to_float(high), to[static_cast<i64>(pitch) * pitch]);
      *to = high;
      if (i + q / 2 * 8 == j + q % 2) p.gram_columns[2 * pitch + i + q / 2 * 8] = element[q];
    }
  }

  // Third phase: tiles of W·G, those of the last columns of G first, which take longest, since there is nothing below the
  // diagonal. Of each feature the sums over a tile's columns, to gram_scalars.
  __device__ __forceinline__ void multiply_weight() {
    const auto row_of = [&](int t) { return t % row_tiles; };
    const auto column_of = [&](int t) { return column_tiles - 1 - t / row_tiles; };
    if (warp == kGramWarps) {
      if (lane > 0) return;
      PipelineState<kColumnStages> state(1);
      for (int t = blockIdx.x; t < row_tiles * column_tiles; t += gridDim.x)
        produce(shared.column_ring, state, 0, column_of(t) + 1, sizeof(GramColumns), [&](int k, int stage, u64* full) {
          GramColumns& to = shared.columns[stage];
          tma_load(to.weight, p.map_weight, full, k * kGramStep, row_of(t) * kGramTile, kEvictNormal);
          tma_load(to.high, p.map_gram, full, k * kGramStep, column_of(t) * kGramStep, kEvictNormal);
          tma_load(to.low, p.map_gram, full, k * kGramStep, pitch + column_of(t) * kGramStep, kEvictNormal);
        });
      return;
    }
    PipelineState<kColumnStages> state(0);
    int odd = 0;  // 1 in every second tile
    for (int t = blockIdx.x; t < row_tiles * column_tiles; t += gridDim.x, odd ^= 1) {
      const int column = column_of(t), j = row_of(t) * kGramTile + threadIdx.x % kGramTile;
      FeatureStatistics f = read_feature(p, min(j, p.features - 1));
      f.batches = counted_batches(p);
      float of_column = 0.0f;  // a number of a column, which arrives while the tile is multiplied
      if (threadIdx.x < 3 * kGramStep)
        of_column = load_l2(p.gram_columns + threadIdx.x / kGramStep * pitch + column * kGramStep + threadIdx.x % kGramStep);
      float acc[kGramStep / 2] = {};
      u32 words[2][kGramStep / 16][Words::kWords][4];  // of W: of this stage, and of the one that is multiplied
      int own = 0;  // the stage of the tile's own columns of W: the last
      for (int k = 0; k <= column; k += 2) {
#pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
          if (k + turn > column) break;
          own = state.stage;
          mbarrier_wait(&shared.column_ring.full[own], state.phase);
          multiply_columns(shared.columns[own], words[turn], acc);
          wgmma_wait<1>();
          if (k + turn > 0 && lane == 0) shared.column_ring.release_before(own);
          state.advance();
        }
      }
      wgmma_wait<0>();
      if (threadIdx.x < 3 * kGramStep) shared.of_column[odd][threadIdx.x / kGramStep][threadIdx.x % kGramStep] = of_column;
      named_barrier_sync(1, 32 * kGramWarps);
      float scalars[2][kGramScalars] = {};
#pragma unroll
      for (int n = 0; n < kGramStep / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 both = weight_word(shared.columns[own], n, h);
#pragma unroll
          for (int c = 0; c < 2; ++c)
            add_element(element_of(both, c, T{}), acc[4 * n + 2 * h + c], shared.of_column[odd], n * 8 + quarter * 2 + c,
                        scalars[h]);
        }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.column_ring.empty[own]);
      float* to = scalars_of(row_of(t), column);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int s = 0; s < kGramScalars; ++s) {
          const float sum = sum_of_quarters(scalars[h][s]);
          if (quarter == 0) to[s * kGramTile + warpgroup * 64 + row + h * 8] = sum;
        }
      if (is_last(row_of(t)) && threadIdx.x < kGramTile && j < p.features) finish(row_of(t), j, f);
    }
  }
  // Sums over a tile's columns, for each of its features.
  __device__ __forceinline__ float* scalars_of(int row_tile, int column) const {
    return p.gram_scalars + mul_wide(column * row_tiles + row_tile, kGramScalars * kGramTile);
  }
  // Waits for the sums of all eight warps. Whether this tile is the last one of its features: all their sums may be read then.
  __device__ __forceinline__ bool is_last(int row_tile) {
    named_barrier_sync(1, 32 * kGramWarps);
    if (column_tiles == 1) return true;
    if (threadIdx.x == 0) {
      u32* done = p.counters + 1 + row_tile;
      shared.last = signal_and_count(done) == static_cast<u32>(column_tiles - 1);
      if (shared.last) *done = 0;
    }
    named_barrier_sync(1, 32 * kGramWarps);
    return shared.last;
  }

  // Two elements of a feature of W: of 8 columns the n-th time; of `row`, or 8 rows on.
  __device__ __forceinline__ u32 weight_word(const GramColumns& from, int n, int h) const {
    return *reinterpret_cast<const u32*>(from.weight + swizzled_word(warpgroup * 64 + row + h * 8, n) + quarter * 4);
  }

  // Begins to multiply a stage, by W's `words`.
  __device__ __forceinline__ void multiply_columns(const GramColumns& from, u32 (&words)[kGramStep / 16][Words::kWords][4],
                                                   float (&acc)[kGramStep / 2]) const {
    using Multiply = WgmmaRegisters<bfloat16, kGramStep>;
#pragma unroll
    for (int step = 0; step < kGramStep / 16; ++step)
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const Words both(weight_word(from, step * 2 + q / 2, q % 2));
#pragma unroll
        for (int w = 0; w < Words::kWords; ++w) words[step][w][q] = both.word[w];
      }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kGramStep / 16; ++step) {
      const u64 high = k_major_descriptor(from.high) + step * kKMajorStep, low = k_major_descriptor(from.low) + step * kKMajorStep;
      Multiply::run(acc, words[step][0], high, 1);
      if (Words::kWords > 1) Multiply::run(acc, words[step][Words::kWords - 1], high, 1);
      Multiply::run(acc, words[step][0], low, 1);
    }
    wgmma_commit();
  }

  // One element of W and of W·G. Of a feature: the quadratic form; w·p and Σ|w_i·p_i|; w·s; Σ w_i²·G_ii.
  __device__ __forceinline__ static void add_element(float weight, float product, const float (&of_column)[3][kGramStep],
                                                     int column, float (&scalars)[kGramScalars]) {
    const float mean = weight * of_column[0][column];
    scalars[0] += product * weight;
    scalars[1] += mean;
    scalars[2] += fabsf(mean);
    scalars[3] += weight * of_column[1][column];
    scalars[4] += weight * weight * of_column[2][column];
  }

  // Mean, rstd and running statistics of a feature, if they are exact enough.
  __device__ __forceinline__ void finish(int row_tile, int j, FeatureStatistics f) const {
    struct Scalars { float of[kGramScalars]; };
    float scalars[kGramScalars] = {};
    visit_ahead<4>(0, column_tiles, 1, [&](int column) {
      Scalars found;
#pragma unroll
      for (int s = 0; s < kGramScalars; ++s)
        found.of[s] = load_l2(scalars_of(row_tile, column) + s * kGramTile + j % kGramTile);
      return found;
    }, [&](int, const Scalars& found) {
#pragma unroll
      for (int s = 0; s < kGramScalars; ++s) scalars[s] += found.of[s];
    });
    const float mean = scalars[1], magnitude = scalars[2], sum = scalars[3], diagonal = scalars[4];
    const float offset = sum * sum / p.batch, m2 = scalars[0] - offset, deviation = kSafeMean * magnitude;
    // Σ(x_i - p_i)·x_j, from which (w·s)·(w·p) was subtracted, was larger by that.
    const float squares = larger(diagonal + fabsf(sum * mean), offset);
    const bool exact = m2 >= larger(p.batch * deviation * deviation, kSafeSquares * squares / sqrtf(p.batch)) && m2 < 3e38f;
    if (exact) {
      f.mean = mean + sum / p.batch;
      f.variance = f.scale * f.scale * m2 / p.batch;
      finish_feature(p, j, f);
    } else {
      *p.inexact = 1; p.rstd[j] = -1.0f;
    }
  }
};

template <class Config, class Params>
__device__ __forceinline__ void gram_statistics(const Params& p) {
  using G = Gram<Config, Params>;
  using Shared = typename G::Shared;
  static_assert(sizeof(Shared) <= Config::kSharedBytes, "the planner's shared memory is too small");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  if (threadIdx.x == 0) {
    prefetch_tensormap(p.map_x); prefetch_tensormap(p.map_weight); prefetch_tensormap(p.map_gram);
    shared.row_ring.init(kGramWarps); shared.column_ring.init(kGramWarps);
    fence_mbarrier_init(); fence_proxy_async_shared();
  }
  __syncthreads();
  griddepcontrol_wait(); griddepcontrol_launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *p.inexact = 0;
    if (p.num_batches_tracked) *p.num_batches_tracked += 1;
  }
  G gram(p, shared);
  gram.add_up_slice();
  grid_sync(p.counters, 1);
  gram.merge_slices();
  grid_sync(p.counters, 2);
  if (threadIdx.x == 0 && atomicAdd(p.counters, 1u) == 3 * gridDim.x - 1) *p.counters = 0;
  gram.multiply_weight();
}

}  // namespace gemmnorm
