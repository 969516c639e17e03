"""Progress on standard error: a live line on a terminal, a plain line per step elsewhere, nothing when silenced."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

EVERY_S = 10.0  # off a terminal, a step that goes on says so this often


class Reporter:
    """`tell(text)` says what is being done, `advance()` that one of `total` parts is done."""

    def __init__(self, label: str, total: int | None, live: Progress | None, quiet: bool) -> None:
        self._label, self._total, self._live, self._quiet = label, total, live, quiet
        self._task = live.add_task(label, total=total, what="") if live else None
        self._done = 0
        self._last, self._printed = "", 0.0
        self._started = time.monotonic()

    def tell(self, text: str) -> None:
        """What is being done now. Off a terminal, steps that count ("timing, round 3 of 40") appear now and then."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, what=text)
            return
        key, elapsed = text.split(", ")[0], time.monotonic() - self._started
        if not self._quiet and (key != self._last or elapsed - self._printed > EVERY_S):
            self._last, self._printed = key, elapsed
            part = "" if self._total is None else f" {self._done}/{self._total}"
            try:
                print(f"[{elapsed:5.0f} s]{part} {self._label}: {text}", file=sys.stderr, flush=True)
            except BrokenPipeError:  # nobody reads any more; what is done goes on
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
                self._quiet = True

    def advance(self) -> None:
        """One part is done."""
        self._done += 1
        if self._live is not None and self._task is not None:
            self._live.advance(self._task)


@contextlib.contextmanager
def reporting(label: str, total: int | None = None, quiet: bool = False) -> Iterator[Reporter]:
    """A `Reporter` for the body; on a terminal the line goes away at its end."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Reporter(label, total, None, quiet)
        return
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
    columns += [BarColumn(bar_width=24), MofNCompleteColumn()] if total is not None else []
    columns += [TimeElapsedColumn(), TextColumn("{task.fields[what]}")]
    with Progress(*columns, console=console, transient=True) as live:
        yield Reporter(label, total, live, quiet)
