"""Compile the kernels that plans ask for, for every architecture, and fail on a spill. Needs no GPU.

    python -m gemmnorm.runtime.compile_all [--arch 90 …] [--jobs 2] [--quick]

The kernels are not listed anywhere: plans are made for a grid of problems, as the planner would make them for a user,
and their launches are what is compiled. A kernel passes when it compiles, uses no stack and spills no register, which
a kernel that indexes an array at run time or asks for too many resident blocks would, and when the tensor cores'
asynchronous multiplications stay asynchronous.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .. import activations, plan
from ..plan import Launch, Plan, Problem, candidates, gradient, ranks
from ..plan.problem import type_members
from . import driver, sources

ARCHITECTURES = (80, 89, 90, 100, 120)
IN_FULL = (80,)  # the oldest, whose kernels the others share but for Hopper's own
REPRESENTATIVE = "gelu"  # the activation that stands for the others at small sizes

# (x and W, y, bias and scale, BatchNorm): whole model in one type; autocast with a scale; autocast without one;
# a half-precision model whose BatchNorm was kept in float32.
_FORMS = (
    ("T", "T", "T", "T"),
    ("T", "float32", "float32", "float32"),
    ("T", "T", "float32", "float32"),
    ("T", "T", "T", "float32"),
)

# Batches and feature counts that between them lead to every vector width (1 to 8) and every tile (4 to 32 threads).
_BATCHES = (2, 1024, 2048, 4096, 16384, 65536)
_FEATURES = (8192, 4096, 512, 8196, 516, 8194, 514, 8193, 513)
_NARROW = ((16384, 24, 64), (16384, 12, 64), (16384, 6, 64), (16384, 3, 64))
_IN_FEATURES = (64, 101, 8192)
_FEW_INPUTS = (64, 8192)  # that lead to all schedules
# Likewise: one tile of rows by clusters of one, two, four and eight blocks (plan/small.py), gradients of panels by
# clusters of one and of two (plan/gradient.py), and wide tiles of 64, 128 and 256 rows, one for all rows or many.
_SMALL = (
    (100, 512, 32), (100, 512, 192), (100, 512, 1024), (100, 512, 8192), (256, 8192, 8192), (512, 8192, 8192),
    (64, 16384, 4096), (100, 16384, 4096), (256, 16384, 4096), (5000, 2048, 8192), (3000, 200, 8200),
    (3000, 8192, 200),
)  # fmt: skip
# Sizes whose every candidate is compiled, whichever the planner takes: one tile of rows, one wave, many, rows of x and
# of y that are no whole sectors; and activations for which those of a backward that reads the product are: derivatives
# of few, some and many registers.
_EVERY_CANDIDATE = ((100, 8192, 8192), (1024, 8192, 8192), (65536, 64, 8192), (3000, 200, 8200))
_EVERY_BACKWARD = (None, "relu", "silu", "gelu")


@dataclass(frozen=True)
class Kernel:
    """One translation unit: the launch, a problem that asks for it, and the architecture."""

    launch: Launch
    problem: Problem
    arch: int

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={str(value).removeprefix('gemmnorm::')}" for name, value in self.launch.config)
        return f"sm_{self.arch} {self.launch.function}<{constants}> {self.problem.activation or 'identity'}"


@dataclass(frozen=True)
class Outcome:
    """What the compiler said: its report, or the error."""

    kernel: Kernel
    report: dict[str, int]
    error: str = ""

    @property
    def fault(self) -> str:
        """Empty where the kernel is as it should be."""
        spent = {name: value for name, value in self.report.items() if name != "registers" and value}
        return self.error or ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in spent.items())


def dtype_forms() -> Iterator[tuple[str, str, str, str]]:
    """(dtype, out_dtype, linear_dtype, norm_dtype) of the calls that users make."""
    yield ("float32", "float32", "float32", "float32")
    for dtype, form in itertools.product(("bfloat16", "float16"), _FORMS):
        compute, out, linear, norm = (dtype if f == "T" else f for f in form)
        yield (compute, out, linear, norm)


def problems(arch: int, quick: bool = False) -> Iterator[Problem]:
    """The grid: dtypes × sizes × phases × activations.

    Every size for the identity; the widest vectors, which need the most registers, for the activations and for float16,
    whose code is bfloat16's but for the conversions; on most architectures also for forms of which nothing but
    per-feature vectors has another dtype. Those forms of float16 are left out.
    """
    names = [None, *(row.name for row in activations.TABLE)]
    chip, hopper = plan.chip_for(arch), arch == 90
    for (dtype, out, linear, norm), activation in itertools.product(dtype_forms(), names):
        uniform, half = out == linear == norm == dtype, dtype == "float16"
        if (activation is not None and (half or not uniform)) or (half and not uniform and out != "float32"):
            continue
        # One tile of rows (100, 256), one wave of tiles (1024), several: the own product finishes each in its own way.
        # Several are compiled for every activation and form, one wave for every form and some activations, and one
        # tile for the common forms and one activation.
        common = arch in IN_FULL or uniform or out == "float32"
        stands = activation in (None, REPRESENTATIVE) and common
        some = (1024, 16384) if activation in _EVERY_BACKWARD else (16384,)
        few = (100, 256, 1024, 16384, 65536) if hopper and stands else some
        everywhere = activation is None and common and dtype in (("float32",) if quick else ("float32", "bfloat16"))
        # Without a product of its own a plan depends neither on in_features nor on the arithmetic.
        inputs = _IN_FEATURES if everywhere else _FEW_INPUTS if activation is None else _FEW_INPUTS[-1:]
        arithmetics = ("tf32", "float32", "ieee") if hopper else ("ieee",)
        sizes = itertools.product(
            _BATCHES if everywhere else few,
            _FEATURES if everywhere else _FEATURES[:1],
            inputs if hopper else inputs[:1],
        )
        small = _SMALL if hopper and stands and (uniform or not half) else ()
        for batch, features, inner in (*sizes, *small, *(_NARROW if everywhere and arch in IN_FULL else ())):
            if inner % 8 and batch not in few:  # rows that TMA does not take are copied, whatever their number
                continue
            for training, save, arithmetic in itertools.product(
                (True, False), (True, False), arithmetics if dtype == "float32" else ("native",)
            ):
                yield Problem(
                    batch, inner, features, dtype, out, linear, norm, arithmetic,
                    activations.canonical(activation), training, save, True, chip,
                )  # fmt: skip


@functools.cache
def kernels(arch: int, quick: bool = False) -> tuple[Kernel, ...]:
    """Every distinct kernel of every strategy's plans for `arch`, in a fixed order."""
    planned: dict[tuple[object, ...], Kernel] = {}
    for made in itertools.chain(*map(plans, problems(arch, quick)), _exchanges(arch)):
        for launch in made.launches:
            same = replace(launch, grid=plan.Extent(1))
            activation = made.problem.activation if launch.activates else None
            kernel = Kernel(launch, made.problem, arch)
            planned.setdefault((same, tuple(plan.c_types(made.problem).values()), activation), kernel)
    distinct: dict[tuple[object, ...], Kernel] = {}
    for kernel in planned.values():
        distinct.setdefault(_text(kernel), kernel)
    return tuple(distinct.values())


def plans(problem: Problem) -> Iterator[Plan]:
    """Those of all strategies that serve the problem, forward and backward, and of what varies a call besides: of calls
    with statistics over several ranks too, of whose kernels none is special to an activation.

    Of the candidates that the planner does not choose, those of the forms whose vectors have the product's dtype, or
    are autocast's: the others differ in the loads of per-feature vectors alone. Of the activations the identity stands
    for all, but in a backward that reads the product (`_EVERY_BACKWARD`).
    """
    served = [name for name, refusal in plan.applicable(problem).items() if refusal is None and name != "reference"]
    again = replace(problem, keep_product=False)
    backward = served if problem.save else []
    cut = problem.training and problem.activation is None and any(name in ranks.CUT for name in served)
    synchronised = ranks.strategies(problem) if cut else ()
    for strategy in served:
        yield plan.make_plan(problem, strategy)
        if problem.dtype != "float32" == problem.linear_dtype:  # as autocast has it
            for cast in (("x", "weight"), ("weight",)):
                yield plan.make_plan(replace(problem, cast=cast), strategy)
        if problem.split and strategy == "one_kernel" and not problem.training:
            yield from (plan.make_plan(replace(problem, prepared=True), strategy), plan.prepare(problem))
        if strategy in synchronised:
            yield from ranks.forward(problem, strategy, 2)[1:]
    for strategy in backward:
        yield plan.make_plan(problem, strategy, "backward")
        if gradient.refusal_to_recompute(again) is None:
            yield plan.make_plan(again, strategy, "backward")
        if strategy in synchronised:
            yield from ranks.backward(problem, strategy)
    sizes = (problem.batch, problem.in_features, problem.out_features)
    vectors_apart = problem.out_dtype == problem.dtype != problem.norm_dtype
    if sizes in _EVERY_CANDIDATE and problem.dtype != "float16" and not vectors_apart:
        kept = backward and problem.activation in _EVERY_BACKWARD
        every = candidates.candidates(problem, "backward") if kept else ()
        if problem.activation is None:
            every += candidates.candidates(problem) + (candidates.candidates(again, "backward") if backward else ())
        yield from (c.plan() for c in every if c.refusal is None)


def _text(kernel: Kernel) -> tuple[object, ...]:
    """What tells a kernel from others: all of its translation unit that does not follow from the names of files.

    A launch for statistics neither writes y nor reads BatchNorm's vectors: its PTX is the same whatever their types and
    the activation, but for constants that nothing reads.
    """
    launch, problem = kernel.launch, kernel.problem
    if launch.entry == "fused_gemm_statistics":
        problem = replace(problem, activation=None, out_dtype=problem.dtype, norm_dtype=problem.linear_dtype)
        types = dict(type_members(problem))
        launch = replace(launch, config=tuple((name, types.get(name, value)) for name, value in launch.config))
    activation = problem.activation if launch.activates else None
    return launch.source, launch.parts, activation, sources.entry_source(launch, problem)


def _exchanges(arch: int) -> Iterator[Plan]:
    for of_ranks, adds_up in itertools.product((2, 8), (True, False)):
        yield ranks.exchange(plan.chip_for(arch), (1,), 1 << 15, of_ranks, 0, 0, adds_up)


def compile_one(kernel: Kernel) -> Outcome:
    """Compile `kernel`; never raises, so that one failure does not hide the others."""
    try:
        return Outcome(kernel, driver.compile_report(kernel.launch, kernel.problem, kernel.arch))
    except Exception as error:
        return Outcome(kernel, {}, f"{type(error).__name__}: {error}")


def together(chosen: Sequence[Kernel], most: int = 16) -> list[list[Kernel]]:
    """Kernels that can share the reading of the same source files."""
    groups: dict[tuple[object, ...], list[Kernel]] = {}
    for kernel in chosen:
        launch, activation = kernel.launch, kernel.problem.activation if kernel.launch.activates else None
        groups.setdefault((kernel.arch, launch.source, launch.parts, activation), []).append(kernel)
    return [group[i : i + most] for group in groups.values() for i in range(0, len(group), most)]


def compile_group(kernels: Sequence[Kernel]) -> list[Outcome]:
    """Compile kernels that `together` put together; one by one where that fails, to say which it is."""
    try:
        pairs = [(kernel.launch, kernel.problem) for kernel in kernels]
        reports = driver.compile_reports(pairs, kernels[0].arch)
        return [Outcome(kernel, report) for kernel, report in zip(kernels, reports, strict=True)]
    except Exception:
        return [compile_one(kernel) for kernel in kernels]


def _planned(pool: concurrent.futures.Executor, architectures: Sequence[int], quick: bool) -> Iterator[list[Kernel]]:
    """The kernels of each architecture, as they come in; Hopper's first, whose planning takes longest."""
    first = sorted(architectures, key=lambda arch: arch != 90)
    for done in concurrent.futures.as_completed([pool.submit(kernels, arch, quick) for arch in first]):
        yield list(done.result())


def compile_all(pool: concurrent.futures.Executor, planned: Iterable[Sequence[Kernel]]) -> Iterator[Outcome]:
    """The outcome of every kernel, as they come in: those that are planned first compile while others are planned."""
    running = [pool.submit(compile_group, group) for chosen in planned for group in together(chosen)]
    for done in concurrent.futures.as_completed(running):
        yield from done.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gemmnorm.runtime.compile_all", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="compute capability × 10")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--quick", action="store_true", help="float32 in full, half precision at the widest vectors")
    parser.add_argument("--list", action="store_true", help="print the kernels and compile nothing")
    options = parser.parse_args(arguments)
    missing = None if options.list else driver.unavailable()
    if missing is not None:
        print(f"nothing was compiled: {missing}", file=sys.stderr)
        return 2
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        if options.list:
            listed = pool.map(kernels, options.arch, itertools.repeat(options.quick))
            print(*itertools.chain.from_iterable(listed), sep="\n")
            return 0
        return report(options.arch, compile_all(pool, _planned(pool, options.arch, options.quick)))


def report(architectures: Sequence[int], outcomes: Iterable[Outcome]) -> int:
    """Print what comes in; 1 where a kernel has a fault."""
    begun, faults = time.monotonic(), 0
    registers: dict[int, list[int]] = {arch: [] for arch in architectures}
    for count, outcome in enumerate(outcomes, start=1):
        registers[outcome.kernel.arch].append(outcome.report.get("registers", 0))
        if outcome.fault:
            faults += 1
            print(f"FAULT {outcome.kernel}: {outcome.fault}", flush=True)
        if count % 250 == 0:
            print(f"{count} kernels, {time.monotonic() - begun:.0f} s", flush=True)
    for arch, found in registers.items():
        print(f"sm_{arch}: {len(found)} kernels, at most {max(found, default=0)} registers a thread")
    total = sum(map(len, registers.values()))
    print(f"{total} kernels planned and compiled in {time.monotonic() - begun:.0f} s, {faults} with a fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
