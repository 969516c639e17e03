"""What stays as it is while a `forward` is recorded or tried: its mode, random states."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def mode(owner: nn.Module, training: bool) -> Iterator[None]:
    """`owner.training`, and nobody else's, for a while."""
    before = owner.training
    owner.__dict__["training"] = training
    try:
        yield
    finally:
        owner.__dict__["training"] = before


def _bytes(state: Tensor) -> bytes:
    """The numbers, read where they lie: a mode (FakeTensorMode) would not have a real tensor compared."""
    return ctypes.string_at(state.data_ptr(), state.numel())


@contextlib.contextmanager
def random_state() -> Iterator[Callable[[], bool]]:
    """Random states are put back at the end; inside, the value says whether any number was drawn."""
    numpy = sys.modules.get("numpy")
    before = (torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None)

    def drew() -> bool:
        moved = [_bytes(torch.get_rng_state()) != _bytes(before[0])]
        moved.append(random.getstate() != before[1])
        if numpy:
            now = numpy.random.get_state()
            moved.append(now[2:] != before[2][2:] or now[1].tobytes() != before[2][1].tobytes())  # type: ignore[index]
        return any(moved)

    try:
        yield drew
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])
