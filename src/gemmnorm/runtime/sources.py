"""The text of the kernels: device sources with their includes inlined, and the entry of every launch of a plan."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from .. import activations
from ..plan import Launch, Problem
from ..plan import params as params_module

KERNELS = Path(__file__).parents[1] / "kernels"
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.M)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def device_source(files: Iterable[str]) -> str:
    """The text of `files` (under kernels/) and of all they include, each file once, in the order of need."""
    seen: list[str] = []
    return "".join(_inlined(name, seen) for name in files)


def _inlined(name: str, seen: list[str]) -> str:
    if name in seen:
        return ""
    seen.append(name)
    text = _read(name).replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda match: _inlined(match.group(1), seen), text)


@functools.cache
def _read(name: str) -> str:
    return (KERNELS / name).read_text(encoding="utf-8")


def type_names(entry: str) -> tuple[str, str]:
    """The names of an entry's `Config` and `Params`."""
    camel = "".join(part.capitalize() for part in entry.split("_"))
    return f"{camel}Config", f"{camel}Params"


def entry_source(launch: Launch, problem: Problem) -> str:
    """`Config` and `Params` of a launch, and its `__global__` function: one call of the device function."""
    config, params = type_names(launch.entry)
    view = params.removesuffix("Params") + "View"
    text = params_module.config_text(config, launch) + params_module.struct_text(params, launch, problem)
    head = f'extern "C" __global__ void __launch_bounds__({launch.block}, {launch.resident}) {launch.entry}(\n'
    call = f"gemmnorm::{launch.function}<{config}>"
    if not launch.maps:
        # By value: the compiler knows that no store changes a field, and neither reads it again nor splits stores.
        return f"{text}{head}    const {params} p) {{\n  {call}(p);\n}}\n"
    text += params_module.view_text(view, params, launch, problem)
    return f"{text}{head}    const __grid_constant__ {params} p) {{\n  {call}({view}(p));\n}}\n"


def translation_unit(launch: Launch, problem: Problem, *more: tuple[Launch, Problem]) -> str:
    """All that NVRTC needs to compile one launch, or several of one source file and activation by other names."""
    return (
        device_source([launch.source, *launch.parts])
        + "\n"
        + activations.cuda_struct(problem.activation)
        + "\n"
        + entry_source(launch, problem)
        + "".join(entry_source(*other) for other in more)
    )


@functools.lru_cache(maxsize=1)
def source_hash() -> str:
    """SHA-256 of what decides the figures in a result file: the kernel sources, comments stripped, and the planner."""
    digest = hashlib.sha256()
    for path in sorted(p for p in KERNELS.rglob("*") if p.suffix in (".cu", ".cuh")):
        text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        digest.update(path.relative_to(KERNELS).as_posix().encode() + b"\0" + " ".join(text.split()).encode() + b"\0")
    for path in sorted((KERNELS.parent / "plan").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
