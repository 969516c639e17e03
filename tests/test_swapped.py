"""A descendant of another class, put in after `fuse`: what its class decided is decided anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Written
from support import stir, twin
from torch import Tensor, nn

import gemmnorm

X = torch.randn(5, FEATURES)


def h(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x)).relu()  # type: ignore[no-any-return]


class Once(nn.Module):
    def encode(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Ten(nn.Module):
    def encode(self, x: Tensor) -> Tensor:
        return x * 10

    def forward(self, x: Tensor) -> Tensor:
        return x * 20


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:1]


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(self.drop(x))  # type: ignore[no-any-return]


def between(self: Any, x: Tensor) -> Tensor:
    a = self.gemm(x)
    b = self.layer(x)
    return self.bn(a) + b  # type: ignore[no-any-return]


def swap(layer: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda model: setattr(model, "layer", layer())


FORWARDS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module], Callable[[Any], None]]] = {
    "a method": (lambda self, x: self.layer.encode(h(self, x)), Once, swap(Ten)),
    "its forward by name": (lambda self, x: self.layer.forward(h(self, x)), Once, swap(Ten)),
    "its class's name": (lambda self, x: h(self, x) * len(self.layer.__class__.__name__), Once, swap(First)),
    "what it has": (
        lambda self, x: h(self, x) * (9 if hasattr(self.layer, "weight") else 1),
        lambda: nn.LayerNorm(FEATURES),
        swap(nn.Identity),
    ),
    "the shape of its result": (
        lambda self, x: self.gemm(z) if len(z := self.layer(x)) == 1 else h(self, z),
        nn.ReLU,
        swap(First),
    ),
    "one that runs between": (between, nn.ReLU, lambda model: setattr(model.layer, "inplace", True)),
    "random numbers between": (
        between,
        lambda: nn.Dropout(0.5),
        lambda model: setattr(model, "gemm", Adapter(model.gemm)),
    ),
}


@pytest.mark.parametrize(("forward", "layer", "change"), FORWARDS.values(), ids=FORWARDS)
def test_another_class(
    forward: Callable[..., Any], layer: Callable[[], nn.Module], change: Callable[[Any], None], calls: list[Any]
) -> None:
    model = stir(Written(forward, layer=layer()))
    fused = gemmnorm.fuse(twin(model))
    for changed in (False, True):
        if changed:
            change(model), change(fused)
        found = []
        for m in (model, fused):
            torch.manual_seed(0)
            found.append(m(X.clone()))
        assert torch.equal(*found)
    assert len(calls) == 1  # before the change
