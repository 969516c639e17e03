"""What a `forward` reads that is not its owner's: globals, closures, and what configurations and classes hold."""

from __future__ import annotations

import inspect
import random
import re
import sys
import types
import weakref
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

GLOBALS = "globals_"  # what the names of namespaces begin with
HELD = "held_"  # and those of functions, classes and closure cells
_INSTALLED = {*sys.stdlib_module_names, "torch"}


class Namespace:
    """Globals that are no module's in `sys.modules`, as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


_namespaces: weakref.WeakValueDictionary[int, Namespace] = weakref.WeakValueDictionary()


def namespace_of(names: dict[str, Any]) -> tuple[str, Any]:
    """What has the globals `names` as its attributes, a module if there is one, and what a text calls it."""
    found = sys.modules.get(str(names.get("__name__")))
    if found is not None and vars(found) is names:
        return f"{GLOBALS}of_{re.sub(r'[^0-9a-zA-Z_]', '_', found.__name__)}", found
    namespace = _namespaces.get(id(names)) or _namespaces.setdefault(id(names), Namespace(names))
    return f"{GLOBALS}{id(names)}", namespace


def known_as(value: Any, name: str = "") -> str:
    """What a text calls a function, a class or a closure cell, which it knows by identity."""
    name = name or getattr(value, "__name__", type(value).__name__)
    return f"{HELD}{re.sub(r'[^0-9a-zA-Z_]', '_', name)}_{id(value)}"


def numbered(text: str) -> str:
    """`text` in which what is `known_as` has a number in the place of its identity, another in each process."""
    held = dict.fromkeys(re.findall(rf"\b{HELD}\w+?_\d{{6,}}\b", text))
    for number, name in enumerate(held, 1):
        text = re.sub(rf"\b{name}\b", f"{name.rpartition('_')[0]}_{number}", text)
    return text


def import_line(name: str, value: Any) -> str:
    """What makes a namespace, a function or a class known as `name`."""
    if name.startswith(HELD):
        return f"from {getattr(value, '__module__', None)} import {getattr(value, '__qualname__', None)} as {name}"
    return f"import {getattr(value, '__name__', '__main__')} as {name}"


def is_importable(value: Any) -> bool:
    """Found where `import_line` says."""
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    return module is not None and getattr(module, str(getattr(value, "__qualname__", None)), None) is value


def path_of(value: Any) -> str | None:
    """`torch.nn.functional.relu`: where a function of PyTorch's is found."""
    other = isinstance(value, (type, nn.Module, fx.Proxy)) or not callable(value)
    name = None if other else getattr(value, "__name__", None)
    places = (("torch.nn.functional", F), ("torch", torch))
    return next((f"{path}.{name}" for path, m in places if name and getattr(m, name, None) is value), None)


def goes_on(value: Any) -> bool:
    """What it gives next is not what it gave last: an iterator, a source of random numbers."""
    return isinstance(value, (Iterator, random.Random)) or str(type(value).__module__).startswith("numpy.random")


def is_of_users(defined: Any) -> bool:
    """A class or function of neither Python's nor PyTorch's own."""
    return str(getattr(defined, "__module__", None) or "torch").partition(".")[0] not in _INSTALLED


def is_settings(value: Any) -> bool:
    """A class, or an object with attributes of its own that is not PyTorch's: a configuration."""
    if isinstance(value, type):
        return is_of_users(value)
    known = (nn.Module, Tensor, fx.Proxy, types.ModuleType, torch.Generator)
    has_attributes = hasattr(value, "__dict__") or is_of_users(type(value))  # or slots
    return has_attributes and not isinstance(value, known)


def names_of(value: Any) -> set[str]:
    """Attributes of a configuration, those that it makes from its keys included."""
    if isinstance(value, types.FunctionType):
        return set(vars(value))
    if isinstance(value, type):
        return {name for cls in value.__mro__ if is_of_users(cls) for name in vars(cls)}
    keys = value.keys() if hasattr(type(value), "__getattr__") and hasattr(type(value), "keys") else ()
    return {*getattr(value, "__dict__", ()), *dir(type(value)), *(key for key in keys if isinstance(key, str))}


def is_of_class(value: Any, name: str) -> bool:
    """The attribute of that name is one of the class of `value`."""
    return inspect.getattr_static(value, name, None) is inspect.getattr_static(type(value), name, None)


def attribute_of(value: Any, name: str) -> Any:
    """An attribute of a configuration, also where it is computed; a method, or what fails, as it lies there."""
    found = inspect.getattr_static(value, name, None)
    computed = hasattr(type(found), "__get__") and not callable(found) and not isinstance(found, cached_property)
    if isinstance(value, type) or not (computed or (found is None and hasattr(type(value), "__getattr__"))):
        return found
    try:
        return getattr(value, name)
    except Exception:
        return found
