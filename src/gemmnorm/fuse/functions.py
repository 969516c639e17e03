"""`torch.autograd.Function` while something is recorded: its call on stand-ins is one call of the recording."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .beside import LOCK, PATIENCE
from .scanning import Untraceable


def _of_class(cls: Any, name: str) -> Any:
    """A static method that `cls` has or inherits, whatever its metaclass says."""
    return next(vars(c)[name] for c in cls.__mro__ if name in vars(c)).__get__(None, cls)


def looked_up(records: Callable[[], bool]) -> dict[str, property]:
    """What `apply` of an `autograd.Function` looks up on its class: given stand-ins, the whole call is recorded.

    `apply` itself may have been taken from its class long before, and is compiled from PyTorch 2.15 on. It looks
    `setup_context` up first, and `forward` with gradients switched off.
    """
    unset = _of_class(torch.autograd.Function, "setup_context")
    with_gradients = True

    def setup_context(cls: Any) -> Any:
        nonlocal with_gradients
        plain = _of_class(cls, "setup_context")
        if not records():
            return plain
        with_gradients = torch.is_grad_enabled()
        if plain is unset:
            return plain
        return lambda ctx, inputs, output: None if issubclass(type(output), fx.Proxy) else plain(ctx, inputs, output)

    def forward(cls: Any) -> Any:
        plain = _of_class(cls, "forward")
        with_context = _of_class(cls, "setup_context") is unset

        @functools.wraps(plain)
        def record(*args: Any, **kwargs: Any) -> Any:
            given = next((a for a in (*args, *kwargs.values()) if issubclass(type(a), fx.Proxy)), None)
            if given is None:
                return plain(*args, **kwargs)
            apply = vars(torch.autograd.Function)["apply"].__get__(None, cls)
            with torch.set_grad_enabled(with_gradients):
                return given.tracer.create_proxy("call_function", apply, args[with_context:], kwargs)

        return record if records() else plain

    def setter(name: str) -> Callable[[Any, Any], None]:
        """A property of a metaclass stands before what its classes have: another thread, as in an import, waits."""

        def assign(cls: Any, value: Any) -> None:
            if records():
                raise Untraceable(f"assigns {name} of an autograd.Function")
            if not LOCK.acquire(timeout=PATIENCE):
                raise AttributeError(f"{name} of {cls.__name__} cannot be assigned while a model is fused")
            try:
                setattr(cls, name, value)
            finally:
                LOCK.release()

        return assign

    looks = {"setup_context": setup_context, "forward": forward}
    return {name: property(look, setter(name)) for name, look in looks.items()}
