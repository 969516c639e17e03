"""Candidates by what they do, for `plan.forcing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gemmnorm.plan import Problem
from gemmnorm.plan.candidates import Candidate
from gemmnorm.plan.cublas import CublasForward
from gemmnorm.plan.gemm import EPILOGUES, Gemm
from gemmnorm.plan.gradient import Backward
from gemmnorm.plan.small import SmallPanel


def epilogue(name: str | None) -> Callable[[Candidate], bool]:
    """`fused_gemm` with this epilogue, or anything for None."""
    wanted = {schedule for schedule, (kind, _) in EPILOGUES.items() if kind == f"{name}Epilogue"}
    if name == "Normalize":
        wanted = {"two-pass"}
    return lambda c: name is None or (isinstance(c.variant, Gemm) and c.variant.schedule in wanted)


def in_registers(wanted: bool) -> Callable[[Candidate], bool]:
    """Single waves whose tiles wait there for their panel, or in shared memory."""
    return lambda c: (
        isinstance(c.variant, Gemm)
        and (c.variant.in_registers == wanted or not c.variant.tile.waits)
        and c.variant.schedule == "co-resident"
    )


def sharing_x(schedule: str) -> Callable[[Candidate], bool]:
    """Neighbouring blocks load x together."""
    return lambda c: isinstance(c.variant, Gemm) and c.variant.sharing > 1 and c.variant.schedule == schedule


def overlapping(c: Candidate) -> bool:
    """Tiles that overlap, for rows of y that begin in the middle of a sector."""
    return isinstance(c.variant, Gemm) and c.variant.tile.overlap > 0


def by_gram(c: Candidate) -> bool:
    """Statistics from the Gram matrix of x; any backward."""
    return c.phase == "backward" or getattr(c.variant, "schedule", "") == "gram"


def in_panels(c: Candidate) -> bool:
    """Normalised by clusters that hold panels of columns."""
    return isinstance(c.variant, CublasForward) and c.variant.panel is not None


def small_panel(c: Candidate) -> bool:
    return isinstance(c.variant, SmallPanel)


def fused_gemm(c: Candidate) -> bool:
    return isinstance(c.variant, Gemm)


def split_products(c: Candidate) -> bool:
    """Backwards whose products are of split operands; any forward."""
    return c.variant.split_products if isinstance(c.variant, Backward) else c.phase == "forward"


def least_converted(problem: Problem, gemm: Gemm) -> Iterator[Gemm]:
    """In place of `candidates._conversions`: one tile of rows and one panel before the product."""
    if gemm.schedule in ("deferred", "evaluate"):
        yield replace(gemm, x_rows=gemm.tile.rows, weight_rows=gemm.tile.columns)
