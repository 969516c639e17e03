// Linear → scale → BatchNorm → activation in one Hopper kernel (sm_90a): a persistent, warp-specialised GEMM.
//
//   producer warpgroup   warp 0, one thread: TMA loads of x and the weight into the ring (pipeline.cuh)
//                        warps 2, 3: operand conversion, where any is left to the kernel (conversion*.cuh)
//                        warps 1 to 3: what the epilogue does beside the main loop (Epilogue::Auxiliary)
//   consumer warpgroups  two: the main loop over K (mainloop*.cuh), then the epilogue with its accumulators
//                        (Epilogue::Consumer, one epilogue_<what>.cuh each)
//
// tile_scheduler.cuh says which tile is next, accumulator_*.cuh how an accumulator tile lies in registers.
#pragma once
#include "gemm/accumulator_normal.cuh"
#include "gemm/accumulator_swap_ab.cuh"
#include "gemm/conversion.cuh"
#include "gemm/mainloop.cuh"
#include "gemm/operands.cuh"
#include "gemm/types.cuh"

namespace gemmnorm {

constexpr int kTurn = 4;  // a named barrier

template <class G>
struct GemmShared {
  alignas(1024) unsigned char x[G::kStages][G::kPlanes][G::TM * kRowBytes];
  alignas(1024) unsigned char weight[G::kStages][G::kPlanes][G::TN * kRowBytes];
  alignas(1024) unsigned char staging[2][G::kStaged && G::Epilogue::kStores ? G::Shape::kStagingBytes : 1024];
  typename G::Conversion::Shared conversion;
  alignas(16) typename G::Scaling::Shared scaling;  // read two floats at a time
  alignas(16) typename G::Epilogue::Shared epilogue;  // likewise
  Pipeline<G::kStages, G::kSharing> ring;
  BlockTiles tiles;
  u64 warps_done;  // completes when all warps but the producer's are done with the counters
};

// One thread loads the operands of the block's tiles; of x its part, for all blocks that share it.
template <class G, class Params, class Shared>
__device__ __forceinline__ void load_tiles(const Params& p, const TileScheduler& scheduler, Shared& shared,
                                           const typename G::Conversion& conversion) {
  const u64 x_policy = p.stream_x ? kEvictFirst : kEvictNormal;
  PipelineState<G::kStages> state(1);
  int t = blockIdx.x, i = 0;
#pragma unroll 1
  for (; t < scheduler.tiles(); ++i) {
    u32 number = 0;
    if constexpr (G::kQueued) number = draw_number(p.counters + p.tile_counter);
    const Tile tile = scheduler.at(t);
    shared.tiles.put(i, t, tile);
    const OperandBox x = operand_box<G::TM, G::kSharing>(p.map_x, p.map_last_x, tile.m * G::TM, p.batch);
    int own_rows = 0;  // where the block's part of x begins
    if constexpr (G::kShares) own_rows = cluster_rank() * x.rows;
    const int first_feature = G::Shape::first_feature(tile, 0);
    const OperandBox weight = operand_box<G::TN>(p.map_weight, p.map_last_weight, first_feature, p.features);
    const int bytes = G::kPlanes * (G::kSharing * x.rows + weight.rows) * kRowBytes;
    produce(shared.ring, state, 0, G::steps(p), bytes, [&](int k, int stage, u64* full) {
      conversion.wait_for(tile, k);
#pragma unroll
      for (int plane = 0; plane < G::kPlanes; ++plane) {
        const int column = (k * G::kPlanes + plane) * G::kTileK;
        if constexpr (G::kShares) {
          tma_load_multicast(shared.x[stage][plane] + own_rows * kRowBytes, *x.map, full, column, tile.m * G::TM + own_rows,
                             (1 << G::kSharing) - 1, x_policy);
          if (weight.rows == 0) continue;
        } else {
          tma_load(shared.x[stage][plane], *x.map, full, column, tile.m * G::TM, x_policy);
        }
        tma_load(shared.weight[stage][plane], *weight.map, full, column, first_feature, kEvictNormal);
      }
    });
    if constexpr (G::kQueued) t = drawn_tile(p.counters + p.tile_counter, number, scheduler.tiles());
    else t += gridDim.x;
  }
  shared.tiles.put(i, t, {});
}

// A consumer warpgroup: main loop and epilogue of the block's tiles. Where the ring holds more than a tile's stages, consumer 1
// begins when 0 has multiplied its first tile: from then on one multiplies while the other finishes.
template <class G, class Params, class Shared>
__device__ __forceinline__ void consume_tiles(const Features<Params>& f, const TileScheduler& scheduler,
                                              const Counters& counters, Shared& shared, int consumer) {
  using Shape = typename G::Shape;
  const int own_rows = Shape::first_row({0, 0}, consumer), own_features = Shape::own_feature(consumer);
  const auto x = [&](int plane, int stage) { return shared.x[stage][plane] + own_rows * kRowBytes; };
  const auto weight = [&](int plane, int stage) { return shared.weight[stage][plane] + own_features * kRowBytes; };
  const auto a = [&](int plane, int stage) { return Shape::kSwapAB ? weight(plane, stage) : x(plane, stage); };
  const auto b = [&](int plane, int stage) { return Shape::kSwapAB ? x(plane, stage) : weight(plane, stage); };
  typename G::Epilogue::template Consumer<Shared> epilogue(f, scheduler, counters, shared, consumer);
  PipelineState<G::kStages> state(0);
  typename G::Accumulators acc;
  const bool takes_turns = G::steps(f.p) < G::kStages && static_cast<int>(blockIdx.x) < scheduler.tiles();
  if (takes_turns && consumer == 1) named_barrier_sync(kTurn, 256);
#pragma unroll 1
  for (TileWalk walk(shared.tiles); walk.t < scheduler.tiles(); walk.advance()) {
    const int t = walk.t;
    epilogue.begin(walk.tile());
    if constexpr (G::kSplit) {
      const typename G::Scaling scaling(f.p, shared.scaling, consumer);
      G::Mainloop::run(shared.ring, state, G::steps(f.p), a, b, acc, [&] { scaling.load(walk.tile()); });
      scaling.apply(acc);
    } else {
      G::Mainloop::run(shared.ring, state, G::steps(f.p), [&](int stage) { return a(0, stage); },
                       [&](int stage) { return b(0, stage); }, acc);
    }
    if (takes_turns && consumer == 0 && t == static_cast<int>(blockIdx.x)) named_barrier_arrive(kTurn, 256);
    epilogue.store(t, walk.tile(), acc);
  }
  epilogue.end();
}

// As the last thing that the block does: where it is the last block of all, the counters become zero again, and the batch is
// counted, if `counts`. `used`: the counters' end.
template <class Params>
__device__ __forceinline__ void reset_counters(const Params& p, const Counters& counters, u32* used, bool counts) {
  __threadfence();
  if (atomicAdd(counters.done(), 1u) != gridDim.x - 1) return;
  __threadfence();
  for (u32* counter = counters.base; counter < used; ++counter) *counter = 0;
  if (counts && p.num_batches_tracked) *p.num_batches_tracked += 1;
}

template <class Config, class Params>
__device__ __forceinline__ void fused_gemm(const Params& p) {
  using G = GemmTypes<Config, Params>;
  using Shared = GemmShared<G>;
  static_assert(sizeof(Shared) <= Config::kSharedBytes, "the planner's Tile.shared is too small");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  const TileScheduler scheduler = tile_scheduler<G::TM, G::TN, G::kSharing>(p);
  const Features<Params> f(p, G::Shape::kMeanRows);
  const Counters counters = {p.counters, scheduler.tiles_n};
  const typename G::Conversion conversion(p, scheduler, counters.end());
  constexpr bool kResets = G::Epilogue::kMergesHere || G::Conversion::kConverts;

  if (threadIdx.x == 0) {
    prefetch_tensormap(p.map_x);
    prefetch_tensormap(p.map_last_x);
    prefetch_tensormap(p.map_weight);
    prefetch_tensormap(p.map_last_weight);
    shared.ring.init(2);
    shared.tiles.init();
    shared.epilogue.init();
    shared.conversion.init();
    mbarrier_init(&shared.warps_done, kGemmThreads / 32 - 1);
    fence_mbarrier_init();
    fence_proxy_async_shared();
  }
  __syncthreads();
  if constexpr (G::kShares) {  // the others' barriers are there
    cluster_arrive_relaxed();
    cluster_wait();
  }
  if (!G::Epilogue::kWaitsItself || G::Conversion::kConverts) {
    if (p.inexact) griddepcontrol_launch_dependents();  // mostly there is nothing to do, and the next launch comes meanwhile
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }
  if (p.inexact && *p.inexact == 0) return;  // the statistics are there already

  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    if (G::kMovesRegisters) setmaxnreg_dec<G::kProducerRegs>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) load_tiles<G>(p, scheduler, shared, conversion);
    if (warp > 0) {
      if constexpr (G::Conversion::kConverts) {
        if (warp >= 2) conversion.convert(shared.conversion, warp - 2);
      }
      G::Epilogue::Auxiliary::run(f, scheduler, counters, shared, warp);
      if (kResets) signal_warp_done(shared.warps_done);
    }
  } else {
    if (G::kMovesRegisters) setmaxnreg_inc<G::kConsumerRegs>();
    consume_tiles<G>(f, scheduler, counters, shared, warpgroup - 1);
    if (kResets && !G::Epilogue::done_early(p)) signal_warp_done(shared.warps_done);
  }

  const bool alone = G::Epilogue::counts_alone(p);
  if (alone && p.num_batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *p.num_batches_tracked += 1;
  if ((G::Conversion::kConverts || (kResets && !alone)) && threadIdx.x == 0) {
    mbarrier_wait(&shared.warps_done, 0);
    reset_counters(p, counters, counters.end() + conversion.counters(), G::Epilogue::kMergesHere && !alone);
  }
  if constexpr (G::kShares) {  // nobody writes to the block any more
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  }
}

}  // namespace gemmnorm
