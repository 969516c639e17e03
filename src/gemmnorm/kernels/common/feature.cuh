// The per-feature vectors of one feature, in registers.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

// 1/sqrt(v) to 40 bits, by one step of Newton's: the library's needs a stack.
__device__ __forceinline__ double wide_rsqrt(double v) {
  const double r = rsqrtf(static_cast<float>(v)), refined = r * (1.5 - 0.5 * v * r * r);
  return refined == refined ? refined : r;  // not for v = 0 and ∞
}

// Of one feature: z = slope·a + shift. The terms of the shift may cancel, each other or slope·a, and what it is rounded by is
// alike in all rows: beside a product of float32 accuracy, `rest` is the bits of the shift beyond 24.
struct Coefficients {
  float slope, shift, rest;

  template <bool HAS_REST>
  __device__ __forceinline__ float value(float a) const {
    return HAS_REST ? (slope * a + rest) + shift : slope * a + shift;
  }
};

// What the last step reads of one feature.
struct FeatureValues {
  float s, b, gamma, shift, running_mean, running_var;

  __device__ __forceinline__ float slope() const { return gamma * s; }  // for rstd = 1
  // Evaluation, of an element a of the product.
  template <bool HAS_REST>
  __device__ __forceinline__ Coefficients coefficients(float eps) const {
    if constexpr (HAS_REST) {
      const double wide = s, r = gamma * wide_rsqrt(static_cast<double>(running_var) + eps);
      const double sum = shift + r * (wide * b - running_mean);
      const float rounded = static_cast<float>(sum), rest = static_cast<float>(sum - rounded);
      return {static_cast<float>(r * wide), rounded, rest == rest ? rest : 0.0f};  // of ∞ there is none
    } else {
      const float r = 1.0f / sqrtf(running_var + eps);
      return {slope() * r, shift + gamma * r * (s * b - running_mean), 0.0f};
    }
  }
};

template <class V>
__device__ V pointee(const V*);  // for its type only

// The same as it is in memory. Of several features, load all before the first is converted: the loads are in flight together as
// long as nothing between them branches (a square root does), stores, or waits for a value.
template <class Params>
struct RawFeature {
  template <class Pointer>
  using Pointee = decltype(pointee(Pointer{}));
  Pointee<decltype(Params::bias)> bias, scale;
  Pointee<decltype(Params::bn_weight)> bn_weight, bn_bias;
  Pointee<decltype(Params::running_mean)> running_mean, running_var;

  template <class V>
  static __device__ __forceinline__ V element(const V* vector, i64 j) {
    V v = {};
    if (vector) v = vector[j];
    return v;
  }
  static __device__ __forceinline__ RawFeature load(const Params& p, int j) {
    return {element(p.bias, j),    element(p.scale, static_cast<i64>(j) * p.scale_stride), element(p.bn_weight, j),
            element(p.bn_bias, j), element(p.running_mean, j), element(p.running_var, j)};
  }
  __device__ __forceinline__ FeatureValues values(const Params& p) const {
    return {p.scale ? to_float(scale) : p.scale_value, to_float(bias),         p.bn_weight ? to_float(bn_weight) : 1.0f,
            to_float(bn_bias),                         to_float(running_mean), to_float(running_var)};
  }
};

}  // namespace gemmnorm
