"""The executable definition of the operator, forward and backward, in plain PyTorch.

It is also the path of every device, dtype and machine that the CUDA kernels do not serve, so it is written for speed as
well: the products are BLAS calls, the statistics PyTorch's own batch normalisation, and nothing is computed twice
except the scaled product, which the backward rebuilds instead of keeping it.

    z = (x Wᵀ + b)·s        ŷ = (z − mean)·rstd        y = φ(γ·ŷ + β)

Its saved tensors are its own affair: `product` is x Wᵀ + b, `statistics` [2, O] are the mean and rstd of z. (The
kernels keep the product without bias and its mean; a forward and its backward always take the same path.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import activations
from ..runtime.operands import Differentiable, Operands, Options


def scaled(product: Tensor, scale: Tensor | None, scale_value: float) -> Tensor:
    """`product` [B, O] times a scale of shape [O], [1, O], [1] or [], or times a number."""
    if scale is not None:
        return product * scale
    return product if scale_value == 1.0 else product * scale_value


def averaging_factor(momentum: float, num_batches_tracked: Tensor | None) -> float:
    """The weight of the new statistics: momentum, or 1/n at the n-th batch where momentum is negative (cumulative).

    A cumulative average without a counter has weight 0, as in `nn.BatchNorm1d`. Reads the counter on the host.
    """
    if momentum >= 0:
        return momentum
    return 0.0 if num_batches_tracked is None else 1.0 / float(num_batches_tracked)


def chain(operands: Operands, options: Options) -> Tensor:
    """The original chain, op by op, differentiated by PyTorch. x [..., I]; BatchNorm1d normalises dimension 1."""
    x, weight, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias = operands
    z = scaled(F.linear(x, weight, bias), scale, options.scale_value)
    factor = _counted(options, counter)
    out = F.batch_norm(z, running_mean, running_var, bn_weight, bn_bias, options.training, factor, options.eps)
    return _activate(out, options.activation)


def _counted(options: Options, counter: Tensor | None) -> float:
    """Count this batch; the weight of its statistics in the running ones."""
    if not options.training:
        return 0.0
    if counter is not None:
        counter.add_(1)
    return averaging_factor(options.momentum, counter)


def statistics_dtype(out: torch.dtype) -> torch.dtype:
    """The dtype in which mean and rstd are kept: float32, or float64 where the output is."""
    return torch.float64 if out == torch.float64 else torch.float32


def forward(operands: Operands, options: Options) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, and what the backward needs: product [B, O], statistics [2, O] in float32 or float64 (None unless `save`).

    In training, batch statistics are used and the running ones updated (unbiased variance), and the counter is
    incremented.
    """
    x, weight, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias = operands
    _, training, _, eps, activation, _, save, *_ = options
    product = F.linear(x, weight, None if bias is None else bias.to(x.dtype))  # under autocast the bias is float32
    in_place = scale is not None and not save
    z = _scaled_in_place(product, scale) if in_place else scaled(product, scale, options.scale_value)  # type: ignore[arg-type]
    factor = _counted(options, counter)
    if not save:
        out = F.batch_norm(z, running_mean, running_var, bn_weight, bn_bias, training, factor, eps)
        return _activate(out, activation), None, None
    if x.shape[0] == 0:  # nothing to normalise with: PyTorch counts the batch and leaves the rest alone
        out = F.batch_norm(z, running_mean, running_var, bn_weight, bn_bias, training, factor, eps)
        zeros = out.new_zeros((2, weight.shape[0]), dtype=statistics_dtype(out.dtype))
        return _activate(out, activation), product, zeros
    out, mean, rstd = torch.native_batch_norm(z, bn_weight, bn_bias, running_mean, running_var, training, factor, eps)
    kept = statistics_dtype(out.dtype)
    if not training:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, (running_var.to(kept) + eps).rsqrt()
    # Without a scale the product is z itself: the same memory, kept once.
    return _activate(out, activation), product, torch.stack([mean.to(kept), rstd.to(kept)])


def _scaled_in_place(product: Tensor, scale: Tensor) -> Tensor:
    """The scaled product in the product's own memory, unless the scale promotes it to a wider type."""
    return product.mul_(scale) if torch.result_type(product, scale) == product.dtype else product * scale


def _activate(out: Tensor, activation: str | None) -> Tensor:
    return out.relu_() if activation == "relu" else activations.forward(out, activation)


def backward(
    grad: Tensor, operands: Differentiable, kept: tuple[Tensor | None, Tensor], options: Options, needs: list[bool]
) -> Differentiable:
    """Gradients of `operands`, None where `needs` is False. grad: ∂L/∂y [B, O]; kept: product and statistics."""
    x, weight, bias, scale, bn_weight, bn_bias = operands
    assert x is not None and weight is not None
    product, statistics = kept
    _, training, _, eps, activation, *_ = options
    if x.shape[0] == 0:
        return Differentiable(
            *(torch.zeros_like(t) if t is not None and need else None for t, need in zip(operands, needs, strict=True))
        )
    assert product is not None
    z = scaled(product, scale, options.scale_value)
    mean, rstd = statistics.unbind(0)
    if activation is not None:
        normalised = (z - mean) * rstd
        normalised = normalised if bn_weight is None else normalised * bn_weight
        normalised = normalised if bn_bias is None else normalised + bn_bias
        grad = activations.backward(grad, normalised.to(grad.dtype), activation)
    need_z = any(needs[:4])
    # PyTorch wants running statistics in the parameters' dtype, and saved ones too where it runs on the CPU.
    like = next((t for t in (bn_weight, bn_bias) if t is not None), mean)
    variance = None if training else (rstd.double().pow(-2) - eps).to(like.dtype)
    saved = (mean, rstd) if z.is_cuda else (mean.to(like.dtype), rstd.to(like.dtype))
    wanted = [need_z, needs[4] and bn_weight is not None, needs[5] and bn_bias is not None]
    grad_z, *of_norm = torch.ops.aten.native_batch_norm_backward(
        grad, z, bn_weight, None if training else mean.to(like.dtype), variance, *saved, training, eps, wanted
    )
    # On a GPU it gives some that nobody wants.
    grad_gamma, grad_beta = (g if want else None for g, want in zip(of_norm, wanted[1:], strict=True))
    grad_bias = grad_scale = None
    grad_x = grad_weight = None
    if need_z:
        grad_product = grad_z
        if scale is not None:
            if needs[3]:
                grad_scale = _reduced(grad_z * product, scale)
            grad_product = grad_z.mul_(scale).to(product.dtype)
        elif options.scale_value != 1.0:
            grad_product = grad_z.mul_(options.scale_value)
        if needs[2] and bias is not None:
            # In training the mean takes the bias out again: its gradient is exactly zero.
            grad_bias = torch.zeros_like(bias) if training else grad_product.sum(0).to(bias.dtype)
        grad_x = grad_product @ weight if needs[0] else None
        grad_weight = grad_product.t() @ x if needs[1] else None
    return Differentiable(grad_x, grad_weight, grad_bias, grad_scale, grad_gamma, grad_beta)


def _reduced(per_element: Tensor, scale: Tensor) -> Tensor:
    """Sum of `per_element` [B, O] over what `scale` was broadcast along."""
    return per_element.sum_to_size(scale.shape).to(scale.dtype)
