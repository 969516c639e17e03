"""What a `forward` reads from its owner while it is recorded, and what it must not write."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import itertools
import re
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from .comparing import Absent, Equal, IsInstance, Keys, Length, Names, Same, Without
from .guards import IN_PLACE
from .keeping import Keeper
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
from .scanning import CONTAINERS, Scan, Untraceable, changed_by, content, is_bound
from .scanning import is_of_users as is_of_user
from .structure import as_written, forward_of
from .values import is_a_value, is_known, is_named, may_change, plain_of
from .watching import by_us, function_of

_REGISTRIES = ("_modules", "_parameters", "_buffers")
_ITEMS = 64  # of a list of configurations
_DEEP = 16  # configurations inside of each other
_MANY, _FAR = 400, 20_000  # conditions, values to look at for them


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
        self.surroundings: dict[str, Any] = {}
        self.namespaces: dict[str, Any] = {}
        self.keeper = Keeper()
        self.keeper.containers |= {id(container): (container, copy.copy(container)) for container in held}
        self.noted: dict[tuple[int, str, int], tuple[nn.Module, str, Any]] = {}  # to look at when `scan` knows more
        self.relations: list[tuple[str, Any]] = []  # (path of a module, what it was found to be)
        self.opaque: set[type] = set()  # classes of installed packages, of which a method was called and not read
        self.helpers: dict[tuple[Any, str, Any], None] = {}  # class, name and function of their methods that ran
        self.looked = 0  # at so many values
        self.called = ""  # a method that stayed a call: what attributes are after it, nobody knows
        self.thread = threading.get_ident()
        tracer.is_one_of = self.is_one_of
        self.take_up()

    def __enter__(self) -> Recorder:
        recorder, plain_setattr, plain_init = self, nn.Module.__setattr__, nn.Module.__init__

        def getattribute(module: nn.Module, name: str) -> Any:
            if module is recorder.owner and name in recorder.whole and recorder.watches(module):
                return recorder.call_of(name)
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                if recorder.watches(module) and not name.startswith("__"):
                    recorder.note_missing(module, name)
                raise
            if name.startswith("__"):
                return value
            if not recorder.watches(module):
                recorder.refuse_stranger(module, name)
                return value
            if name in _REGISTRIES:
                return recorder.registry(module, name, value)
            with recorder.tracer.watch.paused():
                known = len(recorder.scan.seen)
                recorder.scan.follow(value)
                if len(recorder.scan.seen) > known:
                    recorder.look_again()
                recorder.note(module, name, value)
                return recorder.tracer.named(value) if isinstance(value, Tensor) else value

        def setattribute(module: nn.Module, name: str, value: Any) -> None:
            if recorder.watches(module):
                if recorder.is_the_same(module, name, value):
                    return
                raise Untraceable(f"assigns self.{name}")
            plain_setattr(module, name, value)

        def initialise(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if threading.get_ident() == recorder.thread:
                recorder.tracer.made[id(module)] = module
            plain_init(module, *args, **kwargs)

        self.plain_setattr, self.plain_init = plain_setattr, plain_init
        nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = setattribute  # type: ignore[method-assign, assignment]
        nn.Module.__init__ = initialise  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = self.plain_setattr  # type: ignore[method-assign]
        nn.Module.__init__ = self.plain_init  # type: ignore[method-assign]

    def watches(self, module: nn.Module) -> bool:
        return id(module) in self.paths and threading.get_ident() == self.thread

    def refuse_stranger(self, module: nn.Module, name: str) -> None:
        if id(module) in self.tracer.made or threading.get_ident() != self.thread:
            return
        if is_of_user(sys._getframe(2).f_code.co_filename):
            raise Untraceable(f"reads {name} of a module that is none of its own")

    def registry(self, module: nn.Module, kind: str, held: dict[str, Any]) -> dict[str, Any]:
        """The children, parameters or buffers of `module` for who lists them: these may be others later."""
        if by_us(sys._getframe(2)):
            return held
        path, names = self.paths[id(module)], tuple(name for name, value in held.items() if value is not None)
        self.keeper.watch(held)
        if kind == "_modules":
            if not self.is_in_a_list(path):
                positions = tuple(map(str, range(len(held))))
                listed = isinstance(module, (nn.Sequential, nn.ModuleList)) and names == positions
                self.relate(path, Length(len(names))) if listed else self.note_value(path, kind, Names(names))
            return held
        self.note_value(path, kind, Names(names))
        given = {name: self.tracer.named(value) for name, value in held.items()}
        self.keeper.watch(given)
        return given

    def is_in_a_list(self, path: str) -> bool:
        """Its children are among what `analysis.child_names` has of the owner."""
        above = path.split(".") if path else []
        modules = [self.owner.get_submodule(".".join(above[: i + 1])) for i in range(len(above))]
        return all(isinstance(m, (nn.ModuleList, nn.ModuleDict)) for m in modules)

    def relate(self, path: str, value: Any) -> None:
        if (path, value) not in self.relations:
            self.relations.append((path, value))
            self.hold(*(value.classes if isinstance(value, IsInstance) else ()))

    def is_one_of(self, module: nn.Module, classes: tuple[type, ...], answer: bool) -> None:
        """`forward` has asked whether a module is."""
        if self.paths.get(id(module)):
            self.relate(self.paths[id(module)], IsInstance(classes, answer))

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
        known = value is Absent or is_known(value) or isinstance(value, CONTAINERS)
        if self.called and known and name != "training":
            raise Untraceable(f"reads {name} after calling {self.called}, which cannot be recorded")
        if known and self.may_have_changed(module, name, value):
            raise Untraceable(f"reads {name} of {self.paths[id(module)]} after calling it, which may change {name}")
        if not isinstance(value, (nn.Module, Tensor, fx.Proxy)):
            self.noted[id(module), name, id(value)] = (module, name, value)
            self.note_parts(module, name, value)

    def note_parts(self, module: nn.Module, name: str, value: Any) -> None:
        path = self.paths[id(module)]
        given = name in vars(module) or isinstance(inspect.getattr_static(type(module), name, None), staticmethod)
        defined = not given or (is_named(value, name) and name not in vars(module))
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
                return any(name in changed_by(kind)[isinstance(value, CONTAINERS)] for kind in kinds)
        return False

    def parts(
        self, text: str, value: Any, inside: tuple[int, ...] = (), defined: bool = False
    ) -> Iterator[tuple[str, Any]]:
        """(expression, value to compare with) of what code may ask of `value`, which `text` stands for: itself or, of a
        configuration, parts whose names occur. What `value` holds is watched from now on.

        `inside`: ids of what it is a part of.
        `defined`: a function or class under its own name, which stays what it is.
        """
        self.looked += 1
        self.keeper.watch(value)
        if goes_on(value):
            line = self.scan.loads.get(re.findall(r"\w+", text)[-1])
            raise Untraceable(f"takes values one after the other from {text}, a {type(value).__name__} (line {line})")
        if value is Absent or is_known(value):
            yield text, copy.deepcopy(value) if type(value) in CONTAINERS else value
        elif isinstance(value, enum.Enum):
            yield f"{text}.name", value.name
        elif isinstance(value, nn.Module):
            if inside and id(value) in self.paths:
                yield text, Same(self.paths[id(value)])
        elif isinstance(value, (Tensor, fx.Proxy, classmethod, staticmethod, property)) or id(value) in inside:
            return
        elif len(inside) > _DEEP or self.looked > _FAR:
            raise Untraceable(f"reads {text[:80]}, which holds too much to be watched")
        else:
            yield from self.parts_of_object(text, value, (*inside, id(value)), defined)

    def parts_of_object(
        self, text: str, value: Any, inside: tuple[int, ...], defined: bool
    ) -> Iterator[tuple[str, Any]]:
        if plain := plain_of(value):
            yield f"{text}.__class__", type(value)
            yield plain[0].format(text), plain[1]
        elif may_change(value):
            raise Untraceable(f"reads {text}, a {type(value).__name__}, whose content may change")
        elif callable(value) and (hasattr(value, "__name__") or not is_of_users(type(value))):
            yield from self.parts_of_callable(text, value, inside, defined)
        elif is_a_value(value):
            yield text, Equal(value)
        else:
            if isinstance(value, (*CONTAINERS, tuple, frozenset, Mapping)):
                yield from self.parts_of_container(text, value, inside)
            if is_settings(value):
                yield f"{text}.__class__", type(value)
                yield from self.parts_of_settings(text, value, inside)

    def parts_of_container(self, text: str, value: Any, inside: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        """Those of its items, and which and how many there are."""
        if isinstance(value, (set, frozenset)):
            yield text, Equal(frozenset(value))
            return
        with_keys = isinstance(value, Mapping) and all(map(is_known, value))
        yield text, Keys(tuple(value)) if with_keys else Length(len(value))
        items: Any = [*value.items()][:_ITEMS] if with_keys else ()
        if isinstance(value, (list, tuple, deque)):
            items = enumerate(itertools.islice(value, _ITEMS))
        for key, item in items:
            yield from self.parts(f"{text}[{key!r}]", item, inside)

    def parts_of_callable(
        self, text: str, value: Any, inside: tuple[int, ...], defined: bool
    ) -> Iterator[tuple[str, Any]]:
        """Those of a function by its identity; of what a copy of the owner has a copy of, by what it consists of."""
        names: tuple[str, ...] = ()
        if is_bound(value):
            function = "__func__" if isinstance(value, types.MethodType) else "__name__"
            names = (function,) if defined or isinstance(value.__self__, nn.Module) else (function, "__self__")
        elif isinstance(value, functools.partial):
            names = ("func", "args", "keywords")
        if not defined:
            yield (f"{text}.__class__", type(value)) if names else (text, value)
        for name in names:
            yield from self.parts(f"{text}.{name}", getattr(value, name), inside, defined)
        if isinstance(value, (type, types.FunctionType)) and is_settings(value):
            yield from self.parts_of_settings(text, value, inside)

    def parts_of_settings(self, text: str, value: Any, inside: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        of_its_own = not isinstance(value, (type, types.FunctionType))
        if of_its_own:
            self.keeper.watch_attributes(value)
        there = {name for name in names_of(value) if not name.startswith("__") or name == "__class__"}
        names = self.scan.names & there
        if type(value) in self.opaque and hasattr(value, "__dict__"):
            names |= {name for name, held in vars(value).items() if name[0] != "_" and is_known(held)}
        for name in sorted(names):
            part = attribute_of(value, name)
            if of_its_own and callable(part) and is_of_class(value, name):
                if getattr(part, "__code__", None) in self.scan.read and hasattr(value, "__dict__"):
                    yield f"{text}.__dict__", Without(name)
                    self.helpers[type(value), name, getattr(type(value), name)] = None
            else:
                defined = name == "__class__" or (is_named(part, name) and not of_its_own)
                yield from self.parts(f"{text}.{name}", part, inside, defined)
        if not isinstance(value, types.FunctionType) and not hasattr(type(value), "__getattr__"):
            for name in sorted(self.scan.optional - there):
                yield f"{text}.{name}", Absent

    def read_before(self, frame: types.FrameType, lenient: bool) -> None:
        """A function of a user's is about to run that nobody has read."""
        self.scan.follow_running(frame.f_code, function_of(frame), frame.f_globals, lenient)
        self.look_again()

    def look_again(self) -> None:
        """At all that was read, now that more names have occurred."""
        known, self.looked = -1, 0
        while known != len(self.scan.names):
            known = len(self.scan.names)
            self.take_up()
            for module, name, value in [*self.noted.values()]:
                self.note_parts(module, name, value)

    def take_up(self) -> None:
        """What the scan has found up to now."""
        for container in self.scan.containers:
            self.keeper.watch(container)
        for function in self.scan.functions:
            self.keeper.watch((function.__defaults__, function.__kwdefaults__))
        for definition in (*filter(is_of_users, self.scan.classes), *self.scan.functions):
            self.keeper.watch_definition(definition)
        self.note_globals()

    def note_globals(self) -> None:
        """What `forward`, and what it calls, may read of modules' globals, closures and the owner's class."""
        if "__class__" in self.scan.names:
            for text, part in self.parts("__class__", self.scan.owner, defined=True):
                self.note_value("", text, part)
        decorated = [vars(function).get("__wrapped__") for function in self.scan.functions]
        for holder, name in self.scan.globals:
            if name.startswith("__"):
                continue
            if isinstance(holder, types.CellType):
                place, (known, namespace), value = "cell_contents", (known_as(holder, name), holder), content(holder)
            else:
                place, (known, namespace), value = name, namespace_of(holder), holder[name]
            if path_of(value) is None or value.__name__ != name:
                defined = is_named(value, name) or any(value is function for function in decorated)
                found = dict(self.parts(f"{known}.{place}", value, defined=defined))
                self.surroundings |= found
                self.namespaces |= {known: namespace} if found else {}
                self.hold(*found.values())

    def note_value(self, path: str, name: str, value: Any) -> None:
        if len(self.attributes) > _MANY:
            raise Untraceable(f"reads more than {_MANY} things that may change")
        if (path, name, value) not in self.attributes:
            self.attributes.append((path, name, value))
            self.hold(value)

    def hold(self, *values: Any) -> None:
        """Have the functions and classes among `values` in the namespace."""
        plain = [v.value if isinstance(v, Equal) else v for v in values if callable(v) or isinstance(v, Equal)]
        self.namespaces |= {known_as(v): v for v in plain if v is not Absent and path_of(v) is None}

    def defined(self) -> tuple[tuple[Any, str, Any], ...]:
        """(module or class, name, function) of the functions that were read and are found there by that name."""
        found = [(as_written(self.scan.owner), "forward", forward_of(self.scan.owner))]
        found += self.helpers
        for holder, name in self.scan.globals:
            if isinstance(holder, dict) and "-packages" not in str(holder.get("__file__")):
                function = holder.get(name)
                if isinstance(function, types.FunctionType) and function in self.scan.functions:
                    found.append((namespace_of(holder)[1], name, function))
        return tuple(dict.fromkeys(found))
