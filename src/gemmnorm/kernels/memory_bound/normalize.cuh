// Scale, shift, normalisation and activation in one sweep over the product.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

enum class Form {
  kFolded,    // training: y = γ·s·rstd · (a - mean) + β           mean of the product a
  kScaled,    // training: y = γ·rstd · (s·(a + b) - s·(mean + b)) + β
  kRunning,   // evaluation: y = γ·rstd · (s·(a + b) - running_mean) + β,  rstd = 1/sqrt(running_var + eps)
};

// Centred in every form: subtracting first keeps a column of large mean exact where α·a + κ would cancel.
//   y = φ( slope · (s·(a + b) - centre) + shift )        with s = 1, b = 0 in the folded form
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
template <class Config, class Params>
__device__ __forceinline__ void normalize(const Params& p) {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using L = typename Config::L;
  using R = typename Config::R;
  using Activation = typename Config::Activation;
  constexpr int N = Config::kVector, TX = Config::kThreadsX, GROUPS = Config::kGroups;
  constexpr Form FORM = Config::kForm;
  using P = Panel<N, TX, GROUPS>;
  P panel(p.batch, p.features);
  griddepcontrol_launch_dependents();
  if (panel.column >= p.features) return;
  griddepcontrol_wait();
  Affine<FORM> affine[N];
#pragma unroll
  for (int i = 0; i < N; ++i)
    affine[i].read(panel.column + i, p.bias, p.scale, p.scale_stride, p.scale_value, p.mean, p.rstd, p.running_mean, p.running_var,
                   p.bn_weight, p.bn_bias, p.eps);
  if (FORM == Form::kRunning && p.mean && panel.group == 0 && panel.lane == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      p.mean[panel.column + i] = affine[i].centre;
      p.rstd[panel.column + i] = 1.0f / sqrtf(to_float(p.running_var[panel.column + i]) + p.eps);
    }
  }
  constexpr int kAtOnce = P::kRows < 4 ? P::kRows : 4;  // loads in flight
  const int first_group = panel.group;
#pragma unroll 1
  for (int g = 0; g < GROUPS; ++g) {
    panel.at(first_group + g);
    if (panel.rows == 0) break;
    const i64 origin = panel.first_row * p.features + panel.column;
    float own[N];  // what was subtracted from this group
#pragma unroll
    for (int i = 0; i < N; ++i)
      own[i] = FORM == Form::kFolded && p.offset
                   ? p.offset[static_cast<i64>(panel.group) * p.features + panel.column + i]
                   : 0.0f;
#pragma unroll 1
    for (int r0 = 0; r0 < P::kRows; r0 += kAtOnce) {
      Vec<T, N> a[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        a[r] = load<T, N>(p.product + origin + panel.existing((r0 + r) * P::kLanes + panel.lane) * p.features);
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int row = (r0 + r) * P::kLanes + panel.lane;
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = Activation::value(affine[i](a[r].value(i), own[i]));
        if (row < panel.rows) store<Y, N>(p.y + origin + static_cast<i64>(row) * p.features, out);
      }
    }
  }
}

}  // namespace gemmnorm
