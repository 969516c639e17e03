"""What a `forward` does or asks at each call that leaves nothing in a recording: refused, where it is reached."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import pytest
from fuse_support import Written
from test_recording import X, assert_same, fused_and_plain, normed
from torch import Tensor

import gemmnorm


def warns(self: Any, x: Tensor) -> Tensor:
    warnings.warn("x", stacklevel=2)
    return normed(self, x)


def by_the_clock(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * time.time()


def by_another_clock(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * perf_counter_ns()


def waits(self: Any, x: Tensor) -> Tensor:
    from time import sleep

    sleep(0)
    return normed(self, x)


REFUSED: dict[Callable[..., Any], tuple[str, int]] = {  # and the line, from the first on
    warns: ("warns", 1),
    by_the_clock: ("asks for the time", 1),
    by_another_clock: ("asks for the time", 1),
    waits: ("sleeps", 3),
}


def lost_functions() -> list[Any]:
    return [time.time, time.sleep, warnings.warn, perf_counter_ns]


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_refused(forward: Callable[..., Any]) -> None:
    before = lost_functions()
    report = gemmnorm.fuse_report(Written(forward))
    does, line = REFUSED[forward]
    reason = f"{does} (line {forward.__code__.co_firstlineno + line})"
    assert not report.matches and [reason in r.reason for r in report.refusals] == [True], report
    assert lost_functions() == before


VALUES = iter([1, 2])


def refused_for_another_reason(self: Any, x: Tensor) -> Tensor:
    return normed(self, x) * next(VALUES) * perf_counter_ns()


def test_what_is_refused_otherwise_leaves_no_trace() -> None:
    before = lost_functions()
    report = gemmnorm.fuse_report(Written(refused_for_another_reason))
    assert not report.matches and "takes values one after the other from" in report.refusals[0].reason
    assert lost_functions() == before


def asked_to(self: Any, x: Tensor) -> Tensor:
    if self.verbose:
        warnings.warn(f"{time.time()} {perf_counter_ns()}", stacklevel=2)
    return normed(self, x)


def test_a_branch_that_is_not_taken_stands_in_nobodys_way(calls: list[Any]) -> None:
    model: Any = Written(asked_to)
    model.verbose = False
    before = lost_functions()
    fused, plain = fused_and_plain(model)
    assert lost_functions() == before
    assert_same(fused, plain, X)
    assert len(calls) == 3
    fused.verbose = True
    with pytest.warns(UserWarning):  # by the original forward
        fused(X)
    assert len(calls) == 3


def timed(self: Any, x: Tensor) -> Tensor:
    return self.clocked(normed(self, x))  # type: ignore[no-any-return]


def clocked(self: Any, y: Tensor) -> Tensor:
    return y * (time.monotonic() > 0)


def test_a_method_that_asks_for_the_time_stays_a_call(calls: list[Any]) -> None:
    model: Any = Written(timed)
    type(model).clocked = clocked
    fused, plain = fused_and_plain(model)
    assert_same(fused, plain, X)
    assert len(calls) == 3
