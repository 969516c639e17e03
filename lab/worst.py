"""Which columns of the benchmark's own data have the largest error, and what is special about them.

    PYTHONPATH=src python lab/worst.py [case] [precision]        on a GPU
"""

import sys

import torch

import gemmnorm
from gemmnorm.bench.cases import CASES, Cell, prepare

case = CASES[sys.argv[1] if len(sys.argv) > 1 else "kb33"]
cell = Cell(case, sys.argv[2] if len(sys.argv) > 2 else "bf16", False, "train_fwd")
prepared = prepare(cell, torch.device("cuda"))
eager, x = prepared.eager, prepared.x
with torch.no_grad():
    a = x.double() @ eager.gemm.weight.double().t()
    scale = eager.scale.double() if eager.has_scale else torch.ones(case.out_features, device="cuda", dtype=torch.float64)
    gamma, beta = eager.bn.weight.double(), eager.bn.bias.double()
    mean, var = a.mean(0), a.var(0, unbiased=False)
    slope = gamma * scale * (scale * scale * var + eager.bn.eps).rsqrt()
    golden = (a - mean) * slope + beta
    golden = golden.relu() if eager.relu else golden
    rounded = golden.to(x.dtype).double()

    def call(strategy):
        bn = eager.bn
        return gemmnorm.linear_scale_batch_norm(
            x, eager.gemm.weight, eager.gemm.bias, eager.scale if eager.has_scale else None,
            bn.running_mean.clone(), bn.running_var.clone(), bn.weight, bn.bias, training=True,
            activation="relu" if eager.relu else None, strategy=strategy,
        ).double()  # fmt: skip

    results = {"float64, rounded once": rounded, "eager": eager(x).double()}
    results |= {s: call(s) for s in ("cublas_folded_bn", "gemm_stats_apply", "one_kernel")}
    for name, y in results.items():
        error = y - golden
        columns, rows = (error.norm(dim=d) / golden.norm(dim=d) for d in (0, 1))
        print(f"{name}: rows {rows.max():.2e}, columns {columns.max():.2e}, median {columns.median():.2e}")
        for j in columns.topk(4).indices.tolist():
            fit = (y[:, j] - beta[j]) @ (golden[:, j] - beta[j]) / (golden[:, j] - beta[j]).square().sum()
            print(
                f"    column {j}: {columns[j]:.2e}; scale {scale[j]:.3g}, gamma {gamma[j]:.3g}, beta {beta[j]:.3g},"
                f" std a {var[j].sqrt():.3g}, mean a {mean[j]:.3g}, norm of y {golden[:, j].norm():.3g},"
                f" mean error {error[:, j].mean():.2e}, slope by fit {fit:.6f}"
            )
