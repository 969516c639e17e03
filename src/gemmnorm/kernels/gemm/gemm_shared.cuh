// What the fused GEMM keeps in shared memory, by the type of its operands.
#pragma once
#include "ptx/wgmma.cuh"
#include "gemm/split_ahead.cuh"

namespace gemmnorm {

struct split;       // operand type: float32 as two float16 (split.cuh), three products for one
struct thirds;      // float32 as three bfloat16, split on the way from shared memory, six products for one

// The multiplied element, how operands are made inside the kernel, bytes of an element in shared memory, its parts, and the
// registers of a thread that feeds and normalises.
template <class T>
struct Operand {
  using Element = T;
  using Ahead = CastAhead<T>;
  static constexpr int kSize = 2, kPlanes = 1, kFeeder = 104;
};
template <>
struct Operand<tf32> : Operand<half> {
  using Element = tf32;
  static constexpr int kSize = 4;
};
template <>
struct Operand<thirds> : Operand<tf32> {
  using Element = bfloat16;
  static constexpr int kPlanes = 3;
};
template <>
struct Operand<split> : Operand<half> {
  using Ahead = SplitAhead;
  static constexpr int kPlanes = 2, kFeeder = 56;
};

template <int TM, int TN, int STAGES, int PLANES, bool STAGED, bool AHEAD>
struct GemmShared : PieceRings<AHEAD> {
  using Shape = TileShape<TM, TN>;
  alignas(1024) unsigned char x[STAGES][PLANES][TM * kRowBytes];
  alignas(1024) unsigned char weight[STAGES][PLANES][TN * kRowBytes];
  alignas(1024) unsigned char staging[2][STAGED ? Shape::kStagingBytes : 1024];
  // Of a tile by rows sums of each warp; of split operands the exponents along the width. Per consumer.
  float sums[2][Shape::kByFeatures ? 2 : 4][Shape::kWidth];
  // Of a tile by rows column coefficients, per consumer; in kOneBlock a group's mean in `slope` and its M2 in `shift`; in
  // evaluation coefficients per tile.
  float slope[2][TN], shift[2][TN];
  float mean[TN], squares[TN], finished_slope[TN], finished_shift[TN];  // of the tile's columns, for both consumers
  int exponents[2][64];  // of split operands, across the width: of a consumer's 64 rows or columns
  u64 full[STAGES], empty[STAGES];
  u64 staged[2], unstaged[2];  // a consumer's tile is ready to be stored; its staging memory is free again
  u64 known[2], used[2];       // in evaluation: a tile's coefficients are there; they may be overwritten
  u64 left;                    // all warps but the first have left
};

// A warp leaves.
__device__ __forceinline__ void leave(u64& left) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&left);
}

}  // namespace gemmnorm
