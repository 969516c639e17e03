"""`gemmnorm explain`: plans of a model file, or of sizes alone, for the GPU that is here or one that is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import plan
from ..bench import Document, command_line, default_device, new_document
from ..fuse import FuseReport, analyse, described, fuse_owners, plans_of, report_of
from ..plan import Chip, Plan, Problem
from ..plan.candidates import candidates
from ..runtime.call import chip as chip_of
from ..userfiles import ModelFileError, load_model_file, progress, run_isolated

LEAST = 0.05  # µs of a part of a predicted time that is worth listing
ASSUMED = 90  # without a GPU and without --target: the architecture whose figures are measured


def _chip(target: str | None) -> tuple[Chip, str]:
    """The chip to plan for, and a sentence saying which that is."""
    if target is not None:
        arch = int(target.removeprefix("sm_").removesuffix("a"))
        return plan.chip_for(arch), f"planned for {target}, as asked"
    here = chip_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    if here is not None:
        return here, f"planned for the GPU of this machine, sm_{here.arch}"
    return plan.chip_for(ASSUMED), f"planned for sm_{ASSUMED}: no GPU that the kernels can run on is here"


def explain_problem(problem: Problem, *, target: str | None = None, strategy: str | None = None) -> Document:
    """The plans of a chain of these sizes: the forward, and in training the backward; a document of kind "explain"."""
    chip, where = _chip(target)
    problem = replace(problem, chip=chip)
    found = [plan.make_plan(problem, plan.check_strategy(strategy))]
    if problem.training:
        saving, strategy = replace(problem, save=True), plan.check_strategy(strategy)
        keep = plan.decide_keep_product(saving, strategy, plan.check_keep_product(None))
        found.append(plan.make_plan(replace(saving, keep_product=keep), strategy, "backward"))
    lines = [where, *map(described, found)]
    return _document(_sizes(problem), lines=lines, plans=plan_documents(found))


def _sizes(problem: Problem) -> str:
    return f"{problem.batch} × {problem.in_features} → {problem.out_features}"


def plan_documents(plans: Iterable[Plan]) -> list[Document]:
    """The plans for a result file: of those with the same sizes, mode and direction the first.

    Each has its `title`, its `text`, `us` and `floor_us` (predicted, and of the bare GEMM), `candidates` (best first:
    `name`, `us` and its `terms`) and `refused` (`names` and the `reason`).
    """
    found: dict[str, Document] = {}
    for made in plans:
        p = made.problem
        mode = "training" if p.training else "evaluation"
        title = f"{_sizes(p)}, {p.dtype}, {mode} {made.phase}"
        if title not in found and made.phase != "prepare":
            about = {"title": title, "text": str(made), "us": 1e6 * made.seconds, "floor_us": 1e6 * made.floor}
            found[title] = {**about, **_candidates(made)}
    return list(found.values())


def _candidates(made: Plan) -> Document:
    """What a plan was chosen from; nothing where no kernel serves the problem."""
    if plan.why_no_kernels(made.problem):
        return {"candidates": [], "refused": []}
    backward = made.phase == "backward"
    ranked = plan.ranking(made.problem, made.phase, made.strategy if backward else None)
    listed = [
        {
            "name": c.choices if backward else c.name,
            "us": us,
            "terms": {k: v for k, v in c.terms().items() if v >= LEAST},
        }
        for us, c in ranked
        if c.strategy != "cublas_bn" or len(ranked) == 1
    ]
    refused: dict[str, list[str]] = {}
    for candidate in candidates(made.problem, made.phase):
        if candidate.refusal is not None:
            refused.setdefault(candidate.refusal, []).append(candidate.name)
    return {"candidates": listed, "refused": [{"names": n, "reason": why} for why, n in refused.items()]}


def explain_file(
    path: str | Path,
    *,
    target: str | None = None,
    strategy: str | None = None,
    precision: str | None = None,
    evaluation: bool = False,
    time_limit: float = 600.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Document:
    """The chains of a model file and their plans; `status` is "ok", "no chain" or "bad model".

    `precision`: as `load_model_file` takes it.
    """
    how = {"strategy": strategy, "precision": precision, "evaluation": evaluation}
    outcome = run_isolated(
        "gemmnorm.cli.explain:child",
        {"path": str(path), "target": target, **how},
        time_limit=time_limit,
        on_progress=lambda message: tell(message["stage"]),
    )
    if not outcome.ok:
        return _document(str(path), status="bad model", detail=outcome.why())
    status = "ok" if outcome.value["matches"] else "no chain"
    return _document(str(path), status=status, **outcome.value["shown"])


def _document(
    subject: str, *, status: str = "ok", detail: str = "", lines: Sequence[str] = (), plans: Sequence[Document] = ()
) -> Document:
    return new_document(
        "explain", command=command_line(), subject=subject, status=status, detail=detail, lines=lines, plans=plans
    )


def child(path: str, target: str | None, strategy: str | None, **how: Any) -> dict[str, Any]:
    """Runs in the isolated process. The model runs once, where it is: a GPU if there is one. `how`: `plans_of_file`."""
    report, found = plans_of_file(path, default_device(), strategy, **how)
    if not report.matches:
        return {"matches": 0, "shown": {"lines": [str(report)]}}
    chip, where = _chip(target)
    plans = [plan.make_plan(replace(p.problem, chip=chip), plan.check_strategy(strategy)) for p in found]
    lines = [str(report), where, *map(described, plans)]
    return {"matches": len(report.matches), "shown": {"lines": lines, "plans": plan_documents(plans)}}


def plans_of_file(
    path: str,
    device: torch.device,
    strategy: str | None = None,
    *,
    precision: str | None = None,
    evaluation: bool = False,
) -> tuple[FuseReport, list[Plan]]:
    """The chains of a model file with their calls in one forward, which runs in this very process, and those' plans.

    Raises:
        ModelFileError: the file is bad, or its model raises.
    """
    progress({"stage": f"loading {path}"})
    spec = load_model_file(path, precision)
    model = spec.build(0).to(device)
    model = model.eval() if evaluation else model
    owners = analyse(model)
    report = report_of(model, owners)
    if not report.matches:
        spec.run_once()
        return report, []
    progress({"stage": f"running {path} once"})
    inputs = [item.to(device) if isinstance(item, torch.Tensor) else item for item in spec.inputs(0)]
    try:
        fuse_owners(model, owners)
        plans = plans_of(model, inputs, strategy)
        return report_of(model, owners, calls=True), plans
    except Exception as error:
        raise ModelFileError(f"{path}: forward(*get_inputs()) raised {type(error).__name__}: {error}") from error
