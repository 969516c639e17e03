"""What a `forward` reads from its owner while it is recorded, and what it must not write."""

from __future__ import annotations

import copy
import enum
import itertools
import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .outside import attribute_of, is_of_users, is_settings, names_of, namespace_of, path_of
from .scanning import CONTAINERS, Scan, Untraceable
from .stand_ins import IN_PLACE

PLAIN = (bool, int, float, str, type(None))
_WRITTEN = (complex, range, torch.dtype, torch.device)  # whose `literal` is theirs too
_ITEMS = 16  # of a list of configurations


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
        self.classes = {cls: _attributes(cls) for cls in scan.classes if is_of_users(cls)}
        self.surroundings: dict[str, Any] = {}
        self.namespaces: dict[str, Any] = {}
        self.containers = {id(container): (container, copy.copy(container)) for container in held}
        self.called = ""  # a method that stayed a call: what attributes are after it, nobody knows
        self.thread = threading.get_ident()
        self.note_globals()

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
        if name in ("_modules", "_parameters", "_buffers"):
            return
        known = value is Absent or _is_known(value) or type(value) in CONTAINERS
        if self.called and known and name != "training":
            raise Untraceable(f"reads {name} after calling {self.called}, which cannot be recorded")
        path = self.paths[id(module)]
        for text, part in self.parts(name, value):
            if (path, text) != ("", "training"):
                self.note_value(path, text, part)

    def parts(self, text: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
        """(expression, plain value) of what code may ask of `value`, which `text` stands for: itself or, of a
        configuration, parts whose names occur. What `value` holds is watched from now on."""
        self.watch(value)
        if value is Absent or _is_known(value):
            yield text, copy.deepcopy(value) if type(value) in CONTAINERS else value
        elif isinstance(value, enum.Enum):
            yield f"{text}.name", value.name
        elif isinstance(value, dict) and depth:
            for key in [key for key in value if type(key) is str and key in self.scan.names]:
                yield from self.parts(f"{text}[{key!r}]", value[key], depth - 1)
        elif type(value) in (list, tuple) and depth:
            for i, item in enumerate(value[:_ITEMS]):
                yield from self.parts(f"{text}[{i}]", item, depth - 1)
        elif depth and is_settings(value):
            if hasattr(value, "__dict__") and not isinstance(value, type):
                self.containers.setdefault(id(vars(value)), (vars(value), copy.copy(vars(value))))
            for name in sorted(self.scan.names & names_of(value)):
                yield from self.parts(f"{text}.{name}", attribute_of(value, name), depth - 1)

    def watch(self, value: Any) -> None:
        """Notice where a list, a dictionary or the like is changed, or one inside of it."""
        if type(value) in CONTAINERS and id(value) not in self.containers:
            self.containers[id(value)] = (value, copy.copy(value))
        if type(value) in (tuple, *CONTAINERS):
            for item in _items(value):
                if type(item) in (tuple, *CONTAINERS) and id(item) not in self.containers:
                    self.watch(item)

    def note_globals(self) -> None:
        """What `forward`, and what it calls, may read of modules' globals and of the owner's class."""
        if "__class__" in self.scan.names:
            for text, part in self.parts("__class__", self.scan.owner):
                self.note_value("", text, part)
        for names, name in self.scan.globals:
            text, namespace = namespace_of(names)
            value = names[name]
            imported = path_of(value) is not None and value.__name__ == name
            if not imported and not name.startswith("__"):
                found = dict(self.parts(f"{text}.{name}", value))
                self.surroundings |= found
                self.namespaces |= {text: namespace} if found else {}

    def note_value(self, path: str, name: str, value: Any) -> None:
        if (path, name, value) not in self.attributes:
            self.attributes.append((path, name, value))

    def restore(self) -> str | None:
        """Change what `forward` has changed of lists, dictionaries, objects and classes back; what it was."""
        found = None
        for container, before in self.containers.values():
            pairs = [(list(_items(c))) for c in (container, before)]
            if len(pairs[0]) != len(pairs[1]) or any(a is not b for a, b in zip(*pairs, strict=True)):
                container.clear()
                (container.update if hasattr(container, "update") else container.extend)(before)
                found = "a list or dictionary, or an object that the module holds"
        for cls, attributes in self.classes.items():
            for name in [name for name, value in attributes.items() if vars(cls).get(name, Absent) is not value]:
                setattr(cls, name, attributes[name])
                found = f"{name} of the class {cls.__name__} (line {self.scan.stores.get(name)})"
            for name in _attributes(cls).keys() - attributes:
                delattr(cls, name)
                found = f"{name} of the class {cls.__name__} (line {self.scan.stores.get(name)})"
        return found


def _is_known(value: Any) -> bool:
    """A plain value, or a container of such, which can be written down."""
    if type(value) in (tuple, torch.Size, list, set, dict):
        return all(map(_is_known, _items(value)))
    return type(value) in (*PLAIN, *_WRITTEN) or path_of(value) is not None


def _attributes(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("__")}


def _items(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        yield from itertools.chain.from_iterable(container.items())
    else:
        yield from container
