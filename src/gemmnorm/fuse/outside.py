"""What a `forward` reads that is not its owner's: globals of modules, and what configurations and classes hold."""

from __future__ import annotations

import inspect
import re
import sys
import types
import weakref
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

GLOBALS = "globals_"  # what the names of namespaces begin with
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


def import_line(name: str, namespace: Any) -> str:
    """What makes a namespace known as `name`."""
    return f"import {getattr(namespace, '__name__', '__main__')} as {name}"


def path_of(value: Any) -> str | None:
    """`torch.nn.functional.relu`: where a function of PyTorch's is found."""
    other = isinstance(value, (type, nn.Module, fx.Proxy)) or not callable(value)
    name = None if other else getattr(value, "__name__", None)
    places = (("torch.nn.functional", F), ("torch", torch))
    return next((f"{path}.{name}" for path, m in places if name and getattr(m, name, None) is value), None)


def is_of_users(cls: type) -> bool:
    """A class of neither Python's nor PyTorch's own."""
    return cls.__module__.partition(".")[0] not in _INSTALLED


def is_settings(value: Any) -> bool:
    """A class, or an object with attributes of its own that is neither PyTorch's nor to be called: a configuration."""
    if isinstance(value, type):
        return is_of_users(value)
    known = (nn.Module, Tensor, fx.Proxy, types.ModuleType, torch.Generator)
    has_attributes = hasattr(value, "__dict__") or is_of_users(type(value))  # or slots
    return has_attributes and not isinstance(value, known) and not callable(value)


def names_of(value: Any) -> set[str]:
    """Attributes of a configuration, those that it makes from its keys included."""
    if isinstance(value, type):
        return {name for cls in value.__mro__ if is_of_users(cls) for name in vars(cls)}
    keys = value.keys() if hasattr(type(value), "__getattr__") and hasattr(type(value), "keys") else ()
    return {*getattr(value, "__dict__", ()), *dir(type(value)), *(key for key in keys if isinstance(key, str))}


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
