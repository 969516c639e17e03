"""What a call that stays a call may change: attributes of modules and objects, and containers that it is handed.

A child module, and a method that cannot be recorded, run as they are. What `forward` reads afterwards of what they may
have changed is unknown while it is recorded.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import os
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .keeping import items_of
from .outside import is_of_users as is_users_own
from .outside import is_settings
from .scanning import CONTAINERS, by_methods, is_of_users
from .values import PLAIN

ANYTHING = "*"
# By these names any attribute may be assigned. An installed package that has them is trusted to assign what it says.
_BY_NAME = {"setattr", "delattr", "vars", "__dict__", "__setattr__", "register_buffer", "register_parameter"}
_BY_NAME |= {"_buffers", "_parameters", "_modules"}
_CHANGES = {"append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "clear"}
_CHANGES |= {"update", "setdefault", "add", "discard", "sort", "reverse", "rotate", "__setitem__", "__delitem__"}
_CHANGES |= {"__iadd__", "__ior__", "move_to_end", "subtract"}
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_OF_MODULES = frozenset(vars(nn.Module()))
_FAR = 2000  # values to look at inside of one


@dataclass(frozen=True)
class Effects:
    """Of some code, with the functions of a user's that it mentions.

    Attributes:
        assigned: names of attributes that it assigns, of whatever; `ANYTHING` where those are computed.
        mentioned: names of attributes, functions and methods that occur.
        changes: it may change a list, a dictionary or the like.
    """

    assigned: frozenset[str] = frozenset()
    mentioned: frozenset[str] = frozenset()
    changes: bool = False

    def __or__(self, other: Effects) -> Effects:
        changes = self.changes or other.changes
        return Effects(self.assigned | other.assigned, self.mentioned | other.mentioned, changes)

    def assigns(self, names: Iterable[str]) -> bool:
        """Any of these, or it may be."""
        return ANYTHING in self.assigned or not self.assigned.isdisjoint(names)

    @property
    def changes_what_it_is_given(self) -> bool:
        """It may assign an attribute, or change a container, that is not its own."""
        return self.changes or bool(self.assigned)


def of_functions(functions: Iterable[types.FunctionType]) -> Effects:
    """Of calls of these, by their byte code, that of functions inside of them, and of globals that they mention."""
    assigned, mentioned, changes, by_name = set[str](), set[str](), False, False
    waiting = [(f.__code__, f.__globals__) for f in functions]
    for code, names in waiting:  # which grows by what they hold and mention
        found = [c for c in code.co_consts if isinstance(c, types.CodeType)]
        called = [names.get(name) for name in code.co_names]
        waiting += [(c, names) for c in found if (c, names) not in waiting]
        for f in called:
            if isinstance(f, types.FunctionType) and _is_users(f):
                waiting += [(f.__code__, f.__globals__)] if (f.__code__, f.__globals__) not in waiting else []
        mentioned.update(code.co_names)
        by_name |= "-packages" not in code.co_filename and not _BY_NAME.isdisjoint(code.co_names)
        names_assigned, changes_items = _stored(code)
        assigned |= names_assigned
        changes |= changes_items
    if by_name:
        assigned.add(ANYTHING)
    return Effects(frozenset(assigned), frozenset(mentioned), changes or bool(mentioned & _CHANGES))


@functools.lru_cache(maxsize=4096)
def _stored(code: types.CodeType) -> tuple[frozenset[str], bool]:
    """The attributes that `code` assigns, and whether it assigns items."""
    found = [*dis.get_instructions(code)]
    names = frozenset(i.argval for i in found if i.opname in ("STORE_ATTR", "DELETE_ATTR"))
    return names, any(i.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE") for i in found)


@by_methods
def _of_class(methods: list[types.FunctionType]) -> Effects:
    return of_functions(methods)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """`module` and all below it, without asking a module by `getattr`, which a recorder may be watching."""
    found = {id(module): module}
    waiting = [module]
    for m in waiting:  # which grows
        scripted = isinstance(m, torch.jit.ScriptModule)  # which keeps its children elsewhere
        for child in m.children() if scripted else object.__getattribute__(m, "_modules").values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return waiting


def of_modules(modules: Iterable[nn.Module]) -> Effects:
    """Of calls of these: of their methods, and of the objects' that they hold."""
    classes: dict[type, None] = {}
    found = Effects()
    for m in modules:
        classes |= {type(m): None}
        classes |= {type(value): None for _, value in held_by(m) if is_an_object(value)}
        attributes = vars(m)  # and not by its attributes, which a recorder may be watching
        if "forward" in attributes or any(attributes.get(name) for name in ("_forward_hooks", "_forward_pre_hooks")):
            found |= Effects(frozenset([ANYTHING]))
    return functools.reduce(operator.or_, map(_of_class, classes), found)


def held_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of its attributes, but for what every module has, and plain values."""
    for name, value in vars(module).items():
        if name not in _OF_MODULES and not isinstance(value, (*PLAIN, Tensor, nn.Module)):
            yield name, value


def of_method(owner: nn.Module, function: Any) -> Effects:
    """Of a call of a method of `owner`, which may call others, and those of the objects that it holds."""
    plain = inspect.unwrap(function)
    found = of_functions([plain]) if isinstance(plain, types.FunctionType) else Effects(frozenset([ANYTHING]))
    for _, held in held_by(owner):
        found |= _of_class(type(held)) if is_an_object(held) else Effects()
    named = (getattr(type(owner), name, None) for name in found.mentioned if name != plain.__name__)
    methods = [f for f in named if isinstance(f, types.FunctionType) and _is_users(f)]
    return found | of_functions(methods)


def _is_users(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename
    return is_of_users(file) and not file.startswith(_PACKAGE)


def is_an_object(value: Any) -> bool:
    """With attributes of its own that a method may assign: a configuration, a state."""
    return is_settings(value) and is_users_own(type(value)) and not isinstance(value, (type, types.FunctionType))


def inside(value: Any) -> Iterator[Any]:
    """The lists, dictionaries and objects in `value`, and itself if it is one."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _FAR:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (fx.Proxy, Tensor, nn.Module, str)):
            continue
        seen.add(id(one))
        if isinstance(one, (tuple, *CONTAINERS)):
            waiting += items_of(one)
        elif is_an_object(one):
            waiting += getattr(one, "__dict__", {}).values()
        if isinstance(one, CONTAINERS) or is_an_object(one):
            yield one


def is_read_again(frame: types.FrameType, values: Iterable[Any]) -> bool:
    """A variable of what runs in `frame` has one of `values` in it, and occurs in what may run after this."""
    ids = {id(value) for value in values}
    names = {name for name, held in frame.f_locals.items() if any(id(v) in ids for v in inside(held))}
    instructions = [*dis.get_instructions(frame.f_code)]
    begin = frame.f_lasti + 1
    for i in instructions:  # a loop goes on where it began
        if i.offset >= begin and "JUMP" in i.opname and isinstance(i.argval, int) and i.argval < begin:
            begin = min(begin, i.argval)
    after = (i for i in instructions if i.offset >= begin and "LOAD" in i.opname)
    return any(names & {*(i.argval if isinstance(i.argval, tuple) else (i.argval,))} for i in after)
