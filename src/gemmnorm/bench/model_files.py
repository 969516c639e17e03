"""`gemmnorm bench MODEL.py [NEW.py …]`: a model file, what gemmnorm makes of it, and replacements, side by side.

User files run in a process of their own, all of them in the same one, because only interleaved samples
can be compared. Every subject gets the same weights by name and the same inputs. Per phase these are timed: the bare
GEMMs (of the shapes that the model's own forward and backward multiply, on random operands), the model, `torch.compile`
of it, `gemmnorm.fuse` of it under every strategy that applies, and each replacement's `ModelNew`.

A time of something that computes something else is worth nothing, so every subject's output is also compared with
float64, roughly: `gemmnorm verify` is the judge.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import gemmnorm

from .. import plan
from ..fuse import OwnerPlan, analyse, fuse_owners, plans_of, report_of
from ..userfiles import (
    DROPOUT_NOTE,
    ModelFile,
    ModelFileError,
    Outcome,
    functions,
    load_candidate_file,
    load_model_file,
    progress,
    replaced,
    run_isolated,
    without_dropout,
)
from . import accuracy, cases, timing
from .cases import PHASES
from .documents import Document, new_document
from .environment import current, default_device, environment
from .products import Products
from .spans import Replays, SpansError, disagreement
from .timing import CudaClock, Variant, WallClock

PEERS = ("eager", "compile", "graph")  # kinds of subjects that the others are judged against
_BOUNDARY = 12.0  # an output this many times as wrong as eager's is not the same function; verify draws the fine line


@dataclass(frozen=True)
class FileOptions:
    """How much to measure; JSON-able, because it travels to the child.

    Attributes:
        phases: of `cases.PHASES`.
        strategies: time only these; None for all that apply.
        device: None for the GPU where there is one.
        precision: "fp32", "fp16" or "bf16": what models and inputs are cast to, as KernelBench does; None: nothing.
        compile: time torch.compile too.
        compile_limit_s: give its first call up after this long.
        budget_s: sampling time per phase.
        limit_s: leave phases out that are expected to exceed this in all.
    """

    phases: Sequence[str] = PHASES
    strategies: Sequence[str] | None = None
    device: str | None = None
    precision: str | None = None
    compile: bool = True
    compile_limit_s: float = 120.0
    budget_s: float = 1.5
    limit_s: float = 300.0


def bench_files(
    model_path: str | Path,
    candidate_paths: Sequence[str | Path] = (),
    options: FileOptions | None = None,
    *,
    time_limit: float = 900.0,
    tell: Callable[[str], None] = lambda _: None,
    command: str = "",
) -> Document:
    """Time the files and return a document of kind "bench-files", as `--json` writes it.

    Its `status` is "ok", "failed" (a replacement or the fused model raises, hangs, crashes or computes something else;
    `failed` says which and why) or "bad model" (`detail` says why). Rows are there for everything that ran.
    """
    options = options or FileOptions()
    document = new_document(
        "bench-files",
        command=command,
        model=str(model_path),
        candidates=[str(p) for p in candidate_paths],
        precision=options.precision,
        status="ok",
        detail="",
        rows=[],
        failed={},
        notes=[],
    )
    able, begin = [str(p) for p in candidate_paths], time.monotonic()
    gone: dict[str, str] = {}
    why_gone: list[str] = []
    while True:
        left = max(1.0, time_limit - (time.monotonic() - begin))
        outcome = _timed(str(model_path), able, options, left, tell)
        subject = outcome.last.get("subject", "model")
        if not outcome.ok and subject != "model":
            gone[subject] = outcome.why() if outcome.names_the_file else f"{outcome.status} while {outcome.stage}"
        if not outcome.ok:
            why_gone.append(outcome.why())
        if outcome.ok or subject not in able or time.monotonic() - begin > time_limit / 2:
            break
        able.remove(subject)  # and the others once more, in a process that it cannot take along
    document.update(outcome.value if outcome.ok else {})
    document["detail"] = "\n".join(why_gone)
    document["failed"] = {**document["failed"], **gone}
    if not outcome.ok and subject == "model":
        document["status"] = "bad model"
    else:
        document["status"] = "failed" if document["failed"] else "ok"
    return document


def _timed(
    model_path: str, candidate_paths: list[str], options: FileOptions, time_limit: float, tell: Callable[[str], None]
) -> Outcome:
    """How the child ended. Where it had timed everything and the profiler took it along, its answer counts."""
    how = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(options).items()}
    outcome = run_isolated(
        "gemmnorm.bench.model_files:child",
        {"model_path": model_path, "candidate_paths": candidate_paths, "options": how},
        time_limit=time_limit,
        on_progress=lambda message: tell(message["stage"]),
    )
    if outcome.ok or "answer" not in outcome.last:
        return outcome
    answer, why = outcome.last["answer"], f"kernel spans were not taken: {outcome.status}"
    return replace(outcome, status="ok", value={**answer, "notes": [*answer["notes"], why]})


# --- the child -------------------------------------------------------------------------------------------------------


@dataclass
class _Subject:
    """One thing to time: its kind ("eager", "compile", "fused", "candidate"), the module, the strategy around it."""

    name: str
    kind: str
    module: nn.Module
    strategy: str | None = None


@dataclass
class _Run:
    """State of a child: what it was given and what it has found out. `written`: PyTorch's functions, as they were."""

    options: FileOptions
    device: torch.device
    inputs: list[Any]
    state: dict[str, Tensor]
    clock: WallClock | CudaClock
    written: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)


def child(model_path: str, candidate_paths: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Runs in the isolated process; see `bench_files`."""
    chosen = FileOptions(**options)
    device = default_device(chosen.device)
    with current(device):
        return _measured(model_path, candidate_paths, chosen, device)


def _measured(model_path: str, candidate_paths: list[str], chosen: FileOptions, device: torch.device) -> dict[str, Any]:
    progress({"stage": f"loading {model_path}", "subject": "model"})
    spec = load_model_file(model_path, chosen.precision)
    model = spec.build(0).to(device)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    inputs = [tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, item) for item in spec.inputs(0)]
    run = _Run(chosen, device, inputs, state, timing.clock_for(device), functions())
    progress({"stage": f"running {model_path} once", "subject": "model"})
    first_s = _first_call(spec, model, run)
    subjects = [_Subject("eager", "eager", model)]
    if chosen.compile:
        subjects.append(_Subject("torch.compile", "compile", compiled(model)))
    owners = analyse(model)
    report = report_of(model, owners)
    if report.matches:
        fused = _fused(model, owners, run)
        report = report_of(fused[0].module, owners) if fused else report
        subjects += fused
    for path in candidate_paths:
        subject = _candidate(path, spec, run)
        if subject is not None:
            subjects.append(subject)
    if isinstance(run.clock, CudaClock):
        subjects.append(_Subject("eager in a CUDA graph", "graph", copy.deepcopy(model)))
    for phase in chosen.phases:
        expected = 2 * first_s * (3.0 if phase == "train_fwd_bwd" else 1.0) * (len(subjects) - len(run.failed) + 1)
        left = chosen.limit_s - (time.monotonic() - run.started)
        if run.rows and expected > left:
            run.notes.append(f"{phase} was not timed: about {expected:.0f} s more, of {chosen.limit_s:.0f} s in all")
            continue
        _time_phase(phase, subjects, run, accurate=expected < left / 2)
    answer = {
        "environment": environment(device),
        "report": str(report),
        "matches": [str(m) for m in report.matches],
        "refusals": [str(r) for r in report.refusals],
        "rows": run.rows,
        "failed": run.failed,
        "notes": run.notes,
    }
    if isinstance(run.clock, CudaClock):
        progress({"stage": "kernel spans", "subject": "timing", "answer": answer})
        _add_spans(subjects, run.clock, run)
    return answer


def compiled(model: nn.Module) -> nn.Module:
    """`torch.compile` of a copy of the model, for fixed shapes."""
    return cast(nn.Module, torch.compile(copy.deepcopy(model), dynamic=False))


def _first_call(spec: ModelFile, model: nn.Module, run: _Run) -> float:
    """Run the model's forward; its seconds, or the reason as a ModelFileError."""
    try:
        with torch.no_grad():
            for _ in range(2):  # the first call may be the only slow one
                begin = time.perf_counter()
                model(*run.inputs)
                run.clock.synchronize()
                seconds = time.perf_counter() - begin
                if seconds > timing.SLOW_S:
                    break
    except Exception as error:
        raise ModelFileError(f"{spec.name}: forward(*get_inputs()) raised {timing.reason(error)}") from error
    model.load_state_dict(run.state)
    return seconds


def _fused(model: nn.Module, owners: Sequence[OwnerPlan], run: _Run) -> list[_Subject]:
    """The model fused, once per strategy that serves all its chains (the reference only where nothing else does)."""
    module = copy.deepcopy(model)
    fuse_owners(module, owners)
    plans = plans_of(module, run.inputs)
    module.load_state_dict(run.state)
    called = report_of(module, owners, calls=True).matches
    run.notes += [str(match) for match in called if match.calls and match.calls.unfused]
    verdicts = [plan.applicable(p.problem) for p in plans]
    first_reason = {s: next((v[s] for v in verdicts if v[s] is not None), None) for s in plan.STRATEGIES if verdicts}
    able, refused = cases.strategies_to_run(first_reason, run.options.strategies)
    for why in dict.fromkeys(refused.values()):
        names = ", ".join(s for s, reason in refused.items() if reason == why)
        run.notes.append(f"{names}: not run, {why}")
    asked = run.options.strategies  # where nobody asks, plain ops run as the model's user gets them
    return [_Subject(f"fused: {s}", "fused", module, s if asked or s != "reference" else None) for s in able]


def _candidate(path: str, spec: ModelFile, run: _Run) -> _Subject | None:
    """A replacement with the model's weights; None, and the reason in `failed`, where it cannot be had."""
    progress({"stage": f"loading {path}", "subject": path})
    try:
        loaded = load_candidate_file(path, run.options.precision)
        module = loaded.build(0, spec.init_inputs()).to(run.device)
        module.load_state_dict(run.state)
    except Exception as error:
        run.failed[path] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"  # the names of keys, too
        module = None
    _look_for_patches(run, path)
    return None if module is None else _Subject(path, "candidate", module)


def _look_for_patches(run: _Run, path: str) -> None:
    """Raise where `path` has put functions in the place of PyTorch's: the others are timed without it then."""
    if names := replaced(run.written):
        text = f"replaces {', '.join(names[:5])}{', …' * (len(names) > 5)}, which the others are timed by"
        progress({"stage": text, "subject": path})
        raise ModelFileError(f"{path} {text}")


def _runner(module: nn.Module, inputs: list[Any], phase: str) -> Callable[[], object]:
    """A function that runs one step of `phase`, made ready (mode, and for a backward the upstream gradients)."""
    module.train(phase != "eval_fwd")
    if phase != "train_fwd_bwd":
        return lambda: module(*inputs)
    wanted = [t for t in (*tree_leaves(inputs), *module.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    upstream: list[Tensor] = []

    def step() -> object:
        outputs = [t for t in tree_leaves(module(*inputs)) if isinstance(t, Tensor) and t.requires_grad]
        if not upstream:
            upstream.extend(torch.randn(t.shape, device=t.device).to(t.dtype) for t in outputs)
        return torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)

    return step


def _time_phase(phase: str, subjects: list[_Subject], run: _Run, accurate: bool) -> None:
    """Time every subject in one phase, and add their rows; `accurate`: compare their outputs with float64 first."""
    inputs = _inputs(phase, run)
    alive = [s for s in subjects if s.name not in run.failed]
    for s in alive:  # the phase before has moved the running statistics, of each subject by its own number of calls
        getattr(s.module, "_orig_mod", s.module).load_state_dict(run.state)
    with torch.set_grad_enabled(phase == "train_fwd_bwd"):
        with without_dropout() as dropped:
            errors = _errors(alive, run, phase) if accurate and phase != "train_fwd_bwd" else {}
        if dropped:
            run.notes.append(f"{phase}: {DROPOUT_NOTE}, not while they were timed")
        alive = [s for s in alive if s.name not in run.failed]
        products = Products()
        try:
            with products:
                _runner(subjects[0].module, inputs, phase)()
        except Exception as error:  # a model without a gradient, say
            run.notes.append(f"{phase} was not timed, the model itself raises: {timing.reason(error)}")
            return
        floors, flops = _floors(products, run.device), products.flops()
        del products
        times = _interleave(phase, floors, alive, inputs, run)
    kinds = {s.name: s.kind for s in alive}
    for name, why in times.failed.items():
        if kinds.get(name) in ("candidate", "fused"):
            run.failed[name] = f"{phase}: {why}"
        run.notes.append(f"{phase}: {name} did not run: {why}")
    shared = {"gemm_ms": times.fastest([v.name for v in floors]), "eager_ms": times.ms("eager")}
    shared["flops"] = flops if floors else None
    for s in alive:
        if s.name in times.ran:
            found = times.ran[s.name]
            row = {"phase": phase, "variant": s.name, "kind": s.kind, "ms": found.ms, "ms_iqr": found.iqr}
            row.update(
                samples=found.samples,
                disturbed=found.disturbed,
                **shared,
                error=errors.get(s.name),
                eager_error=errors.get("eager"),
            )
            row["kernels"] = None
            row["verdicts"] = times.against(s.name, [p.name for p in alive if p.kind in PEERS and p is not s])
            run.rows.append(row)


def _floors(products: Products, device: torch.device) -> list[Variant]:
    """The bare GEMMs on every BLAS backend; none where the model has no product."""
    if not products.found:
        return []
    backends = ("cublas", "cublaslt") if device.type == "cuda" else (None,)
    bare = products.replay()
    return [Variant(f"GEMMs {b or ''}".strip(), bare, lambda b=b: cases.blas_backend(b)) for b in backends]  # type: ignore[misc]


def _interleave(
    phase: str, floors: list[Variant], subjects: list[_Subject], inputs: list[Any], run: _Run
) -> timing.Timings:
    """Sample the floors and the subjects side by side, saying at each step whose code is running."""
    variants = [*floors, *(_variant(s, phase, inputs, run) for s in subjects)]
    candidates = [s.name for s in subjects if s.kind == "candidate"]
    begun: list[str] = []  # whose code has run first, one after the other

    def tell(text: str) -> None:
        name = text.removeprefix("warming up ")
        if begun and begun[-1] in candidates:
            _look_for_patches(run, begun[-1])
        begun.append(name)
        progress({"stage": f"{phase}: {text}", "subject": name if name in candidates else "timing"})

    limit_s = max(run.options.limit_s - (time.monotonic() - run.started), 1.0)
    peers = [s.name for s in subjects if s.kind in PEERS]
    decide = [(s.name, peer) for s in subjects if s.kind not in PEERS for peer in peers]
    budget_s = run.options.budget_s
    times = timing.interleave(
        variants, run.clock, budget_s=budget_s, min_samples=3, limit_s=limit_s, on_progress=tell, decide=decide
    )
    for name in candidates:
        _look_for_patches(run, name)
    return times


def _variant(subject: _Subject, phase: str, inputs: list[Any], run: _Run) -> Variant:
    """One step of a subject, under its strategy."""
    limit = run.options.compile_limit_s if subject.kind == "compile" else None
    step = _runner(subject.module, inputs, phase)
    if subject.kind == "graph":
        step = timing.graphed(step, run.device)
    return Variant(subject.name, step, lambda: gemmnorm.set_strategy(subject.strategy), limit_s=limit)


def _add_spans(subjects: list[_Subject], clock: CudaClock, run: _Run) -> None:
    """Put the kernels' spans into the rows; notes where they disagree with the times, or cannot be had."""
    replays = Replays(clock)

    def again() -> None:
        for phase in dict.fromkeys(row["phase"] for row in run.rows):
            timed = {row["variant"] for row in run.rows if row["phase"] == phase}
            inputs = _inputs(phase, run)
            with torch.set_grad_enabled(phase == "train_fwd_bwd"):
                for s in subjects:
                    if s.name in timed:
                        replays.add((phase, s.name), _variant(s, phase, inputs, run))

    try:
        taken = replays.taken(again)
    except SpansError as error:
        run.notes.append(f"kernel spans were not taken: {error}")
        return
    run.notes += [f"no kernel span: {phase}: {name}: {why}" for (phase, name), why in replays.failed.items()]
    for row in run.rows:
        span = taken.get((row["phase"], row["variant"]))
        row["kernels"] = span.as_dict() if span else None
        if why := disagreement(row["ms"], row["kernels"]):
            run.notes.append(f"{row['phase']}: {row['variant']}: {why}")


def _inputs(phase: str, run: _Run) -> list[Any]:
    """The inputs; where gradients are timed, leaves that want one."""
    return [tree_map(_leaf, item) for item in run.inputs] if phase == "train_fwd_bwd" else run.inputs


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _errors(subjects: list[_Subject], run: _Run, phase: str) -> dict[str, float]:
    """Error of every subject's outputs against float64; a replacement far beyond eager's goes to `failed`."""
    progress({"stage": f"{phase}: float64", "subject": "model"})
    model = copy.deepcopy(subjects[0].module).double()
    wide = [tree_map(_widened, item) for item in run.inputs]
    model.train(phase != "eval_fwd")
    try:
        want = [t for t in tree_leaves(model(*wide)) if isinstance(t, Tensor)]
    except Exception as error:  # a model with dtypes of its own
        run.notes.append(f"{phase}: no float64 run of the model, so no errors: {timing.reason(error)}")
        return {}
    found: dict[str, float] = {}
    for s in subjects:
        if s.kind in ("compile", "graph"):
            continue
        subject = s.name if s.kind == "candidate" else "timing"
        progress({"stage": f"{phase}: {s.name} against float64", "subject": subject})
        s.module.train(phase != "eval_fwd")
        try:
            with gemmnorm.set_strategy(s.strategy):
                got = [t for t in tree_leaves(s.module(*run.inputs)) if isinstance(t, Tensor)]
            found[s.name] = max((_tensor_error(g, w) for g, w in zip(got, want, strict=True)), default=0.0)
        except Exception as error:
            run.failed[s.name] = f"{phase}: {timing.reason(error)}"
            continue
        finally:
            s.module.load_state_dict(run.state)
            if s.kind == "candidate":
                _look_for_patches(run, s.name)
        floor = 64 * torch.finfo(got[0].dtype).eps if got and got[0].is_floating_point() else 0.0
        if "eager" in found and not found[s.name] <= _BOUNDARY * found["eager"] + floor:
            run.failed[s.name] = (
                f"{phase}: computes something else (error {found[s.name]:.1e}, eager {found['eager']:.1e});"
                " gemmnorm verify says more"
            )
    return found


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _tensor_error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        raise ValueError(f"output of shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    columns = want.shape[-1] if want.dim() > 1 else 1
    return accuracy.relative_error(got.reshape(-1, columns), want.double().reshape(-1, columns))
