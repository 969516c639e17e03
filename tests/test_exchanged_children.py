"""A child that never gives None, exchanged after `fuse` for one that may: the original `forward` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Written
from support import twin
from test_conditions_of_inputs import assert_same, calls_of, h
from torch import Tensor, nn

import gemmnorm

X = torch.randn(5, FEATURES)
SIZE = (FEATURES, FEATURES)


class Never(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 2


class Sometimes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 2 if x.sum() > 1e9 else None


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x


class HalfPair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, None


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.function = torch.relu

    def help(self, x: Tensor) -> Any:
        return self.inner(x)

    def forward(self, x: Tensor) -> Any:
        return self.help(x)


class ByFunction(Around):
    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Never(), Never()])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def given(self: Any, x: Tensor) -> Tensor:
    y = self.aux(x)
    return h(self, x) if y is None else h(self, y)


def part(self: Any, x: Tensor) -> Tensor:
    y = self.aux(x)[1]
    return h(self, x) if y is None else h(self, y) * 2


def of_chain(self: Any, x: Tensor) -> Tensor:
    y = self.bn(self.gemm(x))
    return x if y is None else y * 2


def none(*_: Any) -> None:
    return None


def sequence(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.Linear(*SIZE), *modules)


CHANGES: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "the child": (given, Never, lambda m: setattr(m, "aux", Sometimes())),
    "one of PyTorch's": (given, nn.ReLU, lambda m: setattr(m, "aux", Sometimes())),
    "its child": (given, lambda: Around(Never()), lambda m: setattr(m.aux, "inner", Sometimes())),
    "a product in it": (given, lambda: Around(nn.Linear(*SIZE)), lambda m: setattr(m.aux, "inner", Sometimes())),
    "the last": (given, sequence, lambda m: m.aux.__setitem__(1, Sometimes())),
    "one more": (given, sequence, lambda m: m.aux.append(Sometimes())),
    "one more inside": (given, lambda: Around(sequence()), lambda m: m.aux.inner.append(Sometimes())),
    "one more in a list": (given, Listing, lambda m: m.aux.layers.append(Sometimes())),
    "a forward": (given, lambda: nn.Linear(*SIZE), lambda m: setattr(m.aux, "forward", none)),
    "a forward inside": (given, lambda: Around(Never()), lambda m: setattr(m.aux.inner, "forward", none)),
    "a method": (given, lambda: Around(Never()), lambda m: setattr(m.aux, "help", none)),
    "a function": (given, lambda: ByFunction(Never()), lambda m: setattr(m.aux, "function", none)),
    "what gives a pair": (part, Pair, lambda m: setattr(m, "aux", HalfPair())),
    "the BatchNorm": (of_chain, Never, lambda m: setattr(m, "bn", Sometimes())),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_child_that_may_give_none(name: str) -> None:
    forward, child, change = CHANGES[name]
    model = Written(forward, aux=child()).eval()
    fused: Any = gemmnorm.fuse(twin(model))
    fused(X)
    assert calls_of(fused) == 1
    for module in (model, fused):
        change(module)
    assert_same(fused, model, X)


@pytest.mark.parametrize("name", ["forward", "help"])
def test_a_class_whose_method_is_exchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Written(given, aux=Around(Never())).eval()
    fused: Any = gemmnorm.fuse(twin(model))
    monkeypatch.setattr(Around, name, none)
    assert_same(fused, model, X)


def test_it_runs_fused_where_the_class_stays() -> None:
    model = Written(given, aux=Around(nn.Sequential(Never(), nn.Linear(*SIZE)))).eval()
    fused: Any = gemmnorm.fuse(twin(model))
    for module in (model, fused):
        torch.manual_seed(0)
        module.aux.inner[1] = nn.Linear(*SIZE)
    assert_same(fused, model, X)
    assert_same(twin(fused), model, X)
    assert calls_of(fused) == 1
    torch.testing.assert_close(torch.compile(fused, fullgraph=True, backend="eager")(X), model(X))


def test_a_batch_norm_may_become_synchronised() -> None:
    fused: Any = gemmnorm.fuse(Written(of_chain).eval())
    fused(X)
    expected = fused(X)
    synchronised: Any = nn.SyncBatchNorm.convert_sync_batchnorm(fused).eval()
    torch.testing.assert_close(synchronised(X), expected)
    assert calls_of(synchronised) == 3
