// The emulator's side of ptx/wgmma.cuh.
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
inline void wgmma_commit() { emulator::commit_products(); }
template <int PENDING>
void wgmma_wait() {
  emulator::wait_for_products(PENDING);
}

template <class T>
constexpr emulator::Format kFormat = emulator::kBfloat16;
template <>
constexpr emulator::Format kFormat<half> = emulator::kHalf;
template <>
constexpr emulator::Format kFormat<tf32> = emulator::kTf32;

template <class T, int N>
struct Wgmma {
  template <int A_MN = 0, int B_MN = 0>
  static void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
    emulator::multiply(kFormat<T>, N, A_MN, B_MN, d, a, b, accumulate);
  }
};
template <class T, int N>
struct WgmmaRegisters {
  template <int B_MN = 0>
  static void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {
    emulator::multiply_registers(kFormat<T>, N, B_MN, d, a, b, accumulate);
  }
};

}  // namespace gemmnorm
