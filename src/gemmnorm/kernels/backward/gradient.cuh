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
template <class Config, class Params>
__device__ __forceinline__ void gradient_sums(const Params& p) {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using L = typename Config::L;
  using R = typename Config::R;
  using Activation = typename Config::Activation;
  constexpr int N = Config::kVector, TX = Config::kThreadsX;
  constexpr Form FORM = Config::kForm;
  using P = Panel<N, TX>;
  __shared__ float shared[kThreads * N];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const P panel(p.batch, p.features);
  const bool inside = panel.column < p.features;
  const i64 group_row = static_cast<i64>(panel.group) * p.features + panel.column;
  SavedAffine<FORM> affine[N];
  float sum[N], dot[N], linear[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum[i] = dot[i] = linear[i] = 0.0f;
    if (inside) {
      affine[i].read(panel.column + i, p.bias, p.scale, p.scale_stride, p.scale_value, p.mean, p.rstd, p.bn_weight, p.bn_bias);
      if (FORM == Form::kFolded) affine[i].centre -= value_or(p.offset, group_row + i, 0.0f);
    }
  }
  constexpr int kAtOnce = P::kRows < 4 ? P::kRows : 4;
  const i64 origin = panel.first_row * p.features + (inside ? panel.column : 0);
#pragma unroll 1
  for (int r0 = 0; r0 < P::kRows; r0 += kAtOnce) {
    Vec<T, N> a[kAtOnce];
    Vec<Y, N> dy[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const i64 at = origin + panel.existing((r0 + r) * P::kLanes + panel.lane) * p.features;
      a[r] = load<T, N>(p.product + at);
      dy[r] = load<Y, N>(p.grad_y + at);
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
      p.group_sum[group_row + i] = sum[i];
      p.group_dot[group_row + i] = dot[i];
      if (FORM == Form::kRunning) p.group_linear[group_row + i] = linear[i];
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
template <class Config, class Params>
__device__ __forceinline__ void merge_gradients(const Params& p) {
  using L = typename Config::L;
  using R = typename Config::R;
  constexpr Form FORM = Config::kForm;
  __shared__ float shared[kThreads];
  const int j = blockIdx.x * kMergeColumns + threadIdx.x % kMergeColumns;
  const int lane = threadIdx.x / kMergeColumns;
  const int groups = (p.batch + kGroupRows - 1) / kGroupRows;
  const bool inside = j < p.features;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  float sum = 0.0f, dot = 0.0f, linear = 0.0f;
  if (inside) {
#pragma unroll 4
    for (int g = lane; g < groups; g += kMergeLanes) {
      const i64 at = static_cast<i64>(g) * p.features + j;
      sum += p.group_sum[at];
      dot += p.group_dot[at];
      if (FORM == Form::kRunning) linear += p.group_linear[at];
    }
  }
  sum = sum_over_merge_lanes(sum, shared);
  dot = sum_over_merge_lanes(dot, shared);
  if (FORM == Form::kRunning) linear = sum_over_merge_lanes(linear, shared);
  if (!inside || lane != 0) return;
  const float s = scale_of(p.scale, p.scale_stride, p.scale_value, j);
  const float r = p.rstd[j], gamma = value_or(p.bn_weight, j, 1.0f);
  if (p.column_exponents) p.column_exponents[j] = kLeastExponent;
  if (FORM == Form::kFolded) {
    store_gradients(j, sum, dot, s, r, gamma, p.eps, p.grad_bias, p.grad_scale, p.grad_bn_weight, p.grad_bn_bias);
    p.mean_grad[j] = sum / p.batch;
    p.slope_grad[j] = s * s * r * r * dot / p.batch;
  } else {
    if (p.grad_bn_bias) from_float(sum, p.grad_bn_bias[j]);
    if (p.grad_bn_weight) from_float(r * dot, p.grad_bn_weight[j]);
    if (p.grad_scale) p.grad_scale[j] = gamma * r * linear;
    if (p.grad_bias) from_float(gamma * s * r * sum, p.grad_bias[j]);
  }
}

// ∂L/∂a, in the product's type. For split operands also the largest exponent of each of its columns, every row
// multiplied by x's power of two.
template <class Config, class Params>
__device__ __forceinline__ void product_gradient(const Params& p) {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using L = typename Config::L;
  using R = typename Config::R;
  using Activation = typename Config::Activation;
  constexpr int N = Config::kVector, TX = Config::kThreadsX, GROUPS = Config::kGroups;
  constexpr Form FORM = Config::kForm;
  using P = Panel<N, TX, GROUPS, true>;
  P panel(p.batch, p.features);
  griddepcontrol_launch_dependents();
  if (panel.column >= p.features) return;
  griddepcontrol_wait();
  SavedAffine<FORM> affine[N];
  float slope[N], constant[N], linear[N];
  int most[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int j = panel.column + i;
    most[i] = kLeastExponent;
    affine[i].read(j, p.bias, p.scale, p.scale_stride, p.scale_value, p.mean, p.rstd, p.bn_weight, p.bn_bias);
    if (FORM == Form::kFolded) {
      slope[i] = affine[i].slope;
      constant[i] = p.mean_grad[j];
      linear[i] = p.slope_grad[j];
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
    const i64 origin = panel.first_row * p.features + panel.column;
    float own[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
      own[i] = FORM == Form::kFolded && p.offset
                   ? p.offset[static_cast<i64>(panel.group) * p.features + panel.column + i]
                   : 0.0f;
#pragma unroll 1
    for (int r0 = 0; r0 < P::kRows; r0 += kAtOnce) {
      Vec<T, N> a[kAtOnce];
      Vec<Y, N> dy[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const i64 at = origin + panel.existing((r0 + r) * P::kLanes + panel.lane) * p.features;
        a[r] = load<T, N>(p.product + at);
        dy[r] = load<Y, N>(p.grad_y + at);
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
          store<T, N>(p.grad_product + origin + static_cast<i64>(row) * p.features, out);
          if (p.column_exponents) {
            const int exponent = p.x_exponents[panel.first_row + row];
#pragma unroll
            for (int i = 0; i < N; ++i) most[i] = max(most[i], scaled_exponent(out[i], exponent));
          }
        }
      }
    }
  }
  if (p.column_exponents) {
#pragma unroll
    for (int i = 0; i < N; ++i) atomicMax(&p.column_exponents[panel.column + i], most[i]);
  }
}

}  // namespace gemmnorm
