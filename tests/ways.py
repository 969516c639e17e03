"""Candidates by what they do, for `plan.forcing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gemmnorm.plan import Problem, panels, small
from gemmnorm.plan.candidates import Candidate, Gradient
from gemmnorm.plan.gemm import EPILOGUES, Gemm


def epilogue(name: str | None) -> Callable[[Candidate], bool]:
    """`fused_gemm` with this epilogue, or anything for None."""
    wanted = {schedule for schedule, (kind, _) in EPILOGUES.items() if kind == f"{name}Epilogue"}
    if name == "Normalize":
        wanted = {"two-pass"}
    return lambda c: name is None or (isinstance(c.way, Gemm) and c.way.schedule in wanted)


def in_registers(wanted: bool) -> Callable[[Candidate], bool]:
    """Single waves whose tiles wait there for their panel, or in shared memory."""
    return lambda c: (
        isinstance(c.way, Gemm)
        and (c.way.in_registers == wanted or not c.way.tile.waits)
        and c.way.schedule == "co-resident"
    )


def by_gram(c: Candidate) -> bool:
    """Statistics from the Gram matrix of x; any backward."""
    return c.phase == "backward" or getattr(c.way, "schedule", "") == "gram"


def in_panels(c: Candidate) -> bool:
    """Normalised by clusters that hold panels of columns."""
    return isinstance(c.way, panels.Shape)


def small_panel(c: Candidate) -> bool:
    return isinstance(c.way, small.Shape)


def fused_gemm(c: Candidate) -> bool:
    return isinstance(c.way, Gemm)


def split_products(c: Candidate) -> bool:
    """Backwards whose products are of split operands; any forward."""
    return c.way.split if isinstance(c.way, Gradient) else c.phase == "forward"


def least_converted(problem: Problem, gemm: Gemm) -> Iterator[Gemm]:
    """In place of `candidates._conversions`: one tile of rows and one panel before the product."""
    if gemm.schedule in ("deferred", "evaluate"):
        yield replace(gemm, x_rows=gemm.tile.rows, weight_rows=gemm.tile.columns)
