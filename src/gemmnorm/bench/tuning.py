"""The best candidate of each problem on this very GPU, and the table of those that beat the planner's choice.

Two rounds: all candidates beside each other, then the planner's choice beside the fastest few, with as many samples as
`verdicts` needs to tell them apart. Only what is faster by `GAIN`, for certain, makes a line of the table
(`runtime.measured`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from .. import plan
from ..errors import GemmNormRuntimeError
from ..plan import Problem, choice, tables
from ..plan.candidates import Candidate, with_other_group_panels
from ..runtime import call, measured
from . import candidates as timed
from .candidates import Clock, Run
from .cases import tf32
from .documents import Document, write_json
from .environment import current
from .timing import reason
from .verdicts import MARGIN, judge

GAIN = 1 + MARGIN  # times as fast as the planner's choice, from where a candidate takes its place
FINALISTS = 3  # candidates that are timed again, beside the planner's choice
ROUNDS = 30  # samples of each of them


def phases(problem: Problem) -> Iterator[tuple[Problem, str]]:
    """What calls like a forward's `problem` pose: evaluation; or training, with and without a backward, and that."""
    plain = replace(problem, save=False, keep_product=True)
    yield plain, "forward"
    if problem.training:
        saving = replace(plain, save=True)
        saving = replace(saving, keep_product=plan.decide_keep_product(saving, None, plan.check_keep_product(None)))
        yield saving, "forward"
        dtypes = ["float32" if name in problem.cast else problem.dtype for name in ("x", "weight")]
        yield replace(saving, cast=(), grad_dtypes=tuple(dtypes)), "backward"


def listed(problem: Problem, phase: str, strategy: str | None) -> list[Candidate]:
    """All that can serve, the planner's choice first; `cublas_bn` only where it is asked for."""
    ranked = [c for _, c in plan.ranking(problem, phase, strategy, shipped=True) if c.strategy != "cublas_bn"]
    more = [c for c in with_other_group_panels(problem) if c.refusal is None] if phase == "forward" else []
    return list({c.name: c for c in (*ranked, *more)}.values())


def tune(
    problems: Iterable[Problem],
    device: torch.device,
    clock: Clock,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[Document]:
    """Measure forward and backward of each distinct problem; a row for each, as it is done.

    A row has `title` and `phase`; `chosen` and `best` with their `chosen_us` and `best_us`; `candidates`, how many were
    timed; `failed`, those that do not run and why, and `wrong`, those that compute something else; and for the table
    `key`, and `line`, the name or None.
    """
    known: dict[tuple[str, ...], Document] = {}
    for problem in problems:
        strategy = None
        for asked, phase in phases(problem):
            key = tables.key_here(asked, phase)
            if key not in known:
                title = f"{asked.batch} × {asked.in_features} → {asked.out_features}, {_kind(asked)}"
                named = {"title": title, "phase": phase_name(asked, phase), "key": list(key)}
                tell(f"{title}, {named['phase']}")
                with current(device):
                    known[key] = named | measure(asked, phase, strategy, device, clock)
                yield known[key]
            strategy = known[key]["strategy"]  # a backward is of the forward that runs


def _kind(problem: Problem) -> str:
    words = [problem.dtype] + ([problem.arithmetic] if problem.arithmetic in ("tf32", "ieee") else [])
    return ", ".join(words + ([f"{' and '.join(problem.cast)} cast"] if problem.cast else []))


def phase_name(problem: Problem, phase: str) -> str:
    """In a word or two."""
    if phase == "backward":
        return "backward"
    return "training, saving" if problem.save else "training" if problem.training else "evaluation"


@torch.no_grad()
def measure(problem: Problem, phase: str, strategy: str | None, device: torch.device, clock: Clock) -> Document:
    """The best candidate of one problem beside the planner's choice."""
    every = {c.name: c for c in listed(problem, phase, strategy)}
    assert problem.chip is not None
    texts = (text for candidate in every.values() for text in timed.units(candidate))
    faults = timed.compile_units(texts, problem.chip.arch)
    given = timed.tensors(problem, phase, device, problem.scaled)
    calls: dict[str, Run] = {}
    failed: dict[str, str] = {}
    with tf32(problem.arithmetic == "tf32"):
        for name, candidate in every.items():
            try:
                broken = [faults[text] for text in timed.units(candidate) if text in faults]
                if broken:
                    raise GemmNormRuntimeError(broken[0])
                made = timed.calls([candidate], given)
                made[name]()
            except Exception as error:  # on a GPU that nobody has tried it on; the others are timed all the same
                failed[name] = reason(error)
            else:
                calls |= made
        if not calls:
            raise GemmNormRuntimeError(f"no candidate runs: {next(iter(failed.values()), 'there is none')}")
        row = _compared(calls, clock)
    best = every[row["best"]]
    kept = row["best"] == next(iter(every))  # what the planner takes; where that does not run, the best of the others
    line = None if kept else best.listed
    return {**row, "line": line, "strategy": strategy or best.strategy, "candidates": len(calls), "failed": failed}


def _compared(calls: Mapping[str, Run], clock: Clock) -> Document:
    """The first of the calls, and the fastest that is faster for certain and computes the same; else the first."""
    chosen = next(iter(calls))
    wanted, wrong, finalists = timed.results(calls[chosen]()), {}, [chosen]
    screened = timed.medians(timed.sampled(calls, clock))
    for name in sorted(screened, key=screened.__getitem__):
        if screened[name] >= screened[chosen] or len(finalists) > FINALISTS:
            break
        far = timed.distance(timed.results(calls[name]()), wanted)
        if far < timed.APART:
            finalists.append(name)
        else:
            wrong[name] = far
    samples = timed.sampled({name: calls[name] for name in finalists}, clock, ROUNDS)
    us = timed.medians(samples)
    best = min(us, key=us.__getitem__)
    verdict = judge(samples[best], samples[chosen])
    if verdict is None or verdict.low <= 1 or verdict.ratio < GAIN:
        best = chosen
    return {"chosen": chosen, "chosen_us": us[chosen], "best": best, "best_us": us[best], "wrong": wrong}


def store_measured(rows: Iterable[Document], gpu: measured.Gpu) -> None:
    """Put what was measured into the GPU's table, in the place of what that had for the same problems, and use it.

    Raises:
        OSError: the file cannot be written.
    """
    lines = measured.read(gpu)
    for row in rows:
        lines.pop(tuple(row["key"]), None)
        if row["line"] is not None:
            lines[tuple(row["key"])] = row["line"]
    path = measured.path(gpu)
    if lines or path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, measured.document(gpu, lines))
    choice.set_measured_here(gpu.chip, lines)
    call.forget()
