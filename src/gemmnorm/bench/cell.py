"""Measuring one cell of a suite: every strategy, eager and torch.compile side by side, as rows of a result file.

A cell (case, precision, autocast, phase) is timed in one process: the bare GEMM, the eager chain, `torch.compile` of it
and every strategy that applies, interleaved (`timing.interleave`). Each strategy gives one row; what it shares with
the other rows of its cell, the peers' times, is repeated in it, so that a row can be read alone.

The floor `gemm_ms` is the fastest of `F.linear` with and without bias and `torch.mm` over torch's BLAS backends: one
product for a forward, and the two gradient products as well for forward and backward. `bound_ms` is the roofline: the
larger of FLOPs and compulsory bytes, over what a large GEMM and a copy reach on this device in this run.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from .timing import CudaClock, Timings, Variant, WallClock

SUSTAINED = ("kb33", "kb39")  # long enough, and in bf16 hot enough, for the clocks to fall
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
        extras: also measure graph replay, host time, sustained time and memory.
    """

    budget_s: float = 1.5
    compile: bool = True
    compile_limit_s: float = 180.0
    strategies: Sequence[str] | None = None
    extras: bool = True


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


def work(cell: Cell) -> tuple[float, float]:
    """FLOPs of the GEMMs, and the bytes that must move at least: each operand and result once per GEMM.

    Forward: x and W in, y out. A backward adds: the product a written and read, g in, x and W once more, their
    gradients out.
    """
    case = cell.case
    size = cases.DTYPES[cell.precision].itemsize
    outer = cell.param_dtype.itemsize  # under autocast x, W and their gradients are float32 in memory
    x, w, y = case.batch * case.in_features, case.in_features * case.out_features, case.batch * case.out_features
    flops = 2.0 * x * case.out_features
    moved = outer * (x + w) + (outer if case.scale else size) * y
    if cell.phase == "train_fwd_bwd":
        flops *= 3
        moved += 2 * outer * (x + w) + size * 2 * y + (outer if case.scale else size) * y
    return flops, float(moved)


def ceilings(device: torch.device, clock: WallClock | CudaClock, precisions: Sequence[str]) -> dict[str, Any]:
    """What this device reaches now: copy rate in GB/s counting both ways, and TFLOP/s of a large GEMM per precision."""
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 768
    count = (2**30 if on_gpu else 2**26) // 4
    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    variants = [Variant("copy", lambda: target.copy_(source))]
    for precision in precisions:
        a, b = (torch.randn(n, n, device=device).to(cases.DTYPES[precision]) for _ in range(2))
        variants.append(
            Variant(precision, lambda a=a, b=b: torch.mm(a, b.t()), lambda p=precision: cases.tf32(p == "tf32"))  # type: ignore[misc]
        )
    done = timing.interleave(variants, clock, budget_s=1.0 if on_gpu else 0.3, min_samples=3)
    copy_ms = done.ms("copy")
    return {
        "copy_gb_per_s": None if copy_ms is None else 8 * count / copy_ms / 1e6,
        "tflops": {p: None if done.ms(p) is None else 2.0 * n**3 / done.ran[p].ms / 1e9 for p in precisions},
        "gemm_size": n,
    }


def bound_ms(cell: Cell, found: dict[str, Any]) -> float | None:
    """The roofline under the measured ceilings, ms."""
    flops, moved = work(cell)
    rate, peak = found.get("copy_gb_per_s"), found.get("tflops", {}).get(cell.precision)
    if not rate or not peak:
        return None
    return float(max(flops / peak / 1e9, moved / rate / 1e6))


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

    def run_cell(self, cell: Cell) -> CellResult:
        """Measure one cell."""
        prepared = cases.prepare(cell, self.device)
        result = CellResult()
        with cases.conditions(cell):
            module = package_module(cell, prepared.eager)
            chosen = self._plan(cell, module, prepared)
            verdicts = plan.applicable(chosen.problem)
            able = self._wanted(verdicts, cell, result)
            self._measure(cell, prepared, module, able, chosen, result)
        return result

    def _plan(self, cell: Cell, module: nn.Module, prepared: Prepared) -> plan.Plan:
        """What the planner makes of the cell when nobody asks for a strategy."""
        with gemmnorm.set_strategy(None), recording() as plans:
            self._forward(cell)(copy.deepcopy(module), prepared.x)
        return plans[0]

    def _wanted(self, verdicts: dict[str, str | None], cell: Cell, result: CellResult) -> list[str]:
        """The strategies to run; those that do not apply go to `not_applicable`."""
        asked = self.options.strategies
        for strategy, why in verdicts.items():
            if why is not None and (asked is None or strategy in asked):
                result.not_applicable.append({**_conditions(cell), "strategy": strategy, "reason": why})
        able = [s for s, why in verdicts.items() if why is None]
        if asked is not None:
            return [s for s in able if s in asked]
        return [s for s in able if s != "reference"] or able

    def _forward(self, cell: Cell) -> accuracy.Forward:
        def forward(module: nn.Module, x: Tensor) -> Tensor:
            with cases.autocast(cell, self.device):
                y: Tensor = module(x)
            return y

        return forward

    def _run(self, cell: Cell, module: nn.Module, prepared: Prepared) -> Callable[[], object]:
        forward, x = self._forward(cell), prepared.x
        if cell.phase != "train_fwd_bwd":
            return lambda: forward(module, x)
        inputs = [x, *module.parameters()]
        return lambda: torch.autograd.grad(forward(module, x), inputs, prepared.g)

    def _measure(
        self,
        cell: Cell,
        prepared: Prepared,
        module: nn.Module,
        able: Sequence[str],
        chosen: plan.Plan,
        result: CellResult,
    ) -> None:
        options = self.options
        errors = self._errors(cell, prepared, module, able, result)
        strategies = [s for s in able if s in errors]
        floors = self._fastest_floors(floor_variants(cell, prepared))
        variants = [*floors, Variant("eager", self._run(cell, copy.deepcopy(prepared.eager), prepared))]
        if options.compile:
            torch._dynamo.reset()
            compiled = cast(nn.Module, torch.compile(copy.deepcopy(prepared.eager), dynamic=False))
            run = self._run(cell, compiled, prepared)
            variants.append(Variant("compile", run, limit_s=options.compile_limit_s))
        if cell.precision == "fp32" and self.device.type == "cuda":
            run = self._run(cell, copy.deepcopy(prepared.eager), prepared)
            variants.append(Variant("eager_tf32", run, lambda: cases.tf32(True)))
        run = self._run(cell, module, prepared)
        variants += [Variant(s, run, lambda s=s: gemmnorm.set_strategy(s)) for s in strategies]  # type: ignore[misc]
        if cell.precision == "fp32" and cell.phase == "eval_fwd" and "one_kernel" in strategies:
            ready = gemmnorm.prepare(copy.deepcopy(module))
            run = self._run(cell, ready, prepared)
            variants.append(Variant("prepared", run, lambda: gemmnorm.set_strategy("one_kernel")))
        times = timing.interleave(variants, self.clock, budget_s=options.budget_s, on_progress=self.tell)
        result.notes += [f"{cell}: {name} did not run: {why}" for name, why in times.failed.items()]
        by_name = {v.name: v for v in variants}
        shared = self._shared(cell, prepared, times, [v.name for v in floors], by_name)
        shared["eager_error"] = errors.get("eager")
        for strategy in strategies:
            if strategy not in times.ran:
                result.not_applicable.append(
                    {**_conditions(cell), "strategy": strategy, "reason": f"failed: {times.failed[strategy]}"}
                )
                continue
            own = times.ran[strategy]
            row = {**_conditions(cell), "arithmetic": chosen.problem.arithmetic, "strategy": strategy}
            row.update(chosen=strategy == chosen.strategy, **shared)
            row.update(ms=own.ms, ms_iqr=own.iqr, samples=own.samples, error=errors.get(strategy))
            row.update(prepared_ms=times.ms("prepared") if strategy == "one_kernel" else None)
            row.update(self._extras(cell, prepared, by_name[strategy], module, ""))
            result.rows.append(row)

    def _errors(
        self, cell: Cell, prepared: Prepared, module: nn.Module, strategies: Sequence[str], result: CellResult
    ) -> dict[str, float | None]:
        """Errors against float64 of eager and of every strategy; a strategy that does not run is left out.

        The first call of a strategy happens here. A kernel that fails to compile or load makes the package fall back
        on plain ops with a warning; that must not be timed under the strategy's name, so the warning is an error here.
        """
        self.tell("errors against float64")
        forward = self._forward(cell)
        golden = accuracy.golden(prepared, cell)
        errors: dict[str, float | None] = {"eager": None}
        if golden is not None:
            errors["eager"] = accuracy.error_of(prepared.eager, forward, prepared, cell, golden)
        for strategy in strategies:
            try:
                with gemmnorm.set_strategy(strategy), warnings.catch_warnings():
                    warnings.simplefilter("error", GemmNormWarning)
                    errors[strategy] = accuracy.error_of(module, forward, prepared, cell, golden)
            except Exception as error:  # a strategy that fails is a result, not the end of the run
                why = f"failed: {timing.reason(error)}"
                result.not_applicable.append({**_conditions(cell), "strategy": strategy, "reason": why})
        return errors

    def _fastest_floors(self, variants: list[Variant]) -> list[Variant]:
        """The two fastest of the floor's many forms, which then take part in the main rounds."""
        self.tell("the bare GEMM, every way")
        times = timing.interleave(variants, self.clock, budget_s=0.2 * self.options.budget_s, min_samples=3)
        order = sorted((v for v in variants if v.name in times.ran), key=lambda v: times.ran[v.name].ms)
        return order[:2]

    def _shared(
        self, cell: Cell, prepared: Prepared, times: Timings, floors: Sequence[str], by_name: dict[str, Variant]
    ) -> dict[str, Any]:
        """What all rows of a cell have in common."""
        flops, moved = work(cell)
        shared: dict[str, Any] = {
            "gemm_ms": times.fastest(floors),
            "eager_ms": times.ms("eager"),
            "compile_ms": times.ms("compile"),
            "eager_tf32_ms": times.ms("eager_tf32"),
            "flops": flops,
            "bytes": moved,
            "bound_ms": bound_ms(cell, self.ceilings),
        }
        floor = min((n for n in floors if n in times.ran), key=lambda n: times.ran[n].ms, default=None)
        shared["gemm_form"] = floor
        for name in ("eager", "compile"):
            usable = by_name[name] if name in times.ran else None
            extras = self._extras(cell, prepared, usable, prepared.eager, f"{name}_")
            shared.update({k: v for k, v in extras.items() if k not in _NOT_OF_COMPILE})
        shared["gemm_sustained_ms"] = None
        if floor is not None and self._is_sustained(cell):
            shared["gemm_sustained_ms"] = self._extra(by_name[floor], timing.sustained_ms)
        return shared

    def _is_sustained(self, cell: Cell) -> bool:
        hot = cell.case.name in SUSTAINED and cell.precision == "bf16" and not cell.autocast
        return hot and self.options.extras and isinstance(self.clock, CudaClock)

    def _extra(self, variant: Variant, measure: Callable[[Callable[[], object], CudaClock], float]) -> float | None:
        """One further figure of a variant that ran; None where it cannot be had (a graph that will not be captured)."""
        assert isinstance(self.clock, CudaClock)
        try:
            with variant.around():
                return measure(variant.run, self.clock)
        except Exception as error:
            self.tell(f"{variant.name}: {timing.reason(error)}")
            torch.cuda.synchronize(self.device)
            return None

    def _extras(
        self, cell: Cell, prepared: Prepared, variant: Variant | None, module: nn.Module, prefix: str
    ) -> dict[str, Any]:
        """graph_us, host_us, sustained_ms and activation bytes, the keys beginning with `prefix`; None if not measured.

        graph_us in the forward phases of small cases, host_us and memory with gradients, sustained_ms in bf16 of the
        two founding sizes.
        """
        memory = f"{prefix or 'peak_'}activation_bytes"
        names = (f"{prefix}graph_us", f"{prefix}host_us", f"{prefix}sustained_ms", memory)
        found: dict[str, Any] = dict.fromkeys(names)
        if variant is None or not self.options.extras:
            return found
        self.tell(f"{variant.name}: graph, host and memory")
        if isinstance(self.clock, CudaClock):
            if cell.case.small and cell.phase != "train_fwd_bwd":
                found[f"{prefix}graph_us"] = self._extra(variant, timing.graph_microseconds)
            if cell.phase == "train_fwd_bwd" and prefix != "compile_":
                forward, x = self._forward(cell), prepared.x
                once = Variant(variant.name, lambda: forward(module, x), variant.around)
                found[f"{prefix}host_us"] = self._extra(once, timing.host_microseconds)
            if self._is_sustained(cell):
                found[f"{prefix}sustained_ms"] = self._extra(variant, timing.sustained_ms)
        if cell.phase == "train_fwd_bwd" and prefix != "compile_":
            forward = self._forward(cell)
            known = [prepared.x, *module.parameters(), *module.buffers()]
            with variant.around():
                found[memory] = timing.activation_bytes(lambda: forward(module, prepared.x), known)
        return found


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
