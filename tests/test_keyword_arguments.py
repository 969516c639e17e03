"""`forward(self, **batch)`: recorded with a stand-in for the dictionary, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from fuse_support import Written
from test_recording import X, assert_same, fused_and_plain, normed
from torch import Tensor

import gemmnorm


def by_name(self: Any, **batch: Tensor) -> Tensor:
    return normed(self, batch["x"])


def maybe_masked(self: Any, **batch: Tensor) -> Tensor:
    y = normed(self, batch["x"])
    if "mask" in batch:
        y = y * batch["mask"]
    return y


def asked_for(self: Any, **batch: Tensor) -> Tensor:
    return normed(self, batch.get("x"))


def taken_out(self: Any, **batch: Tensor) -> Tensor:
    x = batch.pop("x")
    return normed(self, x) * 2


def of_several_rows(self: Any, **batch: Tensor) -> Tensor:
    return normed(self, batch["x"]) if batch["x"].shape[0] > 1 else batch["x"]


# What it is called with, and how many of the three calls of `assert_same` run fused.
FUSED: dict[Callable[..., Any], list[tuple[dict[str, Tensor], int]]] = {
    by_name: [({"x": X}, 3), ({"x": X, "more": X}, 3)],
    maybe_masked: [({"x": X, "mask": X}, 3), ({"x": X}, 0)],
    asked_for: [({"x": X}, 3)],
    taken_out: [({"x": X}, 3)],
    of_several_rows: [({"x": X}, 3)],
}


@pytest.mark.parametrize("forward", FUSED, ids=lambda f: f.__name__)
def test_fused(forward: Callable[..., Any], calls: list[Any]) -> None:
    fused, plain = fused_and_plain(Written(forward))
    for given, count in FUSED[forward]:
        calls.clear()
        assert_same(fused, plain, **given)
        assert len(calls) == count, given
    batch = {"x": X}
    fused(**batch)
    assert [*batch] == ["x"]  # the caller's own dictionary


@pytest.mark.parametrize("forward", [by_name, asked_for, taken_out], ids=lambda f: f.__name__)
def test_what_is_missing_raises_as_it_did(forward: Callable[..., Any]) -> None:
    raised = []
    for model in fused_and_plain(Written(forward)):
        with pytest.raises((KeyError, TypeError)) as error:
            model(y=X)
        raised.append((type(error.value), str(error.value)))
    assert raised[0] == raised[1]


def counted(self: Any, **batch: Tensor) -> Tensor:
    return normed(self, batch["x"]) if len(batch) > 1 else batch["x"]


def handed_on(self: Any, **batch: Tensor) -> Tensor:
    return normed(self, **batch)


def iterated(self: Any, **batch: Tensor) -> Tensor:
    return sum(normed(self, value) for value in batch.values())  # type: ignore[return-value]


@functools.wraps(by_name)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return by_name(*args, **kwargs)


REFUSED = {
    counted: "asks how many arguments it is given",
    handed_on: "decides by the data (iterates over a value)",
    iterated: "decides by the data (iterates over a value)",
    wrapped: "takes keyword arguments alone, by way of another function",
}


@pytest.mark.parametrize("forward", REFUSED, ids=["counted", "handed on", "iterated", "wrapped"])
def test_refused(forward: Callable[..., Any]) -> None:
    report = gemmnorm.fuse_report(Written(forward))
    assert not report.matches and [REFUSED[forward] in r.reason for r in report.refusals] == [True], report
