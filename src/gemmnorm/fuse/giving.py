"""Whether a function or module may give None, as far as byte code tells. Where it does not tell, it may."""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .instructions import CONSTANTS, is_none
from .structure import forward_of
from .values import PLAIN

_GIVE_VALUES = (
    "BINARY_",
    "INPLACE_",
    "UNARY_",
    "BUILD_",
    "CALL",
    "COMPARE_",
    "FORMAT_",
    "LIST_TO_",
    "IS_",
    "CONTAINS_",
)
_LOAD_METHODS = ("LOAD_METHOD", "LOAD_SUPER_METHOD", "LOAD_SUPER_ATTR")
_OF_PYTHON = (len, isinstance, hasattr, sum, min, max, abs, round, sorted)  # these give no None, nor do classes
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ALWAYS = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD")


def is_of_torch(function: Any) -> bool:
    """A function or method of PyTorch's or of Python's operators; none of them gives None, but for what it is given."""
    home = str(getattr(function, "__module__", None) or "torch")
    if isinstance(getattr(function, "__self__", None), type):
        home = function.__self__.__module__
    if function is F.multi_head_attention_forward or home.startswith("torch.nn.parallel"):
        return False
    return home.partition(".")[0] in ("torch", "_operator", "math") or function in _OF_PYTHON


def mentions_none(module: nn.Module) -> bool:
    """None may be a part of what its `forward` returns."""
    function = forward_of(type(module))
    return not isinstance(function, types.FunctionType) or any(map(is_none, _instructions(function)))


class Asked:
    """Modules that an answer depends on, and which of their attributes and methods it does."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.names: dict[int, set[str]] = {}

    def note(self, module: nn.Module, *names: str) -> None:
        self.modules[id(module)] = module
        self.names.setdefault(id(module), set()).update(names)


class Giving:
    """What the methods of `module`, or functions of no module, give, and whatever these call.

    `asked`: gets what the answer depends on.
    """

    def __init__(self, module: nn.Module | None, asked: Asked, seen: set[tuple[int, int]] | None = None) -> None:
        self.module, self.asked = module, asked
        self.seen = set() if seen is None else seen  # functions that are being looked at, with their modules

    def of_forward(self, given: bool = True) -> bool:
        """`forward` never gives None where (`given`) no argument is None, or whatever they are."""
        self.asked.note(self.module, "forward")  # type: ignore[arg-type]
        if "forward" in vars(self.module):
            return False
        return self.of_function(forward_of(type(self.module)), given)  # type: ignore[arg-type]

    def of_method(self, name: str, given: bool = True) -> bool:
        self.asked.note(self.module, name)  # type: ignore[arg-type]
        return self.of_function(inspect.getattr_static(type(self.module), name, None), given)

    def of_function(self, function: Any, given: bool = True) -> bool:
        """It never gives None."""
        if isinstance(function, (staticmethod, classmethod, types.MethodType)):
            function = function.__func__
        if isinstance(function, type) or is_of_torch(function):
            return True
        function = inspect.unwrap(function) if isinstance(function, types.FunctionType) else None
        if not isinstance(function, types.FunctionType):
            return False
        key = (id(function.__code__), id(self.module))
        if key in self.seen:
            return True
        self.seen.add(key)
        uses = _uses(function)
        names = _names_of_none(function, uses, given)
        returns = [(load, use) for load, use in uses if use.opname == "RETURN_VALUE"]
        returns += [(load, load) for load, _ in uses if load.opname == "RETURN_CONST"]
        return all(_is_value(load, names) for load, _ in returns) and all(map(self._of_called, _called(function)))

    def _of_called(self, called: tuple[types.FunctionType, str, bool]) -> bool:
        """`called`: a function, a name in it, and whether it is called for certain. See `_called`."""
        function, name, certainly = called
        found = self._named(function, name)
        if not found:
            return not certainly or any(hasattr(holder, name) for holder in (Tensor, torch, F))
        return all(map(self._of_value, found))

    def _of_value(self, value: Any) -> bool:
        """It gives no None if it is called, or is not called."""
        if isinstance(value, (nn.ModuleList, nn.ModuleDict)):
            self.asked.note(value)
            return all(map(self._of_value, value.children()))
        if isinstance(value, nn.Module):
            return self._of_descendant(value)
        if isinstance(value, (list, tuple, dict)):
            return all(map(self._of_value, value.values() if isinstance(value, dict) else value))
        is_plain = isinstance(value, (*PLAIN, Tensor, property, types.ModuleType)) or not callable(value)
        return (is_plain and not isinstance(value, (staticmethod, classmethod))) or self.of_function(value)

    def _of_descendant(self, module: nn.Module) -> bool:
        """It gives no None: one that passes on what it is given is given none either."""
        if isinstance(module, nn.Sequential) and is_of_torch(forward_of(type(module))):
            self.asked.note(module, "forward")
            return "forward" not in vars(module) and all(map(self._of_descendant, module))
        return Giving(module, self.asked, self.seen).of_forward()

    def _named(self, function: types.FunctionType, name: str) -> list[Any]:
        """What `name` may stand for in `function`: what the module has by that name, a global or one of Python's."""
        found = [] if self.module is None else self._of_module(function, name)
        if any(callable(value) and not isinstance(value, nn.Module) for value in found):
            self.asked.note(self.module, name)  # type: ignore[arg-type]
        if not found and name in function.__globals__:
            found = [function.__globals__[name]]
        elif not found and name in vars(builtins) and not hasattr(Tensor, name):
            found = [vars(builtins)[name]]
        return found

    def _of_module(self, function: types.FunctionType, name: str) -> list[Any]:
        held = vars(self.module)
        for registry in (held, held["_modules"]):
            if registry.get(name) is not None:
                return [registry[name]]
        bases = [vars(base)[name] for base in type(self.module).__mro__ if name in vars(base)]
        return bases if "super" in function.__code__.co_names else bases[:1]


def _instructions(function: types.FunctionType) -> list[dis.Instruction]:
    return [*dis.get_instructions(inspect.unwrap(function))]


def _called(function: types.FunctionType) -> Iterator[tuple[types.FunctionType, str, bool]]:
    """(function, name, it is certainly called) of the globals and attributes that `function` loads."""
    codes = [function.__code__]
    for code in codes:  # which grows by the functions inside of it
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for i in dis.get_instructions(code):
            if i.opname in ("LOAD_GLOBAL", "LOAD_ATTR", *_LOAD_METHODS):
                as_method = i.opname == "LOAD_ATTR" and sys.version_info >= (3, 12) and bool((i.arg or 0) & 1)
                yield function, str(i.argval), as_method or i.opname != "LOAD_ATTR"


def _uses(function: types.FunctionType) -> list[tuple[dis.Instruction, dis.Instruction]]:
    """Each instruction with the one that runs after it, where that does not depend on a value.

    A subscript that is certain, by a slice or several, is a BUILD_SLICE here; where one of two values is used by what
    they lead to, and the first may be None (`a and b`), what comes before is the jump. What leaves a `with` or an
    `except` before a value is returned is left out.
    """
    found: list[dis.Instruction] = []
    for i in _instructions(function):
        swaps = [k for k, other in enumerate(found[-8:], max(len(found) - 8, 0)) if other.opname == "SWAP"]
        if i.opname == "RETURN_VALUE" and found[-1].opname in ("POP_EXCEPT", "POP_TOP") and swaps:
            del found[swaps[-1] :]
        found.append(i)
    at = {instruction.offset: instruction for instruction in found}
    pairs = []
    for before, a, b in zip([found[0], *found], found, found[1:], strict=False):
        by_slices = before.opname in ("BUILD_SLICE", "BUILD_TUPLE") or isinstance(before.argval, (tuple, slice))
        is_item = a.opname == "BINARY_SUBSCR" or (a.opname == "BINARY_OP" and a.argrepr == "[]")
        load = before._replace(opname="BUILD_SLICE") if is_item and by_slices else a
        if a.opname not in _ALWAYS:
            pairs.append((load, at[b.argval] if b.opname in _ALWAYS else b))
        if a.opcode in _JUMPS and a.opname not in _ALWAYS and "TRUE" not in a.opname:
            pairs.append((a, at[a.argval]))
    return pairs


def _names_of_none(
    function: types.FunctionType, uses: Iterable[tuple[dis.Instruction, dis.Instruction]], given: bool
) -> set[str]:
    """Variables and parameters that may be None, also by way of another one."""
    found = {name for name, p in inspect.signature(function).parameters.items() if p.default is None or not given}
    while True:
        stored: set[str] = set()
        for load, use in uses:
            if use.opname.startswith("STORE_FAST") and not _is_value(load, found):
                stored.update(_named(use) if use.opname.startswith("STORE_FAST_STORE") else _named(use)[:1])
        if stored <= found:
            return found
        found |= stored


def _is_value(load: dis.Instruction, names: set[str]) -> bool:
    """It leaves something that is not None, where only the variables `names` may be."""
    if "LOAD_FAST" in load.opname:
        return _named(load)[-1] not in names
    if load.opname in (*CONSTANTS, "RETURN_CONST", "LOAD_SMALL_INT"):
        return not is_none(load)
    is_item = load.opname == "BINARY_SUBSCR" or (load.opname == "BINARY_OP" and load.argrepr == "[]")
    return load.opname.startswith(_GIVE_VALUES) and not is_item


def _named(instruction: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction, of which newer interpreters have some with two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
