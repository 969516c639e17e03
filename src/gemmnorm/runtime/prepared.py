"""Weights that are split before any call asks for it: `prepare(model)`, for evaluation in float32 on Hopper.

An explicit step, because it keeps a second copy of the weight (as large as the first). A call that finds its weight
prepared does not split it; it reads the weight all the same, beside the tensor cores, and compares a checksum of every
row with what was split. A feature whose row has changed is computed again from the weight itself. Where PyTorch knows
of the change (`optimizer.step()`, `load_state_dict`, any operation in place, `weight.data = …`), the prepared copy is
dropped. So it is never stale, not even after `weight.data.mul_(0.9)`, of which PyTorch does not know: then it is slow,
and `prepare` again makes it fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import plan
from ..plan import Problem
from . import binding, driver


@dataclass(frozen=True)
class PreparedWeight:
    """The tensors of `plan.PREPARED`, the weight that they were made of as PyTorch sees it, and the stream."""

    tensors: tuple[Tensor, ...]
    made_of: tuple[Any, ...]
    stream: int


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → PreparedWeight


def _seen(weight: Tensor) -> tuple[Any, ...]:
    """What changes with every change that PyTorch knows of. The kernel looks at the contents."""
    weight = weight.flatten(1) if len(weight.shape) > 2 else weight  # a convolution's
    return getattr(weight, "_version", 0), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device


def _key(weight: Tensor) -> Tensor:
    """`weight`, or the parameter [O, I, 1, …] of the convolution that it is a view of."""
    base = getattr(weight, "_base", None)
    return weight if base is None or base.numel() != weight.numel() else base


def make(weight: Tensor, problem: Problem, scalars: tuple[Any, ...]) -> None:
    """Split `weight` now; `scalars` as for any call. Waits for the device, so that calls on any stream may follow."""
    for other, found in list(_known.items()):  # whose weight has gone elsewhere, and is not evaluated any more
        if found.made_of != _seen(other):
            forget(other)
    checksums = torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device)
    split, exponents, largest, total = binding.bind(plan.prepare(problem))([weight, checksums], scalars)
    assert split is not None and exponents is not None and largest is not None and total is not None
    stream = driver.stream_handle(weight.device.index)
    driver.synchronize(weight.device)
    _known[_key(weight)] = PreparedWeight((split, exponents, largest, total, checksums), _seen(weight), stream)


def find(weight: Tensor) -> PreparedWeight | None:
    """What `make` has made of `weight`; None, and it is dropped, where the weight has changed since.

    None in a call that is captured too: a graph would use it for ever.
    """
    found: PreparedWeight | None = _known.get(_key(weight))
    if found is None:
        return None
    if found.made_of != _seen(weight):
        forget(weight)
        return None
    if driver.capturing():
        return None
    if driver.stream_handle(weight.device.index) != found.stream:
        for t in found.tensors:
            t.record_stream(torch.cuda.current_stream(weight.device))
    return found


def forget(weight: Tensor) -> bool:
    """Drop what `make` has made of `weight`; whether there was anything."""
    return _known.pop(_key(weight), None) is not None
