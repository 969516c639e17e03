// The emulator's side of ptx/wgmma.cuh: each thread computes its own elements, at once or when they are waited for.
#pragma once
#include "ptx/hopper.cuh"

namespace gemmnorm {

struct tf32;

inline u64 matrix_descriptor(const void* tile) { return reinterpret_cast<std::uintptr_t>(tile) >> 4; }
constexpr int kDescriptorStep = 2;

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
    return as_float(bits & 0xFFFFE000u);  // the tensor cores read no more
  }
};

// K-major operand: 32 bytes of `row`, at the descriptor's step along the 128 bytes of K.
template <class T>
void read_row(u64 descriptor, int row, float* out) {
  unsigned char* tile = reinterpret_cast<unsigned char*>(descriptor << 4 & ~u64{127});
  const int first = static_cast<int>(descriptor << 4 & 127);
  for (int k = 0; k < 32; k += Element<T>::kSize) *out++ = Element<T>::at(swizzled(tile, row, first + k));
}

template <class T, int N>
struct Wgmma {
  static void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
    const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    float* to = d;
    const auto product = [=] {
      constexpr int kK = 32 / Element<T>::kSize;
      float low[kK], high[kK], column[kK];
      read_row<T>(a, row, low);
      read_row<T>(a, row + 8, high);
      for (int i = 0; i < N / 8; ++i)
        for (int c = 0; c < 2; ++c) {
          read_row<T>(b, i * 8 + lane % 4 * 2 + c, column);
          float sum_low = 0, sum_high = 0;
          for (int k = 0; k < kK; ++k) {
            sum_low += low[k] * column[k];
            sum_high += high[k] * column[k];
          }
          to[4 * i + c] = sum_low + (accumulate ? to[4 * i + c] : 0.0f);
          to[4 * i + 2 + c] = sum_high + (accumulate ? to[4 * i + 2 + c] : 0.0f);
        }
    };
    if (emulator::machine.lazy)
      emulator::current->products.emplace_back(emulator::current->groups, product);
    else
      product();
  }
};

}  // namespace gemmnorm
