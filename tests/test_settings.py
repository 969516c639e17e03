"""Objects, containers and values of many kinds that a `forward` reads: a change of any of them is noticed."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import pathlib
import re
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_frozen import X, assert_same, made, normed, pair
from torch import Tensor, nn

import gemmnorm


class Held:
    k = 2.0

    def __init__(self) -> None:
        self.t, self.inner, self.items = 2.0, SimpleNamespace(gain=2.0), {"a": 2.0}

    def value(self) -> float:
        return self.t * self.k

    def get(self, key: str) -> Any:
        try:
            return self.items[key]
        except KeyError:
            return None

    @property
    def best(self) -> Any:
        return self.inner

    def __getitem__(self, key: str) -> Any:
        return self.items[key]

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, key: str) -> bool:
        return key in self.items


class Derived(Held):
    def value(self) -> float:
        return 7.0


@dataclasses.dataclass
class Configuration:
    hidden: int = 6

    @property
    def double(self) -> int:
        return self.hidden * 2

    def factor(self) -> float:
        return self.double / 4


class Text(str):
    pass


Factor = Callable[[Any], Any]
OBJECTS: dict[str, tuple[Callable[[], Any], Factor, Callable[[Any], Any]]] = {
    "another class": (Held, lambda k: k.value(), lambda m: setattr(m, "k", Derived())),
    "an attribute": (Held, lambda k: k.value(), lambda m: setattr(m.k, "t", 5.0)),
    "over the class's": (Held, lambda k: k.value(), lambda m: setattr(m.k, "k", 5.0)),
    "a method over the class's": (Held, lambda k: k.value(), lambda m: setattr(m.k, "value", lambda: 5.0)),
    "none any more": (Held, lambda k: getattr(k, "t", 9.0), lambda m: delattr(m.k, "t")),
    "by a method": (Held, lambda k: k.get("a"), lambda m: m.k.items.update(a=5.0)),
    "by a property": (Held, lambda k: k.best.gain, lambda m: setattr(m.k.inner, "gain", 5.0)),
    "by a key": (Held, lambda k: k["a"], lambda m: m.k.items.update(a=5.0)),
    "its length": (Held, lambda k: len(k), lambda m: m.k.items.update(b=5.0)),
    "what it contains": (Held, lambda k: 2 if "b" in k else 1, lambda m: m.k.items.update(b=5.0)),
    "a property of a dataclass": (Configuration, lambda k: k.double, lambda m: setattr(m.k, "hidden", 9)),
    "a method of a dataclass": (Configuration, lambda k: k.factor(), lambda m: setattr(m.k, "hidden", 9)),
    "a list of them": (lambda: [Held()], lambda k: sum(h.value() for h in k), lambda m: m.k.append(Derived())),
    "in a list": (lambda: [Held()], lambda k: sum(h.value() for h in k), lambda m: setattr(m.k[0], "t", 5.0)),
    "a dictionary of them": (lambda: {"a": Held()}, lambda k: sum(h.value() for h in k.values()),
                             lambda m: m.k.update(b=Derived())),
    "a counter": (lambda: collections.Counter(n=2), lambda k: k["n"], lambda m: m.k.update(["n"])),
    "ordered": (lambda: collections.OrderedDict(a=Held()), lambda k: 2 if "n" in k else 1, lambda m: m.k.update(n=1)),
    "a deque": (lambda: collections.deque([2.0, 3.0]), lambda k: k[0], lambda m: m.k.rotate()),
    "of a UserDict": (lambda: collections.UserDict(a=2.0), lambda k: k["a"], lambda m: m.k.update(a=5.0)),
    "of a ChainMap": (lambda: collections.ChainMap({"a": 2.0}), lambda k: k["a"], lambda m: m.k.update(a=5.0)),
}  # fmt: skip
VALUES: dict[str, tuple[Any, Any, Factor]] = {
    "a path": (pathlib.Path("/a"), pathlib.Path("/b"), lambda k: len(k.name) if k.name == "a" else 5),
    "a pattern": (re.compile("a"), re.compile("b"), lambda k: 2 if k.match("a") else 1),
    "a date": (datetime.date(2, 1, 1), datetime.date(3, 1, 1), lambda k: k.year),
    "a decimal": (decimal.Decimal("1.5"), decimal.Decimal("2.5"), float),
    "bytes": (b"aa", b"bb", lambda k: 2 if k == b"aa" else 1),
    "a complex number": (1 + 2j, 3 + 2j, lambda k: k.real),
    "a text of its own": (Text("a"), Text("b"), lambda k: 2 if k == "a" else 1),
    "a frozen set": (frozenset("a"), frozenset("n"), lambda k: 2 if "n" in k else 1),
    "a set": ({"a", Held}, {"n", Held}, lambda k: 2 if "n" in k else 1),
    "a slice": (slice(0, 2), slice(0, 3), lambda k: k.stop),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_change_of_an_object_is_noticed(name: str, calls: list[Any]) -> None:
    make, factor, change = OBJECTS[name]
    fused, plain = pair(made(lambda self, x: normed(self, x) * factor(self.k), k=make()))
    assert_same(fused, plain)
    assert len(calls) == 2
    change(fused), change(plain)
    assert_same(fused, plain)
    assert len(calls) == 2


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_any_kind_is_a_condition(name: str, calls: list[Any]) -> None:
    before, after, factor = VALUES[name]
    fused, plain = pair(made(lambda self, x: normed(self, x) * factor(self.k), k=before))
    assert_same(fused, plain)
    assert len(calls) == 2
    fused.k = plain.k = after
    assert_same(fused, plain)
    assert len(calls) == 2


def test_a_set_whose_copy_has_another_order_is_not_taken_for_changed(calls: list[Any]) -> None:
    class Kind(type):
        def __hash__(cls) -> int:
            return 7  # all ask for the last of eight places, and the first to come gets it

    held: set[Any] = {Kind("One", (), {}), Kind("Two", (), {})}
    assert [*held] != [*set(iter(held))]
    fused, plain = pair(made(lambda self, x: normed(self, x) * (2 if 1 in self.k else 1), k=held))
    assert_same(fused, plain)
    assert len(calls) == 2


def test_a_method_of_a_helper_that_is_patched_is_run(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain = pair(made(lambda self, x: normed(self, x) * self.k.value(), k=Held()))
    assert_same(fused, plain)
    for name, value in (("value", lambda self: 17.0), ("k", 13.0)):
        with monkeypatch.context() as patch:
            patch.setattr(Held, name, value)
            assert_same(fused, plain)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "held, factor",
    [
        (weakref.ref(Held), lambda k: k().k),
        (types.MappingProxyType({"a": torch.ones(1)}), lambda k: float(k["a"].sum())),
    ],
)
def test_what_nobody_can_watch_is_refused(held: Any, factor: Factor) -> None:
    model = made(lambda self, x: normed(self, x) * factor(self.k))
    vars(model)["k"] = held
    assert not gemmnorm.fuse_report(model).matches


def test_a_module_that_is_no_descendant_is_refused() -> None:
    model = made(lambda self, x: normed(self, x) * self.others[0].in_features, others=[nn.Linear(3, 3)])
    assert "none of its own" in str(gemmnorm.fuse_report(model))


class Temporary:
    def __init__(self, value: Any) -> None:
        self.value, self.seen = value, []

    def add(self, y: Any) -> Temporary:
        self.seen.append(y)
        self.value = self.value + y
        return self


def makes_objects(self: Any, x: Tensor) -> Any:
    def twice(h: Tensor, n: int) -> Tensor:
        return h if n == 0 else twice(h * 2, n - 1)

    outs, named = [], {}
    for _ in range(2):
        outs.append(twice(x, 2))
    named.update(y=normed(self, sum(outs)))
    return Temporary(named["y"]).add(x).value


def test_objects_and_containers_of_its_own_are_nobodys_business(calls: list[Any]) -> None:
    assert_same(*pair(made(makes_objects)))
    assert len(calls) == 2


def test_conditions_are_evaluated_where_attributes_are_gone() -> None:
    fused, plain = pair(made(lambda self, x: normed(self, x) * self.k.inner.gain, k=Held()))
    del fused.k, plain.k
    for model in (fused, plain):
        with pytest.raises(AttributeError, match="'k'"):
            model(X)
