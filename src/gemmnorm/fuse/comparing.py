"""What a `forward` has read, as expressions that are true where it is something else."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .outside import import_line, known_as, path_of


class Absent:
    """In place of an attribute's value: the owner has none of that name."""


@dataclass(frozen=True)
class Length:
    """Of a list or the like whose items are looked at one by one."""

    length: int


@dataclass(frozen=True)
class Keys:
    """Of a dictionary whose values are looked at one by one."""

    keys: tuple[Any, ...]


@dataclass(frozen=True)
class Without:
    """A dictionary of attributes that lacks one, which is the class's."""

    name: str


@dataclass(frozen=True)
class Equal:
    """A value that does not change, such as a path; it is held to be compared with."""

    value: Any

    @property
    def __name__(self) -> str:
        return type(self.value).__name__


@dataclass(frozen=True)
class Kept:
    """A large container of plain values: a copy is kept, instead of one made anew whenever it is compared with."""

    value: Any

    @cached_property
    def name(self) -> str:
        """Equal for equal ones, so that equal owners have equal texts."""
        return f"{KEPT}{hashlib.sha256(literal(self.value).encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Names:
    """Of a module's children, parameters or buffers that are not None."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Same:
    """The very module at `path` below the owner."""

    path: str


@dataclass(frozen=True)
class Compared:
    """How an attribute of a module, or the module, compares with one of the module at `path`."""

    names: tuple[str, ...]
    sign: str
    path: str
    others: tuple[str, ...]
    answer: bool


@dataclass(frozen=True)
class IsInstance:
    """Whether it is one of a class, or of one out of several."""

    classes: tuple[type, ...]
    answer: bool


@dataclass(frozen=True)
class OfClass:
    """A module of this very class, fused or not."""

    cls: type


HOLDS = "as_recorded"  # a variable: whether a recording does
KEPT = "kept_"  # what the names of kept containers begin with
UNLIKE = "unlike"  # what the function of that name is called in a text
# Asks for a part of what an attribute or a global is, which may be None by now.
_MAY_RAISE = re.compile(
    r"\b(self|globals_\w+|held_\w+)(\.\w+|\[[^]]*\])[.\[]|\[\*|\b(len|unlike)\((self|globals_|held_)"
)
_CONTAINERS = (list, tuple, torch.Size, set, frozenset, dict)
Render = Callable[[str], str]  # a dotted path below the owner ("" for itself) → an expression


def differs(expression: str, value: Any, render: Render) -> str:
    """An expression that is true where `expression` is not `value`."""
    if value is Absent:
        return "hasattr({}, {!r})".format(*expression.rsplit(".", 1))
    if isinstance(value, Length):
        return f"len({expression}) != {value.length}"
    if isinstance(value, Keys):
        return f"[*{expression}] != {literal([*value.keys])}"
    if isinstance(value, Without):
        return f"{value.name!r} in {expression}"
    if isinstance(value, Equal):
        return f"{expression} != {known_as(value.value)}"
    if isinstance(value, Kept):
        return f"{UNLIKE}({expression}, {value.name})"
    if isinstance(value, Names):
        held = f"[name for name, held in {expression}.items() if held is not None]"
        return f"{held} != {literal([*value.names])}"
    if isinstance(value, Same):
        return f"{expression} is not {render(value.path)}"
    if isinstance(value, Compared):
        left, right = ".".join((expression, *value.names)), ".".join((render(value.path), *value.others))
        return f"({left} {value.sign} {right}) is not {value.answer}"
    if isinstance(value, OfClass):
        return f'getattr({expression}, "_gemmnorm_original", {expression}.__class__) is not {literal(value.cls)}'
    if isinstance(value, IsInstance):
        classes = literal(value.classes) if len(value.classes) > 1 else literal(value.classes[0])
        return f"{'not ' * value.answer}isinstance({expression}, {classes})"
    if value is None or isinstance(value, bool) or callable(value):
        return f"{expression} is not {literal(value)}"
    if type(value) in (int, float) and not expression.endswith(")"):  # and no tensor of that value
        return f"type({expression}) is not {type(value).__name__} or {expression} != {literal(value)}"
    if type(value) in _CONTAINERS and _has_look_alikes(value):
        return f"{UNLIKE}({expression}, {literal(value)})"
    return f"{expression} != {literal(value)}"


def _has_look_alikes(value: Any) -> bool:
    """What compares equal need not be the same: 1 and 1.0, sizes and a tuple, dictionaries in another order."""
    if type(value) in (list, tuple, set, frozenset):
        return any(map(_has_look_alikes, value))
    return isinstance(value, (int, float, complex, torch.Size, dict))


def unlike(value: Any, recorded: Any) -> bool:
    """`value` is not `recorded`, or of another type, or in another order; or something inside of it is."""
    if type(value) is not type(recorded):
        return True
    if isinstance(recorded, dict):
        return _any_unlike([*value], [*recorded]) or _any_unlike([*value.values()], [*recorded.values()])
    if isinstance(recorded, (list, tuple)):
        return _any_unlike(value, recorded)
    if isinstance(recorded, (set, frozenset)):
        return bool(value != recorded) or {type(v) for v in value} != {type(v) for v in recorded}
    if value != recorded:  # a branch, as Dynamo of PyTorch 2.4 wants it
        return True
    return recorded == 0 and str(value) != str(recorded)  # -0.0


def _any_unlike(values: Collection[Any], recorded: Collection[Any]) -> bool:
    if len(values) != len(recorded):
        return True
    pairs = [(a, b) for a, b in zip(values, recorded, strict=False) if a is not b]  # Dynamo 2.4 has no other `map`
    return any(unlike(a, b) for a, b in pairs)


def lines_for(namespace: Iterable[tuple[str, Any]]) -> Iterable[str]:
    """What makes what a text refers to, in a file of its own; there `unlike` is no more than `!=`."""
    for name, value in namespace:
        yield f"{name} = {literal(value)}" if name.startswith(KEPT) else import_line(name, value)


def questions(conditions: Sequence[str], catches: bool) -> tuple[list[str], str, str]:
    """(statements, an expression after them that is true where none of `conditions` is, and one where any is).

    With `catches` a recording does not hold where asking raises. An exported file may catch nothing: there it raises.
    """
    text = " or ".join(conditions)
    if not catches or not any(map(_MAY_RAISE.search, conditions)):
        return [], f"not ({text})", text
    # `not (not …)` becomes one instruction on Python 3.14, which Dynamo does not expect.
    return [
        "try:", f"    {HOLDS} = False if {text} else True", "except Exception:", f"    {HOLDS} = False",
    ], HOLDS, f"not {HOLDS}"  # fmt: skip


def below(prefix: str, value: Any) -> Any:
    """The same where the owner is itself a descendant, at `prefix`."""
    return replace(value, path=f"{prefix}.{value.path}".rstrip(".")) if isinstance(value, (Same, Compared)) else value


def literal(value: Any) -> str:
    """A plain value, a function, a class, or a container of such, as Python; `repr(math.inf)` is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{float(value)}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, (set, frozenset)):
        inside = f"{{{', '.join(sorted(map(literal, value)))}}}" if value else "set()"
        return f"frozenset({inside})" if isinstance(value, frozenset) else inside
    if isinstance(value, torch.Size):
        return f"torch.Size({literal([*value])})"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    return path_of(value) or (known_as(value) if callable(value) else repr(value))


def named_by(conditions: Iterable[str]) -> Iterator[tuple[str, Any, str]]:
    """(name, value, the line that imports it) of what conditions refer to, besides what was read."""
    text = "\n".join(conditions)
    for module in (torch, os, logging):
        if f"{module.__name__}." in text:
            yield module.__name__, module, f"import {module.__name__}"
    if f"{UNLIKE}(" in text:
        yield UNLIKE, unlike, f"from operator import ne as {UNLIKE}"
