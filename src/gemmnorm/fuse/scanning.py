"""What misleads a recording, found in the byte code of a `forward` and of what it calls.

`Scan` reads it before anything is recorded, and reads what it did not foresee while that is called. What code asks of a
stand-in is answered by `stand_ins.py`.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import os
import re
import sys
import sysconfig
import textwrap
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from .instructions import CONSTANTS, is_none, one_by_one, raising, with_lines

T = TypeVar("T")
ANY = "*"  # among the tested parameters: any of them may be
TORCH = os.path.join(torch.__path__[0], "")  # and not torchvision or torch_geometric
CONTAINERS = (list, dict, set, deque, OrderedDict)
HERE = os.path.join(os.path.dirname(__file__), "")
_ASSERTS = os.path.join(os.sep, "_pytest", "assertion", "")  # pytest has an `assert` call this, to explain a failure
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
# Context managers that a recording may lose, or that are noticed when they are entered.
_CONTEXTS = {"no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "autocast", "saved_tensors_hooks"}
_CONTEXTS |= {"record_function", "nullcontext", "catch_warnings", "save_on_cpu"}
_CATCHES = {"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH"}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_OF_TENSORS = (torch.dtype, torch.layout, torch.memory_format)
_SIGNS = {"COMPARE_OP": ("", ""), "IS_OP": ("is", "is not"), "CONTAINS_OP": ("in", "not in")}
_INTROSPECTION = {
    "type": "asks for the type of a value",
    "globals": "reads variables by globals()",
}
_MATCHES = {"MATCH_SEQUENCE", "MATCH_MAPPING", "MATCH_CLASS", "MATCH_KEYS"}


class Untraceable(Exception):
    """`forward` cannot be recorded faithfully; the message completes "its forward …"."""

    raised: list[Untraceable] | None = None  # for who records, meanwhile: the code that is recorded may have caught it

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if Untraceable.raised is not None:
            Untraceable.raised.append(self)


class Raised(Untraceable):
    """`forward` raised, or was about to with a message about a value.

    It may where a decision was imagined otherwise than its inputs would have it.
    """


def in_a_line(error: Exception) -> str:
    """What `error` is, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


class Scan:
    """Reads the byte code of `forward`, and of what it calls, for what misleads a recording.

    Attributes:
        tested: the parameters of `forward` that it compares with `is`, in all likelihood with None.
        booleans: those that it compares so with True or False.
        comparisons: the variables that are compared so while `observing` looks, by code and offset.
        tests_values: it compares something else so.
        codes: the byte code that was read.
        tested_attributes: what it compares so of `self` or of anything else.
        names: the attributes and texts that occur.
        optional: texts that occur where it is asked whether something has an attribute, or what it is if not.
        computes_names: attributes are asked for by names that do not occur.
        containers: the lists, dictionaries and sets that occur as globals.
        globals: (namespace of a module, or the closure's cell; name) of the globals and closure variables that occur.
        classes: those that occur as globals, and the owner's own.
        functions: those that were read.
        methods: those of the owner whose names occur.
        loads: the line where something of that name is read.
        stores: the line where an attribute of that name is assigned.
        compared: (names, sign, names) where two attributes of the owner, or attributes of those, are compared.
        bypassing: the byte code that reads attributes by `object.__getattribute__`.
        own: the byte code of the owner's methods, whose first parameter is the owner.
    """

    def __init__(self, owner: type[nn.Module], forward: types.FunctionType, whole: Container[str]) -> None:
        self.owner, self.whole = owner, whole
        self.forward = inspect.unwrap(forward).__code__
        self.seen: set[tuple[Any, ...]] = set()
        self.codes: set[types.CodeType] = set()
        self.read: set[types.CodeType] = set()  # those that were read leniently too
        self.lenient = False
        self.optional: set[str] = set()
        self.computes_names = False
        stores = itertools.chain.from_iterable(map(one_by_one, dis.get_instructions(self.forward)))
        self.assigned = {i.argval for i in stores if i.opname.startswith("STORE_FAST")}
        self.tested: set[str] = set()
        self.booleans: set[str] = set()
        self.tests_values = False
        self.comparisons: dict[types.CodeType, dict[int, str]] = {}
        self.tested_attributes: set[str] = set()
        self.names: set[Any] = set()
        self.containers: list[Any] = []
        self.globals: list[tuple[dict[str, Any] | types.CellType, str]] = []
        self.classes: list[type] = [cls for cls in owner.__mro__ if not cls.__module__.startswith("torch.")]
        self.functions: dict[types.FunctionType, None] = {}
        self.methods: dict[str, Any] = {}
        self.loads: dict[str, int] = {}
        self.stores: dict[str, int] = {}
        self.compared: set[tuple[tuple[str, ...], str, tuple[str, ...]]] = set()
        self.bypassing: set[types.CodeType] = set()
        self.own = {self.forward, *(f.__code__ for f in methods_of(owner))}
        self.follow(forward)

    def follow(self, called: Any) -> None:
        """Read what runs when `called` is, as far as it is Python."""
        if isinstance(called, classmethod):
            self.names.add("__class__")
        if isinstance(called, (staticmethod, classmethod, types.MethodType)):
            called = called.__func__
        elif isinstance(called, functools.partial):
            called = called.func
        elif isinstance(called, property):
            called = called.fget
        elif callable(called) and not isinstance(called, (type, nn.Module, types.FunctionType)):
            called = inspect.getattr_static(type(called), "__call__", None)
        for f in (called, inspect.unwrap(called)) if isinstance(called, types.FunctionType) else ():
            if isinstance(f, types.FunctionType) and is_of_users(f.__code__.co_filename):
                self.functions[f] = None
                cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
                self._read(f.__code__, f.__globals__, cells)

    def follow_running(
        self, code: types.CodeType, function: types.FunctionType | None, namespace: Any, lenient: bool
    ) -> None:
        """Read what has been called by whatever way; `function` is None where nobody knows which one it is.

        `lenient`: it is given no stand-in, so that it may catch what it likes.
        """
        before, self.lenient = self.lenient, lenient
        try:
            if function is None:
                self._read(code, namespace, {})
            else:
                self.follow(function)
        finally:
            self.lenient = before

    def _read(self, code: types.CodeType, namespace: dict[str, Any], cells: dict[str, types.CellType]) -> None:
        """`cells`: the closure of the function that `code` is, or is inside of."""
        key = (self.lenient, code, *map(id, cells.values()))
        if key in self.seen:
            return
        self.seen.add(key)
        self.read.add(code)
        if not self.lenient:
            self.codes.add(code)
        self._refuse_statements(code, cells)
        self.names.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
        self.computes_names |= "-packages" not in code.co_filename and _computes_names(code)
        if {"getattr", "hasattr"} & {*code.co_names}:
            self.optional.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._read(constant, namespace, cells)
        before = self.lenient
        try:
            self._read_instructions(code, namespace, cells)
        finally:
            self.lenient = before

    def _read_instructions(
        self, code: types.CodeType, namespace: dict[str, Any], cells: dict[str, types.CellType]
    ) -> None:
        lenient, writes_a_message = self.lenient, raising(code)
        imported: dict[str, Any] = {}  # variables that have a module, or what was taken from one
        passed: list[dis.Instruction] = []  # what has run
        before: list[dis.Instruction] = []  # the same without what has no part in an expression
        place: Any = None  # a module that names are taken from
        found: Any = None  # what a name outside of the function, with attributes behind it, stands for
        for instruction, line in with_lines(code):
            name, value = instruction.opname, instruction.argval
            self.lenient = lenient or instruction.offset in writes_a_message
            passed.append(instruction)
            if "LOAD" in name and isinstance(value, str):
                self.loads.setdefault(value, line)
            if name == "IS_OP" and is_none(before[-1]):
                self._note_test(code, before[:-1], passed)
            elif name == "IS_OP" and not self.lenient:
                self._refuse_identity(code, [*before, instruction], cells, line)
            elif "JUMP" in name and "NONE" in name:
                self._note_test(code, before, passed)
            if name in _SIGNS:
                self._note_comparison(code, instruction, before)
            if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
                if value in _INTROSPECTION and not self.lenient:
                    raise Untraceable(_INTROSPECTION[value])
                cell = cells.get(value) if name == "LOAD_DEREF" else None
                found = namespace.get(value) if cell is None else content(cell)
                if found is object.__getattribute__:
                    self.bypassing.add(code)
                self._note_global(found, namespace if cell is None else cell, value)
            elif name == "IMPORT_NAME":
                place = found = sys.modules.get(value)
            elif name == "IMPORT_FROM":
                found = getattr(place, value, None)
                if isinstance(place, types.ModuleType):
                    self._note_global(found, vars(place), value)
            elif name.startswith("STORE_FAST") and before and before[-1].opname.startswith("IMPORT_"):
                imported[str(value)] = found
            elif name.startswith("LOAD_FAST") and value in imported:
                found = imported[value]
            elif name in _ATTRIBUTES:
                place, found = found, getattr(found, value, None) if is_own(found) else None
                if found is not None:
                    self._note_global(found, vars(place), value)
                self._follow_method(code, str(value))
                if value == "__getattribute__" and (before[-1].opname, before[-1].argval) == ("LOAD_GLOBAL", "object"):
                    self.bypassing.add(code)
                if value == "__dict__" and before[-1].opname not in _ATTRIBUTES and self._is_of_owner(code, before):
                    raise Untraceable(f"reads attributes from self.__dict__ (line {line})")
            if name not in ("COPY", "NOT_TAKEN", "CACHE", "NOP", "EXTENDED_ARG"):
                before += one_by_one(instruction)

    def _note_global(self, value: Any, namespace: Any, name: str) -> None:
        if isinstance(namespace, dict) and str(namespace.get("__name__")).startswith("namedtuple_"):
            return  # what `collections.namedtuple` has made, for itself alone
        if not _is_empty(namespace) if isinstance(namespace, types.CellType) else name in namespace:
            self.globals.append((namespace, name))
        if type(value) in CONTAINERS:
            self.containers.append(value)
        if isinstance(value, type):
            self.classes.append(value)
        self.follow(value)

    def _refuse_statements(self, code: types.CodeType, cells: Container[str]) -> None:
        """`try`, `with` and others that decide what runs, or how, where no stand-in is asked."""
        before, handlers = "", set[int]()
        names: dict[int, set[str]] = {}
        for instruction, line in with_lines(code):
            name = instruction.opname
            names.setdefault(line, set()).add(str(instruction.argval))
            if name == "SETUP_FINALLY":
                handlers.add(instruction.argval)
            catches_all = name == "POP_TOP" and (before == "PUSH_EXC_INFO" or instruction.offset in handlers)
            lenient = self.lenient
            if not lenient and (name in _CATCHES or catches_all):
                raise Untraceable(f"catches exceptions (line {line})")
            if not lenient and name == "WITH_EXCEPT_START" and not names[line] & _CONTEXTS:
                raise Untraceable(f"has a with statement (line {line}), and what that does would be lost")
            if not lenient and name in _MATCHES:
                raise Untraceable(f"matches the structure of a value (line {line})")
            if name == "STORE_GLOBAL":
                raise Untraceable(f"assigns the global {instruction.argval} (line {line})")
            if name == "STORE_DEREF" and instruction.argval in code.co_freevars and instruction.argval in cells:
                raise Untraceable(f"assigns {instruction.argval} of its closure (line {line})")
            if name == "STORE_ATTR":
                self.stores[instruction.argval] = line
            before = name

    def _note_test(self, code: types.CodeType, before: list[dis.Instruction], passed: list[dis.Instruction]) -> None:
        """`before` ends with what is compared with None by the last of `passed`."""
        last, owner = before[-1], self._is_of_owner(code, before)
        until = [*itertools.takewhile(lambda i: i.offset > last.offset, reversed(passed))]
        one_of_several = any(i.is_jump_target for i in until)  # as of `a if b else c`
        if last.opname == "LOAD_ATTR":
            self.tested_attributes.add(last.argval)
        if one_of_several:
            self.note_any_test()
        elif last.opname == "LOAD_ATTR":  # of `self` it is no value that is computed
            self.tests_values |= not owner
        elif self._is_parameter(code, last):
            self.tested.add(last.argval)
        elif _is_variable(code, last):
            self.comparisons.setdefault(code, {}).update((i.offset, last.argval) for i in until)
        elif last.opname != "LOAD_GLOBAL":
            self.note_any_test()

    def note_any_test(self) -> None:
        """Any value may be compared with None, and any parameter."""
        self.tested.add(ANY)
        self.tests_values = True

    def _is_parameter(self, code: types.CodeType, loads: dis.Instruction) -> bool:
        """It loads a parameter of `forward` that is never assigned anything else."""
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        local = loads.opname.startswith("LOAD_FAST") and isinstance(loads.argval, str) and code is self.forward
        return local and loads.argval in parameters and loads.argval not in self.assigned

    def _refuse_identity(
        self, code: types.CodeType, before: list[dis.Instruction], cells: Container[str], line: int
    ) -> None:
        """`a is b` asks no stand-in, and `before` ends with it: neither may be one.

        Each is a global or its attribute, or an attribute of `self`; a parameter of the owner's is a stand-in too, but
        always the same. One of `forward`'s may be compared with True or False. What PyTorch has for an attribute of
        tensors, such as `torch.float32`, is compared with one.
        """
        rest = before[:-1]
        if type(rest[-1].argval) is bool and rest[-1].opname in CONSTANTS and self._is_parameter(code, rest[-2]):
            self.booleans.add(rest[-2].argval)
            return
        for _ in range(2):
            start = rest.index(_base(rest))
            base, named = rest[start], {str(i.argval) for i in rest[start + 1 :]}
            known = base.opname in (*CONSTANTS, "LOAD_GLOBAL", "LOAD_NAME") or self._is_of_owner(code, rest)
            known |= base.opname == "LOAD_DEREF" and base.argval in cells
            of_torch = base.argval == "torch" and any(isinstance(getattr(torch, n, None), _OF_TENSORS) for n in named)
            rest = rest[:start]
            if of_torch or not known or any(i.is_jump_target for i in before[start + 1 :]):
                raise Untraceable(f"compares by identity (line {line}); == can be recorded")

    def _note_comparison(self, code: types.CodeType, how: dis.Instruction, before: list[dis.Instruction]) -> None:
        """Two attributes of the owner, or what they have, are compared: `self.a == self.b`, `self.a is self.b`."""
        sides: list[tuple[str, ...]] = []
        for _ in range(2):
            start = before.index(_base(before)) if any(i.opname not in _ATTRIBUTES for i in before) else 0
            if not before or not self._is_of_owner(code, before):
                return
            sides.append(tuple(str(i.argval) for i in before[start + 1 :]))
            before = before[:start]
        text = how.argrepr if how.opname == "COMPARE_OP" else _SIGNS[how.opname][bool(how.argval)]
        sign = re.sub(r"bool\((.*)\)", r"\1", text)
        if sign in ("==", "!=", "is", "is not", "in", "not in"):
            self.compared.add((sides[1], sign, sides[0]))

    def _is_of_owner(self, code: types.CodeType, before: list[dis.Instruction]) -> bool:
        """`before` ends with `self.…`, in a method of the owner or in a function inside of one."""
        base = _base(before)
        local = base.opname.startswith("LOAD_FAST") and code in self.own and (base.argval,) == code.co_varnames[:1]
        return local or (base.opname == "LOAD_DEREF" and (base.argval,) == self.forward.co_varnames[:1])

    def _follow_method(self, code: types.CodeType, name: str) -> None:
        """The owner's method of that name, and where `super()` is called those of its bases."""
        if name in self.whole or (hasattr(nn.Module, name) and "super" not in code.co_names):
            return
        bases = self.owner.__mro__ if "super" in code.co_names else ()
        inherited = [vars(base)[name] for base in bases if name in vars(base)]
        found = inspect.getattr_static(self.owner, name, None)
        if isinstance(found, (types.FunctionType, staticmethod, property)) and name != "forward":
            self.methods[name] = getattr(self.owner, name)
        try:
            for function in inherited or [found]:
                self.follow(function)
        except Untraceable as reason:
            if code is self.forward:
                reason.method = name  # type: ignore[attr-defined]
            raise


_BY_NAME = {"vars", "__dict__", "attrgetter", "asdict", "astuple", "fields", "__getattribute__"}


def _computes_names(code: types.CodeType) -> bool:
    """It asks for attributes by names that are computed, or for all of them."""
    names = {*code.co_names}
    if names & _BY_NAME or "getattr" not in names:
        return bool(names & _BY_NAME)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):  # typed in, or a piece of an expression
        return True
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "getattr")
    return any(len(n.args) < 2 or not isinstance(n.args[1], ast.Constant) for n in calls)


def _base(before: list[dis.Instruction]) -> dis.Instruction:
    """What has loaded that of which `before` ends with attributes."""
    return next(i for i in reversed(before) if i.opname not in _ATTRIBUTES)


def _is_variable(code: types.CodeType, load: dis.Instruction) -> bool:
    """It loads a variable of a function, or one of its closure, that a frame of `code` has by that name.

    What is a variable in one part of a function and one of a closure in another cannot be read on Python 3.13.0.
    """
    in_cell = load.argval in code.co_cellvars + code.co_freevars
    return load.opname == "LOAD_DEREF" if in_cell else load.opname.startswith("LOAD_FAST")


def is_own(module: Any) -> bool:
    """A module of the user's project, and not one that is installed, of which a branch not taken may speak."""
    file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
    return bool(file) and is_of_users(str(file)) and "-packages" not in str(file)


@functools.lru_cache(maxsize=4096)  # each call that a recording watches asks
def is_of_users(filename: str) -> bool:
    """Neither PyTorch's nor Python's own, nor of `fuse`, nor of pytest's `assert`."""
    of_others = is_of_python(filename) or filename.startswith((TORCH, HERE, "<gemmnorm"))
    return not of_others and _ASSERTS not in filename


def is_bound(value: Any) -> bool:
    """A method of an object or class; that of a class may be compiled: `autograd.Function.apply`, from PyTorch 2.15."""
    if isinstance(value, types.BuiltinMethodType):
        return isinstance(value.__self__, type) and issubclass(value.__self__, torch.autograd.Function)
    return isinstance(value, types.MethodType)


@functools.lru_cache(maxsize=4096)
def is_of_python(filename: str) -> bool:
    return filename.startswith("<frozen") or (filename.startswith(_STDLIB) and "-packages" not in filename)


def methods_of(cls: type) -> Iterator[types.FunctionType]:
    """Functions of a user's classes that are given an instance; properties' and what decorators wrap among them."""
    for base in cls.__mro__:
        held = () if base.__module__.startswith(("torch.", "builtins")) else vars(base).values()
        for value in held:
            parts = (value, *(getattr(value, name, None) for name in ("fget", "fset", "fdel", "func")))
            for f in parts if not isinstance(value, (type, nn.Module)) else ():
                if isinstance(f, types.FunctionType):
                    yield f
                    inner = inspect.unwrap(f)
                    if inner is not f and isinstance(inner, types.FunctionType):
                        yield inner


def by_methods(answer: Callable[[list[types.FunctionType]], T]) -> Callable[[type], T]:
    """`answer` of the methods of a class but its constructor, kept as long as the class lives and they are the same."""
    kept: weakref.WeakKeyDictionary[type, tuple[list[types.CodeType], T]] = weakref.WeakKeyDictionary()

    @functools.wraps(answer)
    def ask(cls: type) -> T:
        methods = [f for f in methods_of(cls) if f.__name__ != "__init__"]
        codes = [f.__code__ for f in methods]
        if cls not in kept or kept[cls][0] != codes:
            kept[cls] = codes, answer(methods)
        return kept[cls][1]

    return ask


@by_methods
def finds_itself(methods: list[types.FunctionType]) -> str | None:
    """A method that calls `super(self.__class__, self)`, which in a derived class is that method."""
    for f in methods:
        found = [(i.opname, str(i.argval)) for i in dis.get_instructions(f.__code__) if i.opname.startswith("LOAD_")]
        for first, second, third in zip(found, found[1:], found[2:], strict=False):
            of_its_class = second == ("LOAD_GLOBAL", "type") or third == ("LOAD_ATTR", "__class__")
            if first == ("LOAD_GLOBAL", "super") and of_its_class:
                return f.__name__
    return None


def content(cell: types.CellType) -> Any:
    """What is in it; None where nothing is, not even None."""
    return None if _is_empty(cell) else cell.cell_contents


def _is_empty(cell: types.CellType) -> bool:
    return cell == types.CellType()
