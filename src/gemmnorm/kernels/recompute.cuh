// Features whose split operands were not enough, once more in float32 arithmetic; nothing where there are none.
#pragma once
#include "panel_units.cuh"

namespace gemmnorm {

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

constexpr int kTogether = 8;  // features whose products share what is read of x

// Products of every row of x with the rows `list` of the weight, a warp to a row of x. Out: their columns of y.
__device__ __forceinline__ void multiply_features(const float* x, const float* weight, const int (&list)[kThreads],
                                                  int first, int count, float* y, int batch, int in_features,
                                                  int features) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < batch; row += kThreads / 32) {
    float sum[kTogether] = {};
    for (int c = lane * 4; c < in_features; c += 128) {
      const Vec<float, 4> a = load<float, 4>(x + static_cast<i64>(row) * in_features + c);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (n >= count) break;
        const Vec<float, 4> b = load<float, 4>(weight + static_cast<i64>(list[first + n]) * in_features + c);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n] += a.at[i] * b.at[i];
      }
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
#pragma unroll
      for (int bit = 16; bit; bit /= 2) sum[n] += __shfl_xor_sync(~0u, sum[n], bit);
      if (lane == n && n < count) y[static_cast<i64>(row) * features + list[first + n]] = sum[n];
    }
  }
}

// The product's column j, in y → its statistics, where they are the batch's, and y itself.
template <bool TRAINING, class Activation, class L, class R>
__device__ __forceinline__ void normalize_column(const Features<L, R>& f, int j, float* product, float* y,
                                                 float* shared /* [kThreads / 32] */) {
  const float s = f.s(j), b = f.b(j);
  float centre, r;
  if (TRAINING) {
    float sum = 0.0f;
    for (int row = threadIdx.x; row < f.batch; row += kThreads) sum += y[static_cast<i64>(row) * f.features + j];
    centre = sum_over_block(sum, shared) / f.batch;
    sum = 0.0f;
    for (int row = threadIdx.x; row < f.batch; row += kThreads) {
      const float deviation = y[static_cast<i64>(row) * f.features + j] - centre;
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
    const float a = y[at];
    if (product) product[at] = a;
    y[at] = Activation::value(slope * (a - origin) + shift);
  }
}

// A block takes every gridDim-th feature. y serves as memory for the product's columns until their statistics are known.
template <class L, class R, bool TRAINING, class Activation>
__device__ __forceinline__ void recompute_features(const float* x /* [batch, in_features] */,
                                                   const float* weight /* [features, in_features] */,
                                                   const int* flags /* [features], in training */,
                                                   const float* weight_largest /* [features] */,
                                                   const float* weight_total /* [features] */,
                                                   u32* most /* [3]: left zero */,
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
  __shared__ float shared[kThreads / 32], x_largest, x_total;
  __shared__ int list[kThreads];
  __shared__ u32 count;
  const Features<L, R> f = {bias,    scale,   scale_stride, scale_value,     running_mean, running_var,
                            bn_weight, bn_bias, batches_tracked, momentum,   eps,          group_mean,
                            nullptr, mean,    rstd,         nullptr,         nullptr,      {},
                            batch,   features, (batch + kGroupRows - 1) / kGroupRows};
  allow_next();
  wait_for_previous();
  if (threadIdx.x == 0) {
    x_largest = __uint_as_float(most[0]);
    x_total = __uint_as_float(most[1]);
    __threadfence();
    if (atomicAdd(&most[2], 1u) == gridDim.x - 1) most[0] = most[1] = most[2] = 0;  // everybody has read
  }
  // In training whoever merged a feature's statistics has decided. In evaluation its running deviation tells.
  const auto lost = [&](int j) {
    if (TRAINING) return flags[j] != 0;
    const float variance = to_float(running_var[j]) + eps, s = f.s(j);
    const float deviation = s == 0.0f ? 3e38f : sqrtf(variance) / fabsf(s);
    return split_loses(x_largest, x_total, weight_largest[j], weight_total[j], deviation);
  };
  for (int start = blockIdx.x; start < features; start += gridDim.x * kThreads) {
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const int mine = start + threadIdx.x * gridDim.x;
    if (mine < features && lost(mine)) list[atomicAdd(&count, 1u)] = mine;
    __syncthreads();
    const int flagged = count;
    for (int n = 0; n < flagged; ++n) {
      if (n % kTogether == 0) {
        multiply_features(x, weight, list, n, min(kTogether, flagged - n), y, batch, in_features, features);
        __syncthreads();
      }
      normalize_column<TRAINING, Activation>(f, list[n], keep_product ? product : nullptr, y, shared);
    }
    __syncthreads();
  }
}

}  // namespace gemmnorm
