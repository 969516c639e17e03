// What an epilogue of `fused_gemm` is: a type with
//
//   Shared                          its shared memory; `init` initialises its barriers, as one thread
//   Auxiliary                       what warps 1 to 3 of the producer warpgroup do beside the main loop
//   Consumer                        what a consumer warpgroup does: `begin` before a tile's main loop, `store` with its
//                                   accumulators, `end` after the block's last tile
//   kStatisticsKnown                all statistics are known before the launch
//   kMergesHere                     those of the batch are merged in this launch, through its counters
//   kWaitsItself                    Auxiliary waits for the launches before (griddepcontrol), and nothing else reads what they
//                                   write: the main loop of the first tile begins beside them. Only behind a GEMM of the same
//                                   call that waits itself before it lets the next begin: all before the call is then complete;
//                                   or two behind the Gram matrix, which begins when all before it is
//                                   Where blocks take tiles, they do so before they wait: by a counter that no launch which may
//                                   still run uses
//   kStores                         tiles are stored, and may pass through the staging buffers
//   counts_alone(p)                 block 0 counts the batch; else the last block does, when it resets the counters
//   done_early(p)                   a consumer signals itself that it is done with the counters, before its last tile is stored,
//                                   so that they are reset meanwhile
#pragma once

namespace gemmnorm {

struct EpilogueDefaults {
  static constexpr bool kStatisticsKnown = false, kMergesHere = false, kWaitsItself = false, kStores = true;
  template <class Params>
  __device__ __forceinline__ static bool counts_alone(const Params&) {
    return false;
  }
  template <class Params>
  __device__ __forceinline__ static bool done_early(const Params&) {
    return false;
  }
};

}  // namespace gemmnorm
