"""`gemmnorm tune`: the candidates of a model file's chains, or of sizes alone, measured on the GPU that is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .. import plan
from ..bench import (
    Document,
    QueueClock,
    command_line,
    default_device,
    environment,
    new_document,
    store_measured,
    tune,
)
from ..errors import GemmNormRuntimeError
from ..plan import Problem
from ..runtime import driver, measured
from ..userfiles import progress, run_isolated
from .explain import plans_of_file


def usable(name: str | None) -> torch.device:
    """The GPU to measure on.

    Raises:
        GemmNormRuntimeError: the kernels do not run there.
    """
    device = default_device(name)
    why = "there is no NVIDIA GPU here" if device.type != "cuda" else driver.unavailable()
    if why is None and torch.cuda.get_device_capability(device) < (8, 0):
        why = "the kernels need compute capability 8.0 or higher"
    if why is not None:
        raise GemmNormRuntimeError(f"tune: nothing can be measured: {why}")
    return torch.device("cuda", device.index or 0)


def tune_here(
    what: str | Problem,
    *,
    device: torch.device,
    precision: str | None = None,
    evaluation: bool = False,
    time_limit: float = 600.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Document:
    """Measure the chains of a model file, or one problem, and keep what is gained; a document of kind "tune".

    `status` is "ok", "no chain", "bad model" or "failed": then what was measured before counts. `path` is where the
    table is, `rows` are those of `bench.tuning.tune`.
    """
    rows: list[Document] = []

    def listen(message: dict[str, Any]) -> None:
        if "row" in message:
            rows.append(message["row"])
        tell(message["stage"])

    sizes = None if isinstance(what, str) else {k: v for k, v in vars(what).items() if k != "chip"}
    outcome = run_isolated(
        "gemmnorm.cli.tune:child",
        {
            "path": what if sizes is None else None,
            "sizes": sizes,
            "device": str(device),
            "precision": precision,
            "evaluation": evaluation,
        },
        time_limit=time_limit,
        on_progress=listen,
    )
    gpu = measured.described(device)
    if rows:
        store_measured(rows, gpu)
    status = "ok" if rows else "no chain"
    if not outcome.ok:
        status = "bad model" if outcome.names_the_file else "failed"
    return new_document(
        "tune",
        command=command_line(),
        environment=environment(device),
        subject=what if isinstance(what, str) else f"{what.batch} × {what.in_features} → {what.out_features}",
        status=status,
        detail=(outcome.value or "") if outcome.ok else outcome.why(),
        path=str(measured.path(gpu)),
        rows=rows,
    )


def child(
    path: str | None, sizes: dict[str, Any] | None, device: str, evaluation: bool, precision: str | None = None
) -> str:
    """Runs in the isolated process, where a kernel that hangs ends nothing else; why nothing was measured, or ""."""
    where = torch.device(device)
    with torch.cuda.device(where):
        if path is None:
            assert sizes is not None
            fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in sizes.items()
            }
            problems, report = [Problem(**fields, chip=measured.described(where).chip)], ""
        else:
            found, plans = plans_of_file(path, where, precision=precision, evaluation=evaluation)
            problems, report = [p.problem for p in plans if p.phase == "forward"], str(found)
        served = [replace(p, prepared=False) for p in problems if plan.why_no_kernels(p) is None]
        for row in tune(served, where, QueueClock(where), lambda text: progress({"stage": text})):
            progress({"stage": f"{row['title']}, {row['phase']}", "row": row})
    if problems and not served:
        return f"no kernels serve it: {plan.why_no_kernels(problems[0])}"
    return report if not served else ""
