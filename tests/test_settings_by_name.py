"""Settings that are asked for by a computed name, or in a module that `forward` imports itself."""

from __future__ import annotations

import copy
import dataclasses
import inspect
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


# --- by ways that do not look like a name ----------------------------------------------------------------------------

GAIN, NESTED, OBJECTS = operator.attrgetter("gain_0"), operator.attrgetter("settings.gain_0"), object.__getattribute__
DOUBLED, DICTIONARY = operator.methodcaller("doubled"), operator.attrgetter("__dict__")
Settings.doubled = lambda self: 2 * self.gain_0  # type: ignore[attr-defined]

SEEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "an operator of a module's": lambda self, x: h(self, x) * GAIN(self.settings),
    "a nested one": lambda self, x: h(self, x) * NESTED(self),
    "one that calls": lambda self, x: h(self, x) * DOUBLED(self.settings),
    "the base class's lookup": lambda self, x: h(self, x) * super(Written, self).__getattribute__("settings").gain_0,
    "of an object, past its class": lambda self, x: h(self, x) * read_past(self.settings),
    "of an object, statically": lambda self, x: h(self, x) * inspect.getattr_static(self.settings, "gain_0"),
}
UNSEEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "past its class": lambda self, x: h(self, x) * object.__getattribute__(self, "gain"),
    "past its class, by a function": lambda self, x: h(self, x) * OBJECTS(self, "gain"),
    "past its class, elsewhere": lambda self, x: h(self, x) * read_past(self, "gain"),
    "of a child": lambda self, x: h(self, x) * OBJECTS(self.gemm, "gain"),
    "statically": lambda self, x: h(self, x) * inspect.getattr_static(self, "gain"),
    "the mode": lambda self, x: h(self, x) * (2 if object.__getattribute__(self, "training") else 3),
    "a dictionary": lambda self, x: h(self, x) * self.__dict__["gain"],
    "a dictionary by its name": lambda self, x: h(self, x) * getattr(self, "__dict__")["gain"],  # noqa: B009
    "a dictionary by an operator": lambda self, x: h(self, x) * DICTIONARY(self)["gain"],
    "a child's dictionary": lambda self, x: h(self, x) * self.gemm.__dict__["gain"],
    "which there are": lambda self, x: h(self, x) * (2 if "gain" in dir(self) else 3),
    "a copy": lambda self, x: h(self, x) * copy.copy(self).gain,
}


def read_past(held: Any, name: str = "gain_0") -> Any:
    return object.__getattribute__(held, name)


@pytest.mark.parametrize("forward", SEEN.values(), ids=SEEN)
def test_an_attribute_in_another_way(forward: Callable[..., Any]) -> None:
    test_an_attribute_by_a_computed_name(forward)


def how_many(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * len(vars(self.settings))


def whether(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * (2 if "late" in dir(self.settings) else 1)


@pytest.mark.parametrize("forward", [how_many, whether])
def test_an_attribute_that_comes_later(forward: Callable[..., Any]) -> None:
    fused = gemmnorm.fuse(Written(forward, settings=Settings()).double())
    before = fused(X)
    fused.settings.late = 1
    assert torch.equal(fused(X), 2 * before)


@pytest.mark.parametrize("forward", UNSEEN.values(), ids=UNSEEN)
def test_an_attribute_of_a_module_in_a_way_that_nobody_sees(forward: Callable[..., Any]) -> None:
    model = Written(forward).eval()
    model.gain = model.gemm.gain = 1.5  # type: ignore[assignment]
    assert torch.isfinite(model(torch.randn(5, FEATURES))).all()
    (refusal,) = gemmnorm.fuse_report(model).refusals
    assert "of a module" in refusal.reason or "from self.__dict__" in refusal.reason


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
