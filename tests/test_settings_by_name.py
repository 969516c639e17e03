"""Settings that are asked for by a computed name, or in a module that `forward` imports itself."""

from __future__ import annotations

import dataclasses
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Written
from support import twin
from torch import Tensor

import gemmnorm

X = torch.randn(5, FEATURES, dtype=torch.float64)


def h(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x))  # type: ignore[no-any-return]


@dataclasses.dataclass
class Settings:
    gain_0: float = 1.5


def by_a_text(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * getattr(self.settings, f"gain_{0}")  # type: ignore[no-any-return]


def all_of_them(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * sum(vars(self.settings).values())


def as_a_dictionary(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * dataclasses.asdict(self.settings)["gain_0"]  # type: ignore[no-any-return]


def by_an_operator(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * operator.attrgetter("settings.gain_0")(self)  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [by_a_text, all_of_them, as_a_dictionary, by_an_operator])
def test_an_attribute_by_a_computed_name(forward: Callable[..., Any]) -> None:
    fused = gemmnorm.fuse(Written(forward, settings=Settings()).double())
    before = fused(X)
    fused.settings.gain_0 = 3.0
    assert torch.allclose(fused(X), 2 * before)


@pytest.fixture
def configuration() -> Iterator[Any]:
    module: Any = types.ModuleType("configuration_of_a_test")
    module.__file__, module.GAIN = __file__, 1.5
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def imported(self: Any, x: Tensor) -> Tensor:
    import configuration_of_a_test as c  # type: ignore[import-not-found]

    return h(self, x) * c.GAIN  # type: ignore[no-any-return]


def taken_from_it(self: Any, x: Tensor) -> Tensor:
    from configuration_of_a_test import GAIN

    return h(self, x) * GAIN  # type: ignore[no-any-return]


def held(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * self.module.GAIN  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [imported, taken_from_it, held])
def test_a_module_that_is_not_a_global(forward: Callable[..., Any], configuration: Any) -> None:
    model = Written(forward, **({"module": configuration} if forward is held else {})).double()
    fused = gemmnorm.fuse(model if forward is held else twin(model))
    assert len(gemmnorm.fuse_report(fused).matches) == 1
    before = fused(X)
    configuration.GAIN = 3.0
    assert torch.allclose(fused(X), 2 * before)
