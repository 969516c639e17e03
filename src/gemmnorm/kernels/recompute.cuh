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

// One block to a feature. y serves as memory for the product's column until its statistics are known.
template <class L, class R, bool TRAINING, class Activation>
__device__ __forceinline__ void recompute_features(const float* x /* [batch, in_features] */,
                                                   const float* weight /* [features, in_features] */,
                                                   const int* flags /* [features] */, u32* most /* [2]: left zero */,
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
  __shared__ float shared[kThreads / 32];
  allow_next();
  wait_for_previous();
  if (blockIdx.x == 0 && threadIdx.x < 2) most[threadIdx.x] = 0;
  const int lane = threadIdx.x % 32;
  for (int j = blockIdx.x; j < features; j += gridDim.x) {
    if (!flags[j]) continue;
    for (int row = threadIdx.x / 32; row < batch; row += kThreads / 32) {
      float sum = 0.0f;
      for (int c = lane * 4; c < in_features; c += 128) {
        const Vec<float, 4> a = load<float, 4>(x + static_cast<i64>(row) * in_features + c);
        const Vec<float, 4> b = load<float, 4>(weight + static_cast<i64>(j) * in_features + c);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += a.at[i] * b.at[i];
      }
#pragma unroll
      for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
      if (lane == 0) y[static_cast<i64>(row) * features + j] = sum;
    }
    __syncthreads();
    const float s = scale_of(scale, scale_stride, scale_value, j), b = value_or(bias, j, 0.0f);
    float centre, r;
    if (TRAINING) {
      float sum = 0.0f;
      for (int row = threadIdx.x; row < batch; row += kThreads) sum += y[static_cast<i64>(row) * features + j];
      centre = sum_over_block(sum, shared) / batch;
      sum = 0.0f;
      for (int row = threadIdx.x; row < batch; row += kThreads) {
        const float deviation = y[static_cast<i64>(row) * features + j] - centre;
        sum += deviation * deviation;
      }
      const float variance = s * s * sum_over_block(sum, shared) / batch;
      r = 1.0f / sqrtf(variance + eps);
      if (threadIdx.x == 0) {
        const float batches = batches_tracked ? static_cast<float>(*batches_tracked) : 0.0f;
        finish_feature(j, centre, variance, s, b, batches, running_mean, running_var, momentum, eps, mean, rstd, batch);
      }
      for (int g = threadIdx.x; g < (batch + kGroupRows - 1) / kGroupRows; g += kThreads)
        group_mean[static_cast<i64>(g) * features + j] = 0.0f;
    } else {
      centre = to_float(running_mean[j]);
      r = 1.0f / sqrtf(to_float(running_var[j]) + eps);
    }
    const float q = value_or(bn_weight, j, 1.0f) * r, slope = q * s;
    const float shift = value_or(bn_bias, j, 0.0f) + (TRAINING ? 0.0f : q * (s * b - centre));
    for (int row = threadIdx.x; row < batch; row += kThreads) {
      const i64 at = static_cast<i64>(row) * features + j;
      const float a = y[at];
      if (keep_product) product[at] = a;
      y[at] = Activation::value(slope * (TRAINING ? a - centre : a) + shift);
    }
    __syncthreads();
  }
}

}  // namespace gemmnorm
