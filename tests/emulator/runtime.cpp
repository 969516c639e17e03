// The emulator's scheduler: starts blocks, gives every fiber its turn, ends when nothing is left or nothing can go on.
#include <cuda.hpp>

namespace emulator {

Machine machine;
Fiber* current = nullptr;

void Machine::do_one_pending() {
  std::swap(pending[random() % pending.size()], pending.back());
  const auto action = std::move(pending.back());
  pending.pop_back();
  action();
}

static void enter() {
  machine.kernel();
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
                const std::function<void()>& kernel) {
  static std::string fault;
  machine.random.seed(seed);
  machine.grid.x = grid;
  machine.block.x = threads;
  machine.cluster = cluster;
  machine.lazy = seed % 2;
  machine.kernel = kernel;
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
        if (fiber.done || (fiber.ready && !(*fiber.ready)())) continue;
        fiber.ready = nullptr;
        current = &fiber;
        if (++turns > kMostTurns) machine.fault = "it goes on and on";
        go_on();
        progress = true;
        if (!machine.fault.empty()) break;
      }
      if (!machine.fault.empty()) break;
      if (!machine.pending.empty() && machine.chance(8)) {
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
