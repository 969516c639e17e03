"""What a child or a method may change of what `forward` reads, is handed, or returns: kept, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Written
from support import stir, twin
from torch import Tensor, nn

import gemmnorm

X = torch.randn(5, FEATURES, dtype=torch.float64)


def h(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x)).relu()  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Whose `forward` does `act` to the layer, its input and whatever else it is given."""

    def __init__(self, act: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(FEATURES, dtype=torch.float64))
        for name, value in held.items():
            setattr(self, name, value)
        self.__class__ = type("Layer", (Layer,), {"act": act, "__reduce_ex__": object.__reduce_ex__})

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        self.act(x, *more)
        return x


@dataclasses.dataclass
class State:
    gain: float = 1.0
    log: list[Any] = dataclasses.field(default_factory=list)

    def bump(self) -> None:
        self.gain += 1.0


def fill(self: Any, x: Tensor, to: Any) -> None:
    to["aux"].append(x.mean())


def moves(self: Any, x: Tensor) -> None:
    self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)


def by_name(self: Any, x: Tensor) -> None:
    setattr(self, "ema", self.ema + 1.0)  # noqa: B010


def keeps(self: Any, x: Tensor) -> None:
    self.log.append(x.mean())


def gains(self: Any, x: Tensor) -> None:
    self.state.gain = 2.0


def bumps(self: Any, x: Tensor) -> None:
    self.state.bump()


def elsewhere(self: Any, x: Tensor) -> None:
    _gain(self.state)


def _gain(state: State) -> None:
    state.gain = 3.0


def a_dictionary(self: Any, x: Tensor) -> Tensor:
    state: dict[str, Any] = {"aux": []}
    y = self.layer(h(self, x), state)
    return y + sum(state["aux"])  # type: ignore[no-any-return]


def a_state(self: Any, x: Tensor) -> Tensor:
    state = State()
    y = self.layer(h(self, x), state)
    return y * state.gain  # type: ignore[no-any-return]


def in_a_loop(self: Any, x: Tensor) -> Tensor:
    x, state = h(self, x), {"aux": [x]}
    for layer in (self.layer, self.layer):
        x = layer(x, state)
    return x


def its_own(self: Any, x: Tensor) -> Tensor:
    return self.layer(h(self, x), self.held) + len(self.held["aux"])  # type: ignore[no-any-return]


def before_and_after(self: Any, x: Tensor) -> Tensor:
    old = self.layer.ema
    y = self.layer(h(self, x))
    return y + 10 * (self.layer.ema - old)  # type: ignore[no-any-return]


def shared(self: Any, x: Tensor) -> Tensor:
    y = self.layer(h(self, x))
    return y + sum(self.log)  # type: ignore[no-any-return]


def its_state(self: Any, x: Tensor) -> Tensor:
    y = self.layer(h(self, x))
    return y * self.layer.state.gain  # type: ignore[no-any-return]


def the_same_state(self: Any, x: Tensor) -> Tensor:
    y = self.layer(h(self, x))
    return y * self.state.gain  # type: ignore[no-any-return]


def _layer(act: Callable[..., Any], **held: Any) -> dict[str, Any]:
    return {"layer": Layer(act, **held), **held}


def gain_of_its_own(self: Any, x: Tensor, state: State) -> None:
    state.gain = 4.0


CHANGED: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "a dictionary that it is handed": (a_dictionary, lambda: _layer(fill)),
    "an object that it is handed": (a_state, lambda: _layer(gain_of_its_own)),
    "what is handed on in a loop": (in_a_loop, lambda: _layer(fill)),
    "a dictionary of the owner's": (its_own, lambda: {**_layer(fill), "held": {"aux": [1.0]}}),
    "its buffer": (before_and_after, lambda: _layer(moves)),
    "its buffer, by name": (before_and_after, lambda: _layer(by_name)),
    "a list that both hold": (shared, lambda: _layer(keeps, log=[])),
    "its object": (its_state, lambda: _layer(gains, state=State())),
    "its object, by a method of that": (its_state, lambda: _layer(bumps, state=State())),
    "its object, by a function": (its_state, lambda: _layer(elsewhere, state=State())),
    "an object that both hold": (the_same_state, lambda: _layer(gains, state=State())),
}


@pytest.mark.parametrize(("forward", "held"), CHANGED.values(), ids=CHANGED)
def test_what_a_child_changes(forward: Callable[..., Any], held: Callable[[], dict[str, Any]]) -> None:
    model = stir(Written(forward, **held())).double()
    fused = gemmnorm.fuse(twin(model))
    for _ in range(2):
        assert torch.equal(fused(X), model(X))
    (refusal,) = gemmnorm.fuse_report(fused).refusals
    assert any(words in refusal.reason for words in ("may change it", "needs it again", "may replace"))


def reads(self: Any, x: Tensor, *more: Any) -> None:
    assert more


def a_list_for_the_last(self: Any, x: Tensor) -> Tensor:
    features = [x, h(self, x)]
    return self.layer(features[1], features)  # type: ignore[no-any-return]


def read_by_both(self: Any, x: Tensor) -> Tensor:
    features = [x, h(self, x)]
    return self.layer(features[1], features) + features[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "act"), [(a_list_for_the_last, fill), (read_by_both, reads)], ids=["not needed again", "only read"]
)
def test_a_list_that_is_handed_over(forward: Callable[..., Any], act: Callable[..., Any]) -> None:
    model = stir(Written(forward, layer=Layer(act if act is reads else lambda self, x, to: to.append(x)))).double()
    fused = gemmnorm.fuse(twin(model))
    assert len(gemmnorm.fuse_report(fused).matches) == 1
    assert torch.equal(fused(X), model(X))


def test_a_dictionary_of_its_own_that_is_returned_is_that_one() -> None:
    model = Written(lambda self, x: (h(self, x), {"info": self.info}), info={"classes": ["a", "b"]}).double()
    gemmnorm.fuse(model)
    assert len(gemmnorm.fuse_report(model).matches) == 1
    assert model(X)[1]["info"] is model.info


def test_a_method_that_stays_a_call() -> None:
    def tick(self: Any) -> None:
        while True:
            self.state.bump()
            break

    def forward(self: Any, x: Tensor) -> Tensor:
        self.tick()
        return h(self, x) * self.state.gain

    model = Written(forward, state=State()).double()
    type(model).tick = tick  # type: ignore[attr-defined]
    fused = gemmnorm.fuse(twin(model))
    for _ in range(3):
        assert torch.equal(fused(X), model(X))
