"""What a recording would keep as it was: parameters that are listed, helper objects, settings, structure, questions."""

from __future__ import annotations

import collections
import contextvars
import copy
import datetime
import enum
import gc
import math
import sys
import time
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fuse_support import Written
from support import twin
from torch import Tensor, is_grad_enabled, nn

import gemmnorm

X = torch.randn(8, 6)
CONTEXT = contextvars.ContextVar("CONTEXT", default=2.0)


def normed(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x))  # type: ignore[no-any-return]


def made(forward: Callable[..., Any], **held: Any) -> Any:
    model: Any = Written(forward)
    for name, value in held.items():
        setattr(model, name, value)
    return model


def answer(model: nn.Module, x: Tensor) -> Any:
    try:
        return model(x)
    except Exception as error:
        return type(error)


def assert_same(fused: Any, plain: Any, x: Tensor = X) -> None:
    for training in (True, False):
        found = [answer(model.train(training), x) for model in (fused, plain)]
        torch.testing.assert_close(*found) if isinstance(found[1], Tensor) else None
        assert isinstance(found[0], Tensor) == isinstance(found[1], Tensor) and type(found[0]) is type(found[1])
    for one, other in zip(fused.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


def pair(model: nn.Module) -> tuple[Any, Any]:
    return gemmnorm.fuse(twin(model)), model


# --- parameters and buffers that are listed


def casts(self: Any, x: Tensor) -> Tensor:
    return normed(self, x.to(next(self.parameters()).dtype))


def moves(self: Any, x: Tensor) -> Tensor:
    found = dict(self.bn.named_buffers())
    return normed(self, x.to(found["running_mean"].device)) + self.state_dict()["fixed"]


def weighs(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) + 1e-3 * sum(p.square().sum() for p in self.gemm.parameters())


def clamps(self: Any, x: Tensor) -> Tensor:
    for p in self.gemm.parameters():
        p.data.clamp_(-0.01, 0.01)
    return normed(self, x)


def resets(self: Any, x: Tensor) -> Tensor:
    self.bn.reset_running_stats()
    return normed(self, x)


@pytest.mark.parametrize("forward", [casts, moves, weighs, clamps, resets])
def test_listed_parameters_are_those_of_the_call(forward: Callable[..., Any], calls: list[Any]) -> None:
    model = made(forward)
    before = copy.deepcopy(model.state_dict())
    fused, plain = pair(model)
    torch.testing.assert_close([*model.state_dict().values()], [*before.values()], rtol=0, atol=0)
    assert_same(fused, plain)
    for m in (fused, plain):
        m.double()
        with torch.no_grad():
            [p.copy_(torch.linspace(-2, 2, p.numel()).view_as(p)) for p in m.parameters()]
    assert_same(fused, plain, X if forward in (casts,) else X.double())
    assert len(calls) == 4


def test_a_model_made_on_meta_and_fused_there() -> None:
    with torch.device("meta"):
        model = gemmnorm.fuse(Written(lambda self, x: normed(self, x.to(next(self.parameters()).device))))
    model.to_empty(device="cpu")
    assert model(X).device.type == "cpu"


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: normed(self, x) * (2 if any(p.requires_grad for p in self.parameters()) else 1),
        lambda self, x: [normed(self, x), self.zero_grad()][0],
        lambda self, x: [normed(self, x), self.gemm.half()][0],
        lambda self, x: normed(self, x) * float(vars(self)["_parameters"]["scale"].sum()),
        lambda self, x: normed(self, x.to(self.others[0].dtype)),
        lambda self, x: self.bn(self.gemm(x) * math.nan),
    ],
)
def test_other_ways_to_them_are_refused(forward: Callable[..., Any]) -> None:
    model = made(forward, others=[torch.ones(3)])
    before = copy.deepcopy(model.state_dict())
    report = gemmnorm.fuse_report(model)
    assert not report.matches and len(report.refusals) == 1
    torch.testing.assert_close([*model.state_dict().values()], [*before.values()], rtol=0, atol=0)
    assert all(p.dtype == torch.float32 for p in model.parameters())


# --- helper objects


class Schedule:
    def __init__(self) -> None:
        self.t = 0

    def value(self) -> float:
        return 0.5**self.t

    def step(self) -> None:
        self.t += 1


class Meter:
    __slots__ = ("last", "values")

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.last = None

    def update(self, y: Any) -> None:
        self.values.append(y)

    def keep(self, y: Any) -> None:
        self.last = y


class Registry:
    kept: list[Any] = []  # noqa: RUF012

    def hide(self, y: Any) -> None:
        (lambda held: held[0].append(y))((vars(type(self))["kept"] and [Registry.kept]) or [Registry.kept])


def test_a_method_of_a_helper_is_read(calls: list[Any]) -> None:
    fused, plain = pair(made(lambda self, x: normed(self, x) * self.schedule.value(), schedule=Schedule()))
    assert_same(fused, plain)
    fused.schedule.step(), plain.schedule.step()
    assert_same(fused, plain)
    assert len(calls) == 2


def after(does: Callable[[Any, Tensor], Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = normed(self, x)
        does(self, y)
        return y

    return forward


LOST: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], Any], Callable[[Any], Any]]] = {
    "a meter": (lambda self, y: self.held.update(y), Meter, lambda held: len(held.values)),
    "slots": (lambda self, y: self.held.keep(y), Meter, lambda held: held.last is None),
    "steps": (lambda self, y: self.held.step(), Schedule, lambda held: held.t),
    "callbacks": (lambda self, y: [c.update(y) for c in self.held], lambda: [Meter()],
                  lambda held: len(held[0].values)),
    "nested": (lambda self, y: self.held.a.b.log(y), lambda: SimpleNamespace(a=SimpleNamespace(b=Nested())),
               lambda held: len(held.a.b.meter.values)),
    "a counter": (lambda self, y: self.held.update(["calls"]), collections.Counter, lambda held: held["calls"]),
    "a default": (lambda self, y: self.held["y"].append(y), lambda: collections.defaultdict(list),
                  lambda held: len(held["y"])),
    "a list of a class of its own": (lambda self, y: self.held.append(1), lambda: Listed([1]), len),
    "an array": (lambda self, y: self.held.__iadd__(1), lambda: np.zeros(3), lambda held: held.sum()),
    "a hidden list": (lambda self, y: self.held.hide(y), Registry, lambda held: len(Registry.kept)),
}  # fmt: skip


class Nested:
    def __init__(self) -> None:
        self.meter = Meter()

    def log(self, y: Any) -> None:
        self.meter.update(y)


class Listed(list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("name", LOST)
def test_what_is_kept_elsewhere_is_refused(name: str) -> None:
    does, make, look = LOST[name]
    model = made(after(does), held=make())
    before = look(model.held)
    report = gemmnorm.fuse_report(model)
    assert not report.matches and len(report.refusals) == 1
    assert look(model.held) == before
    gemmnorm.fuse(model)(X)
    assert look(model.held) != before
    Registry.kept.clear()


def test_a_method_of_the_owner_that_logs_stays_a_call(calls: list[Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = normed(self, x)
        self.log("mean", y.mean())
        return y

    model = made(forward, trainer=SimpleNamespace(meter=Meter()))
    type(model).log = lambda self, name, value: self.trainer.meter.update((name, value))
    gemmnorm.fuse(model)(X)
    ((name, value),) = model.trainer.meter.values
    assert len(calls) == 1 and name == "mean" and isinstance(value, Tensor)


# --- numbers of classes of their own, and configurations


class Times(enum.IntEnum):
    TWICE = 2
    THRICE = 3


class Ratio(float):
    pass


def times(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * self.k


def configured(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * self.k.a.b.c.d.gain


def optional(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * (self.k.gain if self.k is not None else 1.0) * getattr(self.k, "more", 1.0)


def chosen(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y if self.k.get("noise") is None else y * self.k["factor"].gain


def with_bias(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y if self.gemm.bias is None else y + self.gemm.bias


def scaled(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y if self.scale is None else y.relu() * self.scale


def deep(gain: float) -> Any:
    return SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=SimpleNamespace(gain=gain)))))


def options() -> dict[str, Any]:
    return {"factor": SimpleNamespace(gain=2.0)}


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[], Any], Callable[[Any], Any]]] = {
    "float64": (times, lambda: np.float64(0.5), lambda m: setattr(m, "k", np.float64(0.1))),
    "an enumeration": (times, lambda: Times.TWICE, lambda m: setattr(m, "k", Times.THRICE)),
    "a number as a tensor": (times, lambda: 2.0, lambda m: setattr(m, "k", torch.full((6,), 3.0))),
    "a number as a parameter": (times, lambda: 2.0, lambda m: setattr(m, "k", nn.Parameter(torch.full((1,), 2.0)))),
    "deep": (configured, lambda: deep(2.0), lambda m: setattr(m.k.a.b.c.d, "gain", 3.0)),
    "cut": (configured, lambda: deep(2.0), lambda m: setattr(m.k.a, "b", None)),
    "none": (optional, lambda: SimpleNamespace(gain=2.0), lambda m: setattr(m, "k", None)),
    "an attribute more": (optional, lambda: SimpleNamespace(gain=2.0), lambda m: setattr(m.k, "more", 3.0)),
    "a key more": (chosen, options, lambda m: m.k.update(noise=1)),
    "a key less": (chosen, lambda: {**options(), "noise": 1}, lambda m: m.k.pop("noise")),
    "another value": (chosen, lambda: {**options(), "noise": 1}, lambda m: m.k.update(factor=SimpleNamespace(gain=3))),
    "no scale": (scaled, lambda: 1, lambda m: setattr(m, "scale", None)),
    "no bias": (with_bias, lambda: 1, lambda m: setattr(m.gemm, "bias", None)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str, calls: list[Any]) -> None:
    forward, value, change = CHANGES[name]
    fused, plain = pair(made(forward, k=value()))
    assert_same(fused, plain)
    change(fused), change(plain)
    assert_same(fused, plain)
    assert len(calls) == 2


@pytest.mark.parametrize("value", [np.bool_(True), np.int64(3), Ratio(0.5), np.float32(2.0)])
def test_other_numbers_are_refused_or_noticed(value: Any) -> None:
    fused, plain = pair(made(lambda self, x: normed(self, x) if self.k > 0.7 else x, k=value))
    assert_same(fused, plain)
    fused.k = plain.k = type(value)(0)
    assert_same(fused, plain)


# --- names and structure


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.inner = nn.Module()
        self.inner.list = nn.ModuleList([nn.Tanh()])
        self.order, self.functions = [self.layers[2]], [torch.relu, lambda x: x * 2]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in (*self.inner.list, *self.order, *self.functions):
            x = layer(x)
        return x * sum(isinstance(m, nn.ReLU) for m in self.modules())


STRUCTURE: dict[str, Callable[[Any], Any]] = {
    "longer": lambda m: m.layers.append(nn.Tanh()),
    "shorter": lambda m: m.layers.__delitem__(2),
    "longer inside": lambda m: m.inner.list.append(nn.Sigmoid()),
    "a list": lambda m: m.order.append(m.layers[2]),
    "another in a list": lambda m: m.order.__setitem__(0, m.inner.list[0]),
    "functions": lambda m: m.functions.pop(),
    "another class": lambda m: m.layers.__setitem__(2, nn.GELU()),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_another_structure_is_noticed(name: str, calls: list[Any]) -> None:
    fused, plain = pair(Layers())
    assert_same(fused, plain)
    assert len(calls) == 2
    STRUCTURE[name](fused), STRUCTURE[name](plain)
    assert_same(fused, plain)


def test_another_class_is_noticed_where_it_is_asked_for(calls: list[Any]) -> None:
    fused, plain = pair(
        made(lambda self, x: normed(self, x) * (2 if isinstance(self.act, nn.ReLU) else 1), act=nn.ReLU())
    )
    assert_same(fused, plain)
    fused.act, plain.act = nn.GELU(), nn.GELU()
    assert_same(fused, plain)
    assert len(calls) == 2


def shared() -> nn.Sequential:
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), act, nn.Linear(6, 6), nn.BatchNorm1d(6), act)


def tied(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) @ self.other.weight


def test_one_module_under_two_names(calls: list[Any]) -> None:
    fused, plain = pair(shared())
    assert_same(fused, plain)
    for m in (fused, plain):
        m[5] = nn.GELU()
    assert_same(fused, plain)
    assert len(calls) == 4


def test_one_parameter_under_two_names(calls: list[Any]) -> None:
    model = made(tied, other=nn.Linear(6, 6))
    model.other.weight = model.gemm.weight
    fused, plain = copy.deepcopy((gemmnorm.fuse(copy.deepcopy(model)), model))
    assert_same(fused, plain)
    weight = torch.randn(6, 6)
    for m in (fused, plain):
        m.other.weight = nn.Parameter(weight)
    assert_same(fused, plain)
    assert len(calls) == 2


# --- questions


def doubled_if(ask: Callable[[], Any]) -> Callable[..., Any]:
    return lambda self, x: normed(self, x) * (2 if ask() else 1)


QUESTIONS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "autocast": (lambda: torch.is_autocast_cpu_enabled(), lambda: torch.autocast("cpu", torch.bfloat16)),
    "its dtype": (lambda: torch.get_autocast_dtype("cpu") == torch.float16,
                  lambda: torch.autocast("cpu", torch.float16)),
    "gradients by name": (lambda: is_grad_enabled(), torch.no_grad),
    "anomalies": (lambda: torch.is_anomaly_enabled(), torch.autograd.detect_anomaly),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_asked_at_each_call(name: str) -> None:
    ask, region = QUESTIONS[name]
    fused, plain = pair(made(doubled_if(ask)))
    assert len(gemmnorm.fuse_report(fused).matches) == 1
    assert_same(fused, plain)
    with region():
        assert_same(fused, plain)


def test_a_default_dtype_is_a_question(calls: list[Any]) -> None:
    fused, plain = pair(made(doubled_if(lambda: torch.get_default_dtype() == torch.float64)))
    assert_same(fused, plain)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(fused, plain)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda: CONTEXT.get() > 1,
        lambda: datetime.datetime.now().hour > 11,
        lambda: torch.backends.cudnn.benchmark,
        lambda: torch.backends.cuda.matmul.allow_tf32,
    ],
)
def test_other_questions_are_refused(ask: Callable[[], Any]) -> None:
    assert not gemmnorm.fuse_report(made(doubled_if(ask))).matches


def test_torch_compile_reads_the_conditions() -> None:
    torch._dynamo.reset()
    for model in (Layers(), shared(), made(configured, k=deep(2.0)), made(casts), made(times, k=Times.TWICE)):
        fused, plain = pair(model.eval())
        compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(X), plain(X))
        assert {m.calls.compiled for m in gemmnorm.fuse_report(fused, calls=True).matches} == {"fused"}


def test_what_the_collector_calls_is_not_recorded(calls: list[Any]) -> None:
    def callback(*_: Any) -> None:
        time.time()

    def makes_garbage(self: Any, x: Tensor) -> Tensor:
        for _ in range(2000):
            held: list[Any] = []
            held.append(held)
        return normed(self, x)

    gc.callbacks.append(callback)
    try:
        fused = gemmnorm.fuse(made(makes_garbage))
    finally:
        gc.callbacks.remove(callback)
    fused(X)
    assert len(calls) == 1 and gc.isenabled()


def test_who_profiles_goes_on() -> None:
    seen: list[Any] = []
    sys.setprofile(lambda *args: seen.append(args[1]))
    gemmnorm.fuse_report(shared())
    profile, count = sys.getprofile(), len(seen)
    types.SimpleNamespace()
    sys.setprofile(None)
    assert profile is not None and count
