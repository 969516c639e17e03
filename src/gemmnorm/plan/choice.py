"""Which strategy serves a problem."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..errors import GemmNormRuntimeError, GemmNormValueError
from . import cublas, gradient, tables
from .candidates import Candidate, candidates, with_other_group_panels
from .gemm import Gemm, refusal
from .gradient import Backward
from .problem import C_TYPES, Chip, Problem
from .steps import OWN_GEMM, Plan

STRATEGIES = ("cublas_bn", "cublas_folded_bn", "gemm_stats_apply", "one_kernel", "reference")

_requested: str | None = None
_keep_product: bool | None = None
_KEEP = {"": None, "auto": None, "1": True, "0": False}  # values of GEMMNORM_KEEP_PRODUCT


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

    Takes effect at once; used as a context manager it is undone at the end. A strategy that cannot serve a problem is
    replaced by the planner's choice, which `explain` reports.

    Args:
        strategy: one of `gemmnorm.plan.STRATEGIES`, or None.

    Raises:
        GemmNormValueError: there is no such strategy.

    Examples:
        >>> with gemmnorm.set_strategy("cublas_bn"):
        ...     y = model(torch.randn(32, 128))
    """
    global _requested
    previous = _requested
    if strategy is not None and strategy not in STRATEGIES:
        raise GemmNormValueError(f"strategy: expected None or one of {', '.join(STRATEGIES)}; got {strategy!r}")
    _requested = strategy
    return _restoring("_requested", previous)


@contextlib.contextmanager
def _restoring(name: str, previous: object) -> Iterator[None]:
    """At the end of the block the module's variable `name` is what it was."""
    try:
        yield
    finally:
        globals()[name] = previous


def parse_keep_product(value: bool | str) -> bool | None:
    """None for "auto".

    Raises:
        GemmNormValueError: it is neither that nor True or False.
    """
    if isinstance(value, bool) or value == "auto":
        return None if value == "auto" else bool(value)
    raise GemmNormValueError(f'keep_product: expected "auto", True or False; got {value!r}')


def check_keep_product(wanted: bool | None) -> bool | None:
    """What is asked for: the argument, else `set_keep_product`'s, else `GEMMNORM_KEEP_PRODUCT`; None leaves the choice.

    Raises:
        GemmNormValueError: the variable is not 0, 1 or auto.
    """
    if wanted is None:
        wanted = _keep_product
    if wanted is None:
        value = os.environ.get("GEMMNORM_KEEP_PRODUCT", "")
        if value not in _KEEP:
            raise GemmNormValueError(f"GEMMNORM_KEEP_PRODUCT: expected 0, 1 or auto; got {value!r}")
        wanted = _KEEP[value]
    return wanted


def set_keep_product(value: bool | str) -> contextlib.AbstractContextManager[None]:
    """Whether all later calls that leave it open keep the product for their backward; "auto" leaves it to the planner.

    False saves memory of y's size for each call: the backward multiplies again, where it can. Takes effect at once, and
    is undone at the end of a `with` block, like `set_strategy`.

    Args:
        value: True, False or "auto".

    Raises:
        GemmNormValueError: it is none of these.

    Examples:
        >>> with gemmnorm.set_keep_product(False):
        ...     y = model(torch.randn(32, 128))
    """
    global _keep_product
    previous, _keep_product = _keep_product, parse_keep_product(value)
    return _restoring("_keep_product", previous)


def why_no_kernels(problem: Problem) -> str | None:
    """Why plain PyTorch ops run, whatever the strategy; None where kernels can serve."""
    chip = problem.chip
    if chip is None:
        return "the tensors are not on an NVIDIA GPU that the kernels can run on"
    if chip.arch < 80:
        return f"compute capability {chip.arch / 10} is below 8.0"
    if problem.dtype not in C_TYPES or problem.out_dtype not in C_TYPES:
        return f"{problem.dtype} is computed by plain PyTorch ops"
    if problem.batch == 0 or problem.out_features == 0 or problem.in_features == 0:
        return "there is nothing to compute"
    if problem.batch > 2**30 or problem.out_features > 2**30:
        return "a dimension is beyond 2³⁰"
    return None


def applicable(problem: Problem) -> dict[str, str | None]:
    """For every strategy None where it can serve the problem, else the reason why not."""
    none_serve = why_no_kernels(problem)
    return {
        "cublas_bn": none_serve or cublas.refusal(problem),
        "cublas_folded_bn": none_serve or cublas.refusal(problem),
        "gemm_stats_apply": none_serve or refusal(problem, "gemm_stats_apply"),
        "one_kernel": none_serve or refusal(problem, "one_kernel"),
        "reference": None,
    }


_forced: Callable[[Candidate], bool] | None = None


@contextlib.contextmanager
def forcing(wanted: Callable[[Candidate], bool]) -> Iterator[None]:
    """Choose among the candidates that `wanted` names, wherever any of those can serve: for tests and measurements."""
    global _forced
    previous = _forced
    _forced = wanted if previous is None else lambda c: previous(c) and wanted(c)
    _forget()
    try:
        yield
    finally:
        _forced = previous
        _forget()


def _forget() -> None:
    cached_plan.cache_clear()
    _keeping_is_faster.cache_clear()


def set_measured_here(chip: Chip, lines: Mapping[tuple[str, ...], str]) -> None:
    """From now on these candidates, by `tables.key_here`, are the choices on `chip`, before those of the files.

    Calls that have a plan keep it until the runtime forgets them.
    """
    tables.here[chip] = dict(lines)
    _forget()


def measured_here(made: Plan) -> bool:
    """Whether `made` is what was measured to be the best on this machine."""
    known = tables.measured_here(made.problem, made.phase)
    if known is None or not made.steps:
        return False
    chosen = ranking(replace(made.problem, copied=()), made.phase, made.strategy)[0][1]
    return known == chosen.listed and chosen.plan().steps == made.steps


def ranking(
    problem: Problem, phase: str = "forward", strategy: str | None = None, *, shipped: bool = False
) -> list[tuple[float, Candidate]]:
    """The candidates that can serve, of one strategy or of all, with their predicted µs: the best first.

    The measured best of an exceptional problem comes first of all, whatever is predicted (docs/planner.md); `shipped`:
    as if nothing had been measured on this machine.
    """
    every = [c for c in candidates(problem, phase) if c.refusal is None]
    if phase == "backward":  # the same for every strategy, but that split operands belong to the own product
        own = strategy in OWN_GEMM
        every = [
            replace(c, strategy=strategy or c.strategy)
            for c in every
            if own or not (isinstance(c.variant, Backward) and c.variant.split_products)
        ]
    elif strategy == "gemm_stats_apply" and not problem.training:  # without statistics it is `fused_gemm` alone
        every = [replace(c, strategy=strategy) for c in every if isinstance(c.variant, Gemm)]
    elif strategy is not None:
        every = [c for c in every if c.strategy == strategy]
    if _forced is not None:
        every = [c for c in every if _forced(c)] or every
    # `cublas_bn` comes last, whatever it costs: it serves where it is asked for.
    ranked = sorted(((c.cost(), c) for c in every), key=lambda pair: (pair[1].strategy == "cublas_bn", pair[0]))
    known = _forced is None and tables.measured_best(problem, phase, shipped)
    if known:
        more = (c for c in with_other_group_panels(problem) if strategy in (None, c.strategy))
        best = [c for c in (*(c for _, c in ranked), *more) if c.listed == known]
        ranked = [(c.cost(), c) for c in best] + [pair for pair in ranked if pair[1] not in best]
    return ranked


def preference(problem: Problem, strategy: str | None) -> tuple[str, ...]:
    """The strategies in the order in which they are tried: the one asked for, then the planner's own."""
    if why_no_kernels(problem):
        return ("reference",)
    best_first = dict.fromkeys(candidate.strategy for _, candidate in ranking(problem))
    return (*((strategy,) if strategy else ()), *best_first, "reference")


def decide_keep_product(problem: Problem, strategy: str | None, wanted: bool | None = None) -> bool:
    """Whether a forward that saves for a backward keeps the product, or the backward multiplies again.

    `wanted`: True or False; None for what is predicted to take less time, forward and backward together. The product is
    kept wherever it cannot be multiplied again.
    """
    refused = gradient.refusal_to_recompute(problem) or why_no_kernels(problem)
    if not problem.save or refused is not None or strategy == "reference":
        return True
    return _keeping_is_faster(problem, strategy) if wanted is None else wanted


@functools.lru_cache(maxsize=4096)
def _keeping_is_faster(problem: Problem, strategy: str | None) -> bool:
    def step(keep_product: bool) -> float:  # not by what was measured here: that holds for what this decides
        p = replace(problem, keep_product=keep_product)
        us, chosen = ranking(p, "forward", strategy, shipped=True)[0]
        return us + ranking(p, "backward", chosen.strategy, shipped=True)[0][0]

    return step(True) <= step(False)


def make_plan(problem: Problem, strategy: str | None = None, phase: str = "forward") -> Plan:
    """The plan for `problem`: that of `strategy` where it applies, else the planner's choice, with the reasons.

    A backward's `strategy` is the one that its forward has run by, and says where the product's offset lies.

    Raises:
        GemmNormRuntimeError: no candidate of the strategy can serve: a backward is to multiply again and cannot.
    """
    verdicts = applicable(problem)
    refused = {name: reason for name, reason in verdicts.items() if reason is not None}
    kernels = why_no_kernels(problem) is None
    of_forward = phase == "backward" and kernels
    if strategy is None or (strategy in refused and not of_forward):
        ranked = ranking(problem) if kernels else []
        chosen = ranked[0][1].strategy if ranked else "reference"
        if strategy is None and phase == "forward":
            times = {c.strategy: us for us, c in reversed(ranked)}
            refused |= {name: f"predicted to take {us:.1f} µs" for name, us in times.items() if name in OWN_GEMM}
    else:
        chosen = strategy
    reasons = tuple((name, reason) for name, reason in refused.items() if name != chosen)
    if chosen == "reference":
        return Plan(problem, phase, chosen, reasons=reasons)
    serving = ranking(problem, phase, chosen)
    if not serving:
        why = dict.fromkeys(c.refusal for c in candidates(problem, phase) if c.refusal is not None)
        raise GemmNormRuntimeError(f"{chosen}: no candidate can serve this {phase}: {'; '.join(why)}")
    return replace(serving[0][1].plan(), reasons=reasons)


@functools.lru_cache(maxsize=4096)
def cached_plan(problem: Problem, strategy: str | None, phase: str) -> Plan:
    """`make_plan`, remembered."""
    return make_plan(problem, strategy, phase)
