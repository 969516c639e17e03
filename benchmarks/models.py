#!/usr/bin/env python3
"""Whole models, each as its users train it: eager, compiled, fused, and fused and compiled.

    PYTHONPATH=src python benchmarks/models.py --json h200-models.json [--only levit,gin] [--budget 200]

A step is `zero_grad`, forward and loss (under autocast where the model's users have it, with a `GradScaler` for
float16), backward and the optimizer. Per model and way:

- `wall_ms`: of a step among many in a row, host and all, between two synchronisations. What a user waits for.
- `device_ms`: CUDA events around one step, the L2 flushed, the host hidden behind queued work as far as 20 ms go. Where
  the step itself waits for the device (`GradScaler` does) host time remains in it.
- `peak_mb`, `kept_mb`: memory above that before the step, with no gradients there: at most, and after the forward.
- `error`: output and gradients of the first step against float64, relative, each as one vector, dropout switched off;
  `deviation`: of the fused ones from eager's.
- `chains`, `calls`, `compiled`: what `fuse_report(model, calls=True)` says after all.

Each model has a process of its own. All compile beside each other; then one after the other is timed. A model whose
package is missing is skipped with a line. On a CPU, and with `--tiny`, everything runs in this process, one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from subjects import MODELS, Subject
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import gemmnorm
from gemmnorm.bench import timing
from gemmnorm.bench.documents import Document, new_document, write_json
from gemmnorm.bench.environment import default_device, environment, package_version
from gemmnorm.runtime.sources import source_hash
from gemmnorm.userfiles import without_dropout

WAYS = ("eager", "compiled", "fused", "fused and compiled")
PACKAGES = ("timm", "torch-geometric", "torchvision")
PREPARING = 0.6  # of the budget may go into compiling
GRADIENT_SCALE = 1024.0  # so low that no step overflows and is skipped


# --- a model in four ways ---------------------------------------------------------------------------------------------


@dataclass
class Options:
    """`seconds`: of sampling, a clock. `compile_by`: no compilation lasts longer than this `time.time()`. `tf32`: for
    float32 products, which is for others to decide than for convolutions."""

    device: str
    tiny: bool = False
    compile: bool = True
    seconds: float = 1.5
    compile_by: float = float("inf")
    tf32: bool = False


@dataclass
class Way:
    """A copy of a model with an optimizer of its own; `module` is the copy, `call` that or it compiled."""

    name: str
    module: nn.Module
    call: Callable[..., Any]
    scaler: torch.amp.GradScaler
    step: Callable[[], object]


@dataclass
class Trained:
    """One model: made, compared, then timed."""

    name: str
    options: Options
    ways: list[Way] = field(default_factory=list)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        if self.options.tf32:
            torch.set_float32_matmul_precision("high")
        self.subject = MODELS[self.name](self.options.tiny)
        self.device = torch.device(self.options.device)
        self.subject.model.to(self.device)
        self.subject.inputs = tree_map(lambda x: x.to(self.device), self.subject.inputs)

    def add(self, name: str) -> None:
        """The way called `name`, and its first step; `failed` has the reason where that raises or takes too long."""
        module = copy.deepcopy(self.subject.model)
        module = gemmnorm.fuse(module) if "fused" in name else module
        call: Any = torch.compile(module) if "compiled" in name else module
        half = self.subject.dtype is torch.float16
        scaler = torch.amp.GradScaler(
            self.device.type, init_scale=GRADIENT_SCALE, growth_interval=10**9, enabled=half
        )  # fmt: skip
        way = Way(name, module, call, scaler, self.step(module, call, scaler))
        left = max(self.options.compile_by - time.time(), 1.0)
        try:
            with timing.deadline(left if left < 1e6 else None):
                way.step()
        except (Exception, timing.TookTooLong) as error:  # a way that fails is a result, not the end of the run
            self.failed[name] = timing.reason(error)
        else:
            self.ways.append(way)

    def forward(self, call: Callable[..., Any]) -> Tensor:
        """The loss."""
        with torch.autocast(self.device.type, self.subject.dtype, enabled=self.subject.dtype is not None):
            return self.subject.loss(call(*self.subject.inputs))

    def step(self, module: nn.Module, call: Callable[..., Any], scaler: torch.amp.GradScaler) -> Callable[[], object]:
        """One step of training."""
        optimizer = self.subject.optimizer(module.parameters())

        def run() -> None:
            optimizer.zero_grad()
            scaler.scale(self.forward(call)).backward()
            scaler.step(optimizer)
            scaler.update()

        return run

    # --- is it right?

    def compare(self) -> None:
        """Errors of eager's and the fused output and gradients against float64, and of fused against eager."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        with without_dropout():
            found["eager"] = self.results(copy.deepcopy(self.subject.model))
            found["fused"] = self.results(gemmnorm.fuse(copy.deepcopy(self.subject.model)))
            with wide(self.subject):
                exact = self.results(copy.deepcopy(self.subject.model).double())
        self.errors = {name: apart(values, exact) for name, values in found.items()}
        self.errors["deviation"] = apart(found["fused"], found["eager"])

    def results(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """The loss's input and its gradient by all parameters, each as one vector in float64."""
        outputs: list[Tensor] = []

        def call(*inputs: Any) -> Any:
            y = module(*inputs)
            outputs.extend(y if isinstance(y, tuple) else [y])
            return y

        (self.forward(call) * GRADIENT_SCALE).backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return one_vector(outputs), one_vector(gradients)

    # --- how long?

    def measure(self) -> list[dict[str, Any]]:
        """A row for each way that ran."""
        on_gpu = self.device.type == "cuda"
        clocks = {"wall": InARow(self.device) if on_gpu else timing.WallClock()}
        clocks |= {"device": timing.CudaClock(self.device)} if on_gpu else {}
        times = {}
        for key, clock in clocks.items():
            variants = [timing.Variant(way.name, way.step) for way in self.ways]
            times[key] = timing.interleave(variants, clock, budget_s=self.options.seconds, min_samples=3)
            self.failed |= times[key].failed
        rows = []
        for way in self.ways:
            row: dict[str, Any] = {
                "model": self.name,
                "batch": self.subject.batch,
                "dtype": self.dtype,
                "way": way.name,
            }
            for key, found in times.items():
                if way.name in found.ran:
                    ran = found.ran[way.name]
                    peers = [peer for peer in WAYS[:2] if peer != way.name]
                    row |= {f"{key}_ms": ran.ms, f"{key}_iqr": ran.iqr, f"{key}_samples": ran.samples}
                    row[f"{key}_verdicts"] = found.against(way.name, peers)
            row |= self.memory(way) if on_gpu else {"peak_mb": None, "kept_mb": None}
            row["overflowed"] = way.scaler.get_scale() < GRADIENT_SCALE and way.scaler.is_enabled()  # skipped a step
            row["error"] = self.errors.get(way.name)
            row["deviation"] = self.errors.get("deviation") if way.name == "fused" else None
            rows.append(row | calls_of(way.module))
        return rows

    @property
    def dtype(self) -> str:
        float32 = "TF32" if self.options.tf32 else "float32"
        return float32 if self.subject.dtype is None else f"{self.subject.dtype} autocast".removeprefix("torch.")

    def memory(self, way: Way) -> dict[str, float]:
        """The highest that a step takes above what was there, and what a forward leaves for its backward. MB."""
        way.module.zero_grad()
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        loss = self.forward(way.call)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - start
        loss.backward()
        del loss
        way.module.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        way.step()
        torch.cuda.synchronize()
        return {"peak_mb": (torch.cuda.max_memory_allocated() - start) / 1e6, "kept_mb": kept / 1e6}


class InARow(timing.CudaClock):
    """The wall clock of a step among many in a row, host and all."""

    ROW_S = 0.1

    def prepare(self, variant: timing.Variant) -> None:
        """How many make a row of a tenth of a second."""
        self.steps = {**getattr(self, "steps", {}), variant.name: 3}
        ms = self.start(variant)()
        self.steps[variant.name] = max(3, min(200, int(self.ROW_S * 1e3 / ms)))

    def start(self, variant: timing.Variant) -> Callable[[], float]:
        """Milliseconds of one."""
        steps = self.steps[variant.name]
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            variant.run()
        self.synchronize()
        taken = (time.perf_counter() - begin) * 1e3 / steps
        return lambda: taken


@contextlib.contextmanager
def wide(subject: Subject) -> Iterator[None]:
    """`subject` in float64, without autocast."""
    inputs, dtype = subject.inputs, subject.dtype
    subject.inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    subject.dtype = None
    try:
        yield
    finally:
        subject.inputs, subject.dtype = inputs, dtype


def one_vector(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def apart(found: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Relative distance of output and gradient."""
    names = ("output", "gradient")
    return {n: float((a - b).norm() / b.norm()) for n, a, b in zip(names, found, other, strict=True)}


def calls_of(module: nn.Module) -> dict[str, Any]:
    """How many chains are fused, and how their calls went."""
    found = [match.calls for match in gemmnorm.fuse_report(module, calls=True).matches if match.calls is not None]
    unfused: dict[str, int] = {}
    for calls in found:
        for reason, count in calls.unfused.items():
            unfused[reason] = unfused.get(reason, 0) + count
    traced = {calls.compiled for calls in found if calls.compiled}
    fused = sum(calls.fused for calls in found)
    return {"chains": len(found), "calls": {"fused": fused, "unfused": unfused}, "compiled": sorted(traced)}


# --- all of them ------------------------------------------------------------------------------------------------------


def prepared(name: str, options: Options) -> Trained:
    """The model, each way's first step behind it."""
    trained = Trained(name, options)
    try:
        trained.compare()
    except Exception as error:  # no memory for float64
        trained.failed["float64"] = timing.reason(error)
    torch.cuda.empty_cache()  # the other processes want some
    for way in ("eager", "fused", "compiled", "fused and compiled") if options.compile else ("eager", "fused"):
        trained.add(way)
    trained.ways.sort(key=lambda way: WAYS.index(way.name))
    return trained


def compile_ahead(name: str, options: Options) -> None:
    """What takes longest, for the caches on disk, while `child` is about the other ways."""
    with contextlib.suppress(Exception):
        Trained(name, options).add("fused and compiled")


def child(name: str, options: Options, parent: Connection) -> None:
    """Prepare, say so, wait for the word, measure, send the rows."""
    try:
        trained = prepared(name, options)
        parent.send("ready")
        parent.recv()
        parent.send((trained.measure(), trained.failed))
    except Exception as error:  # a missing package, out of memory
        parent.send(([], {"all": timing.reason(error)}))


@dataclass
class Run:
    """All models, into one document."""

    names: Sequence[str]
    options: Options
    budget: float
    path: Path | None
    console: Console
    begun: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        device = torch.device(self.options.device)
        self.document: Document = new_document(
            "models", command="benchmarks/models.py", source_hash=source_hash(),
            environment=environment(device) | {name: package_version(name) for name in PACKAGES}, rows=[], skipped={},
        )  # fmt: skip

    def tell(self, words: str) -> None:
        self.console.print(f"{time.time() - self.begun:6.1f} s  {words}", highlight=False, markup=False)

    def keep(self, name: str, rows: list[dict[str, Any]], failed: dict[str, str]) -> None:
        """Write a model's rows, so that a run cut short leaves what it had."""
        self.document["rows"] += rows
        for way, why in failed.items():
            self.document["skipped"][f"{name}, {way}"] = why
            self.tell(f"{name}, {way}: {why}")
        if rows:
            self.tell(f"{name} timed")
        if self.path is not None:
            write_json(self.path, self.document)

    def here(self) -> None:
        """One by one, in this process."""
        for name in self.names:
            try:
                trained = prepared(name, self.options)
                self.keep(name, trained.measure(), trained.failed)
            except Exception as error:  # a missing package
                self.keep(name, [], {"all": timing.reason(error)})
            torch._dynamo.reset()

    def in_processes(self) -> None:
        """Prepared beside each other, timed one after the other."""
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each process
        spawn = multiprocessing.get_context("spawn")
        self.options.compile_by = self.begun + PREPARING * self.budget
        ahead = [spawn.Process(target=compile_ahead, args=(n, self.options), daemon=False) for n in self.names]
        children: dict[Any, tuple[str, Any]] = {}
        for name in self.names:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=child, args=(name, self.options, theirs))
            process.start()
            theirs.close()
            children[ours] = (name, process)
        for process in ahead if self.options.compile else ():
            process.start()
        ready: list[Any] = []
        while len(ready) < len(children) and (left := self.options.compile_by + 15 - time.time()) > 0:
            for ours in wait([c for c in children if c not in ready], timeout=left):
                ready.append(ours)
        for process in ahead:
            if process.pid is not None and process.is_alive():
                process.kill()
        for ours, (name, process) in children.items():
            self.keep(name, *self.answer(ours) if ours in ready else ([], {"all": "not compiled in time"}))
            process.kill()  # which has said what it had to
            process.join()

    def answer(self, ours: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Of a child that has something to say: that it is ready, then its rows; or why there are none."""
        try:
            found = ours.recv()
            if found == "ready":
                if time.time() - self.begun > self.budget:
                    return [], {"all": "no time left"}
                ours.send("go")
                found = ours.recv()
            return found  # type: ignore[no-any-return]
        except EOFError:
            return [], {"all": "its process died"}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each model and one for each way."""
    out = Table("", box=None, pad_edge=False)
    for title in ("wall ms", "× eager", "device ms", "× eager", "peak MB", "kept MB", "calls", "output", "gradient"):
        out.add_column(title, justify="right", no_wrap=True)
    eager = {row["model"]: row for row in rows if row["way"] == "eager"}
    for row in rows:
        base = eager.get(row["model"], {})
        if row is base:
            out.add_row(f"{row['model']}: {row['batch']}, {row['dtype']}", style="bold")
        cells: list[str] = []
        for key in ("wall_ms", "device_ms"):
            ratio = row[key] / base[key] if row.get(key) and base.get(key) else None
            cells += [number(row.get(key), 3), number(ratio, 2)]
        error = row["error"] or {}
        cells += [number(row["peak_mb"], 0), number(row["kept_mb"], 0), calls_in_words(row)]
        out.add_row(f"  {row['way']}", *cells, *(f"{value:.1e}" for value in error.values()))
    out.caption = "peak, kept: memory above the start; output, gradient: relative error against float64"
    return out


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def calls_in_words(row: dict[str, Any]) -> str:
    """Fused calls of all; or what the compiled graph holds."""
    if row["compiled"]:
        return ", ".join(row["compiled"])
    fused, unfused = row["calls"]["fused"], sum(row["calls"]["unfused"].values())
    return f"{fused} of {fused + unfused}" if row["chains"] else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help=f"of {','.join(MODELS)}")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds in all")
    parser.add_argument("--seconds", type=float, default=1.2, help="of sampling, for each model and clock")
    parser.add_argument("--no-compile", action="store_true", help="eager and fused alone")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: does it run?")
    parser.add_argument("--tf32", action="store_true", help='set_float32_matmul_precision("high")')
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    names = given.only.split(",") if given.only else list(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"no such model: {', '.join(unknown)}")
    device = default_device(given.device)
    options = Options(str(device), given.tiny, not given.no_compile, given.seconds, tf32=given.tf32)
    console = Console(width=None if sys.stdout.isatty() else 140)
    run = Run(names, options, given.budget, given.json, console)
    run.in_processes() if device.type == "cuda" and not given.tiny else run.here()
    console.print(table(run.document["rows"]))
    return 0 if run.document["rows"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
