"""Stand-ins for tensors, and honest answers to what code asks of them while a `forward` is recorded.

Given a stand-in, `isinstance(x, Tensor)`, `f"{x.shape}"` or `torch.is_grad_enabled()` have an answer that a recording
would keep for ever. Here each is recorded, becomes a condition, or is refused.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import operator
import os
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from . import guards
from .beside import LOCK, PATIENCE
from .functions import looked_up
from .instructions import reads_attribute, unpacked
from .scanning import HERE, TORCH, Raised, Untraceable, is_of_python

MAPPING = "mapping"  # the key under which a node says that it stands for the keyword arguments of a call
_INSIDE = (TORCH, HERE)  # code that knows stand-ins
_GRAD_MODE = os.path.join(TORCH, "autograd", "grad_mode.py")
_FX = os.path.join(TORCH, "fx", "")
_here = threading.local()  # `records`: this thread does
_TYPE = "asks for the type of a value"
_HAS = "asks what a value has"
_TEXT = "writes a value into a text"
_DICT: Any = vars(fx.Proxy)["__dict__"]
_NODE_TYPE: Any = getattr(pytree, "_get_node_type", None)  # a private name: docs/private_api.md
_OWN = ("node", "tracer", "root", "attr", "_node", "keys")  # attributes of torch.fx's, who alone sees them
_GRADIENTS = "switches gradients on or off"
_SAVED = "changes what autograd saves, as activation checkpointing does"
# Methods of context managers whose effect a recording would lose; of `no_grad` it notices what runs inside.
_ENTERED: dict[tuple[type[Any], str], str] = {
    (torch.amp.autocast_mode.autocast, "__enter__"): "enters an autocast region",
    (torch.autograd.graph.saved_tensors_hooks, "__enter__"): _SAVED,
    (torch.enable_grad, "__enter__"): _GRADIENTS,
    (torch.inference_mode, "__enter__"): _GRADIENTS,
    (torch.set_grad_enabled, "__init__"): _GRADIENTS,
    (torch.set_grad_enabled, "__enter__"): _GRADIENTS,
}
# Questions about the surroundings, whose answers become conditions: the function, and its name below `torch`.
_ASKED = (
    *("is_grad_enabled", "is_inference_mode_enabled", "is_anomaly_enabled", "compiler.is_compiling", "jit.is_tracing"),
    *("is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled"),
    *("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype"),
    *("get_default_dtype", "get_num_threads", "get_float32_matmul_precision", "initial_seed"),
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("distributed.is_initialized", "distributed.get_rank", "distributed.get_world_size"),
)


def _at(path: str) -> tuple[Any, str]:
    """The module that has the question `path`, and its name there."""
    module, _, name = f"torch.{path}".rpartition(".")
    return sys.modules.get(module), name


QUESTIONS = {getattr(*_at(path)): path for path in _ASKED if hasattr(*_at(path))}
# Tensors made from no tensor: each call makes a new one.
_FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
)


def _own(name: str) -> property:
    """What torch.fx keeps under `name`; for who is recorded, the attribute of the value that has that name."""
    kept = f"_own_{name}"

    def get(self: StandIn) -> Any:
        return object.__getattribute__(self, kept) if _inside(2) else self.__getattr__(name)

    return property(get, lambda self, value: object.__setattr__(self, kept, value))


class StandIn(fx.Proxy):
    """Records what is done to a tensor in place as such, and refuses to be taken for a number, a text or a key."""

    node, tracer, root, attr, _node = map(_own, ("node", "tracer", "root", "attr", "_node"))  # type: ignore[assignment]

    @property
    def keys(self) -> Any:  # type: ignore[override]
        return super().keys if _inside(2) else self.__getattr__("keys")

    def __getattr__(self, name: str) -> Any:
        found = _Attribute(self, name)
        if name in self.tracer.compared:  # type: ignore[attr-defined]
            mark_as_compared(found)
        return found

    def __hash__(self) -> int:
        _refuse("looks a value up in a set or dictionary; == can be recorded", but=nn.modules.container.__file__)
        return object.__hash__(self)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        if reads_attribute(sys._getframe(1)):  # and not a compiled function, about which `watching` hears
            _refuse(_TYPE)
        return type(self)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        _refuse(_HAS)
        return _DICT.__get__(self)

    def __dir__(self) -> Any:
        _refuse(_HAS)
        return object.__dir__(self)

    def __repr__(self) -> str:
        _refuse(f"{_TEXT}, or hands it to a function of torch.jit.script")
        return super().__repr__()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN or not _inside(2):
            raise Untraceable(f"sets the attribute {name} of a value")
        object.__setattr__(self, name, value)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __iter__(self) -> Iterator[Any]:
        with self.tracer.watch.paused():  # type: ignore[attr-defined]
            names = unpacked(sys._getframe(1))
        if names is None:
            return iter(self.tracer.iter(self))
        call, parts = self.tracer.create_proxy, []
        for i, name in enumerate(names):
            parts.append(call("call_function", operator.getitem, (self, i), {}))
            parts[-1].node.meta[guards.UNPACKED] = (i, len(names), name)
        return iter(parts)

    def __contains__(self, item: Any) -> bool:
        return bool(self.tracer.create_proxy("call_function", operator.contains, (self, item), {}))

    def __len__(self) -> int:
        raise TypeError("asked by what iterates, as a hint; `len` has another answer")

    def __format__(self, _: str = "") -> str:
        raise Raised(_TEXT)

    __str__ = __format__  # type: ignore[assignment]


class _Attribute(StandIn, fx.proxy.Attribute):
    """An attribute of a value, or a method that is about to be called."""

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """Made when it is asked for; torch.fx would record what stands in for `getattr`."""
        if not _inside(2):
            return self.__getattr__("node")  # type: ignore[no-any-return]
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", guards.ATTRIBUTE, (self.root, self.attr), {}).node
        return self._node  # type: ignore[no-any-return]


def _refuse(reason: str, but: str | None = None) -> None:
    """Where user's code asks a stand-in, by way of Python's library or PyTorch's file `but` or not."""
    if not _inside(3, but):
        raise Raised(reason)


def mark_as_compared(value: fx.Proxy) -> None:
    """`optional` makes a condition of it: it may be None where it is compared with None, or may be missing."""
    value.node.meta[guards.COMPARED] = True


def _define(target: Callable[..., Any]) -> None:
    """`y *= s` as what it is; torch.fx would record `y = y * s`."""

    def record(self: StandIn, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    setattr(StandIn, f"__{target.__name__}__", record)


def _refuse_number(name: str) -> None:
    def refuse(self: StandIn) -> NoReturn:
        raise Untraceable("takes the value of an input, a tensor or a size for a Python number")

    setattr(StandIn, f"__{name}__", refuse)


for _target in guards.IN_PLACE:
    _define(_target)
for _name in ("int", "float", "complex", "index"):
    _refuse_number(_name)


# --- answers ---------------------------------------------------------------------------------------------------------


def _asked(value: Any) -> bool:
    """`value` is a stand-in, and who asks is neither PyTorch nor the recorder."""
    return issubclass(type(value), fx.Proxy) and not _inside(3)


def _inside(depth: int, but: str | None = None) -> bool:
    """Who asks is PyTorch, the recorder, or another thread, whose answers are the plain ones."""
    frame: types.FrameType | None = sys._getframe(depth)
    if not getattr(_here, "records", False):
        return True
    while frame is not None and (is_of_python(frame.f_code.co_filename) or frame.f_code is torch.is_tensor.__code__):
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else HERE
    return file.startswith(_INSIDE) and file != but


def _is_instance(value: Any, classes: Any, plain: Callable[..., bool] = isinstance) -> bool:
    if not _asked(value):
        answer = plain(value, classes)
        if plain(value, nn.Module) and not _inside(2):
            _here.tracer.is_one_of(value, tuple(_flat(classes)), answer)
        return answer
    listed = [c for group in _flat(classes) for c in _members(group)]
    of_a_kind = any(issubclass(c, Tensor) and c is not Tensor for c in listed)
    if of_a_kind or not guards.is_tensor(value.tracer.root, value.node):
        raise Raised(_TYPE)
    return any(issubclass(Tensor, c) for c in listed)


def _flat(classes: Any) -> Iterator[Any]:
    for group in classes if type(classes) is tuple else ():
        yield from _flat(group)
    if type(classes) is not tuple:
        yield from typing.get_args(classes) or (classes,)


def _members(group: Any, plain: Callable[..., bool] = isinstance) -> Iterator[type]:
    for member in typing.get_args(group) or (group,):
        if not plain(member, type):
            raise Raised(_TYPE)
        yield member


def _length(value: Any) -> Any:
    if not _asked(value):
        return guards.LENGTH(value)
    if value.node.meta.get(MAPPING):
        raise Untraceable("asks how many arguments it is given")
    return value.tracer.create_proxy("call_function", guards.LENGTH, (value,), {})


def _only_of_values(name: str, reason: str) -> Callable[..., Any]:
    plain = getattr(builtins, name)

    def ask(value: Any, *rest: Any) -> Any:
        if _asked(value):
            raise Raised(reason)
        if issubclass(type(value), nn.Module) and not _inside(2):
            if name == "id":
                raise Untraceable("asks for the identity of a module")
            _here.tracer.recorder.relate_class(value)
        return plain(value, *rest)

    return ask


def _getattr(value: Any, name: str, *default: Any) -> Any:
    if not _asked(value):
        return guards.ATTRIBUTE(value, name, *default)
    if default and default[0] is not None:
        raise Raised(_HAS)
    found = value.__getattr__(name) if name in _OWN else guards.ATTRIBUTE(value, name)
    if not default:
        return found
    mark_as_compared(found)
    return found


def _vars(*values: Any, plain: Callable[..., dict[str, Any]] = vars) -> dict[str, Any]:
    if not values:
        return sys._getframe(1).f_locals
    if _asked(values[0]):
        raise Raised(_HAS)
    if issubclass(type(values[0]), nn.Module) and not _inside(2):
        raise Untraceable("reads the attributes of a module by vars()")
    return plain(*values)


def _dir(*values: Any, plain: Callable[..., list[str]] = dir) -> list[str]:
    if not values:
        return sorted(sys._getframe(1).f_locals)
    if _asked(values[0]):
        raise Raised(_HAS)
    if issubclass(type(values[0]), nn.Module) and not _inside(2):
        raise Untraceable("lists the attributes of a module")
    return plain(*values)


def _node_type(value: Any) -> Any:
    """What `tree_map` and the like ask of each part of a tree; torch.fx asks stand-ins too."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == pytree.__file__:
        frame = frame.f_back
    if issubclass(type(value), StandIn) and frame is not None and not frame.f_code.co_filename.startswith((_FX, HERE)):
        raise Raised("asks for the structure of a value")
    return _NODE_TYPE(value)


def _print(*values: Any, plain: Callable[..., None] = print, **how: Any) -> None:
    if not _inside(2):
        raise Untraceable("prints")
    plain(*values, **how)


_BUILTINS: dict[str, Callable[..., Any]] = {
    "isinstance": _is_instance,
    "len": _length,
    "print": _print,
    "getattr": _getattr,
    "hasattr": _only_of_values("hasattr", _HAS),
    "callable": _only_of_values("callable", "asks what a value is"),
    "id": _only_of_values("id", "asks for the identity of a value"),
    "vars": _vars,
    "dir": _dir,
}


def _about(path: str, plain: Callable[..., Any], answers: dict[str, Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        answer = plain(*args, **kwargs)
        if not _inside(2):
            given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
            if any(type(value) not in (str, int) for value in (*args, *kwargs.values())):
                raise Untraceable(f"calls torch.{path}({', '.join(given)})")
            answers[f"torch.{path}({', '.join(given)})"] = answer
        return answer

    return ask


def _asking_line() -> int | None:
    """The line of the user's code that asks, by way of Python's library or not; None where anyone else does."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and is_of_python(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not getattr(_here, "records", False) or frame.f_code.co_filename.startswith(_INSIDE):
        return None
    return frame.f_lineno


def _environment(name: str, answers: dict[str, Any]) -> Callable[..., Any]:
    """A method of `os.environ`: one variable is a question, all else is refused."""
    plain = vars(type(os.environ))[name]

    def ask(environment: Any, *args: Any) -> Any:
        line = _asking_line()
        if line is not None and (name != "__getitem__" or environment is not os.environ or type(args[0]) is not str):
            raise Untraceable(f"{'reads all of' if name == '__iter__' else 'changes'} the environment (line {line})")
        if line is not None:
            answers[f"os.environ.get({args[0]!r})"] = os.environ.get(args[0])
        return plain(environment, *args)

    return ask


def _would_log(answers: dict[str, Any]) -> Callable[..., bool]:
    """`Logger.isEnabledFor`, which every log call asks first: a question, and refused where something is logged."""
    plain = logging.Logger.isEnabledFor

    def ask(logger: logging.Logger, level: int) -> bool:
        answer, line = plain(logger, level), _asking_line()
        if line is not None:
            by_a_log_call = sys._getframe(1).f_globals is vars(logging)
            if (answer and by_a_log_call) or logging.getLogger(logger.name) is not logger:
                raise Untraceable(f"logs (line {line})")
            answers[f"logging.getLogger({logger.name!r}).isEnabledFor({level!r})"] = answer
        return answer

    return ask


def _making(tracer: fx.Tracer, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A call of `plain` is recorded; the tensor that it would make now would be the same for ever."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if _inside(2) else tracer.create_proxy("call_function", plain, args, kwargs)

    return make


@contextlib.contextmanager
def honest(tracer: fx.Tracer) -> Iterator[dict[str, Any]]:
    """While active, questions are answered honestly; the value has those about the surroundings, with the answers."""
    answers: dict[str, Any] = {}
    # PyTorch lists its functions when it is first asked, and keeps that: never what is put in their place here.
    torch.overrides.get_ignored_functions(), torch.overrides.get_overridable_functions()

    def enter(plain: Callable[..., Any], reason: str) -> Callable[..., Any]:
        @functools.wraps(plain)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            by_others = not caller.f_code.co_filename.startswith((HERE, _GRAD_MODE))  # such as `no_grad` itself
            if by_others and getattr(_here, "records", False):
                refused = Untraceable(reason)
                refused.method = getattr(caller.f_locals.get("func"), "__name__", None)  # type: ignore[attr-defined]
                raise refused  # with the function that it decorates
            return plain(*args, **kwargs)

        return refuse

    with contextlib.ExitStack() as stack:
        stack.enter_context(_no_first_import_of_dynamo())
        for name, answer in _BUILTINS.items():
            stack.enter_context(_replaced(builtins, name, answer))
        if _NODE_TYPE is not None:
            stack.enter_context(_replaced(pytree, "_get_node_type", _node_type))
        for name in _FACTORIES:
            stack.enter_context(_replaced(torch, name, _making(tracer, getattr(torch, name))))
        for path in QUESTIONS.values():
            place, name = _at(path)
            stack.enter_context(_replaced(place, name, _about(path, getattr(place, name), answers)))
        for name in ("__getitem__", "__setitem__", "__delitem__", "__iter__"):
            stack.enter_context(_replaced(type(os.environ), name, _environment(name, answers)))
        stack.enter_context(_replaced(logging.Logger, "isEnabledFor", _would_log(answers)))
        for (cls, name), reason in _ENTERED.items():
            stack.enter_context(_replaced(cls, name, enter(vars(cls)[name], reason)))
        for name, found in looked_up(lambda: getattr(_here, "records", False)).items():
            stack.enter_context(_replaced(type(torch.autograd.Function), name, found))
        stack.enter_context(_replaced(_here, "tracer", tracer))
        stack.enter_context(_replaced(_here, "records", True))
        yield answers


@contextlib.contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    missing = name not in vars(place)
    before = vars(place).get(name)
    setattr(place, name, value)
    try:
        yield
    finally:
        delattr(place, name) if missing else setattr(place, name, before)


@contextlib.contextmanager
def _no_first_import_of_dynamo() -> Iterator[None]:
    """Dynamo knows built-in functions by identity, from its import on; checkpointing is what imports it in a call."""
    finder: Any = types.SimpleNamespace(find_spec=_refuse_dynamo)
    sys.meta_path = [finder, *sys.meta_path]  # another list: an import in another thread goes through the one of before
    try:
        yield
    finally:
        sys.meta_path = [other for other in sys.meta_path if other is not finder]


def _refuse_dynamo(name: str, *_: Any) -> None:
    if name != "torch._dynamo":
        return
    if getattr(_here, "records", False):
        raise Untraceable(_SAVED)
    if LOCK.acquire(timeout=PATIENCE):  # another thread's import waits, but not for ever: both may import something
        LOCK.release()
