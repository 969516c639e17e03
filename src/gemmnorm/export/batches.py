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
from ..plan.candidates import Candidate
from ..plan.gradient import Backward
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
    """The plans of both modes and directions: for batches like `problem`'s, and where those serve few, for every other.

    In evaluation a GEMM of our own keeps nothing for a backward; where gradients are wanted the file then runs the
    original modules.
    """
    saves_in_evaluation = strategy not in OWN_GEMM
    forward, backward = {}, {}
    for training in (True, False):
        mode = replace(problem, training=training)
        forward[training] = _forward_cases(mode, strategy, saves=training or saves_in_evaluation)
        if training or saves_in_evaluation:
            backward[training] = _backward_cases(replace(mode, save=True), strategy)
    return Site(suffix, forward, backward)


LARGE = 1 << 20  # rows: the plan for so many is the one for any batch, `small_panel` in evaluation too


def _forward_cases(problem: Problem, strategy: str, saves: bool) -> tuple[Case, ...]:
    """One case where the problem's plan serves every batch; else its own, then that of a batch large enough for all.

    A file without a GEMM of our own is for other GPUs too, so it uses nothing that only Hopper has.
    """
    if strategy not in OWN_GEMM and problem.chip:
        problem = replace(problem, chip=replace(problem.chip, arch=80))

    def plans(p: Problem) -> dict[bool, Plan]:  # of one candidate: what is kept for a backward changes no kernel
        _, chosen = plan.ranking(replace(p, save=saves), "forward", strategy)[0]
        of_both = {save: replace(chosen, problem=replace(chosen.problem, save=save)) for save in (False, saves)}
        return {save: candidate.plan() for save, candidate in of_both.items()}

    found = plans(problem)
    few = _few_batches(found[False])
    if few is None:
        return (Case("", "", found),)
    large = problem
    while _few_batches(plans(large)[False]) is not None and large.batch < LARGE:
        large = replace(large, batch=2 * large.batch)
    general = plans(large)
    if general[False].launches == found[False].launches:
        return (Case("", "", found),)
    return (Case(*few, found), Case("_any_batch", "", general))


PAYS = 0.97  # of the time by three launches, from where a backward in one launch is worth its kernel in the file


def _backward_cases(problem: Problem, strategy: str) -> tuple[Case, ...]:
    """Three launches serve every batch. Where the problem's own plan wins enough it stands before them."""
    if strategy not in OWN_GEMM and problem.chip:
        problem = replace(problem, chip=replace(problem.chip, arch=80))
    own = plan.make_plan(problem, strategy, "backward")
    splits = any(launch.function == "split_gemm" for launch in own.launches)
    general = Candidate(problem, "backward", own.strategy, Backward("three launches", splits)).plan()
    if len(own.launches) == len(general.launches) or own.seconds > PAYS * general.seconds:
        return (Case("", "", {True: general}),)
    rows = gradient.most_rows(own) or problem.batch
    return (Case(f"_to_{rows}", f"batch <= {rows}", {True: own}), Case("_any_batch", "", {True: general}))


def _few_tiles(problem: Problem) -> tuple[str, str]:
    """`_few_batches` of `small_panel`, whose cluster has all tiles of a batch in training; in evaluation it serves more
    than it is taken for.
    """
    tiles = small.row_tiles(problem)
    if tiles == 1 or not problem.training:
        return "_one_tile" if tiles == 1 else "_few_tiles", f"batch <= {small.TILE_ROWS * tiles}"
    return "_few_tiles", f"{Extent(1, small.TILE_ROWS).cpp()} == {tiles}"


def _few_batches(found: Plan) -> tuple[str, str] | None:
    """A word for the batches that a plan serves, and the condition in C++; None where it serves all."""
    for launch in found.launches:
        tiles = launch.grid
        if launch.function == "small_panel":
            return _few_tiles(found.problem)
        if ("Epilogue<>", "gemmnorm::SingleTileEpilogue") in launch.config:  # a block has all rows of its features
            return "_one_tile", f"batch <= {tiles.rows}"
        if ("Epilogue<>", "gemmnorm::CoResidentEpilogue") in launch.config:  # all tiles of a panel run at the same time
            rows = Extent(1, tiles.rows)
            blocks = replace(tiles, limit=0).value(found.problem.batch)
            return "_one_wave", f"{rows.cpp()} == {rows.value(found.problem.batch)} && {blocks} <= multiprocessors()"
    return None
