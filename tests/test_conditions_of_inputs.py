"""What a `forward` asks of its inputs, and does to them: a condition under which the recording holds, or refused."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Written
from support import stir, twin
from torch import Tensor, nn

import gemmnorm
from gemmnorm.fuse.analysis import plan_of

X = torch.randn(5, FEATURES)


class Bare:
    """An input with attributes, as graph data is."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


def h(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x))  # type: ignore[no-any-return]


def outcome(model: nn.Module, given: tuple[Any, ...]) -> Any:
    """What it gives, or the error that it raises, and whether that has a graph."""
    torch.manual_seed(1)
    try:
        y = model(*copy.deepcopy(given))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return y, getattr(y, "requires_grad", None)


def assert_same(fused: nn.Module, model: nn.Module, *given: Any) -> None:
    found, expected = outcome(fused, given), outcome(model, given)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(fused.state_dict(), model.state_dict(), rtol=0, atol=0)


def calls_of(fused: nn.Module) -> int:
    """How many calls of the only chain ran as one operation; -1 where it was refused."""
    matches = gemmnorm.fuse_report(fused, calls=True).matches
    return int(matches[0].calls.fused) if matches and matches[0].calls else -1


def reason_of(model: nn.Module) -> str:
    return gemmnorm.fuse_report(model).refusals[0].reason


# --- what may be None


class Auxiliary(nn.Module):
    """Gives None by way of a method, once `on` is changed."""

    on = True

    def compute(self, x: Tensor) -> Tensor | None:
        return x * 2 if self.on else None

    def forward(self, x: Tensor) -> Tensor | None:
        return self.compute(x)


class Steady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y = self.scaled(x) if self.training else x[:, :FEATURES]
        return y

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2


def with_child(self: Any, x: Tensor) -> Tensor:
    y, more = h(self, x), self.aux(x)
    return y if more is None else y + more


@pytest.mark.parametrize("inside", [False, True])
def test_a_child_that_gives_none_later(inside: bool) -> None:
    aux = Auxiliary()
    model = Written(with_child, aux=nn.Sequential(nn.Identity(), aux) if inside else aux)
    assert "what aux gives may be None" in reason_of(model)
    fused: Any = gemmnorm.fuse(twin(model))
    aux.on = False
    (fused.aux[1] if inside else fused.aux).on = False
    assert_same(fused, model, X)


@pytest.mark.parametrize(
    "give",
    [
        lambda s, x: s.held["a"],
        lambda s, x: s.held.get("a"),
        lambda s, x: s.on and s.layer(x),
        lambda s, x: getattr(s, "missing", None),
        lambda s, x: next(iter(s.held.values())),
    ],
)
def test_what_may_give_none_is_not_certain(give: Any) -> None:
    aux = nn.Module()
    aux.__class__ = type("Gives", (nn.Module,), {"forward": give})
    vars(aux).update(on=False, held={"a": None})
    aux.layer = nn.Linear(FEATURES, FEATURES)
    model = Written(with_child, aux=aux)
    assert_same(gemmnorm.fuse(twin(model)), model, X)
    assert "what aux gives may be None" in reason_of(model)


@pytest.mark.parametrize(
    "aux", [Steady(), nn.ReLU(), nn.Sequential(nn.Linear(FEATURES, FEATURES), Steady()), nn.Sequential()]
)
def test_a_child_that_never_gives_none(aux: nn.Module) -> None:
    model = Written(with_child, aux=aux)
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X)
    assert calls_of(fused) == 1


def by_name(self: Any, b: Any) -> Tensor:
    mean = b.mean
    return h(self, b.x) if mean is None else h(self, b.x - mean)


def of_a_method(self: Any, b: Any) -> Tensor:
    mean = b.stats.mean(0)
    return h(self, b.x) if mean is None else h(self, b.x - mean)


class Means:
    """Has a method of a tensor's name that gives None."""

    def mean(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("name", ["mean", "values", "data", "indices", "std"])
def test_an_input_s_attribute_called_as_one_of_tensors(name: str) -> None:
    def forward(self: Any, b: Any) -> Tensor:
        found = getattr(b, name)
        return h(self, b.x) if found is None else h(self, b.x - found)

    for read in (forward, by_name):
        model = Written(read)
        fused = gemmnorm.fuse(twin(model))
        assert_same(fused, model, Bare(x=X, **{"mean": X, name: X}))
        assert calls_of(fused) == 1
        assert_same(fused, model, Bare(x=X, **{"mean": None, name: None}))
    model = Written(of_a_method)
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, Bare(x=X, stats=X))
    assert calls_of(fused) == 1
    assert_same(fused, model, Bare(x=X, stats=Means()))


# --- what is asked of an input that has been changed


def pops(self: Any, b: Any) -> Tensor:
    y = b.pop("y")
    return (h(self, b["x"]) + y) * (2 if "y" in b else 1)


def sets_none(self: Any, b: Any) -> Tensor:
    b["y"] = None
    return h(self, b["x"]) * (2 if b.get("y") is not None else 1)


def lays_out(self: Any, x: Tensor) -> Tensor:
    x.unsqueeze_(1)
    return h(self, x.flatten(1)) * (9 if x.dim() == 3 else 1)


def lays_out_what_may_be_the_same(self: Any, x: Tensor) -> Tensor:
    x.contiguous().unsqueeze_(1)
    return h(self, x.flatten(1)) * (9 if x.dim() == 3 else 1)


def sets_an_item(self: Any, b: Any) -> Tensor:
    b["x"] = b["x"][:1]
    return h(self, b["x"]) if b["x"].shape[0] == 1 else h(self, b["x"]) * 2


def writes_into(self: Any, x: Tensor) -> Tensor:
    torch.add(x, 1, out=x)
    return h(self, x) if x.shape[0] > 0 else self.gemm(x)  # type: ignore[no-any-return]


def gives_away(self: Any, b: Any) -> Tensor:
    y = self.taker(b)
    return h(self, y) * (2 if "y" in b else 1)


def sorts(self: Any, b: Any) -> Tensor:
    b.sort()
    return h(self, X) * (2 if b[0].shape[0] > 3 else 1)


class Taker(nn.Module):
    def forward(self, b: Any) -> Any:
        b.pop("y")
        return b["x"]


class Shapes:
    """Compares like a number."""

    def __init__(self, first: int) -> None:
        self.shape = (first,)

    def __lt__(self, other: Any) -> bool:
        return bool(self.shape < other.shape)


CHANGED: dict[str, tuple[Callable[..., Any], Any]] = {
    "pop": (pops, {"x": X, "y": X}),
    "an item is set to None": (sets_none, {"x": X, "y": X}),
    "unsqueeze_": (lays_out, X),
    "unsqueeze_ of what may be the same": (lays_out_what_may_be_the_same, X),
    "an item": (sets_an_item, {"x": X}),
    "out=": (writes_into, X),
    "a child": (gives_away, {"x": X, "y": X}),
    "a list's sort": (sorts, [Shapes(4), Shapes(3)]),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("training", [True, False])
def test_an_input_that_was_changed_before_it_is_asked(name: str, training: bool) -> None:
    forward, given = CHANGED[name]
    model = Written(forward, taker=Taker()).train(training)
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, given)
    if name != "a list's sort":
        assert "which may change it" in reason_of(model)


def test_an_input_that_is_asked_before_it_is_changed() -> None:
    def forward(self: Any, b: Any) -> Tensor:
        factor = 2 if "y" in b and b["x"].dim() == 2 else 1
        b["y"] = b.pop("x").unsqueeze_(1)
        return h(self, b["y"].flatten(1)) * factor

    model = Written(forward)
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, {"x": X, "y": X})
    assert_same(fused, model, {"x": X})
    assert calls_of(fused) == 1


# --- attributes of an input that are called as those of stand-ins


def sets_a_node(self: Any, g: Any) -> Tensor:
    y = h(self, g.x)
    g.node = y
    return y


@pytest.mark.parametrize("name", ["node", "tracer", "root", "attr", "_node", "keys"])
def test_an_attribute_called_as_one_of_a_stand_in(name: str) -> None:
    def asks(self: Any, g: Any) -> Tensor:
        held = getattr(g.edge, name)
        return h(self, g.x) * held + operator.attrgetter(f"tree.{name}.depth")(g)

    source = f"lambda s, g: s.bn(s.gemm(g.x)) * g.edge.{name} * g.tree.{name}.depth + g.{name}"
    given = Bare(x=X, depth=7.0, edge=Bare(**{name: X}), tree=Bare(**{name: Bare(depth=2.0)}), **{name: X})
    for forward in (asks, eval(source)):
        model = Written(forward)
        fused = gemmnorm.fuse(twin(model))
        assert_same(fused, model, given)
        assert calls_of(fused) == 1


def test_a_stand_in_s_own_attribute_is_not_set() -> None:
    model = Written(sets_a_node)
    assert "sets the attribute node of a value" in reason_of(model)


# --- unpacking


def unpacks(self: Any, b: Any) -> Tensor:
    x, y = b
    return h(self, x) + y  # type: ignore[no-any-return]


def unpacks_one(self: Any, b: Any) -> Tensor:
    (x,) = b
    return h(self, x)


def unpacks_a_shape(self: Any, x: Tensor) -> Tensor:
    n, features = x.shape
    return h(self, x).view(n, features)


def unpacks_a_shape_of_three(self: Any, x: Tensor) -> Tensor:
    n, length, features = x.shape
    return h(self, x.view(n * length, features)).view(n, length, -1)


def unpacks_what_it_decides_by(self: Any, x: Tensor) -> Tensor:
    n, _ = x.size()
    return h(self, x) if n > 1 else x


def unpacks_a_product(self: Any, x: Tensor) -> Tensor:
    product = self.gemm(x)
    n, features = product.shape
    return self.bn(product).view(features, n)  # type: ignore[no-any-return]


def unpacks_a_child(self: Any, x: Tensor) -> Tensor:
    a, b = self.pair(h(self, x))
    return a + b  # type: ignore[no-any-return]


class Pair(nn.Module):
    count = 2

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x, x * 2, x * 3)[: self.count]


CUBE = torch.randn(3, 4, FEATURES)
UNPACKED: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "an input": (unpacks, [(X, X), (X, X, X), (X,), [X, X], {0: X, 1: X}, X[:2], 3]),
    "one": (unpacks_one, [(X,), (X, X), ()]),
    "a shape": (unpacks_a_shape, [X, CUBE, X[0]]),
    "a shape of three": (unpacks_a_shape_of_three, [CUBE, X]),
    "a decision": (unpacks_what_it_decides_by, [X, CUBE, X[0], X[:1]]),
    "a product": (unpacks_a_product, [X, CUBE.flatten(0, 1), X[0]]),
    "a child": (unpacks_a_child, [X]),
}


@pytest.mark.parametrize("name", UNPACKED)
def test_unpacking(name: str) -> None:
    forward, given = UNPACKED[name]
    model: Any = Written(forward, pair=Pair())
    fused: Any = gemmnorm.fuse(twin(model))
    for mode in (True, False):
        for value in given:
            assert_same(fused.train(mode), model.train(mode), value)
    assert calls_of(fused) > 0
    for count in (1, 3):
        model.pair.count = fused.pair.count = count
        assert_same(fused, model, given[0])


def test_unpacking_reads_as_it_was_written() -> None:
    assert plan_of(Written(unpacks)).forward_source("chain").splitlines()[1:] == [
        "    x, y = b",
        "    x = chain(x, self.gemm, self.bn)",
        "    return x + y",
    ]
    of_a_child = plan_of(Written(unpacks_a_child, pair=Pair())).forward_source("chain")
    assert "    a, b = self.pair(x)" in of_a_child


# --- gradient mode


def by_enable_grad(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return h(self, x)


def by_inference_mode(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return h(self, x)


def by_set_grad_enabled(self: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(True):
        return h(self, x)


def by_statement(self: Any, x: Tensor) -> Tensor:
    torch.set_grad_enabled(True)
    return h(self, x)


def in_a_method(self: Any, x: Tensor) -> Tensor:
    return h(self, x) * self.decorated(x)  # type: ignore[no-any-return]


SWITCHES = [by_enable_grad, by_inference_mode, by_set_grad_enabled, by_statement]


@pytest.mark.parametrize("decorator", [torch.enable_grad(), torch.no_grad(), torch.inference_mode(False)])
@pytest.mark.parametrize("forward", [*SWITCHES, torch.enable_grad()(h), torch.set_grad_enabled(True)(h), in_a_method])
def test_gradients_that_are_switched_on(forward: Any, decorator: Any) -> None:
    model: Any = Written(forward)
    type(model).decorated = decorator(lambda self, x: self.gemm(x))
    fused = gemmnorm.fuse(twin(model))
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            assert_same(fused, model, X)
    if forward is not in_a_method:
        assert "switches gradients on or off" in reason_of(model)


class Tracking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gemm, self.bn = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        y = h(self, x)
        self.track(y)
        return y

    def track(self, y: Tensor) -> None:
        self.mean.lerp_(y.detach().mean(0), 0.1)


@pytest.mark.parametrize("decorator", [torch.no_grad(), torch.enable_grad(), torch.inference_mode(False)])
def test_a_decorated_method_stays_a_call(decorator: Any) -> None:
    model = stir(Tracking())
    model.__class__ = type("Decorated", (Tracking,), {"track": decorator(Tracking.track)})
    fused = gemmnorm.fuse(twin(model))
    assert_same(fused, model, X)
    assert calls_of(fused) == 1
