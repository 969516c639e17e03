"""The chain written out in PyTorch, and comparisons that say where the worst element is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from gemmnorm import activations

RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class Chain(nn.Module):
    """The founding model with every part optional: activation(bn(gemm(x) * scale))."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scale_shape: tuple[int, ...] | None = None,
        activation: str | None = None,
        **norm: Any,
    ) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, bias=bias)
        self.scale = None if scale_shape is None else nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, **norm)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        z = self.gemm(x)
        z = z if self.scale is None else z * self.scale
        return activations.forward(self.bn(z), self.activation)


def stir(module: nn.Module, seed: int = 1) -> nn.Module:
    """Give every parameter and buffer a value that shows when it is forgotten or used twice."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if name.endswith("running_var"):
                values = values.abs() + 0.5
            elif name.endswith("gemm.weight") or name.endswith("0.weight"):
                values = values / tensor.shape[1] ** 0.5
            tensor.copy_(values)
    return module


def arguments(module: Any, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of `linear_scale_batch_norm` after x, from a Chain's own tensors."""
    bn = module.bn
    positional = (
        module.gemm.weight, module.gemm.bias, module.scale, bn.running_mean, bn.running_var, bn.weight, bn.bias,
    )  # fmt: skip
    keywords = {
        "num_batches_tracked": bn.num_batches_tracked,
        "training": bn.training or bn.running_mean is None,
        "momentum": bn.momentum,
        "eps": bn.eps,
        "activation": module.activation,
    }
    return positional, {**keywords, **more}


def step(module: nn.Module, call: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers of one forward and backward of `call(x)` over `module`'s tensors."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    y = call(x)
    y.backward(grad.to(y.dtype))
    found = {"y": y.detach(), "grad x": x.grad}
    found |= {f"grad {name}": p.grad for name, p in module.named_parameters()}
    found |= {name: b.clone() for name, b in module.named_buffers()}
    return found


def twin(module: nn.Module) -> Any:
    """An independent copy with the same values."""
    return copy.deepcopy(module)


def worst(got: Tensor, expected: Tensor, relative: float, absolute: float) -> str | None:
    """None where |got − expected| ≤ absolute + relative·|expected| everywhere; else where it is furthest off."""
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.numel() == 0:
        return None
    g, e = got.double().flatten(), expected.double().flatten()
    difference = (g - e).abs()
    difference[g.isnan() & e.isnan()] = 0.0
    difference[(g == e)] = 0.0
    excess = torch.where(difference.isnan(), torch.inf, difference) - (absolute + relative * e.abs().nan_to_num())
    at = int(excess.argmax())
    if excess[at] <= 0:
        return None
    return f"element {at} of {tuple(got.shape)}: {g[at].item():.9g}, expected {e[at].item():.9g}"


def assert_same(
    got: dict[str, Tensor], expected: dict[str, Tensor], relative: float, absolute: float, same_dtype: bool = True
) -> None:
    """Every tensor of `expected` is in `got`, of the same dtype and within tolerance; integers are equal."""
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        have = got[name]
        if want is None or have is None:
            assert have is want, name
            continue
        assert have.dtype == want.dtype or not same_dtype, f"{name}: {have.dtype}, expected {want.dtype}"
        exact = not want.is_floating_point()
        wrong = worst(have, want, 0.0 if exact else relative, 0.0 if exact else absolute)
        assert wrong is None, f"{name}: {wrong}"
