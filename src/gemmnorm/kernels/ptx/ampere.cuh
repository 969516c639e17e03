// Types, conversions and ordering: the instructions that every GPU from compute capability 8.0 has.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

// The byte offset of a field, as a constant. NVRTC before 13.1 has no __builtin_offsetof, and none has the header.
#ifdef __CUDACC_RTC__
#define GEMMNORM_OFFSET(TYPE, FIELD) __INTADDR__(&static_cast<TYPE*>(nullptr)->FIELD)
#else
#define GEMMNORM_OFFSET(TYPE, FIELD) __builtin_offsetof(TYPE, FIELD)
#endif

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

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(half v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
}
__device__ __forceinline__ float to_float(bfloat16 v) { return __uint_as_float(static_cast<u32>(v.bits) << 16); }

__device__ __forceinline__ void from_float(float f, float& v) { v = f; }
__device__ __forceinline__ void from_float(float f, half& v) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v.bits) : "f"(f)); }
__device__ __forceinline__ void from_float(float f, bfloat16& v) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v.bits) : "f"(f));
}

// Two conversions in one instruction; `low` becomes the element at the lower address.
__device__ __forceinline__ u32 pack(float low, float high, half) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u32 pack(float low, float high, bfloat16) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Element i of the two in a word; bfloat16's without being moved to the lower half first.
template <class T>
__device__ __forceinline__ float element_of(u32 both, int i, T) {
  return to_float(T{static_cast<u16>(both >> 16 * i)});
}
__device__ __forceinline__ float element_of(u32 both, int i, bfloat16) {
  return __uint_as_float(i ? both & 0xFFFF0000u : both << 16);
}

// 2^x and 1/x to two units in the last place, denormal results zero.
__device__ __forceinline__ float power_of_2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// The larger of two, NaN if either is.
__device__ __forceinline__ float larger(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// a·b in 64 bits, one instruction. Of factors that come from memory or from Params the compiler makes 64-bit numbers first,
// which costs three instructions a product and a register for each factor.
__device__ __forceinline__ i64 mul_wide(int a, int b) {
  i64 r;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(r) : "r"(a), "r"(b));
  return r;
}

// Nothing that reads or writes memory moves across: keeps the compiler from loading far ahead, which costs registers.
__device__ __forceinline__ void compiler_barrier() { asm volatile("" ::: "memory"); }

// The same value, of which the compiler knows nothing: what is computed from it is computed again, not kept in registers.
__device__ __forceinline__ int opaque(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
__device__ __forceinline__ float opaque(float v) {
  asm volatile("" : "+f"(v));
  return v;
}

// A word to global memory in one instruction: the compiler breaks up some stores of 16 bytes into fours.
__device__ __forceinline__ void store_word(void* to, u16 v) { *static_cast<u16*>(to) = v; }
__device__ __forceinline__ void store_word(void* to, u32 v) { *static_cast<u32*>(to) = v; }
__device__ __forceinline__ void store_word(void* to, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_word(void* to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Copies to shared memory past the registers, a thread's own: #data-movement-and-conversion-instructions-cp-async
__device__ __forceinline__ void cp_async_16(void* to_shared, const void* from) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
// All of this thread's copies have taken place.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Eight bytes at once between GPUs, whatever the caches hold: #memory-consistency-model
__device__ __forceinline__ void store_system(u64* to, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
__device__ __forceinline__ u64 load_system(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void end_with_error() { asm volatile("trap;"); }

// Programmatic dependent launch (sm_90 and later): `griddepcontrol_wait` returns when the kernels before this one on the
// stream have finished and their writes are visible; `griddepcontrol_launch_dependents` lets the next one start its blocks
// early.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gemmnorm
