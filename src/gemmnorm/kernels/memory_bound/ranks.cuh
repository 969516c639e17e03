// Column statistics over the ranks of a process group. `pack_statistics` writes this rank's as one row of numbers, one
// all_gather collects the rows, and `merge_ranks` merges them in the order of the ranks: every rank gets the same bits.
//
// A row is the mean of the product a [features], its M2 about that mean [features], and the number of batch rows; a rank
// without rows sends zeros. Counts stay on the device, so ranks may differ in them from call to call.
#pragma once
#include "memory_bound/statistics.cuh"

namespace gemmnorm {

template <class Config, class Params>
__device__ __forceinline__ void pack_statistics(const Params& p) {
  __shared__ float shared[kThreads];
  const GroupMerge<Config::kColumns, Config::kRows> merge(p.batch, p.features);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const MergedGroups of = merge_groups<true>(p, merge, 1.0f, 0.0f, shared);
  if (!merge.inside() || merge.lane != 0) return;
  p.local_statistics[merge.j] = of.mean;
  p.local_statistics[p.features + merge.j] = of.m2;
  if (merge.j == 0) p.local_statistics[2 * p.features] = p.batch;
}

// mean, rstd, running statistics and the count of all rows, of kColumns features a block. num_batches_tracked counts this batch
// already. The mean is taken as deviations from the first rank's, so that of a constant column it is exact.
template <class Config, class Params>
__device__ __forceinline__ void merge_ranks(const Params& p) {
  __shared__ float shared[kThreads];
  GroupMerge<Config::kColumns, kGroupRows> merge(p.ranks * kGroupRows, 2 * p.features + 1);  // "groups" of one row each
  const bool inside = merge.j < p.features;
  const int j = merge.j = min(merge.j, p.features - 1);
  // The first launch of its call: what it reads may have been written just before, and the next may begin without waiting.
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  FeatureStatistics f = read_feature(p, j);
  f.batches = counted_batches(p);

  const float* rows_of = p.gathered + 2 * p.features - j;  // at a feature's place
  const float first = p.gathered[j];
  float within[3] = {}, between[1] = {};  // Σ rows, Σ rows·(mean - first) and ΣM2; Σ rows·deviation²
  merge.add_up(within, shared, [&](i64 at) { return make_float3(rows_of[at], p.gathered[at], p.gathered[at + p.features]); },
               [&](float (&sum)[3], float3 of_rank, int) {
                 sum[0] += of_rank.x;
                 sum[1] += of_rank.x * (of_rank.y - first);
                 sum[2] += of_rank.z;
               });
  const float rows = within[0], mean = first + within[1] / fmaxf(rows, 1.0f);
  merge.add_up(between, shared, [&](i64 at) { return make_float2(rows_of[at], p.gathered[at]); },
               [&](float (&sum)[1], float2 of_rank, int) {
                 const float deviation = of_rank.y - mean;
                 sum[0] += deviation * deviation * of_rank.x;
               });
  if (!inside || merge.lane != 0) return;
  f.mean = mean;
  f.variance = f.scale * f.scale * (within[2] + between[0]) / fmaxf(rows, 1.0f);
  f.keep_running = rows == 0.0f;
  Params all = p;
  all.batch = max(2, static_cast<int>(rows));  // one row has no variance, whatever that is divided by
  finish_feature(all, j, f);
  p.row_count[j] = rows;
}

}  // namespace gemmnorm
