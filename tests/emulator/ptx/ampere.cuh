// The emulator's side of ptx/ampere.cuh.
#pragma once

#define GEMMNORM_OFFSET(TYPE, FIELD) __builtin_offsetof(TYPE, FIELD)

namespace gemmnorm {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct half {
  u16 bits;
};
struct bfloat16 {
  u16 bits;
};

inline float to_float(float v) { return v; }
inline float to_float(half v) {
  const u32 sign = static_cast<u32>(v.bits >> 15) << 31, exponent = v.bits >> 10 & 31, fraction = v.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | (fraction ? 0x7FC00000u : 0x7F800000u));
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2⁻²⁴
  return sign ? -magnitude : magnitude;
}
inline float to_float(bfloat16 v) { return __uint_as_float(static_cast<u32>(v.bits) << 16); }

inline void from_float(float f, float& v) { v = f; }
inline void from_float(float f, half& v) {  // to nearest, ties to even
  const u16 sign = __float_as_uint(f) >> 16 & 0x8000;
  const float magnitude = std::fabs(f);
  if (std::isnan(f)) {
    v.bits = 0x7FFF;
  } else if (magnitude >= 65520.0f) {
    v.bits = sign | 0x7C00;
  } else if (magnitude < 6.103515625e-05f) {
    v.bits = sign | static_cast<u16>(std::nearbyint(std::ldexp(magnitude, 24)));
  } else {
    int exponent;
    const float fraction = std::frexp(magnitude, &exponent);  // [0.5, 1)
    v.bits = sign | static_cast<u16>(((exponent + 14) << 10) + static_cast<int>(std::nearbyint(std::ldexp(fraction, 11))) - 1024);
  }
}
inline void from_float(float f, bfloat16& v) {
  const u32 bits = __float_as_uint(f);
  v.bits = std::isnan(f) ? 0x7FFF : static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <class T>
u32 pack(float low, float high, T) {
  T a, b;
  from_float(low, a);
  from_float(high, b);
  return a.bits | static_cast<u32>(b.bits) << 16;
}

template <class Word>
void store_word(void* to, const Word& v) {
  *static_cast<Word*>(to) = v;
}

template <class T>
float element_of(u32 both, int i, T) {
  return to_float(T{static_cast<u16>(both >> 16 * i)});
}

inline float power_of_2(float x) { return std::exp2(x); }
inline float larger(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }
inline float reciprocal(float x) { return 1.0f / x; }
inline i64 mul_wide(int a, int b) { return static_cast<i64>(a) * b; }

inline void compiler_barrier() {}
template <class T>
T opaque(T v) {
  return v;
}

inline void cp_async_16(void* to, const void* from) { emulator::copy_16(to, from); }
inline void cp_async_wait_all() { emulator::do_own_copies(); }

// The other rank is another process: no fiber of this one can be waited for instead.
inline void store_system(u64* to, u64 v) { __atomic_store_n(to, v, __ATOMIC_RELAXED); }
inline u64 load_system(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u64 nanoseconds() {
  sched_yield();
  return static_cast<u64>(time(nullptr)) * 1'000'000'000;
}
inline void end_with_error() { emulator::fail("another rank has not come"); }

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace gemmnorm
