"""`gemmnorm explain`: plans of a model file, or of sizes alone, for the GPU that is here or one that is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import gemmnorm

from .. import activations, plan
from ..bench.environment import now
from ..bench.files import why_not
from ..plan import Chip, Problem
from ..runtime import call as runtime
from ..verify.isolate import progress, run_isolated
from ..verify.model_file import ModelFileError, load_model_file

SCHEMA = 1
ASSUMED = 90  # without a GPU and without --target: the architecture whose figures are measured


def _chip(target: str | None) -> tuple[Chip, str]:
    """The chip to plan for, and a sentence saying which that is."""
    if target is not None:
        arch = int(target.removeprefix("sm_").removesuffix("a"))
        return plan.chip_for(arch), f"planned for {target}, as asked"
    here = runtime.chip(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    if here is not None:
        return here, f"planned for the GPU of this machine, sm_{here.arch}"
    return plan.chip_for(ASSUMED), f"planned for sm_{ASSUMED}: no GPU that the kernels can run on is here"


def _document(subject: str, lines: list[str]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": "explain",
        "created": now(),
        "subject": subject,
        "status": "ok",
        "detail": "",
        "lines": lines,
    }


def explain_sizes(
    batch: int,
    in_features: int,
    out_features: int,
    *,
    dtype: str = "float32",
    arithmetic: str = "float32",
    training: bool = True,
    scaled: bool = True,
    activation: str | None = None,
    target: str | None = None,
    strategy: str | None = None,
) -> dict[str, Any]:
    """The plans of a chain of these sizes: the forward, and in training the backward; a document of kind "explain"."""
    chip, where = _chip(target)
    problem = Problem(
        batch,
        in_features,
        out_features,
        dtype,
        dtype,
        dtype,
        dtype,
        arithmetic,
        activations.canonical(activation),
        training,
        False,
        scaled,
        chip,
    )
    lines = [where, str(gemmnorm.explain(problem, strategy=strategy))]
    if training:
        lines.append(str(plan.make_plan(replace(problem, save=True), plan.check_strategy(strategy), "backward")))
    return _document(f"{batch} × {in_features} → {out_features}", lines)


def explain_file(
    path: str | Path,
    *,
    target: str | None = None,
    strategy: str | None = None,
    time_limit: float = 600.0,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The chains of a model file and their plans; `status` is "ok", "no chain" or "bad model"."""
    stage = ["starting"]

    def on_progress(message: dict[str, Any]) -> None:
        stage[0] = str(message["stage"])
        tell(stage[0])

    outcome = run_isolated(
        "gemmnorm.cli.explain_files:child",
        {"path": str(path), "target": target, "strategy": strategy},
        time_limit=time_limit,
        on_progress=on_progress,
    )
    if not outcome.ok:
        return {**_document(str(path), []), "status": "bad model", "detail": why_not(outcome, stage[0])}
    document = _document(str(path), outcome.value["lines"])
    if not outcome.value["matches"]:
        document["status"] = "no chain"
    return document


def child(path: str, target: str | None, strategy: str | None) -> dict[str, Any]:
    """Runs in the isolated process. The model runs once, where it is: a GPU if there is one."""
    progress({"stage": f"loading {path}"})
    spec = load_model_file(path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = spec.build(0).to(device)
    report = gemmnorm.fuse_report(model)
    if not report.matches:
        return {"matches": 0, "lines": [str(report)]}
    progress({"stage": f"running {path} once"})
    inputs = [item.to(device) if isinstance(item, torch.Tensor) else item for item in spec.inputs(0)]
    try:
        found = gemmnorm.explain(gemmnorm.fuse(model), *inputs, strategy=strategy)
    except Exception as error:
        raise ModelFileError(f"{path}: forward(*get_inputs()) raised {type(error).__name__}: {error}") from error
    chip, where = _chip(target)
    plans = [plan.make_plan(replace(p.problem, chip=chip), plan.check_strategy(strategy)) for p in found.plans]
    return {"matches": len(report.matches), "lines": [str(report), where, *map(str, plans)]}
