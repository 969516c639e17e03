"""Times every candidate of the planner, on a GPU; what the planner's constants are fitted to (docs/planner.md).

    PYTHONPATH=src python benchmarks/candidates.py --out candidates.json.gz --budget 400

`--add FILE` keeps the rows of an earlier run, and measures problems that it lacks, and those again that have candidates
which it lacks; with `--again` all problems, where a kernel has changed; with `--near gram` those where candidates of
that name compete.
`--list` prints the problems and how many kernels they need, without a GPU. Problems come in the order of their value:
those that TARGETS holds, random ones, then a grid; `--budget` seconds stop the run cleanly and keep what is there.

`gemmnorm.bench.candidates` says how. Results are compared with the first candidate's, so that none is fast by being
wrong.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gemmnorm import plan
from gemmnorm.bench import candidates as timed
from gemmnorm.bench import random_problems
from gemmnorm.plan import Problem, candidates
from gemmnorm.plan.candidates import Candidate
from gemmnorm.runtime import measured, sources

# Name → dtype of the product, of y with and without a scale, of the vectors; arithmetic; which operands are cast.
KINDS = {
    "bf16": ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "native", ()),
    "fp16": ("float16", "float16", "float16", "float16", "native", ()),
    "tf32": ("float32", "float32", "float32", "float32", "tf32", ()),
    "fp32": ("float32", "float32", "float32", "float32", "float32", ()),
    "amp": ("bfloat16", "float32", "bfloat16", "float32", "native", ("x", "weight")),
}
HELD = {  # batch, in_features, out_features, bias and scale, activation
    "kb33": (1024, 8192, 8192, True, None),
    "kb39": (16384, 4096, 4096, True, None),
    "projector": (2048, 2048, 8192, False, "relu"),
    "projector256": (256, 2048, 8192, False, "relu"),
    "mid": (512, 2048, 2048, True, None),
    "v0": (128, 1024, 512, True, None),
}
BROUGHT = (  # sizes that others named
    (65536, 128, 1024), (131072, 64, 64), (59904, 112, 9856), (107008, 256, 1632), (8832, 5656, 4896),
    (776, 3000, 5000), (1032, 4096, 4096), (768, 3072, 5120), (1000, 10000, 1000), (65536, 1024, 1024),
    *((batch, 4096, 4096) for batch in (16, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096)),
)  # fmt: skip
GRID = (
    (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536),
    (64, 256, 512, 1024, 2048, 4096, 8192),
    (64, 128, 256, 512, 1024, 2048, 4096, 8192),
)
PHASES = ((True, "forward"), (False, "forward"), (True, "backward"))  # training or not, and which
MOST_FLOPS = 3e11  # of the grid's problems


@dataclass(frozen=True)
class Case:
    """A problem by name, whether there are a bias and a scale, and whether other groupings of panels are timed too."""

    kind: str
    phase: str
    problem: Problem
    vectors: bool = True
    varied: bool = False

    @property
    def row(self) -> dict[str, Any]:
        p = self.problem
        return {
            "kind": self.kind, "phase": self.phase, "batch": p.batch, "in": p.in_features, "out": p.out_features,
            "training": p.training, "save": p.save, "vectors": self.vectors, "activation": p.activation,
        }  # fmt: skip


def case(
    kind: str, sizes: Sequence[int], training: bool, save: bool, vectors: bool = True, activation: str | None = None,
    phase: str = "forward", varied: bool = False,
) -> Case:  # fmt: skip
    """The problem of a call, as the runtime would describe it on an H200; `on` is for another GPU."""
    dtype, scaled, plain, linear, arithmetic, cast = KINDS[kind]
    problem = Problem(
        *sizes, dtype, scaled if vectors else plain, linear, linear, arithmetic, activation, training, save, vectors,
        plan.CHIPS[90],
    )  # fmt: skip
    if phase == "backward":
        wide = "float32" if cast else dtype
        problem = replace(problem, grad_dtypes=(wide, wide))
    elif sizes[1] % 4 == 0:
        problem = replace(problem, cast=cast)
    return Case(kind, phase, problem, vectors, varied)


def on(chip: plan.Chip, one: Case) -> Case:
    """The case on another GPU."""
    return replace(one, problem=replace(one.problem, chip=chip))


def held() -> Iterator[Case]:
    """The sizes of TARGETS; float16, whose code is bfloat16's, in training alone."""
    for kind, (*sizes, vectors, activation) in itertools.product(KINDS, HELD.values()):
        yield case(kind, sizes, True, False, vectors, activation, varied=kind != "fp16")
        if kind != "fp16":
            yield case(kind, sizes, True, True, vectors, activation)
            yield case(kind, sizes, False, False, vectors, activation, varied=True)
            yield case(kind, sizes, True, True, vectors, activation, "backward")


def drawn(seed: int) -> tuple[int, int, int]:
    """Sizes as people bring them, of other draws than `gemmnorm bench --random` measures."""
    return random_problems.sizes(random.Random(seed))


def brought() -> Iterator[Case]:
    kinds = ("bf16", "tf32", "fp32", "amp")
    for number, sizes in enumerate((*BROUGHT, *(drawn(seed) for seed in range(100, 250)))):
        for kind, training in itertools.product(kinds, (True, False)):
            save, vectors = training and number % 4 == 3, kind == "amp" or number % 3 > 0
            yield case(kind, sizes, training, save, vectors, varied=number % 8 == 0)
        for kind in dict.fromkeys(("bf16", kinds[number % 4])):
            yield case(kind, sizes, True, True, phase="backward")


def middle() -> Iterator[Case]:
    """Training where the product leaves the L2 and K is some hundreds: few of the problems above."""
    every = (drawn(seed) for seed in range(1000, 1500))
    few = [sizes for sizes in every if sizes[0] > 8192 and 192 <= sizes[1] <= 2048 and sizes[2] >= 512]
    for sizes, kind in itertools.product(few, ("bf16", "tf32", "fp32")):
        yield case(kind, sizes, True, False)


def more() -> Iterator[Case]:
    """As people bring them: their rows are often no whole lines or sectors, which those of the grid are."""
    for seed, training in itertools.product(range(2000, 2400), (True, False)):
        yield case("bf16", drawn(seed), training, False)


def grid() -> Iterator[Case]:
    problems = [
        case(kind, sizes, training, False)
        for kind, sizes, training in itertools.product(
            ("bf16", "tf32", "fp32"), itertools.product(*GRID), (True, False)
        )
        if 2 * sizes[0] * sizes[1] * sizes[2] <= MOST_FLOPS and (sizes[0] > 1 or not training)
    ]
    return iter(random.Random(1).sample(problems, len(problems)))


def cases() -> Iterator[Case]:
    """All, the most valuable first; random ones and the grid alternate from where the former begin."""
    yield from held()
    yield from random.Random(0).sample(list(brought()), sum(1 for _ in brought()))
    yield from middle()
    yield from more()
    yield from grid()


def found(one: Case) -> list[Candidate]:
    """The candidates that can serve, `cublas_bn` left out: it differs from `cublas_folded_bn` in arithmetic alone."""
    every = candidates.candidates(one.problem, one.phase)
    if one.phase == "backward":  # and without a kept product
        every += candidates.candidates(replace(one.problem, keep_product=False), one.phase)
    if one.varied:
        every += candidates.with_other_group_panels(one.problem)
    return [c for c in every if c.refusal is None and c.strategy != "cublas_bn"]


# --- measuring --------------------------------------------------------------------------------------------------------


@functools.cache
def _unit(launch: plan.Launch, types: tuple[str, ...], activation: str | None, problem: Problem) -> str:
    return _translation_unit(launch, problem)


_translation_unit = sources.translation_unit
_plain_problems: dict[tuple[object, ...], Problem] = {}


def unit(launch: plan.Launch, problem: Problem) -> str:
    """`sources.translation_unit`, remembered by what the text depends on."""
    same = replace(launch, grid=plan.Extent(1), numbers=(), cooperative=False, cluster=1)
    types = tuple(plan.c_types(problem).values())
    shared = _plain_problems.setdefault((types, problem.activation), problem)
    return _unit(same, types, problem.activation, shared)


def units(chosen: Sequence[Case]) -> list[str]:
    """The translation units of all candidates, in the order of the cases."""
    return list(dict.fromkeys(text for one in chosen for c in found(one) for text in timed.units(c)))


broken: dict[str, str] = {}  # units that do not compile, and why


def bare(one: Case, device: str) -> dict[str, Callable[[], object]]:
    """The products alone, by cuBLAS."""
    p = one.problem
    dtype = getattr(torch, p.dtype)
    x, weight, da = (
        torch.randn(*shape, device=device, dtype=dtype)
        for shape in ((p.batch, p.in_features), (p.out_features, p.in_features), (p.batch, p.out_features))
    )
    if one.phase == "forward":
        return {"GEMM": lambda: torch.mm(x, weight.t(), out=da)}
    return {"GEMM": lambda: (torch.mm(da, weight), torch.mm(da.t(), x))}


def measure(one: Case, clock: timed.Clock, device: str = "cuda") -> dict[str, Any]:
    """The row of a case: its times by candidate."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if one.kind == "tf32" else "none"  # type: ignore[attr-defined]
    torch.manual_seed(0)
    calls = timed.calls(found(one), timed.tensors(one.problem, one.phase, device, one.vectors), broken)
    small = one.problem.batch * one.problem.out_features <= 1 << 22
    wrong = {}
    if small and one.phase == "forward":
        results = {name: timed.results(call()) for name, call in calls.items()}
        wanted = next(iter(results.values()))
        distances = {name: timed.distance(result, wanted) for name, result in results.items()}
        wrong = {name: d for name, d in distances.items() if not d < timed.APART}
    else:
        for call in calls.values():
            call()
    every = {**calls, **bare(one, device)}
    clock(list(every.values())[-1:])
    row = {**one.row, "us": timed.medians(timed.sampled(every, clock))}
    return {**row, "wrong": wrong} if wrong else row


class Watch(threading.Thread):
    """Ends the process where a kernel hangs, and says which case it was."""

    def __init__(self, limit: float) -> None:
        super().__init__(daemon=True)
        self.limit, self.at, self.what = limit, time.monotonic(), ""

    def tell(self, what: str) -> None:
        self.what, self.at = what, time.monotonic()

    def run(self) -> None:
        while time.monotonic() - self.at < self.limit:
            time.sleep(0.5)
        print(f"HANGS: {self.what}", flush=True)
        os._exit(3)


def described(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What was measured in a row, without the figures."""
    return tuple(sorted((key, value) for key, value in row.items() if key not in ("us", "wrong", "sources")))


def chip_of(document: dict[str, Any]) -> plan.Chip:
    """The GPU that a file is of; files that do not say are an H200's."""
    return plan.Chip(**document["chip"]) if "chip" in document else plan.CHIPS[90]


def earlier(path: str) -> list[dict[str, Any]]:
    """The rows of an earlier run, each with the hash of the sources that it measured."""
    with gzip.open(path) as f:
        document = json.load(f)
    return [{"sources": document["sources"], **row} for row in document["rows"]]


def near(name: str, us: dict[str, float]) -> bool:
    """Whether candidates of this name were within a quarter of the fastest."""
    times = {candidate: time for candidate, time in us.items() if candidate != "GEMM"}
    most = 1.25 * min(times.values(), default=0.0)
    return any(name in candidate and time < most for candidate, time in times.items())


def write(path: str, gpu: measured.Gpu, rows: list[dict[str, Any]]) -> None:
    document = {
        "schema": "gemmnorm candidates 1",
        "gpu": gpu.name,
        "chip": asdict(gpu.chip),
        "torch": torch.__version__,
        "sources": sources.source_hash(),
        "command": "python benchmarks/candidates.py",
        "rows": rows,
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    with open(path + ".new", "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as to:
        to.write(text.encode())
    os.replace(path + ".new", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="candidates.json.gz")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds, compiling included")
    parser.add_argument("--only", default="", help="kinds and phases, by commas: bf16,backward or training")
    parser.add_argument("--features", type=int, default=1 << 30, help="problems of no more of them")
    parser.add_argument("--rows", type=int, default=1 << 30, help="likewise")
    parser.add_argument("--add", help="an earlier run's file: measure what it lacks, problems or their candidates")
    parser.add_argument("--again", action="store_true", help="with --add, problems too that lack no candidate")
    parser.add_argument(
        "--near", help="with --add, those whose candidates of this name were within a quarter of the best"
    )
    parser.add_argument("--sizes", nargs="*", default=[], help="16384x4096x4096 …: these alone, forward and backward")
    parser.add_argument("--list", action="store_true", help="print the problems, run nothing")
    options = parser.parse_args()
    begin = time.monotonic()
    sources.translation_unit = unit  # type: ignore[assignment]
    sizes = [tuple(map(int, text.split("x"))) for text in options.sizes]
    asked = (
        case(kind, one, t, phase == "backward", phase=phase, varied=True)
        for one, kind, (t, phase) in itertools.product(sizes, KINDS, PHASES)
    )
    chosen = list(dict.fromkeys(asked if sizes else cases()))
    words = [word for word in options.only.split(",") if word]
    kinds, phases = [w for w in words if w in KINDS], [w for w in words if w in ("forward", "backward")]
    chosen = [c for c in chosen if (not kinds or c.kind in kinds) and (not phases or c.phase in phases)]
    chosen = [c for c in chosen if c.problem.out_features <= options.features and c.problem.batch <= options.rows]
    chosen = [c for c in chosen if "training" not in words or (c.phase == "forward" and c.problem.training)]
    rows = earlier(options.add) if options.add else []
    known = {described(row): row["us"] for row in rows}
    if options.near:
        chosen = [c for c in chosen if near(options.near, known.get(described(c.row), {}))]
    elif options.add and not options.again:
        chosen = [c for c in chosen if any(f.name not in known.get(described(c.row), {}) for f in found(c))]
    if options.list:
        for one in chosen:
            print(one.row, len(found(one)))
        print(
            len(chosen), "problems,", sum(len(found(c)) for c in chosen), "candidates,", len(units(chosen)), "kernels"
        )
        return
    gpu = measured.described(torch.device("cuda", 0))
    chosen = [on(gpu.chip, c) for c in chosen]
    texts = units(chosen)
    print(f"{len(chosen)} problems, {len(texts)} kernels; planned in {time.monotonic() - begin:.0f} s", flush=True)
    broken.update(timed.compile_units(texts, 90))
    print(f"compiled in {time.monotonic() - begin:.0f} s, {len(broken)} faults", flush=True)
    for fault in list(broken.values())[:3]:
        print(fault, flush=True)

    watch, clock, failed, again = Watch(30.0), timed.QueueClock(), 0, {described(row): i for i, row in enumerate(rows)}
    watch.start()
    written = time.monotonic()
    with torch.no_grad():
        for number, one in enumerate(chosen):
            if time.monotonic() - begin > options.budget:
                print(f"the budget ends at problem {number} of {len(chosen)}", flush=True)
                break
            watch.tell(str(one.row))
            try:
                row = measure(one, clock)
            except Exception as error:
                failed += 1
                print(f"FAILED {one.row}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if "CUDA" in str(error) and failed > 3:
                    break
                continue
            if "wrong" in row:
                print("WRONG", row, flush=True)
            place = again.get(described(row))
            rows[len(rows) if place is None else place : None if place is None else place + 1] = [row]
            if number % 250 == 0:
                print(f"{number} problems, {time.monotonic() - begin:.0f} s", flush=True)
            if time.monotonic() - written > 30:
                watch.tell("writing")
                write(options.out, gpu, rows)
                written = time.monotonic()
    watch.tell("writing")
    write(options.out, gpu, rows)
    samples = sum(len(row["us"]) for row in rows)
    print(f"{len(rows)} problems, {samples} times, {failed} failures in {time.monotonic() - begin:.0f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
