"""Attributes, children and parameters that a `forward` compares with each other: what it found stays a condition."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Written
from torch import Tensor, nn

import gemmnorm

X = torch.randn(5, FEATURES, dtype=torch.float64)


class Settings:
    gain = 1.5


def h(self: Any, x: Tensor, answer: bool) -> Tensor:
    return self.bn(self.gemm(x)) * (2 if answer else 3)  # type: ignore[no-any-return]


def equal(a: Any, b: Any) -> bool:
    return a == b  # type: ignore[no-any-return]


def tie(model: Any) -> None:
    model.second = model.first


def tie_parameters(model: Any) -> None:
    model.other = model.scale


def tie_weights(model: Any) -> None:
    model.first.weight = model.second.weight


def exchange(model: Any) -> None:
    model.kept = model.second.forward


def children() -> dict[str, Any]:
    return {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6)}


def objects() -> dict[str, Any]:
    return {"first": Settings(), "second": Settings()}


def with_a_method() -> dict[str, Any]:
    held = children()
    return {**held, "kept": held["first"].forward}


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], dict[str, Any]], Callable[[Any], None]]] = {
    "children": (lambda self, x: h(self, x, self.first == self.second), children, tie),
    "children, unlike": (lambda self, x: h(self, x, self.first != self.second), children, tie),
    "children, by identity": (lambda self, x: h(self, x, self.first is self.second), children, tie),
    "children, not by identity": (lambda self, x: h(self, x, self.first is not self.second), children, tie),
    "a child in a tuple": (lambda self, x: h(self, x, self.first in (self.second,)), children, tie),
    "children, in a function": (lambda self, x: h(self, x, equal(self.first, self.second)), children, tie),
    "children, by an operator": (lambda self, x: h(self, x, operator.eq(self.first, self.second)), children, tie),
    "weights of children": (lambda self, x: h(self, x, self.first.weight is self.second.weight), children, tie_weights),
    "parameters": (lambda self, x: h(self, x, self.scale is self.other),
                   lambda: {"other": nn.Parameter(torch.randn(FEATURES))}, tie_parameters),
    "objects": (lambda self, x: h(self, x, self.first == self.second), objects, tie),
    "objects, by identity": (lambda self, x: h(self, x, self.first is self.second), objects, tie),
    "lists, by identity": (lambda self, x: h(self, x, self.first is self.second),
                           lambda: {"first": [1], "second": [1]}, tie),
    "methods": (lambda self, x: h(self, x, self.kept == self.first.forward), with_a_method, exchange),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_becomes_the_same_or_another_runs_as_it_is(name: str) -> None:
    forward, held, change = CASES[name]
    model = Written(forward, **held()).double().eval()
    fused: Any = gemmnorm.fuse(copy.deepcopy(model))
    before = model(X)
    assert torch.equal(fused(X), before)
    (call,) = fused._gemmnorm.calls
    assert call.fused == 1 and not call.unfused
    for m in (model, fused):
        change(m)
    assert not torch.equal(model(X), before)
    assert torch.equal(fused(X), model(X))


OTHER = nn.Linear(6, 6)
REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "a set": lambda self, x: h(self, x, len({self.first, self.second}) == 1),
    "a dictionary": lambda self, x: h(self, x, {self.first: True}.get(self.second, False)),
    "an identity": lambda self, x: h(self, x, id(self.first) == id(self.second)),
    "another's": lambda self, x: h(self, x, self.first == OTHER),
}


@pytest.mark.parametrize("forward", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_condition_is_refused(forward: Callable[[Any, Tensor], Any]) -> None:
    model = Written(forward, **children()).double().eval()
    (refusal,) = gemmnorm.fuse_report(model).refusals
    assert " a module" in refusal.reason
    assert len({nn.Linear(1, 1), nn.Linear(1, 1)}) == 2 and "__hash__" not in vars(nn.Module)
