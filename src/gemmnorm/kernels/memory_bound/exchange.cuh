// Numbers exchanged among the GPUs of one host, in memory that each of them maps of all others (runtime/peers.py): what a
// library's all_gather or all_reduce does, without its host time.
//
// A block of every rank works with the blocks of its own index on the others, and has a piece of each rank's memory: two
// slots, taken in turn, with a flag and a part of the row from every rank. It writes its part into the slot on every rank,
// then the flags; it waits for the others' flags in its own memory and reads the parts beside them. It comes back to a slot
// two exchanges later, when the flags of the exchange between have said that the others have read it: an exchange on one
// rank begins when the one before has ended.
//
// The next launch begins when nothing is waited for any more: its blocks, waiting, would keep kernels of other streams
// from the multiprocessors, and another rank may wait for one of those.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

template <int RANKS, int PART>
struct alignas(128) ExchangeMemory {  // of a block
  u32 exchanges;  // that it has done
  u32 flags[2][RANKS];  // the number of the exchange that is written
  float parts[2][RANKS][PART];
};

template <class Config, class Params>
__device__ __forceinline__ void exchange(const Params& p) {
  constexpr int kRanks = Config::kRanks;
  using Memory = ExchangeMemory<kRanks, Config::kPart>;
  static_assert(kRanks <= kThreads, "a thread a flag");
  const auto memory = [&](int rank) -> Memory& { return reinterpret_cast<Memory*>(p.peers[rank])[blockIdx.x]; };
  Memory& own = memory(p.rank);
  const int part = (p.count + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * part;
  const int end = min(part, p.count - begin);

  griddepcontrol_wait();
  const u32 number = own.exchanges + 1, slot = number % 2;
  for (int i = threadIdx.x; i < end; i += kThreads) {
    const float v = p.sent[begin + i];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) memory(r).parts[slot][p.rank][i] = v;
  }
  __syncthreads();
  if (threadIdx.x < kRanks) {
    store_release_system(&memory(threadIdx.x).flags[slot][p.rank], number);
    wait_for_system(&own.flags[slot][threadIdx.x], number, 1'000'000ull * p.limit_ms);
  }
  __syncthreads();
  griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < end; i += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const float v = own.parts[slot][r][i];
      if constexpr (Config::kSum) sum = r == 0 ? v : sum + v;
      else p.received[static_cast<i64>(r) * p.count + begin + i] = v;
    }
    if constexpr (Config::kSum) p.received[begin + i] = sum;
  }
  if (threadIdx.x == 0) own.exchanges = number;
}

}  // namespace gemmnorm
