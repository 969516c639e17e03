"""What a forward returns, taken apart: its containers and objects, its tensors, its numbers, and everything else."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Outputs", "as_real", "take_apart"]

_PLACE = re.compile(r" at 0x[0-9a-fA-F]+|\buser_\w+_[0-9a-f]{12}\.")  # where an object lies, and in which file's module
_ORDINARY = (tuple, list, dict, OrderedDict, defaultdict)  # without their names in the structure; others have theirs


@dataclass
class Outputs:
    """tensors    themselves; a complex one as its real and imaginary parts, a view of it
    numbers    floating-point numbers and arrays that are no tensors: computed, as a rule, and compared as tensors are
    others     what is compared exactly: a plain value, or how it prints
    structure  "(Tensor, {'aux': Tensor}, Out(y=complex Tensor))"
    """

    tensors: list[Tensor]
    numbers: list[Tensor]
    others: list[Any]
    structure: str


def as_real(value: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, a view of it; any other as it is."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def take_apart(output: Any) -> Outputs:
    """The parts of an output, in their order.

    Raises:
        TypeError: a tensor is sparse.
    """
    found = Outputs([], [], [], "")
    found.structure = _walk(output, found, ())
    return found


def _walk(value: Any, found: Outputs, within: tuple[int, ...]) -> str:
    """Put the parts of a value into `found`; returns its structure."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"expected dense tensors as outputs, got one of layout {value.layout}")
        found.tensors.append(as_real(value))
        return "complex Tensor" if value.is_complex() else "Tensor"
    around = None if id(value) in within else _around(value)
    if around is not None:
        opening, closing = around
        parts = [label + _walk(part, found, (*within, id(value))) for label, part in _parts(value)]
        return f"{opening}{', '.join(parts)}{',' * (opening == '(' and closing == ')' and len(parts) == 1)}{closing}"
    number = _number(value)
    if number is not None:
        found.numbers.append(number)
    else:
        plain = type(value) in (bool, int, str, type(None))
        shown = getattr(value, "__qualname__", None) or repr(value)
        found.others.append(value if plain else _PLACE.sub("", shown))
    return type(value).__name__


def _around(value: Any) -> tuple[str, str] | None:
    """What stands around the parts of a container or object; None for what is compared as a whole."""
    kind = type(value)
    name = "" if kind in _ORDINARY or (hasattr(kind, "_fields") and kind.__bases__ == (tuple,)) else kind.__name__
    if isinstance(value, Mapping):
        return f"{name}{{", "}"
    if isinstance(value, tuple):
        return f"{name}(", ")"
    if isinstance(value, (list, deque)):
        return f"{name}[", "]"
    if isinstance(value, (type, ModuleType, Enum)) or callable(value) or hasattr(value, "__array__"):
        return None
    return (f"{name}(", ")") if is_dataclass(value) or getattr(value, "__dict__", None) else None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of what `_around` does not call a whole, each with what stands before it."""
    if isinstance(value, Mapping):
        yield from ((f"{key!r}: ", part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f"{name}=", part) for name, part in zip(value._fields, value, strict=True))
    elif isinstance(value, (tuple, list, deque)):
        yield from (("", part) for part in value)
    else:
        names = [field.name for field in fields(value)] if is_dataclass(value) else list(vars(value))
        yield from ((f"{name}=", getattr(value, name, None)) for name in names)


def _number(value: Any) -> Tensor | None:
    """A number or an array of NumPy's as a tensor if it is a floating-point one."""
    if isinstance(value, float):
        return torch.tensor(float(value), dtype=torch.float32)
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if not hasattr(value, "__array__") or kind != "f":
        return None
    number = torch.as_tensor(value).clone()
    return number.float() if number.dtype == torch.float64 else number
