"""Weights that autocast casts: one copy for the calls of one step, as PyTorch's own operations share one.

A head is often called once for each view of a batch. The first call casts the weight and its graph keeps the copy for
the backward; a later call multiplies by that copy, as long as the graph lives, the weight is as it was, and the same
outermost `torch.autocast` is open. For each element that saves the 6 bytes of one cast, and the 2 of another copy.

Where that `torch.autocast` ends is asked for those weights alone that have been called twice in a step before.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from . import driver


class _Made(NamedTuple):
    """A copy of a weight, and what must still be so where it is to serve.

    Attributes:
        version: of the weight.
        repeated: the weight is called several times in a step. Only then the copy serves, and the rest is known.
        memory: which the weight lies in.
        stream: on which the copy was made, and so is ready.
        region: what lives as long as the outermost `torch.autocast`.
    """

    copy: weakref.ref[Tensor] | TensorWeakRef
    version: int
    repeated: bool = False
    memory: int = 0
    stream: int = 0
    region: TensorWeakRef | None = None


_KEPT = 4096
_made: dict[int, _Made] = {}  # by the weight's `id`
_markers: dict[torch.device, Tensor] = {}
_regions: dict[torch.device, TensorWeakRef] = {}


def find(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The copy of `weight` in `dtype` that a call of this step has made; None where there is none."""
    made = _made.get(id(weight))
    if made is None or (copy := made.copy()) is None or made.version != weight._version:
        return None
    if not made.repeated:
        _made[id(weight)] = made._replace(repeated=True)
    holds = (
        made.region is not None
        and made.region() is not None
        and copy.dtype == dtype
        and made.memory == weight.untyped_storage()._cdata
        and made.stream == driver.stream_handle(weight.device.index)
    )
    return copy if holds else None


def keep(weight: Tensor, copy: Tensor) -> None:
    """Let later calls find `copy`, which a graph holds."""
    if not (weight.requires_grad and weight.is_leaf and copy.is_contiguous()):
        return
    before = _made.get(id(weight))
    repeated = before is not None and before.repeated
    region = _region(weight.device) if repeated else None
    if region is None:
        if len(_made) >= _KEPT:
            _made.clear()
        _made[id(weight)] = _Made(weakref.ref(copy), weight._version, repeated)
        return
    memory, stream = weight.untyped_storage()._cdata, driver.stream_handle(weight.device.index)
    copy._gemmnorm_of = weight  # type: ignore[attr-defined] # so that no other weight gets its `id` meanwhile
    _made[id(weight)] = _Made(TensorWeakRef(copy), weight._version, True, memory, stream, region)


def _region(device: torch.device) -> TensorWeakRef | None:
    """What lives as long as the outermost `torch.autocast`: a copy, without elements, in PyTorch's cache of copies."""
    region = _regions.get(device)
    if region is None or region() is None:
        if device not in _markers:
            _markers[device] = torch.empty((0, 0), device=device, requires_grad=True)
        region = _regions[device] = TensorWeakRef(_cast_copy(_markers[device]))
    return None if region() is None else region  # with the cache switched off it is gone already


def _cast_copy(marker: Tensor) -> Tensor:
    """The copy that autocast makes of an operand of a product; a tensor that nobody holds where it makes none."""
    copy = torch.einsum("ij->ij", marker)._base
    return torch.empty(0) if copy is None or copy is marker else copy
