"""Which strategy serves a problem."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace

from ..errors import GemmNormValueError
from . import cast, gradient, hopper, library, small, split
from .problem import C_TYPES, Problem
from .steps import OWN_GEMM, Plan

STRATEGIES = ("cublas_bn", "cublas_folded_bn", "gemm_stats_apply", "one_kernel", "reference")

_requested: str | None = None


def check_strategy(strategy: str | None) -> str | None:
    """The strategy asked for: the argument, else `set_strategy`'s, else `GEMMNORM_STRATEGY`; None leaves the choice.

    Raises:
        GemmNormValueError: the name is not one of `STRATEGIES`.
    """
    strategy = strategy or _requested or os.environ.get("GEMMNORM_STRATEGY") or None
    if strategy is not None and strategy not in STRATEGIES:
        raise GemmNormValueError(f"strategy: expected None or one of {', '.join(STRATEGIES)}; got {strategy!r}")
    return strategy


def set_strategy(strategy: str | None) -> contextlib.AbstractContextManager[None]:
    """Ask for one strategy in all later calls; None gives the choice back to the planner.

    Takes effect at once. Used as a context manager (`with set_strategy("cublas_bn"): …`) it is undone at the end.
    A strategy that cannot serve a problem is replaced by the planner's choice, which `explain` reports.
    """
    global _requested
    previous = _requested
    if strategy is not None and strategy not in STRATEGIES:
        raise GemmNormValueError(f"strategy: expected None or one of {', '.join(STRATEGIES)}; got {strategy!r}")
    _requested = strategy
    return _restoring(previous)


@contextlib.contextmanager
def _restoring(previous: str | None) -> Iterator[None]:
    global _requested
    try:
        yield
    finally:
        _requested = previous


def applicable(problem: Problem) -> dict[str, str | None]:
    """For every strategy None where it can serve the problem, else the reason why not."""
    chip = problem.chip
    kernels: str | None = None
    if chip is None:
        kernels = "the tensors are not on an NVIDIA GPU that the kernels can run on"
    elif chip.arch < 80:
        kernels = f"compute capability {chip.arch / 10} is below 8.0"
    elif problem.dtype not in C_TYPES or problem.out_dtype not in C_TYPES:
        kernels = f"{problem.dtype} is computed by plain PyTorch ops"
    elif problem.batch == 0 or problem.out_features == 0 or problem.in_features == 0:
        kernels = "there is nothing to compute"
    elif problem.batch > 2**30 or problem.out_features > 2**30:
        kernels = "a dimension is beyond 2³⁰"
    return {
        "cublas_bn": kernels,
        "cublas_folded_bn": kernels,
        "gemm_stats_apply": kernels or hopper.refusal(problem, "gemm_stats_apply"),
        "one_kernel": kernels or hopper.refusal(problem, "one_kernel"),
        "reference": None,
    }


# What the planner prefers, first the best, unless `hopper.better_served` knows better.
_PREFERENCE = ("one_kernel", "cublas_folded_bn", "cublas_bn", "reference")


def preference(problem: Problem, strategy: str | None) -> tuple[str, ...]:
    """The strategies in the order in which they are tried: the one asked for, then the planner's own."""
    better = _better_than_one_kernel(problem)
    return ((strategy,) if strategy else ()) + ((better[0],) if better else ()) + _PREFERENCE


def _better_than_one_kernel(problem: Problem) -> tuple[str, str] | None:
    """What the planner prefers to `one_kernel` where that could serve, and why."""
    if applicable(problem)["one_kernel"]:
        return None
    return (small if small.shape(problem) else hopper).better_served(problem)


def make_plan(problem: Problem, strategy: str | None = None, phase: str = "forward") -> Plan:
    """The plan for `problem`: that of `strategy` where it applies, else the planner's choice, with the reasons."""
    verdicts = applicable(problem)
    chosen = next(name for name in preference(problem, strategy) if verdicts[name] is None)
    better = _better_than_one_kernel(problem)
    passed_over = {**verdicts, **({"one_kernel": better[1]} if better else {})}
    reasons = tuple((name, reason) for name, reason in passed_over.items() if reason is not None and name != chosen)
    if chosen == "reference":
        return Plan(problem, phase, chosen, reasons=reasons)
    own = chosen in OWN_GEMM
    if phase == "forward":
        build = hopper.forward if own else cast.in_front(library.forward)
        if chosen == "one_kernel" and small.shape(problem):
            build = cast.in_front(small.forward)
    else:
        build = split.backward if own else gradient.backward
    return replace(build(problem, chosen), reasons=reasons)


@functools.lru_cache(maxsize=4096)
def cached_plan(problem: Problem, strategy: str | None, phase: str) -> Plan:
    """`make_plan`, remembered."""
    return make_plan(problem, strategy, phase)
