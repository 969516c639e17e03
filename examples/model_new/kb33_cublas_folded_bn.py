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


# --- gemmnorm: generated for sm_80 and newer
#
# Below, `ModelNew` computes the same function as `Model` with fused CUDA kernels, forward and backward (cublas_folded_bn).
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
                          const torch::Tensor& product, const torch::Tensor& mean, const torch::Tensor& rstd,
                          double eps, const std::vector<bool>& needs);
Tensors backward_evaluation(const torch::Tensor& grad /* [batch, 8192] */,
                            const torch::Tensor& x /* [batch, 8192] */,
                            const torch::Tensor& weight /* [8192, 8192] */, const MaybeTensor& bias /* [8192] */,
                            const MaybeTensor& scale /* [8192] or [1] */, double scale_value,
                            const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                            const torch::Tensor& product, const torch::Tensor& mean, const torch::Tensor& rstd,
                            double eps, const std::vector<bool>& needs);
"""

_KERNELS = r"""
// Column statistics of the product: a mean and an M2 (sum of squared deviations) for every group of 64 rows, then
// their merge, which also updates the running statistics. Mean first, then M2 about that mean, at both levels: safe for
// |mean| >> std, and the order of every sum is fixed, so the same bits come out of every run.
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
// The backward of scale -> BatchNorm -> activation with respect to the product a, in two passes over (grad_y, a):
// column sums of every group of 64 rows, their merge into the gradients of the per-feature parameters, and
//   training:   da = gamma*s*rstd * ( g - mean(g) - (a - mean)*s^2*rstd^2*h/B )      g = grad_y * phi'    h = sum  g*(a - mean)
//   evaluation: da = gamma*s*rstd * g
// The bias has no gradient in training (the mean takes it out again), and the scale acts only through eps.
// float32 operands as two float16 each, for the tensor cores: v*2^-e = high + low*2^-11, with one exponent e per row.

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

struct Identity {
  static constexpr bool identity = true;
  static __device__ __forceinline__ float value(float z) { return z; }
  static __device__ __forceinline__ float gradient(float g, float z) { return g; }
};

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_statistics(
    const float* product /* [batch, features] */,
    const float* bias /* [features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* group_mean /* [groups, features] */,
    float* group_m2 /* [groups, features] */,
    long long* num_batches_tracked /* [1] or null */,
    int batch,
    int features) {
  gemmnorm::column_statistics<float, float, 4, 32, true>(
      product, bias, scale, scale_stride, scale_value, group_mean, group_m2, num_batches_tracked, batch, features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_merge(
    float* group_mean /* [groups, features] */,
    float* group_m2 /* [groups, features] */,
    const float* bias /* [features] or null */,
    const float* scale /* [features] or [1] or null */,
    int scale_stride /* 1 for a vector, 0 for one number */,
    float scale_value /* the scale where it is a plain number */,
    float* running_mean /* [features] or null */,
    float* running_var /* [features] or null */,
    long long* num_batches_tracked /* [1] or null */,
    float momentum /* negative for the cumulative average */,
    float eps,
    float* mean /* [features] */,
    float* rstd /* [features] */,
    int batch,
    int features) {
  gemmnorm::merge_statistics<float, float, true>(
      group_mean, group_m2, bias, scale, scale_stride, scale_value, running_mean, running_var, num_batches_tracked,
      momentum, eps, mean, rstd, batch, features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_apply(
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
  gemmnorm::normalize<float, float, float, float, 4, 32, 1, gemmnorm::Form::kFolded, Identity>(
      product, offset, bias, scale, scale_stride, scale_value, mean, rstd, running_mean, running_var, bn_weight,
      bn_bias, eps, y, batch, features);
}

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_evaluate(
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

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_gradient_sums(
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
  gemmnorm::gradient_sums<float, float, float, float, 4, 32, gemmnorm::Form::kFolded, Identity>(
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
  gemmnorm::merge_gradients<float, float, gemmnorm::Form::kFolded>(
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
  gemmnorm::product_gradient<float, float, float, float, 4, 32, 1, gemmnorm::Form::kFolded, Identity>(
      grad_y, product, offset, bias, scale, scale_stride, scale_value, mean, rstd, bn_weight, bn_bias, mean_grad,
      slope_grad, nullptr, nullptr, grad_product, batch, features);
}

extern "C" __global__ void __launch_bounds__(256, 1) fused_gemm_scale_bn_gradient_sums_evaluation(
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

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_gradient_merge_evaluation(
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

extern "C" __global__ void __launch_bounds__(256, 2) fused_gemm_scale_bn_gradient_apply_evaluation(
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

// Batch statistics. Returns y and, with `save`, what the backward needs: product, mean, rstd.
Tensors forward_training(const torch::Tensor& x /* [batch, 8192] */, const torch::Tensor& weight /* [8192, 8192] */,
                         const MaybeTensor& bias /* [8192] */, const MaybeTensor& scale /* [8192] or [1] */,
                         double scale_value, const MaybeTensor& running_mean /* [8192] */,
                         const MaybeTensor& running_var /* [8192] */, const MaybeTensor& num_batches_tracked,
                         const MaybeTensor& bn_weight /* [8192] */, const MaybeTensor& bn_bias /* [8192] */,
                         double momentum, double eps, bool save) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int64_t batch = x.size(0);
  const int64_t groups = (batch + 63) / 64;
  torch::Tensor y = empty(x, torch::kFloat32, {batch, 8192});
  torch::Tensor mean = empty(x, torch::kFloat32, {8192});
  torch::Tensor rstd = empty(x, torch::kFloat32, {8192});
  torch::Tensor product = save ? empty(x, torch::kFloat32, {batch, 8192}) : y;
  const Scratch scratch(x, {4 * groups * 8192, 4 * groups * 8192});
  float* group_mean = scratch.piece<float>(0);
  float* group_m2 = scratch.piece<float>(1);
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;

  at::mm_out(product, x, weight.t());  // by the library
  launch(fused_gemm_scale_bn_statistics, 64 * groups, 256, stream, pointer<float>(product), pointer<float>(bias),
         pointer<float>(scale), scale_stride, scale_value, group_mean, group_m2,
         pointer<long long>(num_batches_tracked), batch, 8192);
  launch(fused_gemm_scale_bn_merge, 512, 256, stream, group_mean, group_m2, pointer<float>(bias),
         pointer<float>(scale), scale_stride, scale_value, pointer<float>(running_mean),
         pointer<float>(running_var), pointer<long long>(num_batches_tracked), momentum, eps, pointer<float>(mean),
         pointer<float>(rstd), batch, 8192);
  launch(fused_gemm_scale_bn_apply, 64 * groups, 256, stream, pointer<float>(product), nullptr /* offset */,
         pointer<float>(bias), pointer<float>(scale), scale_stride, scale_value, pointer<float>(mean),
         pointer<float>(rstd), pointer<float>(running_mean), pointer<float>(running_var), pointer<float>(bn_weight),
         pointer<float>(bn_bias), eps, pointer<float>(y), batch, 8192);

  if (!save) return {y};
  return {y, product, mean, rstd};
}

// Running statistics. Returns y and, with `save`, what the backward needs: product, mean, rstd.
Tensors forward_evaluation(const torch::Tensor& x /* [batch, 8192] */,
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
  torch::Tensor y = empty(x, torch::kFloat32, {batch, 8192});
  torch::Tensor mean = save ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor rstd = save ? empty(x, torch::kFloat32, {8192}) : torch::Tensor();
  torch::Tensor product = save ? empty(x, torch::kFloat32, {batch, 8192}) : y;
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;

  at::mm_out(product, x, weight.t());  // by the library
  launch(fused_gemm_scale_bn_evaluate, 64 * groups, 256, stream, pointer<float>(product), nullptr /* offset */,
         pointer<float>(bias), pointer<float>(scale), scale_stride, scale_value, pointer<float>(mean),
         pointer<float>(rstd), pointer<float>(running_mean), pointer<float>(running_var), pointer<float>(bn_weight),
         pointer<float>(bn_bias), eps, pointer<float>(y), batch, 8192);

  if (!save) return {y};
  return {y, product, mean, rstd};
}

// Through batch statistics. Returns the gradients of x, weight, bias, scale, bn_weight and bn_bias; those
// that `needs` leaves out are undefined.
Tensors backward_training(const torch::Tensor& grad /* [batch, 8192] */, const torch::Tensor& x /* [batch, 8192] */,
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
  const Scratch scratch(x, {4 * groups * 8192, 4 * groups * 8192, 4 * 8192, 4 * 8192});
  float* group_sum = scratch.piece<float>(0);
  float* group_dot = scratch.piece<float>(1);
  float* mean_grad = scratch.piece<float>(2);
  float* slope_grad = scratch.piece<float>(3);
  const int scale_stride = scale && scale->numel() == 8192 ? 1 : 0;

  launch(fused_gemm_scale_bn_gradient_sums, 64 * groups, 256, stream, pointer<float>(grad_y),
         pointer<float>(product), nullptr /* offset */, pointer<float>(bias), pointer<float>(scale), scale_stride,
         scale_value, pointer<float>(mean), pointer<float>(rstd), pointer<float>(bn_weight),
         pointer<float>(bn_bias), group_sum, group_dot, nullptr /* group_linear */, batch, 8192);
  launch(fused_gemm_scale_bn_gradient_merge, 512, 256, stream, group_sum, group_dot, nullptr /* group_linear */,
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

  launch(fused_gemm_scale_bn_gradient_sums_evaluation, 64 * groups, 256, stream, pointer<float>(grad_y),
         pointer<float>(product), nullptr /* offset */, pointer<float>(bias), pointer<float>(scale), scale_stride,
         scale_value, pointer<float>(mean), pointer<float>(rstd), pointer<float>(bn_weight),
         pointer<float>(bn_bias), group_sum, group_dot, group_linear, batch, 8192);
  launch(fused_gemm_scale_bn_gradient_merge_evaluation, 512, 256, stream, group_sum, group_dot, group_linear,
         pointer<float>(scale), scale_stride, scale_value, pointer<float>(rstd), pointer<float>(bn_weight), eps,
         mean_grad, slope_grad, pointer<float>(grad_bias), pointer<float>(grad_scale),
         pointer<float>(grad_bn_weight), pointer<float>(grad_bn_bias), batch, 8192);
  launch(fused_gemm_scale_bn_gradient_apply_evaluation, 64 * groups, 256, stream, pointer<float>(grad_y),
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
    if capability < (8, 0):
        _warnings.warn("gemmnorm: the kernels need compute capability 8.0; plain PyTorch operations run instead")
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

