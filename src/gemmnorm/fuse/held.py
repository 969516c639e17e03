"""What stays as it is while a `forward` is recorded or tried: random states."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor

GENERATORS = ("torch", "random", "numpy")


def _bytes(state: Tensor) -> bytes:
    """The numbers, read where they lie: a mode (FakeTensorMode) would not have a real tensor compared."""
    return ctypes.string_at(state.data_ptr(), state.numel())


@contextlib.contextmanager
def random_state(used: Container[str] = GENERATORS) -> Iterator[Callable[[], bool]]:
    """Random states are put back at the end; inside, the value says whether any number was drawn.

    `used`: the `GENERATORS` that this thread may draw from; the others move for another thread alone, if they do.
    """
    numpy = sys.modules.get("numpy")
    before = (torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None)

    def drew() -> bool:
        moved = ["torch" in used and _bytes(torch.get_rng_state()) != _bytes(before[0])]
        moved.append("random" in used and random.getstate() != before[1])
        if numpy and "numpy" in used:
            now = numpy.random.get_state()
            moved.append(now[2:] != before[2][2:] or now[1].tobytes() != before[2][1].tobytes())  # type: ignore[index]
        return any(moved)

    try:
        yield drew
    finally:
        if "torch" in used:
            torch.set_rng_state(before[0])
        if "random" in used:
            random.setstate(before[1])
        if numpy and "numpy" in used:
            numpy.random.set_state(before[2])
