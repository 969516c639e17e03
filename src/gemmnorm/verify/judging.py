"""Is the candidate the same function as the original?  The equality check behind ``gemmnorm verify``.

:func:`verify` takes two files and answers with a dict; both files run in a process of their own, so neither can
hang or kill the caller.  In one process, :func:`references` and :func:`judge` do the work::

    original = load_model_file("model.py")
    for reference in references(original, seeds=3, device="cpu"): ...
    result = judge(load_candidate_file("new.py"), original, list_of_references)

What is compared, for several seeds of fresh weights and inputs, in training and in evaluation: outputs, with and
without autograd; running statistics and counters; gradients of every floating-point input and of every parameter.
The cases are in :mod:`gemmnorm.verify.families`, the limits in :mod:`gemmnorm.verify.equality`; docs/verification.md
explains both.

The dict (schema 1)::

    schema, tool, model, candidate, device, dtype, seeds, seconds
    equal       bool
    verdict     equal | not_equal | candidate_raises | candidate_hangs | candidate_crashes | model_bad
    exit_code   0 equal; 1 the candidate's fault; 2 the model's
    reason      one sentence; detail: a traceback or a log where there is one
    checks      [{seed, case, phase, quantity, measure, error, eager_error, limit, ratio, ok, position, note}]
    summary     the worst check of each (phase, quantity), same fields; failures: how many checks failed
    properties  same_parameter_names, same_drawing_order, inputs_mutated, outputs_share_memory, deterministic,
                allclose_eager: {train, eval, tolerance}
    warnings    sentences about what is reported and not condemned
    skipped     sentences about what could not be checked

Errors and limits are relative to the golden norm, or to the norm before cancellation where that is larger;
``ratio`` is error over limit.  A value is null where it is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import GemmNormValueError
from . import isolate
from .candidate import Candidate, Check
from .equality import Limits, Measure, compare
from .families import plan_cases, without_rows
from .golden import Original, Reference
from .model_file import ModelFile, ModelFileError, load_candidate_file, load_model_file

__all__ = ["SCHEMA", "Limits", "Measure", "check_files", "compare", "judge", "references", "verify"]

SCHEMA = 1
_LARGE = 4_000_000  # parameters from which on the families are shared out over the seeds
_FULL_SIZE_SECONDS = 60.0  # what the float64 products of the full-size case may take
_CPU_FLOPS_PER_CORE = 5.0e10  # float64, one core


def verify(
    model_path: str | Path,
    candidate_path: str | Path,
    *,
    seeds: int = 3,
    device: str | None = None,
    time_limit: float = 600.0,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Check that the candidate file's ``ModelNew`` is the same function as the model file's ``Model``.

    seeds        how many draws of weights and inputs; one is quick, three is the rule
    device       "cpu", "cuda", …; by default CUDA where there is one
    time_limit   seconds for everything, the building of extensions included
    on_progress  gets {"stage": "model" | "candidate", "done", "total", "seed", "case", "phase"} as the work goes on

    Never raises for what the files do; returns the dict described on the module's page.  Raises GemmNormValueError for
    ``seeds`` below 1 and for a device that is not there.
    """
    if seeds < 1:
        raise GemmNormValueError(f"verify: seeds must be at least 1, got {seeds}")
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise GemmNormValueError(f"verify: device must be one that this machine has, got {device!r} without CUDA")
    stage: dict[str, Any] = {"stage": "model", "done": 0, "total": 0}

    def watch(message: dict[str, Any]) -> None:
        stage.update(message)
        if on_progress is not None:
            on_progress(message)

    kwargs = {"model_path": str(model_path), "candidate_path": str(candidate_path), "seeds": seeds, "device": device}
    outcome = isolate.run_isolated(
        "gemmnorm.verify.verify:check_files", kwargs, time_limit=time_limit, on_progress=watch
    )
    if outcome.ok:
        result: dict[str, Any] = outcome.value
        return {**result, "seconds": outcome.seconds}
    blamed = "Model" if stage["stage"] == "model" else "ModelNew"
    path = model_path if blamed == "Model" else candidate_path
    how = {"raised": "raised", "hung": f"gave no answer within {time_limit:g} s", "crashed": "killed its process"}
    if stage["done"] and blamed == "Model":
        how["hung"] = f"got through {stage['done']} of {stage['total']} runs in {time_limit:g} s; give it more time"
    verbs = {"raised": "raises", "hung": "hangs", "crashed": "crashes"}
    verdict = "model_bad" if blamed == "Model" else f"candidate_{verbs[outcome.status]}"
    reason = f"{path}: {blamed} {how[outcome.status]}"
    if outcome.status == "raised":
        reason += f" {outcome.detail.strip().splitlines()[-1]}"
    elif outcome.status == "crashed":
        reason += f": it {outcome.detail.splitlines()[0].removeprefix('the process ')}"
    answer = _answer(str(model_path), str(candidate_path), seeds, device or "")
    return {**answer, "verdict": verdict, "exit_code": 2 if blamed == "Model" else 1, "reason": reason,
            "detail": outcome.detail, "seconds": outcome.seconds}  # fmt: skip


def check_files(model_path: str, candidate_path: str, seeds: int, device: str | None) -> dict[str, Any]:
    """:func:`verify` without the isolation: runs both files in this process.  Meant for the isolated child."""
    answer = _answer(model_path, candidate_path, seeds, device or default_device())
    isolate.progress({"stage": "model", "done": 0, "total": 0})
    try:
        original = load_model_file(model_path)
        plan = Plan(original, seeds, answer["device"])
        isolate.progress({"stage": "candidate", "done": 0, "total": plan.total})
        candidate: ModelFile | ModelFileError
        try:
            candidate = load_candidate_file(candidate_path)
        except ModelFileError as error:
            return {**answer, "verdict": "candidate_raises", "exit_code": 1, "reason": str(error)}
        isolate.progress({"stage": "model", "done": 0, "total": plan.total})
        return {**answer, **judge(candidate, original, plan.references(), total=plan.total, device=answer["device"]),
                "skipped": plan.skipped}  # fmt: skip
    except ModelFileError as error:
        return {**answer, "verdict": "model_bad", "exit_code": 2, "reason": str(error)}


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Plan:
    """Which cases run for this model on this device, and the references of them, seed by seed."""

    def __init__(self, file: ModelFile, seeds: int, device: str | torch.device) -> None:
        self.file, self.seeds, self.device = file, seeds, torch.device(device)
        self.skipped: list[str] = []
        self._first = Original(file, 0, self.device)
        small = self._first.accepts_rows(5) and self._first.accepts_rows(2)
        if self._first.draws_random_numbers(9 if small else None):
            raise ModelFileError(
                f"{file.name}: Model must compute the same outputs from the same inputs, "
                "its training pass draws random numbers (dropout?), so that nothing can be compared"
            )
        large = self._first.size >= _LARGE
        on_gpu = self.device.type == "cuda"
        rows = None if on_gpu or not small else self._full_rows()
        self.cases = [plan_cases(i, seeds, large=large, full_rows=rows, full_everywhere=on_gpu) for i in range(seeds)]
        if not small:
            self.skipped.append("other batch sizes: the model runs only at the batch that get_inputs() makes")
            self.cases = [without_rows(cases) for cases in self.cases]
        if large and seeds < 3:
            self.skipped.append(f"nothing by family, but with {seeds} seed(s) a large model sees each family once only")
        self.total = sum(len(case.phases) for cases in self.cases for case in cases)

    def references(self) -> Iterator[Reference]:
        for seed, cases in enumerate(self.cases):
            original = self._first if seed == 0 else Original(self.file, seed, self.device)
            yield from original.references(cases)

    def _full_rows(self) -> int | None:
        """The batch of the full-size case on a CPU: all of it, or as much as the float64 products have time for."""
        from torch.utils.flop_counter import FlopCounterMode

        from .families import Case, draw_inputs
        from .golden import run_trial

        full = self._first.rows
        if full is None:
            return None
        inputs = draw_inputs(self._first.inputs, Case("probe", 2), torch.Generator().manual_seed(0))
        with FlopCounterMode(display=False) as counter:
            run_trial(self._first.model, inputs, training=False, cotangent=None)
        # Training runs forward and backward (three products for each one), evaluation forward; golden and noisy.
        flops = counter.get_total_flops() / 2 * full * 8
        seconds = flops / (_CPU_FLOPS_PER_CORE * max(1, torch.get_num_threads()))
        if seconds <= _FULL_SIZE_SECONDS:
            return full
        rows = max(2, int(full * _FULL_SIZE_SECONDS / seconds))
        self.skipped.append(f"rows {rows} to {full} of the full-size case: float64 on this CPU takes {seconds:.0f} s")
        return rows


def references(file: ModelFile, *, seeds: int = 3, device: str = "cpu") -> Iterator[Reference]:
    """Every reference of a model, to be judged against one at a time or kept for several candidates."""
    return Plan(file, seeds, device).references()


def judge(
    candidate_file: ModelFile,
    original: ModelFile,
    cases: Iterable[Reference],
    *,
    total: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Judge a candidate by references, in this process; the part of the dict that depends on the candidate."""
    checks: list[Check] = []
    candidate: Candidate | None = None
    trouble = ""
    for done, reference in enumerate(cases):
        where = {"seed": reference.seed, "case": reference.case.name, "phase": reference.phase}
        isolate.progress({"stage": "candidate", "done": done, "total": total, **where})
        if candidate is None or candidate.seed != reference.seed:
            earlier = candidate
            try:
                candidate = Candidate(candidate_file, original, reference.seed, torch.device(device))
            except ModelFileError as error:
                return {"equal": False, "verdict": "candidate_raises", "exit_code": 1, "reason": str(error)}
            candidate.continue_from(earlier)
            if candidate.mismatch:
                reason = f"{candidate_file.name}: parameters and buffers differ: {candidate.mismatch}"
                return _not_equal(reason, candidate, checks)
        found = candidate.check(reference)
        checks += found
        trouble = trouble or candidate.trouble
        if trouble and "CUDA error" in trouble:
            break  # the context is lost; nothing that follows would be the model's fault
        isolate.progress({"stage": "model", "done": done + 1, "total": total, **where})
    if candidate is None:
        raise ValueError("judge: no references given")
    failed = [check for check in checks if not check["ok"]]
    if not failed:
        result = {"equal": True, "verdict": "equal", "exit_code": 0, "reason": _praise(checks)}
        return {**_not_equal("", candidate, checks), **result}
    result = _not_equal(f"{candidate_file.name}: {_sentence(_first_cause(failed))}", candidate, checks)
    if trouble:
        result.update(verdict="candidate_raises", detail=trouble)
    return result


def _answer(model: str, candidate: str, seeds: int, device: str) -> dict[str, Any]:
    return {"schema": SCHEMA, "tool": "verify", "model": model, "candidate": candidate, "device": device,
            "seeds": seeds, "seconds": None, "equal": False, "verdict": "not_equal", "exit_code": 1, "reason": "",
            "detail": "", "checks": [], "summary": [], "failures": 0, "properties": {}, "warnings": [],
            "skipped": []}  # fmt: skip


def _not_equal(reason: str, candidate: Candidate, checks: list[Check]) -> dict[str, Any]:
    return {
        "equal": False,
        "verdict": "not_equal",
        "exit_code": 1,
        "reason": reason,
        "checks": [_plain(check) for check in checks],
        "summary": [_plain(check) for check in _summary(checks)],
        "failures": sum(not check["ok"] for check in checks),
        "properties": candidate.properties,
        "warnings": candidate.warnings(),
    }


def _summary(checks: list[Check]) -> list[Check]:
    """The worst check of each (phase, quantity), in order of first appearance."""
    worst: dict[tuple[str, str], Check] = {}
    for check in checks:
        key = (check["phase"], check["quantity"])
        if key not in worst or check["ratio"] > worst[key]["ratio"]:
            worst[key] = check
    return list(worst.values())


def _first_cause(failed: list[Check]) -> Check:
    """The failure to tell first: one without autograd's help if there is any, the most extreme among those."""
    return max(failed, key=lambda c: (not c["quantity"].startswith("grad:"), c["ratio"]))


def _sentence(check: Check) -> str:
    where = f"{check['quantity']} in {check['phase']} mode, case “{check['case']}”, seed {check['seed']}"
    if check["error"] is None or not math.isfinite(check["ratio"]):
        return f"{where}: {check['note'] or 'not finite'}"
    at = f" at {check['position']}" if check["position"] else ""
    return (
        f"{where}: {check['measure']} error {check['error']:.2e}{at}, allowed {check['limit']:.2e} "
        f"(the original's own error {check['eager_error']:.2e})"
    )


def _praise(checks: list[Check]) -> str:
    worst = max(checks, key=lambda c: c["ratio"])
    closest = f"the closest call stands at {worst['ratio']:.2f} of its limit ({_sentence(worst)})"
    return f"equal in {len(checks)} comparisons; {closest}"


def _plain(check: Check) -> dict[str, Any]:
    return {**check, "ratio": check["ratio"] if math.isfinite(check["ratio"]) else None}
