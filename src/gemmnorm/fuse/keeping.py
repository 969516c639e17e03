"""What lists, dictionaries, objects and classes hold while something is recorded: a change is noticed, and undone."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from .comparing import Absent
from .outside import is_of_users
from .scanning import CONTAINERS


class Keeper:
    """Knows what each of the things that it watches held at first."""

    def __init__(self) -> None:
        self.containers: dict[int, tuple[Any, Any]] = {}  # by id: it, and a copy
        self.slots: dict[int, tuple[Any, dict[str, Any], dict[str, Any]]] = {}  # object, their descriptors, values
        self.definitions: dict[Any, dict[str, Any]] = {}  # classes and functions, with their attributes

    def watch(self, value: Any) -> None:
        """Notice where a list, a dictionary or the like is changed, or one inside of it."""
        if isinstance(value, CONTAINERS) and id(value) not in self.containers:
            self.containers[id(value)] = (value, _copied(value))
        if isinstance(value, (tuple, *CONTAINERS)):
            for item in items_of(value):
                if isinstance(item, (tuple, *CONTAINERS)) and id(item) not in self.containers:
                    self.watch(item)

    def watch_attributes(self, value: Any) -> None:
        """Notice where an attribute of an object is changed."""
        if hasattr(value, "__dict__"):
            self.containers.setdefault(id(vars(value)), (vars(value), _copied(vars(value))))
            for held in [held for name, held in vars(value).items() if not name.startswith("_")]:  # no caches
                self.watch(held)
        slots = {
            n: m
            for cls in filter(is_of_users, type(value).__mro__)
            for n, m in vars(cls).items()
            if inspect.ismemberdescriptor(m)
        }
        if slots:
            self.slots.setdefault(id(value), (value, slots, _slots(value, slots)))

    def watch_definition(self, definition: Any) -> None:
        """Notice where an attribute of a class or a function is changed."""
        self.definitions.setdefault(definition, _attributes(definition))

    def has_changed(self) -> bool:
        """Something that `restore` would change back, of what lists, dictionaries and objects hold."""
        slots = (_slots(value, slots) != before for value, slots, before in self.slots.values())
        return any(_differ(*both) for both in self.containers.values()) or any(slots)

    def restore(self, lines: Mapping[str, int]) -> str | None:
        """Change what `forward` has changed of lists, dictionaries, objects and classes back; what it was.

        `lines`: where attributes of these names are assigned.
        """
        found = None
        for container, before in self.containers.values():
            if _differ(container, before):
                base = _base(container)
                base.clear(container)
                (getattr(base, "update", None) or base.extend)(container, before)
                found = "a list or dictionary, or an object that the module holds"
        for value, slots, attributes in self.slots.values():
            now = _slots(value, slots)
            for name in (name for name in slots if now[name] is not attributes[name]):
                (slots[name].__delete__ if attributes[name] is Absent else slots[name].__set__)(
                    value, *() if attributes[name] is Absent else (attributes[name],)
                )
                found = "a list or dictionary, or an object that the module holds"
        self.containers.clear()
        for definition, attributes in self.definitions.items():
            kind, now = "class" if isinstance(definition, type) else "function", _attributes(definition)
            changed = [name for name, value in attributes.items() if now.get(name, Absent) is not value]
            for name in changed:
                setattr(definition, name, attributes[name])
            for name in now.keys() - attributes:
                delattr(definition, name)
            for name in (*changed, *(now.keys() - attributes)):
                found = f"{name} of the {kind} {definition.__name__} (line {lines.get(name)})"
        return found


def _attributes(definition: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(definition).items() if not name.startswith("__")}


def _base(container: Any) -> Any:
    return next(base for base in (list, dict, set, deque, tuple, frozenset) if isinstance(container, base))


def _copied(container: Any) -> Any:
    return _base(container)(items_of(container) if not isinstance(container, dict) else dict.items(container))


def items_of(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        yield from itertools.chain.from_iterable(dict.items(container))
    else:
        yield from _base(container).__iter__(container)


def _differ(container: Any, before: Any) -> bool:
    one, other = ([id(item) for item in items_of(held)] for held in (container, before))
    if isinstance(container, set):  # whose copy may have them in another order
        one, other = sorted(one), sorted(other)
    return one != other


def _slots(value: Any, slots: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, descriptor in slots.items():
        try:
            found[name] = descriptor.__get__(value)
        except AttributeError:
            found[name] = Absent
    return found
