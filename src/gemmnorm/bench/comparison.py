"""`gemmnorm bench --compare OLD.json`: is anything slower than it was?

Times of two runs differ by clocks and temperature, so what is compared is R, the time over the bare GEMM of the same
run (the time itself where no GEMM was measured).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import GemmNormValueError
from .documents import Document

TOLERANCE = 0.03  # of R, and never less than the quartile distances of both runs together
_CELL = ("case", "precision", "autocast", "phase")
_SAME = ("gpu", "cpu", "torch")  # of the environment: what else makes times different


def check_comparable(kind: str, environment: Document, old: Document, name: str) -> None:
    """Raise GemmNormValueError where `old` is of another kind, or of a machine whose times are others."""
    if old.get("kind", "bench") != kind:
        raise GemmNormValueError(f"{name}: expected a result of kind {kind!r}; got {old.get('kind')!r}")
    there = old.get("environment") or {}
    if differs := [k for k in _SAME if environment.get(k) != there.get(k)]:
        parts = ", ".join(f"{k} {there.get(k)}, here {environment.get(k)}" for k in differs)
        raise GemmNormValueError(f"{name}: expected a result of this machine; got {parts}")


def compare(new: Document, old: Document, name: str = "OLD") -> Document:
    """What became of each cell that both results have: `cells` with old and new R, and how many `regressions`.

    Raises:
        GemmNormValueError: the results are of different kinds or machines, or have no cell in common.
    """
    check_comparable(new["kind"], new.get("environment") or {}, old, name)
    ours, theirs = (Path(document["model"]).name if document.get("model") else None for document in (new, old))
    if ours != theirs:
        raise GemmNormValueError(f"{name}: expected a result of {ours or 'a suite'}; got one of {theirs or 'a suite'}")
    before = dict(cells_of(old))
    cells = [{"cell": _name(key), **judged(before[key], row)} for key, row in cells_of(new) if key in before]
    if not cells:
        raise GemmNormValueError(f"{name}: expected a cell that was measured now as well; got none")
    slower = sum(cell["verdict"] == "slower" for cell in cells)
    return {"old": name, "created": old.get("created"), "cells": cells, "regressions": slower}


def cells_of(document: Document) -> Iterator[tuple[tuple[Any, ...], Document]]:
    """Key and row of every cell: the planner's choice, or every variant of a model file but the peers."""
    for row in document["rows"]:
        if document.get("kind") == "bench-files":
            if row.get("kind") in ("fused", "candidate"):
                yield (row["phase"], row["variant"]), row
        elif row.get("chosen"):
            yield tuple(row.get(k) for k in _CELL), row


def in_gemms(row: Document) -> float:
    """R: the time over the bare GEMM's, or the time itself without one."""
    return float(row["ms"]) / (row.get("gemm_ms") or 1.0)


def judged(old: Document, new: Document) -> Document:
    """R of two rows of one cell (times, where one has no GEMM's), its change, how much is allowed, and the verdict."""
    both = old.get("gemm_ms") and new.get("gemm_ms")
    before, now = (in_gemms(row) if both else float(row["ms"]) for row in (old, new))
    limit = max(TOLERANCE, sum((row.get("ms_iqr") or 0.0) / row["ms"] for row in (old, new)))
    word = "slower" if now > before * (1 + limit) else "faster" if before > now * (1 + limit) else "same"
    return {"old": before, "new": now, "change": now / before, "limit": limit, "verdict": word}


def _name(key: tuple[Any, ...]) -> str:
    return " ".join("amp" if part is True else str(part) for part in key if part is not False and part is not None)
