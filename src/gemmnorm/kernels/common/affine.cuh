// Scale → BatchNorm of one feature as z = slope·d + shift, where d is the deviation of an element a of the product.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

// Every form subtracts before it multiplies: a column of large mean stays exact, where α·a + κ would cancel.
enum class Form {
  kFolded,   // training:   d = a - mean                         slope = γ·s·rstd    mean of the product a
  kScaled,   // training:   d = s·(a + b) - s·(mean + b)         slope = γ·rstd
  kRunning,  // evaluation: d = s·(a + b) - running_mean         slope = γ/sqrt(running_var + eps)
};

template <Form FORM>
struct Affine {
  float slope, shift, centre;
  float scale, bias;  // not read in the folded form

  __device__ __forceinline__ float deviation(float a) const {
    return FORM == Form::kFolded ? a - centre : (a + bias) * scale - centre;
  }
  __device__ __forceinline__ float operator()(float a) const { return slope * deviation(a) + shift; }

  // For elements that were stored as a - offset (folded form only).
  __device__ __forceinline__ Affine stored_minus(float offset) const {
    Affine result = *this;
    if (FORM == Form::kFolded) result.centre = centre - offset;
    return result;
  }
};

// Of feature j in the forward: from the batch's mean and rstd, or from the running statistics.
template <Form FORM, class Params>
__device__ __forceinline__ Affine<FORM> forward_affine(const Params& p, int j) {
  const float s = scale_of(p.scale, p.scale_stride, p.scale_value, j), gamma = value_or(p.bn_weight, j, 1.0f);
  Affine<FORM> f;
  f.shift = value_or(p.bn_bias, j, 0.0f);
  f.scale = s;
  f.bias = FORM == Form::kFolded ? 0.0f : value_or(p.bias, j, 0.0f);
  if constexpr (FORM == Form::kFolded) {
    f.centre = p.mean[j];
    f.slope = gamma * s * p.rstd[j];
  } else if constexpr (FORM == Form::kScaled) {
    f.centre = (p.mean[j] + f.bias) * s;
    f.slope = gamma * p.rstd[j];
  } else {
    f.centre = to_float(p.running_mean[j]);
    f.slope = gamma / sqrtf(to_float(p.running_var[j]) + p.eps);
  }
  return f;
}

// Of feature j in the backward: from the mean and rstd that the forward kept, in evaluation those of z.
template <Form FORM, class Params>
__device__ __forceinline__ Affine<FORM> saved_affine(const Params& p, int j) {
  const float s = scale_of(p.scale, p.scale_stride, p.scale_value, j), gamma = value_or(p.bn_weight, j, 1.0f);
  Affine<FORM> f;
  f.shift = value_or(p.bn_bias, j, 0.0f);
  f.scale = s;
  f.bias = FORM == Form::kFolded ? 0.0f : value_or(p.bias, j, 0.0f);
  f.centre = p.mean[j];
  f.slope = FORM == Form::kFolded ? gamma * s * p.rstd[j] : gamma * p.rstd[j];
  return f;
}

}  // namespace gemmnorm
