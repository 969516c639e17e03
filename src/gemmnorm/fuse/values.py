"""Kinds of values, as a recorder tells them apart."""

from __future__ import annotations

import array
import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .keeping import items_of
from .outside import is_of_users, path_of

PLAIN = (bool, int, float, str, type(None))
_WRITTEN = (complex, bytes, range, slice, torch.dtype, torch.device)  # whose `literal` is theirs too
_CONTAINERS = (tuple, torch.Size, list, set, frozenset, dict)
# What makes a plain one of a number or text of a class of its own.
_EXACT: tuple[tuple[Any, str], ...] = ((int, "__int__"), (float, "__float__"), (complex, "__pos__"), (str, "__str__"))
_CHANGING = (bytearray, memoryview, array.array, weakref.ref, weakref.WeakSet)


@dataclass(frozen=True)
class Method:
    """What a node calls that stands for a method of the owner, or of the descendant at `path`."""

    name: str
    path: str = ""

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a recording is written out, not run")


def is_known(value: Any) -> bool:
    """A plain value, or a container of such, which can be written down."""
    if type(value) in _CONTAINERS:
        return all(map(is_known, items_of(value)))
    return type(value) in (*PLAIN, *_WRITTEN) or path_of(value) is not None


def counted(value: Any) -> int:
    """How many values there are in a container, and in those inside of it; 1 where it is none."""
    if type(value) not in _CONTAINERS:
        return 1
    return sum(map(counted, items_of(value)))


def is_named(value: Any, name: str) -> bool:
    """A function or class by its own name."""
    return not isinstance(value, fx.Proxy) and callable(value) and getattr(value, "__name__", None) == name


def plain_of(value: Any) -> tuple[str, Any] | None:
    """What a number or text of a class of its own is without that class, and how to ask for it."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
        plain = value.item()
        return ("{}.item()", plain) if type(plain) in PLAIN else None
    for base, turn in _EXACT:
        if isinstance(value, base):
            return "{}", getattr(base, turn)(value)
    return None


def is_a_value(value: Any) -> bool:
    """One of Python's own classes that compares by what it is, and never changes."""
    cls: Any = type(value)
    compares = cls.__eq__ is not object.__eq__ and cls.__hash__ not in (None, object.__hash__)
    return compares and not is_of_users(cls) and not isinstance(value, (tuple, frozenset, Mapping))


def names_asked(getter: Any) -> set[str]:
    """Of an `operator.attrgetter` or `methodcaller`: the attributes that it asks for."""
    made, arguments = getter.__reduce__()
    while isinstance(made, functools.partial):  # of a methodcaller with keywords
        arguments = (*made.args, *arguments)
        made = made.func
    return {name for text in arguments if isinstance(text, str) for name in text.split(".")}


def may_change(value: Any) -> bool:
    """What it holds may be something else later, and nobody can tell by looking at it from outside."""
    return hasattr(type(value), "__array__") or isinstance(value, _CHANGING)
