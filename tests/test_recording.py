"""What a recording would get wrong: questions that a stand-in answers otherwise than a tensor, and lost effects.

Each is recorded, made a condition, or refused with a reason.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_support import Written
from support import stir, twin
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as recompute

import gemmnorm

X = torch.randn(5, 6, dtype=torch.float64)
SEEN: list[int] = []
COUNT = 0


def normed(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x))


def fused_and_plain(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    plain = stir(model.double())
    return gemmnorm.fuse(twin(plain)), plain


def assert_same(fused: nn.Module, plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Outputs, gradients and buffers, in both modes, with and without gradients."""
    for training, grad in ((True, True), (False, True), (False, False)):
        found = []
        for model in (fused, plain):
            given, named = copy.deepcopy((args, kwargs))
            model.train(training).zero_grad()
            torch.manual_seed(0)
            with torch.set_grad_enabled(grad):
                y = model(*given, **named)
            if grad:
                (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
            found.append([y, *(p.grad for p in model.parameters()), *model.buffers()])
        torch.testing.assert_close(*found)


# --- refused


def catches_small_batches(self: Any, x: Tensor) -> Tensor:
    try:
        return normed(self, x)
    except ValueError:
        return x


def catches_all(self: Any, x: Tensor) -> Tensor:
    rows: Any = x.shape[0]
    try:
        rows = int(rows)
    except:  # noqa: E722
        rows = -1
    return normed(self, x) * rows


def suppresses(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    with contextlib.suppress(Exception):
        if y.sum() > -1e9:
            y = y * 2
    return y


def caught_elsewhere(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * (2 if raises(lambda: bool(x.sum() < -1e9)) else 1)


class Suppressing(contextlib.suppress):
    """Under a name that is known to be harmless."""


nullcontext = Suppressing


def suppresses_by_another_name(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    with nullcontext(Exception):
        y = y * float(y.sum())
    return y


def raises(f: Callable[[], Any]) -> bool:
    try:
        return bool(f())
    except Exception:
        return True


def on_another_device(self: Any, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        return normed(self, x)


def by_structure(self: Any, x: Tensor) -> Tensor:
    match x.shape:
        case (_, _):
            return x
        case _:
            return normed(self, x)


def as_text(self: Any, x: Tensor) -> Any:
    return normed(self, x) if f"{x.shape}" == "torch.Size([5, 6])" else x


def as_text_by_format(self: Any, x: Tensor) -> Any:
    return normed(self, x), "%s" % x.dtype  # noqa: UP031


def saves_otherwise(self: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        return normed(self, x)


def recomputes(self: Any, x: Tensor) -> Tensor:
    return recompute(lambda x: normed(self, x), x, use_reentrant=False)  # type: ignore[no-any-return]


def sets_data(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    y.data = y.data * 2
    return y


def counts_by_a_global(self: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return normed(self, x)


def notes_in_a_global(self: Any, x: Tensor) -> Tensor:
    SEEN.append(1)
    return normed(self, x)


def notes_in_an_object(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    self.meter.__dict__["last"] = y
    return y


def registers(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "ones"):
        self.register_buffer("ones", Tensor([1.0] * 6).double())
    return normed(self, x) * self.ones


def goes_past_setattr(self: Any, x: Tensor) -> Tensor:
    object.__setattr__(self, "count", getattr(self, "count", 0) + 1)
    return normed(self, x) * self.count


def keeps(self: Any, x: Tensor) -> Tensor:
    if "ones" not in self.cache:
        self.cache["ones"] = torch.ones(6)
    return normed(self, x) * self.cache["ones"]


def prints(self: Any, x: Tensor) -> Tensor:
    print("x")
    return normed(self, x)


class Auxiliary(nn.Module):
    def forward(self, y: Tensor) -> Tensor | None:
        return y * 2 if self.training else None


def gets_none(self: Any, x: Tensor) -> Any:
    y = normed(self, x)
    more = self.aux(y)
    return y if more is None else y + more


def part_is_none(self: Any, x: Tensor) -> Any:
    y, weights = self.attention(x, x, x, need_weights=False)
    return normed(self, y) if weights is None else y


def called_slice(self: Any, x: Tensor, slice: int = 2) -> Tensor:
    return normed(self, x)[:, 1:slice]


REFUSED: dict[Callable[..., Any], str] = {
    catches_small_batches: "catches exceptions (line ",
    catches_all: "catches exceptions (line ",
    caught_elsewhere: "catches exceptions (line ",
    suppresses: "has a with statement (line ",
    suppresses_by_another_name: "takes the value of an input, a tensor or a size for a Python number",
    on_another_device: "has a with statement (line ",
    by_structure: "matches the structure of a value (line ",
    as_text: "writes a value into a text",
    as_text_by_format: "writes a value into a text",
    saves_otherwise: "changes what autograd saves",
    recomputes: "",  # which of the things that it does is named depends on what PyTorch has imported
    sets_data: "sets the attribute data of a value",
    counts_by_a_global: "assigns the global COUNT (line ",
    notes_in_a_global: "changes a list or dictionary, or an object",
    notes_in_an_object: "changes a list or dictionary, or an object",
    registers: "uses a tensor that is no input of its own (line ",
    goes_past_setattr: "changes a list or dictionary, or an object",
    keeps: "changes a list or dictionary, or an object",
    prints: "prints",
    gets_none: "compares a value with None, and what aux gives may be None",
    part_is_none: "compares a value with None, and what getitem gives may be None",
    called_slice: "has a parameter called slice",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_refused(forward: Callable[..., Any]) -> None:
    model = Written(forward, aux=Auxiliary(), attention=nn.MultiheadAttention(6, 2))
    model.meter, model.cache = types.SimpleNamespace(last=None), {}
    keys, values = [*model.state_dict()], [*vars(model)]
    SEEN.clear()
    report = gemmnorm.fuse_report(model)
    assert not report.matches and [REFUSED[forward] in r.reason for r in report.refusals] == [True], report
    assert "line" not in REFUSED[forward] or any(f"(line {n})" in str(report) for n in range(50, 200))
    assert [*model.state_dict()] == keys and [*vars(model)] == values
    assert model.meter.last is None and not model.cache and not SEEN


# --- fused


def ask(y: Any) -> Any:
    return y if isinstance(y, Tensor) and torch.is_tensor(y) and y is not None else y * 100


class Asks:
    def ask(self, y: Any) -> Any:
        return ask(y)

    __call__ = ask


class AskingModule(nn.Module, Asks):
    __call__ = nn.Module.__call__


class Asking(Written):
    def forward(self, x: Any) -> Any:
        return ask(self.bn(self.gemm(x * 2)))


def inherits(self: Any, x: Tensor) -> Any:
    return Asking.forward(self, x)


def closure() -> Callable[..., Any]:
    def inner(y: Any) -> Any:
        return y if isinstance(y, Tensor) else y * 100

    return lambda self, x: inner(normed(self, x))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return -ctx.factor * grad, None


class Scaled(Reversed):
    @staticmethod
    def forward(x: Tensor, factor: float = 4.0) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]


reverse, scale = Reversed.apply, Scaled.apply


def assigns_items(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x) * 1
    first = y[:, 0] * 1
    y[:, 0] = 0
    y[1:, 1] += first[1:]
    y[y < -1] = 0
    return y


def changes_a_buffer(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    if self.training:
        self.fixed += 1
        self.fixed[:, :2] = y.detach()[0, :2]
    return y * self.fixed


def repeats(self: Any, x: Tensor, n: int = 2, p: float = 0.5) -> Tensor:
    y = normed(self, x)
    for _ in range(n):
        y = y.tanh() * 2
    return y * p if p else y


def limited(self: Any, x: Tensor, limit: float = math.inf) -> Tensor:
    return normed(self, x).clamp(max=limit)


def masked(self: Any, batch: Any) -> Tensor:
    y, mask = normed(self, batch["x"]), batch.get("mask")
    return y if mask is None else y * mask


def of_an_object(self: Any, batch: Any) -> Tensor:
    y = normed(self, batch.x)
    return y if batch.mask is None else y * batch.mask


def with_skip(self: Any, x: Tensor) -> Any:
    """Compares what cannot be None: a child, a method and a class give something."""
    found: Any = None
    for _ in range(2):
        found = self.kept(x) if found is None else types.SimpleNamespace(y=found).y
    return normed(self, found)


def kept(self: Any, x: Tensor) -> Tensor:
    try:
        return x * 2 if x.sum() > -1e9 else x
    except Exception:
        return x


def surroundings(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    if torch.distributed.is_initialized():
        y = y * torch.distributed.get_world_size()
    return y * 2 if torch.is_grad_enabled() else y


def says_nothing(self: Any, x: Tensor, checkpoint: bool = False) -> Tensor:
    if checkpoint:
        print(x.shape)
        return recompute(normed, self, x)  # type: ignore[no-any-return]
    if x.dim() != 2:
        raise ValueError(f"x: expected a matrix, got {x.shape}")
    return normed(self, x)


def catches_in_a_method(self: Any, x: Tensor) -> Tensor:
    return self.caught(normed(self, x))  # type: ignore[no-any-return]


def caught(self: Any, y: Tensor) -> Tensor:
    try:
        return y * 2 if y.sum() > -1e9 else y
    except Exception:
        return y * 100


FUSED: dict[str, tuple[Callable[..., Any], list[dict[str, Any]], int]] = {
    "a function": (lambda self, x: ask(normed(self, x)), [{"x": X}], 3),
    "a closure": (closure(), [{"x": X}], 3),
    "a method of a child": (lambda self, x: self.asks.ask(normed(self, x)), [{"x": X}], 3),
    "an object": (lambda self, x: self.call(normed(self, x)), [{"x": X}], 3),
    "a partial function": (lambda self, x: self.part(normed(self, x)), [{"x": X}], 3),
    "another class": (inherits, [{"x": X}], 3),
    "a Function": (lambda self, x: reverse(normed(self, Reversed.apply(x, 3.0)), 0.5), [{"x": X}], 3),
    "a Function's context": (lambda self, x: scale(normed(self, Scaled.apply(x)), 0.5), [{"x": X}], 3),
    "items": (assigns_items, [{"x": X}], 3),
    "a buffer": (changes_a_buffer, [{"x": X}], 3),
    "numbers": (repeats, [{"x": X}, {"x": X, "n": 3}, {"x": X, "p": 0.0}], 3),
    "infinity": (limited, [{"x": X}, {"x": X, "limit": 0.1}], 6),
    "a dictionary": (masked, [{"batch": {"x": X}}, {"batch": {"x": X, "mask": X}}], 3),
    "attributes": (
        of_an_object,
        [{"batch": types.SimpleNamespace(x=X, mask=mask)} for mask in (X, None)],
        3,
    ),
    "no None": (with_skip, [{"x": X}], 3),
    "surroundings": (surroundings, [{"x": X}], 2),
    "what is not reached": (says_nothing, [{"x": X}], 3),
    "caught in a method": (catches_in_a_method, [{"x": X}], 3),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str, calls: list[Any]) -> None:
    forward, given, count = FUSED[name]
    model = Written(forward, asks=AskingModule())
    type(model).caught, type(model).kept = caught, kept  # type: ignore[attr-defined]
    model.call, model.part = Asks(), functools.partial(ask)
    fused, plain = fused_and_plain(model)
    for kwargs in given:
        assert_same(fused, plain, **kwargs)
    assert len(calls) == count


def test_fusing_without_gradients_records_how_it_runs_with_them(calls: list[Any]) -> None:
    with torch.no_grad():
        fused, plain = fused_and_plain(Written(surroundings))
    assert_same(fused, plain, X)
    assert len(calls) == 2


# --- what changes later


class Mode(enum.Enum):
    TWICE = 2
    ONCE = 1


def configured(self: Any, x: Tensor) -> Tensor:
    y = self.function(normed(self, x))
    y = y * self.config.factor if self.mode is Mode.TWICE else y
    y = y.relu() if self.settings["activation"] == "relu" else y
    return (y if self.limit == math.inf else y.clamp(max=self.limit)).to(self.dtype)  # type: ignore[no-any-return]


class Config:
    factor = 2.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a configuration": lambda model: setattr(model.config, "factor", 3.0),
    "a dictionary": lambda model: model.settings.update(activation="none"),
    "an enumeration": lambda model: setattr(model, "mode", Mode.ONCE),
    "a function": lambda model: setattr(model, "function", F.silu),
    "infinity": lambda model: setattr(model, "limit", 0.5),
    "a dtype": lambda model: setattr(model, "dtype", torch.float32),
}


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_of_other_kinds_are_conditions(name: str, calls: list[Any]) -> None:
    model: Any = Written(configured)
    model.config, model.settings, model.mode = Config(), {"activation": "relu"}, Mode.TWICE
    model.function, model.limit, model.dtype = torch.tanh, math.inf, torch.float64
    fused, plain = fused_and_plain(model)
    assert_same(fused, plain, X)
    assert len(calls) == 3
    CHANGES[name](fused)
    CHANGES[name](plain)
    assert_same(fused, plain, X)
    assert len(calls) == 3


def test_other_threads_are_left_alone():
    """What is replaced while a forward is recorded is replaced for all; who records nothing does not notice."""
    answers, done = [], threading.Event()
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).double()
    wanted = model(X)

    def other():
        while not done.is_set():
            try:
                print(end="")
                assert torch.equal(model(X), wanted)
                with torch.autocast("cpu", torch.bfloat16):
                    answers.append(torch.is_autocast_enabled("cpu") and isinstance(answers, list))
            except Exception as error:
                answers.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(20):
        gemmnorm.fuse_report(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()))
    done.set()
    thread.join()
    assert answers and set(map(repr, answers)) == {"True"}
