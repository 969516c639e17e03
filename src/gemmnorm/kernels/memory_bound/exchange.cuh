// Numbers exchanged among the GPUs of one host, in memory that each of them maps of all others (runtime/peers.py): what a
// library's all_gather or all_reduce does, with less of its host time.
//
// A number goes to the other ranks in one store of 8 bytes, beside the number of the exchange, for which the receiver waits:
// nothing has to be ordered. A block of every rank works with the blocks of its own index on the others, and has a piece of
// each rank's memory: two slots, taken in turn. It comes back to a slot two exchanges later, having seen of the exchange
// between that the others have begun it, and so have read the slot: an exchange on one rank begins when the one before has
// ended.
//
// The next launch begins when nothing is waited for any more: its blocks, waiting, would keep kernels of other streams
// from the multiprocessors, and another rank may wait for one of those.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

constexpr int kExchangeThreads = 512;

template <int RANKS, int PART>
struct alignas(128) ExchangeMemory {  // of a block
  u64 parts[2][RANKS][PART];  // number of the exchange, and value
  u32 exchanges;  // that it has done
};

template <class Config, class Params>
__device__ __forceinline__ void exchange(const Params& p) {
  constexpr int kRanks = Config::kRanks;
  using Memory = ExchangeMemory<kRanks, Config::kPart>;
  Memory* memory[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) memory[r] = reinterpret_cast<Memory*>(p.peers[r]) + blockIdx.x;
  Memory& own = reinterpret_cast<Memory*>(p.peers[p.rank])[blockIdx.x];
  const int part = (p.count + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * part;
  const int end = min(part, p.count - begin);

  griddepcontrol_wait();
  const u32 number = own.exchanges + 1, slot = number % 2;
  for (int i = threadIdx.x; i < end; i += kExchangeThreads) {
    const u64 sent = static_cast<u64>(number) << 32 | __float_as_uint(p.sent[begin + i]);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) store_system(&memory[r]->parts[slot][p.rank][i], sent);
  }
  const u64 limit = nanoseconds() + 1'000'000ull * p.limit_ms;
  const auto take = [&](int rank, int i) {
    u64 got = load_system(&own.parts[slot][rank][i]);
    while (got >> 32 != number) {
      got = load_system(&own.parts[slot][rank][i]);
      if (nanoseconds() > limit) end_with_error();
    }
    return __uint_as_float(static_cast<u32>(got));
  };
  for (int i = threadIdx.x; i < end; i += kExchangeThreads) {
    float value[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) value[r] = take(r, i);
    if constexpr (Config::kSum) {
#pragma unroll
      for (int r = 1; r < kRanks; ++r) value[0] += value[r];
      p.received[begin + i] = value[0];
    } else {
#pragma unroll
      for (int r = 0; r < kRanks; ++r) p.received[static_cast<i64>(r) * p.count + begin + i] = value[r];
    }
  }
  __syncthreads();
  griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) own.exchanges = number;
}

}  // namespace gemmnorm
