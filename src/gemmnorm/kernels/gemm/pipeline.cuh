// The ring of shared-memory stages between the producer thread, which fills it by TMA, and the consumers.
#pragma once
#include "ptx/hopper.cuh"

namespace gemmnorm {

// Barriers of a ring: `full` completes when a stage's bytes have arrived, `empty` when all consumers have read them: those of
// all BLOCKS of a cluster, whose producers write to each other's rings.
template <int STAGES, int BLOCKS = 1>
struct Pipeline {
  static constexpr int kStages = STAGES;
  u64 full[STAGES], empty[STAGES];

  __device__ __forceinline__ void init(int consumers) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], consumers * BLOCKS);
    }
  }
  // A consumer has read the stage before `stage`, as one thread.
  __device__ __forceinline__ void release_before(int stage) {
    u64* barrier = &empty[stage == 0 ? STAGES - 1 : stage - 1];
    if constexpr (BLOCKS > 1) {
#pragma unroll
      for (int rank = 0; rank < BLOCKS; ++rank) mbarrier_arrive_remote(barrier, rank);
    } else {
      mbarrier_arrive(barrier);
    }
  }
};

// Where a thread is in the ring. The producer begins with phase 1: all stages are empty.
template <int STAGES>
struct PipelineState {
  int stage = 0;
  u32 phase;

  __device__ __forceinline__ explicit PipelineState(u32 phase_) : phase(phase_) {}
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// What TMA loads of a tile's rows of an operand: all ROWS of them, or of the last tile those that exist, in eights, by a map of
// its own. Rows of a box beyond the matrix would be filled with zeros, slowly. What a stage holds in their place nobody may
// read.
struct OperandBox {
  const TensorMap* map;
  int rows;
};
// Where the BLOCKS of a cluster share them out: each one's part. None of a tile beyond the last.
template <int ROWS, int BLOCKS = 1>
__device__ __forceinline__ OperandBox operand_box(const TensorMap& map, const TensorMap& last, int first_row, int rows) {
  const int left = rows - first_row;
  if (left > ROWS) return {&map, ROWS / BLOCKS};
  return {&last, max((left + 8 * BLOCKS - 1) / (8 * BLOCKS) * 8, 0)};
}

// The producer: as one thread, fills a stage of `bytes` for each k in [begin, end). `load(k, stage, barrier)` asks TMA for it.
template <class Ring, class Load>
__device__ __forceinline__ void produce(Ring& ring, PipelineState<Ring::kStages>& state, int begin, int end, u32 bytes,
                                        const Load& load) {
  for (int k = begin; k < end; ++k) {
    mbarrier_wait(&ring.empty[state.stage], state.phase);
    mbarrier_expect_tx(&ring.full[state.stage], bytes);
    load(k, state.stage, &ring.full[state.stage]);
    state.advance();
  }
}

}  // namespace gemmnorm
