"""Kernel spans: what the GPU's own record says about a variant that events have timed.

Each variant runs once more under `torch.profiler`, queued behind a spin and the L2 flush like every sample, between two
markers: kernels of `torch.cuda._sleep`. Activities are told apart by the order in which they were launched, so that
work on other streams belongs to the variant that launched it. All of them share one recording: CUPTI slows launches
down for as long as the process lives, and may record nothing a second time. So this comes after everything is timed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch.profiler import ProfilerActivity, profile

from ..errors import GemmNormError
from .timing import CudaClock, Variant, reason, warm_up

APART = 0.2  # of the time: by more than this, and by more than `LATENCY_MS`, spans and events disagree
LATENCY_MS = 0.005  # what may lie between an event and a kernel, and between the kernels of a chain under CUPTI
MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep
_MARKS = 3  # of each variant: the spin, the marker before, the marker after
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Key: TypeAlias = tuple[Any, str]  # of a variant: its cell or phase, its name
Event: TypeAlias = dict[str, Any]  # of a trace in Chrome's format; `ts` and `dur` are µs


class SpansError(GemmNormError):
    """The profiler is not usable here."""


@dataclass(frozen=True)
class Span:
    """`span_ms` from the first activity's start to the last one's end, `sum_ms` of all `count` of them (more than the
    span where they overlap), and `event_ms`, the same run by events; null where the variant launched nothing."""

    span_ms: float | None
    sum_ms: float
    count: int
    event_ms: float

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        return asdict(self)


def disagreement(ms: float | None, found: dict[str, Any] | None) -> str | None:
    """In a few words, where events (`ms`) and the kernels' span differ by more than `APART` and `LATENCY_MS`."""
    if ms is None or found is None:
        return None
    span = found["span_ms"] or 0.0
    if abs(ms - span) <= max(APART * ms, LATENCY_MS):
        return None
    return f"{ms:.4f} ms by events, {span:.4f} ms from the first of {found['count']} kernels to the end of the last"


def recorded(run: Callable[[], object], activity: ProfilerActivity = ProfilerActivity.CUDA) -> list[Event]:
    """The trace of `run`, as `torch.profiler` exports it."""
    with profile(activities=[activity]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def between_markers(events: Sequence[Event], categories: Sequence[str] = _DEVICE) -> list[list[Event]]:
    """The device's activities after each marker, in the order of their launches."""
    listed = [event for event in events if event.get("cat") in categories]
    listed.sort(key=lambda event: (event.get("args", {}).get("correlation", 0), event["ts"]))
    groups: list[list[Event]] = []
    for event in listed:
        if MARKER in event["name"]:
            groups.append([])
        elif groups:
            groups[-1].append(event)
    return groups


def span_of(events: Sequence[Event], event_ms: float) -> Span:
    """Span and sum of one variant's activities."""
    if not events:
        return Span(None, 0.0, 0, event_ms)
    end = max(event["ts"] + event["dur"] for event in events)
    total = sum(event["dur"] for event in events)
    return Span((end - min(event["ts"] for event in events)) / 1e3, total / 1e3, len(events), event_ms)


class Replays:
    """One recording of many variants: `add` runs one, `taken` reads what became of all."""

    def __init__(self, clock: CudaClock) -> None:
        self._clock = clock
        self._events: dict[Key, float] = {}
        self.failed: dict[Key, str] = {}

    def add(self, key: Key, variant: Variant) -> None:
        """Warm the variant up and run it between markers; one that cannot be warmed up is named in `failed`."""
        if why := warm_up(variant, self._clock, timed=False):
            self.failed[key] = why
            return
        self._events[key] = self._clock.start(variant, marked=True)()
        self._clock.synchronize()

    def taken(
        self, run: Callable[[], object], record: Callable[[Callable[[], object]], list[Event]] = recorded
    ) -> dict[Key, Span]:
        """The span of every variant that `run` adds.

        Raises:
            SpansError: the profiler raises, or records no kernels, or others than were launched.
        """
        self._clock.spin(0.0)  # its first spin calibrates, with kernels like the markers
        try:
            groups = between_markers(record(run))
        except Exception as error:  # whatever a profiler does not like must not end a bench
            raise SpansError(reason(error)) from error
        if len(groups) != _MARKS * len(self._events):
            raise SpansError(f"expected {_MARKS * len(self._events)} markers in the trace; got {len(groups)}")
        return {
            key: span_of(groups[_MARKS * i + 1], event_ms) for i, (key, event_ms) in enumerate(self._events.items())
        }
