"""Which values a `forward` compares with None, seen while it is recorded: `is` asks no stand-in.

`scanning` finds the comparisons of variables. When one is about to run, its variable is read here, and what that stands
for is marked: only of those values does it matter whether they may be None (`optional`). A comparison of anything else,
and one that nobody saw, may be of any value.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from . import stand_ins

_MISSING = object()


class Observer:
    """Looks at the comparisons in what runs, from `watch` to `close`.

    Attributes:
        comparisons: by code and offset, the variable that is compared there; it may grow.
        seen: the code that was watched while it ran.
        ran_unread: code that ran and that nobody had read.
        missed: something was compared, or may have been, that nobody saw.
    """

    def __init__(self, comparisons: Mapping[types.CodeType, Mapping[int, str]]) -> None:
        self.comparisons = comparisons
        self.seen: set[types.CodeType] = set()
        self.ran_unread: set[types.CodeType] = set()
        self.missed = False
        self.thread = threading.get_ident()
        self.way = _Instructions(self._look) if sys.version_info >= (3, 12) else _Frames(self._look)

    @property
    def saw_all(self) -> bool:
        """Each comparison that was read was seen. Code that has not run here may have run in another thread."""
        return not self.missed and self.seen.issuperset(self.comparisons)

    def watch(self, frame: types.FrameType) -> None:
        """`frame`, whose code has comparisons, begins to run or goes on."""
        self.missed |= frame.f_code in self.ran_unread
        self.way.watch(frame)

    def close(self) -> None:
        self.way.close()

    def _look(self, frame: types.FrameType, offset: int) -> bool:
        """The instruction at `offset` is about to run in `frame`; whether it compares a variable."""
        self.seen.add(frame.f_code)
        name = self.comparisons[frame.f_code].get(offset)
        value: Any = None if name is None else frame.f_locals.get(name, _MISSING)
        if value is _MISSING:
            self.missed = True
        elif issubclass(type(value), fx.Proxy):
            if threading.get_ident() == self.thread:
                stand_ins.mark_as_compared(value)
            else:
                self.missed = True
        return name is not None


class _Instructions:
    """From Python 3.12 on: each instruction of a watched code calls `look`, in whatever frame and thread it runs.

    What compares no variable does so once, for speed.
    """

    def __init__(self, look: Callable[[types.FrameType, int], bool]) -> None:
        self.look = look
        self.monitoring: Any = getattr(sys, "monitoring", None)
        self.tool: int | None = None
        self.codes: list[types.CodeType] = []

    def watch(self, frame: types.FrameType) -> None:
        """Where other tools leave no room, nothing is seen."""
        ask, instruction = self.monitoring, self.monitoring.events.INSTRUCTION
        if self.tool is None:
            self.tool = next((tool for tool in (4, 3) if ask.get_tool(tool) is None), None)
            if self.tool is None:
                return
            ask.use_tool_id(self.tool, "gemmnorm")
            ask.register_callback(self.tool, instruction, self._event)
        if not ask.get_local_events(self.tool, frame.f_code):
            ask.set_local_events(self.tool, frame.f_code, instruction)
            self.codes.append(frame.f_code)

    def pause(self) -> None:
        """What is not watched costs nothing anyway."""

    def go_on(self) -> None:
        pass

    def close(self) -> None:
        if self.tool is not None:
            for code in self.codes:
                self.monitoring.set_local_events(self.tool, code, 0)
            self.monitoring.register_callback(self.tool, self.monitoring.events.INSTRUCTION, None)
            self.monitoring.free_tool_id(self.tool)
            self.tool, self.codes = None, []

    def _event(self, _: types.CodeType, offset: int) -> Any:
        return None if self.look(sys._getframe(1), offset) else self.monitoring.DISABLE


class _Frames:
    """Before Python 3.12: each instruction of a watched frame calls `look`."""

    def __init__(self, look: Callable[[types.FrameType, int], bool]) -> None:
        self.look = look
        self.frames: list[types.FrameType] = []  # the watched ones; a generator's may outlive the recording

    def watch(self, frame: types.FrameType) -> None:
        """Where a debugger or a coverage tool traces, nothing is seen: it has to hear of every call and return."""
        if not self.frames:
            if sys.gettrace() is not None:
                return
            sys.settrace(_begin_nothing)
        frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self._event, False, True
        self.frames.append(frame)

    def pause(self) -> None:
        """For speed: Python looks at each call while there is a trace function."""
        if self.frames:
            sys.settrace(None)

    def go_on(self) -> None:
        if self.frames:
            sys.settrace(_begin_nothing)

    def close(self) -> None:
        if self.frames:
            sys.settrace(None)
        while self.frames:
            frame = self.frames.pop()
            frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = None, True, False

    def _event(self, frame: types.FrameType, kind: str, _: object) -> Any:
        if kind == "opcode":
            self.look(frame, frame.f_lasti)
        return self._event


def _begin_nothing(*_: object) -> None:
    """A trace function that watches no other frames."""
