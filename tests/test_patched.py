"""Classes and functions that are patched after `fuse`, or that no class can be derived from."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import twin
from test_frozen import X, assert_same, normed, pair
from torch import Tensor, nn

import gemmnorm


class Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gemm, self.bn, self.act = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.act(normed(self, self.halved(x))))

    def halved(self, x: Tensor) -> Tensor:
        return x / 2


def helper(x: Tensor) -> Tensor:
    return x * 2


def patched_forward(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) + 100


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "forward": (Patched, "forward", patched_forward),
    "a method": (Patched, "halved", lambda self, x: x * 3),
    "a function": (sys.modules[__name__], "helper", lambda x: x * 3),
    "a Linear": (nn.Linear, "forward", lambda self, x: F.linear(x, self.weight) * 3),
    "a BatchNorm": (nn.BatchNorm1d, "forward", lambda self, x: x * 3),
    "an activation": (nn.ReLU, "forward", lambda self, x: x * 3),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_is_patched_is_run(name: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain = pair(Patched())
    assert_same(fused, plain)
    assert len(calls) == 2
    holder, attribute, value = PATCHES[name]
    with monkeypatch.context() as patch:
        patch.setattr(holder, attribute, value)
        assert_same(fused, plain)
        assert len(calls) == 2
        assert_same(gemmnorm.fuse(fused), plain)
        assert_same(gemmnorm.fuse(twin(plain)), twin(plain))
        assert_same(gemmnorm.unfuse(fused), plain)
    assert_same(gemmnorm.fuse(fused), plain)


class Gained(Patched):
    gain = 2.0

    @classmethod
    def halved(cls, x: Tensor) -> Tensor:
        return x * cls.gain


def test_an_attribute_of_the_class_is_noticed_in_a_class_method(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, plain = pair(Gained())
    assert_same(fused, plain)
    monkeypatch.setattr(Gained, "gain", 3.0)
    assert_same(fused, plain)
    assert len(calls) == 2


def test_a_method_of_the_instance_is_run() -> None:
    fused, plain = pair(Patched())
    fused.halved = plain.halved = lambda x: x * 3
    assert_same(fused, plain)


class OwnLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def test_a_linear_of_a_class_of_its_own_is_one_by_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain = pair(nn.Sequential(OwnLinear(), nn.BatchNorm1d(6)))
    assert len(gemmnorm.fuse_report(fused).matches) == 1
    monkeypatch.setattr(OwnLinear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) * 3)
    for _ in range(2):
        assert_same(fused, plain)
        gemmnorm.fuse(fused)
    assert_same(gemmnorm.fuse(twin(plain)), twin(plain))


class Once(type):
    names: set[str] = set()  # noqa: RUF012

    def __new__(cls, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in Once.names:
            raise RuntimeError(f"{name} twice")
        Once.names.add(name)
        return super().__new__(cls, name, *args, **kwargs)


class Unique(Patched, metaclass=Once):
    pass


def test_a_class_that_cannot_be_derived_from_is_left_alone(calls: list[Any]) -> None:
    plain = nn.Sequential(Patched(), Unique())
    with pytest.warns(gemmnorm.errors.GemmNormWarning, match="Unique is not fused"):
        fused = gemmnorm.fuse(twin(plain))
    assert_same(fused, plain)
    assert len(calls) == 2


class FindsItself(Patched):
    def train(self, mode: bool = True) -> Any:
        return super(self.__class__, self).train(mode)


def test_super_of_its_own_class_is_refused() -> None:
    fused, plain = pair(FindsItself())
    assert "calls super() of its own class" in str(gemmnorm.fuse_report(fused))
    assert_same(fused, plain)


@pytest.mark.parametrize("name, other", [("bn", nn.BatchNorm2d(6)), ("gemm", nn.Conv1d(6, 6, 1))])
def test_a_child_of_another_kind_is_run_as_it_is(name: str, other: nn.Module) -> None:
    fused, plain = pair(Patched())
    for m in (fused, plain):
        setattr(m, name, copy.deepcopy(other))
    for x in (X, torch.randn(8, 6, 6)):
        assert_same(fused, plain, x)
