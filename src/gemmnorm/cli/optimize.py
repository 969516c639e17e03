"""`gemmnorm optimize MODEL.py`: find the chains, write the replacement, verify it, time it, write the report.

The replacement is written under a temporary name beside its place and renamed once `verify` has found it equal, so that
nothing half-written or wrong is ever left. User files run in processes of their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import plan
from ..bench import (
    Document,
    FileOptions,
    bench_files,
    default_device,
    environment,
    new_document,
    nvcc_version,
    write_json,
)
from ..errors import GemmNormValueError
from ..export import compile_check, read_model, write_replacement
from ..userfiles import progress, run_isolated
from ..verify import verify
from . import report

WRITING = "writing the replacement"


@dataclass(frozen=True)
class OptimizeOptions:
    """What `optimize` may do.

    Attributes:
        output: the replacement's path; None for `<stem of MODEL>_new.py` in the current directory.
        target: `sm_XX`; None for the GPU that is here, else `sm_80`.
        strategy: None for the planner's choice.
        device: None for the GPU where there is one.
        seeds: how many draws of weights and inputs `verify` compares.
        compile: time torch.compile as well.
        time_limit: seconds for each of the isolated steps (write, verify, time).
        timing_limit_s: phases are left out of the timing that would take longer than this in all.
    """

    output: str | None = None
    target: str | None = None
    strategy: str | None = None
    device: str | None = None
    seeds: int = 3
    compile: bool = True
    time_limit: float = 600.0
    timing_limit_s: float = 60.0


def optimize(
    model_path: str | Path,
    options: OptimizeOptions | None = None,
    *,
    tell: Callable[[str], None] = lambda _: None,
    command: str = "",
) -> Document:
    """Make, verify and time a replacement for the model in `model_path`; a document of kind "optimize".

    Its `status` is "equal" (the files in `files` were written), "not equal" (nothing was written; `verify` or `detail`
    says why), "failed" (the replacement could not be written), "bad model" or "no chain" (`detail` says why).

    Raises:
        GemmNormValueError: the output would overwrite the model, or its directory does not exist.
    """
    options = options or OptimizeOptions()
    output = Path(options.output or f"{Path(model_path).stem}_new.py")
    if output.resolve() == Path(model_path).resolve():
        raise GemmNormValueError(f"output: expected a path other than the model's own; got {output}")
    if not output.parent.is_dir():
        raise GemmNormValueError(f"output: expected a path in an existing directory; got {output}")
    device = str(default_device(options.device))
    document = new_document(
        "optimize",
        command=command,
        model=str(model_path),
        output=str(output),
        device=device,
        environment=environment(default_device(device)),
        status="not equal",
        detail="",
        export=None,
        verify=None,
        bench=None,
        said=[],
        files=[],
    )
    temporary = output.with_name(f".{output.stem}.{os.getpid()}.tmp.py")
    try:
        _steps(document, options, temporary, lambda text: tell(text.replace(str(temporary), str(output))))
        if document["status"] == "equal":
            _publish(document, temporary, output)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return document


def _steps(document: Document, options: OptimizeOptions, temporary: Path, tell: Callable[[str], None]) -> None:
    """Write to `temporary`, verify and time; leaves the verdict and its grounds in `document`."""
    model, device = document["model"], document["device"]
    tell("looking for chains")
    kwargs = {"model_path": model, "output_path": str(temporary), "target": options.target}
    written = run_isolated(
        "gemmnorm.cli.optimize:child_export",
        {**kwargs, "strategy": options.strategy},
        time_limit=options.time_limit,
        on_progress=lambda message: tell(message["stage"]),
    )
    if not written.ok:
        ours = written.stage == WRITING and not written.names_the_file
        document.update(status="failed" if ours else "bad model", detail=written.why())
        return
    found = written.value
    document["export"] = found
    if not found["matches"]:
        document.update(status="no chain", detail=f"{model}: {found['report']}")
        return
    tell("verifying")
    verdict = verify(
        model,
        temporary,
        seeds=options.seeds,
        device=device,
        time_limit=options.time_limit,
        on_progress=lambda message: tell(verify_stage(message)),
    )
    document["verify"] = _renamed(verdict, str(temporary), document["output"])
    if not verdict["equal"]:
        status = "bad model" if verdict["exit_code"] == 2 else "not equal"
        document.update(status=status, detail=document["verify"]["reason"])
        return
    document["status"] = "equal"
    tell("timing")
    timing_options = FileOptions(device=device, compile=options.compile, limit_s=options.timing_limit_s)
    times = bench_files(
        model, [temporary], timing_options, time_limit=options.time_limit, tell=tell, command=document["command"]
    )
    document["bench"] = _renamed(times, str(temporary), document["output"])
    document["compiled"] = None if device == "cuda" else _compile_check(temporary, found["target"], tell)
    document["said"] = what_was_run(document)


def verify_stage(message: dict[str, Any]) -> str:
    """What verify is at, in a few words."""
    place = f", {message['done']} of {message['total']}" if message.get("total") else ""
    return f"verifying{place}"


def child_export(model_path: str, output_path: str, target: str | None, strategy: str | None) -> dict[str, Any]:
    """Runs in the isolated process: the report on the model's chains, and the replacement written if there are any."""
    progress({"stage": f"loading {model_path}"})
    found = read_model(model_path)
    answer: dict[str, Any] = {
        "report": str(found.report),
        "matches": [str(m) for m in found.report.matches],
        "refusals": [str(r) for r in found.report.refusals],
        "target": target,
        "strategy": strategy,
    }
    if found.report.matches:
        progress({"stage": WRITING})
        written = write_replacement(found, output_path, target=target, strategy=strategy)
        answer.update(target=written.target, strategy=written.strategy)
    return answer


def _compile_check(path: Path, target: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Compile the written CUDA code where nvcc is at hand; says what came of it."""
    nvcc = nvcc_version()
    if nvcc is None:
        return {"nvcc": None, "problem": None}
    tell(f"compiling the CUDA code for {target} with nvcc {nvcc}")
    return {"nvcc": nvcc, "problem": compile_check(str(path), target)}


def what_was_run(document: Document) -> list[str]:
    """In so many words: what was run, and what was not."""
    output, device = document["output"], document["device"]
    target, strategy = document["export"]["target"], document["export"]["strategy"]
    if device == "cuda":
        gpu = document["environment"].get("gpu")
        return [f"Run on {gpu}: {output} ({strategy}, {target}) was verified and timed, the fused model was timed."]
    newer = "" if strategy in plan.OWN_GEMM else " and newer"  # Hopper's instructions are no other GPU's
    said = [
        f"Run, on the CPU: {output} and the fused model in the package, both through plain PyTorch ops;"
        f" {output} was verified, both were timed. The CPU's times say nothing about a GPU's.",
        f"Not run: the CUDA kernels in {output} ({strategy}, for {target}{newer}), because there is no GPU here.",
    ]
    compiled = document.get("compiled") or {}
    if compiled.get("nvcc") is None:
        said.append("Not compiled: there is no nvcc here. The file's kernels are built at its first call on a GPU.")
    elif compiled["problem"] is None:
        said.append(f"Compiled for {target}, with nvcc {compiled['nvcc']}, without an error.")
    else:
        said.append(f"nvcc {compiled['nvcc']} did not compile the CUDA code for {target}: {compiled['problem']}")
    return said


def _publish(document: Document, temporary: Path, output: Path) -> None:
    """The replacement under its own name, and the report beside it as JSON and as text."""
    data, words = output.with_suffix(".json"), output.with_suffix(".txt")
    document["files"] = [str(output), str(data), str(words)]
    written = words.with_name(f".{words.name}.{os.getpid()}.tmp")
    written.write_text(report.text(document), encoding="utf-8")
    os.replace(written, words)
    write_json(data, document)
    os.replace(temporary, output)


def _renamed(value: Any, old: str, new: str) -> Any:
    """`value` with the temporary name replaced by the one that the user knows, in every string."""
    if isinstance(value, dict):
        return {_renamed(k, old, new): _renamed(v, old, new) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(v, old, new) for v in value]
    return value.replace(old, new) if isinstance(value, str) else value
