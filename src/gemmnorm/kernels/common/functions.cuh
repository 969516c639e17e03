// What activations are made of. Errors are those of float32 arithmetic; NaN stays NaN, and infinity goes to the limit.
#pragma once
#include "ptx/ampere.cuh"

namespace gemmnorm {

constexpr float kLog2E = 1.4426950408889634f;

// 1 / (1 + e^-z)
__device__ __forceinline__ float sigmoid(float z) { return reciprocal(1.0f + power_of_2(-kLog2E * z)); }

// 1 - tanh², which by itself has no digits left where tanh is near 1.
__device__ __forceinline__ float tanh_derivative(float z) {
  const float e = power_of_2(-2.0f * kLog2E * fabsf(z)), r = reciprocal(1.0f + e);
  return 4.0f * e * r * r;
}

// √2π times the density of the normal distribution.
__device__ __forceinline__ float bell(float z) { return power_of_2(-0.5f * kLog2E * z * z); }

// The distribution function of the normal distribution: below zero bell(z)·P(1 / (1 + p·|z|)), without cancellation. P is
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
