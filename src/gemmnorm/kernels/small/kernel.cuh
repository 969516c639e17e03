// Small batches, the whole chain in one launch (sm_90a): in training a cluster of blocks owns a panel of features. It has so
// many blocks for each tile of 128 rows, which share out K; in evaluation every tile of a panel has a cluster of its own.
//
//   warp 8          one thread: TMA loads; then, in training, the whole warp finishes the features' statistics
//   warps 0 to 7    two consumer warpgroups: the block's part of K for all rows of its tile and all features of the panel; then
//                   some of them finish y (finish.cuh)
//
// Latency is everything here, so between the last load and the last store there are but
//   1. the multiplications of one stage;
//   2. one trip from block to block: the accumulators go straight to the shared memory of the block that finishes them, whose
//      barrier counts their bytes. No block asks, none waits for the cluster, and each may leave when it has what it needs;
//   3. one sum over the rows and one barrier of the block, for the values and their squares at once, about the tile's first
//      row. A value of n lies within √(n - 1) deviations of their mean, so the squares lose 7 bits at most, 11 of 2048 rows,
//      also where |mean| >> std;
//   4. where there are several tiles of rows, one more trip from block to block, with these sums;
//   5. one reciprocal root.
// float32 takes a second sum and barrier, about the tile's mean, and a root that is rounded as it should be.
#pragma once
#include "gemm/mainloop.cuh"
#include "gemm/operands.cuh"
#include "small/finish.cuh"

namespace gemmnorm {

template <class Config>
struct SmallTypes {
  using T = typename Config::T;
  using Operand = OperandTraits<typename Config::Operand>;
  using Activation = typename Config::Activation;
  static constexpr int BN = Config::kColumns, kStages = Config::kStages;
  static constexpr int kShares = Config::kShares, kTiles = Config::kTiles;  // of K, and of the batch in a cluster
  static constexpr int kCluster = kShares * kTiles;
  static constexpr bool kTraining = Config::kTraining, kSplit = Operand::kPlanes == 3;
  using S = PanelShare<BN, kShares>;
  static constexpr int kBoxes = kSplit ? 2 : 1;  // of a stage, side by side along K
  static constexpr int kBoxK = kRowBytes / Operand::kSize, kTileK = kBoxK * kBoxes;
  static constexpr int kSums = kSplit ? 1 : 0;  // which of the sums over rows count
};

template <int BN, bool SPLIT>
struct WeightPartsIf {};
template <int BN>
struct WeightPartsIf<BN, true> {
  WeightParts<BN> weight_parts;
};

template <class G>
struct SmallShared : WeightPartsIf<G::BN, G::kSplit> {
  using S = typename G::S;
  alignas(1024) unsigned char x[G::kStages][G::kBoxes][kTileRows * kRowBytes];
  alignas(1024) unsigned char weight[G::kStages][G::kBoxes][G::BN * kRowBytes];
  float4 parts[G::kShares][S::kUnits][S::kFinishers];  // partial sums of the product, by block of origin
  UnitSums<S> sums[2];  // over the tile's rows, about its first, and about the mean: of the product as it is stored, or once
                        // more (float32)
  TileSums<G::kTiles, S::kColumns> tiles;
  Pipeline<G::kStages> ring;
  u64 arrived;  // all partial sums
};

// Hands the accumulators to the blocks that finish them, of the cluster's blocks `first` and those after it. A block begins
// with the one after it and ends with itself, so that not all send to one.
template <class G, class Shared>
__device__ __forceinline__ void exchange_partial_sums(Shared& shared, int first, int rank, const float (&acc)[G::BN / 2]) {
  using S = typename G::S;
  constexpr int kAll = G::BN / 8, kStarts = kAll / S::kUnits;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own_start = rank * S::kColumns / 8 / S::kUnits;
  float4* slots = &shared.parts[rank][0][(warp * 8 + lane / 4) * S::kAcross + lane % S::kAcross];
#pragma unroll
  for (int start = 0; start < kStarts; ++start) {
    if (start != own_start) continue;
#pragma unroll
    for (int n = 0; n < kAll; ++n) {
      const int i = ((start + 1) * S::kUnits + n) % kAll;
      const int owner = i * 8 / S::kColumns + (S::kColumns < 8 ? lane % 4 / 2 : 0);
      const float4 v = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
      float4* to = slots + i % S::kUnits * S::kFinishers;
      if (G::kShares == 1 || owner == rank) *to = v;
      else st_async_remote(to, v, &shared.arrived, first + owner);
    }
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(&shared.arrived);
}

template <class Config, class Params>
__device__ __forceinline__ void small_panel(const Params& p) {
  using G = SmallTypes<Config>;
  using S = typename G::S;
  using Shared = SmallShared<G>;
  constexpr int BN = G::BN, kCluster = G::kCluster, kShares = G::kShares;
  static_assert(sizeof(Shared) <= Config::kSharedBytes, "the planner gives too little shared memory");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A panel's tiles follow each other, and a tile's blocks.
  const int tiles = G::kTraining ? G::kTiles : (p.batch + kTileRows - 1) / kTileRows;
  const int block = static_cast<int>(blockIdx.x), rank = block % kShares;
  const int tile = block / kShares % tiles, panel = block / kShares / tiles;
  const int steps = (p.in_features + G::kTileK - 1) / G::kTileK;
  const int begin = rank * steps / kShares, end = (rank + 1) * steps / kShares;  // the block's part of K
  const int first_column = panel * BN + rank * S::kColumns;

  if (warp == kConsumerWarps && lane == 0) {
    prefetch_tensormap(p.map_x);
    prefetch_tensormap(p.map_last_x);
    prefetch_tensormap(p.map_weight);
    prefetch_tensormap(p.map_last_weight);
    shared.ring.init(G::kSplit ? kConsumerWarps : 2);  // which nobody but this thread waits for before the cluster does
    fence_mbarrier_init();
    fence_proxy_async_shared();
  } else if (threadIdx.x == 0) {
    mbarrier_init(&shared.arrived, 1 + kConsumerWarps);
    shared.tiles.init();
    fence_mbarrier_init();
    mbarrier_expect_tx(&shared.arrived, (kShares - 1) * sizeof(shared.parts[0]));
  }
  __syncwarp();
  if (kCluster > 1) cluster_arrive_relaxed();
  else __syncthreads();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  if (warp == kConsumerWarps) {
    if (lane == 0) {
      const OperandBox x = operand_box<kTileRows>(p.map_x, p.map_last_x, tile * kTileRows, p.batch);
      const OperandBox weight = operand_box<BN>(p.map_weight, p.map_last_weight, panel * BN, p.features);
      PipelineState<G::kStages> state(1);
      produce(shared.ring, state, begin, end, G::kBoxes * (x.rows + weight.rows) * kRowBytes, [&](int k, int stage, u64* full) {
#pragma unroll
        for (int box = 0; box < G::kBoxes; ++box) {
          const int column = k * G::kTileK + box * G::kBoxK;
          tma_load(shared.x[stage][box], *x.map, full, column, tile * kTileRows, kEvictNormal);
          tma_load(shared.weight[stage][box], *weight.map, full, column, panel * BN, kEvictNormal);
        }
      });
    }
    __syncwarp();
    if constexpr (G::kTraining) finish_statistics<G>(p, shared, tile, rank, first_column);
    return;
  }

  Finisher<G, Params, Shared> finisher(p, shared, tile, first_column);
  const bool finishes = warp < S::kWarps;
  if (finishes) finisher.load_features();
  if (kCluster > 1) cluster_wait();  // all barriers of the cluster are there

  const int consumer = __shfl_sync(~0u, warp / 4, 0);  // the same for the whole warp, and the compiler knows
  PipelineState<G::kStages> state(0);
  float acc[BN / 2];
  if constexpr (G::kSplit) {
    Bf16x3Mainloop<BN>::run(shared.ring, state, end - begin, shared, consumer, acc);
  } else {
    if (begin == end) {
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) acc[i] = 0.0f;
    }
    const auto a = [&](int stage) { return shared.x[stage][0] + consumer * kGroupRows * kRowBytes; };
    const auto b = [&](int stage) { return shared.weight[stage][0]; };
    Mainloop<typename G::Operand::Element, BN>::run(shared.ring, state, end - begin, a, b, acc);
  }
  exchange_partial_sums<G>(shared, G::kTiles > 1 ? tile * kShares : 0, rank, acc);
  if (!finishes) return;
  mbarrier_wait_cluster(&shared.arrived, 0);
  if constexpr (G::kTraining) finisher.train();
  else finisher.evaluate();
}

}  // namespace gemmnorm
