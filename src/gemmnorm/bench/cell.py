"""Measuring one cell of a suite: every strategy, eager and torch.compile side by side, as rows of a result file.

A cell (case, precision, autocast, phase) is timed in one process: the bare GEMM, the eager chain, `torch.compile` of it
and every strategy that applies, interleaved (`timing.interleave`). Each strategy gives one row; what it shares with
the other rows of its cell, the peers' times, is repeated in it, so that a row can be read alone. First the cell is
prepared (`Bench.prepare`), which may happen beside other work, then measured (`Bench.measure`), which may not.

The floor `gemm_ms` is the fastest of `F.linear` with and without bias and `torch.mm` over torch's BLAS backends: one
product for a forward, and the two gradient products as well for forward and backward. `bound_ms` is the roofline: the
larger of FLOPs and compulsory bytes, over what a large GEMM and a copy reach on this device in this run.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemmnorm

from .. import plan
from ..errors import GemmNormWarning
from ..runtime.call import recording
from . import accuracy, cases, timing
from .cases import Cell, Prepared
from .roofline import bound_ms, ceilings, work
from .timing import CudaClock, Timings, Variant

SUSTAINED = ("kb33", "kb39")  # long enough, and in bf16 hot enough, for the clocks to fall
PEERS = ("eager", "compile", "eager_graphed")  # variants that the planner's choice is judged against
_NOT_OF_COMPILE = ("compile_host_us", "compile_activation_bytes")
Tell = Callable[[str], None]


@dataclass
class Options:
    """How much to measure.

    Attributes:
        budget_s: sampling time of one cell; the warm-up comes on top.
        compile: time `torch.compile` as well.
        compile_limit_s: give its compilation up after this long.
        strategies: only these; None for every strategy that applies (the reference only where nothing else does).
        extras: also measure graph replay, host time, sustained time and memory, and take the kernels' spans.
        only_chosen: time the planner's choice alone.
    """

    budget_s: float = 1.5
    compile: bool = True
    compile_limit_s: float = 180.0
    strategies: Sequence[str] | None = None
    extras: bool = True
    only_chosen: bool = False


@dataclass
class CellResult:
    """The rows of a cell, the strategies that have none with the reason, and whatever else went otherwise."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    not_applicable: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def floor_variants(cell: Cell, prepared: Prepared) -> list[Variant]:
    """The bare GEMMs of a cell, every way torch has of computing them."""
    device = prepared.x.device
    dtype = cases.DTYPES[cell.precision]
    x, g = prepared.x.detach().to(dtype), prepared.g.to(dtype)
    weight = prepared.eager.gemm.weight.detach().to(dtype)
    bias = None if prepared.eager.gemm.bias is None else prepared.eager.gemm.bias.detach().to(dtype)
    forms: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: F.linear(x, weight),
        "mm": lambda: torch.mm(x, weight.t()),
    }
    if bias is not None:
        forms["linear with bias"] = lambda: F.linear(x, weight, bias)

    def three(product: Callable[[], Tensor]) -> Callable[[], object]:
        if cell.phase != "train_fwd_bwd":
            return product
        return lambda: (product(), torch.mm(g, weight), torch.mm(g.t(), x))

    backends: tuple[str | None, ...] = (None,)
    if device.type == "cuda" and hasattr(torch.backends.cuda, "preferred_blas_library"):
        backends = ("cublas", "cublaslt")
    return [
        Variant(f"gemm {form} {backend or ''}".strip(), three(run), lambda b=backend: cases.blas_backend(b))  # type: ignore[misc]
        for backend in backends
        for form, run in forms.items()
    ]


def package_module(cell: Cell, eager: nn.Module) -> gemmnorm.LinearScaleBatchNorm1d:
    """The fused module with the eager chain's weights, loaded through its `state_dict`: the keys must agree."""
    case = cell.case
    module = gemmnorm.LinearScaleBatchNorm1d(
        case.in_features, case.out_features, bias=case.bias, scale=case.scale, activation=case.activation
    )
    weight = next(eager.parameters())
    module = module.to(device=weight.device, dtype=weight.dtype)
    module.load_state_dict(eager.state_dict())
    return module.train(eager.training)


class Bench:
    """Runs cells on one device.

    Args:
        device: where everything runs.
        options: how much to measure.
        tell: told in a few words what is being done.
    """

    def __init__(self, device: torch.device, options: Options, tell: Tell = lambda _: None) -> None:
        self.device = device
        self.options = options
        self.tell = tell
        self.clock = timing.clock_for(device)
        self.ceilings: dict[str, Any] = {}

    def measure_ceilings(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Measure the ceilings for the precisions that `cells` use."""
        self.tell("ceilings: a copy and a large GEMM")
        self.ceilings = ceilings(self.device, self.clock, list(dict.fromkeys(c.precision for c in cells)))
        return self.ceilings

    def prepare(self, cell: Cell) -> Ready:
        """Make what is timed, and call it once. Nothing is timed here, and others may use the device."""
        prepared = cases.prepare(cell, self.device)
        with cases.conditions(cell):
            return CellRun(self, cell, prepared, package_module(cell, prepared.eager)).get_ready()

    def measure(self, ready: Ready) -> CellResult:
        """Measure a prepared cell, alone on the device."""
        with cases.conditions(ready.run.cell):
            ready.run.measure(ready)
        return ready.run.result


@dataclass
class Ready:
    """A cell whose variants have run once: kernels are compiled and loaded, the libraries have their workspaces.

    Attributes:
        chosen: what the planner makes of the cell when nobody asks for a strategy.
        strategies: those that are timed; each is a variant of its name.
        variants: the peers and the strategies; `floors`: the bare GEMMs.
        failed: by name, why a variant's or strategy's first call failed; it is not timed.
    """

    run: CellRun
    chosen: plan.Plan
    strategies: list[str]
    floors: list[Variant]
    variants: list[Variant]
    failed: dict[str, str]


@dataclass
class CellRun:
    """One cell being measured: its tensors, the fused module with the eager chain's weights, and the result so far."""

    bench: Bench
    cell: Cell
    prepared: Prepared
    module: nn.Module
    result: CellResult = field(default_factory=CellResult)

    def leave_out(self, strategy: str, why: str) -> None:
        """There is no row for this strategy, and this is the reason."""
        self.result.not_applicable.append({**_conditions(self.cell), "strategy": strategy, "reason": why})

    def did_not_run(self, name: str, why: str) -> None:
        """A note on a variant without a time."""
        self.result.notes.append(f"{self.cell}: {name} did not run: {why}")

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        """A forward under the cell's autocast, entered for this call alone."""
        with cases.autocast(self.cell, self.bench.device):
            y: Tensor = module(x)
        return y

    def step(self, module: nn.Module) -> Callable[[], object]:
        """What is timed: the forward, and in `train_fwd_bwd` the gradients of x and of every parameter."""
        x = self.prepared.x
        if self.cell.phase != "train_fwd_bwd":
            return lambda: self.forward(module, x)
        inputs = [x, *module.parameters()]
        return lambda: torch.autograd.grad(self.forward(module, x), inputs, self.prepared.g)

    def chosen_plan(self) -> plan.Plan:
        """What the planner makes of the cell when nobody asks for a strategy."""
        with gemmnorm.set_strategy(None), recording() as plans:
            self.forward(copy.deepcopy(self.module), self.prepared.x)
        return plans[0]

    def predicted_ms(self, chosen: plan.Plan) -> float | None:
        """The planner's time for its choice; None for plain ops, and with a backward, which has a plan of its own."""
        return 1e3 * chosen.seconds if chosen.seconds and self.cell.phase != "train_fwd_bwd" else None

    def get_ready(self) -> Ready:
        """Call every strategy, peer and bare GEMM once; what fails is left out.

        Eager in a CUDA graph is not called: its kernels are eager's, and a graph would hold memory from here on.
        """
        self.bench.tell("first calls")
        chosen = self.chosen_plan()
        failed = _overtaken(chosen)
        strategies = list(self._able(chosen, failed))
        ready = Ready(self, chosen, strategies, floor_variants(self.cell, self.prepared), [], failed)
        ready.variants = [*self.peers(), *self.fused(strategies)]
        for variant in (*ready.floors, *ready.variants):
            if variant.name not in ("eager_graphed", *strategies):
                why = timing.warm_up(replace(variant, warmup=1), self.bench.clock, timed=False)
                if why is not None:
                    failed[variant.name] = why
                    self.did_not_run(variant.name, why)
        ready.floors = [v for v in ready.floors if v.name not in failed]
        ready.variants = [v for v in ready.variants if v.name not in failed]
        return ready

    def _able(self, chosen: plan.Plan, failed: dict[str, str]) -> Iterator[str]:
        """The strategies that are asked for, apply and run; the others are left out, and in `failed` if they apply."""
        options = self.bench.options
        asked = [chosen.strategy] if options.only_chosen else options.strategies
        able, refused = cases.strategies_to_run(plan.applicable(chosen.problem), asked)
        for strategy, why in refused.items():
            self.leave_out(strategy, why)
        for strategy in able:
            wrong = self.first_call(strategy)
            if wrong is None:
                yield strategy
            else:
                failed[strategy] = wrong
                self.leave_out(strategy, f"failed: {wrong}")

    def first_call(self, strategy: str) -> str | None:
        """None, or the reason why this strategy cannot run.

        A kernel that fails to compile or load makes the package fall back on another strategy, with a warning the first
        time. That must not be timed under the strategy's name, so it is an error here.
        """
        try:
            with gemmnorm.set_strategy(strategy), recording() as plans, warnings.catch_warnings():
                warnings.simplefilter("error", GemmNormWarning)
                self.step(copy.deepcopy(self.module))()
                self.bench.clock.synchronize()
        except Exception as error:  # a strategy that fails is a result, not the end of the run
            return timing.reason(error)
        return next((f"{p.strategy} ran in its place" for p in plans if p.strategy != strategy), None)

    def measure(self, ready: Ready) -> None:
        """Time the peers and the strategies, and add a row for each strategy that ran."""
        chosen = ready.chosen
        errors = self.errors(ready.strategies)
        strategies = [s for s in ready.strategies if s in errors]
        lost = {*ready.strategies} - {*strategies}
        floors = self._fastest_floors(ready.floors)
        variants = {v.name: v for v in (*floors, *ready.variants) if v.name not in lost}
        budget_s, tell = self.bench.options.budget_s, self.bench.tell
        decide = [(s, peer) for s in strategies for peer in PEERS if s == chosen.strategy and peer in variants]
        times = timing.interleave(
            list(variants.values()), self.bench.clock, budget_s=budget_s, on_progress=tell, decide=decide
        )
        for name, why in times.failed.items():
            self.did_not_run(name, why)
        shared = {**self._shared(times, [v.name for v in floors], variants), "eager_error": errors.get("eager")}
        for strategy in strategies:
            if strategy not in times.ran:
                self.leave_out(strategy, f"failed: {times.failed[strategy]}")
                continue
            found = times.ran[strategy]
            row = {**_conditions(self.cell), "arithmetic": chosen.problem.arithmetic, "strategy": strategy}
            row.update(chosen=strategy == chosen.strategy, **shared)
            row.update(predicted_ms=self.predicted_ms(chosen) if strategy == chosen.strategy else None)
            row.update(ms=found.ms, ms_iqr=found.iqr, samples=found.samples, error=errors.get(strategy))
            row.update(disturbed=found.disturbed, verdicts=times.against(strategy, PEERS))
            row.update(prepared_ms=times.ms("prepared") if strategy == "one_kernel" else None)
            row.update(self._extras(variants[strategy], self.module, ""), kernels=None)
            self.result.rows.append(row)

    def errors(self, strategies: Sequence[str]) -> dict[str, float | None]:
        """Errors against float64 of eager and of every strategy; a strategy that does not run is left out."""
        self.bench.tell("errors against float64")
        cell, prepared = self.cell, self.prepared
        golden = accuracy.golden(prepared, cell)
        errors: dict[str, float | None] = {"eager": None}
        if golden is not None:
            errors["eager"] = accuracy.error_of(prepared.eager, self.forward, prepared, cell, golden)
        for strategy in strategies:
            try:
                with gemmnorm.set_strategy(strategy):
                    errors[strategy] = accuracy.error_of(self.module, self.forward, prepared, cell, golden)
            except Exception as error:  # as in `first_call`
                self.leave_out(strategy, f"failed: {timing.reason(error)}")
        return errors

    def _fastest_floors(self, variants: list[Variant]) -> list[Variant]:
        """The two fastest of the floor's many forms, which then take part in the main rounds."""
        self.bench.tell("the bare GEMM, every way")
        budget_s = 0.2 * self.bench.options.budget_s
        times = timing.interleave(variants, self.bench.clock, budget_s=budget_s, min_samples=3)
        order = sorted((v for v in variants if v.name in times.ran), key=lambda v: times.ran[v.name].ms)
        return order[:2]

    def peers(self) -> Iterator[Variant]:
        """Eager, torch.compile of it, on a GPU eager in a CUDA graph, and for float32 eager in TF32."""
        eager, options = self.prepared.eager, self.bench.options
        yield Variant("eager", self.step(copy.deepcopy(eager)))
        if options.compile:
            yield Variant("compile", self.step(self.compiled()), limit_s=options.compile_limit_s)
        if self.bench.device.type == "cuda":
            yield Variant("eager_graphed", timing.graphed(self.step(copy.deepcopy(eager)), self.bench.device))
        if self.cell.precision == "fp32" and self.bench.device.type == "cuda":
            yield Variant("eager_tf32", self.step(copy.deepcopy(eager)), lambda: cases.tf32(True))

    def compiled(self) -> nn.Module:
        """The eager chain by torch.compile, for these sizes."""
        torch._dynamo.reset()
        return cast(nn.Module, torch.compile(copy.deepcopy(self.prepared.eager), dynamic=False))

    def fused(self, strategies: Sequence[str]) -> Iterator[Variant]:
        """Every strategy, and `one_kernel` with prepared weights where those serve."""
        step = self.step(self.module)
        for strategy in strategies:
            yield Variant(strategy, step, lambda s=strategy: gemmnorm.set_strategy(s))  # type: ignore[misc]
        if self.cell.precision == "fp32" and self.cell.phase == "eval_fwd" and "one_kernel" in strategies:
            ready = gemmnorm.prepare(copy.deepcopy(self.module))
            yield Variant("prepared", self.step(ready), lambda: gemmnorm.set_strategy("one_kernel"))

    def _shared(self, times: Timings, floors: Sequence[str], variants: dict[str, Variant]) -> dict[str, Any]:
        """What all rows of a cell have in common."""
        flops, moved = work(self.cell)
        shared: dict[str, Any] = {
            "gemm_ms": times.fastest(floors),
            "eager_ms": times.ms("eager"),
            "compile_ms": times.ms("compile"),
            "eager_graphed_ms": times.ms("eager_graphed"),
            "eager_tf32_ms": times.ms("eager_tf32"),
            "flops": flops,
            "bytes": moved,
            "bound_ms": bound_ms(self.cell, self.bench.ceilings),
        }
        floor = min((n for n in floors if n in times.ran), key=lambda n: times.ran[n].ms, default=None)
        shared["gemm_form"] = floor
        for name in ("eager", "compile"):
            usable = variants[name] if name in times.ran else None
            extras = self._extras(usable, self.prepared.eager, f"{name}_")
            shared.update({k: v for k, v in extras.items() if k not in _NOT_OF_COMPILE})
        shared["gemm_sustained_ms"] = None
        if floor is not None and self._is_sustained():
            shared["gemm_sustained_ms"] = self._extra(variants[floor], timing.sustained_ms)
        return shared

    def _is_sustained(self) -> bool:
        cell, bench = self.cell, self.bench
        hot = cell.case.name in SUSTAINED and cell.precision == "bf16" and not cell.autocast
        return hot and bench.options.extras and isinstance(bench.clock, CudaClock)

    def _extra(self, variant: Variant, measure: Callable[[Callable[[], object], CudaClock], float]) -> float | None:
        """One further figure of a variant that ran; None where it cannot be had (a graph that will not be captured)."""
        clock = self.bench.clock
        assert isinstance(clock, CudaClock)
        try:
            with variant.around():
                return measure(variant.run, clock)
        except Exception as error:
            self.bench.tell(f"{variant.name}: {timing.reason(error)}")
            torch.cuda.synchronize(self.bench.device)
            return None

    def _extras(self, variant: Variant | None, module: nn.Module, prefix: str) -> dict[str, Any]:
        """graph_us, host_us, sustained_ms and activation bytes, the keys beginning with `prefix`; None if not measured.

        graph_us in the forward phases of small cases, host_us and memory with gradients, sustained_ms in bf16 of
        kb33 and kb39.
        """
        memory = f"{prefix or 'peak_'}activation_bytes"
        names = (f"{prefix}graph_us", f"{prefix}host_us", f"{prefix}sustained_ms", memory)
        found: dict[str, Any] = dict.fromkeys(names)
        if variant is None or not self.bench.options.extras:
            return found
        self.bench.tell(f"{variant.name}: graph, host and memory")
        x, backward = self.prepared.x, self.cell.phase == "train_fwd_bwd"
        if isinstance(self.bench.clock, CudaClock):
            if self.cell.case.small and not backward:
                found[f"{prefix}graph_us"] = self._extra(variant, timing.graph_microseconds)
            if backward and prefix != "compile_":
                once = Variant(variant.name, lambda: self.forward(module, x), variant.around)
                found[f"{prefix}host_us"] = self._extra(once, timing.host_microseconds)
            if self._is_sustained():
                found[f"{prefix}sustained_ms"] = self._extra(variant, timing.sustained_ms)
        if backward and prefix != "compile_":
            known = [x, *module.parameters(), *module.buffers()]
            with variant.around():
                found[memory] = timing.activation_bytes(lambda: self.forward(module, x), known)
        return found


def _overtaken(chosen: plan.Plan) -> dict[str, str]:
    """The strategies that the planner prefers to the one that ran, which therefore do not compile or load."""
    with gemmnorm.set_strategy(None):
        order = plan.preference(chosen.problem, plan.check_strategy(None))
    verdicts = plan.applicable(chosen.problem)
    better = order[: order.index(chosen.strategy)]
    return {s: f"{chosen.strategy} ran in its place" for s in better if verdicts[s] is None}


def _conditions(cell: Cell) -> dict[str, Any]:
    """The part of a row that says what was asked for."""
    case = cell.case
    return {
        "case": case.name,
        "batch": case.batch,
        "in_features": case.in_features,
        "out_features": case.out_features,
        "bias": case.bias,
        "scale": case.scale,
        "activation": case.activation,
        "precision": cell.precision,
        "param_dtype": str(cell.param_dtype).removeprefix("torch."),
        "autocast": cell.autocast,
        "grad": cell.phase == "train_fwd_bwd",
        "phase": cell.phase,
    }
