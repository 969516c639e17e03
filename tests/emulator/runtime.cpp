// The emulator's scheduler: starts blocks, gives every fiber its turn, ends when nothing is left or nothing can go on.
#include "machine.hpp"

namespace emulator {

Machine machine;
Fiber* current = nullptr;
Here here;

void Machine::do_one_pending() {
  std::swap(pending[random() % pending.size()], pending.back());
  const auto action = std::move(pending.back());
  pending.pop_back();
  action();
}

bool chance(unsigned one_in) { return machine.random() % one_in == 0; }

void pause(const char* what, Closure ready) {
  current->ready = ready;
  current->what = what;
  if (!_setjmp(current->context)) _longjmp(machine.scheduler, 1);
}
void fail(const char* why) {
  machine.fault = why;
  pause("nothing", {[](const void*) { return false; }, nullptr});
  std::abort();
}

static bool arrive_at_gate(Gate& gate, unsigned threads) {
  if (++gate.arrived < threads) return false;
  gate.arrived = 0;
  ++gate.opened;
  return true;
}
static void pass_gate(Gate& gate, unsigned threads, const char* what) {
  const struct {
    const Gate& gate;
    unsigned opened;
  } before = {gate, gate.opened};
  if (arrive_at_gate(gate, threads)) return;
  using Before = decltype(before);
  pause(what, {[](const void* at) {
                 const Before& was = *static_cast<Before*>(at);
                 return was.gate.opened != was.opened;
               },
               &before});
}
void pass_all_threads() { pass_gate(current->block->gates[0], current->block->alive, "__syncthreads"); }
void pass_barrier(int barrier, int threads) { pass_gate(current->block->gates[barrier], threads, "bar.sync"); }
void arrive_at_barrier(int barrier, int threads) { arrive_at_gate(current->block->gates[barrier], threads); }

std::uint64_t exchange(std::uint64_t value, unsigned source) {
  Warp& warp = current->block->warps[current->thread.x / 32];
  const unsigned turn = warp.opened % 2;
  warp.slots[turn][lane()] = value;
  pass_gate(warp, 32, "a warp's shuffle");
  return source < 32 ? warp.slots[turn][source] : value;
}
void exchange_all(std::uint64_t value, std::uint64_t (&all)[32]) {
  Warp& warp = current->block->warps[current->thread.x / 32];
  const unsigned turn = warp.opened % 2;
  exchange(value, 32);
  std::memcpy(all, warp.slots[turn], sizeof all);
}

// Clusters: one barrier for all their threads.
void arrive_at_cluster() {
  Cluster& cluster = *current->block->cluster;
  current->cluster_turn = cluster.opened;
  if (++cluster.arrived == here.cluster * here.threads.x) {
    cluster.arrived = 0;
    ++cluster.opened;
  }
}
void wait_for_cluster() {
  const Cluster* cluster = current->block->cluster.get();
  const unsigned turn = current->cluster_turn;
  wait("the cluster's barrier", [=] { return cluster->opened != turn; });
}

void copy_16(void* to, const void* from) {
  if (chance(2)) std::memcpy(to, from, 16);
  else current->small_copies.emplace_back(to, from);
}
void do_own_copies() {
  for (const auto& [to, from] : current->small_copies) std::memcpy(to, from, 16);
  current->small_copies.clear();
}

static void enter() {
  machine.kernel(machine.params);
  current->done = true;
  --current->block->alive;
  _longjmp(machine.scheduler, 1);
}

// Lets the current fiber run until it waits. Not by `swapcontext`, whose system call takes most of the time.
static void go_on() {
  if (_setjmp(machine.scheduler)) return;
  if (current->begun) _longjmp(current->context, 1);
  current->begun = true;
  setcontext(&current->start);
}

constexpr size_t kStack = 96 * 1024;
constexpr std::uint64_t kMostTurns = 30'000'000;  // of fibers in one launch: some seconds

static std::unique_ptr<Block> start_block(unsigned index, unsigned threads, unsigned shared) {
  auto block = std::make_unique<Block>();
  block->index.x = index;
  block->memory = std::make_unique<unsigned char[]>(shared + 1024);
  std::memset(block->memory.get(), 0xFF, shared + 1024);  // NaN in every format
  block->shared = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(block->memory.get()) + 1023) & ~1023ull);
  block->stacks.reset(new char[threads * kStack]);
  block->fibers.resize(threads);
  block->warps.resize((threads + 31) / 32);
  block->alive = threads;
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = block->fibers[t];
    fiber.thread.x = t;
    fiber.block = block.get();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = block->stacks.get() + t * kStack;
    fiber.start.uc_stack.ss_size = kStack;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, enter, 0);
  }
  return block;
}

const char* run(unsigned grid, unsigned cluster, unsigned threads, unsigned shared, unsigned resident, unsigned seed,
                void (*kernel)(const void*), const void* params) {
  static std::string fault;
  machine.random.seed(seed);
  here.grid.x = grid;
  here.threads.x = threads;
  here.cluster = cluster;
  machine.lazy = seed % 2;
  machine.kernel = kernel;
  machine.params = params;
  machine.pending.clear();
  machine.fault.clear();
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned next = 0;
  std::uint64_t turns = 0;
  std::vector<std::pair<Block*, unsigned>> order;  // warps, in the order in which they get their turn
  while (next < grid || !blocks.empty()) {
    if (blocks.size() + cluster <= std::max(resident, cluster) && next < grid) {
      while (blocks.size() + cluster <= std::max(resident, cluster) && next < grid) {
        const auto together = std::make_shared<Cluster>();
        for (unsigned i = 0; i < cluster; ++i) {
          blocks.push_back(start_block(next++, threads, shared));
          blocks.back()->cluster = together;
          together->blocks.push_back(blocks.back().get());
        }
      }
      order.clear();
      for (auto& block : blocks)
        for (unsigned w = 0; w < block->warps.size(); ++w) order.emplace_back(block.get(), w);
    }
    std::shuffle(order.begin(), order.end(), machine.random);
    bool progress = false;
    for (auto& [block, warp] : order) {
      for (unsigned t = warp * 32; t < std::min(threads, warp * 32 + 32); ++t) {
        Fiber& fiber = block->fibers[t];
        if (fiber.done || (fiber.ready.call && !fiber.ready.call(fiber.ready.at))) continue;
        fiber.ready.call = nullptr;
        current = &fiber;
        here.thread = fiber.thread;
        here.block = block->index;
        here.shared = block->shared;
        if (++turns > kMostTurns) machine.fault = "it goes on and on";
        go_on();
        progress = true;
        if (!machine.fault.empty()) break;
      }
      if (!machine.fault.empty()) break;
      if (!machine.pending.empty() && chance(8)) {
        machine.do_one_pending();
        progress = true;
      }
    }
    if (!progress && machine.fault.empty()) {
      if (machine.pending.empty()) {
        machine.fault = "deadlock:";
        for (auto& [block, warp] : order)
          for (unsigned t = warp * 32; t < std::min(threads, warp * 32 + 32); ++t)
            if (!block->fibers[t].done && (t % 32 == 0 || block->fibers[t - 1].done || block->fibers[t - 1].what != block->fibers[t].what))
              machine.fault += "\n  block " + std::to_string(block->index.x) + " thread " + std::to_string(t) +
                               " waits for " + block->fibers[t].what;
      } else {
        machine.do_one_pending();
      }
    }
    if (!machine.fault.empty()) {
      fault = machine.fault;
      for (auto& block : blocks) block.release();  // their fibers cannot be unwound
      return fault.c_str();
    }
    const size_t before = blocks.size();
    const auto left = [](const std::unique_ptr<Block>& b) {  // all of a cluster, for its blocks may look at each other
      const auto& all = b->cluster->blocks;
      return !b->cluster->stores && std::all_of(all.begin(), all.end(), [](const Block* other) { return !other->alive; });
    };
    std::vector<std::unique_ptr<Block>> staying, leaving;
    for (auto& block : blocks) (left(block) ? leaving : staying).push_back(std::move(block));
    blocks = std::move(staying);
    if (blocks.size() != before) {
      order.clear();
      for (auto& block : blocks)
        for (unsigned w = 0; w < block->warps.size(); ++w) order.emplace_back(block.get(), w);
    }
  }
  while (!machine.pending.empty()) machine.do_one_pending();
  return nullptr;
}

}  // namespace emulator
