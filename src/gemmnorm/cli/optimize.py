"""`gemmnorm optimize MODEL.py`: find the chains, write the replacement, verify it, time it, write the report.

The replacement is written under a temporary name beside its place and renamed once `verify` has found it equal, so that
nothing half-written or wrong is ever left. User files run in processes of their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    write_text,
)
from ..errors import GemmNormError, GemmNormValueError
from ..export import (
    MARK,
    check_hub_folder,
    compile_check,
    hub_files,
    imports_beside,
    read_model,
    write_hub,
    write_replacement,
)
from ..fuse import FuseReport
from ..userfiles import progress, run_isolated
from ..verify import Effort, verify
from . import report
from .explain import plan_documents
from .page import page

WRITING = "writing the replacement"


@dataclass(frozen=True)
class OptimizeOptions:
    """What `optimize` may do.

    Attributes:
        hub: also write a project for Hugging Face's kernel-builder into this folder, whose name is the kernel's.
        output: the replacement's path; None for `<stem of MODEL>_new.py` in the current directory.
        target: `sm_XX`; None for the GPU that is here, else `sm_80`.
        strategy: None for the planner's choice.
        device: None for the GPU where there is one.
        precision: "fp32", "fp16" or "bf16": what both models and all inputs are cast to; None: they stay as they are.
        seeds: how many draws of weights and inputs `verify` compares; None for what the effort asks.
        effort: "quick", "usual" or "thorough", of `verify`.
        compile: time torch.compile as well, and without a GPU compile the written kernels where there is an nvcc.
        time_limit: seconds for each of the isolated steps (write, verify, time).
        timing_limit_s: phases are left out of the timing that would take longer than this in all.
    """

    output: str | None = None
    hub: str | None = None
    target: str | None = None
    strategy: str | None = None
    device: str | None = None
    precision: str | None = None
    seeds: int | None = None
    effort: Effort = "usual"
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

    Its `kernels` says whether the written kernels were "run", on a GPU, or else "compiled" or "not compiled": then the
    comparison was of plain PyTorch ops, which the file uses without a GPU. Its `status` is "equal" (the files in
    `files` were written), "not equal" (nothing was written; `verify` or `detail` says why), "not compiled" (equal
    without its kernels, which nvcc refused; nothing was written), "failed" (the replacement could not be written),
    "refused" (no file can be made of this model, or for this strategy or target), "bad model" or "no chain" (`detail`
    says why).

    Raises:
        GemmNormValueError: the output would overwrite the model, or its directory does not exist; or `hub` is no folder
            for a kernel.
    """
    options = options or OptimizeOptions()
    output = output_path(model_path, options.output)
    check_output(output, Path(model_path))
    if options.hub is not None:
        check_hub_folder(options.hub)
    device = str(default_device(options.device))
    document = new_document(
        "optimize",
        command=command,
        model=str(model_path),
        output=str(output),
        device=device,
        precision=options.precision,
        environment=environment(default_device(device)),
        status="not equal",
        detail="",
        export=None,
        verify=None,
        bench=None,
        said=[],
        files=[],
        compiled=None,
        kernels=None,
    )
    temporary = output.with_name(f".{output.stem}.{os.getpid()}.tmp.py")
    try:
        hub = _steps(document, options, temporary, lambda text: tell(text.replace(str(temporary), str(output))))
        if document["status"] == "equal":
            if options.hub is not None:
                verified = [document["verify"]["reason"], *document["said"]]
                document["files"] += map(str, write_hub(hub, options.hub, verified))
            _publish(document, temporary, output)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return document


def check_output(output: Path, model: Path) -> None:
    """Before anything runs: can the files be written, and is nothing lost that this tool did not write?"""
    if output.resolve() == model.resolve() or (output.exists() and output.samefile(model)):
        raise GemmNormValueError(f"output: expected a path other than the model's own; got {output}")
    if output.suffix != ".py" or output.is_dir():
        raise GemmNormValueError(f"output: expected a file that ends in .py; got {output}")
    if not output.parent.is_dir():
        raise GemmNormValueError(f"output: expected a path in an existing directory; got {output}")
    if not os.access(output.parent, os.W_OK):
        raise GemmNormValueError(f"output: the directory of {output} is not writable")
    if output.exists() and MARK not in output.read_text(encoding="utf-8", errors="replace"):
        raise GemmNormValueError(f"output: {output} is there already, and was not written by gemmnorm")
    data, *others = beside = reports_of(output)
    if any(path.exists() for path in beside) and not _is_report(data):
        raise GemmNormValueError(
            f"output: the report would overwrite {data} or {' or '.join(map(str, others))}, which gemmnorm did not"
            " write; choose another name"
        )


def output_path(model_path: str | Path, output: str | None) -> Path:
    """Where the replacement goes."""
    return Path(output or f"{Path(model_path).stem}_new.py")


def reports_of(output: Path) -> list[Path]:
    """Where the report goes: as JSON, as text, as a page."""
    return [output.with_suffix(suffix) for suffix in (".json", ".txt", ".html")]


def _is_report(path: Path) -> bool:
    """Whether the file is the report of an earlier `optimize`."""
    try:
        return report.kind_of(report.load(path)) == "optimize"
    except GemmNormError:
        return False


def _steps(
    document: Document, options: OptimizeOptions, temporary: Path, tell: Callable[[str], None]
) -> dict[str, str]:
    """Write to `temporary`, verify and time; leaves the verdict and its grounds in `document`.

    Returns the files for the Hub, if they are wanted and the model is equal.
    """
    hub = _export(document, options, temporary, tell)
    if hub is None:
        return {}
    model, device = document["model"], document["device"]
    tell("verifying")
    verdict = verify(
        model,
        temporary,
        seeds=options.seeds,
        effort=options.effort,
        device=device,
        precision=options.precision,
        time_limit=options.time_limit,
        on_progress=lambda message: tell(verify_stage(message)),
    )
    document["verify"] = _renamed(verdict, str(temporary), document["output"])
    if not verdict["equal"]:
        status = "bad model" if verdict["exit_code"] == 2 else "not equal"
        document.update(status=status, detail=document["verify"]["reason"])
        here, there = Path(document["output"]).resolve().parent, Path(model).resolve().parent
        if here != there and "FileNotFoundError" in document["detail"]:
            document["detail"] += f"; where the model reads files beside itself, write this one there too: -o {there}/…"
        return {}
    document["status"] = "equal"
    tell("timing")
    timing_options = FileOptions(
        device=device,
        precision=options.precision,
        compile=options.compile,
        budget_s=1.5 if default_device(device).type == "cuda" else 0.5,  # a CPU's times say nothing about a GPU's
        limit_s=options.timing_limit_s,
    )
    times = bench_files(
        model, [temporary], timing_options, time_limit=options.time_limit, tell=tell, command=document["command"]
    )
    document["bench"] = _renamed(times, str(temporary), document["output"])
    _compile_unless_run(document, options, temporary, tell)
    document["said"] = what_was_run(document)
    return hub


def _export(
    document: Document, options: OptimizeOptions, temporary: Path, tell: Callable[[str], None]
) -> dict[str, str] | None:
    """Write to `temporary`; returns the files for the Hub, or None where `document` says why nothing was written."""
    model = document["model"]
    tell("looking for chains")
    kwargs = {"model_path": model, "output_path": str(temporary), "precision": options.precision}
    kwargs["hub"] = None if options.hub is None else check_hub_folder(options.hub)
    written = run_isolated(
        "gemmnorm.cli.optimize:child_export",
        {**kwargs, "target": options.target, "strategy": options.strategy},
        time_limit=options.time_limit,
        on_progress=lambda message: tell(message["stage"]),
    )
    if not written.ok:
        ours = written.stage == WRITING and not written.names_the_file
        document.update(status="failed" if ours else "bad model", detail=written.why())
        return None
    found = written.value
    hub: dict[str, str] = found.pop("hub", {})
    document["export"] = found
    if not found["matches"]:
        document.update(status="no chain", detail=f"{model}: {found['report']}")
        return None
    if "refused" in found:
        document.update(status="refused", detail=found.pop("refused"))
        return None
    return hub


def _compile_unless_run(
    document: Document, options: OptimizeOptions, temporary: Path, tell: Callable[[str], None]
) -> None:
    """Leaves in `document` whether the kernels ran, and where there is no GPU whether they compile."""
    document["kernels"] = "run"
    if default_device(document["device"]).type != "cuda":
        document["compiled"] = (
            _compile_check(temporary, document["export"]["target"], tell) if options.compile else {"skipped": True}
        )
        done = document["compiled"].get("nvcc") and document["compiled"]["problem"] is None
        document["kernels"] = "compiled" if done else "not compiled"
    problem = (document["compiled"] or {}).get("problem")
    if problem is not None:
        document.update(status="not compiled", detail=f"nvcc did not compile the CUDA code: {problem}")


def verify_stage(message: dict[str, Any]) -> str:
    """What verify is at, in a few words."""
    place = f", {message['done']} of {message['total']}" if message.get("total") else ""
    left = f", about {message['left_s']:.0f} s left" if message.get("left_s") else ""
    return f"verifying{place}{left}"


def child_export(
    model_path: str,
    output_path: str,
    precision: str | None,
    target: str | None,
    strategy: str | None,
    hub: str | None = None,
) -> dict[str, Any]:
    """Runs in the isolated process: the report on the model's chains, and the replacement written if there are any."""
    progress({"stage": f"loading {model_path}"})
    found = read_model(model_path, precision)
    answer: dict[str, Any] = {
        "report": str(_as_written(found.report)),
        "matches": [str(m) for m in found.report.matches],
        "refusals": [str(r) for r in found.report.refusals],
        "target": target,
        "strategy": strategy,
    }
    if not found.report.matches:  # because there are none, or because its forward does not run?
        found.file.run_once()
    else:
        progress({"stage": WRITING})
        try:
            written = write_replacement(found, output_path, target=target, strategy=strategy)
            if hub is not None:
                answer["hub"] = hub_files(written, hub)
        except GemmNormValueError as reason:  # float64, a strategy that does not serve, a SyncBatchNorm
            return {**answer, "refused": str(reason)}
        answer.update(target=written.target, strategy=written.strategy, plans=plan_documents(written.plans))
        answer["beside"] = imports_beside(written.model, found.path.parent)
    return answer


def _as_written(found: FuseReport) -> FuseReport:
    """The report of a model whose chains are written out: all of them are fused."""
    return replace(found, matches=tuple(replace(match, fused=True) for match in found.matches))


def _compile_check(path: Path, target: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Compile the written CUDA code where nvcc is at hand; says what came of it."""
    nvcc = nvcc_version()
    if nvcc is None:
        return {"nvcc": None, "problem": None}
    tell(f"compiling the CUDA code for {target} with nvcc {nvcc}")
    return {"nvcc": nvcc, "problem": compile_check(str(path), target)}


def what_was_run(document: Document) -> list[str]:
    """In so many words: what was run, and what was not."""
    output = document["output"]
    target, strategy = document["export"]["target"], document["export"]["strategy"]
    beside = ", ".join(document["export"].get("beside") or ())
    needs = [f"{output} imports {beside} from the model's folder: where it goes, that has to go too."] if beside else []
    if document["kernels"] == "run":
        gpu = document["environment"].get("gpu")
        run = f"Run on {gpu}: {output} ({strategy}, {target}) was verified and timed, the fused model was timed."
        return [run, *needs]
    newer = "" if strategy in plan.OWN_GEMM else " and newer"  # Hopper's instructions are no other GPU's
    said = [
        f"Run, on the CPU: {output} and the fused model in the package, both through plain PyTorch ops;"
        f" {output} was verified, both were timed. The CPU's times say nothing about a GPU's.",
        f"Not run: the CUDA kernels in {output} ({strategy}, for {target}{newer}), because there is no GPU here.",
    ]
    compiled = document.get("compiled") or {}
    if compiled.get("skipped"):
        said.append("Not compiled: --no-compile. The file's kernels are built at its first call on a GPU.")
    elif compiled.get("nvcc") is None:
        said.append("Not compiled: there is no nvcc here. The file's kernels are built at its first call on a GPU.")
    elif compiled["problem"] is None:
        said.append(f"Compiled for {target}, with nvcc {compiled['nvcc']}, without an error.")
    else:
        said.append(f"nvcc {compiled['nvcc']} did not compile the CUDA code for {target}: {compiled['problem']}")
    return said + needs


def _publish(document: Document, temporary: Path, output: Path) -> None:
    """The replacement under its own name, and the report beside it."""
    data, words, shown = reports_of(output)
    document["files"][:0] = [str(path) for path in (output, data, words, shown)]
    write_text(words, report.text(document))
    write_text(shown, page(document))
    write_json(data, document)
    os.replace(temporary, output.resolve())  # what a link leads to, not the link


def _renamed(value: Any, old: str, new: str) -> Any:
    """`value` with the temporary name replaced by the one that the user knows, in every string."""
    if isinstance(value, dict):
        return {_renamed(k, old, new): _renamed(v, old, new) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(v, old, new) for v in value]
    return value.replace(old, new) if isinstance(value, str) else value
