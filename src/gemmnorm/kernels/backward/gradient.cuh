// The backward of scale → BatchNorm → activation with respect to the product a, in two passes over (grad_y, a):
// column sums of every group of 64 rows, their merge into the gradients of the per-feature parameters, and
//   training:   da = γ·s·rstd · ( g - mean(g) - (a - mean)·s²·rstd²·h/B )      g = grad_y · φ'    h = Σ g·(a - mean)
//   evaluation: da = γ·s·rstd · g
// The bias has no gradient in training (the mean takes it out again), and the scale acts only through eps.
#pragma once
#include "memory_bound/normalize.cuh"
#include "memory_bound/split.cuh"
#include "memory_bound/statistics.cuh"

namespace gemmnorm {

// g = grad_y · φ'(normalised value), recomputed from a so that y need not be kept.
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

// Σg and Σ g·(a - mean) of every group; in evaluation Σ g·(z - running_mean) and, for the scale, Σ g·(a + b).
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

// In training: Σg and h = Σ g·(a - mean) of feature j → the gradients of its parameters, each of which may be null.
template <class L, class R>
__device__ __forceinline__ void store_gradients(int j, float sum, float h, float s, float r, float gamma, float eps,
                                                L* grad_bias, float* grad_scale, R* grad_bn_weight, R* grad_bn_bias) {
  if (grad_bn_bias) from_float(sum, grad_bn_bias[j]);
  if (grad_bn_weight) from_float(s * r * h, grad_bn_weight[j]);
  if (grad_scale) grad_scale[j] = gamma * eps * r * r * r * h;
  if (grad_bias) from_float(0.0f, grad_bias[j]);
}

// The groups' sums, added up in a fixed order, become the parameters' gradients, and the two numbers per feature that
// the last kernel needs: mean_grad = Σg/B and slope_grad = s²·rstd²·h/B. Each gradient may be null.
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

// ∂L/∂a, in the product's type. For split operands also the largest exponent of each of its columns, every row
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
