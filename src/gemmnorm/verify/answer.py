"""Is the candidate the same function as the original?  The equality check behind `gemmnorm verify`.

`verify` takes two files and answers with a dict; both files run in a process of their own, so neither can
hang or kill the caller. In one process, `references` and `judge` do the work::

    original = load_model_file("model.py")
    for reference in references(original, seeds=3, device="cpu"): ...
    result = judge(load_candidate_file("new.py"), original, list_of_references)

What is compared, for several seeds of fresh weights and inputs, in training and in evaluation: outputs, with and
without autograd; running statistics and counters; gradients of every floating-point input and of every parameter.
docs/verification.md explains the cases and the limits.

The dict (schema 1)::

    schema, tool, model, candidate, device, precision, seeds, effort, seconds
    equal       bool
    verdict     equal | not_equal | candidate_raises | candidate_hangs | candidate_crashes | model_bad
    exit_code   0 equal; 1 the candidate's fault; 2 the model's
    reason      one sentence; detail: a traceback or a log where there is one
    fault       {class, sentence} of what is not equal, the class one of `faults.FAULTS`; else null
    checks      [{seed, case, phase, quantity, measure, error, eager_error, limit, ratio, ok, position, note}]
    summary     the worst check of each (phase, quantity), same fields; failures: how many checks failed
    properties  same_parameter_names, same_drawing_order, same_parameter_order, inputs_mutated,
                outputs_share_memory, deterministic, weights_prepacked, moves_generator, threads, settings_left,
                instances (what goes wrong with several, copies and exchanged parameters),
                output_needed (in place writes to it are refused), one_backward (a second one through the
                same graph is refused), frozen_statistics (true where it is right with its normalisations alone in
                evaluation, null where that was not looked at), autocast (true where it has the original's dtypes and
                values under `torch.autocast` in bfloat16; null where that was not looked at or tells nothing: the
                model is not of float32, or raises there, or roundings leave no digit of its outputs),
                autocast_float16 (likewise; null too where a CPU would take too long),
                missing_arguments, hooks_not_run, hooks_raise, pickle_raises, other_strides (`conventions.lacking`),
                allclose_eager: {train, eval, tolerance},
                output_error: {train, eval: {error, eager_error}} on plain data
    warnings    sentences about what is reported and not condemned
    skipped     sentences about what could not be checked

Errors and limits are relative to the golden norm, or to the norm before cancellation where that is larger;
`ratio` is error over limit. A value is null where it is not finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import GemmNormValueError
from ..userfiles import (
    DROPOUT_NOTE,
    PRECISIONS,
    Bare,
    BareProcessError,
    ModelFileError,
    Outcome,
    load_model_file,
    progress,
    run_isolated,
    without_dropout,
)
from .candidate import Remote
from .judging import judge
from .reading import suspicions
from .schedule import SEEDS, Effort, Schedule

__all__ = ["SCHEMA", "check_files", "verify"]

SCHEMA = 1
# Threads that wait by spinning keep each other from running where a machine has other work: six times as slow.
_PATIENT = {"OMP_WAIT_POLICY": "passive"}


def _is_here(device: str) -> bool:
    """The name of a device that this machine has."""
    try:
        return torch.device(device).type in ("cpu", "cuda" if torch.cuda.is_available() else "")
    except RuntimeError:
        return False


def _checked(seeds: int | None, effort: str, device: str | None, precision: str | None, time_limit: float) -> int:
    """How many seeds `verify` takes.

    Raises:
        GemmNormValueError: an argument is none of those that it lists.
    """
    if effort not in SEEDS:
        raise GemmNormValueError(f"verify: effort must be one of {', '.join(SEEDS)}, got {effort!r}")
    seeds = SEEDS[effort] if seeds is None else seeds
    if not isinstance(seeds, int) or seeds < 1:
        raise GemmNormValueError(f"verify: seeds must be a whole number from 1 on, got {seeds!r}")
    if not time_limit > 0:
        raise GemmNormValueError(f"verify: time_limit must be a positive number of seconds, got {time_limit!r}")
    if device is not None and not _is_here(device):
        raise GemmNormValueError(f"verify: device must be cpu, or cuda but not without CUDA, got {device!r}")
    if precision is not None and precision not in PRECISIONS:
        raise GemmNormValueError(f"verify: precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return seeds


def verify(
    model_path: str | Path,
    candidate_path: str | Path,
    *,
    seeds: int | None = None,
    effort: Effort = "usual",
    to_the_end: bool | None = None,
    device: str | None = None,
    precision: str | None = None,
    time_limit: float = 600.0,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Check that the candidate file's `ModelNew` is the same function as the model file's `Model`.

    Args:
        model_path: the file with `Model`, `get_inputs` and `get_init_inputs`.
        candidate_path: the file with `ModelNew`.
        seeds: how many draws of weights and inputs; by default 1, 3 or 5, as the effort asks.
        effort: "quick" for somebody who edits a kernel, "usual", "thorough" for a release.
        to_the_end: go on after a case that failed; by default only when thorough.
        device: "cpu", "cuda", …; by default CUDA where there is one.
        precision: "fp32", "fp16" or "bf16": both models and all inputs are cast to it, as KernelBench does; by default
            they stay as the files make them.
        time_limit: seconds for everything, the building of extensions included.
        on_progress: gets {"stage": "model" | "candidate", "done", "total", "seed", "case", "phase", "left_s"} as the
            work goes on.

    Returns:
        A dict: `equal`, `verdict`, `exit_code`, `reason` and every comparison; the head of this module's file has all
        fields. Whatever the files do is told there, and raises nothing.

    Raises:
        GemmNormValueError: `seeds` is below 1, `time_limit` not above 0, or there is no such device, precision or
            effort.

    Examples:
        >>> gemmnorm.verify.verify("model.py", "new.py", effort="quick")["verdict"]  # doctest: +SKIP
        'equal'
    """
    seeds = _checked(seeds, effort, device, precision, time_limit)
    to_the_end = effort == "thorough" if to_the_end is None else to_the_end
    how = {"seeds": seeds, "effort": effort, "to_the_end": to_the_end, "device": device, "precision": precision}
    kwargs = {"model_path": str(model_path), "candidate_path": str(candidate_path), **how}
    outcome = run_isolated(
        "gemmnorm.verify.answer:check_files",
        kwargs,
        time_limit=time_limit,
        on_progress=on_progress,
        environment=_PATIENT,
    )
    if outcome.ok:
        crashed = outcome.value["verdict"] == "candidate_crashes"
        return {**outcome.value, **({"detail": outcome.log} if crashed else {}), "seconds": outcome.seconds}
    answer = _answer(str(model_path), str(candidate_path), seeds, effort, device or "", precision)
    return {**answer, **_blame(outcome, str(model_path), str(candidate_path), time_limit), "seconds": outcome.seconds}


def _blame(outcome: Outcome, model_path: str, candidate_path: str, time_limit: float) -> dict[str, Any]:
    """Verdict and reason where no answer came: the fault of whichever file was running last."""
    at = {"stage": "model", "done": 0, "total": 0, **outcome.last}
    models_fault = at["stage"] == "model"
    how = {"raised": "raised", "hung": f"gave no answer within {time_limit:g} s", "crashed": "killed its process"}
    if at["done"] and models_fault:
        how["hung"] = f"got through {at['done']} of {at['total']} runs in {time_limit:g} s; give it more time"
    reason = f"{model_path}: Model" if models_fault else f"{candidate_path}: ModelNew"
    reason += f" {how[outcome.status]}"
    if outcome.status == "raised":
        reason += f" {outcome.detail.strip().splitlines()[-1]}"
    elif outcome.status == "crashed":
        reason += f": it {outcome.detail.splitlines()[0].removeprefix('the process ')}"
    verbs = {"raised": "raises", "hung": "hangs", "crashed": "crashes"}
    verdict = "model_bad" if models_fault else f"candidate_{verbs[outcome.status]}"
    fault = None if models_fault else {"class": verbs[outcome.status], "sentence": reason.partition(": ")[2]}
    exit_code = 2 if models_fault else 1
    return {"verdict": verdict, "exit_code": exit_code, "reason": reason, "fault": fault, "detail": outcome.detail}


def check_files(
    model_path: str,
    candidate_path: str,
    seeds: int,
    device: str | None,
    effort: Effort = "usual",
    to_the_end: bool = False,
    precision: str | None = None,
) -> dict[str, Any]:
    """`verify` with the model in this process; the candidate has its own. Meant for the isolated child."""
    with without_dropout() as dropped:
        answer = _answer(model_path, candidate_path, seeds, effort, device or default_device(), precision)
        answer |= _judged(answer, to_the_end)
    if dropped and DROPOUT_NOTE not in answer["warnings"]:
        answer["warnings"] = [*answer["warnings"], DROPOUT_NOTE]
    return answer


def _judged(asked: dict[str, Any], to_the_end: bool) -> dict[str, Any]:
    """What the files that `asked` names come to."""
    device, precision = asked["device"], asked["precision"]
    progress({"stage": "model", "done": 0, "total": 0})
    try:
        original = load_model_file(asked["model"], precision)
        with Bare("verify.runner:load", [asked["model"], asked["candidate"], device, precision]) as bare:
            schedule = Schedule(original, asked["seeds"], device, asked["effort"])
            torch.set_num_threads(schedule.threads)
            side = Remote(bare, asked["candidate"], schedule.threads)
            verdict = judge(side, original, schedule.references(), total=schedule.total, to_the_end=to_the_end)
            with contextlib.suppress(BareProcessError, ModelFileError):
                verdict.setdefault("warnings", []).extend([DROPOUT_NOTE] if side.call("dropped") else [])
        verdict["warnings"] = [*verdict.get("warnings", []), *suspicions(asked["candidate"])]
        return {**verdict, "skipped": schedule.skipped}
    except ModelFileError as error:
        return {"verdict": "model_bad", "exit_code": 2, "reason": str(error)}


def default_device() -> str:
    """CUDA where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _answer(model: str, candidate: str, seeds: int, effort: str, device: str, precision: str | None) -> dict[str, Any]:
    return {"schema": SCHEMA, "tool": "verify", "model": model, "candidate": candidate, "device": device,
            "precision": precision, "seeds": seeds, "effort": effort, "seconds": None, "equal": False,
            "verdict": "not_equal", "exit_code": 1, "reason": "", "fault": None, "detail": "", "checks": [],
            "summary": [], "failures": 0, "properties": {}, "warnings": [], "skipped": []}  # fmt: skip
