"""Comparisons with None are seen beside debuggers, other tools and threads, or nothing is taken for granted."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_conditions_of_inputs import h, reason_of
from test_observing import Asking, a_part, absent, the_result
from torch import Tensor

import gemmnorm


def test_a_debugger_sees_what_it_would_without() -> None:
    """A coverage tool counts on each call and each return."""
    entered: Counter[Any] = Counter()

    def tracer(frame: Any, kind: str, _: object) -> Any:
        entered[frame.f_code] += {"call": 1, "return": -1}.get(kind, 0)
        return tracer

    def profiler(*_: object) -> None:
        pass

    before = sys.gettrace(), sys.getprofile()
    try:
        sys.setprofile(profiler)
        sys.settrace(tracer)
        refused = reason_of(Asking(the_result))
        report = gemmnorm.fuse_report(Asking(a_part))
        found = sys.gettrace(), sys.getprofile()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert found == (tracer, profiler)
    assert {the_result.__code__, a_part.__code__} < {*entered}
    assert not any(entered.values())
    assert "what kept gives may be None" in refused
    if sys.version_info >= (3, 12):
        assert len(report.matches) == 1
    else:  # nothing is seen, so that whatever is computed may be None
        assert "what kept gives may be None" in report.refusals[0].reason


def test_it_is_there_again_after_an_error() -> None:
    def tracer(*_: object) -> None:
        pass

    def forward(self: Any, x: Tensor) -> Tensor:
        y = x
        if y is not None:
            raise ValueError("no such value")
        return h(self, x)

    before = sys.gettrace()
    try:
        sys.settrace(tracer)
        gemmnorm.fuse(Asking(forward))
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12")
def test_nothing_is_left_of_looking_and_other_tools_have_their_places() -> None:
    monitoring: Any = sys.monitoring
    gemmnorm.fuse(Asking(a_part))
    assert [monitoring.get_tool(tool) for tool in (3, 4)] == [None, None]
    for tool in (3, 4):
        monitoring.use_tool_id(tool, "another")
    try:
        assert monitoring.get_local_events(4, a_part.__code__) == 0
        assert "what kept gives may be None" in reason_of(Asking(a_part))
    finally:
        for tool in (3, 4):
            monitoring.free_tool_id(tool)


INSTALLED = """
import _thread
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

POOL = ThreadPoolExecutor(1)


def run(function, *args):
    return POOL.submit(function, *args).result()


def run_by_hand(function, *args):
    results = SimpleQueue()
    _thread.start_new_thread(lambda: results.put(function(*args)), ())
    return results.get()


class Box:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def absent(value, box=None):
    found = value if box is None else box.value
    return found is None


def answer():
    found = None
    while True:
        found = yield found is None


ANSWERS = answer()
next(ANSWERS)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of a package that is installed."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "gemmnorm_test_installed.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    module = importlib.import_module("gemmnorm_test_installed")
    yield module
    module.POOL.shutdown()
    del sys.modules["gemmnorm_test_installed"]


def test_what_another_thread_compares(installed: Any) -> None:
    def there(self: Any, x: Tensor) -> Tensor:
        y = self.aux(x)
        return h(self, x) * (2 if installed.run(absent, y) else 3)

    def there_alone(self: Any, x: Tensor) -> Tensor:
        y = self.aux(x)
        return h(self, x) * (2 if installed.run_by_hand(absent, y) else 3)

    def here_and_there(self: Any, x: Tensor) -> Tensor:
        y = self.aux(x)
        return h(self, x) * (2 if installed.run(absent, y) or absent(x) else 3)

    def here_and_there_alone(self: Any, x: Tensor) -> Tensor:
        y = self.aux(x)
        return h(self, x) * (2 if installed.run_by_hand(absent, y) or absent(x) else 3)

    for forward in (there, there_alone, here_and_there, here_and_there_alone):
        assert "what aux gives may be None" in reason_of(Asking(forward))


def test_what_a_function_has_compared_before_it_was_read(installed: Any) -> None:
    """An installed one is read when it is given a stand-in."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = installed.absent(None, installed.Box(self.aux(x)))
        return h(self, x) * (2 if hidden or installed.absent(x) else 3)

    assert "what aux gives may be None" in reason_of(Asking(forward))


def test_nothing_is_left_of_looking_at_what_goes_on_afterwards(installed: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            installed.ANSWERS.send(x)
        return h(self, x)

    reason_of(Asking(forward))
    frame = installed.ANSWERS.gi_frame
    assert frame.f_trace is None
    assert frame.f_trace_lines and not frame.f_trace_opcodes
