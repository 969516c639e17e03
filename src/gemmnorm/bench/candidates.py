"""Timing candidates of the planner beside each other: for `gemmnorm tune`, and what the planner is fitted to.

Every sample is queued behind the emptying of the L2, so that neither the host nor the cache is timed; candidates take
turns, each round begins with another one, and the median counts. What takes more than twice the fastest candidate's
time in each of two rounds is not timed again: a single sample may be far off. Times are microseconds.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..plan import GROUP_ROWS, Problem
from ..plan.candidates import Candidate
from ..runtime import binding, driver, sources
from .timing import FLUSH_BYTES, TRIES

SLOW, LEAST, MOST = 2.0, 3, 9  # times the fastest from where two rounds are enough; rounds of the others
APART = 0.03  # relative, from where two results are not of the same function
ENOUGH = 1e4  # µs of one candidate's samples from where there are no more than `LEAST`
SPIN = 400_000  # clock cycles in front of a round, in which the host gets ahead

Run: TypeAlias = Callable[[], list[Tensor | None]]
Clock: TypeAlias = Callable[[Sequence[Callable[[], object]]], list[float]]  # one sample of each call, in their order


# --- compiling --------------------------------------------------------------------------------------------------------


def units(candidate: Candidate) -> list[str]:
    """The translation units of a candidate's launches."""
    return [sources.translation_unit(launch, candidate.problem) for launch in candidate.plan().launches]


def compile_units(texts: Iterable[str], arch: int) -> dict[str, str]:
    """Compile translation units into the disk cache, in processes beside each other; of those that fail, why."""
    missing = [text for text in dict.fromkeys(texts) if not driver.is_compiled(text, arch)]
    workers = min(len(missing), max(1, (os.cpu_count() or 2) - 1))
    one = functools.partial(_fault, arch)
    if workers < 2:
        said = [one(text) for text in missing]
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            said = list(pool.map(one, missing))
    return {text: why for text, why in zip(missing, said, strict=True) if why}


def _fault(arch: int, text: str) -> str:
    try:
        driver.compile_ahead(text, arch)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:600]}"
    return ""


# --- calls ------------------------------------------------------------------------------------------------------------


def tensors(problem: Problem, phase: str, device: str | torch.device, vectors: bool = True) -> dict[str, Tensor | None]:
    """Random tensors that a call hands in, by role; `vectors`: a bias and a scale too."""
    p = problem
    dtype, y, linear, norm = (getattr(torch, n) for n in (p.dtype, p.out_dtype, p.linear_dtype, p.norm_dtype))

    def random_of(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def vector(dtype: torch.dtype) -> Tensor:
        return torch.rand(p.out_features, device=device, dtype=torch.float32).add_(0.5).to(dtype)

    wide = {name: torch.float32 if name in p.cast else dtype for name in ("x", "weight")}
    given: dict[str, Tensor | None] = {
        "x": random_of(p.batch, p.in_features, dtype=wide["x"]),
        "weight": random_of(p.out_features, p.in_features, dtype=wide["weight"]),
        "num_batches_tracked": torch.zeros((), dtype=torch.int64, device=device) if p.training else None,
        "bias": vector(linear) if vectors else None,
        "scale": vector(linear) if vectors else None,
        **{role: vector(norm) for role in ("running_mean", "running_var", "bn_weight", "bn_bias")},
    }
    if phase == "backward":
        rows = 2 + (-(-p.batch // GROUP_ROWS) if p.training else 0)
        given["grad_y"] = random_of(p.batch, p.out_features, dtype=y)
        given["product"] = random_of(p.batch, p.out_features)
        given["statistics"] = torch.rand(rows, p.out_features, device=device) + 0.5
    return given


def calls(
    chosen: Iterable[Candidate], given: Mapping[str, Tensor | None], skipped: Container[str] = ()
) -> dict[str, Run]:
    """Every candidate by name, its kernels loaded, but those with a translation unit that is `skipped`."""
    made: dict[str, Run] = {}
    for candidate in chosen:
        if not any(text in skipped for text in units(candidate)):
            inputs = tuple(given.get(role) for role in binding.INPUTS[candidate.phase])
            scalars = binding.scalars(candidate.problem, given["scale"], 1.0, 0.1, 1e-5)
            made[candidate.name] = functools.partial(_run, binding.Bound(candidate.plan()), inputs, scalars)
    return made


def _run(bound: binding.Bound, inputs: Sequence[Tensor | None], scalars: tuple[Any, ...]) -> list[Tensor | None]:
    return bound([*inputs], scalars)


def results(outputs: Sequence[Tensor | None]) -> list[Tensor]:
    """What the caller of a forward or a backward gets: y alone, or six gradients where they are wanted."""
    return [t for t in outputs[: 1 if len(outputs) < 6 else 6] if t is not None]


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative distance between the tensors of two candidates' results."""
    pairs = [(a.float(), b.float()) for a, b in zip(found, wanted, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs)


# --- timing -----------------------------------------------------------------------------------------------------------


class QueueClock:
    """Samples behind an emptied L2, many in a queue, so that the host is ahead; those for which it was not, again."""

    def __init__(self, device: str | torch.device = "cuda") -> None:
        self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self._sink = torch.zeros((), dtype=torch.float32, device=device)

    def __call__(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """One sample of each, in this order."""
        found, waiting = [0.0] * len(calls), list(range(len(calls)))
        for _ in range(TRIES):
            taken = self._queued([calls[i] for i in waiting])
            for i, (us, _) in zip(waiting, taken, strict=True):
                found[i] = us
            waiting = [i for i, (_, late) in zip(waiting, taken, strict=True) if late]
            if not waiting:
                break
        return found

    def _queued(self, calls: Sequence[Callable[[], object]]) -> list[tuple[float, bool]]:
        """A sample of each, and whether the device got there before all of the call was queued."""
        torch.cuda._sleep(SPIN)  # type: ignore[no-untyped-call]
        events, late = [], []
        for call in calls:
            self._flush.zero_()
            torch.sum(self._flush, 0, out=self._sink)
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            events.append((begin, end))
            late.append(begin.query())
        torch.cuda.synchronize()
        return [(1e3 * begin.elapsed_time(end), was) for (begin, end), was in zip(events, late, strict=True)]


def sampled(
    calls: Mapping[str, Callable[[], object]], clock: Clock, rounds: int | None = None
) -> dict[str, list[float]]:
    """Samples of the calls, as many as `rounds`, or as their times want it; of what is slow the lesser of two."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    alive, done, wanted = list(calls), 0, rounds or LEAST
    while done < wanted:
        turn = done % len(alive)
        turned = alive[turn:] + alive[:turn]
        for name, taken in zip(turned, clock([calls[name] for name in turned]), strict=True):
            samples[name].append(taken)
        done += 1
        if done == 2 and rounds is None:
            least = {name: min(taken) for name, taken in samples.items()}
            fastest = min(least.values())
            alive = [name for name in calls if least[name] <= SLOW * fastest]
            samples |= {name: [least[name]] for name in calls if name not in alive}
            wanted = max(LEAST, min(MOST, int(ENOUGH / fastest)))
    return samples


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of each call's samples."""
    return {name: round(statistics.median(taken), 2) for name, taken in samples.items()}
