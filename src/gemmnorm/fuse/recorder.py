"""What a `forward` reads from its owner while it is recorded, and what it must not write."""

from __future__ import annotations

import copy
import enum
import inspect
import threading
import types
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .scanning import CONTAINERS, Scan, Untraceable
from .stand_ins import IN_PLACE

PLAIN = (bool, int, float, str, type(None))


class Absent:
    """In place of an attribute's value: the owner has none of that name."""


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


class Recorder:
    """While active, notes what `forward` reads from the owner and its descendants, and forbids assignments.

    Both work by replacing methods of `nn.Module`, as `torch.fx` itself does while it traces.
    """

    def __init__(self, owner: nn.Module, tracer: Any, whole: Container[str], scan: Scan) -> None:
        """`whole`: methods of `owner` that stay calls; `scan` reads what `forward` turns out to call."""
        self.owner, self.tracer, self.whole, self.scan = owner, tracer, whole, scan
        self.paths = {id(module): path for path, module in owner.named_modules()}
        self.attributes: list[tuple[str, str, Any]] = []
        held = (vars(owner), owner._buffers, owner._parameters, owner._modules, *scan.containers)
        self.containers = {id(container): (container, copy.copy(container)) for container in held}
        self.called = ""  # a method that stayed a call: what attributes are after it, nobody knows
        self.thread = threading.get_ident()

    def __enter__(self) -> Recorder:
        recorder, plain_setattr = self, nn.Module.__setattr__

        def getattribute(module: nn.Module, name: str) -> Any:
            if module is recorder.owner and name in recorder.whole and recorder.watches(module):
                return recorder.call_of(name)
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                if recorder.watches(module) and not name.startswith("__"):
                    recorder.note_missing(module, name)
                raise
            if not name.startswith("__") and recorder.watches(module):
                recorder.scan.follow(value)
                recorder.note(module, name, value)
            return value

        def setattribute(module: nn.Module, name: str, value: Any) -> None:
            if recorder.watches(module):
                if recorder.is_the_same(module, name, value):
                    return
                raise Untraceable(f"assigns self.{name}")
            if threading.get_ident() == recorder.thread:
                recorder.tracer.made[id(module)] = module
            plain_setattr(module, name, value)

        self.plain_setattr = plain_setattr
        nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = setattribute  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = self.plain_setattr  # type: ignore[method-assign]

    def watches(self, module: nn.Module) -> bool:
        return id(module) in self.paths and threading.get_ident() == self.thread

    def is_the_same(self, module: nn.Module, name: str, value: Any) -> bool:
        """`self.steps += 1`: the buffer or parameter has been changed in place, and stays what it is."""
        node = value.node if isinstance(value, fx.Proxy) else None
        if node is None or node.target not in IN_PLACE:
            return False
        path = f"{self.paths[id(module)]}.{name}".lstrip(".")
        changed: Any = node.args[0]
        return bool(changed.op == "get_attr" and changed.target == path)

    def call_of(self, name: str) -> Callable[..., Any]:
        """What stands for a method that stays a call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.called = name
            return self.tracer.create_proxy("call_function", Method(name), args, kwargs)

        return call

    def note_missing(self, module: nn.Module, name: str) -> None:
        """An attribute that is registered as None, or that is not there. (All others are found elsewhere.)"""
        registries = [module.__dict__.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")]
        found = [registry[name] for registry in registries if name in registry]
        if not found and not hasattr(type(module), name):
            self.note(module, name, Absent)
        elif found and found[0] is None:
            self.note(module, name, None)

    def note(self, module: nn.Module, name: str, value: Any) -> None:
        plain = value is Absent or _is_plain(value) or (type(value) is tuple and all(map(_is_plain, value)))
        is_container = type(value) in CONTAINERS and name not in ("_modules", "_parameters", "_buffers")
        if self.called and (is_container or (plain and name != "training")):
            raise Untraceable(f"reads {name} after calling {self.called}, which cannot be recorded")
        path = self.paths[id(module)]
        if is_container:
            self.containers.setdefault(id(value), (value, copy.copy(value)))
            if type(value) in (list, dict) and all(map(_is_plain, _items(value))):
                plain, value = True, copy.copy(value)
        elif isinstance(value, enum.Enum):
            self.note_value(path, f"{name}.name", value.name)
        elif _is_settings(value):
            self.containers.setdefault(id(vars(value)), (vars(value), copy.copy(vars(value))))
            for attribute in sorted(self.scan.names & {*vars(value), *dir(type(value))}):
                inner = vars(value).get(attribute, inspect.getattr_static(type(value), attribute, None))
                if _is_plain(inner):
                    self.note_value(path, f"{name}.{attribute}", inner)
        if plain and (path, name) != ("", "training"):
            self.note_value(path, name, value)

    def note_value(self, path: str, name: str, value: Any) -> None:
        if (path, name, value) not in self.attributes:
            self.attributes.append((path, name, value))

    def restore(self) -> bool:
        """Change what `forward` has changed of lists, dictionaries and configurations back; whether there was any."""
        changed = False
        for container, before in self.containers.values():
            pairs = [(list(_items(c))) for c in (container, before)]
            if len(pairs[0]) != len(pairs[1]) or any(a is not b for a, b in zip(*pairs, strict=True)):
                container.clear()
                (container.update if hasattr(container, "update") else container.extend)(before)
                changed = True
        return changed


def _is_plain(value: Any) -> bool:
    return type(value) in (*PLAIN, torch.dtype) or path_of(value) is not None


def path_of(value: Any) -> str | None:
    """`torch.nn.functional.relu`: where a function of PyTorch's is found."""
    name = getattr(value, "__name__", None) if callable(value) and not isinstance(value, (type, nn.Module)) else None
    places = (("torch.nn.functional", F), ("torch", torch))
    return next((f"{path}.{name}" for path, m in places if name and getattr(m, name, None) is value), None)


def _is_settings(value: Any) -> bool:
    """An object with attributes of its own that is neither PyTorch's nor to be called: a configuration."""
    known = (nn.Module, Tensor, fx.Proxy, type, types.ModuleType, torch.Generator)
    return hasattr(value, "__dict__") and not isinstance(value, known) and not callable(value)


def _items(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        for key, value in container.items():
            yield from (key, value)
    else:
        yield from container
