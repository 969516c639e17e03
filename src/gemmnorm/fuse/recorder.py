"""What a `forward` reads from its owner while it is recorded, and what it must not write."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import itertools
import re
import threading
import types
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .outside import (
    attribute_of,
    goes_on,
    is_of_class,
    is_of_users,
    is_settings,
    known_as,
    names_of,
    namespace_of,
    path_of,
)
from .scanning import CONTAINERS, Scan, Untraceable, changed_by, content
from .stand_ins import IN_PLACE, LOST, refusing

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
        held: tuple[Any, ...] = (vars(owner), owner._buffers, owner._parameters, owner._modules)
        self.definitions: dict[Any, dict[str, Any]] = {}  # classes and functions, with their attributes
        self.surroundings: dict[str, Any] = {}
        self.namespaces: dict[str, Any] = {}
        self.containers = {id(container): (container, copy.copy(container)) for container in held}
        self.replaced: list[tuple[dict[str, Any], str, Any]] = []  # globals that `forward` must not call
        self.called = ""  # a method that stayed a call: what attributes are after it, nobody knows
        self.thread = threading.get_ident()
        self.take_up()

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
                known = len(recorder.scan.seen)
                recorder.scan.follow(value)
                if len(recorder.scan.seen) > known:
                    recorder.take_up()
                    recorder.replace_lost()
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
        self.replace_lost()
        return self

    def __exit__(self, *_: object) -> None:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = self.plain_setattr  # type: ignore[method-assign]
        for holder, name, value in self.replaced:
            holder[name] = value

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
        if known and self.may_have_changed(module, name, value):
            raise Untraceable(f"reads {name} of {self.paths[id(module)]} after calling it, which may change {name}")
        path = self.paths[id(module)]
        given = name in vars(module) or isinstance(inspect.getattr_static(type(module), name, None), staticmethod)
        defined = not given or (_is_named(value, name) and name not in vars(module))
        for text, part in self.parts(name, value, defined=defined):
            if (path, text) != ("", "training"):
                self.note_value(path, text, part)

    def may_have_changed(self, module: nn.Module, name: str, value: Any) -> bool:
        """A child that was called before, and holds `module`, assigns that attribute, or uses what is a container."""
        if name == "training":
            return False
        for child in self.tracer.called:
            inside = list(child.modules())
            if any(module is m for m in inside):
                kinds: set[Any] = {type(m) for m in inside}
                return any(name in changed_by(kind)[type(value) in CONTAINERS] for kind in kinds)
        return False

    def parts(self, text: str, value: Any, depth: int = 3, defined: bool = False) -> Iterator[tuple[str, Any]]:
        """(expression, plain value, function or class) of what code may ask of `value`, which `text` stands for: itself
        or, of a configuration, parts whose names occur. What `value` holds is watched from now on.

        `defined`: a function or class under its own name, which stays what it is.
        """
        self.watch(value)
        if goes_on(value):
            line = self.scan.loads.get(re.findall(r"\w+", text)[-1])
            raise Untraceable(f"takes values one after the other from {text}, a {type(value).__name__} (line {line})")
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
        elif isinstance(value, (nn.Module, fx.Proxy)):
            return
        elif callable(value) and (hasattr(value, "__name__") or not is_of_users(type(value))):
            yield from self.parts_of_callable(text, value, depth, defined)
        elif depth and is_settings(value):
            if callable(value) and not isinstance(value, type):
                yield f"{text}.__class__", type(value)
            yield from self.parts_of_settings(text, value, depth)

    def parts_of_callable(self, text: str, value: Any, depth: int, defined: bool) -> Iterator[tuple[str, Any]]:
        """Those of a function by its identity; of what a copy of the owner has a copy of, by what it consists of."""
        names: tuple[str, ...] = ()
        if isinstance(value, types.MethodType):
            names = ("__func__",) if defined or isinstance(value.__self__, nn.Module) else ("__func__", "__self__")
        elif isinstance(value, functools.partial):
            names = ("func", "args", "keywords")
        if not defined:
            yield (f"{text}.__class__", type(value)) if names else (text, value)
        for name in names if depth else ():
            yield from self.parts(f"{text}.{name}", getattr(value, name), depth - 1, defined)
        if depth and isinstance(value, (type, types.FunctionType)) and is_settings(value):
            yield from self.parts_of_settings(text, value, depth)

    def parts_of_settings(self, text: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        of_its_own = not isinstance(value, (type, types.FunctionType))
        if hasattr(value, "__dict__") and of_its_own:
            self.containers.setdefault(id(vars(value)), (vars(value), copy.copy(vars(value))))
        for name in sorted(self.scan.names & names_of(value)):
            part = attribute_of(value, name)
            if not (of_its_own and callable(part) and is_of_class(value, name)):
                defined = name == "__class__" or (_is_named(part, name) and not of_its_own)
                yield from self.parts(f"{text}.{name}", part, depth - 1, defined)

    def watch(self, value: Any) -> None:
        """Notice where a list, a dictionary or the like is changed, or one inside of it."""
        if type(value) in CONTAINERS and id(value) not in self.containers:
            self.containers[id(value)] = (value, copy.copy(value))
        if type(value) in (tuple, *CONTAINERS):
            for item in _items(value):
                if type(item) in (tuple, *CONTAINERS) and id(item) not in self.containers:
                    self.watch(item)

    def take_up(self) -> None:
        """What the scan has found up to now."""
        for container in self.scan.containers:
            self.watch(container)
        for function in self.scan.functions:
            self.watch((function.__defaults__, function.__kwdefaults__))
        for definition in (*filter(is_of_users, self.scan.classes), *self.scan.functions):
            self.definitions.setdefault(definition, _attributes(definition))
        self.note_globals()

    def replace_lost(self) -> None:
        """`from time import perf_counter`: as `stand_ins.honest` does for `time.perf_counter`."""
        for holder, name in self.scan.globals:
            if isinstance(holder, types.CellType):
                continue
            reason = _lost(holder.get(name))
            if reason is not None:
                self.replaced.append((holder, name, holder[name]))
                holder[name] = refusing(holder[name], reason)

    def note_globals(self) -> None:
        """What `forward`, and what it calls, may read of modules' globals, closures and the owner's class."""
        if "__class__" in self.scan.names:
            for text, part in self.parts("__class__", self.scan.owner, defined=True):
                self.note_value("", text, part)
        decorated = [vars(function).get("__wrapped__") for function in self.scan.functions]
        replaced = [(id(holder), name) for holder, name, _ in self.replaced]
        for holder, name in self.scan.globals:
            if name.startswith("__") or (id(holder), name) in replaced:
                continue
            if isinstance(holder, types.CellType):
                place, (known, namespace), value = "cell_contents", (known_as(holder, name), holder), content(holder)
            else:
                place, (known, namespace), value = name, namespace_of(holder), holder[name]
            if path_of(value) is None or value.__name__ != name:
                defined = _is_named(value, name) or any(value is function for function in decorated)
                found = dict(self.parts(f"{known}.{place}", value, defined=defined))
                self.surroundings |= found
                self.namespaces |= {known: namespace} if found else {}
                self.hold(*found.values())

    def note_value(self, path: str, name: str, value: Any) -> None:
        if (path, name, value) not in self.attributes:
            self.attributes.append((path, name, value))
            self.hold(value)

    def hold(self, *values: Any) -> None:
        """Have the functions and classes among `values` in the namespace."""
        held = [v for v in values if callable(v) and v is not Absent and path_of(v) is None]
        self.namespaces |= {known_as(value): value for value in held}

    def restore(self) -> str | None:
        """Change what `forward` has changed of lists, dictionaries, objects and classes back; what it was."""
        found = None
        for container, before in self.containers.values():
            pairs = [(list(_items(c))) for c in (container, before)]
            if len(pairs[0]) != len(pairs[1]) or any(a is not b for a, b in zip(*pairs, strict=True)):
                container.clear()
                (container.update if hasattr(container, "update") else container.extend)(before)
                found = "a list or dictionary, or an object that the module holds"
        for definition, attributes in self.definitions.items():
            kind, now = "class" if isinstance(definition, type) else "function", _attributes(definition)
            changed = [name for name, value in attributes.items() if now.get(name, Absent) is not value]
            for name in changed:
                setattr(definition, name, attributes[name])
            for name in now.keys() - attributes:
                delattr(definition, name)
            for name in (*changed, *(now.keys() - attributes)):
                found = f"{name} of the {kind} {definition.__name__} (line {self.scan.stores.get(name)})"
        return found


def _is_known(value: Any) -> bool:
    """A plain value, or a container of such, which can be written down."""
    if type(value) in (tuple, torch.Size, list, set, dict):
        return all(map(_is_known, _items(value)))
    return type(value) in (*PLAIN, *_WRITTEN) or path_of(value) is not None


def _lost(value: Any) -> str | None:
    """Why code that is recorded must not call `value`; None where it may."""
    return next((why for _, function, why in LOST if value is function), None)


def _is_named(value: Any, name: str) -> bool:
    """A function or class by its own name."""
    return callable(value) and getattr(value, "__name__", None) == name


def _attributes(definition: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(definition).items() if not name.startswith("__")}


def _items(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        yield from itertools.chain.from_iterable(container.items())
    else:
        yield from container
