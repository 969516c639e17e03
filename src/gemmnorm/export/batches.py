"""Which plans a file holds: for each kind of chain, both modes, both directions, and every batch size.

A plan is made for one batch size. Where it serves only some, the plan of a batch large enough to serve all stands
beside it, and the file's host function chooses between the two by the batch that it gets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from .. import plan
from ..errors import GemmNormValueError
from ..fuse import Chain
from ..plan import OWN_GEMM, Extent, Plan, Problem, gradient, small
from ..plan.hopper import MOST_ROWS_IN_REGISTERS, choose_tile
from .host import Case, Site


class Kind(NamedTuple):
    """What distinguishes the chains of a file: chains of one kind share their kernels."""

    in_features: int
    out_features: int
    activation: str | None
    scaled: bool


def kind_of(chain: Chain) -> Kind:
    """The kind of a chain."""
    return Kind(chain.in_features, chain.out_features, chain.activation, chain.scale is not None)


def problem_of(kind: Kind, batch: int, dtype: str, target: str) -> Problem:
    """What a plan is made for: one kind of chain, in training, on the target."""
    arithmetic = "float32" if dtype == "float32" else "native"
    chip = plan.chip_for(int(re.sub(r"\D", "", target)))
    return Problem(
        batch, kind.in_features, kind.out_features, dtype, dtype, dtype, dtype, arithmetic,
        kind.activation, training=True, save=False, scaled=kind.scaled, chip=chip,
    )  # fmt: skip


def common_strategy(problems: Iterable[Problem], otherwise: str) -> str:
    """The planner's choice, if it is the same for every problem; else `otherwise`."""
    chosen = {plan.make_plan(problem).strategy for problem in problems}
    return chosen.pop() if len(chosen) == 1 else otherwise


def sites_of(problems: dict[Kind, Problem], target: str, strategy: str) -> dict[Kind, Site]:
    """The plans of each kind of chain.

    Raises:
        GemmNormValueError: the strategy does not serve one of them on the target; the reason is in the message.
    """
    sites: dict[Kind, Site] = {}
    for index, (kind, problem) in enumerate(problems.items(), start=1):
        reason = plan.applicable(problem)[strategy]
        if strategy in OWN_GEMM and problem.chip and problem.chip.arch != 90:
            reason = f"its kernels need the target sm_90; this one is {target}"
        elif strategy == "reference":
            reason = "it has no kernels"
        if reason is not None:
            raise GemmNormValueError(f"strategy: {strategy} cannot be written out for this model: {reason}")
        sites[kind] = plan_site(problem, strategy, "" if len(problems) == 1 else f"_{index}")
    return sites


def plan_site(problem: Problem, strategy: str, suffix: str = "") -> Site:
    """The plans of both modes and directions for any batch, and those for batches like `problem`'s where others serve.

    A strategy that cannot keep what a backward needs gives way to the cuBLAS product there, as it does at run time.
    """
    modes = (True, False)
    return Site(
        suffix,
        {training: _forward_cases(replace(problem, training=training), strategy) for training in modes},
        {training: _backward_cases(replace(problem, training=training, save=True), strategy) for training in modes},
    )


def _forward_cases(problem: Problem, strategy: str) -> tuple[Case, ...]:
    """One case where the problem's plan serves every batch; else its own, then that of a batch large enough for all."""

    def plans(p: Problem) -> dict[bool, Plan]:
        return {save: plan.make_plan(replace(p, save=save), strategy) for save in (True, False)}

    found = plans(problem)
    narrow = _narrow(found[False])
    if narrow is None:
        return (Case("", "", found),)
    large = problem
    while _narrow(plans(large)[False]) is not None:
        large = replace(large, batch=2 * large.batch)
    return (Case(*narrow, found), Case("", "", plans(large)))


def _backward_cases(problem: Problem, strategy: str) -> tuple[Case, ...]:
    """Likewise. What limits a backward is how many rows fit into a cluster's shared memory.

    A file without a GEMM of our own is for other GPUs too, so its backward uses nothing that only Hopper has.
    """
    if strategy not in OWN_GEMM and problem.chip:
        problem = replace(problem, chip=replace(problem.chip, arch=80))

    def made(p: Problem) -> Plan:
        return plan.make_plan(p, strategy, "backward")

    found = made(problem)
    rows = gradient.most_rows(found)
    if rows is None:
        return (Case("", "", {True: found}),)
    large = problem
    while gradient.most_rows(made(large)) is not None:
        large = replace(large, batch=2 * large.batch)
    return (Case(f"_to_{rows}", f"batch <= {rows}", {True: found}), Case("", "", {True: made(large)}))


def _narrow(found: Plan) -> tuple[str, str] | None:
    """A word for the batches that a plan serves, and the condition in C++; None where it serves all."""
    for launch in found.launches:
        tiles = launch.grid
        if launch.function == "small_panel":
            return "_one_tile", f"batch <= {small.TILE_ROWS}"
        if ("Epilogue<>", "gemmnorm::SingleTileEpilogue") in launch.config:  # a block has all rows of its features
            return "_one_tile", f"batch <= {tiles.rows}"
        if ("Epilogue<>", "gemmnorm::SingleWaveEpilogue") in launch.config:  # blocks wait for each other, wave by wave
            count, weight = replace(tiles, limit=0).cpp(), launch.maps[1]
            if tiles.times * weight.rows >= found.problem.out_features:
                few = "" if choose_tile(found.problem).waits else f"batch <= {MOST_ROWS_IN_REGISTERS} && "
                return "_one_wave", f"{few}{count} <= multiprocessors()"
            rows = Extent(1, tiles.rows)
            same = f"{rows.cpp()} == {rows.value(found.problem.batch)}"
            return "_whole_panels", f"{same} && {count} <= multiprocessors()"
    return None
