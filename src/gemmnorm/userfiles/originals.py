"""What a user's file replaces in this process: functions of PyTorch and Python that compute, measure, compare or draw.

A file that makes `nn.Linear.forward` slow is fast beside it, and one that exchanges `torch.allclose` is always right.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.testing
from torch import nn
from torch.nn import functional

from .dropout import stands_in

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_MODULES: dict[str, Any] = {
    "time": time, "torch": torch, "torch.autograd": torch.autograd, "torch.cuda": torch.cuda,
    "torch.nn.functional": functional, "torch.testing": torch.testing,
}  # fmt: skip
_CLASSES: dict[str, type] = {
    "torch.Tensor": torch.Tensor, "torch.cuda.Event": torch.cuda.Event, "torch.cuda.Stream": torch.cuda.Stream,
}  # fmt: skip
_OPERATORS = {"add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "eq", "getitem"}
_METHODS = {
    "__call__", "__getattr__", "_call_impl", "_wrapped_call_impl", "forward", "_conv_forward", "_check_input_dim",
    "load_state_dict", "state_dict", "named_parameters", "to", "train",
}  # fmt: skip


class _Written(NamedTuple):
    """A function as it was; of one in Python what it consists of, too."""

    function: object
    code: types.CodeType | None
    defaults: tuple[Any, ...] | None


def functions() -> dict[str, _Written]:
    """What there is to replace, by name."""
    return {name: _written(function) for name, function in _everything()}


def replaced(before: Mapping[str, _Written]) -> list[str]:
    """The names of `before` that stand for another function by now; but PyTorch's compiler wraps one of its own."""
    now = functions()
    gone_or_new = [name for name in {**before, **now} if (name in before) != (name in now) and _is_method(name)]
    return [*gone_or_new, *(name for name, was in before.items() if name in now and _differs(was, now[name]))]


def _is_method(name: str) -> bool:
    """Of a class of `torch.nn`; a module may have more functions by and by."""
    return name.startswith("torch.nn.") and name.rpartition(".")[2] in _METHODS


def _differs(was: _Written, now: _Written) -> bool:
    same = was.function is now.function and was.code is now.code and was.defaults is now.defaults
    return not (same or stands_in(now.function) or _wraps(now, was))


def _wraps(now: _Written, was: _Written) -> bool:
    """A function of PyTorch's that calls the one that was there."""
    function: Any = now.function
    inside = [getattr(function, "__wrapped__", None)]
    with contextlib.suppress(ValueError):  # a cell that is empty yet
        inside += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return any(one is was.function for one in inside) and _is_in_torch(now.code)


def _everything() -> Iterator[tuple[str, object]]:
    for path, module in _MODULES.items():
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and callable(value) and (path == "torch.cuda" or not isinstance(value, type)):
                yield f"{path}.{name}", value
    for path, kind in _CLASSES.items():
        for name in dir(kind):
            if not name.startswith("_") or name.strip("_") in _OPERATORS:
                yield f"{path}.{name}", inspect.getattr_static(kind, name, None)
    for name, value in list(vars(nn).items()):
        if isinstance(value, type) and issubclass(value, nn.Module):
            own = vars(value)
            yield from ((f"torch.nn.{name}.{method}", own[method]) for method in sorted(_METHODS & own.keys()))


def _written(function: Any) -> _Written:
    function = getattr(function, "__func__", function)  # of a static or class method
    plain = isinstance(function, types.FunctionType)
    return _Written(function, function.__code__ if plain else None, function.__defaults__ if plain else None)


def _is_in_torch(code: types.CodeType | None) -> bool:
    """PyTorch's own file has that code at that place, whatever name of a file the code bears."""
    return code is not None and code.co_filename.startswith(_TORCH) and code in _codes(code.co_filename)


@functools.lru_cache(maxsize=64)
def _codes(path: str) -> frozenset[types.CodeType]:
    found: set[types.CodeType] = set()
    with contextlib.suppress(OSError, SyntaxError), open(path, "rb") as file:
        waiting = [compile(file.read(), path, "exec", dont_inherit=True)]
        while waiting:
            code = waiting.pop()
            found.add(code)
            waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(found)
