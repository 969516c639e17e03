"""A problem file: Linear → scale → BatchNorm, batch 1024, 8192 → 8192. `gemmnorm optimize examples/kb33.py`"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


batch_size = 1024
in_features = 8192
out_features = 8192
scale_shape = (out_features,)


def get_inputs():
    return [torch.randn(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, scale_shape]


# --- gemmnorm: generated for sm_90a only
#
# Below, `ModelNew` computes the same function as `Model` with fused CUDA kernels, forward and backward (one_kernel).
# It has the same constructor, draws its parameters in the same order, and shares `Model`'s state_dict. The kernels are
# compiled at the first call on a GPU; on any other device, dtype or shape the original modules run.

import functools as _functools
import hashlib as _hashlib
import warnings as _warnings

import torch
from torch.utils.cpp_extension import CUDA_HOME as _CUDA_HOME
from torch.utils.cpp_extension import load_inline as _load_inline

_DECLARATIONS = r"""
#include <optional>
#include <vector>
#include <torch/types.h>

using Tensors = std::vector<torch::Tensor>;
using MaybeTensor = std::optional<torch::Tensor>;

Tensors forward_training(const torch::Tensor& x /* [batch, 8192] */, const torch::Tensor& weight /* [8192, 8192] */,
                         const MaybeTensor& bias /* [8192] */, const MaybeTensor& scale /* [8192] or [1] */,
                         double scale_value, const MaybeTensor& running_mean /* [8192] */,
                         const MaybeTensor& running_var /* [8192] */, const MaybeTensor& num_batches_tracked,
                         const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                         double momentum, double eps, bool save);
Tensors forward_evaluation(const torch::Tensor& x /* [batch, 8192] */,
                           const torch::Tensor& weight /* [8192, 8192] */, const MaybeTensor& bias /* [8192] */,
                           const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                           const MaybeTensor& running_mean /* [8192] */,
                           const MaybeTensor& running_var /* [8192] */, const MaybeTensor& num_batches_tracked,
                           const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                           double momentum, double eps, bool save);
Tensors backward_training(const torch::Tensor& grad /* [batch, 8192] */, const torch::Tensor& x /* [batch, 8192] */,
                          const torch::Tensor& weight /* [8192, 8192] */, const MaybeTensor& bias /* [8192] */,
                          const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                          const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                          const torch::Tensor& product, const torch::Tensor& group_mean, const torch::Tensor& mean,
                          const torch::Tensor& rstd, double eps, const std::vector<bool>& needs);
Tensors backward_evaluation(const torch::Tensor& grad /* [batch, 8192] */,
                            const torch::Tensor& x /* [batch, 8192] */,
                            const torch::Tensor& weight /* [8192, 8192] */, const MaybeTensor& bias /* [8192] */,
                            const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                            const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                            const torch::Tensor& product, const torch::Tensor& mean, const torch::Tensor& rstd,
                            double eps, const std::vector<bool>& needs);
"""

_KERNELS = r"""
// float32 operands as two float16 each, for the tensor cores: v*2^-e = high + low*2^-11, with one exponent e per row.
// Memory access and tiling shared by every kernel. No toolkit headers: NVRTC needs none.
// What activations are made of. Errors are those of float32 arithmetic; NaN stays NaN, and infinity goes to the limit.
// Types, conversions and ordering: the instructions that every GPU from compute capability 8.0 has.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/

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

// Nothing that reads or writes memory moves across: keeps the compiler from loading far ahead, which costs registers.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

// The same value, of which the compiler knows nothing: what is computed from it is computed again, not kept in registers.
__device__ __forceinline__ int computed_anew(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
__device__ __forceinline__ float computed_anew(float v) {
  asm volatile("" : "+f"(v));
  return v;
}

// Copies to shared memory past the registers, a thread's own: #data-movement-and-conversion-instructions-cp-async
__device__ __forceinline__ void copy_16_bytes(void* to_shared, const void* from) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
// All of this thread's copies have taken place.
__device__ __forceinline__ void wait_small_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Programmatic dependent launch (sm_90 and later): `wait_for_previous` returns when the kernels before this one on the
// stream have finished and their writes are visible; `allow_next` lets the next one start its blocks early.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gemmnorm

namespace gemmnorm {

constexpr float kLog2E = 1.4426950408889634f;

// 1 / (1 + e^-z)
__device__ __forceinline__ float sigmoid(float z) { return reciprocal(1.0f + power_of_2(-kLog2E * z)); }

// 1 - tanh^2, which by itself has no digits left where tanh is near 1.
__device__ __forceinline__ float tanh_derivative(float z) {
  const float e = power_of_2(-2.0f * kLog2E * fabsf(z)), r = reciprocal(1.0f + e);
  return 4.0f * e * r * r;
}

// sqrt 2π times the density of the normal distribution.
__device__ __forceinline__ float bell(float z) { return power_of_2(-0.5f * kLog2E * z * z); }

// The distribution function of the normal distribution: below zero bell(z)*P(1 / (1 + p*|z|)), without cancellation. P is
// fitted to 3e-8 of Mills' ratio, the best for p = 0.32 and degree 10.
__device__ __forceinline__ float normal_distribution(float z) {
  const float t = reciprocal(1.0f + 0.32f * fabsf(z));
  float p = -2.107817101e-02f;
  p = p * t + 9.540726330e-02f;
  p = p * t - 1.467074584e-01f;
  p = p * t + 6.532801575e-02f;
  p = p * t - 9.377561859e-03f;
  p = p * t + 5.865396291e-02f;
  p = p * t + 8.782909868e-02f;
  p = p * t + 1.146223594e-01f;
  p = p * t + 1.276609464e-01f;
  p = p * t + 1.276615288e-01f;
  const float tail = p * t * bell(z);
  return z < 0.0f ? tail : 1.0f - tail;
}

}  // namespace gemmnorm

namespace gemmnorm {

// A row of group_mean and group_m2 stands for so many of the batch, in every strategy (own wide tiles fill several alike).
constexpr int kGroupRows = 64;
// Threads of a block of the memory-bound kernels: TX along the features, kThreads / TX along the rows.
constexpr int kThreads = 256;

// The machine word(s) that move BYTES bytes at once.
template <int BYTES>
struct Word;
template <>
struct Word<2> {
  using type = u16;
};
template <>
struct Word<4> {
  using type = u32;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};
struct TwoWords {
  uint4 low, high;
};
template <>
struct Word<32> {
  using type = TwoWords;
};

// N neighbouring elements of a row, moved as one or two aligned words.
template <class T, int N>
struct alignas(sizeof(typename Word<N * sizeof(T)>::type)) Vec {
  T at[N];

  // at[i] as a float, for an i that is known when it is compiled.
  __device__ __forceinline__ float value(int i) const {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) return element_of(reinterpret_cast<const u32*>(at)[i / 2], i % 2, T{});
    else return to_float(at[i]);
  }
};

template <class T, int N>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  using W = typename Word<N * sizeof(T)>::type;
  Vec<T, N> v;
  *reinterpret_cast<W*>(&v) = *reinterpret_cast<const W*>(p);
  return v;
}

template <class T, int N>
__device__ __forceinline__ void store(T* p, const float (&f)[N]) {
  using W = typename Word<N * sizeof(T)>::type;
  Vec<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) from_float(f[i], v.at[i]);
  *reinterpret_cast<W*>(p) = *reinterpret_cast<W*>(&v);
}

// A per-feature vector that may be absent.
template <class T>
__device__ __forceinline__ float value_or(const T* vector, i64 index, float absent) {
  return vector ? to_float(vector[index]) : absent;
}

// The scale of feature j: a vector (stride 1), one number in memory (stride 0), or a number given by value.
template <class T>
__device__ __forceinline__ float scale_of(const T* scale, int stride, float number, int j) {
  return scale ? to_float(scale[static_cast<i64>(j) * stride]) : number;
}

// The tile of one block: GROUPS statistics groups, one after the other, by TX*N features. Consecutive blocks walk along
// a row. REVERSED blocks start at the last rows: what the kernel before has touched last is still in the L2.
template <int N, int TX, int GROUPS = 1, bool REVERSED = false>
struct Panel {
  static constexpr int kColumns = TX * N;
  static constexpr int kLanes = kThreads / TX;       // rows that the block reads at once
  static constexpr int kRows = kGroupRows / kLanes;  // rows of a group that one thread reads

  int group, lane, tx, column, rows, batch;
  i64 first_row;

  __device__ __forceinline__ Panel(int batch_, int features) : batch(batch_) {
    const int panels = (features + kColumns - 1) / kColumns;
    const int block = REVERSED ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    tx = threadIdx.x % TX;
    lane = threadIdx.x / TX;
    column = (block % panels) * kColumns + tx * N;
    at(block / panels * GROUPS);
  }
  // A row to load in place of `row`, which may lie beyond the group: loads without conditions are all in flight at once.
  __device__ __forceinline__ i64 existing(int row) const { return min(row, rows - 1); }
  // Moves to another group; `rows` is 0 beyond the batch.
  __device__ __forceinline__ void at(int group_) {
    group = group_;
    first_row = static_cast<i64>(group) * kGroupRows;
    const i64 left = batch - first_row;
    rows = left <= 0 ? 0 : left < kGroupRows ? static_cast<int>(left) : kGroupRows;
  }
};

// Sums `value[i]` of the threads that share a column, in a fixed order, and hands the sum to all of them.
template <int N, int TX>
__device__ __forceinline__ void sum_over_lanes(float (&value)[N], float* shared /* [lanes][N][TX] */) {
  constexpr int kLanes = kThreads / TX;
  const int tx = threadIdx.x % TX, lane = threadIdx.x / TX;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) shared[(lane * N + i) * TX + tx] = value[i];
  __syncthreads();
  // Every thread adds up the columns of its own lane's share, then reads back all of its own.
  for (int c = threadIdx.x; c < N * TX; c += kThreads) {
    float sum = shared[c];
    for (int l = 1; l < kLanes; ++l) sum += shared[l * N * TX + c];
    shared[c] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = shared[i * TX + tx];
}

}  // namespace gemmnorm

namespace gemmnorm {

constexpr int kSplitColumns = 64;    // of K: `high` of so many, then `low` of the same
constexpr float kLowUnit = 1.0f / 2048.0f;  // what one unit of `low` is worth

// 2^n for n in [-252, 254], as two factors that are exact and in range.
struct PowerOfTwo {
  float first, second;
};
__device__ __forceinline__ PowerOfTwo power_of_two(int n) {
  const int half = n / 2;
  return {__uint_as_float(static_cast<u32>(half + 127) << 23), __uint_as_float(static_cast<u32>(n - half + 127) << 23)};
}
__device__ __forceinline__ float times(float v, const PowerOfTwo& p) { return v * p.first * p.second; }

// The exponent that brings a row whose largest magnitude has these bits to [2^14, 2^15).
__device__ __forceinline__ int row_exponent(u32 bits) {
  if (bits == 0) return 0;
  const int exponent = bits >> 23;
  return (exponent ? exponent - 127 : 31 - __clz(bits) - 149) - 14;
}

// Sums of two exponents, in the range of power_of_two. Only zeros, and what is as good as zero, lie outside.
constexpr int kLeastExponent = -252;
__device__ __forceinline__ int in_range(int n) { return min(max(n, kLeastExponent), 254); }

// The exponent that brings v*2^e to [2^14, 2^15); kLeastExponent for zero.
__device__ __forceinline__ int scaled_exponent(float v, int e) {
  const u32 bits = __float_as_uint(v) & 0x7FFFFFFFu;
  return bits ? max(row_exponent(bits) + e, kLeastExponent) : kLeastExponent;
}

// v*2^-exponent as high + low*2^-11, four neighbouring elements of a row at a time.
__device__ __forceinline__ void store_split(half* row /* of ceil(columns/64) x 2 x 64 */, int column, const float (&scaled)[4]) {
  u32 high[2], low[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = scaled[2 * i], b = scaled[2 * i + 1];
    high[i] = pack(a, b, half{});
    const half rounded_a = {static_cast<u16>(high[i])}, rounded_b = {static_cast<u16>(high[i] >> 16)};
    low[i] = pack((a - to_float(rounded_a)) / kLowUnit, (b - to_float(rounded_b)) / kLowUnit, half{});
  }
  half* at = row + column / kSplitColumns * 2 * kSplitColumns + column % kSplitColumns;
  *reinterpret_cast<uint2*>(at) = make_uint2(high[0], high[1]);
  *reinterpret_cast<uint2*>(at + kSplitColumns) = make_uint2(low[0], low[1]);
}

constexpr int kHeldColumns = 8 * 4 * kThreads;  // of a row, that a block holds in registers between its two passes

// Calls `visit(column, four elements)` for a row: what is held, then the rest from memory. Zeros up to `end`.
template <class Visit>
__device__ __forceinline__ void visit_row(const float* row, const Vec<float, 4> (&held)[8], int columns, int end,
                                          const Visit& visit) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int c = (i * kThreads + threadIdx.x) * 4;
    if (c < end) visit(c, held[i]);
  }
#pragma unroll 1
  for (int c = kHeldColumns + threadIdx.x * 4; c < end; c += 4 * kThreads)
    visit(c, c < columns ? load<float, 4>(row + c) : Vec<float, 4>{});
}

__device__ __forceinline__ void hold_row(const float* row, Vec<float, 4> (&held)[8], int columns) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int c = (i * kThreads + threadIdx.x) * 4;
    held[i] = c < columns ? load<float, 4>(row + c) : Vec<float, 4>{};
  }
}

// What stands for the contents of a row, added up over its words in any order. The bits of four elements come together
// turned by as many bytes, and times a number for their place in 64 bits, so that sign flips, powers of two and exchanges do
// not cancel. That of zeros is zero. It costs the tensor cores' warps time: 10 instructions.
__device__ __forceinline__ u64 checksum(int column, const Vec<float, 4>& v) {
  u32 bits = 0, place = static_cast<u32>(column) * 0x9E3779B1u;
  place = (place ^ place >> 15) | 1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 own = __float_as_uint(v.at[i]);
    bits += i ? own << 8 * i | own >> (32 - 8 * i) : own;
  }
  return static_cast<u64>(bits) * place;
}

// The largest of a block's values, for every thread.
__device__ __forceinline__ int block_max(int value, int* shared /* [kThreads / 32] */) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) value = max(value, __shfl_xor_sync(~0u, value, bit));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) value = max(value, shared[w]);
  return value;
}

// A block splits one row, of the weight or of x. Also gives each row's largest magnitude and sum
// of magnitudes, which bound what is lost to float16's exponent, and the maxima of x's over all rows as bits (of floats
// that are not negative, so they compare as such; NaN above all). The weight's rows come in descending order and x's
// last: what the product reads first is then still in the L2.
__device__ __forceinline__ void split_rows(const float* x /* [batch, in_features] */,
                                           const float* weight /* [features, in_features] */,
                                           half* split_x /* [batch, ceil(in_features/64), 2, 64]: high and low */,
                                           half* split_weight /* [features, ceil(in_features/64), 2, 64] */,
                                           int* x_exponents /* [batch] */, int* weight_exponents /* [features] */,
                                           float* weight_largest /* [features] or null */,
                                           float* weight_total /* [features] or null */,
                                           u64* weight_checksums /* [features] or null: zero */,
                                           u32* most /* [2] or null */, int weight_rows /* to split, of the first */,
                                           int in_features) {
  __shared__ int shared[kThreads / 32];
  __shared__ float sums[kThreads / 32];
  allow_next();
  wait_for_previous();
  const int block = blockIdx.x;
  const bool of_weight = block < weight_rows;
  const int row = of_weight ? weight_rows - 1 - block : block - weight_rows;
  const int padded = (in_features + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
  const float* source = (of_weight ? weight : x) + static_cast<i64>(row) * in_features;
  half* target = (of_weight ? split_weight : split_x) + static_cast<i64>(row) * 2 * padded;

  Vec<float, 4> held[8];
  hold_row(source, held, in_features);
  u32 bits = 0;
  float sum = 0.0f;
  visit_row(source, held, in_features, in_features, [&](int, const Vec<float, 4>& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits = max(bits, __float_as_uint(v.at[i]) & 0x7FFFFFFFu);
      sum += fabsf(v.at[i]);
    }
  });
#pragma unroll
  for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  bits = static_cast<u32>(block_max(static_cast<int>(bits), shared));
  const int exponent = row_exponent(bits);
  if (threadIdx.x == 0) {
    sum = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) sum += sums[w];
    (of_weight ? weight_exponents : x_exponents)[row] = exponent;
    if (of_weight && weight_largest) {
      weight_largest[row] = __uint_as_float(bits);
      weight_total[row] = sum;
    }
    if (!of_weight && most) {
      atomicMax(&most[0], bits);
      atomicMax(&most[1], __float_as_uint(sum) & 0x7FFFFFFFu);
    }
  }
  if (of_weight && weight_checksums) {
    u64 code = 0;
    visit_row(source, held, in_features, in_features, [&](int c, const Vec<float, 4>& v) { code += checksum(c, v); });
    atomicAdd(&weight_checksums[row], code);
  }
  const PowerOfTwo scale = power_of_two(-exponent);
  visit_row(source, held, in_features, padded, [&](int c, const Vec<float, 4>& v) {
    const float scaled[4] = {times(v.at[0], scale), times(v.at[1], scale), times(v.at[2], scale), times(v.at[3], scale)};
    store_split(target, c, scaled);
  });
}

// The gradient of the product, split twice: with an exponent per row, its columns multiplied by the weight's powers of
// two, for dx = da*W; and with an exponent per column, its rows multiplied by x's, for dW = da^T*x. Split W and x lack
// just those powers. A row's exponent is found here, a column's came with the gradient: panel_gradient.cuh,
// gradient_units.cuh or gradient.cuh.
__device__ __forceinline__ void split_gradient(const float* grad_product /* [batch, features] */,
                                               const int* x_exponents /* [batch] */,
                                               const int* weight_exponents /* [features] */,
                                               const int* column_exponents /* [features] */,
                                               half* split_by_rows /* [batch, ceil(features/64), 2, 64] */,
                                               half* split_by_columns /* [batch, ceil(features/64), 2, 64] */,
                                               int* row_exponents /* [batch] */, int features) {
  __shared__ int shared[kThreads / 32];
  allow_next();
  wait_for_previous();
  const int row = blockIdx.x, own = x_exponents[row];
  const int padded = (features + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
  const float* source = grad_product + static_cast<i64>(row) * features;
  Vec<float, 4> held[8];
  hold_row(source, held, features);
  int most = kLeastExponent;
  visit_row(source, held, features, features, [&](int c, const Vec<float, 4>& v) {
    const Vec<int, 4> e = load<int, 4>(weight_exponents + c);
#pragma unroll
    for (int i = 0; i < 4; ++i) most = max(most, scaled_exponent(v.at[i], e.at[i]));
  });
  most = block_max(most, shared);
  if (threadIdx.x == 0) row_exponents[row] = most;
  half* by_rows = split_by_rows + static_cast<i64>(row) * 2 * padded;
  half* by_columns = split_by_columns + static_cast<i64>(row) * 2 * padded;
  visit_row(source, held, features, padded, [&](int c, const Vec<float, 4>& v) {
    float to_rows[4] = {}, to_columns[4] = {};
    if (c < features) {
      const Vec<int, 4> of_weight = load<int, 4>(weight_exponents + c), of_column = load<int, 4>(column_exponents + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to_rows[i] = times(v.at[i], power_of_two(in_range(of_weight.at[i] - most)));
        to_columns[i] = times(v.at[i], power_of_two(in_range(own - of_column.at[i])));
      }
    }
    store_split(by_rows, c, to_rows);
    store_split(by_columns, c, to_columns);
  });
}

// Where float16's exponent loses more than float32 itself would: what the elements that `low` cannot hold may add up to,
// against the deviation of the column. Written so that NaN and infinity count as lost.
__device__ __forceinline__ bool split_loses(float x_largest, float x_total, float weight_largest, float weight_total,
                                            float deviation) {
  const float unit = 1.862645149230957e-09f;  // 2^-51 / 2^-22
  return !(unit * x_largest * weight_total + unit * x_total * weight_largest <= deviation);
}

}  // namespace gemmnorm
// The whole chain in one Hopper kernel: GEMM -> scale -> BatchNorm -> activation (sm_90a).
//
// A persistent block is one warpgroup that feeds and two that multiply. Warp 0 copies tiles of x and W into a ring of
// shared-memory stages; each consumer warpgroup multiplies its half of a tile: 64 features by all rows (tile_by_features.cuh),
// or of a narrow tile 64 rows by all features (tile_by_rows.cuh). It takes mean and M2 of its rows from the
// accumulators, and stores the product minus the mean. The other warps, by Finish:
// - whole panels (a panel is a column of tiles): warps 2 and 3 serve a consumer each, while it multiplies the next tile,
//   and warp 1 merges statistics (whole_panels.cuh);
// - persistent: warp 1 stores staged tiles and counts what is complete; warps 2 and 3 normalise complete panels out of the
//   L2 (panel_units.cuh);
// - evaluation: warp 1 computes the next tile's coefficients.
// Before that warps 2 and 3 cast or split the rows that later tiles need, or the last columns of them that the first tiles
// need, where that was left to them (ahead.cuh).
// The last tile of every block never leaves the registers before it is normalised.
// What the fused GEMM keeps in shared memory, by the type of its operands.
// Warpgroup matrix multiply-accumulate (sm_90a): D[64, N] += A[64, 32 bytes] * B[N, 32 bytes]^T, both operands in shared
// memory, swizzled by 128 bytes, along K or, where they are of two bytes, across it. PTX ISA: #asynchronous-warpgroup-level-matrix-instructions
// Hopper's instructions (sm_90a), one named function each. wgmma has a file of its own.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/

namespace gemmnorm {

// The 128-byte descriptor that the copy engine reads; made on the host (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// pack (ampere.cuh) of what is at most the largest bfloat16: PTX ISA 8.1 and later.
__device__ __forceinline__ u32 pack_finite(float low, float high) {
  u32 r;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// mbarrier: #parallel-synchronization-and-communication-instructions-mbarrier
__device__ __forceinline__ void barrier_init(u64* b, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* b, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(b)), "r"(parity)
        : "memory");
  } while (!done);
}
// The same where other blocks of the cluster write what is waited for.
__device__ __forceinline__ void barrier_wait_cluster(u64* b, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(b)), "r"(parity)
        : "memory");
  } while (!done);
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders ordinary accesses to shared memory before those of the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Four matrices of 8 x 8 elements of 16 bits, turned around on the way from registers to shared memory: lanes 8i to 8i + 7
// give where the rows of the i-th go: #warp-level-matrix-instructions-stmatrix
__device__ __forceinline__ void store_transposed(void* row, const u32 (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// bar.sync on a numbered barrier: the `threads` threads that name it wait for each other.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Copy engine: #data-movement-and-conversion-instructions-cp-async-bulk-tensor. x counts along a row, y the rows.
// A policy says what the L2 should rather keep: #createpolicy; these are its encodings of whole-access policies.
constexpr u64 kEvictNormal = 0x1000000000000000ull, kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull;
__device__ __forceinline__ void copy_to_shared(void* to, const TensorMap& map, u64* barrier, int x, int y, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
// A run of bytes, a multiple of 16, without a map, for the last time: #data-movement-and-conversion-instructions-cp-async-bulk
__device__ __forceinline__ void copy_bytes_to_shared(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}
__device__ __forceinline__ void copy_to_global(const TensorMap& map, const void* from, int x, int y,
                                               u64 policy = kEvictNormal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(&map),
      "r"(shared_address(from)), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All of this thread's copies have read their source.
__device__ __forceinline__ void wait_copies_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// All of this thread's copies are complete and visible to it.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Brings a map closer: #data-movement-and-conversion-instructions-prefetch-prefetchu
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Clusters of blocks: #parallel-synchronization-and-communication-instructions-barrier-cluster, and mapa for the shared
// memory of another block.
__device__ __forceinline__ int cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// Of all threads of the cluster: what each wrote before it arrived is visible to all after the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Orders nothing but what fence_barrier_init covers.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Writes v to where `own` lies in the shared memory of the cluster's block `rank`, whose barrier counts the 16 bytes when
// they are there; nobody waits here: #data-movement-and-conversion-instructions-st-async
__device__ __forceinline__ void store_remote(float4* own, float4 v, u64* barrier, int rank) {
  asm volatile(
      "{\n.reg .u32 a, b;\nmapa.shared::cluster.u32 a, %0, %6;\nmapa.shared::cluster.u32 b, %5, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [a], {%1, %2, %3, %4}, [b];\n}" ::"r"(
          shared_address(own)),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}
// What lies at `own` in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float2 load_remote(const float2* own, int rank) {
  float2 v;
  asm volatile(
      "{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %2, %3;\nld.shared::cluster.v2.f32 {%0, %1}, [a];\n}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(shared_address(own)), "r"(rank)
      : "memory");
  return v;
}

// Moves registers between the warpgroups of a block: #miscellaneous-instructions-setmaxnreg
template <int COUNT>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Counters in global memory that order what other blocks wrote: #memory-consistency-model
__device__ __forceinline__ void add_release(u32* counter, u32 value) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void wait_until(const u32* counter, u32 value) {
  while (load_acquire(counter) < value) __nanosleep(32);
}

// Loads that go to the L2, for what other blocks wrote during this kernel.
__device__ __forceinline__ float load_l2(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int load_l2(const int* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_l2(const float2* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_l2(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
// What is read for the last time, and what is written for somebody after this kernel: the L2 lets go of it first.
__device__ __forceinline__ uint4 load_last_time(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(kEvictFirst)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_for_others(uint4* p, uint4 v) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
               "l"(kEvictFirst)
               : "memory");
}

}  // namespace gemmnorm

namespace gemmnorm {

struct tf32;  // operand type: float32 words of which the tensor cores read the upper 19 bits

// Shared-memory descriptor of a K-major tile whose rows are 128 bytes, 128-byte swizzle, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ u64 matrix_descriptor(const void* tile) {
  return ((shared_address(tile) & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
constexpr int kDescriptorStep = 2;  // the next 32 bytes of K, in the descriptor's units of 16 bytes

// The same of a tile that lies across K (MN-major): 64 rows of K, 128 bytes of each; the next 64 rows or columns of the
// operand follow after these 8 KiB.
constexpr int kAcrossBytes = 64 * 128;
__device__ __forceinline__ u64 across_descriptor(const void* tile) {
  return ((shared_address(tile) & 0x3FFFF) >> 4) | (u64{kAcrossBytes >> 4} << 16) | (64ull << 32) | (1ull << 62);
}
constexpr int kAcrossStep = 16 * 128 / 16;  // the next 16 rows of K

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Operand type and width -> the instruction. `accumulate` 0 starts from zero. A or B may lie across K if of two bytes.
template <class T, int N>
struct Wgmma;

// clang-format off
#define GEMMNORM_WGMMA(N, TYPE, SHAPE, TYPES, REGISTERS, A, B, P, TAIL, ...)                                   \
  template <>                                                                                                \
  struct Wgmma<TYPE, N> {                                                                                    \
    template <int A_ACROSS = 0, int B_ACROSS = 0>                                                            \
    static __device__ __forceinline__ void run(float (&d)[N / 2], u64 a, u64 b, int accumulate) {            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." \
                   TYPES " {" REGISTERS "}, %" A ", %" B ", p, 1, 1" TAIL ";\n}"                               \
                   : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate), "n"(A_ACROSS), "n"(B_ACROSS));            \
    }                                                                                                        \
  };

// The same with A from registers: of rows r and r + 8, columns c and c + 1, then 8 columns on; r = lane / 4, c = lane % 4 * 2.
template <class T, int N>
struct WgmmaRegisters;
#define GEMMNORM_WGMMA_REGISTERS(N, TYPE, SHAPE, TYPES, REGISTERS, A0, A1, A2, A3, B, P, ...)                    \
  template <>                                                                                                \
  struct WgmmaRegisters<TYPE, N> {                                                                           \
    static __device__ __forceinline__ void run(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32."  \
                   TYPES " {" REGISTERS "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, 0;\n}"      \
                   : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));     \
    }                                                                                                        \
  };

#define GEMMNORM_REGISTERS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GEMMNORM_OPERANDS_32 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define GEMMNORM_REGISTERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GEMMNORM_OPERANDS_64 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define GEMMNORM_REGISTERS_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31," \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GEMMNORM_OPERANDS_128 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define GEMMNORM_REGISTERS_256 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31," \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63," \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79," \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95," \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111," \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GEMMNORM_OPERANDS_256 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

GEMMNORM_WGMMA(32, half, "m64n32k16", "f16.f16", GEMMNORM_REGISTERS_32, "16", "17", "18", ", %19, %20", GEMMNORM_OPERANDS_32)
GEMMNORM_WGMMA(32, bfloat16, "m64n32k16", "bf16.bf16", GEMMNORM_REGISTERS_32, "16", "17", "18", ", %19, %20", GEMMNORM_OPERANDS_32)
GEMMNORM_WGMMA(32, tf32, "m64n32k8", "tf32.tf32", GEMMNORM_REGISTERS_32, "16", "17", "18", "", GEMMNORM_OPERANDS_32)
GEMMNORM_WGMMA(64, half, "m64n64k16", "f16.f16", GEMMNORM_REGISTERS_64, "32", "33", "34", ", %35, %36", GEMMNORM_OPERANDS_64)
GEMMNORM_WGMMA(64, bfloat16, "m64n64k16", "bf16.bf16", GEMMNORM_REGISTERS_64, "32", "33", "34", ", %35, %36", GEMMNORM_OPERANDS_64)
GEMMNORM_WGMMA(64, tf32, "m64n64k8", "tf32.tf32", GEMMNORM_REGISTERS_64, "32", "33", "34", "", GEMMNORM_OPERANDS_64)
GEMMNORM_WGMMA(128, half, "m64n128k16", "f16.f16", GEMMNORM_REGISTERS_128, "64", "65", "66", ", %67, %68", GEMMNORM_OPERANDS_128)
GEMMNORM_WGMMA(128, bfloat16, "m64n128k16", "bf16.bf16", GEMMNORM_REGISTERS_128, "64", "65", "66", ", %67, %68", GEMMNORM_OPERANDS_128)
GEMMNORM_WGMMA(128, tf32, "m64n128k8", "tf32.tf32", GEMMNORM_REGISTERS_128, "64", "65", "66", "", GEMMNORM_OPERANDS_128)
GEMMNORM_WGMMA(256, half, "m64n256k16", "f16.f16", GEMMNORM_REGISTERS_256, "128", "129", "130", ", %131, %132", GEMMNORM_OPERANDS_256)
GEMMNORM_WGMMA(256, bfloat16, "m64n256k16", "bf16.bf16", GEMMNORM_REGISTERS_256, "128", "129", "130", ", %131, %132", GEMMNORM_OPERANDS_256)
GEMMNORM_WGMMA(256, tf32, "m64n256k8", "tf32.tf32", GEMMNORM_REGISTERS_256, "128", "129", "130", "", GEMMNORM_OPERANDS_256)
GEMMNORM_WGMMA_REGISTERS(32, bfloat16, "m64n32k16", "bf16.bf16", GEMMNORM_REGISTERS_32, "16", "17", "18", "19", "20", "21", GEMMNORM_OPERANDS_32)
GEMMNORM_WGMMA_REGISTERS(64, bfloat16, "m64n64k16", "bf16.bf16", GEMMNORM_REGISTERS_64, "32", "33", "34", "35", "36", "37", GEMMNORM_OPERANDS_64)
// clang-format on

}  // namespace gemmnorm
// Splitting rows of x and the weight inside the fused GEMM, after those that split_rows has split. Of a weight that was split
// long before (`prepare`) every row is read, and compared with what was split.
// Rows of x and the weight that become operands inside the fused GEMM, ahead of the tiles that need them: the launch before
// it leaves rows of later waves of tiles, and of those that it casts the last columns, to two warps of every block, which
// work beside the tensor cores.
// float32 operands that autocast wants in half precision: rows of x and of the weight, rounded to nearest.

namespace gemmnorm {

constexpr int kCastColumns = 2048;  // of a row, that are cast at a time

// Casts a row as one of LANES threads: WORDS loads of 16 bytes are in flight at once. `columns` is a multiple of 4.
template <class T, int LANES, int WORDS>
__device__ __forceinline__ void cast_row(const float* from, T* to, int columns, int lane) {
#pragma unroll 1
  for (int first = lane * 4; first < columns; first += LANES * 4 * WORDS) {
    Vec<float, 4> v[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) v[i] = load<float, 4>(from + min(first + i * LANES * 4, columns - 4));
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const int c = first + i * LANES * 4;
      const float(&f)[4] = v[i].at;
      if (c < columns) *reinterpret_cast<uint2*>(to + c) = make_uint2(pack(f[0], f[1], T{}), pack(f[2], f[3], T{}));
    }
  }
}

// Casts kCastColumns as one lane of a warp. All loads are in flight at once.
template <class T>
__device__ __forceinline__ void cast_chunk(const float* from, T* to, int lane) {
  constexpr int kWords = kCastColumns / 128;
  Vec<float, 4> v[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) v[i] = load<float, 4>(from + lane * 4 + i * 128);
  __syncwarp();  // else the compiler lets later loads wait for registers of earlier ones
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float(&f)[4] = v[i].at;
    *reinterpret_cast<uint2*>(to + lane * 4 + i * 128) = make_uint2(pack(f[0], f[1], T{}), pack(f[2], f[3], T{}));
  }
}

// A block casts the beginning of one row. The weight's come in descending order and x's last: what the product reads first is
// then still in the L2.
template <class T>
__device__ __forceinline__ void cast_rows(const float* x /* [batch, in_features] or null */,
                                          const float* weight /* [features, in_features] or null */,
                                          T* cast_x /* [batch, in_features] */, T* cast_weight /* [features, in_features] */,
                                          int weight_rows /* to cast, of the first */,
                                          int begun /* times kCastColumns are cast, of each row */, int in_features) {
  allow_next();
  wait_for_previous();
  const int block = blockIdx.x;
  const bool of_weight = block < weight_rows;
  const i64 first = static_cast<i64>((of_weight ? weight_rows : static_cast<int>(gridDim.x)) - 1 - block) * in_features;
  cast_row<T, kThreads, 8>((of_weight ? weight : x) + first, (of_weight ? cast_weight : cast_x) + first,
                           min(begun * kCastColumns, in_features), threadIdx.x);
}

}  // namespace gemmnorm
// The tiles of a product: in which order they are worked on, and what happens to them then.

namespace gemmnorm {

// What happens to a tile once it is multiplied.
enum class Finish {
  kEvaluate,     // y = phi(slope*a + shift) with the running statistics, at once
  kStatistics,   // product and group statistics only; other kernels do the rest
  kOneBlock,     // training, the batch fits one tile: all of it within the block
  kWholePanels,  // training, the tiles of a panel are worked on at once: each waits for the others in shared memory, while
                 // the next is multiplied, or in registers (the last of every block; all, where that is better)
  kPersistent,   // training, any size: tiles are stored and normalised later, but for the last of every block
};

constexpr int kRowBytes = 128;     // of K in one stage: one swizzle row
constexpr int kGemmThreads = 384;  // a warpgroup that feeds and two that multiply

struct Tile {
  int m, n;
};

// A tile of TM x TN. Two consumers share out its rows, or, of a wide one, its columns (tile_by_features.cuh).
template <int TM, int TN>
struct TileShape {
  static constexpr bool kByFeatures = TN == 128;
  static constexpr int kWidth = kByFeatures ? TM : TN;  // of a consumer's 64 rows or columns
  static constexpr int kMeanRows = kByFeatures ? TM : kGroupRows;  // whose mean is taken off, and whose M2 is taken
  static constexpr int kParts = kWidth / 64;  // of what a consumer holds, 64 x 64 each
  static constexpr int kStagingBytes = (TM < 128 ? 128 : TM) * TN;  // of a consumer, on their way to memory
  // What it holds leaves as V in so many trips, each of some of its parts.
  template <class V>
  static constexpr int kTrips = kWidth * 64 * sizeof(V) > kStagingBytes ? kWidth * 64 * sizeof(V) / kStagingBytes : 1;

  // Where a consumer's part begins.
  __device__ __forceinline__ static int row(Tile tile, int consumer, int part) {
    return tile.m * TM + (kByFeatures ? part : consumer) * 64;
  }
  __device__ __forceinline__ static int column(Tile tile, int consumer, int part) {
    return tile.n * TN + (kByFeatures ? consumer : part) * 64;
  }
};

// Tiles in the order of their number: `group_panels` panels at a time, along them first, so that panels are complete
// early while their weights and a band of x stay in the L2.
struct Raster {
  int tiles_m, tiles_n, group_panels;

  __device__ __forceinline__ int tiles() const { return tiles_m * tiles_n; }
  // Whether any tile of panel n has a number below `stored`: its first has the lowest.
  __device__ __forceinline__ bool has_stored(int n, int stored) const {
    const int first = n / group_panels * group_panels;
    return first * tiles_m + (n - first) < stored;
  }
  __device__ __forceinline__ Tile at(int t) const {
    const int group = t / (group_panels * tiles_m), first = group * group_panels;
    const int panels = min(group_panels, tiles_n - first), rest = t - first * tiles_m;
    return {rest / panels, first + rest % panels};
  }
};

}  // namespace gemmnorm

namespace gemmnorm {

constexpr int kWorkers = 2;  // warps of a block
constexpr int kBands = 64;   // of rows of x; each has counters

struct RowsAhead {
  u32* ready;               // rows made here: [panels, chunks], then [kBands, chunks]
  int x_rows, weight_rows;  // of which the launch before has made the first chunks
  int batch, in_features, features;
  int chunks;               // of K, that are made one after the other
  int x_begun, weight_begun;  // of these, that the launch before has made of its rows

  // Waits until a chunk of a tile's rows is there, as the thread that will ask the copy engine for it.
  template <int TM, int TN>
  __device__ __forceinline__ void wait_for(const Raster& raster, Tile tile, int chunk) const {
    const int panel_end = min((tile.n + 1) * TN, features);
    const int panel = panel_end - max(tile.n * TN, chunk < weight_begun ? weight_rows : 0);
    if (panel > 0) wait_until(&ready[tile.n * chunks + chunk], panel);
    const bool waited = wait_for_band<TM>(raster, tile.m * TM / band_rows<TM>(raster), chunk);
    if (panel > 0 || waited) fence_async_global();
  }
  // The same for a band of x; whether any of it was made here.
  template <int TM>
  __device__ __forceinline__ bool wait_for_band(const Raster& raster, int band, int chunk) const {
    const int rows = band_rows<TM>(raster);
    const int missing = min((band + 1) * rows, batch) - max(band * rows, chunk < x_begun ? x_rows : 0);
    if (missing > 0) wait_until(&ready[(raster.tiles_n + band) * chunks + chunk], missing);
    return missing > 0;
  }

  template <int TM>
  __device__ __forceinline__ static int band_rows(const Raster& raster) {
    return (raster.tiles_m + kBands - 1) / kBands * TM;
  }

  // Says, as a warp, that a chunk of so many rows is there: the copy engine will read it.
  template <int TM, int TN>
  __device__ __forceinline__ void done(const Raster& raster, bool of_x, int row, int chunk, int rows) const {
    fence_async_global();
    __syncwarp();
    const int place = of_x ? raster.tiles_n + row / band_rows<TM>(raster) : row / TN;
    if (threadIdx.x % 32 == 0) add_release(&ready[place * chunks + chunk], rows);
  }
};

// Operands that are cast, in chunks of kCastColumns. One that is in half precision already has all its rows.
template <class T>
struct CastAhead : RowsAhead {
  using Element = T;
  static constexpr int kStepsOfChunk = kCastColumns * sizeof(T) / kRowBytes;
  const float *x, *weight;  // [batch, in_features], [features, in_features], or null
  T *cast_x, *cast_weight;

  // The warp's share of what is left, eight rows of a chunk at a time: first of the rows that the launch before has begun,
  // which the first tiles of all blocks need, then of as many of x's as those, again and again, then of the weight's.
  template <int TM, int TN>
  __device__ __forceinline__ void cast(const Raster& raster, int worker) const {
    constexpr int kRows = 8;  // of one panel: features are a multiple
    int item = kWorkers * blockIdx.x + worker, first = min(x_begun, weight_begun);
    int x_from = x ? 0 : batch, x_to = x ? x_rows : batch, from = weight ? 0 : features, to = weight ? weight_rows : features;
    for (;;) {
      const int groups_of_x = (x_to - x_from + kRows - 1) / kRows, groups = groups_of_x + (to - from + kRows - 1) / kRows;
      const int items = groups * (chunks - first);
#pragma unroll 1
      for (; item < items; item += kWorkers * gridDim.x) {
        const int chunk = first + item / groups, n = item % groups, column = chunk * kCastColumns;
        const bool of_x = n < groups_of_x;
        const int row = of_x ? x_from + n * kRows : from + (n - groups_of_x) * kRows;
        const int rows = min(kRows, (of_x ? x_to : to) - row), columns = min(kCastColumns, in_features - column);
        const i64 at = static_cast<i64>(row) * in_features + column;
        const float* source = (of_x ? x : weight) + at;
        T* target = (of_x ? cast_x : cast_weight) + at;
#pragma unroll 1
        for (int i = 0; i < rows; ++i, source += in_features, target += in_features)
          if (columns == kCastColumns) cast_chunk(source, target, threadIdx.x % 32);
          else cast_row<T, 32, 4>(source, target, columns, threadIdx.x % 32);
        done<TM, TN>(raster, of_x, row, chunk, rows);
      }
      item -= items;
      first = 0;
      x_from = x_to;
      from = to;
      if (x_to < batch) x_to = min(x_to + x_rows, batch);
      else if (to < features) to = min(to + weight_rows, features);
      else return;
    }
  }
};

}  // namespace gemmnorm

namespace gemmnorm {

constexpr int kPieceColumns = 1024;  // of a row, that the copy engine brings at a time
constexpr int kPieces = 3;           // in flight, for each warp

struct PieceRing {
  alignas(128) float pieces[kPieces][kPieceColumns];
  u64 arrived[kPieces];
};
template <bool AHEAD>
struct PieceRings {};
template <>
struct PieceRings<true> {
  PieceRing rings[kWorkers];
};

// The operands, and what is known of them.
struct SplitAhead : RowsAhead {
  using Element = half;
  static constexpr int kStepsOfChunk = 1 << 30;  // a row has one exponent: all of it is one chunk
  const float *x, *weight;           // [batch, in_features], [features, in_features]
  half *split_x, *split_weight;      // as split_rows leaves them
  int *x_exponents, *weight_exponents;
  float *weight_largest, *weight_total;
  u32* most;
  const u64* weight_checksums;       // null, or the weight is split already: what its rows were then
  // A lane's words of a piece, four elements each; how many of them it has in flight.
  static constexpr int kWords = kPieceColumns / 128, kAtOnce = 4;

  // The first row of the weight that is left, to be split or to be compared.
  __device__ __forceinline__ int first_of_weight() const { return weight_checksums ? 0 : weight_rows; }
  // The n-th of the rows that are left: x's, then the weight's.
  __device__ __forceinline__ const float* row_left(int n) const {
    const int left_of_x = batch - x_rows;
    return n < left_of_x ? x + static_cast<i64>(x_rows + n) * in_features
                         : weight + static_cast<i64>(first_of_weight() + n - left_of_x) * in_features;
  }

  // A row of an operand, split.
  __device__ __forceinline__ half* row_of(bool of_x, int row) const {
    return (of_x ? split_x : split_weight) + static_cast<i64>(row) * ((in_features + kSplitColumns - 1) / kSplitColumns) * 2 * kSplitColumns;
  }

  // Where the next piece to ask for lies: which of the rows that are left, that row, and the piece's first column.
  struct Cursor {
    int row;
    const float* source;
    int first;
  };
  // Asks the copy engine for a piece, as one thread, and goes on to the next.
  __device__ __forceinline__ void request(PieceRing& ring, int slot, Cursor& c, int left, int stride) const {
    if (c.row >= left) return;
    const u32 bytes = min(kPieceColumns, in_features - c.first) * 4;
    barrier_expect(&ring.arrived[slot], bytes);
    copy_bytes_to_shared(ring.pieces[slot], c.source + c.first, bytes, &ring.arrived[slot]);
    c.first += kPieceColumns;
    if (c.first < in_features) return;
    c.first = 0;
    c.row += stride;
    c.source = row_left(c.row);
  }

  template <int WORDS>
  __device__ __forceinline__ static u32 largest_of(const Vec<float, 4> (&v)[WORDS]) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) bits = max(bits, __float_as_uint(v[i].at[q]) & 0x7FFFFFFFu);
    return bits;
  }
  __device__ __forceinline__ static u32 warp_max(u32 bits) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, bit));
    return bits;
  }
  // The lane's words of a piece from the begin-th on, zeros beyond the row's end. Nothing waits for a condition.
  template <int WORDS>
  __device__ __forceinline__ static void read_words(const float* piece, int left /* columns of the row */, int begin,
                                                    Vec<float, 4> (&v)[WORDS]) {
    const int column = begin * 128 + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) v[i] = load<float, 4>(piece + column + i * 128);
    if (left < kPieceColumns) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        if (column + i * 128 >= left) v[i] = {};
    }
  }

  // The warp's share of the rows that are left: every so many-th. The copy engine runs kPieces ahead, into the next row.
  template <int TM, int TN>
  __device__ __forceinline__ void split(PieceRing& ring, const Raster& raster, int worker) const {
    const int stride = kWorkers * gridDim.x, first_row = static_cast<int>(kWorkers * blockIdx.x) + worker;
    const int left_of_x = batch - x_rows, left = left_of_x + features - first_of_weight();
    Pieces pieces = {*this, ring, {first_row, row_left(first_row), 0}, left, stride};
    pieces.begin();
#pragma unroll 1
    for (int n = first_row; n < left; n += stride) {
      const bool of_x = n < left_of_x;
      const int row = of_x ? x_rows + n : first_of_weight() + n - left_of_x;
      if (!of_x && weight_checksums) {
        compare_row(pieces, row);
        continue;
      }
      split_row(pieces, n, row, of_x);
      done<TM, TN>(raster, of_x, row, 0, 1);
    }
  }

  // In evaluation: puts the features that the running deviation says are lost on the list, as a warp: of the rows of the weight
  // those that it has split or compared, and its share of those that were split before.
  template <int TM, class Features>
  __device__ __forceinline__ void find_features(const Features& f, const Raster& raster, int worker) const {
    const int lane = threadIdx.x % 32, stride = kWorkers * gridDim.x, warp = kWorkers * blockIdx.x + worker;
    for (int band = lane; band < kBands && band * band_rows<TM>(raster) < batch; band += 32) wait_for_band<TM>(raster, band, 0);
    __syncwarp();  // `most` is known, and what lane 0 has written of the warp's rows
    for (int j = warp * 32 + lane; j < first_of_weight(); j += stride * 32) f.guard.raises(j, f.running_deviation(j));
    const int before = first_of_weight() - (batch - x_rows);  // from where the warp's rows are counted to features
    for (int j = before + warp + lane * stride; j < features; j += stride * 32)
      if (j >= first_of_weight()) f.guard.raises(j, f.running_deviation(j));
  }

  // The pieces of the warp's rows, one after the other.
  struct Pieces {
    const SplitAhead& ahead;
    PieceRing& ring;
    Cursor cursor;
    int left, stride;
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void begin() {
      if (threadIdx.x % 32 == 0)
        for (int s = 0; s < kPieces; ++s) ahead.request(ring, s, cursor, left, stride);
    }
    __device__ __forceinline__ const float* wait() const {
      barrier_wait(&ring.arrived[slot], parity);
      return ring.pieces[slot];
    }
    __device__ __forceinline__ void release() {
      __syncwarp();  // everybody has read the piece
      if (threadIdx.x % 32 == 0) ahead.request(ring, slot, cursor, left, stride);
      if (++slot == kPieces) {
        slot = 0;
        parity ^= 1;
      }
    }
  };

  // A row that has changed is computed again, from the weight itself: nothing is small beside infinity.
  __device__ __forceinline__ void compare_row(Pieces& pieces, int row) const {
    const int lane = threadIdx.x % 32;
    u64 code = 0;
#pragma unroll 1
    for (int first = 0; first < in_features; first += kPieceColumns) {
      const float* piece = pieces.wait();
#pragma unroll 1
      for (int begin = 0; begin < kWords; begin += kWords / 2) {
        Vec<float, 4> v[kWords / 2];
        read_words(piece, in_features - first, begin, v);
#pragma unroll
        for (int i = 0; i < kWords / 2; ++i) code += checksum(first + ((begin + i) * 32 + lane) * 4, v[i]);
      }
      pieces.release();
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) code += __shfl_xor_sync(~0u, code, bit);
    if (lane == 0 && code != weight_checksums[row]) weight_largest[row] = __uint_as_float(0x7F800000u);
  }

  // What is known of a row once all of it has been read.
  struct Sizes {
    u32 largest;  // bits
    float total;
  };
  // The lane's words of a piece of which `left` columns belong to the row, and `padded` are written; WHOLE: all of them.
  template <bool WHOLE>
  __device__ __forceinline__ static void split_piece(const float* piece, half* target /* the lane's first */, int left,
                                                     int padded, float scale, Sizes& sizes) {
    constexpr int kTogether = WHOLE ? kAtOnce : 1;
#pragma unroll 1
    for (int begin = 0; begin < kWords; begin += kTogether) {
      Vec<float, 4> v[kTogether];
      read_words(piece, WHOLE ? kPieceColumns : left, begin, v);
      sizes.largest = max(sizes.largest, largest_of(v));
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        sizes.total += (fabsf(v[i].at[0]) + fabsf(v[i].at[1])) + (fabsf(v[i].at[2]) + fabsf(v[i].at[3]));
        const float scaled[4] = {v[i].at[0] * scale, v[i].at[1] * scale, v[i].at[2] * scale, v[i].at[3] * scale};
        if (WHOLE || (begin + i) * 128 + threadIdx.x % 32 * 4 < padded) store_split(target + (begin + i) * 256, 0, scaled);
      }
    }
  }

  // A row is read once: its exponent is that of its first piece, and a row that does not fit, up to 65504, or begins with
  // zeros and is small, or whose exponent takes two factors, is split once more.
  __device__ __forceinline__ void split_row(Pieces& pieces, int n, int row, bool of_x) const {
    constexpr int kLeastOfOneFactor = -127;
    const int lane = threadIdx.x % 32, padded = (in_features + kSplitColumns - 1) / kSplitColumns * kSplitColumns;
    half* at = row_of(of_x, row) + lane / 16 * 2 * kSplitColumns + lane % 16 * 4;
    Sizes sizes = {};
    int exponent = 0;
    float scale = 0.0f;
#pragma unroll 1
    for (int first = 0; first < in_features; first += kPieceColumns) {
      const float* piece = pieces.wait();
      if (first == 0) {
        u32 begun = 0;
#pragma unroll 1
        for (int begin = 0; begin < kWords; begin += kAtOnce) {
          Vec<float, 4> v[kAtOnce];
          read_words(piece, in_features, begin, v);
          begun = max(begun, largest_of(v));
        }
        exponent = max(row_exponent(warp_max(begun)), kLeastOfOneFactor);
        scale = __uint_as_float(static_cast<u32>(127 - exponent) << 23);
      }
      const int left = in_features - first;
      if (left >= kPieceColumns) split_piece<true>(piece, at, left, left, scale, sizes);
      else split_piece<false>(piece, at, left, padded - first, scale, sizes);
      at += 2 * kPieceColumns;
      pieces.release();
    }
    sizes.largest = warp_max(sizes.largest);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sizes.total += __shfl_xor_sync(~0u, sizes.total, bit);
    const int wanted = row_exponent(sizes.largest);
    if (wanted < exponent || !(__uint_as_float(sizes.largest) * scale <= 65504.0f)) {
      exponent = wanted;
      const PowerOfTwo factors = power_of_two(-exponent);
      const float* source = row_left(computed_anew(n));
      half* target = row_of(of_x, computed_anew(row));
#pragma unroll 1
      for (int c = lane * 4; c < padded; c += 128) {
        const Vec<float, 4> v = c < in_features ? load<float, 4>(source + c) : Vec<float, 4>{};
        const float scaled[4] = {times(v.at[0], factors), times(v.at[1], factors), times(v.at[2], factors), times(v.at[3], factors)};
        store_split(target, c, scaled);
      }
    }
    if (lane == 0) {
      (of_x ? x_exponents : weight_exponents)[row] = exponent;
      if (!of_x) {
        weight_largest[row] = __uint_as_float(sizes.largest);
        weight_total[row] = sizes.total;
      } else {
        atomicMax(&most[0], sizes.largest);
        atomicMax(&most[1], __float_as_uint(sizes.total) & 0x7FFFFFFFu);
      }
    }
  }
};

}  // namespace gemmnorm

namespace gemmnorm {

struct split;       // operand type: float32 as two float16 (split.cuh), three products for one
struct thirds;      // float32 as three bfloat16, split on the way from shared memory, six products for one

// The multiplied element, how operands are made inside the kernel, bytes of an element in shared memory, its parts, and the
// registers of a thread that feeds and normalises.
template <class T>
struct Operand {
  using Element = T;
  using Ahead = CastAhead<T>;
  static constexpr int kSize = 2, kPlanes = 1, kFeeder = 104;
};
template <>
struct Operand<tf32> : Operand<half> {
  using Element = tf32;
  static constexpr int kSize = 4;
};
template <>
struct Operand<thirds> : Operand<tf32> {
  using Element = bfloat16;
  static constexpr int kPlanes = 3;
};
template <>
struct Operand<split> : Operand<half> {
  using Ahead = SplitAhead;
  static constexpr int kPlanes = 2, kFeeder = 56;
};

template <int TM, int TN, int STAGES, int PLANES, bool STAGED, bool AHEAD>
struct GemmShared : PieceRings<AHEAD> {
  using Shape = TileShape<TM, TN>;
  alignas(1024) unsigned char x[STAGES][PLANES][TM * kRowBytes];
  alignas(1024) unsigned char weight[STAGES][PLANES][TN * kRowBytes];
  alignas(1024) unsigned char staging[2][STAGED ? Shape::kStagingBytes : 1024];
  // Of a tile by rows sums of each warp; of split operands the exponents along the width. Per consumer.
  float sums[2][Shape::kByFeatures ? 2 : 4][Shape::kWidth];
  // Of a tile by rows column coefficients, per consumer; in kOneBlock a group's mean in `slope` and its M2 in `shift`; in
  // evaluation coefficients per tile.
  float slope[2][TN], shift[2][TN];
  float mean[TN], squares[TN], finished_slope[TN], finished_shift[TN];  // of the tile's columns, for both consumers
  int exponents[2][64];  // of split operands, across the width: of a consumer's 64 rows or columns
  u64 full[STAGES], empty[STAGES];
  u64 staged[2], unstaged[2];  // a consumer's tile is ready to be stored; its staging memory is free again
  u64 known[2], used[2];       // in evaluation: a tile's coefficients are there; they may be overwritten
  u64 left;                    // all warps but the first have left
};

// A warp leaves.
__device__ __forceinline__ void leave(u64& left) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(&left);
}

}  // namespace gemmnorm
// One stage of K of a product of split operands: three products of float16 for one of float32.

namespace gemmnorm {

// high*high into `part`, which starts from zero, and both products with a low part into `cross`, in units of 2^-11. Two
// groups of multiplications: the first is for the caller to add up, because the tensor cores truncate, while the second
// still runs. Operands as descriptors, 64 of K each; `first` where `cross` starts from zero too.
template <int BN, int A_ACROSS = 0, int B_ACROSS = 0>
__device__ __forceinline__ void multiply_stage(float (&part)[BN / 2], float (&cross)[BN / 2], u64 a, u64 a_low, u64 b,
                                               u64 b_low, bool first) {
  constexpr int kStepA = A_ACROSS ? kAcrossStep : kDescriptorStep, kStepB = B_ACROSS ? kAcrossStep : kDescriptorStep;
  using Multiply = Wgmma<half, BN>;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    Multiply::template run<A_ACROSS, B_ACROSS>(part, a + i * kStepA, b + i * kStepB, i ? 1 : 0);
  wgmma_commit();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Multiply::template run<A_ACROSS, B_ACROSS>(cross, a_low + i * kStepA, b + i * kStepB, first && !i ? 0 : 1);
    Multiply::template run<A_ACROSS, B_ACROSS>(cross, a + i * kStepA, b_low + i * kStepB, 1);
  }
  wgmma_commit();
}

}  // namespace gemmnorm
// What a consumer holds of a wide tile: 64 features and all TM rows, multiplied as W*x^T. A thread has two features, eight
// apart, and a quarter of the rows, so that what belongs to a feature is in its registers, and a sum over rows takes two
// shuffles. (Of a tile by rows a thread has two rows, and every number of a feature comes from shared memory.)
// A tile on its way out of the accumulators: pairs of neighbouring columns, of rows that are eight apart.
// What follows the tiles of the fused GEMM: a panel (one column of tiles) whose rows are all multiplied is merged and
// normalised by single warps, out of the L2, while the tensor cores work on later panels.
// Scale, shift, normalisation and activation in one sweep over the product.

namespace gemmnorm {

enum class Form {
  kFolded,    // training: y = gamma*s*rstd * (a - mean) + beta           mean of the product a
  kScaled,    // training: y = gamma*rstd * (s*(a + b) - s*(mean + b)) + beta
  kRunning,   // evaluation: y = gamma*rstd * (s*(a + b) - running_mean) + beta,  rstd = 1/sqrt(running_var + eps)
};

// Centred in every form: subtracting first keeps a column of large mean exact where alpha*a + kappa would cancel.
//   y = phi( slope * (s*(a + b) - centre) + shift )        with s = 1, b = 0 in the folded form
template <Form FORM>
struct Affine {
  float scale, bias, centre, slope, shift;

  template <class L, class R>
  __device__ __forceinline__ void read(int j, const L* bias_, const L* scale_, int scale_stride, float scale_value,
                                       const float* mean_, const float* rstd_, const R* running_mean,
                                       const R* running_var, const R* bn_weight, const R* bn_bias, float eps) {
    const float s = scale_of(scale_, scale_stride, scale_value, j);
    const float b = value_or(bias_, j, 0.0f);
    const float gamma = value_or(bn_weight, j, 1.0f);
    shift = value_or(bn_bias, j, 0.0f);
    scale = FORM == Form::kFolded ? 1.0f : s;
    bias = FORM == Form::kFolded ? 0.0f : b;
    if (FORM == Form::kRunning) {
      centre = to_float(running_mean[j]);
      slope = gamma / sqrtf(to_float(running_var[j]) + eps);
    } else {
      centre = FORM == Form::kFolded ? mean_[j] : (mean_[j] + b) * s;
      slope = FORM == Form::kFolded ? gamma * s * rstd_[j] : gamma * rstd_[j];
    }
  }
  // `own`: what had been subtracted from a before it was stored.
  __device__ __forceinline__ float operator()(float a, float own = 0.0f) const {
    if (FORM == Form::kFolded) return slope * (a + (own - centre)) + shift;
    return slope * ((a + bias) * scale - centre) + shift;
  }
};

// `offset` is what the producer of the product subtracted from a group of rows before it stored them (folded form only).
// `y` may be the product's own memory when both have one type. In the running form `mean` and `rstd` are outputs (or
// null): the running statistics that were used, kept for the backward.
template <class T, class Y, class L, class R, int N, int TX, int GROUPS, Form FORM, class Activation>
__device__ __forceinline__ void normalize(const T* product /* [batch, features] */,
                                          const float* offset /* [groups, features] or null */,
                                          const L* bias /* [features] or null */,
                                          const L* scale /* [features] or [1] or null */, int scale_stride,
                                          float scale_value, float* mean /* [features] or null */,
                                          float* rstd /* [features] or null */,
                                          const R* running_mean /* [features] or null */,
                                          const R* running_var /* [features] or null */,
                                          const R* bn_weight /* [features] or null */,
                                          const R* bn_bias /* [features] or null */, float eps,
                                          Y* y /* [batch, features] */, int batch, int features) {
  using P = Panel<N, TX, GROUPS>;
  P panel(batch, features);
  allow_next();
  if (panel.column >= features) return;
  wait_for_previous();
  Affine<FORM> affine[N];
#pragma unroll
  for (int i = 0; i < N; ++i)
    affine[i].read(panel.column + i, bias, scale, scale_stride, scale_value, mean, rstd, running_mean, running_var,
                   bn_weight, bn_bias, eps);
  if (FORM == Form::kRunning && mean && panel.group == 0 && panel.lane == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      mean[panel.column + i] = affine[i].centre;
      rstd[panel.column + i] = 1.0f / sqrtf(to_float(running_var[panel.column + i]) + eps);
    }
  }
  constexpr int kAtOnce = P::kRows < 4 ? P::kRows : 4;  // loads in flight
  const int first_group = panel.group;
#pragma unroll 1
  for (int g = 0; g < GROUPS; ++g) {
    panel.at(first_group + g);
    if (panel.rows == 0) break;
    const i64 origin = panel.first_row * features + panel.column;
    float own[N];  // what was subtracted from this group
#pragma unroll
    for (int i = 0; i < N; ++i)
      own[i] = FORM == Form::kFolded && offset
                   ? offset[static_cast<i64>(panel.group) * features + panel.column + i]
                   : 0.0f;
#pragma unroll 1
    for (int r0 = 0; r0 < P::kRows; r0 += kAtOnce) {
      Vec<T, N> a[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        a[r] = load<T, N>(product + origin + panel.existing((r0 + r) * P::kLanes + panel.lane) * features);
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int row = (r0 + r) * P::kLanes + panel.lane;
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = Activation::value(affine[i](a[r].value(i), own[i]));
        if (row < panel.rows) store<Y, N>(y + origin + static_cast<i64>(row) * features, out);
      }
    }
  }
}

}  // namespace gemmnorm
// Column statistics of the product: a mean and an M2 (sum of squared deviations) for every group of 64 rows, then
// their merge, which also updates the running statistics. Mean first, then M2 about that mean, at both levels: safe for
// |mean| >> std, and the order of every sum is fixed, so the same bits come out of every run.

namespace gemmnorm {

// FOLD: M2 of the product a; the merge multiplies by s^2. Otherwise M2 of the scaled tensor (a + b)*s, whose
// elements exist only in registers. The mean is that of a in both.
template <class T, class L, int N, int TX, bool FOLD>
__device__ __forceinline__ void column_statistics(const T* product /* [batch, features] */,
                                                  const L* bias /* [features] or null */,
                                                  const L* scale /* [features] or [1] or null */, int scale_stride,
                                                  float scale_value, float* group_mean /* [groups, features] */,
                                                  float* group_m2 /* [groups, features] */,
                                                  i64* batches_tracked /* [1] or null: incremented */, int batch,
                                                  int features) {
  using P = Panel<N, TX, 1, true>;
  __shared__ float shared[kThreads * N];
  allow_next();
  wait_for_previous();
  const P panel(batch, features);
  if (batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *batches_tracked += 1;

  const bool inside = panel.column < features;
  const T* p = product + panel.first_row * features + (inside ? panel.column : 0);
  Vec<T, N> a[P::kRows];
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
    a[r] = load<T, N>(p + panel.existing(r * P::kLanes + panel.lane) * features);
  }
  float mean[N];
#pragma unroll
  for (int i = 0; i < N; ++i) mean[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
    if (r * P::kLanes + panel.lane < panel.rows) {
#pragma unroll
      for (int i = 0; i < N; ++i) mean[i] += a[r].value(i);
    }
  }
  sum_over_lanes<N, TX>(mean, shared);
  float m2[N], s[N], b[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    mean[i] /= panel.rows;  // exactly, so that nothing is left of a constant column
    m2[i] = 0.0f;
    s[i] = FOLD || !inside ? 1.0f : scale_of(scale, scale_stride, scale_value, panel.column + i);
    b[i] = FOLD || !inside ? 0.0f : value_or(bias, panel.column + i, 0.0f);
  }
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
    if (r * P::kLanes + panel.lane < panel.rows) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float deviation = FOLD ? a[r].value(i) - mean[i]
                                     : (a[r].value(i) + b[i]) * s[i] - (mean[i] + b[i]) * s[i];
        m2[i] += deviation * deviation;
      }
    }
  }
  sum_over_lanes<N, TX>(m2, shared);
  if (inside && panel.lane == 0) {
    const i64 out = static_cast<i64>(panel.group) * features + panel.column;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      group_mean[out + i] = mean[i];
      group_m2[out + i] = m2[i];
    }
  }
}

// Threads of a merging block: kMergeColumns features by kMergeLanes lanes that share out the groups.
constexpr int kMergeColumns = 16;
constexpr int kMergeLanes = kThreads / kMergeColumns;

// Sum over the lanes of a merging block, in a fixed order.
__device__ __forceinline__ float sum_over_merge_lanes(float value, float* shared /* [kThreads] */) {
  __syncthreads();
  shared[threadIdx.x] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int l = 0; l < kMergeLanes; ++l) sum += shared[l * kMergeColumns + threadIdx.x % kMergeColumns];
  return sum;
}

// What the statistics of feature j become: rstd = 1/sqrt(var(z) + eps) and the running statistics,
//   running_mean <- (1-m)*running_mean + m*s*(mean + b)       running_var <- (1-m)*running_var + m*var(z)*B/(B-1)
// A negative momentum stands for the cumulative average: m = 1 / batches, the count with this batch in it.
template <class R>
__device__ __forceinline__ void finish_feature(int j, float mean_a, float variance, float s, float b, float batches,
                                               R* running_mean, R* running_var, float old_mean, float old_var,
                                               float momentum, float eps, float* mean, float* rstd, int batch) {
  mean[j] = mean_a;
  rstd[j] = 1.0f / sqrtf(variance + eps);
  if (!running_mean) return;
  const float m = momentum >= 0.0f ? momentum : 1.0f / batches;
  from_float((1.0f - m) * old_mean + m * (s * (mean_a + b)), running_mean[j]);
  const float unbiased = variance * (static_cast<float>(batch) / (computed_anew(batch) - 1));  // the factor needs no register
  from_float((1.0f - m) * old_var + m * unbiased, running_var[j]);
}

// Merges the groups of each feature. `batches_tracked` has been incremented.
template <class L, class R, bool FOLD>
__device__ __forceinline__ void merge_statistics(const float* group_mean /* [groups, features] */,
                                                 const float* group_m2 /* [groups, features] */,
                                                 const L* bias /* [features] or null */,
                                                 const L* scale /* [features] or [1] or null */, int scale_stride,
                                                 float scale_value, R* running_mean /* [features] or null */,
                                                 R* running_var /* [features] or null */,
                                                 const i64* batches_tracked /* [1] or null */, float momentum,
                                                 float eps, float* mean /* [features] */, float* rstd /* [features] */,
                                                 int batch, int features) {
  __shared__ float shared[kThreads];
  const int j = blockIdx.x * kMergeColumns + threadIdx.x % kMergeColumns;
  const int lane = threadIdx.x / kMergeColumns;
  const int groups = (batch + kGroupRows - 1) / kGroupRows;
  const bool inside = j < features;
  const float s = inside ? scale_of(scale, scale_stride, scale_value, j) : 1.0f;
  const float b = inside ? value_or(bias, j, 0.0f) : 0.0f;
  allow_next();
  wait_for_previous();

  float sum = 0.0f;
  if (inside) {
#pragma unroll 4
    for (int g = lane; g < groups; g += kMergeLanes) {
      const int rows = min(kGroupRows, batch - g * kGroupRows);
      sum += group_mean[static_cast<i64>(g) * features + j] * rows;
    }
  }
  const float mu = sum_over_merge_lanes(sum, shared) / batch;
  sum = 0.0f;
  if (inside) {
#pragma unroll 4
    for (int g = lane; g < groups; g += kMergeLanes) {
      const int rows = min(kGroupRows, batch - g * kGroupRows);
      const i64 at = static_cast<i64>(g) * features + j;
      const float deviation = FOLD ? group_mean[at] - mu : (group_mean[at] + b) * s - (mu + b) * s;
      sum += group_m2[at] + deviation * deviation * rows;
    }
  }
  const float m2 = sum_over_merge_lanes(sum, shared);
  if (!inside || lane != 0) return;
  const float variance = (FOLD ? s * s * m2 : m2) / batch;
  const float batches = batches_tracked ? static_cast<float>(*batches_tracked) : 0.0f;
  finish_feature(j, mu, variance, s, b, batches, running_mean, running_var, value_or(running_mean, j, 0.0f),
                 value_or(running_var, j, 0.0f), momentum, eps, mean, rstd, batch);
}

}  // namespace gemmnorm

namespace gemmnorm {

constexpr int kMergeWidth = 8;    // features whose groups a warp merges at a time
constexpr int kDirectRows = 8192;  // of a batch whose tiles merge by themselves rather than wait for somebody's merge
constexpr int kDone = 0, kTicket = 1, kPanels = 2;  // counters: blocks done, next unit, then two numbers per panel

// Numbers of `most` behind the two of x: blocks that have read them, and features on the list.
constexpr int kReaders = 2, kFlagged = 3;

// What decides whether split operands were enough; `flagged` is null where the operands are not split.
struct Guard {
  u32* most;                                     // over the rows of x: largest magnitude, sum of magnitudes (bits)
  const float *weight_largest, *weight_total;    // of each row of the weight
  int* flagged;                                  // the features to be computed again in float32, in any order

  // Whether feature j, whose deviation is given, has to be; then it is put on the list.
  __device__ __forceinline__ bool raises(int j, float deviation) const {
    if (!flagged) return false;
    const bool lost = split_loses(__uint_as_float(load_acquire(&most[0])), __uint_as_float(load_acquire(&most[1])),
                                  weight_largest[j], weight_total[j], deviation);
    if (lost) flagged[atomicAdd(&most[kFlagged], 1u)] = j;
    return lost;
  }
};

// Everything per feature, and the sizes.
template <class L, class R>
struct Features {
  const L *bias, *scale;
  int scale_stride;
  float scale_value;
  R *running_mean, *running_var;
  const R *bn_weight, *bn_bias;
  const i64* batches_tracked;
  float momentum, eps;
  float *group_mean, *group_m2, *mean, *rstd, *merged_slope, *merged_shift;
  Guard guard;
  int batch, features, groups, group_rows;  // as they are merged

  __device__ __forceinline__ float s(int j) const { return scale_of(scale, scale_stride, scale_value, j); }
  __device__ __forceinline__ float b(int j) const { return value_or(bias, j, 0.0f); }
  // y = phi(slope*(a - mean) + shift)
  __device__ __forceinline__ float slope(int j, float rstd_j) const {
    return value_or(bn_weight, j, 1.0f) * s(j) * rstd_j;
  }
  // Of the product's column j, by the running statistics.
  __device__ __forceinline__ float running_deviation(int j) const {
    return s(j) == 0.0f ? 3e38f : sqrtf(to_float(running_var[j]) + eps) / fabsf(s(j));
  }
  __device__ __forceinline__ float shift(int j) const { return value_or(bn_bias, j, 0.0f); }
  __device__ __forceinline__ int rows(int group) const {
    const int left = batch - group * group_rows;
    return left < 0 ? 0 : left < group_rows ? left : group_rows;
  }
  // Where a group's number for feature j is in group_mean and group_m2, which have a row for every kGroupRows rows.
  __device__ __forceinline__ i64 at(int group, int j) const {
    return static_cast<i64>(group * (group_rows / kGroupRows)) * features + j;
  }
  // What the last step for feature j reads, all of it in flight at once.
  struct Own {
    float s, b, slope /* with rstd = 1 */, shift, running_mean, running_var;
  };
  __device__ __forceinline__ Own own(int j) const {
    return {s(j), b(j), slope(j, 1.0f), shift(j), value_or(running_mean, j, 0.0f), value_or(running_var, j, 0.0f)};
  }
  __device__ __forceinline__ void finish(int j, const Own& of, float mu, float m2) const {
    const float batches = batches_tracked && momentum < 0.0f ? static_cast<float>(*batches_tracked + 1) : 0.0f;
    const float variance = of.s * of.s * m2 / batch;
    const bool again = guard.raises(j, sqrtf(m2 / batch));  // then the running statistics wait for it
    if (merged_slope) {
      merged_slope[j] = of.slope / sqrtf(variance + eps);
      merged_shift[j] = of.shift;
    }
    finish_feature(j, mu, variance, of.s, of.b, batches, again ? nullptr : running_mean, running_var, of.running_mean,
                   of.running_var, momentum, eps, mean, rstd, batch);
  }
};

// Mean and M2 of a column, merged from those of its groups by `lanes` neighbouring lanes, each with AHEAD groups in flight.
// `load(of_m2, g)` gives a number of group g. All is relative to the mean of a few groups, spread over the batch and full if
// any is: M2 = sum  M2_g + n_g*d^2 - (sum  n_g*d)^2/B with d = mean_g - near.
struct Column {
  float mean, m2;
};
template <int AHEAD, class L, class R, class Load>
__device__ __forceinline__ Column merge_column(const Features<L, R>& f, int lane, int lanes, const Load& load) {
  constexpr int kSpread = 4;
  const int full = max(f.batch / f.group_rows, 1);
  float near = 0.0f, sum = 0.0f, squares = 0.0f, spread[kSpread];
#pragma unroll
  for (int q = 0; q < kSpread; ++q) spread[q] = load(false, q * full / kSpread);
  for (int g0 = lane; g0 < f.groups; g0 += lanes * AHEAD) {
    float means[AHEAD], squared[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int g = min(g0 + i * lanes, f.groups - 1);
      means[i] = load(false, g);
      squared[i] = load(true, g);
    }
    if (g0 < lanes) near = ((spread[0] + spread[1]) + (spread[2] + spread[3])) / kSpread;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const float n = g0 + i * lanes < f.groups ? f.rows(g0 + i * lanes) : 0, d = means[i] - near;
      sum += n * d;
      squares += (n > 0.0f ? squared[i] : 0.0f) + n * d * d;
    }
  }
  near = ((spread[0] + spread[1]) + (spread[2] + spread[3])) / kSpread;  // of lanes without groups too
#pragma unroll
  for (int bit = 1; bit < lanes; bit *= 2) {
    sum += __shfl_xor_sync(~0u, sum, bit);
    squares += __shfl_xor_sync(~0u, squares, bit);
  }
  return {near + sum / f.batch, squares - sum * sum / f.batch};
}

// Mean and M2 of n rows, for four neighbouring features, and their merge (Chan): exact in n, safe for |mean| >> std.
struct Moments {
  float n, mean[4], m2[4];

  __device__ __forceinline__ void add(float other_n, const float (&other_mean)[4], const float (&other_m2)[4]) {
    const float total = n + other_n, share = total > 0.0f ? other_n / total : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float delta = other_mean[i] - mean[i];
      mean[i] += delta * share;
      m2[i] += other_m2[i] + delta * delta * (n * share);
    }
    n = total;
  }
};

// One warp merges the groups of kMergeWidth features: two lanes along the features, sixteen along the groups, of which a
// lane has AHEAD in flight.
template <int AHEAD, class L, class R>
__device__ __forceinline__ void merge_groups(const Features<L, R>& f, int first_feature) {
  const int lane = threadIdx.x % 32, j = first_feature + (lane % 2) * 4;
  const bool inside = j < f.features;
  Moments sum = {};
#pragma unroll 1
  for (int g0 = lane / 2; g0 < f.groups; g0 += 16 * AHEAD) {
    float4 mean[AHEAD], m2[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int g = g0 + 16 * i;
      const i64 at = f.at(g < f.groups ? g : 0, inside ? j : 0);
      mean[i] = load_l2(reinterpret_cast<const float4*>(f.group_mean + at));
      m2[i] = load_l2(reinterpret_cast<const float4*>(f.group_m2 + at));
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const float group_mean[4] = {mean[i].x, mean[i].y, mean[i].z, mean[i].w};
      const float group_m2[4] = {m2[i].x, m2[i].y, m2[i].z, m2[i].w};
      if (g0 + 16 * i < f.groups) sum.add(f.rows(g0 + 16 * i), group_mean, group_m2);
    }
  }
#pragma unroll
  for (int bit = 2; bit < 32; bit *= 2) {  // the lower lane's part is always the left operand: one order, same bits
    float other_mean[4], other_m2[4];
    const float other_n = __shfl_down_sync(~0u, sum.n, bit);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      other_mean[i] = __shfl_down_sync(~0u, sum.mean[i], bit);
      other_m2[i] = __shfl_down_sync(~0u, sum.m2[i], bit);
    }
    sum.add(other_n, other_mean, other_m2);
  }
  // The two lanes that hold a sum hand it out, so that a lane finishes one feature.
  float mean = 0.0f, m2 = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float mean_i = __shfl_sync(~0u, sum.mean[i], lane / 4 % 2), m2_i = __shfl_sync(~0u, sum.m2[i], lane / 4 % 2);
    if (lane % 4 == i) mean = mean_i, m2 = m2_i;
  }
  const int mine = first_feature + lane;
  if (lane < kMergeWidth && mine < f.features) f.finish(mine, f.own(mine), mean, m2);
}

// One warp computes y = phi(slope*a + shift) of COLUMNS features with the running statistics; `keep`: mean and rstd too.
template <int COLUMNS, class L, class R>
__device__ __forceinline__ void evaluation_coefficients(const Features<L, R>& f, int first, bool keep, float* slope,
                                                        float* shift) {
#pragma unroll 2
  for (int c = threadIdx.x % 32; c < COLUMNS; c += 32) {
    const int j = min(first + c, f.features - 1);
    const float r = 1.0f / sqrtf(to_float(f.running_var[j]) + f.eps), centre = to_float(f.running_mean[j]);
    slope[c] = f.slope(j, r);
    shift[c] = f.shift(j) + value_or(f.bn_weight, j, 1.0f) * r * (f.s(j) * f.b(j) - centre);
    if (f.mean && keep) {
      f.mean[j] = centre;
      f.rstd[j] = r;
    }
  }
}

// N numbers of a per-feature vector, from the L2.
template <int N>
__device__ __forceinline__ void load_features(const float* vector, float (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = load_l2(reinterpret_cast<const float4*>(vector + i));
    out[i] = v.x;
    out[i + 1] = v.y;
    out[i + 2] = v.z;
    out[i + 3] = v.w;
  }
}

// For N features of a merged panel: y = phi(slope*a' + shift), a' as it is stored, minus the mean that group_mean has.
template <int N, class L, class R>
__device__ __forceinline__ void group_coefficients(const Features<L, R>& f, int group, int column, float (&slope)[N],
                                                   float (&shift)[N]) {
  float mean[N], own[N];
  load_features(f.merged_slope + column, slope);
  load_features(f.merged_shift + column, shift);
  load_features(f.mean + column, mean);
  load_features(f.group_mean + static_cast<i64>(group) * f.features + column, own);
#pragma unroll
  for (int i = 0; i < N; ++i) shift[i] += slope[i] * (own[i] - mean[i]);
}

// One warp normalises UNIT rows of a stored tile, ROWS in flight.
template <class T, class Y, int TN, class Activation, int UNIT, int ROWS, class L, class R>
__device__ __forceinline__ void normalize_unit(const Features<L, R>& f, const T* product, Y* y, int first_row,
                                               int first_column) {
  constexpr int N = 16 / sizeof(T);
  constexpr int kColumns = TN < 32 * N ? TN : 32 * N;  // that the warp covers at once
  constexpr int kLanes = 32 * N / kColumns;            // rows that it covers at once
  constexpr int kAtOnce = UNIT / kLanes < ROWS ? UNIT / kLanes : ROWS;
  const int lane = threadIdx.x % 32, group = first_row / kGroupRows;
  const int rows = min(UNIT, f.batch - first_row);
#pragma unroll 1
  for (int c = 0; c < TN; c += kColumns) {
    const int column = first_column + c + (lane % (kColumns / N)) * N;
    if (column >= f.features) continue;
    float slope[N], shift[N];
    group_coefficients(f, group, column, slope, shift);
    const i64 origin = static_cast<i64>(first_row) * f.features + column;
#pragma unroll 1
    for (int r0 = lane / (kColumns / N); r0 < rows; r0 += kLanes * kAtOnce) {
      Vec<T, N> a[kAtOnce];  // loads without conditions are all in flight at once
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        *reinterpret_cast<uint4*>(&a[r]) = load_last_time(
            reinterpret_cast<const uint4*>(product + origin + static_cast<i64>(min(r0 + r * kLanes, rows - 1)) * f.features));
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = Activation::value(slope[i] * a[r].value(i) + shift[i]);
        if (r0 + r * kLanes >= rows) continue;
        Vec<Y, N> rounded;
#pragma unroll
        for (int i = 0; i < N; ++i) from_float(out[i], rounded.at[i]);
        uint4* to = reinterpret_cast<uint4*>(y + origin + static_cast<i64>(r0 + r * kLanes) * f.features);
#pragma unroll
        for (int w = 0; w < N * sizeof(Y) / 16; ++w) store_for_others(to + w, reinterpret_cast<const uint4*>(&rounded)[w]);
      }
    }
  }
}

// A warp takes units in order, one at a time, until none is left: first the merges of a group of panels, then the rows
// of its stored tiles. A unit waits only for tiles that come before it.
template <class T, class Y, int TM, int TN, class Activation, int AHEAD, class L, class R>
__device__ __forceinline__ void take_units(const Features<L, R>& f, const Raster& raster, const T* product, Y* y,
                                           u32* counters, int stored) {
  constexpr int kUnitRows = 16384 / (TN * sizeof(T)) < 64 ? 16384 / (TN * sizeof(T)) : 64;  // that a warp normalises at a time
  constexpr int kMerges = TN / kMergeWidth, kUnits = TM / kUnitRows;
  const int lane = threadIdx.x % 32;
  const int complete = kPanels, merged = kPanels + raster.tiles_n;  // of the counters
  const int per_panel = kMerges + kUnits * raster.tiles_m;
  // Tiles that merge for themselves need no units of their own: the last unit is then in the last group with stored tiles.
  const bool direct = f.batch <= kDirectRows;
  const int group_tiles = raster.group_panels * raster.tiles_m;
  const int last_panel = direct ? min((stored + group_tiles - 1) / group_tiles * raster.group_panels, raster.tiles_n)
                                : raster.tiles_n;
#pragma unroll 1
  for (;;) {
    int unit = 0;
    if (lane == 0) unit = static_cast<int>(atomicAdd(&counters[kTicket], 1u));
    unit = __shfl_sync(~0u, unit, 0);
    if (unit >= per_panel * last_panel) return;
    const int group = unit / (per_panel * raster.group_panels), first = group * raster.group_panels;
    const int panels = min(raster.group_panels, raster.tiles_n - first);
    const int rest = unit - first * per_panel;
    if (rest < kMerges * panels) {
      const int n = first + rest / kMerges;
      if (direct && !raster.has_stored(n, stored)) continue;
      if (lane == 0) wait_until(&counters[complete + n], 2 * raster.tiles_m);
      __syncwarp();
      merge_groups<AHEAD>(f, n * TN + (rest % kMerges) * kMergeWidth);
      __syncwarp();
      if (lane == 0) add_release(&counters[merged + n], kMergeWidth);
    } else {
      const int t = first * raster.tiles_m + (rest - kMerges * panels) / kUnits;
      if (t >= stored) continue;
      const Tile tile = raster.at(t);
      const int row = tile.m * TM + (rest - kMerges * panels) % kUnits * kUnitRows;
      if (row >= f.batch) continue;
      if (lane == 0) wait_until(&counters[merged + tile.n], TN);
      __syncwarp();
      normalize_unit<T, Y, TN, Activation, kUnitRows, 2 * AHEAD>(f, product, y, row, tile.n * TN);
    }
  }
}

}  // namespace gemmnorm

namespace gemmnorm {

// Two neighbouring values less the mean, as T holds them: statistics and results agree with what is stored, so that the
// rounding of a value that stands out is normalised away as PyTorch's is. Without computed_anew ptxas finds that these
// writes reach the next wgmma and puts all of them in series (C7520).
template <class T>
__device__ __forceinline__ void rounded_pair(float& a, float& b, float2 mean, T) {
  const u32 both = pack(a - mean.x, b - mean.y, T{});
  a = computed_anew(element_of(both, 0, T{}));
  b = computed_anew(element_of(both, 1, T{}));
}
__device__ __forceinline__ void rounded_pair(float& a, float& b, float2 mean, float) {
  a -= mean.x;
  b -= mean.y;
}

// Per-column numbers of a thread's next N pairs of columns, all in flight at once.
template <int N>
__device__ __forceinline__ void load_pairs(const float* columns, float2 (&out)[N]) {
#pragma unroll
  for (int q = 0; q < N; ++q) out[q] = *reinterpret_cast<const float2*>(columns + q * 8 + (threadIdx.x % 4) * 2);
}

// A thread's two neighbouring results (the i-th such pair) of row own_row, and of own_row + 8, to where the copy engine
// will fetch them as T.
template <class T>
__device__ __forceinline__ void stage_pairs(unsigned char* staging, int own_row, int i, float2 low, float2 high) {
  if constexpr (sizeof(T) == 2) {
    unsigned char* to = staging + (i / 8) * kGroupRows * kRowBytes + own_row * kRowBytes +
                        (((i % 8) * 16 + (threadIdx.x % 4) * 4) ^ ((own_row % 8) << 4));
    *reinterpret_cast<u32*>(to) = pack(low.x, low.y, T{});
    *reinterpret_cast<u32*>(to + 8 * kRowBytes) = pack(high.x, high.y, T{});
  }
}

constexpr int kPartBytes = 64 * kRowBytes;  // of a box that the copy engine stores

// Asks the copy engine, as one thread, to store what a consumer has staged in one trip.
template <class Shape, class V>
__device__ __forceinline__ void store_staged(const TensorMap& map, const unsigned char* staging, Tile tile, int consumer,
                                             int trip, int batch, u64 policy = kEvictNormal) {
  constexpr int kParts = Shape::kParts / Shape::template kTrips<V>, kColumns = kRowBytes / sizeof(V);  // kColumns: of a box
  for (int i = 0; i < kParts; ++i) {
    const int part = trip * kParts + i, row = Shape::row(tile, consumer, part);
    if (row >= batch) continue;
    for (int c = 0; c < 64; c += kColumns)
      copy_to_global(map, staging + (c / kColumns * kParts + i) * kPartBytes, Shape::column(tile, consumer, part) + c, row,
                     policy);
  }
  commit_copies();
}

// Two neighbouring results of one row, straight to global memory.
template <class Y>
__device__ __forceinline__ void store_pair(Y* to, float2 v) {
  const float pair[2] = {v.x, v.y};
  store<Y, 2>(to, pair);
}

}  // namespace gemmnorm

namespace gemmnorm {

// acc[4i] and acc[4i + 1] are the first feature's, of rows 8i + 2*(lane % 4) and the next; then come the second's.
template <class T, class Y, int TM, int TN>
struct TileByFeatures {
  static constexpr int kMeeting = 128;  // threads that finish features together
  static constexpr int kOctets = 8;     // of rows, whose sums are taken together
  using Shape = TileShape<TM, TN>;
  using Accumulators = float[TM / 2];

  int consumer, lane, feature;  // the first of the two, in the tile
  float mean[2], slope[2], shift[2];

  __device__ __forceinline__ explicit TileByFeatures(int consumer_)
      : consumer(consumer_), lane(threadIdx.x % 32), feature(consumer_ * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4) {}

  // Where the lane begins to stage: the 16 bytes of one of 16 rows that it names for its warp, or a float of its own. Warps 0
  // and 1 have the first 32 features, which is a box of float32, the others the second.
  template <class V>
  __device__ __forceinline__ int staged_at() const {
    const int warp = feature / 16 % 4;
    if constexpr (sizeof(V) == 2) {
      const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
      return row * kRowBytes + (chunk ^ row % 8) * 16;
    } else {
      const int row = lane % 4 * 2, chunk = warp % 2 * 4 + lane / 16;
      const int box = warp / 2 * (Shape::kParts / Shape::template kTrips<V>)*kPartBytes;
      return computed_anew(box + row * kRowBytes + (chunk ^ row) * 16 + lane / 4 % 4 * 4);
    }
  }

  // Over the four lanes that share two features.
  __device__ __forceinline__ static float over_lanes(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }

  // The tile's number for each feature to `own`, where the block needs it, and to [groups, features]: to the row of the first
  // kGroupRows rows, and zero or, of a mean, the number again to those of the others.
  template <bool MEAN, class L, class R>
  __device__ __forceinline__ void store_of_tile(const Features<L, R>& f, Tile tile, const float (&v)[2], float* to,
                                                float* own) const {
    const int part = lane % 4, row = tile.m * TM + part * kGroupRows;
    if (part * kGroupRows >= TM) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = feature + 8 * c, j = tile.n * TN + column;
      if (j < f.features && row < f.batch)
        to[static_cast<i64>(row / kGroupRows) * f.features + j] = MEAN || part == 0 ? v[c] : 0.0f;
      if (own && part == 0) own[column] = v[c];
    }
  }

  // The means of the tile's rows. Rows beyond the batch are zero in the accumulators.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_means(const Features<L, R>& f, Shared& shared, Tile tile, const Accumulators& acc) {
    const int rows = f.batch - tile.m * TM;  // or more than the tile has
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < TM / 8; i += kOctets) {  // short sums round less
      float part[2] = {};
#pragma unroll
      for (int o = i; o < i + kOctets; ++o) {
        part[0] += acc[4 * o] + acc[4 * o + 1];
        part[1] += acc[4 * o + 2] + acc[4 * o + 3];
      }
      sum[0] += part[0];
      sum[1] += part[1];
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) mean[c] = over_lanes(sum[c]) * (1.0f / TM);
    if (rows < TM) {  // exactly, so that nothing is left of a constant column
      mean[0] = mean[0] * TM / rows;
      mean[1] = mean[1] * TM / rows;
    }
    store_of_tile<true>(f, tile, mean, f.group_mean, ONE_BLOCK ? shared.slope[0] : nullptr);
  }

  // Takes them off, rounds to T, and sums up the squares of what is left: M2. To `staging`, where that is not null.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_squares(const Features<L, R>& f, Shared& shared, Tile tile, Accumulators& acc,
                                               unsigned char* staging) const {
    const int rows = f.batch - tile.m * TM, at = staged_at<T>();
    if (rows < TM) {  // rows beyond the batch count for nothing
#pragma unroll
      for (int i = 0; i < TM / 2; ++i)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= rows) acc[i] = mean[i / 2 % 2];
    }
    float m2[2] = {};
#pragma unroll
    for (int i = 0; i < TM / 8; i += kOctets) {
      float sum[2] = {};
#pragma unroll
      for (int o = i; o < i + kOctets; o += 2) {
        if constexpr (sizeof(T) == 2) {
          u32 pairs[4];
#pragma unroll
          for (int p = 0; p < 4; ++p)
            pairs[p] = pack(acc[4 * o + 2 * p] - mean[p % 2], acc[4 * o + 2 * p + 1] - mean[p % 2], T{});
          if (staging) store_transposed(staging + o * 8 * kRowBytes + at, pairs);
#pragma unroll
          for (int q = 0; q < 8; ++q) acc[4 * o + q] = computed_anew(element_of(pairs[q / 2], q % 2, T{}));
        } else {
#pragma unroll
          for (int q = 0; q < 8; ++q) acc[4 * o + q] -= mean[q / 2 % 2];
        }
#pragma unroll
        for (int q = 0; q < 8; ++q) sum[q / 2 % 2] += acc[4 * o + q] * acc[4 * o + q];
      }
      m2[0] += sum[0];
      m2[1] += sum[1];
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) m2[c] = over_lanes(m2[c]);
    store_of_tile<false>(f, tile, m2, f.group_m2, ONE_BLOCK ? shared.shift[0] : nullptr);
  }

  // Two octets of rows, straight to memory. Of a whole tile nothing is compared.
  template <class V>
  __device__ __forceinline__ void store_octets(const float (&v)[8], int i, V* to, Tile tile, int batch, int features) const {
    const int row = tile.m * TM + lane % 4 * 2, j = tile.n * TN + feature;
    const bool whole = (tile.m + 1) * TM <= batch && (tile.n + 1) * TN <= features;
    V* at = to + static_cast<i64>(row) * features + j;
    const auto down = [&](int q) { return (i + q / 4) * 8 + q % 2; };
    const auto right = [](int q) { return q / 2 % 2 * 8; };
    if (whole) {
#pragma unroll
      for (int q = 0; q < 8; ++q) from_float(v[q], at[down(q) * features + right(q)]);
    } else {
#pragma unroll
      for (int q = 0; q < 8; ++q)
        if (row + down(q) < batch && j + right(q) < features) from_float(v[q], at[down(q) * features + right(q)]);
    }
  }
  // The same to where the copy engine will fetch them as V: `at` is the lane's place in the first octets of the trip.
  template <class V>
  __device__ __forceinline__ static void stage_octets(const float (&v)[8], unsigned char* octets, int at) {
    if constexpr (sizeof(V) == 2) {
      const u32 pairs[4] = {pack(v[0], v[1], V{}), pack(v[2], v[3], V{}), pack(v[4], v[5], V{}), pack(v[6], v[7], V{})};
      store_transposed(octets + at, pairs);
    } else {
#pragma unroll
      for (int q = 0; q < 8; ++q)
        *reinterpret_cast<float*>(octets + (at ^ q / 2 % 2 * 32 ^ q % 2 * 16) + (q / 4 * 8 + q % 2) * kRowBytes) = v[q];
    }
  }
  template <bool STAGED>
  __device__ __forceinline__ void store_product(const Accumulators& acc, int trip, unsigned char* staging, T* product,
                                                Tile tile, int batch, int features) const {
    constexpr int kOfTrip = TM / 8 / (STAGED ? Shape::template kTrips<T> : 1);
    const int at = staged_at<T>();
#pragma unroll
    for (int i = 0; i < kOfTrip; i += 2) {
      float v[8];
#pragma unroll
      for (int q = 0; q < 8; ++q) v[q] = acc[4 * (trip * kOfTrip + i) + q];
      if constexpr (STAGED) stage_octets<T>(v, staging + i * 8 * kRowBytes, at);
      else store_octets(v, i, product, tile, batch, features);
    }
  }

  // Coefficients for values that are stored minus the mean of the tile's rows.
  template <class Shared>
  __device__ __forceinline__ void take_coefficients(Shared& shared) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int j = feature + 8 * c;
      slope[c] = shared.finished_slope[j];
      shift[c] = slope[c] * (mean[c] - shared.mean[j]) + shared.finished_shift[j];
    }
  }

  // y, to be staged, in trips, or straight to memory; in evaluation with the coefficients that lie in shared memory.
  template <class Activation, bool EVALUATE, bool STAGED, class Shared>
  __device__ __forceinline__ void store_results(const Accumulators& acc, int trip, Shared& shared, int buffer, Y* y,
                                                Tile tile, int batch, int features) {
    if constexpr (EVALUATE) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        slope[c] = shared.slope[buffer][feature + 8 * c];
        shift[c] = shared.shift[buffer][feature + 8 * c];
      }
    }
    constexpr int kOfTrip = TM / 8 / (STAGED ? Shape::template kTrips<Y> : 1);
    const int at = staged_at<Y>();
#pragma unroll
    for (int i = 0; i < kOfTrip; i += 2) {
      float v[8];
#pragma unroll
      for (int q = 0; q < 8; ++q)
        v[q] = Activation::value(slope[q / 2 % 2] * acc[4 * (trip * kOfTrip + i) + q] + shift[q / 2 % 2]);
      if constexpr (STAGED) stage_octets<Y>(v, shared.staging[consumer] + i * 8 * kRowBytes, at);
      else store_octets(v, i, y, tile, batch, features);
    }
  }
};

}  // namespace gemmnorm
// What a consumer holds of a narrow tile: 64 rows and all TN columns, multiplied as x*W^T. A thread has rows own and own + 8,
// and of every eight columns two.
// Sums over lanes, and column sums of an accumulator tile (wgmma's layout of D: 64 rows over four warps), in a fixed order.

namespace gemmnorm {

// Halves the columns that a thread holds while adding up over the 8 lanes that share them.
template <int HALF>
__device__ __forceinline__ void exchange(const float (&v)[2 * HALF], float (&out)[HALF], int lane, int bit) {
  const bool upper = lane & bit;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float kept = upper ? v[HALF + i] : v[i], sent = upper ? v[i] : v[HALF + i];
    out[i] = kept + __shfl_xor_sync(~0u, sent, bit);
  }
}

// Sums of N numbers over the lanes that differ in BIT and above; each is written once.
template <int N, int BIT>
__device__ __forceinline__ void fold_lanes(const float (&v)[N], float* to, bool writes = true) {
  const int lane = threadIdx.x % 32;
  if constexpr (BIT == 32) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (writes) to[i] = v[i];
  } else if constexpr (N > 1) {
    float half[N / 2];
    exchange<N / 2>(v, half, lane, BIT);
    fold_lanes<N / 2, 2 * BIT>(half, to + (lane & BIT ? N / 2 : 0), writes);
  } else {
    const float sum[1] = {v[0] + __shfl_xor_sync(~0u, v[0], BIT)};
    fold_lanes<1, 2 * BIT>(sum, to, writes && !(lane & BIT));
  }
}

// Column sums of a consumer's 64 x BN values. `pair(i)` is the thread's sum over its two rows of its i-th column, which
// is column (i / 2)*8 + (lane % 4)*2 + i % 2. Shuffles over the lanes, at most 64 columns at a time so that registers
// suffice; shared memory over the warps; returned for columns 2*thread and 2*thread + 1.
template <int BN, class Pair>
__device__ __forceinline__ float2 column_sums(float (*sums)[BN], int consumer, const Pair& pair) {
  constexpr int kPart = BN < 64 ? BN : 64;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int first = ((lane & 4) ? kPart / 8 : 0) + ((lane & 8) ? kPart / 16 : 0) + ((lane & 16) ? kPart / 32 : 0);
#pragma unroll
  for (int part = 0; part < BN / kPart; ++part) {
    float v[kPart / 4], half[kPart / 8], quarter[kPart / 16], eighth[kPart / 32];
#pragma unroll
    for (int i = 0; i < kPart / 4; ++i) v[i] = pair(part * (kPart / 4) + i);
    exchange<kPart / 8>(v, half, lane, 4);
    exchange<kPart / 16>(half, quarter, lane, 8);
    exchange<kPart / 32>(quarter, eighth, lane, 16);
#pragma unroll
    for (int i = 0; i < kPart / 32; ++i) {
      const int k = first + i;
      sums[warp][part * kPart + (k / 2) * 8 + (lane % 4) * 2 + (k & 1)] = eighth[i];
    }
  }
  sync_threads(1 + consumer, 128);
  float2 total = make_float2(0.0f, 0.0f);
  if (2 * thread < BN) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(&sums[w][2 * thread]);
      total.x += part.x;
      total.y += part.y;
    }
  }
  return total;
}

}  // namespace gemmnorm

namespace gemmnorm {

// acc[4i] and acc[4i + 1] are of row own and columns 8i + 2*(lane % 4) and the next; then come those of row own + 8.
template <class T, class Y, int TM, int TN>
struct TileByRows {
  static_assert(TM == 2 * kGroupRows, "a group for each consumer");
  static constexpr int kMeeting = 256;  // threads that finish features together
  using Accumulators = float[TN / 2];

  int consumer, lane, thread, own;
  float2 mean;  // of the group, of columns 2*thread and the next

  __device__ __forceinline__ explicit TileByRows(int consumer_)
      : consumer(consumer_),
        lane(threadIdx.x % 32),
        thread(threadIdx.x % 128),
        own(threadIdx.x % 128 / 32 * 16 + lane / 4) {}

  template <class L, class R>
  __device__ __forceinline__ void store_of_group(const Features<L, R>& f, Tile tile, float2 v, float* to) const {
    const int j = tile.n * TN + 2 * thread, group = 2 * tile.m + consumer;
    if (2 * thread < TN && j < f.features && f.rows(group))
      *reinterpret_cast<float2*>(to + static_cast<i64>(group) * f.features + j) = v;
  }

  // The mean of the group. Rows beyond the batch are zero in the accumulators.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_means(const Features<L, R>& f, Shared& shared, Tile tile, const Accumulators& acc) {
    const int rows = max(f.rows(2 * tile.m + consumer), 1);
    mean = column_sums<TN>(shared.sums[consumer], consumer,
                           [&](int i) { return acc[i / 2 * 4 + i % 2] + acc[i / 2 * 4 + 2 + i % 2]; });
    mean.x /= rows;
    mean.y /= rows;
    if (2 * thread < TN) *reinterpret_cast<float2*>(&shared.slope[consumer][2 * thread]) = mean;
    sync_threads(1 + consumer, 128);
    store_of_group(f, tile, mean, f.group_mean);
  }

  // Takes it off, rounds to T, and sums up the squares of what is left: M2. To `staging`, where that is not null.
  template <bool ONE_BLOCK, class Shared, class L, class R>
  __device__ __forceinline__ void take_squares(const Features<L, R>& f, Shared& shared, Tile tile, Accumulators& acc,
                                               unsigned char* staging) const {
    const int rows = f.batch - (2 * tile.m + consumer) * kGroupRows;  // or more than the group has, or none
#pragma unroll
    for (int i = 0; i < TN / 8; ++i) {
      const float2 m = *reinterpret_cast<const float2*>(&shared.slope[consumer][i * 8 + (lane % 4) * 2]);
      rounded_pair(acc[4 * i], acc[4 * i + 1], m, T{});
      rounded_pair(acc[4 * i + 2], acc[4 * i + 3], m, T{});
      if (i % 8 == 7) keep_order();
    }
    if (rows < kGroupRows) {  // rows beyond the batch count for nothing
#pragma unroll
      for (int i = 0; i < TN / 8; ++i) {
        if (own >= rows) acc[4 * i] = acc[4 * i + 1] = 0.0f;
        if (own + 8 >= rows) acc[4 * i + 2] = acc[4 * i + 3] = 0.0f;
      }
    }
    const float2 m2 = column_sums<TN>(shared.sums[consumer], consumer, [&](int i) {
      const float a = acc[i / 2 * 4 + i % 2], b = acc[i / 2 * 4 + 2 + i % 2];
      return a * a + b * b;
    });
    sync_threads(1 + consumer, 128);  // the sums are read before the next tile's are written
    store_of_group(f, tile, m2, f.group_m2);
    if (ONE_BLOCK && 2 * thread < TN) *reinterpret_cast<float2*>(&shared.shift[consumer][2 * thread]) = m2;
    if (!staging) return;
#pragma unroll
    for (int i = 0; i < TN / 8; ++i)
      stage_pairs<T>(staging, own, i, make_float2(acc[4 * i], acc[4 * i + 1]), make_float2(acc[4 * i + 2], acc[4 * i + 3]));
  }

  // The i-th pairs of columns straight to memory.
  template <class V>
  __device__ __forceinline__ void store_pairs(float2 low, float2 high, int i, V* to, Tile tile, int batch,
                                              int features) const {
    const int column = tile.n * TN + i * 8 + lane % 4 * 2;
    const i64 row = static_cast<i64>(2 * tile.m + consumer) * kGroupRows + own;
    if (column >= features) return;
    if (row < batch) store_pair(to + row * features + column, low);
    if (row + 8 < batch) store_pair(to + (row + 8) * features + column, high);
  }
  template <bool STAGED>
  __device__ __forceinline__ void store_product(const Accumulators& acc, int, unsigned char*, T* product, Tile tile,
                                                int batch, int features) const {
#pragma unroll
    for (int i = 0; i < TN / 8; ++i)
      store_pairs(make_float2(acc[4 * i], acc[4 * i + 1]), make_float2(acc[4 * i + 2], acc[4 * i + 3]), i, product, tile,
                  batch, features);
  }

  // Coefficients for values that are stored minus their group's mean.
  template <class Shared>
  __device__ __forceinline__ void take_coefficients(Shared& shared) const {
    if (2 * thread >= TN) return;
    const float2 m = *reinterpret_cast<const float2*>(&shared.mean[2 * thread]);
    const float2 slope = *reinterpret_cast<const float2*>(&shared.finished_slope[2 * thread]);
    const float2 shift = *reinterpret_cast<const float2*>(&shared.finished_shift[2 * thread]);
    *reinterpret_cast<float2*>(&shared.slope[consumer][2 * thread]) = slope;
    *reinterpret_cast<float2*>(&shared.shift[consumer][2 * thread]) =
        make_float2(slope.x * (mean.x - m.x) + shift.x, slope.y * (mean.y - m.y) + shift.y);
  }

  // y, to be staged or straight to memory, with coefficients in shared memory: the consumer's, in evaluation the tile's.
  template <class Activation, bool EVALUATE, bool STAGED, class Shared>
  __device__ __forceinline__ void store_results(const Accumulators& acc, int, Shared& shared, int buffer, Y* y, Tile tile,
                                                int batch, int features) const {
    constexpr int kPairs = 4;
    const int at = EVALUATE ? buffer : consumer;
#pragma unroll
    for (int i0 = 0; i0 < TN / 8; i0 += kPairs) {
      float2 slope[kPairs], shift[kPairs];
      load_pairs(&shared.slope[at][i0 * 8], slope);
      load_pairs(&shared.shift[at][i0 * 8], shift);
#pragma unroll
      for (int q = 0; q < kPairs; ++q) {
        const int i = i0 + q;
        const float2 a = make_float2(Activation::value(slope[q].x * acc[4 * i] + shift[q].x),
                                     Activation::value(slope[q].y * acc[4 * i + 1] + shift[q].y));
        const float2 b = make_float2(Activation::value(slope[q].x * acc[4 * i + 2] + shift[q].x),
                                     Activation::value(slope[q].y * acc[4 * i + 3] + shift[q].y));
        if constexpr (STAGED) {
          stage_pairs<Y>(shared.staging[consumer], own, i, a, b);
        } else {
          store_pairs(a, b, i, y, tile, batch, features);
        }
      }
      keep_order();
    }
  }
};

}  // namespace gemmnorm
// Tiles that wait for the rest of their panel in shared memory: all rows of a panel are worked on by one wave of blocks, so
// the wait is short, and nothing but the result (and the product where it is kept) goes to memory.

namespace gemmnorm {

// One warp normalises 64 x 64 staged values. A y of the product's size takes their place and leaves by the copy engine.
template <class T, class Y, class Activation, class L, class R>
__device__ __forceinline__ void normalize_staged(const Features<L, R>& f, unsigned char* staged, const TensorMap& map_y,
                                                 Y* y, int first_row, int first_column) {
  constexpr int N = 16 / sizeof(T), kChunks = kRowBytes / 16;
  const int lane = threadIdx.x % 32, chunk = lane % kChunks, group = first_row / kGroupRows;
  const int rows = min(f.batch - first_row, kGroupRows);
  const int column = first_column + chunk * N;
  if (column < f.features) {
    float slope[N], shift[N];
    group_coefficients(f, group, column, slope, shift);
#pragma unroll 4
    for (int row = lane / kChunks; row < rows; row += 32 / kChunks) {
      unsigned char* at = staged + row * kRowBytes + ((chunk ^ row) % 8) * 16;
      const Vec<T, N> a = *reinterpret_cast<const Vec<T, N>*>(at);
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = Activation::value(slope[i] * a.value(i) + shift[i]);
      if constexpr (sizeof(Y) == sizeof(T)) {
        store<Y, N>(reinterpret_cast<Y*>(at), out);
      } else {
        store<Y, N>(y + static_cast<i64>(first_row + row) * f.features + column, out);
      }
    }
  }
  if constexpr (sizeof(Y) == sizeof(T)) {
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      copy_to_global(map_y, staged, first_column, first_row);
      commit_copies();
    }
  }
}

// One warp of each block merges its share of a panel's columns, for tiles that have left the registers by then.
template <int TN, class L, class R>
__device__ __forceinline__ void merge_panels(const Features<L, R>& f, const Raster& raster, u32* counters, int stored) {
  int lanes = 1;  // to a column: as many as leave a column or more to each block of the panel
  while (lanes < 32 && raster.tiles_m * (32 / lanes) > TN) lanes *= 2;
  const int lane = threadIdx.x % 32, columns = 32 / lanes;
#pragma unroll 1
  for (int t = blockIdx.x; t < raster.tiles(); t += gridDim.x) {
    const Tile tile = raster.at(t);
    if (!raster.has_stored(tile.n, stored) && f.batch <= kDirectRows) continue;
#pragma unroll 1
    for (int c = tile.m * columns; c < TN; c += raster.tiles_m * columns) {
      const int j = tile.n * TN + c + lane / lanes, existing = min(j, f.features - 1);
      const auto own = f.own(existing);
      if (lane == 0) wait_until(&counters[kPanels + tile.n], 2 * raster.tiles_m);
      __syncwarp();
      const auto load = [&](bool of_m2, int g) {
        return load_l2((of_m2 ? f.group_m2 : f.group_mean) + f.at(g, existing));
      };
      const Column merged = merge_column<8>(f, lane % lanes, lanes, load);
      if (lane % lanes == 0 && j < f.features) f.finish(j, own, merged.mean, merged.m2);
      __syncwarp();
      if (lane == 0) add_release(&counters[kPanels + raster.tiles_n + tile.n], columns);
    }
  }
}

// What a warp does for a consumer: it stores the product where that is kept, says that the statistics of what is staged are
// there, and normalises it when the panel is merged. Of a tile that stays in registers, as the
// block's last does, the consumer does most of that itself.
template <class T, class Y, int TN, class Activation, bool STAGED, bool WAITS, class Shared, class L, class R>
__device__ __forceinline__ void serve_consumer(const Features<L, R>& f, const Raster& raster, Shared& shared, int consumer,
                                               const TensorMap& map_product, const TensorMap& map_y, Y* y, u32* counters,
                                               int stored, int keep_product) {
  using Shape = typename Shared::Shape;
  const int lane = threadIdx.x % 32;
  unsigned char* staging = shared.staging[consumer];
  u32 parity = 0;
#pragma unroll 1
  for (int t = blockIdx.x; t < raster.tiles(); t += gridDim.x) {
    const Tile tile = raster.at(t);
    const bool later = WAITS && t < stored;
    u32* complete = &counters[kPanels + tile.n];
    const int trips = STAGED && keep_product ? Shape::template kTrips<T> : 1;
#pragma unroll 1
    for (int trip = 0; trip < trips; ++trip, parity ^= 1) {
      barrier_wait(&shared.staged[consumer], parity);
      __syncwarp();  // nobody waits for this phase any more
      if (lane > 0) continue;
      if (STAGED && keep_product) store_staged<Shape, T>(map_product, staging, tile, consumer, trip, f.batch);
      if (trip == 0) add_release(complete, 1);
      if (STAGED) wait_copies_read();
      if (!later) barrier_arrive(&shared.unstaged[consumer]);
    }
    if constexpr (WAITS) {
      if (later) {
        if (lane == 0) wait_until(complete + raster.tiles_n, TN);
        __syncwarp();
#pragma unroll 1
        for (int part = 0; part < Shape::kParts && Shape::row(tile, consumer, part) < f.batch; ++part)
          normalize_staged<T, Y, Activation>(f, staging + part * kPartBytes, map_y, y, Shape::row(tile, consumer, part),
                                             Shape::column(tile, consumer, part));
        __syncwarp();  // all have read what is staged
        if (lane == 0) {
          wait_copies_read();
          barrier_arrive(&shared.unstaged[consumer]);
        }
        __syncwarp();
      }
    }
  }
}

}  // namespace gemmnorm

namespace gemmnorm {

// What a consumer holds of a tile.
template <bool BY_FEATURES>
struct Held {
  template <class T, class Y, int TM, int TN>
  using Tile = TileByFeatures<T, Y, TM, TN>;
};
template <>
struct Held<false> {
  template <class T, class Y, int TM, int TN>
  using Tile = TileByRows<T, Y, TM, TN>;
};

template <class OP, class T, class Y, class L, class R, int TM, int TN, int STAGES, int SHARED_BYTES, Finish FINISH,
          class Activation>
__device__ __forceinline__ void fused_gemm(const TensorMap& map_x /* [batch, in_features] */,
    const TensorMap& map_weight /* [features, in_features] */, const TensorMap& map_product /* [batch, features] */,
    const TensorMap& map_y /* [batch, features] */, T* product /* [batch, features]: minus group_mean */,
    Y* y /* [batch, features]; the product's memory where that is not kept */, const L* bias /* [features] or null */,
    const L* scale /* [features] or [1] or null */, int scale_stride, float scale_value,
    R* running_mean /* [features] or null */, R* running_var /* [features] or null */,
    i64* batches_tracked /* [1] or null */, const R* bn_weight /* [features] or null */,
    const R* bn_bias /* [features] or null */, float momentum, float eps, float* group_mean /* [groups, features] */,
    float* group_m2 /* [groups, features] */, float* mean /* [features] */, float* rstd /* [features] */,
    float* merged_slope /* [features] */, float* merged_shift /* [features] */,
    u32* counters /* zero, and left zero */,
    const float* x /* [batch, in_features], where the operand is made of it here: cast or split */,
    const float* weight /* [features, in_features], likewise */,
    typename Operand<OP>::Ahead::Element* operand_x /* see cast_rows and split_rows, likewise */,
    typename Operand<OP>::Ahead::Element* operand_weight /* likewise */, int* x_exponents /* [batch], of split operands */,
    int* weight_exponents /* [features], likewise */, float* weight_largest /* [features], likewise */,
    float* weight_total /* [features], likewise */, const u64* weight_checksums /* [features] or null, likewise */,
    u32* most /* [4], likewise */, int* flagged /* [features], likewise */, int x_rows, int weight_rows /* made already, or */,
    int begun /* times kCastColumns of them */, int group_panels, int in_registers, int stream_x, int keep_product, int batch,
    int in_features, int features) {
  constexpr int kTileK = kRowBytes / Operand<OP>::kSize;
  using Shape = TileShape<TM, TN>;
  constexpr int kWidth = Shape::kWidth, kAccumulators = kWidth / 2;
  constexpr int kPlanes = Operand<OP>::kPlanes;
  constexpr bool kSplit = kPlanes == 2, kMoveRegisters = kWidth * kPlanes == 256;
  // Each of the 384 threads starts with 168 registers; the widest tiles need more in the consumers.
  constexpr bool kSplitsToo = kSplit && (FINISH == Finish::kPersistent || FINISH == Finish::kEvaluate);
  constexpr int kFeeder = kSplit && !kSplitsToo ? 40 : kSplit && FINISH == Finish::kEvaluate ? 72 : Operand<OP>::kFeeder;
  constexpr int kConsumer = (3 * 168 - kFeeder) / 16 * 8;
  using Element = typename Operand<OP>::Element;
  constexpr bool kStaged = !kSplit && (Shape::kByFeatures || (sizeof(T) == 2 && TN >= 64));  // on the way out
  constexpr bool kStagedY = kStaged && (Shape::kByFeatures || sizeof(Y) == 2);
  constexpr int kTrips = kStaged ? Shape::template kTrips<T> : 1, kTripsY = kStagedY ? Shape::template kTrips<Y> : 1;
  constexpr bool kWaits = kStaged && sizeof(T) == 2;  // a tile has room to wait in shared memory
  constexpr bool kWhole = FINISH == Finish::kWholePanels, kLater = FINISH == Finish::kPersistent || (kWhole && kWaits);
  constexpr int kAhead = 4;  // partial results in flight
  constexpr int kMergeAhead = kSplit ? 1 : 4;  // loads in flight while a warp merges or normalises
  using Shared = GemmShared<TM, TN, STAGES, kPlanes, kStaged, kSplitsToo>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "plan.py and GemmShared disagree");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  const Features<L, R> f = {bias,      scale,   scale_stride, scale_value,     running_mean, running_var,
                            bn_weight, bn_bias, batches_tracked, momentum,     eps,          group_mean,
                            group_m2,  mean,    rstd,         merged_slope,    merged_shift,
                            {most, weight_largest, weight_total, flagged}, batch, features,
                            (batch + Shape::kMeanRows - 1) / Shape::kMeanRows, Shape::kMeanRows};
  const Raster raster = {(batch + TM - 1) / TM, (features + TN - 1) / TN, group_panels};
  const int chunks = kSplit ? 1 : (in_features + kCastColumns - 1) / kCastColumns;  // of rows that are made here
  const RowsAhead rows_ahead = {counters + kPanels + 2 * raster.tiles_n, min(x_rows, batch), weight_rows, batch, in_features,
                                features, chunks, kSplit || !x ? chunks : begun, kSplit || !weight ? chunks : begun};
  typename Operand<OP>::Ahead ahead = {rows_ahead, x, weight, operand_x, operand_weight};
  if constexpr (kSplit) {
    ahead.x_exponents = x_exponents, ahead.weight_exponents = weight_exponents;
    ahead.weight_largest = weight_largest, ahead.weight_total = weight_total;
    ahead.most = most, ahead.weight_checksums = weight_checksums;
  }
  const bool makes_rows = kSplitsToo || (sizeof(T) == 2 && FINISH != Finish::kOneBlock && (x || weight));
  constexpr bool kTrains = FINISH != Finish::kEvaluate && FINISH != Finish::kStatistics;
  const bool resets = kTrains || makes_rows;  // the counters
  const int tiles = raster.tiles(), steps = (in_features + kTileK - 1) / kTileK;
  // Tiles that leave the registers and are normalised later; the rest, the last of each block, stay in registers.
  const int stored = kLater && !in_registers ? max(tiles - static_cast<int>(gridDim.x), 0) : 0;
  const int warpgroup = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    prefetch_map(map_x);
    prefetch_map(map_weight);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 2);
    }
    for (int c = 0; c < 2; ++c) {
      barrier_init(&shared.staged[c], 128);
      barrier_init(&shared.unstaged[c], 1);
      barrier_init(&shared.known[c], 32);
      barrier_init(&shared.used[c], 256);
    }
    barrier_init(&shared.left, kGemmThreads / 32 - 1);
    if constexpr (kSplitsToo)
      for (int p = 0; p < kWorkers * kPieces; ++p) barrier_init(&shared.rings[p / kPieces].arrived[p % kPieces], 1);
    fence_barrier_init();
    fence_async_shared();
  }
  __syncthreads();
  wait_for_previous();
  allow_next();
  if (FINISH == Finish::kStatistics && batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *batches_tracked += 1;

  if (warpgroup == 0) {
    if (kMoveRegisters) release_registers<kFeeder>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0 && lane == 0) {  // feeds the ring
      // Of a box of x. In training rows beyond the batch have to be zero; else nobody looks at them.
      const int rows = FINISH == Finish::kEvaluate ? min(TM, (batch + 7) / 8 * 8) : TM;
      const u64 x_policy = stream_x ? kEvictFirst : kEvictNormal;
      int stage = 0;
      u32 parity = 1;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = raster.at(t);
        for (int k = 0; k < steps; ++k) {
          constexpr int kStepsOfChunk = Operand<OP>::Ahead::kStepsOfChunk;
          if (makes_rows && k % kStepsOfChunk == 0) ahead.template wait_for<TM, TN>(raster, tile, k / kStepsOfChunk);
          barrier_wait(&shared.empty[stage], parity);
          barrier_expect(&shared.full[stage], kPlanes * (rows + TN) * kRowBytes);
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) {
            const int column = (k * kPlanes + p) * kTileK;
            copy_to_shared(shared.x[stage][p], map_x, &shared.full[stage], column, tile.m * TM, x_policy);
            copy_to_shared(shared.weight[stage][p], map_weight, &shared.full[stage], column, tile.n * TN, kEvictNormal);
          }
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    } else if (warp == 1 && FINISH == Finish::kEvaluate) {  // computes coefficients, a tile ahead of the multiplications
      int buffer = 0;
      u32 parity = 1;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = raster.at(t);
        barrier_wait(&shared.used[buffer], parity);
        evaluation_coefficients<TN>(f, tile.n * TN, tile.m == 0, shared.slope[buffer], shared.shift[buffer]);
        barrier_arrive(&shared.known[buffer]);
        buffer ^= 1;
        if (buffer == 0) parity ^= 1;
      }
    } else if (warp == 1 && !kWhole) {  // stores staged tiles, counts what is complete
      u32 parity = 0;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = raster.at(t);
        const bool later = FINISH == Finish::kStatistics || t < stored, leaves = later || keep_product;
        const u64 kept = FINISH == Finish::kPersistent && later ? kEvictLast : kEvictNormal;  // until it is normalised
        for (int trip = 0; trip < (leaves ? kTrips : 1); ++trip, parity ^= 1) {
          for (int c = 0; c < 2; ++c) {
            barrier_wait(&shared.staged[c], parity);
            __syncwarp();  // nobody waits for this phase any more
            if (lane > 0) continue;
            if (kStaged && leaves) store_staged<Shape, T>(map_product, shared.staging[c], tile, c, trip, batch, kept);
            // Of a tile that stays in registers nobody reads the product: its statistics are all that others wait for.
            if (FINISH == Finish::kPersistent && !later && trip == 0) add_release(&counters[kPanels + tile.n], 1);
            if (kStaged) wait_copies_read();
            barrier_arrive(&shared.unstaged[c]);
            if (FINISH == Finish::kPersistent && later && trip == kTrips - 1) {
              if (kStaged) {
                wait_copies();
                fence_async_global();
              }
              add_release(&counters[kPanels + tile.n], 1);
            }
          }
        }
      }
    } else if (warp == 1 && kWaits) {  // of whole panels
      merge_panels<TN>(f, raster, counters, stored);
    } else if (warp >= 2) {
      if constexpr (kSplitsToo) ahead.template split<TM, TN>(shared.rings[warp - 2], raster, warp - 2);
      if constexpr (kSplitsToo && FINISH == Finish::kEvaluate) ahead.template find_features<TM>(f, raster, warp - 2);
      if constexpr (sizeof(T) == 2) {
        if (makes_rows) ahead.template cast<TM, TN>(raster, warp - 2);
      }
      if constexpr (kWhole) {
        serve_consumer<T, Y, TN, Activation, kStaged, kWaits>(f, raster, shared, warp - 2, map_product, map_y, y, counters,
                                                              stored, keep_product);
      } else if (FINISH == Finish::kPersistent) {
        take_units<T, Y, TM, TN, Activation, kMergeAhead>(f, raster, product, y, counters, stored);
      }
    }
    if (resets && warp > 0) leave(shared.left);
  } else {
    if (kMoveRegisters) claim_registers<kConsumer>();
    const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32;
    typename Held<Shape::kByFeatures>::template Tile<T, Y, TM, TN> held(consumer);
    int stage = 0;
    u32 parity = 0, staging_parity = 1;
    int buffer = 0;
    u32 known_parity = 0;
    float acc[kAccumulators];
    // Of split operands: high*high of one stage, which `acc` adds up because the tensor cores truncate; and both products
    // with a low part, in units of 2^-11, whose truncation is far below.
    float part[kSplit ? kAccumulators : 1], cross[kSplit ? kAccumulators : 1];

    // Each consumer finishes half of a tile's columns, kLanes threads to a column. Of a narrow tile, which leaves registers
    // for it, it reads what that takes before the multiplications.
    constexpr int kLanes = 256 / TN;
    constexpr bool kEarly = (FINISH == Finish::kOneBlock || kWhole) && TN <= 64;

    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      typename Features<L, R>::Own early = {};
      if (kEarly) early = f.own(min(raster.at(t).n * TN + consumer * (TN / 2) + thread / kLanes, features - 1));
      if (kSplit) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.0f;
      }
      for (int k = 0; k < steps; ++k) {
        barrier_wait(&shared.full[stage], parity);
        wgmma_fence();
        const auto shares = [&](int plane) { return Shape::kByFeatures ? shared.weight[stage][plane] : shared.x[stage][plane]; };
        const auto whole = [&](int plane) { return Shape::kByFeatures ? shared.x[stage][plane] : shared.weight[stage][plane]; };
        const u64 a = matrix_descriptor(shares(0) + consumer * 64 * kRowBytes), b = matrix_descriptor(whole(0));
        if constexpr (kSplit) {
          const u64 a_low = matrix_descriptor(shares(1) + consumer * 64 * kRowBytes), b_low = matrix_descriptor(whole(1));
          multiply_stage<kWidth>(part, cross, a, a_low, b, b_low, k == 0);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            Wgmma<Element, kWidth>::run(acc, a + i * kDescriptorStep, b + i * kDescriptorStep, (k | i) ? 1 : 0);
          wgmma_commit();
        }
        if (kSplit && k == 0) {  // exponents; `sums` is free until the statistics are taken
          const Tile tile = raster.at(t);
          const int n = (Shape::kByFeatures ? tile.m * TM : tile.n * TN) + thread;
          const int own = (Shape::kByFeatures ? tile.n * TN : tile.m * TM) + consumer * 64 + thread;
          const int* exponents = Shape::kByFeatures ? x_exponents : weight_exponents;
          const int* of_own = Shape::kByFeatures ? weight_exponents : x_exponents;
          if (thread < kWidth) {
            const PowerOfTwo p = power_of_two(n < (Shape::kByFeatures ? batch : features) ? load_l2(exponents + n) : 0);
            shared.sums[consumer][0][thread] = p.first;
            shared.sums[consumer][1][thread] = p.second;
          }
          if (thread < 64)
            shared.exponents[consumer][thread] = own < (Shape::kByFeatures ? features : batch) ? load_l2(of_own + own) : 0;
        }
        if (k > 0 || kSplit) wgmma_wait<1>();
        if constexpr (kSplit) {
#pragma unroll
          for (int i = 0; i < kAccumulators; ++i) acc[i] += part[i];
        }
        if (k > 0) {
          if (thread == 0) barrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);
        }
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      wgmma_wait<0>();
      if (thread == 0) barrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);

      const Tile tile = raster.at(kSplit ? computed_anew(t) : t);
      if constexpr (kSplit) {  // back to the scale of x and W
        sync_threads(1 + consumer, 128);
        const int* own = &shared.exponents[consumer][thread / 32 * 16 + lane / 4];
        const PowerOfTwo low = power_of_two(own[0]), high = power_of_two(own[8]);
#pragma unroll
        for (int i = 0; i < kWidth / 8; ++i) {
          const int c = i * 8 + (lane % 4) * 2;
          const float2 first = *reinterpret_cast<const float2*>(&shared.sums[consumer][0][c]);
          const float2 second = *reinterpret_cast<const float2*>(&shared.sums[consumer][1][c]);
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const PowerOfTwo across = {q % 2 ? first.y : first.x, q % 2 ? second.y : second.x};
            acc[4 * i + q] = times(times(acc[4 * i + q] + kLowUnit * cross[4 * i + q], q < 2 ? low : high), across);
          }
          if (i % 4 == 3) keep_order();
        }
        sync_threads(1 + consumer, 128);
      }

      constexpr bool kOneBlock = FINISH == Finish::kOneBlock;
      bool finish_here = FINISH == Finish::kEvaluate, finish_feature_here = false;
      const int finished = consumer * (TN / 2) + thread / kLanes, at_column = tile.n * TN + finished;
      if constexpr (FINISH != Finish::kEvaluate) {
        if ((kOneBlock || kWhole) && kStagedY && thread == 0) wait_copies_read();  // of the tile before
        held.template take_means<kOneBlock>(f, shared, tile, acc);
        finish_here = kOneBlock || ((kWhole || FINISH == Finish::kPersistent) && t >= stored);
        const bool leaves = !finish_here || keep_product, stages = kStaged && leaves;  // the product
        unsigned char* staging = shared.staging[consumer];
        // The staging memory is free. No consumer gets two tiles ahead of the warp that serves it.
        const auto wait_for_staging = [&] {
          barrier_wait(&shared.unstaged[consumer], staging_parity);
          if (stages && (kOneBlock || kWhole) && kStagedY) sync_threads(1 + consumer, 128);
        };
        if (kWaits && stages) wait_for_staging();
        held.template take_squares<kOneBlock>(f, shared, tile, acc, kWaits && stages ? staging : nullptr);
        if (!(kWaits && stages)) wait_for_staging();
#pragma unroll
        for (int trip = 0; trip < kTrips; ++trip) {
          if (trip > 0 && !leaves) break;
          if (trip > 0) barrier_wait(&shared.unstaged[consumer], staging_parity);
          staging_parity ^= 1;
          if (!kWaits && leaves) held.template store_product<kStaged>(acc, trip, staging, product, tile, batch, features);
          if (kStaged) fence_async_shared();
          barrier_arrive(&shared.staged[consumer]);
        }

        if (finish_here) {
          const bool mine = at_column < features, direct = !kLater || f.batch <= kDirectRows;
          const auto own = kEarly ? early : f.own(mine ? at_column : 0);
          if (kOneBlock) {
            sync_threads(Shape::kByFeatures ? 1 + consumer : 3, held.kMeeting);
          } else {
            if (thread == 0) {
              if (direct) wait_until(&counters[kPanels + tile.n], 2 * raster.tiles_m);
              else wait_until(&counters[kPanels + raster.tiles_n + tile.n], TN);
            }
            sync_threads(1 + consumer, 128);
          }
          float centre = 0.0f, r = 0.0f;
          if (direct) {
            const auto load_group = [&](bool of_m2, int g) {
              if (kOneBlock) return (of_m2 ? shared.shift : shared.slope)[g][finished];
              return load_l2((of_m2 ? group_m2 : group_mean) + f.at(g, mine ? at_column : 0));
            };
            Column merged;
            if constexpr (kOneBlock && Shape::kByFeatures) merged = {load_group(false, 0), load_group(true, 0)};
            else merged = merge_column<kAhead>(f, computed_anew(thread % kLanes), kLanes, load_group);
            centre = merged.mean;
            r = 1.0f / sqrtf(own.s * own.s * merged.m2 / batch + eps);
            shared.squares[finished] = merged.m2;
            const bool mine_to_finish = !kLater || !raster.has_stored(tile.n, stored);
            finish_feature_here = mine && thread % kLanes == 0 && tile.m == 0 && mine_to_finish;
          } else if (mine) {
            centre = load_l2(mean + at_column);
            r = load_l2(rstd + at_column);
          }
          if (thread % kLanes == 0) {
            shared.mean[finished] = centre;
            shared.finished_slope[finished] = own.slope * r;
            shared.finished_shift[finished] = own.shift;
          }
          sync_threads(Shape::kByFeatures ? 1 + consumer : 3, held.kMeeting);
          held.take_coefficients(shared);
          if (kStagedY) barrier_wait(&shared.unstaged[consumer], staging_parity);  // the product has left its memory
        }
      }
      if (finish_here) {
        constexpr bool kEvaluate = FINISH == Finish::kEvaluate;
        const int evaluated = buffer;
        if (kEvaluate) {
          barrier_wait(&shared.known[buffer], known_parity);
          buffer ^= 1;
          if (buffer == 0) known_parity ^= 1;
        }
#pragma unroll
        for (int trip = 0; trip < kTripsY; ++trip) {
          if (kStagedY && (kEvaluate || trip > 0) && thread == 0) wait_copies_read();
          sync_threads(1 + consumer, 128);  // the coefficients are there, the staging memory is free
          held.template store_results<Activation, kEvaluate, kStagedY>(acc, trip, shared, evaluated, y, tile, batch, features);
          if (kEvaluate && trip == kTripsY - 1) barrier_arrive(&shared.used[evaluated]);
          if (kStagedY) fence_async_shared();
          sync_threads(1 + consumer, 128);
          if (kStagedY && thread == 0)
            store_staged<Shape, Y>(map_y, shared.staging[consumer], tile, consumer, trip, batch);
        }
        if (finish_feature_here)  // nobody waits
          f.finish(at_column, kEarly ? early : f.own(at_column), shared.mean[finished], shared.squares[finished]);
      }
    }
    if (FINISH == Finish::kPersistent) take_units<T, Y, TM, TN, Activation, kMergeAhead>(f, raster, product, y, counters, stored);
    if (resets) leave(shared.left);
    if (kStagedY && thread == 0) wait_copies_read();
  }

  if (FINISH == Finish::kOneBlock && momentum >= 0.0f) {  // no block waits for another, none reads the count of batches
    if (batches_tracked && blockIdx.x == 0 && threadIdx.x == 0) *batches_tracked += 1;
  } else if (resets && threadIdx.x == 0) {
    // When nobody in the block will look at the counters again, the last block leaves them as it found them, and counts the
    // batch. Meanwhile the results leave.
    barrier_wait(&shared.left, 0);
    __threadfence();
    if (atomicAdd(&counters[kDone], 1u) == gridDim.x - 1) {
      __threadfence();
      const int used = kPanels + 2 * raster.tiles_n + (makes_rows ? (raster.tiles_n + kBands) * chunks : 0);
      for (int i = 0; i < used; ++i) counters[i] = 0;
      if (kTrains && batches_tracked) *batches_tracked += 1;
    }
  }
}

}  // namespace gemmnorm
// Features whose split operands were not enough, once more in float32 arithmetic; nothing where there are none. In
// training whoever merges a feature's statistics puts it on the list (Guard), in evaluation who splits the weight does
// (split_ahead.cuh).

namespace gemmnorm {

// A tile of their product: 128 rows of x by 64 features of the list, K in steps of 16, from float4 to float4.
constexpr int kAgainRows = 128, kAgainColumns = 64, kAgainStep = 16;
constexpr int kAgainPart = 128;  // of K that is added up by itself: less error than one long sum

struct AgainShared {
  alignas(16) float x[kAgainStep][kAgainRows + 4];  // a word of K to a row: what is read together lies together
  alignas(16) float weight[kAgainStep][kAgainColumns + 4];
};

// This thread's 8 x 4 of the tile's sums, rows 8*(thread / 16) and columns 4*(thread % 16) on. `list` has `count` features.
__device__ __forceinline__ void multiply_tile(const float* x, const float* weight, const int* list, int count,
                                              int first_row, AgainShared& shared, float (&sum)[8][4], int batch,
                                              int in_features) {
  constexpr int kWords = kAgainStep / 4, kPerX = kAgainRows * kWords / kThreads;
  static_assert(kAgainColumns * kWords == kThreads, "a thread loads one word of the weight");
  const int thread = threadIdx.x, word = thread % kWords * 4, row = thread / kWords;
  const float* of_weight = weight + static_cast<i64>(list[min(row, count - 1)]) * in_features;
  const float* of_x[kPerX];
#pragma unroll
  for (int i = 0; i < kPerX; ++i)
    of_x[i] = x + static_cast<i64>(min(first_row + row + i * (kAgainRows / kPerX), batch - 1)) * in_features;
  float part[8][4] = {};
#pragma unroll
  for (int r = 0; r < 8; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[r][c] = 0.0f;
  for (int k0 = 0; k0 < in_features; k0 += kAgainStep) {
    const bool inside = k0 + word < in_features;
    const Vec<float, 4> w = inside ? load<float, 4>(of_weight + k0 + word) : Vec<float, 4>{};
    Vec<float, 4> a[kPerX];
#pragma unroll
    for (int i = 0; i < kPerX; ++i) a[i] = inside ? load<float, 4>(of_x[i] + k0 + word) : Vec<float, 4>{};
    __syncthreads();  // the step before is read
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      shared.weight[word + q][row] = w.at[q];
#pragma unroll
      for (int i = 0; i < kPerX; ++i) shared.x[word + q][row + i * (kAgainRows / kPerX)] = a[i].at[q];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kAgainStep; ++k) {
      const Vec<float, 4> low = load<float, 4>(&shared.x[k][thread / 16 * 8]);
      const Vec<float, 4> high = load<float, 4>(&shared.x[k][thread / 16 * 8 + 4]);
      const Vec<float, 4> b = load<float, 4>(&shared.weight[k][thread % 16 * 4]);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          part[r][c] += low.at[r] * b.at[c];
          part[r + 4][c] += high.at[r] * b.at[c];
        }
    }
    if ((k0 + kAgainStep) % kAgainPart && k0 + kAgainStep < in_features) continue;
#pragma unroll
    for (int r = 0; r < 8; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[r][c] += part[r][c];
        part[r][c] = 0.0f;
      }
  }
}

// Sum over a block, in a fixed order, handed to every thread.
__device__ __forceinline__ float sum_over_block(float value, float* shared /* [kThreads / 32] */) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) value += __shfl_xor_sync(~0u, value, bit);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) sum += shared[w];
  return sum;
}

// The product's column j, in y -> its statistics, where they are the batch's, and y itself. Other blocks wrote it.
template <bool TRAINING, class Activation, class L, class R>
__device__ __forceinline__ void normalize_column(const Features<L, R>& f, int j, float* product, float* y,
                                                 float* shared /* [kThreads / 32] */) {
  const float s = f.s(j), b = f.b(j);
  float centre, r;
  if (TRAINING) {
    float sum = 0.0f;
    for (int row = threadIdx.x; row < f.batch; row += kThreads) sum += load_l2(y + static_cast<i64>(row) * f.features + j);
    centre = sum_over_block(sum, shared) / f.batch;
    sum = 0.0f;
    for (int row = threadIdx.x; row < f.batch; row += kThreads) {
      const float deviation = load_l2(y + static_cast<i64>(row) * f.features + j) - centre;
      sum += deviation * deviation;
    }
    const float variance = s * s * sum_over_block(sum, shared) / f.batch;
    r = 1.0f / sqrtf(variance + f.eps);
    if (threadIdx.x == 0) {  // the counter counts this batch already
      const float batches = f.batches_tracked ? static_cast<float>(*f.batches_tracked) : 0.0f;
      finish_feature(j, centre, variance, s, b, batches, f.running_mean, f.running_var, value_or(f.running_mean, j, 0.0f),
                     value_or(f.running_var, j, 0.0f), f.momentum, f.eps, f.mean, f.rstd, f.batch);
    }
    for (int g = threadIdx.x; g < f.groups; g += kThreads) f.group_mean[static_cast<i64>(g) * f.features + j] = 0.0f;
  } else {
    centre = to_float(f.running_mean[j]);
    r = 1.0f / sqrtf(to_float(f.running_var[j]) + f.eps);
  }
  const float slope = f.slope(j, r), origin = TRAINING ? centre : 0.0f;
  const float shift = f.shift(j) + (TRAINING ? 0.0f : value_or(f.bn_weight, j, 1.0f) * r * (s * b - centre));
  for (int row = threadIdx.x; row < f.batch; row += kThreads) {
    const i64 at = static_cast<i64>(row) * f.features + j;
    const float a = load_l2(y + at);
    if (product) product[at] = a;
    y[at] = Activation::value(slope * (a - origin) + shift);
  }
}

// The blocks share out the tiles; who finishes the last one of 64 features normalises them. y serves as memory for the
// product's columns until then.
template <class L, class R, bool TRAINING, class Activation>
__device__ __forceinline__ void recompute_features(const float* x /* [batch, in_features] */,
                                                   const float* weight /* [features, in_features] */,
                                                   const int* flagged /* [features]: a list */,
                                                   u32* most /* [4], after a number for each 64 features: left zero */,
                                                   float* product /* [batch, features] or null */,
                                                   float* y /* [batch, features] */,
                                                   const L* bias /* [features] or null */,
                                                   const L* scale /* [features] or [1] or null */, int scale_stride,
                                                   float scale_value, R* running_mean /* [features] or null */,
                                                   R* running_var /* [features] or null */,
                                                   const i64* batches_tracked /* [1] or null: counts this batch */,
                                                   const R* bn_weight /* [features] or null */,
                                                   const R* bn_bias /* [features] or null */, float momentum, float eps,
                                                   float* group_mean /* [groups, features] */,
                                                   float* mean /* [features] */, float* rstd /* [features] */,
                                                   int keep_product, int batch, int in_features, int features) {
  __shared__ AgainShared shared;
  __shared__ float sums[kThreads / 32];
  __shared__ int list[kAgainColumns];
  __shared__ u32 arrived;
  const Features<L, R> f = {bias,    scale,   scale_stride, scale_value,     running_mean, running_var,
                            bn_weight, bn_bias, batches_tracked, momentum,   eps,          group_mean,
                            nullptr, mean,    rstd,         nullptr,         nullptr,      {},
                            batch,   features, (batch + kGroupRows - 1) / kGroupRows, kGroupRows};
  allow_next();
  wait_for_previous();
  if (blockIdx.x == 0 && threadIdx.x == 0) most[0] = most[1] = 0;  // nobody reads them here
  const u32 found = most[kFlagged];
  if (found == 0) return;
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&most[kReaders], 1u) == gridDim.x - 1) most[kReaders] = most[kFlagged] = 0;
  const int count = static_cast<int>(found), row_tiles = (batch + kAgainRows - 1) / kAgainRows;
  const int chunks = (count + kAgainColumns - 1) / kAgainColumns;
  u32* const done = most - (features + kAgainColumns - 1) / kAgainColumns;
  for (int item = blockIdx.x; item < chunks * row_tiles; item += gridDim.x) {
    const int chunk = item % chunks, first_row = item / chunks * kAgainRows;
    const int columns = min(count - chunk * kAgainColumns, kAgainColumns);
    if (threadIdx.x < columns) list[threadIdx.x] = flagged[chunk * kAgainColumns + threadIdx.x];
    __syncthreads();
    float sum[8][4];
    multiply_tile(x, weight, list, columns, first_row, shared, sum, batch, in_features);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int row = first_row + threadIdx.x / 16 * 8 + r;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int column = threadIdx.x % 16 * 4 + c;
        if (row < batch && column < columns) y[static_cast<i64>(row) * features + list[column]] = sum[r][c];
      }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      arrived = atomicAdd(&done[chunk], 1u);
      __threadfence();
    }
    __syncthreads();
    if (arrived == row_tiles - 1) {
      if (threadIdx.x == 0) done[chunk] = 0;
      for (int n = 0; n < columns; ++n)
        normalize_column<TRAINING, Activation>(f, list[n], keep_product ? product : nullptr, y, sums);
    }
    __syncthreads();
  }
}

}  // namespace gemmnorm
// The backward with respect to the product in one launch, for batches that no cluster's shared memory holds (training;
// formulas in gradient.cuh). Blocks take turns in order, each for some rows of a panel of columns: column sums, and `lag`
// panels later the gradients, for which grad_y and the product are read again, out of the L2. The first blocks do nothing
// but merge the sums of whole panels. All blocks run at once; whoever waits, waits for earlier turns.
// The backward of scale -> BatchNorm -> activation with respect to the product a, in two passes over (grad_y, a):
// column sums of every group of 64 rows, their merge into the gradients of the per-feature parameters, and
//   training:   da = gamma*s*rstd * ( g - mean(g) - (a - mean)*s^2*rstd^2*h/B )      g = grad_y * phi'    h = sum  g*(a - mean)
//   evaluation: da = gamma*s*rstd * g
// The bias has no gradient in training (the mean takes it out again), and the scale acts only through eps.

namespace gemmnorm {

// g = grad_y * phi'(normalised value), recomputed from a so that y need not be kept.
template <class Activation, Form FORM>
__device__ __forceinline__ float through_activation(float grad, float a, const Affine<FORM>& affine, float own = 0.0f) {
  return Activation::identity ? grad : Activation::gradient(grad, affine(a, own));
}

// Per-feature coefficients from what the forward saved. `mean` is that of a in training, of z in evaluation.
template <Form FORM>
struct SavedAffine : Affine<FORM> {
  template <class L, class R>
  __device__ __forceinline__ void read(int j, const L* bias_, const L* scale_, int scale_stride, float scale_value,
                                       const float* mean, const float* rstd, const R* bn_weight, const R* bn_bias) {
    const float s = scale_of(scale_, scale_stride, scale_value, j);
    const float gamma = value_or(bn_weight, j, 1.0f);
    this->shift = value_or(bn_bias, j, 0.0f);
    this->scale = FORM == Form::kFolded ? 1.0f : s;
    this->bias = FORM == Form::kFolded ? 0.0f : value_or(bias_, j, 0.0f);
    this->centre = mean[j];
    this->slope = FORM == Form::kFolded ? gamma * s * rstd[j] : gamma * rstd[j];
  }
};

// sum g and sum  g*(a - mean) of every group; in evaluation sum  g*(z - running_mean) and, for the scale, sum  g*(a + b).
// `offset` [groups, features] or null is what the forward subtracted from a group of rows before it stored the product.
template <class T, class Y, class L, class R, int N, int TX, Form FORM, class Activation>
__device__ __forceinline__ void gradient_sums(const Y* grad_y /* [batch, features] */,
                                              const T* product /* [batch, features] */,
                                              const float* offset /* [groups, features] or null */,
                                              const L* bias /* [features] or null */,
                                              const L* scale /* [features] or [1] or null */, int scale_stride,
                                              float scale_value, const float* mean /* [features] */,
                                              const float* rstd /* [features] */,
                                              const R* bn_weight /* [features] or null */,
                                              const R* bn_bias /* [features] or null */,
                                              float* group_sum /* [groups, features] */,
                                              float* group_dot /* [groups, features] */,
                                              float* group_linear /* [groups, features], evaluation only */, int batch,
                                              int features) {
  using P = Panel<N, TX>;
  __shared__ float shared[kThreads * N];
  allow_next();
  wait_for_previous();
  const P panel(batch, features);
  const bool inside = panel.column < features;
  const i64 group_row = static_cast<i64>(panel.group) * features + panel.column;
  SavedAffine<FORM> affine[N];
  float sum[N], dot[N], linear[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum[i] = dot[i] = linear[i] = 0.0f;
    if (inside) {
      affine[i].read(panel.column + i, bias, scale, scale_stride, scale_value, mean, rstd, bn_weight, bn_bias);
      if (FORM == Form::kFolded) affine[i].centre -= value_or(offset, group_row + i, 0.0f);
    }
  }
  constexpr int kAtOnce = P::kRows < 4 ? P::kRows : 4;
  const i64 origin = panel.first_row * features + (inside ? panel.column : 0);
#pragma unroll 1
  for (int r0 = 0; r0 < P::kRows; r0 += kAtOnce) {
    Vec<T, N> a[kAtOnce];
    Vec<Y, N> dy[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const i64 at = origin + panel.existing((r0 + r) * P::kLanes + panel.lane) * features;
      a[r] = load<T, N>(product + at);
      dy[r] = load<Y, N>(grad_y + at);
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int row = (r0 + r) * P::kLanes + panel.lane;
      if (inside && row < panel.rows) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float value = a[r].value(i);
          const float g = through_activation<Activation>(dy[r].value(i), value, affine[i]);
          const float lin = FORM == Form::kFolded ? value : value + affine[i].bias;
          sum[i] += g;
          dot[i] += g * (FORM == Form::kFolded ? value - affine[i].centre : lin * affine[i].scale - affine[i].centre);
          if (FORM == Form::kRunning) linear[i] += g * lin;
        }
      }
    }
  }
  sum_over_lanes<N, TX>(sum, shared);
  sum_over_lanes<N, TX>(dot, shared);
  if (FORM == Form::kRunning) sum_over_lanes<N, TX>(linear, shared);
  if (inside && panel.lane == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      group_sum[group_row + i] = sum[i];
      group_dot[group_row + i] = dot[i];
      if (FORM == Form::kRunning) group_linear[group_row + i] = linear[i];
    }
  }
}

// In training: sum g and h = sum  g*(a - mean) of feature j -> the gradients of its parameters, each of which may be null.
template <class L, class R>
__device__ __forceinline__ void store_gradients(int j, float sum, float h, float s, float r, float gamma, float eps,
                                                L* grad_bias, float* grad_scale, R* grad_bn_weight, R* grad_bn_bias) {
  if (grad_bn_bias) from_float(sum, grad_bn_bias[j]);
  if (grad_bn_weight) from_float(s * r * h, grad_bn_weight[j]);
  if (grad_scale) grad_scale[j] = gamma * eps * r * r * r * h;
  if (grad_bias) from_float(0.0f, grad_bias[j]);
}

// The groups' sums, added up in a fixed order, become the parameters' gradients, and the two numbers per feature that
// the last kernel needs: mean_grad = sum g/B and slope_grad = s^2*rstd^2*h/B. Each gradient may be null.
template <class L, class R, Form FORM>
__device__ __forceinline__ void merge_gradients(const float* group_sum /* [groups, features] */,
                                                const float* group_dot /* [groups, features] */,
                                                const float* group_linear /* [groups, features] or null */,
                                                const L* scale /* [features] or [1] or null */, int scale_stride,
                                                float scale_value, const float* rstd /* [features] */,
                                                const R* bn_weight /* [features] or null */, float eps,
                                                float* mean_grad /* [features] */, float* slope_grad /* [features] */,
                                                int* column_exponents /* [features] or null: made ready */,
                                                L* grad_bias /* [features] or null */,
                                                float* grad_scale /* [features] or null */,
                                                R* grad_bn_weight /* [features] or null */,
                                                R* grad_bn_bias /* [features] or null */, int batch, int features) {
  __shared__ float shared[kThreads];
  const int j = blockIdx.x * kMergeColumns + threadIdx.x % kMergeColumns;
  const int lane = threadIdx.x / kMergeColumns;
  const int groups = (batch + kGroupRows - 1) / kGroupRows;
  const bool inside = j < features;
  allow_next();
  wait_for_previous();
  float sum = 0.0f, dot = 0.0f, linear = 0.0f;
  if (inside) {
#pragma unroll 4
    for (int g = lane; g < groups; g += kMergeLanes) {
      const i64 at = static_cast<i64>(g) * features + j;
      sum += group_sum[at];
      dot += group_dot[at];
      if (FORM == Form::kRunning) linear += group_linear[at];
    }
  }
  sum = sum_over_merge_lanes(sum, shared);
  dot = sum_over_merge_lanes(dot, shared);
  if (FORM == Form::kRunning) linear = sum_over_merge_lanes(linear, shared);
  if (!inside || lane != 0) return;
  const float s = scale_of(scale, scale_stride, scale_value, j);
  const float r = rstd[j], gamma = value_or(bn_weight, j, 1.0f);
  if (column_exponents) column_exponents[j] = kLeastExponent;
  if (FORM == Form::kFolded) {
    store_gradients(j, sum, dot, s, r, gamma, eps, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias);
    mean_grad[j] = sum / batch;
    slope_grad[j] = s * s * r * r * dot / batch;
  } else {
    if (grad_bn_bias) from_float(sum, grad_bn_bias[j]);
    if (grad_bn_weight) from_float(r * dot, grad_bn_weight[j]);
    if (grad_scale) grad_scale[j] = gamma * r * linear;
    if (grad_bias) from_float(gamma * s * r * sum, grad_bias[j]);
  }
}

// dL/da, in the product's type. For split operands also the largest exponent of each of its columns, every row
// multiplied by x's power of two.
template <class T, class Y, class L, class R, int N, int TX, int GROUPS, Form FORM, class Activation>
__device__ __forceinline__ void product_gradient(const Y* grad_y /* [batch, features] */,
                                                 const T* product /* [batch, features] */,
                                                 const float* offset /* [groups, features] or null */,
                                                 const L* bias /* [features] or null */,
                                                 const L* scale /* [features] or [1] or null */, int scale_stride,
                                                 float scale_value, const float* mean /* [features] */,
                                                 const float* rstd /* [features] */,
                                                 const R* bn_weight /* [features] or null */,
                                                 const R* bn_bias /* [features] or null */,
                                                 const float* mean_grad /* [features], training only */,
                                                 const float* slope_grad /* [features], training only */,
                                                 const int* x_exponents /* [batch] or null */,
                                                 int* column_exponents /* [features] or null */,
                                                 T* grad_product /* [batch, features] */, int batch, int features) {
  using P = Panel<N, TX, GROUPS, true>;
  P panel(batch, features);
  allow_next();
  if (panel.column >= features) return;
  wait_for_previous();
  SavedAffine<FORM> affine[N];
  float slope[N], constant[N], linear[N];
  int most[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int j = panel.column + i;
    most[i] = kLeastExponent;
    affine[i].read(j, bias, scale, scale_stride, scale_value, mean, rstd, bn_weight, bn_bias);
    if (FORM == Form::kFolded) {
      slope[i] = affine[i].slope;
      constant[i] = mean_grad[j];
      linear[i] = slope_grad[j];
    } else {
      slope[i] = affine[i].slope * affine[i].scale;
    }
  }
  // As many rows in flight as the registers hold beside the activation's.
  constexpr int kMost = Activation::identity && sizeof(T) == sizeof(Y) ? 8 : 4;
  constexpr int kAtOnce = P::kRows < kMost ? P::kRows : kMost;
  const int first_group = panel.group;
#pragma unroll 1
  for (int g = 0; g < GROUPS; ++g) {
    panel.at(first_group + g);
    if (panel.rows == 0) break;
    const i64 origin = panel.first_row * features + panel.column;
    float own[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
      own[i] = FORM == Form::kFolded && offset
                   ? offset[static_cast<i64>(panel.group) * features + panel.column + i]
                   : 0.0f;
#pragma unroll 1
    for (int r0 = 0; r0 < P::kRows; r0 += kAtOnce) {
      Vec<T, N> a[kAtOnce];
      Vec<Y, N> dy[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const i64 at = origin + panel.existing((r0 + r) * P::kLanes + panel.lane) * features;
        a[r] = load<T, N>(product + at);
        dy[r] = load<Y, N>(grad_y + at);
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int row = (r0 + r) * P::kLanes + panel.lane;
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float value = a[r].value(i);
          const float grad = through_activation<Activation>(dy[r].value(i), value, affine[i], own[i]);
          out[i] = FORM == Form::kFolded
                       ? slope[i] * (grad - constant[i] - (value + (own[i] - affine[i].centre)) * linear[i])
                       : slope[i] * grad;
        }
        if (row < panel.rows) {
          store<T, N>(grad_product + origin + static_cast<i64>(row) * features, out);
          if (column_exponents) {
            const int exponent = x_exponents[panel.first_row + row];
#pragma unroll
            for (int i = 0; i < N; ++i) most[i] = max(most[i], scaled_exponent(out[i], exponent));
          }
        }
      }
    }
  }
  if (column_exponents) {
#pragma unroll
    for (int i = 0; i < N; ++i) atomicMax(&column_exponents[panel.column + i], most[i]);
  }
}

}  // namespace gemmnorm

namespace gemmnorm {

constexpr int kMergers = 8, kMergedColumns = 8;  // blocks that merge, at most, and columns that a warp merges
constexpr int kTurn = 0, kLeft = 1, kTurnPanels = 2;  // counters: turns taken, blocks that have left, then two of every panel

// What a thread holds of a turn: every fourth of its warp's ROWS rows, 16 bytes of the product of each, 8 lanes side by side.
template <class T, class Y, int ROWS>
struct HeldRows {
  static constexpr int N = 16 / sizeof(T), kTX = 8, kColumns = kTX * N, kLanes = 32 / kTX, kSteps = ROWS / kLanes;
  static constexpr int kWarps = kThreads / 32, kRows = kWarps * ROWS, kWords = N * sizeof(Y) / 16;
  static_assert(kGroupRows % ROWS == 0, "a warp's rows lie in one group");

  Vec<T, N> product[kSteps];
  Vec<Y, N> grad_y[kSteps];
  int column, rows;  // the thread's first; of the warp
  i64 first_row;
  bool inside;

  __device__ __forceinline__ int row(int step) const { return step * kLanes + threadIdx.x % 32 / kTX; }
  __device__ __forceinline__ bool exists(int step) const { return inside && row(step) < rows; }
  // Where there is nothing, something else is loaded: loads without conditions are all in flight at once.
  __device__ __forceinline__ void place(int panel, int unit, int batch, int features) {
    column = panel * kColumns + threadIdx.x % kTX * N;
    inside = column < features;
    if (!inside) column = 0;
    first_row = static_cast<i64>(unit) * kRows + threadIdx.x / 32 * ROWS;
    rows = static_cast<int>(max(i64{0}, min(i64{ROWS}, batch - first_row)));
    if (rows == 0) first_row = 0;
  }
  __device__ __forceinline__ i64 origin(int step, int features) const {
    return (first_row + max(0, min(row(step), rows - 1))) * features + column;
  }
  __device__ __forceinline__ void read(const T* a, const Y* dy, int features) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      product[s] = load<T, N>(a + origin(s, features));
      grad_y[s] = load<Y, N>(dy + origin(s, features));
    }
  }
  __device__ __forceinline__ void read_again(const T* a, const Y* dy, int features) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const i64 at = origin(s, features);
      *reinterpret_cast<uint4*>(&product[s]) = load_last_time(reinterpret_cast<const uint4*>(a + at));
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        reinterpret_cast<uint4*>(&grad_y[s])[w] = load_last_time(reinterpret_cast<const uint4*>(dy + at) + w);
    }
  }
};

template <class T, class Y, class L, class R, int ROWS, int SHARED_BYTES, class Activation>
__device__ __forceinline__ void gradient_units(const Y* grad_y /* [batch, features] */,
                                               const T* product /* [batch, features] */,
                                               const float* offset /* [groups, features] or null */,
                                               const L* scale /* [features] or [1] or null */, int scale_stride,
                                               float scale_value, const float* mean /* [features] */,
                                               const float* rstd /* [features] */,
                                               const R* bn_weight /* [features] or null */,
                                               const R* bn_bias /* [features] or null */, float eps,
                                               float* group_sum /* [units, features] */,
                                               float* group_dot /* [units, features] */,
                                               float* mean_grad /* [features] */, float* slope_grad /* [features] */,
                                               float* merged_slope /* [features] */,
                                               float* merged_shift /* [features] */,
                                               const int* x_exponents /* [batch] or null */,
                                               int* column_exponents /* [features] or null */,
                                               L* grad_bias /* [features] or null */,
                                               float* grad_scale /* [features] or null */,
                                               R* grad_bn_weight /* [features] or null */,
                                               R* grad_bn_bias /* [features] or null */,
                                               T* grad_product /* [batch, features] */,
                                               u32* counters /* zero, and left zero */, int lag /* in panels, at least 1 */,
                                               int batch, int features) {
  using Held = HeldRows<T, Y, ROWS>;
  constexpr int N = Held::N, kColumns = Held::kColumns, kMerges = kColumns / kMergedColumns, kQuads = kColumns / 4;
  struct Shared {
    float4 sums[Held::kWarps][2][kQuads];  // sum g and sum  g*(a - mean) of each warp
    int most[kColumns];                    // of the columns' exponents
    int next_turn;
  };
  static_assert(sizeof(Shared) == SHARED_BYTES, "the plan and Shared disagree");
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int units = (batch + Held::kRows - 1) / Held::kRows, panels = (features + kColumns - 1) / kColumns;
  const int turns = units * (panels + lag);
  const int mergers = min(kMergers, static_cast<int>(gridDim.x) / 2);
  u32 *summed = counters + kTurnPanels, *merged = summed + panels;
  allow_next();
  wait_for_previous();

  if (blockIdx.x < mergers) {  // a warp merges 8 columns: 2 lanes of four along the features, 16 along the units
#pragma unroll 1
    for (int panel = blockIdx.x; panel < panels && warp < kMerges; panel += mergers) {
      const int first = panel * kColumns + warp * kMergedColumns, quad = min(first + lane % 2 * 4, features - 4);
      const int j = first + lane % 2 * 4 + (lane & 4 ? 2 : 0) + (lane & 8 ? 1 : 0), existing = min(j, features - 1);
      const float s = scale_of(scale, scale_stride, scale_value, existing), r = rstd[existing];
      const float gamma = value_or(bn_weight, existing, 1.0f), beta = value_or(bn_bias, existing, 0.0f);
      if (lane == 0) wait_until(&summed[panel], 2 * units);
      __syncwarp();
      float v[8] = {};
#pragma unroll 8
      for (int unit = lane / 2; unit < units; unit += 16) {
        const float4 sum = load_l2(reinterpret_cast<const float4*>(group_sum + static_cast<i64>(unit) * features + quad));
        const float4 dot = load_l2(reinterpret_cast<const float4*>(group_dot + static_cast<i64>(unit) * features + quad));
        v[0] += sum.x, v[1] += sum.y, v[2] += sum.z, v[3] += sum.w;
        v[4] += dot.x, v[5] += dot.y, v[6] += dot.z, v[7] += dot.w;
      }
      float four[4], two[2], one[1];
      exchange<4>(v, four, lane, 2);
      exchange<2>(four, two, lane, 4);
      exchange<1>(two, one, lane, 8);
      const float sum = one[0] + __shfl_xor_sync(~0u, one[0], 16), dot = __shfl_xor_sync(~0u, sum, 2);
      if (!(lane & 2) && lane < 16 && j < features) {
        mean_grad[j] = sum / batch;
        slope_grad[j] = s * s * r * r * dot / batch;
        merged_slope[j] = gamma * s * r;
        merged_shift[j] = beta;
        if (column_exponents) column_exponents[j] = kLeastExponent;
        store_gradients(j, sum, dot, s, r, gamma, eps, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias);
      }
      __syncwarp();
      if (lane == 0) add_release(&merged[panel], 1);
    }
  } else {
    int turn = blockIdx.x - mergers;
    if (threadIdx.x < kColumns) shared.most[threadIdx.x] = kLeastExponent;
    Held held;
    float from_mean[N], slope[N], shift[N];
    const auto read_means = [&] {  // rows that the forward wrote, or the workspace's: whole words
      const Vec<float, N> centre = load<float, N>(mean + held.column);
      Vec<float, N> own = {};
      if (offset) own = load<float, N>(offset + held.first_row / kGroupRows * features + held.column);
#pragma unroll
      for (int i = 0; i < N; ++i) from_mean[i] = own.at[i] - centre.at[i];
    };
    const auto through = [&](float dy, float deviation, int i) {
      return Activation::identity ? dy : Activation::gradient(dy, slope[i] * deviation + shift[i]);
    };
    const auto read_merged = [&](const float* from, float (&to)[N]) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float4 v = load_l2(reinterpret_cast<const float4*>(from + held.column + i));
        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
      }
    };
    const auto begin_sums = [&] {
      if (turn >= units * panels) return;
      held.place(turn / units, turn % units, batch, features);
      held.read(product, grad_y, features);
      read_means();
      if constexpr (!Activation::identity) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int j = held.column + i;
          slope[i] = value_or(bn_weight, j, 1.0f) * scale_of(scale, scale_stride, scale_value, j) * rstd[j];
          shift[i] = value_or(bn_bias, j, 0.0f);
        }
      }
    };
    begin_sums();
#pragma unroll 1
    while (turn < turns) {
      const int round = turn / units, unit = turn % units;
      u32 ticket = 0;
      if (threadIdx.x == 0) ticket = atomicAdd(&counters[kTurn], 1u);
      if (round < panels) {
        float v[2 * N], half[N], quarter[N / 2];
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) v[i] = 0.0f;
#pragma unroll
        for (int s = 0; s < Held::kSteps; ++s) {
          if (!held.exists(s)) continue;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const float deviation = held.product[s].value(i) + from_mean[i];
            const float grad = through(held.grad_y[s].value(i), deviation, i);
            v[i] += grad;
            v[N + i] += grad * deviation;
          }
        }
        exchange<N>(v, half, lane, 8);
        exchange<N / 2>(half, quarter, lane, 16);
        float* part = reinterpret_cast<float*>(shared.sums[warp][lane & 8 ? 1 : 0]) + lane % 8 * N + (lane & 16 ? N / 2 : 0);
        store<float, N / 2>(part, quarter);
      }
      int row_exponent = 0;  // of the row that is the lane's
      const auto begin_gradients = [&] {
        if (round < lag) return;
        held.place(round - lag, unit, batch, features);
        held.read_again(product, grad_y, features);
        read_means();
        if (x_exponents) row_exponent = x_exponents[held.first_row + max(0, min(lane % ROWS, held.rows - 1))];
      };
      const auto wait_for_merged = [&] {
        if (round >= lag && lane == 0) wait_until(&merged[round - lag], kMerges);
      };
      // Two warps hand on the sums, which others wait for; in a long turn before they have anything else on the way.
      constexpr bool kSumsFirst = ROWS > 16;
      if (warp >= 2 || !kSumsFirst) begin_gradients();
      __syncthreads();
      if (warp >= 2) {
        if (warp == 2) wait_for_merged();
        __syncwarp();
        sync_threads(1, kThreads - 64);
      } else {
        if (round < panels) {
          if (lane < kQuads) {
            float4 total = {};
#pragma unroll
            for (int w = 0; w < Held::kWarps; ++w) {
              const float4 v = shared.sums[w][warp][lane];
              total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
            }
            const int column = round * kColumns + lane * 4;
            float* to = (warp ? group_dot : group_sum) + static_cast<i64>(unit) * features + column;
            if (column < features) *reinterpret_cast<float4*>(to) = total;
          }
          __syncwarp();
          if (lane == 0) add_release(&summed[round], 1);
        }
        if (kSumsFirst) begin_gradients();
        wait_for_merged();
        __syncwarp();
      }
      if (round >= lag) {
        float constant[N], linear[N];
        int most[N];
        read_merged(mean_grad, constant);
        read_merged(slope_grad, linear);
        read_merged(merged_slope, slope);
        if (!Activation::identity) read_merged(merged_shift, shift);
#pragma unroll
        for (int i = 0; i < N; ++i) most[i] = kLeastExponent;
#pragma unroll
        for (int s = 0; s < Held::kSteps; ++s) {
          const int exponent = column_exponents ? __shfl_sync(~0u, row_exponent, held.row(s) % 32) : 0;
          if (!held.exists(s)) continue;
          float out[N];
          Vec<T, N> rounded;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const float deviation = held.product[s].value(i) + from_mean[i];
            const float grad = through(held.grad_y[s].value(i), deviation, i);
            out[i] = slope[i] * (grad - constant[i] - deviation * linear[i]);
            from_float(out[i], rounded.at[i]);
            if (column_exponents) most[i] = max(most[i], scaled_exponent(out[i], exponent));
          }
          store_for_others(reinterpret_cast<uint4*>(grad_product + held.origin(s, features)),
                           *reinterpret_cast<const uint4*>(&rounded));
        }
        if (column_exponents) {
#pragma unroll
          for (int i = 0; i < N; ++i) atomicMax(&shared.most[lane % 8 * N + i], most[i]);
        }
      }
      if (threadIdx.x == 0) shared.next_turn = static_cast<int>(gridDim.x - mergers + ticket);
      __syncthreads();
      if (column_exponents && round >= lag && threadIdx.x < kColumns) {
        const int j = (round - lag) * kColumns + threadIdx.x;
        if (j < features) atomicMax(&column_exponents[j], shared.most[threadIdx.x]);
        shared.most[threadIdx.x] = kLeastExponent;
      }
      turn = shared.next_turn;
      begin_sums();
    }
  }

  __syncthreads();  // the last block to get here leaves the counters as it found them
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&counters[kLeft], 1u) == gridDim.x - 1) {
      __threadfence();
      for (int i = 0; i < kTurnPanels + 2 * panels; ++i) counters[i] = 0;
    }
  }
}

}  // namespace gemmnorm
// A product of split operands by itself, for the gradients of a float32 chain (sm_90a): out = A*B, scaled back by A's
// exponents. B lies across K in memory, and so may A; nothing is transposed beforehand.
//
// A persistent block is one warpgroup that feeds a ring of shared-memory stages and two that multiply, 64 of the tile's
// 128 rows each.

namespace gemmnorm {

constexpr int kSplitTile = 128;  // rows and columns of the tile

template <int STAGES>
struct SplitShared {
  alignas(1024) unsigned char a[STAGES][2][kSplitTile * 128];  // of each stage high, then low
  alignas(1024) unsigned char b[STAGES][2][kSplitTile * 128];
  u64 full[STAGES], empty[STAGES];
};

template <bool A_ACROSS, int STAGES, int SHARED_BYTES>
__device__ __forceinline__ void split_gemm(const TensorMap& map_a /* split [rows, inner], or [inner, rows] if across */,
                                           const TensorMap& map_b /* split [inner, columns] */,
                                           const int* exponents /* [rows] */, float* out /* [rows, columns] */,
                                           int group_panels, int rows, int inner, int columns) {
  using Shared = SplitShared<STAGES>;
  static_assert(sizeof(Shared) == SHARED_BYTES, "the planner and SplitShared disagree");
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const Raster raster = {(rows + kSplitTile - 1) / kSplitTile, (columns + kSplitTile - 1) / kSplitTile, group_panels};
  const int tiles = raster.tiles(), steps = (inner + kSplitColumns - 1) / kSplitColumns;
  const int warpgroup = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 2);
    }
    fence_barrier_init();
    fence_async_shared();
  }
  __syncthreads();
  wait_for_previous();
  allow_next();

  int stage = 0;
  if (warpgroup == 0) {
    release_registers<40>();
    if (threadIdx.x != 0) return;
    u32 parity = 1;
    // Copies the 128 columns from `column` on, of 64 rows of a split matrix: 64 columns at a time, high and low.
    const auto copy_across = [&](unsigned char (&to)[2][kSplitTile * 128], const TensorMap& map, int column, int row) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy_to_shared(to[i % 2] + i / 2 * kAcrossBytes, map, &shared.full[stage], column * 2 + i * 64, row,
                       kEvictNormal);
    };
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      const Tile tile = raster.at(t);
      for (int k = 0; k < steps; ++k) {
        barrier_wait(&shared.empty[stage], parity);
        barrier_expect(&shared.full[stage], 4 * kSplitTile * 128);
        if (A_ACROSS) {
          copy_across(shared.a[stage], map_a, tile.m * kSplitTile, k * 64);
        } else {
#pragma unroll
          for (int p = 0; p < 2; ++p)
            copy_to_shared(shared.a[stage][p], map_a, &shared.full[stage], (2 * k + p) * 64, tile.m * kSplitTile,
                           kEvictNormal);
        }
        copy_across(shared.b[stage], map_b, tile.n * kSplitTile, k * 64);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  } else {
    claim_registers<232>();
    const int consumer = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    u32 parity = 0;
    float acc[kSplitTile / 2], part[kSplitTile / 2], cross[kSplitTile / 2];
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
#pragma unroll
      for (int i = 0; i < kSplitTile / 2; ++i) acc[i] = 0.0f;
      for (int k = 0; k < steps; ++k) {
        const auto descriptor_a = [&](int plane) {
          const unsigned char* tile = shared.a[stage][plane] + consumer * 64 * 128;
          return A_ACROSS ? across_descriptor(tile) : matrix_descriptor(tile);
        };
        barrier_wait(&shared.full[stage], parity);
        wgmma_fence();
        multiply_stage<kSplitTile, A_ACROSS, 1>(part, cross, descriptor_a(0), descriptor_a(1),
                                                across_descriptor(shared.b[stage][0]),
                                                across_descriptor(shared.b[stage][1]), k == 0);
        wgmma_wait<1>();
#pragma unroll
        for (int i = 0; i < kSplitTile / 2; ++i) acc[i] += part[i];
        if (k > 0 && threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      wgmma_wait<0>();
      if (threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[stage == 0 ? STAGES - 1 : stage - 1]);

      const Tile tile = raster.at(t);
      const int row = tile.m * kSplitTile + consumer * 64 + warp * 16 + lane / 4;
      const int first_column = tile.n * kSplitTile + lane % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (row + 8 * h >= rows) continue;
        const PowerOfTwo scale = power_of_two(exponents[row + 8 * h]);
        float* to = out + static_cast<i64>(row + 8 * h) * columns;
#pragma unroll
        for (int i = 0; i < kSplitTile / 8; ++i) {
          const int column = first_column + i * 8;
          const float pair[2] = {times(acc[4 * i + 2 * h] + kLowUnit * cross[4 * i + 2 * h], scale),
                                 times(acc[4 * i + 2 * h + 1] + kLowUnit * cross[4 * i + 2 * h + 1], scale)};
          if (column < columns) store<float, 2>(to + column, pair);
        }
      }
    }
  }
}

}  // namespace gemmnorm
// The backward with respect to the product in one launch and one reading (training; formulas in gradient.cuh): a cluster
// of blocks owns a panel of columns at a time. Each block copies its rows of grad_y and the product into shared memory,
// takes the column sums, adds up those of the whole cluster, and computes the gradients from what it holds; what it has
// used of a panel it replaces by the next one's at once. Clusters: sm_90.

namespace gemmnorm {

constexpr int kWarps = kThreads / 32;

// A warp has ROWS rows of a panel, TX lanes along the features; a thread reads back only what it has copied.
template <class Y, int N, int TX, int ROWS>
struct PanelShared {
  static constexpr int kSteps = ROWS * TX / 32;      // of a warp through its rows
  static constexpr int kWords = N * sizeof(Y) / 16;  // of grad_y in a step
  uint4 product[kSteps][kThreads];
  uint4 grad_y[kSteps][kWords][kThreads];
  alignas(16) float mean[TX * N], slope[TX * N], shift[TX * N];  // per column: of the forward
  alignas(16) float mean_grad[TX * N], slope_grad[TX * N];       // and of the backward
  // sum g and sum  g*(a - mean) of the cluster's blocks, and before that of the warps, for which the next panel's place serves:
  // nothing arrives there until all of this block's are sent.
  alignas(16) float sums[2][kWarps][2][TX * N];
  u64 all_arrived[2];
};

// Calls `visit(row, step, a - mean, g)` for every row that the thread holds, N columns at a time.
template <class Activation, class T, class Y, int N, int TX, int ROWS, class Visit>
__device__ __forceinline__ void visit_rows(const PanelShared<Y, N, TX, ROWS>& shared, int rows,
                                           const float (&from_mean)[N], const float (&slope)[N], const float (&shift)[N],
                                           const Visit& visit) {
#pragma unroll 2
  for (int row = threadIdx.x % 32 / TX, step = 0; row < rows; row += 32 / TX, ++step) {
    Vec<T, N> a;
    Vec<Y, N> dy;
    *reinterpret_cast<uint4*>(&a) = shared.product[step][threadIdx.x];
#pragma unroll
    for (int w = 0; w < shared.kWords; ++w) reinterpret_cast<uint4*>(&dy)[w] = shared.grad_y[step][w][threadIdx.x];
    float deviation[N], grad[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      deviation[i] = a.value(i) + from_mean[i];
      grad[i] = dy.value(i);
      if (!Activation::identity) grad[i] = Activation::gradient(grad[i], slope[i] * deviation[i] + shift[i]);
    }
    visit(row, step, deviation, grad);
  }
}

template <int N>
__device__ __forceinline__ void read_columns(const float* from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
  }
}

template <class T, class Y, class L, class R, int TX, int ROWS /* of a warp */, int CLUSTER, int SHARED_BYTES, class Activation>
__device__ __forceinline__ void panel_gradient(const Y* grad_y /* [batch, features] */,
                                               const T* product /* [batch, features] */,
                                               const float* offset /* [groups, features] or null */,
                                               const L* scale /* [features] or [1] or null */, int scale_stride,
                                               float scale_value, const float* mean /* [features] */,
                                               const float* rstd /* [features] */,
                                               const R* bn_weight /* [features] or null */,
                                               const R* bn_bias /* [features] or null */, float eps,
                                               const int* x_exponents /* [batch] or null */,
                                               int* column_exponents /* [features] or null */,
                                               L* grad_bias /* [features] or null */,
                                               float* grad_scale /* [features] or null */,
                                               R* grad_bn_weight /* [features] or null */,
                                               R* grad_bn_bias /* [features] or null */,
                                               T* grad_product /* [batch, features] */, int batch, int features) {
  constexpr int N = 16 / sizeof(T), kColumns = TX * N, kLanes = 32 / TX, kPieces = 2 * kColumns / 4;
  constexpr u32 kArriving = CLUSTER * kPieces * sizeof(float4);
  using Shared = PanelShared<Y, N, TX, ROWS>;
  static_assert(CLUSTER <= kWarps, "blocks and warps take turns in PanelShared::sums");
  static_assert(kGroupRows % ROWS == 0, "a warp's rows lie in one group");
  static_assert(sizeof(Shared) == SHARED_BYTES, "the plan and PanelShared disagree");
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = threadIdx.x, warp = thread / 32, tx = thread % TX, lane = thread % 32 / TX;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int stride = static_cast<int>(gridDim.x) / CLUSTER * kColumns;  // from a cluster's panel to its next
  const int share = ((batch + ROWS - 1) / ROWS + CLUSTER - 1) / CLUSTER;  // warps of a block that have rows
  const int first_row = (rank * share + warp) * ROWS, existing = warp < share ? max(0, min(ROWS, batch - first_row)) : 0;
  // The warp's rows in a panel where the thread has columns from `column` on.
  const auto rows_of = [&](int column) { return column < features ? existing : 0; };
  const auto copy_row = [&](int step, int row, int column) {
    const i64 at = static_cast<i64>(row) * features + column;
    copy_16_bytes(&shared.product[step][thread], product + at);
#pragma unroll
    for (int w = 0; w < Shared::kWords; ++w)
      copy_16_bytes(&shared.grad_y[step][w][thread], grad_y + at + w * (16 / sizeof(Y)));
  };
  if (CLUSTER > 1) {
    if (thread == 0) {
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        barrier_init(&shared.all_arrived[turn], 1);
        barrier_expect(&shared.all_arrived[turn], kArriving);
      }
      fence_barrier_init();
    }
    cluster_arrive_relaxed();
  }
  allow_next();
  wait_for_previous();
  int first_column = static_cast<int>(blockIdx.x) / CLUSTER * kColumns;
  if (const int rows = rows_of(first_column + tx * N)) {
#pragma unroll
    for (int step = 0; step < Shared::kSteps; ++step)
      copy_row(step, first_row + min(step * kLanes + lane, rows - 1), first_column + tx * N);
  }
  struct {  // of the column that the thread owns, as they come: read a panel ahead
    L scale;
    R gamma, beta;
    float mean, rstd;
  } own = {};
  const auto read_own = [&](int j) {
    if (thread >= kColumns || j >= features) return;
    if (scale) own.scale = scale[static_cast<i64>(j) * scale_stride];
    if (bn_weight) own.gamma = bn_weight[j];
    if (bn_bias) own.beta = bn_bias[j];
    own.mean = mean[j];
    own.rstd = rstd[j];
  };
  read_own(first_column + thread);
  if (CLUSTER > 1) cluster_wait();

#pragma unroll 1
  for (int count = 0; first_column < features; first_column += stride, ++count) {
    const int column = first_column + tx * N, next_column = column + stride, j = first_column + thread;
    const int turn = count % 2;
    const bool owner = thread < kColumns && j < features;  // of a column
    const float s = scale ? to_float(own.scale) : scale_value, r = own.rstd;
    const float gamma = bn_weight ? to_float(own.gamma) : 1.0f;
    if (owner) {
      shared.mean[thread] = own.mean;
      shared.slope[thread] = gamma * s * r;
      shared.shift[thread] = bn_bias ? to_float(own.beta) : 0.0f;
      if (column_exponents && rank == 0) column_exponents[j] = kLeastExponent;
    }
    float from_mean[N] = {};  // what is to be added to a stored value
    if (offset && rows_of(column)) read_columns<N>(offset + static_cast<i64>(first_row / kGroupRows) * features + column, from_mean);
    __syncthreads();
    float slope[N], shift[N], centre[N], sum[N], dot[N];
    read_columns<N>(&shared.slope[tx * N], slope);
    read_columns<N>(&shared.shift[tx * N], shift);
    read_columns<N>(&shared.mean[tx * N], centre);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      from_mean[i] -= centre[i];
      sum[i] = dot[i] = 0.0f;
    }
    const auto add_row = [&](int, int, const float (&deviation)[N], const float (&grad)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sum[i] += grad[i];
        dot[i] += grad[i] * deviation[i];
      }
    };
    wait_small_copies();
    visit_rows<Activation, T>(shared, rows_of(column), from_mean, slope, shift, add_row);
    fold_lanes<N, TX>(sum, &shared.sums[1 - turn][warp][0][tx * N]);
    fold_lanes<N, TX>(dot, &shared.sums[1 - turn][warp][1][tx * N]);
    __syncthreads();

    const int piece = thread % kPieces;
    float4 total = {};
    if (thread < kPieces * CLUSTER) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 v = reinterpret_cast<const float4*>(shared.sums[1 - turn][w])[piece];
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
    }
    if (CLUSTER > 1) __syncthreads();  // a block that has got its sums may send the next panel's to where the warps' were
    if (thread < kPieces * CLUSTER) {
      float4* to = reinterpret_cast<float4*>(shared.sums[turn][rank]) + piece;
      if (CLUSTER > 1) store_remote(to, total, &shared.all_arrived[turn], thread / kPieces);
      else *to = total;
    }
    if (CLUSTER == 1) __syncthreads();
    else if (thread < kColumns) barrier_wait_cluster(&shared.all_arrived[turn], count / 2 % 2);
    if (CLUSTER > 1 && thread == 0) barrier_expect(&shared.all_arrived[turn], kArriving);
    if (owner) {
      float all = 0.0f, h = 0.0f;
#pragma unroll
      for (int block = 0; block < CLUSTER; ++block) {
        all += shared.sums[turn][block][0][thread];
        h += shared.sums[turn][block][1][thread];
      }
      shared.mean_grad[thread] = all / batch;
      shared.slope_grad[thread] = s * s * r * r * h / batch;
      if (rank == 0) store_gradients(j, all, h, s, r, gamma, eps, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias);
    }
    __syncthreads();

    read_own(j + stride);
    float constant[N], linear[N];
    int most[N];
    read_columns<N>(&shared.mean_grad[tx * N], constant);
    read_columns<N>(&shared.slope_grad[tx * N], linear);
#pragma unroll
    for (int i = 0; i < N; ++i) most[i] = kLeastExponent;
    const auto store_row = [&](int row, int step, const float (&deviation)[N], const float (&grad)[N]) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = slope[i] * (grad[i] - constant[i] - deviation[i] * linear[i]);
      store<T, N>(grad_product + static_cast<i64>(first_row + row) * features + column, out);
      if (next_column < features) copy_row(step, first_row + row, next_column);
      if (column_exponents) {
        const int exponent = x_exponents[first_row + row];
#pragma unroll
        for (int i = 0; i < N; ++i) most[i] = max(most[i], scaled_exponent(out[i], exponent));
      }
    };
    visit_rows<Activation, T>(shared, rows_of(column), from_mean, slope, shift, store_row);
    if (column_exponents && column < features) {
#pragma unroll
      for (int i = 0; i < N; ++i) atomicMax(&column_exponents[column + i], most[i]);
    }
  }
}

}  // namespace gemmnorm

struct Identity {
  static constexpr bool identity = true;
  static __device__ __forceinline__ float value(float z) { return z; }
  static __device__ __forceinline__ float gradient(float g, float z) { return g; }
};

extern "C" __global__ void __launch_bounds__(256, 4) fused_gemm_split_operands(
    const float* x /* [batch, in_features] */,
    const float* weight /* [features, in_features] */,
    gemmnorm::half* split_x /* [batch, ceil(in_features/64), 2, 64] */,
    gemmnorm::half* split_weight /* [features, ceil(in_features/64), 2, 64] */,
    int* x_exponents /* [batch] */,
    int* weight_exponents /* [features] */,
    float* weight_largest /* [features] */,
    float* weight_total /* [features] */,
    unsigned int* most /* [4], after a number for each 64 features: zero, and left zero */,
    int weight_rows /* of the weight, likewise */,
    int in_features) {
  gemmnorm::split_rows(
      x, weight, split_x, split_weight, x_exponents, weight_exponents, weight_largest, weight_total, nullptr, most,
      weight_rows, in_features);
}

extern "C" __global__ void __launch_bounds__(384, 1) fused_gemm_scale_bn(
    const __grid_constant__ gemmnorm::TensorMap map_x /* [batch, in_features] */,
    const __grid_constant__ gemmnorm::TensorMap map_weight /* [features, in_features] */,
    const __grid_constant__ gemmnorm::TensorMap map_product /* [batch, features] */,
    const __grid_constant__ gemmnorm::TensorMap map_y /* [batch, features] */,
    float* stored_product /* [batch, features] */,
    float* y /* [batch, features] */,
    const float* bias /* [features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* running_mean /* [features] or null */,
    float* running_var /* [features] or null */,
    long long* num_batches_tracked /* [1] or null */,
    const float* bn_weight /* [features] or null */,
    const float* bn_bias /* [features] or null */,
    float momentum /* negative for the cumulative average */,
    float eps,
    float* group_mean /* [groups, features] */,
    float* group_m2 /* [groups, features] */,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    float* merged_slope /* [features] */,
    float* merged_shift /* [features] */,
    unsigned int* counters /* zero, and left zero */,
    const float* x /* [batch, in_features] */,
    const float* weight /* [features, in_features] */,
    gemmnorm::half* split_x /* [batch, ceil(in_features/64), 2, 64] */,
    gemmnorm::half* split_weight /* [features, ceil(in_features/64), 2, 64] */,
    int* x_exponents /* [batch] */,
    int* weight_exponents /* [features] */,
    float* weight_largest /* [features] */,
    float* weight_total /* [features] */,
    unsigned int* most /* [4], after a number for each 64 features: zero, and left zero */,
    int* flagged /* [features]: a list */,
    int x_rows /* of x, that are made already or begun */,
    int weight_rows /* of the weight, likewise */,
    int begun /* chunks of 2048 columns of these rows, that are cast already */,
    int group_panels /* panels that are worked on together */,
    int in_registers /* tiles wait for their panel there */,
    int stream_x /* whether the L2 should let go of x first */,
    int keep_product /* whether the product has memory of its own */,
    int batch,
    int in_features,
    int features) {
  gemmnorm::fused_gemm<gemmnorm::split, float, float, float, float, 128, 128, 3, 231424, gemmnorm::Finish::kPersistent, Identity>(
      map_x, map_weight, map_product, map_y, stored_product, y, bias, scale, scale_stride, scale_value,
      running_mean, running_var, num_batches_tracked, bn_weight, bn_bias, momentum, eps, group_mean, group_m2, mean,
      rstd, merged_slope, merged_shift, counters, x, weight, split_x, split_weight, x_exponents, weight_exponents,
      weight_largest, weight_total, nullptr, most, flagged, x_rows, weight_rows, begun, group_panels, in_registers,
      stream_x, keep_product, batch, in_features, features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_recompute(
    const float* x /* [batch, in_features] */,
    const float* weight /* [features, in_features] */,
    int* flagged /* [features]: a list */,
    unsigned int* most /* [4], after a number for each 64 features: zero, and left zero */,
    float* stored_product /* [batch, features] */,
    float* y /* [batch, features] */,
    const float* bias /* [features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* running_mean /* [features] or null */,
    float* running_var /* [features] or null */,
    long long* num_batches_tracked /* [1] or null */,
    const float* bn_weight /* [features] or null */,
    const float* bn_bias /* [features] or null */,
    float momentum /* negative for the cumulative average */,
    float eps,
    float* group_mean /* [groups, features] */,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    int keep_product /* whether the product has memory of its own */,
    int batch,
    int in_features,
    int features) {
  gemmnorm::recompute_features<float, float, true, Identity>(
      x, weight, flagged, most, stored_product, y, bias, scale, scale_stride, scale_value, running_mean,
      running_var, num_batches_tracked, bn_weight, bn_bias, momentum, eps, group_mean, mean, rstd, keep_product,
      batch, in_features, features);
}

extern "C" __global__ void __launch_bounds__(384, 1) fused_gemm_scale_bn_evaluate(
    const __grid_constant__ gemmnorm::TensorMap map_x /* [batch, in_features] */,
    const __grid_constant__ gemmnorm::TensorMap map_weight /* [features, in_features] */,
    const __grid_constant__ gemmnorm::TensorMap map_product /* [batch, features] */,
    const __grid_constant__ gemmnorm::TensorMap map_y /* [batch, features] */,
    float* stored_product /* [batch, features] */,
    float* y /* [batch, features] */,
    const float* bias /* [features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* running_mean /* [features] or null */,
    float* running_var /* [features] or null */,
    long long* num_batches_tracked /* [1] or null */,
    const float* bn_weight /* [features] or null */,
    const float* bn_bias /* [features] or null */,
    float momentum /* negative for the cumulative average */,
    float eps,
    float* group_mean /* [groups, features] */,
    float* group_m2 /* [groups, features] */,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    float* merged_slope /* [features] */,
    float* merged_shift /* [features] */,
    unsigned int* counters /* zero, and left zero */,
    const float* x /* [batch, in_features] */,
    const float* weight /* [features, in_features] */,
    gemmnorm::half* split_x /* [batch, ceil(in_features/64), 2, 64] */,
    gemmnorm::half* split_weight /* [features, ceil(in_features/64), 2, 64] */,
    int* x_exponents /* [batch] */,
    int* weight_exponents /* [features] */,
    float* weight_largest /* [features] */,
    float* weight_total /* [features] */,
    unsigned int* most /* [4], after a number for each 64 features: zero, and left zero */,
    int* flagged /* [features]: a list */,
    int x_rows /* of x, that are made already or begun */,
    int weight_rows /* of the weight, likewise */,
    int begun /* chunks of 2048 columns of these rows, that are cast already */,
    int group_panels /* panels that are worked on together */,
    int in_registers /* tiles wait for their panel there */,
    int stream_x /* whether the L2 should let go of x first */,
    int keep_product /* whether the product has memory of its own */,
    int batch,
    int in_features,
    int features) {
  gemmnorm::fused_gemm<gemmnorm::split, float, float, float, float, 128, 128, 3, 231424, gemmnorm::Finish::kEvaluate, Identity>(
      map_x, map_weight, map_product, map_y, stored_product, y, bias, scale, scale_stride, scale_value,
      running_mean, running_var, num_batches_tracked, bn_weight, bn_bias, momentum, eps, group_mean, group_m2, mean,
      rstd, merged_slope, merged_shift, counters, x, weight, split_x, split_weight, x_exponents, weight_exponents,
      weight_largest, weight_total, nullptr, most, flagged, x_rows, weight_rows, begun, group_panels, in_registers,
      stream_x, keep_product, batch, in_features, features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_recompute_evaluation(
    const float* x /* [batch, in_features] */,
    const float* weight /* [features, in_features] */,
    int* flagged /* [features]: a list */,
    unsigned int* most /* [4], after a number for each 64 features: zero, and left zero */,
    float* stored_product /* [batch, features] */,
    float* y /* [batch, features] */,
    const float* bias /* [features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* running_mean /* [features] or null */,
    float* running_var /* [features] or null */,
    long long* num_batches_tracked /* [1] or null */,
    const float* bn_weight /* [features] or null */,
    const float* bn_bias /* [features] or null */,
    float momentum /* negative for the cumulative average */,
    float eps,
    float* group_mean /* [groups, features] */,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    int keep_product /* whether the product has memory of its own */,
    int batch,
    int in_features,
    int features) {
  gemmnorm::recompute_features<float, float, false, Identity>(
      x, weight, flagged, most, stored_product, y, bias, scale, scale_stride, scale_value, running_mean,
      running_var, num_batches_tracked, bn_weight, bn_bias, momentum, eps, group_mean, mean, rstd, keep_product,
      batch, in_features, features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_evaluate_evaluation(
    const float* product /* [batch, features] */,
    const float* offset /* [groups, features] or null */,
    const float* bias /* [features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    float* running_mean /* [features] or null */,
    float* running_var /* [features] or null */,
    const float* bn_weight /* [features] or null */,
    const float* bn_bias /* [features] or null */,
    float eps,
    float* y /* [batch, features] */,
    int batch,
    int features) {
  gemmnorm::normalize<float, float, float, float, 4, 32, 1, gemmnorm::Form::kRunning, Identity>(
      product, offset, bias, scale, scale_stride, scale_value, mean, rstd, running_mean, running_var, bn_weight,
      bn_bias, eps, y, batch, features);
}

extern "C" __global__ void __launch_bounds__(256, 4) fused_gemm_split_operands_2(
    const float* x /* [batch, in_features] */,
    const float* weight /* [features, in_features] */,
    gemmnorm::half* split_x /* [batch, ceil(in_features/64), 2, 64] */,
    gemmnorm::half* split_weight /* [features, ceil(in_features/64), 2, 64] */,
    int* x_exponents /* [batch] */,
    int* weight_exponents /* [features] */,
    int weight_rows /* of the weight, likewise */,
    int in_features) {
  gemmnorm::split_rows(
      x, weight, split_x, split_weight, x_exponents, weight_exponents, nullptr, nullptr, nullptr, nullptr,
      weight_rows, in_features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_gradient(
    const float* grad_y /* [batch, features] */,
    const float* product /* [batch, features] */,
    const float* offset /* [groups, features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    const float* bn_weight /* [features] or null */,
    const float* bn_bias /* [features] or null */,
    float eps,
    float* group_sum /* [groups, features] */,
    float* group_dot /* [groups, features] */,
    float* mean_grad /* [features] */,
    float* slope_grad /* [features] */,
    float* merged_slope /* [features] */,
    float* merged_shift /* [features] */,
    int* x_exponents /* [batch] */,
    int* column_exponents /* [features] */,
    float* grad_bias /* [features] or null */,
    float* grad_scale /* [features] or null */,
    float* grad_bn_weight /* [features] or null */,
    float* grad_bn_bias /* [features] or null */,
    float* grad_product /* [batch, features] */,
    unsigned int* counters /* zero, and left zero */,
    int lag /* panels that are read again later */,
    int batch,
    int features) {
  gemmnorm::gradient_units<float, float, float, float, 32, 2192, Identity>(
      grad_y, product, offset, scale, scale_stride, scale_value, mean, rstd, bn_weight, bn_bias, eps, group_sum,
      group_dot, mean_grad, slope_grad, merged_slope, merged_shift, x_exponents, column_exponents, grad_bias,
      grad_scale, grad_bn_weight, grad_bn_bias, grad_product, counters, lag, batch, features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_split_gradient(
    float* grad_product /* [batch, features] */,
    int* x_exponents /* [batch] */,
    int* weight_exponents /* [features] */,
    int* column_exponents /* [features] */,
    gemmnorm::half* split_by_rows /* [batch, ceil(features/64), 2, 64] */,
    gemmnorm::half* split_by_columns /* [batch, ceil(features/64), 2, 64] */,
    int* row_exponents /* [batch] */,
    int features) {
  gemmnorm::split_gradient(
      grad_product, x_exponents, weight_exponents, column_exponents, split_by_rows, split_by_columns, row_exponents,
      features);
}

extern "C" __global__ void __launch_bounds__(384, 1) fused_gemm_split_grad_x(
    const __grid_constant__ gemmnorm::TensorMap map_a /* left operand, split */,
    const __grid_constant__ gemmnorm::TensorMap map_b /* right operand, split */,
    int* row_exponents /* [batch] */,
    float* grad_x /* [batch, in_features] */,
    int group_panels /* panels that are worked on together */,
    int batch,
    int features,
    int in_features) {
  gemmnorm::split_gemm<false, 3, 197632>(
      map_a, map_b, row_exponents, grad_x, group_panels, batch, features, in_features);
}

extern "C" __global__ void __launch_bounds__(384, 1) fused_gemm_split_grad_weight(
    const __grid_constant__ gemmnorm::TensorMap map_a /* left operand, split */,
    const __grid_constant__ gemmnorm::TensorMap map_b /* right operand, split */,
    int* column_exponents /* [features] */,
    float* grad_weight /* [features, in_features] */,
    int group_panels /* panels that are worked on together */,
    int features,
    int batch,
    int in_features) {
  gemmnorm::split_gemm<true, 3, 197632>(
      map_a, map_b, column_exponents, grad_weight, group_panels, features, batch, in_features);
}

extern "C" __global__ void __launch_bounds__(256, 3) fused_gemm_scale_bn_gradient_to_1024(
    const float* grad_y /* [batch, features] */,
    const float* product /* [batch, features] */,
    const float* offset /* [groups, features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    const float* bn_weight /* [features] or null */,
    const float* bn_bias /* [features] or null */,
    float eps,
    int* x_exponents /* [batch] */,
    int* column_exponents /* [features] */,
    float* grad_bias /* [features] or null */,
    float* grad_scale /* [features] or null */,
    float* grad_bn_weight /* [features] or null */,
    float* grad_bn_bias /* [features] or null */,
    float* grad_product /* [batch, features] */,
    int batch,
    int features) {
  gemmnorm::panel_gradient<float, float, float, float, 8, 32, 4, 70288, Identity>(
      grad_y, product, offset, scale, scale_stride, scale_value, mean, rstd, bn_weight, bn_bias, eps, x_exponents,
      column_exponents, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias, grad_product, batch, features);
}

extern "C" __global__ void __launch_bounds__(256, 1) fused_gemm_scale_bn_gradient_sums(
    const float* grad_y /* [batch, features] */,
    const float* product /* [batch, features] */,
    const float* offset /* [groups, features] or null */,
    const float* bias /* [features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    const float* bn_weight /* [features] or null */,
    const float* bn_bias /* [features] or null */,
    float* group_sum /* [groups, features] */,
    float* group_dot /* [groups, features] */,
    float* group_linear /* [groups, features] or null */,
    int batch,
    int features) {
  gemmnorm::gradient_sums<float, float, float, float, 4, 32, gemmnorm::Form::kRunning, Identity>(
      grad_y, product, offset, bias, scale, scale_stride, scale_value, mean, rstd, bn_weight, bn_bias, group_sum,
      group_dot, group_linear, batch, features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_gradient_merge(
    float* group_sum /* [groups, features] */,
    float* group_dot /* [groups, features] */,
    float* group_linear /* [groups, features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* rstd /* [features] */,
    const float* bn_weight /* [features] or null */,
    float eps,
    float* mean_grad /* [features] */,
    float* slope_grad /* [features] */,
    float* grad_bias /* [features] or null */,
    float* grad_scale /* [features] or null */,
    float* grad_bn_weight /* [features] or null */,
    float* grad_bn_bias /* [features] or null */,
    int batch,
    int features) {
  gemmnorm::merge_gradients<float, float, gemmnorm::Form::kRunning>(
      group_sum, group_dot, group_linear, scale, scale_stride, scale_value, rstd, bn_weight, eps, mean_grad,
      slope_grad, nullptr, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias, batch, features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_gradient_apply(
    const float* grad_y /* [batch, features] */,
    const float* product /* [batch, features] */,
    const float* offset /* [groups, features] or null */,
    const float* bias /* [features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    const float* bn_weight /* [features] or null */,
    const float* bn_bias /* [features] or null */,
    float* mean_grad /* [features] */,
    float* slope_grad /* [features] */,
    float* grad_product /* [batch, features] */,
    int batch,
    int features) {
  gemmnorm::product_gradient<float, float, float, float, 4, 32, 1, gemmnorm::Form::kRunning, Identity>(
      grad_y, product, offset, bias, scale, scale_stride, scale_value, mean, rstd, bn_weight, bn_bias, mean_grad,
      slope_grad, nullptr, nullptr, grad_product, batch, features);
}
"""

_HOST = r"""
// Host side: one function for each direction and mode allocates, runs the products and launches the kernels.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace {

// The elements of a tensor as the kernels call their type; null for a tensor that is not there.
template <class T>
T* pointer(const torch::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}
template <class T>
T* pointer(const MaybeTensor& tensor) {
  return tensor ? pointer<T>(*tensor) : nullptr;
}

torch::Tensor empty(const torch::Tensor& like, torch::ScalarType type, at::IntArrayRef shape) {
  return torch::empty(shape, like.options().dtype(type));
}

// Contiguous, and aligned to the 16 bytes that a thread reads at once.
torch::Tensor dense(const torch::Tensor& tensor) {
  const torch::Tensor result = tensor.contiguous();
  return reinterpret_cast<uintptr_t>(result.data_ptr()) % 16 ? result.clone() : result;
}

// Memory that dies with the call: one allocation, cut into pieces of the given numbers of bytes.
class Scratch {
 public:
  Scratch(const torch::Tensor& like, std::initializer_list<int64_t> bytes) {
    int64_t total = 0;
    for (const int64_t piece : bytes) {
      offsets_.push_back(total);
      total += (piece + 255) / 256 * 256;
    }
    memory_ = empty(like, torch::kUInt8, {total});
  }
  template <class T>
  T* piece(size_t index) const {
    return reinterpret_cast<T*>(pointer<uint8_t>(memory_) + offsets_[index]);
  }

 private:
  torch::Tensor memory_;
  std::vector<int64_t> offsets_;
};

// From Hopper on, a kernel may start while the one before it still runs; it waits for that one itself, before it reads
// (`wait_for_previous`).
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream, Arguments... arguments) {
#if CUDART_VERSION >= 11080
  int device = 0, major = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = major >= 9 ? 1 : 0;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
#else
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(static_cast<Parameters>(arguments)...);
#endif
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

// What the kernels with Hopper's own product ask of the host besides: tensor maps, counters, and larger launches.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <cuda.h>  // types only: the one function of the driver is looked up at run time

namespace {

int64_t multiprocessors() {
  int device = 0, count = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's own function, through the runtime, so that nothing is linked against the driver.
EncodeTiled find_encode_tiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  C10_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status));
#else
  C10_CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status));
#endif
  TORCH_CHECK(status == cudaDriverEntryPointSuccess && found, "the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<EncodeTiled>(found);
}

// The copy engine's view of a contiguous [rows, columns] matrix, cut into boxes, swizzled over 128 bytes as the tensor
// cores read it; zero beyond the matrix. It holds an address and sizes, nothing of the contents.
template <class T>
gemmnorm::TensorMap tensor_map(const T* matrix, CUtensorMapDataType type, int64_t rows, int64_t columns, int box_rows,
                               int box_columns) {
  static const EncodeTiled encode = find_encode_tiled();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[] = {static_cast<cuuint64_t>(columns * sizeof(T))};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, 2, const_cast<T*>(matrix), sizes, row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refuses a [", rows, ", ", columns, "] matrix: error ",
              static_cast<int>(result));
  gemmnorm::TensorMap opaque;
  static_assert(sizeof(opaque) == sizeof(map), "the kernels and cuda.h disagree about a tensor map");
  std::memcpy(&opaque, &map, sizeof(map));
  return opaque;
}

// Numbers that are zero whenever no kernel runs on them: the kernels leave them as they found them. Calls on one stream
// follow each other and share theirs. A captured call may be replayed at any time, beside anything: it gets numbers of
// its own, out of its graph's memory, which the graph sets to zero at each replay.
torch::Tensor take_counters(const torch::Tensor& like, cudaStream_t stream, int64_t count) {
  const auto zeros = [&] { return torch::zeros({count}, like.options().dtype(torch::kInt32).requires_grad(false)); };
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return zeros();
  static std::mutex mutex;
  // Never destroyed: when the process ends, CUDA may have gone before.
  static auto& known = *new std::map<std::tuple<int, cudaStream_t, int64_t>, torch::Tensor>();
  const std::lock_guard<std::mutex> lock(mutex);
  torch::Tensor& found = known[{static_cast<int>(like.device().index()), stream, count}];
  if (!found.defined()) found = zeros();
  return found;
}

// Lifts the limit of 48 KB on a kernel's dynamic shared memory, once for each device.
void allow_shared(const void* kernel, int bytes) {
  if (bytes <= 48 * 1024) return;
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> done;
  int device = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  if (done.count({kernel, device})) return;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  done.insert({kernel, device});
}

// With dynamic shared memory, in clusters of blocks; and `cooperative` where blocks wait for each other, so that all of them
// must run at once. Else the kernel may start early, as `launch` has it.
template <class... Parameters, class... Arguments>
void launch_hopper(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared, int cluster, bool cooperative,
                   cudaStream_t stream, Arguments... arguments) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared);
  cudaLaunchAttribute attributes[2] = {};
  if (cooperative) {
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
  } else {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
  }
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

// y alone: one_kernel.
Tensors forward_training_alone(const torch::Tensor& x /* [batch, 8192] */,
                               const torch::Tensor& weight /* [8192, 8192] */, const MaybeTensor& bias /* [8192] */,
                               const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                               const MaybeTensor& running_mean /* [8192] */,
                               const MaybeTensor& running_var /* [8192] */, const MaybeTensor& num_batches_tracked,
                               const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                               double momentum, double eps, bool save) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int64_t batch = x.size(0);
  const int64_t groups = (batch + 63) / 64;
  const int64_t tiles_of_128 = (batch + 127) / 128;
  torch::Tensor y = empty(x, torch::kFloat32, {batch, 8192});
  const Scratch scratch(x, {4 * 8192, 4 * 8192, 4 * groups * 8192, 4 * groups * 8192, 4 * 8192, 4 * 8192,
                            2 * batch * 16384, 2 * 8192 * 16384, 4 * batch, 4 * 8192, 4 * 8192, 4 * 8192,
                            4 * 8192});
  float* merged_slope = scratch.piece<float>(0);
  float* merged_shift = scratch.piece<float>(1);
  float* group_mean = scratch.piece<float>(2);
  float* group_m2 = scratch.piece<float>(3);
  float* mean = scratch.piece<float>(4);
  float* rstd = scratch.piece<float>(5);
  gemmnorm::half* split_x = scratch.piece<gemmnorm::half>(6);
  gemmnorm::half* split_weight = scratch.piece<gemmnorm::half>(7);
  int* x_exponents = scratch.piece<int>(8);
  int* weight_exponents = scratch.piece<int>(9);
  int* flagged = scratch.piece<int>(10);
  float* weight_largest = scratch.piece<float>(11);
  float* weight_total = scratch.piece<float>(12);
  torch::Tensor product = y;
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;
  const torch::Tensor counters = take_counters(x, stream, 390);

  launch(fused_gemm_split_operands, batch + 2048, 256, stream, pointer<float>(x), pointer<float>(weight), split_x,
         split_weight, x_exponents, weight_exponents, weight_largest, weight_total,
         pointer<unsigned int>(counters) + 386, 2048 /* weight_rows */, 8192);
  launch_hopper(fused_gemm_scale_bn, std::min<int64_t>(64 * tiles_of_128, multiprocessors()), 384,
                231424 /* shared */, 1 /* cluster */, true /* cooperative */, stream,
                tensor_map(split_x, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 16384, 128, 64),
                tensor_map(split_weight, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 8192, 16384, 128, 64),
                tensor_map(pointer<float>(y), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, batch, 8192, 64, 32),
                tensor_map(pointer<float>(y), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, batch, 8192, 64, 32),
                pointer<float>(product), pointer<float>(y), pointer<float>(bias), pointer<float>(scale),
                scale_stride, scale_value, pointer<float>(running_mean), pointer<float>(running_var),
                pointer<long long>(num_batches_tracked), pointer<float>(bn_weight), pointer<float>(bn_bias),
                momentum, eps, group_mean, group_m2, mean, rstd, merged_slope, merged_shift,
                pointer<unsigned int>(counters), pointer<float>(x), pointer<float>(weight), split_x, split_weight,
                x_exponents, weight_exponents, weight_largest, weight_total, pointer<unsigned int>(counters) + 386,
                flagged, 1073741824 /* x_rows */, 2048 /* weight_rows */, 1 /* begun */, 8 /* group_panels */,
                0 /* in_registers */, 0 /* stream_x */, 0 /* keep_product */, batch, 8192, 8192);
  launch(fused_gemm_scale_bn_recompute, 264, 256, stream, pointer<float>(x), pointer<float>(weight), flagged,
         pointer<unsigned int>(counters) + 386, pointer<float>(product), pointer<float>(y), pointer<float>(bias),
         pointer<float>(scale), scale_stride, scale_value, pointer<float>(running_mean),
         pointer<float>(running_var), pointer<long long>(num_batches_tracked), pointer<float>(bn_weight),
         pointer<float>(bn_bias), momentum, eps, group_mean, mean, rstd, 0 /* keep_product */, batch, 8192, 8192);

  return {y};
}

// y, and for the backward product, group_mean, mean, rstd: one_kernel.
Tensors forward_training_saving(const torch::Tensor& x /* [batch, 8192] */,
                                const torch::Tensor& weight /* [8192, 8192] */,
                                const MaybeTensor& bias /* [8192] */, const MaybeTensor& scale /* [8192] or [1] */,
                                double scale_value, const MaybeTensor& running_mean /* [8192] */,
                                const MaybeTensor& running_var /* [8192] */, const MaybeTensor& num_batches_tracked,
                                const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                                double momentum, double eps, bool save) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int64_t batch = x.size(0);
  const int64_t groups = (batch + 63) / 64;
  const int64_t tiles_of_128 = (batch + 127) / 128;
  torch::Tensor y = empty(x, torch::kFloat32, {batch, 8192});
  torch::Tensor product = empty(x, torch::kFloat32, {batch, 8192});
  torch::Tensor group_mean = empty(x, torch::kFloat32, {groups, 8192});
  torch::Tensor mean = empty(x, torch::kFloat32, {8192});
  torch::Tensor rstd = empty(x, torch::kFloat32, {8192});
  const Scratch scratch(x, {4 * 8192, 4 * 8192, 4 * groups * 8192, 2 * batch * 16384, 2 * 8192 * 16384, 4 * batch,
                            4 * 8192, 4 * 8192, 4 * 8192, 4 * 8192});
  float* merged_slope = scratch.piece<float>(0);
  float* merged_shift = scratch.piece<float>(1);
  float* group_m2 = scratch.piece<float>(2);
  gemmnorm::half* split_x = scratch.piece<gemmnorm::half>(3);
  gemmnorm::half* split_weight = scratch.piece<gemmnorm::half>(4);
  int* x_exponents = scratch.piece<int>(5);
  int* weight_exponents = scratch.piece<int>(6);
  int* flagged = scratch.piece<int>(7);
  float* weight_largest = scratch.piece<float>(8);
  float* weight_total = scratch.piece<float>(9);
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;
  const torch::Tensor counters = take_counters(x, stream, 390);

  launch(fused_gemm_split_operands, batch + 2048, 256, stream, pointer<float>(x), pointer<float>(weight), split_x,
         split_weight, x_exponents, weight_exponents, weight_largest, weight_total,
         pointer<unsigned int>(counters) + 386, 2048 /* weight_rows */, 8192);
  launch_hopper(fused_gemm_scale_bn, std::min<int64_t>(64 * tiles_of_128, multiprocessors()), 384,
                231424 /* shared */, 1 /* cluster */, true /* cooperative */, stream,
                tensor_map(split_x, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 16384, 128, 64),
                tensor_map(split_weight, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 8192, 16384, 128, 64),
                tensor_map(pointer<float>(product), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, batch, 8192, 64, 32),
                tensor_map(pointer<float>(y), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, batch, 8192, 64, 32),
                pointer<float>(product), pointer<float>(y), pointer<float>(bias), pointer<float>(scale),
                scale_stride, scale_value, pointer<float>(running_mean), pointer<float>(running_var),
                pointer<long long>(num_batches_tracked), pointer<float>(bn_weight), pointer<float>(bn_bias),
                momentum, eps, pointer<float>(group_mean), group_m2, pointer<float>(mean), pointer<float>(rstd),
                merged_slope, merged_shift, pointer<unsigned int>(counters), pointer<float>(x),
                pointer<float>(weight), split_x, split_weight, x_exponents, weight_exponents, weight_largest,
                weight_total, pointer<unsigned int>(counters) + 386, flagged, 1073741824 /* x_rows */,
                2048 /* weight_rows */, 1 /* begun */, 8 /* group_panels */, 0 /* in_registers */, 0 /* stream_x */,
                1 /* keep_product */, batch, 8192, 8192);
  launch(fused_gemm_scale_bn_recompute, 264, 256, stream, pointer<float>(x), pointer<float>(weight), flagged,
         pointer<unsigned int>(counters) + 386, pointer<float>(product), pointer<float>(y), pointer<float>(bias),
         pointer<float>(scale), scale_stride, scale_value, pointer<float>(running_mean),
         pointer<float>(running_var), pointer<long long>(num_batches_tracked), pointer<float>(bn_weight),
         pointer<float>(bn_bias), momentum, eps, pointer<float>(group_mean), pointer<float>(mean),
         pointer<float>(rstd), 1 /* keep_product */, batch, 8192, 8192);

  return {y, product, group_mean, mean, rstd};
}

// Chooses by whether something is kept for the backward.
Tensors forward_training(const torch::Tensor& x /* [batch, 8192] */, const torch::Tensor& weight /* [8192, 8192] */,
                         const MaybeTensor& bias /* [8192] */, const MaybeTensor& scale /* [8192] or [1] */,
                         double scale_value, const MaybeTensor& running_mean /* [8192] */,
                         const MaybeTensor& running_var /* [8192] */, const MaybeTensor& num_batches_tracked,
                         const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                         double momentum, double eps, bool save) {
  const c10::cuda::CUDAGuard guard(x.device());
  auto run = save ? forward_training_saving : forward_training_alone;
  return run(x, weight, bias, scale, scale_value, running_mean, running_var, num_batches_tracked, bn_weight,
             bn_bias, momentum, eps, save);
}

// y alone: one_kernel.
Tensors forward_evaluation_alone(const torch::Tensor& x /* [batch, 8192] */,
                                 const torch::Tensor& weight /* [8192, 8192] */,
                                 const MaybeTensor& bias /* [8192] */, const MaybeTensor& scale /* [8192] or [1] */,
                                 double scale_value, const MaybeTensor& running_mean /* [8192] */,
                                 const MaybeTensor& running_var /* [8192] */,
                                 const MaybeTensor& num_batches_tracked, const MaybeTensor& bn_weight /* [8192] */,
                                 const MaybeTensor& bn_bias /* [8192] */, double momentum, double eps, bool save) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int64_t batch = x.size(0);
  const int64_t tiles_of_128 = (batch + 127) / 128;
  torch::Tensor y = empty(x, torch::kFloat32, {batch, 8192});
  const Scratch scratch(x, {2 * batch * 16384, 2 * 8192 * 16384, 4 * batch, 4 * 8192, 4 * 8192, 4 * 8192,
                            4 * 8192});
  gemmnorm::half* split_x = scratch.piece<gemmnorm::half>(0);
  gemmnorm::half* split_weight = scratch.piece<gemmnorm::half>(1);
  int* x_exponents = scratch.piece<int>(2);
  int* weight_exponents = scratch.piece<int>(3);
  int* flagged = scratch.piece<int>(4);
  float* weight_largest = scratch.piece<float>(5);
  float* weight_total = scratch.piece<float>(6);
  torch::Tensor product = y;
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;
  const torch::Tensor counters = take_counters(x, stream, 390);

  launch(fused_gemm_split_operands, batch + 2048, 256, stream, pointer<float>(x), pointer<float>(weight), split_x,
         split_weight, x_exponents, weight_exponents, weight_largest, weight_total,
         pointer<unsigned int>(counters) + 386, 2048 /* weight_rows */, 8192);
  launch_hopper(fused_gemm_scale_bn_evaluate, std::min<int64_t>(64 * tiles_of_128, multiprocessors()), 384,
                231424 /* shared */, 1 /* cluster */, true /* cooperative */, stream,
                tensor_map(split_x, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 16384, std::min<int64_t>(128, (batch + 7) / 8 * 8), 64),
                tensor_map(split_weight, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 8192, 16384, 128, 64),
                tensor_map(pointer<float>(y), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, batch, 8192, 64, 32),
                tensor_map(pointer<float>(y), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, batch, 8192, 64, 32),
                pointer<float>(product), pointer<float>(y), pointer<float>(bias), pointer<float>(scale),
                scale_stride, scale_value, pointer<float>(running_mean), pointer<float>(running_var),
                pointer<long long>(num_batches_tracked), pointer<float>(bn_weight), pointer<float>(bn_bias),
                momentum, eps, nullptr /* group_mean */, nullptr /* group_m2 */, nullptr /* mean */,
                nullptr /* rstd */, nullptr /* merged_slope */, nullptr /* merged_shift */,
                pointer<unsigned int>(counters), pointer<float>(x), pointer<float>(weight), split_x, split_weight,
                x_exponents, weight_exponents, weight_largest, weight_total, pointer<unsigned int>(counters) + 386,
                flagged, 1073741824 /* x_rows */, 2048 /* weight_rows */, 1 /* begun */, 8 /* group_panels */,
                0 /* in_registers */, 0 /* stream_x */, 0 /* keep_product */, batch, 8192, 8192);
  launch(fused_gemm_scale_bn_recompute_evaluation, 264, 256, stream, pointer<float>(x), pointer<float>(weight),
         flagged, pointer<unsigned int>(counters) + 386, pointer<float>(product), pointer<float>(y),
         pointer<float>(bias), pointer<float>(scale), scale_stride, scale_value, pointer<float>(running_mean),
         pointer<float>(running_var), pointer<long long>(num_batches_tracked), pointer<float>(bn_weight),
         pointer<float>(bn_bias), momentum, eps, nullptr /* group_mean */, nullptr /* mean */, nullptr /* rstd */,
         0 /* keep_product */, batch, 8192, 8192);

  return {y};
}

// y, and for the backward product, mean, rstd: cublas_folded_bn.
Tensors forward_evaluation_saving(const torch::Tensor& x /* [batch, 8192] */,
                                  const torch::Tensor& weight /* [8192, 8192] */,
                                  const MaybeTensor& bias /* [8192] */,
                                  const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                                  const MaybeTensor& running_mean /* [8192] */,
                                  const MaybeTensor& running_var /* [8192] */,
                                  const MaybeTensor& num_batches_tracked, const MaybeTensor& bn_weight /* [8192] */,
                                  const MaybeTensor& bn_bias /* [8192] */, double momentum, double eps, bool save) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int64_t batch = x.size(0);
  const int64_t groups = (batch + 63) / 64;
  torch::Tensor y = empty(x, torch::kFloat32, {batch, 8192});
  torch::Tensor product = empty(x, torch::kFloat32, {batch, 8192});
  torch::Tensor mean = empty(x, torch::kFloat32, {8192});
  torch::Tensor rstd = empty(x, torch::kFloat32, {8192});
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;

  at::mm_out(product, x, weight.t());  // by the library
  launch(fused_gemm_scale_bn_evaluate_evaluation, 64 * groups, 256, stream, pointer<float>(product),
         nullptr /* offset */, pointer<float>(bias), pointer<float>(scale), scale_stride, scale_value,
         pointer<float>(mean), pointer<float>(rstd), pointer<float>(running_mean), pointer<float>(running_var),
         pointer<float>(bn_weight), pointer<float>(bn_bias), eps, pointer<float>(y), batch, 8192);

  return {y, product, mean, rstd};
}

// Chooses by whether something is kept for the backward.
Tensors forward_evaluation(const torch::Tensor& x /* [batch, 8192] */,
                           const torch::Tensor& weight /* [8192, 8192] */, const MaybeTensor& bias /* [8192] */,
                           const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                           const MaybeTensor& running_mean /* [8192] */,
                           const MaybeTensor& running_var /* [8192] */, const MaybeTensor& num_batches_tracked,
                           const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                           double momentum, double eps, bool save) {
  const c10::cuda::CUDAGuard guard(x.device());
  auto run = save ? forward_evaluation_saving : forward_evaluation_alone;
  return run(x, weight, bias, scale, scale_value, running_mean, running_var, num_batches_tracked, bn_weight,
             bn_bias, momentum, eps, save);
}

// Through batch statistics. Returns the gradients of x, weight, bias, scale, bn_weight and bn_bias; those
// that `needs` leaves out are undefined.
Tensors backward_training_any(const torch::Tensor& grad /* [batch, 8192] */,
                              const torch::Tensor& x /* [batch, 8192] */,
                              const torch::Tensor& weight /* [8192, 8192] */, const MaybeTensor& bias /* [8192] */,
                              const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                              const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                              const torch::Tensor& product, const torch::Tensor& group_mean,
                              const torch::Tensor& mean, const torch::Tensor& rstd, double eps,
                              const std::vector<bool>& needs) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int64_t batch = x.size(0);
  const int64_t tiles_of_256 = (batch + 255) / 256;
  const int64_t tiles_of_128 = (batch + 127) / 128;
  const torch::Tensor grad_y = dense(grad);
  torch::Tensor grad_x = needs[0] ? empty(x, torch::kFloat32, {batch, 8192}) : torch::Tensor();
  torch::Tensor grad_weight = needs[1] ? empty(x, torch::kFloat32, {8192, 8192}) : torch::Tensor();
  torch::Tensor grad_bias = needs[2] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_scale = needs[3] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_bn_weight = needs[4] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_bn_bias = needs[5] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  const Scratch scratch(x, {4 * tiles_of_256 * 8192, 4 * tiles_of_256 * 8192, 4 * 8192, 4 * 8192, 4 * 8192,
                            4 * 8192, 4 * batch * 8192, 2 * batch * 16384, 2 * 8192 * 16384, 4 * batch, 4 * 8192,
                            2 * batch * 16384, 2 * batch * 16384, 4 * batch, 4 * 8192});
  float* group_sum = scratch.piece<float>(0);
  float* group_dot = scratch.piece<float>(1);
  float* mean_grad = scratch.piece<float>(2);
  float* slope_grad = scratch.piece<float>(3);
  float* merged_slope = scratch.piece<float>(4);
  float* merged_shift = scratch.piece<float>(5);
  float* grad_product = scratch.piece<float>(6);
  gemmnorm::half* split_x = scratch.piece<gemmnorm::half>(7);
  gemmnorm::half* split_weight = scratch.piece<gemmnorm::half>(8);
  int* x_exponents = scratch.piece<int>(9);
  int* weight_exponents = scratch.piece<int>(10);
  gemmnorm::half* split_by_rows = scratch.piece<gemmnorm::half>(11);
  gemmnorm::half* split_by_columns = scratch.piece<gemmnorm::half>(12);
  int* row_exponents = scratch.piece<int>(13);
  int* column_exponents = scratch.piece<int>(14);
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;
  const torch::Tensor counters = take_counters(x, stream, 514);

  launch(fused_gemm_split_operands_2, batch + 8192, 256, stream, pointer<float>(x), pointer<float>(weight), split_x,
         split_weight, x_exponents, weight_exponents, 8192 /* weight_rows */, 8192);
  launch_hopper(fused_gemm_scale_bn_gradient, std::min<int64_t>(256 * tiles_of_256 + 1, 2 * multiprocessors()), 256,
                2192 /* shared */, 1 /* cluster */, true /* cooperative */, stream, pointer<float>(grad_y),
                pointer<float>(product), pointer<float>(group_mean), pointer<float>(scale), scale_stride,
                scale_value, pointer<float>(mean), pointer<float>(rstd), pointer<float>(bn_weight),
                pointer<float>(bn_bias), eps, group_sum, group_dot, mean_grad, slope_grad, merged_slope,
                merged_shift, x_exponents, column_exponents, pointer<float>(grad_bias), pointer<float>(grad_scale),
                pointer<float>(grad_bn_weight), pointer<float>(grad_bn_bias), grad_product,
                pointer<unsigned int>(counters), 8 /* lag */, batch, 8192);
  launch(fused_gemm_split_gradient, batch, 256, stream, grad_product, x_exponents, weight_exponents,
         column_exponents, split_by_rows, split_by_columns, row_exponents, 8192);
  if (grad_x.defined()) launch_hopper(fused_gemm_split_grad_x,
                                      std::min<int64_t>(64 * tiles_of_128, multiprocessors()), 384,
                                      197632 /* shared */, 1 /* cluster */, false /* cooperative */, stream,
                                      tensor_map(split_by_rows, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 16384, 128, 64),
                                      tensor_map(split_weight, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 8192, 16384, 64, 64),
                                      row_exponents, pointer<float>(grad_x), 12 /* group_panels */, batch, 8192,
                                      8192);
  if (grad_weight.defined()) launch_hopper(fused_gemm_split_grad_weight, 132, 384, 197632 /* shared */,
                                           1 /* cluster */, false /* cooperative */, stream,
                                           tensor_map(split_by_columns, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 16384, 64, 64),
                                           tensor_map(split_x, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 16384, 64, 64),
                                           column_exponents, pointer<float>(grad_weight), 12 /* group_panels */,
                                           8192, batch, 8192);

  return {grad_x, grad_weight, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias};
}

// Through batch statistics. Returns the gradients of x, weight, bias, scale, bn_weight and bn_bias; those
// that `needs` leaves out are undefined.
Tensors backward_training_to_1024(const torch::Tensor& grad /* [batch, 8192] */,
                                  const torch::Tensor& x /* [batch, 8192] */,
                                  const torch::Tensor& weight /* [8192, 8192] */,
                                  const MaybeTensor& bias /* [8192] */,
                                  const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                                  const MaybeTensor& bn_weight /* [8192] */,
                                  const MaybeTensor& bn_bias /* [8192] */, const torch::Tensor& product,
                                  const torch::Tensor& group_mean, const torch::Tensor& mean,
                                  const torch::Tensor& rstd, double eps, const std::vector<bool>& needs) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int64_t batch = x.size(0);
  const int64_t tiles_of_128 = (batch + 127) / 128;
  const torch::Tensor grad_y = dense(grad);
  torch::Tensor grad_x = needs[0] ? empty(x, torch::kFloat32, {batch, 8192}) : torch::Tensor();
  torch::Tensor grad_weight = needs[1] ? empty(x, torch::kFloat32, {8192, 8192}) : torch::Tensor();
  torch::Tensor grad_bias = needs[2] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_scale = needs[3] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_bn_weight = needs[4] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_bn_bias = needs[5] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  const Scratch scratch(x, {4 * batch * 8192, 2 * batch * 16384, 2 * 8192 * 16384, 4 * batch, 4 * 8192,
                            2 * batch * 16384, 2 * batch * 16384, 4 * batch, 4 * 8192});
  float* grad_product = scratch.piece<float>(0);
  gemmnorm::half* split_x = scratch.piece<gemmnorm::half>(1);
  gemmnorm::half* split_weight = scratch.piece<gemmnorm::half>(2);
  int* x_exponents = scratch.piece<int>(3);
  int* weight_exponents = scratch.piece<int>(4);
  gemmnorm::half* split_by_rows = scratch.piece<gemmnorm::half>(5);
  gemmnorm::half* split_by_columns = scratch.piece<gemmnorm::half>(6);
  int* row_exponents = scratch.piece<int>(7);
  int* column_exponents = scratch.piece<int>(8);
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;

  launch(fused_gemm_split_operands_2, batch + 8192, 256, stream, pointer<float>(x), pointer<float>(weight), split_x,
         split_weight, x_exponents, weight_exponents, 8192 /* weight_rows */, 8192);
  launch_hopper(fused_gemm_scale_bn_gradient_to_1024, 360, 256, 70288 /* shared */, 4 /* cluster */,
                false /* cooperative */, stream, pointer<float>(grad_y), pointer<float>(product),
                pointer<float>(group_mean), pointer<float>(scale), scale_stride, scale_value, pointer<float>(mean),
                pointer<float>(rstd), pointer<float>(bn_weight), pointer<float>(bn_bias), eps, x_exponents,
                column_exponents, pointer<float>(grad_bias), pointer<float>(grad_scale),
                pointer<float>(grad_bn_weight), pointer<float>(grad_bn_bias), grad_product, batch, 8192);
  launch(fused_gemm_split_gradient, batch, 256, stream, grad_product, x_exponents, weight_exponents,
         column_exponents, split_by_rows, split_by_columns, row_exponents, 8192);
  if (grad_x.defined()) launch_hopper(fused_gemm_split_grad_x,
                                      std::min<int64_t>(64 * tiles_of_128, multiprocessors()), 384,
                                      197632 /* shared */, 1 /* cluster */, false /* cooperative */, stream,
                                      tensor_map(split_by_rows, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 16384, 128, 64),
                                      tensor_map(split_weight, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 8192, 16384, 64, 64),
                                      row_exponents, pointer<float>(grad_x), 16 /* group_panels */, batch, 8192,
                                      8192);
  if (grad_weight.defined()) launch_hopper(fused_gemm_split_grad_weight, 132, 384, 197632 /* shared */,
                                           1 /* cluster */, false /* cooperative */, stream,
                                           tensor_map(split_by_columns, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 16384, 64, 64),
                                           tensor_map(split_x, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 16384, 64, 64),
                                           column_exponents, pointer<float>(grad_weight), 12 /* group_panels */,
                                           8192, batch, 8192);

  return {grad_x, grad_weight, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias};
}

// Chooses by the batch.
Tensors backward_training(const torch::Tensor& grad /* [batch, 8192] */, const torch::Tensor& x /* [batch, 8192] */,
                          const torch::Tensor& weight /* [8192, 8192] */, const MaybeTensor& bias /* [8192] */,
                          const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                          const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                          const torch::Tensor& product, const torch::Tensor& group_mean, const torch::Tensor& mean,
                          const torch::Tensor& rstd, double eps, const std::vector<bool>& needs) {
  const int64_t batch = x.size(0);
  auto run = backward_training_any;
  if (batch <= 1024) run = backward_training_to_1024;
  return run(grad, x, weight, bias, scale, scale_value, bn_weight, bn_bias, product, group_mean, mean, rstd, eps,
             needs);
}

// Through running statistics. Returns the gradients of x, weight, bias, scale, bn_weight and bn_bias; those
// that `needs` leaves out are undefined.
Tensors backward_evaluation(const torch::Tensor& grad /* [batch, 8192] */,
                            const torch::Tensor& x /* [batch, 8192] */,
                            const torch::Tensor& weight /* [8192, 8192] */, const MaybeTensor& bias /* [8192] */,
                            const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                            const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                            const torch::Tensor& product, const torch::Tensor& mean, const torch::Tensor& rstd,
                            double eps, const std::vector<bool>& needs) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int64_t batch = x.size(0);
  const int64_t groups = (batch + 63) / 64;
  const torch::Tensor grad_y = dense(grad);
  torch::Tensor grad_x = needs[0] ? empty(x, torch::kFloat32, {batch, 8192}) : torch::Tensor();
  torch::Tensor grad_weight = needs[1] ? empty(x, torch::kFloat32, {8192, 8192}) : torch::Tensor();
  torch::Tensor grad_bias = needs[2] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_scale = needs[3] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_bn_weight = needs[4] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_bn_bias = needs[5] ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor grad_product = empty(x, torch::kFloat32, {batch, 8192});
  const Scratch scratch(x, {4 * groups * 8192, 4 * groups * 8192, 4 * groups * 8192, 4 * 8192, 4 * 8192});
  float* group_sum = scratch.piece<float>(0);
  float* group_dot = scratch.piece<float>(1);
  float* group_linear = scratch.piece<float>(2);
  float* mean_grad = scratch.piece<float>(3);
  float* slope_grad = scratch.piece<float>(4);
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;

  launch(fused_gemm_scale_bn_gradient_sums, 64 * groups, 256, stream, pointer<float>(grad_y),
         pointer<float>(product), nullptr /* offset */, pointer<float>(bias), pointer<float>(scale), scale_stride,
         scale_value, pointer<float>(mean), pointer<float>(rstd), pointer<float>(bn_weight),
         pointer<float>(bn_bias), group_sum, group_dot, group_linear, batch, 8192);
  launch(fused_gemm_scale_bn_gradient_merge, 512, 256, stream, group_sum, group_dot, group_linear,
         pointer<float>(scale), scale_stride, scale_value, pointer<float>(rstd), pointer<float>(bn_weight), eps,
         mean_grad, slope_grad, pointer<float>(grad_bias), pointer<float>(grad_scale),
         pointer<float>(grad_bn_weight), pointer<float>(grad_bn_bias), batch, 8192);
  launch(fused_gemm_scale_bn_gradient_apply, 64 * groups, 256, stream, pointer<float>(grad_y),
         pointer<float>(product), nullptr /* offset */, pointer<float>(bias), pointer<float>(scale), scale_stride,
         scale_value, pointer<float>(mean), pointer<float>(rstd), pointer<float>(bn_weight),
         pointer<float>(bn_bias), mean_grad, slope_grad, pointer<float>(grad_product), batch, 8192);
  if (grad_x.defined()) at::mm_out(grad_x, grad_product, weight);  // by the library
  if (grad_weight.defined()) at::mm_out(grad_weight, grad_product.t(), x);  // by the library

  return {grad_x, grad_weight, grad_bias, grad_scale, grad_bn_weight, grad_bn_bias};
}
"""


@_functools.lru_cache(maxsize=None)
def _extension(capability):
    """The compiled kernels for one compute capability; a build that fails raises."""
    major, minor = capability
    arch = f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    source = _DECLARATIONS + _KERNELS + _HOST
    return _load_inline(
        name="gemmnorm_" + _hashlib.sha256((source + arch).encode()).hexdigest()[:16],
        cpp_sources=[_DECLARATIONS],
        cuda_sources=[_DECLARATIONS + _KERNELS + _HOST],
        functions=['forward_training', 'forward_evaluation', 'backward_training', 'backward_evaluation'],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"],
    )


@_functools.lru_cache(maxsize=None)
def _kernels_for(device):
    """The compiled kernels for a device, or None (with one warning) where they cannot be built."""
    capability = torch.cuda.get_device_capability(device)
    if _CUDA_HOME is None or torch.version.cuda is None:
        _warnings.warn("gemmnorm: no CUDA toolkit was found (CUDA_HOME); plain PyTorch operations run instead")
        return None
    if capability != (9, 0):
        _warnings.warn("gemmnorm: the kernels need compute capability 9.0 and no other; plain PyTorch operations run instead")
        return None
    return _extension(capability)


# Activations that the model applies as functions, by gemmnorm's names: what runs where the kernels do not.
_ACTIVATIONS = {}


class _FusedChain(torch.autograd.Function):
    """Linear, scale, BatchNorm and activation as one operation. Saved: x, the weight, the product, mean and rstd."""

    @staticmethod
    def forward(ctx, kernels, suffix, x, weight, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias,
                scale_value, training, momentum, eps, save):
        mode = ("training" if training else "evaluation") + suffix
        y, *saved = getattr(kernels, "forward_" + mode)(
            x, weight, bias, scale, scale_value, running_mean, running_var, counter, bn_weight, bn_bias, momentum, eps,
            save,
        )
        ctx.save_for_backward(x, weight, bias, scale, bn_weight, bn_bias, *saved)
        ctx.run = getattr(kernels, "backward_" + mode)
        ctx.numbers = (scale_value, eps)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, bias, scale, bn_weight, bn_bias, *saved = ctx.saved_tensors
        scale_value, eps = ctx.numbers
        operands = (x, weight, bias, scale, bn_weight, bn_bias)
        wanted = [ctx.needs_input_grad[i] for i in (2, 3, 4, 5, 9, 10)]
        found = ctx.run(grad, x, weight, bias, scale, scale_value, bn_weight, bn_bias, *saved, eps, wanted)
        found = [g if want else None for g, want in zip(found, wanted)]
        if found[3] is not None:  # one scale for all features: the sum of their gradients
            found[3] = found[3].sum() if scale.numel() == 1 else found[3]
            found[3] = found[3].reshape(scale.shape).to(scale.dtype)
        gx, gw, gb, gs, gg, gt = found
        return None, None, gx, gw, gb, gs, None, None, None, gg, gt, None, None, None, None, None


def _chain(problem, x, linear, bn, scale, activation):
    """activation(bn(linear(x) * scale)): by the kernels where they serve, else module by module."""
    in_features, out_features, dtype, fused_activation, suffix = problem
    activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
    tensors = [linear.weight, linear.bias, bn.weight, bn.bias, bn.running_mean, bn.running_var]
    tensors += [scale] if isinstance(scale, torch.Tensor) else []
    serves = (
        x.is_cuda and x.dim() == 2 and x.shape[0] > 0 and x.dtype == dtype
        and type(linear) is torch.nn.Linear and type(bn) is torch.nn.BatchNorm1d
        and tuple(linear.weight.shape) == (out_features, in_features) and x.shape[1] == in_features
        and all(t is None or (t.device == x.device and t.dtype == dtype and t.is_contiguous()) for t in tensors)
        and not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (linear, bn))
        and not torch.is_autocast_enabled()
    )
    kernels = _kernels_for(x.device) if serves else None
    if kernels is None:
        y = linear(x)
        y = bn(y if scale is None else y * scale)
        return y if activation is None else activation(y)
    training = bn.training or bn.running_mean is None
    if training and x.shape[0] == 1:
        size = torch.Size([1, out_features])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
    counter = bn.num_batches_tracked if bn.training and bn.track_running_stats else None
    momentum = bn.momentum if bn.momentum is not None else (0.0 if counter is None else -1.0)
    weight = linear.weight.contiguous()
    weight = weight.clone() if weight.data_ptr() % 16 else weight
    x = x.contiguous()
    x = x.clone() if x.data_ptr() % 16 else x
    learned = (x, weight, linear.bias, bn.weight, bn.bias, scale if isinstance(scale, torch.Tensor) else None)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned)
    is_tensor = isinstance(scale, torch.Tensor)
    y = _FusedChain.apply(
        kernels, suffix, x, weight, linear.bias, scale if is_tensor else None, bn.running_mean, bn.running_var, counter,
        bn.weight, bn.bias, 1.0 if is_tensor or scale is None else float(scale), training, momentum, bn.eps, save,
    )
    return y if activation is None or fused_activation else activation(y)


def fused_linear_scale_batch_norm(x, linear, bn, scale=None, activation=None):
    """Linear(8192, 8192) -> scale -> BatchNorm1d."""
    return _chain((8192, 8192, torch.float32, False, ''), x, linear, bn, scale, activation)


class ModelNew(Model):
    """`Model` with its chains fused."""

    def forward(self, x):
        return fused_linear_scale_batch_norm(x, self.gemm, self.bn, scale=self.scale)

