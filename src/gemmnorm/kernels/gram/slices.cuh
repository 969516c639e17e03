// First phase of the Gram kernel: partial matrices of slices of the rows.
#pragma once
#include "gram/block.cuh"
#include "gram/pivot.cuh"
#include "ptx/wgmma.cuh"

namespace gemmnorm {

template <class Config, class Params> struct GramSlices : GramBlock<Config, Params> {
  using Base = GramBlock<Config, Params>;
  using T = typename Base::T;
  using Base::p, Base::shared, Base::warp, Base::lane, Base::warpgroup, Base::row, Base::quarter;
  using Base::parts_of_row, Base::parts, Base::slices, Base::row_steps, Base::pitch, Base::row_tiles, Base::column_tiles;
  using Base::kColumns, Base::kItemColumns, Base::kNarrow, Base::kRows, Base::kRowStages, Base::kVectors, Base::sum_of_quarters;
  using Base::Base;

  // G of a part of its elements and a slice of the rows, to gram_partial and gram_sum.
  __device__ __forceinline__ void add_up_slice() {
    const int slice = blockIdx.x / parts;
    if (slice >= slices) return;
    const GramPart part = gram_part(blockIdx.x % parts, parts_of_row);
    const int begin = static_cast<int>(static_cast<i64>(row_steps) * slice / slices);
    const int end = static_cast<int>(static_cast<i64>(row_steps) * (slice + 1) / slices);
    const bool diagonal = part.i == part.j;
    if (warp == kGramWarps) {
      if (lane > 0) return;
      PipelineState<kRowStages> state(1);
      const int bytes = (diagonal ? 2 : 4) * kGramStep * kRowBytes;
      produce(shared.row_ring, state, begin, end, bytes, [&](int k, int stage, u64* full) {
        for (int box = 0; box < 2; ++box) {
          const int column = kNarrow ? 0 : box * kGramStep, below = kNarrow ? box * kGramStep : 0;
          GramRows& to = shared.rows[stage];
          tma_load(to.i[box], p.map_x, full, part.i * kGramTile + column, k * kRows + below, kEvictNormal);
          if (!diagonal) tma_load(to.j[box], p.map_x, full, part.j * kGramTile + column, k * kRows, kEvictNormal);
        }
      });
      for (int k = 0; k < column_tiles && blockIdx.x < row_tiles; ++k)  // for the third phase
        tma_prefetch(p.map_weight, k * kGramStep, blockIdx.x * kGramTile);
      return;
    }
    static_assert(2 * kGramTile == 32 * kGramWarps, "a thread has a pivot");
    const int c = threadIdx.x, column = (c < kGramTile ? part.i : part.j) * kGramTile + c % kGramTile;
    T pivot = {};
    if (column < p.in_features) pivot = pivot_of(p.x, column, p.batch, p.x_pitch);
    shared.pivot[c / kGramTile][c % kGramTile] = pivot;
    if (diagonal && slice == 0 && c < kGramTile) p.gram_columns[column] = to_float(pivot);
    named_barrier_sync(1, 32 * kGramWarps);
    float acc[kColumns / 2];
    float sum[2] = {};            // of x - p, of this thread's elements
    u32 a[2][kGramStep / 16][4];  // of this stage, and of the one that is multiplied
    PipelineState<kRowStages> state(0);
    for (int k = begin; k < end; k += 2) {
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        if (k + turn >= end) break;
        mbarrier_wait(&shared.row_ring.full[state.stage], state.phase);
        const GramRows& rows = shared.rows[state.stage];
        load_rows(rows.i[warpgroup], a[turn], sum);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kGramStep / 16; ++step)
          WgmmaRegisters<T, kColumns>::template run<1>(
              acc, a[turn][step],
              mn_major_descriptor(kNarrow ? rows.i[warpgroup] : diagonal ? rows.i[0] : rows.j[0]) + step * kMnMajorStep,
              k + turn > begin || step > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (k + turn > begin && lane == 0) shared.row_ring.release_before(state.stage);
        state.advance();
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = sum_of_quarters(sum[h]);
    if (kNarrow) { add_other_half(acc, sum); if (warpgroup == 1) return; }
    // Rows beyond the batch came as zeros, less the pivot.
    const int beyond = max(end * kRows - p.batch, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += static_cast<float>(beyond) * to_float(pivot_of_row(h));
    float4* to = reinterpret_cast<float4*>(p.gram_partial) + static_cast<i64>(slice * parts + blockIdx.x % parts) * kVectors;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int q = 0; q < 4; ++q)  // Σ(x_i - p_i)·x_j until here
        acc[4 * n + q] -= sum[q / 2] * to_float(shared.pivot[1][n * 8 + quarter * 2 + q % 2]);
      if (part.needs(warp, n) && part.has(warp, n, p.in_features))
        to[(warp * kItemColumns + n) * 32 + lane] =
            make_float4(acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]);
    }
    if (diagonal && quarter == 0) {
      float* own = p.gram_sum + static_cast<i64>(slice) * pitch + part.i * kGramTile + warpgroup * 64 + row;
      own[0] = sum[0]; own[8] = sum[1];
    }
  }

  // Warpgroup 0 adds what 1 has of its half of the rows.
  __device__ __forceinline__ void add_other_half(float (&acc)[kColumns / 2], float (&sum)[2]) {
    float4* half = reinterpret_cast<float4*>(shared.rows[kRowStages - 1].j) + threadIdx.x % 128;  // the last stage's are unused
    static_assert(!kNarrow || sizeof(GramRows::j) >= sizeof(acc) * 128, "a warpgroup's accumulators");
    if (warpgroup == 1) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        half[n * 128] = make_float4(acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]);
      shared.merged[warp][lane] = make_float4(sum[0], sum[1], 0.0f, 0.0f);
    }
    fence_proxy_async_shared();  // TMA writes there in the third phase
    named_barrier_sync(1, 32 * kGramWarps);
    if (warpgroup == 1) return;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float4 v = half[n * 128];
      acc[4 * n] += v.x; acc[4 * n + 1] += v.y; acc[4 * n + 2] += v.z; acc[4 * n + 3] += v.w;
    }
    fence_proxy_async_shared();
    const float4 other = shared.merged[warp + 4][lane];
    sum[0] += other.x; sum[1] += other.y;
  }
  // Of the first of the thread's rows of G, or of that 8 rows on.
  __device__ __forceinline__ T pivot_of_row(int h) const { return shared.pivot[0][(kNarrow ? 0 : warpgroup * 64) + row + h * 8]; }

  // A warpgroup's 64 columns i of a stage, less their pivots.
  __device__ __forceinline__ void load_rows(const unsigned char* i, u32 (&a)[kGramStep / 16][4], float (&sum)[2]) const {
    const int matrix = lane / 8;  // of the four that a lane says a row of
    u32 pivot[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) pivot[h] = pivot_of_row(h).bits * 0x10001u;
#pragma unroll
    for (int step = 0; step < kGramStep / 16; ++step)
      ldmatrix_trans(i + swizzled_word(step * 16 + matrix / 2 * 8 + lane % 8, warp % 4 * 2 + matrix % 2), a[step]);
#pragma unroll
    for (int step = 0; step < kGramStep / 16; ++step)
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        a[step][q] = subtract_pairs(a[step][q], pivot[q % 2], T{});
        sum[q % 2] += element_of(a[step][q], 0, T{}) + element_of(a[step][q], 1, T{});
      }
  }
};

}  // namespace gemmnorm
