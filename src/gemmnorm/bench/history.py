"""`--history OLD.json …`: R and S of every cell of a result over older runs of the same machine.

R is the time over the bare GEMM of the same run and S eager's time over it, so that clocks and temperature do not make
a history. Versions may differ from run to run, and are shown beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import GemmNormValueError
from .comparison import cells_of, in_gemms, judged
from .documents import Document

KINDS = ("bench", "bench-files")


def history(new: Document, olds: Sequence[tuple[str, Document]], name: str = "this result") -> Document:
    """What `new` and older results measured, by cell.

    Args:
        new: a result of kind "bench" or "bench-files"; its cells are followed.
        olds: names and results, in any order; a copy of `new` among them does not count twice.
        name: of `new`.

    Returns:
        `runs`: name, `created`, `source_hash` and `torch` of each, the oldest first.
        `cells`: `case`, `phase`, `name` and `points` of each cell that `new` has; a point has `run` (its number in
        `runs`), `R`, `S` (null without eager) and `verdict`: slower, faster or same as at the point before, or null.
        `left_out`: `name` and `reason` of each result of another kind, model or machine.

    Raises:
        GemmNormValueError: `new` is of another kind, or no older result is left.
    """
    if new.get("kind", "bench") not in KINDS:
        raise GemmNormValueError(f"{name}: expected a result of kind bench or bench-files; got {new.get('kind')!r}")
    left_out = []
    found = [(name, new)]
    for other, old in olds:
        if why := _refusal(new, old):
            left_out.append({"name": other, "reason": why})
        elif not any(_copies(old, document) for _, document in found):
            found.append((other, old))
    if len(found) < 2:
        reasons = "; ".join(f"{item['name']}: {item['reason']}" for item in left_out)
        raise GemmNormValueError(f"--history: expected another run of the same; got {reasons or 'none'}")
    runs = sorted(found, key=lambda run: str(run[1].get("created")))
    rows = [dict(cells_of(document)) for _, document in runs]
    return {
        "runs": [_about(label, document) for label, document in runs],
        "cells": [_cell(new, key, rows) for key, _ in cells_of(new)],
        "left_out": left_out,
    }


def _copies(one: Document, other: Document) -> bool:
    return all(one.get(key) == other.get(key) for key in ("created", "rows"))


def _about(name: str, document: Document) -> Document:
    versions = {"source_hash": document.get("source_hash"), "torch": (document.get("environment") or {}).get("torch")}
    return {"name": name, "created": document.get("created"), **versions}


def _refusal(new: Document, old: Document) -> str | None:
    """Why these two make no history together."""
    for what, of in _SAME.items():
        if of(new) != of(old):
            return f"of another {what}, {of(old)}"
    return None if dict(cells_of(new)).keys() & dict(cells_of(old)).keys() else "no cell in common"


def _machine(document: Document) -> str | None:
    environment = document.get("environment") or {}
    return environment.get("gpu") or environment.get("cpu")


def _subject(document: Document) -> tuple[str, ...]:
    """The model file, and what it was cast to."""
    found = (Path(document["model"]).name, document.get("precision")) if document.get("model") else ()
    return tuple(map(str, filter(None, found)))


_SAME = {"kind": lambda document: document.get("kind", "bench"), "machine": _machine, "model": _subject}


def _cell(new: Document, key: tuple[Any, ...], rows: Sequence[dict[tuple[Any, ...], Document]]) -> Document:
    points: list[Document] = []
    before: Document | None = None
    for number, row in ((i, found[key]) for i, found in enumerate(rows) if key in found):
        verdict = judged(before, row)["verdict"] if before else None
        eager = row["eager_ms"] / row["ms"] if row.get("eager_ms") else None
        points.append({"run": number, "R": in_gemms(row), "S": eager, "verdict": verdict})
        before = row
    if new.get("kind") == "bench-files":
        case, (phase, name) = Path(new["model"]).name, key
    else:
        case, precision, autocast, phase = key
        name = "amp" if autocast else precision
    return {"case": case, "phase": phase, "name": name, "points": points}
