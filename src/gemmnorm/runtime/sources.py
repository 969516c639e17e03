"""The text of the kernels: device sources with their includes inlined, and the entry of every launch of a plan."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from .. import activations
from ..plan import NOTHING, ROLES, Launch, Problem, c_types

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


def entry_source(launch: Launch, problem: Problem) -> str:
    """The `__global__` function of a launch: parameters typed by role, one call of the device function."""
    types = c_types(problem)
    parameters = []
    for role in launch.parameters:
        c_type, shape = ROLES[role]
        note = f" /* {shape} */" if shape else ""
        parameters.append(f"    {c_type.format(**types)} {role}{note}")
    constants = f"<{', '.join(launch.constants)}>" if launch.constants else ""
    arguments = ", ".join("nullptr" if role == NOTHING else role for role in launch.arguments)
    return (
        f'extern "C" __global__ void __launch_bounds__({launch.block}, {launch.resident}) {launch.entry}(\n'
        + ",\n".join(parameters)
        + f") {{\n  gemmnorm::{launch.function}{constants}({arguments});\n}}\n"
    )


def translation_unit(launch: Launch, problem: Problem, *more: tuple[Launch, Problem]) -> str:
    """All that NVRTC needs to compile one launch, or several of one source file and activation by other names."""
    return (
        device_source([launch.source])
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
