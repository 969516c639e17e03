// The backward of scale → BatchNorm → activation with respect to the product a, by elements and by features:
//   g = ∂L/∂z = grad_y · φ'(z), with z recomputed from a, so that neither z nor y need be kept
//   training:   da = γ·s·rstd · (g - Σg/B - (a - mean)·s²·rstd²·h/B)     h = Σ g·(a - mean)
//   evaluation: da = γ·s·rstd · g
// All kernels of the backward compute these with the functions of this file.
#pragma once
#include "common/affine.cuh"
#include "common/fp16x2.cuh"

namespace gemmnorm {

// One feature in the backward; in training with what its column sums come to.
template <Form FORM>
struct FeatureGradient : Affine<FORM> {
  float mean_grad, slope_grad;  // Σg/B and s²·rstd²·h/B

  template <class Activation>
  __device__ __forceinline__ float through_activation(float grad_y, float deviation) const {
    return Activation::identity ? grad_y : Activation::gradient(grad_y, this->slope * deviation + this->shift);
  }
  // da
  __device__ __forceinline__ float of_product(float g, float deviation) const {
    if (FORM == Form::kFolded) return this->slope * (g - mean_grad - deviation * slope_grad);
    return this->slope * this->scale * g;
  }
};

// Of feature j, by its affine map alone, or for the last launch with its column sums.
template <Form FORM, bool SUMMED, class Params>
__device__ __forceinline__ FeatureGradient<FORM> feature_gradient(const Params& p, int j) {
  FeatureGradient<FORM> f;
  static_cast<Affine<FORM>&>(f) = saved_affine<FORM>(p, j);
  f.mean_grad = f.slope_grad = 0.0f;
  if constexpr (SUMMED && FORM == Form::kFolded) {
    f.mean_grad = p.mean_grad[j];
    f.slope_grad = p.slope_grad[j];
  }
  return f;
}

// N neighbouring elements of the two tensors that the backward reads.
template <class T, class Y, int N>
struct GradientWords {
  Vec<T, N> product;
  Vec<Y, N> grad_y;
};

// Calls `visit(i, g, deviation of a)` for N neighbouring elements.
template <class Activation, Form FORM, class T, class Y, int N, class Visit>
__device__ __forceinline__ void visit_gradients(const GradientWords<T, Y, N>& words, const FeatureGradient<FORM> (&features)[N],
                                                const Visit& visit) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float deviation = features[i].deviation(words.product.value(i));
    visit(i, features[i].template through_activation<Activation>(words.grad_y.value(i), deviation), deviation);
  }
}

// For split operands: the largest exponents of N columns of da, every row multiplied by x's power of two.
template <int N>
struct ColumnExponents {
  int largest[N];

  __device__ __forceinline__ ColumnExponents() {
#pragma unroll
    for (int i = 0; i < N; ++i) largest[i] = kLeastExponent;
  }
  __device__ __forceinline__ void add(const float (&row)[N], int x_exponent) {
#pragma unroll
    for (int i = 0; i < N; ++i) largest[i] = max(largest[i], scaled_exponent(row[i], x_exponent));
  }
  __device__ __forceinline__ void merge_into(int* columns) const {
#pragma unroll
    for (int i = 0; i < N; ++i) atomicMax(&columns[i], largest[i]);
  }
};

// The column sums of one feature in training, and what its gradients depend on beside them.
struct FeatureSums {
  float sum, dot;  // Σg and h
  float scale, rstd, gamma;

  __device__ __forceinline__ float mean_grad(float rows) const { return sum / rows; }
  __device__ __forceinline__ float slope_grad(float rows) const { return scale * scale * rstd * rstd * dot / rows; }
};

// Training: the gradients of feature j's parameters, each of which may be null. The bias has none, since the mean takes it
// out again, and the scale acts only through eps.
template <class Params>
__device__ __forceinline__ void store_gradients(const Params& p, int j, const FeatureSums& f) {
  const float r = f.rstd;
  if (p.grad_bn_bias) from_float(f.sum, p.grad_bn_bias[j]);
  if (p.grad_bn_weight) from_float(f.scale * r * f.dot, p.grad_bn_weight[j]);
  if (p.grad_scale) p.grad_scale[j] = f.gamma * p.eps * r * r * r * f.dot;
  if (p.grad_bias) from_float(0.0f, p.grad_bias[j]);
}

}  // namespace gemmnorm
