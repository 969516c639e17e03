"""What a `forward` makes or names that its text has to write in another way, or imagines of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_support import FEATURES, Written
from support import twin
from test_conditions_of_inputs import X, assert_same, calls_of, h, reason_of
from torch import Tensor, nn

import gemmnorm

# --- modules that forward makes

SHARED = nn.Dropout(0.5)


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


MADE: dict[str, Callable[..., Any]] = {
    "ReLU": lambda s, x: nn.ReLU()(h(s, x)),
    "Tanh": lambda s, x: nn.Tanh()(h(s, x)),
    "Softmax": lambda s, x: nn.Softmax(dim=1)(h(s, x)),
    "Flatten": lambda s, x: nn.Flatten()(h(s, x)),
    "Dropout": lambda s, x: nn.Dropout(0.5)(h(s, x)),
    "MSELoss": lambda s, x: nn.MSELoss()(h(s, x), x),
    "a slice": lambda s, x: s.net[:3](x),
    "Sequential": lambda s, x: nn.Sequential(s.gemm, s.bn, nn.Sigmoid())(x),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_is_made(name: str, training: bool) -> None:
    net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU(), nn.Tanh())
    model: Any = Written(MADE[name], net=net).train(training)
    fused: Any = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X)
    assert calls_of(fused) == 1
    for changed in (fused, model):
        changed.net[2] = nn.Identity()
        changed.net.insert(2, nn.Tanh())
    assert_same(fused, model, X)


REFUSED: dict[str, Callable[..., Any]] = {
    "makes a module, a Doubling, and calls it": lambda s, x: Doubling()(h(s, x)),
    "calls a Dropout that is none of its own modules": lambda s, x: SHARED(h(s, x)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_module_that_cannot_be_written_out(reason: str) -> None:
    model = Written(REFUSED[reason])
    assert reason in reason_of(model)
    assert_same(gemmnorm.fuse(twin(model)), model, X)


# --- what inputs are imagined to be


def pads(self: Any, x: Tensor) -> Tensor:
    if x.size(-1) != self.dim:
        x = F.pad(x, (0, self.dim - x.size(-1)))
    return h(self, x)


def by_width(self: Any, x: Tensor) -> Tensor:
    return h(self, x) if x.size(-1) == self.gemm.in_features else self.gemm.weight * 2


def by_another_width(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return h(self, x) + (self.wide(y) if y.shape[1] == 2 * FEATURES else y)  # type: ignore[no-any-return]


def raises_for(self: Any, x: Tensor) -> Tensor:
    n, features = x.shape
    if features > 2 * FEATURES:
        raise ValueError(f"{features} features")
    return h(self, x).view(n, -1)


WIDTHS: dict[str, tuple[Callable[..., Any], list[tuple[Tensor, ...]]]] = {
    "padding": (pads, [(X,), (X[:, :4],)]),
    "in_features": (by_width, [(X,), (X[:, :4],)]),
    "another": (by_another_width, [(X, torch.cat([X, X], 1)), (X, X)]),
    "an error": (raises_for, [(X,), (torch.cat([X, X, X], 1),)]),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_an_input_is_as_wide_as_a_linear_takes_it(name: str) -> None:
    forward, calls = WIDTHS[name]
    model: Any = Written(forward, wide=nn.Linear(2 * FEATURES, FEATURES))
    model.dim = FEATURES
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, *calls[0])
    assert calls_of(fused) == 1
    for given in calls[1:]:
        assert_same(fused, model, *given)


def test_a_number_by_default_is_no_tensor() -> None:
    def forward(self: Any, x: Tensor, alpha: float = 2.0) -> Tensor:
        return h(self, x) * (alpha if isinstance(alpha, float) else 1.0)

    model = Written(forward)
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X)
    assert calls_of(fused) == 1
    for alpha in (3.0, 3, X):
        assert_same(fused, model, X, alpha)


# --- names and kinds of values

NAMES = ["type", "len", "product", "math", "float", "F", "operator", "os", "int"]


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_called_as_something_else(name: str) -> None:
    forward = eval(f"lambda self, x, {name}=2.0: h(self, x) * {name}", {"h": h})
    model = Written(forward)
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X)
    assert_same(fused, model, X, 3.0)
    assert calls_of(fused) == 2


def of_mean(self: Any, x: Tensor, product: Tensor) -> Tensor:
    return self.bn(self.gemm(x).view(x.shape[0], product.shape[1])) * 2  # type: ignore[no-any-return]


HIDDEN: dict[str, Callable[..., Any]] = {
    "float": lambda self, x, float: h(self, x).clamp(max=math.inf) * float,
    "type": lambda self, x, type: h(self, x) * type * self.factor,
    "len": lambda self, x, len: h(self, x) * len * sum(self.factors),
    "math": lambda self, x, math: h(self, x) * math.real,
    "product": of_mean,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_parameter_that_would_hide_what_the_text_needs(name: str) -> None:
    model: Any = Written(HIDDEN[name])
    model.factor, model.factors = 2.0, [1.5, 2.5]
    fused: Any = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X, X)
    for changed in (fused, model):
        changed.factor, changed.factors = 3.0, [1.5, 2.5, 3.5]
    assert_same(fused, model, X, X)


@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_a_number_of_numpy_is_refused_in_words(kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    model: Any = Written(lambda self, x: h(self, x) * self.factor)
    model.factor = getattr(numpy, kind)(2)
    assert f"uses a {kind} of numpy" in reason_of(model)
    assert_same(gemmnorm.fuse(twin(model)), model, X)


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_function_of_torchscript_is_named() -> None:
    scripted = torch.jit.script(doubled)
    assert "a function of torch.jit.script" in reason_of(Written(lambda self, x: scripted(h(self, x))))
