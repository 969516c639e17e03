"""What autograd keeps for a backward, seen and changed by others between the forward and it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulator import COMPILER, emulated
from support import stir, twin
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import gemmnorm
from gemmnorm import plan
from gemmnorm.errors import GemmNormRuntimeError
from gemmnorm.op import autograd

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
STRATEGIES = ("one_kernel", "gemm_stats_apply", "cublas_folded_bn", "cublas_bn")


def spread(t: Tensor) -> Tensor:
    """The same numbers, every other one of a larger tensor."""
    wide = t.new_zeros((*t.shape, 2))
    wide[..., 0] = t
    return wide[..., 0]


def eighth_bits(t: Tensor) -> Any:
    unit = t.float().abs().max() / 127
    return (t.float() / unit).round().to(torch.int8), unit, t.dtype


def whole(packed: Any) -> Tensor:
    found: Tensor = (packed[0].float() * packed[1]).to(packed[2])
    return found


HOOKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], float]] = {
    "other strides": (spread, lambda t: t, 1e-5),
    "other strides of matrices": (lambda t: spread(t) if t.dim() == 2 else t, lambda t: t, 1e-5),
    "transposed": (lambda t: t, lambda t: t.t().contiguous().t() if t.dim() == 2 else t, 1e-5),
    "quantised": (eighth_bits, whole, 0.2),
}


def gradients(model: nn.Module, x: Tensor, grad: Tensor, hooks: Any = None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    if hooks is None:
        y = model(x)
    else:
        with saved_tensors_hooks(*hooks):
            y = model(x)
    y.backward(grad)
    return [x.grad, *(p.grad for name, p in model.named_parameters() if name != "0.bias")]  # type: ignore[list-item]


def model() -> nn.Sequential:
    return stir(nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_may_give_back_other_places_of_memory_and_rounded_numbers(name: str, strategy: str) -> None:
    if name == "quantised" and autograd._hooks is None:
        pytest.skip("PyTorch 2.4 does not say that there are hooks")
    *hooks, tolerance = HOOKS[name]
    original, x, grad = model(), torch.randn(70, 64), torch.randn(70, 48)
    fused = gemmnorm.fuse(twin(original))
    want, exact = gradients(original, x, grad, hooks), gradients(original, x, grad)
    with emulated(plan.chip_for(90, 3)), gemmnorm.set_strategy(strategy):
        for _ in range(2):
            for got, wanted in zip(gradients(fused, x, grad, hooks), want, strict=True):
                assert (got - wanted).norm() < tolerance * wanted.norm()
            for got, wanted in zip(gradients(fused, x, grad), exact, strict=True):
                assert (got - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_dtype_is_refused(strategy: str) -> None:
    fused, x, grad = gemmnorm.fuse(model()), torch.randn(70, 64), torch.randn(70, 48)
    hooks = (lambda t: t, lambda t: t.double() if t.is_floating_point() else t)
    with (
        emulated(plan.chip_for(90, 3)),
        gemmnorm.set_strategy(strategy),
        pytest.raises(GemmNormRuntimeError, match=r"gave back .* of torch.float64"),
    ):
        gradients(fused, x, grad, hooks)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_memory_of_the_weight_is_refused(strategy: str) -> None:
    fused, x = gemmnorm.fuse(model()), torch.randn(70, 64, requires_grad=True)
    with emulated(plan.chip_for(90, 3)), gemmnorm.set_strategy(strategy):
        y = fused(x)
        fused[0].weight.data = torch.randn(48, 64)
        with pytest.raises(GemmNormRuntimeError, match="weight: its `data` was exchanged"):
            y.sum().backward()
        fused(x).sum().backward()
