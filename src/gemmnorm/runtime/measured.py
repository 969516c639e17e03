"""What `gemmnorm tune` has measured on this machine: a file beside the compiled kernels for each kind of GPU.

The planner gets it when the GPU is first described. A table of other sources, another PyTorch or another GPU is
ignored, and so is a broken one, with a warning.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import GemmNormWarning
from ..plan import Chip, chip_for, choice, tables
from . import driver, sources

Lines = dict[tuple[str, ...], str]  # `plan.tables.key_here` → the candidate's name


class Gpu(NamedTuple):
    """A GPU's name, and what the planner knows of it."""

    name: str
    chip: Chip


@functools.lru_cache(maxsize=64)
def described(device: torch.device) -> Gpu:
    """An NVIDIA GPU; from here on the planner has its table."""
    properties = torch.cuda.get_device_properties(device)
    memory = driver.memory_of(torch.cuda.current_device() if device.index is None else device.index)
    chip = chip_for(properties.major * 10 + properties.minor, properties.multi_processor_count, *memory)
    found = Gpu(properties.name, chip)
    if lines := read(found):  # beside those of another GPU that is the same to the planner
        choice.set_measured_here(chip, tables.here.get(chip, {}) | lines)
    return found


def folder() -> Path:
    """Where tables are."""
    return driver.cache_directory()


def path(gpu: Gpu) -> Path:
    """Where its table is, if there is one."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu.name).strip("-")
    return folder() / f"measured-{name}-sm_{gpu.chip.arch}-{gpu.chip.multiprocessors}.json"


def document(gpu: Gpu, lines: Lines) -> dict[str, Any]:
    """A table as its file has it."""
    return {**_head(gpu), "lines": [[*key, name] for key, name in sorted(lines.items())]}


def _head(gpu: Gpu) -> dict[str, Any]:
    """What a table is valid for."""
    return {
        "kind": "gemmnorm measured",
        "gpu": gpu.name,
        "arch": gpu.chip.arch,
        "multiprocessors": gpu.chip.multiprocessors,
        "sources": sources.source_hash(),
        "torch": torch.__version__,
    }


def read(gpu: Gpu) -> Lines:
    """The GPU's table; empty where there is none that is valid."""
    try:
        file = path(gpu)
        found = json.loads(file.read_text(encoding="utf-8"))
        if {**found, **_head(gpu)} != found:
            return {}
        return {tuple(map(str, key)): str(name) for *key, name in found["lines"]}
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # the last: nobody has a home here
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"{file} is ignored ({why}); `gemmnorm tune --forget` deletes it", GemmNormWarning, stacklevel=2)
        return {}


class Table(NamedTuple):
    """A file of this folder: its GPU's name, how many lines, and whether they are of these sources and this PyTorch."""

    gpu: str
    lines: int
    current: bool


def _files() -> list[Path]:
    """The tables' files; none where nobody may look."""
    try:
        return sorted(folder().glob("measured-*.json"))
    except OSError:
        return []


def stored() -> list[Table]:
    """The tables there are, of any GPU; a broken one has no lines."""
    found = []
    for file in _files():
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            current = (document["sources"], document["torch"]) == (sources.source_hash(), torch.__version__)
            found.append(Table(str(document["gpu"]), len(document["lines"]), current))
        except (OSError, ValueError, KeyError, TypeError):
            found.append(Table(file.name, 0, False))
    return found


def forget() -> list[Path]:
    """Delete every table, of other GPUs and of other sources too; the files that there were."""
    found = _files()
    for file in found:
        file.unlink(missing_ok=True)
    for chip in tables.here:
        choice.set_measured_here(chip, {})
    return found
