// A GPU on the CPU, for tests: every CUDA thread is a fiber, blocks share nothing but global memory, and whatever the
// hardware leaves open is decided at random from a seed: which warp runs next, when a copy or a multiplication that runs
// on its own takes place. A kernel that waits for what never comes is reported, not endured.
#pragma once
#include <cuda.hpp>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

struct Gate {  // a barrier: who is here, and how often it has opened
  unsigned arrived = 0, opened = 0;
};
struct Warp : Gate {
  std::uint64_t slots[2][32];
};

struct Block;
struct Fiber {
  ucontext_t start;
  jmp_buf context;  // where it goes on, once it has begun
  bool begun = false;
  Index thread;
  Block* block = nullptr;
  bool done = false;
  Closure ready = {nullptr, nullptr};  // what it waits for
  const char* what = "";
  int copies = 0;  // own bulk copies that have not taken place
  std::vector<std::pair<unsigned, std::function<void()>>> products;  // own multiplications: their group, what to do
  unsigned groups = 0;                                              // of multiplications, committed
  std::vector<std::pair<void*, const void*>> small_copies;          // own copies of 16 bytes: to, from
  unsigned cluster_turn = 0;                                        // of the cluster's barrier, when it arrived
};

struct Block {
  Index index;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* shared;
  std::unique_ptr<char[]> stacks;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Gate gates[17];  // bar.sync 0 to 15, and one spare
  unsigned alive;
  std::shared_ptr<struct Cluster> cluster;
};

struct Cluster : Gate {
  std::vector<Block*> blocks;
  unsigned stores = 0;  // on their way from block to block
};

struct Machine {
  std::mt19937 random;
  bool lazy;  // multiplications take place when they are waited for, else at once
  jmp_buf scheduler;
  void (*kernel)(const void*);
  const void* params;
  std::vector<std::function<void()>> pending;  // copies on their way
  std::string fault;

  void do_one_pending();
};

extern Machine machine;
extern Fiber* current;

}  // namespace emulator
