"""What a `forward` reads that is not its owner's: a change of it is noticed, and a change by it is refused."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_recording as elsewhere
import torch
import torch.nn.functional as F
from fuse_support import Written
from test_recording import X, assert_same, fused_and_plain, normed
from torch import Tensor

import gemmnorm
from gemmnorm import export as exporting
from gemmnorm.userfiles import load_source

TWICE = True
FACTOR = 2.0
ACTIVATION = F.relu
CFG = types.SimpleNamespace(debug=False, head=types.SimpleNamespace(norm="batch", layers=[{"act": "relu"}, {}]))
TABLE = {"act": "relu", "made by": object()}


class Settings:
    act = "relu"


class Keyed(dict):  # type: ignore[type-arg]
    """Attributes that are keys, as in many packages for configurations."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


KEYED = Keyed(act="relu", none=object())


def flag(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y * FACTOR if TWICE else y


def flag_elsewhere(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * elsewhere.COUNT


def flag_in_a_function(self: Any, x: Tensor) -> Tensor:
    return scaled(normed(self, x))


def scaled(y: Tensor) -> Tensor:
    return ACTIVATION(y) * FACTOR


def configuration(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y * 100 if CFG.debug else y


def nested(self: Any, x: Tensor) -> Tensor:
    head = CFG.head
    y = self.bn(self.gemm(x)) if head.norm == "batch" else self.gemm(x)
    return y if self.cfg.head.norm == "batch" else y * 2  # type: ignore[no-any-return]


def table(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y.relu() if TABLE["act"] == "relu" else y


def of_a_class(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y.relu() if Settings.act == "relu" else y


def of_its_class(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y.relu() if self.__class__.act == "relu" else y


def keyed(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x)
    return y.relu() if KEYED.act == "relu" else y


@dataclasses.dataclass
class Slotted:
    __slots__ = ("act",)
    act: str


class Named(NamedTuple):
    act: str


def attributes(self: Any, x: Tensor) -> Tensor:
    y = normed(self, x.to(self.place))
    for i, (size, _) in enumerate(self.sizes):
        y = y * size if i in self.kept else y
    y = y.relu() if self.slotted.act == "relu" else y
    y = y.tanh() if self.named.act == "tanh" else y
    return y * self.specs[0].act * sum(range(3)[: len(self.steps)])


CHANGES: dict[Callable[..., Any], list[Any]] = {
    flag: [(globals(), "TWICE", False), (globals(), "FACTOR", 3.0)],
    flag_elsewhere: [(vars(elsewhere), "COUNT", 5)],
    flag_in_a_function: [(globals(), "FACTOR", 3.0), (globals(), "ACTIVATION", F.silu)],
    configuration: [(vars(CFG), "debug", True)],
    nested: [(vars(CFG.head), "norm", "none"), (vars(CFG), "head", types.SimpleNamespace(norm="none"))],
    table: [(TABLE, "act", "none")],
    of_a_class: [(Settings, "act", "none")],
    of_its_class: [(Written, "act", "none")],
    keyed: [(KEYED, "act", "none")],
}


@pytest.mark.parametrize("forward", CHANGES, ids=lambda f: f.__name__)
def test_a_change_outside_is_noticed(
    forward: Callable[..., Any], calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Written, "act", "relu", raising=False)
    model: Any = Written(forward)
    model.cfg = CFG
    fused, plain = fused_and_plain(model)
    vars(fused)["cfg"] = CFG  # and not a copy
    assert_same(fused, plain, X)
    assert len(calls) == 3
    for place, name, value in CHANGES[forward]:
        with monkeypatch.context() as patch:
            (patch.setattr if isinstance(place, type) else patch.setitem)(place, name, value)
            assert_same(fused, plain, X)
            assert len(calls) == 3
    assert_same(fused, plain, X)
    assert len(calls) == 6


class Counting(Written):
    calls = 0


METER = types.SimpleNamespace(count=0)


ATTRIBUTES = {
    "place": (torch.device("cpu"), torch.device("meta")),
    "sizes": (((2, 1), (3, 1)), ((2, 1), (4, 1))),
    "kept": ({1}, {0, 1}),
    "slotted": (Slotted("relu"), Slotted("none")),
    "named": (Named("tanh"), Named("none")),
    "specs": ([types.SimpleNamespace(act=2, more=X)], [types.SimpleNamespace(act=3, more=X)]),
    "steps": (range(3), range(2)),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_that_can_be_written_down_are_conditions(name: str, calls: list[Any]) -> None:
    model: Any = Written(attributes)
    for attribute, (value, _) in ATTRIBUTES.items():
        setattr(model, attribute, value)
    fused, plain = fused_and_plain(model)
    assert_same(fused, plain, X)
    assert len(calls) == 3
    for changed in (fused, plain):
        setattr(changed, name, ATTRIBUTES[name][1])
    if name == "place":
        with pytest.raises(RuntimeError):
            fused(X)
    else:
        assert_same(fused, plain, X)
    assert len(calls) == 3


def counts_on_its_class(self: Any, x: Tensor) -> Tensor:
    self.__class__.calls += 1
    return normed(self, x)


def counts_on_a_class(self: Any, x: Tensor) -> Tensor:
    Counting.calls += 1
    return normed(self, x)


def makes_a_class_attribute(self: Any, x: Tensor) -> Tensor:
    Counting.last = 1  # type: ignore[attr-defined]
    return normed(self, x)


def counts_on_a_global(self: Any, x: Tensor) -> Tensor:
    METER.count += 1
    return normed(self, x)


def notes_in_a_list_of_lists(self: Any, x: Tensor) -> Tensor:
    self.lists[0].append(1)
    return normed(self, x)


REFUSED = {
    notes_in_a_list_of_lists: "changes a list or dictionary, or an object",
    counts_on_its_class: "changes calls of the class Written (line ",
    counts_on_a_class: "changes calls of the class Counting (line ",
    makes_a_class_attribute: "changes last of the class Counting (line ",
    counts_on_a_global: "changes a list or dictionary, or an object",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_changes_outside_are_refused(forward: Callable[..., Any]) -> None:
    model: Any = Written(forward)
    type(model).calls, model.lists = 0, [[]]
    report = gemmnorm.fuse_report(model)
    assert not report.matches and REFUSED[forward] in report.refusals[0].reason, report
    assert type(model).calls == Counting.calls == METER.count == 0 and not hasattr(Counting, "last")
    assert model.lists == [[]]


FILE = """
import torch
from torch import nn

TWICE = True


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bn = nn.Linear(32, 24), nn.BatchNorm1d(24)

    def forward(self, x):
        y = self.bn(self.linear(x))
        return y * 2 if TWICE else y


def get_inputs():
    return [torch.randn(40, 32)]


def get_init_inputs():
    return []
"""


def test_an_exported_file_asks_for_its_own_global(tmp_path: Path) -> None:
    path = tmp_path / "flagged.py"
    path.write_text(FILE)
    module = load_source(exporting.export(path, path.with_name("flagged_new.py")).source, "flagged_new")
    new, x = module.ModelNew().eval(), torch.randn(40, 32)
    twice = new(x)
    module.TWICE = False
    torch.testing.assert_close(new(x) * 2, twice)
