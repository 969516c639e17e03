// The emulator's side of ptx/wgmma.cuh: each thread computes its own elements, at once or when they are waited for.
#pragma once
#include "ptx/hopper.cuh"

namespace gemmnorm {

struct tf32;

inline u64 k_major_descriptor(const void* tile) { return reinterpret_cast<std::uintptr_t>(tile) >> 4; }
constexpr int kKMajorStep = 2;
constexpr int kMnMajorBytes = 64 * 128;
inline u64 mn_major_descriptor(const void* tile) { return k_major_descriptor(tile); }
constexpr int kMnMajorStep = 16 * 128 / 16;

inline void wgmma_fence() {}
inline void wgmma_commit() { ++emulator::current->groups; }
// The four warps multiply together: what is complete for one is complete for all.
template <int PENDING>
void wgmma_wait() {
  emulator::Fiber* first = &emulator::current->block->fibers[emulator::current->thread.x / 128 * 128];
  const unsigned groups = emulator::current->groups - std::min<unsigned>(emulator::current->groups, PENDING);
  emulator::wait("the other warps' multiplications", [=] {
    return std::all_of(first, first + 128, [=](const emulator::Fiber& f) { return f.groups >= groups; });
  });
  for (emulator::Fiber* f = first; f != first + 128; ++f)
    while (!f->products.empty() && f->products.front().first < groups) {
      f->products.front().second();
      f->products.erase(f->products.begin());
    }
}

template <class T>
struct Element {
  static constexpr int kSize = 2;
  static float at(const unsigned char* p) {
    T v;
    std::memcpy(&v, p, 2);
    return to_float(v);
  }
};
template <>
struct Element<tf32> {
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
void read_row(u64 descriptor, int row, float* out) {
  const u64 address = descriptor << 4;
  if (ACROSS) {
    unsigned char* tile = reinterpret_cast<unsigned char*>(address & ~u64{1023}) + row / 64 * kMnMajorBytes;
    const int first = static_cast<int>(address & 1023) / 128;
    for (int k = 0; k < 16; ++k) *out++ = Element<T>::at(swizzled(tile, first + k, row % 64 * Element<T>::kSize));
  } else {
    unsigned char* tile = reinterpret_cast<unsigned char*>(address & ~u64{127});
    const int first = static_cast<int>(address & 127);
    for (int k = 0; k < 32; k += Element<T>::kSize) *out++ = Element<T>::at(swizzled(tile, row, first + k));
  }
}

inline double two_to_the(int exponent) {
  const u64 bits = static_cast<u64>(1023 + exponent) << 52;
  double d;
  std::memcpy(&d, &bits, 8);
  return d;
}

// One instruction's sum as Hopper forms it: products and accumulator aligned to the largest exponent among them, cut off
// 25 bits below its leading one, added exactly, cut off to float32. A model: it gives the errors that were measured on an
// H200 for float32 by three products (docs/float32.md), and was not compared with one bit by bit.
inline float tensor_core_sum(const float* a, const float* b, int count, float accumulator) {
  double terms[17];
  for (int k = 0; k < count; ++k) terms[k] = static_cast<double>(a[k]) * b[k];
  terms[count] = accumulator;
  double largest = 0, plain = 0;
  for (int k = 0; k <= count; ++k) {
    largest = std::max(largest, std::fabs(terms[k]));
    plain += terms[k];
  }
  if (!std::isfinite(plain) || largest == 0) return static_cast<float>(plain);
  u64 bits;
  std::memcpy(&bits, &largest, 8);
  const int exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1023;
  const double up = two_to_the(25 - exponent), down = two_to_the(exponent - 25);  // of float32, far from the ends
  i64 sum = 0;
  for (int k = 0; k <= count; ++k) sum += static_cast<i64>(terms[k] * up);
  const double exact = static_cast<double>(sum) * down;
  const float rounded = static_cast<float>(exact);
  return std::fabs(rounded) > std::fabs(exact) ? std::nextafterf(rounded, 0.0f) : rounded;
}

template <class T, int N>
struct Wgmma {
  template <int A_MN = 0, int B_MN = 0>
  static void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
    const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    float* to = d;
    const auto product = [=] {
      constexpr int kK = 32 / Element<T>::kSize;
      float low[kK], high[kK], column[kK];
      read_row<T, A_MN>(a, row, low);
      read_row<T, A_MN>(a, row + 8, high);
      for (int i = 0; i < N / 8; ++i)
        for (int c = 0; c < 2; ++c) {
          read_row<T, B_MN>(b, i * 8 + lane % 4 * 2 + c, column);
          float &at_low = to[4 * i + c], &at_high = to[4 * i + 2 + c];
          at_low = tensor_core_sum(low, column, kK, accumulate ? at_low : 0.0f);
          at_high = tensor_core_sum(high, column, kK, accumulate ? at_high : 0.0f);
        }
    };
    if (emulator::machine.lazy)
      emulator::current->products.emplace_back(emulator::current->groups, product);
    else
      product();
  }
};

// A's rows come from the four lanes that hold them; the registers are free when it returns, which on the chip they are not.
template <class T, int N>
struct WgmmaRegisters {
  template <int B_MN = 0>
  static void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {
    const int lane = threadIdx.x % 32;
    struct Rows {
      float low[16], high[16];
    } rows;
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int r = 0; r < 4; ++r) {
        const u32 both = __shfl_sync(~0u, a[r], lane / 4 * 4 + quarter);
        float* to = (r % 2 ? rows.high : rows.low) + r / 2 * 8 + quarter * 2;
        to[0] = to_float(T{static_cast<u16>(both)});
        to[1] = to_float(T{static_cast<u16>(both >> 16)});
      }
    float* to = d;
    const auto product = [=] {
      float column[16];
      for (int i = 0; i < N / 8; ++i)
        for (int c = 0; c < 2; ++c) {
          read_row<T, B_MN>(b, i * 8 + lane % 4 * 2 + c, column);
          float &at_low = to[4 * i + c], &at_high = to[4 * i + 2 + c];
          at_low = tensor_core_sum(rows.low, column, 16, accumulate ? at_low : 0.0f);
          at_high = tensor_core_sum(rows.high, column, 16, accumulate ? at_high : 0.0f);
        }
    };
    if (emulator::machine.lazy)
      emulator::current->products.emplace_back(emulator::current->groups, product);
    else
      product();
  }
};

}  // namespace gemmnorm
