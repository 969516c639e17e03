"""What Python answers by a stand-in's hash, identity, class or attributes: noticed, or refused, never frozen."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import gc
import operator
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from fuse_support import FEATURES, Written
from support import stir, twin
from torch import Tensor, is_tensor, nn
from torch.utils import _pytree as pytree

import gemmnorm

X = torch.randn(5, FEATURES, dtype=torch.float64)
SCALES = {"a": 2.0, 3: 4.0, torch.float64: 3.0, "cpu": 5.0}
is_instance = isinstance


class Mode(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass
class Batch:
    x: Tensor
    w: Tensor | None = None
    mode: Mode = Mode.A


class Bare:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


def h(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x)).relu()  # type: ignore[no-any-return]


def weight_of(d: Any) -> Any:
    return d.w if d.w is not None else 2.0


@functools.singledispatch
def prepared(d: Any) -> Any:
    return d


@prepared.register(dict)
def _(d: Any) -> Any:
    return d["x"] * 2


@prepared.register(Tensor)
def _(d: Tensor) -> Tensor:
    return d * 3


def with_local_dictionary(self: Any, x: Tensor, name: str) -> Tensor:
    found = {"a": 2.0}
    found[name] = 3.0
    return h(self, x) * found["a"]


def with_a_static_method(self: Any, d: Any) -> Any:
    return h(self, d.x) * Helper.weight(d)


class Helper:
    @staticmethod
    def weight(d: Any) -> Any:
        return 2.0 if d.w is None else d.w


def of_a_tensor(x: Tensor) -> float:
    return 3.0 if x.grad_fn is None else 1.0


W = torch.randn(5, 1, dtype=torch.float64)
LEAF = X.clone().requires_grad_()
CASES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "a string in a dictionary": (lambda s, x, k: h(s, x) * (2 if k in SCALES else 1), [(X, "a"), (X, "b")]),
    "dict.get": (lambda s, x, k: h(s, x) * SCALES.get(k, 1.0), [(X, "a"), (X, "b")]),
    "ModuleDict": (lambda s, x, k: s.heads[k](h(s, x)) if k in s.heads else h(s, x), [(X, "a"), (X, "b")]),
    "a dtype in a set": (lambda s, x: h(s, x) * (2 if x.dtype in {torch.float64, torch.float32} else 1), [(X,)]),
    "by dtype": (lambda s, x: h(s, x) * SCALES.get(x.dtype, 1.0), [(X,)]),
    "by rank": (lambda s, x: h(s, x) * (2 if x.ndim in {2, 3} else 1), [(X,)]),
    "by device": (lambda s, x: h(s, x) * SCALES.get(x.device.type, 1.0), [(X,)]),
    "a default in a set": (lambda s, x, k=3: h(s, x) * (2 if k in {1, 3} else 1), [(X,), (X, 2)]),
    "sets": (lambda s, x, k: h(s, x) * (2 if {k} == {"a"} else 1), [(X, "a"), (X, "b")]),
    "a set's length": (lambda s, x, k: h(s, x) * len({k, 1}), [(X, 1), (X, 2)]),
    "a local dictionary": (with_local_dictionary, [(X, "a"), (X, "b")]),
    "is a member": (lambda s, x, m: h(s, x) * (2 if m is Mode.A else 1), [(X, Mode.A), (X, Mode.B)]),
    "is True": (lambda s, x, flag: h(s, x) * (2 if flag is True else 1), [(X, True), (X, 1)]),
    "is not False": (lambda s, x, flag: h(s, x) * (2 if flag is not False else 1), [(X, True), (X, False)]),
    "is another": (lambda s, a, b: h(s, a) if a is b else h(s, a) - h(s, b), [(X, X), (X, X + 1)]),
    "is a member's": (lambda s, d: h(s, d.x) * (2 if d.mode is Mode.A else 1), [(Batch(X),), (Batch(X, W, Mode.B),)]),
    "a layout": (lambda s, x: h(s, x) * (2 if x.layout is torch.strided else 1), [(X,)]),
    "operator.is_": (lambda s, x, y: h(s, x) * (2 if operator.is_(y, None) else 1), [(X, None), (X, X)]),
    "None in a function": (lambda s, d: h(s, d.x) * weight_of(d), [(Batch(X),), (Batch(X, W),)]),
    "None in a static method": (with_a_static_method, [(Batch(X),), (Batch(X, W),)]),
    "None in a lambda": (lambda s, x: h(s, x) * of_a_tensor(x), [(X,), (LEAF * 2,)]),
    "None alone": (lambda s, d: h(s, d.x) * (2 if d.w is None else 1), [(Batch(X),), (Batch(X, W),)]),
    "None by getattr": (
        lambda s, d: h(s, d.x) * (2 if getattr(d, "w", None) is None else 1),
        [(Batch(X),), (Batch(X, W),), (Bare(x=X),)],
    ),
    "None by getattr, given": (
        lambda s, d: h(s, d.x) * (2 if (w := getattr(d, "w", None)) is None else w),
        [(Batch(X),), (Batch(X, W),), (Bare(x=X),)],
    ),
    "another default": (lambda s, d: h(s, d.x) * getattr(d, "w", 2.0), [(Batch(X, W),), (Bare(x=X),)]),
    "grad_fn": (lambda s, x: h(s, x) * (2 if x.grad_fn is None else 1), [(X,), (LEAF * 2,)]),
    "grad_fn of a result": (lambda s, x: h(s, x) * (2 if h(s, x).grad_fn is None else 1), [(X,), (LEAF,)]),
    "a weight's grad": (lambda s, x: h(s, x) * (2 if s.gemm.weight.grad is None else 1), [(X,)]),
    "_base": (lambda s, x: h(s, x) * (2 if x._base is None else 1), [(X,), (X[:3],)]),
    "singledispatch": (lambda s, d: h(s, prepared(d)), [(X,), ({"x": X},)]),
    "tree_map": (lambda s, d: h(s, pytree.tree_map(lambda v: v * 2, d)["x"]), [({"x": X},)]),
    "tree_flatten": (lambda s, d: h(s, pytree.tree_flatten(d)[0][0]), [({"x": X},), (X,)]),
    "is_tensor": (lambda s, x: h(s, x) * (2 if is_tensor(x) else 1), [(X,)]),
    "isinstance": (lambda s, x: h(s, x) * (2 if is_instance(x, Tensor) else 1), [(X,)]),
    "__class__": (lambda s, x: h(s, x) * (2 if x.__class__ is Tensor else 1), [(X,)]),
    "a class's name": (lambda s, x: h(s, x) * (2 if x.__class__.__name__ == "Tensor" else 1), [(X,)]),
    "__dict__": (lambda s, x: h(s, x) * x.__dict__.get("foo", 2), [(X,)]),
    "vars": (lambda s, x: h(s, x) * vars(x).get("node", 2), [(X,)]),
    "dir": (lambda s, x: h(s, x) * (2 if "device" in dir(x) else 1), [(X,)]),
    "repr": (lambda s, x: h(s, x) * (2 if "5" in f"{x.shape!r}" else 1), [(X,)]),
    "a repr": (lambda s, x: h(s, x) * len(repr(x.dtype)), [(X,)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_the_same_as_unfused(name: str, training: bool) -> None:
    forward, calls = CASES[name]
    model = Written(forward, heads=nn.ModuleDict({"a": nn.Linear(FEATURES, FEATURES)})).double().train(training)
    fused = gemmnorm.fuse(twin(model))
    for given in calls:
        torch.testing.assert_close(fused(*given), model(*given))
    torch.testing.assert_close(fused.state_dict(), model.state_dict())


def test_a_default_that_is_looked_up_is_fused() -> None:
    model = Written(CASES["a default in a set"][0])
    gemmnorm.fuse(model)(X.float())
    assert gemmnorm.fuse_report(model, calls=True).matches[0].calls.fused == 1


@pytest.mark.parametrize("where", ["vars", "__dict__"])
def test_attributes_behind_the_instance_s_dictionary(where: str) -> None:
    of_self = {
        "vars": lambda s, x: h(s, x) * vars(s)["factor"],
        "__dict__": lambda s, x: h(s, x) * s.__dict__["factor"],
    }
    model: Any = Written(of_self[where])
    model.factor = 2.0
    fused, plain = gemmnorm.fuse(twin(model)), twin(model)
    for changed in (fused, plain):
        changed.factor = 5.0
    torch.testing.assert_close(fused(X.float()), plain(X.float()))


def doubled(y: Tensor) -> Tensor:
    return y * 2


def test_code_that_is_reloaded_in_place() -> None:
    """As IPython's autoreload does: the functions stay, and what they do is exchanged."""

    def before(s: Any, x: Tensor, factor: float = 1.0) -> Tensor:
        return doubled(h(s, x)) * factor

    def after(s: Any, x: Tensor, factor: float = 1.0) -> Tensor:
        return doubled(h(s, x)) * factor + 1

    model = Written(before)
    fused = gemmnorm.fuse(twin(model))
    changes: tuple[tuple[Any, str, Any], ...] = (
        (before, "__code__", after.__code__),
        (doubled, "__code__", (lambda y: y * 4).__code__),
    )
    for function, name, value in changes:
        was = getattr(function, name)
        try:
            setattr(function, name, value)
            torch.testing.assert_close(fused(X.float()), model(X.float()))
        finally:
            setattr(function, name, was)
    torch.testing.assert_close(fused(X.float()), model(X.float()))


# --- classes


T = TypeVar("T")


class Asks(Protocol):
    def forward(self, x: Tensor) -> Tensor: ...


class Slotted:
    __slots__ = ()


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gemm, self.bn = nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x)).relu()  # type: ignore[no-any-return]


class Abstract(abc.ABC, _Chain):
    pass


class Typed(Generic[T], _Chain):
    pass


class Asked(Asks, _Chain):
    forward = _Chain.forward


class WithSlots(Slotted, _Chain):
    pass


@pytest.mark.parametrize("cls", [Abstract, Typed, Asked, WithSlots])
def test_bases_before_the_module(cls: type[nn.Module], tmp_path: Any) -> None:
    model = stir(nn.Sequential(cls(), nn.Linear(4, 4), nn.BatchNorm1d(4)))
    fused = gemmnorm.fuse(twin(model))
    assert len(gemmnorm.fuse_report(fused).matches) == 2 and type(fused[0]).__name__ == cls.__name__
    x = X.float()
    torch.testing.assert_close(fused(x), model(x))
    torch.save(fused, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(loaded(x), twin(fused)(x))
    assert loaded[0].__dict__.keys() >= {"_gemmnorm"}
    assert type(gemmnorm.unfuse(fused)[0]) is cls


def finds_itself(self: Any) -> Any:
    return super(self.__class__, self)


@pytest.mark.parametrize("kind", [property, torch.no_grad(), functools.cached_property])
def test_super_of_the_own_class_is_found_in_whatever_is_called(kind: Any) -> None:
    def above(self: Any) -> Any:
        return super(self.__class__, self).extra_repr()

    model: Any = Written(h)
    type(model).above = kind(above)
    if kind is functools.cached_property:
        type(model).above.__set_name__(type(model), "above")
    fused: Any = gemmnorm.fuse(model)
    assert (fused.above() if callable(fused.above) else fused.above) == ""


def test_a_function_of_the_class_behind_one_of_the_instance() -> None:
    model: Any = Written(lambda s, x: s.act(h(s, x)))
    type(model).act, model.act = staticmethod(torch.tanh), torch.sin
    fused: Any = gemmnorm.fuse(twin(model))
    x = X.float()
    torch.testing.assert_close(fused(x), model(x))
    assert gemmnorm.fuse_report(fused, calls=True).matches[0].calls.fused == 1
    fused.act = model.act = torch.cos
    torch.testing.assert_close(fused(x), model(x))
    del fused.act, model.act
    torch.testing.assert_close(fused(x), model(x))


def test_classes_are_let_go() -> None:
    model: Any = Written(types.FunctionType(h.__code__, h.__globals__))
    cls = weakref.ref(type(model))
    gemmnorm.fuse(model)(X.float())
    del model
    for _ in range(2):  # what a weak reference's callback lets go of
        gc.collect()
    assert cls() is None


def test_a_fused_forward_is_described_as_the_original() -> None:
    fused = gemmnorm.fuse(Abstract())
    assert (
        typing.get_type_hints(fused.forward) == typing.get_type_hints(_Chain.forward)
        and fused.forward.__module__ == __name__
    )


def asks_for_true(self: Any, x: Tensor, twice: Any = None, *, more: bool = False) -> Any:
    y = h(self, x)
    if isinstance(twice, bool) and twice is True:
        y = y * 2
    return y if more is not True else (y, y)


def test_a_parameter_compared_with_true(calls: list[Any]) -> None:
    model = stir(Written(asks_for_true)).double()
    fused = gemmnorm.fuse(twin(model))
    for given in ({}, {"twice": True}, {"twice": False}, {"more": True}, {"twice": torch.ones(5, 1), "more": False}):
        got, want = fused(X, **given), model(X, **given)
        assert len(got) == len(want) and all(map(torch.equal, got, want))
    assert calls
