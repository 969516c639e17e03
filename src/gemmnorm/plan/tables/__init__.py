"""What was measured, as data: the constants of the cost function, and the best candidates of exceptional problems.

Those of the files beside this one were measured on one H200; `here` holds what `gemmnorm tune` has measured on this
machine, which the runtime puts in (`choice.set_measured_here`).
"""

from __future__ import annotations

import csv
import functools
import json
from dataclasses import replace
from pathlib import Path

from ..problem import Chip, Problem

HERE = Path(__file__).parent
CONSTANTS, BEST = HERE / "h200.json", HERE / "h200-measured.csv"
MULTIPROCESSORS = 132  # of the GPU that was measured
COLUMNS = (
    "phase", "dtype", "out_dtype", "arithmetic", "cast", "training", "save", "batch", "in_features", "out_features",
    "candidate",
)  # fmt: skip
here: dict[Chip, dict[tuple[str, ...], str]] = {}  # by `key_here`


def key(problem: Problem, phase: str) -> tuple[str, ...]:
    """What a line of the table is found by.

    float16 and bfloat16 run at one rate: bfloat16's lines serve both. A forward that keeps the product takes the line
    of one that does not.
    """
    p = replace(problem, dtype="bfloat16") if problem.dtype == "float16" else problem
    p = replace(p, out_dtype="bfloat16") if p.out_dtype == "float16" else p
    found = (
        phase, p.dtype, p.out_dtype, p.arithmetic, "+".join(p.cast), int(p.training),
        int(p.save and phase == "backward"), p.batch, p.in_features, p.out_features,
    )  # fmt: skip
    return tuple(map(str, found))


def key_here(problem: Problem, phase: str) -> tuple[str, ...]:
    """What a line of `here` is found by: `key`, and in training whether the product is kept."""
    return (*key(problem, phase), str(int(problem.training and problem.saves_product)))


def constants() -> dict[str, dict[str, float]]:
    """By arithmetic and name."""
    found: dict[str, dict[str, float]] = json.loads(CONSTANTS.read_text(encoding="utf-8"))["constants"]
    return found


@functools.cache
def _best() -> dict[tuple[str, ...], str]:
    if not BEST.exists():
        return {}
    with BEST.open(newline="", encoding="utf-8") as file:
        return {tuple(row[:-1]): row[-1] for row in list(csv.reader(file))[1:]}


def measured_here(problem: Problem, phase: str) -> str | None:
    """The name of the candidate that was measured to be the best on this machine."""
    if problem.chip is None or problem.prepared:
        return None
    return here.get(problem.chip, {}).get(key_here(problem, phase))


def measured_best(problem: Problem, phase: str, shipped: bool = False) -> str | None:
    """The name of the candidate that was measured to be the best, where the prediction would take a slower one.

    On this machine first; `shipped`: by the files alone.
    """
    found = None if shipped else measured_here(problem, phase)
    chip = problem.chip
    if found or chip is None or chip.arch != 90 or chip.multiprocessors != MULTIPROCESSORS or problem.prepared:
        return found
    return _best().get(key(problem, phase))
