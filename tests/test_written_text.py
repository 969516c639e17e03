"""The text of a fused `forward`: it is Python whatever names and lengths come in, and the results are the very same."""

from __future__ import annotations

import abc
import contextlib
import copy
import gc
import pathlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from fuse_support import FEATURES, Written
from torch import Tensor, nn

import gemmnorm
from gemmnorm.fuse import lines, writing

X = torch.randn(5, FEATURES)


def h(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x))  # type: ignore[no-any-return]


def assert_same(model: nn.Module, *args: Any, change: Callable[[Any], object] | None = None, fused: bool = True) -> Any:
    """Fused and not, the model gives equal values of equal types in both modes, `change`d after fusing or not."""
    copied = gemmnorm.fuse(copy.deepcopy(model))
    assert any(match.fused for match in gemmnorm.fuse_report(copied).matches) is fused
    for module in (model, copied) if change is not None else ():
        change(module)  # type: ignore[misc]
    for training in (True, False):
        expected, found = (m.train(training)(*args) for m in (model, copied))
        assert described(found) == described(expected)
    return found


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.stride(), value.tolist()
    if isinstance(value, dict):
        return [*value], described(tuple(value.values()))
    return (type(value), [*map(described, value)]) if isinstance(value, (tuple, list)) else (type(value), value)


# --- lines -----------------------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    def forward(self, x: Tensor, first_tensor_to_look_at: Tensor, second_tensor_to_look_at: Tensor) -> Tensor:
        return x * 2 - first_tensor_to_look_at + second_tensor_to_look_at


def by_the_names_of_modes(self: Any, x: Tensor) -> Any:
    return {f"train={self.training}": self.heads[str(self.training)](h(self, x))}


def told_the_mode(self: Any, x: Tensor) -> Any:
    return {"True": h(self, x), "mode": self.training, "not": not self.training}


def calls_a_child_with_a_bracket(self: Any, x: Tensor) -> Tensor:
    head = self.heads["price (EUR) of what is in the basket :-("]
    y = head(x=h(self, x), first_tensor_to_look_at=x, second_tensor_to_look_at=x)
    return y.abs()  # type: ignore[no-any-return]


def returns_a_call_of_a_child_with_a_bracket(self: Any, x: Tensor) -> Tensor:
    head = self.heads["price (EUR) of what is in the basket :-("]
    return head(x=h(self, x), first_tensor_to_look_at=x, second_tensor_to_look_at=x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [by_the_names_of_modes, told_the_mode])
def test_true_and_false_in_texts_are_no_modes(forward: Any) -> None:
    assert_same(Written(forward, heads=nn.ModuleDict({"True": nn.LayerNorm(FEATURES), "False": nn.Identity()})), X)


def test_lines_are_merged_by_what_stands_outside_of_texts() -> None:
    assert lines.merge_modes(["f(True, 'True')"], ["f(False, 'True')"]) == ["f(self.training, 'True')"]
    apart = lines.merge_modes(['f("it\'s True")'], ['f("it\'s False")'])
    assert apart == ["if self.training:", '    f("it\'s True")', 'f("it\'s False")']


@pytest.mark.parametrize("forward", [calls_a_child_with_a_bracket, returns_a_call_of_a_child_with_a_bracket])
def test_a_long_line_with_brackets_in_a_name(forward: Any) -> None:
    assert_same(Written(forward, heads=nn.ModuleDict({"price (EUR) of what is in the basket :-(": Weighted()})), X)


def test_a_long_line_breaks_within_its_last_parentheses() -> None:
    found = lines.wrapped("y = ", f"f(a) + g({', '.join('abcdefgh' * 8)})")
    assert [line[:8] for line in found] == ["y = f(a)", "    a, b", ")"]


# --- depth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [3, 25, 110, 150])
def test_arithmetic_in_a_long_loop(steps: int) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = h(self, x)
        for _ in range(steps):
            y = y * 0.9 + 0.1
        return y

    assert_same(Written(forward), X)


# --- what nobody has foreseen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SyntaxError("no such thing"), RecursionError("too deep"), RuntimeError()])
def test_what_fails_in_writing_is_a_refusal(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(self: Any) -> list[str]:
        raise error

    monkeypatch.setattr(writing.Writer, "body", fail)
    model = gemmnorm.fuse(Written(h))
    (refusal,) = gemmnorm.fuse_report(model).refusals
    assert f"cannot be analysed ({type(error).__name__}: {str(error) or 'no message'})" in refusal.reason
    model(X)


def test_a_text_that_is_no_python_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing.Writer, "body", lambda self: ["return ("])
    (refusal,) = gemmnorm.fuse_report(gemmnorm.fuse(Written(h))).refusals
    assert "cannot be analysed (SyntaxError" in refusal.reason


def test_who_interrupts_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing.Writer, "body", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gemmnorm.fuse(Written(h))


# --- chains over more than a matrix ----------------------------------------------------------------------------------


def transposed(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x).transpose(1, 2))  # type: ignore[no-any-return]


def pooled(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.conv(x)).relu().max(-1)[0]  # type: ignore[no-any-return]


def scaled_rows(self: Any, x: Tensor) -> Tensor:
    return torch.relu(self.bn(self.gemm(x).view(-1, FEATURES) * self.scale))


def one_dimension() -> dict[str, nn.Module]:
    return {"conv": nn.Conv1d(FEATURES, 16, 1), "norm": nn.BatchNorm1d(16)}


LAID_OUT: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "transpose": (lambda: Written(transposed), torch.randn(7, 11, FEATURES)),
    "scaled rows": (lambda: Written(scaled_rows), torch.randn(7, 11, FEATURES)),
    "Conv1d, then the largest": (lambda: Written(pooled, **one_dimension()), torch.randn(7, FEATURES, 33)),
    "Conv1d of a transposed x": (lambda: nn.Sequential(*one_dimension().values()),
                                 torch.randn(7, 33, FEATURES).transpose(1, 2)),
    "Conv2d, channels last": (lambda: nn.Sequential(nn.Conv2d(FEATURES, 32, 1), nn.BatchNorm2d(32), nn.ReLU()),
                              torch.randn(4, FEATURES, 9, 9).to(memory_format=torch.channels_last)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAID_OUT)
def test_other_layouts_are_the_same_to_the_last_bit(name: str) -> None:
    """Where no kernels can serve, the modules run on x as it is; the call counts as fused, as of a matrix."""
    make, x = LAID_OUT[name]
    model = make()
    fused = gemmnorm.fuse(copy.deepcopy(model))
    for training in (True, False, True):
        found = []
        for module in (model, fused):
            module.train(training).zero_grad()
            given = x.detach().requires_grad_()  # keeps the strides
            y = module(given)
            y.mul(torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
            gradients: list[Any] = [given.grad, *(p.grad for p in module.parameters())]
            found.append(described([y.detach(), *gradients, *module.state_dict().values()]))
        assert found[0] == found[1]
    (match,) = gemmnorm.fuse_report(fused, calls=True).matches
    assert str(match.calls) == "calls: 3 fused"


def test_a_strategy_that_is_asked_for_takes_rows() -> None:
    model = Written(transposed)
    fused, x = gemmnorm.fuse(copy.deepcopy(model)), torch.randn(7, 11, FEATURES)
    with gemmnorm.set_strategy("reference"):
        torch.testing.assert_close(fused(x), model(x))


# --- what is compared, and what is returned --------------------------------------------------------------------------


def boosted(y: Tensor, by: float = 1.5, *, also: float = 1.0, table: Any = (1.0, [2.0])) -> Tensor:
    return y * by * also * table[1][0]


def through_a_helper(self: Any, x: Tensor) -> Tensor:
    return boosted(h(self, x))


DEFAULTS: dict[str, Callable[[Any], object]] = {
    "another": lambda m: setattr(boosted, "__defaults__", (9.0,)),
    "equal, of another type": lambda m: setattr(boosted, "__kwdefaults__", {"also": 1, "table": (1.0, [2.0])}),
    "changed in place": lambda m: boosted.__kwdefaults__.update(also=3.0),
    "what one holds": lambda m: boosted.__kwdefaults__["table"][1].__setitem__(0, 7.0),
    "none": lambda m: setattr(boosted, "__kwdefaults__", {**boosted.__kwdefaults__, "also": -1.0}),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_a_helper_that_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boosted, "__defaults__", boosted.__defaults__)
    monkeypatch.setattr(boosted, "__kwdefaults__", copy.deepcopy(boosted.__kwdefaults__))
    assert_same(Written(through_a_helper), X, change=DEFAULTS[name])


def filled(**changed: Any) -> dict[str, Any]:
    return {"w": [1, 2.0], "n": 1, "zero": 0.0, "s": {1, 2}, "t": (3, True), "size": torch.Size([2])} | changed


HELD: dict[str, dict[str, Any]] = {
    "an int, then a float": filled(w=[1.0, 2.0]),
    "a float, then an int": filled(w=[1, 2]),
    "a number, then a bool": filled(n=True),
    "a bool inside of a tuple": filled(t=(3, 1)),
    "zero, then minus zero": filled(zero=-0.0),
    "a set": filled(s={1.0, 2}),
    "a size, then a tuple": filled(size=(2,)),
    "another order": dict(reversed(filled().items())),
    "one less": {"w": [1, 2.0]},
    "the same": filled(),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_equal_values_of_other_types_are_others(name: str, many: bool) -> None:
    rest = {f"k{i}": i for i in range(30)} if many else {}
    change = {**HELD[name], **rest}
    if name == "another order":
        change = dict(reversed({**filled(), **rest}.items()))
        change |= {next(iter(change)): [3, 4]} if many else {}
    model = Written(lambda self, x: (h(self, x), repr(self.held)))
    model.held = {**filled(), **rest}  # type: ignore[assignment]
    assert_same(model, X, change=lambda m: setattr(m, "held", change))


def test_equal_owners_share_a_function_whatever_they_hold() -> None:
    models = [Written(lambda self, x: h(self, x) * self.held[0]) for _ in range(2)]
    models[1].__class__ = models[0].__class__
    for model in models:
        model.held = [float(i) for i in range(100)]  # type: ignore[assignment]
        gemmnorm.fuse(model)
    first, second = (model._gemmnorm.forward for model in models)  # type: ignore[union-attr]
    assert first is second
    models[1].held[0] = 7.0  # type: ignore[index, operator]
    torch.testing.assert_close(models[1](X), gemmnorm.unfuse(models[1])(X))


class Gain:
    def __init__(self, gain: float = 1.5) -> None:
        self.gain = gain


MANY: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[int], Any], Callable[[Any], object]]] = {
    "an entry": (lambda self, x: h(self, x) * self.held["gain"],
                 lambda n: {**{f"k{i}": i for i in range(n)}, "path": pathlib.Path("."), "gain": 1.5},
                 lambda m: m.held.update(gain=9.0)),
    "an object": (lambda self, x: h(self, x) * self.held[70].gain,
                  lambda n: [Gain() for _ in range(n)],
                  lambda m: setattr(m.held[70], "gain", 9.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_all_of_a_large_container_is_watched_or_it_is_refused(name: str) -> None:
    forward, make, change = MANY[name]
    for count, fused in ((80, True), (1000, False)):
        model = Written(forward)
        model.held = make(count)
        assert_same(model, X, change=change, fused=fused)
    (refusal,) = gemmnorm.fuse_report(model).refusals
    assert "reads more than 400 things" in refusal.reason


RETURNED: dict[str, Any] = {
    "a size": torch.Size([2, 3]),
    "sizes inside": [torch.Size([2]), (1,)],
    "a number of numpy's": np.float64(1.5),
    "such a number inside": {"n": (np.float64(1.5), 2)},
    "infinity": np.float64("inf"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_keeps_its_type(name: str) -> None:
    model = Written(lambda self, x: (h(self, x), self.held, self.held))
    model.held = RETURNED[name]
    assert_same(model, X)


def test_a_number_of_numpys_in_arithmetic_is_one_of_pythons() -> None:
    model = Written(lambda self, x: h(self, x) * self.held)
    model.held = np.float64(1.5)  # type: ignore[assignment]
    assert_same(model, X)
    assert_same(model, X, change=lambda m: setattr(m, "held", np.float64(2.5)))


# --- what is left behind ---------------------------------------------------------------------------------------------


def catches(self: Any, x: Tensor) -> Tensor:
    try:
        return h(self, x)
    except ValueError:
        return x


def catches_all(self: Any, x: Tensor) -> Tensor:
    y = h(self, x)
    with contextlib.suppress(Exception):
        return y if y.sum() > 0 else x
    return y


def decides_by_data(self: Any, x: Tensor) -> Tensor:
    y = h(self, x)
    return y if y.sum() > 0 else x


def raises(self: Any, x: Tensor) -> Tensor:
    h(self, x)
    raise RuntimeError("not now")


@pytest.mark.parametrize("forward", [catches, catches_all, decides_by_data, raises])
def test_a_refused_model_is_let_go(forward: Any) -> None:
    model = gemmnorm.fuse(Written(forward))
    report = gemmnorm.fuse_report(model)
    assert report.refusals and not report.matches
    found = weakref.ref(model)
    del model
    gc.collect()
    assert found() is None


def test_a_class_that_counts_as_a_linear_is_let_go() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), None

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    class Derived(Own):
        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x) * 2

    model = nn.Sequential(Own(), nn.BatchNorm1d(6))
    assert_same(model, X)
    assert_same(nn.Sequential(Derived(), nn.BatchNorm1d(6)), X, fused=False)
    found = weakref.ref(Own)
    del model, Own, Derived
    gc.collect()
    assert found() is None


def test_what_pytorch_lists_of_itself_is_its_own() -> None:
    gemmnorm.fuse(Written(h))
    ours = [f for f in torch.overrides.get_ignored_functions() if str(getattr(f, "__module__", "")).startswith("gemmn")]
    assert not ours and torch.randn in torch.overrides.get_ignored_functions()


# --- classes that hear of their subclasses ---------------------------------------------------------------------------

registered: list[Any] = []


class Registering:
    """A base without a `__dict__`."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        registered.append(cls)


class AbstractModel(abc.ABC, nn.Module):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        registered.append(cls)


T = TypeVar("T")


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gemm, self.bn = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return h(self, x)


class BehindABC(AbstractModel, Chained): ...


class BehindGeneric(Generic[T], AbstractModel, Chained): ...


class BehindABaseOfItsOwn(Registering, Chained): ...


class InPlainOrder(Chained, Registering): ...


@pytest.mark.parametrize("cls", [BehindABC, BehindGeneric, BehindABaseOfItsOwn, InPlainOrder])
def test_who_lists_subclasses_does_not_hear_of_a_fused_one(cls: Any) -> None:
    known = registered.copy()
    model = cls()
    assert_same(model, X)
    fused = gemmnorm.fuse(copy.deepcopy(model))
    assert registered == known and isinstance(fused, cls) and type(fused) is not cls
    assert type(pickle.loads(pickle.dumps(fused))) is type(fused)
    assert type(gemmnorm.unfuse(fused)) is cls

    class Further(cls):  # type: ignore[misc]
        pass

    assert registered == [*known, Further]
