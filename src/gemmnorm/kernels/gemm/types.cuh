// What the parts of the GEMM are, for one Config: types and constants by name.
#pragma once
#include "gemm/features.cuh"
#include "gemm/operands.cuh"
#include "gemm/scaling.cuh"

namespace gemmnorm {

template <class G>
struct AccumulatorSwapAB;
template <class G>
struct AccumulatorNormal;
template <class Element, int WIDTH, int BLOCKS>
struct Mainloop;
template <int WIDTH, bool A_MN, bool B_MN>
struct SplitMainloop;

template <bool SPLIT, class Element, int WIDTH, int BLOCKS>
struct SelectMainloop {
  using type = Mainloop<Element, WIDTH, BLOCKS>;
};
template <class Element, int WIDTH, int BLOCKS>
struct SelectMainloop<true, Element, WIDTH, BLOCKS> {
  using type = SplitMainloop<WIDTH, false, false>;
};
template <bool SWAP_AB, class G>
struct SelectAccumulator {
  using type = AccumulatorSwapAB<G>;
};
template <class G>
struct SelectAccumulator<false, G> {
  using type = AccumulatorNormal<G>;
};

template <class Config, class Params>
struct GemmTypes {
  using T = typename Config::T;  // of the product
  using Y = typename Config::Y;
  using Activation = typename Config::Activation;
  using Operand = OperandTraits<typename Config::Operand>;
  static constexpr int TM = Config::kTileRows, TN = Config::kTileColumns, kStages = Config::kStages;
  static constexpr int kSharing = Config::kSharing;  // blocks, neighbours along the features, that load each tile of x together
  static constexpr bool kShares = kSharing > 1;
  using Shape = TileShape<TM, TN>;
  static constexpr int kWidth = Shape::kWidth, kPlanes = Operand::kPlanes;
  static constexpr bool kSplit = kPlanes == 2;
  static constexpr int kTileK = kRowBytes / Operand::kSize;  // elements of K in a stage
  using Accumulators = float[Shape::kBlocks * kWidth / 2];
  static constexpr int kLaneColumns = (TN + 31) / 32 * 32;  // of the tile, and beyond it, as warps go through them

  // The product, and y, leave the accumulators through the staging buffers, in store passes; else straight to memory.
  static constexpr bool kStaged = !kSplit && (Shape::kSwapAB || (sizeof(T) == 2 && TN >= 64));
  static constexpr bool kStagedY = kStaged && (Shape::kSwapAB || sizeof(Y) == 2);
  static constexpr int kStorePasses = kStaged ? Shape::template kStorePasses<T> : 1;
  static constexpr int kStorePassesY = kStagedY ? Shape::template kStorePasses<Y> : 1;
  static constexpr bool kOverlaps = Shape::kOverlap > 0;
  static_assert(!kOverlaps || kStagedY, "tiles that overlap leave through the staging buffers");
  static constexpr bool kFitsStaging = kStaged && sizeof(T) == 2;  // a whole tile fits the staging buffers, and may wait there

  using Epilogue = typename Config::template Epilogue<GemmTypes, Params>;
  static constexpr bool kStatisticsKnown = Epilogue::kStatisticsKnown;
  static constexpr bool kHasRest = kSplit && kStatisticsKnown;  // the shift is two floats (common/feature.cuh)
  using Conversion = typename Config::template Conversion<GemmTypes, Params>;
  static constexpr bool kQueued = Config::kQueued;  // blocks take tiles as they become free
  static_assert(!kOverlaps || (kStatisticsKnown && !Conversion::kConverts), "two tiles have the same feature");
  static_assert(!kQueued || (!kShares && !Conversion::kConverts && !Epilogue::kMergesHere),
                "neighbours, converted rows and complete panels come in the static order of tiles");
  static_assert(kStages + 4 < BlockTiles::kSlots, "a slot may still be read when it is written again");
  using Mainloop = typename SelectMainloop<kSplit, typename Operand::Element, kWidth, Shape::kBlocks>::type;
  using AccumulatorTile = typename SelectAccumulator<Shape::kSwapAB, GemmTypes>::type;
  using Scaling = SplitScaling<GemmTypes, Params, kSplit>;

  // Each of the 384 threads starts with 168 registers; the widest tiles need more in the consumers.
  static constexpr bool kMovesRegisters = Shape::kBlocks * kWidth * kPlanes >= 192;
  static constexpr int kProducerRegs = Conversion::kProducerRegs, kConsumerRegs = (3 * 168 - kProducerRegs) / 16 * 8;

  __device__ __forceinline__ static int steps(const Params& p) { return (p.in_features + kTileK - 1) / kTileK; }
};

}  // namespace gemmnorm
