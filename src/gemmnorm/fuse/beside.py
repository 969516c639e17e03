"""Beside other threads: while something is recorded they compile nothing, and run what they have compiled.

A recording replaces built-in functions and methods of `nn.Module` for the whole process. Code that runs in another
thread gets the plain answers; Dynamo, which reads the code of what it finds, does not, so a compilation waits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from torch import fx
from torch.fx import _symbolic_trace

P = ParamSpec("P")
T = TypeVar("T")
LOCK = threading.RLock()
PATIENCE = 60.0  # seconds, where to wait for ever may be to wait for one that waits
_FLAG = "_is_fx_tracing_flag"  # a private name: docs/private_api.md
_inside = threading.local()
_BEGUN = 5e-3  # seconds, in which a call comes from its beginning to its guards


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No other thread records, nor compiles; both wait. A call inside of one does not.

    Dynamo's lock is taken first, as by a compilation that copies a fused model.
    """
    outermost = not getattr(_inside, "alone", False)
    if outermost and "torch._dynamo" in sys.modules:  # another thread may be in the middle of that import
        importlib.import_module("torch._dynamo")
    compiles: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    taken = compiles is not None and compiles.acquire(timeout=-1 if outermost else PATIENCE)
    try:
        with LOCK:
            _inside.alone = True
            try:
                yield
            finally:
                _inside.alone = not outermost
    finally:
        if taken:
            compiles.release()


def recording_alone(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which records, while other threads wait with that and with what they compile and have compiled."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with alone(), compiled_calls_wait():
            return function(*args, **kwargs)

    return run


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, while no other thread records or compiles."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with alone():
            return function(*args, **kwargs)

    return run


class _Here:
    """True in the thread that made it. Any other is told False when it is closed."""

    def __init__(self) -> None:
        self.thread, self.closed = threading.get_ident(), threading.Event()

    def __bool__(self) -> bool:
        if self.thread != threading.get_ident():
            self.closed.wait(PATIENCE)
        return not self.closed.is_set() and self.thread == threading.get_ident()


@contextlib.contextmanager
def compiled_calls_wait() -> Iterator[None]:
    """A call of a compiled model asks whether torch.fx traces: in other threads it waits there for the answer.

    Its guards would fail by what is replaced meanwhile, and have it compiled again. That happens to a call that has
    begun before and has not come to its guards yet.
    """
    if getattr(_inside, "waited_for", False):
        yield
        return
    before, here = getattr(_symbolic_trace, _FLAG, None), _Here()
    setattr(_symbolic_trace, _FLAG, here)
    _inside.waited_for = True
    try:
        skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip is not None:
            _have_skipped(skip)
            time.sleep(_BEGUN if threading.active_count() > 1 else 0)
        yield
    finally:
        _inside.waited_for = False
        setattr(_symbolic_trace, _FLAG, before)
        here.closed.set()  # another thread that traced meanwhile may put it back


@functools.cache
def _have_skipped(skip: Callable[[types.CodeType], None]) -> None:
    """Dynamo leaves alone what takes the place of others' functions: in another thread it would compile that."""
    for name in ("recorder", "stand_ins", "functions", "scanning", "tracing", "watching"):
        held = vars(sys.modules[f"{__package__}.{name}"]).values()
        classes = (value for value in held if isinstance(value, type) and value.__module__.startswith(str(__package__)))
        found = itertools.chain(held, *(vars(cls).values() for cls in classes))
        codes = [f.__code__ for f in found if isinstance(f, types.FunctionType)]
        for code in codes:  # which grows by the functions inside of it
            codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
            if os.path.dirname(code.co_filename) == os.path.dirname(__file__):
                skip(code)


def trace(tracer: fx.Tracer, root: Any) -> fx.Graph:
    """`tracer.trace(root)`, which says in a global of its module that it traces: here in a copy of those globals."""
    plain: Any = inspect.unwrap(fx.Tracer.trace)
    names = dict(vars(_symbolic_trace))
    apart = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    return apart(tracer, root)  # type: ignore[no-any-return]
