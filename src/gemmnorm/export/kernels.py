"""The kernels of an exported file, and how C++ is broken into lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import activations
from ..errors import GemmNormRuntimeError
from ..plan import Buffer, Launch, Map, Plan, Problem, Product
from ..runtime.sources import device_source, entry_source

WIDTH = 116

_KNOWN = {
    Launch: {"entry", "source", "function", "config", "params", "roles", "absent", "grid", "block", "resident", "shared",
             "cooperative", "cluster", "maps", "numbers", "only_for"},
    Map: {"role", "tensor", "rows", "columns", "exact", "fits"},
    Product: {"out", "left", "right", "transpose_left", "transpose_right"},
    Buffer: {"role", "dtype", "shape"},
    Plan: {"problem", "phase", "strategy", "steps", "outputs", "workspace", "aliases", "reasons", "counters", "seconds",
           "floor"},
}  # fmt: skip


class Kernels:
    """The `__global__` functions of a file, each distinct one once and under a name of its own."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.structs: dict[str | None, tuple[str, str]] = {}
        self.names: dict[str, str] = {}
        self.entries: list[str] = []

    def name(self, launch: Launch, problem: Problem, suffix: str) -> str:
        """The name of the kernel that `launch` calls."""
        check_known(launch)
        if launch.source not in self.files:
            self.files.append(launch.source)
        if launch.activates:
            struct = self._activation(problem.activation)
            config = tuple((name, struct if name == "Activation" else value) for name, value in launch.config)
            launch = replace(launch, config=config)
        text = entry_source(launch, problem)
        if text not in self.names:
            self.names[text] = name = self._free_name(launch.entry + suffix, problem)
            self.entries.append(entry_source(replace(launch, entry=name), problem))
        return self.names[text]

    def _free_name(self, name: str, problem: Problem) -> str:
        taken = set(self.names.values())
        if name in taken and not problem.training:
            name += "_evaluation"
        base, n = name, 1
        while name in taken:
            n += 1
            name = f"{base}_{n}"
        return name

    def _activation(self, activation: str | None) -> str:
        """The name of the struct that computes `activation`: Identity, Relu, LeakyRelu, …"""
        if activation not in self.structs:
            base = "Identity" if activation is None else _camel(activations.parse(activation)[0].name)
            taken, name, n = {name for name, _ in self.structs.values()}, base, 1
            while name in taken:
                n += 1
                name = f"{base}{n}"
            text = activations.cuda_struct(activation).replace("struct Activation", f"struct {name}")
            self.structs[activation] = (name, text)
        return self.structs[activation][0]

    def text(self) -> str:
        structs = (text for _, text in self.structs.values())
        return "\n".join([device_source(self.files), *structs, *self.entries])


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def wrap(head: str, items: Sequence[str], tail: str, between: str = ",") -> str:
    """`head item, item, … tail`, broken into lines that hang below the first item."""
    lines, line, indent = [], head, " " * len(head)
    for i, item in enumerate(items):
        piece = item + (between if i + 1 < len(items) else tail)
        gap = "" if line in (head, indent) else " "
        if gap and len(line) + 1 + len(piece) > WIDTH:
            lines.append(line)
            line, gap = indent, ""
        line += gap + piece
    return "\n".join([*lines, line])


def check_known(item: Any) -> None:
    """Raise for a field that this printer does not know and that is not at its default."""
    known = _KNOWN[type(item)]
    for entry in dataclasses.fields(item):
        if entry.name not in known and getattr(item, entry.name) != entry.default:
            kind = type(item).__name__
            raise GemmNormRuntimeError(
                f"export: the {kind} has {entry.name}={getattr(item, entry.name)!r}, which it cannot print as C++ yet"
            )
