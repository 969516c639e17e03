// What Hopper does by itself or for many threads, for the emulator: barriers in shared memory, copies of TMA, stores to
// other blocks, matrices to and from registers, the tensor cores. Compiled once, for all kernels.
#include "machine.hpp"
#include "ptx/ampere.cuh"

#include <limits>
#include <numeric>

namespace emulator {

using gemmnorm::bfloat16;
using gemmnorm::half;
using gemmnorm::i64;
using gemmnorm::u16;
using gemmnorm::u32;

struct MapFields {  // what tests/emulator writes into a map
  unsigned char* base;
  i64 rows, columns, pitch /* bytes from row to row */;
  int box_rows, box_columns, size, round_to_tf32;
};

// The eight bytes of an mbarrier.
struct Arrivals {
  int bytes;
  u16 missing;
  u16 count_and_phase;

  int phase() const { return count_and_phase >> 15; }
  void check() {
    if (missing || bytes) return;
    count_and_phase ^= 0x8000;
    missing = count_and_phase & 0x7FFF;
  }
};
static_assert(sizeof(Arrivals) == sizeof(u64));

static Arrivals& arrivals(u64* b) { return *reinterpret_cast<Arrivals*>(b); }

void init_mbarrier(u64* b, unsigned count) { arrivals(b) = {0, static_cast<u16>(count), static_cast<u16>(count)}; }
void arrive_at_mbarrier(u64* b, int expected_bytes) {
  arrivals(b).bytes += expected_bytes;
  if (!arrivals(b).missing) fail("more arrivals at an mbarrier than it expects");
  --arrivals(b).missing;
  arrivals(b).check();
}
void wait_for_mbarrier(u64* b, unsigned parity) {
  wait("an mbarrier", [=] { return arrivals(b).phase() != static_cast<int>(parity); });
}

static float rounded_to_tf32(float f) {
  return std::isfinite(f) ? __uint_as_float((__float_as_uint(f) + 0x1000) & 0xFFFFE000u) : f;
}
// Box element (row, byte) ↔ shared memory, swizzled: bits 4-6 of the address are xor-ed with bits 7-9.
static unsigned char* swizzled(unsigned char* box, int row, int byte) {
  const auto address = reinterpret_cast<std::uintptr_t>(box) + row * 128 + byte;
  return reinterpret_cast<unsigned char*>(address ^ (address >> 3 & 0x70));
}
static MapFields fields(const void* map) {
  MapFields m;
  std::memcpy(&m, map, sizeof m);
  if (m.box_columns * m.size != 128) fail("a box whose rows are not 128 bytes");
  return m;
}

// `landing` runs when the box lands.
template <class Landing>
static void load_box(void* to, const void* map, u64* barrier, int x, int y, const Landing& landing) {
  const MapFields m = fields(map);
  if (reinterpret_cast<std::uintptr_t>(to) % 1024) fail("a swizzled box that is not aligned to 1024 bytes");
  machine.pending.push_back([=] {
    landing();
    for (int r = 0; r < m.box_rows; ++r)
      for (int c = 0; c < m.box_columns; ++c) {
        unsigned char* target = swizzled(static_cast<unsigned char*>(to), r, c * m.size);
        const bool inside = y + r >= 0 && y + r < m.rows && x + c >= 0 && x + c < m.columns;
        if (!inside) {
          std::memset(target, 0, m.size);
          continue;
        }
        std::memcpy(target, m.base + (y + r) * m.pitch + (x + c) * m.size, m.size);
        if (m.round_to_tf32) {
          float f;
          std::memcpy(&f, target, 4);
          f = rounded_to_tf32(f);
          std::memcpy(target, &f, 4);
        }
      }
    arrivals(barrier).bytes -= m.box_rows * 128;
    arrivals(barrier).check();
  });
}

void load_box(void* to, const void* map, u64* barrier, int x, int y) {
  load_box(to, map, barrier, x, y, [] {});
}

void load_bulk(void* to, const void* from, unsigned bytes, u64* barrier) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16)
    fail("a bulk copy that is not aligned to 16 bytes");
  machine.pending.push_back([=] {
    std::memcpy(to, from, bytes);
    arrivals(barrier).bytes -= static_cast<int>(bytes);
    arrivals(barrier).check();
  });
}

void store_box(const void* map, const void* from, int x, int y) {
  if (x < 0 || y < 0) fail("a box to store that begins before the matrix, which a GPU calls an illegal instruction");
  const MapFields m = fields(map);
  Fiber* owner = current;
  ++owner->copies;
  machine.pending.push_back([=] {
    for (int r = 0; r < m.box_rows; ++r)
      for (int c = 0; c < m.box_columns; ++c)
        if (y + r < m.rows && x + c < m.columns)
          std::memcpy(m.base + (y + r) * m.pitch + (x + c) * m.size,
                      swizzled(static_cast<unsigned char*>(const_cast<void*>(from)), r, c * m.size), m.size);
    --owner->copies;
  });
}
void wait_for_stores() {
  Fiber* owner = current;
  wait("its bulk copies", [=] { return owner->copies == 0; });
}

// In the shared memory of a block of the cluster, where this block has `own`.
static unsigned char* in_cluster(void* own, unsigned rank) {
  const Block* peer = current->block->cluster->blocks.at(rank);
  if (!peer->alive) fail("the shared memory of a block that has left");
  return peer->shared + (static_cast<unsigned char*>(own) - current->block->shared);
}
void store_remote(void* own, float4 v, u64* barrier, int rank) {
  if (reinterpret_cast<std::uintptr_t>(own) % 16) fail("a misaligned store to another block");
  unsigned char* const to = in_cluster(own, rank);
  unsigned char* const counts = in_cluster(barrier, rank);
  Cluster* cluster = current->block->cluster.get();
  ++cluster->stores;
  machine.pending.push_back([=] {
    --cluster->stores;
    if (!cluster->blocks[rank]->alive) machine.fault = "a store to a block that has left";
    std::memcpy(to, &v, sizeof v);
    Arrivals& there = arrivals(reinterpret_cast<u64*>(counts));
    there.bytes -= static_cast<int>(sizeof v);
    there.check();
  });
}

void load_box_remote(void* own, const void* map, u64* barrier, int x, int y, int rank) {
  Cluster* cluster = current->block->cluster.get();
  ++cluster->stores;
  load_box(in_cluster(own, rank), map, reinterpret_cast<u64*>(in_cluster(barrier, rank)), x, y, [=] {
    --cluster->stores;
    if (!cluster->blocks[rank]->alive) machine.fault = "a load into a block that has left";
  });
}
void arrive_remote(u64* barrier, int rank) { arrive_at_mbarrier(reinterpret_cast<u64*>(in_cluster(barrier, rank)), 0); }

void store_transposed(void* row, const unsigned (&pairs)[4]) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i)
    for (int r = 0; r < 8; ++r) {
      auto* to = reinterpret_cast<u16*>(exchange(reinterpret_cast<std::uintptr_t>(row), 8 * i + r));
      if (reinterpret_cast<std::uintptr_t>(to) % 16) fail("a row of a matrix that is not aligned to 16 bytes");
      if (lane % 4 == r / 2) to[lane / 4] = static_cast<u16>(pairs[i] >> (r % 2 * 16));
    }
}

void load_transposed(const void* row, unsigned (&pairs)[4]) {
  const int lane = threadIdx.x % 32;
  std::uint64_t rows[32];
  exchange_all(reinterpret_cast<std::uintptr_t>(row), rows);
  for (int i = 0; i < 4; ++i) {
    pairs[i] = 0;
    for (int half = 0; half < 2; ++half) {
      const auto* from = reinterpret_cast<const u16*>(rows[8 * i + lane % 4 * 2 + half]);
      if (reinterpret_cast<std::uintptr_t>(from) % 16) fail("a row of a matrix that is not aligned to 16 bytes");
      pairs[i] |= static_cast<u32>(from[lane / 4]) << (half * 16);
    }
  }
}

void commit_products() { ++current->groups; }
// The four warps multiply together: what is complete for one is complete for all.
void wait_for_products(unsigned pending) {
  Fiber* first = &current->block->fibers[current->thread.x / 128 * 128];
  const unsigned groups = current->groups - std::min<unsigned>(current->groups, pending);
  wait("the other warps' multiplications", [=] {
    return std::all_of(first, first + 128, [=](const Fiber& f) { return f.groups >= groups; });
  });
  for (Fiber* f = first; f != first + 128; ++f)
    while (!f->products.empty() && f->products.front().first < groups) {
      f->products.front().second();
      f->products.erase(f->products.begin());
    }
}

struct Tf32;
template <class T>
struct Element {
  static constexpr int kSize = 2;
  static float at(const unsigned char* p) {
    T v;
    std::memcpy(&v, p, 2);
    return gemmnorm::to_float(v);
  }
};
template <>
struct Element<Tf32> {
  static constexpr int kSize = 4;
  static float at(const unsigned char* p) {
    u32 bits;
    std::memcpy(&bits, p, 4);
    return __uint_as_float(bits & 0xFFFFE000u);  // the tensor cores read no more
  }
};

// 32 bytes of K of one row of an operand, at the descriptor's step: along the 128 bytes of a row in memory, or, where the
// operand lies across K, one element of each of 16 rows.
template <class T, int ACROSS>
static void read_row(u64 descriptor, int row, float* out) {
  const u64 address = descriptor << 4;
  if (ACROSS) {
    unsigned char* tile = reinterpret_cast<unsigned char*>(address & ~u64{1023}) + row / 64 * (64 * 128);
    const int first = static_cast<int>(address & 1023) / 128;
    for (int k = 0; k < 16; ++k) *out++ = Element<T>::at(swizzled(tile, first + k, row % 64 * Element<T>::kSize));
  } else {
    unsigned char* tile = reinterpret_cast<unsigned char*>(address & ~u64{127});
    const int first = static_cast<int>(address & 127);
    for (int half = 0; half < 2; ++half) {  // 16 bytes stay together
      const unsigned char* from = swizzled(tile, row, first + 16 * half);
      for (int k = 0; k < 16; k += Element<T>::kSize) *out++ = Element<T>::at(from + k);
    }
  }
}

static double two_to_the(int exponent) {
  const u64 bits = static_cast<u64>(1023 + exponent) << 52;
  double d;
  std::memcpy(&d, &bits, 8);
  return d;
}

static i64 magnitude_bits(double v) {
  i64 bits;
  std::memcpy(&bits, &v, 8);
  return bits & std::numeric_limits<i64>::max();
}

// One instruction's sum as Hopper forms it: products and accumulator aligned to the largest exponent among them, cut off
// 25 bits below its leading one, added exactly, cut off to float32. A model: it gives the errors that were measured on an
// H200 for float32 by three products (docs/float32.md), and was not compared with one bit by bit.
template <int COUNT>
static float tensor_core_sum(const float* a, const float* b, float accumulator) {
  double terms[COUNT];
  for (int k = 0; k < COUNT; ++k) terms[k] = static_cast<double>(a[k]) * b[k];
  i64 largest = 0;  // as bits, whose order is that of magnitudes
  for (int k = 0; k < COUNT; ++k) largest = std::max(largest, magnitude_bits(terms[k]));
  largest = std::max(largest, magnitude_bits(accumulator));
  if (largest == 0) return 0.0f;
  const int exponent = static_cast<int>(largest >> 52) - 1023;
  if (exponent == 1024) return static_cast<float>(std::accumulate(terms, terms + COUNT, 0.0) + accumulator);
  const double up = two_to_the(25 - exponent), down = two_to_the(exponent - 25);  // of float32, far from the ends
  i64 sum = static_cast<i64>(accumulator * up);
  for (int k = 0; k < COUNT; ++k) sum += static_cast<i64>(terms[k] * up);
  const double exact = static_cast<double>(sum) * down;
  const float rounded = static_cast<float>(exact);
  return std::fabs(rounded) > std::fabs(exact) ? std::nextafterf(rounded, 0.0f) : rounded;
}

// At once or when it is waited for.
template <class Product>
static void do_product(const Product& product) {
  if (machine.lazy) current->products.emplace_back(current->groups, product);
  else product();
}

// A thread's own elements of a product: those of its two rows of A, which `low` and `high` are, and of its columns.
template <class T, int B_ACROSS>
static void add_columns(int n, int lane, float* d, const float* low, const float* high, u64 b, bool accumulate) {
  constexpr int kK = 32 / Element<T>::kSize;
  float column[16];
  for (int i = 0; i < n / 8; ++i)
    for (int c = 0; c < 2; ++c) {
      read_row<T, B_ACROSS>(b, i * 8 + lane % 4 * 2 + c, column);
      float &at_low = d[4 * i + c], &at_high = d[4 * i + 2 + c];
      at_low = tensor_core_sum<kK>(low, column, accumulate ? at_low : 0.0f);
      at_high = tensor_core_sum<kK>(high, column, accumulate ? at_high : 0.0f);
    }
}
template <class T, int A_ACROSS, int B_ACROSS>
static void multiply(int n, float* d, u64 a, u64 b, bool accumulate) {
  const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  do_product([=] {
    float low[16], high[16];
    read_row<T, A_ACROSS>(a, row, low);
    read_row<T, A_ACROSS>(a, row + 8, high);
    add_columns<T, B_ACROSS>(n, lane, d, low, high, b, accumulate);
  });
}
template <class T>
static void multiply(int n, bool a_across, bool b_across, float* d, u64 a, u64 b, bool accumulate) {
  if (a_across && b_across) multiply<T, 1, 1>(n, d, a, b, accumulate);
  else if (a_across) multiply<T, 1, 0>(n, d, a, b, accumulate);
  else if (b_across) multiply<T, 0, 1>(n, d, a, b, accumulate);
  else multiply<T, 0, 0>(n, d, a, b, accumulate);
}
void multiply(Format format, int n, bool a_across, bool b_across, float* d, u64 a, u64 b, bool accumulate) {
  if (format == kHalf) multiply<half>(n, a_across, b_across, d, a, b, accumulate);
  else if (format == kBfloat16) multiply<bfloat16>(n, a_across, b_across, d, a, b, accumulate);
  else if (a_across || b_across) fail("a product of tf32 across K");
  else multiply<Tf32, 0, 0>(n, d, a, b, accumulate);
}

// A's rows come from the four lanes that hold them; the registers are free when it returns, which on the chip they are not.
template <class T>
static void multiply_registers(int n, bool b_across, float* d, const unsigned (&a)[4], u64 b, bool accumulate) {
  const int lane = threadIdx.x % 32;
  struct Rows {
    float low[16], high[16];
  } rows;
  for (int quarter = 0; quarter < 4; ++quarter)
    for (int r = 0; r < 4; ++r) {
      const u32 both = static_cast<u32>(exchange(a[r], lane / 4 * 4 + quarter));
      float* to = (r % 2 ? rows.high : rows.low) + r / 2 * 8 + quarter * 2;
      to[0] = gemmnorm::to_float(T{static_cast<u16>(both)});
      to[1] = gemmnorm::to_float(T{static_cast<u16>(both >> 16)});
    }
  do_product([=] {
    if (b_across) add_columns<T, 1>(n, lane, d, rows.low, rows.high, b, accumulate);
    else add_columns<T, 0>(n, lane, d, rows.low, rows.high, b, accumulate);
  });
}
void multiply_registers(Format format, int n, bool b_across, float* d, const unsigned (&a)[4], u64 b, bool accumulate) {
  if (format == kTf32) fail("a product of tf32 from registers");
  if (format == kHalf) multiply_registers<half>(n, b_across, d, a, b, accumulate);
  else multiply_registers<bfloat16>(n, b_across, d, a, b, accumulate);
}

}  // namespace emulator
