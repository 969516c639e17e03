"""`gemmnorm bench --suite`: measuring the cells of a suite into a result file.

The file is written every few seconds and at the end, under a temporary name and renamed, so that a run that is cut off
keeps what it has; `resume=True` continues it.
"""

from __future__ import annotations

import contextlib
import json
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..runtime import sources
from .cases import Cell
from .cell import Bench, Options, Tell
from .cross_check import add_spans
from .documents import Document, command_line, new_document, write_json
from .environment import current, environment
from .workers import Failure, Spent, how_many, in_rounds, one_by_one

ROW_KEY = ("case", "precision", "autocast", "phase")
EVERY_S = 5.0  # between two writings of a file, which has thousands of rows where cells take a moment


def tests_of(path: str | Path | None) -> dict[str, int | None]:
    """Passed, failed and skipped tests of a JUnit file (`pytest --junit-xml`); null without one."""
    if path is None:
        return {"passed": None, "failed": None, "skipped": None}
    total = failed = skipped = 0
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def empty_result(device: torch.device, command: str | None = None) -> Document:
    """An empty result file of kind "bench"."""
    return new_document(
        "bench",
        command=command or command_line(),
        source_hash=sources.source_hash(),
        environment=environment(device),
        ceilings={},
        rows=[],
        not_applicable=[],
        notes=[],
        tests=tests_of(None),
    )


def _previous(path: Path | None, fresh: Document) -> Document:
    """The document at `path`, if it is of the same sources, torch and GPU; else `fresh` with a note."""
    if path is None or not path.exists():
        return fresh
    found: Document = json.loads(path.read_text(encoding="utf-8"))
    same = all(
        found.get("environment", {}).get(k) == fresh["environment"].get(k) for k in ("gpu", "torch", "cpu", "cuda")
    )
    if found.get("kind") == "bench" and found.get("source_hash") == fresh["source_hash"] and same:
        commands = found["command"].split(" && ")
        if fresh["command"] not in commands:
            found["command"] = " && ".join([*commands, fresh["command"]])
        return found
    return {**fresh, "notes": [f"{path.name} was of other sources or another machine and was started afresh"]}


def cell_key(cell: Cell) -> tuple[Any, ...]:
    """What identifies a cell's rows in a result file."""
    return (cell.case.name, cell.precision, cell.autocast, cell.phase)


def run_suite(
    cells: Sequence[Cell],
    device: torch.device,
    options: Options,
    *,
    path: str | Path | None = None,
    resume: bool = False,
    tell: Tell = lambda _: None,
    on_cell: Callable[[Cell], None] = lambda _: None,
    about: Document | None = None,
    workers: int | None = None,
) -> Document:
    """Measure `cells` and return the result document.

    Args:
        path: write the document there every few seconds, and however the run ends.
        resume: keep the rows that `path` already has, and measure only cells without any.
        tell: told in a few words what is being done.
        on_cell: called when a cell is finished.
        about: further entries of the document.
        workers: processes that prepare cells beside each other (`workers.py`), each being measured alone; fewer than
            two: this process does it all. None: on a GPU as many as there is room for, else one.

    A cell that fails as a whole (out of memory, say) leaves a note and no rows; a lost device ends the run. `seconds`
    of the document says what `preparing` and `measuring` took.
    """
    with current(device):
        document = empty_result(device) | (about or {})
        if resume:
            document = _previous(Path(path) if path else None, document)
        done = {tuple(row.get(k) for k in ROW_KEY) for row in (*document["rows"], *document["not_applicable"])}
        todo = [c for c in cells if cell_key(c) not in done]
        for cell in (c for c in cells if cell_key(c) in done):
            on_cell(cell)
        if todo:
            bench = Bench(device, options, tell)
            earlier, found = document["ceilings"], bench.measure_ceilings(cells)
            document["ceilings"] = {**found, "tflops": earlier.get("tflops", {}) | found["tflops"]}
            count = how_many(todo, device) if workers is None else min(workers, len(todo))
            with _written(document, path) as write:
                for cell in _measured(bench, todo, count, document):
                    write()
                    on_cell(cell)
        with _written(document, path):
            if options.extras:
                document["notes"] += add_spans(document["rows"], cells, device, tell)
        return document


def _measured(bench: Bench, cells: Sequence[Cell], workers: int, document: Document) -> Iterator[Cell]:
    """Measure `cells` into the document, at the end in their order, and say where the time went."""
    spent = Spent()
    outcomes = in_rounds(bench, cells, spent, workers) if workers > 1 else one_by_one(bench, cells, spent)
    with contextlib.closing(outcomes):
        for cell, outcome in outcomes:
            if isinstance(outcome, Failure):
                document["notes"].append(f"{cell}: {outcome.reason}")
                if bench.device.type == "cuda":
                    torch.cuda.synchronize(bench.device)  # raises where the device is lost, and all that would follow
            else:
                document["rows"] += outcome.rows
                document["not_applicable"] += outcome.not_applicable
                document["notes"] += outcome.notes
            yield cell
    number = {cell_key(cell): n for n, cell in enumerate(cells)}
    for kind in ("rows", "not_applicable"):
        document[kind].sort(key=lambda row: number.get(tuple(row.get(k) for k in ROW_KEY), -1))
    document["seconds"] = {what: round(s, 1) for what, s in asdict(spent).items()}
    bench.tell(str(spent))


@contextlib.contextmanager
def _written(document: Document, path: str | Path | None) -> Iterator[Callable[[], None]]:
    """Write the document when the body ends, even by an exception, and now and then where it calls what it is given."""
    last = time.monotonic()

    def write() -> None:
        nonlocal last
        if path is not None and time.monotonic() - last > EVERY_S:
            write_json(path, document)
            last = time.monotonic()

    try:
        yield write
    finally:
        if path is not None:
            write_json(path, document)
