"""Statistics over the ranks of a process group, as `nn.SyncBatchNorm` takes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .. import activations
from ..runtime.operands import Operands, Options
from . import reference


def world_size(group: Any) -> int:
    """Ranks in `group`; 1 where `torch.distributed` is not initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def merge(count: Tensor, mean: Tensor, m2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the union of groups, in a fixed order: count [G], mean and M2 [G, O] → count [], mean, M2 [O].

    The mean first, then M2 about that mean: M2 = Σ_g M2_g + n_g (mean_g − mean)².
    """
    total = count.sum()
    weight = (count / total.clamp_min(1)).unsqueeze(1)
    merged = (weight * mean).sum(0)
    return total, merged, (m2 + count.unsqueeze(1) * (mean - merged).square()).sum(0)


class _SyncNormalize(torch.autograd.Function):
    """z [B, O] of this rank → (z − mean)·rstd over the rows of all ranks. Every reduction is ordered by rank."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, eps: float, group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        wide = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
        rows = wide.shape[0]
        mean = wide.mean(0) if rows else wide.new_zeros(wide.shape[1])
        local = torch.cat([wide.new_tensor([rows]), mean, (wide - mean).square().sum(0)])
        every = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, local, group=group)
        gathered = torch.stack(every)
        features = wide.shape[1]
        count, mean, m2 = merge(gathered[:, 0], gathered[:, 1 : 1 + features], gathered[:, 1 + features :])
        variance = m2 / count
        rstd = (variance + eps).rsqrt()
        normalised = (wide - mean) * rstd
        ctx.save_for_backward(normalised, rstd, count)
        ctx.group, ctx.dtype = group, z.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None]:  # type: ignore[override]
        normalised, rstd, count = ctx.saved_tensors
        sums = torch.stack([grad.sum(0), (grad * normalised).sum(0)])
        every = [torch.empty_like(sums) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(every, sums, group=ctx.group)
        mean_grad, mean_dot = (torch.stack(every).sum(0) / count).unbind(0)
        return ((grad - mean_grad - normalised * mean_dot) * rstd).to(ctx.dtype), None, None


def linear_scale_sync_batch_norm(operands: Operands, options: Options, group: Any) -> Tensor:
    """The training-mode chain with statistics over all ranks of `group`, one collective forward and one backward."""
    x, weight, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias = operands
    z = reference.scaled(F.linear(x, weight, bias), scale, options.scale_value)
    normalised, mean, variance, count = _SyncNormalize.apply(z, options.eps, group)
    if counter is not None:
        counter.add_(1)
    if running_mean is not None and running_var is not None:
        factor = reference.averaging_factor(options.momentum, counter)
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), factor)
    out = normalised if bn_weight is None else normalised * bn_weight
    out = out if bn_bias is None else out + bn_bias
    return activations.forward(out.to(z.dtype), options.activation)
