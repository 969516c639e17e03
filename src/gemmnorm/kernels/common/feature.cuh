// The per-feature vectors of one feature, in registers.
#pragma once
#include "common/common.cuh"

namespace gemmnorm {

// What the last step reads of one feature.
struct FeatureValues {
  float s, b, gamma, shift, running_mean, running_var;

  __device__ __forceinline__ float slope() const { return gamma * s; }  // for rstd = 1
  // Evaluation: φ(c.x·a + c.y) of an element a of the product.
  __device__ __forceinline__ float2 coefficients(float eps) const {
    const float r = 1.0f / sqrtf(running_var + eps);
    return make_float2(slope() * r, shift + gamma * r * (s * b - running_mean));
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
