"""What a `forward` reads from its owner while it is recorded, and what it must not write."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import operator
import re
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sized
from typing import Any

from torch import Tensor, fx, nn

from . import effects, guards
from .comparing import Absent, Compared, Equal, IsInstance, Kept, Keys, Length, Names, OfClass, Same, Without
from .guards import IN_PLACE
from .keeping import Keeper, items_of
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
from .scanning import CONTAINERS, Scan, Untraceable, content, is_bound, is_own
from .scanning import is_of_users as is_of_user
from .structure import compared_attributes, is_in_a_list, original_class
from .values import Method, counted, is_a_value, is_known, is_named, may_change, names_asked, plain_of
from .watching import by_a_user, by_us, by_way_of_python, comparisons_of, function_of

_REGISTRIES = ("_modules", "_parameters", "_buffers")
_FEW = 16  # values, to be written down
_DEEP = 16  # configurations inside of each other
_HANDED = "hands a list, a dictionary or an object to what may change it, and needs it again"
_MANY, _FAR = 400, 20_000  # conditions, values to look at for them


class Recorder:
    """While active, notes what `forward` reads from the owner and its descendants, and forbids assignments.

    Both work by replacing methods of `nn.Module`, as `torch.fx` itself does while it traces.
    """

    def __init__(self, owner: nn.Module, training: bool, tracer: Any, whole: Container[str], scan: Scan) -> None:
        """`training`: the mode that the owner says it is in.

        `whole`: methods of `owner` that stay calls; `scan` reads what `forward` turns out to call.
        """
        self.owner, self.training, self.tracer, self.whole, self.scan = owner, training, tracer, whole, scan
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
        self.known_effects: dict[int, tuple[effects.Effects, set[int], dict[int, str]]] = {}
        self.called = ""  # a method that stayed a call: what attributes are after it, nobody knows
        self.thread = threading.get_ident()
        tracer.is_one_of, tracer.recorder = self.is_one_of, self
        self.take_up()

    def __enter__(self) -> Recorder:
        recorder, plain_setattr, plain_init = self, nn.Module.__setattr__, nn.Module.__init__

        def getattribute(module: nn.Module, name: str) -> Any:
            if module is recorder.owner and name in recorder.whole and recorder.watches(module):
                return recorder.call_of(name)
            if name == "training" and module is recorder.owner and recorder.watches(module):
                return recorder.training  # other threads run the model in its own mode meanwhile
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                if recorder.watches(module) and not name.startswith("__"):
                    recorder.note_missing(module, name)
                raise
            if name == "__class__" and recorder.watches(module) and by_a_user(sys._getframe(1)):
                recorder.relate_class(module)
            if name == "__dict__" and recorder.watches(module) and by_way_of_python(sys._getframe(1)):
                raise Untraceable("reads attributes of a module from its __dict__")
            if name.startswith("__"):
                return value
            if not recorder.watches(module):
                recorder.refuse_stranger(module, name)
                return value
            if name in _REGISTRIES:
                return recorder.registry(module, name, value)
            if name == "forward" and by_us(sys._getframe(1)):  # torch.fx, of a child that it calls
                return value
            if name not in vars(module) and hasattr(type(module), name) and by_a_user(sys._getframe(1)):
                recorder.relate_class(module)
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
        nn.Module.__eq__, nn.Module.__hash__ = comparisons_of(self)  # type: ignore[method-assign]
        nn.Module.__setattr__ = setattribute  # type: ignore[method-assign, assignment]
        nn.Module.__init__ = initialise  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        del nn.Module.__getattribute__, nn.Module.__eq__, nn.Module.__hash__
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
            if not is_in_a_list(self.owner, path):
                positions = tuple(map(str, range(len(held))))
                listed = isinstance(module, (nn.Sequential, nn.ModuleList)) and names == positions
                self.relate(path, Length(len(names))) if listed else self.note_value(path, kind, Names(names))
            return held
        self.note_value(path, kind, Names(names))
        given = {name: self.tracer.named(value) for name, value in held.items()}
        self.keeper.watch(given)
        return given

    def relate(self, path: str, value: Any) -> None:
        if (path, value) not in self.relations:
            self.relations.append((path, value))
            of_one = (value.cls,) if isinstance(value, OfClass) else ()
            self.hold(*(value.classes if isinstance(value, IsInstance) else of_one))

    def is_asked(self, frame: types.FrameType) -> bool:
        return threading.get_ident() == self.thread and by_way_of_python(frame)

    def relate_identity(self, module: nn.Module, other: nn.Module) -> None:
        """A user's code has asked whether two modules are the same."""
        path, other_path = (self.paths.get(id(m)) for m in (module, other))
        if path is None or other_path is None:
            raise Untraceable("compares a module with one that is none of its own")
        self.relate(path, Compared((), "is", other_path, (), module is other))

    def relate_class(self, module: nn.Module) -> None:
        """What was asked of a descendant its class decides: it may be of another later."""
        if self.paths.get(id(module)):
            self.relate(self.paths[id(module)], OfClass(original_class(module)))

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
            self.hand_over(self.effects_of_method(name), (*args, *kwargs.values()))
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
        if (known or effects.is_an_object(value)) and (by := self.may_have_changed(module, name, value)):
            raise Untraceable(f"reads {name} after calling {by}, which may change it")
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

    def may_have_changed(self, module: nn.Module, name: str, value: Any) -> str | None:
        """What was called before and may have changed that attribute, or what is in it: its name."""
        if name == "training" or not (self.tracer.called or self.called):
            return None
        inside = [*effects.inside(value)]
        parts = {n for v in inside if effects.is_an_object(v) for n in names_of(v) & self.scan.names}
        for child in self.tracer.called:
            found, modules, held = self.effects_of(child)
            known_as = {held[id(v)] for v in inside if id(v) in held}
            if id(module) in modules:
                changes = found.assigns({name, *parts}) or (isinstance(value, CONTAINERS) and name in found.mentioned)
            else:
                changes = not known_as.isdisjoint(found.mentioned) and (found.changes or found.assigns(parts))
            if changes:
                return self.paths.get(id(child)) or type(child).__name__
        if self.called and parts:
            return self.called if self.effects_of_method(self.called).assigns(parts) else None
        return None

    def look_back(self, graph: fx.Graph) -> None:
        """At a whole recording: classes that decided are conditions, and tensors are not to be replaced by a call.

        The text reads them where they are used.
        """
        for path in guards.modules_asked(graph):
            self.relate_class(self.owner.get_submodule(path))
        for node in graph.find_nodes(op="get_attr"):
            path, _, name = str(node.target).rpartition(".")
            module = self.owner.get_submodule(path)
            by = [self.effects_of(c)[0] for c in self.tracer.called if id(module) in self.effects_of(c)[1]]
            by += [self.effects_of_method(self.called)] if self.called else []
            if any(found.assigns({name}) for found in by):
                raise Untraceable(f"reads {node.target}, which a call may replace")

    def returned(self, value: Any) -> Any:
        """What `forward` returns, in which a list or a dictionary that is an attribute goes by its name."""
        known = {id(v): (module, name) for module, name, v in self.noted.values() if isinstance(v, CONTAINERS)}
        if isinstance(value, (fx.Proxy, Tensor)):
            return value
        if id(value) in known:
            module, name = known[id(value)]
            path = self.paths[id(module)]
            return self.tracer.create_proxy("get_attr", f"{path}.{name}".lstrip("."), (), {})
        held = value if isinstance(value, CONTAINERS) else getattr(value, "__dict__", None)
        if id(held) in self.keeper.containers:
            raise Untraceable("returns a list, a dictionary or an object that outlives the call")
        if type(value) in (list, tuple):
            return type(value)(map(self.returned, value))
        return {key: self.returned(v) for key, v in value.items()} if type(value) is dict else value

    def effects_of(self, child: nn.Module) -> tuple[effects.Effects, set[int], dict[int, str]]:
        """Of a call of it; ids of the modules in it, and of the containers and objects that these hold, with names."""
        if id(child) not in self.known_effects:
            with self.tracer.watch.paused():
                modules = effects.modules_of(child)
                held = {id(v): name for m in modules for name, one in effects.held_by(m) for v in effects.inside(one)}
                self.known_effects[id(child)] = effects.of_modules(modules), {*map(id, modules)}, held
        return self.known_effects[id(child)]

    def effects_of_method(self, name: str) -> effects.Effects:
        with self.tracer.watch.paused():
            return effects.of_method(self.owner, inspect.getattr_static(type(self.owner), name))

    def hand_over(self, called: effects.Effects, values: tuple[Any, ...]) -> None:
        """Refuse a list, a dictionary or an object among arguments that is needed again: the call gets a copy."""
        given = [*effects.inside(values)]
        if not given or not called.changes_what_it_is_given:
            return
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self.tracer.watch.forward:
            if is_of_user(frame.f_code.co_filename) and effects.is_read_again(frame, given):
                raise Untraceable(_HANDED)
            frame = frame.f_back
        held = any(id(value) in self.keeper.containers for value in given)
        if held or (frame is not None and effects.is_read_again(frame, given)):
            raise Untraceable(_HANDED)

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
            held = copy.deepcopy(value) if type(value) in (*CONTAINERS, tuple) else value
            yield text, Kept(held) if counted(value) > _FEW else held
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
            if is_own(value):
                yield from self.parts_of_settings(text, value, inside)
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
        items: Any = value.items() if with_keys else ()
        if isinstance(value, (list, tuple, deque)):
            items = enumerate(value)
        for key, item in items:
            yield from self.parts(f"{text}[{key!r}]", item, inside)

    def parts_of_callable(
        self, text: str, value: Any, inside: tuple[int, ...], defined: bool
    ) -> Iterator[tuple[str, Any]]:
        """Those of a function by its identity; of what a copy of the owner has a copy of, by what it consists of."""
        if isinstance(value, (operator.attrgetter, operator.methodcaller)):
            self.scan.names.update(names_asked(value))
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
            if hasattr(value, "__dict__") and self.scan.names & {"vars", "dir", "__dict__"}:
                yield f"{text}.__dict__", Keys(tuple(vars(value)))
        there = {name for name in names_of(value) if not name.startswith("__") or name == "__class__"}
        names = self.scan.names & there
        if self.scan.computes_names and of_its_own:
            names |= {name for name in there if name[0] != "_" and not callable(attribute_of(value, name))}
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
        for found in compared_attributes(self.owner, self.scan.compared):
            self.relate("", found)

    def note_globals(self) -> None:
        """What `forward`, and what it calls, may read of modules' globals, closures and the owner's class."""
        if "__class__" in self.scan.names:
            for text, part in self.parts("__class__", self.scan.owner, defined=True):
                self.note_value("", text, part)
        for function in self.scan.functions:
            for name in ("__defaults__", "__kwdefaults__"):
                held = getattr(function, name)
                if any(isinstance(value, (*CONTAINERS, tuple)) for value in items_of(held or ())):
                    self.note_outside(known_as(function), function, f"{known_as(function)}.{name}", held)
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
                self.note_outside(known, namespace, f"{known}.{place}", value, defined)

    def note_outside(self, known: str, namespace: Any, text: str, value: Any, defined: bool = False) -> None:
        """What `text` asks of the `namespace` that is `known` so."""
        found = dict(self.parts(text, value, defined=defined))
        self.surroundings |= found
        self.refuse_many(self.surroundings)
        self.namespaces |= {known: namespace} if found else {}
        self.hold(*found.values())

    def note_value(self, path: str, name: str, value: Any) -> None:
        self.refuse_many(self.attributes)
        if (path, name, value) not in self.attributes:
            self.attributes.append((path, name, value))
            self.hold(value)

    def refuse_many(self, conditions: Sized) -> None:
        if len(conditions) > _MANY:
            raise Untraceable(f"reads more than {_MANY} things that may change")

    def hold(self, *values: Any) -> None:
        """Have the functions and classes among `values` in the namespace."""
        plain = [v.value if isinstance(v, Equal) else v for v in values if callable(v) or isinstance(v, Equal)]
        self.namespaces |= {known_as(v): v for v in plain if v is not Absent and path_of(v) is None}
        self.namespaces |= {v.name: v.value for v in values if isinstance(v, Kept)}
