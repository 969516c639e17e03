"""What runs while a `forward` is recorded: user's functions are read before they run, questions and tensors noticed.

Reading byte code ahead (`scanning`) finds what is called by a name. A method of a helper object, a callback out of a
list or a property is found here, when it is called; so is what is asked of Python or PyTorch, by whatever name it goes.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import gc
import inspect
import operator
import os
import pathlib
import random
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from . import stand_ins
from .observing import Observer
from .outside import goes_on, is_settings
from .scanning import TORCH, Untraceable, is_of_python, is_of_users

_OURS = (os.path.join(TORCH, "fx", ""), os.path.join(os.path.dirname(os.path.dirname(__file__)), ""))
_MODULES = os.path.join(TORCH, "nn", "modules", "")
_BACKENDS = os.path.join(TORCH, "backends", "")
_CONSTANT = ("is_available", "is_built", "version")  # of a backend
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
# What a recording would lose, or ask once for all calls.
_LOST: dict[Callable[..., Any], str] = {
    **{getattr(time, f"{name}{unit}"): "asks for the time" for name in _CLOCKS for unit in ("", "_ns")},
    **{time.sleep: "sleeps", warnings.warn: "warns", warnings.warn_explicit: "warns"},
    isinstance: "calls isinstance under another name",
    **dict.fromkeys((operator.is_, operator.is_not), "compares values by identity"),
    **dict.fromkeys((time.localtime, time.gmtime, time.strftime, time.ctime), "asks for the time"),
}
# Modules of Python's whose functions give the same for the same arguments, and change nothing but those; or whose
# questions are noticed elsewhere (`stand_ins`). The rest, a clock, a file, a queue, is asked or told anew at each call.
_PURE = {
    "_abc", "_bisect", "_collections", "_functools", "_heapq", "_operator", "_typing", "builtins", "cmath",
    "itertools", "math", "_collections_abc", "_weakrefset", "abc", "bisect", "collections", "contextlib",
    "copy", "copyreg", "dataclasses", "decimal", "enum", "fractions", "functools", "heapq", "importlib",
    "inspect", "keyword", "logging", "numbers", "operator", "posixpath", "ntpath", "re", "reprlib", "string",
    "textwrap", "types", "typing", "warnings", "weakref", "_datetime", "datetime", "_decimal", "_contextvars",
    "_sre", "_weakref", "zipimport", "json",
}  # fmt: skip
_IMPURE = {"open", "input", "exec", "eval", "compile", "breakpoint", "globals", "locals"}  # of `builtins`
_NAMES_OF_PATHS = {  # the code of what a path answers by its text
    getattr(getattr(held, "fget", None) or getattr(held, "__func__", held), "__code__", None)
    for held in vars(pathlib.PurePath).values()
}
_ENVIRONMENT = ("getenv", "get", "encode", "decode", "check_str")  # of `os`, beside special methods
# Python functions of `torch` and of `torch.cuda` that are constant, or that are given what they are about.
_OF_TORCH = {"is_tensor", "is_storage", "typename", "is_available", "is_built", "device_count", "is_bf16_supported"}
_OF_TORCH |= {"get_device_capability", "get_device_name", "get_device_properties"}
_STATES = tuple(os.path.join(TORCH, *name) for name in (("__init__.py",), ("random.py",), ("cuda", ""), ("onnx", "")))
_TAKE_ARGUMENTS = ("is_autocast_enabled", "get_autocast_dtype")
_STATIC = inspect.getattr_static.__code__
_NOW = ("now", "today", "utcnow")
_OF_THREADS = ("_thread", "_queue")  # compiled, by which other threads are handed something; the rest is `threading`'s


class Watch:
    """While active in this thread, `recorder` reads each function before it runs, and `answers` has what was asked."""

    def __init__(self, recorder: Any, answers: dict[str, Any], forward: types.CodeType, used: set[str]) -> None:
        """`used` gets the generators of random numbers (`held.GENERATORS`) that may be drawn from."""
        self.recorder, self.answers, self.forward, self.used = recorder, answers, forward, used
        self.methods = {getattr(f, "__code__", None): name for name, f in recorder.scan.methods.items()}
        self.known: set[types.CodeType] = set()
        self.known_leniently: set[types.CodeType] = set()
        self.python = {
            f.__code__: (f, path) for f, path in stand_ins.QUESTIONS.items() if isinstance(f, types.FunctionType)
        }
        self.mode = _NoOtherTensors(used)
        self.active = False

    def __enter__(self) -> Watch:
        self.before, self.collects, self.active = sys.getprofile(), gc.isenabled(), True
        self.began = False  # whether `forward` has
        gc.disable()  # what runs when something is collected is not `forward`'s
        self.mode.__enter__()
        self.observer = Observer(self.recorder.scan.comparisons)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.active = False
        self.observer.close()
        if self.collects:
            gc.enable()
        self.mode.__exit__(None, None, None)
        if callable(self.before):
            sys.setprofile(self.before)
        elif self.before is not None:  # cProfile, which sets itself
            self.before.enable()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While the recorder works, which runs nothing of the user's: for speed."""
        if not self.active or threading.get_ident() != self.observer.thread:
            yield
            return
        self.active = False
        sys.setprofile(None)
        self.observer.way.pause()
        try:
            yield
        finally:
            self.active = True
            self.observer.way.go_on()
            sys.setprofile(self._event)

    def _event(self, frame: types.FrameType, kind: str, function: Any) -> None:
        if kind == "call":
            self._called(frame)
            if self.observer.comparisons and frame.f_code in self.observer.comparisons:
                self.observer.watch(frame)
        elif kind == "c_call":
            self._called_compiled(frame, function)
        elif kind == "return" and frame.f_code in self.methods:
            self._returns(frame)

    def _called_compiled(self, frame: types.FrameType, function: Any) -> None:
        of = type(getattr(function, "__self__", None))
        if issubclass(of, (random.Random, torch.Generator)):
            self.used.add("random" if issubclass(of, random.Random) else "torch")
        if is_of_users(frame.f_code.co_filename):
            self._asked(function, f"(line {frame.f_lineno})")
            if _is_of_project(frame) and not _is_pure(function):
                raise Untraceable(f"{_does(function)} (line {frame.f_lineno})")

    def _returns(self, frame: types.FrameType) -> None:
        """A method that `forward` has called, and that has changed something, may stay a call."""
        if frame.f_back is not None and frame.f_back.f_code is self.forward and self.recorder.keeper.has_changed():
            reason = Untraceable("changes a list or dictionary, or an object that the module holds")
            reason.method = self.methods[frame.f_code]  # type: ignore[attr-defined]
            raise reason

    def _called(self, frame: types.FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if code is self.forward:  # where it calls itself, its parameters are other values
            self.observer.missed |= self.began
            self.began = True
        bypasses = code in self.recorder.scan.bypassing or (code is _STATIC and not by_us(caller))
        if bypasses and any(isinstance(value, nn.Module) for value in frame.f_locals.values()):
            raise Untraceable("reads attributes of a module past its __getattribute__")
        if code in self.known:
            return
        self.observer.missed |= code.co_filename == threading.__file__  # another thread may be handed something
        by_user = caller is not None and is_of_users(caller.f_code.co_filename)
        if by_user and code in self.python and caller is not None:
            function, path = self.python[code]
            self._note(function, path, any(v is not None for v in frame.f_locals.values()), f"(line {caller.f_lineno})")
        elif by_user and code.co_filename.startswith(_BACKENDS) and code.co_name not in _CONSTANT:
            raise Untraceable("asks for a setting of torch.backends")
        elif caller is not None and _is_of_project(caller) and _has_a_state(frame):
            raise Untraceable(f"{_does(frame)} (line {caller.f_lineno})")
        elif is_of_users(code.co_filename):
            if not (_stands_apart(frame) or by_us(caller)):
                self._read(frame)
            if code not in self.recorder.scan.read:
                self.observer.ran_unread.add(code)

    def _read(self, frame: types.FrameType) -> None:
        """Where it is given no stand-in, it may be again later."""
        code = frame.f_code
        lenient = not any(map(_holds_stand_in, frame.f_locals.values()))
        known = self.known_leniently if lenient else self.known
        if code in known or code in self.recorder.scan.codes:
            return
        if lenient and "-packages" in code.co_filename:  # the package's affair; what it is asked with is watched
            self.recorder.opaque.add(type(_first(frame)))
            return
        known.add(code)
        self.recorder.read_before(frame, lenient)

    def _asked(self, function: Any, line: str) -> None:
        of, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        home = of.__name__ if isinstance(of, types.ModuleType) else type(of).__module__
        self.observer.missed |= home in _OF_THREADS
        if isinstance(of, contextvars.ContextVar) and name == "get":
            raise Untraceable(f"reads a context variable {line}")
        if isinstance(of, type) and issubclass(of, datetime.date) and name in _NOW:
            raise Untraceable(f"asks for the time {line}")
        if isinstance(function, types.BuiltinFunctionType):
            if function in _LOST:
                raise Untraceable(f"{_LOST[function]} {line}")
            if function in stand_ins.QUESTIONS:
                self._note(
                    function, stand_ins.QUESTIONS[function], stand_ins.QUESTIONS[function] in _TAKE_ARGUMENTS, line
                )

    def _note(self, function: Callable[..., Any], path: str, with_arguments: bool, line: str) -> None:
        if with_arguments:
            raise Untraceable(f"calls {path} under another name {line}; torch.{path} can be recorded")
        self.answers[f"torch.{path}()"] = function()


def _is_of_project(frame: types.FrameType) -> bool:
    """Code of a user's that is not installed: of a package's, what it asks and tells is its own affair."""
    file = frame.f_code.co_filename
    return is_of_users(file) and "-packages" not in file


def _is_pure(function: Any) -> bool:
    """A compiled function is no question about a state, and tells nobody anything."""
    of = getattr(function, "__self__", None)
    module, name = str(getattr(function, "__module__", None) or ""), getattr(function, "__name__", "")
    if goes_on(of) and not isinstance(of, Iterator):
        return False
    by_pybind = type(of).__name__.startswith(("PyCapsule", "pybind11_detail_function"))
    if isinstance(of, types.ModuleType):
        module = of.__name__
    elif not (of is None or by_pybind):  # a method
        bases = (of if isinstance(of, type) else type(of)).__mro__
        module = next((base for base in bases if name in vars(base)), object).__module__
        return module.partition(".")[0] not in sys.stdlib_module_names or module in _PURE
    if module.partition(".")[0] == "torch":
        return not (by_pybind or module == "torch._C") or function in stand_ins.QUESTIONS
    return (module in _PURE and name not in _IMPURE) or module.partition(".")[0] not in sys.stdlib_module_names


def _has_a_state(frame: types.FrameType) -> bool:
    """A Python function of Python's own library, or of PyTorch's, asks for a state, or changes one."""
    code = frame.f_code
    file, name = code.co_filename, code.co_name
    if file.startswith(_STATES):
        return not (name in _OF_TORCH or name.startswith("__")) and not any(
            map(_holds_stand_in, frame.f_locals.values())
        )
    if not is_of_python(file):
        return False
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    if module == "pathlib":
        return code not in _NAMES_OF_PATHS and not name.startswith("__")
    if module == "os":
        return name not in _ENVIRONMENT and not name.startswith("__")
    return module not in _PURE


def _does(called: Any) -> str:
    """What is refused of a compiled function, or of one that runs in a frame."""
    if isinstance(called, types.FrameType):
        module, of = str(called.f_globals.get("__name__")), None
        name = f"{module}.{getattr(called.f_code, 'co_qualname', called.f_code.co_name)}"
    else:
        module, of, name = "", getattr(called, "__self__", None), getattr(called, "__qualname__", str(called))
    if module == "random" or (goes_on(of) and not isinstance(of, Iterator)):
        return "draws random numbers"
    return f"calls {name}, which a recording would do once"


def by_us(frame: types.FrameType | None) -> bool:
    """Who asks, by way of Python's library and methods of `nn.Module` or not, is the recorder, not what it records."""
    while frame is not None:
        file = frame.f_code.co_filename
        passes_on = file == stand_ins.__file__ or frame.f_code.co_name == "getattribute"  # in place of Python's own
        if not (passes_on or file.startswith(_MODULES) or is_of_python(file)):
            break
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename.startswith(_OURS)


def by_a_user(frame: types.FrameType) -> bool:
    """Code of a user's runs in `frame`."""
    return is_of_users(frame.f_code.co_filename)


def by_way_of_python(frame: types.FrameType | None) -> bool:
    """Who asks, by way of Python's library or not, is code of a user's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file == stand_ins.__file__ or is_of_python(file)):
            return is_of_users(file)
        frame = frame.f_back
    return False


def comparisons_of(recorder: Any) -> tuple[Any, Any]:
    """`__eq__` and `__hash__` of modules, of which `recorder` hears."""

    def equal(module: nn.Module, other: object) -> Any:
        if isinstance(other, nn.Module) and recorder.is_asked(sys._getframe(1)):
            recorder.relate_identity(module, other)
        return object.__eq__(module, other)

    def hashed(module: nn.Module) -> int:
        if recorder.watches(module) and by_way_of_python(sys._getframe(1)):
            raise Untraceable("looks a module up in a set or dictionary")
        return object.__hash__(module)

    return equal, hashed


def _first(frame: types.FrameType) -> Any:
    """The first argument of what runs in `frame`, such as `self`."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def function_of(frame: types.FrameType) -> types.FunctionType | None:
    """The function that runs in `frame`, which has just been called, where it can be found."""
    code, first = frame.f_code, _first(frame)
    for cls in (first if isinstance(first, type) else type(first)).__mro__:
        found = vars(cls).get(code.co_name)
        for f in (found, *(getattr(found, name, None) for name in ("__func__", "fget", "func"))):
            if isinstance(f, types.FunctionType) and f.__code__ is code:
                return f
    holders = gc.get_referrers(code) if code.co_freevars else ()
    return next((f for f in holders if isinstance(f, types.FunctionType) and f.__code__ is code), None)


def _stands_apart(frame: types.FrameType) -> bool:
    """Runs when nobody has called it, or gives what the recorder watches anyway."""
    code, first = frame.f_code, _first(frame)
    looks_up = code.co_name in ("__getattr__", "__getattribute__") and isinstance(first, nn.Module)
    return looks_up or code.co_name == "__del__" or _is_within_a_library(frame)


def _is_within_a_library(frame: types.FrameType | None) -> bool:
    """An installed package makes an object, as a recording will again, or looks up an attribute or an item."""
    if frame is None or "-packages" not in frame.f_code.co_filename:
        return False
    while frame is not None and "-packages" in frame.f_code.co_filename:
        if frame.f_code.co_name.startswith("__"):
            return True
        frame = frame.f_back
    return False


def _holds_stand_in(value: Any) -> bool:
    if type(value) in (tuple, list, set, dict):
        return any(map(_holds_stand_in, value.values() if type(value) is dict else value))
    held = getattr(value, "__dict__", {}) if is_settings(value) and not isinstance(value, type) else {}
    return any(isinstance(v, fx.Proxy) for v in (value, *held.values()))


class _NoOtherTensors(TorchFunctionMode):  # type: ignore[misc]
    """Tensors that are no stand-ins are not asked for anything, and nothing is done with them."""

    def __init__(self, used: set[str]) -> None:
        super().__init__()
        self.used = used

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*_leaves((args, kwargs or {}))]
        self.used |= set() if any(isinstance(a, fx.Proxy) for a in given) else {"torch"}
        if any(isinstance(a, Tensor) for a in given) and not any(isinstance(a, fx.Proxy) for a in given):
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename.startswith(TORCH) and not by_us(frame):
                frame = frame.f_back
            if not by_us(frame):
                raise Untraceable(f"uses a tensor that is no input of its own (line {frame.f_lineno})")
        return func(*args, **(kwargs or {}))


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (tuple, list):
        for item in value:
            yield from _leaves(item)
    elif type(value) is dict:
        yield from _leaves([*value.values()])
    else:
        yield value


# --- what is left of a recording -------------------------------------------------------------------------------------


def forget_frames(error: BaseException | None) -> None:
    """Drop the variables of the calls that `error` has ended."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def take_back(made: list[weakref.ref[fx.Proxy]]) -> str | None:
    """Take the stand-ins that are still somewhere out of there; where one was."""
    if all(ref() is None for ref in made):
        return None
    gc.collect()
    left = [proxy for ref in made if (proxy := ref()) is not None]
    found = None
    for proxy in left:
        for holder in gc.get_referrers(proxy):
            if holder is not left and not isinstance(holder, (types.FrameType, fx.Proxy)) and _drop(holder, proxy):
                found = f"a {type(holder).__name__}"
    return found or ("an object" if left else None)


def _drop(holder: Any, proxy: fx.Proxy) -> bool:
    if isinstance(holder, list):
        list.__setitem__(holder, slice(None), [item for item in holder if item is not proxy])
    elif isinstance(holder, dict):
        for key in [key for key, value in dict.items(holder) if value is proxy]:
            dict.__delitem__(holder, key)
    elif isinstance(holder, set):
        set.discard(holder, proxy)
    elif hasattr(holder, "__dict__") and any(value is proxy for value in vars(holder).values()):
        return _drop(vars(holder), proxy)
    else:
        return False
    return True
