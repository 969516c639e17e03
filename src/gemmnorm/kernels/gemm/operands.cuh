// Operand types of the GEMM: what is multiplied, and how it lies in shared memory.
#pragma once
#include "ptx/wgmma.cuh"

namespace gemmnorm {

struct fp16x2;  // float32 as two float16 (fp16x2): high and low; three products for one
struct bf16x3;  // float32 as three bfloat16 (bf16x3), split on the way from shared memory; six products for one

// The type that wgmma multiplies, bytes of an element in shared memory, and planes: an element's parts.
template <class T>
struct OperandTraits {
  using Element = T;
  static constexpr int kSize = 2, kPlanes = 1;
};
template <>
struct OperandTraits<tf32> {
  using Element = tf32;
  static constexpr int kSize = 4, kPlanes = 1;
};
template <>
struct OperandTraits<fp16x2> {
  using Element = half;
  static constexpr int kSize = 2, kPlanes = 2;
};
template <>
struct OperandTraits<bf16x3> {
  using Element = bfloat16;
  static constexpr int kSize = 4, kPlanes = 3;
};

}  // namespace gemmnorm
