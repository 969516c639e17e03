"""The parameters of a `forward`, and how a recording stands for them."""

from __future__ import annotations

import inspect
import types
from typing import Any

from .scanning import Untraceable
from .values import PLAIN

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(forward: types.FunctionType) -> tuple[inspect.Parameter, ...]:
    found = tuple(inspect.signature(forward).parameters.values())[1:]
    for p in found:
        if p.default is not p.empty and type(p.default) not in PLAIN:
            raise Untraceable(f"has a default value for {p.name} that is not a plain one")
    return found


def is_input(p: inspect.Parameter, parameters: tuple[inspect.Parameter, ...]) -> bool:
    """`forward(self, *args)`: it is recorded with one."""
    return p.kind is p.VAR_POSITIONAL and p is parameters[0]


def is_mapping(p: inspect.Parameter, parameters: tuple[inspect.Parameter, ...]) -> bool:
    """`forward(self, **batch)`: a dictionary of inputs."""
    return p.kind is p.VAR_KEYWORD and p is parameters[0]


def by_position(forward: Any) -> types.FunctionType:
    """`forward(self, **batch)` as `forward(self, batch)`, so that a stand-in can take the dictionary's place."""
    code = getattr(forward, "__code__", None)
    if code is None or code.co_argcount != 1 or not code.co_flags & inspect.CO_VARKEYWORDS:
        raise Untraceable("takes keyword arguments alone, by way of another function")
    code = code.replace(co_flags=code.co_flags & ~inspect.CO_VARKEYWORDS, co_argcount=2)
    return types.FunctionType(code, forward.__globals__, forward.__name__, None, forward.__closure__)
