"""Write a model file's replacement: one self-contained Python file, all CUDA inlined through `load_inline`.

The file is MODEL's source word for word, then the kernels and host functions, printed from the plans that `runtime`
would run (`cpp.py`), then `class ModelNew(Model)` with the `forward` that `fuse` puts into a model (`model_new.py`).

`python -m gemmnorm.tools.export examples` writes `examples/model_new/` anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import plan
from ..errors import GemmNormRuntimeError, GemmNormValueError
from ..plan import Plan, Problem
from . import cpp, matching
from .analysis import OwnerPlan, analyse
from .fuse import FuseReport, fuse_report
from .kernel_text import unused
from .matching import Chain
from .model_file import ModelFile, load_model_file
from .model_new import Generated, Kind, activation_module, python_text

DEFAULT_TARGET = "sm_80"  # runs on every newer GPU as well
NO_NVCC = "there is no nvcc here"
# What outside harnesses refuse anywhere in a file, comments included.
REFUSED = (r"\btry\s*:", r"except", r"\bpass\b", r"\bimport threading\b", r"__file__", r"from __future__")
FOUNDING = ("kb33", "kb39")
ChainKey = tuple[str, Chain]  # the owner's path, and the chain


@dataclass(frozen=True)
class ExportResult:
    """What was written.

    Attributes:
        source: the whole text.
        strategy, target: what the plans were made for.
        plans: every plan in the file.
        report: what was matched and refused in the model.
        path: of the file; None where only the text was asked for.
    """

    source: str
    strategy: str
    target: str
    plans: tuple[Plan, ...]
    report: FuseReport
    path: Path | None = None


def export(
    model_path: str | Path,
    output_path: str | Path | None,
    *,
    target: str | None = None,
    strategy: str | None = None,
) -> ExportResult:
    """Write the replacement of the model in `model_path` to `output_path` (None: only return the text).

    The batch size and the dtypes are those of the file's `get_inputs`; the batch decides tiles and nothing else.

    Args:
        target: `sm_80`, `sm_90`, …: the GPU that the plans are made for; default the one that is here, else `sm_80`.
        strategy: one of `gemmnorm.plan.STRATEGIES`; default the planner's choice for each chain. One that needs TF32
            is written for TF32, and the file uses it only where PyTorch allows that.

    Raises:
        ModelFileError: the model file is bad.
        GemmNormValueError: it holds no chain, or none that the kernels serve (with the reasons, chain by chain).
    """
    loaded = load_model_file(model_path)
    target, chip = _chip(target)
    strategy = plan.check_strategy(strategy)
    model, inputs = _without_memory(loaded)
    owners = [owner for owner in analyse(model) if owner.chains]
    report = fuse_report(model)
    if not owners:
        raise GemmNormValueError(f"{model_path}: {report}")
    problems, kinds = _problems(model, owners, inputs, chip)
    chosen = {key: _strategy(problem, strategy) for key, problem in problems.items()}
    reasons = [f"  {_where(key)}: {choice}" for key, choice in chosen.items() if isinstance(choice, str)]
    if reasons:
        raise GemmNormValueError("\n".join([f"{model_path}: the kernels do not serve every chain", *reasons]))
    choices = {key: choice for key, choice in chosen.items() if not isinstance(choice, str)}
    sites = _sites(choices)
    strategies = list(dict.fromkeys(name for _, name in choices.values()))
    made = Generated(
        owners,
        {key: replace(kind, suffix=sites[choices[key]].suffix) for key, kind in kinds.items()},
        cpp.cuda_text(list(sites.values())),
        " and ".join(strategies),
        target,
        _capabilities(choices.values()),
        any(problem.arithmetic == "tf32" for problem, _ in choices.values()),
    )
    generated = python_text(made, loaded.module)
    for word in REFUSED:
        if refused := re.search(word, generated):
            raise GemmNormRuntimeError(f"export: harnesses refuse {refused.group()!r}, which the generated text holds")
    original, encoding = _read(model_path)
    source = (original if original.endswith("\n") else original + "\n") + generated
    path = None if output_path is None else Path(output_path)
    if path is not None:
        _write(path, source.encode(encoding))
    plans = tuple(p for site in sites.values() for p in site.plans)
    return ExportResult(source, made.strategy, target, plans, report, path)


def _chip(target: str | None) -> tuple[str, plan.Chip]:
    """The target's name and what the planner knows of it."""
    if target is None and torch.cuda.is_available() and torch.version.cuda is not None:
        properties = torch.cuda.get_device_properties(torch.device("cuda"))
        arch = properties.major * 10 + properties.minor
        return f"sm_{arch}", plan.chip_for(arch, properties.multi_processor_count)
    match = re.fullmatch(r"sm_(\d{2,3})a?", target or DEFAULT_TARGET)
    if match is None or int(match.group(1)) < 80:
        raise GemmNormValueError(f"target: expected sm_80 or newer, as in sm_90; got {target!r}")
    return f"sm_{match.group(1)}", plan.chip_for(int(match.group(1)))


def _read(path: str | Path) -> tuple[str, str]:
    """The model file's text, to the letter, and its encoding."""
    data = Path(path).read_bytes()
    with open(path, "rb") as stream:
        encoding, _ = tokenize.detect_encoding(stream.readline)
    return data.decode(encoding), encoding


def _write(path: Path, data: bytes) -> None:
    """All of `data` at `path`, or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# --- the problems that the chains pose -------------------------------------------------------------------------------


def _without_memory(loaded: ModelFile) -> tuple[nn.Module, list[Any]]:
    """The model and its inputs, on the meta device where that can be: only sizes and dtypes are of interest."""
    with contextlib.suppress(Exception), torch.device("meta"):
        return loaded.build(0), loaded.inputs(0)
    model, inputs = loaded.build(0), loaded.inputs(0)
    with contextlib.suppress(Exception):
        model = model.to("meta")
        inputs = [value.to("meta") if isinstance(value, Tensor) else value for value in inputs]
    return model, inputs


def _problems(
    model: nn.Module, owners: list[OwnerPlan], inputs: list[Any], chip: plan.Chip
) -> tuple[dict[ChainKey, Problem], dict[ChainKey, Kind]]:
    """What each chain asks of the planner, and what its callable in the file is made with."""
    linears: dict[ChainKey, Any] = {}
    for owner_plan in owners:
        inside = model.get_submodule(owner_plan.path)
        linears |= {(owner_plan.path, chain): inside.get_submodule(chain.linear) for chain in owner_plan.chains}
    seen = _observed(model, inputs, linears)
    first = next((value for value in inputs if isinstance(value, Tensor) and value.dim()), None)
    batch = first.shape[0] if first is not None else 1024
    problems: dict[ChainKey, Problem] = {}
    kinds: dict[ChainKey, Kind] = {}
    for key, linear in linears.items():
        path, chain = key
        owner = model.get_submodule(path)
        bn: Any = owner.get_submodule(chain.bn)
        scale = matching.resolve(owner, chain.scale) if isinstance(chain.scale, str) else None
        rows, dtype = seen.get(key, (batch, linear.weight.dtype))
        scale_dtype = dtype if scale is None else scale.dtype
        out_dtype = dtype if scale is None or scale.dim() == 0 else torch.promote_types(dtype, scale.dtype)
        norm = [t.dtype for t in (bn.running_mean, bn.running_var, bn.weight, bn.bias) if t is not None]
        linear_vectors = [t.dtype for t in (linear.bias, scale) if t is not None]
        problems[key] = Problem(
            rows,
            chain.in_features,
            chain.out_features,
            _name(dtype),
            _name(out_dtype),
            _common(linear_vectors),
            _common(norm),
            "float32" if dtype == torch.float32 else "native",
            chain.activation,
            True,
            False,
            chain.scale is not None,
            chip,
        )
        module = owner.get_submodule(chain.activation_module) if chain.activation_module is not None else None
        kinds[key] = Kind(
            chain.in_features,
            chain.out_features,
            _name(dtype),
            _name(scale_dtype),
            _common(norm),
            chain.scale is not None,
            chain.activation,
            None if module is None else activation_module(module),
        )
    return problems, kinds


def _observed(
    model: nn.Module, inputs: list[Any], linears: dict[ChainKey, Any]
) -> dict[ChainKey, tuple[int, torch.dtype]]:
    """Rows and dtype of what arrives at each Linear, from one forward without memory; {} where there can be none."""
    seen: dict[ChainKey, tuple[int, torch.dtype]] = {}
    if any(t.device.type != "meta" for t in model.parameters()):
        return seen

    def note(key: ChainKey) -> Any:
        return lambda _, args: seen.setdefault(key, (args[0].shape[0], args[0].dtype)) and None

    handles = [linear.register_forward_pre_hook(note(key)) for key, linear in linears.items()]
    try:
        with contextlib.suppress(Exception), torch.no_grad():
            model.eval()(*inputs)
    finally:
        for handle in handles:
            handle.remove()
        model.train()
    return seen


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _common(dtypes: list[torch.dtype]) -> str:
    """The one dtype of some vectors; float32 where there are none, and what names the trouble where they differ."""
    distinct = list(dict.fromkeys(map(_name, dtypes)))
    return " and ".join(distinct) or "float32"


def _strategy(problem: Problem, wanted: str | None) -> tuple[Problem, str] | str:
    """(the problem, the strategy that serves it), or the reason why none does."""
    for vectors in (problem.linear_dtype, problem.norm_dtype):
        if vectors not in plan.C_TYPES:
            return f"its vectors are {vectors}; the kernels take one of {', '.join(plan.C_TYPES)}"
    if wanted is None:
        found = plan.make_plan(problem).strategy
        return (problem, found) if found != "reference" else str(plan.applicable(problem)["cublas_bn"])
    reason = plan.applicable(problem)[wanted]
    if wanted == "reference":
        return "the reference strategy has no kernels to write out"
    if reason is None:
        return problem, wanted
    tf32 = replace(problem, arithmetic="tf32")
    if problem.dtype == "float32" and plan.applicable(tf32)[wanted] is None:
        return tf32, wanted
    return f"{wanted}: {reason}"


def _sites(choices: dict[ChainKey, tuple[Problem, str]]) -> dict[tuple[Problem, str], cpp.Site]:
    """The plans of every distinct problem, and the ending of its functions' names."""
    distinct = list(dict.fromkeys(choices.values()))
    endings: list[str] = []
    for problem, _ in distinct:
        ending = f"_{problem.in_features}_{problem.out_features}" if len(distinct) > 1 else ""
        endings.append(unused(ending, "_", endings))
    return {choice: cpp.plan_site(*choice, ending) for choice, ending in zip(distinct, endings, strict=True)}


def _capabilities(choices: Any) -> tuple[tuple[int, int], ...]:
    """The compute capabilities that all of the strategies run on; () for every one from 8.0."""

    def serves(arch: int) -> bool:
        return all(plan.applicable(replace(p, chip=plan.chip_for(arch)))[s] is None for p, s in choices)

    known = [arch for arch in plan.CHIPS if serves(arch)]
    return () if len(known) == len(plan.CHIPS) else tuple((arch // 10, arch % 10) for arch in known)


def _where(key: ChainKey) -> str:
    path, chain = key
    return f"{path}: {chain}" if path else str(chain)


# --- compiling what was written --------------------------------------------------------------------------------------


def find_nvcc() -> str | None:
    """nvcc: on the PATH, in CUDA_HOME, or where the toolkit installs itself."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [str(Path(home) / "bin") for home in homes if home]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(places))


def compile_check(path: str | Path, target: str | None = None, time_limit: float = 600.0) -> str | None:
    """Compile the CUDA code of an exported file with nvcc: None when it compiles, else the reason or the log.

    `NO_NVCC` where there is none. Needs no GPU and no CUDA build of PyTorch: its CPU headers do, with an empty
    `cuda_cmake_macros.h`. Nothing of the file is run.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        return NO_NVCC
    source, _ = _read(path)
    names = ("CUDA_DECLARATIONS", "CUDA_KERNELS", "CUDA_HOST")
    parts = [re.search(rf'^{name} = r"""\n(.*?)"""$', source, re.M | re.S) for name in names]
    found = [part.group(1) for part in parts if part is not None]
    if len(found) != len(names):
        return f"{path} holds no CUDA code of gemmnorm's"
    from torch.utils.cpp_extension import include_paths

    arch = plan.target(int(re.sub(r"\D", "", target or DEFAULT_TARGET))).removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        macros = Path(folder, "c10", "cuda", "impl", "cuda_cmake_macros.h")
        macros.parent.mkdir(parents=True)
        macros.write_text("#pragma once\n", encoding="utf-8")
        unit = Path(folder, "unit.cu")
        unit.write_text("".join(found), encoding="utf-8")
        options = [
            f"-std={_cpp_standard()}",
            "--expt-relaxed-constexpr",
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
        ]
        includes = [f"-I{place}" for place in (folder, *include_paths())]
        command = [nvcc, *options, *includes, "-c", str(unit), "-o", str(Path(folder, "unit.o"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit)
        except subprocess.TimeoutExpired:
            return f"nvcc was still at work after {time_limit:.0f} s"
    return None if done.returncode == 0 else (done.stderr or done.stdout)[-4000:]


def _cpp_standard() -> str:
    """The C++ standard that the headers of this PyTorch are written in."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return "c++20" if (major, minor) >= (2, 12) else "c++17"


# --- the files that stand in examples/ -------------------------------------------------------------------------------


def founding_exports(folder: str | Path) -> Iterator[tuple[Path, ExportResult]]:
    """(path, what stands there) for each founding model in `folder` and each strategy that can be written out."""
    for name in FOUNDING:
        for strategy in plan.STRATEGIES:
            for target in (DEFAULT_TARGET, "sm_90"):
                try:
                    made = export(Path(folder, f"{name}.py"), None, target=target, strategy=strategy)
                except GemmNormValueError:
                    continue
                yield Path(folder, "model_new", f"{name}_{strategy}.py"), made
                break


def regenerate(folder: str | Path) -> list[Path]:
    """Write `model_new/<model>_<strategy>.py` for the founding models in `folder`; returns the paths."""
    written = []
    for path, made in founding_exports(folder):
        _write(path, made.source.encode("utf-8"))
        written.append(path)
    return written


if __name__ == "__main__":
    for written_path in regenerate(sys.argv[1] if len(sys.argv) > 1 else "examples"):
        print(written_path)
