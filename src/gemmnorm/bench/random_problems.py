"""`gemmnorm bench --random`: problems that nobody tuned for, drawn from a seed, and what a result file of them says.

Sizes are log-uniform: rows 2^5 … 2^17, inputs and features 2^3 … 2^13.3, multiples of 8, half of the problems
multiples of 128, 30 MFLOP to 600 GFLOP a product; bias, scale and ReLU by the toss of a coin.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import cases
from .cases import Case, Cell

ROWS, WIDTHS = (5.0, 17.0), (3.0, 13.3)  # exponents of two
FLOPS = 3e7, 6e11  # of one product
STEPS = (8, 128)  # that all three sizes are multiples of
BACKWARDS = 3  # every third problem is also measured forward and backward
SHORT_MS = 0.02  # of the bare GEMM, up to which launches decide
SLOWER = 1.03  # than the faster of eager and torch.compile, from where a row counts as slower


def sizes(rng: random.Random) -> tuple[int, int, int]:
    """Batch, in_features and out_features of one problem."""
    while True:
        drawn = [2 ** rng.uniform(*limits) for limits in (ROWS, WIDTHS, WIDTHS)]
        step = rng.choice(STEPS)
        batch, wide, out = (max(step, round(size / step) * step) for size in drawn)
        if FLOPS[0] <= 2 * batch * wide * out <= FLOPS[1]:
            return batch, wide, out


def draw(seed: int, count: int) -> list[Case]:
    """The first `count` problems of a seed; a larger count only adds to them."""
    rng = random.Random(f"gemmnorm bench --random {seed}")
    found = []
    for number in range(count):
        batch, wide, out = sizes(rng)
        bias, scale, relu = (rng.random() < 0.5 for _ in range(3))
        found.append(Case(f"random-{seed}-{number}", batch, wide, out, bias, scale, "relu" if relu else None))
    return found


def cells(
    seeds: Sequence[int], count: int, precisions: Sequence[str] | None = None, phases: Sequence[str] | None = None
) -> list[Cell]:
    """The cells of so many problems a seed: training and evaluation, for every third also forward and backward."""
    found = []
    for case in (case for seed in seeds for case in draw(seed, count)):
        number = int(case.name.rsplit("-", 1)[1])
        for precision in precisions or ("bf16",):
            condition = ("bf16", True) if precision == "amp" else (precision, False)
            for phase in cases.PHASES:
                asked = not phases or phase in phases
                if asked and (phase != "train_fwd_bwd" or number % BACKWARDS == 0):
                    found.append(Cell(case, *condition, phase))
    return found


# --- what a result says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Class:
    """The rows of one class: geometric means, and the worst of each."""

    name: str
    rows: tuple[dict[str, Any], ...]

    def mean(self, ratio: Callable[[dict[str, Any]], float | None]) -> float | None:
        found = [math.log(value) for row in self.rows if (value := ratio(row))]
        return math.exp(sum(found) / len(found)) if found else None

    def worst(self, ratio: Callable[[dict[str, Any]], float | None], pick: Callable[..., float]) -> float | None:
        found = [value for row in self.rows if (value := ratio(row))]
        return pick(found) if found else None

    @property
    def slower(self) -> int:
        """Rows behind the faster of eager and torch.compile by more than 3%."""
        return sum(behind(row) > SLOWER for row in self.rows)

    @property
    def predicted(self) -> float | None:
        """The share of rows whose predicted time is within 25%."""
        known = [row for row in self.rows if row.get("predicted_ms")]
        near = sum(0.8 <= row["predicted_ms"] / row["ms"] <= 1.25 for row in known)
        return near / len(known) if known else None


def r(row: dict[str, Any]) -> float | None:
    """ms / bare GEMM."""
    return row["ms"] / row["gemm_ms"] if row.get("gemm_ms") else None


def s(row: dict[str, Any]) -> float | None:
    """eager / ms."""
    return row["eager_ms"] / row["ms"] if row.get("eager_ms") else None


def c(row: dict[str, Any]) -> float | None:
    """torch.compile / ms."""
    return row["compile_ms"] / row["ms"] if row.get("compile_ms") else None


def behind(row: dict[str, Any]) -> float:
    """ms / the faster of eager and torch.compile; 0 where neither was measured."""
    return float(row["ms"] / min((t for t in (row.get("eager_ms"), row.get("compile_ms")) if t), default=math.inf))


def memory_bound(row: dict[str, Any], ceilings: dict[str, Any]) -> bool:
    """Moving the bytes takes longer than the products."""
    rate, peak = ceilings.get("copy_gb_per_s"), ceilings.get("tflops", {}).get(row["precision"])
    return bool(rate and peak and row["bytes"] / rate / 1e6 > row["flops"] / peak / 1e9)


def classes(rows: Sequence[dict[str, Any]], ceilings: dict[str, Any]) -> Iterator[Class]:
    """All rows; those where launches, memory or tensor cores decide, the last by K; and batches just above a tile."""

    def short(row: dict[str, Any]) -> bool:
        return bool(row["gemm_ms"] and row["gemm_ms"] < SHORT_MS)

    def among(name: str, wanted: Callable[[dict[str, Any]], bool]) -> Class:
        return Class(name, tuple(row for row in rows if wanted(row)))

    def heavy(row: dict[str, Any]) -> bool:
        return not short(row) and not memory_bound(row, ceilings)

    yield among("all", lambda row: True)
    yield among("GEMM under 20 µs", short)
    yield among("from 20 µs", lambda row: not short(row))
    yield among("memory-bound, from 20 µs", lambda row: not short(row) and not heavy(row))
    yield among("compute-bound, K % 64 = 0", lambda row: heavy(row) and row["in_features"] % 64 == 0)
    yield among("compute-bound, K % 64 ≠ 0", lambda row: heavy(row) and row["in_features"] % 64 > 0)
    yield among("rows just above a tile", lambda row: row["batch"] > 128 and 0 < row["batch"] % 128 <= 16)
