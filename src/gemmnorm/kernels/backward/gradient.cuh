// The backward with respect to the product in three launches (formulas in formulas.cuh): column sums of every group of 64
// rows, their merge into the gradients of the per-feature parameters, and the gradient of the product. grad_y and the
// product are read twice. The planner takes them in evaluation, on GPUs other than Hopper, where a row is not whole words of 16
// bytes, and for batches of which the L2 cannot keep a panel.
#pragma once
#include "backward/formulas.cuh"
#include "memory_bound/group_tile.cuh"

namespace gemmnorm {

// group_sum = Σg and group_dot = Σ g·(a - mean) of one group and TX·N features a block; in evaluation group_dot is
// Σ g·(s·(a + b) - running_mean), and for the scale there is group_linear = Σ g·(a + b).
// `offset` [groups, features] or null is what the forward subtracted from a group of rows before it stored the product.
template <class Config, class Params>
__device__ __forceinline__ void gradient_sums(const Params& p) {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using Activation = typename Config::Activation;
  constexpr int N = Config::kVector, TX = Config::kThreadsX, kInFlight = 2;
  constexpr Form FORM = Config::kForm;
  using Words = GradientWords<T, Y, N>;
  __shared__ float shared[kThreads * N];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const GroupTile<N, TX> tile(p.batch, p.features);
  const i64 group_row = tile.group_row();
  FeatureGradient<FORM> feature[N];
  float sum[N] = {}, dot[N] = {}, linear[N] = {};
  tile.template visit_rows<kInFlight>(
      [&](i64 at) { return Words{load<T, N>(p.product + at), load<Y, N>(p.grad_y + at)}; },
      [&] {
        tile.share_features(feature, [&](int j) { return feature_gradient<FORM, false>(p, j); });
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (FORM == Form::kFolded) feature[i].centre -= value_or(p.offset, group_row + i, 0.0f);
      },
      [&](int, const Words& words) {
        visit_gradients<Activation>(words, feature, [&](int i, float g, float deviation) {
          sum[i] += g;
          dot[i] += g * deviation;
          if (FORM == Form::kRunning) linear[i] += g * (words.product.value(i) + feature[i].bias);
        });
      });
  sum_over_lanes<N, TX>(sum, shared);
  sum_over_lanes<N, TX>(dot, shared);
  if (FORM == Form::kRunning) sum_over_lanes<N, TX>(linear, shared);
  if (!tile.inside || tile.lane != 0) return;
  store<float, N>(p.group_sum + group_row, sum);
  store<float, N>(p.group_dot + group_row, dot);
  if (FORM == Form::kRunning) store<float, N>(p.group_linear + group_row, linear);
}

// The gradients of kColumns features' parameters a block, and in training the two numbers per feature that the last kernel
// needs: with statistics over several ranks this one's share of them.
template <class Config, class Params>
__device__ __forceinline__ void merge_gradients(const Params& p) {
  constexpr Form FORM = Config::kForm;
  constexpr int kSums = FORM == Form::kRunning ? 3 : 2;
  __shared__ float shared[kThreads];
  const GroupMerge<Config::kColumns, Config::kRows> merge(p.batch, p.features);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int j = min(merge.j, p.features - 1);
  const float s = scale_of(p.scale, p.scale_stride, p.scale_value, j), gamma = value_or(p.bn_weight, j, 1.0f), rstd = p.rstd[j];
  float sum[kSums] = {};
  merge.add_up(sum, shared,
               [&](i64 at) {
                 return make_float3(p.group_sum[at], p.group_dot[at], FORM == Form::kRunning ? p.group_linear[at] : 0.0f);
               },
               [](float (&sum)[kSums], float3 of_group, int) {
                 sum[0] += of_group.x;
                 sum[1] += of_group.y;
                 if constexpr (FORM == Form::kRunning) sum[2] += of_group.z;
               });
  if (!merge.inside() || merge.lane != 0) return;
  const FeatureSums f = {sum[0], sum[1], s, rstd, gamma};
  if constexpr (kHasField<decltype(&Params::column_exponents)>) p.column_exponents[j] = kLeastExponent;
  if constexpr (FORM == Form::kFolded) {
    store_gradients(p, j, f);
    float rows = p.batch;
    if constexpr (kHasField<decltype(&Params::row_count)>) rows = fmaxf(p.row_count[j], 1.0f);  // of all ranks
    p.mean_grad[j] = f.mean_grad(rows);
    p.slope_grad[j] = f.slope_grad(rows);
  } else {
    if (p.grad_bn_bias) from_float(f.sum, p.grad_bn_bias[j]);
    if (p.grad_bn_weight) from_float(f.rstd * f.dot, p.grad_bn_weight[j]);
    if (p.grad_scale) p.grad_scale[j] = gamma * f.rstd * sum[2];
    if (p.grad_bias) from_float(gamma * s * f.rstd * f.sum, p.grad_bias[j]);
  }
}

// da, in the product's type; for split operands its columns' exponents too. From the last rows on, which gradient_sums read
// last.
template <class Config, class Params>
__device__ __forceinline__ void product_gradient(const Params& p) {
  using T = typename Config::T;
  using Y = typename Config::Y;
  using Activation = typename Config::Activation;
  constexpr int N = Config::kVector;
  constexpr Form FORM = Config::kForm;
  constexpr bool kExponents = kHasField<decltype(&Params::column_exponents)>;
  constexpr int kInFlight = Activation::identity && sizeof(T) == sizeof(Y) ? 8 : 4;  // what the registers hold
  using Words = GradientWords<T, Y, N>;
  const GroupTile<N, Config::kThreadsX, true> tile(p.batch, p.features);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  FeatureGradient<FORM> feature[N];
  ColumnExponents<N> exponents;
  tile.template visit_rows<kInFlight>(
      [&](i64 at) { return Words{load<T, N>(p.product + at), load<Y, N>(p.grad_y + at)}; },
      [&] {
        tile.share_features(feature, [&](int j) { return feature_gradient<FORM, true>(p, j); });
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (FORM == Form::kFolded) feature[i].centre -= value_or(p.offset, tile.group_row() + i, 0.0f);
      },
      [&](int row, const Words& words) {
        float out[N];
        visit_gradients<Activation>(words, feature, [&](int i, float g, float d) { out[i] = feature[i].of_product(g, d); });
        if (!tile.inside) return;
        store<T, N>(p.grad_product + tile.at(row), out);
        if constexpr (kExponents) exponents.add(out, p.x_exponents[tile.group * kGroupRows + row]);
      });
  if (!tile.inside) return;
  if constexpr (kExponents) exponents.merge_into(p.column_exponents + tile.column);
}

}  // namespace gemmnorm
