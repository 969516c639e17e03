"""Errors of a chain against float64, for the benchmark's `error` and `eager_error`.

An error here is relative, and the worst of three: over the whole tensor, over its worst row, over its worst column.
The gradients of per-feature parameters are sums that cancel (the bias's is exactly zero in training, the scale's all
but zero), so each is measured against the norm of what was summed, not against what is left of it.

`gemmnorm verify` judges by finer rules; these are figures to put beside a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .cases import Cell, EagerChain, Prepared

Forward = Callable[[nn.Module, Tensor], Tensor]


@dataclass
class Golden:
    """Output and gradients in float64, by name, and what each is measured against where it is a sum that cancels."""

    values: dict[str, Tensor]
    norms: dict[str, Tensor]


def relative_error(got: Tensor, want: Tensor) -> float:
    """The worst of global, per-row and per-column relative error of `got` against `want` (both [rows, columns]).

    A row or column is measured against its own norm, but at least a thousandth of the average one's: a column that an
    activation has all but emptied says nothing. NaN or Inf anywhere gives infinity.
    """
    error = got.double() - want
    if not bool(torch.isfinite(error).all()):
        return float("inf")
    total = torch.linalg.vector_norm(want).clamp_min(1e-30)
    worst = torch.linalg.vector_norm(error) / total
    for dim in (0, 1):
        norms = torch.linalg.vector_norm(want, dim=dim)
        floor = 1e-3 * total / norms.numel() ** 0.5
        worst = torch.maximum(worst, (torch.linalg.vector_norm(error, dim=dim) / norms.clamp_min(floor)).max())
    return float(worst)


def feature_error(got: Tensor, want: Tensor, norms: Tensor) -> float:
    """The largest |got − want| / norms over the features."""
    error = (got.double().flatten() - want.flatten()).abs() / norms.clamp_min(1e-30)
    return float(error.max()) if bool(torch.isfinite(error).all()) else float("inf")


def outputs(module: nn.Module, forward: Forward, prepared: Prepared, phase: str) -> dict[str, Tensor]:
    """y, and for `train_fwd_bwd` the gradients of x and of every parameter, by name."""
    y = forward(module, prepared.x)
    if phase != "train_fwd_bwd":
        return {"y": y}
    named = dict(module.named_parameters())
    grads = torch.autograd.grad(y, [prepared.x, *named.values()], prepared.g.to(y.dtype))
    return {"y": y.detach(), "x": grads[0], **dict(zip(named, grads[1:], strict=True))}


def float64_bytes(cell: Cell) -> int:
    case = cell.case
    io = case.batch * case.in_features + case.in_features * case.out_features
    return 8 * ((io + 6 * case.batch * case.out_features) * (2 if cell.phase == "train_fwd_bwd" else 1))


def golden(prepared: Prepared, cell: Cell) -> Golden | None:
    """The chain in float64 on the device itself, or None where that would take more memory than is free."""
    x, eager = prepared.x, prepared.eager
    if x.device.type == "cuda" and float64_bytes(cell) > torch.cuda.mem_get_info(x.device)[0]:
        return None
    double: EagerChain = copy.deepcopy(eager).double()
    wide = Prepared(double, x.detach().double().requires_grad_(x.requires_grad), prepared.g.double())
    values = outputs(double, lambda module, z: module(z), wide, cell.phase)
    return Golden(values, _norms(double, wide) if cell.phase == "train_fwd_bwd" else {})


@torch.no_grad()
def _norms(double: EagerChain, wide: Prepared) -> dict[str, Tensor]:
    """‖g‖·‖factor‖ of every per-feature gradient: the norm of its terms, by Cauchy and Schwarz. [out_features] each."""
    a = double.gemm(wide.x)
    z = a * double.scale if double.has_scale else a
    var, mean = torch.var_mean(z, dim=0, unbiased=False)
    r = torch.rsqrt(var + double.bn.eps)
    g = torch.linalg.vector_norm(wide.g, dim=0)
    inner = (double.bn.weight * r).abs()  # ∂y/∂z, but for the statistics
    batch = wide.g.shape[0] ** 0.5
    norms = {
        "bn.bias": g * batch,
        "bn.weight": g * torch.linalg.vector_norm((z - mean) * r, dim=0),
        "gemm.bias": g * batch * inner * (double.scale.abs() if double.has_scale else 1.0),
    }
    if double.has_scale:
        norms["scale"] = g * inner * torch.linalg.vector_norm(a, dim=0)
    return norms


def error_of(module: nn.Module, forward: Forward, prepared: Prepared, cell: Cell, want: Golden | None) -> float | None:
    """The worst error of `module` over the output and, in `train_fwd_bwd`, every gradient; None without a golden.

    `module` runs, in any case, as a copy, so that its running statistics stay as they are.
    """
    got = outputs(copy.deepcopy(module), forward, prepared, cell.phase)
    if want is None:
        return None
    worst = 0.0
    for name, value in want.values.items():
        if name in want.norms:
            worst = max(worst, feature_error(got[name], value, want.norms[name]))
        else:
            worst = max(worst, relative_error(got[name], value))
    return worst
