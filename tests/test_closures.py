"""Closures, functions that are held, counters, the environment, log levels: a change is noticed, or refused by line."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_support import Written
from test_recording import X, assert_same, fused_and_plain, normed
from torch import Tensor

import gemmnorm
from gemmnorm import export as exporting
from gemmnorm.errors import GemmNormValueError
from gemmnorm.userfiles import load_source

LOG = logging.getLogger("gemmnorm_test")
DOUBLE = lambda h: h * 2  # noqa: E731
NAMES = itertools.count()


def halve(h: Tensor) -> Tensor:
    return h / 2


def tripled(h: Tensor) -> Tensor:
    return h * tripled.factor  # type: ignore[attr-defined, no-any-return]


tripled.factor = 3  # type: ignore[attr-defined]


class Shift:
    """To be called, with an attribute."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, h: Tensor) -> Tensor:
        return h + self.by

    def negated(self, h: Tensor) -> Tensor:
        return self.by - h


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * 2


class Tripled(Doubled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 3


def cell_of(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)]


def closed_over(**held: Any) -> Callable[..., Any]:
    """A `forward` that reads from its closure, by way of a function of its own and of a helper."""
    factor, act, cfg, sizes = held["factor"], held["act"], held["cfg"], held["sizes"]

    def helper(h: Tensor) -> Tensor:
        return h * sum(sizes)

    def forward(self: Any, x: Tensor) -> Tensor:
        y = normed(self, x)
        y = (lambda h: h * factor)(act(y))
        return helper(y) if cfg.twice else y

    forward.helper = helper  # type: ignore[attr-defined]
    return forward


CLOSURE: dict[str, Any] = {
    "factor": (2.0, 3.0),
    "act": (halve, F.silu),
    "cfg": (types.SimpleNamespace(twice=True), types.SimpleNamespace(twice=False)),
    "sizes": ([1, 2], [1, 3]),
}


@pytest.mark.parametrize("name", CLOSURE)
def test_a_closure_variable_is_a_condition(name: str, calls: list[Any]) -> None:
    forward: Any = closed_over(**{key: value for key, (value, _) in CLOSURE.items()})
    fused, plain = fused_and_plain(Written(forward))
    assert_same(fused, plain, X)
    assert len(calls) == 3
    cell_of(forward.helper if name == "sizes" else forward, name).cell_contents = CLOSURE[name][1]
    assert_same(fused, plain, X)
    assert len(calls) == 3


def test_a_configuration_in_a_closure_is_a_condition(calls: list[Any]) -> None:
    cfg = types.SimpleNamespace(twice=True)
    fused, plain = fused_and_plain(Written(closed_over(factor=2.0, act=halve, cfg=cfg, sizes=[2])))
    assert_same(fused, plain, X)
    cfg.twice = False
    assert_same(fused, plain, X)
    assert len(calls) == 3


def test_two_closures_of_one_function_are_told_apart(calls: list[Any]) -> None:
    def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda h: h * factor

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.second(self.first(normed(self, x)))  # type: ignore[no-any-return]

    model: Any = Written(forward)
    model.first, model.second = scaled_by(2.0), scaled_by(3.0)
    fused, plain = fused_and_plain(model)
    assert_same(fused, plain, X)
    assert len(calls) == 3
    cell_of(model.second, "factor").cell_contents = 5.0
    assert_same(fused, plain, X)
    assert len(calls) == 3


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, x: Tensor) -> Any:
        return function(self, x)

    return wrapper


def test_what_a_decorator_wraps_costs_no_condition() -> None:
    fused: Any = gemmnorm.fuse(Written(decorated(decorated(normed))))
    assert fused._gemmnorm.plan.forms[0].conditions == ()


def calls_what_it_holds(self: Any, x: Tensor) -> Tensor:
    return self.act(normed(self, x))  # type: ignore[no-any-return]


def calls_by_a_key(self: Any, x: Tensor) -> Tensor:
    return self.act["act"](normed(self, x))  # type: ignore[no-any-return]


def calls_of_a_configuration(self: Any, x: Tensor) -> Tensor:
    return self.act.act(normed(self, x))  # type: ignore[no-any-return]


HELD: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "a lambda": (calls_what_it_holds, lambda h: h.relu(), lambda h: h * 2),
    "a function": (calls_what_it_holds, halve, DOUBLE),
    "one for PyTorch's": (calls_what_it_holds, torch.relu, halve),
    "PyTorch's for one": (calls_what_it_holds, halve, torch.relu),
    "a partial function": (calls_what_it_holds, functools.partial(halve), functools.partial(DOUBLE)),
    "arguments": (calls_what_it_holds, functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=3)),
    "an object": (calls_what_it_holds, Shift(1.0), Shift(2.0)),
    "another kind": (calls_what_it_holds, Shift(1.0), halve),
    "a method": (calls_what_it_holds, Shift(1.0).negated, Shift(1.0).__call__),
    "a method of another": (calls_what_it_holds, Shift(1.0).negated, Shift(2.0).negated),
    "a Function": (calls_what_it_holds, Doubled.apply, Tripled.apply),
    "in a dictionary": (calls_by_a_key, {"act": halve}, {"act": DOUBLE}),
    "in a configuration": (
        calls_of_a_configuration,
        types.SimpleNamespace(act=halve),
        types.SimpleNamespace(act=DOUBLE),
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_a_function_that_is_held_is_a_condition(name: str, calls: list[Any]) -> None:
    forward, before, after = HELD[name]
    model: Any = Written(forward)
    model.act = before
    fused, plain = fused_and_plain(model)
    assert_same(fused, plain, X)
    assert_same(*copy.deepcopy((fused, plain)), X)
    assert len(calls) == 6
    fused.act = plain.act = after  # type: ignore[assignment]
    assert_same(fused, plain, X)
    assert len(calls) == 6


def calls_a_global(self: Any, x: Tensor) -> Tensor:
    return DOUBLE(tripled(halve(normed(self, x))))


def test_a_global_function_is_a_condition_but_for_definitions(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, plain = fused_and_plain(Written(calls_a_global))
    assert_same(fused, plain, X)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "DOUBLE", halve)
        assert_same(fused, plain, X)
    with monkeypatch.context() as patch:
        patch.setattr(tripled, "factor", 4)
        assert_same(fused, plain, X)
    assert len(calls) == 3
    conditions = fused._gemmnorm.plan.forms[0].conditions  # type: ignore[union-attr]
    assert "DOUBLE" in conditions[0] and "tripled.factor" in conditions[1] and len(conditions) == 2, conditions


def makes_its_function(self: Any, x: Tensor) -> Tensor:
    return self.made(normed(self, x)) + self.static(x)  # type: ignore[no-any-return]


def test_what_a_class_defines_costs_no_condition_and_a_property_is_read_through(calls: list[Any]) -> None:
    model: Any = Written(makes_its_function)
    model.factor = 2.0
    type(model).made = property(lambda self: lambda h: h * self.factor)
    type(model).static = staticmethod(halve)
    fused, plain = fused_and_plain(model)
    assert_same(fused, plain, X)
    assert len(calls) == 3
    fused.factor = plain.factor = 3.0  # type: ignore[assignment]
    assert_same(fused, plain, X)
    fused.factor = plain.factor = 2.0  # type: ignore[assignment]
    type(model).static = staticmethod(DOUBLE)
    assert_same(fused, plain, X)
    assert len(calls) == 3


def test_a_closure_variable_may_be_unassigned(calls: list[Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return later(normed(self, x)) if self.later else normed(self, x)

    model: Any = Written(forward)
    model.later = False
    fused, plain = fused_and_plain(model)
    assert_same(fused, plain, X)
    assert len(calls) == 3
    later = halve


def logs_in_a_method(self: Any, x: Tensor) -> Tensor:
    return self.logged(normed(self, x))  # type: ignore[no-any-return]


def logged(self: Any, h: Tensor) -> Tensor:
    LOG.warning("that")
    return h * next(self.counter)


def test_a_method_that_logs_and_counts_stays_a_call(calls: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Written(logs_in_a_method)
    type(model).logged, model.counter = logged, iter(range(1, 9))
    fused, plain = fused_and_plain(model)
    caplog.clear()
    assert_same(fused, plain, X)
    assert len(calls) == 3 and len(caplog.records) == 6


FILE = """
import torch
from torch import nn


def halve(h):
    return h / 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bn, self.act = nn.Linear(32, 24), nn.BatchNorm1d(24), ACT

    def forward(self, x):
        return self.act(self.bn(self.linear(x)))


def get_inputs():
    return [torch.randn(40, 32)]


def get_init_inputs():
    return []
"""


def test_an_exported_file_asks_for_a_function_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "holding.py"
    path.write_text(FILE.replace("ACT", "halve"))
    module = load_source(exporting.export(path, path.with_name("holding_new.py")).source, "holding_new")
    new, x = module.ModelNew().eval(), torch.randn(40, 32)
    half = new(x)
    new.act = lambda h: h
    torch.testing.assert_close(new(x), half * 2)
    path.write_text(FILE.replace("ACT", "lambda h: h / 2"))
    with pytest.raises(GemmNormValueError, match="a name at the top level"):
        exporting.export(path, path.with_name("holding_new.py"))


# --- refused


def counts_in_a_closure() -> Callable[..., Any]:
    count = 0

    def forward(self: Any, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return normed(self, x) * count

    return forward


def counts_by_an_attribute(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * next(self.counter)


def counts_by_a_global(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * next(NAMES)


def draws_of_its_own(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * self.dice.random()


def counts_on_itself(self: Any, x: Tensor) -> Tensor:
    counts_on_itself.calls = getattr(counts_on_itself, "calls", 0) + 1  # type: ignore[attr-defined]
    return normed(self, x)


def counts_on_a_helper(self: Any, x: Tensor) -> Tensor:
    tripled.factor += 1  # type: ignore[attr-defined]
    return tripled(normed(self, x))


def keeps_in_a_default(self: Any, x: Tensor) -> Tensor:
    return remembers(normed(self, x))


def remembers(h: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return h * len(seen)


def changes_the_environment(self: Any, x: Tensor) -> Tensor:
    os.environ["GEMMNORM_TEST"] = "1"
    return normed(self, x)


def reads_the_whole_environment(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * len({**os.environ})


def warns(self: Any, x: Tensor) -> Tensor:
    LOG.warning("that")
    return normed(self, x)


REFUSED: dict[Callable[..., Any], str] = {
    counts_in_a_closure(): "assigns count of its closure (line ",
    counts_by_an_attribute: "takes values one after the other from counter, a count (line ",
    counts_by_a_global: "NAMES, a count (line ",
    draws_of_its_own: "takes values one after the other from dice, a Random (line ",
    counts_on_itself: "changes calls of the function counts_on_itself (line ",
    counts_on_a_helper: "changes factor of the function tripled (line ",
    keeps_in_a_default: "changes a list or dictionary",
    changes_the_environment: "changes the environment (line ",
    reads_the_whole_environment: "reads all of the environment (line ",
    warns: "logs (line ",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_refused(forward: Callable[..., Any]) -> None:
    model: Any = Written(forward)
    model.counter, model.dice = itertools.count(7), random.Random(0)
    report = gemmnorm.fuse_report(model)
    assert not report.matches and REFUSED[forward] in report.refusals[0].reason, report
    first, last = (f"(line {n})" in str(report) for n in (0, None))
    assert not first and not last
    assert next(model.counter) == 7 and tripled.factor == 3  # type: ignore[attr-defined]
    assert not hasattr(counts_on_itself, "calls") and "GEMMNORM_TEST" not in os.environ
    assert remembers.__defaults__ == ([],)


# --- questions


def asks_the_environment(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    y = y * 2 if os.getenv("GEMMNORM_TEST", "") == "on" else y
    return y * 3 if "GEMMNORM_TEST" in os.environ and os.environ["GEMMNORM_TEST"] == "off" else y


@pytest.mark.parametrize("before", [None, "on", "off"])
def test_the_environment_is_a_condition(before: str | None, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def put(value: str | None) -> None:
        monkeypatch.delenv("GEMMNORM_TEST", raising=False)
        if value is not None:
            monkeypatch.setenv("GEMMNORM_TEST", value)

    put(before)
    fused, plain = fused_and_plain(Written(asks_the_environment))
    for value in (None, "on", "off"):
        put(value)
        assert_same(fused, plain, X)
    assert len(calls) == 3


def logs(self: Any, x: Tensor) -> Tensor:
    LOG.debug("rows: %s", x.shape)
    logging.getLogger("gemmnorm_test.other").debug("that")
    return normed(self, x)


@pytest.mark.parametrize("name", ["gemmnorm_test", "gemmnorm_test.other"])
def test_who_raises_the_level_gets_the_log_lines(name: str, calls: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    fused, plain = fused_and_plain(Written(logs))
    assert_same(fused, plain, X)
    assert len(calls) == 3 and not caplog.records
    with caplog.at_level(logging.DEBUG, name):
        fused(X)
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        plain(X)
        assert found == [record.getMessage() for record in caplog.records] != []
    fused(X)
    assert len(calls) == 4
